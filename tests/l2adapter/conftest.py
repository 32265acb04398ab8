# SPDX-License-Identifier: Apache-2.0
"""Tests over LMCache's package: collected where it is on PYTHONPATH, as docs/LMCACHE.md says."""

from __future__ import annotations

import pytest

from l2adapter import HAS_LMCACHE

collect_ignore_glob = [] if HAS_LMCACHE else ["test_*.py"]


@pytest.fixture(autouse=True)
def _own_memory(tmp_path, monkeypatch):
    """Keep what is remembered of weights out of the user's own directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")


@pytest.fixture
def model(tmp_path):
    from l2adapter.adapters import write_model

    return write_model(tmp_path / "model")
