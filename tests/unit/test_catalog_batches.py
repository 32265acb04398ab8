# SPDX-License-Identifier: Apache-2.0
"""What the catalog says of blocks, after whatever was done to many of their copies at once."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey, Slot, Tier
from kvdisk.manager.catalog import Catalog, CopyState, Presence

PATHS = ("abcdef", "abcxyz", "abq", "mn")
"""Chains, of which some begin alike: a key is the whole path up to a block, as vLLM's hashes
are."""
TIERS = (Tier.CPU, Tier.NVME)


def keys_of(path: str) -> list[BlockKey]:
    return [BlockKey(path[: end + 1].encode()) for end in range(len(path))]


EVERY_KEY = sorted({key for path in PATHS for key in keys_of(path)})
_acts = st.lists(
    st.tuples(
        st.sampled_from(("store", "store", "begin", "begin", "finish", "finish", "finish", "doom", "drop", "hide")),
        st.sampled_from(PATHS),
        st.integers(0, 3),
        st.integers(1, 6),
        st.sampled_from(TIERS),
        st.booleans(),
    ),
    min_size=8,
    max_size=40,
)


def act(catalog: Catalog, number: int, what: Any) -> None:
    """Do to those blocks of a path what can be done to them."""
    name, path, first, count, tier, turned = what
    keys = keys_of(path)
    if name == "hide":
        catalog.hide(Tier.NVME, frozenset({count % 2}) if turned else frozenset())
        return
    if name == "store":
        new = [at for at in range(first, min(first + count, len(keys))) if catalog.find(keys[at]) < 0]
        if turned:
            new.reverse()  # nobody should, and it must not tie a chain to itself
        rows = [catalog.add(keys[at], 100 * number + at, 7, keys[at - 1] if at else None) for at in new]
        catalog.begin(rows, tier, [Slot(at % 2, 100 * number + at) for at in new])
        return
    rows = [row for row in map(catalog.find, keys[first : first + count]) if row >= 0]
    states = {row: catalog.state(row, tier) for row in rows}
    if name == "begin":
        absent = [row for row, state in states.items() if state == CopyState.ABSENT]
        catalog.begin(absent, tier, [Slot(at % 2, 100 * number + at) for at in range(len(absent))])
    elif name == "finish":
        catalog.finish([row for row, state in states.items() if state == CopyState.WRITING], tier)
    elif name == "doom":
        for row in [row for row, state in states.items() if state in {CopyState.WRITING, CopyState.READY}]:
            catalog.doom(row, tier)
    else:
        catalog.unpin([row for row in rows if catalog.pins(row, tier)], tier)
        catalog.drop([row for row, state in reversed(states.items()) if state != CopyState.ABSENT], tier)


def presence_by_states(catalog: Catalog, key: BlockKey) -> Presence:
    row = catalog.find(key)
    if row >= 0 and any(catalog.readable(row, tier) for tier in TIERS):
        return Presence.READY
    writing = row >= 0 and any(catalog.state(row, tier) == CopyState.WRITING for tier in TIERS)
    return Presence.COMING if writing else Presence.NOWHERE


def check_chains(catalog: Catalog) -> None:
    """Each copy hangs on its parent once, and nothing else does."""
    for tier in TIERS:
        columns, hanging = catalog.columns(tier), []
        for row in {*catalog.rows(), *catalog._rows.values()}:
            child = columns.first_child[row]
            while child >= 0:
                assert catalog.keys[child][:-1] == catalog.keys[row] and child not in hanging
                hanging.append(child)
                child = columns.next_child[child]
        assert set(hanging) == {row for row in catalog.rows_in(tier) if catalog.parent(row) is not None}


@settings(max_examples=200)
@given(_acts)
def test_presence_and_chains_are_what_the_copies_make_of_them(acts: list[Any]) -> None:
    catalog = Catalog()
    for number, what in enumerate(acts):
        before = {key: presence_by_states(catalog, key) for key in EVERY_KEY}
        gains, losses = catalog.gains, catalog.losses
        act(catalog, number, what)
        after = {key: presence_by_states(catalog, key) for key in EVERY_KEY}
        assert bytes(after.values()) == catalog.presences(EVERY_KEY)
        assert catalog.gains > gains or not any(after[key] > before[key] for key in EVERY_KEY)
        assert catalog.losses > losses or not any(after[key] < before[key] for key in EVERY_KEY)
        check_chains(catalog)


def test_rows_of_an_earlier_epoch_are_given_back_once() -> None:
    catalog, pair = Catalog(), keys_of("ab")
    old = [catalog.add(pair[0], 1, 0, None), catalog.add(pair[1], 2, 0, pair[0])]
    catalog.begin(old, Tier.CPU, [Slot(0, 0), Slot(0, 1)])
    catalog.finish(old, Tier.CPU)
    catalog.hide_all()
    catalog.drop(old[::-1], Tier.CPU)
    assert len(catalog) == 0
    rows = [catalog.add(key, 9, 1, None) for key in keys_of("abcdefgh")]
    assert len({*rows}) == len(rows)
