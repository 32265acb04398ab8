# SPDX-License-Identifier: Apache-2.0
"""Bugs in who may enter a tier that the state machine must catch; as ``test_planted_bugs``."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from machines import Bugs, Patch, wrap
from support.manager_sizes import ADMISSION_SIZES, BUDGET, NVME_BUDGET, REUSE_CPU

from kvdisk.manager.admission import AdmitReused, ReuseTable, WriteBudget
from kvdisk.manager.demotions import Demotions
from kvdisk.manager.manager import TierManager
from kvdisk.manager.nvme import NvmeSpace

BUGS = Bugs(ADMISSION_SIZES)


@BUGS.plant_in(REUSE_CPU)
def one_request_counted_twice(patch: Patch) -> None:
    numbers = count()

    def want(original: Any, self: ReuseTable, key: Any, request_id: str) -> Any:
        return original(self, key, f"{request_id} {next(numbers)}")

    wrap(patch, ReuseTable, "want", want)


@BUGS.plant_in(REUSE_CPU)
def counts_that_survive_a_reset(patch: Patch) -> None:
    patch.setattr(AdmitReused, "reset", lambda self: None)


@BUGS.plant
def refused_block_not_asked_before_it_leaves(patch: Patch) -> None:
    patch.setattr(Demotions, "keeps", lambda self, row: False)


@BUGS.plant_in(NVME_BUDGET)
def budget_overdrawn(patch: Patch) -> None:
    wrap(patch, WriteBudget, "spend", lambda original, self, blocks, size: original(self, blocks // 2, size))


@BUGS.plant_in(NVME_BUDGET)
def budget_that_a_restart_fills(patch: Patch) -> None:
    def refresh(original: Any, self: WriteBudget, now: float) -> bool:
        if self._refreshed_s is None:
            self._bytes = float(self.burst_bytes)
        return bool(original(self, now))

    wrap(patch, WriteBudget, "refresh", refresh)


@BUGS.plant_in(BUDGET)
def idle_engine_that_waits_for_the_budget(patch: Patch) -> None:
    def has_pending_work(original: Any, self: TierManager, now: float) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(NvmeSpace, "may_write", lambda space, now: space.segments.may_write(now))
            return bool(original(self, now))

    wrap(patch, TierManager, "has_pending_work", has_pending_work)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS.must_be_caught(name, monkeypatch)
