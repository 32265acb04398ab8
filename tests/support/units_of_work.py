# SPDX-License-Identifier: Apache-2.0
"""Which tests stay together, in which order they come, and which of them a shard runs.

A unit is what one worker runs in one go: a file, or one test of a file whose tests share nothing. A
pytest plugin: longer units come first, so that no worker is left with a long one at the end, and
``--shard 2/6`` keeps the second sixth of what is selected.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

LONG_UNITS: dict[str, float] = json.loads(Path(__file__).with_name("long_units.json").read_text())
"""About how long a unit takes, in seconds, by the name of its file or of its test; others take
``SHORT_S``. Only the proportions count."""
SHORT_S = 10.0
APART = frozenset(
    {
        "tests/simulation/test_simulation.py",
        "tests/stateful/test_bounds.py",
        "tests/stateful/test_manager.py",
        "tests/stateful/test_planted_bugs.py",
        "tests/connector/test_torture.py",
        "tests/connector/test_torture_next_vllm.py",
        "tests/crash/test_crash_images.py",
        "tests/crash/test_live_kill.py",
        "tests/crash/test_nth_failure.py",
        "tests/fake_gpu/test_planted_faults.py",
        "tests/fake_gpu/test_traffic.py",
        "tests/test_planted_invariants.py",
        "tests/unit/test_measures.py",
        "tests/unit/test_run_week.py",
    }
)
"""Files of which each test is a unit: they are long, and no test prepares anything for another."""


def unit_of(test: str) -> str:
    """Return the unit of a test, both by their names as pytest prints them."""
    file = test.partition("::")[0]
    return test if file in APART else file


def seconds_of(unit: str) -> float:
    return LONG_UNITS.get(unit, LONG_UNITS.get(unit.partition("[")[0], SHORT_S))


def shards(tests: Iterable[str], count: int) -> list[set[str]]:
    """Return the units of these tests in so many shards, all about equally long."""
    found: list[set[str]] = [set() for _ in range(count)]
    seconds = [0.0] * count
    for unit in sorted({unit_of(test) for test in tests}, key=lambda unit: (-seconds_of(unit), unit)):
        shortest = seconds.index(min(seconds))
        found[shortest].add(unit)
        seconds[shortest] += seconds_of(unit)
    return found


def parse(text: str) -> tuple[int, int]:
    """Return a shard's number, and how many there are."""
    try:
        number, count = map(int, text.split("/"))
    except ValueError:
        number, count = 0, 0
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--shard is one of several, as 2/6, not {text!r}")
    return number, count


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="2/6", help="run this one of so many parts of what is selected")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Leave out other shards, and put long units first: those alike stay in their order."""
    if text := config.getoption("--shard"):
        number, count = parse(text)
        kept: Collection[str] = shards((item.nodeid for item in items), count)[number - 1]
        others = [item for item in items if unit_of(item.nodeid) not in kept]
        items[:] = [item for item in items if unit_of(item.nodeid) in kept]
        config.hook.pytest_deselected(items=others)
    if getattr(config, "workerinput", None) is not None:  # alone, tests keep the order of their files
        items.sort(key=lambda item: -seconds_of(unit_of(item.nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile`` hand out units."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = unit_of
    return scheduler
