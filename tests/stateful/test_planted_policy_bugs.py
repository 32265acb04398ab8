# SPDX-License-Identifier: Apache-2.0
"""Bugs in the store policies and in what is saved of victims; as ``test_planted_bugs``."""

from __future__ import annotations

from typing import Any

import pytest
from machines import Bugs, Patch, wrap
from support.manager_sizes import ON_PREEMPTION_SIZES, ON_PREEMPTION_WINDOW, SPILLOVER_REUSE, SPILLOVER_SIZES

from kvdisk.manager.manager import TierManager
from kvdisk.manager.store_policy import OnPreemption, Spillover
from kvdisk.manager.stores import StorePlanner, Table

PREEMPTION, SPILL = Bugs(ON_PREEMPTION_SIZES), Bugs(SPILLOVER_SIZES)


@PREEMPTION.plant
def victims_blocks_copied_after_they_were_overwritten(patch: Patch) -> None:
    def preempt(original: Any, self: TierManager, *args: Any) -> None:
        original(self, *args)
        self._urgent.clear()

    wrap(patch, TierManager, "preempt", preempt)


@PREEMPTION.plant_in(ON_PREEMPTION_WINDOW)
def blocks_that_the_step_zeroes_saved(patch: Patch) -> None:
    def save(original: Any, self: StorePlanner, request: Any, overwritten: Any, *args: Any) -> Any:
        return original(self, request, (), *args)

    wrap(patch, StorePlanner, "save", save)


@PREEMPTION.plant
def blocks_saved_that_are_not_full(patch: Patch) -> None:
    def save(original: Any, self: StorePlanner, request: Any, *args: Any) -> Any:
        table = self._tables.get(request.request_id, Table(0, ()))
        self._tables[request.request_id] = table._replace(computed_tokens=table.computed_tokens + 2)
        return original(self, request, *args)

    wrap(patch, StorePlanner, "save", save)


@PREEMPTION.plant
def blocks_stored_though_nobody_was_preempted(patch: Patch) -> None:
    patch.setattr(OnPreemption, "offers", lambda self, request_id, group, storable, *_: range(storable))


@SPILL.plant
def free_block_offered_again_though_nobody_reached_it(patch: Patch) -> None:
    def free_offers(original: Any, self: Spillover, *args: Any) -> Any:
        self._offered.clear()
        self._front = type(self._front)()
        return original(self, *args)

    wrap(patch, Spillover, "free_offers", free_offers)


@SPILL.plant_in(SPILLOVER_REUSE)
def refused_free_block_offered_every_step(patch: Patch) -> None:
    patch.setattr(Spillover, "refuse_free", lambda self, key, *_: self._due.update({key: self._blocks[key]}))


@SPILL.plant
def free_blocks_stored_and_not_watched(patch: Patch) -> None:
    def queue(original: Any, self: StorePlanner, taken: Any, request: Any, *, watched: bool = True) -> Any:
        return original(self, taken, request, watched=watched and request is not None)

    wrap(patch, StorePlanner, "_queue", queue)


@pytest.mark.parametrize("name", PREEMPTION)
def test_a_planted_bug_of_preemption_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PREEMPTION.must_be_caught(name, monkeypatch)


@pytest.mark.parametrize("name", SPILL)
def test_a_planted_bug_of_spillover_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SPILL.must_be_caught(name, monkeypatch)
