# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvdisk.manager.eviction import LruPolicy

STEPS = st.lists(st.tuples(st.sampled_from(["insert", "access", "remove"]), st.integers(0, 7)), max_size=60)


@given(STEPS, st.sets(st.integers(0, 7)), st.integers(0, 9))
def test_lru_is_an_ordered_dictionary(steps, pinned, count):
    policy, model = LruPolicy(), OrderedDict()
    for step, row in steps:
        if step == "insert" and row not in model:
            policy.insert(row)
            model[row] = None
        elif step == "access":
            policy.access(row)
            if row in model:
                model.move_to_end(row)
        elif step == "remove":
            policy.remove(row)
            model.pop(row, None)
        assert [policy.holds(other) for other in range(8)] == [other in model for other in range(8)]
    expected = [row for row in model if row not in pinned][:count]
    assert policy.victims(count, lambda row: row not in pinned) == expected


def test_a_search_is_bounded():
    policy = LruPolicy()
    for row in range(1000):
        policy.insert(row)
    asked = []
    assert policy.victims(1, lambda row: asked.append(row) or False) == []
    assert len(asked) < 1000
