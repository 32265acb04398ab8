# SPDX-License-Identifier: Apache-2.0
"""What the conformance suite cannot ask of every device: system calls that stop short, and how
batches are cut."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from kvdisk.device import aio
from kvdisk.device.base import Op, Transfer
from kvdisk.device.posix import PosixDevice
from kvdisk.geometry import ALIGNMENT
from kvdisk.testing.device_conformance import WAIT_S, fill, make_memory


@pytest.fixture
def fd(tmp_path):
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield number
    os.close(number)


@pytest.fixture
def device(fd):
    made = PosixDevice(threads=4)
    made.attach_file(fd)
    yield made
    made.close()


def run(device, op, *batch):
    device.submit(op, batch)
    (outcome,) = device.drain()
    return outcome.errors


def short(real, most_bytes):
    """A system call that moves at most so many bytes."""

    def call(fd, buffers, offset):
        taken, room = [], most_bytes
        for buffer in buffers:
            taken.append(buffer[:room])
            room -= taken[-1].nbytes
            if not room:
                break
        return real(fd, taken, offset)

    return call


@pytest.mark.parametrize("most_bytes", [ALIGNMENT, 3 * ALIGNMENT])
def test_a_call_that_stops_short_is_continued(device, fd, monkeypatch, most_bytes):
    monkeypatch.setattr(os, "preadv", short(os.preadv, most_bytes))
    monkeypatch.setattr(os, "pwritev", short(os.pwritev, most_bytes))
    memory = make_memory(7 * ALIGNMENT)
    data = fill(memory, 1)
    views = tuple(memory[start * ALIGNMENT : end * ALIGNMENT] for start, end in [(0, 2), (2, 3), (3, 7)])
    assert run(device, Op.WRITE, Transfer(fd, ALIGNMENT, views)) == {}
    assert os.pread(fd, 8 * ALIGNMENT, 0) == bytes(ALIGNMENT) + data
    memory[:] = bytes(len(memory))
    assert run(device, Op.READ, Transfer(fd, ALIGNMENT, views)) == {}
    assert memory == data


@pytest.mark.parametrize("most_bytes", [1000, ALIGNMENT + 512])
def test_a_call_that_stops_between_blocks_is_an_io_error(device, fd, monkeypatch, most_bytes):
    monkeypatch.setattr(os, "pwritev", short(os.pwritev, most_bytes))
    assert run(device, Op.WRITE, Transfer(fd, 0, (make_memory(2 * ALIGNMENT),))) == {0: errno.EIO}


def test_a_call_that_python_refuses_is_an_error_and_the_threads_live_on(device, fd, monkeypatch):
    def refuse(*arguments):
        raise ValueError("operation forbidden on released memoryview object")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        batch = [Transfer(fd, 0, (make_memory(ALIGNMENT),))] * 8
        assert run(device, Op.WRITE, *batch) == dict.fromkeys(range(8), errno.EFAULT)
    assert run(device, Op.WRITE, *batch) == {}


@pytest.mark.parametrize("kernel_queue", [True, False])
def test_writes_that_hang_hold_up_no_read(tmp_path, monkeypatch, kernel_queue):
    """As on a file system that is frozen: the submission of a write does not come back."""
    go, begun = threading.Event(), threading.Event()
    monkeypatch.setattr(aio, "serves", lambda _fd: True)
    device = PosixDevice(threads=2, kernel_queue=kernel_queue)
    fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, 8 * ALIGNMENT)
    device.attach_file(fd)
    writes = getattr(device._files[fd][Op.WRITE], "_context", None)

    def hanging(real, is_write):
        def call(*arguments):
            if is_write(*arguments):
                begun.set()
                assert go.wait(WAIT_S)
            return real(*arguments)

        return call

    submit = hanging(aio._Kernel.submit, lambda _kernel, context, *_: context is writes)
    monkeypatch.setattr(aio._Kernel, "submit", submit)
    monkeypatch.setattr(os, "pwritev", hanging(os.pwritev, lambda *_: True))
    memory = make_memory(ALIGNMENT)
    late = {device.submit(Op.WRITE, [Transfer(fd, at * ALIGNMENT, (memory,))]) for at in range(8)}
    assert begun.wait(WAIT_S)
    for at in range(3):
        ticket = device.submit(Op.READ, [Transfer(fd, at * ALIGNMENT, (make_memory(ALIGNMENT),))])
        assert device.poll(WAIT_S) == [(ticket, {})]
    go.set()
    assert {outcome.ticket for outcome in device.drain() if not outcome.errors} == late
    device.close()
    os.close(fd)
