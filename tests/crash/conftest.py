# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdisk.index import neighbour_reader

MEMORY = Path("/dev/shm")  # noqa: S108 - only looked for


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No home is left alone because the process that reads it has to wait for a busy machine."""
    monkeypatch.setattr(neighbour_reader, "ANSWER_TIMEOUT_S", 600.0)


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is such a place: for tests that open a store hundreds of
    times."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="kvdisk-test-", dir=MEMORY))
    yield path
    shutil.rmtree(path)
