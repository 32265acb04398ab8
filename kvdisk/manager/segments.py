# SPDX-License-Identifier: Apache-2.0
"""The NVMe tier's room: segments, slots, eviction, limbo, and the index. Scheduler thread only.

A slot of an evicted copy waits in limbo until its record's deletion is committed, so a committed
record never names a slot that holds other bytes (invariant 2). Segments are made one at a time per
size class as room is needed, up to the budget, and by jobs that every rank runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvdisk.blocks import Slot, Tier, group_of
from kvdisk.geometry import Geometry, segment_charge_bytes
from kvdisk.index.base import BlockRecord, Index, IndexState, SegmentRecord
from kvdisk.manager.catalog import Catalog, CopyState
from kvdisk.manager.drive_health import Drives, Turns
from kvdisk.manager.eviction import EvictionPolicy
from kvdisk.manager.nvme_layout import NvmeLayout
from kvdisk.manager.nvme_restore import restore_blocks
from kvdisk.manager.pool import SlotPool
from kvdisk.manager.tail_first import TailFirst
from kvdisk.manager.transfers import JobRecord, Transfers
from kvdisk.messages import HomeSpec, JobKind, Reason, SegmentSpec
from kvdisk.stats import Stats

logger = logging.getLogger("kvdisk.manager")

_MAX_EVICTED_PER_STEP = 256
_WRITE_IS_BAD = frozenset({Reason.NO_SPACE, Reason.IO_ERROR})
"""Failures of a write after which writes stop for a while; so does a write that the drive does not end in time."""


@dataclass(slots=True)
class _Drop:
    """A segment on its way out. ``rows``: those that jobs still used at the start. ``ticket``: when the deletion of its
    last record is committed its files may go; None: a job still uses it. ``sent``: the ranks have been told."""

    spec: SegmentSpec
    rows: list[int]
    ticket: int | None = None
    sent: bool = False


class NvmeSpace:
    """Slots of this engine's home, on ``drive_count`` drives."""

    def __init__(
        self,
        geometry: Geometry,
        layout: NvmeLayout,
        index: Index,
        catalog: Catalog,
        transfers: Transfers,
        stats: Stats,
        make_policy: Callable[[], EvictionPolicy],
        drive_count: int = 1,
    ) -> None:
        self._geometry = geometry
        self._layout = layout
        self._index = index
        self._catalog = catalog
        self._transfers = transfers
        self._stats = stats
        self._policies = [TailFirst(make_policy(), catalog, Tier.NVME) for _ in geometry.slot_sizes]
        self.pool = SlotPool(len(geometry.slot_sizes))
        self._segments: dict[int, SegmentSpec] = {}
        self._attaching: set[int] = set()
        self._drops: dict[int, _Drop] = {}
        self._next_segment = 0
        self._ticket = 0
        self._committed = 0
        self._dropped = 0
        self._index_writable = True
        self._stuck = [False] * len(geometry.slot_sizes)
        self._home_open = True
        self.drives = Drives(drive_count, stats)
        self._turns = Turns.of_slots(geometry.slot_sizes)
        self._writable = list(range(drive_count))
        """Drives that might be written when that was last asked."""

    # -- start ---------------------------------------------------------------------------------

    def restore(self, home_id: str, fingerprint: bytes) -> None:
        """Fill the catalog from the index and plan the jobs that open the home and its segments on every rank."""
        records = sorted(self._index.segments())
        self._next_segment = max((record.segment for record in records), default=-1) + 1
        restored = restore_blocks(
            self._index, self._geometry, self._catalog, self._policies, {record.segment: record for record in records}
        )
        if restored.stale:
            self._ticket = self._index.delete(restored.stale)
        for record in records:
            self._segments[record.segment] = spec = SegmentSpec(
                record.segment, record.slot_bytes, record.slot_count, record.drive, create=False
            )
            size_class = self._geometry.slot_sizes.index(spec.slot_bytes)
            self.pool.add_segment(spec.segment, size_class, spec.slot_count, restored.used.get(spec.segment))
        self.pool.retain(restored.stale_slots, self._ticket)
        home = HomeSpec(home_id, fingerprint, tuple(self._segments))
        self._transfers.add(JobKind.OPEN_HOME, [], [], home=home)
        for spec in self._segments.values():
            self._attaching.add(spec.segment)
            self._transfers.add(JobKind.OPEN_SEGMENT, [], [], segment=spec)
        self._shrink()

    def _shrink(self) -> None:
        """Drop segments, the newest first, where the cap has become smaller than what the home holds."""
        for size_class, cap in enumerate(self._layout.class_bytes):
            mine = [spec for spec in self._segments.values() if self._class_of_spec(spec) == size_class]
            held = sum(self._bytes_of(spec) for spec in mine)
            while mine and held > cap:
                spec = mine.pop()
                held -= self._bytes_of(spec)
                self._drop_segment(spec)

    # -- slots ---------------------------------------------------------------------------------

    def allocate(self, size_class: int, count: int) -> list[Slot]:
        """Take up to ``count`` free slots, in runs, piece by piece from the drives in turn; fewer, or none, for want.

        From the drives that could be written when ``may_write`` was last called.
        """
        slots: list[Slot] = []
        on_drive = {drive: self._segments_on([drive]) for drive in self._writable}
        drives = [drive for drive in self._writable if self.pool.free_in(size_class, on_drive[drive])]
        while drives and len(slots) < count:
            drive, most = self._turns.next_piece(size_class, drives)
            taken = self.pool.allocate(size_class, min(most, count - len(slots)), on_drive[drive])
            if taken:
                self._turns.took(size_class, len(taken))
                slots += taken
            else:
                drives.remove(drive)
        return slots

    def _segments_on(self, drives: Collection[int]) -> frozenset[int]:
        return frozenset(spec.segment for spec in self._segments.values() if spec.drive in drives)

    def has_room(self, size_class: int) -> bool:
        """Whether a slot is free now, on a drive that can be written."""
        return self._free_slots(size_class) > 0

    def _free_slots(self, size_class: int) -> int:
        if len(self._writable) == len(self.drives):
            return self.pool.free[size_class]
        return self.pool.free_in(size_class, self._segments_on(self._writable))

    def _is_opening(self) -> bool:
        # No new segment before every rank has joined the home: joining removes what the index does not know.
        return bool(self._attaching) or self._transfers.count(JobKind.OPEN_HOME) > 0

    def inserted(self, row: int) -> None:
        """A copy became READY on every rank: order it, and write its record."""
        size_class = self._class_of(row)
        self._policies[size_class].insert(row)

    def record(self, rows: Iterable[int], now_s: int) -> None:
        """Queue the records of READY copies for the index. A full queue costs only their life after a restart."""
        records = [
            BlockRecord(
                self._catalog.epochs[row],
                self._catalog.keys[row],
                self._catalog.slot(row, Tier.NVME),
                self._catalog.generations[row],
                self._catalog.parents[row],
                now_s,
            )
            for row in rows
        ]
        ticket = self._index.put(records) if records else None
        if ticket is not None:
            self._ticket = ticket

    def accessed(self, row: int) -> None:
        """A copy was used: of one chain the tail is told first."""
        self._policies[self._class_of(row)].access(row)

    def drop(self, rows: list[int]) -> None:
        """End READY or DOOMED, unpinned copies: their records are deleted, their slots go to limbo."""
        if not rows:
            return
        keys = [(self._catalog.epochs[row], self._catalog.keys[row]) for row in rows]
        for row in rows:
            self._policies[self._class_of(row)].remove(row)
        slots = [self._catalog.drop(row, Tier.NVME) for row in rows]
        self._ticket = self._index.delete(keys)
        self.pool.retain(slots, self._ticket)

    def discard(self, row: int) -> None:
        """Serve a READY copy to nobody any more, and end it as soon as no job uses it."""
        self._policies[self._class_of(row)].remove(row)
        self._catalog.doom(row, Tier.NVME)
        self._end_doomed(row)

    def unpin(self, row: int) -> None:
        """Give back one pin; the last one of a doomed copy ends it."""
        self._catalog.unpin(row, Tier.NVME)
        self._end_doomed(row)

    def _end_doomed(self, row: int) -> None:
        if self._catalog.state(row, Tier.NVME) == CopyState.DOOMED and self._catalog.pins(row, Tier.NVME) == 0:
            self.drop([row])

    def make_room(self, now: float, wanted: list[int]) -> None:
        """Open a segment where the cap allows, else evict, so that ``wanted`` slots by size class can be had soon."""
        for size_class, count in enumerate(wanted):
            low_slots = min(64, self.pool.total[size_class] // 8)
            if self._is_opening() or not self.may_write(now):
                continue
            short = max(count, low_slots) - self._free_slots(size_class) - self.pool.limbo[size_class]
            made = short <= 0 or self._open_segment(size_class, now)
            if not made and self.pool.total[size_class]:
                made = self._evict(size_class, min(short, _MAX_EVICTED_PER_STEP)) > 0
            self._stuck[size_class] = not made and not self.has_room(size_class)

    def is_stuck(self, size_class: int) -> bool:
        """Whether ``make_room`` found no way to room when it last tried, and no slot is free or about to be."""
        return self._stuck[size_class] and not (self._index_writable and self.pool.limbo[size_class])

    def _evict(self, size_class: int, count: int) -> int:
        evictable, places = self._catalog.evictable, self._segments_on(self._writable)
        all_places = len(self._writable) == len(self.drives)
        rows = self._policies[size_class].victims(
            count,
            lambda row: (
                evictable(row, Tier.NVME) and (all_places or self._catalog.slot(row, Tier.NVME).segment in places)
            ),
        )
        self._stats.add("evicted_blocks_nvme", len(rows))
        self.drop(rows)
        return len(rows)

    # -- segments ------------------------------------------------------------------------------

    def _open_segment(self, size_class: int, now: float) -> bool:
        """Plan a new segment, on the writable drive that has least of its kind.

        False where the cap, or the back-off after a failure, forbids it.
        """
        drives = [drive for drive in self._writable if self.drives.may_make(drive, now)]
        if not drives:
            return False
        size = self._geometry.slot_sizes[size_class]
        held = dict.fromkeys(range(len(self.drives)), 0)
        for other in self._segments.values():
            if other.slot_bytes == size:
                held[other.drive] += self._bytes_of(other)
        drive = min(drives, key=lambda number: held[number])
        spec = SegmentSpec(self._next_segment, size, self._layout.slot_counts[size_class], drive, create=True)
        if sum(held.values()) + self._bytes_of(spec) > self._layout.class_bytes[size_class]:
            return False
        self._next_segment += 1
        self._segments[spec.segment] = spec
        self._attaching.add(spec.segment)
        self._transfers.add(JobKind.OPEN_SEGMENT, [], [], segment=spec)
        return True

    def settle_files(self, record: JobRecord, now: float) -> None:
        """Settle a job of files: slots enter the pool when all ranks have reported, one failure undoes all."""
        job = record.job
        if job.kind is JobKind.OPEN_HOME:
            if record.failed:
                self._home_open = False
                logger.warning("kvdisk could not open its home on every rank; the NVMe tier is off until a restart.")
            return
        spec = job.segment
        assert spec is not None
        if job.kind is JobKind.DROP_SEGMENT:
            del self._segments[spec.segment], self._drops[spec.segment]
            self._ticket = self._index.delete_segment(spec.segment)
            return
        self._attaching.discard(spec.segment)
        if spec.segment in self._drops:
            return  # it was dropped while it was being opened
        if record.failed:
            if spec.create:
                self.drives.segment_failed(spec.drive, now)
            else:
                logger.warning("kvdisk gives up segment %d, which could not be opened on every rank.", spec.segment)
            self._drop_segment(spec)
        elif spec.create:
            self.drives.segment_made(spec.drive)
            self._ticket = self._index.put_segment(
                SegmentRecord(spec.segment, spec.slot_bytes, spec.slot_count, spec.drive)
            )
            self.pool.add_segment(spec.segment, self._class_of_spec(spec), spec.slot_count)

    def _drop_segment(self, spec: SegmentSpec) -> None:
        """Take a segment out of service; its files go when the deletion of its records is committed."""
        rows = [row for row in self._catalog.rows() if self._is_in(row, spec.segment)]
        for row in rows:
            if self._catalog.state(row, Tier.NVME) != CopyState.DOOMED:
                self._policies[self._class_of(row)].remove(row)
                self._catalog.doom(row, Tier.NVME)
        pinned = [row for row in rows if self._catalog.pins(row, Tier.NVME) > 0]
        self.drop([row for row in rows if self._catalog.pins(row, Tier.NVME) == 0])
        if self.pool.has_segment(spec.segment):
            self.pool.retire_segment(spec.segment)
        self._drops[spec.segment] = _Drop(spec, pinned)

    def _is_in(self, row: int, segment: int) -> bool:
        """Whether a row has a copy in a segment: in one that is being dropped no other copy can begin."""
        return (
            self._catalog.state(row, Tier.NVME) != CopyState.ABSENT
            and self._catalog.slot(row, Tier.NVME).segment == segment
        )

    # -- commits and failures ------------------------------------------------------------------

    def commit(self) -> bool:
        """Learn how far the index has come: slots leave limbo, and dropped segments lose their files.

        Returns whether room came free.
        """
        progress = self._index.poll()
        self._committed = progress.committed
        self._index_writable = progress.state is IndexState.WRITABLE
        self._stats.add("dropped_records", progress.dropped_puts - self._dropped)
        self._dropped = progress.dropped_puts
        free = sum(self.pool.free)
        self.pool.settle_limbo(self._committed)
        for drop in self._drops.values():
            if drop.ticket is None and not any(self._is_in(row, drop.spec.segment) for row in drop.rows):
                drop.ticket = self._ticket
            if drop.ticket is not None and drop.ticket <= self._committed and not drop.sent:
                drop.sent = True
                self._transfers.add(JobKind.DROP_SEGMENT, [], [], segment=drop.spec)
        return sum(self.pool.free) > free

    @property
    def uncommitted(self) -> bool:
        """Whether steps are needed until a commit. Not while the index fails: stepping would not help it."""
        # A drop without a ticket waits for a job, which is pending itself, or for a zombie, which nobody waits for.
        dropping = any(drop.ticket is not None for drop in self._drops.values())
        return self._index_writable and (self._ticket > self._committed or dropping)

    def may_write(self, now: float) -> bool:
        """Whether demotions may be planned: the home is open, and some drive is in order with no back-off running."""
        self._writable = self.drives.writable(now) if self._home_open else []
        return bool(self._writable)

    @property
    def home_open(self) -> bool:
        """False once a rank could not open the home."""
        return self._home_open

    def resumes(self, now: float) -> bool:
        """Whether a back-off or a quarantine has ended since this was last asked."""
        resumed = self.drives.look(now) and self.may_write(now)
        self._hide_quarantined()
        return resumed

    def note_writes(self, record: JobRecord, now: float) -> None:
        """Learn from a settled store or demotion how the drives are."""
        good, bad = set(), set()
        for at, move in enumerate(record.job.moves):
            assert move.nvme is not None
            reason = record.failed.get(at)
            if reason is None:
                good.add(self._segments[move.nvme.segment].drive)
            elif reason in _WRITE_IS_BAD or at in record.late:
                bad.add(self._segments[move.nvme.segment].drive)
        for drive in bad:
            self.drives.write_failed(drive, now, "a write failed on some rank")
        for drive in good - bad:
            self.drives.write_succeeded(drive)

    def note_reads(self, record: JobRecord, now: float) -> None:
        """Learn from a settled load how the drives are; what they hold is hidden while they are quarantined."""
        for at, move in enumerate(record.job.moves):
            spec = self._segments.get(move.nvme.segment) if move.nvme is not None else None
            if spec is None or spec.segment in self._drops:
                continue  # not of this home, or its files could not be opened
            reason = record.failed.get(at)
            if reason is Reason.IO_ERROR or at in record.late:
                self.drives.read_failed(spec.drive, now, hangs=at in record.late)
            elif reason is None or reason in {Reason.HEADER, Reason.CHECKSUM}:
                self.drives.read_succeeded(spec.drive)
        self._hide_quarantined()

    def _hide_quarantined(self) -> None:
        if self.drives.quarantined or self._catalog.hidden_segments:
            self._catalog.hidden_segments = self._segments_on(self.drives.quarantined)

    def _class_of(self, row: int) -> int:
        return self._geometry.size_classes[group_of(self._catalog.keys[row])]

    def _class_of_spec(self, spec: SegmentSpec) -> int:
        return self._geometry.slot_sizes.index(spec.slot_bytes)

    def _bytes_of(self, spec: SegmentSpec) -> int:
        return segment_charge_bytes(spec.slot_bytes, spec.slot_count) * self._geometry.rank_count
