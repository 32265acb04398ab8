# SPDX-License-Identifier: Apache-2.0
"""The eviction policies: what each proposes, and in which order."""

from __future__ import annotations

import os
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey
from kvdisk.config import EVICTIONS
from kvdisk.manager.eviction import CreditPolicy, LeftKeys, make_eviction

KEYS = [BlockKey(b"key %d" % row) for row in range(2000)]
STEPS = st.lists(st.tuples(st.sampled_from(["insert", "access", "remove"]), st.integers(0, 7)), max_size=60)


@pytest.mark.parametrize("name", EVICTIONS)
@given(STEPS, st.permutations(range(8)).flatmap(lambda rows: st.integers(0, 8).map(lambda count: rows[:count])))
def test_every_policy_proposes_each_row_that_it_has_and_lru_in_its_order(name, steps, filled):
    policy, model = make_eviction(name, KEYS), OrderedDict.fromkeys(filled)
    policy.fill(np.array(filled, np.int32), np.arange(len(filled), dtype=np.uint32))
    for step, row in steps:
        if step == "insert" and row not in model:
            policy.insert((row,))
            model[row] = None
        elif step == "access":
            policy.access((row,))
            if row in model:
                model.move_to_end(row)
        elif step == "remove":
            policy.remove((row,))
            model.pop(row, None)
        proposed = list(policy.proposals())
        assert proposed == list(model) if name == "lru" else sorted(proposed) == sorted(model)


@pytest.mark.parametrize("name", EVICTIONS)
def test_a_copy_that_could_not_leave_is_proposed_last_and_is_not_used(name):
    policy = make_eviction(name, KEYS)
    policy.insert(range(10))
    policy.postpone(0)
    policy.postpone(999)
    assert list(policy.proposals()) == [*range(1, 10), 0]
    assert list(policy.proposals()) == [*range(1, 10), 0], "no search has moved it to another queue"


class TestCredit:
    @staticmethod
    def make(interval: float) -> CreditPolicy:
        """Return a policy that has learnt an interval, and goes on averaging slowly."""
        policy = CreditPolicy(KEYS)
        policy.interval, policy._learnt = interval, policy.MEMORY
        return policy

    def test_the_order_is_that_of_the_formula(self):
        policy = self.make(interval=300)
        rng = np.random.default_rng(5)
        policy.insert(range(400))
        for row in rng.zipf(1.3, 3000) % 400:
            policy.access((int(row),))

        def credit(row: int) -> float:
            age, horizon = policy._now - policy._last[row], int(policy.HORIZON * policy.interval)
            doubled = next(at for at, most in enumerate((1, 2, 4, 8, 1000)) if policy._uses[row] <= most)
            return doubled * max(0, horizon - age) / 2 - age

        order = list(policy.proposals())
        found = [credit(row) for row in order]
        assert found == sorted(found) and sorted(order) == list(range(400))

    def test_uses_that_follow_at_once_are_one_and_are_remembered_while_a_copy_is_away(self):
        policy = self.make(interval=160)
        policy.insert((0, 1))
        for _ in range(5):
            policy.access((0,))
        assert policy._uses[0] == 1
        policy.insert(range(10, 40))
        policy.access((0,))
        assert policy._uses[0] == 2
        policy.remove((0, 1))
        policy.insert(range(50, 70))
        policy.insert((0, 1))
        assert (policy._uses[0], policy._uses[1]) == (3, 2)


def test_a_key_that_has_left_is_forgotten_only_by_another_in_its_place():
    left = LeftKeys(1 << 18)
    keys = [BlockKey(os.urandom(34)) for _ in range(20_000)]
    start = (1 << 32) - 10_000  # the clock goes beyond 32 bits
    left.add(keys, [3] * len(keys), range(start, start + len(keys)), 100)
    found = left.take(keys, start + 50_000)
    assert 0.95 * len(keys) < len(found) < len(keys)
    assert all(uses == 3 and age == 50_000 - at for at, (uses, age) in found.items())
    assert left.take(keys, start + 50_000) == {}
