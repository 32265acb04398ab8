# SPDX-License-Identifier: Apache-2.0
"""Where the manager is compiled all tests run that form, and these run the sources, in processes of their own.

What changes the manager to see whether that is noticed can only be run so; and the simulation is run in both forms,
since where there is no C compiler the sources are what users run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvdisk.compiled import VARIABLE
from kvdisk.manager import IS_COMPILED

TESTS = Path(__file__).resolve().parent
MARK = "mark." + "interpreted"
MARKED = [path for path in sorted(TESTS.rglob("test_*.py")) if MARK in path.read_text()]
BOTH = [TESTS / "simulation" / "test_simulation.py"]


@pytest.mark.skipif(not IS_COMPILED, reason="the tests run the sources as they are")
@pytest.mark.parametrize("path", [*MARKED, *BOTH], ids=lambda path: path.stem)
def test_the_sources_pass(path: Path) -> None:
    which = "not gpu and not torture" + " and interpreted" * (path in MARKED)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", which, str(path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment[VARIABLE] = "0"
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout
