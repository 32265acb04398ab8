# SPDX-License-Identifier: Apache-2.0
"""vLLM's own ``OffloadingConnector`` on the fake GPU, with its own worker, and kvdisk's tier behind
its memory: the tokens are those of vLLM alone, and nothing races, wherever the KV came from."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from test_tier_engine import IDLE, flip_bits
from torture_rounds import SEED, make_prompts, make_requests, random_prompt, verify_store

from fake_gpu.engines import GpuEngine

pytestmark = pytest.mark.fake_gpu
ACTS, TIER = "fake_gpu.offloading_acts", "host_offloading"
CAP = 64 << 20
AMPLE, SMALL = 16 << 20, 1 << 20
"""Bytes of memory: for all prompts, and for a part of them."""
FEW_BLOCKS = 18
"""With these not all requests find room for what they generate."""
TOKENS = 6
LENGTHS = (90, 138, 300)
"""Of prompts: the longest has as many pages that vLLM loads them by a kernel, the others go by
copies."""
PROMPTS = [random_prompt(1000 + length, length) for length in LENGTHS]
LIMITS: dict[str, Any] = {"max_model_len": 512}
LONG = 40
"""Tokens of an answer that grows by more than a block."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the directory of a tiny model, which it builds unless it has been."""
    folder, license_ = tmp_path_factory.mktemp("models"), Path(__file__).resolve().parents[2] / "LICENSE"
    return lambda kind: tiny_models.build(f"tiny-{kind}", folder / kind, [license_.read_text()])


@pytest.fixture(scope="module")
def tiny_llama(models: Callable[[str], Path]) -> Path:
    return models("llama")


def found_tokens(block_tokens: int) -> int:
    """Return how many tokens of all prompts can hit."""
    return sum((length - 1) // block_tokens * block_tokens for length in LENGTHS)


@cache
def answers_alone(model: Path, **more: Any) -> list[list[int]]:
    with GpuEngine(model, model.with_suffix(".log"), **LIMITS | more) as engine:
        return [answer.tokens for answer in engine.generate(PROMPTS, LONG)]


def start(model: Path, folder: Path, *, memory: int, tier: dict[str, Any] | None = None, **more: Any) -> GpuEngine:
    """Start an engine whose host memory has so many bytes, and watch it."""
    ours = {"type": "kvdisk", "store_dirs": str(folder / "store"), "nvme_bytes": CAP, "device": "posix"}
    ours |= {"lookup_wait_s": 600, "io_deadline_s": 600} | (tier or {})
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": memory, "secondary_tiers": [ours]}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    engine = GpuEngine(model, folder / "log", kv_transfer_config=transfer, **LIMITS | more)
    assert engine.call(f"{ACTS}:watch"), "vLLM could not pin its memory"
    return engine


def ask(engine: GpuEngine, count: int = TOKENS) -> tuple[list[list[int]], int]:
    """Return the tokens of each prompt, all asked at once, and how many of the prompts' were
    cached."""
    found = engine.generate(PROMPTS, count)
    return [answer.tokens for answer in found], sum(answer.cached for answer in found)


def rest(engine: GpuEngine, **state: Any) -> dict[str, Any]:
    """Let an engine end what it has begun; assert that neither it nor the GPU did wrong; return what
    was seen."""
    engine.drain()
    seen: dict[str, Any] = engine.call(f"{ACTS}:watched")
    assert not seen["meetings"], seen
    assert engine.call(f"{TIER}:state_of") == IDLE | state
    engine.check()
    return seen


def from_each_place(model: Path, folder: Path, **more: Any) -> None:
    """Ask cold, from memory, from the drive after a restart, and with each block there damaged."""
    long = answers_alone(model, **more)
    expected, hits = [tokens[:TOKENS] for tokens in long], found_tokens(more.get("block_size", 32))
    few = {"num_gpu_blocks_override": FEW_BLOCKS * 32 // more.get("block_size", 32)} | more
    with start(model, folder, memory=AMPLE, **more) as engine:
        assert ask(engine) == (expected, 0), "cold"
        engine.reset()
        assert ask(engine) == (expected, hits), "from memory"
        seen = rest(engine)
        assert seen["worker"] == "CPUOffloadingWorker" and seen["stored"] and seen["batches"], seen
        by_kernel = seen["kernels"]
    with start(model, folder, memory=SMALL, **few) as engine:
        assert ask(engine, LONG) == (long, hits), "from the drive, after a restart"
        assert engine.metrics()["num_preemptions"] > 0
        seen = rest(engine)
        assert seen["loaded"], seen
        # Of small pages in large batches; larger pages go by copies.
        assert bool(by_kernel + seen["kernels"]) == (more.get("block_size", 32) == 32), seen
    flip_bits(folder / "store")
    with start(model, folder, memory=SMALL, **few) as engine:
        assert ask(engine)[0] == expected, "no flipped bit is served"
        rest(engine)
        assert engine.metrics()["kvdisk_verification_failures.checksum"] > 2


def test_from_each_place(tiny_llama, tmp_path):
    from_each_place(tiny_llama, tmp_path)


@pytest.mark.torture
@pytest.mark.parametrize("how", ["copies", "gemma3", "granite4", "late", "contrary", "threads", "at_once"])
def test_from_each_place_otherwise(models, tmp_path, how):
    """In other orders, and with other models; "copies": of pages too large for vLLM's kernel;
    "at_once": without asynchronous scheduling."""
    kinds = {
        "copies": {"block_size": 64},
        "granite4": {"block_size": 64, "max_num_batched_tokens": 64},
        "at_once": {"async_scheduling": False},
    }
    orders = {"order": how} if how in {"late", "contrary", "threads"} else {}
    model = models(how if how in {"gemma3", "granite4"} else "llama")
    from_each_place(model, tmp_path, **kinds.get(how, {}), **orders)
    asynchronous = "Asynchronous scheduling is enabled" in (tmp_path / "log").read_text()
    assert asynchronous == (how != "at_once")


MANY = make_prompts(SEED, 12)
STEPS_BETWEEN = 40


@cache
def answers_to_many(model: Path) -> list[list[list[int]]]:
    """Return vLLM's own answers by each of two sets of weights."""
    with GpuEngine(model, model.with_suffix(".many.log"), **LIMITS) as engine:
        found = []
        for number in range(2):
            engine.call("engine_acts:use_weights", number)
            assert engine.call("engine_acts:reset_all")
            found.append([answer.tokens for answer in engine.generate(MANY, 32)])
    return found


def run_many(engine: GpuEngine, seed: int, expected: list[list[list[int]]], steps_between: int = 0) -> int:
    """Run requests that come and go at random; return how often everything was reset. What ran at a
    reset has tokens of both sets of weights."""
    requests = make_requests(seed, MANY, 24)
    found = engine.call("engine_acts:run_requests", requests, steps_between)
    for at, (samples, weights) in found["ended"].items():
        request = requests[int(at)]
        for tokens in samples if weights is not None else ():
            wanted = expected[weights][request["which"]][: request["max_tokens"]]
            assert tokens == wanted, f"seed {seed}, request {at}: wrong tokens"
    return int(found["resets"])


@pytest.mark.torture
@pytest.mark.parametrize("order", ["mixed", "late", "contrary"])
def test_requests_that_come_and_go(tiny_llama, tmp_path, order):
    expected = answers_to_many(tiny_llama)
    with start(tiny_llama, tmp_path, memory=SMALL, num_gpu_blocks_override=40, order=order) as engine:
        run_many(engine, SEED, expected)
        rest(engine)
        # Other weights come each time that everything is reset, whatever runs.
        assert run_many(engine, SEED + 1, expected, STEPS_BETWEEN) > 1
        seen = rest(engine)
        assert seen["loaded"] and seen["stored"], seen
    assert verify_store(tmp_path / "store", CAP)


@pytest.mark.torture
def test_a_mover_that_is_killed(tiny_llama, tmp_path):
    expected = answers_to_many(tiny_llama)
    with start(tiny_llama, tmp_path, memory=SMALL, num_gpu_blocks_override=40) as engine:
        run_many(engine, SEED, expected)
        engine.call(f"{TIER}:signal_mover", signal.SIGSTOP)
        engine.generate([random_prompt(1, 100)], 1)  # stores are on their way to it
        engine.call(f"{TIER}:signal_mover", signal.SIGKILL)
        run_many(engine, SEED + 2, expected)
        rest(engine, off=True)
    assert "Traceback" not in (tmp_path / "log").read_text()
