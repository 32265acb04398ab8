# SPDX-License-Identifier: Apache-2.0
"""What the catalog does for many blocks at once is what it does for each: rows, links, states, and chains walked."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey, Slot, Tier
from kvdisk.manager.catalog import Catalog, Change, CopyState
from kvdisk.manager.events import Journal
from kvdisk.stats import Stats

PATHS = ("abcdef", "abcxyz", "abq", "mn")
"""Chains, of which some begin alike: a key is the whole path up to a block, as vLLM's hashes are."""
_steps = st.lists(
    st.tuples(st.sampled_from(PATHS), st.integers(0, 5), st.integers(1, 6), st.sampled_from(("store", "drop", "doom"))),
    max_size=12,
)


def keys_of(path: str) -> list[BlockKey]:
    return [BlockKey(path[: end + 1].encode()) for end in range(len(path))]


def facts(catalog: Catalog) -> dict[BlockKey, tuple[object, ...]]:
    """Return what is known of each block, by key and not by row."""
    found = {}
    for key, row in catalog._rows.items():
        parent_row = catalog.chains.parent_rows[row]
        children = set()
        for tier in Tier.CPU, Tier.NVME:
            child = catalog.chains.first(row, tier)
            while child >= 0:
                assert (tier, catalog.keys[child]) not in children, "a chain that is tied to itself"
                children.add((tier, catalog.keys[child]))
                child = catalog.chains.next(child, tier)
        found[key] = (
            catalog.generations[row],
            catalog.epochs[row],
            catalog.parents[row],
            catalog.keys[parent_row] if parent_row >= 0 else None,
            frozenset(children),
            tuple(catalog.state(row, tier) for tier in (Tier.CPU, Tier.NVME)),
            tuple(catalog.pins(row, tier) for tier in (Tier.CPU, Tier.NVME)),
            catalog.is_ready(row),
        )
    return found


def store(catalog: Catalog, keys: list[BlockKey], generation: int, *, at_once: bool) -> None:
    """Give copies to those of the keys, neighbours in one chain from the second on, that have none."""
    new = [at for at in range(1, len(keys)) if catalog.find(keys[at]) < 0]
    slots = [Slot(0, generation + at) for at in new]
    parents = [keys[at - 1] or None for at in new]
    if at_once:
        rows = catalog.begin_new([keys[at] for at in new], generation, 7, parents, Tier.CPU, slots)
        catalog.finish(rows[::-1], Tier.CPU)
        return
    rows = []
    for number, (at, slot, parent) in enumerate(zip(new, slots, parents, strict=True)):
        rows.append(catalog.add(keys[at], generation + number, 7, parent))
        catalog.begin((rows[-1],), Tier.CPU, (slot,))
    for row in reversed(rows):
        catalog.finish((row,), Tier.CPU)


def drop(catalog: Catalog, keys: list[BlockKey], *, at_once: bool, doom: bool) -> None:
    rows = [row for row in map(catalog.find, reversed(keys)) if row >= 0]
    for row in rows:
        if doom:
            catalog.doom(row, Tier.CPU)
    if at_once:
        catalog.drop_all(rows, Tier.CPU)
    else:
        for row in rows:
            catalog.drop((row,), Tier.CPU)


@given(_steps)
def test_many_at_once_are_one_after_the_other(steps: list[tuple[str, int, int, str]]) -> None:
    together, singly = Catalog(), Catalog()
    for number, (path, first, count, what) in enumerate(steps):
        keys = [BlockKey(b""), *keys_of(path)][first : first + count + 1]
        for catalog in (together, singly):
            at_once = catalog is together
            if what == "store":
                store(catalog, keys, 100 * number, at_once=at_once)
            else:
                drop(catalog, keys[1:], at_once=at_once, doom=what == "doom")
        assert facts(together) == facts(singly)
        assert together.chains._orphans.keys() == singly.chains._orphans.keys()
        assert (together.gains, together.losses) == (singly.gains, singly.losses)
        for path_again in PATHS:
            every = keys_of(path_again)
            for start in range(len(every)):
                for stop in range(start, len(every) + 1):
                    assert together.find_chain(every[start:stop]) == together.find_all(every[start:stop])


class ByTheTable:
    """A catalog in which each change of a copy goes through the table of transitions by itself."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def store(self, keys: list[BlockKey], generation: int, parents: list[Any], tier: Tier, slots: list[Slot]) -> None:
        for number, key in enumerate(keys):
            self._catalog.add(key, generation + number, 7, parents[number])
        self._catalog.begin_all([self._catalog.find(key) for key in keys], tier, slots)

    def finish(self, rows: list[int], tier: Tier) -> None:
        for row in rows:
            self._catalog._change(row, tier, Change.READY)
        self._catalog.unpin(rows, tier)
        self._catalog._note(rows, tier, stored=True)

    def drop(self, rows: list[int], tier: Tier) -> None:
        catalog = self._catalog
        catalog._note(rows, tier, stored=False)
        for row in rows:
            catalog._change(row, tier, Change.DROP)
        catalog.chains.unlink(rows, tier)
        catalog._vacate([row for row in rows if not any(catalog.state(row, other) for other in (Tier.CPU, Tier.NVME))])


_acts = st.lists(
    st.tuples(
        st.sampled_from(
            ("store", "store", "begin", "begin", "finish", "finish", "finish", "doom", "drop", "drop", "hide")
        ),
        st.sampled_from(PATHS[:2]),
        st.integers(0, 3),
        st.integers(1, 6),
        st.sampled_from((Tier.CPU, Tier.NVME)),
        st.booleans(),
    ),
    min_size=8,
    max_size=40,
)


def act(catalog: Catalog, slow: ByTheTable | None, number: int, what: Any) -> None:
    """Do to those blocks of a path what can be done to them: at once, or with ``slow`` by the table."""
    name, path, first, count, tier, turned = what
    keys = keys_of(path)
    if name == "hide":
        catalog.hidden_segments = frozenset({count}) if turned else frozenset()
    elif name == "store":
        new = [at for at in range(first, min(first + count, len(keys))) if catalog.find(keys[at]) < 0]
        if turned:
            new.reverse()  # nobody should, and it must not tie a chain to itself
        wanted, parents = [keys[at] for at in new], [keys[at - 1] if at else None for at in new]
        slots = [Slot(at % 2, 100 * number + at) for at in new]
        if slow is not None:
            slow.store(wanted, 100 * number, parents, tier, slots)
        else:
            catalog.begin_new(wanted, 100 * number, 7, parents, tier, slots)
    else:
        rows = [row for row in map(catalog.find, keys[first : first + count]) if row >= 0]
        change(catalog, slow, number, name, rows, tier)


def change(catalog: Catalog, slow: ByTheTable | None, number: int, name: str, rows: list[int], tier: Tier) -> None:
    states = {row: catalog.state(row, tier) for row in rows}
    if name == "begin":
        absent = [row for row, state in states.items() if state == CopyState.ABSENT]
        catalog.begin_all(absent, tier, [Slot(at % 2, 100 * number + at) for at in range(len(absent))])
    elif name == "finish":
        (slow or catalog).finish([row for row, state in states.items() if state == CopyState.WRITING], tier)
    elif name == "doom":
        for row in [row for row, state in states.items() if state in {CopyState.WRITING, CopyState.READY}]:
            catalog.doom(row, tier)
    else:
        catalog.unpin([row for row in rows if catalog.pins(row, tier)], tier)
        there = [row for row, state in reversed(states.items()) if state != CopyState.ABSENT]
        if slow is not None:
            slow.drop(there, tier)
        else:
            catalog.drop_all(there, tier)


@settings(max_examples=200)
@given(_acts, st.booleans())
def test_what_is_done_in_one_pass_is_what_the_table_says(acts: list[Any], listens: bool) -> None:
    quick, slow = Catalog(), Catalog()
    for catalog in (quick, slow):
        catalog.journal = Journal(Stats()) if listens else None
    for number, what in enumerate(acts):
        act(quick, None, number, what)
        act(slow, ByTheTable(slow), number, what)
        assert facts(quick) == facts(slow)
        assert (quick.gains, quick.losses) == (slow.gains, slow.losses)
        names = [{catalog.keys[row] for row in catalog._unready if row >= 0} for catalog in (quick, slow)]
        assert names[0] == names[1]
        assert quick.chains._orphans.keys() == slow.chains._orphans.keys()
        if quick.journal is not None and slow.journal is not None:
            assert quick.journal.take() == slow.journal.take()


def test_a_chain_that_leads_elsewhere_is_not_believed() -> None:
    """A record may name a wrong parent; what is asked for is found by its keys then."""
    catalog = Catalog()
    a, b, wrong = (BlockKey(name) for name in (b"a", b"ab", b"x"))
    rows = catalog.begin_new((a, wrong), 1, 0, (None, None), Tier.CPU, [Slot(0, 0), Slot(0, 1)])
    rows += catalog.begin_new((b,), 3, 0, (wrong,), Tier.CPU, [Slot(0, 2)])
    assert catalog.find_chain([a, b]) == [rows[0], rows[2]]
    assert all(catalog.state(row, Tier.CPU) == CopyState.WRITING for row in rows)
