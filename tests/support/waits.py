# SPDX-License-Identifier: Apache-2.0
"""Waiting for what threads and processes come to, however busy the machine is."""

from __future__ import annotations

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


def lives(pid: int) -> bool:
    """Whether a process is there that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
