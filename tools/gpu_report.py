# SPDX-License-Identifier: Apache-2.0
"""All that only a GPU machine can show, in one go: the GPU's tests, how fast bytes get to its
blocks and back, and what that costs the model.

Run it with nothing but kvdisk's packages and torch installed; vLLM is not needed, and kvdisk is
taken from this checkout::

    python tools/gpu_report.py --dir /nvme/somewhere --json report.json

It is of use wherever it is cut: what matters most comes first, each measure runs in a process of
its own with a limit, and is written as JSON and printed when it has ended; SIGTERM has it print
what there is. At the end it prints tables and a verdict per goal for docs/measurements/gpu.md, in
``--minutes``, the tests included. Without a GPU it says so and ends with 2; with failed tests, or
wrong bytes, it ends with 1. The directory should be on the drive that kvdisk shall use; what is
written there (``--file-bytes``) is removed. ``--host`` needs no GPU: it measures stores and loads
between blocks in host memory and slots there or on the drive, beside a plain copy and the drive
alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # kvdisk need not be installed

from gpu_measures import (  # noqa: E402
    ALONE,
    BESIDE_LOADS,
    BESIDE_PINNING,
    BESIDE_STORES,
    BLOCKS_FIRST,
    COPIES,
    DRIVE,
    LARGE_CACHE_BLOCK_BYTES,
    LARGE_CACHE_BYTES,
    LARGE_COPY,
    LAYERS_FIRST,
    MIB,
    MLA,
    MLA_BYTES,
    MODEL,
    MOVES,
    PINNING_MODEL,
    POSIX,
    PYTHON_MODEL,
    SHAPES,
    STRAIGHT,
    THREADS,
    Memory,
    Pace,
    Speed,
    large_cache,
    measure_beside,
    measure_both,
    measure_drive,
    measure_large_cache,
    measure_memory,
    measure_pinning,
    measure_plain,
    measure_rows,
    memory_name,
)
from machine import Machine  # noqa: E402
from one_by_one import Failure, run_apart, run_here  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from kvdisk.device import aio  # noqa: E402
from kvdisk.device.gds import gds_unavailable  # noqa: E402

if TYPE_CHECKING:
    from kvdisk.worker.copier import CudaLanes as Lanes

NO_GPU = "gpu_report: there is no CUDA GPU here (torch finds none), so there is nothing to report."
BLOCK_BYTES = (2 * MIB, 256 << 10, 64 << 10, 8 * MIB)
DIRECTORIES = (Path(), Path("/nvme"), Path("/var/tmp"), Path("/tmp"), Path("/dev/shm"))  # noqa: S108
DESCRIBE_S, TESTS_S, TEST_S, MEASURE_S, LEAST_S = 60.0, 150.0, 60, 60.0, 5.0
GOAL_BYTES, LEAST, MOST_LOSS, UNTOUCHED_BYTES = 256 << 10, 0.9, 0.03, 64 * MIB


class CutError(BaseException):
    """The report was told to end."""


@dataclass
class Verdict:
    """Whether a goal was met. ``met``: None: not measured."""

    goal: str
    line: str
    found: str
    met: bool | None


@dataclass
class Report:
    """What is printed, and written as JSON. ``took_s``: all of it; ``taken_bytes``: of the first
    GPU's memory, by a rank on the second one; -1: not known, ``second`` says why; ``cut``: what
    ended the report before its end."""

    machine: dict[str, str]
    tests: dict[str, Any] = field(default_factory=dict)
    gds: str = ""
    speeds: list[Speed] = field(default_factory=list)
    taken_bytes: int = -1
    second: str = "there is one GPU"
    verdicts: list[Verdict] = field(default_factory=list)
    took_s: float = 0.0
    cut: str = ""


class Measure(NamedTuple):
    """One of what is measured. ``size``: of its blocks; ``act`` yields speeds."""

    name: str
    size: int
    act: Callable[[], Iterable[Speed]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- the machine and the tests --------------------------------------------------------------------


def choose_directory(candidates: Sequence[Path]) -> Path:
    """Return the first directory on whose drive the kernel's queue serves files, else the first
    that takes direct files, else the first that takes any. Raises OSError."""
    ranked: dict[int, Path] = {}
    for directory in candidates:
        for rank, flags in ((1, os.O_DIRECT), (2, 0)):
            with suppress(OSError):
                fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
                try:
                    ranked.setdefault(0 if aio.serves(fd) else rank, directory.resolve())
                finally:
                    os.close(fd)
                break
    if not ranked:
        raise OSError(f"no file can be made in {', '.join(map(str, candidates))}")
    return ranked[min(ranked)]


def drive_queue_words() -> str:
    """Return what submits to the drive."""
    try:
        aio.library()
    except OSError as error:
        return f"Python threads ({error.strerror})"
    return "a thread of C, where the file system allows it"


def describe_machine(directory: Path) -> dict[str, str]:
    """Return what this runs on."""
    import torch

    found = {"machine": Machine.here(directory).sentence, "torch": torch.__version__}
    found |= {"directory": str(directory), "drive queue": drive_queue_words()}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {"gpu": gpu.name, "gpu_bytes": str(gpu.total_memory), "cuda": str(torch.version.cuda)}
        found |= {"gpus": str(torch.cuda.device_count())}
    return found


def describe_gpu(directory: Path) -> Iterator[tuple[dict[str, str], str] | None]:
    """Yield the machine, and why there is no GPUDirect; None where torch finds no GPU."""
    try:
        make_lanes()
    except (ImportError, AssertionError, RuntimeError):  # torch is absent, built without CUDA, or finds no GPU
        yield None
        return
    yield describe_machine(directory), gds_unavailable() or ""


def make_lanes() -> Lanes:
    from kvdisk.worker.copier import CudaLanes

    return CudaLanes()


def tests_command(base: Path) -> list[str]:
    """Return what runs tests/gpu: it names each test as it goes, and what failed at the end."""
    # Tracebacks as Python prints them: pytest's own are long, and take longer.
    command = [sys.executable, "-m", "pytest", "--tb=native"]
    command += ["-o", "addopts=", "-p", "no:cacheprovider", "-m", "gpu", "-v", "-rfEs"]
    if find_spec("pytest_timeout") is not None:
        command += ["--timeout", str(TEST_S)]
    return [*command, "-o", f"faulthandler_timeout={TEST_S * 2 // 3}", "--basetemp", str(base), "tests/gpu"]


def run_tests(directory: Path, output: Path, limit_s: float) -> dict[str, Any]:
    """Run tests/gpu, on files of the directory; return counts, and the lines of what failed.

    ``output``: where all that pytest says goes. A run that takes too long is killed, and what it
    had said counts.
    """
    with tempfile.TemporaryDirectory(dir=directory) as base, output.open("w") as file:
        command, environment = tests_command(Path(base) / "tests"), {**os.environ, "PYTHONUNBUFFERED": "1"}
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code, why = child.wait(limit_s), ""
        except subprocess.TimeoutExpired:
            code, why = 1, f"the tests did not end in {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return {"code": code, "why": why, "output": str(output), **read_tests(output.read_text(errors="replace"))}


def read_tests(said: str) -> dict[str, Any]:
    """Return counts and failures from what ``pytest -v`` has said, whole or cut."""
    lines = re.findall(r"^(tests/\S+?::.*?)(?: (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*)?$", said, re.MULTILINE)
    found = {"passed": "PASSED", "failed": "FAILED", "error": "ERROR", "skipped": "SKIPPED"}
    counts = {name: sum(what == word for _, what in lines) for name, word in found.items()}
    summary = re.findall(r"^(?:FAILED|ERROR) \S.*$", said, re.MULTILINE)
    failures = summary or [f"{what} {test}" for test, what in lines if what in {"FAILED", "ERROR"}]
    unended = [test.strip() for test, what in lines if not what]
    return {**counts, "failures": failures, "unended": unended, "last_lines": said.splitlines()[-15:]}


# -- the other GPU ---------------------------------------------------------------------------------


def child_command() -> list[str]:
    """Return what runs a rank on the second GPU: it says so, and waits for a line."""
    return [sys.executable, str(Path(__file__).resolve()), "--rank-on-second"]


def be_second_rank() -> int:
    """Store and load on the second GPU as a rank does, and stay until told to end."""
    import torch

    torch.cuda.set_device(1)  # as vLLM does, on the model's thread alone
    with closing(Memory(make_lanes(), LAYERS_FIRST, MIB, 64 * MIB)) as memory, closing(memory.route(2)) as route:
        route.check()
        print("moved", flush=True)
        sys.stdin.readline()
    return 0


def free_bytes_of_first() -> int:
    """Return what the first GPU has left."""
    import torch

    return int(torch.cuda.mem_get_info(0)[0])


def taken_by_second() -> int:
    """Return how much memory of the first GPU a rank on the second takes; -1 with one GPU. Raises
    RuntimeError where the rank failed."""
    import torch

    if torch.cuda.device_count() < 2:
        return -1
    before = free_bytes_of_first()
    with subprocess.Popen(child_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        moved = child.stdout.readline().strip()
        taken = before - free_bytes_of_first()
        child.communicate("\n")
    if moved != "moved" or child.returncode:
        raise RuntimeError("the rank on the second GPU failed")
    return max(0, taken)


# -- verdicts --------------------------------------------------------------------------------------


def judge(report: Report) -> list[Verdict]:
    """Return whether each goal was met, line by line."""
    known = {(speed.route, speed.what, speed.block_bytes): speed.median for speed in report.speeds if speed.samples}
    limits = {what: speed for (route, what, _), speed in known.items() if route == LARGE_COPY}
    found: list[Verdict] = []

    def ratio(goal: str, line: str, share: float, of: float) -> None:
        found.append(Verdict(goal, line, f"{share / of:.2f}", share / of >= LEAST))

    goal = f"copies, and moves from memory, at least {LEAST} of one large copy"
    judged = ("copy, ", *(memory_name(shape, THREADS[-1]) for shape in (LAYERS_FIRST, BLOCKS_FIRST)))
    for (route, what, size), speed in known.items():
        way = {"store": "gather", "load": "scatter"}.get(what, what)
        if size >= GOAL_BYTES and way in limits and route.startswith(judged):
            ratio(goal, f"{size >> 10} KiB, {route}, {what}", speed, limits[way])
    goal = f"drive to GPU at least {LEAST} of the drive"
    for (route, what, size), speed in known.items():
        if route == DRIVE and what == "load" and size >= GOAL_BYTES:
            ways = {name: known[name, what, size] for name in (POSIX, STRAIGHT) if (name, what, size) in known}
            if ways:
                best = max(ways, key=lambda name: ways[name])
                ratio(goal, f"{size >> 10} KiB, {best}", ways[best], speed)
    goal = f"a model's step beside loses at most {MOST_LOSS:.0%}"
    for (route, what, size), speed in known.items():
        if route in {MODEL, PYTHON_MODEL, PINNING_MODEL} and what != ALONE and (route, ALONE, size) in known:
            loss = 1 - speed / known[route, ALONE, size]
            found.append(Verdict(goal, f"{route}, {what}", f"{loss:.1%}", loss <= MOST_LOSS))
    goal = "a rank on the second GPU takes nothing of the first"
    if report.taken_bytes < 0:
        found.append(Verdict(goal, "memory of the first GPU", report.second, None))
    else:
        taken = f"{report.taken_bytes / MIB:.0f} MiB"
        found.append(Verdict(goal, "memory of the first GPU", taken, report.taken_bytes < UNTOUCHED_BYTES))
    missing = [speed for speed in report.speeds if speed.why]
    return found + [
        Verdict("all was measured", f"{each.block_bytes >> 10} KiB, {each.route}", each.why, None) for each in missing
    ]


# -- what is printed ---------------------------------------------------------------------------


def show_tests(console: Console, tests: dict[str, Any]) -> None:
    """Print how many tests there were, and each that failed."""
    counts = [f"{tests[what]} {what}" for what in ("passed", "failed", "error", "skipped") if tests.get(what)]
    console.print(f"\nTests: {', '.join(counts) or 'none ran'}. {tests.get('why', '')}".rstrip())
    for line in [*tests.get("failures", ()), *(f"not ended: {test}" for test in tests.get("unended", ()))]:
        console.print(f"- {line}")


def show_speeds(console: Console, speeds: Sequence[Speed]) -> None:
    """Print speeds as Markdown tables; and where what failed did, below."""
    models = {
        speed.route: None for speed in speeds if speed.what in {ALONE, BESIDE_LOADS, BESIDE_STORES, BESIDE_PINNING}
    }
    by_route = {(speed.block_bytes, speed.route, speed.what): speed for speed in speeds if speed.route not in models}
    copies = {speed.route for speed in speeds if speed.what in COPIES}
    for whats, routes in ((COPIES, copies), (MOVES, {route for _, route, _ in by_route} - copies)):
        table = Table("block", "route", *(f"{what} GB/s" for what in whats), box=box.MARKDOWN)
        for size, route in dict.fromkeys(key[:2] for key in by_route if key[1] in routes):
            cells = [by_route[key].words for what in whats if (key := (size, route, what)) in by_route]
            table.add_row(f"{size >> 10} KiB", route, *cells)
        if table.row_count:
            console.print(table)
    for route in models:
        steps = [
            f"{speed.what} {speed.words if speed.why else f'{speed.median:.1f}'}"
            for speed in speeds
            if speed.route == route
        ]
        console.print(f"Steps a second, {route}: {', '.join(steps)}.\n")
    for speed in speeds:
        if speed.trace:
            say(f"{speed.block_bytes >> 10} KiB, {speed.route}: {speed.why}\n{speed.trace}")


def show(report: Report) -> None:
    """Print the report as Markdown, for docs/measurements/gpu.md."""
    console = Console(width=200, markup=False, highlight=False)
    console.print("GPU:", ", ".join(f"{name} {value}" for name, value in report.machine.items()))
    show_tests(console, report.tests)
    console.print(f"All in {report.took_s:.0f} s.{f' Cut: {report.cut}.' if report.cut else ''}")
    if report.gds:
        console.print(f"Not here: gds: {report.gds}")
    show_speeds(console, report.speeds)
    if report.verdicts:
        table = Table("goal", "line", "found", "verdict", box=box.MARKDOWN)
        words = {True: "met", False: "missed", None: "not measured"}
        for verdict in report.verdicts:
            table.add_row(verdict.goal, verdict.line, verdict.found, words[verdict.met])
        console.print(table)


# -- one measure after the other ---------------------------------------------------------------


def work_of(options: Any, gds: str) -> Iterator[Measure]:
    """Yield what is measured, what matters most first. ``act`` runs in a process of its own, and
    is the first there to touch the GPU."""
    moved, arena = options.copy_bytes, options.arena_bytes

    def on_lanes(measure: Callable[..., Iterable[Speed]], *given: Any) -> Callable[[], Iterable[Speed]]:
        pace = Pace(options.repetitions, MEASURE_S / 3)
        return lambda: measure(make_lanes(), *given, pace)

    def of_size(size: int) -> Iterator[Measure]:
        for shape in SHAPES:
            yield Measure(f"copy, {shape.name}", size, on_lanes(measure_both, shape, size, moved))
        for shape, threads in ((BLOCKS_FIRST, THREADS), (LAYERS_FIRST, THREADS[-1:])):
            yield Measure(f"memory, {shape.name}", size, on_lanes(measure_memory, shape, size, arena, threads))

    def of_drive(size: int) -> Measure:
        return Measure(POSIX, size, on_lanes(measure_drive, options.dir, size, options.file_bytes, gds))

    first, rest = options.sizes[:2], options.sizes[2:]
    yield Measure(LARGE_COPY, 0, on_lanes(measure_plain, moved))
    for size in first[:1]:
        yield from of_size(size)
    yield Measure(MODEL, options.side, on_lanes(measure_beside, arena, options.side, options.step_s))
    for size in first[1:]:
        yield from of_size(size)
    for size in first:
        yield of_drive(size)
    for shape in SHAPES:
        name = f"copy, {large_cache(shape, options.cache_bytes).name}"
        act = on_lanes(measure_large_cache, shape, moved, options.cache_bytes)
        yield Measure(name, LARGE_CACHE_BLOCK_BYTES, act)
    yield Measure("rows", 0, on_lanes(measure_rows, options.cache_bytes))
    yield Measure(PINNING_MODEL, options.side, on_lanes(measure_pinning, arena, options.side))
    yield Measure(f"copy, {MLA.name}", MLA_BYTES, on_lanes(measure_both, MLA, MLA_BYTES, moved))
    for size in rest:
        yield from of_size(size)
        yield of_drive(size)


def work_of_host(options: Any) -> Iterator[Measure]:
    """Yield what can be measured without a GPU."""
    pace = Pace(options.repetitions, 1e9)
    yield Measure(LARGE_COPY, 0, partial(measure_plain, None, options.copy_bytes, pace))
    for size in options.sizes:
        for shape in (LAYERS_FIRST, BLOCKS_FIRST):
            act = partial(measure_memory, None, shape, size, options.arena_bytes, (0, *THREADS), pace)
            yield Measure(f"memory, {shape.name}", size, act)
        yield Measure(POSIX, size, partial(measure_drive, None, options.dir, size, options.file_bytes, "no GPU", pace))


class Run:
    """A report that grows: what it has is written as JSON, and printed, after each measure."""

    def __init__(self, report: Report, options: Any) -> None:
        self.report = report
        self._json = options.json
        self._console = Console(width=200, markup=False, highlight=False)
        self._began_s = time.monotonic()
        self._end_s: float = self._began_s + 60 * options.minutes

    @property
    def left_s(self) -> float:
        """How much of the time is left."""
        return float(self._end_s - time.monotonic())

    def write(self) -> None:
        """Write what there is as JSON, whole: a file that is there already stays until then."""
        self.report.verdicts = judge(self.report)
        self.report.took_s = time.monotonic() - self._began_s
        if self._json is not None:
            beside = self._json.with_name(self._json.name + ".new")
            beside.write_text(json.dumps(asdict(self.report), indent=1) + "\n")
            beside.replace(self._json)

    def test(self, directory: Path, output: Path) -> None:
        """Run the tests, for half of the time at most."""
        say(f"the tests of tests/gpu; what they say: {output}")
        try:
            self.report.tests = run_tests(directory, output, min(TESTS_S, max(LEAST_S, self.left_s / 2)))
        except CutError:
            self.report.tests = read_tests(output.read_text(errors="replace"))
            raise
        self.write()
        show_tests(self._console, self.report.tests)

    def measure(self, measure: Measure, *, apart: bool) -> None:
        """Run one of the measures, if there is time, and keep what it finds until it fails."""
        if apart and self.left_s < LEAST_S:
            self._note(measure, Failure("no time was left", ""))
            self.write()
            return
        say(f"{measure.name}, {measure.size >> 10} KiB")
        before, speeds = len(self.report.speeds), self.report.speeds
        limit_s = min(MEASURE_S, self.left_s)
        failure = run_apart(measure.act, speeds.append, limit_s) if apart else run_here(measure.act, speeds.append)
        if failure is not None:
            self._note(measure, failure)
        self.write()
        show_speeds(self._console, speeds[before:])

    def ask_second(self) -> None:
        """Ask what a rank on the second GPU takes of the first one's memory."""

        def taken() -> Iterator[int]:
            yield taken_by_second()

        found: list[int] = []
        if self.left_s < LEAST_S:
            self.report.second = "no time was left"
            return
        failure = run_apart(taken, found.append, min(MEASURE_S, self.left_s))
        if failure is not None:
            self.report.second = failure.why
        self.report.taken_bytes = found[0] if found else -1

    def _note(self, measure: Measure, failure: Failure) -> None:
        speed = Speed(measure.name, MOVES[0], measure.size, why=failure.why, trace=failure.trace)
        self.report.speeds.append(speed)


def make_report(run: Run, options: Any) -> None:
    """Test and measure all, one after the other, in the time there is."""
    if not options.no_tests:
        beside = options.json if options.json is not None else Path("gpu_report")
        run.test(options.dir, beside.with_suffix(".tests.txt").resolve())
    for measure in work_of(options, run.report.gds):
        run.measure(measure, apart=True)
    run.ask_second()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument(
        "--dir", type=Path, nargs="+", default=DIRECTORIES, help="on the drive to measure, or several to choose from"
    )
    parser.add_argument("--json", type=Path, help="where the same goes as JSON; what the tests say goes beside it")
    parser.add_argument("--sizes", type=int, nargs="+", default=BLOCK_BYTES, help="of blocks, in bytes; in order")
    parser.add_argument("--file-bytes", type=int, default=1 << 30, help="of the file of each route, at most")
    parser.add_argument("--copy-bytes", type=int, default=1 << 30, help="moved by each copy")
    parser.add_argument("--arena-bytes", type=int, default=2 << 30, help="of the memory that routes go to and from")
    parser.add_argument("--cache-bytes", type=int, default=LARGE_CACHE_BYTES, help="of the GPU's blocks, once")
    parser.add_argument("--side", type=int, default=4096, help="of the matrices of the model's step")
    parser.add_argument("--step-s", type=float, default=1.0, help="for each sample of that")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=6.0, help="that all takes at most")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--host", action="store_true", help="measure without a GPU: its blocks are in host memory")
    parser.add_argument("--rank-on-second", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        options.dir = choose_directory(options.dir)
    except OSError as error:
        parser.error(str(error))
    for size in options.sizes:
        if size <= 0 or size % (LAYERS_FIRST.layers * 8):
            parser.error(f"a size must be a multiple of {LAYERS_FIRST.layers * 8}: {size}")
    return options


def cut(number: int, _frame: object) -> None:
    """End the report where it is."""
    signal.signal(number, signal.SIG_IGN)
    raise CutError(signal.Signals(number).name)


def start(options: Any) -> Run | None:
    """Describe the machine; None: there is no GPU."""
    if options.host:
        return Run(Report(describe_machine(options.dir)), options)
    with suppress(ImportError):
        import torch  # noqa: F401 - once, for all processes that fork from this one

    found: list[Any] = []
    failure = run_apart(partial(describe_gpu, options.dir), found.append, DESCRIBE_S)
    if failure is not None:
        say(f"the GPU could not be asked: {failure.why}\n{failure.trace}")
    if not found or found[0] is None:
        return None
    machine, gds = found[0]
    return Run(Report(machine, gds=gds), options)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.rank_on_second:
        return be_second_rank()
    before = {number: signal.signal(number, cut) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        run = start(options)
        if run is None:
            print(NO_GPU)
            return 2
        return finish(run, options)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finish(run: Run, options: Any) -> int:
    """Measure all, and show it; return the exit code."""
    report = run.report
    try:
        if options.host:
            for measure in work_of_host(options):
                run.measure(measure, apart=False)
        else:
            make_report(run, options)
    except CutError as error:
        report.cut = str(error)
    run.write()
    show(report)
    if report.cut:
        return 128 + signal.Signals[report.cut].value
    wrong = any("other bytes" in speed.why for speed in report.speeds)
    return 1 if report.tests.get("code", 0) or wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
