# SPDX-License-Identifier: Apache-2.0
"""Our own tools: the GPU report without a GPU, one line, and a rehearsal over CPU tensors in which
every route moves something; and what a large store costs."""

from __future__ import annotations

import json
from unittest.mock import Mock

import gpu_report
import measure_store
from ranks import CpuLanes
from support.addressed_device import AddressedDevice

from kvdisk.device.posix import PosixDevice
from kvdisk.worker import copier, slot_headers

SMALL = ["--sizes", "65536", "131072", "--file-bytes", "1000000", "--copy-bytes", "1000000", "--repetitions", "1"]


def test_without_a_gpu_it_is_one_line_and_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(copier, "CudaLanes", Mock(side_effect=RuntimeError("Found no NVIDIA driver on your system.")))
    assert gpu_report.main([]) == 2
    assert capsys.readouterr().out.splitlines() == [gpu_report.NO_GPU]


def test_every_route_and_size_is_in_the_table_and_the_json(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(copier, "CudaLanes", CpuLanes)
    monkeypatch.setattr(gpu_report, "gds_unavailable", lambda: None)
    monkeypatch.setattr(gpu_report, "GdsDevice", lambda: AddressedDevice(PosixDevice()))
    target = tmp_path / "report.json"
    drive = tmp_path / "drive"
    drive.mkdir()
    assert gpu_report.main([*SMALL, "--no-tests", "--dir", str(drive), "--json", str(target)]) == 0
    assert list(drive.iterdir()) == []
    printed = capsys.readouterr().out
    found = json.loads(target.read_text())
    routes = dict.fromkeys(("posix, pinned memory", gpu_report.STRAIGHT), gpu_report.MOVES)
    routes[gpu_report.COPY] = gpu_report.COPIES
    assert {(row["route"], row["what"], row["block_bytes"]) for row in found["speeds"][2:]} == {
        (route, what, size) for route, whats in routes.items() for what in whats for size in (65536, 131072)
    }
    assert all(min(row["samples"]) > 0 for row in found["speeds"])
    rows = [line for line in printed.splitlines() if line.startswith("| ") and "KiB" in line]
    assert len(rows) == 1 + 2 + 4, printed
    assert slot_headers.check_slot.__module__ == "kvdisk.device.header", "verification is back"


def test_a_store_is_measured_in_memory():
    blocks = 2 * measure_store.LOOKED_UP
    assert measure_store.measure_tier(lambda: measure_store.GivenIndex(blocks), blocks)["hit_us"] > 0
