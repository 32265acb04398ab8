# SPDX-License-Identifier: Apache-2.0
"""These tests run in the environment that ``make test-cuda`` makes, and are skipped elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "connector"))  # what tests of engines share


@pytest.fixture(autouse=True, scope="session")
def _needs_fake_gpu() -> None:
    if "fake_gpu_start" not in sys.modules:
        pytest.skip("it needs the GPU of host memory: make test-cuda")
