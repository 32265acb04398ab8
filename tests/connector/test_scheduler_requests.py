# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: requests of special kinds, sessions, drafters, and the first requests
of a fresh store."""

from __future__ import annotations

from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, BLOCKS, OTHER, PROMPT, Bench, prompt_of
from test_scheduler_events import image
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.request import RequestStatus

from kvdisk.blocks import group_of, make_block_key
from kvdisk.messages import JobKind

WHOLE = PROMPT[: BLOCKS * BLOCK_TOKENS]
ADAPTER = LoRARequest("tuned", 1, "/adapters/tuned")


# -- adapters --------------------------------------------------------------------------------------


def test_a_request_with_an_adapter_without_files_is_left_alone(engines):
    """vLLM's hash names the adapter and its path. Retrained under both, it would find the KV of the
    old one."""
    bench = engines.make(num_blocks=12, adapters=True)
    requests = [
        bench.add(name, prompt_of(at), 70, lora_request=ADAPTER if at % 2 else None) for at, name in enumerate("abcd")
    ]
    bench.step(20)
    bench.abort("b")
    bench.finish(*"acd", count=70)
    assert sum(request.num_preemptions for request in requests) > 0
    touched = {move.key for job in bench.jobs for move in job.moves}
    assert [bool(touched & set(bench.keys(name))) for name in "abcd"] == [True, False, True, False]


# -- requests that load nothing --------------------------------------------------------------------


@pytest.mark.parametrize(("begins", "is_over"), [(BLOCK_TOKENS + 3, True), (2 * BLOCK_TOKENS + 5, False)])
def test_media_that_lie_over_each_other_leave_nothing(begins, is_over, engines):
    """vLLM hashes the first of them alone, so that the same frames with another sound would hit."""
    bench, film = engines.make(nvme=True), image("film", 5, 2 * BLOCK_TOKENS)
    bench.sees_images()
    for name in ("sound", "another"):
        media = [film, image(name, begins, BLOCK_TOKENS // 2)]
        request = bench.serve(name, PROMPT, mm_features=media)
        bench.forget()
    first = make_block_key(request.block_hashes[begins // BLOCK_TOKENS], 0)
    assert (first in bench.keys("sound")) == is_over
    bench.serve("again", PROMPT, mm_features=media)
    assert bool(bench.stored()) == bool(bench.loads()) != is_over


@pytest.mark.parametrize(
    "kind",
    [
        {"sampling_params": SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1)},
        {"pooling_params": PoolingParams(task="embed", skip_reading_prefix_cache=True)},
    ],
    ids=["prompt log-probabilities", "pooling"],
)
def test_requests_that_need_the_whole_prompt_computed_load_nothing(kind, engines):
    bench = engines.make()
    bench.serve("a", PROMPT)
    bench.forget()
    request = bench.add("b", PROMPT, **kind)
    assert request.skip_reading_prefix_cache
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (0, False), "nor does it wait for a block"
    assert bench.manager._requests["b"].limits.most_load_tokens == 0, "nor is anything read ahead"
    assert bench.step().num_scheduled_tokens == {"b": len(PROMPT)}
    bench.run()
    bench.serve("c", OTHER, **kind)
    assert not bench.loads()
    assert len(bench.stored()) == 2 * BLOCKS, "what they compute is stored all the same, once"


# -- tokens that come and go -----------------------------------------------------------------------


@pytest.mark.parametrize("store_decode", [False, True])
def test_a_session_is_stored_as_its_prompt_grows(store_decode, engines):
    """Each answer becomes a part of the prompt, less its last token, in whose place comes what is
    said next."""
    bench = engines.make(extra={"store_decode": store_decode})
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


def test_keys_of_a_prompt_that_was_hashed_anew_are_forgotten(engines):
    """No session of vLLM 0.32 does it after its blocks were offered; were one to, another prompt's
    KV would be told."""
    bench = engines.make()
    request = bench.add("a", PROMPT, max_tokens=8, resumable=True)
    bench.step()
    request.block_hashes[2:] = [b"x" * 32, b"y" * 32]
    bench.step()
    assert bench.stored()[BLOCKS:] == [make_block_key(one, 0) for one in request.block_hashes[2:]]
    bench.abort("a")


# -- drafters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored_of", "asked", "drafted", "loaded"),
    [
        (WHOLE, [*WHOLE, 8], BLOCKS - 1, BLOCKS - 2),  # of the last block the drafter does not know the next token
        ([*WHOLE, 7], [*WHOLE, 8], BLOCKS, BLOCKS - 1),  # it may be another one now
        ([*WHOLE, *OTHER[:33]], [*WHOLE, *[8] * 33], BLOCKS + 1, BLOCKS - 1),
        ([*WHOLE, *OTHER[:33]], [*WHOLE, *OTHER[:33]], BLOCKS + 1, BLOCKS),
    ],
)
def test_a_drafters_last_block_is_not_what_its_hash_says(engines, stored_of, asked, drafted, loaded):
    bench = engines.make(drafter=True)
    bench.serve("a", stored_of)
    whole = len(stored_of) // BLOCK_TOKENS
    assert [sum(group_of(key) == group for key in bench.stored()) for group in (0, 1)] == [whole, drafted]
    bench.forget()
    bench.serve("b", asked)
    (load,) = bench.jobs_of(JobKind.LOAD)
    for group in (0, 1):
        assert [move.key for move in load.moves if group_of(move.key) == group] == bench.keys("a", group)[:loaded]


# -- a fresh store ---------------------------------------------------------------------------------


FRESH: dict[str, Any] = {"nvme": True, "extra": {"cpu_bytes": 0}}


@pytest.mark.parametrize(("max_tokens", "window"), [(1, None), (8, None), (1, 2 * BLOCK_TOKENS)])
def test_the_first_requests_of_a_fresh_store_are_stored(engines, max_tokens, window):
    bench = engines.make(**FRESH, window_tokens=window)
    bench.add("a", PROMPT, max_tokens)
    bench.add("b", OTHER, max_tokens)
    bench.run()
    assert {*bench.keys("a"), *bench.keys("b")} <= set(bench.stored())
    bench.forget()
    for name in "ab":
        bench.serve(f"again {name}", bench.known[name].prompt_token_ids)
    assert bench.counters()["hit_tokens.nvme"] == 2 * BLOCKS * BLOCK_TOKENS


@pytest.mark.parametrize("reset", ["reset_prefix_cache", "reset_connector_cache"])
def test_what_is_gone_before_there_is_room_is_not_stored(engines, reset):
    bench: Bench = engines.make(**FRESH)
    bench.hold = {JobKind.OPEN_SEGMENT}
    bench.add("a", PROMPT, max_tokens=1)
    bench.step(4)
    assert getattr(bench.scheduler, reset)()
    bench.release()
    bench.run()
    assert bench.stored() == []
