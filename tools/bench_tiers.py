# SPDX-License-Identifier: Apache-2.0
"""kvdisk's device beside fio and vLLM's own way to a drive, in turn, on one drive: through the
kernel's queue and through threads, alone and beside a Python thread that never pauses.

    python tools/bench_tiers.py /nvme/somewhere

A ratio is the median of the rounds' ratios, so that drift of the drive cancels out. Figures of two
runs are not comparable. What is not installed is left out. With torch the mover's way to the drive
is measured beside the drive alone, too. At the end stands a verdict for each goal.

vLLM's way is a file for each block (``fs_io_C``). The C extension is loaded from its file, without
vLLM around it, and called as vLLM's tier for file systems does (``vllm/v1/kv_offload/tiering/fs``):
a list of paths and of buffers for each call, threads of Python, files opened with O_DIRECT, each
written under another name first. It is given more than it has in vLLM: directories exist already,
and the blocks of a measurement are dealt out evenly, one call for each thread.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from machine import Machine
from rich.console import Console
from rich.table import Table

from kvdisk.cli.bench import RUN_BYTES, move_all, shuffled
from kvdisk.cli.output import size
from kvdisk.config import parse_bytes
from kvdisk.device.base import Op
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import nameless_file
from kvdisk.errors import ConfigError
from kvdisk.worker.arena import Arena
from kvdisk.worker.runner import BATCH_BYTES, MOST_READS

THREADS = (1, 4, 8, 16)
"""Counts that vLLM's files are measured with. Its default is 16 for each direction."""
FOLDERS = 16
FIO_ENGINES = {
    "fio io_uring": ("--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"),
    "fio libaio": ("--ioengine=libaio",),
}
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""What the device has, too. Without them and registered buffers fio reads half as fast."""
FIO_BYTES = 512 << 20
"""fio moves at least so much: the start of its thread is in its time."""

OF_FIO, OF_VLLM = "fio", "vLLM"
QUEUE, THREADED, BUSY = "posix-aio", "posix-threads", "posix-aio, busy Python"
KIB, MIB = 1 << 10, 1 << 20
MOVER_BYTES = 512 << 20
"""Of the file of the mover's way."""

Seconds = Callable[[], float]
"""Moves all bytes of a case once, and returns how long that took."""


@dataclass(frozen=True)
class Case:
    """One thing to measure: blocks at shuffled places, each moved once."""

    op: Op
    block_bytes: int
    block_count: int

    @property
    def total_bytes(self) -> int:
        """Of one measurement."""
        return self.block_bytes * self.block_count

    @property
    def depth(self) -> int:
        """As many blocks as the mover has at the device at once, within reason."""
        return min(max(MOST_READS * BATCH_BYTES // self.block_bytes, 4), 256, self.block_count)

    @property
    def words(self) -> str:
        """The case in words."""
        return f"{self.op.value} {size(self.block_bytes).replace('.0 ', ' ')} x {self.depth}"


@dataclass(frozen=True)
class Goal:
    """How many times as fast as the best of ``peers`` a contender shall be, at least."""

    what: str
    sizes: tuple[int, ...]
    ops: tuple[Op, ...]
    contender: str
    peers: str
    least: float


BOTH = (Op.WRITE, Op.READ)
GOALS = (
    Goal("the queue, of fio", (256 * KIB, 2 * MIB, 8 * MIB), BOTH, QUEUE, OF_FIO, 0.97),
    Goal("the same beside a busy Python thread", (256 * KIB,), BOTH, BUSY, OF_FIO, 0.85),
    *(
        Goal("the queue, of vLLM's files", (size,), (op,), QUEUE, OF_VLLM, least)
        for op, leasts in ((Op.WRITE, (1.5, 2, 3)), (Op.READ, (1, 1.1, 1.5)))
        for size, least in zip((2 * MIB, 256 * KIB, 64 * KIB), leasts, strict=True)
    ),
    Goal("threads, of fio", (2 * MIB,), BOTH, THREADED, OF_FIO, 0.9),
)
MOVER_LEAST = 0.92
"""Through the mover, verified, of the drive alone."""


def run_device(case: Case, device: PosixDevice, fd: int, memory: memoryview) -> float:
    """Move a case's bytes as ``kvdisk bench`` does; return the seconds."""
    batches = shuffled(fd, memory[: case.total_bytes], case.block_bytes, max(RUN_BYTES, case.block_bytes))
    return case.total_bytes / move_all(device, case.op, batches)


@contextmanager
def busy_thread(*, wanted: bool) -> Iterator[None]:
    """Run Python code beside what is done meanwhile, as an engine's process may."""
    over = False

    def work() -> None:
        while not over:
            pass

    thread = threading.Thread(target=work)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        over = True
        if wanted:
            thread.join()


def device_contenders(case: Case, devices: Sequence[PosixDevice], fd: int, memory: memoryview) -> dict[str, Seconds]:
    """Return what moves the blocks once through each device, alone and beside a busy thread."""

    def run(device: PosixDevice, busy: bool) -> float:
        with busy_thread(wanted=busy):
            return run_device(case, device, fd, memory)

    return {
        f"{device.name}{', busy Python' * busy}": partial(run, device, busy)
        for busy in (False, True)
        for device in devices
    }


def run_fio(case: Case, engine: str, path: str) -> float:
    """Move a case's bytes with fio; return the seconds of one pass. Raises ConfigError."""
    passes = max(1, FIO_BYTES // case.total_bytes)
    command = [
        *("fio", "--name=limit", f"--filename={path}", "--direct=1", "--thread", "--fallocate=none"),
        *(f"--size={case.total_bytes}", f"--io_size={case.total_bytes * passes}", f"--bs={case.block_bytes}"),
        *(f"--rw=rand{case.op.value}", f"--iodepth={case.depth}", *FIO_ENGINES[engine]),
        *("--allow_file_create=0", "--scramble_buffers=0", "--gtod_reduce=1", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | HUGE_PAGES)
    start = done.stdout.find("{")  # notes come before it
    if done.returncode or start < 0:
        raise ConfigError(f"{engine}: {(done.stderr or done.stdout).strip()[:200]}")
    job = json.loads(done.stdout[start:])["jobs"][0]
    if job["read"]["io_bytes"] + job["write"]["io_bytes"] != case.total_bytes * passes:
        raise ConfigError(f"{engine} moved another number of bytes than was asked for")
    return float(max(job["read"]["runtime"], job["write"]["runtime"]) / 1000 / passes)


def load_extension() -> Any:
    """Return vLLM's ``fs_io_C``. Raises ConfigError where vLLM is not installed, or has none."""
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None else spec.submodule_search_locations or []
    path = next((str(path) for folder in folders for path in Path(folder).glob("fs_io_C*.so")), None)
    if path is None:
        raise ConfigError("vLLM's fs_io_C is not installed here: there is no peer to compare with.")
    loader = importlib.machinery.ExtensionFileLoader("fs_io_C", path)
    try:
        import torch  # noqa: F401 - it is linked with torch's libraries, and finds them when they are loaded

        found = importlib.util.spec_from_loader("fs_io_C", loader)
        assert found is not None
        loaded = importlib.util.module_from_spec(found)
        loader.exec_module(loaded)
    except ImportError as error:
        raise ConfigError(f"vLLM's fs_io_C cannot be loaded, so that there is no peer: {error}") from None
    return loaded


class VllmFiles:
    """vLLM's files of a case's blocks. ``directory``: not made yet.

    They are emptied when they were measured, and removed at the end of the run only: ext4 passes
    over inodes that were freed in the last minutes one by one, which would slow the next files
    down, and not in vLLM, which removes none. For the same reason they lie where no run before had
    its files: ext4 is asked to spread directories over the drive.
    """

    def __init__(self, extension: Any, case: Case, directory: Path, memory: memoryview, direct: bool) -> None:
        self._extension = extension
        self._case = case
        each = case.block_bytes
        self._views = [memory[at * each : (at + 1) * each] for at in range(case.block_count)]
        self._direct = direct
        self._directory = directory
        directory.mkdir()
        if chattr := shutil.which("chattr"):
            subprocess.run([chattr, "+T", directory], capture_output=True, check=False)  # not all file systems can
        self._paths: list[str] = []
        self._renew()

    def contenders(self, stack: ExitStack) -> dict[str, Seconds]:
        """Return what moves the blocks once, for each number of threads. They take space, once,
        until ``stack`` ends."""
        if self._case.op is Op.READ:
            self._store(THREADS[-1])
            stack.callback(self._empty)
        move = self._load if self._case.op is Op.READ else self._store_anew
        return {f"vLLM fs_io_C x {count}": partial(move, count) for count in THREADS}

    def _renew(self) -> None:
        """Name files that do not exist, in directories that do."""
        folders = [self._directory / secrets.token_hex(8) for _ in range(FOLDERS)]
        for folder in folders:
            folder.mkdir()
        self._paths = [str(folders[at % FOLDERS] / f"{at:064x}.bin") for at in range(self._case.block_count)]

    def _load(self, count: int) -> float:
        return self._run(count, lambda paths, views: self._extension.batch_load_block(paths, views, self._direct))

    def _store(self, count: int) -> float:
        """Write every file; what exists already would be left as it is."""
        store = self._extension.batch_store_block
        return self._run(
            count, lambda paths, views: store([f"{path}_1.tmp" for path in paths], paths, views, self._direct)
        )

    def _empty(self) -> None:
        """Give the files' space back, and wait until that is done."""
        for path in self._paths:
            if os.path.exists(path):
                os.truncate(path, 0)
        folder = os.open(self._directory, os.O_RDONLY)
        os.fsync(folder)  # what the file system has to do for that is not for the next one to wait for
        os.close(folder)

    def _store_anew(self, count: int) -> float:
        """Write every file under a new name, and give the space back."""
        try:
            return self._store(count)
        finally:
            self._empty()
            self._renew()

    def _run(self, count: int, call: Any) -> float:
        """Deal the blocks out to threads, which are there already, and return what their calls
        took."""
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda _: None, range(count)))
            began_s = time.perf_counter()
            tasks = [pool.submit(call, self._paths[at::count], self._views[at::count]) for at in range(count)]
            for task in tasks:
                task.result()
            return time.perf_counter() - began_s


def measure(contenders: dict[str, Seconds], rounds: int) -> dict[str, list[float]]:
    """Measure all once to warm up and once in each round; return the rounds' seconds."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        names = list(contenders)
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            seconds = contenders[name]()
            if turn:
                found[name].append(seconds)
    return found


def ratio(mine: list[float], other: list[float]) -> float:
    """Return how many times as fast as ``other``: the median over the rounds."""
    return statistics.median(two / one for one, two in zip(mine, other, strict=True))


def best_of(found: dict[str, list[float]], kind: str) -> list[float] | None:
    """Return the rounds of the fastest contender of a kind; None without any."""
    mine = [seconds for name, seconds in found.items() if name.startswith(kind)]
    return min(mine, key=statistics.median, default=None)


def judge(goal: Goal, results: dict[Case, dict[str, list[float]]]) -> list[tuple[str, str, str]]:
    """Return case, ratio and verdict for each case of a goal that was measured."""
    judged = []
    for case, found in results.items():
        peer = best_of(found, goal.peers)
        if peer is not None and case.block_bytes in goal.sizes and case.op in goal.ops:
            share = ratio(found[goal.contender], peer)
            judged.append((case.words, f"{share:.2f}", "met" if share >= goal.least else "missed"))
    return judged


def mover_rows(directory: Path, rounds: int) -> Iterator[tuple[str, str, str]]:
    """Measure the mover's way between blocks in host memory and the drive; yield case, ratio to
    the drive alone, and verdict. Raises ImportError without torch."""
    from gpu_measures import DRIVE, MOVES, POSIX, Pace, measure_drive

    print("through the mover", file=sys.stderr)
    found = measure_drive(None, directory, 2 * MIB, MOVER_BYTES, "no GPU", Pace(rounds, 1e9))
    if lost := [speed for speed in found if speed.why]:
        yield lost[0].route, lost[0].why, "not measured"
        return
    speeds = {(speed.route, speed.what): speed.samples for speed in found}
    for what in MOVES[:2]:
        pairs = zip(speeds[POSIX, what], speeds[DRIVE, what], strict=True)
        share = statistics.median(mine / alone for mine, alone in pairs)
        yield f"{what} 2 MiB", f"{share:.2f}", "met" if share >= MOVER_LEAST else "missed"


def add_rows(table: Table, case: Case, found: dict[str, list[float]]) -> None:
    table.add_row(case.words, style="italic")
    best = [best_of(found, kind) for kind in (OF_FIO, OF_VLLM)]
    for name, seconds in found.items():
        rates = [case.total_bytes / 1e6 / each for each in seconds]
        ratios = [f"{ratio(seconds, other):.2f}" if other else "" for other in best]
        spread = f"{min(rates):,.0f}-{max(rates):,.0f}"
        table.add_row(f"  {name}", f"{statistics.median(rates):,.0f}", spread, *ratios)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("dir", type=Path, help="on the drive to measure")
    parser.add_argument("--total", default="256MiB", help="bytes of one measurement, of the file, and of memory")
    parser.add_argument("--sizes", nargs="+", default=["64KiB", "256KiB", "2MiB", "8MiB"], help="of blocks")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    total_bytes = parse_bytes("--total", options.total)
    sizes = [parse_bytes("--sizes", text) for text in options.sizes]
    # Writes first: what was never written is not read from the drive.
    cases = [Case(op, each, total_bytes // each) for each in sizes for op in (Op.WRITE, Op.READ)]
    console = Console(highlight=False)
    console.print(Machine.here(options.dir).sentence)
    table = Table("", "MB/s", "lowest-highest", "of fio", "of vLLM")
    results: dict[Case, dict[str, list[float]]] = {}
    memory = Arena([RUN_BYTES], [total_bytes // RUN_BYTES], pin=False).memory  # with huge pages, as a worker's
    memory[:] = os.urandom(total_bytes)  # no drive compresses it
    with ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir)))
        fd, direct = stack.enter_context(nameless_file(private, total_bytes))
        devices, extension = [PosixDevice(), PosixDevice(kernel_queue=False)], None
        for device in devices:
            stack.callback(device.close)
            device.attach_file(fd)
        try:
            extension = load_extension()
        except ConfigError as error:
            console.print(str(error))
        has_fio = direct and shutil.which("fio") is not None
        if not has_fio:
            console.print("fio is not installed, or the file system refuses O_DIRECT: there is no limit")
        for number, case in enumerate(cases):
            print(case.words, file=sys.stderr)
            with ExitStack() as mine:
                contenders = device_contenders(case, devices, fd, memory)
                if has_fio:
                    path = f"/proc/{os.getpid()}/fd/{fd}"
                    contenders |= {engine: partial(run_fio, case, engine, path) for engine in FIO_ENGINES}
                if extension is not None:
                    files = VllmFiles(extension, case, private / str(number), memory, direct)
                    contenders |= files.contenders(mine)
                results[case] = measure(contenders, options.rounds)
                add_rows(table, case, results[case])
            table.add_section()
    console.print(table)
    verdicts = Table("what", "wanted", "case", "ratio", "verdict")
    for goal in GOALS:
        for row in judge(goal, results):
            verdicts.add_row(goal.what, f"{goal.least:g}", *row)
    try:
        for row in mover_rows(options.dir, options.rounds):
            verdicts.add_row("through the mover, of the drive alone", f"{MOVER_LEAST:g}", *row)
    except ImportError as error:
        console.print(f"the mover is left out: {error}")
    console.print(verdicts)
    console.print(Machine.here(options.dir).sentence)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
