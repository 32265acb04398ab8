# SPDX-License-Identifier: Apache-2.0
"""What the catalog does for many blocks at once is what it does for each: rows, links, states, and chains walked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey, Slot, Tier
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.copies import CopyState

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
        catalog.begin(rows[-1], Tier.CPU, slot)
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
            catalog.drop(row, Tier.CPU)


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


def test_a_chain_that_leads_elsewhere_is_not_believed() -> None:
    """A record may name a wrong parent; what is asked for is found by its keys then."""
    catalog = Catalog()
    a, b, wrong = (BlockKey(name) for name in (b"a", b"ab", b"x"))
    rows = catalog.begin_new((a, wrong), 1, 0, (None, None), Tier.CPU, [Slot(0, 0), Slot(0, 1)])
    rows += catalog.begin_new((b,), 3, 0, (wrong,), Tier.CPU, [Slot(0, 2)])
    assert catalog.find_chain([a, b]) == [rows[0], rows[2]]
    assert all(catalog.state(row, Tier.CPU) == CopyState.WRITING for row in rows)
