# SPDX-License-Identifier: Apache-2.0
"""The NVMe tier: slots, eviction, limbo, and the index. Scheduler thread only.

A slot of an evicted copy waits in limbo until its record's deletion is committed, so a committed
record never names a slot that holds other bytes (invariant 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvdisk.blocks import Slot, Tier
from kvdisk.device.uses import USES_RECORD, UsesRecords
from kvdisk.index.base import BlockRecord, Index, IndexState, SegmentRecord
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.catalog import ABSENT, DOOMED
from kvdisk.manager.jobs import JobRecord
from kvdisk.manager.nvme_restore import restore_blocks
from kvdisk.manager.parts import Parts
from kvdisk.manager.segments import NvmeLayout, Segments, Turns
from kvdisk.manager.tiers import TierSpace
from kvdisk.manager.uses import Uses
from kvdisk.manager.write_budget import WriteBudget
from kvdisk.messages import JobKind, SegmentSpec

SHORT_RUN_SLOTS = 8
"""Free slots in shorter runs than this count as fragmented: a write of a block or few at a time."""
_MAX_EVICTED_PER_STEP = 256
_MOST_SPARE_SLOTS, _SPARE_DIVISOR = 1024, 32
"""Kept free of a large tier, so that there are long runs to choose from."""


def spare_slots(total: int) -> int:
    """Return how many of a tier's slots are kept free between steps."""
    return max(min(64, total // 8), min(_MOST_SPARE_SLOTS, total // _SPARE_DIVISOR))


@dataclass(slots=True)
class _Drop:
    """A segment on its way out. ``rows``: those that jobs still used at the start. ``ticket``: when
    the deletion of its last record is committed its files may go; None: a job still uses it.
    ``sent``: the ranks have been told."""

    spec: SegmentSpec
    rows: list[int]
    ticket: int | None = None
    sent: bool = False


class NvmeSpace(TierSpace):
    """Slots of this engine's store, on ``drive_count`` drives.

    ``budget``: what may be written; None: without bound.
    """

    in_memory = False

    def __init__(
        self,
        parts: Parts,
        layout: NvmeLayout,
        index: Index,
        admission: AdmissionPolicy,
        drive_count: int = 1,
        budget: WriteBudget | None = None,
    ) -> None:
        super().__init__(parts, Tier.NVME, admission)
        self._index = index
        self._transfers = parts.transfers
        self.segments = Segments(parts.geometry, layout, parts.transfers, parts.stats, drive_count)
        self.uses = Uses()
        self._drops: dict[int, _Drop] = {}
        self._ticket = 0
        self._committed = 0
        self._dropped = 0
        self._index_writable = True
        self._stuck = [False] * len(parts.geometry.slot_sizes)
        self._turns = Turns.of_slots(parts.geometry.slot_sizes)
        self._budget = budget
        self.most_slots = layout.most_slots(parts.geometry)
        self.capacity_bytes = layout.capacity_bytes(parts.geometry)

    # -- start ---------------------------------------------------------------------------------

    def restore(self, home_id: str, fingerprint: bytes, known_uses: UsesRecords | None = None) -> None:
        """Fill the catalog from the index and plan the jobs that open the engine store and its
        segments.

        ``known_uses``: what the engine store's USES file says, if it says anything.
        """
        records = sorted(self._index.segments())
        if known_uses is None:
            known_uses = np.zeros(0, USES_RECORD)
        segments = {record.segment: record for record in records}
        restored = restore_blocks(
            self._index, self._geometry, self._catalog, self._orders, segments, self.uses, known_uses
        )
        if restored.stale:
            self._ticket = self._index.delete(restored.stale)
        self.segments.restore(records, home_id, fingerprint)
        for spec in self.segments.specs.values():
            used = restored.used.get(spec.segment)
            self.pool.add_segment(spec.segment, self.segments.class_of(spec), spec.slot_count, used, spec.drive)
        self.pool.retain(restored.stale_slots, self._ticket)
        for spec in self.segments.surplus():
            self._drop_segment(spec)

    # -- slots ---------------------------------------------------------------------------------

    def allocate(self, size_class: int, count: int, *, keep_queued: bool = False) -> list[Slot]:  # noqa: ARG002
        """Take up to ``count`` free slots, run by run from the drives in turn; fewer, or none, for
        want.

        From the drives that could be written at the last ``refresh_writable``. They are charged
        to the budget.
        """
        block_bytes = self._block_bytes(size_class)
        if self._budget is not None:
            count = min(count, self._budget.affords(block_bytes))
        slots: list[Slot] = []
        drives = [drive for drive in self.segments.writable if self.pool.free_on(size_class, (drive,))]
        while drives and len(slots) < count:
            drive, most = self._turns.next_run(size_class, drives)
            taken = self.pool.allocate(size_class, min(most, count - len(slots)), drive)
            if taken:
                self._turns.took(size_class, len(taken))
                slots += taken
            else:
                drives.remove(drive)
        if self._budget is not None:
            pauses = self._budget.pauses
            self._budget.spend(len(slots), block_bytes)
            self._stats.add("budget_pauses", self._budget.pauses - pauses)
        return slots

    def give_back(self, size_class: int, slots: Sequence[Slot]) -> None:
        """Return slots that were just taken, and not used; nor is their part of the budget."""
        self.pool.release(slots)
        if self._budget is not None:
            self._budget.spend(-len(slots), self._block_bytes(size_class))

    @property
    def free_and_total(self) -> tuple[int, int]:
        """Slots that are or will be free without an eviction, and all that there may be."""
        unmade = max(0, self.most_slots - sum(self.pool.total))
        return unmade + sum(self.pool.free) + sum(self.pool.limbo), unmade + sum(self.pool.total)

    def _block_bytes(self, size_class: int) -> int:
        """Bytes of a block on the drive over all ranks."""
        return self._geometry.slot_sizes[size_class] * self._parts_of_block

    def has_room(self, size_class: int) -> bool:
        """Whether a slot is free now, on a drive that can be written."""
        return self._free_slots(size_class) > 0

    def _free_slots(self, size_class: int) -> int:
        if self.segments.all_writable:
            return self.pool.free[size_class]
        return self.pool.free_on(size_class, self.segments.writable)

    def _record(self, rows: Sequence[int], now_s: int) -> None:
        """Queue the records of READY copies for the index. A full queue costs only their life after
        a restart."""
        self.uses.begin(rows, [self._catalog.generations[row] for row in rows])
        catalog = self._catalog
        records = [
            BlockRecord(
                catalog.epochs[row],
                catalog.keys[row],
                catalog.slot(row, Tier.NVME),
                catalog.generations[row],
                catalog.parent(row),
                now_s,
            )
            for row in rows
        ]
        ticket = self._index.put(records) if records else None
        if ticket is not None:
            self._ticket = ticket

    def reached(self, rows: Sequence[int]) -> None:
        """A request has come to these blocks, which are in some tier; of one chain the tail comes
        first."""
        super().reached(rows)
        self.uses.reached(rows)

    def drop(self, rows: Sequence[int]) -> None:
        """End unpinned copies: their records are deleted, their slots go to limbo."""
        if not rows:
            return
        names = [(self._catalog.epochs[row], self._catalog.keys[row]) for row in rows]
        slots = self._end(rows)
        self.uses.end(rows)
        self._ticket = self._index.delete(names)
        self.pool.retain(slots, self._ticket)

    def make_room(self, now: float, wanted: Sequence[int]) -> None:
        """Open a segment where the cap allows, else evict, so that ``wanted`` slots by size class
        can be had soon."""
        for size_class, wish in enumerate(wanted):
            total = self.pool.total[size_class]
            low_slots = spare_slots(total)
            if not self.refresh_writable(now) or self.segments.hold_up(now):
                continue
            allowed = wish if self._budget is None else self._budget.affords(self._block_bytes(size_class))
            short = max(min(wish, allowed), low_slots) - self._free_slots(size_class) - self.pool.limbo[size_class]
            made = short <= 0 or self.segments.plan_new(size_class, now)
            if not made and self.pool.total[size_class]:
                made = self._evict(size_class, min(short, _MAX_EVICTED_PER_STEP)) > 0
            self._stuck[size_class] = not (made and self._index_writable) and not self.has_room(size_class)

    def is_stuck(self, size_class: int) -> bool:
        """Whether ``make_room`` found no way to room when it last tried, and no slot is free or
        about to be."""
        return self._stuck[size_class] and not (self._index_writable and self.pool.limbo[size_class])

    def awaits_commit(self, size_class: int) -> bool:
        """Whether slots come free with a commit, and no other way."""
        return self.pool.limbo[size_class] > 0 and not self.has_room(size_class)

    def _evict(self, size_class: int, count: int) -> int:
        evictable = self._catalog.evictable_in(Tier.NVME)
        if not self.segments.all_writable:
            # What a quarantined drive has may leave, too: it would hold back the heads of its
            # chains on the others.
            places = self.segments.on_drives({*self.segments.writable, *self.segments.drives.quarantined})
            slot, anywhere = self._catalog.slot, evictable

            def evictable(row: int) -> bool:
                return anywhere(row) and slot(row, Tier.NVME).segment in places

        rows = self._leaving(self._victims(size_class, count, evictable))
        self._stats.add("evicted_blocks.nvme", len(rows))
        self.drop(rows)
        return len(rows)

    # -- segments ------------------------------------------------------------------------------

    def settle_files(self, record: JobRecord, now: float) -> None:
        """Settle a job of files: slots enter the pool when all ranks have reported, one failure
        undoes all."""
        job = record.job
        if job.kind is JobKind.OPEN_HOME:
            if record.failed:
                self.segments.home_failed()
            return
        spec = job.segment
        assert spec is not None
        if job.kind is JobKind.DROP_SEGMENT:
            self.segments.forget(spec)
            del self._drops[spec.segment]
            self._ticket = self._index.delete_segment(spec.segment)
            return
        self.segments.attached(spec)
        if spec.segment in self._drops:
            return  # it was dropped while it was being opened
        if record.failed:
            self.segments.open_failed(spec, now)
            self._drop_segment(spec)
        elif spec.create:
            self.segments.drives.segment_made(spec.drive)
            self._ticket = self._index.put_segment(
                SegmentRecord(spec.segment, spec.slot_bytes, spec.slot_count, spec.drive)
            )
            if not self.segments.share(spec):
                self.pool.add_segment(spec.segment, self.segments.class_of(spec), spec.slot_count, drive=spec.drive)
        elif not self.pool.has_segment(spec.segment):
            self.pool.add_segment(spec.segment, self.segments.class_of(spec), spec.slot_count, drive=spec.drive)

    def _drop_segment(self, spec: SegmentSpec) -> None:
        """Take a segment out of service; its files go when the deletion of its records is
        committed."""
        rows = self._catalog.rows_in(Tier.NVME, spec.segment)
        for row in rows:
            if self._state(row) != DOOMED:
                self._forget((row,))
                self._catalog.doom(row, Tier.NVME)
        pinned = [row for row in rows if self._catalog.pins(row, Tier.NVME) > 0]
        self.drop([row for row in rows if self._catalog.pins(row, Tier.NVME) == 0])
        if self.pool.has_segment(spec.segment):
            self.pool.retire_segment(spec.segment)
        self._drops[spec.segment] = _Drop(spec, pinned)

    def _is_in(self, row: int, segment: int) -> bool:
        """Whether a row has a copy in a segment: in one that is being dropped no other copy can
        begin."""
        return self._state(row) != ABSENT and self._catalog.slot(row, Tier.NVME).segment == segment

    # -- commits and failures ------------------------------------------------------------------

    def commit(self) -> bool:
        """Learn how far the index has come: slots leave limbo, and dropped segments lose their
        files.

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
        """Whether steps are needed until a commit. Not while the index fails: stepping would not
        help it."""
        # A drop without a ticket waits for a job, which is pending itself, or for a zombie, which
        # nobody waits for.
        dropping = any(drop.ticket is not None for drop in self._drops.values())
        return self._index_writable and (self._ticket > self._committed or dropping)

    @property
    def tickets(self) -> tuple[int, int]:
        """Of the last change of the index, and of the last that is known to be committed."""
        return self._ticket, self._committed

    @property
    def _parts_of_block(self) -> int:
        return self._geometry.part_count

    def gauges(self) -> dict[str, float]:
        """Return the tier's gauges, by series."""
        found = super().gauges()
        found["capacity_bytes.nvme"] = self.capacity_bytes
        found["limbo_blocks"] = sum(self.pool.limbo)
        found["uncommitted_changes"] = max(0, self._ticket - self._committed)
        free = sum(self.pool.free)
        found["fragmentation_ratio"] = self.pool.free_in_short_runs(SHORT_RUN_SLOTS) / free if free else 0.0
        if self._budget is not None:
            found["write_budget_bytes"] = self._budget.left_bytes
        drives = self.segments.drives
        for drive in range(len(drives)):
            found[f"drive_quarantined.{drive}"] = int(drive in drives.quarantined)
        return found

    def refresh_writable(self, now: float) -> bool:
        """Fill the budget, and learn which drives may be written. Return whether copies may be: the
        store is open, some drive is in order and not in a back-off, and the budget is not spent."""
        return self.segments.refresh_writable(now) and (self._budget is None or self._budget.refresh(now))

    @property
    def is_spent(self) -> bool:
        """Whether it was the budget that forbade writing at the last ``refresh_writable``."""
        return self._budget is not None and not self._budget.is_open

    @property
    def has_room_soon(self) -> bool:
        """Whether there is room, or is to be in a segment that is being made or opened, or is the
        first of its kind."""
        coming = self.segments.is_opening or not all(self.pool.total) or all(self.pool.free)
        return coming and self.is_open and not self.is_spent

    @property
    def is_open(self) -> bool:
        """False once a rank could not open the engine's store."""
        return self.segments.home_open

    def reset(self) -> None:
        """Forget what was counted. Records stay for engines that load the files."""
        self.admission.reset()

    def refresh(self, now: float, now_s: int) -> bool:
        """Learn how far commits have come, and which drives may be used again. Return whether room
        may be free."""
        released = self.commit()
        self.uses.count(now_s)
        resumed = self.segments.drives.refresh(now) and self.refresh_writable(now)
        if self._budget is not None:
            resumed |= self._budget.refresh(now) and self._budget.take_resumed()
        self._catalog.hide(Tier.NVME, self.segments.quarantined)
        return released or resumed

    def learn_writes(self, record: JobRecord, now: float) -> None:
        """Learn from a settled store or demotion how the drives are."""
        self.segments.learn_writes(record, now)

    def learn_reads(self, record: JobRecord, now: float) -> None:
        """Learn from a settled load or prefetch how the drives are; what a quarantined one holds is
        hidden."""
        self.segments.learn_reads(record, now, self._drops)
        self._catalog.hide(Tier.NVME, self.segments.quarantined)
