# SPDX-License-Identifier: Apache-2.0
"""vLLM's own GPU worker and model runner V2, with kvdisk, on the fake GPU: the tokens are
those of vLLM alone wherever the KV came from, and nothing races (``engines.GpuEngine``).

Prompts are longer than a step, so that they are computed in chunks, and scheduling is asynchronous.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_models
from adapter_files import write_adapter
from engine_child import Answer
from torture_rounds import SLOT_BYTES, random_prompt, tokens_of

from fake_gpu.drafts import write_eagle, write_mtp
from fake_gpu.engines import GpuEngine
from kvdisk.device.listing import list_homes
from kvdisk.geometry import HEADER_BYTES, slot_offset
from kvdisk.worker.runner import Runner

pytestmark = pytest.mark.fake_gpu
torture = pytest.mark.torture

ROOT = Path(__file__).resolve().parents[2]
SHARED = random_prompt(1, 100)
PROMPTS = [random_prompt(2, 90), random_prompt(3, 150), *(SHARED + random_prompt(at, 40) for at in (4, 5))]
MANY = [random_prompt(20 + at, 32 * (2 + at % 3) - 4) for at in range(8)]  # each takes one more block
MANY_TOKENS = 16
ORDERS = ("late", "contrary", "random", "eager", "threads")


class Kind(NamedTuple):
    """A model. ``block_tokens``: hits are multiples of; ``few_blocks``: of a GPU on which requests
    are preempted; ``cpu_tier``: kvdisk wants one for it; ``model``: where it is not the kind's
    name; ``left_out``: blocks that vLLM computes again at a hit's end, for the drafter."""

    limits: dict[str, Any]
    block_tokens: int = 32
    few_blocks: int = 14
    cpu_tier: bool = False
    model: str = ""
    left_out: int = 0


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
HYBRID = {"num_gpu_blocks_override": 120}
KINDS = {
    "llama": Kind({}),
    "gemma3": Kind(HYBRID, few_blocks=36),
    "granite4": Kind(HYBRID, 64, 24, cpu_tier=True),
    "deepseek": Kind({"attention_config": {"backend": "TRITON_MLA", "mla_prefill_backend": "CPU"}}),
    "lfm2": Kind(HYBRID, few_blocks=40, cpu_tier=True),
    "n-gram": Kind({"speculative_config": NGRAM}, model="llama"),
    "eagle": Kind({"speculative_config": {"method": "eagle", "num_speculative_tokens": 2}}, left_out=1, model="llama"),
    # Recurrent states, attention, and a layer that predicts one token more.
    "mtp": Kind(
        HYBRID | {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
        64,
        26,
        cpu_tier=True,
        model="nemotron-mtp",
        left_out=1,
    ),
}
IN_MAKE_TEST = ("llama", "gemma3", "granite4", "eagle")
ALONE = {"n-gram": "llama", "eagle": "llama"}
"""Kinds whose answers are those of another one, which is what speculation must not change."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the directory of a tiny model, which it builds unless it has been."""
    folder = tmp_path_factory.mktemp("models")

    def build(kind: str) -> Path:
        place = folder / kind
        if kind == "nemotron-mtp":
            return place if place.exists() else write_mtp(build("nemotron"), place)
        if kind == "eagle":
            return place if place.exists() else write_eagle(build("llama"), place)
        return tiny_models.build(f"tiny-{kind}", place, [(ROOT / "LICENSE").read_text()])

    return build


@pytest.fixture(scope="session")
def alone(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns what vLLM without kvdisk answers to ``PROMPTS`` and to ``MANY``."""
    found: dict[str, tuple[list[list[int]], list[list[int]]]] = {}

    def ask(name: str) -> tuple[list[list[int]], list[list[int]]]:
        name = ALONE.get(name, name)
        kind = KINDS[name]
        if name not in found:
            log = tmp_path_factory.mktemp("alone") / "log"
            with GpuEngine(models(kind.model or name), log, **kind.limits) as engine:
                found[name] = tokens_of(engine.generate(PROMPTS)), tokens_of(engine.generate(MANY, MANY_TOKENS))
        return found[name]

    return ask


def store_in(folder: Path, **more: Any) -> dict[str, Any]:
    return {"cpu_bytes": "16MiB", "store_dirs": str(folder), "nvme_bytes": "64MiB", "device": "posix"} | more


def whole(prompt: list[int], block_tokens: int = 32) -> int:
    """Return how many tokens of a prompt can be loaded."""
    return (len(prompt) - 1) // block_tokens * block_tokens


def no_failures(engine: GpuEngine) -> dict[str, int]:
    """Return kvdisk's counters, of which none counts a failure."""
    counters = engine.counters()
    assert not {name for name in counters if name.endswith("_failures") or name.startswith("failed")}, counters
    return counters


def loaded(answers: list[Answer], kind: Kind = KINDS["llama"]) -> bool:
    """Return whether all that can be loaded of ``PROMPTS`` was not computed."""
    left_out = kind.left_out * kind.block_tokens
    wanted = [max(0, whole(prompt, kind.block_tokens) - left_out) for prompt in PROMPTS]
    return any(wanted) and [answer.cached for answer in answers] == wanted


def flip_bits(store: Path) -> None:
    """Flip a bit of every block of the tiny Llama on the drive."""
    (home,) = list_homes(store)
    for file in home.segments_path.rglob("rank0.kv"):
        data = bytearray(file.read_bytes())
        for start in range(slot_offset(SLOT_BYTES, 0), len(data) - SLOT_BYTES + 1, SLOT_BYTES):
            data[start + HEADER_BYTES + 1000] ^= 1
        file.write_bytes(data)


def serve(name: str, order: str, models: Any, alone: Any, folder: Path) -> None:
    """Have one kind of model served cold, from memory, and from the drive after a restart; the
    second engine preempts."""
    kind, log, store = KINDS[name], folder / "log", folder / "store"
    model, (right, right_of_many), limits = models(kind.model or name), alone(name), kind.limits
    if name == "eagle":
        limits = {"speculative_config": limits["speculative_config"] | {"model": str(models("eagle"))}}
    with GpuEngine(model, log, store_in(store), order=order, **limits) as engine:
        assert tokens_of(engine.generate(PROMPTS)) == right, "cold"
        engine.reset()
        warm = engine.generate(PROMPTS)
        assert tokens_of(warm) == right, "from memory"
        assert loaded(warm, kind), [answer.cached for answer in warm]
        engine.drain()
        counters = no_failures(engine)
        assert counters["hit_tokens.cpu"] > 0 and counters["demoted_blocks"] == counters["stored_blocks"]
    extra = store_in(store, store_decode=True) | ({} if kind.cpu_tier else {"cpu_bytes": 0})
    few = limits | {"num_gpu_blocks_override": kind.few_blocks}
    with GpuEngine(model, log, extra, order=order, **few) as engine:
        warm = engine.generate(PROMPTS, together=False)
        assert tokens_of(warm) == right, "from the drive, after a restart"
        assert loaded(warm, kind), [answer.cached for answer in warm]
        assert engine.counters()["hit_tokens.nvme"] > 0
        assert tokens_of(engine.generate(MANY, MANY_TOKENS)) == right_of_many, "victims are saved and come back"
        engine.drain()
        metrics = engine.metrics()
        assert metrics["num_preemptions"] > 0
        if "speculative_config" in limits:
            assert metrics["spec_decode_num_draft_tokens"] > 0
        if name == "eagle":
            assert metrics["spec_decode_num_accepted_tokens"] > 0, metrics
        no_failures(engine)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[torture] * (name not in IN_MAKE_TEST)) for name in KINDS])
def test_kind(name, models, alone, tmp_path):
    serve(name, "mixed", models, alone, tmp_path)


@torture
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_order(name, order, models, alone, tmp_path):
    serve(name, order, models, alone, tmp_path)


def kill_mover(llm: Any) -> None:
    """Have the thread that moves blocks end at its next copy. Runs in the engine's process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    copier = get_kv_transfer_group().worker.mover._runner._resources.copier

    def killed(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted: the mover is killed")

    copier.gather = copier.scatter = killed


def test_flipped_bits_and_a_killed_mover(models, alone, tmp_path):
    model, (right, right_of_many), store = models("llama"), alone("llama"), tmp_path / "store"
    with GpuEngine(model, tmp_path / "log", store_in(store)) as engine:
        assert tokens_of(engine.generate(PROMPTS)) == right
        engine.drain()
    flip_bits(store)
    with GpuEngine(model, tmp_path / "log", store_in(store)) as engine:
        assert tokens_of(engine.generate(PROMPTS)) == right, "every bit that is wrong is noticed"
        assert engine.counters()["verification_failures.checksum"] > 0
        engine.reset()
        again = engine.generate(PROMPTS)
        assert tokens_of(again) == right and loaded(again), "what was computed took the place of the bad"
        engine.reset()
        engine.call("fake_gpu.test_engine:kill_mover")
        assert tokens_of(engine.generate(PROMPTS)) == right, "nobody moves blocks any more"
        assert tokens_of(engine.generate(MANY, MANY_TOKENS)) == right_of_many


def slow_mover(_: Any) -> None:
    """Have the thread that moves blocks look late at whether its copies have ended. Runs in the
    engine's process."""
    turn = Runner.turn

    def slowly(runner: Runner, *args: Any, **kwargs: Any) -> bool:
        if runner.copying:
            time.sleep(0.05)
        return turn(runner, *args, **kwargs)

    Runner.turn = slowly  # type: ignore[method-assign]


def test_what_is_written_before_the_hook_is_dropped(models, alone, tmp_path):
    """Beside recurrent states vLLM writes to new blocks before kvdisk hears of them. Copies from
    them that still go on then are dropped (``GpuEngine.check`` sees to it, block for block)."""
    kind, (_, right_of_many) = KINDS["lfm2"], alone("lfm2")
    limits = kind.limits | {"num_gpu_blocks_override": kind.few_blocks}
    extra = store_in(tmp_path / "store", store_decode=True)
    with GpuEngine(models("lfm2"), tmp_path / "log", extra, order="late", **limits) as engine:
        engine.call("fake_gpu.test_engine:slow_mover")
        assert tokens_of(engine.generate(MANY, MANY_TOKENS)) == right_of_many
        seen = engine.call("fake_gpu.engines:seen")
        assert seen["races"] > 0 and seen["dropped"], seen
        engine.reset()
        assert tokens_of(engine.generate(MANY, MANY_TOKENS)) == right_of_many, "from memory"


POLICIES = {
    "on_compute": {"store_decode": True},
    "on_preemption": {},
    "spillover": {"store_decode": True},
}


@pytest.mark.parametrize(
    ("name", "policy", "asynchronous"),
    [
        ("llama", "on_preemption", True),
        ("llama", "spillover", True),
        *(pytest.param("llama", policy, False, marks=torture) for policy in POLICIES),
        pytest.param("gemma3", "spillover", True, marks=torture),
    ],
)
def test_preempted(name, policy, asynchronous, models, alone, tmp_path):
    """Blocks that go and come back while the GPU has few."""
    kind, (_, right_of_many) = KINDS[name], alone(name)
    extra = store_in(tmp_path / "store", store_policy=policy) | POLICIES[policy]
    limits = kind.limits | {"num_gpu_blocks_override": kind.few_blocks, "async_scheduling": asynchronous}
    with GpuEngine(models(name), tmp_path / "log", extra, **limits) as engine:
        for _ in range(2):
            assert tokens_of(engine.generate(MANY, MANY_TOKENS)) == right_of_many
        engine.drain()
        assert engine.metrics()["num_preemptions"] > 0
        assert no_failures(engine)["stored_blocks"] > 0
        assert engine.call("fake_gpu.engines:seen")["asynchronous"] is asynchronous


@torture
def test_adapters(models, tmp_path):
    """Blocks of one LoRA adapter serve no other one, nor the model itself."""
    store, folders = tmp_path / "store", [write_adapter(tmp_path / name, seed) for seed, name in enumerate("ab")]
    # vLLM's kernels of adapters take 16 bits only.
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "dtype": "float16"}
    prompts = PROMPTS[1:2]
    hit = whole(prompts[0])

    def ask(engine: GpuEngine) -> list[tuple[list[int], int]]:
        """Return the tokens of each adapter and of the model itself, and how many of the prompt's
        were cached."""
        engine.call("engine_acts:await_adapters")
        asked = [(prompts, folder.name, number, str(folder)) for number, folder in enumerate(folders, 1)]
        found = [tuple(answer) for each in asked for answer in engine.call("engine_acts:generate_with", *each)]
        return found + [(answer.tokens, answer.cached) for answer in engine.generate(prompts)]

    with GpuEngine(models("llama"), tmp_path / "log", **lora) as engine:
        cold = ask(engine)
    right = [tokens for tokens, _ in cold]
    assert right[0] != right[1] != right[2] != right[0], "else the test shows nothing"
    with GpuEngine(models("llama"), tmp_path / "log", store_in(store), **lora) as engine:
        assert ask(engine) == cold == [(tokens, 0) for tokens in right], "none has another's blocks"
        engine.reset()
        assert ask(engine) == [(tokens, hit) for tokens in right], "from memory"
        engine.drain()
        assert no_failures(engine)["hit_tokens.cpu"] == 3 * hit
    with GpuEngine(models("llama"), tmp_path / "log", store_in(store, cpu_bytes=0), **lora) as engine:
        assert ask(engine) == [(tokens, hit) for tokens in right], "from the drive, after a restart"
