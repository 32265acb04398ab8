# SPDX-License-Identifier: Apache-2.0
"""On the fake GPU each test is also one of what waits for what."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

ON_FAKE_GPU = "fake_gpu_start" in sys.modules
LONG = "by Triton's kernel-17-8388632"
"""What Triton's interpreter takes minutes for."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if ON_FAKE_GPU else ():
        if LONG in item.nodeid:
            item.add_marker(pytest.mark.torture)


@pytest.fixture(autouse=True)
def _all_waits_are_there() -> Iterator[None]:
    if not ON_FAKE_GPU:
        yield
        return
    from fake_gpu import control

    before = control.races(), control.violations()
    yield
    torch.cuda.synchronize()
    assert (control.races(), control.violations()) == before, "races, violations: the log has them"
