# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU build takes the fake GPU for its platform: its own GPU worker, model runner and
scheduler, with Triton's interpreter for kernels and torch for the rest."""

from __future__ import annotations

import sys
import types
from typing import Any

from fake_gpu_start import act_after

WIDE = 128
"""Tokens of a tile of attention, and rows of queries at most."""


def plugin() -> str:
    """Is called by vLLM as it looks for platforms; returns the platform's class."""
    import torch
    import triton.backends
    import triton.language as tl

    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        sys.modules.setdefault(name, types.ModuleType(name))
    found = torch._ops._OpNamespace.__getattr__

    def operation(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if "support" in name:  # what a kernel of vLLM's could do, were it there
                return lambda *_, **__: False
            if name.endswith("_and_mul") or "gelu" in name:  # asked for, and not called with ``custom_ops=["none"]``
                return None
            raise

    torch._ops._OpNamespace.__getattr__ = operation
    warmup: Any = types.ModuleType("vllm.model_executor.warmup.kernel_warmup")  # of compiled kernels
    warmup.kernel_warmup = lambda *_, **__: None
    sys.modules[warmup.__name__] = warmup
    flash: Any = types.ModuleType("vllm.vllm_flash_attn")
    flash.FA2_AVAILABLE = flash.FA3_AVAILABLE = False
    flash.is_fa_version_supported = lambda *_: False
    flash.fa_version_unsupported_reason = lambda *_: "it is a fake GPU"
    for name in ("compile_flash_attn_varlen_func_from_specs", "flash_attn_varlen_func", "get_scheduler_metadata"):
        setattr(flash, name, None)
    sys.modules["vllm.vllm_flash_attn"] = flash
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=object())  # or the CPU build wants no Triton
    tl.extra.cuda.gdc_wait = tl.extra.cuda.gdc_launch_dependents = lambda *_, **__: None
    act_after("vllm.v1.attention.ops.triton_unified_attention", widen_attention)
    act_after("vllm.v1.attention.backends.triton_attn", one_pass)
    return "fake_gpu_platform.FakeGpuPlatform"


def widen_attention(attention: types.ModuleType) -> None:
    """Give each program of vLLM's attention more tokens at once: the interpreter's time goes by how
    many programs there are. In a sliding window a program reads no block that has left it."""
    kernel = attention.kernel_unified_attention

    def launcher(grid: tuple[int, ...]) -> Any:
        def launch(**given: Any) -> None:
            queries, per_head = given["query_ptr"], given["num_queries_per_kv"]
            rows = min(WIDE, max(given["BLOCK_M"], 1 << (queries.shape[0] * per_head - 1).bit_length()))
            given |= {"BLOCK_M": rows, "BLOCK_Q": rows // per_head}
            if given["SLIDING_WINDOW"] <= 0:
                given["TILE_SIZE"] = WIDE
            kernel[(queries.shape[0] // given["BLOCK_Q"] + given["num_seqs"], *grid[1:])](**given)

        return launch

    attention.kernel_unified_attention = type("Wide", (), {"__getitem__": staticmethod(launcher)})()


def one_pass(backend: types.ModuleType) -> None:
    """Have attention to a long context in one pass, not in sixteen pieces beside each other."""
    backend.MIN_LAUNCH_GRID_SIZE_2D = 0
