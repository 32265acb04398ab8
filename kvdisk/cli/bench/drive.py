# SPDX-License-Identifier: Apache-2.0
"""How fast host memory and a drive are without the mover: blocks and runs of neighbours, read and written."""

from __future__ import annotations

import mmap
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from kvdisk.device.base import Buffer, Device, Op, Transfer
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import FILE_BYTES, nameless_file
from kvdisk.errors import DeviceError

RUN_BYTES = 8 << 20
"""What a worker moves at once of neighbouring slots."""
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Speed:
    """What a device reached. ``bytes_each``: of a transfer. ``run``: whether neighbours followed each other.

    ``samples``: bytes per second, one for each repetition.
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


def measure_drive(directory: Path, block_bytes: int, file_bytes: int = FILE_BYTES) -> DriveReport:
    """Move a file of ``directory`` that nobody sees in blocks and in runs. Raises DeviceError, OSError."""
    run_bytes = min(RUN_BYTES, file_bytes)
    block_bytes = min(block_bytes, run_bytes)
    memory = memoryview(mmap.mmap(-1, file_bytes))
    memory[:] = random.randbytes(4096) * (file_bytes // 4096)  # noqa: S311 - no secret
    with nameless_file(directory, file_bytes) as (fd, direct), closing(PosixDevice()) as device:
        report = DriveReport(block_bytes, run_bytes, direct)
        device.attach_memory(memory)
        device.attach_file(fd)
        for op in (Op.WRITE, Op.READ):
            for run in (False, True):
                size = run_bytes if run else block_bytes
                samples = [_sample(device, op, _batches(fd, memory, size, run_bytes)) for _ in range(ROUNDS)]
                report.speeds.append(Speed(device.name, op, run, size, tuple(samples)))
    return report


def _batches(fd: int, memory: Buffer, size: int, batch_bytes: int) -> list[list[Transfer]]:
    """Return transfers of ``size`` at shuffled places, in batches as a worker submits them."""
    places = list(range(0, len(memory) - size + 1, size))
    transfers = [
        Transfer(fd, place, (memory[at : at + size],))
        for at, place in zip(places, random.sample(places, len(places)), strict=True)
    ]
    most = max(1, batch_bytes // size)
    return [transfers[first : first + most] for first in range(0, len(transfers), most)]


def _sample(device: Device, op: Op, batches: Sequence[Sequence[Transfer]]) -> float:
    """Move all batches; return bytes per second. Raises DeviceError."""
    began_s = time.monotonic()
    for batch in batches:
        device.submit(op, batch)
    failed = [number for outcome in device.drain() for number in outcome.errors.values()]
    took_s = time.monotonic() - began_s
    if failed:
        raise DeviceError(failed[0], "the drive that is measured")
    return sum(transfer.buffers[0].nbytes for batch in batches for transfer in batch) / max(took_s, 1e-9)
