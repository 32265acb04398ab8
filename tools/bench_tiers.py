# SPDX-License-Identifier: Apache-2.0
"""kvdisk's devices beside fio and vLLM's own way to a drive, in turn, on one drive.

    python tools/bench_tiers.py /nvme/somewhere

A ratio is the median of the rounds' ratios, so that drift of the drive cancels out. Figures of two
runs are not comparable. What is not installed is left out.

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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvdisk.cli.bench import Machine
from kvdisk.cli.output import parse_size, size
from kvdisk.device.base import Buffer, Device, Op, Transfer
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import nameless_file
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.geometry import ALIGNMENT, round_up
from kvdisk.worker.arena import Arena
from kvdisk.worker.runner import MOST_READS, PART_BYTES

LANES = MOST_READS
"""Batches that the mover has at a device at once."""
THREADS = (1, 4, 8, 16)
"""Counts that vLLM's files are measured with. Its default is 16 for each direction."""
FOLDERS = 16


class Layout(Enum):
    """Where on the drive blocks lie that are moved one after the other."""

    CONTIGUOUS = "contiguous"
    SCATTERED = "scattered"


@dataclass(frozen=True)
class Case:
    """One thing to measure: so many blocks, each moved once, ``depth`` of them at a time."""

    op: Op
    layout: Layout
    block_bytes: int
    block_count: int

    @property
    def depth(self) -> int:
        """As many blocks as the mover has at the device at once, within reason."""
        return min(max(MOST_READS * PART_BYTES // self.block_bytes, 4), 256, self.block_count)

    @property
    def total_bytes(self) -> int:
        """Of one measurement."""
        return self.block_bytes * self.block_count

    @property
    def lane_blocks(self) -> int:
        """Blocks of a batch."""
        return -(-self.depth // min(LANES, self.depth))

    @property
    def bytes_in_flight(self) -> int:
        """Memory that the batches need at once."""
        return min(LANES, self.depth) * self.lane_blocks * self.block_bytes

    @property
    def words(self) -> str:
        """The case in words."""
        return f"{self.op.value} {size(self.block_bytes).replace('.0 ', ' ')} x {self.depth} {self.layout.value}"

    def order(self) -> list[int]:
        """Return the blocks in the order in which they are moved, the same in every run."""
        if self.layout is Layout.CONTIGUOUS:
            return list(range(self.block_count))
        return np.random.default_rng(1).permutation(self.block_count).tolist()


FIO_ENGINES = {
    "fio io_uring": ("--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"),
    "fio libaio": ("--ioengine=libaio",),
}
FIO_KINDS = {
    (Op.READ, Layout.CONTIGUOUS): "read",
    (Op.WRITE, Layout.CONTIGUOUS): "write",
    (Op.READ, Layout.SCATTERED): "randread",
    (Op.WRITE, Layout.SCATTERED): "randwrite",
}
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""What the devices have, too. Without them and registered buffers fio reads half as fast."""
FIO_BYTES = 512 << 20
"""fio moves at least so much: the start of its thread is in its time."""
WRITE_BYTES = 8 << 20

Seconds = Callable[[], float]
"""Moves all bytes of a case once, and returns how long that took."""


class DriveRun:
    """A device over a file. ``memory``, for the buffers, and ``fd`` stay the caller's."""

    def __init__(self, device: Device, fd: int, memory: Buffer) -> None:
        self.device = device
        self._fd = fd
        self._memory = memory
        device.attach_memory(memory)
        device.attach_file(fd)

    def move(self, case: Case) -> None:
        """Move every block of a case once. Raises DeviceError where a transfer failed."""
        device, order, most = self.device, case.order(), case.lane_blocks
        batches = (order[start : start + most] for start in range(0, len(order), most))
        free = list(range(min(LANES, case.depth)))
        lane_of: dict[int, int] = {}
        while True:
            while free and (blocks := next(batches, None)) is not None:
                lane = free.pop()
                lane_of[device.submit(case.op, self._transfers(case, lane * most, blocks))] = lane
            if not lane_of:
                return
            for outcome in device.poll(1.0):
                if outcome.errors:
                    device.drain()
                    raise DeviceError(next(iter(outcome.errors.values())), f"device {device.name}")
                free.append(lane_of.pop(outcome.ticket))

    def _transfers(self, case: Case, first: int, blocks: list[int]) -> list[Transfer]:
        """Return the transfers of a batch whose buffers begin at block ``first`` of the memory."""
        size, memory, fd = case.block_bytes, self._memory, self._fd
        if case.layout is Layout.CONTIGUOUS:  # neighbours are one transfer, as in the mover
            return [Transfer(fd, blocks[0] * size, (memory[first * size : (first + len(blocks)) * size],))]
        return [
            Transfer(fd, block * size, (memory[at * size : (at + 1) * size],))
            for at, block in enumerate(blocks, start=first)
        ]


def run_fio(case: Case, engine: str, path: str) -> float:
    """Move a case's bytes with fio; return the seconds of one pass. Raises ConfigError."""
    passes = max(1, FIO_BYTES // case.total_bytes)
    command = [
        *("fio", "--name=limit", f"--filename={path}", "--direct=1", "--thread", "--fallocate=none"),
        *(f"--size={case.total_bytes}", f"--io_size={case.total_bytes * passes}", f"--bs={case.block_bytes}"),
        *(f"--rw={FIO_KINDS[case.op, case.layout]}", f"--iodepth={case.depth}", *FIO_ENGINES[engine]),
        *("--allow_file_create=0", "--scramble_buffers=0", "--gtod_reduce=1", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | HUGE_PAGES)
    start = done.stdout.find("{")  # notes come before it
    if done.returncode or start < 0:
        raise ConfigError(f"{engine}: {(done.stderr or done.stdout).strip()[:200]}")
    job = json.loads(done.stdout[start:])["jobs"][0]
    if job["read"]["io_bytes"] + job["write"]["io_bytes"] != case.total_bytes * passes:
        raise ConfigError(f"{engine} moved another number of bytes than was asked for")
    return max(job["read"]["runtime"], job["write"]["runtime"]) / 1000 / passes


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

        loaded = importlib.util.module_from_spec(importlib.util.spec_from_loader("fs_io_C", loader))
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
        self._memory = memory
        self._direct = direct
        self._directory = directory
        self._order = case.order()
        directory.mkdir()
        if chattr := shutil.which("chattr"):
            subprocess.run([chattr, "+T", directory], capture_output=True, check=False)  # not all file systems can
        self._paths: list[str] = []
        self._renew()

    def contenders(self, stack: ExitStack) -> dict[str, Seconds]:
        """Return what moves the blocks once, for each number of threads. They take space, once,
        until ``stack`` ends."""
        if self._case.op is Op.READ:
            self.store(THREADS[-1])
            stack.callback(self.empty)
        move = self.load if self._case.op is Op.READ else self.store_anew
        return {f"vLLM fs_io_C x {count}": partial(move, count) for count in THREADS}

    def _renew(self) -> None:
        """Name files that do not exist, in directories that do."""
        folders = [self._directory / secrets.token_hex(8) for _ in range(FOLDERS)]
        for folder in folders:
            folder.mkdir()
        self._paths = [str(folders[block % FOLDERS] / f"{block:064x}.bin") for block in self._order]

    def load(self, count: int) -> float:
        """Read every file."""
        return self._run(count, lambda paths, views: self._extension.batch_load_block(paths, views, self._direct))

    def store(self, count: int) -> float:
        """Write every file; what exists already would be left as it is."""
        store = self._extension.batch_store_block
        return self._run(
            count, lambda paths, views: store([f"{path}_1.tmp" for path in paths], paths, views, self._direct)
        )

    def empty(self) -> None:
        """Give the files' space back, and wait until that is done."""
        for path in self._paths:
            if os.path.exists(path):
                os.truncate(path, 0)
        folder = os.open(self._directory, os.O_RDONLY)
        os.fsync(folder)  # what the file system has to do for that is not for the next one to wait for
        os.close(folder)

    def store_anew(self, count: int) -> float:
        """Write every file under a new name, and give the space back."""
        try:
            return self.store(count)
        finally:
            self.empty()
            self._renew()

    def _run(self, count: int, call: Any) -> float:
        """Deal the blocks out to threads, which are there already, and return what their calls
        took."""
        tasks = [(self._paths[at::count], self._views(at, count)) for at in range(count)]
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda _: None, range(count)))

            began_s = time.perf_counter()
            for future in [pool.submit(call, *task) for task in tasks if task[0]]:
                future.result()
            return time.perf_counter() - began_s

    def _views(self, thread: int, count: int) -> list[memoryview]:
        """Return the buffers of a thread's blocks: it has its own part of the memory, and goes
        round in it."""
        size = self._case.block_bytes
        slots = max(1, self._memory.nbytes // size // count)
        first = thread * slots if (thread + 1) * slots * size <= self._memory.nbytes else 0
        mine = [self._memory[(first + at) * size : (first + at + 1) * size] for at in range(slots)]
        return [mine[at % slots] for at in range(len(self._paths[thread::count]))]


def timed(move: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    move()
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


def add_rows(table: Table, case: Case, found: dict[str, list[float]]) -> None:
    table.add_row(case.words, style="italic")
    best = {}
    for kind in ("fio", "vLLM"):
        mine = [seconds for name, seconds in found.items() if name.startswith(kind)]
        best[kind] = min(mine, key=statistics.median, default=None)
    for name, seconds in found.items():
        rates = [case.total_bytes / 1e6 / each for each in seconds]
        ratios = [f"{ratio(seconds, other):.2f}" if other else "" for other in best.values()]
        spread = f"{min(rates):,.0f}-{max(rates):,.0f}"
        table.add_row(f"  {name}", f"{statistics.median(rates):,.0f}", spread, *ratios)


def cases(total_bytes: int, sizes: list[int]) -> list[Case]:
    return [Case(op, layout, size, total_bytes // size) for layout in Layout for size in sizes for op in Op]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("dir", type=Path, help="on the drive to measure")
    parser.add_argument("--total", default="256M", help="bytes of one measurement, and of the file")
    parser.add_argument("--sizes", nargs="+", default=["64K", "256K", "2M", "8M"], help="of blocks")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    total_bytes = parse_size("--total", options.total)
    sizes = [parse_size("--sizes", size) for size in options.sizes]
    wanted = cases(total_bytes, sizes)
    in_flight = max(WRITE_BYTES, *(case.bytes_in_flight for case in wanted))
    console = Console(highlight=False)
    console.print(Machine.here(options.dir).sentence)
    table = Table("", "MB/s", "lowest-highest", "of fio", "of vLLM")
    with ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir)))
        arena = Arena([WRITE_BYTES], [-(-in_flight // WRITE_BYTES)], pin=False)
        stack.callback(arena.close)
        filling = np.random.default_rng(2)  # no drive compresses it
        for start in range(0, arena.memory.nbytes, WRITE_BYTES):
            arena.memory[start : start + WRITE_BYTES] = filling.bytes(WRITE_BYTES)
        fd, direct = stack.enter_context(nameless_file(private, round_up(total_bytes, ALIGNMENT)))
        for at in range(0, total_bytes, WRITE_BYTES):
            os.pwrite(fd, arena.memory[: min(WRITE_BYTES, total_bytes - at)], at)
        device = PosixDevice()
        stack.callback(device.close)
        drive, extension = DriveRun(device, fd, arena.memory), None
        try:
            extension = load_extension()
        except ConfigError as error:
            console.print(str(error))
        has_fio = direct and shutil.which("fio") is not None
        if not has_fio:
            console.print("fio is not installed, or the file system refuses O_DIRECT: there is no limit")
        for number, case in enumerate(wanted):
            print(case.words, file=sys.stderr)
            with ExitStack() as mine:
                contenders: dict[str, Seconds] = {}
                if has_fio:
                    path = f"/proc/{os.getpid()}/fd/{fd}"
                    contenders |= {engine: partial(run_fio, case, engine, path) for engine in FIO_ENGINES}
                contenders[device.name] = partial(timed, partial(drive.move, case))
                if extension is not None and case.layout is Layout.CONTIGUOUS:  # files have no order on the drive
                    files = VllmFiles(extension, case, private / str(number), arena.memory, direct)
                    contenders |= files.contenders(mine)
                add_rows(table, case, measure(contenders, options.rounds))
            table.add_section()
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
