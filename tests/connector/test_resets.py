# SPDX-License-Identifier: Apache-2.0
"""Pauses, resets and weight updates of a real engine: KV from before is never served after one, and
stores that are out hold up neither a reset nor a request."""

from __future__ import annotations

import random

import pytest
from engine_child import EngineChild
from torture_rounds import BLOCK_TOKENS, HERE

ENV = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **HERE}
LIMITS = {"max_model_len": 512, "num_gpu_blocks_override": 64, "max_num_seqs": 16}
STORE = {"nvme_bytes": "256MiB", "device": "posix", "store_decode": True}
SHARED = random.Random(1).choices(range(10, 500), k=100)
PROMPTS = [SHARED[: 50 * (seed % 3)] + random.Random(seed).choices(range(10, 500), k=90) for seed in range(2, 14)]
TOKENS = 10
STEPS_BETWEEN = 25


def test_pauses_sleep_and_a_weight_update_in_memory(tiny_llama, tmp_path):
    """The engine is in a process of its own, which drains where it pauses."""
    extra = {"cpu_bytes": "64MiB", "store_dirs": str(tmp_path / "store"), **STORE}
    with EngineChild(tiny_llama, tmp_path / "log", layout="own", env=ENV, extra_config=extra, **LIMITS) as engine:

        def answer() -> tuple[list[list[int]], int]:
            """Serve all prompts; return the tokens, and how many of the first one were cached."""
            answers = engine.generate(PROMPTS, TOKENS, together=False)
            return [answer.tokens for answer in answers], answers[0].cached

        whole = len(PROMPTS[0]) // BLOCK_TOKENS * BLOCK_TOKENS
        before, _ = answer()
        # Not drained: it falls asleep with stores on their way, and nothing is lost by it.
        engine.call("engine_acts:sleep_and_wake")
        engine.reset()
        assert answer() == (before, whole)
        engine.generate([[7, *PROMPTS[0]]])
        # Not drained: the stores of the last prompt are on their way when the caches are cleared.
        engine.call("engine_acts:pause", "abort")
        engine.call("engine_acts:use_weights", 1)
        engine.call("engine_acts:resume")
        after, cached = answer()
        assert cached == 0, "nothing from before the update is there"
        assert all(one != other for one, other in zip(before, after, strict=True)), "else the test shows nothing"
        engine.reset()
        assert answer() == (after, whole), "what was computed with the new weights is served to this process"
        # A second pause, with nothing changed in between, is as good as an update: kvdisk cannot
        # tell.
        engine.call("engine_acts:pause", "wait")
        engine.call("engine_acts:resume")
        assert answer() == (after, 0)


def reset_while_it_serves(engine: EngineChild, resets: int) -> None:
    """Assert that all of so many resets succeed under load, and that nothing from before one is
    served after it."""
    expected = []
    for weights in range(2):
        engine.call("engine_acts:use_weights", weights)
        engine.call("engine_acts:reset_all")
        answers = engine.generate(PROMPTS, TOKENS, together=False)
        expected.append([answer.tokens for answer in answers])
    assert all(one != other for one, other in zip(*expected, strict=True)), "else the test shows nothing"
    engine.call("engine_acts:use_weights", 0)
    engine.call("engine_acts:reset_all")
    counts = engine.call("engine_acts:reset_under_load", PROMPTS, expected, resets, STEPS_BETWEEN)
    assert counts["reset"] == resets
    assert counts["open"] == 8 * resets and counts["compared"] >= 3 * resets, counts
    assert counts["stores out"] > 0, counts
    print(counts)
    engine.call("engine_acts:audit")


@pytest.mark.torture
def test_resets_under_load(tiny_llama, tmp_path):
    extra = {"cpu_bytes": "4MiB", "store_dirs": str(tmp_path / "store"), **STORE}
    too_few = {"num_gpu_blocks_override": 40}  # for the prefix cache to keep what is asked for again
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=extra, env=ENV, **(LIMITS | too_few)) as engine:
        reset_while_it_serves(engine, 60)
        assert engine.counters()["loaded_blocks"] > 0


@pytest.mark.torture
def test_slow_and_hanging_writes_without_a_cpu_tier(tiny_llama, tmp_path):
    extra = {"cpu_bytes": 0, "store_dirs": str(tmp_path / "store"), **STORE}
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=extra, env=ENV, **LIMITS) as engine:

        def serve(seed: int) -> tuple[int, bool]:
            prompts = [random.Random(1000 * seed + at).choices(range(10, 500), k=190) for at in range(60)]
            steps, stores_are_out = engine.call("engine_acts:run_load", prompts, TOKENS, 16)
            return steps, stores_are_out

        serve(1)
        engine.drain()
        usual, _ = serve(2)
        engine.drain()
        engine.call("engine_acts:delay_writes", 0.5)
        # The middle of three: beside a loaded machine one request may come a turn later.
        slow, _ = sorted(serve(seed) for seed in (3, 5, 6))[1]
        reset_while_it_serves(engine, 60)
        engine.call("engine_acts:delay_writes", 0)
        engine.drain()
        engine.call("engine_acts:hang_next_write")
        hung, stores_are_out = serve(4)
        assert stores_are_out
        engine.call("engine_acts:let_go")
        engine.call("engine_acts:audit")
        print(f"steps of 60 requests: {usual}, slow writes {slow}, one that hangs {hung}")
        assert max(slow, hung) <= 1.05 * usual + 1, (usual, slow, hung)
        assert engine.counters()["stored_blocks"] > 0
