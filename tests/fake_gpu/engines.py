# SPDX-License-Identifier: Apache-2.0
"""vLLM's engines on the fake GPU: its GPU worker and model runner V2, each in a process of its own.

The GPU does what it is given in a random order of those that CUDA allows. When an engine ends,
nothing may have raced but what kvdisk has dropped, and nothing may have touched what it must not.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

from engine_child import EngineChild
from forked_engines import Forked
from torture_rounds import HERE, SEED

from fake_gpu import control
from kvdisk.manager.jobs import StoreSources

os.environ |= {"FAKE_GPU_FORKS": "1", "FAKE_GPU_RACES": "each"}  # for the process that forks
ENVIRONMENT = HERE | {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
NATIVE = {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "num_gpu_blocks_override": 60,
    "max_model_len": 256,
    "max_num_batched_tokens": 96,
    "kv_cache_memory_bytes": 64 << 20,
    "attention_config": {"backend": "TRITON_ATTN"},
    # vLLM's own kernels are for GPUs: torch does what they do.
    "compilation_config": {"custom_ops": ["none"]},
    "kernel_config": {"ir_op_priority": NATIVE},
}
"""Arguments of ``vllm.LLM``."""
COPY = "aten::index_select"
BEFORE_HOOKS = ("triton _zero_kv_blocks_kernel", "triton precopy_mamba_align_fused_kernel")
"""What vLLM's runner writes beside recurrent states before it calls ``handle_preemptions``: zeroed
blocks, and states that move to new blocks. What a store reads of these is dropped (decision 29)."""
RACE = re.compile(r"fake GPU: RACE: #\d+ (.+) \(stream \d+\) \w+ (\d+) bytes at (\S+), .* with #\d+ (.+) \(stream")


class GpuEngine(EngineChild):
    """``EngineChild`` there. ``order``: see ``runtime.cpp``; ``blocks``: of the GPU."""

    start = Forked

    def __init__(
        self, model: Path, log: Path, extra: dict[str, Any] | None = None, *, order: str = "mixed", **more: Any
    ) -> None:
        if order == "threads":
            self.start = subprocess.Popen  # what forks has chosen another order already
        self._before = log.stat().st_size if log.exists() else 0  # of other engines
        env = ENVIRONMENT | {"FAKE_GPU_SCHED": order} | more.pop("env", {})
        super().__init__(model, log, extra_config=extra, env=env, **ENGINE | more)
        self.call("fake_gpu.engines:begin", order, SEED)

    def end(self) -> None:
        """Close, once nothing has gone wrong on the GPU."""
        self.check()
        self.close()

    def check(self) -> None:
        """Assert that nothing has raced but what is meant to, and nothing has touched what it must
        not, so far."""
        seen = self.call("fake_gpu.engines:seen")
        assert seen["runner"].endswith("gpu.model_runner"), seen
        assert seen["kernels"] > 0 and not seen["violations"], (seen, self.log)
        lines = self.log.read_bytes()[self._before :].decode(errors="replace").splitlines()
        races = [line for line in lines if "fake GPU: RACE" in line]
        wrong = [line for line in races if not _is_dropped(line, seen["caches"], seen["dropped"])]
        assert not wrong and (races or not seen["races"]), (wrong, seen, self.log)

    def __exit__(self, kind: Any, *more: Any) -> None:
        if kind is None:
            self.check()
        super().__exit__(kind, *more)


def _is_dropped(race: str, caches: list[tuple[int, int, int]], dropped: list[int]) -> bool:
    """Return whether a race is one of a copy that kvdisk has dropped, block for block."""
    found = RACE.search(race)
    assert found, race
    one, byte_count, address, other = found.groups()
    if {one, other} not in [{COPY, name} for name in BEFORE_HOOKS]:
        return False
    begin = int(address, 16)
    for start, cache_bytes, block_bytes in caches:
        if start <= begin < start + cache_bytes:
            blocks = range((begin - start) // block_bytes, (begin - start + int(byte_count) - 1) // block_bytes + 1)
            return set(blocks) <= set(dropped)
    return False


# -- in the engine's process -----------------------------------------------------------------------

_dropped: set[int] = set()
"""The GPU blocks of copies that kvdisk dropped, as the runner may have written to them first."""


def begin(_: Any, order: str, seed: int) -> None:
    control.reseed(order, seed)
    take_fence = StoreSources.take_fence

    def noted(sources: Any, overwritten: Collection[int]) -> Any:
        sources._note_reused()
        reused = sources._reused
        fence = take_fence(sources, overwritten)
        for _, record in reused:
            _dropped.update(*(record.job.moves[position].gpu_blocks for position in record.failed if position >= 0))
        return fence

    StoreSources.take_fence = noted  # type: ignore[method-assign]


def _get_runner_and_caches(worker: Any) -> tuple[str, set[tuple[int, int, int]]]:
    """Return the module of a worker's runner, and its caches: address, bytes, bytes of a block."""
    runner, found = worker.model_runner, set()
    for cache in runner.kv_caches:
        dim = cache.shape.index(runner.kv_cache_config.num_blocks)
        for part in cache if dim == 1 else [cache]:
            block_bytes = part.stride(0) * part.element_size()
            found.add((part.data_ptr(), block_bytes * len(part), block_bytes))
    return type(runner).__module__, found


def seen(llm: Any) -> dict[str, Any]:
    """Return what the GPU has seen, and what runs the model."""
    ((runner, caches),) = llm.collective_rpc(_get_runner_and_caches)
    kernels = control.counts(kernels=True)
    return {
        "runner": runner,
        "races": control.races(),
        "caches": sorted(caches),
        "dropped": sorted(_dropped),
        "violations": control.violations(),
        "kernels": sum(count for name, count in kernels.items() if name.startswith("triton ")),
        "asynchronous": bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling),
    }
