# SPDX-License-Identifier: Apache-2.0
"""What the catalog does for many blocks at once is what it does for each: rows, links, states,
counts and journal."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey, Slot, Tier
from kvdisk.manager.catalog import Catalog, CopyState, Presence
from kvdisk.manager.events import Journal
from kvdisk.stats import Stats

PATHS = ("abcdef", "abcxyz", "abq", "mn")
"""Chains, of which some begin alike: a key is the whole path up to a block, as vLLM's hashes
are."""


def keys_of(path: str) -> list[BlockKey]:
    return [BlockKey(path[: end + 1].encode()) for end in range(len(path))]


PAIR = [BlockKey(b"a"), BlockKey(b"ab")]


def facts(catalog: Catalog) -> dict[BlockKey, tuple[object, ...]]:
    """Return what is known of each block, by key and not by row."""
    found = {}
    for key, row in catalog._rows.items():
        parent_row = catalog.parent_rows[row]
        children = set()
        for tier in Tier.CPU, Tier.NVME:
            child = catalog.columns(tier).first_child[row]
            while child >= 0:
                assert (tier, catalog.keys[child]) not in children, "a chain that is tied to itself"
                children.add((tier, catalog.keys[child]))
                child = catalog.columns(tier).next_child[child]
        found[key] = (
            catalog.generations[row],
            catalog.epochs[row],
            catalog.parent(row),
            catalog.keys[parent_row] if parent_row >= 0 else None,
            frozenset(children),
            tuple(catalog.state(row, tier) for tier in (Tier.CPU, Tier.NVME)),
            tuple(catalog.pins(row, tier) for tier in (Tier.CPU, Tier.NVME)),
            catalog.is_ready(row),
        )
    return found


_acts = st.lists(
    st.tuples(
        st.sampled_from(("store", "store", "begin", "begin", "finish", "finish", "finish", "doom", "drop", "hide")),
        st.sampled_from(PATHS),
        st.integers(0, 3),
        st.integers(1, 6),
        st.sampled_from((Tier.CPU, Tier.NVME)),
        st.booleans(),
    ),
    min_size=8,
    max_size=40,
)


class Each:
    """A catalog that is told of each copy by itself."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def begin(self, rows: list[int], tier: Tier, slots: list[Slot]) -> None:
        for row, slot in zip(rows, slots, strict=True):
            self._catalog.begin([row], tier, [slot])

    def finish(self, rows: list[int], tier: Tier) -> None:
        for row in rows:
            self._catalog.finish([row], tier)

    def drop(self, rows: list[int], tier: Tier) -> None:
        for row in rows:
            self._catalog.drop([row], tier)


def act(catalog: Catalog, teller: Any, number: int, what: Any) -> None:
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
        teller.begin(rows, tier, [Slot(at % 2, 100 * number + at) for at in new])
        return
    rows = [row for row in map(catalog.find, keys[first : first + count]) if row >= 0]
    states = {row: catalog.state(row, tier) for row in rows}
    if name == "begin":
        absent = [row for row, state in states.items() if state == CopyState.ABSENT]
        teller.begin(absent, tier, [Slot(at % 2, 100 * number + at) for at in range(len(absent))])
    elif name == "finish":
        teller.finish([row for row, state in states.items() if state == CopyState.WRITING], tier)
    elif name == "doom":
        for row in [row for row, state in states.items() if state in {CopyState.WRITING, CopyState.READY}]:
            catalog.doom(row, tier)
    else:
        catalog.unpin([row for row in rows if catalog.pins(row, tier)], tier)
        teller.drop([row for row, state in reversed(states.items()) if state != CopyState.ABSENT], tier)


def presence_by_states(catalog: Catalog, key: BlockKey) -> Presence:
    row = catalog.find(key)
    tiers = (Tier.CPU, Tier.NVME)
    if row >= 0 and any(catalog.readable(row, tier) for tier in tiers):
        return Presence.READY
    writing = row >= 0 and any(catalog.state(row, tier) == CopyState.WRITING for tier in tiers)
    return Presence.COMING if writing else Presence.NOWHERE


@settings(max_examples=200)
@given(_acts, st.booleans())
def test_many_at_once_are_one_after_the_other(acts: list[Any], listens: bool) -> None:
    together, singly = Catalog(), Catalog()
    for catalog in (together, singly):
        catalog.journal = Journal(Stats()) if listens else None
    for number, what in enumerate(acts):
        before = {key: presence_by_states(together, key) for path in PATHS for key in keys_of(path)}
        counts = (together.gains, together.losses)
        act(together, together, number, what)
        act(singly, Each(singly), number, what)
        assert facts(together) == facts(singly)
        assert (together.gains, together.losses) == (singly.gains, singly.losses)
        assert together._rows.keys() == singly._rows.keys()
        if together.journal is not None and singly.journal is not None:
            assert together.journal.take() == singly.journal.take()
        after = {key: presence_by_states(together, key) for key in before}
        assert bytes(after.values()) == together.presences(list(after))
        assert together.gains > counts[0] or not any(after[key] > before[key] for key in after)
        assert together.losses > counts[1] or not any(after[key] < before[key] for key in after)


def test_rows_of_an_earlier_epoch_are_given_back_once() -> None:
    catalog = Catalog()
    old = [
        catalog.add(key, at + 1, 0, parent) for at, (key, parent) in enumerate(zip(PAIR, (None, PAIR[0]), strict=True))
    ]
    catalog.begin(old, Tier.CPU, [Slot(0, 0), Slot(0, 1)])
    catalog.finish(old, Tier.CPU)
    catalog.hide_all()
    catalog.drop(old[::-1], Tier.CPU)
    assert len(catalog) == 0
    rows = [catalog.add(key, 9, 1, None) for key in keys_of("abcdefgh")]
    assert len({*rows}) == len(rows)
