# SPDX-License-Identifier: Apache-2.0
"""The work of a step: one order, one budget, owners."""

from __future__ import annotations

from typing import Any

import pytest
from support.low_bounds import lower_shares
from test_long_prompts import GROUPS
from tier_bench import TierBench

from kvdisk.geometry import Geometry
from kvdisk.manager import step_work
from kvdisk.manager.requests import BlockKeys, KVHint
from kvdisk.manager.step_work import SHARES, SPARE_BLOCKS, Kind, Share, StepWork, Work


class Blocks:
    """Work on so many blocks, looked at as far as a step lets them. ``looked``: by name, in
    order."""

    def __init__(self) -> None:
        self.step_work = StepWork()
        self.looked: list[tuple[str, int]] = []

    def add(self, kind: Kind, name: str, blocks: int, owner: object = None) -> None:
        self.step_work.add(kind, name if owner is None else owner, self._look(kind, name, blocks))

    def _look(self, kind: Kind, name: str, blocks: int) -> Work:
        while blocks > 0:
            some = min(blocks, self.step_work.left(kind))
            blocks -= some
            self.looked.append((name, some))
            yield some

    def step(self) -> list[tuple[str, int]]:
        """Return what a step looks at."""
        self.looked.clear()
        self.step_work.run()
        self.step_work.end_step()
        return list(self.looked)


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


def test_the_table_has_every_kind_in_its_order() -> None:
    assert list(SHARES) == sorted(Kind), "who reads the table reads the order"


def test_kinds_come_in_the_order_of_the_table_and_owners_as_they_came(blocks: Blocks) -> None:
    for kind, name in ((Kind.SENDS, "c"), (Kind.LOADS, "a"), (Kind.SENDS, "d"), (Kind.LOADS, "b")):
        blocks.add(kind, name, 3)
    assert blocks.step() == [("a", 3), ("b", 3), ("c", 3), ("d", 3)]
    assert not any(map(blocks.step_work.has, Kind))


@pytest.mark.parametrize("kinds", [tuple(Kind), tuple(Kind)[-3:], (Kind.DEMAND,)])
def test_a_step_looks_at_no_more_than_its_budget_and_each_kind_gets_its_share(
    kinds: tuple[Kind, ...], blocks: Blocks
) -> None:
    """However much waits of the others."""
    for kind in kinds:
        for number in range(3):
            blocks.add(kind, f"{kind.name} {number}", 10**6)
    for _ in range(5):
        looked = blocks.step()
        by_kind = {kind: sum(count for name, count in looked if name.startswith(kind.name + " ")) for kind in kinds}
        costs = {kind: count * SHARES[kind].cost for kind, count in by_kind.items()}
        assert all(costs[kind] >= SHARES[kind].blocks for kind in kinds), costs
        most = SPARE_BLOCKS + sum(SHARES[kind].blocks for kind in kinds)
        assert most <= sum(costs.values()) < most + max(SHARES[kind].cost for kind in kinds)


def test_what_is_urgent_takes_what_is_spare_and_leaves_the_others_their_shares(blocks: Blocks) -> None:
    blocks.step_work.spend(Kind.LOADS, 10**6)
    assert blocks.step_work.left(Kind.LOADS) == 0
    assert blocks.step_work.left(Kind.DEMAND) == SHARES[Kind.DEMAND].blocks
    blocks.add(Kind.DEMAND, "demand", 10**6)
    assert blocks.step() == [("demand", SHARES[Kind.DEMAND].blocks)]
    assert blocks.step() == [("demand", SHARES[Kind.DEMAND].blocks + SPARE_BLOCKS)], "a step owes nothing"


def test_a_cost_lets_a_step_look_at_fewer(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_shares(monkeypatch, 0)
    monkeypatch.setitem(SHARES, Kind.AGES, Share(10, cost=4))
    blocks.step_work.end_step()
    blocks.add(Kind.AGES, "ages", 100)
    assert blocks.step() == [("ages", 3)]
    assert blocks.step() == [("ages", 3)]


def test_cancelled_by_its_owner_nothing_is_left(blocks: Blocks) -> None:
    for name, owner in (("a", "x"), ("b", "y"), ("c", "x")):
        blocks.add(Kind.LOADS, name, 10**6, owner)
        blocks.add(Kind.SENDS, name, 10**6, owner)
    blocks.step()
    blocks.step_work.cancel("x", Kind.LOADS)
    assert list(blocks.step_work.owners(Kind.LOADS)) == ["y"]
    assert blocks.step_work.has(Kind.SENDS, "x")
    blocks.step_work.cancel("x")
    assert not blocks.step_work.has(Kind.SENDS, "x") and blocks.step_work.has(Kind.SENDS, "y")
    blocks.step_work.clear()
    assert not any(map(blocks.step_work.has, Kind)) and not blocks.step()


def test_who_can_do_nothing_more_rests_until_the_next_step_and_holds_up_nobody(blocks: Blocks) -> None:
    asked = []

    def waits() -> Work:
        for turn in range(3):
            asked.append(turn)
            yield 0

    blocks.step_work.add(Kind.QUESTIONS, "waits", waits())
    blocks.add(Kind.QUESTIONS, "goes on", 5)
    assert blocks.step() == [("goes on", 5)]
    for _ in range(3):
        blocks.step_work.run(Kind.QUESTIONS)
    assert asked == [0, 1], "once in a step, however often that runs it"
    blocks.step_work.end_step()
    blocks.step()
    blocks.step()
    assert asked == [0, 1, 2] and not blocks.step_work.has(Kind.QUESTIONS)


def test_work_that_puts_other_work_before_itself_goes_on_behind_it(blocks: Blocks) -> None:
    def splits() -> Work:
        blocks.step_work.add(Kind.LOADS, "owner", blocks._look(Kind.LOADS, "first", 2), first=True)
        yield 1
        blocks.looked.append(("second", 1))

    blocks.step_work.add(Kind.LOADS, "owner", splits())
    assert blocks.step() == [("first", 2), ("second", 1)]


@pytest.mark.parametrize(
    ("kind", "is_open", "silent", "is_pending"),
    [
        (Kind.LOADS, True, False, True),
        (Kind.LOADS, True, True, True),
        (Kind.SENDS, True, False, True),
        (Kind.SENDS, True, True, False),
        (Kind.SENDS, False, False, False),
        (Kind.QUESTIONS, True, False, False),
    ],
)
def test_an_engine_that_rests_makes_steps_for_what_they_bring_on(
    kind: Kind, is_open: bool, silent: bool, is_pending: bool, blocks: Blocks
) -> None:
    gate = [is_open]
    blocks.step_work.open_when(kind, lambda: gate[0])
    assert not blocks.step_work.is_pending(silent=silent)
    blocks.add(kind, "a", 5)
    assert blocks.step_work.is_pending(silent=silent) is is_pending
    assert bool(blocks.step()) is is_open
    blocks.add(kind, "a", 5)
    gate[0] = False
    assert not blocks.step_work.is_pending(silent=False), "its gate is asked again"


def test_the_budget_is_one_number() -> None:
    assert step_work.SPARE_BLOCKS + sum(share.blocks for share in SHARES.values()) <= 20_000


@pytest.mark.parametrize("blocks_of_prompt", [30, 90])
@pytest.mark.parametrize("geometry", GROUPS.values(), ids=GROUPS)
def test_a_plan_looks_at_as_much_of_a_long_prompt_as_its_budget_allows(
    geometry: Geometry, blocks_of_prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a hit that is pinned, counted, used, offered and prefetched, three times as long or not.
    What is made of keys tells it, whatever the work says itself."""
    prompt = "a" * 2 * blocks_of_prompt
    groups = len(geometry.groups)
    bench = TierBench((2 * groups * blocks_of_prompt,), geometry=geometry, gpu_blocks=20_000, min_load_tokens=0)
    bench.serve(prompt)
    bench.engine.pool.forget_all()
    lower_shares(monkeypatch, 4)
    bench.manager._stores._context.step_blocks = 4
    manager, made, looks = bench.manager, [0], [0]
    make, many, plan, end = BlockKeys.__getitem__, BlockKeys.of, manager.take_plan, manager._work.end_step

    def making(keys: BlockKeys, at: Any) -> Any:
        found = make(keys, at)
        made[-1] += len(found) if isinstance(at, slice) else 1
        return found

    def making_many(keys: BlockKeys, positions: Any) -> Any:
        made[-1] += len(positions)
        return many(keys, positions)

    def planning(*args: Any, **how: Any) -> Any:
        made[-1] = 0
        found = plan(*args, **how)
        made.append(0)
        return found

    def ending() -> None:
        looks.append(manager._work.looks)
        end()

    monkeypatch.setattr(BlockKeys, "__getitem__", making)
    monkeypatch.setattr(BlockKeys, "of", making_many)
    monkeypatch.setattr(manager, "take_plan", planning)
    monkeypatch.setattr(manager._work, "end_step", ending)
    request = bench.add(prompt, finishing=False)
    manager.hint(request.id, (KVHint("pin", None, 600.0), KVHint("prefetch")), bench.now)
    for _ in range(30):
        bench.step(8)
    request.finishing = True
    bench.step(8)
    while manager.has_pending_work(bench.now):
        bench.step(8)
    budget = sum(share.blocks for share in SHARES.values())
    assert max(looks) <= budget, "more than the budget of a step"
    assert 4 <= max(made) <= 3 * budget, "more keys were made in a plan than it may look at"
    assert not any(map(manager._work.has, set(Kind) - {Kind.STANDINGS}))
