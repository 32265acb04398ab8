# SPDX-License-Identifier: Apache-2.0
"""The wheel: one for every Python, with the package, its compiled queue and nothing else, which
works where nothing else is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import make_wheel
import pytest

from kvdisk import __version__

ROOT = Path(__file__).resolve().parents[1]
QUEUE = "kvdisk/device/drive_queue.abi3.so"


def committed() -> list[str]:
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return [name for name in listed if name and (ROOT / name).is_file()]


def test_the_wheel_has_the_package_and_serves_every_python(tmp_path, needs_compiler):
    """Built of a checkout in which something of an earlier build lies about."""
    checkout = tmp_path / "checkout"
    for name in committed():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    for left in (
        "build/lib/kvdisk/gone.py",
        "kvdisk/device/gone.abi3.so",
        "kvdisk/__pycache__/gone.cpython-311.pyc",
        "kvdisk.egg-info/SOURCES.txt",
    ):
        (checkout / left).parent.mkdir(parents=True, exist_ok=True)
        (checkout / left).write_text("")
    dist = tmp_path / "dist"
    dist.mkdir()
    (dist / "kvdisk-0.0.1-py3-none-any.whl").write_text("")
    wheel = make_wheel.build(dist, checkout)
    assert [path.name for path in dist.iterdir()] == [wheel.name]
    assert re.fullmatch(rf"kvdisk-{re.escape(__version__)}-cp311-abi3-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = archive.read(f"{info}/METADATA").decode()
        entries = archive.read(f"{info}/entry_points.txt").decode()
    inside = {name for name in names if not name.startswith(info)}
    assert inside == {name for name in committed() if name.startswith("kvdisk/")} | {QUEUE}
    assert "\nRequires-Python: >=3.11\n" in metadata and "\nRequires-Dist: lmdb" in metadata
    assert "kvdisk = kvdisk.cli.main:app" in entries and "kvdisk = kvdisk.connector.plugin:register" in entries


def test_why_a_wheel_cannot_be_built_is_said(tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in make_wheel.PARTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, checkout / name)
    text = (checkout / "pyproject.toml").read_text()
    (checkout / "pyproject.toml").write_text(text.replace('name = "kvdisk"', "name = 1", 1))
    with pytest.raises(make_wheel.WheelError, match=r"pip wheel .* ended with 1"):
        make_wheel.build(tmp_path / "dist", checkout)


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_make_wheel_tries_it_in_an_empty_environment(tmp_path):
    command = [sys.executable, str(ROOT / "tools/make_wheel.py"), "--dist", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tried = re.findall(r"^  (\S+): kvdisk (\S+)$", done.stdout, re.MULTILINE)
    assert tried and {version for _, version in tried} == {__version__}


def test_nothing_says_that_kvdisk_is_published():
    published = re.compile(r"pip install (?:-\S+ )*[\"']?kvdisk\b(?!\S* @|[-/])")
    assert published.search("pip install 'kvdisk[gds]'") and published.search("pip install -U kvdisk")
    assert not published.search('pip install "kvdisk[vllm] @ git+<this repository>"')
    texts = [name for name in committed() if name.startswith(("docs/", "kvdisk/", "tools/", "README", "CHANGELOG"))]
    assert not [name for name in texts if published.search((ROOT / name).read_text(errors="replace"))]
