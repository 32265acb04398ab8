# SPDX-License-Identifier: Apache-2.0
"""What the tests of the commands share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_stores import Owner


@pytest.fixture(autouse=True)
def on_a_local_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests run on, as in a container, says nothing of what they test."""
    monkeypatch.setattr("kvdisk.device.mounts.MOUNTINFO_PATH", Path("/nowhere"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store may be made."""
    return tmp_path / "store"


@pytest.fixture
def owner(path: Path) -> Iterator[Owner]:
    """An engine that lives in a process of its own, in that store."""
    owner = Owner(path)
    yield owner
    owner.kill()


@pytest.fixture(params=[False, True], ids=["through host memory", "direct"])
def rank(request):
    """One rank; what its way straight to a GPU and the way through host memory have in common."""
    from ranks import Rank  # imports torch

    made = Rank(direct=request.param)
    made.run()
    yield made
    made.close()
