# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvdisk.testing import manager_machine
from kvdisk.testing.manager_machine import ManagerMachine

SIZES = ("ONE_GROUP", "WINDOW", "REUSE", "REUSE_CPU", "NVME_ONLY", "NVME_REUSE", "CPU_ONLY")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failed writes are the point here, and each warns."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def run(name: str, examples: int, steps: int, *, derandomize: bool) -> None:
    class Machine(ManagerMachine):
        all_sizes = (getattr(manager_machine, name),)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=derandomize,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("name", SIZES)
def test_manager_keeps_its_invariants(name: str) -> None:
    run(name, 120, 60, derandomize=True)


@pytest.mark.torture
@pytest.mark.parametrize("name", SIZES)
def test_manager_keeps_its_invariants_for_long(name: str) -> None:
    run(name, 5000, 100, derandomize=False)


def test_all_sizes_are_run() -> None:
    assert tuple(getattr(manager_machine, name) for name in SIZES) == manager_machine.ALL_SIZES
