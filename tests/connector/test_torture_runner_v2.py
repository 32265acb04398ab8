# SPDX-License-Identifier: Apache-2.0
"""Model runner V2, which vLLM has on every GPU: its CPU worker runs it here on CPU tensors, with
Triton's interpreter for the runner's kernels. The tokens are those of vLLM alone, and each block
that was loaded has the bytes that were stored."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from engine_child import EngineChild
from support.interpreted_triton import lay_triton, paths
from torture_rounds import GPU, HERE, MIB, SEED, random_prompt, run_round, tokens_of, verify_store

pytestmark = pytest.mark.torture

LONG = [random_prompt(SEED + at, 320 + 8 * at) for at in range(4)]
"""Prompts of ten blocks and more, which the GPU's blocks hold together."""
AFTER_RESTART = "NVMe, after a restart"
FEW_BLOCKS = {"num_gpu_blocks_override": 45, "max_num_seqs": 8}


class OnV2(EngineChild):
    """An engine with model runner V2, in a process of its own: Triton comes before vLLM."""

    start = subprocess.Popen

    def __init__(self, triton: Path, model: Path, log: Path, **more: Any) -> None:
        env = HERE | paths(triton, HERE["PYTHONPATH"]) | {"VLLM_USE_V2_MODEL_RUNNER": "1"}
        super().__init__(model, log, env=env, **GPU | more)
        assert "Using V2 Model Runner" in log.read_text()

    def call(self, target: str, *arguments: Any) -> Any:
        if target == "engine_acts:run_requests":  # the interpreter cannot draw: the likeliest token, once
            arguments = ([request | {"n": 1} for request in arguments[0]], *arguments[1:])
        return super().call(target, *arguments)


@pytest.fixture(scope="session")
def triton() -> Path:
    return lay_triton()


def digests(engine: EngineChild, *, loaded: bool = False) -> dict[str, str]:
    """Return ``engine_acts.block_digests``."""
    return dict(engine.call("engine_acts:block_digests", loaded))


@pytest.mark.parametrize(
    ("model", "through"),
    [
        ("llama", "memory"),
        *(("gemma3", way) for way in ("memory", "NVMe, after a restart", "NVMe, without a CPU tier")),
    ],
    indirect=["model"],
)
def test_what_was_stored_is_in_the_blocks_again(triton, model, through, tmp_path):
    """Compared by digests of every block; blocks that loads fill with zeros are noticed."""
    store = {"store_dirs": str(tmp_path / "store"), "nvme_bytes": 64 * MIB, "nvme_admission": "all"}
    extra = {"cpu_bytes": 0 if "without" in through else "16MiB"} | ({} if through == "memory" else store)
    log, answers = tmp_path / "log", []

    def engine() -> OnV2:
        return OnV2(triton, model, log, extra_config=extra, num_gpu_blocks_override=200)

    def ask(engine: EngineChild) -> dict[str, str]:
        answers.append(tokens_of(engine.generate(LONG, together=False)))
        engine.drain()
        return digests(engine, loaded=len(answers) > 1)

    with engine() as first:
        first.call("engine_acts:watch_loads")
        before = ask(first)
        if through != AFTER_RESTART:
            first.reset()
            after, zeroed = ask(first), zeroes(first, ask)
    if through == AFTER_RESTART:
        with engine() as second:
            second.call("engine_acts:watch_loads")
            after, zeroed = ask(second), zeroes(second, ask)
    assert len(after) >= 4 * 9, "most blocks were loaded"
    assert {name: before.get(name) for name in after} == after
    assert answers[0] == answers[1]
    assert len(zeroed) >= 4 * 9 and not set(zeroed.values()) & set(before.values()), "the control"
    assert answers[2] != answers[0]


def zeroes(engine: EngineChild, ask: Any) -> dict[str, str]:
    """Ask once more, with loads that bring zeros."""
    engine.reset()
    engine.call("engine_acts:zero_loads")
    engine.call("engine_acts:watch_loads")
    return ask(engine)


WORKLOADS = {
    "few blocks": (FEW_BLOCKS, {"cpu_bytes": "4MiB", "store_decode": True}),
    "evictions": ({}, {"cpu_bytes": "2MiB", "segment_bytes": 300_000}),
}


@pytest.mark.parametrize(
    ("model", "name"),
    [("llama", name) for name in WORKLOADS] + [("gemma3", "few blocks")],
    indirect=["model"],
)
def test_workload(triton, model, expected, name, tmp_path):
    """``expected``: what vLLM answers with the runner that its CPU build has."""
    limits, extra = WORKLOADS[name]
    store = tmp_path / "store"
    settings = {"store_dirs": str(store), "nvme_bytes": 14 * MIB, "segment_bytes": MIB} | extra
    with OnV2(triton, model, tmp_path / "log", extra_config=settings, **limits) as engine:
        for at in range(2):
            run_round(engine, SEED + at, expected)
            (facts,) = engine.call("engine_acts:audit")["connectors"]
            counters = facts["counters"]
            bad = {name for name in counters if name.endswith("_failures") or name.startswith("failed")}
            assert not bad, f"seed {SEED + at}: {counters}"
            assert verify_store(store, settings["nvme_bytes"]) + facts["dropped_puts"] >= facts["nvme_blocks"]
        assert counters.get("loaded_blocks", 0) > 0
    verify_store(store, settings["nvme_bytes"])
