# SPDX-License-Identifier: Apache-2.0
"""Speculation with several tokens, on vLLM's real schedulers: drafts that are right and wrong.

A wrong draft's KV is wrong until it is computed again; a drafter's KV looks so many tokens ahead as
vLLM says. Every byte that is read, and every token, is compared.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, PROMPT, Bench, Engines, prompt_of

from kvdisk.blocks import group_of
from kvdisk.messages import JobKind

DECODED = 5 * BLOCK_TOKENS
METHODS = [("ngram", False), ("ngram_gpu", False), ("ngram_gpu", True), ("eagle", False), ("eagle", True)]
METHODS += [("mtp", False), ("mtp", True)]
DRAFTS = 5


def make(engines: Engines, method: str, pipelined: bool, drafts: int = DRAFTS, **more: Any) -> Bench:
    more = {"drafter": "ngram" not in method, "max_batched_tokens": 96} | more
    made: Bench = engines.make(method=method, drafts=drafts, pipelined=pipelined, **more)
    return made


@pytest.mark.parametrize("store_decode", [True, False])
@pytest.mark.parametrize(("method", "pipelined"), METHODS)
def test_what_is_generated_with_drafts_is_loaded_again(engines, method, pipelined, store_decode):
    bench = make(engines, method, pipelined, extra={"store_decode": store_decode})
    for number in (1, 2):
        bench.add(f"first {number}", prompt_of(number), max_tokens=DECODED)
    bench.run()
    assert [len(bench.sampled(f"first {number}")) for number in (1, 2)] == [DECODED] * 2
    drafted = bench.scheduler.vllm_config.num_prefill_lookahead_tokens
    tokens = len(PROMPT) + store_decode * (DECODED - 1)
    for group in range(bench.group_count):
        known = tokens - drafted * group  # the second group is the drafter's
        stored = sum(group_of(key) == group for key in bench.stored())
        assert stored == 2 * (known // BLOCK_TOKENS if store_decode else len(PROMPT) // BLOCK_TOKENS)
    bench.forget()
    for number in (1, 2):
        again = bench.known[f"first {number}"].all_token_ids[:tokens]
        bench.serve(f"again {number}", again, max_tokens=20)
        other = [*again[:-1], (again[-1] + 1) % 500]
        bench.serve(f"other {number}", other, max_tokens=20)
    assert len(bench.jobs_of(JobKind.LOAD)) >= 2


@pytest.mark.parametrize("policy", ["on_compute", "on_preemption", "spillover"])
@pytest.mark.parametrize(("method", "pipelined"), METHODS)
def test_drafts_and_preemption(engines, method, pipelined, policy):
    bench = make(engines, method, pipelined, num_blocks=24, extra={"store_policy": policy})
    for number in range(4):
        bench.add(f"one {number}", prompt_of(number), max_tokens=DECODED)
    bench.run(steps=1000)
    assert any(bench.known[f"one {number}"].num_preemptions for number in range(4))
    for number in range(4):
        assert len(bench.sampled(f"one {number}")) == DECODED


@pytest.mark.parametrize("tail", range(6))
@pytest.mark.parametrize("drafts", [1, 2, 3, 5])
def test_a_block_is_stored_when_its_drafter_has_seen_all_that_it_looks_at(engines, drafts, tail):
    bench = make(engines, "mtp", False, drafts)
    whole = prompt_of(1, 4 * BLOCK_TOKENS + tail)
    bench.serve("a", whole)
    stored = [sum(group_of(key) == group for key in bench.stored()) for group in (0, 1)]
    assert stored == [4, 4 if tail >= drafts else 3]
    bench.forget()
    bench.serve("b", whole + prompt_of(2, BLOCK_TOKENS), max_tokens=20)
    bench.serve("c", whole[: 4 * BLOCK_TOKENS] + prompt_of(3, BLOCK_TOKENS), max_tokens=20)


HYBRIDS = [("ngram", False), ("eagle", False), ("mtp", False), ("ngram_gpu", True), ("mtp", True)]


def make_hybrid(engines: Engines, method: str, pipelined: bool, drafts: int, **more: Any) -> Bench:
    states = {"state_tokens": BLOCK_TOKENS, "state_drafts": drafts}
    return make(engines, method, pipelined, drafts, **states | more)


@pytest.mark.parametrize(("store_decode", "retention"), [(True, None), (True, 0), (False, 0)])
@pytest.mark.parametrize("drafts", [pytest.param(1, marks=pytest.mark.torture), 5])
@pytest.mark.parametrize(("method", "pipelined"), HYBRIDS)
def test_recurrent_states_and_drafts(engines, method, pipelined, drafts, store_decode, retention):
    """There is a state after each draft, and the right one comes to its block when it is known
    which that is. Of prompts all is stored, and hits."""
    how = {"retention_tokens": retention, "extra": {"store_decode": store_decode}}
    bench = make_hybrid(engines, method, pipelined, drafts, **how)
    for number in (1, 2):
        bench.add(f"first {number}", prompt_of(number), max_tokens=DECODED)
    bench.run()
    assert [len(bench.sampled(f"first {number}")) for number in (1, 2)] == [DECODED] * 2
    kinds = Counter(map(group_of, bench.stored()))
    if not store_decode:
        assert kinds[0] == 2 * (len(PROMPT) // BLOCK_TOKENS)
    bench.forget()
    for number in (1, 2):
        again = bench.known[f"first {number}"].all_token_ids
        bench.serve(f"again {number}", again[: len(PROMPT)] + prompt_of(3, 40), max_tokens=DECODED)
        bench.serve(f"longer {number}", again, max_tokens=DECODED)
    hits = {job.request_id for job in bench.jobs_of(JobKind.LOAD)}
    assert hits >= {"again 1", "again 2"}


@pytest.mark.parametrize("policy", ["on_compute", "spillover"])
@pytest.mark.parametrize(("method", "pipelined"), HYBRIDS)
def test_recurrent_states_drafts_and_preemption(engines, method, pipelined, policy):
    extra = {"store_policy": policy, "store_decode": True}
    bench = make_hybrid(engines, method, pipelined, 2, num_blocks=40, extra=extra)
    for number in range(4):
        bench.add(f"one {number}", prompt_of(number), max_tokens=DECODED)
    bench.run(steps=2000)
    assert any(bench.known[f"one {number}"].num_preemptions for number in range(4))
    for number in range(4):
        assert len(bench.sampled(f"one {number}")) == DECODED
        bench.serve(f"again {number}", bench.known[f"one {number}"].all_token_ids, max_tokens=20)
