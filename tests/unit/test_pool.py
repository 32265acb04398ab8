# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pool_check import check_pool

from kvdisk.blocks import Slot
from kvdisk.manager.pool import SlotPool

STEPS = st.lists(st.tuples(st.sampled_from(["take", "release", "retain", "commit"]), st.integers(1, 5)), max_size=60)
DRIVES = {0: 0, 1: 1, 2: 0}
TURNS = st.lists(
    st.tuples(st.sampled_from([0, 1]), st.integers(1, 12), st.lists(st.integers(0, 40), max_size=12)), max_size=25
)
LONG = 256


@given(STEPS)
def test_a_slot_is_in_one_place_at_a_time(steps):
    pool = SlotPool(1)
    pool.add_segment(3, 0, 5)
    pool.add_segment(7, 0, 4, used=np.array([1], np.uint32))
    everything = {Slot(3, index) for index in range(5)} | {Slot(7, index) for index in range(4)}
    used, limbo, ticket, committed = {Slot(7, 1)}, {}, 0, 0
    for step, number in steps:
        if step == "take":
            free = len(everything) - len(used) - len(limbo)
            taken = pool.allocate(0, number)
            assert len(taken) == min(number, free)
            assert not set(taken) & (used | set(limbo))
            used |= set(taken)
        elif step == "release":
            given_back = sorted(used)[:number]
            pool.release(given_back)
            used -= set(given_back)
        elif step == "retain":
            ticket += 1
            given_back = sorted(used)[:number]
            pool.retain(given_back, ticket)
            used -= set(given_back)
            limbo |= dict.fromkeys(given_back, ticket)
        else:
            committed = min(ticket, committed + number // 3)
            pool.settle_limbo(committed)
            limbo = {slot: of for slot, of in limbo.items() if of > committed}
        check_pool(pool)
        assert (pool.free[0], pool.limbo[0]) == (len(everything) - len(used) - len(limbo), len(limbo))


def test_size_classes_are_apart_and_segments_go():
    pool = SlotPool(2)
    pool.add_segment(0, 0, 2)
    pool.add_segment(1, 1, 2)
    (slot,) = pool.allocate(1, 1)
    assert slot.segment == 1
    pool.retire_segment(1)
    assert (pool.total, pool.free) == ([2, 0], [2, 0])
    pool.release([slot])  # comes too late, and changes nothing
    assert pool.allocate(1, 1) == []
    with pytest.raises(AssertionError):
        pool.release([Slot(0, 0)])  # it is free already


def runs_of(free):
    """Return the lengths of the runs of a set of slots, longest first."""
    starts = [slot for slot in free if Slot(slot.segment, slot.index - 1) not in free]
    lengths = []
    for segment, index in starts:
        length = 1
        while Slot(segment, index + length) in free:
            length += 1
        lengths.append(length)
    return sorted(lengths, reverse=True)


@given(TURNS)
def test_the_shortest_run_that_is_long_enough_is_cut_else_the_longest_are_used_up(turns):
    """Against a pool that looks at every slot."""
    pool = SlotPool(1)
    free, used = set(), []
    for segment, drive in DRIVES.items():
        pool.add_segment(segment, 0, 14, drive=drive)
        free |= {Slot(segment, index) for index in range(14)}
    for drive, count, gone in turns:
        mine = {slot for slot in free if DRIVES[slot.segment] == drive}
        assert pool.free_on(0, (drive,)) == len(mine)
        lengths, expected, wanted = runs_of(mine), [], min(count, len(mine))
        while wanted:
            enough = [length for length in lengths if length >= wanted]
            length = min(enough) if enough else lengths[0]
            lengths.remove(length)
            expected.append(min(length, wanted))
            wanted -= expected[-1]
            if length > expected[-1]:
                lengths = sorted([*lengths, length - expected[-1]], reverse=True)
        taken = pool.allocate(0, count, drive)
        assert set(taken) <= mine and len(set(taken)) == len(taken) == sum(expected)
        # Runs of different segments, or taken one after the other, may touch: so they are compared
        # as they came.
        at = 0
        for length in expected:
            first = taken[at]
            assert taken[at : at + length] == [Slot(first.segment, first.index + step) for step in range(length)]
            at += length
        assert runs_of(mine - set(taken)) == lengths
        free -= set(taken)
        used += taken
        back = list(dict.fromkeys(used[at % len(used)] for at in gone)) if used else []
        pool.release(back)
        used = [slot for slot in used if slot not in back]
        free |= set(back)
        check_pool(pool)


@pytest.mark.parametrize("order", [range(10), range(9, -1, -1), [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]])
def test_what_comes_free_in_any_order_is_one_run_again(order):
    pool = SlotPool(1)
    pool.add_segment(4, 0, 10)
    slots = pool.allocate(0, 10)
    pool.release([slots[at] for at in order])
    check_pool(pool)
    assert pool.allocate(0, 10) == slots
