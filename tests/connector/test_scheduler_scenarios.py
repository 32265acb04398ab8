# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: preemption, resets, sessions, several groups, ranks, and requests of special kinds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from schedulers import BLOCK_TOKENS, Bench
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.request import RequestStatus

from kvdisk.blocks import Tier, group_of, make_block_key
from kvdisk.connector.connector import KVDiskWorkerMetadata
from kvdisk.messages import Job, JobKind, JobResult, Reason, Report

pytestmark = pytest.mark.vllm

BLOCKS = 4
PROMPT = list(range(100, 100 + BLOCKS * BLOCK_TOKENS + 5))
SHORT_OF_A_BLOCK = PROMPT[: BLOCK_TOKENS - 1]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "model")


def _jobs(bench: Bench, kind: JobKind) -> list[Job]:
    return [job for job in bench.jobs if job.kind is kind]


def _references(bench: Bench) -> list[int]:
    return [block.ref_cnt for block in bench.pool.blocks[1:]]


def _assert_all_given_back(bench: Bench) -> None:
    assert not any(_references(bench))
    catalog = bench.connector.scheduler._manager._catalog
    assert not any(catalog.pins(row, tier) for row in catalog.rows() for tier in (Tier.CPU, Tier.NVME))
    assert not bench.connector.scheduler._requests


def _stored(bench: Bench) -> list[bytes]:
    return [move.key for job in _jobs(bench, JobKind.STORE) for move in job.moves]


# -- preemption, aborts, resets --------------------------------------------------------------------


def test_a_victim_comes_back_before_its_store_has_ended(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "model", num_blocks=12)
    bench.hold = {JobKind.STORE}
    bench.add("a", PROMPT, max_tokens=40)
    victim = bench.add("b", [token + 1 for token in PROMPT], max_tokens=80)
    while victim.num_preemptions == 0:
        bench.step()
    while victim.status is not RequestStatus.RUNNING:
        bench.step()
    assert {job.kind for job in bench.held} == {JobKind.STORE}, "its copy is still on its way"
    bench.release()
    bench.run(steps=300)
    assert [len(bench.tokens[name]) for name in "ab"] == [40, 80]
    assert len(set(_stored(bench))) == len(_stored(bench)) == 2 * BLOCKS, "and none is stored a second time"
    _assert_all_given_back(bench)


def test_requests_with_one_prefix_load_it_at_the_same_time(tmp_path: Path) -> None:
    """Where the engine's own prefix cache is off."""
    bench = Bench(tmp_path / "model", prefix_caching=False)
    bench.add("a", PROMPT)
    bench.run()
    assert bench.scheduler.reset_prefix_cache()
    bench.hold = {JobKind.LOAD}
    for name in "bcd":
        bench.add(name, PROMPT)
    bench.step()
    assert [job.request_id for job in bench.held] == ["b", "c", "d"]
    catalog = bench.connector.scheduler._manager._catalog
    assert [catalog.pins(row, Tier.CPU) for row in catalog.rows()] == [3] * BLOCKS
    bench.abort("c")
    bench.fail = {JobKind.LOAD: (3,)}  # of all three: the copy is dropped once, not three times
    bench.release()
    bench.run()
    assert [len(bench.tokens[name]) for name in "bd"] == [2, 2]
    _assert_all_given_back(bench)


def test_a_reset_with_a_load_in_flight_serves_nothing_of_before(bench: Bench) -> None:
    bench.add("a", PROMPT)
    bench.run()
    assert bench.scheduler.reset_prefix_cache()
    bench.hold = {JobKind.LOAD}
    request = bench.add("b", PROMPT)
    bench.step()
    assert bench.scheduler.reset_connector_cache()
    bench.release()
    bench.step()
    assert request.num_computed_tokens == 0, "none of what was loaded counts"
    assert bench.step().num_scheduled_tokens == {"b": len(PROMPT)}
    bench.run()
    assert len(_jobs(bench, JobKind.LOAD)) == 1
    _assert_all_given_back(bench)


def test_a_reset_with_stores_and_loads_in_flight_gives_everything_back(bench: Bench) -> None:
    bench.add("a", PROMPT)
    bench.run()
    assert bench.scheduler.reset_prefix_cache()
    bench.hold = {JobKind.STORE, JobKind.LOAD}
    bench.add("b", PROMPT)
    bench.add("c", [token + 1 for token in PROMPT], max_tokens=1)
    bench.step()
    assert {job.kind for job in bench.held} == {JobKind.STORE, JobKind.LOAD}
    bench.abort("b")
    assert bench.scheduler.reset_connector_cache()
    bench.release()
    bench.run()
    _assert_all_given_back(bench)
    assert len(bench.connector.scheduler._manager._catalog) == 0, "no copy is left, of either"


@pytest.mark.parametrize("seed", range(6))
def test_after_any_run_the_pool_is_as_it_is_without_the_connector(seed: int, tmp_path: Path) -> None:
    extra = {"store_decode": bool(seed % 2), "cpu_bytes": "1MiB", "lookup_wait_s": 0.01}
    window = 2 * BLOCK_TOKENS if seed % 3 == 0 else None
    ends = []
    for connector in (True, False):
        bench = Bench(
            tmp_path / f"model{connector}", num_blocks=26, extra=extra, connector=connector, window_tokens=window
        )
        _random_run(bench, random.Random(seed))
        ends.append((_references(bench), bench.pool.get_num_free_blocks()))
        if connector:
            _assert_all_given_back(bench)
            assert bench.counters()["stored_blocks"] > 0
    assert ends[0] == ends[1]


def _random_run(bench: Bench, rng: random.Random) -> None:
    """Requests that share prefixes come and are aborted; jobs are held, let go and fail; the caches are reset."""
    kinds = (JobKind.STORE, JobKind.LOAD)
    for step in range(120):
        if rng.random() < 0.25:
            start = rng.choice([100, 100, 200])
            length = rng.randrange(10, 6 * BLOCK_TOKENS)
            bench.add(f"r{step}", range(start, start + length), max_tokens=rng.randrange(1, 60))
        if rng.random() < 0.1 and bench.scheduler.requests:
            bench.abort(rng.choice(sorted(bench.scheduler.requests)))
        if rng.random() < 0.1:
            bench.hold = set(rng.sample(kinds, rng.randrange(3)))
            bench.fail = {rng.choice(kinds): (rng.randrange(4),)} if rng.random() < 0.5 else {}
        if rng.random() < 0.05:
            bench.scheduler.reset_prefix_cache(reset_connector=rng.random() < 0.5)
        bench.step()
    bench.release()
    bench.fail = {}
    bench.run(steps=3000)


# -- groups ----------------------------------------------------------------------------------------


def test_groups_with_blocks_of_different_sizes(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "model", window_tokens=3 * BLOCK_TOKENS, window_block_tokens=2 * BLOCK_TOKENS)
    request = bench.add("a", PROMPT)
    bench.run()
    hashes = request.block_hashes
    full = [make_block_key(block_hash, 0) for block_hash in hashes[:BLOCKS]]
    large = [make_block_key(hashes[at], 1) for at in (1, 3)]
    assert _stored(bench) == full + large, "a block is named by the last of its hashes"
    assert bench.scheduler.reset_prefix_cache()
    bench.add("b", PROMPT)
    bench.run()
    assert bench.scheduler.reset_prefix_cache()
    bench.add("c", PROMPT[: 3 * BLOCK_TOKENS + 1])
    bench.run()
    first, second = _jobs(bench, JobKind.LOAD)
    assert [move.key for move in first.moves] == full + large
    assert [move.key for move in second.moves] == full[:2] + large[:1], "where both groups have whole blocks"
    _assert_all_given_back(bench)


def test_blocks_that_a_window_has_passed_are_nobodys(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "model", window_tokens=BLOCK_TOKENS + 1)
    bench.add("a", PROMPT)
    bench.run()
    manager = bench.connector.scheduler._manager
    early = [move.key for move in _jobs(bench, JobKind.STORE)[0].moves if group_of(move.key) == 1][:-1]
    for key in reversed(early):
        manager._tiers.get(Tier.CPU).drop([manager._catalog.find(key)])
    assert bench.scheduler.reset_prefix_cache()
    bench.add("b", PROMPT)
    bench.step()
    (_, window) = bench.scheduler.kv_cache_manager.get_block_ids("b")
    assert window[: BLOCKS - 1] == [0] * (BLOCKS - 1), "null blocks, which are neither loaded nor stored again"
    bench.run()
    (load,) = _jobs(bench, JobKind.LOAD)
    assert len(load.moves) == BLOCKS + 1
    assert len(_jobs(bench, JobKind.STORE)) == 1
    _assert_all_given_back(bench)


def test_two_ranks_answer_in_different_steps(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = bench.connector.scheduler._manager
    monkeypatch.setattr(manager._transfers, "_rank_count", 2)
    bench.add("a", PROMPT, max_tokens=1)
    bench.step()
    assert bench.counters().get("stored_blocks", 0) == 0
    (store,) = _jobs(bench, JobKind.STORE)
    # The second rank fails one of them: that one failed.
    report = Report({store.id: JobResult(1, {2: Reason.IO_ERROR})})
    output = type("Output", (), {"kv_connector_worker_meta": KVDiskWorkerMetadata(report), "invalid_block_ids": set()})
    bench.connector.update_connector_output(output)
    assert bench.counters()["stored_blocks"] == BLOCKS - 1
    assert not any(_references(bench))


# -- tokens that come and go -----------------------------------------------------------------------


@pytest.mark.parametrize(("max_tokens", "blocks"), [(1, 0), (2, 1)])
def test_the_last_sampled_token_completes_no_block(max_tokens: int, blocks: int, tmp_path: Path) -> None:
    bench = Bench(tmp_path / "model", extra={"store_decode": True})
    request = bench.add("a", SHORT_OF_A_BLOCK, max_tokens=max_tokens)
    bench.run()
    assert len(request.block_hashes) == 1, "it has a hash, and without its last token no KV"
    assert len(_stored(bench)) == blocks


@pytest.mark.parametrize("store_decode", [False, True])
def test_a_session_is_stored_as_its_prompt_grows(store_decode: bool, tmp_path: Path) -> None:
    """Each answer becomes a part of the prompt, less its last token, in whose place comes what is said next."""
    bench = Bench(tmp_path / "model", extra={"store_decode": store_decode})
    turns = [SHORT_OF_A_BLOCK, PROMPT[40:90], PROMPT[90:130]]
    session = bench.add("a", turns[0], max_tokens=1, resumable=True)
    for tokens in turns[1:]:
        while session.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            bench.step()
        bench.add("a", tokens, max_tokens=3, resumable=True)
    while session.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
        bench.step()
    prompt = list(session.all_token_ids)
    whole = len(prompt[:-1]) // BLOCK_TOKENS
    assert prompt[: BLOCK_TOKENS + 1] == SHORT_OF_A_BLOCK + turns[1][:2], "the first answer's only token is gone"
    expected = [make_block_key(block_hash, 0) for block_hash in session.block_hashes[:whole]]
    assert _stored(bench) == expected
    bench.add("a", [], resumable=False)  # the end of the session
    bench.run()
    _assert_all_given_back(bench)
    # Who says the same from the start gets it.
    assert bench.scheduler.reset_prefix_cache()
    bench.add("b", prompt)
    bench.run()
    (load,) = _jobs(bench, JobKind.LOAD)
    assert [move.key for move in load.moves] == expected


def test_keys_of_a_prompt_that_was_hashed_anew_are_forgotten(bench: Bench) -> None:
    """No session of vLLM 0.32 does it after its blocks were offered; were one to, another prompt's KV would be told."""
    request = bench.add("a", PROMPT, max_tokens=8, resumable=True)
    bench.step()
    assert len(_stored(bench)) == BLOCKS
    del request.block_hashes[2:]
    request.block_hashes.extend([b"x" * 32, b"y" * 32])
    bench.step()
    state = bench.connector.scheduler._manager._requests["a"]
    assert [key[:-2] for key in state.keys[0]] == request.block_hashes[:BLOCKS]
    assert len(_stored(bench)) == BLOCKS + 2, "the two blocks that are others now"


# -- requests of special kinds ---------------------------------------------------------------------


def test_images_are_a_part_of_the_keys(bench: Bench) -> None:
    keys = []
    for name in ("one", "two"):
        feature = MultiModalFeatureSpec(None, "image", name, PlaceholderRange(BLOCK_TOKENS, 10))
        request = bench.make_request(name, PROMPT, mm_features=[feature])
        bench.connector.on_new_request(request)
        keys.append(bench.connector.scheduler._manager._requests[name].keys[0][:])
    first, second = keys
    assert first[0] == second[0], "before the image"
    assert not set(first[1:]) & set(second[1:]), "from the image on"


@pytest.mark.parametrize(
    "kind",
    [
        {"sampling_params": SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1)},
        {"pooling_params": PoolingParams(task="embed", skip_reading_prefix_cache=True)},
    ],
    ids=["prompt log-probabilities", "pooling"],
)
def test_requests_that_need_the_whole_prompt_computed_load_nothing(kind: dict[str, object], bench: Bench) -> None:
    bench.add("a", PROMPT)
    bench.run()
    assert bench.scheduler.reset_prefix_cache()
    request = bench.add("b", PROMPT, **kind)
    assert request.skip_reading_prefix_cache
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (0, False), "nor does it wait for a block"
    assert bench.connector.scheduler._manager._requests["b"].most_load_tokens == 0, "nor is anything read ahead"
    assert bench.step().num_scheduled_tokens == {"b": len(PROMPT)}
    bench.run()
    bench.add("c", [token + 1 for token in PROMPT], **kind)
    bench.run()
    bench.add("d", [token + 2 for token in PROMPT], **kind)
    assert bench.connector.reset_cache()
    bench.run()
    assert not _jobs(bench, JobKind.LOAD)
    assert len(_stored(bench)) == 3 * BLOCKS, "what they compute is stored all the same, once, also after a reset"
    _assert_all_given_back(bench)
