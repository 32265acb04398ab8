# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import numpy as np

from kvdisk.blocks import BlockKey
from kvdisk.manager.eviction import CreditPolicy, LeftKeys

KEYS = [BlockKey(b"key %d" % row) for row in range(4000)]


def order(policy: CreditPolicy) -> list[int]:
    return list(policy.proposals())


def make(interval: float = 0.0) -> CreditPolicy:
    """Return a policy that has learnt an interval, and goes on averaging slowly."""
    policy = CreditPolicy(KEYS)
    policy.interval, policy._learnt = interval, policy.MEMORY if interval else 0
    return policy


def credit_of(policy: CreditPolicy, row: int) -> float:
    age = policy._now - policy._last[row]
    horizon = int(policy.HORIZON * policy.interval)
    uses = policy._uses[row]
    rank = next(rank for rank, most in enumerate((1, 2, 4, 8, 1000)) if uses <= most)
    return rank * max(0, horizon - age) / 2 - age


def test_the_order_is_that_of_the_formula():
    policy = make(interval=300)
    rng = np.random.default_rng(5)
    policy.insert(range(400))
    for row in rng.zipf(1.3, 3000) % 400:
        policy.access((int(row),))
    ranks = [credit_of(policy, row) for row in order(policy)]
    assert ranks == sorted(ranks)
    assert sorted(order(policy)) == list(range(400))


def test_uses_that_follow_at_once_are_one():
    policy = make(interval=160)
    policy.insert((0, 1))
    for _ in range(5):
        policy.access((0,))
    assert policy._uses[0] == 1
    policy.insert(range(10, 30))
    policy.access((0,))
    assert policy._uses[0] == 2


def test_uses_are_remembered_while_a_copy_is_away():
    policy = make(interval=10)
    policy.insert((0, 1))
    policy.insert(range(10, 40))
    policy.access((0,))
    assert policy._uses[0] == 2
    policy.remove((0, 1))
    policy.insert(range(50, 60))
    policy.insert((0, 1))
    assert (policy._uses[0], policy._uses[1]) == (3, 2)
    policy.remove((0,))
    policy._left.take([KEYS[0]], policy._now)
    policy.insert((0,))
    assert policy._uses[0] == 1, "what was taken is forgotten"


def test_postponing_is_not_a_use():
    policy = make(interval=10)
    policy.insert(range(3))
    policy.insert(range(10, 40))
    policy.postpone(0)
    assert policy._uses[0] == 1 and policy.interval == 10
    assert order(policy)[-1] == 0
    policy.postpone(999)


def test_filled_rows_are_used_once_in_the_order_given():
    policy = make(interval=10)
    rows = np.array([5, 3, 9], np.int32)
    policy.fill(rows, np.zeros(3, np.uint32))
    assert order(policy) == [5, 3, 9]
    policy.insert((1,))
    policy.access((5,))
    assert order(policy) == [3, 9, 1, 5]


class TestLeftKeys:
    def test_it_forgets_no_key_but_by_another_in_its_place(self):
        left = LeftKeys(1 << 18)
        keys = [BlockKey(os.urandom(34)) for _ in range(20_000)]
        left.add(keys, [3] * len(keys), range(len(keys)), 100)
        found = left.take(keys, 50_000)
        assert 0.95 * len(keys) < len(found) < len(keys)
        assert all(uses == 3 and age == 50_000 - at for at, (uses, age) in found.items())
        assert left.take(keys, 50_000) == {}

    def test_a_clock_beyond_32_bits(self):
        left = LeftKeys(1)
        left.add(KEYS[:1], [2], [(1 << 32) - 5], 10)
        assert left.take([KEYS[0]], (1 << 32) + 5) == {0: (2, 10)}
