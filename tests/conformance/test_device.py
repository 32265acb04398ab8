# SPDX-License-Identifier: Apache-2.0
"""The device suite over every device, and what only some devices promise."""

from __future__ import annotations

import errno
import os

import pytest
from support.device_conformance import WAIT_S, DeviceConformance, FilesConformance, fill, make_memory
from support.faulty_device import FaultPlan, FaultyDevice
from support.memory_device import MemoryDevice

from kvdisk.device import aio
from kvdisk.device.base import Device, Op, Transfer
from kvdisk.device.posix import PosixDevice
from kvdisk.geometry import ALIGNMENT


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
    def _any_file_system(self, monkeypatch, needs_queue) -> None:
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


def test_the_nth_transfer_fails_is_torn_or_lost():
    inner, memory = MemoryDevice(), make_memory(4 * ALIGNMENT)
    data = fill(memory, 1)
    inner.attach_file(7)
    inner.submit(Op.WRITE, [Transfer(7, 0, (memory,))])
    inner.drain()
    device = FaultyDevice(inner, FaultPlan(fail={2: errno.ENXIO}, tear={4, 5}, lose={7}))
    memory[:] = bytes(len(memory))
    views = [memory[at * ALIGNMENT : (at + 1) * ALIGNMENT] for at in range(4)]
    device.submit(Op.READ, [Transfer(7, at * ALIGNMENT, (view,)) for at, view in enumerate(views[:3])])
    assert device.drain()[0].errors == {1: errno.ENXIO}
    zeros = bytes(ALIGNMENT)
    assert [bytes(view) for view in views] == [data[:ALIGNMENT], zeros, data[2 * ALIGNMENT :][:ALIGNMENT], zeros]
    mine = fill(memory, 4)
    last = (memory[:ALIGNMENT],)
    device.submit(Op.WRITE, [Transfer(7, at, views) for at, views in ((0, tuple(views[:3])), (3 * ALIGNMENT, last))])
    ticket = device.submit(Op.WRITE, [Transfer(7, 4 * ALIGNMENT, last)])
    torn, fine = device.poll(WAIT_S)
    assert torn.errors == {0: errno.EIO, 1: errno.EIO} and fine == (ticket, {})
    written = mine[:ALIGNMENT] + data[ALIGNMENT:] + mine[:ALIGNMENT]
    assert inner.contents(7) == written, "half of the one, and nothing of a single block"
    device.submit(Op.WRITE, [Transfer(7, 0, (memory,))])
    assert device.drain()[0].errors == {} and inner.contents(7) == written, "lost, and nobody is told"


def test_a_read_is_corrupted_and_batches_are_held():
    inner, memory = MemoryDevice(), make_memory(3 * ALIGNMENT)
    data = bytearray(fill(memory, 1))
    inner.attach_file(7)
    device = FaultyDevice(inner, FaultPlan(corrupt={2: ALIGNMENT + 5}, hold=True))
    views = tuple(memory[at * ALIGNMENT : (at + 1) * ALIGNMENT] for at in range(3))
    tickets = [device.submit(Op.WRITE, [Transfer(7, at * ALIGNMENT, (view,))]) for at, view in enumerate(views)]
    assert device.poll() == [] and device.held == 3 and inner.contents(7) == b""
    device.release(2)
    assert [outcome.ticket for outcome in device.poll(WAIT_S)] == tickets[:2], "the oldest first"
    assert device.held == 1 and inner.contents(7) == data[: 2 * ALIGNMENT]
    device.drain()
    for _ in range(2):
        assert bytes(memory) == data
        device.submit(Op.READ, [Transfer(7, 0, views)])
        assert device.drain()[0].errors == {}
    data[ALIGNMENT + 5] ^= 1
    assert bytes(memory) == data, "one bit of the second read"
