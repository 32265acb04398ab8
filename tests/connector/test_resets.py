# SPDX-License-Identifier: Apache-2.0
"""Pauses, sleep and a weight update of a real engine: KV from before is never served after it."""

from __future__ import annotations

import random

from engine_child import EngineChild
from torture_rounds import BLOCK_TOKENS, HERE

ENV = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **HERE}
LIMITS = {"max_model_len": 512, "num_gpu_blocks_override": 64, "max_num_seqs": 16}
STORE = {"nvme_bytes": "256MiB", "device": "posix", "store_decode": True}
SHARED = random.Random(1).choices(range(10, 500), k=100)
PROMPTS = [SHARED[: 50 * (seed % 3)] + random.Random(seed).choices(range(10, 500), k=90) for seed in range(2, 14)]
TOKENS = 10


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
