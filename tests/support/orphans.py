# SPDX-License-Identifier: Apache-2.0
"""Processes whose parent is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from support.waits import WAIT_S, lives, until


def await_orphans_end(script: str, *paths: str) -> None:
    """Run a script that prints the number of a process of its own, and kills itself with SIGKILL;
    wait until that process has ended, too. ``paths``: where the script finds modules first."""
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, sys.path)])},
        start_new_session=True,
    )
    assert parent.stdout is not None
    try:
        pid = int(parent.stdout.readline())
        assert parent.wait(WAIT_S) == -signal.SIGKILL
        until(lambda: not lives(pid), "the end of the orphan")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.stdout.close()
