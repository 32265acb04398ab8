# SPDX-License-Identifier: Apache-2.0
"""What the conformance suite cannot ask of every device: system calls that stop short, and how batches are cut."""

from __future__ import annotations

import errno
import os

import pytest

from kvdisk.device.base import Op, Transfer
from kvdisk.device.posix import PosixDevice
from kvdisk.geometry import ALIGNMENT
from kvdisk.testing.device_conformance import fill, make_memory


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


@pytest.mark.parametrize("most_bytes", [ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT])
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


def test_a_full_drive_is_its_errno(device, fd):
    full = os.open("/dev/full", os.O_RDWR)
    try:
        device.attach_file(full)
        memory = make_memory(2 * ALIGNMENT)
        batch = [Transfer(full, 0, (memory[:ALIGNMENT],)), Transfer(fd, 0, (memory[ALIGNMENT:],))]
        assert run(device, Op.WRITE, *batch) == {0: errno.ENOSPC}
    finally:
        os.close(full)


def test_a_call_that_python_refuses_is_an_error_and_the_threads_live_on(device, fd, monkeypatch):
    def refuse(*arguments):
        raise ValueError("operation forbidden on released memoryview object")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        batch = [Transfer(fd, 0, (make_memory(ALIGNMENT),))] * 8
        assert run(device, Op.WRITE, *batch) == dict.fromkeys(range(8), errno.EFAULT)
    assert run(device, Op.WRITE, *batch) == {}
