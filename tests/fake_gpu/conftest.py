# SPDX-License-Identifier: Apache-2.0
"""These tests run in the environment that ``make test-cuda`` makes, and are skipped elsewhere."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True, scope="session")
def _needs_fake_gpu() -> None:
    if "fake_gpu_start" not in sys.modules:
        pytest.skip("it needs the GPU of host memory: make test-cuda")
