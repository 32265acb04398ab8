# SPDX-License-Identifier: Apache-2.0
"""Schedulers, models for the real engine, built once per test run, and what vLLM alone answers with
them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from schedulers import Engines
from torture_rounds import answers_alone

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Makes schedulers with real workers. All that they began has ended when the test has."""
    made = Engines(tmp_path)
    yield made
    made.end()


def _tiny(kind: str) -> Any:
    @pytest.fixture(scope="session")
    def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tiny_models.build(kind, tmp_path_factory.mktemp("models") / kind, [(ROOT / "LICENSE").read_text()])

    return built


tiny_llama = _tiny("tiny-llama")
"""A model directory: two layers of full attention, one KV-cache group."""
tiny_gemma3 = _tiny("tiny-gemma3")
"""One of sliding windows (64 tokens) and full attention, three KV-cache groups."""
tiny_gemma4 = _tiny("tiny-gemma4")
"""One whose layers' KV differs in bytes, in one KV-cache group without the hybrid manager."""


@pytest.fixture(params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    """Each of them in turn, in tests that do not choose."""
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.fixture
def expected(model: Path) -> list[list[int]]:
    """What vLLM alone answers to each prompt, see ``answers_alone``."""
    return answers_alone(model)
