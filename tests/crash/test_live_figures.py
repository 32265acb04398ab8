# SPDX-License-Identifier: Apache-2.0
"""FIGURES of engines that live, die and come after one another."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from live_children import Child, wait_for
from support.live_process import ProcessSettings

from kvdisk.device.telemetry_file import TelemetryRecord, read_telemetry


def figures_of(store: Path, child: Child) -> TelemetryRecord | None:
    """Return what an engine tells of itself, None before it has told anything."""
    homes = [line["home"] for line in child.lines("serving")]
    return read_telemetry(store / "homes" / homes[0]) if homes else None


def test_engines_tell_of_themselves_and_top_shows_them_come_and_go(tmp_path):
    store = tmp_path / "store"
    settings = ProcessSettings(str(store), every_s=0.1, blocks=48)
    with Child(tmp_path, settings) as one, Child(tmp_path, settings) as two:
        for child in (one, two):
            child.wait_serving()
            wait_for(
                lambda child=child: (found := figures_of(store, child)) and found.totals.get("demoted_blocks"), "it"
            )
        first = figures_of(store, one)
        assert first is not None
        assert (first.pid, first.host, first.ranks, first.model) == (one.pid, socket.gethostname(), 2, "model")
        (drive,) = first.drives
        assert drive.path == str(store) and drive.written_bytes > 0 and not drive.quarantined
        assert first.sums["transfer_bytes.cpu_to_nvme"][1] == drive.written_bytes
        shown = _top(store)
        assert {engine["pid"] for engine in shown["engines"]} == {one.pid, two.pid} and not shown["problems"]
        one.assert_killed()
        left = figures_of(store, one)
        assert left is not None and left.pid == one.pid, "what a killed engine told stays until somebody takes its home"
        shown = _top(store)
        assert [engine["pid"] for engine in shown["engines"]] == [two.pid] and len(shown["orphans"]) == 1
        two.end()
    with Child(tmp_path, settings) as three:
        three.wait_serving()
        found = figures_of(store, three)
        assert found is not None and found.pid == three.pid, "from the start on"
        three.end()
    shown = _top(store)
    assert not shown["engines"] and shown["orphans"]


def _top(store: Path) -> dict[str, Any]:
    """Return what the command prints, from its real entry point."""
    done = subprocess.run(
        [sys.executable, "-m", "kvdisk.cli.main", "top", str(store), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
