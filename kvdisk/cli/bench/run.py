# SPDX-License-Identifier: Apache-2.0
"""One run of ``kvdisk bench``: what is compared is measured in turn, round by round, on one file."""

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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvdisk.cli.bench import mover
from kvdisk.cli.bench.cases import Case, Layout, Part, Result, Sample, Settings, Unmeasured
from kvdisk.cli.bench.drive import DriveRun, auto_depth, bytes_in_flight, try_device
from kvdisk.cli.bench.machine import Machine, describe
from kvdisk.cli.wording import size
from kvdisk.device.base import Buffer, Device
from kvdisk.device.gds import GdsDevice, gds_unavailable
from kvdisk.device.pair import PairDevice
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import MAKERS, ProbeReport, nameless_file, probe
from kvdisk.errors import ConfigError, DeviceError, KvdiskError
from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, round_up
from kvdisk.worker.arena import Arena

if TYPE_CHECKING:
    from kvdisk.worker.copier import Lanes

JSON_VERSION = 2
LEFT_FREE_BYTES = 1 << 30
"""What a run leaves free on the file system, or it does not begin."""
MOST_MOVER_BYTES = 512 << 20
"""Of one measurement through the mover: all its blocks lie in memory."""
NO_TORCH = "torch is not installed: nothing is measured through the mover."
NOT_DIRECT = "the file system refuses O_DIRECT: these are figures of the system's memory, not of a drive."
_WRITE_BYTES = 8 << 20
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

    ``skipped``: a line for each thing that is not measured. ``straight_to_gpu``: what would move
    straight between drive and GPU. ``gpu``: whether the mover's blocks were on a GPU.
    """

    machine: Machine
    settings: Settings
    json_version: int = JSON_VERSION
    started_s: int = field(default_factory=lambda: int(time.time()))
    gpu: bool = False
    skipped: list[str] = field(default_factory=list)
    probes: list[ProbeReport] = field(default_factory=list)
    straight_to_gpu: str = ""
    results: list[Result] = field(default_factory=list)


def measure(settings: Settings, watch: Watch) -> Run:
    """Measure all that was asked for; ``skipped`` says what could not be. Waits for the drive.

    Raises ConfigError where there is too little room or no permission, DeviceError where the drive fails.
    """
    run = Run(describe(settings.directory), settings)
    with ExitStack() as stack:
        memory = _memory(stack, settings)
        fd = stack.enter_context(_scratch_file(settings, run, memory, watch))
        stack.enter_context(_settled_heap())
        if Part.DRIVE in settings.parts:
            _measure_drive(run, fd, memory, watch)
        if {Part.MOVER, Part.MEMORY} & set(settings.parts):
            _measure_mover(run, fd, watch)
    return run


@contextmanager
def _scratch_file(settings: Settings, run: Run, memory: Buffer, watch: Watch) -> Iterator[int]:
    """Make the file to measure on, and probe the drive where that is wanted. The file has no name, so nothing is left.

    From here on Ctrl-C ends the process at once: an exception in the middle of a device's call
    would lose track of what is in flight.
    """
    directory, total_bytes = settings.directory, round_up(settings.total_bytes, ALIGNMENT)
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes - total_bytes < LEFT_FREE_BYTES:
        raise ConfigError(
            f"{directory} has {size(free_bytes)} free; this run needs {size(total_bytes)} and leaves"
            f" {size(LEFT_FREE_BYTES)} free. Give it less with --total, or another directory."
        )
    with ExitStack() as stack:
        try:
            private = tempfile.TemporaryDirectory(prefix=".kvdisk-bench-", dir=directory)
        except OSError as error:
            raise ConfigError(f"cannot write in {directory}: {error.strerror}.") from None
        with private:
            if Part.PROBE in settings.parts:
                watch("what a start would choose")
                _probe(run, Path(private.name))
            watch("making the file")
            try:
                fd, direct = stack.enter_context(nameless_file(Path(private.name), total_bytes))
                _overwrite(fd, total_bytes, memory)
            except OSError as error:
                raise DeviceError(error.errno or errno.EIO, "making the file that is measured on") from error
        if not direct:
            run.skipped.append(NOT_DIRECT)
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        stack.callback(signal.signal, signal.SIGINT, before)
        yield fd


def _overwrite(fd: int, total_bytes: int, content: Buffer) -> None:
    """Write all of the file, since slots that have been in use are measured."""
    at = 0
    while at < total_bytes:
        at += os.pwrite(fd, content[: min(_WRITE_BYTES, total_bytes - at)], at)
    os.fsync(fd)


def _memory(stack: ExitStack, settings: Settings) -> Buffer:
    """Return memory for the devices' buffers, filled with bytes that no drive compresses."""
    sizes = [(settings.depth or auto_depth(size), size) for size in settings.block_sizes]
    needed = max(_WRITE_BYTES, *(bytes_in_flight(depth, size) for depth, size in sizes))
    arena = Arena([_WRITE_BYTES], [-(-needed // _WRITE_BYTES)], pin=False)
    stack.callback(arena.close)
    mover.fill(arena.memory)
    return arena.memory


@contextmanager
def _settled_heap() -> Iterator[None]:
    """Keep Python's collector off what is there already, as vLLM does when an engine has started."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# -- the drive -------------------------------------------------------------------------------------


def _probe(run: Run, directory: Path) -> None:
    """Find out what ``device: auto`` would choose for each block size, and what would go straight to a GPU."""
    slot_sizes = [HEADER_BYTES + round_up(size, ALIGNMENT) for size in run.settings.block_sizes]
    run.probes = [probe(directory, slot_bytes) for slot_bytes in slot_sizes]
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
    from kvdisk.worker.direct_choice import choose_direct

    counts = [_STAGING_SLOTS] * len(slot_sizes)
    choice = choose_direct(
        directory, slot_sizes, counts, lanes, lambda: PairDevice(MAKERS["posix"](), GdsDevice()), always=False
    )
    if choice.direct is not None:
        choice.direct.staging.close()
    return choice.line


def _measure_drive(run: Run, fd: int, memory: Buffer, watch: Watch) -> None:
    with ExitStack() as stack:
        drives = []
        for device in _devices(run):
            drives.append(DriveRun(device, fd, memory))
            stack.callback(drives[-1].close)
        for case in drive_cases(run.settings):
            contenders = [Contender(drive.device.name, partial(drive.move, case)) for drive in drives]
            run.results += measure_in_turn(case, contenders, run.settings.rounds, run.skipped, watch)


def drive_cases(settings: Settings) -> list[Case]:
    """Return the cases of a device alone: every size with every flow and layout."""
    cases = []
    for layout in settings.layouts:
        for flow in settings.flows:
            for block_bytes in settings.block_sizes:
                count = settings.total_bytes // block_bytes
                depth = min(settings.depth or auto_depth(block_bytes), count)
                cases.append(Case(Part.DRIVE, flow, block_bytes, depth, layout, count * block_bytes))
    return cases


# -- the mover -------------------------------------------------------------------------------------


def _measure_mover(run: Run, fd: int, watch: Watch) -> None:
    if not mover.has_torch():
        run.skipped.append(NO_TORCH)
        return
    settings = run.settings
    lanes, _ = mover.find_gpu()
    run.gpu = lanes is not None
    for part in (Part.MOVER, Part.MEMORY):
        for flow in settings.flows if part in settings.parts else ():
            for block_bytes in settings.block_sizes:
                count = mover.blocks_of(min(settings.total_bytes, MOST_MOVER_BYTES), block_bytes)
                if not count:
                    run.skipped.append(f"{part.value}: --total is too small for a block of {block_bytes} bytes.")
                    continue
                case = Case(part, flow, block_bytes, count, Layout.CONTIGUOUS, count * block_bytes)
                _measure_mover_case(run, case, fd, lanes, watch)


def _measure_mover_case(run: Run, case: Case, fd: int, lanes: Lanes | None, watch: Watch) -> None:
    devices = [PosixDevice()] if case.part is Part.MEMORY else _devices(run)
    contenders = []
    with ExitStack() as stack:
        for device in devices:
            try:
                made = mover.MoverRun(device, fd, case, lanes)
            except (KvdiskError, OSError) as error:
                run.skipped.append(f"{case.part.value}: {case.words}: {device.name}: {error}")
                device.close()
                continue
            stack.callback(made.close)
            contenders.append(Contender("CPU tier" if case.part is Part.MEMORY else device.name, made.move))
        run.results += measure_in_turn(case, contenders, run.settings.rounds, run.skipped, watch)


def _devices(run: Run) -> list[Device]:
    """Return new devices, the caller's to close. Raises Unmeasured where there is none."""
    found, missing = [], []
    for name in run.settings.devices:
        device, why = try_device(name)
        if device is not None:
            found.append(device)
        else:
            missing.append(f"device {name} is left out: {why}")
    run.skipped += [line for line in missing if line not in run.skipped]
    if not found:
        raise Unmeasured("; ".join(missing))
    return found


# -- in turn ---------------------------------------------------------------------------------------


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
