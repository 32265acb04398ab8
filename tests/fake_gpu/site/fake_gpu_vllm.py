# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU build takes the fake GPU for its platform: its own GPU worker, model runner and
scheduler, with Triton's interpreter for kernels and torch for the rest."""

from __future__ import annotations

import sys
import types
from typing import Any


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
    return "fake_gpu_platform.FakeGpuPlatform"
