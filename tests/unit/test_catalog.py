# SPDX-License-Identifier: Apache-2.0
"""Rows of the catalog, and what it says of blocks, after whatever was done to many of their copies
at once. ``test_lookup`` shows what can be loaded of them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.blocks import KEPT_TIERS, BlockKey, Slot, Tier
from kvdisk.manager.catalog import ABSENT, READY, WRITING, Catalog

PATHS = (b"abcdef", b"abcxyz", b"abq", b"mn")
"""Chains, of which some begin alike: a key is the whole path up to a block."""
KEYS = {path: [BlockKey(path[: end + 1]) for end in range(len(path))] for path in PATHS}
EVERY_KEY = sorted({key for keys in KEYS.values() for key in keys})
ACTS = ("store", "store", "begin", "begin", "finish", "finish", "finish", "drop", "end", "hide")
Act = tuple[str, bytes, int, int, Tier, bool]
_act = st.tuples(*map(st.sampled_from, (ACTS, PATHS, range(4), range(1, 7), KEPT_TIERS, (False, True))))


def act(catalog: Catalog, number: int, what: Act) -> None:
    """Do to those blocks of a path what can be done to them."""
    name, path, first, count, tier, turned = what
    keys = KEYS[path]
    found = [(at, catalog.find(keys[at])) for at in range(first, min(first + count, len(keys)))]
    rows = [row for _, row in found if row >= 0]
    states = {row: catalog.state(row, tier) for row in rows}
    if name == "hide":
        catalog.hide(Tier.NVME, frozenset({count % 2} if turned else ()))
    elif name == "store":
        new = [at for at, row in found if row < 0]
        if turned:
            new.reverse()  # nobody should, and it must not tie a chain to itself
        rows = [catalog.add([keys[at]], [100 * number + at], 7, [keys[at - 1] if at else None])[0] for at in new]
        catalog.begin(rows, tier, [Slot(at % 2, 100 * number + at) for at in new])
    elif name == "begin":
        absent = [row for row in rows if states[row] == ABSENT]
        catalog.begin(absent, tier, [Slot(at % 2, 100 * number + at) for at in range(len(absent))])
    elif name == "finish":
        catalog.finish([row for row in rows if states[row] == WRITING], tier)
    elif name == "drop":
        for row in rows:
            if states[row] in {WRITING, READY}:
                catalog.drop(row, tier)
    else:
        catalog.unpin([row for row in rows if catalog.pins(row, tier)], tier)
        catalog.end([row for row in reversed(rows) if states[row] != ABSENT], tier)


def presence(catalog: Catalog, key: BlockKey) -> int:
    row = catalog.find(key)
    if catalog.readable_tier(row) is not None:
        return READY
    return WRITING if row >= 0 and any(catalog.state(row, tier) == WRITING for tier in KEPT_TIERS) else ABSENT


def check_chains(catalog: Catalog) -> None:
    """Each copy hangs on its parent once, and nothing else does."""
    for tier in KEPT_TIERS:
        columns, hanging = catalog.columns(tier), []
        for row, first in enumerate(columns.first_child):
            child = first
            while child >= 0:
                assert catalog.keys[child][:-1] == catalog.keys[row]
                hanging.append(child)
                child = columns.next_child[child]
        assert sorted(hanging) == [row for row in catalog.rows_in(tier) if catalog.parent(row) is not None]


@settings(max_examples=200)
@given(st.lists(_act, min_size=8, max_size=40))
def test_presence_and_chains_are_what_the_copies_make_of_them(acts: list[Act]) -> None:
    catalog = Catalog()
    after = dict.fromkeys(EVERY_KEY, 0)
    for number, what in enumerate(acts):
        before, gains, losses = after, catalog.gains, catalog.losses
        act(catalog, number, what)
        after = {key: presence(catalog, key) for key in EVERY_KEY}
        assert bytes(after.values()) == catalog.presences(EVERY_KEY)
        assert catalog.gains > gains or not any(after[key] > before[key] for key in EVERY_KEY)
        assert catalog.losses > losses or not any(after[key] < before[key] for key in EVERY_KEY)
        check_chains(catalog)


def test_rows_of_an_earlier_epoch_are_given_back_once() -> None:
    catalog, pair = Catalog(), [BlockKey(b"a"), BlockKey(b"ab")]
    old = catalog.add(pair, [1, 2], 0, [None, pair[0]])
    catalog.begin(old, Tier.CPU, [Slot(0, 0), Slot(0, 1)])
    catalog.finish(old, Tier.CPU)
    catalog.hide_all()
    catalog.end(old[::-1], Tier.CPU)
    assert len(catalog) == 0
    rows = catalog.add([BlockKey(b"%d" % number) for number in range(8)], [9] * 8, 1, [None] * 8)
    assert len({*rows}) == len(rows)


@settings(max_examples=300)
@given(st.lists(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 8)), max_size=5), max_size=6), st.data())
def test_no_chain_comes_back_to_itself_whatever_is_named_as_parents(
    puts: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    """A parent of 8: none. Blocks come and go between; one that others follow comes back."""
    keys, catalog = [BlockKey(bytes([number])) for number in range(8)], Catalog()
    for number, pairs in enumerate(puts):
        new = {key: parent for key, parent in pairs if catalog.find(keys[key]) < 0 and key != parent}
        parents = [keys[parent] if parent < 8 else None for parent in new.values()]
        rows = catalog.add([keys[key] for key in new], range(len(new)), 7, parents)
        catalog.begin(rows, Tier.NVME, [Slot(number, at) for at in range(len(rows))])
        catalog.finish(rows, Tier.NVME)
        for row in catalog.rows_in(Tier.NVME):
            named, above = catalog.keys[row], [catalog.parent(row)]
            while above[-1] is not None:
                assert above[-1] != named and len(above) <= len(keys), "it follows itself"
                above.append(catalog.parent(catalog._rows[above[-1]]))
        followers = Counter(catalog.parent(row) for row in catalog.rows_in(Tier.NVME))
        for row in catalog.rows_in(Tier.NVME):
            assert catalog.follower_count(row) == followers[catalog.keys[row]]
        for row in catalog.rows_in(Tier.NVME):
            if data.draw(st.booleans()):
                catalog.end([row], Tier.NVME)
    # What was named, and no circle, is what they follow.
    catalog = Catalog()
    rows = catalog.add(keys[:4], range(4), 7, [keys[3], keys[0], keys[1], keys[7]])
    assert [catalog.parent(row) for row in rows] == [keys[3], keys[0], keys[1], keys[7]]
