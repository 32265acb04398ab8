# SPDX-License-Identifier: Apache-2.0
"""ENOSPC on a small file system: the tier stops growing and serves on, with one warning; it grows
when space returns.

This file is also the program that mounts the file system in a namespace of its own, where no
privilege is needed. Where the system does not allow that either, a quota of this file's own takes
its place.
"""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel

from kvdisk.device import segment
from kvdisk.device.paths import allocated_bytes

MIB = 1 << 20
DRIVE_BYTES, BALLAST_BYTES = 8 * MIB, 5 * MIB
LONGER_THAN_ANY_BACK_OFF_S = 100.0
LIMIT_S = 600.0


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())

    def of_segments(self) -> list[str]:
        return [text for text in self.found if "could not make a segment" in text]


class Quota:
    """Refuses segment files when a directory has come to so many bytes, as preallocation on a small
    drive does."""

    def __init__(self, drive: Path) -> None:
        self._drive = drive
        self._allocate = segment._allocate
        segment._allocate = self

    def __call__(self, path: Path, length_bytes: int) -> None:
        if allocated_bytes(self._drive) + length_bytes > DRIVE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self._allocate(path, length_bytes)


def scenario(drive: Path) -> None:
    """Fill the drive below an engine whose cap is larger, look, give space back, and look again."""
    warnings = Warnings()
    logging.getLogger("kvdisk").addHandler(warnings)
    ballast = drive / "ballast"
    ballast.write_bytes(bytes(BALLAST_BYTES))
    model = LiveModel()
    now_s = [time.time()]  # back-offs end when the test says so, however many steps it takes until then
    config = model.config(str(drive / "store"), blocks=1200, store_decode=True)
    engine = LiveEngine(config, model, clock=lambda: now_s[0])
    load = LiveLoad(engine, 1, LoadShape(width=20, aborts=0.0))
    stats = engine.manager.stats
    end_s = time.monotonic() + LIMIT_S

    def run_until(what: str, condition) -> None:
        while not condition():
            assert time.monotonic() < end_s, f"not: {what}; {engine.describe()}; {warnings.found}"
            load.step()

    def slots() -> int:
        assert engine.parts.nvme is not None
        return sum(engine.parts.nvme.pool.total)

    run_until("a full drive", warnings.of_segments)
    load.run_requests(20)
    held, loaded, evicted = slots(), stats["hit_tokens.nvme"], stats["evicted_blocks.nvme"]
    run_until("reads go on", lambda: stats["hit_tokens.nvme"] > loaded + 100)
    run_until("new blocks take the slots of old ones", lambda: stats["evicted_blocks.nvme"] > evicted + 20)
    assert slots() == held, "the tier grew in the back-off"
    assert len(warnings.of_segments()) == 1 == stats["segment_failures"], warnings.found
    now_s[0] += LONGER_THAN_ANY_BACK_OFF_S
    run_until("another try", lambda: len(warnings.of_segments()) == 2)

    ballast.unlink()
    now_s[0] += LONGER_THAN_ANY_BACK_OFF_S
    run_until("the tier grows again", lambda: slots() > held)
    load.end()
    assert audit(engine) > 0
    engine.close()
    again = LiveEngine(config, model)
    again.run_until_quiet()
    assert audit(again) > 0
    again.close()


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


def test_a_full_drive_stops_growth_and_nothing_else() -> None:
    command = mounts_here()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*command, sys.executable, __file__, "mount" if command else "quota"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        if sys.argv[1] == "mount":
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DRIVE_BYTES},mode=700", "x", place], check=True)  # noqa: S607
        else:
            Quota(Path(place))
        scenario(Path(place))
        if sys.argv[1] == "mount":
            subprocess.run(["umount", place], check=True)  # noqa: S607
