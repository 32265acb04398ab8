# SPDX-License-Identifier: Apache-2.0
"""The models that ``tools/replay_models.py`` compares with: small cases by hand, and that the
optimum is one."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_models import MODELS, run_belady, run_model
from replay_traces import Prefixes

TINY = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=6).map(
    lambda prompts: [prefixes.number(prompt) for prefixes in [Prefixes()] for prompt in prompts]
)


def test_models_by_hand():
    prompts = [["a", "b"], ["c"], ["a", "b"], ["d"], ["c"]]
    # Room for three, the head of a prompt used last: b a | b a c | (a b hit) c b a | b a d | a d c
    assert run_model("lru", prompts, 3) == ([0, 0, 2, 0, 0], 5)
    # Two: b a | a c | a hits, b does not, and pushes c out | a d | d c
    assert run_model("lru", prompts, 2).hits == [0, 0, 1, 0, 0]
    scan = [[block] for block in ["a", "a", "b", "c", "d", "e", "a"]]
    assert run_model("arc", scan, 3).hits == [0, 1, 0, 0, 0, 0, 1], "what was used twice outlives a scan"
    assert run_model("lru", scan, 3).hits == [0, 1, 0, 0, 0, 0, 0]


def brute_force(prompts, capacity):
    """The most hits of all ways to keep blocks: after each reference any of those there, and of the
    one that came."""
    references = tuple((block, at == 0) for prompt in prompts for at, block in enumerate(prompt))

    @cache
    def most(at, kept, whole):
        if at == len(references):
            return 0
        block, is_first = references[at]
        whole = block in kept and (whole or is_first)
        there = kept | {block}
        choices = [
            frozenset(choice) for count in range(min(capacity, len(there)) + 1) for choice in combinations(there, count)
        ]
        return whole + max(most(at + 1, choice, whole) for choice in choices)

    return most(0, frozenset(), False)


@pytest.mark.parametrize("capacity", [0, 1, 2, 3])
@given(prompts=TINY.filter(lambda prompts: sum(map(len, prompts)) <= 11))
def test_belady_is_the_optimum_and_no_model_beats_it(capacity, prompts):
    best = run_belady(prompts, capacity)
    assert sum(best.hits) == brute_force(prompts, capacity)
    assert best.written <= sum(best.hits)
    if capacity:
        assert all(sum(run_model(name, prompts, capacity).hits) <= sum(best.hits) for name in MODELS)
