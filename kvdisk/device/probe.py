# SPDX-License-Identifier: Apache-2.0
"""Which device a worker moves bytes with: the one that is configured, or the best on this drive, tried at start.

The file has no name from its first moment, or from the next where the file system cannot make one so; a killed probe
leaves nothing. It has at most ``FILE_BYTES``, for about a second: the cap does not count it.
"""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvdisk.device.base import Buffer, Device, Op, Transfer
from kvdisk.device.control import check_directory
from kvdisk.device.drives import make_missing_directory, write_in_place
from kvdisk.device.nixl import NixlDevice
from kvdisk.device.posix import PosixDevice
from kvdisk.errors import ConfigError, KvdiskError
from kvdisk.geometry import ALIGNMENT

logger = logging.getLogger("kvdisk")

MAKERS: Mapping[str, Callable[[], Device]] = {"nixl": NixlDevice, "posix": PosixDevice}
"""The devices that ``auto`` chooses from. The first is taken unless a later one is clearly faster.

Where ``posix`` has the kernel's own queue (``QUEUED``) it goes first: beside the mover's other work its thread sees
sooner what has ended (docs/measurements/drive.md). Where it has only threads, NIXL does, since they slow down while
Python is busy.
"""
FALLBACK, QUEUED = "posix", "posix-aio"
CLEARLY = 1.15
"""So many times as fast. Less is what the same drive differs by from one start to the next."""
RUN_BYTES = 8 << 20
"""What a worker moves at once of neighbouring slots."""
FILE_BYTES = 32 << 20
BUDGET_S = 0.6
"""Of measuring, beyond which no further repetition begins."""
_MOST_REPETITIONS = 5
_LONGEST_SAMPLE_S = 0.05
_GIVE_UP_S = 5.0
_PREFIX = ".probe-"
_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_NO_NAMELESS = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})

_given_up: list[object] = []
"""Devices that have not ended what they hold, and its memory: kept, for the drive may still come to it."""


class _Silence(Exception):
    """A device has not ended a batch in time: what it holds is given up, and it is not closed."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What one device reached. ``bytes_each``: of a transfer. ``run``: whether neighbours followed each other.

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
class ProbeReport:
    """All that a probe found out. ``direct``: files there are opened with O_DIRECT, None where that is not known.

    ``names``: of the devices that there are, what they are called with the file. ``absent``: why a device was not
    measured, or is not to be trusted. ``problem``: why none was. ``chosen``: the device to use, for reads and writes of
    any size; ``why``: what decided that. ``seconds``: what the probe took.
    """

    directory: Path
    block_bytes: int
    run_bytes: int
    direct: bool | None = None
    speeds: list[Speed] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    chosen: str = FALLBACK
    why: str = ""
    seconds: float = 0.0

    def speed(self, device: str, op: Op, run: bool) -> Speed | None:
        """Return one figure."""
        return next((each for each in self.speeds if (each.device, each.op, each.run) == (device, op, run)), None)

    def name(self, device: str) -> str:
        """Return what a device is called, which says what it really uses."""
        return self.names.get(device, device)

    @property
    def line(self) -> str:
        """What was chosen and why, in one line."""
        how = {True: "with O_DIRECT", False: "through the kernel's cache, without O_DIRECT", None: "not tried"}
        name = self.name(self.chosen)
        text = f"kvdisk reads and writes {self.directory} with the device {name} ({how[self.direct]}): {self.why}"
        if not self.speeds:
            return text
        said = [
            f"{'runs' if run else 'blocks'} of {size} bytes " + ", ".join(self._read_and_written(run))
            for run, size in ((False, self.block_bytes), (True, self.run_bytes))
        ]
        missing = [f"without {device}: {why.rstrip('.')}" for device, why in self.absent.items()]
        return f"{text}; MB/s read/written: " + "; ".join(said + missing)

    def _read_and_written(self, run: bool) -> Iterator[str]:
        for device in dict.fromkeys(each.device for each in self.speeds):
            both = [self.speed(device, op, run) for op in (Op.READ, Op.WRITE)]
            yield f"{self.name(device)} " + "/".join(
                "-" if each is None else f"{each.bytes_per_s / 1e6:.0f}" for each in both
            )


def choose_device(wanted: str, directories: Sequence[Path], block_bytes: int) -> Device:
    """Return a new device, which is the caller's to close.

    ``wanted``: one of ``config.DEVICES``. ``auto`` probes the first directory, for slots of ``block_bytes``, and logs
    one line, and so does ``gds``, whose GPU memory is another device's: what goes through host memory needs one, too.
    Without directories nothing is probed, and nothing will move. Raises ConfigError where a device that was
    named cannot be had.
    """
    if not directories:
        return PosixDevice()
    if wanted in {"auto", "gds"}:
        report = probe(directories[0], block_bytes)
        logger.info("%s", report.line)
        return MAKERS[report.chosen]()
    return MAKERS[wanted]()


def make_like(device: Device) -> Device:
    """Return another device of the same kind, which is the caller's to close. Raises ConfigError."""
    return type(device)()


def probe(
    directory: Path,
    block_bytes: int,
    *,
    run_bytes: int = RUN_BYTES,
    makers: Mapping[str, Callable[[], Device]] = MAKERS,
    budget_s: float = BUDGET_S,
    file_bytes: int = FILE_BYTES,
) -> ProbeReport:
    """Try and measure the devices on a drive, and choose one. Raises nothing that a drive or a library can cause.

    ``directory``: of a store, made where it is missing. ``block_bytes``: of a slot, a multiple of ALIGNMENT; measured
    are blocks of at most ``run_bytes``. Waits for the drive, about ``budget_s`` and at most a few seconds.
    """
    assert block_bytes > 0 and block_bytes % ALIGNMENT == 0
    run_bytes = min(run_bytes, file_bytes)
    report = ProbeReport(directory, min(block_bytes, run_bytes), run_bytes)
    began_s = time.monotonic()
    try:
        make_missing_directory(directory)
        check_directory(directory)
        with nameless_file(directory, file_bytes) as (fd, report.direct):
            _Trial(report, fd, file_bytes, budget_s).run(makers)
    except _Silence:
        report.problem = f"the drive has not answered for {_GIVE_UP_S:.0f} s"
    except (OSError, KvdiskError) as error:
        number = getattr(error, "errno", None)
        full = number in {errno.ENOSPC, errno.EDQUOT}
        report.problem = "the drive is full" if full else f"nothing could be tried there: {error}".rstrip(".")
    queued = report.names.get(FALLBACK) == QUEUED
    report.chosen, report.why = choose(report, sorted(makers, key=lambda name: queued and name != FALLBACK))
    report.seconds = time.monotonic() - began_s
    return report


def choose(report: ProbeReport, preferred: Sequence[str]) -> tuple[str, str]:
    """Return the first device of ``preferred`` that no other beats clearly, and why it is the one.

    Compared are geometric means over reads and writes, blocks and runs. ``FALLBACK`` is for where none was measured,
    and for files without O_DIRECT, of which the others make nothing better.
    """
    if report.problem:
        return FALLBACK, report.problem
    if report.direct is False:
        return FALLBACK, "the file system refuses O_DIRECT"
    means = {}
    for device in preferred:
        speeds = [each.bytes_per_s for each in report.speeds if each.device == device]
        if speeds and device not in report.absent:
            means[device] = math.exp(statistics.fmean(map(math.log, speeds)))
    if not means:
        return FALLBACK, "no device passed its trial"
    best = max(means.values())
    chosen = next(device for device, mean in means.items() if mean * CLEARLY >= best)
    if len(means) == 1:
        return chosen, "it is the only one that can be used"
    other = max((device for device in means if device != chosen), key=means.__getitem__)
    ratio = means[chosen] / means[other]
    margin = "" if ratio >= 1 else f", which would be taken if it were {CLEARLY} times as fast"
    return chosen, f"over reads and writes, blocks and runs it is {ratio:.2f} times as fast as {other}{margin}"


@contextmanager
def nameless_file(directory: Path, file_bytes: int) -> Iterator[tuple[int, bool]]:
    """Open a file of so many allocated bytes that nobody else sees, and say whether it is direct. Raises OSError."""
    fd = -1
    for direct in (os.O_DIRECT, 0):
        try:
            fd = _open_nameless(directory, direct)
            write_in_place(fd)  # as segments are
            os.posix_fallocate(fd, 0, file_bytes)
            with memoryview(mmap.mmap(-1, ALIGNMENT)) as block:
                os.pwritev(fd, [block], 0)
            break
        except OSError as error:
            if fd >= 0:
                os.close(fd)
                fd = -1
            if not direct or error.errno not in _NOT_DIRECT:
                raise
    silent = False
    try:
        yield fd, bool(direct)
    except _Silence:
        silent = True  # what has not ended may still use the number
        raise
    finally:
        if not silent:
            os.close(fd)


def _open_nameless(directory: Path, direct: int) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | direct, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
    for left in directory.glob(_PREFIX + "*"):  # by a probe that was killed before it could take the name away
        with suppress(OSError):
            left.unlink()
    path = directory / f"{_PREFIX}{os.getpid()}-{random.randrange(1 << 32)}"  # noqa: S311 - a name, no secret
    # Without O_DIRECT at first, for where that is refused the file is made all the same.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | direct)
    finally:
        path.unlink()


class _Trial:
    """The measuring of one probe: a file, memory of its length, and the devices that are there."""

    def __init__(self, report: ProbeReport, fd: int, file_bytes: int, budget_s: float) -> None:
        self._report = report
        self._fd = fd
        self._file_bytes = file_bytes
        self._budget_s = budget_s
        mapping = mmap.mmap(-1, file_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(mapping)
        self._random = random.Random(0)  # noqa: S311 - the same places for every device
        self._samples: dict[tuple[str, Op, bool], list[float]] = {}

    def run(self, makers: Mapping[str, Callable[[], Device]]) -> None:
        """Fill the report. Raises OSError, KvdiskError, _Silence."""
        devices: dict[str, Device] = {}
        try:
            for name, make in makers.items():
                try:
                    devices[name] = make()
                except ConfigError as error:
                    self._report.absent[name] = str(error)
            for name, device in devices.items():
                device.attach_memory(self._memory)
                device.attach_file(self._fd)
                self._report.names[name] = device.name
            self._memory[:] = self._random.randbytes(ALIGNMENT) * (self._file_bytes // ALIGNMENT)
            for name, device in devices.items():
                if why := self._check(device):
                    self._report.absent[name] = why
            self._measure({name: device for name, device in devices.items() if name not in self._report.absent})
        except _Silence:
            _given_up.append((devices, self._memory))
            devices = {}
            raise
        finally:
            for device in devices.values():
                device.close()

    def _check(self, device: Device) -> str:
        """Return what is wrong with what a device writes and reads, "" for nothing."""
        size = min(16 * ALIGNMENT, self._file_bytes // 2)
        written, read = self._memory[:size], self._memory[size : 2 * size]
        data = self._random.randbytes(size)
        at = self._random.randrange(0, self._file_bytes - size + 1, ALIGNMENT)
        written[:] = data
        # Backwards in memory, so that the order of buffers counts.
        parts = [slice(start, start + ALIGNMENT) for start in range(size - ALIGNMENT, -1, -ALIGNMENT)]
        whole = Transfer(self._fd, at, tuple(written[part] for part in parts))
        if errors := self._move(device, Op.WRITE, [whole]):
            return f"a write that was tried failed: {os.strerror(errors[0])}"
        single = [Transfer(self._fd, at + place * ALIGNMENT, (read[part],)) for place, part in enumerate(parts)]
        if errors := self._move(device, Op.READ, single):
            return f"a read that was tried failed: {os.strerror(next(iter(errors.values())))}"
        seen = mmap.mmap(-1, size)
        if os.preadv(self._fd, [seen], at) != size or seen[:] != b"".join(data[part] for part in parts):
            return "what was written is not what is on the drive"
        return "" if read == data else "what was read is not what is on the drive"

    def _measure(self, devices: Mapping[str, Device]) -> None:
        report = self._report
        deadline_s = time.monotonic() + self._budget_s
        for repetition in range(_MOST_REPETITIONS):
            for op in (Op.WRITE, Op.READ):
                for run in (False, True):
                    for name, device in devices.items():
                        if repetition and time.monotonic() >= deadline_s:
                            continue
                        self._samples.setdefault((name, op, run), []).append(self._sample(device, op, run))
        for (name, op, run), samples in self._samples.items():
            bytes_each = report.run_bytes if run else report.block_bytes
            report.speeds.append(Speed(name, op, run, bytes_each, tuple(samples)))

    def _sample(self, device: Device, op: Op, run: bool) -> float:
        """Move the file once, or what of it can be begun in time; return bytes per second."""
        block, part = self._report.block_bytes, self._report.run_bytes
        parts = max(1, self._file_bytes // part)
        places = list(range(0, parts * (part // block) * block, block))
        self._random.shuffle(places)
        began_s = time.monotonic()
        out: set[int] = set()
        moved = 0
        for number in range(parts):
            if out and time.monotonic() - began_s > _LONGEST_SAMPLE_S:
                break
            room = self._memory[number * part : (number + 1) * part]
            if run:
                batch = [Transfer(self._fd, number * part, (room,))]
            else:
                mine = places[number * (part // block) : (number + 1) * (part // block)]
                batch = [_block(self._fd, place, room, at * block, block) for at, place in enumerate(mine)]
            moved += sum(transfer.buffers[0].nbytes for transfer in batch)
            out.add(device.submit(op, batch))
        self._await(device, out)
        return moved / max(time.monotonic() - began_s, 1e-9)

    def _move(self, device: Device, op: Op, batch: Sequence[Transfer]) -> dict[int, int]:
        return self._await(device, {device.submit(op, batch)})

    def _await(self, device: Device, tickets: set[int]) -> dict[int, int]:
        """Wait for batches; return the errors of them all. Raises _Silence."""
        errors: dict[int, int] = {}
        deadline_s = time.monotonic() + _GIVE_UP_S
        while tickets:
            for outcome in device.poll(0.05):
                tickets.discard(outcome.ticket)
                errors |= outcome.errors
            if tickets and time.monotonic() >= deadline_s:
                raise _Silence
        return errors


def _block(fd: int, place: int, room: Buffer, start: int, size: int) -> Transfer:
    return Transfer(fd, place, (room[start : start + size],))
