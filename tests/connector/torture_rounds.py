# SPDX-License-Identifier: Apache-2.0
"""What runs of real engines share: prompts, seeds, a round of requests, and what vLLM alone
answers.

Decoding of the tiny models does not depend on how requests are batched (``answers_alone`` asserts
it), so one baseline, request after request, serves all of them. A failure names its seed.
``KVDISK_TORTURE_SEED`` shifts all seeds.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from engine_child import Answer, EngineChild

from kvdisk.cli import verify
from kvdisk.cli.survey import survey_store
from kvdisk.geometry import HEADER_BYTES

BLOCK_TOKENS = 32
SLOT_BYTES = 32768 + HEADER_BYTES
"""Of two of the tiny models: 32 tokens, two layers of a group, two heads of 32, keys and values,
four bytes."""
LONGEST = 360
MOST_TOKENS = 32
SEED = int(os.environ.get("KVDISK_TORTURE_SEED", "0"))
_FOLDER = Path(__file__).parent
HERE = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(_FOLDER), str(_FOLDER.parent), os.environ.get("PYTHONPATH")])),
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
"""An environment for ``engine_acts``."""


def random_prompt(seed: int, length: int) -> list[int]:
    """Return a prompt that shares no block with another seed's."""
    chosen = random.Random(seed)
    return [chosen.randrange(10, 500) for _ in range(length)]


def tokens_of(answers: Sequence[Answer]) -> list[list[int]]:
    """Return what each request has sampled."""
    return [answer.tokens for answer in answers]


def _length(rng: random.Random) -> int:
    """Any length, or one beside a whole number of blocks."""
    blocks = rng.randrange(1, LONGEST // BLOCK_TOKENS + 1)
    length = rng.choice([rng.randrange(1, LONGEST), blocks * BLOCK_TOKENS + rng.choice([-1, 0, 1])])
    return max(1, min(LONGEST, length))


def make_prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts whose prefixes branch at random places."""
    rng = random.Random(seed)
    roots = [[rng.randrange(10, 500) for _ in range(LONGEST)] for _ in range(4)]
    prompts = []
    for _ in range(count):
        base = rng.choice(roots)[: _length(rng)]
        base = base + [rng.randrange(10, 500) for _ in range(LONGEST - len(base))]
        prompts.append(base[: _length(rng)])
        if rng.random() < 0.3:
            roots.append(base)
    return prompts


def make_requests(seed: int, prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
    """Requests of one round, see ``engine_acts.run_requests``; ``which``: number of the prompt."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        which = rng.randrange(len(prompts))
        requests.append(
            {
                "which": which,
                "prompt": prompts[which],
                "max_tokens": rng.randrange(1, MOST_TOKENS + 1),
                "at": rng.randrange(3 * count),
                "abort": rng.randrange(30) if rng.random() < 0.2 else None,
                "salt": "salt" if rng.random() < 0.1 else None,
                "logprobs": rng.random() < 0.1,
                "n": 2 if rng.random() < 0.1 else 1,
            }
        )
    return requests


PROMPTS = make_prompts(SEED, 50)
ROUNDS = 2
MIB = 1 << 20
GPU = {"max_model_len": 512, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 96}
LIMITS_OF: dict[str, dict[str, Any]] = {"llama4": {"num_gpu_blocks_override": 75}}
"""What a model needs instead, in all rounds."""


@cache
def answers_alone(model: Path) -> list[list[int]]:
    """Return vLLM's own answer to each prompt, one after the other; and, preempted and batched
    anyhow, all the same."""
    limits = GPU | {"num_gpu_blocks_override": 45} | LIMITS_OF.get(model.name, {})
    with EngineChild(model, model.with_suffix(".log"), env=HERE, **limits) as engine:
        answers = tokens_of(engine.generate(PROMPTS, MOST_TOKENS, together=False))
        for at in range(ROUNDS):
            run_round(engine, SEED + at, answers)
        assert engine.metrics()["num_preemptions"] > 0
    return answers


def run_round(
    engine: EngineChild, seed: int, *expected: list[list[int]], count: int = 40, steps_between: int = 0
) -> dict[str, int]:
    """Run requests and compare their tokens; ``expected``: by set of weights. Return counts, see
    ``engine_acts.run_requests``. What ran at a reset has tokens of both sets."""
    requests = make_requests(seed, PROMPTS, count)
    found = engine.call("engine_acts:run_requests", requests, steps_between)
    ended = found.pop("ended")
    for at, (samples, weights) in ended.items():
        request = requests[int(at)]
        for tokens in samples if weights is not None else ():
            wanted = expected[weights][request["which"]][: request["max_tokens"]]
            assert tokens == wanted, f"seed {seed}, request {at}: wrong tokens, {len(request['prompt'])} in the prompt"
    for request, at in zip(requests, range(count), strict=True):
        assert request["abort"] is not None or str(at) in ended, f"seed {seed}: request {at} has no answer"
    return found | {"compared": sum(weights is not None for _, weights in ended.values())}


def verify_store(store: Path, cap_bytes: int) -> int:
    """Assert that the store is sound, below its cap, and that every record's slot holds its block;
    return the records.

    For a store that nobody has damaged; an engine that has it open must be idle.
    """
    survey = survey_store(store)
    assert not survey.problems, survey.problems
    assert all(home.allocated_bytes <= cap_bytes for home in survey.engine_stores), (survey.engine_stores, cap_bytes)
    verdict = verify.verify_store([store])
    assert not verdict.wrong and not any(home.problems for home in verdict.engine_stores), verdict
    return sum(home.blocks for home in verdict.engine_stores)
