# SPDX-License-Identifier: Apache-2.0
"""``kvdisk inspect`` beside a live engine, and after it: real blocks, real headers, real uses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cli_stores import run
from support import ENVIRONMENT

from kvdisk.device.control import USES_FILE

WAIT_S = 600.0


def inspect(path: Path, *arguments: str) -> dict[str, Any]:
    done = run("inspect", path, *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_live_engine_is_looked_at_and_its_uses_are_there_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "store"
    command = [sys.executable, "-m", "support.live_process", "--store", str(path), "--seconds", "3600", "--seed", "3"]
    engine = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    try:
        deadline_s = time.monotonic() + WAIT_S
        found = None
        while time.monotonic() < deadline_s:
            if list(path.glob("homes/*/index/data.mdb")):
                found = inspect(path)
                if found["totals"]["blocks"] > 20:
                    break
            time.sleep(0.2)
        assert found is not None and found["totals"]["blocks"] > 20, found
        (home,) = found["homes"]
        assert (home["owner"], found["problems"]) == ("alive", [])
        prefixes = found["namespaces"][0]["prefixes"]
        assert prefixes["chains"] >= 1 and prefixes["roots"] >= 1
        assert "alive" in run("inspect", path).stdout
        assert run("report", path, "-o", tmp_path / "live.html").returncode == 0
    finally:
        engine.terminate()
        assert engine.wait(WAIT_S) == 0
    left = inspect(path)
    assert (left["homes"][0]["owner"], left["homes"][0]["clean"]) == ("orphan", True)
    assert (path / "homes" / left["homes"][0]["id"] / USES_FILE).stat().st_mode & 0o777 == 0o600
    reuse = left["reuse"]
    assert sum(reuse["blocks"][1:]) > 0 and reuse["unknown"] == 0, "every block is told of once its engine has ended"
    assert sum(reuse["blocks"]) == left["totals"]["blocks"]
    prefix = left["namespaces"][0]["prefixes"]["tree"][0]
    assert prefix["first_uses"] >= 1 and abs(prefix["last_use_s"] - time.time()) < WAIT_S
    block = inspect(path, prefix["key"])["blocks"][0]
    assert block["copies"][0]["ranks"][0]["header"]["key"] == block["key"], "header and payload are as recorded"
