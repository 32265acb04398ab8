# SPDX-License-Identifier: Apache-2.0
"""These tests run in the environment that ``make test-cuda`` makes, and are skipped elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "connector"))  # what tests of engines share

ON_FAKE_GPU = "fake_gpu_start" in sys.modules
collect_ignore = [] if ON_FAKE_GPU else ["test_triton.py"]  # elsewhere there is no Triton to import


@pytest.fixture(autouse=True, scope="session")
def _needs_fake_gpu() -> None:
    if not ON_FAKE_GPU:
        pytest.skip("it needs the fake GPU: make test-cuda")


@pytest.fixture(autouse=True)
def _leave_the_gpu_in_order(_needs_fake_gpu: None) -> Iterator[None]:
    """No test leaves the next one an error, work, an order or a stream of its own."""
    yield
    import torch

    from fake_gpu import control

    control.break_down(0)
    control.runtime().cudaDeviceSynchronize()
    control.runtime().cudaGetLastError()
    control.reseed("mixed")
    torch.cuda.set_device(0)
    torch.cuda.set_stream(torch.cuda.default_stream())
