# SPDX-License-Identifier: Apache-2.0
"""``kvdisk bench``: that a measurement moves what it says, and the command on a real drive."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bench_drive
import pytest
from bench_drive import DriveRun
from cli_stores import COMMAND, run_here
from ranks import CpuLanes

from kvdisk.cli.bench import run as bench_run
from kvdisk.cli.bench.cases import Case, Flow, Part, Result, Sample, Speed
from kvdisk.cli.bench.mover import MoverRun, Unmeasured, blocks_of
from kvdisk.cli.bench.run import Contender, measure_in_turn
from kvdisk.cli.output import parse_size
from kvdisk.device.base import Op
from kvdisk.device.memory import MemoryDevice
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.testing.faulty_device import FaultyDevice
from kvdisk.worker import copier
from kvdisk.worker.arena import Arena

ROOT = Path(__file__).resolve().parents[2]
KIB = 1024
BLOCK = 16 * KIB
FD = 7
QUICK = ("--total", "4M", "--rounds", "1", "-b", "64K", "--parts", "memory")
WAIT_S = 500.0
"""A bound, not a delay: what takes longer hangs."""
POSIX = {"posix-aio", "posix-threads"}
"""What it is called depends on what the machine lets it use."""


def case(flow: Flow = Flow.LOAD, part: Part = Part.MOVER) -> Case:
    return Case(part, flow, BLOCK, 20)


# --- One device, as our comparison with fio drives it. ---


def drive() -> tuple[DriveRun, FaultyDevice]:
    device = FaultyDevice(MemoryDevice(file_bytes=32 * BLOCK))
    return DriveRun(device, FD, Arena([BLOCK], [64], pin=False).memory), device


@pytest.mark.parametrize("layout", bench_drive.Layout)
@pytest.mark.parametrize("op", Op)
def test_every_block_is_moved_once(op, layout):
    run, device = drive()
    run.move(bench_drive.Case(op, layout, BLOCK, 25))
    moved: list[int] = []
    for submitted, transfers in device.submitted:
        assert submitted is op
        for _, offset, size in transfers:
            moved += range(offset // BLOCK, (offset + size) // BLOCK)
    assert sorted(moved) == list(range(25))
    assert (moved == sorted(moved)) == (layout is bench_drive.Layout.CONTIGUOUS)


# --- The mover. ---


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("part", [Part.MOVER, Part.MEMORY])
@pytest.mark.parametrize("flow", Flow)
def test_the_mover_moves_every_block(flow, part, gpu):
    assert (blocks_of(4096 + 20 * (BLOCK + 4096), BLOCK), blocks_of(4095 + 20 * (BLOCK + 4096), BLOCK)) == (20, 19)
    device = FaultyDevice(MemoryDevice(file_bytes=4096 + 20 * (BLOCK + 4096)))
    run = MoverRun(device, FD, case(flow, part), CpuLanes() if gpu else None)
    stored = len(device.submitted)
    assert {op for op, _ in device.submitted} == ({Op.WRITE} if part is Part.MOVER else set())
    run.move()
    moved = device.submitted[stored:]
    if part is Part.MOVER:
        assert {op for op, _ in moved} == {Op.READ if flow is Flow.LOAD else Op.WRITE}
        assert sum(size for _, batch in moved for _, _, size in batch) == 20 * (BLOCK + 4096)
        if flow is Flow.LOAD:
            device.plan.corrupt = {device._reads + 1: 9000}
            with pytest.raises(Unmeasured, match="CHECKSUM"):
                run.move()
    run.close()


# --- In turn. ---


def test_every_contender_is_measured_once_a_round_in_another_order():
    calls: list[str] = []
    contenders = [Contender(name, lambda name=name: calls.append(name)) for name in "abc"]
    results = measure_in_turn(case(), contenders, 4, [], lambda _: None)
    rounds = ["".join(calls[start : start + 3]) for start in range(0, 15, 3)]
    assert all(sorted(one) == list("abc") for one in rounds) and len({one[0] for one in rounds}) == 3
    assert [(one.name, len(one.samples)) for one in results] == [("a", 4), ("b", 4), ("c", 4)]


def test_a_contender_that_fails_is_left_out_and_said():
    def fail() -> None:
        raise DeviceError(errno.EIO, "the drive")

    skipped: list[str] = []
    made = [Contender("good", lambda: None), Contender("bad", fail)]
    results = measure_in_turn(case(), made, 3, skipped, lambda _: None)
    assert [one.name for one in results] == ["good"]
    assert len(skipped) == 1 and "bad" in skipped[0] and "the drive" in skipped[0]


def test_figures_are_of_all_rounds():
    samples = [Sample(2.0, 1.0), Sample(1.0, 2.0), Sample(4.0, 4.0)]
    result = Result(Case(Part.MOVER, Flow.LOAD, 10**6, 1000), "posix", samples)
    assert result.mb_per_s == Speed(500, 250, 1000)
    assert result.cpu_s_per_gib == pytest.approx(2 * 2**30 / 10**9)


def test_sizes_as_people_write_them():
    for text, wanted in (("64K", 65536), ("2MiB", 2 << 20), ("1g", 1 << 30), ("4096", 4096), ("1MB", 10**6)):
        assert parse_size("--total", text) == wanted
    with pytest.raises(ConfigError, match="--total"):
        parse_size("--total", "much")


# --- The command. ---


def bench(*arguments: object, **environment: str) -> Any:
    return subprocess.run(
        [str(argument) for argument in (COMMAND, "bench", *arguments)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        check=False,
    )


def measured(done: Any) -> dict[str, Any]:
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_run_has_everything_and_leaves_nothing(tmp_path):
    found = measured(bench(tmp_path, "--total", "4M", "--rounds", "2", "-b", "64K", "-b", "256K", "--json"))
    assert not list(tmp_path.iterdir())
    assert found["json_version"] == 2 and found["machine"]["cores"] >= 1 and found["machine"]["file_system"]
    assert [one["block_bytes"] for one in found["drive"]] == [68 << 10, 260 << 10]
    for one in found["drive"]:
        assert {speed["device"] for speed in one["speeds"]} <= POSIX
        ways = [(speed["op"], speed["run"]) for speed in one["speeds"]]
        assert sorted(ways) == [("read", False), ("read", True), ("write", False), ("write", True)]
    assert found["chosen"].startswith("device: auto would use posix-")
    assert "straight between drive and GPU" in found["straight_to_gpu"]
    cases = {(one["case"]["part"], one["case"]["flow"], one["case"]["block_bytes"]) for one in found["results"]}
    assert cases == {
        (part, flow, size) for part in ("mover", "memory") for flow in ("load", "store") for size in (65536, 262144)
    }
    for one in found["results"]:
        total_bytes = one["case"]["block_bytes"] * one["case"]["block_count"]
        rates = sorted(total_bytes / 1e6 / sample["seconds"] for sample in one["samples"])
        assert one["mb_per_s"] == pytest.approx({"lowest": rates[0], "highest": rates[1], "median": sum(rates) / 2})
        assert one["name"] in (POSIX if one["case"]["part"] == "mover" else {"CPU tier"})


def test_tables(tmp_path):
    done = bench(tmp_path, "--total", "2M", "--rounds", "1", "-b", "64K", "-b", "128K", COLUMNS="100")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 100
    drive, mover, memory = re.split(r"^Host memory in place of a GPU and .*\n", done.stdout, flags=re.MULTILINE)
    (line,) = [line.split() for line in drive.splitlines() if line.startswith("68 KiB  ")]
    assert line[2] in POSIX and all(figure.replace(",", "").isdigit() for figure in line[3:7])
    for table, name in ((mover, "posix"), (memory, "CPU tier")):
        assert [words in table for words in ("load 64 KiB", "store 128 KiB")] == [True, True]
        assert len(re.findall(rf"^  {name}", table, re.MULTILINE)) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rounds", "0"), "--rounds must be 1 to"),
        (("-b", "5000"), "multiple of 4 KiB"),
        (("-b", "lots"), "--block-size must be a size"),
        (("--total", "1M", "-b", "1M"), "at least two blocks"),
        (("--total", "1T"), "at most 16.0 GiB"),
    ],
)
def test_wrong_usage_is_refused_in_one_line(tmp_path, arguments, words):
    done = run_here("bench", tmp_path, *arguments)
    assert done.exit_code == 2
    assert words in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_is_no_directory_is_refused(tmp_path):
    done = run_here("bench", tmp_path / "absent", *QUICK)
    assert done.exit_code == 2 and "is not a directory" in done.stderr


def test_a_drive_without_room_is_not_filled(tmp_path, monkeypatch):
    real = os.statvfs
    free_bytes = bench_run.LEFT_FREE_BYTES + (4 << 20)

    class Status:
        f_frsize = 1

        def __init__(self, free: int) -> None:
            self.f_bavail = free

    monkeypatch.setattr(os, "statvfs", lambda path: Status(free_bytes - 1) if path == tmp_path else real(path))
    done = run_here("bench", tmp_path, *QUICK)
    assert done.exit_code == 2 and "free" in done.stderr and "--total" in done.stderr
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "statvfs", lambda path: Status(free_bytes) if path == tmp_path else real(path))
    assert run_here("bench", tmp_path, *QUICK).exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(tmp_path, number):
    long = ("--total", "8M", "-b", "64K", "--rounds", "1000", "--parts", "mover")
    child = subprocess.Popen(
        [COMMAND, "bench", tmp_path, *long],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + WAIT_S
    while moved_bytes(child) < 10 * (8 << 20):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(number)
    assert child.wait(WAIT_S) != 0
    assert not list(tmp_path.iterdir())


def moved_bytes(child: subprocess.Popen[str]) -> int:
    """What a process has written, by calls that a drive served and by those that memory did."""
    said = dict(line.split(": ") for line in Path(f"/proc/{child.pid}/io").read_text().splitlines())
    return int(said["write_bytes"]) + int(said["wchar"])


def test_without_torch_the_rest_is_measured(tmp_path):
    absent, place = tmp_path / "absent", tmp_path / "place"
    absent.mkdir()
    place.mkdir()
    for name in ("torch", "vllm"):
        (absent / f"{name}.py").write_text("raise ImportError('this must not be loaded')")
    first = os.pathsep.join(filter(None, [str(absent), os.environ.get("PYTHONPATH")]))
    found = measured(bench(place, "--total", "4M", "--rounds", "1", "-b", "64K", "--json", PYTHONPATH=first))
    assert len(found["drive"]) == 1 and found["results"] == []
    assert sum("torch is not installed" in line for line in found["skipped"]) == 1


def test_blocks_are_on_a_gpu_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(copier, "CudaLanes", CpuLanes)
    done = run_here("bench", tmp_path, *QUICK)
    assert done.exit_code == 0 and "GPU and CPU tier, through the mover" in done.stdout
    assert "Host memory" not in done.stdout


def test_the_comparison_with_fio_and_vllm(tmp_path):
    """A tool of ours; what is not installed is left out in a line."""
    done = subprocess.run(
        [sys.executable, "tools/bench_tiers.py", tmp_path, "--total", "4M", "--rounds", "1", "--sizes", "1M"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    assert done.stdout.count("fio libaio") in {0, 4} and done.stdout.count("vLLM fs_io_C x 16") in {0, 2}
    assert ("fio libaio" in done.stdout) != ("fio is not installed" in done.stdout)
    assert sum(done.stdout.count(f"  {name} ") for name in POSIX) == 4
