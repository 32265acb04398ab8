# SPDX-License-Identifier: Apache-2.0
"""One rank's drive in a simulation: files that outlive processes, and a device over them that one
generator makes fail.

A batch moves nothing until the simulation ends it, in whatever order, so what is done meanwhile to
the slots that it names shows in the bytes.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

from kvdisk.blocks import BlockKey
from kvdisk.device.base import Op, Transfer
from kvdisk.device.header import read_header
from kvdisk.errors import CorruptRecord, DeviceError
from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, segment_file_bytes, slot_offset
from kvdisk.messages import HomeSpec, SegmentSpec
from kvdisk.worker.routes import OpenFile
from support.faulty_device import FaultyDevice, HeldBatch
from support.memory_device import MemoryDevice

_FIRST_FD = 3

Note = Callable[[str], None]
"""Takes an event of the trace."""


@dataclass(slots=True)
class Weather:
    """How likely what goes wrong; may change at any time.

    ``eio``, ``tear``: of a transfer; ``flip``: of a read, after it. ``flip`` is four times as
    likely as said, and so is ``eio`` of a read, up to 0.6: the others are to happen, too. ``lose``:
    of a write, whose bytes never arrive; ``hang``: of a batch; ``files``, ``home``: that a segment,
    or the home, cannot be opened on a rank; ``slow_copies``: that a copy has not ended when it is
    started. ``full``: ranks whose drive takes no writes.
    """

    eio: float = 0.0
    tear: float = 0.0
    flip: float = 0.0
    lose: float = 0.0
    hang: float = 0.0
    files: float = 0.0
    home: float = 0.0
    slow_copies: float = 0.0
    full: frozenset[int] = frozenset()

    def clear_up(self) -> None:
        """Let everything work."""
        self.eio = self.tear = self.flip = self.lose = self.hang = self.files = self.home = self.slow_copies = 0.0
        self.full = frozenset()


class SimDrive:
    """What a rank has on the drive: the bytes of its segment files, by segment.

    ``removed``: those without a name, which the process that has them open still uses. ``damaged``:
    key and generation of what it was given and may not have, or not as it was. ``lost``: segments
    of which some drive's file was removed; all drives of an engine have the same set.
    """

    def __init__(self, lost: set[int]) -> None:
        self.lost = lost
        self.files: dict[int, bytearray] = {}
        self.removed: dict[int, bytearray] = {}
        self.damaged: set[tuple[BlockKey, int]] = set()

    def slot(self, segment: int, slot_bytes: int, index: int) -> memoryview:
        """Return a copy of a slot's bytes, fewer than ``slot_bytes`` where the file has not got
        them."""
        start = slot_offset(slot_bytes, index)
        file = self.removed.get(segment, b"") if segment not in self.files else self.files[segment]
        return memoryview(bytes(file[start : start + slot_bytes]))

    def remove(self, segment: int) -> None:
        """Take a file's name away, as somebody does who removes files."""
        self.removed[segment] = self.files.pop(segment)
        self.lost.add(segment)

    def drop(self, segment: int) -> None:
        """Remove a file whose process has closed it. Where it was lost on some drive, that is done
        before the deletion of its records is committed."""
        for files in (self.files, self.removed):
            file = files.pop(segment, None)
            if file is not None and segment in self.lost:
                self._note_lost(file)

    def free_removed(self) -> list[int]:
        """Lose the bytes of the files without a name; return their segments."""
        for file in self.removed.values():
            self._note_lost(file)
            file[:] = bytes(len(file))
        return list(self.removed)

    def forget_removed(self) -> None:
        """Nobody has the files without a name open any more."""
        self.free_removed()
        self.removed.clear()

    def replace(self, files: dict[int, bytearray]) -> None:
        """Have these files in place of those that there are, when no process has one open."""
        for segment, file in self.files.items():
            other = files.get(segment, b"")
            for start in range(0, len(file), ALIGNMENT):
                if file[start : start + ALIGNMENT] != other[start : start + ALIGNMENT]:
                    self._note_lost(file, start // ALIGNMENT)
        self.files = {segment: bytearray(file) for segment, file in files.items()}

    def _note_lost(self, file: bytearray, changed: int | None = None) -> None:
        """Note the blocks of a file as damaged; ``changed``: only the one that has this page."""
        last = None
        for page in range(len(file) // ALIGNMENT):
            try:
                found = read_header(memoryview(bytes(file[page * ALIGNMENT :][:HEADER_BYTES]))).identity
                last = found.key, found.generation
            except CorruptRecord:
                pass  # a payload
            if last is not None and changed in (None, page):
                self.damaged.add(last)

    def flip(self, segment: int, slot_bytes: int, index: int, byte: int) -> None:
        self.files[segment][slot_offset(slot_bytes, index) + byte] ^= 1

    def misdirect(self, segment: int, slot_bytes: int, index: int, other: int) -> None:
        """Let what slot ``other`` (modulo their number) holds arrive in slot ``index``, too."""
        file = self.files[segment]
        other %= (len(file) - slot_offset(slot_bytes, 0)) // slot_bytes
        file[slot_offset(slot_bytes, index) : slot_offset(slot_bytes, index + 1)] = self.slot(
            segment, slot_bytes, other
        )


class SimFiles:
    """``SegmentFiles`` over a drive. ``descriptors``: the open files; a number that was closed is
    given again."""

    def __init__(self, drive: SimDrive, weather: Weather, rng: random.Random, note: Note) -> None:
        self.descriptors: dict[int, bytearray] = {}
        self._drive = drive
        self._weather = weather
        self._rng = rng
        self._note = note
        self._joined = False
        self._open: dict[int, int] = {}

    def open_home(self, spec: HomeSpec) -> None:
        if self._joined:
            assert self._open.keys() <= set(spec.known_segments), "a segment that is in use is unknown"
            return
        self._fail("the home", self._weather.home)
        self._drive.forget_removed()
        for segment in [segment for segment in self._drive.files if segment not in spec.known_segments]:
            del self._drive.files[segment]
        self._joined = True

    def open_segment(self, spec: SegmentSpec) -> OpenFile | None:
        if spec.segment in self._open:
            assert not spec.create and spec.source is None
            return None
        self._must_have_joined()
        self._fail(f"segment {spec.segment}", self._weather.files)
        file_bytes = segment_file_bytes(spec.slot_bytes, spec.slot_count)
        if spec.create:
            self._drive.files[spec.segment] = bytearray(file_bytes)
        elif spec.segment not in self._drive.files:
            raise DeviceError(errno.ENOENT, f"segment {spec.segment} is not there")
        file = self._drive.files[spec.segment]
        if len(file) != file_bytes:
            raise CorruptRecord(f"segment {spec.segment} has {len(file)} bytes")
        fd = next(fd for fd in range(_FIRST_FD, _FIRST_FD + len(self.descriptors) + 1) if fd not in self.descriptors)
        self.descriptors[fd] = file
        self._open[spec.segment] = fd
        return OpenFile(fd, spec.slot_bytes, spec.slot_count, spec.drive)

    def drop_segment(self, spec: SegmentSpec) -> None:
        self._must_have_joined()
        fd = self._open.pop(spec.segment, None)
        if fd is not None:
            del self.descriptors[fd]
        self._drive.drop(spec.segment)

    def give_back(self) -> Collection[int]:
        return [segment for segment in self._drive.free_removed() if segment in self._open]

    def close(self) -> None:
        self.descriptors.clear()
        self._open.clear()

    def _must_have_joined(self) -> None:
        if not self._joined:
            raise DeviceError(errno.ENODEV, "the engine store of this segment is not open")

    def _fail(self, what: str, likelihood: float) -> None:
        if likelihood and self._rng.random() < likelihood:
            number = self._rng.choice((errno.ENOSPC, errno.EIO))
            self._note(f"{what} cannot be opened: {errno.errorcode[number]}")
            raise DeviceError(number, f"{what} cannot be opened, for the test")


class _DescriptorDevice(MemoryDevice):
    """A ``MemoryDevice`` whose descriptors mean what ``SimFiles`` has opened under them when a
    batch moves."""

    def __init__(self, files: SimFiles) -> None:
        super().__init__()
        self._descriptors = files.descriptors

    def attach_file(self, fd: int) -> None:
        self._files[fd] = self._descriptors[fd]
        super().attach_file(fd)


class SimDevice(FaultyDevice):
    """A rank's device, which breaks transfers as the weather is, and ends batches when it is told
    to.

    It demands that nobody touches a buffer while it owns it. ``seen``: how often each fault came.
    """

    def __init__(self, rank: int, drive: SimDrive, files: SimFiles, weather: Weather, rng: random.Random, note: Note):
        super().__init__(_DescriptorDevice(files))
        self.plan.hold = True
        self.seen: dict[str, int] = {}
        self._rank = rank
        self._drive = drive
        self._weather = weather
        self._rng = rng
        self._note = note
        self._sums: dict[int, list[int]] = {}
        """Of the buffers of each batch that has not moved yet."""

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        weather, rng = self._weather, self._rng
        self.plan.full = self._rank in weather.full
        faults = [self._break(op, at, transfer) for at, transfer in enumerate(batch, 1)]
        if weather.hang and rng.random() < weather.hang:
            self.plan.hang.add(self._transfers + 1)
            faults.append("hang")
        for fault in filter(None, faults):
            self.seen[f"{op.value} {fault}"] = self.seen.get(f"{op.value} {fault}", 0) + 1
        ticket = super().submit(op, batch)
        self._note(f"rank {self._rank} {op.value} {ticket}: {self.submitted.pop()[1]} {faults}")
        return ticket

    def _break(self, op: Op, at: int, transfer: Transfer) -> str:
        """Say what shall become of a transfer, the ``at``-th of its batch; return the fault's
        name."""
        weather, plan, number = self._weather, self.plan, self._transfers + at
        if plan.full and op is Op.WRITE:
            return "full"
        likelihoods = [weather.eio, weather.tear, weather.lose]
        if op is Op.READ:  # these are few
            likelihoods = [min(0.6, 4 * weather.eio), weather.tear, 4 * weather.flip]
        draw = self._rng.random()
        if draw < likelihoods[0]:
            plan.fail[number] = errno.EIO
            return "eio"
        if draw < sum(likelihoods[:2]):
            plan.tear.add(number)
            return "tear"
        if draw >= sum(likelihoods):
            return ""
        if op is Op.READ:
            in_header = self._rng.random() < 0.5
            byte = self._rng.randrange(HEADER_BYTES) if in_header else HEADER_BYTES + self._rng.randrange(200)
            plan.corrupt[self._reads + at] = byte
            return "flip"
        plan.lose.add(number)
        self._drive.damaged.update(_names(transfer))
        return "lose"

    def end_one(self) -> None:
        """End one of the batches that do not hang, with the next ``poll``."""
        if self.held:
            at = self._rng.randrange(self.held)
            self._note(f"rank {self._rank} ends batch {at} of {self.held}")
            self.release_at(at)

    def crash(self) -> None:
        """The process is gone: each batch under way moves, or does not, before anybody else looks
        at the drive."""
        for batch in [*self._held, *self._hanging]:
            if self._rng.random() < 0.5:
                self._pass_on(batch)
        self._held, self._hanging = [], []
        self.close()

    def _keep_back(self, batch: HeldBatch, kept: list[HeldBatch]) -> None:
        self._sums[batch.ticket] = _sums(batch)
        super()._keep_back(batch, kept)

    def _pass_on(self, batch: HeldBatch) -> None:
        assert self._sums.pop(batch.ticket) == _sums(batch), "a buffer was touched while the device owned it"
        super()._pass_on(batch)


def _sums(batch: HeldBatch) -> list[int]:
    return [crc32(buffer) for transfer in batch.passed for buffer in transfer.buffers]


def _names(transfer: Transfer) -> Iterator[tuple[BlockKey, int]]:
    """Yield key and generation of the blocks that a transfer writes."""
    for buffer in transfer.buffers:
        for start in range(0, buffer.nbytes, ALIGNMENT):
            try:
                found = read_header(buffer[start : start + HEADER_BYTES]).identity
            except CorruptRecord:
                continue  # a payload
            yield found.key, found.generation
