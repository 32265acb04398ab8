# SPDX-License-Identifier: Apache-2.0
"""Packages for some tests, in folders of their own under ``build/``, out of the way of all
others."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def lay(name: str, wanted: Sequence[str], what: str) -> Path:
    """Return the folder ``name``, in which pip has laid what is wanted, whole or not at all.
    ``wanted``: arguments of pip. ``what``: their name in words."""
    folder = ROOT / "build" / name
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            python = Path(scratch) / "python"
            how = ["--no-deps", "--only-binary", ":all:", "--no-input", "--target", str(python)]
            command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *wanted, *how]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                why = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
                pytest.fail(f"pip could not install {what}, which this test runs on: {why}", pytrace=False)
            with suppress(OSError):  # another process was quicker
                python.rename(folder)
    assert folder.exists()
    return folder
