# SPDX-License-Identifier: Apache-2.0
"""The longest hit against its definition, written out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvdisk.blocks import Slot, Tier, make_block_key
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.lookup import longest_hit

BLOCKS = 12


@st.composite
def situations(draw):
    sizes = draw(st.sampled_from([(2,), (2, 2), (2, 4), (4, 2, 2)]))
    windows = [draw(st.sampled_from([None, 1, 2, 3, 4, 5, 9])) for _ in sizes]
    groups = tuple(
        GroupGeometry(at, size, 100, window) for at, (size, window) in enumerate(zip(sizes, windows, strict=True))
    )
    states = [draw(st.lists(st.sampled_from("rrrrwn"), min_size=BLOCKS, max_size=BLOCKS)) for _ in sizes]
    step = max(sizes)
    local = draw(st.integers(0, 3)) * step
    return Geometry(groups, 1, 2), states, local, draw(st.integers(local, BLOCKS * 2))


def _catalog(states):
    catalog, keys = Catalog(), []
    for group, row_states in enumerate(states):
        keys.append([make_block_key(bytes([position]), group) for position in range(BLOCKS)])
        for position, state in enumerate(row_states):
            if state == "n":
                continue
            row = catalog.add(keys[group][position], 1, 0, None)
            tier = Tier.CPU if position % 2 else Tier.NVME
            catalog.begin(row, tier, Slot(group, position))
            if state == "r":
                catalog.finish(row, tier)
    return catalog, keys


def _by_definition(geometry, states, local, limit, there):
    step = max(group.block_tokens for group in geometry.groups)
    for end in range(limit // step * step, local, -step):
        if all(
            states[group.group][position] in there
            for group in geometry.groups
            for position in range(local // group.block_tokens, end // group.block_tokens)
            # A token is read by the next one at ``end`` if it lies less than a window before it.
            if group.window_tokens is None or (position + 1) * group.block_tokens > end - group.window_tokens + 1
        ):
            return end
    return local


@given(situations())
def test_the_longest_hit(situation):
    geometry, states, local, limit = situation
    limit = min(limit, *(BLOCKS * group.block_tokens for group in geometry.groups))
    catalog, keys = _catalog(states)
    for coming, there in ((False, "r"), (True, "rw")):
        expected = _by_definition(geometry, states, local, limit, there)
        assert longest_hit(catalog, geometry, keys, local, limit, coming=coming) == expected
