# SPDX-License-Identifier: Apache-2.0
"""The supported versions that are not installed: their Python over the installed one's kernels."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import vllm
from test_start_variables import ask, served

from kvdisk.connector.versions import SUPPORTED_VERSIONS, vllm_minor_version

pytestmark = pytest.mark.torture

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("0.33.0",)
WHICH = "not gpu and not fake_gpu and not torture"
PARTS = {
    "engine": (("test_engine.py",), "not gpu and not fake_gpu"),  # with two ranks
    "scheduler": (("test_scheduler_*.py",), WHICH),
    "start": (
        tuple(
            f"test_{name}.py"
            for name in ("hooks", "metrics", "model_code", "model_files", "start", "start_variables", "switched_off")
        ),
        WHICH,
    ),
    "tier": (("test_hung_commits.py", "test_tier*.py"), WHICH),
}
"""By name: files, and which of their tests."""
RUST = "vllm/vllm-rs"
"""vLLM's front end in Rust: a program in each wheel for GPUs, which also runs beside the engine of
a CPU build."""


def lay_python(folder: Path, version: str) -> None:
    """Lay the Python files of a version's wheel into ``folder``, and its front end in Rust, whole
    or not at all; nothing where they are there."""
    if (folder / RUST).exists():
        return
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
            parts = [name for name in names if name.endswith(".py") or ".dist-info/" in name or name == RUST]
            archive.extractall(python, parts)
        (python / RUST).chmod(0o755)
        # Its version says that it is a CPU build, so that it takes that platform.
        (info,) = python.glob("*.dist-info")
        metadata = info / "METADATA"
        text = metadata.read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
        assert "+cpu" in text
        metadata.write_text(text)
        info.rename(python / f"vllm-{version}+cpu.dist-info")
        shutil.rmtree(folder, ignore_errors=True)
        python.rename(folder)


def link_kernels(folder: Path) -> None:
    """Lay links to the compiled parts of the installed version beside the Python of another, which
    has none for CPUs."""
    installed = Path(vllm.__file__).parent
    for kernels in installed.rglob("*.so"):
        link = folder / "vllm" / kernels.relative_to(installed)
        if not link.exists() or not link.samefile(kernels):
            link.unlink(missing_ok=True)
            link.symlink_to(kernels)


def lay_version(folder: Path, version: str) -> None:
    """Do both, one of this run's processes after the other."""
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lay_python(folder, version)
        link_kernels(folder)


def with_python(folder: Path) -> dict[str, str]:
    """Return an environment in which a version's Python comes before the installed one.

    vLLM keeps there what it has found out about models, which differs by version: with one place
    for both each start would do it again.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ours = (ROOT / name for name in (".", "tests", "tests/connector", "tools"))
    found = {"PYTHONPATH": os.pathsep.join(map(str, (folder, *ours)))}
    return environment | found | {"XDG_CACHE_HOME": str(ROOT / "build" / f"{folder.name}-cache")}


def test_every_supported_version_is_tested():
    minors = {tuple(int(number) for number in version.split(".")[:2]) for version in VERSIONS}
    assert minors | {vllm_minor_version()} == set(SUPPORTED_VERSIONS)
    assert len(minors) == len(VERSIONS)


@pytest.fixture(params=VERSIONS)
def folder(request: pytest.FixtureRequest) -> Path:
    """A version's Python, with kernels."""
    python = ROOT / "build" / f"vllm-{request.param}-python"
    lay_version(python, request.param)
    which = [sys.executable, "-c", "import vllm; print(vllm.__version__, vllm.__file__)"]
    said = subprocess.run(which, env=with_python(python), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found, path = said.splitlines()[-1].split(maxsplit=1)
    assert found.startswith(request.param) and Path(path).is_relative_to(python), said
    return python


@pytest.mark.parametrize("part", PARTS)
def test_the_tests_of_one_version_on_another(folder, part):
    names, which = PARTS[part]
    files = sorted(str(file) for name in names for file in (ROOT / "tests" / "connector").glob(name))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "600", "-m", which, *files]
    done = subprocess.run(
        command,
        env=with_python(folder),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    last = done.stdout.splitlines()[-1]
    if done.returncode != 0 or "skipped" in last or " passed" not in last:
        pytest.fail(f"on {folder.name}:\n{done.stdout[-20_000:]}", pytrace=False)


def test_the_front_end_in_rust_serves_what_variables_configure(folder, tiny_llama, tmp_path):
    """It knows nothing of connectors: the process that starts it builds the engine's
    configuration."""
    laid = with_python(folder)
    more = {name: laid[name] for name in ("PYTHONPATH", "XDG_CACHE_HOME")} | {"VLLM_USE_RUST_FRONTEND": "1"}
    more |= {"KVDISK_STORE_DIRS": str(tmp_path / "kv"), "KVDISK_NVME_BYTES": "1GiB", "KVDISK_MIN_LOAD_TOKENS": "0"}
    with served(tiny_llama, tmp_path / "first.log", **more, KVDISK_CPU_BYTES="64MiB") as address:
        text, cached = ask(address)
        assert cached == 0
    with served(tiny_llama, tmp_path / "second.log", **more, KVDISK_CPU_BYTES="64MiB") as address:
        assert ask(address) == (text, 896)
    log = (tmp_path / "second.log").read_text()
    assert "Launching Rust frontend" in log and "of the environment set the connector KVDiskConnector" in log


NAMESPACES = """
import sys
from pathlib import Path
from types import SimpleNamespace

from schedulers import vllm_config
from test_start import FULL, PLAIN, WINDOW, _cache
from dataclasses import replace

from kvdisk.connector import descriptions
from kvdisk.connector.identity import fingerprint_of
from kvdisk.connector.plugin import register

register()
config = vllm_config(Path(sys.argv[1]))
print(fingerprint_of(config, PLAIN)[0].hex())
descriptions.current_platform = SimpleNamespace(is_cuda=lambda: True)
for cache in (PLAIN, replace(_cache(FULL, WINDOW), kv_cache_layout="LBNHC"), replace(PLAIN, kv_cache_layout="LBHNC")):
    print(fingerprint_of(config, cache)[0].hex())
"""


def test_versions_agree_on_a_namespace_where_descriptions_tell_the_bytes(folder, tiny_llama):
    """On a CPU, and by heads, each version has its own."""
    found = []
    for first in (Path(vllm.__file__).parents[1], folder):
        command = [sys.executable, "-c", NAMESPACES, str(tiny_llama)]
        done = subprocess.run(command, env=with_python(first), cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split()[-4:])
    cpu, plain, window, by_heads = (len(set(pair)) for pair in zip(*found, strict=True))
    assert (cpu, plain, window, by_heads) == (2, 1, 1, 2)
    assert len(set(found[0])) == 4
