# SPDX-License-Identifier: Apache-2.0
"""One run of ``kvdisk bench``: the drive as a start measures it, then the mover."""

from __future__ import annotations

import errno
import gc
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvdisk.cli.bench import mover
from kvdisk.cli.bench.cases import Case, Flow, Part, Result, Sample, Settings
from kvdisk.cli.bench.drive import DriveReport, measure_drive
from kvdisk.cli.bench.machine import Machine, describe
from kvdisk.cli.output import size
from kvdisk.device.gds import GdsDevice, gds_unavailable
from kvdisk.device.pair import PairDevice
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import nameless_file, probe
from kvdisk.errors import ConfigError, DeviceError, KvdiskError
from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, round_up

if TYPE_CHECKING:
    from kvdisk.worker.copier import Lanes

JSON_VERSION = 2
LEFT_FREE_BYTES = 1 << 30
"""What a run leaves free on the file system, or it does not begin."""
MOST_MOVER_BYTES = 512 << 20
"""Of one measurement through the mover: all its blocks lie in memory."""
NO_TORCH = "torch is not installed: nothing is measured through the mover."
NOT_DIRECT = "the file system refuses O_DIRECT: these are figures of the system's memory, not of a drive."
_STAGING_SLOTS = 4

Watch = Callable[[str], None]
"""Told what is measured now."""


class Contender(NamedTuple):
    """One of those that are measured in turn. ``move`` moves all bytes of the case once."""

    name: str
    move: Callable[[], None]


@dataclass
class Run:
    """What a run gave, as ``--json`` prints it. Do not compare figures of two runs.

    ``drive``: figures of each block size. ``chosen``: what a start would use, in words.
    ``straight_to_gpu``: what would move straight between drive and GPU. ``gpu``: whether the
    mover's blocks were on a GPU. ``skipped``: a line for each thing that is not measured.
    """

    machine: Machine
    settings: Settings
    json_version: int = JSON_VERSION
    started_s: int = field(default_factory=lambda: int(time.time()))
    drive: list[DriveReport] = field(default_factory=list)
    chosen: str = ""
    straight_to_gpu: str = ""
    gpu: bool = False
    results: list[Result] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def measure(settings: Settings, watch: Watch) -> Run:
    """Measure all that was asked for; ``skipped`` says what could not be. Waits for the drive.

    Raises ConfigError where there is no room or no permission, DeviceError where the drive fails.
    """
    run = Run(describe(settings.directory), settings)
    _check_room(settings)
    with ExitStack() as stack:
        with _private_directory(settings.directory) as private:
            if Part.DRIVE in settings.parts:
                watch("each device on the drive")
                _measure_drive(run, private)
            fd = _open_file(stack, run, private) if Part.MOVER in settings.parts else -1
        if {Part.MOVER, Part.MEMORY} & set(settings.parts):
            stack.enter_context(_ending_at_once())
            stack.enter_context(_settled_heap())
            _measure_mover(run, fd, watch)
    return run


def _check_room(settings: Settings) -> None:
    directory = settings.directory
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes - settings.total_bytes < LEFT_FREE_BYTES:
        raise ConfigError(
            f"{directory} has {size(free_bytes)} free; this run needs {size(settings.total_bytes)} and leaves"
            f" {size(LEFT_FREE_BYTES)} free. Give it less with --total, or another directory."
        )


@contextmanager
def _private_directory(directory: Path) -> Iterator[Path]:
    """Make a directory in which files without a name are opened, and remove it when they are."""
    try:
        private = tempfile.TemporaryDirectory(prefix=".kvdisk-bench-", dir=directory)
    except OSError as error:
        raise ConfigError(f"cannot write in {directory}: {error.strerror}.") from None
    with private:
        yield Path(private.name)


def _open_file(stack: ExitStack, run: Run, directory: Path) -> int:
    """Open the file for the mover's slots. It has no name, so nothing of it can be left."""
    try:
        file = nameless_file(directory, round_up(run.settings.total_bytes, ALIGNMENT))
        fd, direct = stack.enter_context(file)
    except OSError as error:
        raise DeviceError(error.errno or errno.EIO, "making the file that is measured on") from error
    if not direct:
        run.skipped.append(NOT_DIRECT)
    return fd


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process: an exception would lose what a device has in flight."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _settled_heap() -> Iterator[None]:
    """Keep Python's collector off what is there already, as vLLM does after its start."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# -- the drive -------------------------------------------------------------------------------------


def _measure_drive(run: Run, directory: Path) -> None:
    """Measure the drive, and say what a start would use, and what would go straight to a GPU."""
    slot_sizes = [HEADER_BYTES + round_up(size, ALIGNMENT) for size in run.settings.block_sizes]
    report = probe(directory)
    run.chosen = f"device: auto would use {report.name}: {report.why}"
    try:
        run.drive = [measure_drive(directory, slot_bytes) for slot_bytes in slot_sizes]
    except OSError as error:
        raise DeviceError(error.errno or errno.EIO, "the drive that is measured") from error
    run.straight_to_gpu = _straight_to_gpu(directory, sorted(set(slot_sizes)))


def _straight_to_gpu(directory: Path, slot_sizes: Sequence[int]) -> str:
    why = gds_unavailable()
    if why is None and not mover.has_torch():
        why = "torch is not installed"
    lanes = None
    if why is None:
        lanes, why = mover.find_gpu()
    if lanes is None:
        return f"nothing would go straight between drive and GPU: {why}"
    from kvdisk.worker.direct import choose_direct

    counts = [_STAGING_SLOTS] * len(slot_sizes)
    choice = choose_direct(
        directory, slot_sizes, counts, lanes, lambda: PairDevice(PosixDevice(), GdsDevice()), always=False
    )
    if choice.direct is not None:
        choice.direct.staging.close()
    return choice.line


# -- the mover -------------------------------------------------------------------------------------


def _measure_mover(run: Run, fd: int, watch: Watch) -> None:
    if not mover.has_torch():
        run.skipped.append(NO_TORCH)
        return
    settings = run.settings
    lanes, _ = mover.find_gpu()
    run.gpu = lanes is not None
    for part in (Part.MOVER, Part.MEMORY):
        for flow in Flow if part in settings.parts else ():
            for block_bytes in settings.block_sizes:
                count = mover.blocks_of(min(settings.total_bytes, MOST_MOVER_BYTES), block_bytes)
                if count:
                    _measure_case(run, Case(part, flow, block_bytes, count), fd, lanes, watch)
                else:
                    run.skipped.append(f"{part.value}: --total is too small for a block of {block_bytes} bytes.")


def _measure_case(run: Run, case: Case, fd: int, lanes: Lanes | None, watch: Watch) -> None:
    contenders = []
    with ExitStack() as stack:
        device = PosixDevice()
        try:
            made = mover.MoverRun(device, fd, case, lanes)
        except (KvdiskError, OSError) as error:
            run.skipped.append(f"{case.part.value}: {case.words}: {device.name}: {error}")
            device.close()
        else:
            stack.callback(made.close)
            contenders.append(Contender("CPU tier" if case.part is Part.MEMORY else device.name, made.move))
        run.results += measure_in_turn(case, contenders, run.settings.rounds, run.skipped, watch)


def measure_in_turn(
    case: Case, contenders: Sequence[Contender], rounds: int, skipped: list[str], watch: Watch
) -> list[Result]:
    """Measure every contender once to warm up and once in each round; who begins changes.

    One that fails is left out from there on, and ``skipped`` says why.
    """
    samples: dict[str, list[Sample]] = {one.name: [] for one in contenders}
    assert len(samples) == len(contenders), "contenders have different names"
    for turn in range(rounds + 1):
        start = turn % max(1, len(contenders))
        for contender in [*contenders[start:], *contenders[:start]]:
            if contender.name not in samples:
                continue
            watch(f"{case.part.value}: {case.words}, {contender.name}")
            try:
                sample = _timed(contender.move)
            except (KvdiskError, OSError) as error:
                del samples[contender.name]
                skipped.append(f"{case.part.value}: {case.words}: {contender.name}: {error}")
                continue
            if turn:
                samples[contender.name].append(sample)
    return [Result(case, name, mine) for name, mine in samples.items()]


def _timed(move: Callable[[], None]) -> Sample:
    began_cpu_s, began_s = time.process_time(), time.perf_counter()
    move()
    seconds = time.perf_counter() - began_s
    return Sample(seconds, time.process_time() - began_cpu_s)
