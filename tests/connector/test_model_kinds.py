# SPDX-License-Identifier: Apache-2.0
"""Models of every kind that vLLM's CPU build runs, on the real engine: the tokens are those that
vLLM computes, with hits of the length that the kind allows, and each group's blocks matter.

docs/MODELS.md has the table. One kind is in ``make test``; the long runs of ``test_torture.py``
have others.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine_child import Answer, EngineChild
from torture_rounds import HERE, random_prompt, tokens_of

MAMBA_STEPS = {"block_size": 64, "max_num_batched_tokens": 64}
"""vLLM's CPU kernel of Mamba 2 fails (IndexError in mamba_mixer2.py) where a step ends behind a
block's end, and so would have to leave a state within."""


class Kind(NamedTuple):
    """``block_tokens``: of the largest block, which hits are multiples of; None: vLLM chooses it by
    the processor. ``groups``: how many. ``few_blocks``: of a pool in which requests are preempted.
    ``batched``: whether vLLM alone gives a request the same tokens alone and among others.
    ``model``: where it is not the kind's name."""

    limits: dict[str, Any]
    block_tokens: int | None
    groups: int
    few_blocks: int
    batched: bool = True
    model: str = ""

    def whole_tokens(self, prompt: list[int], log: Path) -> int:
        """Return how many tokens of a prompt can hit. ``log``: of an engine of this kind."""
        tokens = self.block_tokens or int(re.findall(r"Setting attention block size to (\d+)", log.read_text())[-1])
        return (len(prompt) - 1) // tokens * tokens


AMX = "amx_bf16" in Path("/proc/cpuinfo").read_text()
"""With that vLLM's sums of 16 bits go by what else is in the batch."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
KINDS = {
    "qwen3": Kind({}, 32, 1, 40),
    "8-bit KV": Kind({"kv_cache_dtype": "fp8"}, 32, 1, 40, model="llama"),
    "n-gram": Kind({"speculative_config": NGRAM}, 32, 1, 40, model="llama"),
    "gemma3": Kind({}, 32, 3, 110),
    "gemma4": Kind({}, 64, 2, 60),
    # Layers of two sizes, of which the scheduler knows the first's, and the workers tell the other.
    "gemma4, one group": Kind({"disable_hybrid_kv_cache_manager": True}, 32, 1, 40, model="gemma4"),
    "granite4": Kind(MAMBA_STEPS, 64, 4, 60),
    # Each rank has half the heads of a state.
    "granite4, two ranks": Kind(MAMBA_STEPS | {"layout": "tp2"}, 64, 4, 60, model="granite4"),
    "nemotron": Kind(MAMBA_STEPS, 64, 4, 60),
    "falcon": Kind(MAMBA_STEPS, 64, 2, 40),
    "mamba2": Kind(MAMBA_STEPS, 64, 1, 13),
    "qwen3-next": Kind({"dtype": "bfloat16"}, None, 4, 30, batched=not AMX),
    "lfm2": Kind({}, 32, 4, 90, batched=False),  # vLLM's CPU kernel of short convolutions does not
    "llama4": Kind({}, 32, 4, 150),
    "gpt-oss": Kind({}, 32, 2, 80),
}
IN_MAKE_TEST = ("granite4",)


SHARED = random_prompt(1, 525)
PROMPTS = [SHARED + random_prompt(2, 40), SHARED + random_prompt(3, 45), random_prompt(4, 576), random_prompt(5, 300)]
TOGETHER = [random_prompt(6, 400) + random_prompt(seed, 50) for seed in range(10, 16)]
PREEMPTED = [random_prompt(seed, 100 + 30 * (seed % 9)) for seed in range(20, 32)]


def _together(engine: EngineChild, prompts: list[list[int]], max_tokens: int = 8) -> list[Answer]:
    return engine.generate(prompts, max_tokens) if prompts else []


NO_AVX_512 = "avx512f" not in Path("/proc/cpuinfo").read_text()
MARKS = {"8-bit KV": [pytest.mark.skipif(NO_AVX_512, reason="vLLM's 8-bit KV needs a processor with AVX-512")]}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_MAKE_TEST else [pytest.mark.torture, *MARKS.get(name, [])])
        for name in KINDS
    ],
)
def test_kind(name, models, tmp_path):
    kind, model, log = KINDS[name], models(KINDS[name].model or name), tmp_path / "log"
    config = {"cpu_bytes": "64MiB", "store_dirs": str(tmp_path / "store"), "nvme_bytes": "256MiB", "device": "posix"}
    limits: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 400, **kind.limits}
    batches, many = (TOGETHER, PREEMPTED) if kind.batched else ([], [])
    with EngineChild(model, log, extra_config=config, env=HERE, **limits) as engine:
        cold = engine.generate(PROMPTS, together=False)
        together, preempted = _together(engine, batches), _together(engine, many, 60)
        # With a salt of its own nothing of a prompt is found: vLLM computes all of it.
        alone = [engine.generate([prompt], salt=f"{at}")[0] for at, prompt in enumerate([*PROMPTS, *batches])]
        assert not any(answer.cached for answer in alone)
        assert tokens_of([*cold, *together]) == tokens_of(alone), "cold, and prefixes that the GPU has"
        engine.reset()
        warm = engine.generate(PROMPTS, together=False)
        whole = [kind.whole_tokens(prompt, log) for prompt in PROMPTS]
        assert tokens_of(warm) == tokens_of(cold), "from memory"
        assert [answer.cached for answer in warm] == whole
        assert tokens_of(_together(engine, batches)) == tokens_of(together), "from memory, together"
        engine.drain()
    few = limits | {"num_gpu_blocks_override": kind.few_blocks}
    with EngineChild(model, log, extra_config=config | {"store_decode": True}, env=HERE, **few) as engine:
        warm = engine.generate(PROMPTS, together=False)
        assert tokens_of(warm) == tokens_of(cold), "from the drive, after a restart"
        assert [answer.cached for answer in warm] == whole
        assert engine.metrics()["kvdisk_hit_tokens.nvme"] >= whole[0]
        assert tokens_of(_together(engine, many, 60)) == tokens_of(preempted), "victims come back"
        metrics = engine.metrics()
        # With nothing but states a request needs no more blocks as it grows, and may be no victim.
        assert metrics["num_preemptions"] > 0 or not kind.batched or name == "mamba2"
        assert metrics.get("spec_decode_num_accepted_tokens", 1) > 0, metrics
        assert tokens_of(_together(engine, batches)) == tokens_of(together)
        engine.drain()
        assert not {name: value for name, value in engine.metrics().items() if "fail" in name and value}
        # Right behind the hit, where a state that forgets has not forgotten yet.
        short = [prompt[: end + 1] for prompt, end in zip(PROMPTS, whole, strict=True)]
        right = tokens_of(engine.generate(short, 32, salt="short", together=False))
        for group in [-1, *range(kind.groups)]:
            engine.reset()
            engine.call("engine_acts:zero_loads", group)
            answers = engine.generate(short, 32, together=False)
            assert [answer.cached for answer in answers] == whole
            assert (tokens_of(answers) == right) == (group < 0), f"group {group} is not read"
