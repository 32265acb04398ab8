# SPDX-License-Identifier: Apache-2.0
"""Models for the real engine, built once per test run, and what vLLM alone answers with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from byte_bench import ByteBench
from schedulers import Bench, Engines
from torture_rounds import answers_alone

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory: two layers of full attention, one KV-cache group."""
    return _build("tiny-llama", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory: sliding window (64 tokens) and full attention, three KV-cache groups."""
    return _build("tiny-gemma3", tmp_path_factory)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Makes schedulers with real workers."""
    made = Engines(tmp_path, ByteBench)
    yield made
    made.close()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Engines]:
    """Makes schedulers whose workers only answer."""
    made = Engines(tmp_path, Bench)
    yield made
    made.close()


@pytest.fixture(scope="session")
def tiny_gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory: layers whose KV differs in bytes, in one KV-cache group without the hybrid
    manager."""
    return _build("tiny-gemma4", tmp_path_factory)


def _build(kind: str, factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(kind, factory.mktemp("models") / kind, [(ROOT / "LICENSE").read_text()])


@pytest.fixture(params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    """Each of them in turn, in tests that do not choose."""
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.fixture(scope="session")
def baselines() -> dict[Path, list[list[int]]]:
    """By model. A fixture that depended on the parameter would be made anew for each of its pairs
    with another."""
    return {}


@pytest.fixture
def expected(
    model: Path, baselines: dict[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """What vLLM alone answers to each prompt, one after the other; and, preempted and batched
    anyhow, all the same."""
    if model not in baselines:
        baselines[model] = answers_alone(model, tmp_path_factory.mktemp("expected") / "log")
    return baselines[model]
