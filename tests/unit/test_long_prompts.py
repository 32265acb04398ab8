# SPDX-License-Identifier: Apache-2.0
"""Prompts that are longer than the bounds of a step: what a bound ends goes on in the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.low_bounds import lower_shares
from tier_bench import GEOMETRY, TierBench, keys_of

from kvdisk.blocks import Tier
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager import bounds, prefix_match
from kvdisk.manager.catalog import NONE, Catalog
from kvdisk.manager.eviction import TailFirst
from kvdisk.manager.requests import BlockKeys, RequestLimits
from kvdisk.manager.step_work import Kind
from kvdisk.manager.store_policy import NoStores
from kvdisk.manager.stores import StorePlanner
from kvdisk.manager.tiers import TierSpace
from kvdisk.messages import JobKind, JobResult, Reason, Report

GROUPS = {
    "one group": GEOMETRY,
    "seven groups": Geometry(
        (GroupGeometry(0, 2, 4096), *(GroupGeometry(at, 2, 4096, window_tokens=8) for at in range(1, 7))), 1, 2
    ),
}
TIERS = {"memory": ("cpu_slots",), "NVMe": ("nvme_slots",), "both": ("cpu_slots", "nvme_slots")}
LENGTH = 80


def prompt_of(number: int, blocks: int = LENGTH // 2) -> str:
    """Return a prompt that has nothing in common with others."""
    return chr(ord("a") + number) * (2 * blocks)


def hit_of(bench: TierBench, prompt: str) -> int | None:
    """Return how many tokens of a prompt can be loaded."""
    hashes = [prompt[:end].encode() for end in range(2, len(prompt) + 1, 2)]
    bench.manager.new_request("asks", hashes, len(prompt), bench.engine.now)
    return bench.manager.lookup("asks", 0, len(prompt) + 1, bench.engine.now)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A search passes over nothing; how many rows each looked at, beside what it was asked for."""
    monkeypatch.setattr(bounds, "TAILS_SKIPPED", 1)
    beside: list[int] = []
    search, tails = TailFirst.victims, TailFirst._tails

    def counted(order: TailFirst, found: dict[int, None], tenant: int = 0) -> Iterator[int]:
        for row in tails(order, found, tenant):
            beside[-1] += 1
            yield row

    def victims(
        order: TailFirst, count: int, evictable: Callable[[int], bool], *, go_on: bool = False, tenant: int = 0
    ) -> list[int]:
        beside.append(-count)
        return search(order, count, evictable, go_on=go_on, tenant=tenant)

    monkeypatch.setattr(TailFirst, "_tails", counted)
    monkeypatch.setattr(TailFirst, "victims", victims)
    return beside


@pytest.mark.parametrize("geometry", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
def test_behind_a_long_prompt_the_next_one_is_stored_whole(tiers, geometry, looked):
    """The search for what may leave looks at no more of the old prompt than leaves: one request is
    all that there is."""
    slots = (len(geometry.groups) * LENGTH * 3 // 4,)
    bench = TierBench(
        **dict.fromkeys(tiers, slots), geometry=geometry, gpu_blocks=2000, nvme_admission="all", min_load_tokens=0
    )
    bench.serve("zz")  # while a segment is made, windows go on
    bench.serve(prompt_of(0))
    bench.add(prompt_of(1), finishing=False)
    for _ in range(60):
        bench.step(8)
    assert max(looked) <= 1
    assert hit_of(bench, prompt_of(1)) == LENGTH


@pytest.mark.parametrize("geometry", GROUPS.values(), ids=GROUPS)
def test_of_a_long_prompt_that_finds_no_room_a_step_offers_a_part(geometry, monkeypatch):
    """A step costs as much as a step's bound, however much waits; and what waits is stored at last,
    the head first."""
    lower_shares(monkeypatch, 14, Kind.REACHED, Kind.PUT_OFF)
    bench = TierBench((40 + 20 * len(geometry.groups),), geometry=geometry, gpu_blocks=2000, min_load_tokens=0)
    bench.manager._stores._context.step_blocks = 14  # what the fake engine computes in a step of 4 tokens, at most
    offered, store = [], bench.manager._stores.store
    bench.manager._stores.store = lambda offers, *rest, **also: (
        offered.append(len(offers.keys)) or store(offers, *rest, **also)
    )
    bench.serve(prompt_of(0))
    held = bench.catalog.rows_in(Tier.CPU)
    bench.catalog.pin(held, Tier.CPU)
    bench.come(prompt_of(1), 400, finishing=False)
    for _ in range(30):
        bench.step(4, seconds=3.0)
    (request,) = bench.manager._requests.values()
    assert len(request.due) > 14, "more waits than a step offers"
    bench.catalog.unpin(held, Tier.CPU)
    bench.manager._state.released += 1  # as when the job ends that held them
    for _ in range(200):
        bench.step(4, seconds=3.0)
    assert not request.due
    assert NONE not in bench.catalog.find_all(request.keys[0][: LENGTH // 2])
    assert max(offered) <= 14


def test_what_an_ended_request_could_not_store_yet_is_stored_once_the_search_gets_there(monkeypatch):
    monkeypatch.setattr(bounds, "TAILS_SKIPPED", 2)
    bench = TierBench((LENGTH + 8,), gpu_blocks=200)
    for number in range(2, 10):
        bench.serve(prompt_of(number, 1))
    bench.serve(prompt_of(0, LENGTH))
    held = [row for number in range(2, 10) for row in bench.rows(prompt_of(number, 1))]
    bench.catalog.pin(held, Tier.CPU)  # searches pass over these first
    bench.add(prompt_of(1))
    while bench.engine.requests:
        bench.step(80)
    assert bench.parts.cpu.is_searching, "it ends while a search goes on"
    bench.idle()
    bench.catalog.unpin(held, Tier.CPU)
    assert bench.held(prompt_of(1), Tier.CPU) == [True] * (LENGTH // 2)


def test_tails_that_may_not_leave_are_passed_over_for_a_while_only(monkeypatch):
    """Searches that pass over what is held go on from where they ended, and once around."""
    monkeypatch.setattr(bounds, "TAILS_SKIPPED", 3)
    bench = TierBench((12,))
    for number in range(12):
        bench.serve(prompt_of(number, 1))
    rows = [bench.rows(prompt_of(number, 1))[0] for number in range(12)]
    bench.catalog.pin(rows[:10], Tier.CPU)
    (order,) = bench.parts.cpu._evictors
    found = [order.victims(1, bench.catalog.evictable_in(Tier.CPU)) for _ in range(4)]
    assert found == [[], [], [], [rows[10]]]
    bench.catalog.pin(rows[10:], Tier.CPU)
    ended = []
    for _ in range(6):
        assert not order.victims(1, bench.catalog.evictable_in(Tier.CPU))
        ended.append(order.ended_early)
    assert ended[0] and not ended[-1], "it goes around for ever"
    bench.catalog.unpin(rows, Tier.CPU)


def test_the_rest_of_a_long_prompt_is_used_in_steps_after_its_end(monkeypatch):
    """Its end makes no key of it, and each step looks at a part."""
    bench = TierBench((LENGTH,), gpu_blocks=2000, min_load_tokens=0)
    bench.serve(prompt_of(0))
    lower_shares(monkeypatch, 4, Kind.REACHED, Kind.PUT_OFF)
    bench.manager._stores._context.step_blocks = 4
    used, use = [], StorePlanner._use

    def noted(planner, keys, **how):
        used.append(len(keys))
        use(planner, keys, **how)

    monkeypatch.setattr(StorePlanner, "_use", noted)
    bench.add(prompt_of(0), finishing=False)
    bench.engine.pool.forget_all()
    while bench.engine.requests and sum(used) < 8:
        bench.step(LENGTH)
    (request,) = bench.manager._requests.values()
    made, make = [], BlockKeys.__getitem__
    monkeypatch.setattr(BlockKeys, "__getitem__", lambda keys, at: made.append(at) or make(keys, at))
    bench.manager._stores.finished(request)
    assert not made
    before = sum(used)
    for _ in range(LENGTH):
        bench.manager._work.run()
        bench.manager._work.end_step()
    assert before <= LENGTH // 4 and sum(used) >= LENGTH // 2
    assert max(used) <= 4


def test_what_is_computed_behind_a_long_hit_is_stored_though_its_request_ends_at_once(monkeypatch):
    """A hit takes steps to look at; its request may end in the first."""
    bench = TierBench((LENGTH,), gpu_blocks=2000, min_load_tokens=0)
    text = prompt_of(0)
    bench.serve(text[: LENGTH // 2])
    lower_shares(monkeypatch, 4, Kind.REACHED, Kind.PUT_OFF)
    bench.manager._stores._context.step_blocks = 4
    bench.engine.pool.forget_all()
    bench.add(text)
    for _ in range(20 * LENGTH):
        if not bench.engine.requests:
            break
        bench.step(8)
    bench.engine.pool.forget_all()  # nothing is stored later
    bench.idle()
    assert all(bench.held(text, Tier.CPU))


@pytest.mark.parametrize("limit", [LENGTH // 4, None])
def test_of_a_long_hit_is_stored_again_only_what_its_request_lets_be_stored(limit, monkeypatch):
    bench = TierBench((LENGTH,), gpu_blocks=2000, min_load_tokens=0)
    text = prompt_of(0)
    bench.serve(text)
    lower_shares(monkeypatch, 4, Kind.REACHED, Kind.PUT_OFF)
    bench.manager._stores._context.step_blocks = 4
    bench.engine.pool.forget_all()
    bench.add(text, finishing=False)
    (request,) = bench.manager._requests.values()
    request.limits = RequestLimits(store_limit_tokens=limit)
    while not bench.manager._work.has(Kind.PUT_OFF):
        bench.step(8)
    bench.parts.cpu.discard(*bench.rows(text)[:3:-1])  # memory loses what no step has looked at
    for _ in range(LENGTH):
        bench.step(8)
    held = bench.held(text, Tier.CPU)[:-1]  # the last one is computed
    assert held == [limit is None or at < limit // 2 for at in range(len(held))]


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many copies each call of the catalog has changed."""
    changes, change = [], Catalog._change

    def noted(catalog, some, *to):
        changes.append(len(some))
        change(catalog, some, *to)

    monkeypatch.setattr(Catalog, "_change", noted)
    return changes


def test_what_an_operator_clears_of_memory_ends_in_pieces_but_for_what_a_job_uses(monkeypatch, changed):
    """Its copies are not changed one by one, and what comes meanwhile stays."""
    monkeypatch.setattr(bounds, "CLEARED", 16)
    bench = TierBench((LENGTH,), gpu_blocks=2000)
    bench.serve(prompt_of(0))
    rows = bench.rows(prompt_of(0))
    bench.catalog.pin(rows[:1], Tier.CPU)
    changed.clear()
    up_to = bench.manager.last_generation
    assert bench.manager.clear_memory(up_to) == (16, 0, True)
    assert changed == [16]
    bench.serve(prompt_of(1, 4))
    changed.clear()
    assert bench.manager.clear_memory(up_to) == (16, 0, True)
    assert bench.manager.clear_memory(up_to) == (8, 0, True)
    assert changed == [16, 1, 7]
    assert bench.manager.clear_memory(up_to) == (0, 0, False)
    assert all(bench.held(prompt_of(1, 4), Tier.CPU))
    assert bench.manager.clear_memory() == (4, 0, True)
    assert bench.catalog.rows_in(Tier.CPU) == rows[:1]
    assert not any(bench.held(prompt_of(0), Tier.CPU))
    bench.parts.cpu.unpin(rows[:1])
    assert len(bench.catalog) == 0 and bench.parts.cpu.pool.free == bench.parts.cpu.pool.total


@pytest.mark.parametrize("geometry", GROUPS.values(), ids=GROUPS)
def test_a_reset_hides_all_at_once_and_steps_end_the_copies(geometry, monkeypatch, changed):
    """It changes what a job uses, and nothing else, however much there is."""
    bench = TierBench((7 * LENGTH,), geometry=geometry, gpu_blocks=2000)
    bench.serve(prompt_of(0))
    lower_shares(monkeypatch, 4)
    rows = bench.catalog.rows_in(Tier.CPU)
    bench.catalog.pin(rows[:1], Tier.CPU)
    changed.clear()
    bench.manager.reset(7)
    assert changed == [1] and hit_of(bench, prompt_of(0)) == 0
    steps = 0
    while bench.manager.has_pending_work(bench.now):
        changed.clear()
        bench.manager.take_plan(bench.now, idle=True)
        assert sum(changed) <= 4
        steps += 1
    assert steps >= len(rows) // 4 and bench.catalog.rows_in(Tier.CPU) == rows[:1]
    bench.parts.cpu.unpin(rows[:1])
    assert len(bench.catalog) == 0 and bench.parts.cpu.pool.free == bench.parts.cpu.pool.total


@pytest.mark.parametrize("geometry", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("share", [None, 0.5])
def test_who_stores_after_a_reset_has_the_room_at_once(geometry, share, monkeypatch):
    """Memory was full, its tenant's share, too; and nothing of before is written to the drive."""
    slots = (len(geometry.groups) * LENGTH // 2,)
    how = {} if share is None else {"salt_share": 0.5}
    bench = TierBench(slots, slots, geometry=geometry, gpu_blocks=2000, nvme_admission="all", min_load_tokens=0, **how)
    bench.serve(prompt_of(0))
    lower_shares(monkeypatch, 4, Kind.GONE)
    bench.change_weights()
    assert bench.parts.dirty is not None and not bench.parts.dirty.total
    assert len(bench.catalog.rows_in(Tier.CPU)) > 8
    bench.add(prompt_of(0)[: LENGTH // 2], finishing=False)
    for _ in range(2):
        bench.step(LENGTH)
    assert all(bench.held(prompt_of(0)[: LENGTH // 2], Tier.CPU))
    assert hit_of(bench, prompt_of(0)) == LENGTH // 2


class Counted(list[int]):
    """Counts how many of its elements are looked at."""

    looked = 0

    def __contains__(self, position: object) -> bool:
        Counted.looked += len(self)
        return super().__contains__(position)

    def __iter__(self) -> Iterator[int]:
        Counted.looked += len(self)
        return super().__iter__()


class Listing(NoStores):
    """Offers all, as a list."""

    def reached(self, request_id, keys, start, stop):
        return Counted(range(start, stop))


def test_what_a_policy_of_the_users_own_lists_is_gone_through_once(monkeypatch):
    """Memory has lost what a long hit brought before a step looks at it: all of it is stored
    again."""
    bench = TierBench((LENGTH,), gpu_blocks=2000, min_load_tokens=0)
    text = prompt_of(0)
    bench.serve(text)
    lower_shares(monkeypatch, 4, Kind.REACHED, Kind.PUT_OFF)
    monkeypatch.setattr(Counted, "looked", 0)
    bench.manager._stores._context.step_blocks = 4
    bench.manager._stores._store_policy = Listing()
    bench.engine.pool.forget_all()
    bench.add(text, finishing=False)
    while not bench.manager._work.has(Kind.PUT_OFF):
        bench.step(8)
    bench.manager._clear_all_memory()
    for _ in range(LENGTH):
        bench.step(8)
    held = bench.held(text, Tier.CPU)[4:-1]  # of what no step had looked at, nor computed
    assert held == [True] * (LENGTH // 2 - 5)
    assert 0 < Counted.looked <= 2 * LENGTH // 2


@pytest.mark.parametrize("geometry", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("others", ["are stored", "are read", "are loaded"])
def test_a_long_prompt_that_waits_for_room_is_looked_up_once(others, geometry, monkeypatch):
    """What others store, evict, read and load in each step makes none of its keys again, but those
    of its windows."""
    windows = (len(geometry.groups) - 1) * 4  # blocks that a hit needs of them
    bench = TierBench((len(geometry.groups) * LENGTH,), geometry=geometry, gpu_blocks=2000, min_load_tokens=0)
    bench.serve(prompt_of(0))
    held = bench.catalog.rows_in(Tier.CPU)
    bench.catalog.pin(held, Tier.CPU)
    bench.serve(prompt_of(1))  # fills the tier
    made, make = 0, BlockKeys.__getitem__

    def noted(keys, at):
        nonlocal made
        found = make(keys, at)
        made += len(found) if isinstance(at, slice) else 1
        return found

    assert hit_of(bench, prompt_of(0)) == LENGTH
    monkeypatch.setattr(prefix_match, "_SPAN", 4)
    each = []
    for number in range(2, 8):
        losses = bench.catalog.losses
        bench.serve(prompt_of(number, 4))
        if others == "are read":
            bench.manager._state.arriving.update(keys_of(prompt_of(number)))
        elif others == "are loaded" and number == 2:
            bench.manager._loads.gpu_loads.begin(99, keys_of(prompt_of(number)))
        assert bench.catalog.losses > losses
        made = 0
        with monkeypatch.context() as patch:
            patch.setattr(BlockKeys, "__getitem__", noted)
            assert bench.manager.lookup("asks", 0, LENGTH + 1, bench.now) == LENGTH
        each.append(made)
    assert max(each[1:]) <= 2 * windows  # to be looked up, and to be compared with what is read


def test_the_demand_of_a_long_hit_is_counted_in_steps_and_whole(monkeypatch):
    bench = TierBench((LENGTH,), gpu_blocks=2000, min_load_tokens=0)
    text = prompt_of(0)
    bench.serve(text)
    lower_shares(monkeypatch, 4, Kind.REACHED, Kind.PUT_OFF, Kind.DEMAND)
    bench.manager._stores._context.step_blocks = 4
    bench.engine.pool.forget_all()
    history, counted = bench.manager._history, []
    count = history.count

    def noted(keys, start, stop, *more):
        counted.append(stop - start)
        return count(keys, start, stop, *more)

    monkeypatch.setattr(history, "count", noted)
    use = StorePlanner._use

    def used(planner, keys, **how):
        assert {history.known(key)[0] for key in keys if key in loaded_keys} <= {2}, "used before it is counted"
        use(planner, keys, **how)

    monkeypatch.setattr(StorePlanner, "_use", used)
    before, loaded_keys = history.now, set(keys_of(text)[:-1])
    bench.add(text, finishing=False)
    most = 0
    for _ in range(LENGTH):
        bench.step(8)
        most, counted = max(most, sum(counted)), []
    assert most <= 3 * 4, "what is computed, and a part of what was loaded"
    *loaded, computed = (history.known(key)[0] for key in keys_of(text))
    assert set(loaded) == {2} and computed == 1, "never more than what it followed then"
    assert history.now == before + LENGTH // 2


def victim_of(bench: TierBench, prompt: str) -> int:
    """Have a prompt computed whole, and its request preempted in the next step; return how many
    blocks it had."""
    request = bench.come(prompt, 400, finishing=False)
    while request.computed <= len(prompt):
        bench.step(8)
    blocks = sum(len(list(filter(None, table))) for table in request.table)
    bench.engine.running.remove(request)
    bench.engine._preempt(request)
    bench.engine._preempted.append(request.id)
    bench.engine.waiting.remove(request)  # it waits for long
    return blocks


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each call of the store planner has offered."""
    offered, store = [], StorePlanner.store

    def noted(planner, offers, *rest, **also):
        offered.append(len(offers.keys))
        return store(planner, offers, *rest, **also)

    monkeypatch.setattr(StorePlanner, "store", noted)
    return offered


@pytest.mark.parametrize("geometry", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
def test_of_a_long_victim_each_step_saves_a_part_and_at_last_all_is_saved(tiers, geometry, monkeypatch, stored):
    """In memory and on NVMe, though its tail is stored before what it follows."""
    slots = (len(geometry.groups) * LENGTH,)
    bench = TierBench(
        **dict.fromkeys(tiers, slots),
        geometry=geometry,
        gpu_blocks=2000,
        min_load_tokens=0,
        store_policy="on_preemption",
        nvme_admission="all",
    )
    while "nvme_slots" in tiers and not bench.parts.nvme.free_slots(0):
        bench.parts.nvme.make_room(bench.engine.now, [1])
        bench.step()
    blocks = victim_of(bench, prompt_of(0))
    lower_shares(monkeypatch, 14, Kind.SAVES)
    bench.manager._stores._context.step_blocks = 6
    stored.clear()
    bench.step(8)
    at_once = stored[0]
    assert 0 < at_once < blocks - 14
    bench.idle()
    assert max(stored) <= 14 + 6 * len(geometry.groups)
    for tier in Tier.CPU, Tier.NVME:
        if tier in bench.catalog.tiers:
            assert all(bench.held(prompt_of(0), tier)), f"some never came to {tier}"
    assert hit_of(bench, prompt_of(0)) == LENGTH


def test_what_the_engine_has_taken_of_a_long_victim_is_saved_at_once_however_much_that_is(monkeypatch, stored):
    bench = TierBench((LENGTH,), gpu_blocks=2000, min_load_tokens=0, store_policy="on_preemption")
    victim_of(bench, prompt_of(0))
    lower_shares(monkeypatch, 4, Kind.SAVES)
    (request,) = bench.manager._requests.values()
    for block in list(request.held_blocks[0])[-20:]:
        bench.engine.pool.get_block(block).key = None  # as when it is another's by now
    stored.clear()
    bench.step(8)
    assert stored[0] == 4 + 20 + bench.engine.pool.step_blocks + (-20 % bench.engine.pool.step_blocks)
    bench.idle()
    assert hit_of(bench, prompt_of(0)) == LENGTH


@pytest.mark.parametrize("taken", [0, 1, 9])
def test_of_a_long_victim_in_units_no_more_is_saved_at_once_than_may_be_taken(taken, monkeypatch, stored):
    """A unit is taken when the engine has given away its last block, which it freed first."""
    geometry = Geometry((GroupGeometry(0, 4, 4096, gpu_blocks=2),), 1, 2)
    bench = TierBench((LENGTH,), geometry=geometry, gpu_blocks=2000, min_load_tokens=0, store_policy="on_preemption")
    victim_of(bench, prompt_of(0))
    lower_shares(monkeypatch, 4, Kind.SAVES)
    bench.manager._stores._context.step_blocks = 6
    (request,) = bench.manager._requests.values()
    blocks = list(request.held_blocks[0])
    for block in blocks[len(blocks) - taken :]:
        bench.engine.pool.get_block(block).key = None  # as when it is another's by now
    stored.clear()
    bench.step(8)
    assert stored[0] == 4 + 3 * (1 + -(-taken // 6)), "the head, and of the tail by three units"


@pytest.mark.parametrize("lost", ["a reset", "the GPU"])
def test_of_a_long_victim_nothing_is_saved_once_its_blocks_may_be_wrong(lost, monkeypatch, stored):
    bench = TierBench((LENGTH,), gpu_blocks=2000, min_load_tokens=0, store_policy="on_preemption")
    victim_of(bench, prompt_of(0))
    lower_shares(monkeypatch, 4, Kind.SAVES)
    bench.step(8)
    bench.manager.reset(7) if lost == "a reset" else bench.manager.lose_gpu()
    stored.clear()
    for _ in range(4):
        bench.manager.take_plan(bench.now, idle=True)
    assert not any(stored) and not bench.manager._work.has(Kind.SAVES)


@pytest.mark.parametrize("geometry", GROUPS.values(), ids=GROUPS)
def test_what_is_read_ahead_for_a_long_prompt_is_found_in_steps(geometry, monkeypatch):
    """Each makes some of its keys, and at last all of it is in memory; what was there counts as
    used, and so is there still."""
    slots = (2 * len(geometry.groups) * LENGTH,)
    bench = TierBench(
        slots, slots, geometry=geometry, gpu_blocks=2000, min_load_tokens=0, most_running=1, nvme_admission="all"
    )
    while not bench.parts.nvme.free_slots(0):
        bench.parts.nvme.make_room(bench.engine.now, [1])
        bench.step()
    bench.serve(prompt_of(0))
    bench.parts.cpu.discard(*bench.rows(prompt_of(0))[8:][::-1])
    bench.engine.pool.forget_all()
    bench.come(prompt_of(1, 4), 400, finishing=False)  # it runs, and the other one waits
    bench.step(8)
    lower_shares(monkeypatch, 2, Kind.PREFETCH, Kind.DEMAND)
    monkeypatch.setattr(prefix_match, "_SPAN", 4)
    bench.add(prompt_of(0))
    made, make, each = 0, BlockKeys.__getitem__, []

    def noted(keys, at):
        nonlocal made
        found = make(keys, at)
        made += len(found) if isinstance(at, slice) else 1
        return found

    monkeypatch.setattr(BlockKeys, "__getitem__", noted)
    for _ in range(8 * LENGTH):
        made = 0
        bench.manager._work.run(Kind.PREFETCH)
        bench.manager._work.end_step()
        each.append(made)
        bench.step(1)
        if all(bench.held(prompt_of(0), Tier.CPU)[:-1]):
            break
    assert all(bench.held(prompt_of(0), Tier.CPU)[:-1])  # the last one is computed
    windows = 8 * (len(geometry.groups) - 1)
    assert max(each) <= 4 * 2 * 4 + windows and sum(map(bool, each)) > LENGTH // 2 // 8


@pytest.mark.parametrize(("tier", "most"), [(Tier.CPU, 8), (Tier.NVME, 4)])
def test_a_step_loads_half_as_many_blocks_that_leave_a_copy_in_memory(tier, most, monkeypatch):
    bench = TierBench((LENGTH,), (LENGTH,), gpu_blocks=2000, min_load_tokens=0, nvme_admission="all", prefetch=False)
    while not bench.parts.nvme.free_slots(0):
        bench.parts.nvme.make_room(bench.engine.now, [1])
        bench.step()
    bench.serve(prompt_of(0))
    if tier is Tier.NVME:
        bench.parts.cpu.discard(*bench.rows(prompt_of(0))[::-1])
    bench.engine.pool.forget_all()
    lower_shares(monkeypatch, 8, Kind.LOADS)
    bench.add(prompt_of(0))
    jobs: list[int] = []
    while bench.engine.requests:
        jobs += [len(job.moves) for job in bench.step(LENGTH).jobs if job.kind is JobKind.LOAD]
    assert max(jobs) == most and sum(jobs) == LENGTH // 2 - 1


def test_copies_that_a_load_has_found_bad_are_dropped_together(monkeypatch):
    bench = TierBench((LENGTH,), gpu_blocks=2000, min_load_tokens=0)
    bench.serve(prompt_of(0))
    rows = bench.rows(prompt_of(0))
    hashes = [prompt_of(0)[:end].encode() for end in range(2, LENGTH + 1, 2)]
    bench.manager.new_request("asks", hashes, LENGTH, bench.now)
    assert bench.manager.lookup("asks", 0, LENGTH + 1, bench.now) == LENGTH
    bench.manager.plan_load("asks", 0, LENGTH, [list(range(1, LENGTH // 2 + 1))])
    (job,) = bench.manager.take_plan(bench.now, idle=True).jobs
    dropped, discard = [], TierSpace.discard
    monkeypatch.setattr(TierSpace, "discard", lambda space, *some: dropped.append(len(some)) or discard(space, *some))
    failed = dict.fromkeys(range(1, len(job.moves)), Reason.CHECKSUM)
    bench.manager.settle(Report({job.id: JobResult(failed=failed)}), bench.now, 0)
    assert dropped == [LENGTH // 2 - 1] and bench.catalog.rows_in(Tier.CPU) == rows[:1]
