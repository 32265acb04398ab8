# SPDX-License-Identifier: Apache-2.0
"""Tries a drive at start, through the kernel's queue or threads, and compares what is written and
read there.

The file has no name. Where a file system gives each file one, the next probe removes what a killed
one left. The file exists for a moment only, and the cap does not count it.
"""

from __future__ import annotations

import logging
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvdisk.device.base import Buffer, Device, Op, Transfer
from kvdisk.device.drives import list_directories, prepare_directory, write_in_place
from kvdisk.device.paths import NO_ROOM, allocate
from kvdisk.device.posix import PosixDevice
from kvdisk.device.segment import make_direct
from kvdisk.errors import KvdiskError
from kvdisk.geometry import ALIGNMENT

logger = logging.getLogger("kvdisk")

FILE_BYTES = 32 << 20
"""Length of the file on which speeds are compared."""
_TRIAL_BYTES = 64 * ALIGNMENT
_PREFIX = ".probe-"
GIVE_UP_S = 5.0

_given_up: list[object] = []
"""Devices that gave no answer, and their memory, kept for ever: the drive may still write to it."""


class DeviceTimeout(Exception):
    """A device has not ended a batch in time. What it holds is given up, and it is not closed."""


class ProbeReport(NamedTuple):
    """What a probe found. ``name``: the name of the device that serves. ``kernel_queue``: whether
    the kernel's queue may be used. ``direct``: whether files there are opened with O_DIRECT; None
    where that is not known. ``why``: what the probe saw."""

    directory: Path
    name: str
    kernel_queue: bool
    direct: bool | None
    why: str

    @property
    def line(self) -> str:
        """Which device serves the drive, and why, in one line."""
        how = {True: "with O_DIRECT", False: "through the page cache, without O_DIRECT", None: "not tried"}
        return f"kvdisk reads and writes {self.directory} with the device {self.name} ({how[self.direct]}): {self.why}"


def choose_device(wanted: str, directories: Sequence[Path]) -> PosixDevice:
    """Return a new device for host memory. The caller closes it.

    ``wanted``: one of ``config.DEVICES``. ``auto`` and ``gds`` try the first directory and log one
    line, as a warning where the kernel's queue or O_DIRECT cannot be used. Without directories
    nothing is tried: the device will move nothing.
    """
    if not directories or wanted == "posix":
        return PosixDevice()
    report = probe(directories[0])
    is_best = report.kernel_queue and report.direct
    logger.log(logging.DEBUG if is_best else logging.WARNING, "%s", report.line)
    return PosixDevice(kernel_queue=report.kernel_queue)


def probe(
    directory: Path,
    make: Callable[[bool], Device] = lambda queue: PosixDevice(kernel_queue=queue),
    *,
    of_store: bool = True,
) -> ProbeReport:
    """Write and read a small file as a worker does, and compare the bytes. Where the kernel's queue
    moves wrong bytes, the report says that threads are to serve.

    ``directory``: a store's, made where it is missing; or any that exists, with ``of_store`` False.
    ``make``: makes the device, with the kernel's queue or without. Waits a few seconds at most.
    Raises nothing that a drive can cause.
    """
    name, direct = "posix", None
    if of_store:
        (directory,) = list_directories(directory)
    try:
        if of_store:
            prepare_directory(directory)
        try:
            with nameless_file(directory, _TRIAL_BYTES) as (fd, direct):
                device = make(True)
                name, wrong = _try(device, fd)
                if not wrong:
                    why = getattr(device, "without_queue", "") or "what it wrote and read there was right"
                    return ProbeReport(directory, name, True, direct, why)
        except DeviceTimeout:
            if device.name == "posix-threads":
                raise
            name, wrong = device.name, f"it gave no answer for {GIVE_UP_S:.0f} s"
        with nameless_file(directory, _TRIAL_BYTES) as (fd, direct):
            threads, still = _try(make(False), fd)
            return ProbeReport(directory, threads, False, direct, still or f"not {name}: {wrong}")
    except DeviceTimeout:
        why = f"the drive has not answered for {GIVE_UP_S:.0f} s"
    except (OSError, KvdiskError) as error:
        full = getattr(error, "errno", None) in NO_ROOM
        why = "the drive is full" if full else f"nothing could be tried there: {error}".rstrip(".")
    return ProbeReport(directory, name, True, direct, why)


@contextmanager
def nameless_file(directory: Path, file_bytes: int) -> Iterator[tuple[int, bool]]:
    """Open a file of ``file_bytes`` allocated bytes that nobody else sees; yield its descriptor,
    and whether it is direct.

    It stays open where ``DeviceTimeout`` ends the body. Raises OSError.
    """
    for left in directory.glob(_PREFIX + "*"):
        with suppress(OSError):
            left.unlink()
    with tempfile.TemporaryFile(dir=directory, prefix=_PREFIX, buffering=0) as file:
        fd = os.dup(file.fileno())
    try:
        write_in_place(fd)  # as segments are
        allocate(fd, file_bytes)
        with memoryview(mmap.mmap(-1, ALIGNMENT)) as block:
            direct = make_direct(fd, lambda: os.pwritev(fd, [block], 0))
        yield fd, direct
    except DeviceTimeout:
        fd = -1  # what has not ended may still use the number
        raise
    finally:
        if fd >= 0:
            os.close(fd)


@contextmanager
def on_trial(device: Device, fd: int, *memories: Buffer, owners: object = None) -> Iterator[None]:
    """Attach memory and a file to a device, and close the device at the end. Where
    ``DeviceTimeout`` ends the body, device, memory and ``owners`` (of the memory) are kept for
    ever."""
    try:
        for memory in memories:
            device.attach_memory(memory)
        device.attach_file(fd)
        yield
    except DeviceTimeout:
        _given_up.append((device, memories, owners))
        raise
    except BaseException:
        device.close()
        raise
    device.close()


def _try(device: Device, fd: int) -> tuple[str, str]:
    """Return the device's name once it has the file, and what is wrong with what it moves ("" for
    nothing). Raises DeviceTimeout."""
    memory = memoryview(mmap.mmap(-1, _TRIAL_BYTES))
    with on_trial(device, fd, memory):
        return device.name, _check(device, fd, memory)


def _check(device: Device, fd: int, memory: memoryview) -> str:
    """Return what is wrong with what a device writes and reads; "" where nothing is."""
    size = len(memory) // 2
    written, read = memory[:size], memory[size:]
    written[:] = data = random.randbytes(size)  # noqa: S311 - no secret
    # Backwards in memory, so that the order of buffers counts.
    parts = [slice(start, start + ALIGNMENT) for start in range(size - ALIGNMENT, -1, -ALIGNMENT)]
    batch = [Transfer(fd, size, tuple(written[part] for part in parts))]
    if errors := await_batches(device, [device.submit(Op.WRITE, batch)]):
        return f"a write that was tried failed: {os.strerror(errors[0])}"
    single = [Transfer(fd, size + place * ALIGNMENT, (read[part],)) for place, part in enumerate(parts)]
    if errors := await_batches(device, [device.submit(Op.READ, single)]):
        return f"a read that was tried failed: {os.strerror(next(iter(errors.values())))}"
    seen = mmap.mmap(-1, size)
    if os.preadv(fd, [seen], size) != size or seen[:] != b"".join(data[part] for part in parts):
        return "what was written is not what is on the drive"
    return "" if read == data else "what was read is not what is on the drive"


def await_batches(device: Device, tickets: Collection[int]) -> dict[int, int]:
    """Wait until these batches, the only ones under way, have ended; return the errors of all.

    Raises DeviceTimeout where one has not ended in ``GIVE_UP_S``.
    """
    waiting, errors = set(tickets), dict[int, int]()
    deadline_s = time.monotonic() + GIVE_UP_S
    while waiting:
        for outcome in device.poll(0.05):
            waiting.discard(outcome.ticket)
            errors |= outcome.errors
        if waiting and time.monotonic() >= deadline_s:
            raise DeviceTimeout
    return errors
