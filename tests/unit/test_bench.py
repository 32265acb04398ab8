# SPDX-License-Identifier: Apache-2.0
"""``kvdisk bench`` on a real drive."""

from __future__ import annotations

import json
import os
from unittest.mock import Mock

import pytest
from cli_stores import run, run_here
from support.memory_device import MemoryDevice

from kvdisk.cli import bench
from kvdisk.device.probe import FILE_BYTES
from kvdisk.testing.faulty_device import FaultPlan, FaultyDevice


def test_a_run_has_everything_needs_no_torch_and_leaves_nothing(tmp_path):
    place, absent = tmp_path / "place", tmp_path / "absent"
    for path in (place, absent):
        path.mkdir()
    for name in ("torch", "vllm"):
        (absent / f"{name}.py").write_text("raise ImportError('this must not be loaded')")
    first = os.pathsep.join(filter(None, [str(absent), os.environ.get("PYTHONPATH")]))
    done = run("bench", place, "-b", "64KiB", "-b", "256KiB", "--json", PYTHONPATH=first)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert not list(place.iterdir())
    assert found["json_version"] == 3 and found["machine"]["cores"] >= 1 and found["machine"]["file_system"]
    assert [one["block_bytes"] for one in found["drive"]] == [68 << 10, 260 << 10]
    for one in found["drive"]:
        ways = [(speed["op"], speed["run"]) for speed in one["speeds"]]
        assert sorted(ways) == [("read", False), ("read", True), ("write", False), ("write", True)]
    assert found["chosen"].startswith("device: auto would use posix-")
    assert "straight between drive and GPU" in found["straight_to_gpu"]


def test_wrong_usage_and_a_drive_without_room_are_refused_in_one_line(tmp_path, monkeypatch):
    real, full = os.statvfs, Mock(f_frsize=1, f_bavail=bench.LEFT_FREE_BYTES + FILE_BYTES - 1)
    monkeypatch.setattr(os, "statvfs", lambda path: full if path == tmp_path else real(path))
    for arguments, words in (
        ((tmp_path, "-b", "5000"), "multiple of 4 KiB"),
        ((tmp_path, "-b", "lots"), "--block-size must be a size"),
        ((tmp_path / "absent",), "is not a directory"),
        ((tmp_path, "-b", "64KiB"), "and leaves 1.0 GiB free"),
    ):
        done = run_here("bench", *arguments)
        assert done.exit_code == 2
        assert words in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
    full.f_bavail += 1
    done = run_here("bench", tmp_path, "-b", "64KiB")
    assert done.exit_code == 0
    (line,) = [line.split() for line in done.stdout.splitlines() if line.startswith("68 KiB  ")]
    assert all(figure.replace(",", "").isdigit() for figure in line[3:7])


@pytest.mark.parametrize(
    ("plan", "said"), [(FaultPlan(full=True), "errno 28"), (FaultPlan(hold=True), "nothing was heard of it for 0.05 s")]
)
def test_a_drive_that_fails_or_hangs_while_it_is_measured_is_an_exit_code(tmp_path, monkeypatch, plan, said):
    monkeypatch.setattr(bench, "SILENT_S", 0.05)
    monkeypatch.setattr(bench, "_given_up", [])
    monkeypatch.setattr(bench, "PosixDevice", lambda: FaultyDevice(MemoryDevice(), plan))
    done = run_here("bench", tmp_path, "-b", "64KiB")
    assert done.exit_code == 1 and done.stderr.startswith("kvdisk: the drive failed: ") and said in done.stderr
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())
