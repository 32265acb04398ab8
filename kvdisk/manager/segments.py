# SPDX-License-Identifier: Apache-2.0
"""The segments of this engine store, the budget they are cut from, and the health of their drives.

Segments are made one at a time per size class as room is needed, up to the budget, and by jobs that
every rank runs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from kvdisk.blocks import Tier
from kvdisk.errors import ConfigError
from kvdisk.geometry import SEGMENT_OVERHEAD_BYTES, Geometry, segment_charge_bytes, slots_per_segment
from kvdisk.index.base import SegmentRecord
from kvdisk.manager.jobs import JobRecord
from kvdisk.manager.parts import Parts
from kvdisk.messages import FOREIGN_SEGMENTS, HomeSpec, JobKind, Reason, SegmentSpec
from kvdisk.stats import Stats

logger = logging.getLogger("kvdisk.manager")

FIRST_BACK_OFF_S = 1.0
LAST_BACK_OFF_S = 60.0
FIRST_QUARANTINE_S = 60.0
LAST_QUARANTINE_S = 3600.0
FAILURES_IN_A_ROW = 8
"""Blocks that a drive fails to read, with none between that it reads, before it is quarantined."""
_OPENING_S = 60.0  # old copies stay so long because a segment is being made; on a drive that hangs it never is
_WRITE_IS_BAD = frozenset({Reason.NO_SPACE, Reason.IO_ERROR})
"""Failures of a write after which writes stop for a while, as after one that is late."""
_READ_TELLS = frozenset({None, Reason.IO_ERROR, Reason.HEADER, Reason.CHECKSUM})
"""Ends of a read, None is success, in which the drive has answered."""


@dataclass(frozen=True)
class NvmeLayout:
    """How a budget is cut, by size class: slots of a segment, bytes of all (all ranks)."""

    index_bytes: int
    slot_counts: tuple[int, ...]
    class_bytes: tuple[int, ...]

    @classmethod
    def make(
        cls,
        budget_bytes: int,
        segment_bytes: int,
        geometry: Geometry,
        index_bytes_for: Callable[[int], int],
        uses_charge_bytes: Callable[[int], int] | None,
        drive_count: int = 1,
    ) -> NvmeLayout:
        """Divide ``budget_bytes`` (all ranks) between index, the file of uses, and size classes.

        ``index_bytes_for``: bytes of an index of so many blocks; ``uses_charge_bytes``: what the
        file of uses for so many slots is charged with; None: there is none. Raises ConfigError
        where nothing fits.
        """
        if uses_charge_bytes is not None:
            without = cls.make(budget_bytes, segment_bytes, geometry, index_bytes_for, None, drive_count)
            budget_bytes -= uses_charge_bytes(without.most_slots(geometry))
        parts = geometry.part_count
        slots = budget_bytes // (min(geometry.slot_sizes) * parts)
        index_bytes = index_bytes_for(slots)
        class_bytes = tuple(int((budget_bytes - index_bytes) * share) for share in geometry.shares)
        slot_counts = []
        for size, cap in zip(geometry.slot_sizes, class_bytes, strict=True):
            # Four segments or more per class, and two a drive: dropping or refusing one must not
            # take the tier away.
            share = cap // (max(4, 2 * drive_count) * parts) - SEGMENT_OVERHEAD_BYTES
            count = slots_per_segment(min(segment_bytes, share), size)
            if segment_charge_bytes(size, count) * parts > cap:
                raise ConfigError(
                    f"nvme_bytes leaves {max(cap, 0)} bytes for blocks that need {size * parts} bytes each on the "
                    "drive; give it more."
                )
            slot_counts.append(count)
        return cls(index_bytes, tuple(slot_counts), class_bytes)

    def most_slots(self, geometry: Geometry) -> int:
        """Return the slots of all segments that the caps have room for."""
        return sum(self.class_slots(geometry))

    def class_slots(self, geometry: Geometry) -> tuple[int, ...]:
        """Return the same by size class."""
        return tuple(
            cap // (segment_charge_bytes(size, count) * geometry.part_count) * count
            for size, count, cap in zip(geometry.slot_sizes, self.slot_counts, self.class_bytes, strict=True)
        )


class _Pause(Enum):
    """What may not be done to a drive for a while; how long, in seconds, the first time and at
    most."""

    WRITES = ("write", FIRST_BACK_OFF_S, LAST_BACK_OFF_S)
    SEGMENTS = ("make a segment", FIRST_BACK_OFF_S, LAST_BACK_OFF_S)
    ALL = ("read or write", FIRST_QUARANTINE_S, LAST_QUARANTINE_S)


class Drives:
    """The health of the drives: which may be written, and which are read. Named by their position
    in the list.

    A write that fails stops writes to its drive for a while, longer each time; reads go on. A
    segment that cannot be made only stops the making of segments. A drive that fails to read block
    after block, or does not end a read in time, is quarantined: nothing on it is promised, read or
    written until its time is over. Then it is on probation: its next failure is enough.
    """

    def __init__(self, count: int, stats: Stats) -> None:
        assert count > 0
        self._stats = stats
        self._failures = [0] * count
        """Reads that failed in a row, by drive."""
        self._ends_s: dict[tuple[int, _Pause], float] = {}
        """Of the pauses that go on, as of the last ``refresh``."""
        self._next_s: dict[tuple[int, _Pause], float] = {}
        """How long the next pause is, where it is not the first since things went well."""

    def __len__(self) -> int:
        return len(self._failures)

    @property
    def quarantined(self) -> frozenset[int]:
        """The drives that are neither read nor written, as of the last failure or ``refresh``."""
        return frozenset(number for number, pause in self._ends_s if pause is _Pause.ALL)

    def refresh(self, now: float) -> bool:
        """End the pauses that are over; return whether there were any."""
        over = [place for place, end_s in self._ends_s.items() if now >= end_s]
        for number, pause in over:
            del self._ends_s[number, pause]
            if pause is _Pause.ALL:
                self._failures[number] = FAILURES_IN_A_ROW - 1
                logger.warning("kvdisk tries drive %d of the store again.", number)
        return bool(over)

    def may_write(self, number: int, now: float) -> bool:
        """Whether nothing keeps a drive from being written."""
        return number not in self.quarantined and now >= self._ends_s.get((number, _Pause.WRITES), now)

    def writable(self, now: float) -> list[int]:
        """Return the drives that may be written."""
        return [number for number in range(len(self)) if self.may_write(number, now)]

    def may_make(self, number: int, now: float) -> bool:
        """Whether a segment may be made on a drive that may be written."""
        return now >= self._ends_s.get((number, _Pause.SEGMENTS), now)

    def wrote(self, number: int, now: float, failure: str | None = None) -> None:
        """A write ended. A ``failure`` stops writes for a while, longer each time."""
        if failure is None:
            self._next_s.pop((number, _Pause.WRITES), None)
        elif now >= self._ends_s.get((number, _Pause.WRITES), now):
            length_s = self._begin(number, _Pause.WRITES, now)
            self._stats.add("write_pauses")
            logger.warning(
                "kvdisk: %s; no writes to drive %d of the store for %.0f s, reads go on.", failure, number, length_s
            )

    def made(self, number: int, now: float, *, failed: bool = False) -> None:
        """A segment was made, or could not be made on some rank: then none is for a while."""
        if not failed:
            self._next_s.pop((number, _Pause.SEGMENTS), None)
            return
        length_s = self._begin(number, _Pause.SEGMENTS, now)
        self._stats.add("segment_failures")
        logger.warning(
            "kvdisk could not make a segment on drive %d of the store; next try in %.0f s.", number, length_s
        )

    def read(self, number: int, now: float, *, failed: bool = False, hangs: bool = False) -> None:
        """A block was read, whatever was in it, or not; ``hangs``: not in time, which is enough."""
        if not (failed or hangs):
            self._failures[number] = 0
            self._next_s.pop((number, _Pause.ALL), None)
            return
        self._failures[number] += 1
        if number in self.quarantined or (self._failures[number] < FAILURES_IN_A_ROW and not hangs):
            return
        length_s = self._begin(number, _Pause.ALL, now)
        self._stats.add("drive_quarantines")
        logger.error(
            "kvdisk: drive %d of the store %s; it is left alone for %.0f s, and what is on it is computed again.",
            number,
            "does not answer" if hangs else f"failed to read {self._failures[number]} blocks in a row",
            length_s,
        )

    def _begin(self, number: int, pause: _Pause, now: float) -> float:
        """Begin a pause; return how long it takes: twice as long as the last, up to the most."""
        _, first_s, most_s = pause.value
        length_s = self._next_s.get((number, pause), first_s)
        self._ends_s[number, pause] = now + length_s
        self._next_s[number, pause] = min(2 * length_s, most_s)
        return length_s


class Segments:
    """This engine's segments. ``specs``: every one by its number, from its plan to the end of its
    files.

    ``writable``: drives that might be written at the last ``refresh_writable``. ``home_open``:
    False once a rank could not open the engine store. ``opening``: segments of which a job that
    makes or opens them is under way.
    """

    def __init__(self, tier: Tier, parts: Parts, layout: NvmeLayout, drive_count: int) -> None:
        self._tier = tier
        self._geometry = parts.geometry
        self._layout = layout
        self._transfers = parts.transfers
        self.specs: dict[int, SegmentSpec] = {}
        self.drives = Drives(drive_count, parts.stats)
        self.writable = list(range(drive_count))
        self.home_open = True
        self._held: Counter[tuple[int, int]] = Counter()
        """Bytes of all that ``specs`` has, by slot size and drive."""
        self.opening: set[int] = set()
        self.in_place: dict[int, SegmentSpec] = {}
        """Of ``specs`` those whose files are there on every rank, as far as is known. A copy may be
        taken on any thread."""
        self._next = 0
        self._opened_s = float("inf")  # when the last new one was planned

    # -- from plan to end ----------------------------------------------------------------------

    def restore(self, records: Iterable[SegmentRecord], home_id: str, fingerprint: bytes) -> None:
        """Take over what the index knows; plan the jobs that open the store and its segments."""
        for record in records:
            self._note(SegmentSpec(*record, create=False))
        self._next = max(self.specs, default=-1) + 1
        home = HomeSpec(home_id, fingerprint, tuple(self.specs))
        self._transfers.add(JobKind.OPEN_HOME, [], [], home=home)
        for spec in self.specs.values():
            self.open(spec)

    def _note(self, spec: SegmentSpec) -> None:
        self.specs[spec.segment] = spec
        self._held[spec.slot_bytes, spec.drive] += self._bytes_of(spec)

    def forget(self, spec: SegmentSpec) -> None:
        """A segment's files are gone on every rank."""
        del self.specs[spec.segment]
        self._held[spec.slot_bytes, spec.drive] -= self._bytes_of(spec)

    def open(self, spec: SegmentSpec) -> None:
        """Plan the job that makes or opens a segment."""
        self.opening.add(spec.segment)
        self._transfers.add(JobKind.OPEN_SEGMENT, [], [], segment=spec)

    @property
    def is_opening(self) -> bool:
        """Whether none may be planned yet: opening the store removes what the index lacks."""
        return bool(self.opening) or self._transfers.count(JobKind.OPEN_HOME) > 0

    def hold_up(self, now: float) -> bool:
        """Whether nothing should leave, because a segment is being made or opened."""
        return self.is_opening and now - self._opened_s < _OPENING_S

    def plan_new(self, size_class: int, now: float) -> bool:
        """Plan a new segment, on the writable drive that has least of its kind.

        False where the cap, or the back-off after a failure, forbids it, while another is being
        opened, and where a damaged record has used up the numbers: until the next start, by which
        it is gone.
        """
        drives = [drive for drive in self.writable if self.drives.may_make(drive, now)]
        if not drives or self.is_opening or self._next >= FOREIGN_SEGMENTS:
            return False
        size = self._geometry.slot_sizes[size_class]
        held = [self._held[size, number] for number in range(len(self.drives))]
        drive = min(drives, key=held.__getitem__)
        spec = SegmentSpec(self._next, size, self._layout.slot_counts[size_class], drive, create=True)
        if sum(held) + self._bytes_of(spec) > self._layout.class_bytes[size_class]:
            return False
        self._next += 1
        self._opened_s = now
        self._note(spec)
        self.open(spec)
        return True

    def on_drives(self, drives: Collection[int]) -> frozenset[int]:
        """Return the segments that lie on some drives."""
        return (
            frozenset(spec.segment for spec in self.specs.values() if spec.drive in drives) if drives else frozenset()
        )

    def class_of(self, spec: SegmentSpec) -> int:
        """Return the size class of a segment's slots."""
        return self._geometry.slot_sizes.index(spec.slot_bytes)

    def _bytes_of(self, spec: SegmentSpec) -> int:
        return segment_charge_bytes(spec.slot_bytes, spec.slot_count) * self._geometry.part_count

    # -- drives --------------------------------------------------------------------------------

    def refresh_writable(self, now: float) -> bool:
        """Learn which drives may be written: where the engine store is open, those in order with no
        back-off running. Return whether there are any."""
        self.writable = self.drives.writable(now) if self.home_open else []
        return bool(self.writable)

    def learn(self, record: JobRecord, now: float, dropping: Collection[int]) -> None:
        """Learn from a settled job how the drives are that it wrote to, or read from: not by reads
        of segments that are dropped, whose files may not have been opened."""
        wrote: dict[int, bool] = {}
        for at, move in enumerate(record.job.moves):
            spec = self.specs.get(move.slots[self._tier].segment) if self._tier in move.slots else None
            if spec is None:
                continue  # nothing of it was on these drives, or it was a neighbour's
            reason, hangs = record.failed.get(at), at in record.late
            if record.details[at].target is self._tier:
                bad = hangs or reason in _WRITE_IS_BAD
                if bad or reason is None:
                    wrote[spec.drive] = bad or wrote.get(spec.drive, False)
            elif spec.segment not in dropping and (hangs or reason in _READ_TELLS):
                self.drives.read(spec.drive, now, failed=reason is Reason.IO_ERROR, hangs=hangs)
        for drive, bad in wrote.items():
            self.drives.wrote(drive, now, "a write failed on some rank" if bad else None)
