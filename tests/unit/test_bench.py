# SPDX-License-Identifier: Apache-2.0
"""``kvdisk bench``: that a measurement moves what it says, and the command on a real drive."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_stores import COMMAND, run_here
from ranks import CpuLanes

from kvdisk.cli.amounts import parse_size
from kvdisk.cli.bench import run as bench_run
from kvdisk.cli.bench.cases import Case, Flow, Layout, Part, Result, Sample, Speed, Unmeasured
from kvdisk.cli.bench.drive import LANES, DriveRun, auto_depth, block_order, bytes_in_flight, try_device
from kvdisk.cli.bench.mover import MoverRun, blocks_of
from kvdisk.cli.bench.run import Contender, measure_in_turn
from kvdisk.device.base import Op
from kvdisk.device.memory import MemoryDevice
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.testing.faulty_device import FaultPlan, FaultyDevice
from kvdisk.worker import copier
from kvdisk.worker.arena import Arena

ROOT = Path(__file__).resolve().parents[2]
KIB = 1024
BLOCK = 16 * KIB
FD = 7
QUICK = ("--total", "4M", "--rounds", "1", "-b", "64K", "--parts", "drive", "--flow", "read", "--layout", "contiguous")
WAIT_S = 500.0
"""A bound, not a delay: what takes longer hangs."""
POSIX = {"posix-aio", "posix-threads"}
"""What it is called depends on what the machine lets it use."""


def case(
    flow: Flow = Flow.READ, layout: Layout = Layout.SCATTERED, depth: int = 6, part: Part = Part.DRIVE, count: int = 25
) -> Case:
    return Case(part, flow, BLOCK, depth, layout, count * BLOCK)


# --- One device. ---


def drive(plan: FaultPlan | None = None) -> tuple[DriveRun, FaultyDevice, Arena]:
    arena = Arena([BLOCK], [64], pin=False)
    arena.memory[:] = np.arange(arena.total_bytes, dtype=np.uint64).view(np.uint8)[: arena.total_bytes].tobytes()
    device = FaultyDevice(MemoryDevice(file_bytes=32 * BLOCK), plan)
    return DriveRun(device, FD, arena.memory), device, arena


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("flow", Flow)
def test_every_block_is_moved_once(flow, layout):
    run, device, _ = drive()
    run.move(case(flow, layout))
    moved: list[int] = []
    for op, transfers in device.submitted:
        assert op is (Op.READ if flow is Flow.READ else Op.WRITE)
        for _, offset, size in transfers:
            moved += range(offset // BLOCK, (offset + size) // BLOCK)
    assert sorted(moved) == list(range(25))
    assert (moved == sorted(moved)) == (layout is Layout.CONTIGUOUS)
    if layout is Layout.CONTIGUOUS:
        assert all(len(transfers) == 1 for _, transfers in device.submitted), "neighbours are one transfer"
    assert len(device.submitted) >= LANES


def test_batches_in_flight_have_memory_of_their_own():
    run, device, arena = drive(FaultPlan(hold=True))
    used: list[tuple[int, int]] = []
    real = device.submit

    def submit(op, batch):
        for transfer in batch:
            for buffer in transfer.buffers:
                start = np.frombuffer(buffer, np.uint8).ctypes.data
                used.append((start, start + buffer.nbytes))
        if len(used) == 6:
            device.plan.hold = False
            device.release()
        return real(op, batch)

    device.submit = submit
    assert bytes_in_flight(6, BLOCK) <= arena.total_bytes
    run.move(case(depth=6))
    first = sorted(used[:6])
    assert all(one[1] <= two[0] for one, two in pairwise(first))


def test_a_failing_drive_fails_the_measurement_and_nothing_stays_in_flight():
    run, device, _ = drive(FaultPlan(fail={3: errno.EIO}, hang={5}))
    with pytest.raises(DeviceError) as caught:
        run.move(case())
    assert caught.value.errno == errno.EIO
    assert device.drain() == []


def test_the_order_is_the_same_every_time():
    order = block_order(case())
    assert order == block_order(case()) != list(range(25)) and sorted(order) == list(range(25))


def test_depth_follows_the_mover_within_reason():
    assert [auto_depth(size) for size in (1 << 20, 8 << 20, 64 << 20, 4096)] == [32, 4, 4, 256]


def test_a_device_that_cannot_be_made_says_why(monkeypatch):
    def absent():
        raise ConfigError("it needs a package\nand more")

    monkeypatch.setitem(bench_run.MAKERS, "nixl", absent)
    assert try_device("nixl") == (None, "it needs a package")


# --- The mover. ---


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("part", [Part.MOVER, Part.MEMORY])
@pytest.mark.parametrize("flow", Flow)
def test_the_mover_moves_every_block(flow, part, gpu):
    assert (blocks_of(4096 + 20 * (BLOCK + 4096), BLOCK), blocks_of(4095 + 20 * (BLOCK + 4096), BLOCK)) == (20, 19)
    device = FaultyDevice(MemoryDevice(file_bytes=4096 + 20 * (BLOCK + 4096)))
    run = MoverRun(device, FD, case(flow, part=part, count=20), CpuLanes() if gpu else None)
    stored = len(device.submitted)
    assert {op for op, _ in device.submitted} == ({Op.WRITE} if part is Part.MOVER else set())
    run.move()
    moved = device.submitted[stored:]
    if part is Part.MOVER:
        assert {op for op, _ in moved} == {Op.READ if flow is Flow.READ else Op.WRITE}
        assert sum(size for _, batch in moved for _, _, size in batch) == 20 * (BLOCK + 4096)
        if flow is Flow.READ:
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
    result = Result(Case(Part.DRIVE, Flow.READ, 10**6, 1, Layout.CONTIGUOUS, 10**9), "posix", samples)
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
    assert [one["block_bytes"] for one in found["probes"]] == [68 << 10, 260 << 10]
    assert all(one["chosen"] in {"posix", "nixl"} and one["why"] and not one["problem"] for one in found["probes"])
    assert "straight between drive and GPU" in found["straight_to_gpu"]
    cases = {(one["case"]["part"], one["case"]["flow"], one["case"]["block_bytes"]) for one in found["results"]}
    parts = ("drive", "mover", "memory")
    assert cases == {(part, flow, size) for part in parts for flow in ("read", "write") for size in (65536, 262144)}
    for one in found["results"]:
        rates = sorted(one["case"]["total_bytes"] / 1e6 / sample["seconds"] for sample in one["samples"])
        assert one["mb_per_s"] == pytest.approx({"lowest": rates[0], "highest": rates[1], "median": sum(rates) / 2})
        assert one["name"] in (POSIX | {"nixl"} if one["case"]["part"] != "memory" else {"CPU tier"})


def test_tables(tmp_path):
    small = ("--total", "2M", "--rounds", "1", "-b", "64K", "-b", "128K", "--parts", "drive", "--parts", "probe")
    done = bench(tmp_path, *small, "--flow", "write", COLUMNS="100")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 100
    rows = [line.split() for line in done.stdout.splitlines() if POSIX & set(line.split()[:1])]
    assert len([row for row in rows if "-" in row[2]]) == 4, done.stdout
    for words in ("write 64 KiB x 32 contiguous", "write 128 KiB x 16 scattered", "68 KiB: ", "132 KiB"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rounds", "0"), "--rounds must be 1 to"),
        (("--depth", "0"), "--depth must be 1 to"),
        (("--depth", "5000"), "--depth must be 1 to"),
        (("--depth", "100", "--total", "64M", "-b", "1M"), "more than all the blocks"),
        (("-b", "5000"), "multiple of 4 KiB"),
        (("-b", "lots"), "--block-size must be a size"),
        (("--total", "1M", "-b", "1M"), "at least two blocks"),
        (("--total", "1T"), "at most 16.0 GiB"),
        (("--device", "punched-cards"), "no device punched-cards"),
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
    long = ("--total", "8M", "-b", "64K", "--rounds", "1000", "--parts", "drive")
    child = subprocess.Popen(
        [COMMAND, "bench", tmp_path, *long], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
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
    arguments = ("--total", "4M", "--rounds", "1", "-b", "64K", "--json", "--flow", "read")
    found = measured(bench(place, *arguments, PYTHONPATH=first))
    assert {one["case"]["part"] for one in found["results"]} == {"drive"}
    assert sum("torch is not installed" in line for line in found["skipped"]) == 1


def test_blocks_are_on_a_gpu_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(copier, "CudaLanes", CpuLanes)
    done = run_here("bench", tmp_path, "--total", "2M", "--rounds", "1", "-b", "64K", "--parts", "memory")
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
