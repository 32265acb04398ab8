# SPDX-License-Identifier: Apache-2.0
"""The eviction policies: what each proposes, and in which order."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey
from kvdisk.config import EVICTIONS
from kvdisk.manager.eviction import EvictionPolicy, make_eviction
from kvdisk.manager.reuse import ReuseHistory

KEYS = [BlockKey(b"key %d" % row) for row in range(2000)]
STEPS = st.lists(st.tuples(st.sampled_from(["insert", "touch", "remove", "park"]), st.integers(0, 7)), max_size=60)


def order_of(policy: EvictionPolicy) -> list[int]:
    return [row for _, row in policy.proposals()]


@pytest.mark.parametrize("name", EVICTIONS)
@given(STEPS, st.permutations(range(8)).flatmap(lambda rows: st.integers(0, 8).map(lambda count: rows[:count])))
def test_every_policy_proposes_each_row_that_it_has_and_lru_in_its_order(name, steps, filled):
    history = ReuseHistory()
    policy, model, parked = make_eviction(name, KEYS, history), OrderedDict.fromkeys(filled), set()
    policy.fill(np.array(filled, np.int32), np.arange(len(filled), dtype=np.uint32))
    for step, row in steps:
        history.count(KEYS, row, row + 1, 0)
        if step == "insert" and row not in model:
            policy.insert((row,))
            model[row] = None
        elif step == "touch":
            policy.touch((row,))
            if row in model:
                model.move_to_end(row)
            parked.discard(row)
        elif step == "remove":
            policy.remove((row,))
            model.pop(row, None)
            parked.discard(row)
        elif step == "park" and (proposed := order_of(policy)):
            policy.park(proposed[0])
            parked.add(proposed[0])
        proposed = order_of(policy)
        expected = [row for row in model if row not in parked]
        assert proposed == expected if name == "lru" else sorted(proposed) == sorted(expected)
    policy.call_back(range(9))
    assert sorted(order_of(policy)) == sorted(model)


@pytest.mark.parametrize("name", EVICTIONS)
def test_a_copy_that_could_not_leave_is_proposed_last_and_is_not_used(name):
    history = ReuseHistory()
    policy = make_eviction(name, KEYS, history)
    history.count(KEYS, 0, 10, 0)
    policy.insert(range(10))
    history.count(KEYS, 10, 20, 0)
    policy.postpone(0)
    policy.postpone(999)
    for _ in range(2):  # no search has changed anything
        assert order_of(policy) == [*range(1, 10), 0]
        assert history.known(KEYS[0])[::2] == (1, 10)


def test_what_brings_least_for_its_time_leaves_first():
    history = ReuseHistory()
    policy = make_eviction("learned", KEYS, history)
    for at in range(10_000):  # the first ten come back in turn, and no others do
        history.count(KEYS, at % 10, at % 10 + 1, 0)
        history.count([BlockKey(b"once %d" % at)], 0, 1, 0)
    history.count(KEYS, 100, 110, 0)
    policy.insert([*range(10), *range(100, 110)])
    assert set(order_of(policy)[:10]) == set(range(100, 110)), "newer, but nobody will want them"
    worths = [worth for worth, _ in policy.proposals()]
    assert worths == sorted(worths)


def test_a_copy_keeps_its_class_when_its_key_is_forgotten():
    history = ReuseHistory()
    policy = make_eviction("learned", KEYS, history)
    for _ in range(5):
        history.count(KEYS, 0, 1, 0)
    policy.insert((0,))
    number = policy._class(0)
    history.clear()
    history.count(KEYS, 0, 1, 0)
    policy.touch((0,))
    assert policy._class(0) == number > policy.classes_of([0])[0]
