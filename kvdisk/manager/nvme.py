# SPDX-License-Identifier: Apache-2.0
"""The NVMe tier: slots, the index, and how much may be written. Scheduler thread only.

A slot of an evicted copy is not free until its record's deletion is committed, so a committed
record never names a slot that holds other bytes (invariant 2).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey, Slot, Tier
from kvdisk.device.uses import USES_RECORD, Uses, UsesRecords
from kvdisk.geometry import segment_file_bytes
from kvdisk.index.base import IndexState, SegmentRecord
from kvdisk.index.record_index import Index
from kvdisk.manager import bounds
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.jobs import JobRecord
from kvdisk.manager.nvme_restore import restore_blocks
from kvdisk.manager.parts import Parts
from kvdisk.manager.room import TierStatus
from kvdisk.manager.room_shift import RoomShift
from kvdisk.manager.segments import NvmeLayout, Segments
from kvdisk.manager.tiers import Cleared, TierSpace
from kvdisk.manager.write_budget import WriteBudget
from kvdisk.messages import GuestSpec, HomeSpec, JobKind, Reason, SegmentSpec

logger = logging.getLogger("kvdisk.manager")

RUN_BYTES = 16 << 20
"""Bytes of one rank that go to a drive before it is the next drive's turn."""
SHORT_RUN_SLOTS = 8
"""Free slots in shorter runs than this count as fragmented: a write of a block or few at a time."""
_SPARE_DIVISOR = 32
"""One in so many slots is kept free of a large tier, up to ``bounds.SPARE_SLOTS``."""
_IS_LOST = frozenset({Reason.ABSENT, Reason.HEADER})
"""Why a segment that could not be opened is given up: its file is known to be gone, or not to be
its own. Whatever else keeps a rank from it may pass."""


def spare_slots(total: int) -> int:
    """Return how many of a tier's slots are kept free between steps."""
    return max(min(64, total // 8), min(bounds.SPARE_SLOTS, total // _SPARE_DIVISOR))


class NvmeSpace(TierSpace):
    """Slots of this engine's store, on ``drive_count`` drives.

    ``budget``: what may be written; None: without bound.
    """

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
        self.segments = Segments(self.tier, parts, layout, drive_count)
        self._shift = RoomShift(parts, self.tier, self.segments, self.pool, self._evictors)
        self.uses = Uses()
        self._drops: dict[int, bool] = {}
        """Segments that are being dropped, and whether the job that drops their files is
        planned."""
        self._lost: set[int] = set()
        """Segments that are being dropped because their files were removed."""
        self._given_up = 0
        """Segments that were given up since ``_tell`` was last called."""
        self._told = (True, 0)
        """What ``_tell`` said last: whether the engine store is open, and how many segments are
        away."""
        self._stopped = False
        self._is_wanted = False
        """Whether anybody has ever asked for slots."""
        self._ending: dict[int, None] = {}
        """Segments that are being dropped and may still have copies, which nobody reads any more:
        each step ends some."""
        self._ended = 0
        """Copies of these that this step has ended."""
        self._ticket = 0
        self._committed = 0
        self._dropped = 0
        self._index_state = IndexState.WRITABLE
        self._allocated = [0] * len(parts.geometry.slot_sizes)
        """Slots that were ever taken, by size class: says which drive's turn it is."""
        self._budget = budget
        self._slots_per_block = parts.geometry.shard_count
        self._step_state = parts.state
        self._is_identified = parts.state.is_identified
        """Whether it is known that its blocks are of this engine's weights: before that nobody sees
        them, and nothing is written."""
        self.capacity = layout.class_slots(parts.geometry)
        """Slots that each size class may have, where prompts are long."""

    # -- start ---------------------------------------------------------------------------------

    def restore(
        self,
        home_id: str,
        fingerprint: bytes,
        known_uses: UsesRecords | None = None,
        guests: GuestSpec | None = None,
    ) -> None:
        """Fill the catalog from the index and, where the engine is identified, plan the jobs that
        open the engine store and its segments.

        ``known_uses``: what the engine store's USES file says, if it says anything. ``guests``: see
        ``HomeSpec``.
        """
        records = sorted(self._index.segments())
        if known_uses is None:
            known_uses = np.zeros(0, USES_RECORD)
        segments = {record.segment: record for record in records}
        restored = restore_blocks(
            self._index, self._geometry, self._catalog, self._evictors, segments, self.uses, known_uses
        )
        if restored.stale:
            self._ticket = self._index.delete(restored.stale)
        self.segments.restore(records)
        for spec in self.segments.specs.values():
            self._enter(spec, restored.used.get(spec.segment))
        self.pool.retain(restored.stale_slots, self._ticket)
        if self._is_identified:
            self.identify(HomeSpec(home_id, fingerprint, guests=guests))
        else:
            self.segments.writable = []
            self._hide()

    def identify(self, home: HomeSpec) -> None:
        """Use the blocks: they are of this engine's weights. Plan the jobs that open the engine
        store, which ``home`` names, and its segments."""
        self._is_identified = True
        self.segments.open_all(home, self._drops)
        self._hide()

    # -- state -----------------------------------------------------------------------------------

    @property
    def works(self) -> bool:
        """See ``Room``."""
        return not self._stopped

    @property
    def is_spent(self) -> bool:
        """See ``Room``."""
        return self._budget is not None and not self._budget.may_spend

    @property
    def status(self) -> TierStatus:
        """The state of the tier now."""
        # It may be in a segment that is being made or opened, or the first of its kind.
        is_writable = self.works and self.segments.home_open and self._index_state is not IndexState.GONE
        comes = self.segments.is_opening or not all(self.pool.total) or all(self.pool.free)
        uncommitted = self._index_writable and self._ticket > self._committed  # steps do not help one that fails
        return TierStatus(comes and is_writable and not self.is_spent, uncommitted, (self._ticket, self._committed))

    def _free_and_total_bytes(self) -> tuple[int, int]:
        free, total = super()._free_and_total_bytes()
        unmade = self.segments.unmade_bytes
        return free + unmade, total + unmade

    def note_time(self, now_s: int) -> None:
        """See ``TierSpace``."""
        self.uses.now_s = now_s

    def refresh(self, now: float) -> bool:
        """Bring commits, drives and budget up to date, and try again what could not be opened.
        Return whether room may have come free."""
        released = self.commit()
        if not self._stopped:
            self.segments.open_again(now)
        resumed = self.segments.drives.refresh(now) and self.update_writable(now)
        if self._budget is not None:
            resumed |= self._budget.refresh(now) and self._budget.take_resumed()
        self._hide()
        self._empty_given_segment()
        self._ended = 0
        self._end_copies()
        return released or resumed

    def update_writable(self, now: float) -> bool:
        """Fill the budget, and learn which drives may be written. Return whether copies may be: the
        store is open, some drive is in order and not in a back-off, the budget is not spent, and
        the index is not gone: without it no slot that had a copy comes free."""
        if self._stopped or self._index_state is IndexState.GONE or not self._is_identified:
            return False
        return self.segments.update_writable(now) and (self._budget is None or self._budget.refresh(now))

    def on_settled(self, record: JobRecord, now: float) -> None:
        """Take note of what a settled job says of drives and files; hide what a quarantined drive
        holds."""
        if record.job.kind is JobKind.OPEN_HOME:
            self.segments.home_open = not record.failed
        spec = record.job.segment
        if spec is not None and spec.source is None:
            if record.job.kind is JobKind.DROP_SEGMENT:
                self.segments.forget(spec)
                self._shift.gone(spec)
                del self._drops[spec.segment]
                self._lost.discard(spec.segment)
                self._ticket = self._index.delete_segment(spec.segment)
            else:
                self._opened(spec, now, next(iter(record.failed.values()), None))
        self.segments.on_settled(record, now, self._drops)
        if record.failed or not record.job.moves:
            self._hide()
            self._tell()

    def _hide(self) -> None:
        """Let nobody read what is on a quarantined drive, is being dropped, or is away; before the
        engine is identified, anything."""
        unread = self.segments.on_drives(self.segments.drives.quarantined)
        if self._ending or self.segments.away:
            unread = unread.union(self._ending, self.segments.away)
        self._catalog.hide(self.tier, unread if self._is_identified else frozenset(self.segments.specs))

    def _tell(self) -> None:
        """Say in a line what became of the segments once all that are tried have answered."""
        if self.segments.is_opening:
            return
        if self._given_up:
            text = "kvdisk gives up segments (%d): on some rank their files are gone, or are not theirs."
            logger.warning(text, self._given_up)
            self._given_up = 0
        state = is_open, away = self.segments.home_open, len(self.segments.away)
        if state == self._told:
            return
        self._told = state
        if is_open and not away:
            logger.warning("kvdisk has opened all of its engine store again.")
            return
        logger.warning(
            "kvdisk cannot open %s on every rank now: all of that stays, and is tried again; what is in there is "
            "computed meanwhile.",
            f"{away} of {len(self.segments.specs)} segments" if is_open else "its engine store",
        )

    def gauges(self) -> dict[str, float]:
        """Return the tier's gauges, by series."""
        found = super().gauges()
        found[f"capacity_bytes.{self.tier.label}"] = self._free_and_total_bytes()[1]
        found["unavailable_blocks"] = sum(map(self.pool.used_slots, self.segments.away))
        found["awaiting_commit_blocks"] = sum(self.pool.awaiting)
        found["uncommitted_changes"] = max(0, self._ticket - self._committed)
        free = sum(self.pool.free)
        found["fragmentation_ratio"] = self.pool.free_in_short_runs(SHORT_RUN_SLOTS) / free if free else 0.0
        if self._budget is not None:
            found["write_budget_bytes"] = self._budget.left_bytes
        drives = self.segments.drives
        for drive in range(len(drives)):
            found[f"drive_quarantined.{drive}"] = int(drive in drives.quarantined)
        return found

    # -- slots ---------------------------------------------------------------------------------

    def allocate(self, size_class: int, count: int, *, keep_dirty: bool = False) -> list[Slot]:  # noqa: ARG002
        """Take up to ``count`` free slots, run by run from the drives in turn, so that a load reads
        from all; fewer, or none, for want.

        From the drives that could be written at the last ``update_writable``. They are charged
        to the budget.
        """
        self._is_wanted |= count > 0
        count = self._affordable(size_class, count)
        run_slots = max(1, RUN_BYTES // self._geometry.slot_sizes[size_class])
        slots: list[Slot] = []
        drives = [drive for drive in self.segments.writable if self.pool.free_on(size_class, (drive,))]
        while drives and len(slots) < count:
            turn, taken = divmod(self._allocated[size_class], run_slots)
            drive = drives[turn % len(drives)]
            found = self.pool.allocate(size_class, min(run_slots - taken, count - len(slots)), drive)
            self._allocated[size_class] += len(found)
            slots += found
            if not found:
                drives.remove(drive)
        if self._budget is not None:
            self._stats.add("budget_pauses", int(self._budget.spend(len(slots), self.bytes_of(size_class))))
        return slots

    def give_back(self, size_class: int, slots: Sequence[Slot]) -> None:
        """Return slots that were just taken, and not used; nor is their part of the budget."""
        self.pool.release(slots)
        if self._budget is not None:
            self._budget.spend(-len(slots), self.bytes_of(size_class))

    def _affordable(self, size_class: int, count: int) -> int:
        """Return up to ``count`` blocks that may be written."""
        return count if self._budget is None else min(count, self._budget.affords(self.bytes_of(size_class)))

    @property
    def affordable_bytes(self) -> float:
        """See ``TierSpace``."""
        if self._budget is None:
            return math.inf
        return self._budget.left_bytes if self._budget.may_spend else 0

    def free_slots(self, size_class: int) -> int:
        """Return how many slots are free now, on drives that can be written."""
        if len(self.segments.writable) == len(self.segments.drives):
            return self.pool.free[size_class]
        return self.pool.free_on(size_class, self.segments.writable)

    def make_room(self, now: float, wanted: Sequence[int]) -> None:
        """Have ``wanted`` slots by size class soon: make a segment if the cap allows, or evict.

        Segments are made one at a time: the class that has the least of what it may have comes
        first.
        """

        def made_share(size_class: int) -> float:
            return self.pool.total[size_class] / max(1, self.capacity[size_class])

        for size_class in sorted(range(len(wanted)), key=made_share) if self.update_writable(now) else ():
            wish, total = wanted[size_class], self.pool.total[size_class]
            if self.segments.defers_eviction(size_class, now):
                continue
            spare = spare_slots(total)
            if self.segments.away and not self._is_wanted:
                # Nothing that can be served leaves before somebody wants to write.
                wish, spare = wish if self.above is not None else 0, 0
            needed = max(self._affordable(size_class, wish), spare)
            short = needed - self.free_slots(size_class) - self.pool.awaiting[size_class]
            made = short <= 0 or self._make_or_take(size_class, now)
            if short <= 0:
                self._shift.note_satisfied(size_class)
            elif not made and total:
                evicted = self._evict(size_class, min(short, bounds.EVICTED))
                self._shift.evicted(size_class, evicted)
                made = evicted > 0
            made |= self._shift.is_freeing_for(size_class) or self._evictors[size_class].ended_early
            self._is_short[size_class] = not (made and self._index_writable) and not self.free_slots(size_class)

    def _make_or_take(self, size_class: int, now: float) -> bool:
        """Plan a new segment, or have one of another size class go for it; return whether there is
        such a way to room."""
        if self._shift.may_make(size_class) and self.segments.plan_new(size_class, now):
            return True
        spec = self._shift.begin(size_class)
        if spec is None:
            return False
        self._stats.add("moved_segments")
        self.pool.retire_segment(spec.segment)
        return True

    def may_get_room(self, size_class: int, *, silent: bool) -> bool:
        """Whether ``make_room`` found a way to room, or slots come free with a commit."""
        awaiting = self.pool.awaiting[size_class]
        if silent and (awaiting or self._shift.is_freeing_for(size_class)) and not self.free_slots(size_class):
            return False
        return not self._is_short[size_class] or (self._index_writable and awaiting > 0)

    def _evictable(self) -> Callable[[int], bool]:
        """Return the test whether a copy may be evicted for room: one on a drive that can be
        written.

        What a quarantined drive has may leave, too: it would hold back the heads of its chains on
        the others. What is away may not: no room came of it.
        """
        anywhere, segments = super()._evictable(), self.segments
        if len(segments.writable) == len(segments.drives) and not segments.away:
            return anywhere
        places = segments.on_drives({*segments.writable, *segments.drives.quarantined}).difference(segments.away)
        segment_of = self._catalog.columns(self.tier).segments
        return lambda row: anywhere(row) and segment_of[row] in places

    @property
    def _index_writable(self) -> bool:
        return self._index_state is IndexState.WRITABLE

    # -- records ---------------------------------------------------------------------------------

    def _record(self, rows: Sequence[int]) -> None:
        """Queue the records of copies. A full queue costs only their life after a restart."""
        self.uses.begin(rows, [self._catalog.generations[row] for row in rows])
        ticket = self._index.put(self._catalog.records(rows, self.tier, self._step_state.now_s)) if rows else None
        if ticket is not None:
            self._ticket = ticket

    def reached(self, rows: Sequence[int]) -> None:
        """A request reached these blocks; see ``TierSpace``."""
        super().reached(rows)
        self.uses.reached(rows)

    def end(self, rows: Sequence[int]) -> None:
        """End unpinned copies: their records are deleted, their slots await that commit."""
        if rows:
            self._ticket = self._index.delete([(self._catalog.epochs[row], self._catalog.keys[row]) for row in rows])
            self.uses.end(rows)
            super().end(rows)

    def _free(self, slots: Sequence[tuple[int, int]]) -> None:
        self.pool.retain(slots, self._ticket)

    # -- segments ------------------------------------------------------------------------------

    def _opened(self, spec: SegmentSpec, now: float, failure: Reason | None) -> None:
        """Every rank has answered the job that makes or opens a segment. Where one rank could not
        make it, or its file is lost, it is dropped on all; where one cannot open it now, it is
        away."""
        self.segments.opening.discard(spec.segment)
        if spec.segment in self._drops:
            return
        is_new = spec.segment not in self.pool.states
        if not is_new and failure is not None and failure not in _IS_LOST:
            self._set_aside(spec, now)
            return
        if spec.create:
            self.segments.made(spec, now, failure)
        elif failure is not None and is_new:  # one rank has made it for all, and nothing is in it
            self.segments.drives.note_segment_result(spec.drive, now, failed=True)
        elif failure is not None:
            self._given_up += 1
        if failure is not None:
            self._drop_segment(spec)
            return
        if spec.create:
            self._shift.made(spec)
            self._ticket = self._index.put_segment(SegmentRecord.of(spec))
        if spec.create and self._geometry.replicated:
            self.segments.open(spec._replace(create=False))  # one rank has made it for all
        elif not self.pool.has_segment(spec.segment):
            self._enter(spec)

    def _enter(self, spec: SegmentSpec, used: NDArray[np.uint32] | None = None) -> None:
        """Take a segment's slots into service."""
        size_class = self.segments.class_of(spec)
        if spec.segment in self.segments.away:
            self.pool.return_segment(spec.segment, size_class, spec.drive)
            self.segments.came_back(spec)
        else:
            self.pool.add_segment(spec.segment, size_class, spec.slot_count, used, spec.drive)
        self.segments.in_place[spec.segment] = spec

    def _set_aside(self, spec: SegmentSpec, now: float) -> None:
        """Take a segment that some rank cannot open now out of service. Its copies stay, hidden,
        with their records and files."""
        if self.pool.has_segment(spec.segment):
            self.pool.retire_segment(spec.segment)
        self.segments.set_aside(spec, now)
        self._hide()

    def _drop_segment(self, spec: SegmentSpec) -> None:
        """Take a segment out of service. Its files go when all its slots have come free: when no
        job uses one any more, and the deletion of its records is committed."""
        self._take_out(spec)
        self._end_copies()
        self._hide()
        self._drop_files()

    def _take_out(self, spec: SegmentSpec) -> None:
        self.segments.in_place.pop(spec.segment, None)
        self.segments.away.pop(spec.segment, None)
        if self.pool.has_segment(spec.segment):
            self.pool.retire_segment(spec.segment)
        self._drops[spec.segment] = False
        self._ending[spec.segment] = None

    def _end_copies(self) -> None:
        """End copies of segments that are being dropped, as many as a step may: a drive that fails
        while it is opened has all of them."""
        while self._ending and (left := bounds.ENDED - self._ended) > 0:
            segment = next(iter(self._ending))
            rows = self._catalog.kept_in(self.tier, segment)
            self.discard(*rows[:left])
            self._ended += len(rows[:left])
            if len(rows) <= left:
                del self._ending[segment]

    def _empty_given_segment(self) -> None:
        """End some copies of a segment whose room another size class gets; after the last its files
        go. Those of a chain that lie in other segments stay: what is stored again before them
        makes them useful again."""
        spec = self._shift.giving
        if spec is None or spec.segment in self._drops:
            return
        rows = self._catalog.kept_in(self.tier, spec.segment)
        if not rows:
            self._drop_segment(spec)
            return
        leaving = rows[: bounds.EVICTED]
        self.discard(*leaving)
        self._stats.add(f"evicted_blocks.{self.tier.label}", len(leaving))

    def lose(self, segments: Collection[int]) -> None:
        """See ``TierSpace``. Each rank closes what it has open, and so gives the bytes back."""
        for segment in segments:
            spec = self.segments.settled(segment)
            if spec is not None:
                self._lost.add(segment)
                self._drop_segment(spec)

    def let_go(self, segment: int, up_to: float = math.inf, ranges: Sequence[tuple[int, int]] | None = None) -> Cleared:
        """Delete the blocks of a segment, or those in some ranges of its slots, that have no
        generation above ``up_to``; what a job uses ends with that.

        Where all of its blocks go the segment goes, too, unless it is just being opened. Of others
        a call deletes ``bounds.CLEARED`` blocks at most.
        """
        spec = self.segments.in_place.get(segment) or self.segments.away.get(segment)
        if spec is None:
            return Cleared()
        rows, generations = self._catalog.kept(self.tier, segment), np.frombuffer(self._catalog.generations, np.uint64)
        is_opening = segment in self.segments.opening
        if ranges is None and not is_opening and not (generations[rows] > up_to).any():
            self._drop_segment(spec)
            file_bytes = segment_file_bytes(spec.slot_bytes, spec.slot_count)
            return Cleared(len(rows), file_bytes * self._geometry.shard_count)
        if ranges is not None:
            chosen = np.zeros(spec.slot_count, np.bool_)
            for first, count in ranges:
                chosen[first : first + count] = True
            rows = rows[chosen[np.frombuffer(self._catalog.columns(self.tier).indices, np.uint32)[rows]]]
        return self.clear(rows, up_to)

    def let_all_go(self) -> None:
        """Delete all blocks, and the segments with them; what a job uses ends with that. Nobody
        finds them from now on. One that is just being opened stays, empty."""
        for segment in list(self.segments.opening):
            self.let_go(segment)
        for spec in [*self.segments.in_place.values(), *self.segments.away.values()]:
            if spec.segment not in self.segments.opening:
                self._take_out(spec)
        self._end_copies()
        self._hide()
        self._drop_files()

    @property
    def ending_segments(self) -> int:
        """How many segments that are dropped have copies whose deletion is not queued yet."""
        return len(self._ending)

    @property
    def index_state(self) -> IndexState:
        """Whether the index takes new blocks."""
        return self._index_state

    def delete_records(self, keys: Sequence[tuple[int, BlockKey]]) -> int:
        """Queue the deletion of records by epoch and key, whether there are any or not. Return the
        ticket of the last deletion of all. Copies stay, and end as they would: the record is
        deleted once more then."""
        self._ticket = self._index.delete(keys)
        return self._ticket

    def stop_writes(self) -> None:
        """Write nothing more until a restart: the next start would not find it. What is there is
        served."""
        self._stopped = True

    def _drop_files(self) -> None:
        for segment, is_planned in self._drops.items():
            # What was removed holds no bytes that a record could name: no commit is waited for.
            may_go = self.pool.is_unused(segment) if segment in self._lost else self.pool.is_empty(segment)
            if not is_planned and may_go:
                self._drops[segment] = True
                self.pool.forget_segment(segment)
                self._transfers.add(JobKind.DROP_SEGMENT, [], [], segment=self.segments.specs[segment])

    # -- commits and failures ------------------------------------------------------------------

    def commit(self) -> bool:
        """Take note of what the index has committed: slots come free, and dropped segments lose
        their files.

        Returns whether room came free.
        """
        progress = self._index.poll()
        self._committed = progress.committed
        self._index_state = progress.state
        self._stats.add("dropped_records", progress.dropped_puts - self._dropped)
        self._dropped = progress.dropped_puts
        free = sum(self.pool.free)
        self.pool.free_committed(self._committed)
        self._drop_files()
        return sum(self.pool.free) > free
