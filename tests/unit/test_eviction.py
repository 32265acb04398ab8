# SPDX-License-Identifier: Apache-2.0
"""The eviction policies: what each proposes, and in which order."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey
from kvdisk.config import EVICTIONS
from kvdisk.manager import bounds
from kvdisk.manager.eviction import EvictionPolicy, make_eviction
from kvdisk.manager.reuse import ReuseHistory
from kvdisk.manager.standings import PINNED

KEYS = [BlockKey(b"key %d" % row) for row in range(2000)]
STEPS = st.lists(st.tuples(st.sampled_from(["insert", "touch", "remove", "follow"]), st.integers(0, 7)), max_size=60)


def order_of(policy: EvictionPolicy) -> list[int]:
    return [row for _, row in policy.proposals()]


@pytest.mark.parametrize("name", EVICTIONS)
@given(STEPS, st.permutations(range(8)).flatmap(lambda rows: st.integers(0, 8).map(lambda count: rows[:count])))
def test_every_policy_proposes_each_tail_that_it_has_and_lru_in_its_order(name, steps, filled):
    """What comes to be followed is used as others are, and takes the place of its last use when it
    is a tail again."""
    history = ReuseHistory()
    policy, model, followed = make_eviction(name, KEYS, history), OrderedDict.fromkeys(filled), set()
    policy.fill(np.array(filled, np.int32), np.arange(len(filled), dtype=np.uint32), np.ones(len(filled), np.bool_))
    for step, row in steps:
        history.count(KEYS, row, row + 1, 0)
        if step == "insert" and row not in model:
            policy.insert((row,))
            policy.list_tails((row,))
            model[row] = None
        elif step == "touch":
            policy.touch((row,))
            if row in model:
                model.move_to_end(row)
        elif step == "remove":
            policy.remove((row,))
            model.pop(row, None)
            followed.discard(row)
        elif step == "follow" and (proposed := order_of(policy)):
            policy.unlist((proposed[row % len(proposed)], -1))
            followed.add(proposed[row % len(proposed)])
        proposed = order_of(policy)
        expected = [row for row in model if row not in followed]
        assert proposed == expected if name == "lru" else sorted(proposed) == sorted(expected)
        assert all(map(policy.holds, model)) and sum(map(policy.holds, range(9))) == len(model)
    policy.list_tails(range(9))
    assert order_of(policy) == list(model) if name == "lru" else sorted(order_of(policy)) == sorted(model)


def test_of_a_long_list_a_new_tail_is_put_before_what_was_looked_at_last(monkeypatch):
    history = ReuseHistory()
    policy = make_eviction("lru", KEYS, history)
    for row in range(10):
        history.count(KEYS, row, row + 1, 0)
        policy.insert((row,))
    policy.list_tails(row for row in range(9) if row != 1)
    history.count(KEYS, 10, 11, 0)
    monkeypatch.setattr(bounds, "TAILS_LOOKED_AT", 3)
    policy.list_tails((1,))
    assert order_of(policy) == list(range(9))
    policy.list_tails((9,))
    assert order_of(policy) == [0, 1, 2, 9, *range(3, 9)]


def test_the_first_tail_of_high_rows_may_be_an_old_one():
    history = ReuseHistory()
    policy = make_eviction("lru", KEYS, history)
    policy.insert((1000,))
    history.count(KEYS, 0, 1, 0)
    policy.insert((0,))
    policy.list_tails((0,))
    history.count(KEYS, 1, 2, 0)
    policy.list_tails((1000,))
    assert order_of(policy) == [1000, 0]


@pytest.mark.parametrize("name", EVICTIONS)
def test_a_copy_that_could_not_leave_is_proposed_last_and_is_not_used(name):
    history = ReuseHistory()
    policy = make_eviction(name, KEYS, history)
    history.count(KEYS, 0, 10, 0)
    policy.insert(range(10))
    policy.list_tails(range(10))
    history.count(KEYS, 10, 20, 0)
    policy.postpone(0)
    policy.postpone(999)
    for _ in range(2):  # no search has changed anything
        assert order_of(policy) == [*range(1, 10), 0]
        assert history.known(KEYS[0])[::2] == (1, 0), "the last request came just behind it"


def test_a_use_changes_a_class_and_no_standing():
    history = ReuseHistory()
    policy = make_eviction("learned", KEYS, history)
    for now in (0, 10, 10_000):  # twice as often used, and more slowly
        history.note_time(now)
        history.count(KEYS, 0, 2, 0)
        if not policy.holds(0):
            policy.insert((0, 1))
            policy.list_tails((0, 1))
            policy.place(1, PINNED)
        policy.touch((0, 1))
        assert policy._list_of[0] == history.known(KEYS[0]).number
        assert policy.standing(1) == PINNED and order_of(policy) == [0]
    history.note_time(10_010)
    before = policy._list_of[0]
    history.count(KEYS, 0, 2, 0)
    policy.touch((0,))
    assert policy._list_of[0] < before, "it comes faster than it did"


def test_a_long_life_is_no_age():
    """The blocks of a time are its lower 32 bits."""
    worths = []
    for now in (0, (1 << 32) - 12):
        history = ReuseHistory()
        history.now = history.came = now
        history._chances.learns_at = math.inf
        policy = make_eviction("learned", KEYS, history)
        history.count(KEYS, 0, 10, 0)
        policy.insert((0, 10))
        for at in range(10, 20):
            history.count(KEYS, at, at + 1, 0)
        worths.append([policy.worth_of(row) for row in (0, 10)])
    assert worths[0] == worths[1]


def test_what_brings_least_for_its_time_leaves_first():
    history = ReuseHistory()
    policy = make_eviction("learned", KEYS, history)
    for at in range(10_000):  # the first ten come back in turn, and no others do
        history.count(KEYS, at % 10, at % 10 + 1, 0)
        history.count([BlockKey(b"once %d" % at)], 0, 1, 0)
    history.count(KEYS, 100, 110, 0)
    policy.insert([*range(10), *range(100, 110)])
    policy.list_tails([*range(10), *range(100, 110)])
    assert set(order_of(policy)[:10]) == set(range(100, 110)), "newer, but nobody will want them"
    worths = [worth for worth, _ in policy.proposals()]
    assert worths == sorted(worths)


def test_a_copy_keeps_its_class_when_its_key_is_forgotten():
    history = ReuseHistory()
    policy = make_eviction("learned", KEYS, history)
    for _ in range(5):
        history.count(KEYS, 0, 1, 0)
    policy.insert((0,))
    number = policy._list_of[0]
    history.clear()
    history.count(KEYS, 0, 1, 0)
    policy.touch((0,))
    assert policy._list_of[0] == number > policy.classes_of([0])[0]
