# SPDX-License-Identifier: Apache-2.0
"""Models for the real engine, built once per test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdisk.testing import tiny_models

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory: two layers of full attention, one KV-cache group."""
    return _build("tiny-llama", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory: sliding window (64 tokens) and full attention, three KV-cache groups."""
    return _build("tiny-gemma3", tmp_path_factory)


def _build(kind: str, factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(kind, factory.mktemp("models") / kind, [(ROOT / "LICENSE").read_text()])
