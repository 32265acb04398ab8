# SPDX-License-Identifier: Apache-2.0
"""The longest hits against their definition, written out, and against the plain way to find them,
block by block."""

from __future__ import annotations

import math
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.blocks import Slot, Tier, make_block_key
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager import catalog as catalogs
from kvdisk.manager import prefix_match
from kvdisk.manager.catalog import Catalog, CopyState
from kvdisk.manager.prefix_match import Hits, Lookups

BLOCKS = 12
SEGMENTS = 3


@st.composite
def geometries(draw):
    sizes = draw(st.sampled_from([(2,), (2, 2), (2, 4), (4, 2, 2), (4, 6)]))
    windows = st.sampled_from([None, None, 1, 2, 3, 4, 5, 9]).map(lambda tokens: {"window_tokens": tokens})
    chunks = st.sampled_from([3, 4, 8]).map(lambda tokens: {"chunk_tokens": tokens})
    groups = tuple(GroupGeometry(at, size, 100, **draw(windows | chunks)) for at, size in enumerate(sizes))
    return Geometry(groups, 1, 2)


def _keys(geometry):
    return [[make_block_key(bytes([position]), group.group) for position in range(BLOCKS)] for group in geometry.groups]


def _is_there(catalog, key, elsewhere, tiers, *, coming):
    row = catalog.find(key)
    if key in elsewhere:
        return True
    for tier in (Tier.CPU, Tier.NVME) if row >= 0 else ():
        if tiers is None or tier in tiers:
            state, columns = catalog.state(row, tier), catalog.columns(tier)
            if state == CopyState.READY:
                is_hidden = catalog.slot(row, tier).segment in columns.hidden
                if not is_hidden and catalog.stored_s[row] >= columns.oldest_s:
                    return True
            elif state == CopyState.WRITING and coming:
                return True
    return False


def _longest_hit(catalog, geometry, keys, local_tokens, limit_tokens, elsewhere, tiers, *, coming):
    step = math.lcm(*(group.block_tokens for group in geometry.groups))
    end = limit_tokens // step * step
    for group in geometry.groups:
        end = min(end, len(keys[group.group]) * group.block_tokens // step * step)
    there = [[_is_there(catalog, key, elsewhere, tiers, coming=coming) for key in group_keys] for group_keys in keys]
    while end > local_tokens:
        if all(
            there[group.group][position]
            for group in geometry.groups
            for position in range(local_tokens // group.block_tokens, end // group.block_tokens)
            # A token is read by the next one at ``end`` if it lies less than a window before it, or
            # in its chunk.
            if (group.window_tokens is None or (position + 1) * group.block_tokens > end - group.window_tokens + 1)
            and (group.chunk_tokens is None or (position + 1) * group.block_tokens > end - end % group.chunk_tokens)
        ):
            return end
        end -= step
    return local_tokens


def _change(catalog, key, tier, segment, step):
    """Take the copy of a block in a tier one step on in its life; ``step`` chooses among what can
    happen to it."""
    row = catalog.find(key)
    if row < 0:
        (row,) = catalog.add([key], [1], 0, [None])
        catalog.stored_s[row] = key[0]  # those behind are younger
    state = catalog.state(row, tier)
    if state == CopyState.ABSENT:
        catalog.begin((row,), tier, (Slot(segment, 0),))
    elif state == CopyState.WRITING and step:
        catalog.finish((row,), tier)
    elif state == CopyState.READY and step == 2:
        catalog.drop(row, tier)
    else:
        if catalog.pins(row, tier):
            catalog.unpin((row,), tier)
        catalog.end((row,), tier)


POSITIONS = st.integers(0, BLOCKS - 1)
# Long runs of blocks that are there make hits: so often a whole run changes at once.
CHANGES = st.tuples(
    st.just("change"),
    st.integers(0, 2),
    POSITIONS,
    st.sampled_from((1, 1, 2, BLOCKS)),
    st.sampled_from((Tier.CPU, Tier.NVME)),
    st.integers(0, SEGMENTS - 1),
    st.sampled_from((0, 1, 1, 1, 2)),
)
EVENTS = st.one_of(
    CHANGES,
    CHANGES,
    CHANGES,
    st.tuples(st.just("hide"), st.frozensets(st.integers(0, SEGMENTS - 1))),
    st.tuples(st.just("elsewhere"), st.integers(0, 2), st.frozensets(POSITIONS, max_size=4)),
    st.tuples(st.just("usable"), st.booleans()),
    st.tuples(st.just("older"), st.integers(-2, 2)),
    st.tuples(st.just("hashed"), st.integers(0, BLOCKS)),
    st.tuples(st.just("weights"), st.integers(0, 7)),
    st.tuples(st.just("ask"), st.integers(0, 3), st.integers(0, 2 * BLOCKS)),
)


TIERS = (None, None, {Tier.CPU}, {Tier.CPU, Tier.REMOTE}, {Tier.NVME}, {Tier.CPU, Tier.NVME})


@mock.patch.object(catalogs, "_GROWN_ROWS", 1)  # so that the last row is in use
@given(
    geometries(),
    st.sampled_from(TIERS),
    st.booleans(),
    st.lists(EVENTS, min_size=1, max_size=40),
    st.sampled_from((1, 3, 256)),
    st.sampled_from((0, 8)),
)
@settings(max_examples=300)
def test_what_is_remembered_is_what_would_be_found(geometry, tiers, full, events, span, few):
    all_keys = _keys(geometry)
    catalog, lookups = Catalog(), Lookups()
    for key in [key for group_keys in all_keys for key in group_keys if full] * 2:
        _change(catalog, key, Tier.NVME, 0, 1)
    keys = [group_keys[: BLOCKS // 2] for group_keys in all_keys]
    hints, usable, changes, oldest_s = frozenset(), True, 0, 0
    local, limit = 0, 2 * BLOCKS
    for name, *event in events:
        if name == "change":
            group, first, count, tier, segment, step = event
            for key in all_keys[group % len(keys)][first : first + count]:
                _change(catalog, key, tier, segment, step)
        elif name == "hide":
            catalog.hide(Tier.NVME, event[0])
        elif name == "elsewhere":
            hints = frozenset(all_keys[event[0] % len(keys)][position] for position in event[1])
            changes += 1
        elif name == "usable":  # what is hinted may not be read now, which changes no hint
            usable = event[0]
        elif name == "older":
            oldest_s = max(0, oldest_s + event[0])  # a clock may go back, too
            catalog.limit_ages(oldest_s, catalogs.LATEST_S)
        elif name == "hashed":
            keys = [group_keys[: max(event[0], len(mine))] for group_keys, mine in zip(all_keys, keys, strict=True)]
        elif name == "weights" and event[0] == 0:
            catalog.hide_all()
        elif name == "ask":
            local, limit = event[0] * geometry.alignment_tokens, event[1]
        places = (catalog, geometry, keys, local, limit, hints if usable else frozenset())
        with mock.patch.object(prefix_match, "_SPAN", span), mock.patch.object(catalogs, "_FEW", few):
            found = lookups.hits(*places, changes, tiers)
        places += (tiers,)
        assert found == Hits(_longest_hit(*places, coming=False), _longest_hit(*places, coming=True))


def _store(catalog, names, tier=Tier.NVME):
    """Store blocks, each named by a letter; return their keys."""
    keys = [make_block_key(name.encode(), 0) for name in names]
    rows = catalog.add(keys, [1] * len(keys), 0, [None] * len(keys))
    catalog.begin(rows, tier, [Slot(0, row) for row in rows])
    catalog.finish(rows, tier)
    return keys


def test_the_row_of_a_block_that_has_left_says_nothing_of_it_when_another_block_has_it():
    geometry, catalog, lookups = Geometry((GroupGeometry(0, 2, 100),), 1, 2), Catalog(), Lookups()
    keys = _store(catalog, "abc")
    assert lookups.hits(catalog, geometry, [keys], 0, 6).ready == 6
    row = catalog.find(keys[1])
    catalog.end((row,), Tier.NVME)
    (other,) = _store(catalog, "x")
    assert catalog.find(other) == row
    assert lookups.hits(catalog, geometry, [keys], 0, 6).ready == 2


def test_the_rows_of_an_earlier_epoch_say_nothing_of_this_one():
    geometry, catalog, lookups = Geometry((GroupGeometry(0, 2, 100),), 1, 2), Catalog(), Lookups()
    keys = _store(catalog, "abc")
    assert lookups.hits(catalog, geometry, [keys], 0, 6).ready == 6
    catalog.hide_all()
    _store(catalog, "x")
    assert lookups.hits(catalog, geometry, [keys], 0, 6).ready == 0
