# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from tier_bench import GEOMETRY, TierBench, keys_of

from kvdisk.blocks import make_block_key
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.admission import AdmissionPolicy, AdmitLearned, AdmitReused, make_admission
from kvdisk.manager.catalog import key_hash
from kvdisk.manager.chances import CLASSES
from kvdisk.manager.demand import Demand
from kvdisk.manager.requests import RequestState
from kvdisk.manager.reuse import NEW_STATE, ReuseHistory
from kvdisk.manager.step_work import Kind, StepWork

SECOND_USE = CLASSES // 6
"""The first class of blocks that two requests wanted."""
PROMPT = "aabbccx"
KEYS = keys_of(PROMPT)
OTHER = make_block_key(b"z", 0)


def request(name):
    hashes = [PROMPT[:end].encode() for end in range(2, len(PROMPT) + 1, 2)]
    state = RequestState(name, hashes, len(PROMPT), GEOMETRY)
    state.update_keys()
    return state


@pytest.mark.parametrize("needed", [1, 2, 3, 16])
def test_distinct_requests_count_once_each(needed):
    history = ReuseHistory()
    policy = AdmitReused(history, needed)
    demand, requests = Demand(history, [policy], StepWork()), [request(str(number)) for number in range(needed)]
    for seen in range(needed):
        assert policy.admits(KEYS) == [False] * 3
        for stop in (1, 3, 2, 3):
            for each in requests[: seen + 1]:  # all so far, in turns
                demand.reach(each, 0, stop)
        assert [history.known(key)[0] for key in KEYS] == [seen + 1] * 3
    assert policy.admits([KEYS[0], OTHER, KEYS[2]]) == [True, False, True]


def test_a_policy_is_told_once_who_wants_what_and_of_a_prompt_at_once():
    told = []

    class Telling(AdmissionPolicy):
        def want(self, keys, request_id):
            told.append((list(keys), request_id))

    demand, one = Demand(ReuseHistory(), [Telling(), Telling()], StepWork()), request("one")
    for stop in (0, 2, 1, 3):
        demand.reach(one, 0, stop)
    assert told == [(KEYS, "one")] * 2


def test_of_a_prompts_states_a_request_wants_the_last_that_was_left():
    """Each request leaves one at the end of its prompt; the third shares two blocks with the
    first."""
    group = GroupGeometry(0, 2, 4096, 2, state_tokens=2)
    history = ReuseHistory({0})
    demand = Demand(history, (), StepWork())

    def come(prompt):
        hashes = [prompt[:end].encode() for end in range(2, len(prompt) + 1, 2)]
        state = RequestState(prompt, hashes, len(prompt), Geometry((group,), 1, 2))
        state.update_keys()
        demand.reach(state, 0, 1)
        demand.reach(state, 0, 9)
        demand.leave_state(state, state.keys[0][-1])
        return state.states

    ends = keys_of("aabbccddeeff")
    assert come("aabb") == []
    assert come("aabbccdd") == [ends[1]]
    assert come("aabbccddeeff") == [ends[3]]
    assert come("aabbcczz") == [ends[1]]
    assert [history.known(key)[0] for key in ends] == [0, 3, 0, 2, 0, 1]
    assert history.known(ends[5])[1] == NEW_STATE


@pytest.mark.parametrize("by_key", [False, True])
def test_no_group_of_a_prompt_ages_what_lies_beside_it(by_key):
    """Nor do its states: they all come at once."""
    kv, window = GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 4096)
    geometry = Geometry((kv, window, GroupGeometry(2, 2, 4096, 2, state_tokens=2)), 1, 2)
    history, work = ReuseHistory({2}), StepWork()
    demand = Demand(history, (), work)

    def come(prompt):
        state = RequestState(prompt, [prompt[:end].encode() for end in range(1, len(prompt) + 1)], 99, geometry)
        state.update_keys()
        if by_key:
            demand.reach_keys(prompt, state.keys, lambda keys: None)
            work.finish(Kind.DEMAND)
        else:
            for group in range(3):
                demand.reach(state, group, len(prompt))
            demand.leave_state(state, state.keys[2][-1])
        return [*state.keys[0], *state.keys[1]]

    beside, left = come("beside"), 0 if by_key else 1
    come("first")  # of what came with them, only what came behind them makes them older
    assert {history.known(key)[2] for key in beside} == {left, 6 + left}
    come("other")
    assert {history.known(key)[2] for key in beside} == {10 + 2 * left, 16 + 2 * left}


def test_with_states_kv_is_worth_what_a_new_state_is():
    history = ReuseHistory({1})
    history.gain = lambda number, blocks, ticks, rate: float((number, blocks, ticks) == (NEW_STATE, 0, 0))
    policy = AdmitLearned(history)
    policy._is_full = True
    policy.watch([SimpleNamespace(least_rate=lambda: 0.0)])
    kv, state = make_block_key(b"h", 0), make_block_key(b"h", 1)
    history.count((kv,), 0, 1, 0)
    assert policy.admits([kv, state]) == [True, False], "nobody knows the state"
    history.state_groups = ()
    assert policy.admits([kv]) == [False]


@pytest.mark.parametrize("admission", ["reuse(2)", "learned"])
def test_what_was_refused_is_remembered_as_used(admission):
    bench = TierBench((), (8,), nvme_admission=admission)
    bench.idle()
    nvme = bench.parts.nvme
    nvme.admission._is_full = True
    nvme.admission.note_room = lambda free, total: None
    if admission == "learned":
        bench.manager._history.gain = lambda number, blocks, ticks, rate: float(number >= SECOND_USE)
    bench.serve(PROMPT)
    assert bench.stats["refused_blocks.reuse"] == 3 and not len(bench.catalog)
    bench.serve(PROMPT, cold=True)
    assert bench.held(PROMPT) == [True] * 3
    assert [bench.manager._history.known(key)[0] for key in KEYS] == [2] * 3


def test_one_that_waits_is_read_ahead_for_loads_and_computes_counts_once():
    bench = TierBench((8,), (16,), nvme_admission="all", min_load_tokens=0, most_running=1)
    bench.idle()
    bench.serve(PROMPT)
    bench.engine.pool.forget_all()
    bench.parts.cpu.discard(*bench.rows(PROMPT)[::-1])
    first = bench.engine.add("first", "z", 9)
    bench.step()
    bench.add(PROMPT + "ddeex")
    for _ in range(4):
        bench.step()
    assert bench.stats["promoted_blocks"] == 3
    first.finishing = True
    bench.finish()
    assert bench.stats["hit_blocks.cpu"] == 3
    assert [bench.manager._history.known(key)[0] for key in KEYS] == [2] * 3


def test_a_request_comes_at_the_time_of_its_step_however_long_none_ran():
    bench = TierBench((8,), ())
    bench.serve(PROMPT)
    bench.engine.now += 3600.0
    bench.serve(PROMPT)
    assert [bench.manager._history.known(key).ticks // 16 < 60 for key in KEYS] == [True] * 3
    assert bench.manager._history.tick // 16 >= 3600
    places = [bench.manager._history._find(key_hash(key))[0] for key in KEYS]
    assert {bench.manager._history._tempos[place] for place in places} == {1 + int(8 * math.log2(1 + 16 * 3600))}


def test_one_that_starts_again_after_a_reset_counts_anew():
    bench = TierBench((8,), (), store_policy="on_compute")
    request = bench.engine.add("one", PROMPT, 9)
    bench.step()
    bench.change_weights()  # which preempts it
    assert [bench.manager._history.known(key)[0] for key in KEYS] == [0] * 3
    request.finishing = True
    bench.finish()
    assert [bench.manager._history.known(key)[0] for key in KEYS] == [1] * 3


class TestLearned:
    @staticmethod
    def make(rate=0.5):
        """Of a history in which what was used twice is worth a write, against what leaves."""

        class Order:
            def least_rate(self):
                return rate

        history = ReuseHistory()
        history.gain = lambda number, blocks, ticks, rate: 0.1 if number >= SECOND_USE and rate < 1 else 0.0
        policy = AdmitLearned(history)
        policy.watch([Order()])
        policy.note_room(0, 100)
        return history, policy

    def test_everything_enters_while_there_is_room(self):
        _, policy = self.make()
        for free, enters in ((100, True), (13, True), (12, False), (13, True), (0, False)):
            policy.note_room(free, 100)
            assert policy.admits_all == enters and policy.admits([OTHER]) == [enters]

    def test_then_what_brings_more_than_what_leaves(self):
        history, policy = self.make()
        for _ in range(2):
            history.count(KEYS, 0, 2, 0)
        assert policy.admits([*KEYS, OTHER]) == [True, True, False, False]
        _, dear = self.make(rate=1)
        assert dear.admits([*KEYS, OTHER]) == [False] * 4

    @pytest.mark.parametrize("tail_first", [False, True])
    def test_what_follows_a_refused_block_is_refused_too(self, tail_first):
        bench = TierBench((4,), (8,), nvme_admission="learned")
        space = bench.parts.nvme
        space.admission.note_room(0, 100)
        space.admission.admits = lambda keys: [key != KEYS[0] for key in keys]
        chain = list(zip([*KEYS, OTHER], [None, *KEYS[:2], None], strict=True))
        chain = chain[::-1] if tail_first else chain
        answers = space.admits(*zip(*chain, strict=True))
        assert dict(zip(dict(chain), answers, strict=True)) == dict.fromkeys(KEYS, False) | {OTHER: True}

    @pytest.mark.parametrize("has_room", [False, True])
    def test_nor_does_it_enter_in_a_later_step(self, has_room):
        """Where there is no room yet, what comes before waits for it, also beyond its request."""
        bench = TierBench((), (8,), nvme_admission="reuse(1)")
        if has_room:
            bench.serve("x" * 3)
            bench.parts.nvme.discard(*bench.catalog.rows())
        bench.parts.nvme.admission.admits = lambda keys: [key != KEYS[2] for key in keys]
        bench.serve("aabbccddeex")
        assert {bench.catalog.keys[row] for row in bench.catalog.rows()} == set(KEYS[:2])


class Own(AdmissionPolicy):
    """Lets nothing in."""

    def admits(self, keys):
        return [False] * len(keys)


class Half:
    def want(self, keys, request_id):
        pass


class Failing(Own):
    def __init__(self):
        raise ValueError("no luck")


def test_names():
    names = {"all": AdmissionPolicy, "learned": AdmitLearned, "reuse(3)": AdmitReused, f"{__name__}:Own": Own}
    assert {name: type(make_admission(name, ReuseHistory())) for name in names} == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("some", "'learned'"),
        ("no_such_module:Own", "cannot be imported: ModuleNotFoundError"),
        (f"{__name__}:Nobody", "no class of that name"),
        (f"{__name__}:PROMPT", "no class of that name"),
        (f"{__name__}:Failing", "cannot be built: ValueError: no luck"),
        (f"{__name__}:Half", "'admits_all', 'admits', 'watch', 'note_room', 'reset'"),
    ],
)
def test_a_wrong_name_is_one_sentence_that_names_the_setting(text, said):
    with pytest.raises(ConfigError, match=said) as error:
        make_admission(text, ReuseHistory(), "nvme_admission")
    assert str(error.value).startswith("nvme_admission ") and str(error.value).count(".\n") == 0
