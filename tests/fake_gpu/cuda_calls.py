# SPDX-License-Identifier: Apache-2.0
"""Calls of the runtime that torch does not make, or not so."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fake_gpu import control

HERE = Path(__file__).resolve().parent
TO_DEVICE, TO_HOST, ON_DEVICE, ANY = 1, 2, 3, 4
LEGACY, PER_THREAD = 0, 2
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


def call(name: str, *arguments: Any) -> int:
    """Call a function; return its error. Numbers are passed as 64 bits."""
    wide = (ctypes.c_int64(each) if isinstance(each, int) else each for each in arguments)
    return getattr(control.runtime(), name)(*wide)


def made(name: str, *arguments: Any) -> int:
    """Call a function that makes something; return its handle."""
    handle = ctypes.c_void_p()
    code = call(name, ctypes.byref(handle), *arguments)
    assert code == 0, (name, code)
    return handle.value or 0


def error_name(code: int) -> str:
    """Return what CUDA calls an error."""
    control.runtime().cudaGetErrorName.restype = ctypes.c_char_p
    return control.runtime().cudaGetErrorName(code).decode()


def copy_async(target: torch.Tensor, source: torch.Tensor, stream: int, kind: int = ANY) -> int:
    """Copy a tensor's bytes; return the error."""
    return call("cudaMemcpyAsync", target.data_ptr(), source.data_ptr(), source.nbytes, kind, stream)


def copy(target: torch.Tensor, source: torch.Tensor, kind: int = ANY) -> int:
    """Copy a tensor's bytes on the legacy stream, not asynchronously; return the error."""
    return call("cudaMemcpy", target.data_ptr(), source.data_ptr(), source.nbytes, kind)


def on_gpu(count: int, value: int = 0) -> torch.Tensor:
    """Return bytes on the GPU that are there, and known to be."""
    tensor = torch.full((count,), value, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return tensor


def pinned(count: int, value: int = 0) -> torch.Tensor:
    """Return bytes in page-locked memory."""
    return torch.full((count,), value, dtype=torch.uint8).pin_memory()


@contextmanager
def expect(*, races: int = 0, violations: int = 0) -> Iterator[None]:
    """Check how many of each are found in the block, whose work ends with it."""
    before = control.races(), control.violations()
    yield
    assert call("cudaDeviceSynchronize") == 0
    found = control.races() - before[0], control.violations() - before[1]
    assert found == (races, violations), f"{found[0]} races and {found[1]} violations"


def output_of(program: str, **variables: str) -> str:
    """Run a program of its own; return what it prints. Its asserts are this test's."""
    environment = os.environ | {f"FAKE_GPU_{name}": value for name, value in variables.items()}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-9000:]
    return done.stdout.strip()
