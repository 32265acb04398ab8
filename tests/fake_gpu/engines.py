# SPDX-License-Identifier: Apache-2.0
"""vLLM's engines on the fake GPU: its GPU worker and model runner V2, each in a process of its own.

The GPU does what it is given in a random order of those that CUDA allows. When an engine ends,
nothing may have raced, and nothing may have touched what it must not.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from engine_child import EngineChild
from forked_engines import Forked
from torture_rounds import HERE, SEED

from fake_gpu import control

os.environ["FAKE_GPU_FORKS"] = "1"  # for the process that forks
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
MEANT = ("triton _zero_kv_blocks_kernel", "aten::index_select")
"""Beside recurrent states vLLM zeroes blocks before kvdisk hears of it. What a store reads of them
is dropped (decision 29)."""


class GpuEngine(EngineChild):
    """``EngineChild`` there. ``order``: see ``runtime.cpp``; ``blocks``: of the GPU."""

    start = Forked

    def __init__(
        self, model: Path, log: Path, extra: dict[str, Any] | None = None, *, order: str = "mixed", **more: Any
    ) -> None:
        if order == "threads":
            self.start = subprocess.Popen  # what forks has chosen another order already
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
        races = [line for line in self.log.read_text(errors="replace").splitlines() if "fake GPU: RACE" in line]
        meant = [line for line in races if all(name in line for name in MEANT)]
        assert races == meant and (races or not seen["races"]), (races, seen, self.log)

    def __exit__(self, kind: Any, *more: Any) -> None:
        if kind is None:
            self.check()
        super().__exit__(kind, *more)


# -- in the engine's process -----------------------------------------------------------------------


def begin(_: Any, order: str, seed: int) -> None:
    control.reseed(order, seed)


def _get_runner(worker: Any) -> str:
    return type(worker.model_runner).__module__


def seen(llm: Any) -> dict[str, Any]:
    """Return what the GPU has seen, and what runs the model."""
    (runner,) = llm.collective_rpc(_get_runner)
    kernels = control.counts(kernels=True)
    return {
        "runner": runner,
        "races": control.races(),
        "violations": control.violations(),
        "kernels": sum(count for name, count in kernels.items() if name.startswith("triton ")),
        "asynchronous": bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling),
    }
