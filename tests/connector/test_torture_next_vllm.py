# SPDX-License-Identifier: Apache-2.0
"""The tests that need no compiled part of vLLM, on the supported versions that are not installed:
for them a version's Python is enough."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from kvdisk.connector.adapter import SUPPORTED_VERSIONS, vllm_minor_version

pytestmark = pytest.mark.torture

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("0.33.0",)
FILES = (
    "test_hooks.py",
    "test_hung_commits.py",
    "test_metrics.py",
    "test_scheduler_*.py",
    "test_sizes.py",
    "test_start.py",
    "test_switched_off.py",
)
WHICH = "not gpu and not torture"


def lay_python(folder: Path, version: str) -> None:
    """Lay the Python files of a version's wheel into ``folder``, whole or not at all; nothing where
    it is there."""
    if folder.exists():
        return
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wanted = [f"vllm=={version}", "--no-deps", "--only-binary", ":all:", "--no-input", "--dest", scratch]
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *wanted]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            why = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            pytest.fail(f"pip could not download vLLM {version}, which this test runs on: {why}", pytrace=False)
        (wheel,) = Path(scratch).glob("*.whl")
        python = Path(scratch) / "python"
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            archive.extractall(python, [name for name in names if name.endswith(".py") or ".dist-info/" in name])
        # Its version says that it is a CPU build, so that it takes that platform.
        (info,) = python.glob("*.dist-info")
        metadata = info / "METADATA"
        text = metadata.read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
        assert "+cpu" in text
        metadata.write_text(text)
        info.rename(python / f"vllm-{version}+cpu.dist-info")
        python.rename(folder)


def test_every_supported_version_is_tested():
    minors = {tuple(int(number) for number in version.split(".")[:2]) for version in VERSIONS}
    assert minors | {vllm_minor_version()} == set(SUPPORTED_VERSIONS)
    assert len(minors) == len(VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_needs_only_the_python_of_another_vllm(version):
    folder = ROOT / "build" / f"vllm-{version}-python"
    lay_python(folder, version)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    which = [sys.executable, "-c", "import vllm; print(vllm.__version__, vllm.__file__)"]
    said = subprocess.run(which, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found, path = said.splitlines()[-1].split(maxsplit=1)
    assert found.startswith(version) and Path(path).is_relative_to(folder), said
    files = sorted(str(file) for name in FILES for file in (ROOT / "tests" / "connector").glob(name))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "600", "-m", WHICH, *files]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    last = done.stdout.splitlines()[-1]
    if done.returncode != 0 or "skipped" in last or " passed" not in last:
        pytest.fail(f"on vLLM {version}:\n{done.stdout[-20_000:]}", pytrace=False)
