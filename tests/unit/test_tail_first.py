# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey, Slot, Tier
from kvdisk.config import EVICTIONS
from kvdisk.manager.catalog import NONE, Catalog, CopyState
from kvdisk.manager.eviction import TailFirst, make_eviction

KEYS = [BlockKey(b"key %d" % number) for number in range(8)]


class Copies:
    """Copies of blocks in one tier, of which ``PARENTS`` says who follows whom."""

    def __init__(self, eviction: str, parents: list[int]) -> None:
        self.catalog = Catalog()
        self.order = TailFirst(make_eviction(eviction, self.catalog.keys), self.catalog, Tier.CPU)
        self.parents = parents
        self.stored = 0

    def store(self, number: int) -> None:
        parent = self.parents[number]
        row = self.catalog.find(KEYS[number])
        if row < 0:
            self.stored += 1
            row = self.catalog.add(KEYS[number], self.stored, 0, KEYS[parent] if parent >= 0 else None)
        if self.catalog.state(row, Tier.CPU) == CopyState.ABSENT:
            self.catalog.begin((row,), Tier.CPU, (Slot(0, number),))
            self.catalog.finish((row,), Tier.CPU)
            self.order.insert((row,))

    def drop(self, row: int) -> None:
        self.order.remove((row,))
        self.catalog.drop((row,), Tier.CPU)

    def ready(self) -> dict[int, int]:
        found = {number: self.catalog.find(key) for number, key in enumerate(KEYS)}
        return {
            number: row
            for number, row in found.items()
            if row >= 0 and self.catalog.state(row, Tier.CPU) == CopyState.READY
        }

    def followers(self, number: int) -> set[int]:
        return {child for child in self.ready() if self.parents[child] == number}

    def evict(self, count: int) -> int:
        numbers = {row: number for number, row in self.ready().items()}
        rows = self.order.victims(count, self.catalog.evictable_in(Tier.CPU))
        assert len(rows) == len(set(rows)) <= count
        for row in rows:
            assert not self.followers(numbers[row]), "a head leaves before its tail"
            assert self.catalog.columns(Tier.CPU).first_child[row] == NONE
            self.drop(row)
        return len(rows)

    def held(self) -> set[int]:
        """What may not leave: what is pinned, and what that follows."""
        pinned = {number for number, row in self.ready().items() if self.catalog.pins(row, Tier.CPU)}
        while True:
            before = {self.parents[number] for number in pinned} & self.ready().keys()
            if before <= pinned:
                return pinned
            pinned |= before


parents_of = st.tuples(*(st.integers(-1, number - 1) for number in range(8))).map(list)
steps = st.lists(st.tuples(st.sampled_from(["store", "use", "lose", "pin", "evict"]), st.integers(0, 7)), max_size=50)


@pytest.mark.parametrize("eviction", EVICTIONS)
@settings(max_examples=200)
@given(parents=parents_of, steps=steps)
def test_of_any_tree_the_tails_leave_first_and_nothing_is_stuck(eviction, parents, steps):
    copies = Copies(eviction, parents)
    for step, number in steps:
        row = copies.ready().get(number, -1)
        if step == "store":
            copies.store(number)
        elif step == "evict":
            room = len(copies.ready()) - len(copies.held())
            assert copies.evict(number) == min(number, room)
        elif row >= 0 and step == "use":
            copies.order.access((row,))
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


def long_chain(eviction: str, length: int) -> tuple[Catalog, TailFirst, list[int]]:
    catalog = Catalog()
    order = TailFirst(make_eviction(eviction, catalog.keys), catalog, Tier.NVME)
    rows = []
    for number in range(length):
        row = catalog.add(BlockKey(b"%d" % number), number, 0, BlockKey(b"%d" % (number - 1)) if number else None)
        catalog.begin((row,), Tier.NVME, (Slot(0, number),))
        catalog.finish([row], Tier.NVME)
        order.insert((row,))
        rows.append(row)
    return catalog, order, rows


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_the_tail_of_a_chain_longer_than_a_search_is_found_in_the_end(eviction, monkeypatch):
    monkeypatch.setattr(TailFirst, "MAX_STEPS", 64)
    catalog, order, rows = long_chain(eviction, 300)
    asked = []

    def evictable(row: int) -> bool:
        asked.append(row)
        return catalog.evictable_in(Tier.NVME)(row)

    left: list[int] = []
    for _ in range(400):
        before = len(asked)
        for row in order.victims(2, evictable):
            order.remove((row,))
            catalog.drop((row,), Tier.NVME)
            left.append(row)
        assert len(asked) - before < 100
    assert left == rows[::-1]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_chain_in_use_does_not_keep_others_from_leaving(eviction, monkeypatch):
    monkeypatch.setattr(TailFirst, "MAX_SKIPPED", 16)
    catalog, order, rows = long_chain(eviction, 200)
    catalog.pin((rows[-1],), Tier.NVME)
    other = catalog.add(BlockKey(b"other"), 1000, 0, None)
    catalog.begin((other,), Tier.NVME, (Slot(0, 1000),))
    catalog.finish([other], Tier.NVME)
    order.insert((other,))
    calls = (order.victims(1, catalog.evictable_in(Tier.NVME)) for _ in range(400))
    assert next(filter(None, calls)) == [other]
