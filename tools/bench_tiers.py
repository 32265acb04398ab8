# SPDX-License-Identifier: Apache-2.0
"""kvdisk's devices beside fio and vLLM's own files (``fs_io_C``), in turn, on one drive.

    python tools/bench_tiers.py /nvme/somewhere

A ratio is the median of the rounds' ratios, so that drift of the drive cancels out. Figures of two
runs are not comparable. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from bench_peer import LANES, Case, Layout, VllmFiles
from rich.console import Console
from rich.table import Table

from kvdisk.cli.bench import Machine
from kvdisk.cli.output import parse_size
from kvdisk.device.base import Buffer, Device, Op, Transfer
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import nameless_file
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.geometry import ALIGNMENT, round_up
from kvdisk.worker.arena import Arena

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
        drives = [DriveRun(device, fd, arena.memory)]
        try:
            peer = VllmFiles()
        except ConfigError as error:
            console.print(str(error))
            peer = None
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
                contenders |= {drive.device.name: partial(timed, partial(drive.move, case)) for drive in drives}
                if peer is not None and case.layout is Layout.CONTIGUOUS:  # files have no order on the drive
                    contenders |= peer.contenders(case, private / str(number), arena.memory, direct, mine)
                add_rows(table, case, measure(contenders, options.rounds))
            table.add_section()
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
