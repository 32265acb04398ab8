# SPDX-License-Identifier: Apache-2.0
"""Where these tests run: on the first CUDA GPU. With ``KVDISK_GPU_TESTS_ON=cpu`` they are
rehearsed over CPU tensors: what they say of streams is not shown then, all else is."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from support.addressed_device import CpuLanes

from kvdisk.worker.copier import CudaLanes, Lane

REHEARSED = os.environ.get("KVDISK_GPU_TESTS_ON") == "cpu"
GPU = torch.device("cpu" if REHEARSED else "cuda")
PIN = not REHEARSED
needs_cuda = pytest.mark.skipif(REHEARSED, reason="nothing of it can be rehearsed on a CPU")


def make_lanes() -> CudaLanes:
    return CpuLanes() if REHEARSED else CudaLanes()


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=GPU)


def synchronize() -> None:
    if not REHEARSED:
        torch.cuda.synchronize()


def keep_busy(lanes: CudaLanes | None = None) -> None:
    """Give the GPU a tenth of a second of work on the current stream, or on all lanes."""
    if REHEARSED:
        return
    for stream in [torch.cuda.current_stream()] if lanes is None else [lanes._streams[lane] for lane in Lane]:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)


def another_stream() -> AbstractContextManager[object]:
    return nullcontext() if REHEARSED else torch.cuda.stream(torch.cuda.Stream())


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in host memory of their own."""
    return tensor.cpu().clone()
