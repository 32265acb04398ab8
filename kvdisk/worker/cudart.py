# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime that torch has loaded, for the few calls that torch does not offer."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_RELAXED = 2


@cache
def cuda_runtime() -> Any:
    """Return the library; None where torch has none, or has it within itself."""
    import torch

    try:  # by its name alone: the loader then finds the one that is there already
        return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    except OSError:
        return None


def relax_captures() -> bool:
    """Let this thread allocate, pin, and ask for events while another one captures CUDA graphs,
    which would fail both; return whether that is so.

    vLLM: it captures graphs once the KV caches are registered, in torch's strictest mode.
    """
    runtime = cuda_runtime()
    mode = ctypes.c_int(_RELAXED)
    return runtime is not None and runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
