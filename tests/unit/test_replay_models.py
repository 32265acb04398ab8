# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_traces import KINDS, Prefixes

from kvdisk.cli.replay.models import MODELS, run_belady, run_model

TINY = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=6).map(
    lambda prompts: [prefixes.number(prompt) for prefixes in [Prefixes()] for prompt in prompts]
)
SINGLES = st.lists(st.integers(0, 7), max_size=60).map(lambda blocks: [[block] for block in blocks])


def test_lru_by_hand():
    prompts = [["a", "b"], ["c"], ["a", "b"], ["d"], ["c"]]
    # Room for three, the head of a prompt used last: b a | b a c | (a b hit) c b a | b a d | a d c
    assert run_model("lru", prompts, 3) == ([0, 0, 2, 0, 0], 5, 2)
    # Two: b a | a c | a hits, b does not, and pushes c out | a d | d c
    assert run_model("lru", prompts, 2).hits == [0, 0, 1, 0, 0]
    assert run_model("lru", prompts, 9).hits == [0, 0, 2, 0, 1]


def test_what_stands_behind_a_hole_does_not_hit():
    # Room for two: the prompt's tail is used first, so its head pushes it out, not the other way round.
    assert run_model("lru", [["a", "b", "c"], ["a", "b", "c"]], 2).hits == [0, 2]
    assert run_model("arc", [["a", "b"], ["a", "c"], ["a", "b"]], 4).hits == [0, 1, 2]


def test_no_room_at_all():
    for name in (*MODELS, "belady"):
        assert run_model(name, [["a"], ["a"]], 0).hits == [0, 0]


def slow_lru(blocks, capacity):
    found, there = [], []
    for block in blocks:
        found.append(int(block in there))
        there = [other for other in there if other != block][-(capacity - 1) :] if capacity > 1 else []
        there.append(block)
    return found


def slow_arc(blocks, capacity):
    """ARC as its paper states it, over plain lists, the least recently used first."""
    once, often, left_once, left_often, target = [], [], [], [], 0.0
    found = []

    def replace(came_often):
        if once and (len(once) > target or (came_often and len(once) == target)):
            left_once.append(once.pop(0))
        else:
            left_often.append(often.pop(0))

    for block in blocks:
        found.append(int(block in once or block in often))
        if block in once or block in often:
            (once if block in once else often).remove(block)
            often.append(block)
        elif block in left_once:
            target = min(capacity, target + max(len(left_often) / len(left_once), 1))
            replace(False)
            left_once.remove(block)
            often.append(block)
        elif block in left_often:
            target = max(0, target - max(len(left_once) / len(left_often), 1))
            replace(True)
            left_often.remove(block)
            often.append(block)
        else:
            if len(once) + len(left_once) == capacity:
                if len(once) < capacity:
                    left_once.pop(0)
                    replace(False)
                else:
                    once.pop(0)
            elif len(once) + len(left_once) + len(often) + len(left_often) >= capacity:
                if len(once) + len(left_once) + len(often) + len(left_often) == 2 * capacity:
                    left_often.pop(0)
                if len(once) + len(often) >= capacity:
                    replace(False)
            once.append(block)
    return found


@pytest.mark.parametrize(("name", "slow"), [("lru", slow_lru), ("arc", slow_arc)])
@given(SINGLES, st.integers(1, 5))
def test_block_by_block_they_are_what_is_published(name, slow, prompts, capacity):
    assert run_model(name, prompts, capacity).hits == slow([block for (block,) in prompts], capacity)


@given(st.sampled_from([*MODELS, "belady"]), TINY, st.integers(1, 6))
def test_room_is_never_exceeded_and_nothing_beats_the_optimum(name, prompts, capacity):
    outcome = run_model(name, prompts, capacity)
    best = run_belady(prompts, capacity)
    assert sum(outcome.hits) <= sum(best.hits)
    if outcome.evicted is not None:
        assert outcome.written - outcome.evicted <= capacity


def brute_force(prompts, capacity):
    """The most hits of all ways to keep blocks: after each reference any of those there, and of the one that came."""
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


@given(TINY.filter(lambda prompts: sum(map(len, prompts)) <= 11), st.integers(1, 3))
def test_belady_is_the_optimum(prompts, capacity):
    outcome = run_belady(prompts, capacity)
    assert sum(outcome.hits) == brute_force(prompts, capacity)
    assert all(hits <= len(prompt) for hits, prompt in zip(outcome.hits, prompts, strict=True))
    assert outcome.written <= sum(outcome.hits)


@pytest.mark.parametrize("kind", KINDS)
def test_what_belady_keeps_are_prefixes(kind):
    prompts = KINDS[kind]()[:400]
    distinct = len({block for prompt in prompts for block in prompt})
    for room in (distinct // 50, distinct // 10, distinct // 3):
        assert sum(run_belady(prompts, room).hits) > 0  # it fails by itself where a block hits behind a miss
