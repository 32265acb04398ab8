# SPDX-License-Identifier: Apache-2.0
"""Which form of the manager a process runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import kvdisk
from kvdisk.compiled import INTERPRETED, VARIABLE, compiled_directory, compiled_sources
from kvdisk.manager import IS_COMPILED

PACKAGE = Path(kvdisk.__file__).parent
ASK = """
import importlib, json, sys
from kvdisk.manager import IS_COMPILED
names = {name: importlib.import_module(f"kvdisk.manager.{name}").__file__ for name in sys.argv[1:]}
print(json.dumps([IS_COMPILED, names]))
"""
needs_compiled = pytest.mark.skipif(not IS_COMPILED, reason="no C compiler, or a source was changed since")


def ask(root: Path, wanted: str | None) -> subprocess.CompletedProcess[str]:
    """Import every module of the manager of the package in ``root``, in a new process."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | {"PYTHONPATH": str(root)}
    names = [path.stem for path in sorted((PACKAGE / "manager").glob("*.py")) if path.stem != "__init__"]
    command = [sys.executable, "-c", ASK, *names]
    return subprocess.run(
        command,
        cwd=root,
        env=environment if wanted is None else environment | {VARIABLE: wanted},
        capture_output=True,
        text=True,
        check=False,
    )


def answer(root: Path, wanted: str | None) -> tuple[bool, dict[str, str]]:
    done = ask(root, wanted)
    assert done.returncode == 0, done.stderr
    is_compiled, files = json.loads(done.stdout)
    assert all(Path(file).is_relative_to(root) for file in files.values())
    return is_compiled, {name: Path(file).suffix for name, file in files.items()}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A directory with a copy of the package, with its compiled form where there is one."""
    shutil.copytree(PACKAGE, tmp_path / "kvdisk", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@needs_compiled
@pytest.mark.parametrize("wanted", [None, "", "1"])
def test_what_was_compiled_runs(copied: Path, wanted: str | None) -> None:
    is_compiled, suffixes = answer(copied, wanted)
    assert is_compiled
    assert suffixes == {name: ".py" if name in INTERPRETED else ".so" for name in suffixes}
    assert len(suffixes) == len(compiled_sources()) + len(INTERPRETED - {"__init__"})


def test_the_sources_run_where_one_says_so(copied: Path) -> None:
    is_compiled, suffixes = answer(copied, "0")
    assert not is_compiled
    assert set(suffixes.values()) == {".py"}


@pytest.mark.parametrize("changed", ["manager/pool.py", "manager/store_policy.py", "messages.py", "index/base.py"])
def test_changed_sources_run_as_they_are(copied: Path, changed: str) -> None:
    with (copied / "kvdisk" / changed).open("a") as file:
        file.write("# changed\n")
    is_compiled, suffixes = answer(copied, None)
    assert not is_compiled
    assert set(suffixes.values()) == {".py"}
    refused = ask(copied, "1")
    assert refused.returncode != 0
    assert f"{VARIABLE} is 1, and these sources have not been compiled" in refused.stderr


def test_a_removed_source_counts_as_a_change(copied: Path) -> None:
    (copied / "kvdisk" / "manager" / "gauges.py").rename(copied / "kvdisk" / "manager" / "gages.py")
    environment = os.environ | {"PYTHONPATH": str(copied)}
    code = "from kvdisk.manager import IS_COMPILED; raise SystemExit(IS_COMPILED)"
    command = [sys.executable, "-c", code]
    environment.pop(VARIABLE, None)
    assert subprocess.run(command, cwd=copied, env=environment, check=False).returncode == 0


def test_a_wrong_value_is_one_sentence(copied: Path) -> None:
    refused = ask(copied, "yes")
    assert refused.returncode != 0
    assert refused.stderr.splitlines()[-1].endswith(
        f"{VARIABLE} is 'yes': set it to 0 (run the sources) or 1 (run the compiled form)."
    )


def test_another_python_has_a_form_of_its_own() -> None:
    assert compiled_directory().name.startswith(sys.implementation.cache_tag + "-")


NO_HEADERS = f"{os.environ.get('CC') or sysconfig.get_config_var('CC') or 'cc'} -nostdinc"
EDITABLE = """
import sys
from setuptools import build_meta
sys.argv[1:] = []
print(build_meta.build_editable("."))
"""


def build(copied: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a copy of the checkout, with a C compiler that fails."""
    root = PACKAGE.parent
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, copied)
    shutil.rmtree(copied / "kvdisk" / "manager" / "compiled", ignore_errors=True)
    environment = os.environ | {"CC": "false"}
    return subprocess.run(
        [sys.executable, *command], cwd=copied, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "command", [["setup.py", "-q", "build_ext", "--inplace"], ["-c", EDITABLE]], ids=["in place", "editable"]
)
def test_nothing_is_compiled_beside_the_sources_which_it_would_hide(copied: Path, command: list[str]) -> None:
    done = build(copied, *command)
    assert done.returncode == 0, done.stderr
    assert "not compiled" not in done.stdout + done.stderr, "it is not even tried"
    assert not list(copied.rglob("*.so")) and not list(copied.rglob("*.c"))
    assert bool(list(copied.glob("*.whl"))) == (command[0] == "-c")


def test_what_cannot_be_compiled_is_built_without(copied: Path) -> None:
    done = build(copied, "setup.py", "-q", "build", "--build-lib", "built")
    assert done.returncode == 0, done.stderr
    assert "the manager is not compiled, and runs as it is written" in done.stdout + done.stderr
    assert not list((copied / "built").rglob("*.so"))
    assert answer(copied / "built", None)[0] is False


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("no-such-compiler -O2", "no C compiler"), ("false", "compiles nothing"), (NO_HEADERS, "headers"), ("", None)],
    ids=["none", "fails", "no headers", "all here"],
)
def test_what_compiling_lacks_is_one_line(compiler: str, said: str | None) -> None:
    """A checkout is used without it: ``make demo`` and ``make test`` go on."""
    if compiler in {"", NO_HEADERS} and not IS_COMPILED:
        pytest.skip("whether there is a C compiler here is not known")
    code = "import sys; sys.path.insert(0, 'tools'); import install; print(install.lacking_to_compile())"
    environment = os.environ | ({"CC": compiler} if compiler else {})
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, env=environment, capture_output=True, text=True, check=True
    )
    assert (said in done.stdout) if said else (done.stdout == "None\n")
