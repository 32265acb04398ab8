# SPDX-License-Identifier: Apache-2.0
"""Schedulers, models for the real engine, built once per test run, and what vLLM alone answers with
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import tiny_models
from engine_child import EngineChild
from forked_engines import Forked
from schedulers import Engines
from torture_rounds import answers_alone

from kvdisk.connector import hooks, lora

ROOT = Path(__file__).resolve().parents[2]
Models = Callable[[str], Path]
EngineChild.start = Forked  # most of a start is the import of vLLM
hooks._parameters = cache(hooks._parameters)  # each connector looks at the same hundred functions


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Makes schedulers with real workers. All that they began has ended when the test has."""
    made = Engines(tmp_path)
    with pytest.MonkeyPatch.context() as patience:  # a drive may hold up a look for longer than it is worth
        patience.setattr(lora, "LOOK_WAIT_S", 60.0)
        patience.setattr(lora, "CHECK_WAIT_S", 60.0)
        yield made
    made.end()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Returns the directory of a tiny model, which it builds unless it has been: "llama" has two
    layers of full attention in one KV-cache group, "gemma3" sliding windows (64 tokens) and full
    attention in three; of "gemma4" the layers' KV differs in bytes, in one group without the hybrid
    manager."""
    folder = tmp_path_factory.mktemp("models")
    return lambda kind: tiny_models.build(f"tiny-{kind}", folder / kind, [(ROOT / "LICENSE").read_text()])


@pytest.fixture(scope="session")
def tiny_llama(models: Models) -> Path:
    return models("llama")


@pytest.fixture(params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, models: Models) -> Path:
    """Each of them in turn, in tests that do not choose."""
    return models(request.param)


@pytest.fixture
def expected(model: Path) -> list[list[int]]:
    """What vLLM alone answers to each prompt, see ``answers_alone``."""
    return answers_alone(model)
