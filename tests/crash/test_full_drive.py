# SPDX-License-Identifier: Apache-2.0
"""ENOSPC on a real small file system: writes stop and reads go on, with one warning; writes come back with the space.

This file is also the program that mounts the file system in a namespace of its own, where no privilege is needed.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kvdisk.testing.live_audit import audit
from kvdisk.testing.live_engine import LiveEngine
from kvdisk.testing.live_load import LiveLoad, LoadShape
from kvdisk.testing.live_model import LiveModel

MIB = 1 << 20
DRIVE_BYTES, BALLAST_BYTES = 8 * MIB, 5 * MIB
LONGER_THAN_ANY_BACK_OFF_S = 100.0
LIMIT_S = 60.0


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())

    def of_writes(self) -> list[str]:
        return [text for text in self.found if "no writes to drive" in text]


def scenario(drive: Path) -> None:
    """Fill the drive below an engine whose cap is larger, look, give space back, and look again."""
    warnings = Warnings()
    logging.getLogger("kvdisk").addHandler(warnings)
    ballast = drive / "ballast"
    ballast.write_bytes(bytes(BALLAST_BYTES))
    model = LiveModel()
    now_s = [time.time()]
    config = model.config(str(drive / "store"), blocks=1200, store_decode=True)
    engine = LiveEngine(config, model, clock=lambda: now_s[0])
    load = LiveLoad(engine, 1, LoadShape(width=20, aborts=0.0))
    stats = engine.manager.stats
    end_s = time.monotonic() + LIMIT_S

    def run_until(what: str, condition) -> None:
        while not condition():
            assert time.monotonic() < end_s, f"not: {what}; {engine.describe()}; {warnings.found}"
            now_s[0] += 0.0001
            load.step()

    run_until("a full drive", warnings.of_writes)
    load.run_requests(20)
    demoted, loaded = stats["demoted_blocks"], stats["hit_tokens_nvme"]
    run_until("reads go on", lambda: stats["hit_tokens_nvme"] > loaded + 100)
    assert stats["demoted_blocks"] == demoted, "writes went on in the back-off"
    assert len(warnings.of_writes()) == 1, warnings.found
    now_s[0] += LONGER_THAN_ANY_BACK_OFF_S
    run_until("another try", lambda: len(warnings.of_writes()) == 2)

    ballast.unlink()
    now_s[0] += LONGER_THAN_ANY_BACK_OFF_S
    demoted = stats["demoted_blocks"]
    run_until("writes come back", lambda: stats["demoted_blocks"] > demoted + 50)
    load.end()
    assert audit(engine) > 0
    engine.close()
    again = LiveEngine(config, model)
    again.run_until_quiet()
    assert audit(again) > 0
    again.close()


def mounts_here() -> list[str]:
    """Return the command that gives a process mounts of its own, [] where the system allows none."""
    for command in (["unshare", "-Urm"], ["unshare", "-m"]):
        try:
            done = subprocess.run([*command, "true"], capture_output=True, check=False)
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            return command
    return []


def test_a_full_drive_stops_writes_and_nothing_else() -> None:
    command = mounts_here()
    if not command:
        pytest.fail("this system lets nobody mount a file system of his own: unshare -Urm fails")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*command, sys.executable, __file__], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DRIVE_BYTES},mode=700", "x", place], check=True)  # noqa: S607
        scenario(Path(place))
        subprocess.run(["umount", place], check=True)  # noqa: S607
