# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in the sources of every wing, each of which the tests it names must catch.

``tests/planted/*.toml`` has them: ``old`` occurs once in ``file``, and becomes ``new``. The
manager's bugs that only a search finds are in ``tests/stateful``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUGS: list[dict[str, str]] = [
    bug for path in sorted((ROOT / "tests/planted").glob("*.toml")) for bug in tomllib.loads(path.read_text())["bug"]
]
STUCK_S = 900.0
"""What takes so long hangs, on however busy a machine. A planted bug may make a test hang, which
catches it."""

named = pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["name"])


@named
def test_a_bug_still_fits_the_sources(bug: dict[str, str]) -> None:
    assert (ROOT / bug["file"]).read_text().count(bug["old"]) == 1, "planted at one place"
    assert bug["old"] != bug["new"]
    assert all((ROOT / test.partition("::")[0]).exists() for test in bug["tests"].split())


def run_tests(root: Path, tests: str) -> subprocess.CompletedProcess[str] | None:
    """Run ``tests`` on the sources in ``root``. None: they did not end."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "not gpu", *tests.split()]
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(root)}
    try:
        return subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=STUCK_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None


@pytest.mark.torture
@named
def test_a_planted_bug_is_caught(bug: dict[str, str], tmp_path: Path) -> None:
    for name in ("kvdisk", "tests", "tools", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    planted = tmp_path / bug["file"]
    planted.write_text(planted.read_text().replace(bug["old"], bug["new"]))
    if planted.suffix == ".c":
        made = planted.with_name(f"{planted.stem}.abi3.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-o", str(made), str(planted)], check=True)  # noqa: S607
    ran = run_tests(tmp_path, bug["tests"])
    assert ran is None or ran.returncode == 1, f"the bug went through, or the tests did not run:\n{ran.stdout[-2000:]}"
