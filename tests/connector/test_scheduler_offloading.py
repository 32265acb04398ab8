# SPDX-License-Identifier: Apache-2.0
"""What is stored, kept and loaded, on vLLM's real scheduler and kvdisk's real workers.

The scenarios are those of vLLM's own tests of its offloading connector and of its simple CPU
offload.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, SIZES, SLOT_BYTES, Bench, prompt_of
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SinkFullAttentionManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvdisk.blocks import Tier, group_of
from kvdisk.messages import JobKind

BLOCK: dict[str, Any] = {"block_size": BLOCK_TOKENS, **SIZES}
GROUPS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window_tokens": 2 * BLOCK_TOKENS},
    "narrow window": {"window_tokens": 40},
    "large blocks": {"window_tokens": 3 * BLOCK_TOKENS, "window_block_tokens": 2 * BLOCK_TOKENS},
    "drafter": {"drafter": True},
    "chunks": {"other": ChunkedLocalAttentionSpec(**BLOCK, attention_chunk_size=4 * BLOCK_TOKENS)},
    "window that keeps more": {
        "other": SlidingWindowSpec(**BLOCK, sliding_window=40, extra_retained_tokens=BLOCK_TOKENS)
    },
    "sinks": {"other": SinkFullAttentionSpec(**BLOCK, sink_len=BLOCK_TOKENS)},
    "latent window": {"other": SlidingWindowMLASpec(**BLOCK, sliding_window=2 * BLOCK_TOKENS)},
    "states": {"state_tokens": BLOCK_TOKENS, "retention_tokens": None},
}
SOURCES = ["cpu", "nvme", "nvme through staging", "nvme, after a restart", "nvme, read ahead"]


@pytest.fixture(autouse=True)
def sinks_start(monkeypatch):
    """vLLM 0.32: the manager of sinks does not know an argument that every manager is given."""
    monkeypatch.setattr(SinkFullAttentionManager, "__init__", FullAttentionManager.__init__)


def per_group(bench: Bench, keys: list[bytes]) -> list[int]:
    """Return how many of these keys are of each group."""
    return [sum(group_of(key) == group for key in keys) for group in range(bench.group_count)]


# -- what is stored, and what of it is loaded ------------------------------------------------------

LEFT_AND_FOUND = [
    # tokens of the prompt and sampled, full blocks stored, with decode too, and what of them hits
    (31, 1, 0, 0, 0),  # the last token sampled has no KV
    (31, 2, 0, 1, 0),
    (32, 1, 1, 1, 0),  # one token is left to compute
    (64, 33, 2, 3, 1),
    (100, 30, 3, 4, 3),
    (600, 2, 18, 18, 18),  # in more than one step
]


@pytest.mark.parametrize("store_decode", [False, True])
@pytest.mark.parametrize(("groups", "pipelined"), [(name, at % 2 == 0) for at, name in enumerate(GROUPS)])
def test_what_a_prompt_leaves_and_what_the_next_one_finds(engines, pipelined, groups, store_decode):
    extra = {"store_decode": store_decode}
    bench = engines.make(pipelined=pipelined, num_blocks=256, extra=extra, **GROUPS[groups])
    for number, (prompt, sampled, stored, with_decode, hit) in enumerate(LEFT_AND_FOUND):
        bench.forget(Tier.CPU)
        bench.jobs.clear()
        bench.serve(f"a{number}", prompt_of(number, prompt), sampled)
        keys = bench.stored()
        assert len(keys) == len(set(keys)), "each once"
        assert per_group(bench, keys)[0] == (with_decode if store_decode else stored)
        assert bench.in_tier(Tier.CPU) == set(keys)
        bench.forget()
        bench.serve(f"b{number}", prompt_of(number, prompt), sampled)
        loaded = [move.key for job in bench.jobs_of(JobKind.LOAD) for move in job.moves]
        whole = hit // 2 * 2 if groups == "large blocks" else hit
        # What a drafter's last block was computed for is another token now.
        least = whole - 1 if groups == "drafter" else whole
        assert least <= per_group(bench, loaded)[0] <= whole
        assert set(loaded) <= set(keys)
        assert bench.sampled(f"b{number}") == bench.sampled(f"a{number}")


@pytest.mark.parametrize(
    ("source", "groups"),
    [
        *((source, "full") for source in SOURCES),
        *((source, "window") for source in SOURCES),
        *zip(SOURCES, ["narrow window", "large blocks", "drafter", "large blocks", "drafter"], strict=True),
        *((source, "states") for source in SOURCES if "staging" not in source),
        ("cpu", "chunks"),
        ("nvme", "window that keeps more"),
    ],
)
def test_every_way_back_to_the_gpu(engines, source, groups):
    more: dict[str, Any] = GROUPS[groups] | {"extra": {"cpu_bytes": 0} if "staging" in source else {}}
    more |= {"max_seqs": 1} if "ahead" in source else {"ranks": 2} if source == "nvme" else {}
    bench = engines.make(nvme=source != "cpu", **more)
    bench.serve("first", prompt_of(9, 290))  # while it runs the first segment is made
    prompts = {name: prompt_of(number, 290) for number, name in enumerate("abc")}
    for name, prompt in prompts.items():
        bench.serve(name, prompt, 3)
    stored = set(bench.stored())
    if "restart" in source:
        bench.assert_quiet()
        engines.close()
        bench = engines.make(nvme=True, **more)
        assert bench.in_tier(Tier.NVME) == stored
    else:
        bench.forget(*([Tier.CPU] if source in {"nvme", "nvme, read ahead"} else []))
    if "ahead" in source:
        bench.add("running", prompt_of(8, 100), 8)
    for name, prompt in prompts.items():
        bench.add(f"{name} again", prompt, 3)
        if groups == "full":  # it waits, and hits the GPU's cache
            bench.add(f"{name} third", prompt, 3)
    bench.run()
    loads = bench.jobs_of(JobKind.LOAD)
    assert [job.request_id for job in loads] == ["a again", "b again", "c again"]
    in_memory = source in {"cpu", "nvme, read ahead"}
    assert all((Tier.NVME not in move.slots) == in_memory for job in loads for move in job.moves)
    assert "failed_loads" not in bench.counters()


@pytest.mark.parametrize("groups", ["window", "drafter"])
def test_free_blocks_of_several_groups_are_stored_as_what_they_are(engines, groups):
    extra = {"store_policy": "spillover"}
    bench = engines.make(num_blocks=80, extra=extra, **GROUPS[groups])
    for number in range(9):
        bench.serve(f"r{number}", prompt_of(number, 325))
    keys = bench.keys("r0")[:9] + bench.keys("r0", 1)[8:9]
    assert set(keys) <= set(bench.stored()), "the GPU has forgotten them"
    bench.serve("again", prompt_of(0, 325))
    assert bench.jobs_of(JobKind.LOAD, "again")


# -- any order of all of it ------------------------------------------------------------------------

PLACES: list[dict[str, Any]] = [
    {},
    {"pipelined": True},
    {"nvme": True, "max_seqs": 1},
    {"nvme": True, "pipelined": True, "window_tokens": 2 * BLOCK_TOKENS},
    {"ranks": 2, "nvme": True, "num_blocks": 14},
    {"nvme": True, "extra": {"cpu_bytes": 0}, "pipelined": True},
    {"extra": {"store_policy": "on_preemption"}, "pipelined": True, "num_blocks": 14},
    {"extra": {"store_policy": "on_preemption", "cpu_bytes": 0}, "nvme": True, "num_blocks": 14, "ranks": 2},
    {"extra": {"store_policy": "spillover"}, "drafter": True},
    {"extra": {"store_policy": "spillover"}, "window_tokens": 2 * BLOCK_TOKENS, "ranks": 2},
    {"extra": {"cpu_bytes": 6 * SLOT_BYTES}, "window_tokens": BLOCK_TOKENS + 1, "num_blocks": 20},
    {"pipelined": True, "max_seqs": 2, "num_blocks": 10},
    {"state_tokens": BLOCK_TOKENS, "pipelined": True, "num_blocks": 30},
    {"state_tokens": 2 * BLOCK_TOKENS, "nvme": True, "retention_tokens": None},
    {"state_tokens": BLOCK_TOKENS, "state_only": True, "retention_tokens": 2 * BLOCK_TOKENS, "ranks": 2},
    {"state_tokens": BLOCK_TOKENS, "extra": {"store_policy": "spillover"}, "retention_tokens": None},
    {"pipelined": True, "num_blocks": 30, **GROUPS["chunks"]},
]
"""Pools of few blocks, where requests are preempted, and tiers of few slots."""


@pytest.mark.parametrize("seed", range(len(PLACES)))
def test_any_order_of_requests_failures_and_resets_leaves_right_bytes(engines, seed):
    place, rng = PLACES[seed], random.Random(seed)
    base = {"cpu_bytes": "400KiB", "store_decode": bool(seed % 2), "lookup_wait_s": 0.01}
    bench = engines.make(**{"num_blocks": 26} | place | {"extra": base | place.get("extra", {})})
    kinds = (JobKind.STORE, JobKind.LOAD, JobKind.DEMOTE, JobKind.PROMOTE)
    for step in range(150):
        if rng.random() < 0.25:
            prompt = prompt_of(rng.choice([1, 1, 2, 3]), rng.randrange(10, 6 * BLOCK_TOKENS))
            bench.add(f"r{step}", prompt, max_tokens=rng.randrange(1, 40))
        if rng.random() < 0.1 and bench.scheduler.requests:
            bench.abort(rng.choice(sorted(bench.scheduler.requests)))
        if rng.random() < 0.1:
            bench.hold = set(rng.sample(kinds, rng.randrange(3)))
            bench.fail = {JobKind.LOAD: (rng.randrange(4),)} if rng.random() < 0.5 else {}
            bench.damage = rng.choice(["payload", "header", "late"])
        if rng.random() < 0.15:
            bench.scheduler.reset_prefix_cache(reset_connector=rng.random() < 0.1)
        if rng.random() < 0.03:
            change_weights(bench)
        bench.step()
    bench.fail = {}
    bench.finish()
    for name in ("computes", "loads"):
        bench.forget()
        bench.serve(name, prompt_of(1, 100))
    assert bench.stored()
    assert "store_policy" in place.get("extra", {}) or bench.jobs_of(JobKind.LOAD, "loads")


def change_weights(bench: Bench) -> None:
    """Reset everything, whatever runs and whatever is being stored, and compute with other weights
    from here on. vLLM refuses it while requests hold blocks that were or are being loaded, and only
    then."""
    while bench.behind:
        bench.update()
    try:
        assert bench.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    except RuntimeError:
        assert set(bench.references()) <= {
            block
            for name, request in bench.scheduler.requests.items()
            if request in bench.scheduler.kv_holding_waiting or request.is_finished()
            for group in range(bench.group_count)
            for block in bench.table(name, group)
        }
        return
    bench.weights += 1
