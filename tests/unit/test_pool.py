# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.pool_check import check_pool

from kvdisk.blocks import Slot
from kvdisk.manager.pool import SlotPool

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "release", "retain", "commit"]),
        st.integers(0, 1),
        st.integers(1, 12),
        st.lists(st.integers(0, 40), max_size=12),
    ),
    max_size=25,
)
DRIVES = {0: 0, 1: 1, 2: 0}


def runs_of(free: set[Slot]) -> list[int]:
    """Return the lengths of the runs of a set of slots, longest first."""
    starts = [slot for slot in free if Slot(slot.segment, slot.index - 1) not in free]
    lengths = []
    for segment, index in starts:
        length = 1
        while Slot(segment, index + length) in free:
            length += 1
        lengths.append(length)
    return sorted(lengths, reverse=True)


def lengths_of_cuts(lengths: list[int], wanted: int) -> list[int]:
    """Return what is to be cut: of the shortest run that is long enough, else the longest."""
    found = []
    while wanted and lengths:
        length = min((each for each in lengths if each >= wanted), default=lengths[0])
        lengths.remove(length)
        found.append(min(length, wanted))
        wanted -= found[-1]
        lengths = sorted([*lengths, length - found[-1]], reverse=True) if length > found[-1] else lengths
    return found


@given(STEPS)
@example([("take", 0, 4, []), ("retain", 0, 1, [0]), ("commit", 0, 1, [])])
def test_each_slot_is_in_one_place_and_runs_are_cut_as_short_as_they_can_be(steps):
    """Against a pool that looks at every slot."""
    pool = SlotPool(1)
    free, used, awaiting, ticket, committed = set(), [Slot(2, 1)], {}, 0, 0
    for segment, drive in DRIVES.items():
        pool.add_segment(segment, 0, 14, np.array([1], np.uint32) if segment == 2 else None, drive)
        free |= {Slot(segment, index) for index in range(14)} - set(used)
    for step, drive, count, picked in steps:
        back = list(dict.fromkeys(used[at % len(used)] for at in picked)) if used else []
        if step == "take":
            mine = {slot for slot in free if DRIVES[slot.segment] == drive}
            assert pool.free_on(0, (drive,)) == len(mine)
            taken, at = pool.allocate(0, count, drive), 0
            for length in lengths_of_cuts(runs_of(mine), count):
                first = taken[at]
                assert taken[at : at + length] == [Slot(first.segment, first.index + step) for step in range(length)]
                at += length
            assert at == len(taken) == len(set(taken)) and set(taken) <= mine
            free -= set(taken)
            used += taken
            continue
        if step == "commit":
            committed = min(ticket, committed + count // 3)
            pool.free_committed(committed)
            free |= {slot for slot, of in awaiting.items() if of <= committed}
            awaiting = {slot: of for slot, of in awaiting.items() if of > committed}
        elif step == "release":
            pool.release(back)
            free |= set(back)
        else:
            ticket += 1
            pool.retain(back, ticket)
            awaiting |= dict.fromkeys(back, ticket)
        used = [slot for slot in used if slot in set(used) - free - set(awaiting)]
        check_pool(pool)
        assert (pool.free[0], pool.awaiting[0]) == (len(free), len(awaiting))


def test_size_classes_are_apart_and_segments_go():
    pool = SlotPool(2)
    pool.add_segment(0, 0, 2)
    pool.add_segment(1, 1, 2)
    (slot,) = pool.allocate(1, 1)
    assert slot.segment == 1
    pool.retire_segment(1)
    assert (pool.total, pool.free, pool.is_empty(1)) == ([2, 0], [2, 0], False)
    pool.release([slot])
    assert pool.allocate(1, 1) == [] and pool.free == [2, 0] and pool.is_empty(1)
    with pytest.raises(AssertionError):
        pool.release([Slot(0, 0)])  # it is free already
