# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey
from kvdisk.config import EVICTIONS
from kvdisk.manager.eviction import make_eviction

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
