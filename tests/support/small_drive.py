# SPDX-License-Identifier: Apache-2.0
"""Small drives for tests of full ones: of memory, in mounts that only the test sees."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def mounts_here() -> list[str]:
    """Return the command that gives a process mounts of its own, [] where the system allows
    none."""
    for command in (["unshare", "-Urm"], ["unshare", "-m"]):
        try:
            done = subprocess.run([*command, "true"], capture_output=True, check=False)
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            return command
    return []


def run_in_mounts_of_its_own(file: str) -> None:
    """Run a file as a program that may mount; the last line that it prints names what failed."""
    command = mounts_here()
    if not command:
        pytest.skip("this system lets nobody mount a file system")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*command, sys.executable, file], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_on_a_drive(scenario: Callable[[Path], None], drive_bytes: int) -> None:
    """Mount a small drive, and do a scenario there, with all temporary files."""
    print(scenario.__name__, flush=True)
    around, before = tempfile.gettempdir(), tempfile._candidate_tempdir_list  # type: ignore[attr-defined]
    place = tempfile.mkdtemp(dir=around)
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={drive_bytes},mode=700", "x", place], check=True)  # noqa: S607
        tempfile._candidate_tempdir_list = lambda: [place]  # type: ignore[attr-defined]
        tempfile.tempdir = None
        scenario(Path(place))
    finally:
        tempfile._candidate_tempdir_list = before  # type: ignore[attr-defined]
        tempfile.tempdir = None
        subprocess.run(["umount", "-l", place], check=False)  # noqa: S607
        os.rmdir(place)


@contextmanager
def tmpfs(place: Path, options: str = "mode=1777") -> Iterator[None]:
    """Mount a file system of memory in a directory, whose inodes are those of any other; skip the
    test where this user cannot."""
    command = ["mount", "-t", "tmpfs", "-o", options, "x", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)  # noqa: S607


def fill(drive: Path) -> Path:
    """Take all that is free; return the file that has it."""
    ballast = drive / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for step in (64 << 10, 4096, 1):
            with suppress(OSError):
                while file.write(bytes(step)):
                    pass
    with pytest.raises(OSError, match="No space"):
        (drive / "one more").write_bytes(b"x")
    (drive / "one more").unlink(missing_ok=True)
    return ballast
