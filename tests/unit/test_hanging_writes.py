# SPDX-License-Identifier: Apache-2.0
"""A write whose submission does not come back, as on a frozen file system, and the reads of the same drive."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import contextmanager

import pytest

from kvdisk.device import aio
from kvdisk.device.base import Op, Transfer
from kvdisk.device.posix import PosixDevice
from kvdisk.geometry import ALIGNMENT
from kvdisk.testing.device_conformance import WAIT_S, make_memory

FILE_BYTES = 8 << 20
_OPS = {aio._PREAD: Op.READ, aio._PREADV: Op.READ, aio._PWRITE: Op.WRITE, aio._PWRITEV: Op.WRITE}


class Gate:
    """Where calls of one direction wait. ``begun``: one is there; ``go``: they may go on."""

    def __init__(self, hung: Op) -> None:
        self.hung = hung
        self.begun, self.go = threading.Event(), threading.Event()

    def pass_by(self, ops: set[Op]) -> None:
        if self.hung in ops:
            self.begun.set()
            self.go.wait()


@pytest.fixture(params=[Op.WRITE, Op.READ], ids=["writes hang", "reads hang"])
def gate(request, monkeypatch):
    """System calls of one direction that do not come back, at each of the two boundaries."""
    made = Gate(request.param)
    real = aio._Kernel.submit

    def submit(kernel, context, count, pointers):
        places = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_uint64))[:count]
        opcodes = [aio._IOCB.unpack(ctypes.string_at(place, aio._IOCB.size))[3] for place in places]
        made.pass_by({_OPS[opcode] for opcode in opcodes})
        return real(kernel, context, count, pointers)

    def waiting(op, call):
        def moved(*arguments):
            made.pass_by({op})
            return call(*arguments)

        return moved

    monkeypatch.setattr(aio, "serves", lambda _fd: True)
    monkeypatch.setattr(aio._Kernel, "submit", submit)
    monkeypatch.setattr(os, "preadv", waiting(Op.READ, os.preadv))
    monkeypatch.setattr(os, "pwritev", waiting(Op.WRITE, os.pwritev))
    yield made
    made.go.set()


@pytest.fixture(params=[True, False], ids=["Linux AIO", "threads"])
def device(request):
    made = PosixDevice(threads=2, kernel_queue=request.param)
    yield made
    made.close()


@contextmanager
def opened(path):
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, FILE_BYTES)
        yield fd
    finally:
        os.close(fd)


def move(device, op, fd, memory, count):
    """Start so many batches of a block each, and return their tickets."""
    return {device.submit(op, [Transfer(fd, at * ALIGNMENT, (memory,))]) for at in range(count)}


def await_all(device, tickets):
    """Wait until these have ended, well; nothing else may end."""
    left = set(tickets)
    while left:
        ended = device.poll(WAIT_S)
        assert ended, "they never ended"
        for ticket, errors in ended:
            assert errors == {}
            left.remove(ticket)


def test_what_hangs_in_one_direction_holds_up_nothing_in_the_other(tmp_path, device, gate):
    hanging, living = make_memory(ALIGNMENT), make_memory(ALIGNMENT)
    other = Op.READ if gate.hung is Op.WRITE else Op.WRITE
    with opened(tmp_path / "file") as fd:
        device.attach_file(fd)
        before = move(device, other, fd, living, 1)
        late = move(device, gate.hung, fd, hanging, 8)
        assert gate.begun.wait(WAIT_S)
        await_all(device, before)
        for _ in range(3):
            await_all(device, move(device, other, fd, living, 4))
        assert device.poll() == []
        gate.go.set()
        await_all(device, late)
