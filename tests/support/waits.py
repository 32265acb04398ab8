# SPDX-License-Identifier: Apache-2.0
"""Waiting for what threads and processes come to, however busy the machine is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

WAIT_S = 600.0
"""What takes so long hangs."""


def until(condition: Callable[[], object], what: str = "what the test waits for") -> None:
    """Return once it is true. Fails where it does not become so."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.002)


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads has: one that runs may still answer."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all(_state(thread / "stat") == "T" for thread in Path(f"/proc/{pid}/task").iterdir()))


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


def lives(pid: int) -> bool:
    """Whether a process is there that has not ended."""
    try:
        return _state(Path(f"/proc/{pid}/stat")) not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
