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
STAND_INS = {
    "vllm.platforms": "CUDA's own platform, but for what asks NVIDIA's libraries: `fake_gpu_platform`.",
    "vLLM's compiled operations": "torch does what they do, as vLLM has it for `custom_ops=['none']` and the native"
    " operations of its IR; whether one could do something is answered with no.",
    "vllm.model_executor.warmup.kernel_warmup": "Nothing: it warms up compiled kernels.",
    "vllm.compilation.passes.pass_manager": "Nothing: its passes rewrite compiled graphs, and nothing is compiled.",
    "vllm.vllm_flash_attn": "Not there, and says so: attention is vLLM's own in Triton.",
    "kernel_unified_attention": "vLLM's own kernel, given tiles of 128 tokens where no window slides, and up to 128"
    " rows of queries, in one pass: the interpreter's time goes by how many programs there are.",
    "get_lora_op_configs": "Blocks of 128 in each direction for vLLM's own kernels of adapters, for the same reason.",
    "TRITON_MLA": "vLLM's own, which takes float32, too: in 16 bits two tokens are often as likely. Prompts are for the"
    " backend that vLLM has for CPUs, in torch: all others are compiled.",
    "Triton's autotuner": "Takes the first of a kernel's ways: none is faster than another.",
    "Triton's grid-dependency calls": "Nothing: the operations of a stream run one after the other.",
}
"""What stands in for parts of vLLM and Triton here, each with what it does."""


def plugin() -> str:
    """Is called by vLLM as it looks for platforms; returns the platform's class."""
    import triton.backends
    import triton.language as tl

    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        sys.modules.setdefault(name, types.ModuleType(name))
    answer_for_operations()
    replace("vllm.model_executor.warmup.kernel_warmup", kernel_warmup=lambda *_, **__: None)
    replace("vllm.compilation.passes.pass_manager", PostGradPassManager=object, PassManager=object)
    replace(
        "vllm.vllm_flash_attn",
        FA2_AVAILABLE=False,
        FA3_AVAILABLE=False,
        is_fa_version_supported=lambda *_: False,
        fa_version_unsupported_reason=lambda *_: "it is a fake GPU",
        compile_flash_attn_varlen_func_from_specs=None,
        flash_attn_varlen_func=None,
        get_scheduler_metadata=None,
    )
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=object())  # or the CPU build wants no Triton
    tl.extra.cuda.gdc_wait = tl.extra.cuda.gdc_launch_dependents = lambda *_, **__: None
    act_after("vllm.v1.attention.ops.triton_unified_attention", widen_attention)
    act_after("vllm.v1.attention.backends.triton_attn", one_pass)
    for name in ("triton_mla", "prefill.cpu_sdpa"):
        act_after(f"vllm.v1.attention.backends.mla.{name}", take_float32)
    act_after("vllm.lora.ops.triton_ops.utils", widen_adapters)
    return "fake_gpu_platform.FakeGpuPlatform"


def replace(name: str, **found: Any) -> None:
    """Have a module of vLLM be another one."""
    module: Any = types.ModuleType(name)
    module.__dict__.update(found)
    sys.modules[name] = module


def answer_for_operations() -> None:
    """Have torch answer for vLLM's compiled operations that are asked for, and not called."""
    import torch

    find = torch._ops._OpNamespace.__getattr__

    def operation(self: Any, name: str) -> Any:
        try:
            return find(self, name)
        except AttributeError:
            if "support" in name:  # what a kernel of vLLM's could do, were it there
                return lambda *_, **__: False
            if name.endswith("_and_mul") or "gelu" in name or name == "relu_squared":
                return None
            raise

    torch._ops._OpNamespace.__getattr__ = operation


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


def widen_adapters(kernels: types.ModuleType) -> None:
    """Have a program of the kernels of adapters do what some hundred do on a GPU."""
    choose = kernels.get_lora_op_configs

    def chosen(*which: Any, **more: Any) -> dict[str, Any]:
        wide = {"block_m": WIDE, "block_n": WIDE, "block_k": WIDE, "split_k": 1}
        return {name: wide.get(name, value) for name, value in choose(*which, **more).items()}

    kernels.get_lora_op_configs = chosen


def take_float32(module: types.ModuleType) -> None:
    """Have a module's backends of attention take float32, too."""
    import torch

    for backend in vars(module).values():
        if isinstance(backend, type) and "supported_dtypes" in dir(backend):
            backend.supported_dtypes = [*backend.supported_dtypes, torch.float32]
