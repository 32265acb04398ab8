# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine and a prompt of 32,000 tokens: computed in chunks, loaded after a reset, after
a preemption, and after a restart."""

from __future__ import annotations

import tiny_models
from conftest import ROOT
from engine_child import EngineChild
from torture_rounds import BLOCK_TOKENS, random_prompt

LONG, SHORT = random_prompt(1, 32_000), random_prompt(2, 8 * BLOCK_TOKENS)
OUTPUTS = 8 * BLOCK_TOKENS
WHOLE = (len(LONG) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
"""Tokens of it that can be loaded."""
SPARE_BLOCKS = 6
"""Too few for what both requests generate: the one that came last is preempted."""
LIMITS = {
    "max_model_len": 32_300,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": (len(LONG) + len(SHORT)) // BLOCK_TOKENS + SPARE_BLOCKS,
}


def test_a_prompt_of_32000_tokens_hits_whole(tmp_path_factory, tmp_path):
    model = tiny_models.build("long-llama", tmp_path_factory.mktemp("long"), [(ROOT / "LICENSE").read_text()])
    store = {"cpu_bytes": "128MiB", "store_dirs": str(tmp_path / "store"), "nvme_bytes": "256MiB", "device": "posix"}
    with EngineChild(model, tmp_path / "log", extra_config=store, **LIMITS) as engine:
        (computed,) = engine.generate([LONG], OUTPUTS)
        assert computed.cached == 0 and len(computed.tokens) == OUTPUTS
        engine.drain()
        counters = engine.counters()
        assert counters["stored_blocks"] == counters["demoted_blocks"] == len(LONG) // BLOCK_TOKENS

        engine.reset()
        (loaded,) = engine.generate([LONG], OUTPUTS)
        assert (loaded.tokens, loaded.cached) == (computed.tokens, WHOLE), "after a reset of vLLM's own cache"
        assert engine.counters()["hit_tokens.cpu"] == WHOLE

        engine.reset()
        assert engine.metrics()["num_preemptions"] == 0
        _, victim = engine.generate([SHORT, LONG], OUTPUTS)
        assert engine.metrics()["num_preemptions"] == 1
        assert victim.tokens == computed.tokens, "preempted"
        assert victim.cached >= WHOLE
        counters = engine.counters()
        assert not {name for name in counters if name.endswith("_failures") or name.startswith("failed")}

    with EngineChild(model, tmp_path / "log", extra_config=store, **LIMITS) as engine:
        (loaded,) = engine.generate([LONG], OUTPUTS)
        assert (loaded.tokens, loaded.cached) == (computed.tokens, WHOLE), "after a restart"
        counters = engine.counters()
        assert counters["hit_tokens.nvme"] == WHOLE and counters["loaded_blocks"] == WHOLE // BLOCK_TOKENS
