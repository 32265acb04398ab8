# SPDX-License-Identifier: Apache-2.0
"""What tests ask the runtime of the fake GPU, and tell it. Any thread may call."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def runtime() -> Any:
    """Return the library that torch has loaded."""
    library = ctypes.CDLL("libcudart.so.13")
    for name in ("races", "violations", "failed", "pending", "counts"):
        getattr(library, f"fake_gpu_{name}").restype = ctypes.c_size_t
    library.fake_gpu_inject.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    library.fake_gpu_reseed.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.fake_gpu_host_touches.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def reseed(order: str = "", seed: int = 0) -> None:
    """Choose the order in which work is done (see docs/FAKE_GPU.md; "": as before) and its
    chances."""
    runtime().fake_gpu_reseed(order.encode(), seed)


def races() -> int:
    """Return how many pairs of operations touched the same bytes, one writing, with no order
    between them."""
    return runtime().fake_gpu_races()


def violations() -> int:
    """Return how often a call was one that CUDA's text leaves undefined, or the host touched or
    gave back memory that an operation was at work on; docs/FAKE_GPU.md lists them."""
    return runtime().fake_gpu_violations()


def failed() -> int:
    """Return how many calls have failed that ``fail`` told to."""
    return runtime().fake_gpu_failed()


def pending() -> int:
    """Return how many operations have not run."""
    return runtime().fake_gpu_pending()


def fail(call: str, code: int, *, after: int = 0, times: int = 1) -> None:
    """Have a function of the runtime, or "kernel", fail with ``code``, ``times`` times, after so
    many calls that go well."""
    runtime().fake_gpu_inject(call.encode(), after, times, code)


def break_down(code: int = 700) -> None:
    """From now on all calls fail, as after a kernel that touched what it must not; 0: no more."""
    runtime().fake_gpu_break(code)


def host_touches(address: int, byte_count: int, *, writes: bool) -> bool:
    """The host touches memory now; return whether an operation is at work there, which counts as a
    violation."""
    return bool(runtime().fake_gpu_host_touches(address, byte_count, writes))


def counts(*, kernels: bool = False) -> dict[str, int]:
    """Return how often each function, or each kernel, was called."""
    text = ctypes.create_string_buffer(1 << 20)
    runtime().fake_gpu_counts(kernels, text, len(text))
    return {name: int(count) for name, _, count in (line.rpartition(" ") for line in text.value.decode().splitlines())}
