# SPDX-License-Identifier: Apache-2.0
"""The tests are tested: each of these bugs is against something that must hold, and the test that
is to show that it holds has to fail with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.planted import BUGS, NAME
from support.planting import Planter

ROOT = Path(__file__).resolve().parents[1]
SUITES = [*(ROOT / "kvdisk/testing").glob("*_conformance.py"), *(ROOT / "tests/support").glob("*_conformance.py")]
TESTS = sorted({bug.test for bug in BUGS.values()})


def run(*tests: str, bug: str = "") -> subprocess.CompletedProcess[str]:
    """Run tests in a process of its own, with a bug or without."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "support.planted", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), NAME: bug, "CI": "true"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.torture
@pytest.mark.parametrize("name", BUGS)
def test_the_test_that_is_named_catches_the_bug(name: str) -> None:
    done = run(BUGS[name].test, bug=name)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, f"{BUGS[name].holds}\n{done.stdout}{done.stderr}"


@pytest.mark.torture
def test_without_a_bug_they_pass() -> None:
    done = run(*TESTS)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_has_a_place_and_a_test(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name].plant(Planter(monkeypatch))
    monkeypatch.undo()
    path, *_, function = BUGS[name].test.split("::")
    assert any(f"def {function}(" in each.read_text() for each in (ROOT / path, *SUITES))
