# SPDX-License-Identifier: Apache-2.0
"""Bugs in waits and in reading ahead that the state machine must catch; as ``test_planted_bugs``."""

from __future__ import annotations

from typing import Any

import pytest
from machines import Bugs, Patch, forget_late, tolerate_missing_pins, wrap
from support.manager_sizes import NVME_ONLY, QUEUE_REUSE, QUEUE_SIZES, QUEUE_WINDOW

from kvdisk.blocks import Tier
from kvdisk.manager import prefetch
from kvdisk.manager.jobs import JobRecord
from kvdisk.manager.loads import LoadPlanner
from kvdisk.manager.prefetch import GpuLoads, PendingReads, Promotions
from kvdisk.manager.settlement import Settlement
from kvdisk.messages import JobKind

BUGS = Bugs(QUEUE_SIZES)


@BUGS.plant
def promotion_without_a_pin(patch: Patch) -> None:
    def make_move(original: Any, self: Promotions, key: Any, *args: Any) -> Any:
        row = self._catalog.find(key)
        made = original(self, key, *args)
        if row >= 0:
            self._catalog.unpin((row,), Tier.NVME)
        return made

    wrap(patch, Promotions, "_make_move", make_move)
    tolerate_missing_pins(patch)


@BUGS.plant
def failed_promotion_left_ready(patch: Patch) -> None:
    def settle(original: Any, self: Settlement, record: JobRecord, *args: Any) -> None:
        record.failed = {}
        original(self, record, *args)

    wrap(patch, Settlement, "_settle_promote", settle)


@BUGS.plant
def source_of_a_failed_promotion_kept(patch: Patch) -> None:
    def settle(original: Any, self: Settlement, record: JobRecord, *args: Any) -> None:
        patch.setattr("kvdisk.manager.settlement._SOURCE_IS_BAD", frozenset())
        original(self, record, *args)

    wrap(patch, Settlement, "_settle_promote", settle)


@BUGS.plant
def reading_ahead_without_bound(patch: Patch) -> None:
    patch.setattr(prefetch, "PREFETCH_DIVISOR", 1)


@BUGS.plant
def reading_ahead_for_those_that_run(patch: Patch) -> None:
    def leave(original: Any, self: Promotions, request_id: str) -> None:
        waiting = self._waiting.get(request_id)
        original(self, request_id)
        if waiting is not None:
            self._waiting[request_id] = waiting

    wrap(patch, Promotions, "leave", leave)


@BUGS.plant
def slots_ahead_never_given_back(patch: Patch) -> None:
    patch.setattr(Promotions, "leave", lambda self, request_id: self._waiting.pop(request_id, None))


@BUGS.plant_in(QUEUE_REUSE)
def reading_ahead_what_the_tier_refuses(patch: Patch) -> None:
    def plan_job(original: Any, self: Promotions, *args: Any) -> bool:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(type(self._landing.admission), "admits", lambda _, keys: [True] * len(keys))
            return original(self, *args)

    wrap(patch, Promotions, "_plan_job", plan_job)


@BUGS.plant
def waiting_for_a_read_without_end(patch: Patch) -> None:
    def may_wait(original: Any, self: LoadPlanner, *args: Any) -> bool:
        return self._reads.any or original(self, *args)

    wrap(patch, LoadPlanner, "_may_wait", may_wait)


@BUGS.plant
def block_read_a_second_time(patch: Patch) -> None:
    patch.setattr(PendingReads, "reader_of", lambda *_: None)


@BUGS.plant
def read_that_has_ended_still_waited_for(patch: Patch) -> None:
    patch.setattr(PendingReads, "end", lambda *_: None)


@BUGS.plant_in(NVME_ONLY)
def block_loaded_a_second_time(patch: Patch) -> None:
    patch.setattr(GpuLoads, "begin", lambda *_: None)


@BUGS.plant
def load_that_has_ended_still_waited_for(patch: Patch) -> None:
    patch.setattr(GpuLoads, "end", lambda *_: None)


@BUGS.plant_in(NVME_ONLY, QUEUE_WINDOW)
def waiting_for_a_load_without_end(patch: Patch) -> None:
    patch.setattr(LoadPlanner, "_is_over", lambda *_: False)


@BUGS.plant
def late_slot_of_a_promotion_freed_at_settlement(patch: Patch) -> None:
    forget_late(patch, {JobKind.PROMOTE})


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS.must_be_caught(name, monkeypatch)
