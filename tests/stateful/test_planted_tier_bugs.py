# SPDX-License-Identifier: Apache-2.0
"""Bugs in tiers, admission and policies, planted by replacing methods, that the state machine must
catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import pytest
from machines import Patch, forget_late, must_catch_a_bug, wrap
from support import manager_sizes as on
from support.manager_parts import Sizes

from kvdisk.blocks import BlockKey
from kvdisk.manager.admission import Demand
from kvdisk.manager.catalog import Catalog, number_of
from kvdisk.manager.demotions import Demotions
from kvdisk.manager.eviction import TailFirst
from kvdisk.manager.requests import RequestState
from kvdisk.manager.reuse import ReuseHistory
from kvdisk.manager.store_policy import OnPreemption, Spillover
from kvdisk.messages import JobKind

BUGS: list[tuple[Callable[[Patch], None], tuple[Sizes, ...]]] = []


def shows_in(*sizes: Sizes) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Take a bug into the list, which one of these sizes shows; a decorator."""

    def add(planted: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS.append((planted, sizes))
        return planted

    return add


@shows_in(*on.ON_COMPUTE_SIZES)
def nvme_refusal_never_asked_again(patch: Patch) -> None:
    def offer(original: Any, self: Demotions, rows: Sequence[int], **how: bool) -> int:
        asked = self.__dict__.setdefault("asked", set())
        keys = {row: (self._catalog.keys[row], self._catalog.generations[row]) for row in rows}
        new = [row for row in rows if keys[row] not in asked]
        asked.update(keys.values())
        return original(self, new, **how)

    wrap(patch, Demotions, "offer", offer)


@shows_in(*on.ON_COMPUTE_SIZES)
def head_evicted_before_its_tail(patch: Patch) -> None:
    def victims(self: TailFirst, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return list(islice(filter(evictable, (row for _, row in self._policy.proposals())), count))

    patch.setattr(TailFirst, "victims", victims)


@shows_in(*on.ON_COMPUTE_SIZES)
def parent_not_found_again_after_a_gap(patch: Patch) -> None:
    def add(original: Any, self: Catalog, keys: list[BlockKey], *args: Any) -> Any:
        for key in keys:
            if self.find(key) < 0:
                self._rows.pop(key, None)
        return original(self, keys, *args)

    wrap(patch, Catalog, "add", add)


def late_slot_freed_at_settlement(kind: JobKind) -> Callable[[Patch], None]:
    def planted(patch: Patch) -> None:
        forget_late(patch, kind)

    planted.__name__ = f"late_slot_of_a_{kind.name.lower()}_freed_at_settlement"
    return planted


shows_in(on.NVME_ONLY)(late_slot_freed_at_settlement(JobKind.LOAD))
shows_in(*on.ON_COMPUTE_SIZES)(late_slot_freed_at_settlement(JobKind.DEMOTE))
shows_in(on.NVME_REUSE)(late_slot_freed_at_settlement(JobKind.STORE))
shows_in(*on.QUEUE_SIZES)(late_slot_freed_at_settlement(JobKind.PROMOTE))


@shows_in(on.REUSE_CPU)
def one_request_counted_twice(patch: Patch) -> None:
    def reach(original: Any, self: Demand, request: RequestState, group: int, stop: int) -> None:
        request.counted[group] = 0
        original(self, request, group, stop)

    wrap(patch, Demand, "reach", reach)


@shows_in(on.REUSE_CPU)
def counts_that_survive_a_reset(patch: Patch) -> None:
    def clear(original: Any, self: ReuseHistory) -> None:
        if not hasattr(self, "_tags"):  # at start
            original(self)

    wrap(patch, ReuseHistory, "clear", clear)


@shows_in(on.REUSE_CPU)
def uses_that_rise_along_a_chain(patch: Patch) -> None:
    def count(original: Any, self: ReuseHistory, keys: Sequence[BlockKey], start: int, stop: int, kin: int) -> int:
        counted: int = original(self, keys, start, stop, kin)
        place, _ = self._find(number_of(keys[stop - 1]))
        self._marks[place] = min(255, 2 * self._marks[place])
        return counted

    wrap(patch, ReuseHistory, "count", count)


@shows_in(*on.ON_PREEMPTION_SIZES)
def blocks_stored_though_nobody_was_preempted(patch: Patch) -> None:
    patch.setattr(OnPreemption, "reached", lambda self, request_id, keys, start, stop: range(start, stop))


@shows_in(*on.SPILLOVER_SIZES)
def free_block_offered_again_though_nobody_reached_it(patch: Patch) -> None:
    def free_offers(original: Any, self: Spillover, *args: Any) -> Any:
        self._offered.clear()
        return original(self, *args)

    wrap(patch, Spillover, "free_offers", free_offers)


@pytest.mark.parametrize(("planted", "sizes"), BUGS, ids=[planted.__name__ for planted, _ in BUGS])
def test_a_planted_bug_is_caught(
    planted: Callable[[Patch], None], sizes: tuple[Sizes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch)
    must_catch_a_bug(sizes)
