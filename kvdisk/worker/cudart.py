# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime that torch has loaded, for the few calls that torch does not offer."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_RELAXED = 2
_MEMORY_ALLOCATION = 2
_OF_CAPTURES = range(900, 909)
"""cudaErrorStreamCaptureUnsupported and the errors of captures behind it."""


@cache
def cuda_runtime(*, holding: bool = False) -> Any:
    """Return the library; None where torch has none, or is linked with it statically.

    ``holding``: calls hold the interpreter lock. It is for functions that end in microseconds:
    getting the lock back may take milliseconds beside a thread that runs Python.
    """
    import torch

    load = ctypes.PyDLL if holding else ctypes.CDLL
    try:  # by its name alone: the loader then finds the one that is there already
        return load(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    except OSError:
        return None


def forget_error() -> None:
    """Clear this thread's last CUDA error, once it was handled: torch would raise it at its next
    call."""
    runtime = cuda_runtime()
    if runtime is not None:
        runtime.cudaGetLastError()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error of torch says that a GPU has no memory left. Such an error breaks
    nothing."""
    import torch

    code = getattr(error, "error_code", None)  # what the runtime said, where torch raises that as it is
    return isinstance(error, torch.OutOfMemoryError) or code == _MEMORY_ALLOCATION


def is_of_capture(error: RuntimeError) -> bool:
    """Return whether an error of torch says that a capture of CUDA graphs, on whatever thread,
    forbade a call. The GPU goes on."""
    return getattr(error, "error_code", None) in _OF_CAPTURES


def relax_captures() -> bool:
    """Let this thread allocate, pin and ask for events while another thread captures CUDA graphs,
    which otherwise fails both. Return whether that is so.

    vLLM: it captures graphs once the KV caches are registered, in torch's strictest mode.
    """
    runtime = cuda_runtime()
    mode = ctypes.c_int(_RELAXED)
    return runtime is not None and runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
