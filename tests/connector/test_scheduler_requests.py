# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: requests of special kinds, sessions, drafters, and the first requests
of a fresh store."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from schedulers import BLOCK_TOKENS, Bench, Engines
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.request import RequestStatus

from kvdisk.blocks import Tier, group_of, make_block_key
from kvdisk.config import Config
from kvdisk.connector.scheduler_side import SchedulerSide
from kvdisk.errors import ConfigError
from kvdisk.messages import JobKind

pytestmark = pytest.mark.vllm

BLOCKS = 4
PROMPT = list(range(100, 100 + BLOCKS * BLOCK_TOKENS + 5))
WHOLE = PROMPT[: BLOCKS * BLOCK_TOKENS]
OTHER = [token + 1 for token in PROMPT]
ADAPTER = LoRARequest("tuned", 1, "/adapters/tuned")


# -- adapters, salts, images -----------------------------------------------------------------------


def test_a_request_with_an_adapter_is_left_alone(plain: Engines) -> None:
    """vLLM's hash names the adapter and its path. Retrained under both, it would find the KV of the
    old one."""
    bench = plain.make(num_blocks=12)
    requests = [
        bench.add(name, [token + at for token in PROMPT], 150, lora_request=ADAPTER if at % 2 else None)
        for at, name in enumerate("abcd")
    ]
    for _ in range(20):
        bench.step()
    bench.abort("b")
    bench.run(steps=1500)
    assert [len(bench.tokens[name]) for name in "acd"] == [150] * 3
    assert sum(request.num_preemptions for request in requests) > 0
    touched = {move.key for job in bench.jobs for move in job.moves}
    assert [bool(touched & set(bench.keys(name))) for name in "abcd"] == [True, False, True, False]
    bench.assert_quiet()


def test_salts_have_keys_of_their_own(plain: Engines) -> None:
    bench = plain.make()
    salts = (None, "one", "two")
    for name in ("first", "again"):
        for salt in salts:
            bench.serve(f"{name} {salt}", PROMPT, cache_salt=salt)
            bench.forget()
        if name == "first":
            assert not bench.loads(), "nothing of another tenant"
            assert len(set(bench.stored())) == 3 * BLOCKS, "not one block is shared"
    assert bench.loads() == [(f"again {salt}", BLOCKS) for salt in salts]
    assert [move.key for job in bench.jobs_of(JobKind.LOAD) for move in job.moves] == bench.stored()


def test_images_are_a_part_of_the_keys(plain: Engines) -> None:
    bench = plain.make()
    for name in ("one", "two"):
        feature = MultiModalFeatureSpec(None, "image", name, PlaceholderRange(BLOCK_TOKENS, 10))
        bench.make_request(name, PROMPT, mm_features=[feature])
    first, second = bench.keys("one"), bench.keys("two")
    assert first[0] == second[0], "before the image"
    assert not set(first[1:]) & set(second[1:]), "from the image on"


# -- requests that load nothing, or are counted otherwise
# -------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        {"sampling_params": SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1)},
        {"pooling_params": PoolingParams(task="embed", skip_reading_prefix_cache=True)},
    ],
    ids=["prompt log-probabilities", "pooling"],
)
def test_requests_that_need_the_whole_prompt_computed_load_nothing(kind: dict[str, Any], plain: Engines) -> None:
    bench = plain.make()
    bench.serve("a", PROMPT)
    bench.forget()
    request = bench.add("b", PROMPT, **kind)
    assert request.skip_reading_prefix_cache
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (0, False), "nor does it wait for a block"
    assert bench._manager._requests["b"].limits.most_load_tokens == 0, "nor is anything read ahead"
    assert bench.step().num_scheduled_tokens == {"b": len(PROMPT)}
    bench.run()
    bench.serve("c", OTHER, **kind)
    assert not bench.loads()
    assert len(bench.stored()) == 2 * BLOCKS, "what they compute is stored all the same, once"
    bench.assert_quiet()


def test_an_engine_may_count_with_numbers_of_numpy(plain: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = plain.make()
    connector = bench.connector
    matched, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
    build = connector.build_connector_meta

    def build_connector_meta(output: Any) -> Any:
        scheduled = {request_id: np.int64(count) for request_id, count in output.num_scheduled_tokens.items()}
        return build(dataclasses.replace(output, num_scheduled_tokens=scheduled))

    monkeypatch.setattr(connector, "get_num_new_matched_tokens", lambda one, tokens: matched(one, np.int64(tokens)))
    monkeypatch.setattr(
        connector, "update_state_after_alloc", lambda one, blocks, tokens: allocated(one, blocks, np.int64(tokens))
    )
    monkeypatch.setattr(connector, "build_connector_meta", build_connector_meta)
    for name in "ab":
        bench.serve(name, PROMPT)
        bench.forget()
    assert bench.counters()["loaded_blocks"] == bench.counters()["stored_blocks"] == BLOCKS


def test_without_the_block_pool_nothing_starts(plain: Engines) -> None:
    bench = plain.make()
    side = SchedulerSide(Config(), bench.scheduler.vllm_config, bench.scheduler.kv_cache_config)
    with pytest.raises(ConfigError, match="block pool"):
        side.bind_pool(object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="block pool"):
        side.has_pending_work()


# -- one prefix, and the engine's own prefix cache off
# -----------------------------------------------


def test_without_a_prefix_cache_requests_load_one_prefix_at_the_same_time(plain: Engines) -> None:
    bench = plain.make(prefix_caching=False)
    bench.serve("a", PROMPT)
    bench.hold = {JobKind.LOAD}
    for name in "bcd":
        bench.add(name, PROMPT)
    bench.step()
    assert bench.loads() == [(name, BLOCKS) for name in "bcd"]
    catalog = bench._manager._catalog
    assert [catalog.pins(row, Tier.CPU) for row in catalog.rows()] == [3] * BLOCKS
    bench.abort("c")
    bench.fail = {JobKind.LOAD: (3,)}  # of all three: the copy is dropped once, not three times
    bench.release()
    bench.run()
    assert [len(bench.tokens[name]) for name in "bd"] == [2, 2]
    bench.assert_quiet()


# -- tokens that come and go -----------------------------------------------------------------------


@pytest.mark.parametrize("store_decode", [False, True])
def test_a_session_is_stored_as_its_prompt_grows(store_decode: bool, plain: Engines) -> None:
    """Each answer becomes a part of the prompt, less its last token, in whose place comes what is
    said next."""
    bench = plain.make(extra={"store_decode": store_decode})
    turns = [PROMPT[: BLOCK_TOKENS - 1], PROMPT[40:90], PROMPT[90:130]]
    session = bench.add("a", turns[0], max_tokens=1, resumable=True)
    for tokens in (*turns[1:], None):
        while session.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            bench.step()
        if tokens:
            bench.add("a", tokens, max_tokens=3, resumable=True)
    prompt = list(session.all_token_ids)
    assert prompt[: BLOCK_TOKENS + 1] == turns[0] + turns[1][:2], "the first answer's only token is gone"
    expected = [make_block_key(one, 0) for one in session.block_hashes[: len(prompt[:-1]) // BLOCK_TOKENS]]
    assert bench.stored() == expected
    bench.add("a", [], resumable=False)  # the end of the session
    bench.run()
    bench.forget()
    bench.serve("b", prompt)  # who says the same from the start gets it
    assert bench.loads() == [("b", len(expected))]
    bench.assert_quiet()


def test_keys_of_a_prompt_that_was_hashed_anew_are_forgotten(plain: Engines) -> None:
    """No session of vLLM 0.32 does it after its blocks were offered; were one to, another prompt's
    KV would be told."""
    bench = plain.make()
    request = bench.add("a", PROMPT, max_tokens=8, resumable=True)
    bench.step()
    request.block_hashes[2:] = [b"x" * 32, b"y" * 32]
    bench.step()
    assert bench.stored()[BLOCKS:] == [make_block_key(one, 0) for one in request.block_hashes[2:]]


# -- groups of other kinds
# ---------------------------------------------------------------------------


def test_groups_with_blocks_of_different_sizes(plain: Engines) -> None:
    bench = plain.make(window_tokens=3 * BLOCK_TOKENS, window_block_tokens=2 * BLOCK_TOKENS)
    bench.serve("a", PROMPT)
    full, large = bench.keys("a"), [bench.keys("a", 1)[at] for at in (1, 3)]
    assert bench.stored() == full + large, "a block is named by the last of its hashes"
    bench.forget()
    bench.serve("b", PROMPT[: 3 * BLOCK_TOKENS + 1])
    (load,) = bench.jobs_of(JobKind.LOAD)
    assert [move.key for move in load.moves] == full[:2] + large[:1], "where both groups have whole blocks"
    bench.assert_quiet()


def test_blocks_that_a_window_has_passed_are_nobodys(plain: Engines) -> None:
    bench = plain.make(window_tokens=BLOCK_TOKENS + 1)
    bench.serve("a", PROMPT)
    for key in reversed([key for key in bench.stored() if group_of(key) == 1][:-1]):
        bench._manager._tiers.get(Tier.CPU).drop([bench._manager._catalog.find(key)])
    bench.forget()
    bench.add("b", PROMPT)
    bench.step()
    assert bench.table("b", 1)[: BLOCKS - 1] == [0] * (BLOCKS - 1), "null blocks: neither loaded nor stored again"
    bench.run()
    assert bench.loads() == [("b", BLOCKS + 1)]
    assert len(bench.jobs_of(JobKind.STORE)) == 1


@pytest.mark.parametrize(
    ("stored_of", "asked", "drafted", "loaded"),
    [
        (WHOLE, [*WHOLE, 8], BLOCKS - 1, BLOCKS - 2),  # of the last block the drafter does not know the next token
        ([*WHOLE, 7], [*WHOLE, 8], BLOCKS, BLOCKS - 1),  # it may be another one now
        ([*WHOLE, *OTHER[:33]], [*WHOLE, *[8] * 33], BLOCKS + 1, BLOCKS - 1),
        ([*WHOLE, *OTHER[:33]], [*WHOLE, *OTHER[:33]], BLOCKS + 1, BLOCKS),
    ],
)
def test_a_drafters_last_block_is_not_what_its_hash_says(
    plain: Engines, stored_of: list[int], asked: list[int], drafted: int, loaded: int
) -> None:
    bench = plain.make(drafter=True)
    bench.serve("a", stored_of)
    whole = len(stored_of) // BLOCK_TOKENS
    assert [sum(group_of(key) == group for key in bench.stored()) for group in (0, 1)] == [whole, drafted]
    bench.forget()
    bench.serve("b", asked)
    (load,) = bench.jobs_of(JobKind.LOAD)
    for group in (0, 1):
        assert [move.key for move in load.moves if group_of(move.key) == group] == bench.keys("a", group)[:loaded]
    bench.assert_quiet()


# -- what has ended before a fresh store had room for it
# ---------------------------------------------

FRESH: dict[str, Any] = {"nvme": True, "extra": {"cpu_bytes": 0}}


@pytest.mark.parametrize(("max_tokens", "window"), [(1, None), (8, None), (1, 2 * BLOCK_TOKENS)])
def test_the_first_requests_of_a_fresh_store_are_stored(plain: Engines, max_tokens: int, window: int | None) -> None:
    bench = plain.make(**FRESH, window_tokens=window)
    bench.add("a", PROMPT, max_tokens)
    bench.add("b", [token + 200 for token in PROMPT], max_tokens)
    bench.run()
    assert {*bench.keys("a"), *bench.keys("b")} <= set(bench.stored())
    bench.forget()
    for name in "ab":
        bench.serve(f"again {name}", bench.known[name].prompt_token_ids)
    assert bench.counters()["hit_tokens.nvme"] == 2 * BLOCKS * BLOCK_TOKENS
    bench.assert_quiet()


@pytest.mark.parametrize("reset", ["reset_prefix_cache", "reset_connector_cache"])
def test_what_is_gone_before_there_is_room_is_not_stored(plain: Engines, reset: str) -> None:
    bench: Bench = plain.make(**FRESH)
    bench.hold = {JobKind.OPEN_SEGMENT}
    bench.add("a", PROMPT, max_tokens=1)
    for _ in range(4):
        bench.step()
    assert getattr(bench.scheduler, reset)()
    bench.release()
    bench.run()
    assert bench.stored() == []
