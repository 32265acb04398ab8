# SPDX-License-Identifier: Apache-2.0
"""Changes modules a little, one place at a time, and lists the changes that no test notices.

For authors: a survivor is a test that is missing, or code that does nothing. mutmut makes the
changes, in a copy of the checkout below ``build/``, and runs for each one the tests that come to
the changed function. ``make mutate FILES="kvdisk/manager/pool.py"`` runs this; it is not a part of
the tests.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "mutate"
COPIED = ("kvdisk", "tests", "tools", "pyproject.toml", "README.md", "LICENSE")
STATEFUL = "tests/stateful/test_manager.py"
MOST_SHOWN = 50
"""Survivors whose change is shown."""


def names_in(file: Path) -> set[str]:
    """Return what a module defines for others, and its own name."""
    tree = ast.parse(file.read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return {file.stem, *(name for name in found if not name.startswith("_"))}


def find_tests(files: Iterable[Path], root: Path = ROOT) -> list[str]:
    """Return the unit tests that name something of these files, and for the manager's the state
    machine."""
    names = set[str]().union(*(names_in(root / file) for file in files))
    word = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names)))})\b")
    found = [path for path in sorted((root / "tests/unit").glob("test_*.py")) if word.search(path.read_text())]
    machine = [STATEFUL] if any("manager" in file.parts for file in files) else []
    return [str(path.relative_to(root)) for path in found] + machine


def prepare(files: Sequence[Path], tests: Sequence[str]) -> None:
    """Make the copy, and tell mutmut what to change in it and what to run."""
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, PLACE / name)
    settings = {
        "source_paths": ["kvdisk"],
        "only_mutate": [str(file) for file in files],
        "also_copy": ["tools", "README.md", "LICENSE"],
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-m", "not torture and not gpu"],
        "pytest_add_cli_args_test_selection": list(tests),
        "track_dependencies": False,
        "use_git_change_detection": False,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    with (PLACE / "pyproject.toml").open("a") as file:
        file.write("\n[tool.mutmut]\n" + "\n".join(lines) + "\n")


def mutmut(*arguments: str, minutes: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run mutmut in the copy; after ``minutes`` it is ended, and what it has found stays."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"CI": "true"}
    command = [sys.executable, "-m", "mutmut", *arguments]
    limit = [] if minutes is None else ["timeout", "--signal=INT", "--kill-after=30", str(round(60 * minutes))]
    return subprocess.run(
        [*limit, *command], cwd=PLACE, env=environment, text=True, check=False,
        stdout=None if minutes is not None else subprocess.PIPE,
    )  # fmt: skip


def main() -> int:
    """Look for survivors, and print them; 0 where there is none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="modules to change, as kvdisk/manager/pool.py")
    parser.add_argument("--tests", nargs="+", help="what to run; without it what names the modules' classes")
    parser.add_argument("--minutes", type=float, default=30, help="end after so long")
    parser.add_argument("--children", type=int, default=2, help="changes tried at a time")
    options = parser.parse_args()
    files = [file.absolute().relative_to(ROOT) for file in options.files]
    tests = options.tests or find_tests(files)
    print(f"kvdisk: {len(tests)} files of tests, for {options.minutes:g} min at most: {' '.join(tests)}", flush=True)
    prepare(files, tests)
    done = mutmut("run", "--max-children", str(options.children), minutes=options.minutes)
    if done.returncode not in {0, 124, 130, 137}:
        return done.returncode
    found = re.findall(r"^\s*(\S+): (\S.*)$", mutmut("results").stdout, re.MULTILINE)
    survivors = [name for name, state in found if state == "survived"]
    others = Counter(state for _, state in found if state != "survived")
    for name in survivors[:MOST_SHOWN]:
        print(mutmut("show", name).stdout)
    left = "".join(f"; {state}: {count}" for state, count in sorted(others.items()))
    print(f"kvdisk: changes that survived: {len(survivors)}{left}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
