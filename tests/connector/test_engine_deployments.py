# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines on the CPU with the stages of a pipeline, and with LoRA adapters: the tokens
are those of vLLM without kvdisk."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from adapter_files import write_adapter
from engine_child import EngineChild
from torture_rounds import BLOCK_TOKENS, HERE

from kvdisk.cli import verify
from kvdisk.device.listing import list_homes

pytestmark = pytest.mark.torture

CHOSEN = random.Random(7)
SHARED = [CHOSEN.randrange(10, 500) for _ in range(330)]
LONG = [SHARED + [CHOSEN.randrange(10, 500) for _ in range(40)] for _ in range(2)]
MANY = [[CHOSEN.randrange(10, 500) for _ in range(45 + 3 * at)] for at in range(26)]
LIMITS: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 200}


def _settings(store: Path) -> dict[str, object]:
    return {"cpu_bytes": "4MiB", "store_dirs": str(store), "nvme_bytes": "256MiB", "device": "posix"}


def _tokens(engine: EngineChild, prompts: list[list[int]], max_tokens: int = 8, *, together: bool = True) -> Any:
    return [answer.tokens for answer in engine.generate(prompts, max_tokens, together=together)]


# -- stages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout", "env", "few_blocks"),
    [
        # Six layers in three groups. Those of the windows have no layer on the second stage.
        ("gemma3", "pp2", {"VLLM_PP_LAYER_PARTITION": "5,1"}, 66),
        pytest.param("llama", "tp2pp2", {}, 24),
    ],
    ids=["two stages", "two stages of two ranks"],
    indirect=["model"],
)
def test_stages_of_a_pipeline(model, layout, env, few_blocks, tmp_path):
    store, log = tmp_path / "store", tmp_path / "log"
    with EngineChild(model, log, **LIMITS) as alone:
        long, many = _tokens(alone, LONG, together=False), _tokens(alone, MANY, 100)

    def start(**limits: Any) -> EngineChild:
        more: dict[str, Any] = LIMITS | limits
        engine = EngineChild(model, log, layout=layout, extra_config=_settings(store), env=HERE | env, **more)
        engine.call("engine_acts:warm_stages")
        return engine

    whole = (len(LONG[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    with start() as engine:
        assert _tokens(engine, LONG, together=False) == long
        engine.reset()
        warm = engine.generate(LONG)
        assert [answer.tokens for answer in warm] == long, "loaded, two requests at once with one prefix"
        assert [answer.cached for answer in warm] == [whole] * 2
        assert _tokens(engine, MANY, 100) == many
        engine.drain()
        (home,) = list_homes(store)
        workers = 4 if layout == "tp2pp2" else 2
        assert {file.name for file in (home.segments_path / "0").iterdir()} == {f"rank{at}.kv" for at in range(workers)}
    verdict = verify.verify_store([store])
    assert sum(one.blocks for one in verdict.engine_stores) > len(LONG[0]) // BLOCK_TOKENS and not verdict.wrong

    with start(max_model_len=512, num_gpu_blocks_override=few_blocks) as engine:
        warm = engine.generate(LONG, together=False)
        assert [answer.tokens for answer in warm] == long, "from NVMe after a restart"
        assert [answer.cached for answer in warm] == [whole] * 2
        assert _tokens(engine, MANY, 100) == many
        engine.drain()
        metrics = engine.metrics()
        assert metrics["num_preemptions"] > 0 and metrics["kvdisk_hit_tokens.nvme"] >= whole
        assert not {name: value for name, value in metrics.items() if name.startswith("kvdisk_failed_") and value}
        for stage in (0, 1):
            engine.reset()
            engine.call("engine_acts:zero_loads", None, stage)
            (damaged,) = engine.generate(LONG[:1])
            assert damaged.cached == whole
            assert damaged.tokens != long[0], "what the stage loads is what it computes with"


# -- adapters --------------------------------------------------------------------------------------


def test_adapters(tiny_llama, tmp_path):
    store, log = tmp_path / "store", tmp_path / "log"
    for seed, name in enumerate(("first", "second", "retrained")):
        write_adapter(tmp_path / name, seed)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    enabled: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "env": HERE, **LIMITS}
    numbers = {"first": 1, "second": 2, "copy": 3, "retrained": 4}
    whole = (len(LONG[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def ask(engine: EngineChild, name: str) -> tuple[list[int], int]:
        engine.reset()
        ((tokens, cached),) = engine.call(
            "engine_acts:generate_with", LONG[:1], name, numbers[name], str(tmp_path / name)
        )
        return tokens, cached

    with EngineChild(tiny_llama, log, **enabled) as alone:
        right = {name: ask(alone, name)[0] for name in numbers}
        base = _tokens(alone, LONG[:1])
    assert right["copy"] == right["first"]
    assert len({str(tokens) for tokens in (*right.values(), *base)}) == 4, "else the test shows nothing"

    with EngineChild(tiny_llama, log, extra_config=_settings(store), **enabled) as engine:
        engine.call("engine_acts:await_adapters")
        assert _tokens(engine, LONG[:1]) == base
        for name, cached in (("first", 0), ("second", 0), ("first", whole), ("second", whole), ("copy", 0)):
            assert ask(engine, name) == (right[name], cached)
        engine.drain()
    shutil.copytree(tmp_path / "retrained", tmp_path / "first", dirs_exist_ok=True)
    with EngineChild(tiny_llama, log, extra_config=_settings(store), **enabled) as engine:
        engine.call("engine_acts:await_adapters")
        assert ask(engine, "first") == (right["retrained"], 0), "under its name and path"
        assert ask(engine, "copy") == (right["copy"], whole), "what it was before, from NVMe"
        assert ask(engine, "first") == (right["retrained"], whole)
        assert ask(engine, "second") == (right["second"], whole)
