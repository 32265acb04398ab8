# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_pool import FakePool
from tier_bench import GEOMETRY, TierBench

from kvdisk.blocks import BlockKey, Slot, Tier, group_of, make_block_key
from kvdisk.config import EVICTIONS, Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager import bounds
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.catalog import NONE, Catalog
from kvdisk.manager.eviction import TailFirst, make_eviction
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.parts import Parts
from kvdisk.manager.reuse import ReuseHistory
from kvdisk.manager.segments import NvmeLayout
from kvdisk.manager.standings import DEMOTED, PINNED, RETAINED, Standings
from kvdisk.manager.tiers import MemorySpace
from kvdisk.messages import SegmentSpec


def key_of(number: int) -> BlockKey:
    return BlockKey(b"key %d" % number)


MOST_STAYING = 2


class Copies:
    """Copies of blocks in one tier. ``parents``: by number, who follows whom. ``states``: the
    numbers of recurrent states."""

    def __init__(self, eviction: str, parents: list[int], states: Collection[int] = ()) -> None:
        self.catalog = Catalog()
        self.history = ReuseHistory({group_of(key_of(number)) for number in states})
        policy = make_eviction(eviction, self.catalog.keys, self.history)
        self.standings = Standings()
        self.now = 0.0
        self.order = TailFirst(policy, self.catalog, Tier.CPU, self.history, self.standings, lambda: MOST_STAYING)
        self.parents = parents
        self.stored = 0

    def store(self, number: int) -> int:
        parent, row = self.parents[number], self.catalog.find(key_of(number))
        if row < 0:
            self.stored += 1
            (row,) = self.catalog.add([key_of(number)], [self.stored], 0, [key_of(parent) if parent >= 0 else None])
            self.catalog.begin((row,), Tier.CPU, (Slot(0, number),))
            self.catalog.finish((row,), Tier.CPU)
            self.order.insert((row,))
        return row

    def drop(self, row: int) -> None:
        self.order.remove((row,))
        self.catalog.end((row,), Tier.CPU)

    def ready(self) -> dict[int, int]:
        found = {number: self.catalog.find(key_of(number)) for number in range(len(self.parents))}
        return {number: row for number, row in found.items() if row >= 0}

    def victims(self, count: int) -> list[int]:
        return self.order.victims(count, self.catalog.evictable_in(Tier.CPU))

    def evict(self, count: int) -> int:
        rows = self.victims(count)
        assert len(rows) == len(set(rows)) <= count
        for row in rows:
            assert self.catalog.columns(Tier.CPU).first_child[row] == NONE, "a head leaves before its tail"
            tails = [tail for tail in self.free() if self.catalog.columns(Tier.CPU).first_child[tail] == NONE]
            assert self.rank(row) == min(map(self.rank, tails)), "one with another standing was to leave before"
            self.drop(row)
        return len(rows)

    def rank(self, row: int) -> float:
        """Whether a row is to leave before, among, or after others."""
        return {DEMOTED: 0, RETAINED: 2}.get(self.order._policy.standing(row), 1)

    def free(self) -> list[int]:
        """Return the rows that may leave."""
        held = self.held()
        return [row for number, row in self.ready().items() if number not in held]

    def tell(self, number: int, standing: int, seconds: float = 1.0) -> None:
        """Give a block, and those before it in its chain, a standing."""
        rows = []
        while number >= 0:
            self.standings.set(key_of(number), standing, self.now + seconds)
            rows.append(self.catalog.find(key_of(number)))
            number = self.parents[number]
        self.order.standings.reorder([row for row in rows if row >= 0])

    def end_standings(self) -> None:
        """Let more than a second pass."""
        self.now += 2.0
        ended = self.standings.take_ended(self.now, 1024)
        self.order.standings.reorder([row for row in self.catalog.find_all(ended) if row >= 0])

    def check_standings(self) -> None:
        """Of what is to stay no more does than may, and not behind what may leave; the rest leaves
        late."""
        stays = 0
        for number, row in self.ready().items():
            told, is_so = self.standings.of(key_of(number)), self.order._policy.standing(row)
            assert is_so == told or (is_so, told) in {(RETAINED, PINNED), (DEMOTED, None)}
            stays += is_so == PINNED
            if is_so == PINNED and self.parents[number] in self.ready():
                assert self.order._policy.standing(self.ready()[self.parents[number]]) == PINNED
        assert stays <= MOST_STAYING

    def held(self) -> set[int]:
        """What may not leave: what is pinned or stays, and what that follows."""
        ready, standing = self.ready(), self.order._policy.standing
        found = {number for number, row in ready.items() if self.catalog.pins(row, Tier.CPU) or standing(row) == PINNED}
        for number in range(len(self.parents) - 1, -1, -1):  # parents come before their children
            if number in found and self.parents[number] in ready:
                found.add(self.parents[number])
        return found


parents_of = st.tuples(*(st.integers(-1, number - 1) for number in range(8))).map(list)
ACTS = ("store", "store", "store", "use", "lose", "pin", "evict")
"""Trees must grow for a head to have several tails."""
steps = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 7)), min_size=20, max_size=50)
STANDINGS = {"first": DEMOTED, "late": RETAINED, "stays": PINNED}
hints = st.lists(
    st.tuples(st.sampled_from(["store", "use", "lose", "evict", *STANDINGS, "wait"]), st.integers(0, 7)), min_size=20
)


@pytest.mark.parametrize("eviction", EVICTIONS)
@settings(max_examples=200)
@given(parents=parents_of, steps=steps, states=st.sets(st.integers(0, 7)))
def test_of_any_tree_the_tails_leave_first_and_nothing_is_stuck(eviction, parents, steps, states):
    copies = Copies(eviction, parents, states)
    for step, number in steps:
        row = copies.ready().get(number, -1)
        if step == "store":
            copies.store(number)
        elif step == "evict":
            room = len(copies.ready()) - len(copies.held())
            assert copies.evict(number) == min(number, room)
        elif row >= 0 and step == "use":
            copies.history.count([key_of(number)], 0, 1, 0)
            copies.order.touch((row,))
        elif row >= 0 and step == "pin":
            if copies.catalog.pins(row, Tier.CPU):
                copies.catalog.unpin((row,), Tier.CPU)
            else:
                copies.catalog.pin((row,), Tier.CPU)
        elif row >= 0 and not copies.catalog.pins(row, Tier.CPU):
            copies.drop(row)
    for row in copies.ready().values():
        if copies.catalog.pins(row, Tier.CPU):
            copies.catalog.unpin((row,), Tier.CPU)
    while copies.ready():
        assert copies.evict(3)
    assert len(copies.catalog._vacant) == len(copies.catalog.generations), "a row is lost"
    assert not copies.order._stateless


@pytest.mark.parametrize("at_once", [1, 2, 8])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_what_a_state_that_has_left_alone_made_useful_leaves_next(eviction, at_once):
    """Two prompts, 0 1 3 4 and 0 2 5, with their states 6 and 7; of the first also an earlier one,
    8, after 0 1."""
    copies = Copies(eviction, [-1, 0, 0, 1, 3, 2, 4, 5, 1], states={6, 7, 8})
    rows = [copies.store(number) for number in range(9)]
    for row in (rows[6], rows[8], rows[7]):
        copies.history.now += 1
        copies.order.touch((row,))
    copies.history.now += 1
    copies.order.touch([rows[number] for number in (5, 2, 4, 3, 1, 0)])  # used last of all
    left: list[int] = []
    while copies.ready():
        found = copies.victims(at_once)
        left += [rows.index(row) for row in found]
        for row in found:
            copies.drop(row)
    served, order = {4: {6}, 3: {6}, 1: {6, 8}, 5: {7}, 2: {7}, 0: {6, 7, 8}}, list[int]()
    for state in [number for number in left if number >= 6]:  # in whatever order the policy lets these leave
        order.append(state)
        order += [number for number, states in served.items() if number not in order and states <= set(order)]
    assert left == order
    if eviction in {"learned", "lru"}:
        assert left == [6, 4, 3, 8, 1, 7, 5, 2, 0]


def test_what_a_state_made_useful_stays_while_a_tier_has_the_state():
    copies = Copies("lru", [-1, 0, -1], states={1})
    rows = [copies.store(number) for number in range(3)]
    copies.catalog.begin(rows[1:2], Tier.NVME, (Slot(0, 1),))
    copies.catalog.finish(rows[1:2], Tier.NVME)
    copies.history.now += 1
    copies.order.touch(rows[:1])
    for row in (rows[1], rows[2], rows[0]):
        assert copies.victims(1) == [row]
        copies.drop(row)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_state_of_another_size_leaves_and_lets_what_it_followed_leave(pinned):
    """A pinned one does not hold back KV that nobody knows to be pinned."""
    geometry = Geometry((GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 8192, 2, state_tokens=2)), 1, 2)
    parts = Parts.make(Config(cpu_bytes=1, pin_share=0.5), geometry, FakePool(9, lambda _: None))
    space = MemorySpace(parts, (2, 2), AdmissionPolicy())
    keys = [make_block_key(text, group) for text in (b"h", b"i") for group in (0, 1)]
    if pinned:
        parts.standings.set(keys[1], PINNED, 3600.0)
    for number, (key, parent) in enumerate(zip(keys, (None, keys[0], None, keys[2]), strict=True)):
        (row,) = parts.catalog.add([key], [number + 1], 0, [parent])
        parts.catalog.begin((row,), Tier.CPU, space.allocate(number % 2, 1))
        space.finish((row,))
    assert not space.allocate(0, 1), "the states follow"
    assert len(space.allocate(1, 2)) == 2 and not any(order._stateless for order in space._evictors)
    assert len(space.allocate(0, 2)) == 2


def test_a_state_that_follows_a_state_makes_nothing_useful():
    """As of a model that has nothing else."""
    copies = Copies("lru", [-1, 0, 1, -1], states={0, 1, 2, 3})
    copies.history.state_groups = {group_of(make_block_key(b"h", 7))}
    keys = {number: make_block_key(b"h%d" % number, 7) for number in range(4)}
    rows = []
    for number in (3, 0, 1, 2):
        parent = copies.parents[number]
        (row,) = copies.catalog.add([keys[number]], [number + 1], 0, [keys[parent] if parent >= 0 else None])
        copies.catalog.begin((row,), Tier.CPU, (Slot(0, number),))
        copies.catalog.finish((row,), Tier.CPU)
        rows.append(row)
    copies.order.insert([rows[3], rows[0], rows[1], rows[2]])
    for row in (rows[0], rows[2], rows[1]):
        copies.history.now += 1
        copies.order.touch((row,))
    assert copies.victims(1) == [rows[3]]
    copies.drop(rows[3])
    assert copies.victims(3) == [rows[0], rows[2], rows[1]]


@pytest.mark.parametrize("how", ["first", "stateless"])
def test_many_that_may_not_leave_hold_up_no_other(how, monkeypatch):
    monkeypatch.setattr(bounds, "TAILS_SKIPPED", 8)
    copies = Copies("lru", [-1] * 30)
    rows = [copies.store(number) for number in range(30)]
    copies.catalog.pin(rows[:29], Tier.CPU)
    if how == "stateless":
        copies.order._stateless.update(rows[:29])
    else:
        for number in range(29):
            copies.standings.set(key_of(number), DEMOTED, 60.0)
        copies.order.standings.reorder(rows)
    assert [rows[29]] in [copies.victims(1) for _ in range(5)]


@pytest.mark.parametrize("eviction", EVICTIONS)
@settings(max_examples=200)
@given(parents=parents_of, steps=hints)
def test_standings_go_before_what_the_policy_says_and_hold_back_no_more_than_may_stay(eviction, parents, steps):
    copies = Copies(eviction, parents)
    for step, number in steps:
        row = copies.ready().get(number, -1)
        if step == "store":
            copies.store(number)
        elif step in STANDINGS:
            copies.tell(number, STANDINGS[step])
        elif step == "wait":
            copies.end_standings()
        elif step == "evict":
            room = len(copies.ready()) - len(copies.held())
            assert copies.evict(number // 3) == min(number // 3, room)
        elif row >= 0 and step == "use":
            copies.order.touch((row,))
            assert copies.order._policy.standing(row) != DEMOTED
        elif row >= 0:
            copies.drop(row)
            assert copies.standings.of(key_of(number)) != DEMOTED, "it leaves first once"
        copies.check_standings()
    copies.end_standings()
    assert not any(map(copies.order._policy.count, (RETAINED, PINNED)))
    while copies.ready():
        assert copies.evict(3)


@pytest.mark.parametrize("is_demoted", [False, True])
def test_what_stays_does_not_hold_back_what_comes_back_before_it_and_does_not_stay(is_demoted):
    copies = Copies("lru", list(range(-1, 3)))
    for number in (1, 2):
        copies.store(number)
    copies.tell(2, PINNED)
    if is_demoted:  # before they were stored, and has left since
        copies.standings.forget(key_of(0))
    assert copies.order._policy.count(PINNED) == MOST_STAYING
    copies.store(0)
    copies.check_standings()
    assert copies.evict(3) == 3


class Watched(Copies):
    """Notes how many rows a search looks at."""

    def __init__(self, eviction: str, parents: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(eviction, parents)
        self.looked = 0
        unlist = self.order._policy.unlist

        def count(rows: Iterable[int]) -> None:
            rows = list(rows)
            self.looked += len(rows)
            unlist(rows)

        monkeypatch.setattr(self.order._policy, "unlist", count)

    def search(self, count: int, *, kept: Collection[int] = ()) -> list[int]:
        self.looked = 0
        evictable = self.catalog.evictable_in(Tier.CPU)

        def asked(row: int) -> bool:
            self.looked += 1
            return evictable(row) and row not in kept

        rows = self.order.victims(count, asked)
        assert self.looked <= bounds.TAILS_SKIPPED + 2 * count, "it looks at what is no tail"
        for row in rows:
            self.drop(row)
        return rows


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_the_tail_of_a_long_chain_is_found_at_once(eviction, monkeypatch):
    monkeypatch.setattr(bounds, "TAILS_SKIPPED", 1)
    copies = Watched(eviction, list(range(-1, 299)), monkeypatch)
    rows = [copies.store(number) for number in range(300)]
    left = [row for _ in range(155) for row in copies.search(2)]
    assert left == rows[::-1]


@pytest.mark.parametrize("newest_first", [False, True])
def test_all_children_of_one_parent_leave_in_one_search(newest_first, monkeypatch):
    copies = Watched("lru", [-1] + [0] * 10_000, monkeypatch)
    rows = [copies.store(number) for number in range(10_001)]
    children = rows[:0:-1] if newest_first else rows[1:]
    for row in children:
        copies.history.now += 1
        copies.order.touch((row,))
    assert copies.search(5000) == children[:5000]
    assert copies.search(5001) == [*children[5000:], rows[0]]


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("why", ["in use", "waits for its demotion", "chain in use"])
def test_what_may_not_leave_does_not_keep_others_from_leaving(eviction, why, monkeypatch):
    monkeypatch.setattr(bounds, "TAILS_SKIPPED", 16)
    parents = [*range(-1, 199), -1] if why == "chain in use" else [-1] * 201
    copies = Watched(eviction, parents, monkeypatch)
    rows = [copies.store(number) for number in range(201)]
    copies.catalog.pin({"in use": rows[:200], "chain in use": rows[199:200]}.get(why, ()), Tier.CPU)
    kept = rows[:200] if why == "waits for its demotion" else ()
    found = [copies.search(1, kept=kept) for _ in range(20)]
    assert list(filter(None, found)) == [rows[200:]]
    assert not any(found[15:]), "nor is anything else found"


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("way", ["evicted", "abandoned", "discarded", "segment dropped"])
def test_a_row_is_a_tail_again_whatever_way_its_follower_goes(eviction, way):
    config = Config(store_dirs=(Path("/nowhere"),), nvme_bytes=1, eviction=eviction)
    parts = Parts.make(config, GEOMETRY, FakePool(2, lambda _: None))
    nvme = NvmeSpace(parts, NvmeLayout(0, (1,), 1 << 62), MemoryIndex(), AdmissionPolicy())
    for number in range(2):
        spec = SegmentSpec(number, 4096, 1)
        nvme.segments.specs[number] = spec
        nvme.pool.add_segment(number, 0, 1)
    catalog, (order,) = parts.catalog, nvme._evictors
    head, tail = catalog.add([key_of(0), key_of(1)], [1, 2], 0, [None, key_of(0)])
    slots = sorted(nvme.pool.allocate(0, 2))
    catalog.begin((head, tail), Tier.NVME, slots)
    nvme.finish((head,) if way == "abandoned" else (tail, head))
    everything = catalog.evictable_in(Tier.NVME)
    assert order.victims(1, lambda row: row == head) == [] == list(order._policy.proposals())[1:]
    if way == "evicted":
        assert nvme._evict(0, 1) == 1
    elif way == "abandoned":
        nvme.abandon(tail)
    elif way == "discarded":
        catalog.pin((tail,), Tier.NVME)
        nvme.discard(tail)
        assert order.victims(1, everything) == [], "a dropped copy follows it still"
        nvme.unpin((tail,))
    else:
        nvme._drop_segment(nvme.segments.specs[1])
    assert order.victims(2, everything) == [head]


def test_what_a_reset_leaves_on_nvme_can_leave_it():
    bench = TierBench((8,), (8,), nvme_admission="all")
    bench.idle()
    bench.serve("aabbccx")
    for space in (bench.parts.cpu, bench.parts.nvme):
        assert space._evictors[0].victims(9, lambda _: False) == [], "heads are not listed"
    bench.change_weights()
    bench.serve("aabbccx", cold=True)
    assert [space.pool.free for space in (bench.parts.cpu, bench.parts.nvme)] == [[5], [2]]
    assert bench.parts.cpu._evict(0, 9) == 3 and bench.parts.nvme._evict(0, 9) == 6
