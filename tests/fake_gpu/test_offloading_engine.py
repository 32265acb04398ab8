# SPDX-License-Identifier: Apache-2.0
"""vLLM's own ``OffloadingConnector`` on the fake GPU, with its own worker, and kvdisk's tier behind
its memory: the tokens are those of vLLM alone, and nothing races, wherever the KV came from."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_models
from test_tier_engine import IDLE
from torture_rounds import SEED, make_prompts, make_requests, random_prompt, verify_store

from fake_gpu.engines import GpuEngine
from kvdisk.device.listing import list_homes
from kvdisk.geometry import HEADER_BYTES

pytestmark = pytest.mark.fake_gpu
ACTS, TIER = "fake_gpu.offloading_acts", "host_offloading"
CAP = 64 << 20
AMPLE, SMALL = 16 << 20, 1 << 20
"""Bytes of memory: for all prompts, and for a part of them."""
TOKENS = 6
LENGTHS = (90, 138, 300)
"""Of prompts: the longest has as many pages that vLLM loads them by a kernel, the others go by
copies."""
PROMPTS = [random_prompt(1000 + length, length) for length in LENGTHS]
LIMITS: dict[str, Any] = {"max_model_len": 512}
LONG = 40
"""Tokens of an answer that grows by more than a block."""


class Kind(NamedTuple):
    """How a model runs. ``few_blocks``: of a GPU on which requests are preempted. ``whole``:
    whether all blocks of a prompt are found. ``by_kernel``: whether vLLM loads the longest prompt
    by a kernel; larger pages, or fewer, go by copies. ``small``: bytes of memory for a part of the
    prompts. ``model``: where it is not the kind's name."""

    limits: dict[str, Any]
    few_blocks: int
    block_tokens: int = 32
    whole: bool = True
    by_kernel: bool = True
    small: int = SMALL
    model: str = ""

    def found_tokens(self) -> int:
        """Return how many tokens of all prompts can hit."""
        return sum((length - 1) // self.block_tokens * self.block_tokens for length in LENGTHS)


KINDS = {
    "llama": Kind({}, 18),
    "llama, larger pages": Kind({"block_size": 64}, 11, 64, by_kernel=False, model="llama"),
    "llama, one step after the other": Kind({"async_scheduling": False}, 18, model="llama"),
    "gemma3": Kind({"num_gpu_blocks_override": 120}, 36, whole=False, small=4 << 20),
    "granite4": Kind({"num_gpu_blocks_override": 100}, 24, 64, whole=False, by_kernel=False, small=4 << 20),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the directory of a tiny model, which it builds unless it has been."""
    folder, license_ = tmp_path_factory.mktemp("models"), Path(__file__).resolve().parents[2] / "LICENSE"
    return lambda kind: tiny_models.build(f"tiny-{kind}", folder / kind, [license_.read_text()])


@pytest.fixture(scope="module")
def tiny_llama(models: Callable[[str], Path]) -> Path:
    return models("llama")


@cache
def answers_alone(model: Path, **more: Any) -> list[list[int]]:
    with GpuEngine(model, model.with_suffix(".log"), **LIMITS | more) as engine:
        return [answer.tokens for answer in engine.generate(PROMPTS, LONG)]


def tiered(folder: Path, *, memory: int) -> dict[str, Any]:
    """Return the configuration of vLLM's connector with so many bytes of memory, and kvdisk behind
    it."""
    ours = {"type": "kvdisk", "store_dirs": str(folder / "store"), "nvme_bytes": CAP, "device": "posix"}
    ours |= {"lookup_wait_s": 600, "io_deadline_s": 600}
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": memory, "secondary_tiers": [ours]}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def start(model: Path, folder: Path, *, memory: int, **more: Any) -> GpuEngine:
    """Start an engine with it, and watch it."""
    engine = GpuEngine(model, folder / "log", kv_transfer_config=tiered(folder, memory=memory), **LIMITS | more)
    assert engine.call(f"{ACTS}:watch"), "vLLM could not pin its memory"
    return engine


def ask(engine: GpuEngine, count: int = TOKENS) -> tuple[list[list[int]], int]:
    """Return the tokens of each prompt, all asked at once, and how many of the prompts' were
    cached."""
    found = engine.generate(PROMPTS, count)
    return [answer.tokens for answer in found], sum(answer.cached for answer in found)


def rest(engine: GpuEngine, **state: Any) -> dict[str, Any]:
    """Let an engine end what it has begun; assert that neither it nor the GPU did wrong; return
    what was seen."""
    engine.drain()
    seen: dict[str, Any] = engine.call("fake_gpu.engines:seen") | engine.call(f"{ACTS}:watched")
    assert not seen["meetings"], seen
    assert engine.call(f"{TIER}:state_of") == IDLE | state
    engine.check()
    return seen


def damage(store: Path, row_bytes: int) -> None:
    """Flip a bit of each row on the drive."""
    (home,) = list_homes(store)
    for file in home.segments_path.glob("*/rank0.kv"):
        content = bytearray(file.read_bytes())
        for at in range(HEADER_BYTES * 2 + 1000, len(content), row_bytes + HEADER_BYTES):
            content[at] ^= 4
        file.write_bytes(content)


def from_each_place(kind: Kind, model: Path, folder: Path, order: str = "mixed") -> None:
    """Ask cold, from memory, from the drive after a restart with few blocks, and with each row
    there damaged."""
    more = kind.limits
    long, hits = answers_alone(model, **more), kind.found_tokens()
    expected = [tokens[:TOKENS] for tokens in long]
    with start(model, folder, memory=AMPLE, order=order, **more) as engine:
        assert ask(engine) == (expected, 0), "cold"
        engine.reset()
        tokens, found = ask(engine)
        assert tokens == expected, "from memory"
        assert found == hits if kind.whole else found > hits / 4
        seen = rest(engine)
        assert seen["worker"] == "CPUOffloadingWorker" and seen["stored"] and seen["batches"], seen
        # Of small pages in large batches; larger pages go by copies.
        assert bool(seen["swap_kernels"]) == kind.by_kernel, seen
        assert seen["asynchronous"] is more.get("async_scheduling", True)
    few = more | {"num_gpu_blocks_override": kind.few_blocks}
    with start(model, folder, memory=kind.small, order=order, **few) as engine:
        tokens, found = ask(engine, LONG)
        assert tokens == long, "from the drive, after a restart"
        assert found == hits if kind.whole else found > hits / 4
        assert rest(engine)["loaded"]
        assert engine.metrics()["num_preemptions"] > 0 or not kind.whole
    damage(folder / "store", seen["row_bytes"])
    with start(model, folder, memory=kind.small, order=order, **few) as engine:
        assert ask(engine)[0] == expected, "no flipped bit is served"
        rest(engine)
        assert engine.metrics().get("kvdisk_verification_failures.checksum", 0) > 2


def test_from_each_place(tiny_llama, tmp_path):
    from_each_place(KINDS["llama"], tiny_llama, tmp_path)


@pytest.mark.torture
def test_what_does_not_wait_is_seen(tiny_llama, tmp_path):
    engine = start(tiny_llama, tmp_path, memory=AMPLE, order="late")
    try:
        engine.call(f"{ACTS}:wait_for_nobody")
        ask(engine, LONG)
        seen = engine.call("fake_gpu.engines:seen")
        assert seen["races"] and seen["violations"], seen
    finally:
        engine.kill()


@pytest.mark.torture
@pytest.mark.parametrize("order", ["late", "contrary", "threads"])
def test_orders(tiny_llama, tmp_path, order):
    from_each_place(KINDS["llama"], tiny_llama, tmp_path, order)


@pytest.mark.torture
@pytest.mark.parametrize("name", [name for name in KINDS if name != "llama"])
def test_kinds(models, tmp_path, name):
    kind = KINDS[name]
    from_each_place(kind, models(kind.model or name), tmp_path)


MANY = make_prompts(SEED, 8)
MANY_TOKENS = 10
STEPS_BETWEEN = 20


@cache
def answers_to_many(model: Path) -> list[list[list[int]]]:
    """Return vLLM's own answers by each of two sets of weights."""
    with GpuEngine(model, model.with_suffix(".many.log"), **LIMITS) as engine:
        found = []
        for number in range(2):
            engine.call("engine_acts:use_weights", number)
            assert engine.call("engine_acts:reset_all")
            found.append([answer.tokens for answer in engine.generate(MANY, MANY_TOKENS)])
    return found


def run_many(engine: GpuEngine, seed: int, expected: list[list[list[int]]], steps_between: int = 0) -> int:
    """Run requests that come and go at random; return how often everything was reset. What ran at a
    reset has tokens of both sets of weights."""
    requests = make_requests(seed, MANY, 14)
    for request in requests:
        # Of several samples each is drawn by a kernel that Triton's interpreter cannot run.
        request |= {"max_tokens": min(request["max_tokens"], MANY_TOKENS), "n": 1}
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
    for seed, moved in ((SEED, "stored"), (SEED + 1, "loaded")):
        with start(tiny_llama, tmp_path, memory=SMALL, num_gpu_blocks_override=40, order=order) as engine:
            run_many(engine, seed, expected)
            seen = rest(engine)
            assert seen[moved], seen
    assert verify_store(tmp_path / "store", CAP)


@pytest.mark.torture
def test_other_weights_after_each_reset(tiny_llama, tmp_path):
    """Everything is reset, whatever runs, one step after the other: vLLM refuses that while a step
    runs that was scheduled ahead, and has preempted all by then. Where such a request is loaded at
    once, its connector ends the engine by an assertion."""
    expected = answers_to_many(tiny_llama)
    limits = {"num_gpu_blocks_override": 40, "async_scheduling": False}
    with start(tiny_llama, tmp_path, memory=SMALL, **limits) as engine:
        run_many(engine, SEED, expected)
        rest(engine)
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


class TwoRanks(GpuEngine):
    """An engine with two workers, tensor parallel, each on a GPU of its own."""

    start = subprocess.Popen

    def __init__(self, model: Path, log: Path, **transfer: Any) -> None:
        # Asynchronous scheduling: vLLM's second rank drops outputs whose copies to the host are
        # under way, and their memory is written again; nobody reads them.
        more = LIMITS | {"layout": "tp2", "async_scheduling": False, "shutdown_timeout": 120}
        env = {"FAKE_GPU_DEVICES": "2", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "TORCHDYNAMO_DISABLE": "1"}
        super().__init__(model, log, env=env, **more, **transfer)

    def check(self) -> None:
        seen = self.call(f"{ACTS}:ranks_seen")
        assert [rank["device"] for rank in seen] == [0, 1]
        assert not any(rank["races"] or rank["violations"] for rank in seen), (seen, self.log)
        assert all(rank["kernels"] and rank["copies"] for rank in seen), seen


@pytest.mark.torture
@pytest.mark.parametrize("connector", ["KVDiskConnector", "OffloadingConnector"])
def test_two_ranks(tiny_llama, tmp_path, connector):
    """A block, or a row, has the bytes of both."""
    store = {"store_dirs": str(tmp_path / "store"), "nvme_bytes": CAP, "device": "posix"}
    transfer: dict[str, Any] = {"extra": store | {"cpu_bytes": AMPLE, "nvme_admission": "all"}}
    if connector == "OffloadingConnector":
        transfer = {"kv_transfer_config": tiered(tmp_path, memory=AMPLE)}
    with TwoRanks(tiny_llama, tmp_path / "log", **transfer) as engine:
        # With a salt of its own nothing of a prompt is found: vLLM computes all of it.
        alone = [engine.generate([prompt], TOKENS, salt=f"{at}")[0].tokens for at, prompt in enumerate(PROMPTS)]
        assert ask(engine) == (alone, 0), "cold"
        engine.reset()
        assert ask(engine) == (alone, KINDS["llama"].found_tokens()), "from memory"
        engine.drain()
    with TwoRanks(tiny_llama, tmp_path / "log", **transfer) as engine:
        assert ask(engine) == (alone, KINDS["llama"].found_tokens()), "from the drive, after a restart"
        assert engine.metrics()["kvdisk_loaded_blocks"] > 10
        engine.drain()
    assert verify_store(tmp_path / "store", CAP) > 10
