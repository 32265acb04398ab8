# SPDX-License-Identifier: Apache-2.0

"""What every ``Device`` does, as one suite of tests. Needs no pytest to be imported.

A test module subclasses ``DeviceConformance`` under a name that begins with ``Test`` and says how a
device and a file are made; pytest then runs each ``test_`` method with ``setup_method`` and
``teardown_method`` around it.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from kvdisk.device.base import Buffer, Device, Op, Outcome, Transfer
from kvdisk.geometry import ALIGNMENT

WAIT_S = 30.0
"""A bound, not a delay: a device that takes longer has lost a batch."""


def make_memory(byte_count: int) -> Buffer:
    """Return zeroed, aligned memory."""
    return memoryview(mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def fill(buffer: Buffer, seed: int) -> bytes:
    """Fill a buffer with bytes that depend on ``seed`` alone, and return them."""
    buffer[:] = random.Random(seed).randbytes(buffer.nbytes)
    return bytes(buffer)


class DeviceConformance(ABC):
    """See the module. Files begin empty and grow by writes."""

    device: Device

    @abstractmethod
    def make_device(self) -> Device:
        """Return a new device; the suite closes it."""

    @abstractmethod
    def open_file(self) -> int:
        """Return the descriptor of a new, empty file; open until the test is over."""

    def close_files(self) -> None:  # noqa: B027 - what is in memory has nothing to close
        """Close and remove what ``open_file`` opened."""

    def setup_method(self, _method: Any) -> None:
        """Make the device of one test."""
        self.device = self.make_device()

    def teardown_method(self, _method: Any) -> None:
        """Close the device, then its files."""
        self.device.close()
        self.close_files()

    # What the tests are written with

    def attach(self) -> int:
        """Return a new file that the device knows."""
        fd = self.open_file()
        self.device.attach_file(fd)
        return fd

    def memory(self, byte_count: int) -> Buffer:
        """Return memory that the device knows."""
        memory = make_memory(byte_count)
        self.device.attach_memory(memory)
        return memory

    def run(self, op: Op, *batch: Transfer) -> dict[int, int]:
        """Move one batch and return its errors."""
        ticket = self.device.submit(op, batch)
        (outcome,) = self.await_outcomes(1)
        assert outcome.ticket == ticket
        return outcome.errors

    def await_outcomes(self, count: int) -> list[Outcome]:
        """Poll until ``count`` batches have ended."""
        ended: list[Outcome] = []
        while len(ended) < count:
            more = self.device.poll(WAIT_S)
            assert more, f"{count - len(ended)} batches never ended"
            ended += more
        assert len(ended) == count
        return ended

    def written(self, fd: int, byte_count: int, seed: int = 1) -> bytes:
        """Write the first ``byte_count`` bytes of a file and return them."""
        memory = self.memory(byte_count)
        data = fill(memory, seed)
        assert self.run(Op.WRITE, Transfer(fd, 0, (memory,))) == {}
        return data

    def read(self, fd: int, offset: int, byte_count: int) -> bytes:
        """Read a range that must be there."""
        memory = self.memory(byte_count)
        assert self.run(Op.READ, Transfer(fd, offset, (memory,))) == {}
        return bytes(memory)

    # The suite

    def test_what_was_written_is_read_and_the_rest_left_alone(self) -> None:
        fd = self.attach()
        byte_count = (9 << 20) + ALIGNMENT
        data = bytearray(self.written(fd, byte_count))
        assert self.read(fd, 0, byte_count) == data
        memory = self.memory(2 * ALIGNMENT)
        data[3 * ALIGNMENT : 5 * ALIGNMENT] = fill(memory, 2)
        assert self.run(Op.WRITE, Transfer(fd, 3 * ALIGNMENT, (memory,))) == {}
        assert self.read(fd, 4 * ALIGNMENT, 3 * ALIGNMENT) == data[4 * ALIGNMENT : 7 * ALIGNMENT]
        assert self.read(fd, 0, byte_count) == data

    def test_scattered_buffers_are_emptied_and_filled_in_order(self) -> None:
        fd = self.attach()
        memory = self.memory(16 * ALIGNMENT)
        data = fill(memory, 3)
        cuts = [(9, 12), (0, 1), (4, 6)]
        scattered = tuple(memory[start * ALIGNMENT : end * ALIGNMENT] for start, end in cuts)
        expected = b"".join(data[start * ALIGNMENT : end * ALIGNMENT] for start, end in cuts)
        assert self.run(Op.WRITE, Transfer(fd, ALIGNMENT, scattered)) == {}
        assert self.read(fd, ALIGNMENT, len(expected)) == expected
        memory[:] = bytes(len(memory))
        assert self.run(Op.READ, Transfer(fd, ALIGNMENT, scattered)) == {}
        assert b"".join(map(bytes, scattered)) == expected
        untouched = memory[12 * ALIGNMENT :], memory[ALIGNMENT : 4 * ALIGNMENT]
        assert not any(any(view) for view in untouched)

    def test_a_transfer_of_very_many_buffers(self) -> None:
        fd = self.attach()
        count = 2100
        memory = self.memory(count * ALIGNMENT)
        data = fill(memory, 4)
        views = tuple(memory[at * ALIGNMENT : (at + 1) * ALIGNMENT] for at in range(count))
        assert self.run(Op.WRITE, Transfer(fd, 0, views[::-1])) == {}
        memory[:] = bytes(len(memory))
        assert self.run(Op.READ, Transfer(fd, 0, views[::-1])) == {}
        assert memory == data

    def test_many_batches_in_flight_each_end_once(self) -> None:
        fd = self.attach()
        count, each_bytes = 64, 3 * ALIGNMENT
        data = self.written(fd, count * each_bytes)
        memory = self.memory(count * each_bytes)
        order = list(range(count))
        random.Random(6).shuffle(order)
        tickets: dict[int, int] = {}
        for at in order:
            view = memory[at * each_bytes : (at + 1) * each_bytes]
            tickets[self.device.submit(Op.READ, [Transfer(fd, at * each_bytes, (view,))])] = at
        assert len(tickets) == count, "a ticket was given twice"
        # No order of completion is promised, but each ticket comes once and its bytes are there by
        # then.
        for _ in range(count):
            for outcome in self.device.poll(WAIT_S):
                at = tickets.pop(outcome.ticket)
                assert outcome.errors == {}
                span = slice(at * each_bytes, (at + 1) * each_bytes)
                assert memory[span] == data[span]
            if not tickets:
                break
        assert not tickets
        assert memory == data
        assert self.device.poll() == []

    def test_the_errors_of_a_batch_name_its_failed_transfers_only(self) -> None:
        fd, stranger = self.attach(), self.open_file()
        data = self.written(fd, 4 * ALIGNMENT)
        memory = self.memory(4 * ALIGNMENT)
        views = [memory[at * ALIGNMENT : (at + 1) * ALIGNMENT] for at in range(4)]
        batch = [
            Transfer(fd, ALIGNMENT, (views[0],)),
            Transfer(stranger, 0, (views[1],)),
            Transfer(fd, 4 * ALIGNMENT, (views[2],)),
            Transfer(fd, 3 * ALIGNMENT, (views[3],)),
            Transfer(fd, 3 * ALIGNMENT, (self.memory(2 * ALIGNMENT),)),
        ]
        assert self.run(Op.READ, *batch) == {1: errno.EBADF, 2: errno.EIO, 4: errno.EIO}
        assert views[0] == data[ALIGNMENT : 2 * ALIGNMENT]
        assert views[3] == data[3 * ALIGNMENT :]

    def test_a_file_that_is_not_attached_is_not_written(self) -> None:
        fd = self.attach()
        data = self.written(fd, ALIGNMENT)
        self.device.detach_file(fd)
        memory = self.memory(ALIGNMENT)
        fill(memory, 7)
        assert self.run(Op.WRITE, Transfer(fd, 0, (memory,))) == {0: errno.EBADF}
        assert self.run(Op.WRITE, Transfer(-1, 0, (memory,))) == {0: errno.EBADF}
        self.device.attach_file(fd)
        assert self.read(fd, 0, ALIGNMENT) == data

    def test_poll_returns_at_once_when_nothing_is_in_flight(self) -> None:
        # Were it to wait, the test run would: an hour is far beyond its limit.
        assert self.device.poll(3600.0) == []
        self.written(self.attach(), ALIGNMENT)
        assert self.device.poll(3600.0) == []
        assert self.device.drain() == []

    def test_drain_returns_all_that_is_in_flight(self) -> None:
        fd = self.attach()
        memory = self.memory(8 * ALIGNMENT)
        data = fill(memory, 8)
        tickets = set()
        for at in range(8):
            view = memory[at * ALIGNMENT : (at + 1) * ALIGNMENT]
            tickets.add(self.device.submit(Op.WRITE, [Transfer(fd, at * ALIGNMENT, (view,))]))
        outcomes = self.device.drain()
        assert {outcome.ticket for outcome in outcomes} == tickets
        assert len(outcomes) == 8
        assert not any(outcome.errors for outcome in outcomes)
        assert self.device.drain() == []
        assert self.read(fd, 0, 8 * ALIGNMENT) == data

    def test_memory_can_be_released_after_the_outcome(self) -> None:
        fd = self.attach()
        for _ in range(20):
            mapping = mmap.mmap(-1, 4 * ALIGNMENT)
            with memoryview(mapping) as memory, memory[: 2 * ALIGNMENT] as one, memory[2 * ALIGNMENT :] as other:
                assert self.run(Op.WRITE, Transfer(fd, 0, (one, other))) == {}
            mapping.close()  # BufferError while any view of it is left

    def test_close_ends_what_is_in_flight_and_may_be_called_again(self) -> None:
        fd = self.attach()
        memory = self.memory(4 * ALIGNMENT)
        data = fill(memory, 9)
        self.device.submit(Op.WRITE, [Transfer(fd, 0, (memory,))])
        self.device.close()
        self.device.close()
        assert self.stored(fd, len(data)) == data

    @abstractmethod
    def stored(self, fd: int, byte_count: int) -> bytes:
        """Return the first bytes of a file, though the device is closed."""


class FilesConformance(DeviceConformance):
    """The suite over real files of a temporary directory, opened with ``flags`` besides.

    ``parent``: where the directory is made; None: where Python makes such.
    """

    flags = 0
    parent: Path | None = None

    def setup_method(self, method: Any) -> None:
        """Make the directory, then the device."""
        self.directory = tempfile.TemporaryDirectory(dir=self.parent)
        self.fds: dict[int, Path] = {}
        super().setup_method(method)

    def open_file(self) -> int:
        """See ``DeviceConformance``."""
        path = Path(self.directory.name) / str(len(self.fds))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | self.flags, 0o600)
        self.fds[fd] = path
        return fd

    def close_files(self) -> None:
        """See ``DeviceConformance``."""
        for fd in self.fds:
            os.close(fd)
        self.directory.cleanup()

    def stored(self, fd: int, byte_count: int) -> bytes:
        """See ``DeviceConformance``."""
        return self.fds[fd].read_bytes()[:byte_count]
