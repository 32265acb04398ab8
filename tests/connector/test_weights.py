# SPDX-License-Identifier: Apache-2.0
"""Weights that change in memory: KV from before an update is never served after it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine_child import EngineChild
from torture_rounds import HERE

pytestmark = pytest.mark.vllm

LIMITS = {"max_model_len": 1024, "num_gpu_blocks_override": 200}
ENV = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **HERE}
BLOCK_TOKENS = 32
FACTOR = 1.7


def _prompts() -> list[list[int]]:
    chosen = random.Random(11)
    shared = [chosen.randrange(10, 500) for _ in range(256)]
    return [shared + [chosen.randrange(10, 500) for _ in range(70)] for _ in range(3)]


PROMPTS = _prompts()
WHOLE = len(PROMPTS[0]) // BLOCK_TOKENS * BLOCK_TOKENS


def _tokens(engine: EngineChild) -> list[list[int]]:
    return [answer.tokens for answer in engine.generate(PROMPTS, together=False)]


def test_a_weight_update_in_memory(tiny_llama: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with EngineChild(tiny_llama, log, env=ENV, **LIMITS) as alone:
        before = _tokens(alone)
        alone.call("engine_acts:scale_weights", FACTOR)
        alone.call("engine_acts:reset_all")
        after = _tokens(alone)
    assert before != after, "the update must change what is generated, or the test shows nothing"

    config = {"cpu_bytes": "64MiB", "store_dirs": str(tmp_path / "store"), "nvme_bytes": "256MiB", "device": "posix"}
    with EngineChild(tiny_llama, log, layout="own", env=ENV, extra_config=config, **LIMITS) as engine:
        assert _tokens(engine) == before
        # Not drained: it falls asleep with stores on their way, and nothing is lost by it.
        engine.call("engine_acts:sleep_and_wake")
        engine.reset()
        slept = engine.generate(PROMPTS, together=False)
        assert [answer.tokens for answer in slept] == before
        assert slept[0].cached == WHOLE
        engine.generate([[7, *PROMPTS[0]]])
        # Not drained: stores and demotions of the last prompt are on their way when the caches are
        # cleared.
        engine.call("engine_acts:pause", "abort")
        engine.call("engine_acts:scale_weights", FACTOR)
        engine.call("engine_acts:resume")
        answers = engine.generate(PROMPTS, together=False)
        assert answers[0].cached == 0, "nothing from before the update is there"
        assert [answer.tokens for answer in answers] == after
        engine.reset()
        warm = engine.generate(PROMPTS, together=False)
        assert [answer.tokens for answer in warm] == after
        assert warm[0].cached == WHOLE, "what was computed with the new weights is served to this process"
        # A second pause, with nothing changed in between, is as good as an update: kvdisk cannot
        # tell.
        engine.call("engine_acts:pause", "wait")
        engine.call("engine_acts:resume")
        again = engine.generate(PROMPTS, together=False)
        assert again[0].cached == 0
        assert [answer.tokens for answer in again] == after
