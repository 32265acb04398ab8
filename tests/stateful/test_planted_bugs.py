# SPDX-License-Identifier: Apache-2.0
"""The state machine is tested too: it must catch each of these bugs, planted in the real manager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import pytest
from machines import Bugs, Patch, forget_late, tolerate_missing_pins, wrap
from support.manager_sizes import CPU_ONLY, NVME_ONLY, NVME_REUSE, ONE_GROUP, QUEUE, REUSE_CPU, WINDOW

from kvdisk.blocks import BlockKey, Tier, group_of
from kvdisk.manager.catalog import Catalog, CopyState
from kvdisk.manager.demotions import Demotions
from kvdisk.manager.eviction import TailFirst
from kvdisk.manager.jobs import JobRecord, StoreSources, Transfers
from kvdisk.manager.loads import LoadPlanner
from kvdisk.manager.manager import TierManager
from kvdisk.manager.pool import SlotPool
from kvdisk.manager.settlement import Settlement
from kvdisk.manager.store_policy import OnCompute, Watermark
from kvdisk.messages import JobKind, Reason

BUGS = Bugs()


@BUGS.plant
def settled_when_the_first_rank_answered(patch: Patch) -> None:
    def absorb(original: Any, self: Transfers, report: Any) -> list[JobRecord]:
        known = {job_id: result for job_id, result in report.results.items() if job_id in self._records}
        for result in known.values():
            result.ranks = self._rank_count
        report.results = known
        return original(self, report)

    wrap(patch, Transfers, "absorb", absorb)


@BUGS.plant_in(CPU_ONLY, NVME_ONLY)
def one_ranks_failure_ignored(patch: Patch) -> None:
    def absorb(original: Any, self: Transfers, report: Any) -> list[JobRecord]:
        settled = original(self, report)
        for record in settled:
            last = report.results[record.job.id]
            if last.ranks < self._rank_count:
                record.failed = dict(last.failed)
        return settled

    wrap(patch, Transfers, "absorb", absorb)


@BUGS.plant_in(QUEUE, ONE_GROUP)
def slot_reused_before_its_deletion_is_committed(patch: Patch) -> None:
    patch.setattr(SlotPool, "retain", lambda self, slots, ticket: self.release(slots))


@BUGS.plant
def demotion_without_a_pin(patch: Patch) -> None:
    def plan(original: Any, self: Demotions, now: float) -> None:
        before = set(self._transfers._records)
        original(self, now)
        for job_id in set(self._transfers._records) - before:
            record = self._transfers._records[job_id]
            if record.job.kind is JobKind.DEMOTE:
                for detail in record.details:
                    self._catalog.unpin((detail.row,), Tier.CPU)

    wrap(patch, Demotions, "plan", plan)
    tolerate_missing_pins(patch)


@BUGS.plant
def load_without_a_pin(patch: Patch) -> None:
    def find(original: Any, self: LoadPlanner, *args: Any) -> Any:
        found = original(self, *args)
        for block in found:
            if block.row >= 0:
                self._catalog.unpin((block.row,), block.tier)
        return found

    wrap(patch, LoadPlanner, "_find_sources", find)
    tolerate_missing_pins(patch)


@BUGS.plant
def source_reused_before_its_copy_has_ended(patch: Patch) -> None:
    patch.setattr(StoreSources, "take_fence", lambda self, overwritten: ())


@BUGS.plant_in(WINDOW)
def fence_forgotten_for_a_window_that_moves_on(patch: Patch) -> None:
    """Only blocks of the first group are watched; a window's leave it while their copy waits."""

    def add(original: Any, self: StoreSources, record: JobRecord) -> None:
        original(self, record)
        self._context.unwatch([move.block for move in record.job.moves if group_of(move.key)])

    wrap(patch, StoreSources, "add", add)


@BUGS.plant_in(CPU_ONLY)
def block_zeroed_before_the_hook_left_sound(patch: Patch) -> None:
    wrap(patch, StoreSources, "take_fence", lambda original, self, _: original(self, ()))


@BUGS.plant_in(NVME_ONLY)
def sources_let_go_when_the_first_rank_has_copied(patch: Patch) -> None:
    def absorb(original: Any, self: Transfers, report: Any) -> list[JobRecord]:
        report.copied = dict.fromkeys(report.copied, self._rank_count)
        return original(self, report)

    wrap(patch, Transfers, "absorb", absorb)


@BUGS.plant
def failed_store_left_ready(patch: Patch) -> None:
    def settle(original: Any, self: Settlement, record: JobRecord, *args: Any) -> None:
        if Reason.CANCELLED not in record.failed.values():
            record.failed = {}
        original(self, record, *args)

    wrap(patch, Settlement, "_settle_store", settle)


@BUGS.plant
def index_written_when_planned(patch: Patch) -> None:
    def plan(original: Any, self: Demotions, now: float) -> None:
        before = set(self._transfers._records)
        original(self, now)
        for job_id in set(self._transfers._records) - before:
            record = self._transfers._records[job_id]
            if record.job.kind is JobKind.DEMOTE:
                self._lower._record([detail.row for detail in record.details], 0)

    wrap(patch, Demotions, "plan", plan)


@BUGS.plant_in(NVME_ONLY, NVME_REUSE, WINDOW)
def refused_block_skipped_by_the_watermark(patch: Patch) -> None:
    patch.setattr(Watermark, "refuse", lambda self, positions, *args: self.accept(positions))


@BUGS.plant
def refused_block_offered_every_step(patch: Patch) -> None:
    def candidates(original: Any, self: Watermark, limit: int, room: int, now: float) -> list[int]:
        fresh = original(self, limit, room, now)
        return sorted({*fresh, *(position for position in self._no_room if position < limit)})

    wrap(patch, Watermark, "candidates", candidates)


@BUGS.plant_in(NVME_REUSE, REUSE_CPU)
def wanted_block_not_offered_again(patch: Patch) -> None:
    patch.setattr(Watermark, "rise", lambda self, key: self.unused.pop(key, None))


@BUGS.plant_in(REUSE_CPU)
def unwanted_block_offered_again(patch: Patch) -> None:
    def refuse(original: Any, self: Watermark, positions: Sequence[int], keys: Sequence[BlockKey]) -> None:
        original(self, positions, keys)
        self._risen.extend(positions)

    wrap(patch, Watermark, "refuse_unused", refuse)


@BUGS.plant
def stored_block_offered_again(patch: Patch) -> None:
    def offers(original: Any, self: OnCompute, request_id: str, group: int, storable: int, *args: Any) -> list[int]:
        original(self, request_id, group, storable, *args)
        return list(range(storable))

    wrap(patch, OnCompute, "offers", offers)


@BUGS.plant
def reset_that_keeps_the_epoch(patch: Patch) -> None:
    patch.setattr(TierManager, "reset", lambda self, epoch: None)


@BUGS.plant_in(WINDOW, ONE_GROUP)
def failed_position_promised_again(patch: Patch) -> None:
    def settle(original: Any, self: Settlement, record: JobRecord, *args: Any) -> None:
        original(self, record, *args)
        request = self._requests.get(record.request_id or "")
        if request is not None:
            request.load_limit_tokens = None

    wrap(patch, Settlement, "_settle_load", settle)


@BUGS.plant
def nvme_refusal_never_asked_again(patch: Patch) -> None:
    def offer(original: Any, self: Demotions, rows: Sequence[int]) -> int:
        asked = self.__dict__.setdefault("asked", set())
        keys = {row: (self._catalog.keys[row], self._catalog.generations[row]) for row in rows}
        new = [row for row in rows if keys[row] not in asked]
        asked.update(keys.values())
        return original(self, new)

    wrap(patch, Demotions, "offer", offer)


@BUGS.plant
def pinned_copy_evicted(patch: Patch) -> None:
    patch.setattr(Catalog, "evictable_in", lambda self, tier: lambda row: self.state(row, tier) == CopyState.READY)


@BUGS.plant_in(NVME_ONLY)
def late_slot_of_a_load_freed_at_settlement(patch: Patch) -> None:
    forget_late(patch, {JobKind.LOAD})


@BUGS.plant
def late_slot_of_a_demotion_freed_at_settlement(patch: Patch) -> None:
    forget_late(patch, {JobKind.DEMOTE})


@BUGS.plant_in(NVME_REUSE)
def late_slot_of_a_store_freed_at_settlement(patch: Patch) -> None:
    forget_late(patch, {JobKind.STORE})


@BUGS.plant_in(NVME_ONLY)
def late_slots_freed_when_the_first_rank_released_them(patch: Patch) -> None:
    def absorb(original: Any, self: Transfers, report: Any) -> list[JobRecord]:
        for job_id in list(report.released):
            record = self._records.get(job_id) or self._zombies.get(job_id)
            if record is None:
                del report.released[job_id]
            elif job_id in self._zombies:
                report.released[job_id] = record.late_ranks - record.released
        return original(self, report)

    wrap(patch, Transfers, "absorb", absorb)


@BUGS.plant
def pins_of_late_moves_given_back_twice(patch: Patch) -> None:
    def settle(original: Any, self: Settlement, record: JobRecord, *args: Any) -> None:
        original(self, record, *args)
        for at in record.late:
            row, move = record.details[at].row, record.job.moves[at]
            if record.job.kind is JobKind.LOAD:
                self._catalog.unpin((row,), Tier.NVME)
            elif Tier.CPU in move.slots:
                self._catalog.unpin((row,), Tier.CPU)

    wrap(patch, Settlement, "settle", settle)
    tolerate_missing_pins(patch)


@BUGS.plant
def pins_of_late_moves_never_given_back(patch: Patch) -> None:
    patch.setattr(Settlement, "release", lambda self, record: None)


@BUGS.plant_in(WINDOW, ONE_GROUP)
def idle_engine_that_waits_for_late_moves(patch: Patch) -> None:
    patch.setattr(Transfers, "__len__", lambda self: len(self._records) + len(self._zombies))


@BUGS.plant
def head_evicted_before_its_tail(patch: Patch) -> None:
    def victims(self: TailFirst, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return list(islice(filter(evictable, self._policy.proposals()), count))

    patch.setattr(TailFirst, "victims", victims)


@BUGS.plant
def parent_not_found_again_after_a_gap(patch: Patch) -> None:
    def add(original: Any, self: Catalog, key: BlockKey, *args: Any) -> Any:
        self._placeholders.pop(key, None)
        return original(self, key, *args)

    wrap(patch, Catalog, "add", add)


@BUGS.plant_in(ONE_GROUP)
def lookup_remembered_after_an_eviction(patch: Patch) -> None:
    patch.setattr(Catalog, "losses", property(lambda _: 0, lambda *_: None), raising=False)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS.must_be_caught(name, monkeypatch)
