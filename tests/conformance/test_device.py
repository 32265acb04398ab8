# SPDX-License-Identifier: Apache-2.0
"""The device suite over every device, and what only some devices promise."""

from __future__ import annotations

import errno
import os

import pytest
from support.memory_device import MemoryDevice

from kvdisk.device import aio
from kvdisk.device.base import Device, Op, Transfer
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


# -- a device that fails on purpose -------------------------------------------------------------

ZEROS, HELD = bytes(ALIGNMENT), 4
"""Blocks of the file."""


def faulty(plan: FaultPlan) -> tuple[FaultyDevice, MemoryDevice, bytes]:
    """Return a device that fails, the one behind it with a file of four blocks, and its bytes."""
    inner = MemoryDevice()
    inner.attach_file(7)
    memory = make_memory(HELD * ALIGNMENT)
    data = fill(memory, 1)
    inner.submit(Op.WRITE, [Transfer(7, 0, (memory,))])
    inner.drain()
    return FaultyDevice(inner, plan), inner, data


def blocks(memory, count=HELD):
    return [memory[at * ALIGNMENT : (at + 1) * ALIGNMENT] for at in range(count)]


def test_the_nth_transfer_fails_is_torn_or_lost():
    plan = FaultPlan(fail={2: errno.ENXIO}, tear={4, 5}, lose={7})
    device, inner, data = faulty(plan)
    memory = make_memory(HELD * ALIGNMENT)
    views = blocks(memory)
    device.submit(Op.READ, [Transfer(7, at * ALIGNMENT, (view,)) for at, view in enumerate(views[:3])])
    assert device.drain()[0].errors == {1: errno.ENXIO}
    assert [bytes(view) for view in views] == [data[:ALIGNMENT], ZEROS, data[2 * ALIGNMENT :][:ALIGNMENT], ZEROS]
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


@pytest.mark.parametrize("byte", [0, 4 * ALIGNMENT + 9])
def test_one_bit_of_the_nth_read_is_flipped(byte):
    device, inner, data = faulty(FaultPlan(corrupt={2: byte}))
    memories = [make_memory(HELD * ALIGNMENT) for _ in range(3)]
    device.submit(Op.WRITE, [Transfer(7, 4 * ALIGNMENT, (memories[0],))])
    device.submit(Op.READ, [Transfer(7, 0, tuple(blocks(memory))) for memory in memories])
    assert not any(outcome.errors for outcome in device.drain())
    assert memories[0] == data == memories[2]
    changed = {at: memories[1][at] ^ data[at] for at in range(len(data)) if memories[1][at] != data[at]}
    assert changed == {byte % len(data): 1}
    assert inner.contents(7)[: len(data)] == data


def test_held_batches_run_when_released_oldest_first():
    device, _, data = faulty(FaultPlan(hold=True))
    first, second = blocks(make_memory(2 * ALIGNMENT), 2)
    tickets = [device.submit(Op.READ, [Transfer(7, 0, (view,))]) for view in (first, second)]
    assert device.poll(3600.0) == [] and device.held == 2
    device.release(1)
    assert device.poll(WAIT_S) == [(tickets[0], {})]
    assert first == data[:ALIGNMENT] and not any(second)
    device.plan.hold = False
    later = device.submit(Op.READ, [Transfer(7, 0, (first,))])
    assert device.poll(WAIT_S) == [(later, {})]
    assert device.drain() == [(tickets[1], {})]
    assert second == data[:ALIGNMENT]
    assert [op for op, _ in device.submitted] == [Op.READ] * 3 and device.submitted[0][1] == ((7, 0, ALIGNMENT),)
