# SPDX-License-Identifier: Apache-2.0
"""Our own tools: the GPU report without a GPU, one line, and a rehearsal over CPU tensors in which
every route moves something; that it notices wrong bytes, and outlives what fails or hangs; and what
a large store costs."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import gpu_measures
import gpu_report
import measure_store
import one_by_one
import pytest
import torch
from gpu_measures import Pace, Speed
from ranks import CpuLanes
from support.addressed_device import AddressedDevice
from support.waits import WAIT_S

from kvdisk.device.posix import PosixDevice
from kvdisk.worker import copier, slot_headers
from kvdisk.worker.copier import CudaCopier, Passed

SMALL = ["--sizes", "65536", "262144", "--file-bytes", "1000000", "--copy-bytes", "1000000", "--repetitions", "1"]
SMALL += ["--arena-bytes", "1000000", "--cache-bytes", "5000000", "--side", "16", "--step-s", "0.001", "--no-tests"]
SIZES = (65536, 262144)
ONCE = Pace(1, 60.0)
SHAPES = {shape.name: shape for shape in (*gpu_measures.SHAPES, gpu_measures.MLA)}


@pytest.fixture
def stand_in(monkeypatch):
    """Host memory for a GPU, with GPUDirect."""
    monkeypatch.setattr(copier, "CudaLanes", CpuLanes)
    monkeypatch.setattr(gpu_report, "gds_unavailable", lambda: None)
    monkeypatch.setattr(gpu_measures, "GdsDevice", lambda: AddressedDevice(PosixDevice()))


def measures(monkeypatch, *acts):
    """Let the report consist of these, by name."""
    listed = [gpu_report.Measure(act.__name__, 4096, act) for act in acts]
    monkeypatch.setattr(gpu_report, "work_of", lambda *_: iter(listed))


def first():
    yield Speed("first", "gather", 4096, [1e9])


def last():
    yield Speed("last", "gather", 4096, [3e9])


def report(tmp_path, *more: str) -> tuple[int, dict]:
    """Run the report; return its exit code, and what it has written."""
    target = tmp_path / "report.json"
    code = gpu_report.main([*SMALL, "--dir", str(tmp_path), "--json", str(target), *more])
    return code, json.loads(target.read_text())


def test_without_a_gpu_it_is_one_line_and_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(copier, "CudaLanes", Mock(side_effect=RuntimeError("Found no NVIDIA driver on your system.")))
    assert gpu_report.main([]) == 2
    assert capsys.readouterr().out.splitlines() == [gpu_report.NO_GPU]


def test_it_runs_where_kvdisk_is_not_installed(tmp_path):
    """Its own checkout serves: an installed kvdisk, and its path, are hidden here."""
    hidden = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in str(each).lower()]\n"
        "sys.path[:] = [each for each in sys.path if not os.path.exists(each + '/kvdisk') or 'site-p' in each]\n"
    )
    command = [sys.executable, str(Path(gpu_report.__file__)), "--help"]
    done = subprocess.run(
        command, env={**hidden, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_route_and_size_is_in_the_table_and_the_json(stand_in, tmp_path, capsys):
    target, drive = tmp_path / "report.json", tmp_path / "drive"
    drive.mkdir()
    assert gpu_report.main([*SMALL, "--dir", str(drive), "--json", str(target)]) == 0
    assert list(drive.iterdir()) == []
    printed = capsys.readouterr().out
    found = json.loads(target.read_text())
    assert [row["why"] + row["trace"] for row in found["speeds"] if row["why"]] == []
    memory = [gpu_report.memory_name(gpu_report.BLOCKS_FIRST, threads) for threads in gpu_report.THREADS]
    memory.append(gpu_report.memory_name(gpu_report.LAYERS_FIRST, gpu_report.THREADS[-1]))
    routes = dict.fromkeys((gpu_report.POSIX, gpu_report.STRAIGHT, *memory), gpu_report.MOVES)
    copies = [f"{how}, {shape.name}" for how in ("copy", gpu_measures.GATHERED) for shape in gpu_report.SHAPES]
    routes |= dict.fromkeys(copies, gpu_report.COPIES)
    routes[gpu_report.DRIVE] = gpu_report.MOVES[:2]
    expected = {(route, what, size) for route, whats in routes.items() for what in whats for size in SIZES}
    expected |= {
        (f"{how}, {gpu_report.MLA.name}", what, gpu_report.MLA_BYTES)
        for how in ("copy", gpu_measures.GATHERED)
        for what in gpu_report.COPIES
    }
    for model in (gpu_report.MODEL, gpu_report.PYTHON_MODEL):
        expected |= {(model, what, 16) for what in ("alone", "beside loads", "beside stores")}
    expected |= {(gpu_report.PINNING_MODEL, what, 16) for what in ("alone", "beside pinning")}
    expected.add(("pinning", "store", 4096 + (1 << 20)))
    apart = (64, 5000000 // 16 // 4096 * 4)
    rows = [(f"rows, {each} KiB apart", what) for each in apart for what in gpu_report.COPIES]
    expected |= {(*row, size) for row in rows for size in gpu_measures.ROW_BYTES}
    expected |= {(gpu_report.LARGE_COPY, what, 1000000) for what in gpu_report.COPIES}
    large = [gpu_report.large_cache(shape, 5000000).name for shape in gpu_report.SHAPES]
    of_large = {(f"copy, {name}", what, 192 << 10) for name in large for what in gpu_report.COPIES}
    assert {(row["route"], row["what"], row["block_bytes"]) for row in found["speeds"]} == expected | of_large
    assert all(min(row["samples"]) > 0 for row in found["speeds"])
    tables = printed[printed.index("GPU:") :]
    lines = [line for line in tables.splitlines() if line.startswith("| ") and line.count("KiB") == 1]
    assert tables.count("KiB apart") == 2 * len(gpu_measures.ROW_BYTES)
    of_copies, of_moves = 1 + 2 * (2 * 2 + 1) + 2, 2 * (4 + 3) + 1
    judged = 2 * 2 + 2 * 2 + 2 + 1  # copies; two shapes from memory; MLA; the drive
    assert len(lines) == of_copies + of_moves + judged, printed
    assert slot_headers.check_slot.__module__ == "kvdisk.device.header", "verification is back"
    goals = [verdict["goal"] for verdict in found["verdicts"]]
    assert len(set(goals)) == 4 and len(goals) == judged + 5 + 1
    assert [each["met"] for each in found["verdicts"] if "second GPU" in each["goal"]] == [None]


# -- it notices wrong bytes ------------------------------------------------------------------------


def do_nothing(*_args):
    return Passed()


def half(copy):
    """Copy the first half of what was asked for."""

    def copying(self, group, one, other, after=None):
        slots = one if hasattr(one, "indices") else other
        count = len(slots.indices) // 2
        some = slots._replace(indices=slots.indices[:count])
        given = (some, other[:count]) if slots is one else (one[:count], some)
        return copy(self, group, *given, after)

    return copying


def turned(copy):
    """Copy all, to or from the slots of others."""

    def copying(self, group, one, other, after=None):
        slots = one if hasattr(one, "indices") else other
        others = slots._replace(indices=[*slots.indices[1:], slots.indices[0]])
        return copy(self, group, *((others, other) if slots is one else (one, others)), after)

    return copying


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=pytest.mark.torture) for way in ("gather", "scatter")), "both"]
)
@pytest.mark.parametrize("wrong", [lambda _: do_nothing, half, turned])
def test_copies_that_do_nothing_or_half_or_mix_blocks_up_are_noticed(monkeypatch, shape, way, wrong):
    """Also where a scatter turns around what the gather did."""
    size = gpu_measures.MLA_BYTES if shape == gpu_measures.MLA.name else 65536
    given = CpuLanes(), SHAPES[shape], size, 6 * size, ONCE
    assert len(gpu_measures.measure_copies(*given)) == 2
    for name in ("gather", "scatter"):
        if way in (name, "both"):
            monkeypatch.setattr(CudaCopier, name, wrong(getattr(CudaCopier, name)))
    with pytest.raises(gpu_measures.WrongBytesError, match="brought other bytes"):
        gpu_measures.measure_copies(*given)


@pytest.mark.parametrize("wrong", [lambda _: do_nothing, half, turned])
def test_loads_that_do_nothing_or_half_or_mix_blocks_up_are_noticed(monkeypatch, wrong):
    with closing(gpu_measures.Memory(CpuLanes(), gpu_measures.BLOCKS_FIRST, 65536, 6 * 65536)) as memory:
        with closing(memory.route(0)) as route:
            route.check()
        monkeypatch.setattr(CudaCopier, "scatter", wrong(CudaCopier.scatter))
        with closing(memory.route(0)) as route, pytest.raises(gpu_measures.WrongBytesError):
            route.check()


def test_wrong_bytes_are_the_reports_exit_code(stand_in, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(CudaCopier, "scatter", do_nothing)
    code, found = report(tmp_path)
    assert code == 1
    why = {row["route"]: row["why"] for row in found["speeds"]}
    assert all("other bytes" in why[f"copy, {shape.name}"] for shape in gpu_report.SHAPES)


def test_blocks_go_to_slots_in_another_order_and_all_ends_of_a_large_cache_take_part(monkeypatch):
    seen = []
    gather = CudaCopier.gather

    def noting(self, group, blocks, slots, after=None):
        seen.append((list(blocks), list(slots.indices)))
        return gather(self, group, blocks, slots, after)

    monkeypatch.setattr(CudaCopier, "gather", noting)
    gpu_measures.measure_copies(CpuLanes(), gpu_measures.LAYERS_FIRST, 65536, 16 * 65536, ONCE, 100 * 65536)
    blocks, slots = seen[0]
    assert sorted(blocks) == [*range(8), *range(92, 100)] and sorted(slots) == list(range(16))
    neighbours = sum(abs(one - other) == 1 for one, other in pairwise(slots))
    assert blocks != sorted(blocks) and neighbours < 8
    assert dict(zip(blocks, slots, strict=True)) != dict(zip(sorted(blocks), sorted(slots), strict=True))


@pytest.mark.parametrize("span_bytes", [1, 65536, 5_000_000])
def test_rows_are_measured_however_little_memory_is_asked_for(span_bytes):
    """Rows of every size, near and apart, none of which lie in each other."""
    found = list(gpu_measures.measure_rows(CpuLanes(), span_bytes, ONCE))
    assert [speed.block_bytes for speed in found if not speed.why] == 2 * sorted([*gpu_measures.ROW_BYTES] * 2)


def test_moves_are_of_several_jobs_and_made_before(monkeypatch):
    monkeypatch.setattr(gpu_measures, "JOB_BYTES", 2 * 65536)
    with (
        closing(gpu_measures.Memory(CpuLanes(), gpu_measures.BLOCKS_FIRST, 65536, 12 * 65536)) as memory,
        closing(memory.route(0)) as route,
    ):
        monkeypatch.setattr(gpu_measures, "Move", None)  # none is made from now on
        jobs = []
        submit = route._mover.submit
        monkeypatch.setattr(route._mover, "submit", lambda plan: jobs.extend(plan.jobs) or submit(plan))
        route.check()
    assert [len(job.moves) for job in jobs] == [2] * 12


# -- it outlives what fails or hangs ---------------------------------------------------------------


def test_what_does_not_fit_the_minutes_is_left_out_and_what_fails_says_why_and_where(stand_in, tmp_path, monkeypatch):
    code, found = report(tmp_path, "--minutes", "0")
    assert code == 0
    assert {row["why"] for row in found["speeds"]} == {"no time was left"}
    monkeypatch.setattr(gpu_measures, "make_layers", Mock(side_effect=RuntimeError("out of memory\nmore")))
    _, found = report(tmp_path)
    unasked = (gpu_report.LARGE_COPY, gpu_report.DRIVE, "rows", "pinning", gpu_report.PINNING_MODEL)
    rows = [row for row in found["speeds"] if not row["route"].startswith(unasked)]
    assert {row["why"] for row in rows} == {"out of memory"}
    assert any("make_layers" in row["trace"] for row in rows)


@pytest.mark.parametrize(
    "error", [AssertionError(), TypeError("no"), ValueError("no"), IndexError("no"), ZeroDivisionError(), Exception()]
)
def test_a_measure_that_raises_loses_nothing_of_the_others(stand_in, tmp_path, monkeypatch, capsys, error):
    def raises():
        yield Speed("half", "gather", 4096, [2e9])
        raise error

    measures(monkeypatch, first, raises, last)
    code, found = report(tmp_path)
    assert code == 0
    assert [row["route"] for row in found["speeds"]] == ["first", "half", "raises", "last"]
    assert type(error).__name__ in found["speeds"][2]["trace"]
    assert "not measured" in capsys.readouterr().out


def test_a_measure_that_hangs_or_dies_loses_nothing_of_the_others(stand_in, tmp_path, monkeypatch):
    def hangs():
        yield Speed("before", "gather", 4096, [2e9])
        threading.Event().wait()

    def dies():
        os.kill(os.getpid(), signal.SIGSEGV)
        yield

    def run_apart(measure, keep, limit_s):
        return one_by_one.run_apart(measure, keep, 6.0 if measure is hangs else limit_s)

    measures(monkeypatch, first, hangs, dies, last)
    monkeypatch.setattr(gpu_report, "run_apart", run_apart)
    _, found = report(tmp_path)
    assert [row["route"] for row in found["speeds"]] == ["first", "before", "hangs", "dies", "last"]
    assert "did not end in" in found["speeds"][2]["why"] and "in hangs" in found["speeds"][2]["trace"]
    assert "died, exit code -11" in found["speeds"][3]["why"] and "in dies" in found["speeds"][3]["trace"]


def test_a_process_that_dies_says_where_though_a_library_took_its_signals():
    """As Mooncake's client does when it is imported."""
    program = (
        "import faulthandler, os, signal, one_by_one\n"
        "faulthandler.enable()\n"
        "signal.signal(signal.SIGSEGV, signal.SIG_DFL)\n"
        "def dies():\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    yield\n"
        "print(one_by_one.run_apart(dies, print, 60.0).trace)\n"
    )
    command = [sys.executable, "-c", program]
    tools = str(Path(one_by_one.__file__).parent)
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": tools}, capture_output=True, text=True, check=False)
    assert "in dies" in done.stdout, done.stderr


def test_each_measure_is_written_before_the_next_begins(stand_in, tmp_path, monkeypatch, capsys):
    target = tmp_path / "report.json"

    def looks():
        written = json.loads(target.read_text())
        yield Speed(",".join(row["route"] for row in written["speeds"]), "gather", 4096, [1e9])

    measures(monkeypatch, first, looks)
    _, found = report(tmp_path)
    assert [row["route"] for row in found["speeds"]] == ["first", "first"]


def test_sigterm_shows_what_there_is(stand_in, tmp_path, monkeypatch, capsys):
    def never():
        time.sleep(1.0)  # what Python does in the parent after a fork swallows exceptions
        os.kill(os.getppid(), signal.SIGTERM)
        threading.Event().wait()
        yield

    measures(monkeypatch, first, never, last)
    code, found = report(tmp_path)
    assert code == 128 + signal.SIGTERM
    assert [row["route"] for row in found["speeds"]] == ["first"]
    assert found["cut"] == "SIGTERM"
    printed = capsys.readouterr().out
    assert "Cut: SIGTERM" in printed and printed.count("| first") == 2, "as it ended, and at the end"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_route_of_which_nothing_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(gpu_measures, "SILENT_S", 0.2)

    class Never(Passed):
        def query(self) -> bool:
            return False

    with closing(gpu_measures.Memory(CpuLanes(), gpu_measures.BLOCKS_FIRST, 65536, 4 * 65536)) as memory:
        monkeypatch.setattr(CudaCopier, "gather", lambda *_: Never())
        with closing(memory.route(0)) as route, pytest.raises(TimeoutError, match="STORE: no job has ended"):
            route.store()


@pytest.mark.parametrize("what", ["route", "copies", "drive"])
def test_what_raises_unregisters_its_memory(monkeypatch, tmp_path, what):
    made = []
    arena = gpu_measures.Arena

    def noted(*args, **fields):
        made.append(arena(*args, **fields))
        return made[-1]

    monkeypatch.setattr(gpu_measures, "Arena", noted)
    if what == "route":
        monkeypatch.setattr(gpu_measures, "make_copier", Mock(side_effect=RuntimeError))
        with pytest.raises(RuntimeError):
            gpu_measures.Memory(CpuLanes(), gpu_measures.BLOCKS_FIRST, 65536, 4 * 65536)
    elif what == "copies":
        monkeypatch.setattr(gpu_measures, "make_copier", Mock(side_effect=RuntimeError))
        with pytest.raises(RuntimeError):
            gpu_measures.measure_copies(CpuLanes(), gpu_measures.BLOCKS_FIRST, 65536, 4 * 65536, ONCE)
    else:
        with pytest.raises(OSError, match="No such file"):
            gpu_measures.drive_route(CpuLanes(), tmp_path / "none", PosixDevice, 65536, 4)
    assert made and all(each._memory is None for each in made)


def test_rounds_end_with_the_time_and_one_is_always_made(monkeypatch):
    now_s = iter([0.0, 1.0, 2.0, 3.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(now_s))
    assert list(Pace(9, 3.0).rounds()) == [0, 1, 2]
    monkeypatch.undo()
    assert next(iter(Pace(3, 0.0).rounds())) == 0 and len(list(Pace(3, 1e9).rounds())) == 3


def test_the_file_is_made_as_small_as_the_drive_is_slow(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_measures, "speed_of", lambda *_: 20e6)
    assert gpu_measures.fitting_bytes(tmp_path, 65536, 1 << 30) == 40_000_000
    assert gpu_measures.fitting_bytes(tmp_path, 65536, 1 << 20) == 1 << 20
    monkeypatch.setattr(gpu_measures, "speed_of", lambda *_: 20e9)
    assert gpu_measures.fitting_bytes(tmp_path, 65536, 1 << 30) == 1 << 30


def test_the_first_directory_with_the_kernels_queue_is_taken(tmp_path, monkeypatch):
    served, other = tmp_path / "served", tmp_path / "other"
    for each in (served, other):
        each.mkdir()
    monkeypatch.setattr(gpu_report.aio, "serves", lambda fd: "served" in os.readlink(f"/proc/self/fd/{fd}"))
    assert gpu_report.choose_directory([tmp_path / "none", other, served]) == served
    monkeypatch.setattr(gpu_report.aio, "serves", lambda fd: False)
    assert gpu_report.choose_directory([tmp_path / "none", other, served]) == other
    with pytest.raises(OSError, match=r"no file can be made in .*none"):
        gpu_report.choose_directory([tmp_path / "none"])


# -- the tests of tests/gpu ------------------------------------------------------------------------

SOME_TESTS = """
import time, pytest
pytestmark = pytest.mark.gpu
def test_good(): pass
def test_bad(): assert 1 == 2, "not the same"
def test_left(): pytest.skip("no drive")
@pytest.fixture
def pinned(): raise RuntimeError("pinning was refused")
def test_fixture(pinned): pass
def test_hangs(): time.sleep(600 if HANGS else 0)
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_what_tests_say_is_kept_whole_and_failures_are_printed(stand_in, tmp_path, monkeypatch, capsys, hangs):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_some.py").write_text(f"HANGS = {hangs}\n{SOME_TESTS}")
    command = [*gpu_report.tests_command(tmp_path / "base")[:-1], "tests", "--rootdir", str(tmp_path)]
    monkeypatch.setattr(gpu_report, "tests_command", lambda base: command)
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    output = tmp_path / "said.txt"

    class Impatient(subprocess.Popen):
        """The time is over once the last test has begun."""

        def wait(self, timeout=None):
            if timeout is None or not hangs:
                return super().wait(timeout)
            while "test_hangs" not in output.read_text():
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Impatient)
    found = gpu_report.run_tests(tmp_path, output, WAIT_S)
    assert (found["failed"], found["error"], found["skipped"]) == (1, 1, 1)
    assert found["passed"] == (1 if hangs else 2)
    assert found["code"] == 1
    assert found["unended"] == ["tests/test_some.py::test_hangs"] * hangs
    assert "pinning was refused" in output.read_text() or hangs
    gpu_report.show_tests(gpu_report.Console(width=200), found)
    printed = capsys.readouterr().out
    assert "FAILED tests/test_some.py::test_bad" in printed and "ERROR tests/test_some.py::test_fixture" in printed
    assert ("the tests did not end" in printed) == hangs


def test_children_are_ended(monkeypatch):
    """Also where what runs them is told to end while it waits."""

    def keep(found):
        raise KeyboardInterrupt(found)

    def hangs():
        yield os.getpid()
        threading.Event().wait()

    with pytest.raises(KeyboardInterrupt) as told:
        one_by_one.run_apart(hangs, keep, WAIT_S)
    with pytest.raises(ProcessLookupError):
        os.kill(told.value.args[0], 0)


# -- verdicts --------------------------------------------------------------------------------------


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
            speed(gpu_report.PYTHON_MODEL, what, 4096, of)
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
        (f"{gpu_report.PYTHON_MODEL}, beside loads", "2.5%", True),
        (f"{gpu_report.PYTHON_MODEL}, beside stores", "4.0%", False),
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
