# SPDX-License-Identifier: Apache-2.0
"""The device suite over every device, and what only some devices promise."""

from __future__ import annotations

import errno
import os

import pytest

from kvdisk.device import aio
from kvdisk.device.base import Device, Op, Transfer
from kvdisk.device.memory import MemoryDevice
from kvdisk.device.posix import PosixDevice
from kvdisk.geometry import ALIGNMENT
from kvdisk.testing.device_conformance import WAIT_S, DeviceConformance, FilesConformance, fill, make_memory
from kvdisk.testing.faulty_device import FaultPlan, FaultyDevice


class TestThreads(FilesConformance):
    """Everything is cut, and every cut falls between buffers of one transfer."""

    def make_device(self) -> Device:
        return PosixDevice(threads=1, longest_bytes=ALIGNMENT, kernel_queue=False)


class TestThreadsDirect(FilesConformance):
    flags = os.O_DIRECT

    def make_device(self) -> Device:
        return PosixDevice(threads=3, kernel_queue=False)


class TestKernelQueue(FilesConformance):
    flags = os.O_DIRECT

    @pytest.fixture(autouse=True)
    def _any_file_system(self, monkeypatch) -> None:
        # Where temporary files are on another one, the kernel waits in the submission, and all else
        # is the same.
        monkeypatch.setattr(aio, "serves", lambda _fd: True)

    def make_device(self) -> Device:
        return PosixDevice(threads=3)


class TestKernelQueueShortCalls(TestKernelQueue):
    """More calls than the kernel takes at a time, and every cut falls between buffers of one
    transfer."""

    def make_device(self) -> Device:
        return PosixDevice(longest_bytes=ALIGNMENT)


class TestMemory(DeviceConformance):
    def setup_method(self, _method) -> None:
        self.reference = MemoryDevice()
        self.last_fd = 100
        super().setup_method(_method)

    def make_device(self) -> Device:
        return self.reference

    def open_file(self) -> int:
        self.last_fd += 1
        return self.last_fd

    def stored(self, fd: int, byte_count: int) -> bytes:
        return self.reference.contents(fd)[:byte_count]


class TestFaultyMemory(TestMemory):
    def make_device(self) -> Device:
        return FaultyDevice(self.reference)


@pytest.fixture
def memory_file():
    """A reference device with one file of four blocks, and the bytes in it."""
    device = MemoryDevice()
    device.attach_file(7)
    memory = make_memory(4 * ALIGNMENT)
    data = fill(memory, 1)
    device.submit(Op.WRITE, [Transfer(7, 0, (memory,))])
    device.drain()
    return device, data


def blocks(memory, count):
    return [memory[at * ALIGNMENT : (at + 1) * ALIGNMENT] for at in range(count)]


def test_the_nth_transfer_fails_with_its_errno_and_moves_nothing(memory_file):
    inner, data = memory_file
    device = FaultyDevice(inner, FaultPlan(fail={2: errno.ENXIO, 4: errno.EIO}))
    memory = make_memory(4 * ALIGNMENT)
    views = blocks(memory, 4)
    device.submit(Op.READ, [Transfer(7, at * ALIGNMENT, (view,)) for at, view in enumerate(views[:3])])
    assert device.drain()[0].errors == {1: errno.ENXIO}
    assert memory == data[:ALIGNMENT] + bytes(ALIGNMENT) + data[2 * ALIGNMENT : 3 * ALIGNMENT] + bytes(ALIGNMENT)
    ticket = device.submit(Op.WRITE, [Transfer(7, 0, (views[3],))])
    assert device.poll(WAIT_S) == [(ticket, {0: errno.EIO})]
    assert inner.contents(7) == data
    device.submit(Op.WRITE, [Transfer(7, 0, (views[3],))])
    assert device.drain()[0].errors == {}
    assert inner.contents(7)[:ALIGNMENT] == bytes(ALIGNMENT)


@pytest.mark.parametrize("byte", [0, 4 * ALIGNMENT + 9])
def test_one_bit_of_the_nth_read_is_flipped(memory_file, byte):
    inner, data = memory_file
    device = FaultyDevice(inner, FaultPlan(corrupt={2: byte}))
    memories = [make_memory(4 * ALIGNMENT) for _ in range(3)]
    device.submit(Op.WRITE, [Transfer(7, 4 * ALIGNMENT, (memories[0],))])
    device.submit(Op.READ, [Transfer(7, 0, tuple(blocks(memory, 4))) for memory in memories])
    assert not any(outcome.errors for outcome in device.drain())
    assert memories[0] == data
    assert memories[2] == data
    changed = {at: memories[1][at] ^ data[at] for at in range(len(data)) if memories[1][at] != data[at]}
    assert changed == {byte % len(data): 1}
    assert inner.contents(7)[: len(data)] == data


def test_held_batches_run_when_released_oldest_first(memory_file):
    inner, data = memory_file
    device = FaultyDevice(inner, FaultPlan(hold=True))
    memory = make_memory(2 * ALIGNMENT)
    first, second = blocks(memory, 2)
    tickets = [device.submit(Op.READ, [Transfer(7, 0, (view,))]) for view in (first, second)]
    assert device.poll(3600.0) == []
    assert device.held == 2
    device.release(1)
    assert device.poll(WAIT_S) == [(tickets[0], {})]
    assert first == data[:ALIGNMENT]
    assert not any(second)
    device.plan.hold = False
    later = device.submit(Op.READ, [Transfer(7, 0, (first,))])
    assert device.poll(WAIT_S) == [(later, {})]
    assert device.drain() == [(tickets[1], {})]
    assert second == data[:ALIGNMENT]
    assert [op for op, _ in device.submitted] == [Op.READ] * 3
    assert device.submitted[0][1] == ((7, 0, ALIGNMENT),)


def test_torn_and_lost_transfers(memory_file):
    """Half of the one is moved, and it has failed; nothing of the other, and it has not."""
    inner, data = memory_file
    device = FaultyDevice(inner, FaultPlan(tear={1, 2}, lose={4}))
    memory = make_memory(4 * ALIGNMENT)
    mine = fill(memory, 4)
    torn = Transfer(7, 0, tuple(blocks(memory, 4)[:3]))
    single = Transfer(7, 3 * ALIGNMENT, (memory[:ALIGNMENT],))
    device.submit(Op.WRITE, [torn, single, Transfer(7, 4 * ALIGNMENT, (memory[:ALIGNMENT],))])
    assert device.drain()[0].errors == {0: errno.EIO, 1: errno.EIO}
    assert inner.contents(7) == mine[:ALIGNMENT] + data[ALIGNMENT:] + mine[:ALIGNMENT]
    device.submit(Op.WRITE, [Transfer(7, 0, (memory,))])
    assert device.drain()[0].errors == {}
    assert inner.contents(7) == mine[:ALIGNMENT] + data[ALIGNMENT:] + mine[:ALIGNMENT]
