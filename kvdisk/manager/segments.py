# SPDX-License-Identifier: Apache-2.0
"""The segments of this engine's home, and what is known of the drives that they lie on. Scheduler thread only.

Segments are made one at a time per size class as room is needed, up to the budget, and by jobs that every rank runs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable

from kvdisk.geometry import Geometry, segment_charge_bytes
from kvdisk.index.base import SegmentRecord
from kvdisk.manager.drive_health import Drives
from kvdisk.manager.nvme_layout import NvmeLayout
from kvdisk.manager.transfers import JobRecord, Transfers
from kvdisk.messages import HomeSpec, JobKind, Reason, SegmentSpec
from kvdisk.stats import Stats

logger = logging.getLogger("kvdisk.manager")

_OPENING_S = 60.0  # old copies stay so long because a segment is being made; on a drive that hangs it never is
_WRITE_IS_BAD = frozenset({Reason.NO_SPACE, Reason.IO_ERROR})
"""Failures of a write after which writes stop for a while; so does a write that the drive does not end in time."""


class Segments:
    """See the module. ``specs``: every segment by its number, from its plan to the end of its files.

    ``writable``: drives that might be written when ``may_write`` was last asked.
    """

    def __init__(
        self, geometry: Geometry, layout: NvmeLayout, transfers: Transfers, stats: Stats, drive_count: int
    ) -> None:
        self._geometry = geometry
        self._layout = layout
        self._transfers = transfers
        self.specs: dict[int, SegmentSpec] = {}
        self.drives = Drives(drive_count, stats)
        self.writable = list(range(drive_count))
        self.home_open = True
        """False once a rank could not open the home."""
        self._held: Counter[tuple[int, int]] = Counter()
        """Bytes of all that ``specs`` has, by slot size and drive."""
        self._attaching: set[int] = set()
        self._next = 0
        self._opened_s = float("inf")  # when the last new one was planned

    # -- from plan to end ----------------------------------------------------------------------

    def restore(self, records: Iterable[SegmentRecord], home_id: str, fingerprint: bytes) -> None:
        """Take over what the index knows, and plan the jobs that open the home and its segments on every rank."""
        for record in records:
            self._note(SegmentSpec(record.segment, record.slot_bytes, record.slot_count, record.drive, create=False))
        self._next = max(self.specs, default=-1) + 1
        home = HomeSpec(home_id, fingerprint, tuple(self.specs))
        self._transfers.add(JobKind.OPEN_HOME, [], [], home=home)
        for spec in self.specs.values():
            self._attach(spec)

    def _note(self, spec: SegmentSpec) -> None:
        self.specs[spec.segment] = spec
        self._held[spec.slot_bytes, spec.drive] += self._bytes_of(spec)

    def forget(self, spec: SegmentSpec) -> None:
        """A segment's files are gone on every rank."""
        del self.specs[spec.segment]
        self._held[spec.slot_bytes, spec.drive] -= self._bytes_of(spec)

    def _attach(self, spec: SegmentSpec) -> None:
        self._attaching.add(spec.segment)
        self._transfers.add(JobKind.OPEN_SEGMENT, [], [], segment=spec)

    @property
    def is_opening(self) -> bool:
        """Whether no new one may be planned yet: joining the home removes what the index does not know."""
        return bool(self._attaching) or self._transfers.count(JobKind.OPEN_HOME) > 0

    def hold_up(self, now: float) -> bool:
        """Whether room is soon to come from a segment that is being made or opened, so that nothing should leave."""
        return self.is_opening and now - self._opened_s < _OPENING_S

    def plan_new(self, size_class: int, now: float) -> bool:
        """Plan a new segment, on the writable drive that has least of its kind.

        False where the cap, or the back-off after a failure, forbids it, and while another is being opened.
        """
        drives = [drive for drive in self.writable if self.drives.may_make(drive, now)]
        if not drives or self.is_opening:
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
        self._attach(spec)
        return True

    def home_failed(self) -> None:
        """Some rank could not open the home."""
        self.home_open = False
        logger.warning("kvdisk could not open its home on every rank; the NVMe tier is off until a restart.")

    def attached(self, spec: SegmentSpec) -> None:
        """Note that every rank has answered the job that opens a segment."""
        self._attaching.discard(spec.segment)

    def share(self, spec: SegmentSpec) -> bool:
        """Plan that all ranks open what one of them has made for all; return whether that is needed."""
        shared = self._geometry.replicated and spec.create
        if shared:
            self._attach(spec._replace(create=False))
        return shared

    def open_failed(self, spec: SegmentSpec, now: float) -> None:
        """Learn that some rank could not open or make a segment; the caller drops it."""
        if spec.create:
            self.drives.segment_failed(spec.drive, now)
        else:
            logger.warning("kvdisk gives up segment %d, which could not be opened on every rank.", spec.segment)

    def surplus(self) -> list[SegmentSpec]:
        """Return what to drop, the newest first, where the cap has become smaller than what the home holds."""
        surplus = []
        for size_class, cap in enumerate(self._layout.class_bytes):
            mine = [spec for spec in self.specs.values() if self.class_of(spec) == size_class]
            held = sum(self._bytes_of(spec) for spec in mine)
            while mine and held > cap:
                surplus.append(mine.pop())
                held -= self._bytes_of(surplus[-1])
        return surplus

    def on_drives(self, drives: Collection[int]) -> frozenset[int]:
        """Return the segments that lie on some drives."""
        return frozenset(spec.segment for spec in self.specs.values() if spec.drive in drives)

    def class_of(self, spec: SegmentSpec) -> int:
        """Return the size class of a segment's slots."""
        return self._geometry.slot_sizes.index(spec.slot_bytes)

    def _bytes_of(self, spec: SegmentSpec) -> int:
        return segment_charge_bytes(spec.slot_bytes, spec.slot_count) * self._geometry.part_count

    # -- drives --------------------------------------------------------------------------------

    def may_write(self, now: float) -> bool:
        """Whether the home is open, and some drive is in order with no back-off running."""
        self.writable = self.drives.writable(now) if self.home_open else []
        return bool(self.writable)

    @property
    def all_writable(self) -> bool:
        """Whether each drive might be written when that was last asked."""
        return len(self.writable) == len(self.drives)

    @property
    def quarantined(self) -> frozenset[int]:
        """The segments that nobody is to read now."""
        return self.on_drives(self.drives.quarantined) if self.drives.quarantined else frozenset()

    def note_writes(self, record: JobRecord, now: float) -> None:
        """Learn from a settled store or demotion how the drives are."""
        good, bad = set(), set()
        for at, move in enumerate(record.job.moves):
            assert move.nvme is not None
            reason = record.failed.get(at)
            if reason is None:
                good.add(self.specs[move.nvme.segment].drive)
            elif reason in _WRITE_IS_BAD or at in record.late:
                bad.add(self.specs[move.nvme.segment].drive)
        for drive in bad:
            self.drives.write_failed(drive, now, "a write failed on some rank")
        for drive in good - bad:
            self.drives.write_succeeded(drive)

    def note_reads(self, record: JobRecord, now: float, dropping: Collection[int]) -> None:
        """Learn from a settled load how the drives are, but for the segments that are being dropped."""
        for at, move in enumerate(record.job.moves):
            spec = self.specs.get(move.nvme.segment) if move.nvme is not None else None
            if spec is None or spec.segment in dropping:
                continue  # not of this home, or its files could not be opened
            reason = record.failed.get(at)
            if reason is Reason.IO_ERROR or at in record.late:
                self.drives.read_failed(spec.drive, now, hangs=at in record.late)
            elif reason is None or reason in {Reason.HEADER, Reason.CHECKSUM}:
                self.drives.read_succeeded(spec.drive)
