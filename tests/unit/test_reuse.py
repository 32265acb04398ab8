# SPDX-License-Identifier: Apache-2.0
"""What is remembered of blocks, and what is learnt from it."""

from __future__ import annotations

import hashlib
import random
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey, make_block_key
from kvdisk.manager import bounds
from kvdisk.manager.admission import AdmitLearned
from kvdisk.manager.catalog import key_hash
from kvdisk.manager.chances import CLASSES, ORIGINS, TEMPOS
from kvdisk.manager.eviction import make_eviction
from kvdisk.manager.reuse import USES, ReuseHistory


def key_of(number: int) -> BlockKey:
    return make_block_key(number.to_bytes(32, "big"), 0)


def come(history: ReuseHistory, keys: list[BlockKey], stops: tuple[int, ...] = ()) -> None:
    """A request comes to all of its prompt, in parts that end there. A block takes a second."""
    start, origin = 0, 0
    history.note_time(history.now)
    for stop in (*stops, len(keys)):
        origin = history.count(keys, start, stop, origin)
        start = stop


def uses(history: ReuseHistory, keys: list[BlockKey]) -> list[int]:
    return [history.known(key)[0] for key in keys]


def small(places: int) -> ReuseHistory:
    history = ReuseHistory()
    history._places = places
    history.clear()
    return history


parents_of = st.tuples(*(st.integers(-1, number - 1) for number in range(12))).map(list)
requests_of = st.lists(st.tuples(st.integers(0, 11), st.lists(st.integers(1, 11), max_size=3)), max_size=40)


@settings(max_examples=300)
@given(parents_of, requests_of, st.sampled_from([2, 4, 8, bounds.LEAST_PLACES]))
def test_uses_never_rise_along_a_chain_whatever_is_forgotten(parents, requests, places):
    history, counts = small(places), [0] * 12
    for block, stops in requests:
        path = [block]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        keys = [key_of(number) for number in path]
        come(history, keys, tuple(sorted(stop for stop in stops if stop < len(keys))))
        for number in path:
            counts[number] += 1
        known = [count for count in uses(history, keys) if count]
        assert known == sorted(known, reverse=True)
        assert known or places < len(path)
        if places == bounds.LEAST_PLACES:
            assert uses(history, [key_of(number) for number in range(12)]) == counts


def test_a_head_that_was_forgotten_has_the_uses_of_what_follows_it():
    history, keys = ReuseHistory(), [key_of(number) for number in range(6)]
    for _ in range(4):
        come(history, keys)
    for place in {history._find(name)[0] for name in map(key_hash, keys[:3])}:
        history._tags[place] = 0
    come(history, keys, (2, 4))
    assert uses(history, keys) == [5] * 6


def test_the_table_is_bounded_and_forgets_what_was_wanted_longest_ago():
    history, always = small(256), key_of(10**6)
    for number in range(2000):
        come(history, [always])
        come(history, [key_of(number)])
    held = uses(history, [key_of(number) for number in range(2000)])
    assert uses(history, [always]) == [USES]
    assert sum(held) <= 256 and sum(held[1900:]) > 70 > sum(held[:1000])
    history.reserve(100_000)
    assert len(history._tags) == 1 << 20 and uses(history, [always]) == [0]
    history.reserve(10**9)
    assert len(history._tags) == bounds.PLACES


def long_prompt(blocks: int, seed: int) -> list[BlockKey]:
    return [make_block_key(hashlib.sha256(b"%d %d" % (seed, at)).digest(), 0) for at in range(blocks)]


@pytest.mark.parametrize("before", [0, 300_000])
@pytest.mark.parametrize("blocks", [2048, 8192, pytest.param(65_536, marks=pytest.mark.torture)])
def test_all_of_what_a_request_came_to_is_known_when_it_is_counted(blocks, before):
    """Keys of one prompt do not take each other's places, and what was known of them stays."""
    history = ReuseHistory()
    for seed in range(before // blocks):
        come(history, long_prompt(blocks, 1000 + seed))
    keys = long_prompt(blocks, 1)
    for number in range(1, 4):
        come(history, keys[: blocks // 2])
        assert set(uses(history, keys[: blocks // 2])) == {2 * number - 1}
        come(history, keys)
        assert uses(history, keys) == [2 * number] * (blocks // 2) + [number] * (blocks - blocks // 2)


def test_what_is_counted_in_parts_is_counted_as_at_once():
    """One request comes to all of its prompt at one time, whatever comes between its parts."""
    parts, whole = ReuseHistory(), ReuseHistory()
    prompt, others = long_prompt(350, 1), long_prompt(40, 2)
    for turn in range(3):
        keys = prompt[: 250 + 50 * turn]
        for history in (parts, whole):
            come(history, others)
        parts.note_time(parts.now)
        visit, origin = parts.begin(0, len(keys)), 0
        for start in range(0, len(keys), 100):
            origin = parts.count(keys, start, min(len(keys), start + 100), origin, visit)
        come(whole, keys)
        for key in (*keys, *others):
            assert parts.known(key) == whole.known(key)
    assert parts.now == whole.now and parts._prompt_blocks == whole._prompt_blocks
    for name in ("entered", "reused", "reused_after"):
        ours, theirs = (list(getattr(history._chances, name)) for history in (parts, whole))
        assert ours == pytest.approx(theirs), name
    visit = parts.begin(0, len(keys))
    origin = parts.count(keys, 0, 200, 0, visit)
    come(parts, keys[200:])  # another request wants them meanwhile
    parts.count(keys, 200, len(keys), origin, visit)
    assert [parts.known(key)[0] for key in (keys[0], keys[-1])] == [5, 3]


def test_one_that_is_not_known_stands_for_the_one_beside_it():
    history, keys = ReuseHistory(), [key_of(number) for number in range(8)]
    parents = [None, *keys[:4], None, *keys[5:7]]
    for key in (keys[2], keys[6]):
        come(history, [key])
    for order in (1, -1):
        found = history.nearest_known(keys[::order], parents[::order])[::order]
        assert found == [keys[2]] * 5 + [keys[6]] * 3
    assert history.nearest_known(keys[3:5], parents[3:5]) == [keys[2]] * 2, "what lies before is known"
    assert history.nearest_known(keys[:2], parents[:2]) == keys[:2], "nobody is known"


def test_a_kin_tells_what_extends_a_conversation_from_what_begins_one():
    history, (old, new, first) = ReuseHistory(), map(key_of, range(3))
    come(history, [old])
    come(history, [old, new], (1,))
    come(history, [first])
    assert len({history.known(key)[1] for key in (new, first)}) == 2


def test_the_turns_of_a_conversation_and_what_branches_off_are_told_apart():
    history, keys = ReuseHistory(), [key_of(number) for number in range(8)]
    for turn in range(1, 6):
        come(history, keys[:turn])
    first, second, third, fourth, fifth = (history.known(key)[1] // TEMPOS % ORIGINS for key in keys[:5])
    assert (first, second, third) == (0, 2, 3) and fourth == fifth == 3
    come(history, [keys[0], keys[6]])
    assert history.known(keys[6])[1] // TEMPOS % ORIGINS == 1, "several had wanted what it branches off from"


def test_a_prompt_teaches_by_the_root_of_its_length():
    """Prompts of 100 blocks never come back, as many of one block do once."""
    history = ReuseHistory()
    for number in range(2000):
        come(history, [key_of(10**6 + 100 * number + at) for at in range(100)])
        come(history, [key_of(number // 2)])
    assert sum(history._chances.entered) == pytest.approx(2000 * 10 + 2000)
    assert sum(history._chances.reused) == pytest.approx(1000)


def test_how_old_a_block_is_does_not_depend_on_how_long_its_prompt_is():
    history, keys = ReuseHistory(), [key_of(number) for number in range(300)]
    come(history, keys)
    assert {history.known(key)[2] for key in keys} == {0}
    come(history, [key_of(1000), key_of(1001)])
    come(history, [key_of(1002)])
    assert {history.known(key)[2] for key in keys} == {2}


def test_a_prompt_does_not_age_what_lies_beside_it():
    """What was used just before a long prompt is no older than that prompt, which came then."""
    history, beside = ReuseHistory(), [key_of(number) for number in range(3)]
    policy = make_eviction("learned", beside, history)
    history.count(beside, 0, 3, 0)
    policy.insert(range(3))
    fresh = policy.worth_of(2)
    history.count(long_prompt(500, 1), 0, 500, 0)
    assert {history.known(key)[2] for key in beside} == {0} and policy.worth_of(2) == fresh
    come(history, [key_of(10)])
    assert {history.known(key)[2] for key in beside} == {500} and policy.worth_of(2) < fresh


def test_of_requests_at_once_an_age_is_the_one_that_is_learnt():
    """Their prompts are counted in turns. Whoever comes then finds blocks as old as they were taken
    to be: by those that came before."""
    history, beside = ReuseHistory(), [key_of(number) for number in range(3)]
    come(history, beside)
    prompts = [long_prompt(100, seed) for seed in range(3)]
    visits, origins = [history.begin(0, 100) for _ in prompts], [0] * 3
    for start in range(0, 100, 25):
        for at, prompt in enumerate(prompts):
            origins[at] = history.count(prompt, start, start + 25, origins[at], visits[at])
            assert {history.known(key)[2] for key in beside} == {200}
    assert {history.known(key)[2] for prompt in prompts for key in prompt} == {0, 100}
    visit = history.begin(0, 1)
    ages = [history.known(key)[2] for key in (beside[0], prompts[0][0], prompts[2][0])]
    assert ages == [300, 200, 0]
    for age, key in zip(ages, (beside[0], prompts[0][0], prompts[2][0]), strict=True):
        before = list(history._chances.reused)
        history.count([key], 0, 1, 0, visit)
        (number,) = np.flatnonzero(np.array(history._chances.reused) - before)
        assert number % 33 == age.bit_length()


def test_what_the_next_request_wants_is_kept_for_as_long_as_that_one_comes():
    """Prompts of 40 blocks, each asked twice: a block is kept for half as long as one comes, or
    longer."""
    history = ReuseHistory()
    for number in range(200):
        for _ in range(2):
            come(history, [key_of(1000 * number + at) for at in range(40)])
    assert 0.5 / 40 < history.rate(0, 0, 0) < 2 / 40


@pytest.fixture(scope="module")
def learnt() -> ReuseHistory:
    """200 blocks that come back in turn, between blocks that never do."""
    history = ReuseHistory()
    for number in range(20_000):
        come(history, [key_of(number % 200)])
        come(history, [key_of(10**6 + number)])
    return history


def test_what_comes_back_is_worth_more_than_what_does_not(learnt):
    (_, warm, *age), (_, cold, *_) = (learnt.known(key_of(number)) for number in (100, 10**6 + 19_000))
    assert age == [198, 199 * 16], "how many there were before the last"
    rate = learnt.rate(cold, 100, 1600)
    assert learnt.rate(warm, *age) > 20 * rate
    least = learnt.rate(warm, *age)
    assert learnt.gain(warm, 1, 16, rate) > 0.5 and learnt.gain(cold, 1, 16, least) < AdmitLearned.LEAST_GAIN
    assert learnt.rate(warm, 4000, 64_000) < learnt.rate(warm, *age) / 20, "it has not come back when it should have"


def test_what_was_not_wanted_for_long_is_worth_less_though_nobody_came():
    history, key = ReuseHistory(), key_of(0)
    policy = make_eviction("learned", [key], history)
    for number in range(300):  # each comes back in ten seconds, or never
        for _ in range(2):
            history.note_time(10.0 * number)
            history.count([key_of(number)], 0, 1, 0)
    history.count([key], 0, 1, 0)
    policy.insert([0])
    fresh = policy.worth_of(0)
    history.note_time(20_000)
    assert policy.worth_of(0) < fresh / 3


def test_a_conversation_is_taken_to_go_on_as_fast_as_it_did():
    """Of two kinds, both of ten turns: each turn after half a minute, and after half an hour."""
    history, numbers, turns = ReuseHistory(), count(), list[tuple[float, int, list[BlockKey]]]()
    for session in range(200):
        keys, pause_s = [key_of(next(numbers)) for _ in range(10)], (30, 1800)[session % 2]
        turns += [(100 * session + pause_s * turn, session, keys[: turn + 1]) for turn in range(10)]
    for now, _, keys in sorted(turns):
        history.note_time(now)
        come_to = history.begin(0, len(keys))
        history.count(keys, 0, len(keys), 0, come_to)
        if len(keys) == 10:
            ends = history.known(keys[-1])
    fast, slow = (history.known(turns[at][2][-1]).number for at in (-11, -1))
    assert fast != slow and ends.number in {fast, slow}
    per_s = history.now / (history.tick / 16)
    after = [(int(per_s * age_s), 16 * age_s) for age_s in (5, 300)]
    assert history.rate(fast, *after[0]) > 3 * history.rate(slow, *after[0])
    assert history.rate(fast, *after[1]) < history.rate(slow, *after[1]) / 3


def test_before_anything_is_learnt_the_order_is_that_of_last_use():
    history = ReuseHistory()
    rates = [[history.rate(number, age, 16 * age) for number in range(CLASSES)] for age in (1, 2, 3, 50, 10**4, 10**8)]
    assert all(len(set(of_age)) == 1 for of_age in rates)
    assert [of_age[0] for of_age in rates] == sorted({of_age[0] for of_age in rates}, reverse=True)


def test_no_age_is_too_high(learnt):
    history = small(4)
    history._learn()
    history.now = 1 << 40
    _, number, age, _ = history.known(key_of(1))
    for each in (age, history.now):
        assert history.rate(number, each, each) >= 0.0
    assert history.gain(number, age, 1 << 40, 0.1) <= 1.0
    come(history, [key_of(1)])
    assert history.known(key_of(1)) == (1, 0, 0, 0)


def test_what_was_there_before_a_restart_teaches_no_ages():
    """Nobody knows when these blocks came: what is used of them is not taken to be of those that
    have come since."""
    history = ReuseHistory()
    history.restore([key_of(number) for number in range(4000)], np.arange(4000), np.zeros(4000, np.uint32))
    assert uses(history, [key_of(7)]) == [1]
    for number in range(1000):  # every fourth is used
        come(history, [key_of(4 * number)])
    history._learn()
    assert history.gain(0, 1, 16, 2e-4) < 0.01


def test_what_is_restored_is_as_if_it_had_come_in_that_order():
    """But where two places are taken: then the later of two has the place."""
    given = np.array([*range(500)] * 20, np.uint32)
    keys = [key_of(number) for number in range(len(given))]
    history, crowded = ReuseHistory(), small(1 << 10)
    classes = history.restore(keys, np.arange(len(keys)), given)
    found = [(*history.known(key), at) for at, key in enumerate(keys) if history.known(key)[0]]
    assert len(found) > 0.995 * len(keys)
    for uses_of_it, number, age, _, at in found:
        expected = min(int(given[at]) + 1, USES), classes[at], len(keys) - 1 - at
        assert (uses_of_it, number, age) == expected
    crowded.restore(keys, np.arange(len(keys)), given)
    known = [at for at, key in enumerate(keys) if crowded.known(key)[0]]
    assert len(known) > 900 and min(known[len(known) // 4 :]) > len(keys) // 2, "mostly late ones"


def test_what_was_learnt_of_new_blocks_holds_while_they_come_back_as_often():
    """A scan is refused before the ages of its blocks tell; what it left out comes in once more of
    it comes back."""
    history, rate = ReuseHistory(), 1e-4
    history.reserve(2000)  # 80 events are of late
    warm = [key_of(number) for number in range(1000)]
    for _ in range(5):
        for key in warm:
            come(history, [key])
    number = history.known(key_of(10**6))[1]
    assert history.gain(number, 1, 16, rate) > 0.5
    for scanned in range(10**6, 10**6 + 400):
        come(history, [key_of(scanned)])
    assert history.gain(number, 1, 16, rate) < AdmitLearned.LEAST_GAIN
    come(history, [key_of(10**6)])
    assert history.gain(history.known(key_of(10**6))[1], 1, 16, rate) > 0.5, "what came back is no scan"
    for scanned in range(10**6, 10**6 + 400):
        come(history, [key_of(scanned)])
    assert history.gain(number, 1, 16, rate) > 0.5


def test_one_long_prompt_is_no_scan():
    history = ReuseHistory()
    history.reserve(100)
    for number in range(300):
        come(history, [key_of(number % 100)])
    come(history, [key_of(1000 + number) for number in range(90)])
    assert history.gain(history.known(key_of(1000))[1], 1, 16, 1e-4) > 0.2


@pytest.mark.parametrize("places", [1 << 8, 1 << 12, 1 << 15])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.torture) for seed in range(1, 3))])
def test_many_blocks_at_once_are_counted_as_one_by_one(monkeypatch, places, seed):
    rng = random.Random(seed)
    monkeypatch.setattr("kvdisk.manager.bounds.LEAST_PLACES", places)
    histories = [ReuseHistory(), ReuseHistory()]
    prompts: list[list[BlockKey]] = [[]]
    now = 0.0
    for _ in range(60):
        known = rng.choice(prompts)
        prompt = known[: rng.randint(0, len(known))]
        prompt += [BlockKey(rng.randbytes(34)) for _ in range(rng.choice([1, 70, 500]))]
        prompts.append(prompt)
        now += rng.choice([0.01, 1, 30, 4000])
        for history in histories:
            history.note_time(now)
        visits = [history.begin(0, len(prompt)) for history in histories]
        origins, start, classes = [0, 0], 0, [[], []]
        while start < len(prompt):
            stop = min(len(prompt), start + rng.choice([10, 64, 400]))
            for at, many in enumerate((1, 1 << 30)):
                monkeypatch.setattr("kvdisk.manager.reuse._MANY", many)
                origins[at] = histories[at].count(prompt, start, stop, origins[at], visits[at])
                classes[at] = histories[at].classes_of(prompt)
            start = stop
            assert classes[0] == classes[1]
        assert origins[0] == origins[1]
        assert histories[0].rate(0, 0, 0) == histories[1].rate(0, 0, 0)
        for name in ("_tags", "_times", "_marks", "_ticks", "_tempos", "_scan_score"):
            first, second = (getattr(history, name) for history in histories)
            assert first == second, name
        for name in ("entered", "reused", "reused_after", "_rates", "_slopes"):
            first, second = (getattr(history._chances, name) for history in histories)
            assert first == second, name


def test_a_few_new_prompts_are_no_scan_and_many_are():
    """A long prompt is no more evidence than the bound, however many blocks it has."""
    rng, numbers = random.Random(5), count()
    history = ReuseHistory()
    history.reserve(40_000)
    once: list[list[BlockKey]] = []

    def ask(*, is_new: bool) -> float:
        """Serve a prompt. Return how much is expected of a new block then, of what was learnt."""
        if is_new:
            once.append([key_of(next(numbers)) for _ in range(300)])
            come(history, once[-1])
        else:
            come(history, once.pop(rng.randrange(len(once))))
        return history.gain(0, 0, 0, 0.0) / float(history._chances._hits[:, 0].sum() / 2)

    for _ in range(200):
        ask(is_new=not once or rng.random() < 0.65)
    found = [ask(is_new=rng.random() < 0.65) for _ in range(400)]
    assert sum(each < 0.8 for each in found) < 20, sum(each < 0.8 for each in found)
    assert [ask(is_new=True) for _ in range(40)][-1] < 0.05, "a scan"
    assert [ask(is_new=False) for _ in range(8)][-1] > 0.5, "which has ended"


def test_a_prompt_that_is_counted_in_many_parts_is_one_witness():
    history, numbers = ReuseHistory(), count()
    for at in range(200):
        keys = [key_of(next(numbers)) for _ in range(300)]
        for _ in range(1 + at % 2):
            come(history, keys)
    before = list(history._scan_score)
    long = [key_of(next(numbers)) for _ in range(40 * 512)]
    visit, origin = history.begin(0, len(long)), 0
    for start in range(0, len(long), 512):
        origin = history.count(long, start, start + 512, origin, visit)
    assert 0 < history._scan_score[0] - before[0] < 1
