# SPDX-License-Identifier: Apache-2.0
"""``kvdisk bench`` as people start it: real runs of a few MiB on a real drive."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_stores import COMMAND, run_here

from kvdisk.cli.bench import fio, scratch

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_tiers.py"
TINY = ("--total", "4M", "--rounds", "2", "-b", "64K", "-b", "256K")
QUICK = ("--total", "4M", "--rounds", "1", "-b", "64K", "--parts", "drive", "--flow", "read", "--layout", "contiguous")
WAIT_S = 500.0
"""A bound, not a delay: what takes longer hangs."""
POSIX = {"posix-aio", "posix-threads"}
"""What it is called: by what the machine lets it use."""


def bench(*arguments: object, program: tuple[object, ...] = (COMMAND, "bench"), **environment: str) -> Any:
    return subprocess.run(
        [str(argument) for argument in (*program, *arguments)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=os.environ | environment,
        check=False,
    )


def measured(done: Any) -> dict[str, Any]:
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def without_fio(tmp_path: Path) -> str:
    """A PATH that has no fio."""
    programs = tmp_path / "programs"
    programs.mkdir()
    return str(programs)


def test_a_run_has_everything_and_leaves_nothing(tmp_path: Path) -> None:
    parts = ("--parts", "drive", "--parts", "mover", "--flow", "read", "--flow", "mixed", "--layout", "scattered")
    found = measured(bench(tmp_path, *TINY, "--json", *parts))
    assert not list(tmp_path.iterdir())
    assert found["what"] == "kvdisk bench" and found["json_version"] == 1 and len(found["run"]) == 32
    machine = found["machine"]
    assert machine["cores"] >= 1 and machine["memory_bytes"] > 1 << 20 and machine["file_system"]
    cases = [(one["case"]["route"], one["case"]["flow"], one["case"]["block_bytes"]) for one in found["groups"]]
    assert cases == [
        *[("drive", flow, size) for flow in ("read", "mixed") for size in (65536, 262144)],
        *[("mover", "read", size) for size in (65536, 262144)],
    ]
    for group in found["groups"]:
        by_name = {one["name"]: one for one in group["contenders"]}
        (posix,) = set(by_name) & POSIX
        assert group["left_out"] == []
        assert (f"{posix} through the mover" in by_name) == (group["case"]["route"] == "mover")
        for one in by_name.values():
            assert len(one["seconds"]) == 2 and all(seconds > 0 for seconds in one["seconds"])
            rates = sorted(group["case"]["bytes"] / 1e6 / seconds for seconds in one["seconds"])
            assert one["mb_per_s"] == pytest.approx(
                {"lowest": rates[0], "highest": rates[1], "median": (rates[0] + rates[1]) / 2}
            )
            assert (one["role"] == "limit") == one["name"].startswith("fio")
    if shutil.which("fio"):
        for group in found["groups"]:
            posix = next(one for one in group["contenders"] if one["name"] in POSIX)
            assert posix["of_limit"] > 0 and any(one["role"] == "limit" for one in group["contenders"])
        assert found["machine"]["fio"].startswith("fio")
    else:
        assert fio.MISSING in found["skipped"]


def test_tables_a_picture_and_a_file(tmp_path: Path) -> None:
    picture, saved, other = tmp_path / "run.svg", tmp_path / "run.json", tmp_path / "run.png"
    small = ("--total", "2M", "--rounds", "1", "-b", "64K", "-b", "128K", "--parts", "drive", "--flow", "write")
    done = bench(tmp_path, *small, "--plot", picture, "--save", saved, COLUMNS="100")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 100
    rows = [line.split() for line in done.stdout.splitlines() if POSIX & set(line.split()[:1])]
    assert len(rows) == 4, done.stdout
    for case in ("write 64 KiB x 32 contiguous", "write 128 KiB x 16 scattered"):
        assert case in done.stdout
    medians = [
        f"{one['mb_per_s']['median']:,.0f}"
        for group in json.loads(saved.read_text())["groups"]
        for one in group["contenders"]
        if one["name"] in POSIX
    ]
    assert [row[1] for row in rows] == medians
    drawn = picture.read_text()
    assert drawn.startswith("<?xml") and "<!-- drive: write, scattered -->" in drawn
    assert ("<!-- limit -->" in drawn) == bool(shutil.which("fio"))
    assert bench(tmp_path, *QUICK, "--plot", other).returncode == 0
    assert other.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "run.png", "run.svg"]


def test_what_a_start_would_choose(tmp_path: Path) -> None:
    found = measured(bench(tmp_path, "--json", "--parts", "probe", "-b", "64K", "-b", "1M"))
    assert not list(tmp_path.iterdir()) and found["groups"] == []
    assert [one["slot_bytes"] for one in found["probes"]] == [68 << 10, (1 << 20) + 4096]
    for one in found["probes"]:
        assert one["chosen"] in {"posix", "nixl"} and one["why"] and one["problem"] == ""
        assert one["names"]["posix"] in POSIX
        ways = [(speed["op"], speed["run"]) for speed in one["speeds"] if speed["device"] == one["chosen"]]
        assert sorted(ways) == [("read", False), ("read", True), ("write", False), ("write", True)]
        assert all(sample > 0 for speed in one["speeds"] for sample in speed["mb_per_s"])
    assert "straight between drive and GPU" in found["straight_to_gpu"]
    done = bench(tmp_path, "--parts", "probe", "-b", "64K", COLUMNS="80")
    (line,) = [line.split() for line in done.stdout.splitlines() if line.strip().startswith("68 KiB  ")]
    assert line[2] in POSIX | {"nixl"} and all(figure.replace(",", "").isdigit() for figure in line[3:7])
    shown = " ".join(done.stdout.split())
    assert any(f"68 KiB: {name}, because" in shown for name in POSIX | {"nixl"})
    assert "straight between drive and GPU" in shown


def test_other_runs_are_refused(tmp_path: Path) -> None:
    saved, other = tmp_path / "run.json", tmp_path / "other.json"
    saved.write_text(json.dumps({"what": "kvdisk bench", "run": "1"}))
    other.write_text("{}")
    for arguments in ((saved,), (tmp_path, "--save", saved)):
        done = run_here("bench", *arguments)
        assert done.exit_code == 2 and "figures of different runs are not comparable" in done.stderr
    done = run_here("bench", tmp_path, "--save", other)
    assert done.exit_code == 2 and "exists and is not a directory" in done.stderr
    assert other.read_text() == "{}"


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
        (("--plot", "run.gif"), ".png or .svg"),
        (("--device", "punched-cards"), "no device punched-cards"),
    ],
)
def test_wrong_usage_is_refused_in_one_line(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run_here("bench", tmp_path, *arguments)
    assert done.exit_code == 2
    assert words in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    done = run_here("bench", tmp_path / "absent", *QUICK)
    assert done.exit_code == 2 and "is not a directory" in done.stderr


def test_a_drive_without_room_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs
    free_bytes = scratch.LEFT_FREE_BYTES + (4 << 20)

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_and_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    child = start_long(tmp_path)
    child.send_signal(number)
    assert child.wait(WAIT_S) == 128 + number
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_goes_with_the_next(tmp_path: Path) -> None:
    child = start_long(tmp_path)
    (left,) = tmp_path.iterdir()
    other = start_long(tmp_path, "--flow", "write")
    child.kill()
    child.wait()
    old_s = time.time() - 3600
    (alive,) = set(tmp_path.iterdir()) - {left}
    for path in (left, alive):
        os.utime(path, (old_s, old_s))
    assert bench(tmp_path, *QUICK).returncode == 0
    assert list(tmp_path.iterdir()) == [alive], "a live run keeps its files"
    other.terminate()
    other.wait()
    assert not list(tmp_path.iterdir())


def start_long(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a run that measures for minutes, and return when it does."""
    there = set(directory.iterdir())
    child = subprocess.Popen(
        [COMMAND, "bench", directory, "--total", "8M", "-b", "64K", "--rounds", "1000", "--parts", "drive", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    deadline, before = time.monotonic() + WAIT_S, 0
    while not before or moved_bytes(child) < before + 4 * (8 << 20):  # to fill the file is one of four
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
        if not before and set(directory.iterdir()) - there:
            before = moved_bytes(child)
    return child


def moved_bytes(child: subprocess.Popen[str]) -> int:
    """What a process has read and written, by calls that a drive served and by those that memory did."""
    said = dict(line.split(": ") for line in Path(f"/proc/{child.pid}/io").read_text().splitlines())
    return sum(int(said[name]) for name in ("read_bytes", "write_bytes", "rchar", "wchar"))


def test_without_torch_the_rest_is_measured(tmp_path: Path) -> None:
    absent, place = tmp_path / "absent", tmp_path / "place"
    absent.mkdir()
    place.mkdir()
    for name in ("torch", "vllm"):
        (absent / f"{name}.py").write_text("raise ImportError('this must not be loaded')")
    first = os.pathsep.join(filter(None, [str(absent), os.environ.get("PYTHONPATH")]))
    arguments = (*TINY, "--json", "--flow", "read", "--layout", "contiguous")
    found = measured(bench(place, *arguments, PYTHONPATH=first, PATH=without_fio(tmp_path)))
    assert {group["case"]["route"] for group in found["groups"]} == {"drive"}
    assert sum("torch is not installed" in line for line in found["skipped"]) == 1
    assert fio.MISSING in found["skipped"]
    assert all(one["of_limit"] is None for group in found["groups"] for one in group["contenders"])


def test_the_figures_and_the_peer(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    arguments = ("--figures", "--total", "16M", "--rounds", "1", "--json")
    parts = ("--parts", "drive", "--parts", "mover", "--parts", "cpu", "--cpu-total", "32M")
    found = measured(
        bench(
            place, *arguments, *parts, program=(sys.executable, TOOL), PATH=without_fio(tmp_path), OMP_NUM_THREADS="1"
        )
    )
    assert not list(place.iterdir())
    rows = found["figures"]
    assert len(rows) == 10
    limits, peers, rest = rows[:3], rows[3:6], rows[6:]
    assert all(row["reached"] is None and row["holds"] is None for row in limits), "there was no fio"
    for row, wanted in zip(peers, (1.0, 1.3, 2.0), strict=True):
        assert row["at_least"] == wanted and row["reached"] == min(one["ratio"] for one in row["cases"])
        assert [one["case"].split()[0] for one in row["cases"]] == ["read", "write"]
        assert row["holds"] is (row["reached"] >= wanted) and all(one["fio"] is None for one in row["cases"])
    assert [(row["at_least"], row["cases"][0]["case"]) for row in rest[:2]] == [
        (0.85, "read 2 MiB"),
        (0.95, "read 2 MiB"),
    ]
    for row, wanted in zip(rest[2:], (1.5, 4.0), strict=True):
        assert row["at_most"] == wanted and row["reached"] == max(one["ratio"] for one in row["cases"]) > 0
    names = {one["name"] for group in found["groups"] for one in group["contenders"] if one["role"] == "peer"}
    assert names == {f"vLLM fs_io_C x {count}" for count in (1, 4, 8, 16)}
    (cpu,) = [group for group in found["groups"] if group["case"]["route"] == "cpu"]
    assert cpu["case"]["bytes"] >= 32 << 20 and cpu["contenders"][0]["name"] == "bare preadv loop"
