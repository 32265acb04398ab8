# SPDX-License-Identifier: Apache-2.0
"""``kvdisk bench``: how fast a drive is, and which device an engine would choose there.

The mover is not in it. ``Bench`` is what ``--json`` prints; its shape changes only with
``json_version``.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from kvdisk import __version__
from kvdisk.cli.output import AsJson, Exit, print_json, refusal, report_console, size
from kvdisk.config import parse_bytes
from kvdisk.device.base import Buffer, Device, Op, Transfer
from kvdisk.device.gds import GdsDevice, gds_unavailable
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import FILE_BYTES, Silence, nameless_file, probe
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.geometry import ALIGNMENT, HEADER_BYTES

JSON_VERSION = 3
LEFT_FREE_BYTES = 1 << 30
"""What a run leaves free on the file system, or it does not begin."""
SILENT_S = 30.0
"""A drive of which nothing is heard for so long is measured no further."""
RUN_BYTES = 8 << 20
"""What a worker moves at once of neighbouring slots."""
ROUNDS = 3
_STAGING_SLOTS = 4
_given_up: list[object] = []
"""A device that has not ended what it holds, and its memory: the drive may still come to it."""


@dataclass(frozen=True)
class Machine:
    """This machine, and the drive of a directory. None: not known."""

    processor: str | None
    cores: int
    memory_bytes: int
    file_system: str | None
    drive: str | None
    kernel: str
    python: str
    kvdisk: str
    load: float

    @classmethod
    def here(cls, directory: Path) -> Machine:
        """Describe this machine and the drive that ``directory`` is on."""
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return cls(
            processor=next(iter(names), None),
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            file_system=_file_system(directory),
            drive=_drive(os.stat(directory).st_dev),
            kernel=platform.release(),
            python=platform.python_version(),
            kvdisk=__version__,
            load=os.getloadavg()[0],
        )

    @property
    def sentence(self) -> str:
        """The description in one line."""
        return (
            f"{self.cores} cores ({self.processor or 'unknown'}), {size(self.memory_bytes)} memory,"
            f" {self.file_system or 'unknown file system'} on {self.drive or 'an unknown drive'},"
            f" Linux {self.kernel}, Python {self.python}, load {self.load:.1f}"
        )


@dataclass(frozen=True, slots=True)
class Speed:
    """What a device reached. ``bytes_each``: of a transfer. ``run``: whether that is a run of
    neighbours. ``samples``: bytes per second, of each round.
    """

    device: str
    op: Op
    run: bool
    bytes_each: int
    samples: tuple[float, ...]

    @property
    def bytes_per_s(self) -> float:
        """The median."""
        return statistics.median(self.samples)


@dataclass(slots=True)
class DriveReport:
    """Figures for one size of slots. ``direct``: whether the file was opened with O_DIRECT."""

    block_bytes: int
    run_bytes: int
    direct: bool
    speeds: list[Speed] = field(default_factory=list)


@dataclass
class Bench:
    """What a run gave. Do not compare figures of two runs.

    ``drive``: figures of each block size. ``chosen``: what a start would use, in words.
    ``straight_to_gpu``: what would move straight between drive and GPU.
    """

    machine: Machine
    drive: list[DriveReport]
    chosen: str
    straight_to_gpu: str
    json_version: int = JSON_VERSION


def bench(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory on the drive to measure.")],
    block_sizes: Annotated[
        list[str],
        typer.Option("--block-size", "-b", metavar="SIZE", help="Bytes of a block; may be given several times."),
    ] = ["64KiB", "256KiB", "1MiB", "2MiB", "8MiB"],  # noqa: B006 - typer copies it
    as_json: AsJson = False,
) -> None:
    """Measure how fast the drive under DIR is, and say which device an engine would choose there.

    The figures are medians. Figures of two runs are not
    comparable: a drive's speed changes from one to the next by more than
    what is looked for. The file that is measured on has no name; nothing is
    left of it.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  measured

    [cyan]1[/cyan]  the drive failed

    [cyan]2[/cyan]  nothing was measured: wrong usage, no room, no permission
    """
    try:
        sizes = [parse_bytes("--block-size", text) for text in block_sizes]
        found = measure(directory, sizes)
    except ConfigError as error:
        raise refusal(str(error)) from None
    except DeviceError as error:
        raise refusal(f"the drive failed: {error}", Exit.WRONG) from None
    if as_json:
        print_json(found)
    else:
        _print(found)


def measure(directory: Path, block_sizes: Sequence[int]) -> Bench:
    """Measure the drive. Raises ConfigError: no room, no permission; DeviceError: the drive
    failed."""
    for block_bytes in block_sizes:
        if block_bytes % ALIGNMENT or not 2 * ALIGNMENT <= block_bytes <= 1 << 30:
            raise ConfigError(f"--block-size must be a multiple of 4 KiB, 8 KiB to 1 GiB, not {block_bytes} bytes.")
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory.")
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes - FILE_BYTES < LEFT_FREE_BYTES:
        raise ConfigError(
            f"{directory} has {size(free_bytes)} free; this run needs {size(FILE_BYTES)} and leaves"
            f" {size(LEFT_FREE_BYTES)} free."
        )
    slot_sizes = [HEADER_BYTES + block_bytes for block_bytes in block_sizes]
    try:
        with tempfile.TemporaryDirectory(prefix=".kvdisk-bench-", dir=directory) as private:
            found = probe(Path(private))
            straight = _straight_to_gpu(Path(private), sorted(set(slot_sizes)))
    except OSError as error:
        raise ConfigError(f"cannot write in {directory}: {error.strerror}.") from None
    try:
        drive = [measure_drive(directory, slot_bytes) for slot_bytes in slot_sizes]
    except Silence:
        raise DeviceError(errno.ETIMEDOUT, f"nothing was heard of it for {SILENT_S:g} s") from None
    except OSError as error:
        raise DeviceError(error.errno or errno.EIO, "the drive that is measured") from error
    return Bench(Machine.here(directory), drive, f"device: auto would use {found.name}: {found.why}", straight)


def measure_drive(directory: Path, block_bytes: int) -> DriveReport:
    """Move a file of ``directory`` that nobody sees in blocks and in runs. Raises DeviceError,
    Silence, OSError."""
    block_bytes = min(block_bytes, RUN_BYTES)
    memory = memoryview(mmap.mmap(-1, FILE_BYTES))
    memory[:] = random.randbytes(4096) * (FILE_BYTES // 4096)  # noqa: S311 - no secret
    with nameless_file(directory, FILE_BYTES) as (fd, direct), ExitStack() as stack:
        report, device = DriveReport(block_bytes, RUN_BYTES, direct), stack.enter_context(closing(PosixDevice()))
        device.attach_memory(memory)
        device.attach_file(fd)
        try:
            for op in (Op.WRITE, Op.READ):
                for run, size in ((False, block_bytes), (True, RUN_BYTES)):
                    samples = [move_all(device, op, shuffled(fd, memory, size, RUN_BYTES)) for _ in range(ROUNDS)]
                    report.speeds.append(Speed(device.name, op, run, size, tuple(samples)))
        except Silence:
            _given_up.append((stack.pop_all(), memory))
            raise
    return report


def shuffled(fd: int, memory: Buffer, size: int, batch_bytes: int) -> list[list[Transfer]]:
    """Return transfers of ``size`` at shuffled places, in batches as a worker submits them."""
    places = list(range(0, len(memory) - size + 1, size))
    transfers = [
        Transfer(fd, place, (memory[at : at + size],))
        for at, place in zip(places, random.sample(places, len(places)), strict=True)
    ]
    most = max(1, batch_bytes // size)
    return [transfers[first : first + most] for first in range(0, len(transfers), most)]


def move_all(device: Device, op: Op, batches: Sequence[Sequence[Transfer]]) -> float:
    """Move all batches; return bytes per second. Raises DeviceError, Silence."""
    began_s = time.monotonic()
    waiting = {device.submit(op, batch) for batch in batches}
    failed: list[int] = []
    while waiting:
        ended = device.poll(SILENT_S)
        if not ended:
            raise Silence
        for outcome in ended:
            waiting.discard(outcome.ticket)
            failed += outcome.errors.values()
    took_s = time.monotonic() - began_s
    if failed:
        raise DeviceError(failed[0], "the drive that is measured")
    return sum(transfer.buffers[0].nbytes for batch in batches for transfer in batch) / max(took_s, 1e-9)


def _straight_to_gpu(directory: Path, slot_sizes: Sequence[int]) -> str:
    why = gds_unavailable()
    if why is None:
        try:
            from kvdisk.worker.copier import CudaLanes
            from kvdisk.worker.direct import choose_direct

            lanes = CudaLanes()
        except (ImportError, AssertionError, RuntimeError) as error:  # no torch, none with CUDA, or no GPU
            why = str(error)
    if why is not None:
        return f"nothing would go straight between drive and GPU: {why}"
    counts = [_STAGING_SLOTS] * len(slot_sizes)
    choice = choose_direct(directory, slot_sizes, counts, lanes, GdsDevice, always=False)
    if choice.direct is not None:
        choice.direct.staging.close()
    return choice.line


def _file_system(directory: Path) -> str | None:
    """Return a file system's type: that of the longest mount point above a directory."""
    types: dict[Path, str] = {}
    with suppress(OSError, IndexError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, behind = line.partition(" - ")
            types[Path(before.split()[4].replace("\\040", " "))] = behind.split()[0]
    resolved = Path(os.path.realpath(directory))
    return next((types[mount] for mount in (resolved, *resolved.parents) if mount in types), None)


def _drive(number: int) -> str | None:
    """Return the model, or the name, of the drive with a device number, if it is one."""
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not link.exists():
        return None
    path = link.resolve()
    if not (path / "queue").exists():  # a partition; the drive is the directory above
        path = path.parent
    with suppress(OSError):
        return (path / "device" / "model").read_text().strip() or path.name
    return path.name


# -- for people --------------------------------------------------------------------------------


def _print(found: Bench) -> None:
    console = report_console()
    console.print(found.machine.sentence)
    console.print("\nMemory and NVMe, the device alone, MB/s")
    table = Table("slots of", "device", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("read", "write", "runs read", "runs written"):
        table.add_column(name, justify="right")
    for report in found.drive:
        speeds = sorted(report.speeds, key=lambda speed: (speed.run, speed.op is Op.WRITE))
        rates = (f"{speed.bytes_per_s / 1e6:,.0f}" for speed in speeds)
        table.add_row(size(report.block_bytes).replace(".0 ", " "), speeds[0].device, *rates)
    console.print(table, found.chosen, found.straight_to_gpu, sep="\n")
