# SPDX-License-Identifier: Apache-2.0
"""Our own tools: the GPU report without a GPU, one line, and a rehearsal over CPU tensors in which
every route moves something; and what a large store costs."""

from __future__ import annotations

import io
import json
import sys
from unittest.mock import Mock

import gpu_report
import measure_store
import pytest
import torch
from ranks import CpuLanes
from support.addressed_device import AddressedDevice

from kvdisk.device.posix import PosixDevice
from kvdisk.worker import copier, slot_headers

SMALL = ["--sizes", "65536", "262144", "--file-bytes", "1000000", "--copy-bytes", "1000000", "--repetitions", "1"]
SMALL += ["--arena-bytes", "1000000", "--cache-bytes", "5000000", "--side", "16", "--step-s", "0.001", "--no-tests"]
SIZES = (65536, 262144)


@pytest.fixture
def stand_in(monkeypatch):
    """A GPU of host memory, with GPUDirect."""
    monkeypatch.setattr(copier, "CudaLanes", CpuLanes)
    monkeypatch.setattr(gpu_report, "gds_unavailable", lambda: None)
    monkeypatch.setattr(gpu_report, "GdsDevice", lambda: AddressedDevice(PosixDevice()))


def test_without_a_gpu_it_is_one_line_and_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(copier, "CudaLanes", Mock(side_effect=RuntimeError("Found no NVIDIA driver on your system.")))
    assert gpu_report.main([]) == 2
    assert capsys.readouterr().out.splitlines() == [gpu_report.NO_GPU]


def test_every_route_and_size_is_in_the_table_and_the_json(stand_in, tmp_path, capsys):
    target, drive = tmp_path / "report.json", tmp_path / "drive"
    drive.mkdir()
    assert gpu_report.main([*SMALL, "--dir", str(drive), "--json", str(target)]) == 0
    assert list(drive.iterdir()) == []
    printed = capsys.readouterr().out
    found = json.loads(target.read_text())
    memory = [gpu_report.memory_name(gpu_report.LAYERS_FIRST, threads) for threads in gpu_report.THREADS]
    memory.append(gpu_report.memory_name(gpu_report.BLOCKS_FIRST, gpu_report.THREADS[-1]))
    routes = dict.fromkeys((gpu_report.POSIX, gpu_report.STRAIGHT, *memory), gpu_report.MOVES)
    copies = [f"{how}, {shape.name}" for how in ("copy", gpu_report.GATHERED) for shape in gpu_report.SHAPES]
    routes |= dict.fromkeys(copies, gpu_report.COPIES)
    routes[gpu_report.DRIVE] = gpu_report.MOVES[:2]
    expected = {(route, what, size) for route, whats in routes.items() for what in whats for size in SIZES}
    expected |= {
        (f"{how}, {gpu_report.MLA.name}", what, gpu_report.MLA_BYTES)
        for how in ("copy", gpu_report.GATHERED)
        for what in gpu_report.COPIES
    }
    expected |= {("model", what, 16) for what in ("alone", "beside loads", "beside stores")}
    expected |= {(gpu_report.LARGE_COPY, what, 1000000) for what in gpu_report.COPIES}
    expected |= {(f"copy, {gpu_report.LARGE_CACHE.name}", what, 2 << 20) for what in gpu_report.COPIES}
    assert {(row["route"], row["what"], row["block_bytes"]) for row in found["speeds"]} == expected
    assert [row["why"] for row in found["speeds"] if row["why"]] == []
    assert all(min(row["samples"]) > 0 for row in found["speeds"])
    lines = [line for line in printed.splitlines() if line.startswith("| ") and line.count("KiB") == 1]
    of_copies, of_moves = 1 + 2 * (2 * 2 + 1) + 1, 2 * (4 + 3)
    judged = 2 * 2 + 2 * 2 + 2 * 2 + 1  # copies, also of MLA and the large cache; two shapes from memory; the drive
    assert len(lines) == of_copies + of_moves + judged, printed
    assert slot_headers.check_slot.__module__ == "kvdisk.device.header", "verification is back"
    goals = [verdict["goal"] for verdict in found["verdicts"]]
    assert len(set(goals)) == 4 and len(goals) == judged + 2 + 1
    assert [each["met"] for each in found["verdicts"] if "second GPU" in each["goal"]] == [None]


def test_goals_are_judged_line_by_line():
    def speed(route, what, size, speed):
        return gpu_report.Speed(route, what, size, [speed])

    mla, threads = f"copy, {gpu_report.MLA.name}", gpu_report.THREADS
    memory = [gpu_report.memory_name(gpu_report.LAYERS_FIRST, count) for count in threads]
    speeds = [
        *(speed(gpu_report.LARGE_COPY, what, 1 << 30, of) for what, of in (("gather", 50.0), ("scatter", 40.0))),
        speed(mla, "gather", 65536, 1.0),
        *(speed(mla, what, 262144, 36.0) for what in ("gather", "scatter")),
        *(speed(memory[0], what, 262144, 1.0) for what in ("store", "load")),
        *(speed(memory[-1], what, 262144, 45.0) for what in ("store", "load", "load unverified")),
        *(speed(gpu_report.DRIVE, what, 262144, 7.0) for what in ("store", "load")),
        speed(gpu_report.POSIX, "load", 262144, 6.0),
        speed(gpu_report.STRAIGHT, "load", 262144, 6.4),
        *(
            speed("model", what, 4096, of)
            for what, of in (("alone", 100.0), ("beside loads", 97.5), ("beside stores", 96))
        ),
        gpu_report.Speed(gpu_report.POSIX, "store", 8 << 20, why="no time was left"),
    ]
    found = gpu_report.judge(gpu_report.Report({}, speeds=speeds, taken_bytes=500 << 20))
    assert [(each.line, each.found, each.met) for each in found] == [
        (f"256 KiB, {mla}, gather", "0.72", False),
        (f"256 KiB, {mla}, scatter", "0.90", True),
        (f"256 KiB, {memory[-1]}, store", "0.90", True),
        (f"256 KiB, {memory[-1]}, load", "1.12", True),
        (f"256 KiB, {gpu_report.STRAIGHT}", "0.91", True),
        ("beside loads", "2.5%", True),
        ("beside stores", "4.0%", False),
        ("memory of the first GPU", "500 MiB", False),
        (f"8192 KiB, {gpu_report.POSIX}", "no time was left", None),
    ]


@pytest.mark.parametrize(("answer", "taken"), [("moved", 3 << 20), ("", None)])
def test_a_rank_on_the_second_gpu_is_watched_from_outside(monkeypatch, answer, taken):
    left = iter([10 << 20, 7 << 20])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpu_report, "free_bytes_of_first", lambda: next(left))
    command = [sys.executable, "-c", f"print({answer!r}, flush=True); input()"]
    monkeypatch.setattr(gpu_report, "child_command", lambda: command)
    if taken is None:
        with pytest.raises(RuntimeError, match="second GPU failed"):
            gpu_report.taken_by_second()
    else:
        assert gpu_report.taken_by_second() == taken


def test_that_rank_moves_before_it_says_so(stand_in, monkeypatch, capsys):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert gpu_report.main(["--rank-on-second"]) == 0
    assert chosen == [1]
    assert capsys.readouterr().out == "moved\n"


def test_what_does_not_fit_the_minutes_is_left_out_and_what_fails_says_why(stand_in, tmp_path, monkeypatch, capsys):
    assert gpu_report.main([*SMALL, "--dir", str(tmp_path), "--minutes", "0"]) == 0
    assert "no time was left" in capsys.readouterr().out
    monkeypatch.setattr(gpu_report, "make_layers", Mock(side_effect=RuntimeError("out of memory\nmore")))
    report = gpu_report.make_report(CpuLanes(), gpu_report.parse([*SMALL, "--dir", str(tmp_path)]))
    unasked = {gpu_report.LARGE_COPY, gpu_report.DRIVE}
    assert {speed.why for speed in report.speeds if speed.route not in unasked} == {"out of memory"}


def test_without_a_gpu_routes_from_memory_and_the_drive_can_be_measured(tmp_path, capsys):
    target = tmp_path / "report.json"
    assert gpu_report.main([*SMALL, "--host", "--dir", str(tmp_path), "--json", str(target)]) == 0
    found = {(row["route"], row["what"]) for row in json.loads(target.read_text())["speeds"]}
    assert (gpu_report.memory_name(gpu_report.LAYERS_FIRST, 0), "load") in found
    of_memory, of_drive = 2 * (1 + len(gpu_report.THREADS)) * len(gpu_report.MOVES), 2 + len(gpu_report.MOVES)
    assert len(found) == 2 + of_memory + of_drive


def test_a_store_is_measured_in_memory():
    blocks = 2 * measure_store.LOOKED_UP
    assert measure_store.measure_tier(lambda: measure_store.GivenIndex(blocks), blocks)["hit_us"] > 0
