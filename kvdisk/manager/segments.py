# SPDX-License-Identifier: Apache-2.0
"""The segments of this engine store, the budget they are cut from, and the health of their drives.

Segments are made one at a time as room is needed, of the size class that needs it, up to the budget
and to what the drives have room for, and by jobs that every rank runs."""

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
from kvdisk.manager import bounds
from kvdisk.manager.jobs import JobRecord
from kvdisk.manager.parts import Parts
from kvdisk.messages import FOREIGN_SEGMENTS, HomeSpec, JobKind, Reason, SegmentSpec, places_in
from kvdisk.stats import Stats

logger = logging.getLogger("kvdisk.manager")

FAILURES_IN_A_ROW = 8
"""Blocks that a drive fails to read, with none between that it reads, before it is quarantined."""
_LEAST_PART = 16
"""The shortest segment is one part in so many of a whole one, where there is no room for more."""
_OPENING_S = 60.0  # old copies stay so long because a segment is being made; on a drive that hangs it never is
_WRITE_IS_BAD = frozenset({Reason.NO_SPACE, Reason.IO_ERROR})
"""Failures of a write after which writes stop for a while, as after one that is late."""
_READ_TELLS = frozenset({None, Reason.IO_ERROR, Reason.HEADER, Reason.CHECKSUM})
"""Ends of a read, None is success, in which the drive has answered."""


@dataclass(frozen=True)
class NvmeLayout:
    """What a budget has room for.

    ``slot_counts``: of a whole segment, by size class. ``segments_bytes``: of all segments, of all
    ranks: which size class has how much of that follows use. ``room_bytes``: what of it the drives
    had room for at the start; None: for all.
    """

    index_bytes: int
    slot_counts: tuple[int, ...]
    segments_bytes: int
    room_bytes: int | None = None

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
        """Divide ``budget_bytes`` (all ranks) between index, the file of uses, and segments.

        ``index_bytes_for``: bytes of an index of so many blocks; ``uses_charge_bytes``: what the
        file of uses for so many slots is charged with; None: there is none. Raises ConfigError
        where nothing fits.
        """
        if uses_charge_bytes is not None:
            without = cls.make(budget_bytes, segment_bytes, geometry, index_bytes_for, None, drive_count)
            budget_bytes -= uses_charge_bytes(without.most_slots(geometry))
        slots = budget_bytes // (min(geometry.slot_sizes) * geometry.shard_count)
        index_bytes = index_bytes_for(slots)
        whole = cls(index_bytes, (), budget_bytes - index_bytes)
        return whole.cut(segment_bytes, geometry, drive_count)

    def cut(
        self, segment_bytes: int, geometry: Geometry, drive_count: int, room_bytes: int | None = None
    ) -> NvmeLayout:
        """Return the same with segments of up to ``segment_bytes``, so short that there is room for
        some. Raises ConfigError where there is none in the budget."""
        parts, budget = geometry.shard_count, self.segments_bytes
        room = budget if room_bytes is None else min(budget, room_bytes)
        # Four segments or more per class, and two a drive: dropping or refusing one must not take
        # the tier away. More where one class is to give another one of them.
        pieces = max(4 if len(geometry.slot_sizes) == 1 else 8, 2 * drive_count) * parts
        slot_counts = []
        for size, share in zip(geometry.slot_sizes, geometry.shares, strict=True):
            count = slots_per_segment(min(segment_bytes, int(room * share) // pieces - SEGMENT_OVERHEAD_BYTES), size)
            if segment_charge_bytes(size, count) * parts > budget * share:
                raise ConfigError(
                    f"nvme_bytes leaves {max(int(budget * share), 0)} bytes for blocks that need {size * parts} bytes "
                    "each on the drive; give it more."
                )
            slot_counts.append(count)
        return NvmeLayout(self.index_bytes, tuple(slot_counts), budget, room)

    @property
    def expected_bytes(self) -> int:
        """What segments can be expected to take."""
        return self.segments_bytes if self.room_bytes is None else self.room_bytes

    def first_bytes(self, geometry: Geometry) -> int:
        """Return what the index takes with a whole segment of each size class."""
        charges = map(segment_charge_bytes, geometry.slot_sizes, self.slot_counts)
        return self.index_bytes + sum(charges) * geometry.shard_count

    def most_slots(self, geometry: Geometry) -> int:
        """Return the most slots that there can be, whatever class they are of."""
        return self.segments_bytes // (min(geometry.slot_sizes) * geometry.shard_count)

    def class_slots(self, geometry: Geometry, segments_bytes: int | None = None) -> tuple[int, ...]:
        """Return the slots by size class that so many bytes (None: the budget's) have room for,
        where each class has what long prompts need of it."""
        total = self.segments_bytes if segments_bytes is None else segments_bytes
        return tuple(
            int(total * share) // (segment_charge_bytes(size, count) * geometry.shard_count) * count
            for size, count, share in zip(geometry.slot_sizes, self.slot_counts, geometry.shares, strict=True)
        )


_NONE = frozenset[int]()


class _Pause(Enum):
    """What may not be done to a drive for a while, and how long."""

    WRITES = ("write", bounds.WRITE_AGAIN)
    SEGMENTS = ("make a segment", bounds.WRITE_AGAIN)
    ALL = ("read or write", bounds.READ_AGAIN)


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
        """By drive and pause, for those that go on as of the last ``refresh``: when they end."""
        self._next_s: dict[tuple[int, _Pause], float] = {}
        """How long the next pause is, where it is not the first since things went well."""

    def __len__(self) -> int:
        return len(self._failures)

    @property
    def quarantined(self) -> frozenset[int]:
        """The drives that are neither read nor written, as of the last failure or ``refresh``."""
        return frozenset([drive for drive, pause in self._ends_s if pause is _Pause.ALL]) if self._ends_s else _NONE

    def refresh(self, now: float) -> bool:
        """End the pauses that are over; return whether there were any."""
        if not self._ends_s:
            return False
        over = [place for place, end_s in self._ends_s.items() if now >= end_s]
        for drive, pause in over:
            del self._ends_s[drive, pause]
            if pause is _Pause.ALL:
                self._failures[drive] = FAILURES_IN_A_ROW - 1
                logger.warning("kvdisk tries drive %d of the store again.", drive)
        return bool(over)

    def may_write(self, drive: int, now: float) -> bool:
        """Whether nothing keeps a drive from being written."""
        return drive not in self.quarantined and now >= self._ends_s.get((drive, _Pause.WRITES), now)

    def writable(self, now: float) -> list[int]:
        """Return the drives that may be written."""
        drives = range(len(self._failures))
        return [drive for drive in drives if self.may_write(drive, now)] if self._ends_s else list(drives)

    def may_make(self, drive: int, now: float) -> bool:
        """Whether a segment may be made on a drive that may be written."""
        return now >= self._ends_s.get((drive, _Pause.SEGMENTS), now)

    def note_write_result(self, drive: int, now: float, failure: str | None = None) -> None:
        """A write ended. A ``failure`` stops writes for a while, longer each time."""
        if failure is None:
            self._next_s.pop((drive, _Pause.WRITES), None)
        elif now >= self._ends_s.get((drive, _Pause.WRITES), now):
            length_s = self._begin(drive, _Pause.WRITES, now)
            self._stats.add("write_pauses")
            logger.warning(
                "kvdisk: %s; no writes to drive %d of the store for %.0f s, reads go on.", failure, drive, length_s
            )

    def note_segment_result(self, drive: int, now: float, *, failed: bool = False, full: bool = False) -> None:
        """A segment was made, or could not be made on some rank: then none is for a while.

        ``full``: for want of room, which is nothing to warn of each time.
        """
        if not failed:
            self._next_s.pop((drive, _Pause.SEGMENTS), None)
            return
        length_s = self._begin(drive, _Pause.SEGMENTS, now)
        self._stats.add("segment_failures")
        logger.log(
            logging.DEBUG if full else logging.WARNING,
            "kvdisk could not make a segment on drive %d of the store; next try in %.0f s.",
            drive,
            length_s,
        )

    def note_room_freed(self, drive: int) -> None:
        """Room came free on a drive: a segment may be made there at once."""
        self._ends_s.pop((drive, _Pause.SEGMENTS), None)
        self._next_s.pop((drive, _Pause.SEGMENTS), None)

    def note_read_result(self, drive: int, now: float, *, failed: bool = False, hangs: bool = False) -> None:
        """A block was read, whatever was in it, or not; ``hangs``: not in time, which is enough."""
        if not (failed or hangs):
            self._failures[drive] = 0
            self._next_s.pop((drive, _Pause.ALL), None)
            return
        self._failures[drive] += 1
        if drive in self.quarantined or (self._failures[drive] < FAILURES_IN_A_ROW and not hangs):
            return
        length_s = self._begin(drive, _Pause.ALL, now)
        self._stats.add("drive_quarantines")
        logger.error(
            "kvdisk: drive %d of the store %s; it is quarantined for %.0f s; its blocks will be recomputed.",
            drive,
            "does not answer" if hangs else f"failed to read {self._failures[drive]} blocks in a row",
            length_s,
        )

    def _begin(self, drive: int, pause: _Pause, now: float) -> float:
        """Begin a pause; return how long it takes: twice as long as the last, up to the most."""
        _, pauses = pause.value
        length_s = self._next_s.get((drive, pause), pauses.first_s)
        self._ends_s[drive, pause] = now + length_s
        self._next_s[drive, pause] = pauses.after(length_s)
        return length_s


class Segments:
    """This engine's segments. ``specs``: every one by its number, from its plan to the end of its
    files.

    ``writable``: drives that might be written at the last ``update_writable``. ``home_open``:
    False while a rank cannot open the engine store. ``opening``: segments of which a job that
    makes or opens them is under way.

    A segment that some rank cannot open *now* is ``away``: its room stays taken, and nothing of it
    is given up. It is tried again, in this life and the next.
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
        self._halvings = [0] * drive_count
        """How often a whole segment's slots are halved for one that finds room, by drive."""
        self._full: set[int] = set()
        """Drives without room for the shortest segment, when that was last tried."""
        self._told = layout.expected_bytes < layout.segments_bytes
        """Whether it was said that there is less room than the budget."""
        self.in_place: dict[int, SegmentSpec] = {}
        """Those of ``specs`` whose files are there on every rank, as far as is known. Any thread
        may copy it."""
        self.away: dict[int, SegmentSpec] = {}
        """Those of ``specs`` that some rank cannot open now; who was tried last is last. Any thread
        may copy it."""
        self._probes: set[int] = set()
        """Those that are tried first, one of each drive: the others follow where that succeeds."""
        self._home = HomeSpec("", b"")
        self._again_s, self._pause_s = 0.0, bounds.WRITE_AGAIN.first_s
        self._next = 0
        self._opened_s = float("inf")  # when the last new one was planned

    # -- from plan to end ----------------------------------------------------------------------

    def restore(self, records: Iterable[SegmentRecord]) -> None:
        """Take over what the index knows."""
        for record in records:
            self._note(SegmentSpec(*record, create=False))
        self._next = max(self.specs, default=-1) + 1

    def open_all(self, home: HomeSpec, dropping: Collection[int] = ()) -> None:
        """Plan the jobs that open the store and its segments, but for those that are being
        dropped."""
        self._home = home
        self._open_home()
        for spec in self.specs.values():
            if spec.segment not in dropping:
                self.open(spec)

    def _open_home(self) -> None:
        known = self._home._replace(known_segments=tuple(self.specs))
        self._transfers.add(JobKind.OPEN_HOME, [], [], home=known)

    def _note(self, spec: SegmentSpec) -> None:
        self.specs[spec.segment] = spec
        self._held[spec.slot_bytes, spec.drive] += self.bytes_of(spec)

    def forget(self, spec: SegmentSpec) -> None:
        """A segment's files are gone on every rank."""
        del self.specs[spec.segment]
        self._held[spec.slot_bytes, spec.drive] -= self.bytes_of(spec)

    def open(self, spec: SegmentSpec) -> None:
        """Plan the job that makes or opens a segment."""
        self.opening.add(spec.segment)
        self._transfers.add(JobKind.OPEN_SEGMENT, [], [], segment=spec)

    def settled(self, segment: int) -> SegmentSpec | None:
        """Return a segment that is in place or away, and of which no job of files is under way."""
        return None if segment in self.opening else self.in_place.get(segment) or self.away.get(segment)

    # -- what cannot be opened now -------------------------------------------------------------

    def set_aside(self, spec: SegmentSpec, now: float) -> None:
        """A rank cannot open a segment now."""
        self._again_s = max(self._again_s, now + bounds.WRITE_AGAIN.first_s)
        self.in_place.pop(spec.segment, None)
        self.away.pop(spec.segment, None)
        self._probes.discard(spec.segment)
        self.away[spec.segment] = spec

    def came_back(self, spec: SegmentSpec) -> None:
        """Every rank could open a segment that was away. After the first of its drive the others
        are tried."""
        del self.away[spec.segment]
        self._pause_s = bounds.WRITE_AGAIN.first_s
        if spec.segment in self._probes:
            self._probes.remove(spec.segment)
            for other in self.away.values():
                if other.drive == spec.drive and other.segment not in self.opening:
                    self.open(other)

    def open_again(self, now: float) -> None:
        """Plan another attempt at what some rank could not open, after a pause that grows: at the
        engine store, and at one segment of each drive."""
        if self.is_opening or now < self._again_s or (self.home_open and not self.away):
            return
        self._again_s, self._pause_s = now + self._pause_s, bounds.WRITE_AGAIN.after(self._pause_s)
        self._opened_s = now
        self._open_home()
        first = {spec.drive: spec for spec in reversed(self.away.values())}
        self._probes = {spec.segment for spec in first.values()}
        for spec in first.values():
            self.open(spec)

    @property
    def is_opening(self) -> bool:
        """Whether none may be planned yet: opening the store removes what the index lacks."""
        return bool(self.opening) or self._transfers.count(JobKind.OPEN_HOME) > 0

    def defers_eviction(self, size_class: int, now: float) -> bool:
        """Whether nothing of a size class should leave, because a segment of it is being made or
        opened, or may be made after another one's."""
        if not self.is_opening or now - self._opened_s >= _OPENING_S:
            return False
        is_own = any(self.class_of(self.specs[each]) == size_class for each in self.opening if each in self.specs)
        return is_own or not self.opening or self._may_grow(size_class)

    def _may_grow(self, size_class: int) -> bool:
        """Whether the cap has room for one more segment of a size class."""
        return self._slots_left(size_class) >= self._least_slots(size_class)

    def plan_new(self, size_class: int, now: float) -> bool:
        """Plan a new segment, on the writable drive that has least of its kind; a short one where
        there is no room for a whole one.

        False where the cap, or the back-off after a failure, forbids it, while another is being
        opened, and where a damaged record has used up the numbers: until the next start, by which
        it is gone.
        """
        drives = [drive for drive in self.writable if self.drives.may_make(drive, now)]
        if not drives or self.is_opening or self._next >= FOREIGN_SEGMENTS or not self._may_grow(size_class):
            return False
        size = self._geometry.slot_sizes[size_class]
        drive = min(drives, key=lambda each: self._held[size, each])
        whole, least = self._layout.slot_counts[size_class], self._least_slots(size_class)
        count = min(max(least, whole >> self._halvings[drive]), self._slots_left(size_class))
        spec = SegmentSpec(self._next, size, count, drive, create=True)
        self._next += 1
        self._opened_s = now
        self._note(spec)
        self.open(spec)
        return True

    def made(self, spec: SegmentSpec, now: float, failure: Reason | None) -> None:
        """A segment was made on every rank, or not. Where there is no room for it, a shorter one is
        tried at once, and after the shortest none for a while."""
        drive = spec.drive
        if failure is None:
            self._full.discard(drive)
            self._halvings[drive] = max(0, self._halvings[drive] - 1)
        size_class = self.class_of(spec)
        is_full = failure is Reason.NO_SPACE
        if is_full and spec.slot_count > self._least_slots(size_class):
            self._halvings[drive] = (self._layout.slot_counts[size_class] // spec.slot_count).bit_length()
            return
        self.drives.note_segment_result(drive, now, failed=failure is not None, full=is_full)
        if is_full:
            self._full.add(drive)
            if not self._told:
                self._told = True
                logger.warning(
                    "kvdisk: drive %d of the store has no room for another segment; the NVMe tier has %.2f GiB of its "
                    "%.2f GiB, and takes more when room comes.",
                    drive,
                    (self.held_bytes - self.bytes_of(spec)) / (1 << 30),
                    self._layout.segments_bytes / (1 << 30),
                )

    def room_came(self, drive: int) -> None:
        """Files were removed from a drive."""
        self._full.discard(drive)
        self.drives.note_room_freed(drive)

    def lacks_room(self, size_class: int) -> bool:
        """Whether nothing but room keeps a segment from being made: the budget is used up, or all
        drives that can be written are full."""
        if self.is_opening or not self.writable or self._next >= FOREIGN_SEGMENTS:
            return False
        return self._slots_left(size_class) < self._least_slots(size_class) or self._full.issuperset(self.writable)

    @property
    def held_bytes(self) -> int:
        """Bytes of all segments, on all ranks."""
        return self._held.total()

    @property
    def unmade_bytes(self) -> int:
        """Bytes for which segments can still be made, as far as is known."""
        is_full = len(self._full) == len(self.drives)
        return 0 if is_full else max(0, self._layout.expected_bytes - self.held_bytes)

    def whole_slots(self, size_class: int) -> int:
        """Return how many slots a whole segment has."""
        return self._layout.slot_counts[size_class]

    def _least_slots(self, size_class: int) -> int:
        """Return how many slots the shortest segment has."""
        return max(1, self._layout.slot_counts[size_class] // _LEAST_PART)

    def _slots_left(self, size_class: int) -> int:
        """Return how many slots a segment may have within the budget, of which each size class that
        has none yet keeps what a whole one takes."""
        sizes, counts, parts = self._geometry.slot_sizes, self._layout.slot_counts, self._geometry.shard_count
        has = {spec.slot_bytes for spec in self.specs.values()} | {sizes[size_class]}
        kept = sum(
            segment_charge_bytes(size, count) * parts
            for size, count in zip(sizes, counts, strict=True)
            if size not in has
        )
        left = (self._layout.segments_bytes - self.held_bytes - kept) // parts
        return (left - segment_charge_bytes(sizes[size_class], 0)) // sizes[size_class]

    def on_drives(self, drives: Collection[int]) -> frozenset[int]:
        """Return the segments that lie on some drives."""
        return frozenset([spec.segment for spec in self.specs.values() if spec.drive in drives]) if drives else _NONE

    def class_of(self, spec: SegmentSpec) -> int:
        """Return the size class of a segment's slots."""
        return self._geometry.slot_sizes.index(spec.slot_bytes)

    def bytes_of(self, spec: SegmentSpec) -> int:
        """Return the bytes of a segment's files, over all ranks."""
        return segment_charge_bytes(spec.slot_bytes, spec.slot_count) * self._geometry.shard_count

    # -- drives --------------------------------------------------------------------------------

    def update_writable(self, now: float) -> bool:
        """Find the drives that may be written: those in order with no back-off running, once the
        engine store is open. Return whether there are any."""
        self.writable = self.drives.writable(now) if self.home_open else []
        return bool(self.writable)

    def on_settled(self, record: JobRecord, now: float, dropping: Collection[int]) -> None:
        """Take note of what a settled job says of the drives that it wrote to, or read from. What
        fails in segments that are dropped or away says nothing, unless it hangs: their files may
        not have been opened."""
        wrote: dict[int, bool] = {}
        read_well: int | None = None  # the drive of the last read, if that went well: another tells nothing new
        for at, slot in enumerate(places_in(record.job.moves, self._tier)):
            spec = None if slot is None else self.specs.get(slot.segment)
            if spec is None:
                continue  # nothing of it was on these drives, or it was a neighbour's
            reason, hangs = record.failed.get(at) if record.failed else None, at in record.late
            is_open = spec.segment not in dropping and spec.segment not in self.away
            if record.details[at].target is self._tier:
                bad = hangs or (is_open and reason in _WRITE_IS_BAD)
                if bad or reason is None:
                    wrote[spec.drive] = bad or wrote.get(spec.drive, False)
            elif is_open and (hangs or reason in _READ_TELLS):
                failed = reason is Reason.IO_ERROR
                if failed or hangs or spec.drive != read_well:
                    self.drives.note_read_result(spec.drive, now, failed=failed, hangs=hangs)
                    read_well = None if failed or hangs else spec.drive
        for drive, bad in wrote.items():
            self.drives.note_write_result(drive, now, "a write failed on some rank" if bad else None)
