# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.errors import ConfigError
from kvdisk.geometry import AUTO, Geometry, GroupGeometry, contiguous_runs, in_units, share_slots


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 5))
def test_runs_cover_everything_in_order(indices, longest):
    runs = contiguous_runs(indices, longest)
    assert [at for start, count in runs for at in range(start, start + count)] == list(range(len(indices)))
    for start, count in runs:
        assert 1 <= count <= longest
        assert indices[start : start + count] == list(range(indices[start], indices[start] + count))
    for (start, count), (follower, _) in pairwise(runs):
        assert count == longest or indices[follower] != indices[start + count - 1] + 1, "cut without need"


def test_size_classes_share_a_tier_by_what_a_token_needs():
    geometry = Geometry((GroupGeometry(0, 16, 4096), GroupGeometry(1, 16, 12288), GroupGeometry(2, 32, 4000)), 2, 16)
    assert geometry.slot_sizes == (8192, 16384)
    assert geometry.size_classes == (0, 1, 0)
    small, large = geometry.shares
    assert small + large == pytest.approx(1)
    assert large / small == pytest.approx((16384 / 16) / (8192 / 16 + 8192 / 32))
    for slots, size, share in zip(geometry.memory_slots(1 << 20), geometry.slot_sizes, geometry.shares, strict=True):
        assert slots * size <= (1 << 20) / 2 * share < (slots + 1) * size


def test_recurrent_states_take_what_prompts_use():
    """One that nearly fills a slot of the attention's has no share of its own, another a small
    one."""
    attention = GroupGeometry(0, 16, 3 * 4096)
    states = [GroupGeometry(at, 16, size, 2, state_tokens=256) for at, size in enumerate((11 * 1024, 5000, 13000), 1)]
    groups = share_slots([attention, *states])
    assert [group.slot_bytes for group in groups] == [16384, 16384, 12288, 20480]
    assert [group.payload_bytes for group in groups] == [12288, 11 * 1024, 5000, 13000], "and are as large as before"
    geometry = Geometry(groups, 1, 16)
    assert geometry.size_classes == (1, 1, 0, 2)
    small, shared, large = geometry.shares
    assert small / shared == pytest.approx((12288 / 256) / (16384 / 16 + 16384 / 256))
    assert large / small == pytest.approx(20480 / 12288)
    assert geometry.tokens_in((10, 170, 10)) == 10 * 256, "the states of a class of their own end first"
    assert geometry.tokens_in((100, 170, 100)) == 160 * 16, "160 blocks of attention, and a state for each 16 of them"


KIB = 1024
FULL, WINDOW = GroupGeometry(0, 16, 64 * KIB), GroupGeometry(0, 16, 64 * KIB, window_tokens=128)


@pytest.mark.parametrize(
    ("group", "unit_tokens", "count"),
    [
        (FULL, 64, 4),
        (FULL, 16, 1),
        (FULL, AUTO, 8),
        (FULL, 4096, 256),
        (replace(FULL, payload_bytes=300 * KIB), AUTO, 2),
        (replace(FULL, payload_bytes=2048 * KIB), AUTO, 1),
        (replace(FULL, block_tokens=256), AUTO, 1),
        (WINDOW, 64, 4),
        (WINDOW, AUTO, 4),
        (replace(WINDOW, volatile_tokens=3), 32, 2),
        (replace(WINDOW, volatile_tokens=3), AUTO, 1),
        (replace(FULL, volatile_tokens=1), AUTO, 1),
        (replace(FULL, chunk_tokens=96), AUTO, 2),
        (replace(FULL, window_tokens=2, state_tokens=256), AUTO, 1),
    ],
)
def test_units(group, unit_tokens, count):
    (unit,) = in_units([group], unit_tokens)
    assert unit.gpu_blocks == count and unit.gpu_block_tokens == group.block_tokens
    assert (unit.block_tokens, unit.payload_bytes) == (count * group.block_tokens, count * group.payload_bytes)


@pytest.mark.parametrize(
    ("group", "unit_tokens"),
    [(FULL, 24), (FULL, 8), (FULL, 8192), (WINDOW, 128), (replace(FULL, window_tokens=2, state_tokens=256), 64)],
)
def test_units_that_no_group_can_have(group, unit_tokens):
    with pytest.raises(ConfigError, match=f"unit_tokens {unit_tokens} fits no KV-cache group"):
        in_units([group], unit_tokens)


@pytest.mark.parametrize(
    ("sizes", "states", "unit_tokens", "found"),
    [
        ((16,), (16,), AUTO, (16,)),
        ((16,), (16,), 64, (16,)),
        ((16,), (528,), AUTO, (16,)),
        ((16, 32), (544, 96), AUTO, (32, 32)),
        ((16,), (512,), AUTO, (128,)),
        ((16,), (512,), 64, (64,)),
        ((16,), (512,), 1024, (16,)),
        ((16, 48), (), AUTO, (32, 96)),
        ((16, 528), (), AUTO, (16, 528)),
        ((16, 64), (), AUTO, (128, 128)),
    ],
)
def test_a_unit_ends_with_each_block_of_states_and_with_those_of_other_groups(sizes, states, unit_tokens, found):
    """A hit ends with one of each group. Of a prompt there may be one state, after its last whole
    block."""
    groups = [replace(FULL, block_tokens=tokens, payload_bytes=1024) for tokens in sizes]
    groups += [replace(FULL, block_tokens=tokens, window_tokens=2, state_tokens=tokens) for tokens in states]
    groups = [replace(group, group=at) for at, group in enumerate(groups)]
    units = in_units(groups, unit_tokens)
    assert tuple(unit.block_tokens for unit in units) == (*found, *states)
    blocks, hits = (Geometry(tuple(each), 1, 16).alignment_tokens for each in (groups, units))
    assert hits == blocks or (not states and hits <= 128)


def test_groups_that_cannot_have_a_unit_keep_their_blocks():
    assert [group.gpu_blocks for group in in_units([FULL, WINDOW], 128)] == [8, 1]
