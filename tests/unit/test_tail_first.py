# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey, Slot, Tier
from kvdisk.config import EVICTIONS
from kvdisk.manager.catalog import NONE, Catalog
from kvdisk.manager.eviction import TailFirst, make_eviction


def key_of(number: int) -> BlockKey:
    return BlockKey(b"key %d" % number)


class Copies:
    """Copies of blocks in one tier. ``parents``: by number, who follows whom."""

    def __init__(self, eviction: str, parents: list[int]) -> None:
        self.catalog = Catalog()
        self.order = TailFirst(make_eviction(eviction, self.catalog.keys), self.catalog, Tier.CPU)
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
        self.catalog.drop((row,), Tier.CPU)

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
            self.drop(row)
        return len(rows)

    def held(self) -> set[int]:
        """What may not leave: what is pinned, and what that follows."""
        ready = self.ready()
        found = {number for number, row in ready.items() if self.catalog.pins(row, Tier.CPU)}
        for number in range(len(self.parents) - 1, -1, -1):  # parents come before their children
            if number in found and self.parents[number] in ready:
                found.add(self.parents[number])
        return found


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


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_the_tail_of_a_chain_longer_than_a_search_is_found_in_the_end(eviction, monkeypatch):
    monkeypatch.setattr(TailFirst, "MAX_STEPS", 64)
    copies = Copies(eviction, list(range(-1, 299)))
    rows, left, asked = [copies.store(number) for number in range(300)], [], []

    def evictable(row: int) -> bool:
        asked.append(row)
        return copies.catalog.evictable_in(Tier.CPU)(row)

    for _ in range(400):
        asked.clear()
        for row in copies.order.victims(2, evictable):
            copies.drop(row)
            left.append(row)
        assert len(asked) < 100
    assert left == rows[::-1]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_chain_in_use_does_not_keep_others_from_leaving(eviction, monkeypatch):
    monkeypatch.setattr(TailFirst, "MAX_SKIPPED", 16)
    copies = Copies(eviction, [*range(-1, 199), -1])
    rows = [copies.store(number) for number in range(201)]
    copies.catalog.pin((rows[199],), Tier.CPU)
    assert next(filter(None, (copies.victims(1) for _ in range(400)))) == rows[200:]
