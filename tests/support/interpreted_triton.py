# SPDX-License-Identifier: Apache-2.0
"""Triton for tests, in a folder of its own: with it in the environment vLLM would take other ways.
Its interpreter runs kernels over CPU tensors, and its compiler needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

VERSION = "3.8.0"
ROOT = Path(__file__).resolve().parents[2]


def lay_triton() -> Path:
    """Return the folder, in which pip has laid it, whole or not at all."""
    folder = ROOT / "build" / f"triton-{VERSION}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            python = Path(scratch) / "python"
            wanted = [
                f"triton=={VERSION}",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--no-input",
                "--target",
                str(python),
            ]
            command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *wanted]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                why = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
                pytest.fail(f"pip could not install Triton {VERSION}, which this test runs on: {why}", pytrace=False)
            with suppress(OSError):  # another process was quicker
                python.rename(folder)
    assert folder.exists()
    return folder


def paths(triton: Path, *more: str | Path, interpreted: bool = True) -> dict[str, str]:
    """Return a PYTHONPATH for processes that shall have it; ``interpreted``: no kernel is
    compiled."""
    ours = [Path(__file__).parent / "interpreting"] if interpreted else []
    return {"PYTHONPATH": os.pathsep.join(map(str, (*ours, triton, *more)))}
