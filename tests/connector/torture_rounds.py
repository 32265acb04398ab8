# SPDX-License-Identifier: Apache-2.0
"""What the long runs of real engines share: prompts, seeds, a round of requests, and what vLLM alone answers.

Decoding of the tiny models does not depend on how requests are batched (``answers_alone`` asserts it), so one
baseline, request after request, serves all of them. A failure names its seed. ``KVDISK_TORTURE_SEED`` shifts all seeds.
"""

from __future__ import annotations

import os
from pathlib import Path

from engine_child import EngineChild
from torture_prompts import MOST_TOKENS, make_prompts, make_requests

SEED = int(os.environ.get("KVDISK_TORTURE_SEED", "0"))
HERE = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))}
PROMPTS = make_prompts(SEED, 50)
ROUNDS = 2
MIB = 1 << 20
GPU = {"max_model_len": 512, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 96}


def answers_alone(model: Path, log: Path) -> list[list[int]]:
    """Return vLLM's own answer to each prompt, one after the other; and, preempted and batched anyhow, all the same."""
    with EngineChild(model, log, env=HERE, **GPU | {"num_gpu_blocks_override": 45}) as engine:
        answers = [answer.tokens for answer in engine.generate(PROMPTS, MOST_TOKENS, together=False)]
        for at in range(ROUNDS):
            run_round(engine, SEED + at, answers)
        assert engine.metrics()["num_preemptions"] > 0
    return answers


def run_round(engine: EngineChild, seed: int, expected: list[list[int]], count: int = 40) -> None:
    requests = make_requests(seed, PROMPTS, count)
    result = engine.call("engine_acts:run_requests", requests, seed)
    for at, samples in result["ended"].items():
        request = requests[int(at)]
        for tokens in samples:
            wanted = expected[request["which"]][: request["max_tokens"]]
            assert tokens == wanted, f"seed {seed}, request {at}: wrong tokens, {len(request['prompt'])} in the prompt"
    for request, at in zip(requests, range(count), strict=True):
        assert request["abort"] is not None or str(at) in result["ended"], f"seed {seed}: request {at} has no answer"
