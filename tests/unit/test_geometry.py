# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.errors import ConfigError
from kvdisk.geometry import AUTO, OFF, Geometry, GroupGeometry, UnitChoice, contiguous_runs, in_units, share_slots


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


KIB, MILLION = 1024, 1 << 20
FULL, WINDOW = GroupGeometry(0, 16, 64 * KIB), GroupGeometry(0, 16, 64 * KIB, window_tokens=128)


@pytest.mark.parametrize(
    ("group", "unit_tokens", "count"),
    [
        (FULL, 64, 4),
        (FULL, 16, 1),
        (FULL, 4096, 256),
        (FULL, OFF, 1),
        (FULL, AUTO, 8),
        (replace(FULL, payload_bytes=2048 * KIB), AUTO, 8),
        (replace(FULL, payload_bytes=3072 * KIB), AUTO, 4),
        (replace(FULL, block_tokens=64), AUTO, 2),
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
    (unit,) = in_units([group], unit_tokens, MILLION)
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
    units = in_units(groups, unit_tokens, MILLION)
    assert tuple(unit.block_tokens for unit in units) == (*found, *states)
    blocks, hits = (Geometry(tuple(each), 1, 16).alignment_tokens for each in (groups, units))
    assert hits == blocks or (not states and hits <= 128)


def of_seven(**more):
    """A model with six groups of windows beside one that reads all."""
    windows = [replace(FULL, group=at, window_tokens=1024, **more) for at in range(1, 7)]
    return [replace(FULL, **more), *windows]


@pytest.mark.parametrize(
    ("groups", "longest_tokens", "found"),
    [
        ([FULL], 0, 16),
        ([FULL], 32_768, 16),
        ([FULL], 131_072, 16),
        ([FULL], 131_073, 32),
        ([FULL], 262_144, 32),
        ([FULL], 524_288, 64),
        ([FULL], 1_000_000, 128),
        ([FULL], 10_000_000, 128),
        (of_seven(), 18_000, 16),
        (of_seven(), 32_768, 32),
        (of_seven(), 131_072, 128),
        (of_seven(), 1_000_000, 128),
        ([replace(FULL, block_tokens=64)], 524_288, 64),
        ([replace(FULL, block_tokens=64)], 1_000_000, 128),
        ([replace(FULL, block_tokens=48)], 1_000_000, 96),
    ],
)
def test_auto_goes_by_the_longest_prompt(groups, longest_tokens, found):
    """A prompt that long has some 8,192 units at most in all groups, unless they would be long."""
    units = in_units(groups, AUTO, longest_tokens)
    assert {unit.block_tokens for unit in units} == {found}
    if found == groups[0].block_tokens:
        assert units == tuple(groups), "a short context keeps what it has"
    assert found > 64 or sum(-(-longest_tokens // unit.block_tokens) for unit in units) <= 8192


@pytest.mark.parametrize(
    ("memory_bytes", "drive_bytes", "found"),
    [
        ((), (), 128),
        ((0,), (0, 0), 128),
        ((256 << 20,), (), 128),
        ((128 << 20,), (), 64),
        ((64 << 20,), (), 32),
        ((16 << 20,), (), 16),
        ((8 << 30,), (128 << 20, 0), 64),
        ((8 << 30,), (1 << 40, 64 << 20), 32),
    ],
)
def test_auto_leaves_each_tier_room_for_some_hundred_units(memory_bytes, drive_bytes, found):
    """Of 3.5 KiB a token, with a header for each slot."""
    plain = Geometry((replace(FULL, payload_bytes=56 * KIB),), 1, 16)
    units = UnitChoice(AUTO, MILLION, memory_bytes, drive_bytes).of(plain)
    assert units.groups[0].block_tokens == found
    if found > 16:
        assert all(size / units.slot_sizes[0] >= 400 for size in (*memory_bytes, *drive_bytes) if size)
    ranks = Geometry(plain.groups, 4, 16)
    times_four = UnitChoice(AUTO, MILLION, *([4 * size for size in each] for each in (memory_bytes, drive_bytes)))
    assert times_four.of(ranks).groups == units.groups, "the bytes of all ranks"
    shared = Geometry(plain.groups, 4, 16, replicated=True)
    in_memory = UnitChoice(AUTO, MILLION, tuple(4 * size for size in memory_bytes), drive_bytes)
    assert in_memory.of(shared).groups == units.groups, "MLA: a drive has one shard of a block"


def test_states_get_the_slots_of_units_that_are_as_large():
    """The slots are shared as ``share_slots`` says, after the units are chosen."""
    state = replace(FULL, group=1, payload_bytes=500 * KIB, block_tokens=512, window_tokens=2, state_tokens=512)
    units = UnitChoice(AUTO, MILLION).of(Geometry((FULL, state), 1, 16))
    assert len(units.slot_sizes) == 1 and units.groups[0].gpu_blocks == 8


def test_groups_that_cannot_have_a_unit_keep_their_blocks():
    assert [group.gpu_blocks for group in in_units([FULL, WINDOW], 128)] == [8, 1]
