# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.blocks import Slot
from kvdisk.manager.pool import SlotPool

STEPS = st.lists(st.tuples(st.sampled_from(["take", "release", "retain", "commit"]), st.integers(1, 5)), max_size=60)


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
            committed = min(ticket, committed + number)
            pool.settle_limbo(committed)
            limbo = {slot: of for slot, of in limbo.items() if of > committed}
        pool.check()
        assert (pool.free[0], pool.limbo[0]) == (len(everything) - len(used) - len(limbo), len(limbo))


def test_slots_come_in_one_run_where_there_is_one():
    pool = SlotPool(1)
    pool.add_segment(0, 0, 10)
    first = pool.allocate(0, 10)
    pool.release([first[1], *first[4:8]])
    assert pool.allocate(0, 4) == first[4:8], "the run, not the hole before it"
    assert pool.allocate(0, 4) == [first[1]]


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
