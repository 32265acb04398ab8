# SPDX-License-Identifier: Apache-2.0
"""On the GPU of host memory each test is also one of what waits for what."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _all_waits_are_there() -> Iterator[None]:
    if "fake_gpu_start" not in sys.modules:
        yield
        return
    from fake_gpu import control

    before = control.races(), control.violations()
    yield
    torch.cuda.synchronize()
    assert (control.races(), control.violations()) == before, "races, violations: the log has them"
