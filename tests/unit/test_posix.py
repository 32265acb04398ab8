# SPDX-License-Identifier: Apache-2.0
"""What the conformance suite cannot ask of every device: calls that stop short, are refused or
hang, through threads and through the kernel's queue."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import queue
import threading
from typing import ClassVar
from unittest.mock import Mock

import pytest
from support.device_conformance import WAIT_S, fill, make_memory

from kvdisk.device import aio, posix
from kvdisk.device.base import GpuRange, Op, Outcome, Transfer
from kvdisk.device.posix import PosixDevice
from kvdisk.geometry import ALIGNMENT


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


@pytest.fixture
def fd(path):
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(number, 0, 2 * aio.LONGEST_BYTES)
    yield number
    os.close(number)


def blocks(memory, *ends):
    """Cut memory into views that end at these blocks."""
    return tuple(memory[s * ALIGNMENT : e * ALIGNMENT] for s, e in zip((0, *ends), ends, strict=False))


class Kernel:
    """The kernel's calls as ``drive_queue.c`` makes them, to be replaced: each is an attribute."""

    FORMS: ClassVar = {
        "setup": (ctypes.c_uint, ctypes.c_void_p),
        "submit": (ctypes.c_ulong, ctypes.c_long, ctypes.c_void_p),
        "getevents": (ctypes.c_ulong, ctypes.c_long, ctypes.c_void_p),
    }

    def __init__(self):
        library, _ = aio.library()
        self.__dict__["places"] = {name: ctypes.c_void_p.in_dll(library, f"kernel_{name}") for name in self.FORMS}
        self.__dict__["real"] = {name: place.value for name, place in self.places.items()}
        self.__dict__["kept"] = []  # what C may still call

    def __getattr__(self, name):
        return ctypes.CFUNCTYPE(ctypes.c_long, *self.FORMS[name])(self.real[name])

    def __setattr__(self, name, call):
        self.kept.append(ctypes.CFUNCTYPE(ctypes.c_long, *self.FORMS[name])(call))
        self.places[name].value = ctypes.cast(self.kept[-1], ctypes.c_void_p).value

    def restore(self):
        for name, address in self.real.items():
            self.places[name].value = address


@pytest.fixture
def kernel(needs_queue):
    found = Kernel()
    yield found
    found.restore()


def opcode(calls):
    """Return that of the first of these ``struct iocb``; None of none, as where a queue begins."""
    return calls and ctypes.c_uint16.from_address(ctypes.c_uint64.from_address(calls).value + 16).value


def singles(fd, memory, count):
    return [Transfer(fd, at * ALIGNMENT, (view,)) for at, view in enumerate(blocks(memory, *range(1, count + 1)))]


# -- threads -----------------------------------------------------------------------------------


@pytest.fixture
def device(fd):
    made = PosixDevice(threads=4, kernel_queue=False)
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


@pytest.mark.parametrize("most_bytes", [ALIGNMENT, 3 * ALIGNMENT, 1000, ALIGNMENT + 512])
def test_a_call_that_stops_short_is_continued_unless_within_a_block(device, fd, monkeypatch, most_bytes):
    fcntl.fcntl(fd, fcntl.F_SETFL, 0)  # not direct, which would move no part of a block
    monkeypatch.setattr(os, "preadv", short(os.preadv, most_bytes))
    monkeypatch.setattr(os, "pwritev", short(os.pwritev, most_bytes))
    memory = make_memory(7 * ALIGNMENT)
    data = fill(memory, 1)
    views = blocks(memory, 2, 3, 7)
    if most_bytes % ALIGNMENT:
        assert run(device, Op.WRITE, Transfer(fd, ALIGNMENT, views)) == {0: errno.EIO}
        return
    assert run(device, Op.WRITE, Transfer(fd, ALIGNMENT, views)) == {}
    assert os.pread(fd, 7 * ALIGNMENT, ALIGNMENT) == data
    memory[:] = bytes(len(memory))
    assert run(device, Op.READ, Transfer(fd, ALIGNMENT, views)) == {}
    assert memory == data


def test_a_call_that_python_refuses_is_an_error_and_the_threads_live_on(device, fd, monkeypatch):
    refuse = Mock(side_effect=ValueError("operation forbidden on released memoryview object"))
    batch = [Transfer(fd, 0, (make_memory(ALIGNMENT),))] * 8
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        assert run(device, Op.WRITE, *batch) == dict.fromkeys(range(8), errno.EFAULT)
    assert run(device, Op.WRITE, *batch) == {}


# -- both --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel_queue", [True, False])
def test_what_is_no_memory_of_the_host_fails_and_nothing_else(fd, monkeypatch, kernel_queue):
    monkeypatch.setattr(aio, "serves", lambda _fd: True)
    device = PosixDevice(kernel_queue=kernel_queue)
    device.attach_file(fd)
    memory = make_memory(ALIGNMENT)
    batch = [Transfer(fd, 0, (GpuRange(1 << 40, ALIGNMENT, None),)), Transfer(fd, ALIGNMENT, (memory.toreadonly(),))]
    assert run(device, Op.WRITE, *batch) == {0: errno.EFAULT}
    assert run(device, Op.WRITE, batch[1]) == {}
    device.close()


@pytest.mark.parametrize("kernel_queue", [True, False])
def test_writes_that_hang_hold_up_no_read(fd, monkeypatch, kernel, kernel_queue):
    """As on a file system that is frozen: the submission of a write does not come back."""
    go, begun = threading.Event(), threading.Event()

    def hanging(real, is_write):
        def call(*arguments):
            if is_write(*arguments):
                begun.set()
                assert go.wait(WAIT_S)
            return real(*arguments)

        return call

    kernel.submit = hanging(kernel.submit, lambda _context, _count, calls: opcode(calls) == aio._OPCODES[Op.WRITE])
    monkeypatch.setattr(os, "pwritev", hanging(os.pwritev, lambda *_: True))
    monkeypatch.setattr(aio, "serves", lambda _fd: True)
    device = PosixDevice(threads=2, kernel_queue=kernel_queue)
    device.attach_file(fd)
    late = {device.submit(Op.WRITE, [each]) for each in singles(fd, make_memory(8 * ALIGNMENT), 8)}
    assert begun.wait(WAIT_S)
    for each in singles(fd, make_memory(3 * ALIGNMENT), 3):
        ticket = device.submit(Op.READ, [each])
        assert device.poll(WAIT_S) == [(ticket, {})]
    go.set()
    assert {outcome.ticket for outcome in device.drain() if not outcome.errors} == late
    device.close()


def no_setup(number):
    def lose(kernel, _monkeypatch):
        kernel.setup = lambda _most, _context: -number

    return lose


def no_library(_kernel, monkeypatch):
    monkeypatch.setattr(aio, "__file__", "/nowhere/aio.py")
    monkeypatch.setattr(aio, "library", aio.library.__wrapped__)


@pytest.mark.parametrize(
    ("lose", "why"),
    [
        (no_setup(errno.EAGAIN), "fs.aio-max-nr is used up"),
        (no_setup(errno.EPERM), "refuses io_setup (Operation not permitted)"),
        (no_library, "install gcc and libc6-dev"),
    ],
)
def test_without_a_queue_threads_serve_and_that_is_said_once(fd, monkeypatch, caplog, kernel, lose, why):
    lose(kernel, monkeypatch)
    monkeypatch.setattr(aio, "serves", lambda _fd: True)
    posix._say_lost.cache_clear()
    with caplog.at_level(logging.WARNING, "kvdisk"):
        for _ in range(2):
            device = PosixDevice(threads=2)
            device.attach_file(fd)
            assert device.name == "posix-threads" and why in device.without_queue
            assert run(device, Op.READ, Transfer(fd, 0, (make_memory(ALIGNMENT),))) == {}
            device.close()
    (record,) = caplog.records
    assert "threads" in record.getMessage() and why in record.getMessage()


# -- the kernel's queue ------------------------------------------------------------------------


@pytest.fixture
def done():
    return queue.SimpleQueue()


@pytest.fixture
def drive(done, needs_queue):
    made = aio.KernelQueue("kvdisk-test", done.put)
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvdisk-test")]


@pytest.mark.parametrize("moved", [ALIGNMENT, 4 * ALIGNMENT, 5 * ALIGNMENT, 1000, 0])
def test_a_call_that_stops_short_in_the_kernel_is_continued(kernel, drive, done, fd, path, moved):
    """The first call to end moves less, as far as anybody hears."""
    real, ends = kernel.getevents, []

    def getevents(context, most, events):
        count = real(context, most, events)
        if count and not ends:
            ctypes.c_int64.from_address(events + 16).value = moved
        ends.extend([0] * count)
        return count

    kernel.getevents = getevents
    memory = make_memory(8 * ALIGNMENT)
    data = fill(memory, 1)
    path.write_bytes(data)
    memory[:] = bytes(len(memory))
    second, first = blocks(memory, 4, 8)
    assert drive.put(5, Op.READ, [(0, Transfer(fd, 0, (first, second)))], ALIGNMENT) == 1
    continued = moved > 0 and moved % ALIGNMENT == 0
    assert done.get(timeout=WAIT_S) == Outcome(5, {} if continued else {0: errno.EIO})
    assert bytes(first) + bytes(second) == data
    assert len(ends) == 1 + continued, "the rest was another call"


def test_a_full_queue_takes_the_rest_later(kernel, drive, done, fd):
    real, counts = kernel.submit, []

    def submit(context, count, calls):
        counts.append(count)
        return -errno.EAGAIN if len(counts) % 2 else real(context, 1, calls)

    kernel.submit = submit
    drive.put(1, Op.READ, list(enumerate(singles(fd, make_memory(3 * ALIGNMENT), 3))), ALIGNMENT)
    assert done.get(timeout=WAIT_S) == Outcome(1, {})
    assert counts == [3, 3, 2, 2, 1, 1]


def test_what_has_ended_is_told_while_the_kernel_takes_no_more(kernel, drive, done, fd):
    submit, getevents, full, go = kernel.submit, kernel.getevents, threading.Event(), threading.Event()

    def submit_one(context, count, calls):
        if first:
            first.pop()
            return submit(context, 1, calls)
        full.set()
        return submit(context, 1, calls) if go.is_set() else -errno.EAGAIN

    first = [True]
    kernel.submit = submit_one
    kernel.getevents = lambda *arguments: getevents(*arguments) if full.is_set() else 0
    one, other = singles(fd, make_memory(2 * ALIGNMENT), 2)
    drive.put(1, Op.READ, [(0, one)], ALIGNMENT)
    drive.put(2, Op.READ, [(0, other)], ALIGNMENT)
    assert done.get(timeout=WAIT_S) == Outcome(1, {})
    go.set()
    assert done.get(timeout=WAIT_S) == Outcome(2, {})


def test_calls_that_the_kernel_refuses_fail_alone(kernel, drive, done, fd):
    real = kernel.submit
    kernel.submit = lambda context, count, calls: -errno.EBADF if count == 2 else real(context, 1, calls)
    drive.put(1, Op.READ, list(enumerate(singles(fd, make_memory(3 * ALIGNMENT), 3))), ALIGNMENT)
    assert done.get(timeout=WAIT_S) == Outcome(1, {1: errno.EBADF})


def test_where_the_kernel_refuses_all_that_it_is_given_the_rest_is_given_too(kernel, drive, done, fd):
    real, count = kernel.submit, 2 * aio.AHEAD_BYTES // aio.LONGEST_BYTES
    kernel.submit = lambda context, count, calls: -errno.EPERM
    batch = [(at, Transfer(fd, 0, (make_memory(aio.LONGEST_BYTES),))) for at in range(count)]
    drive.put(1, Op.READ, batch, 4 * aio.LONGEST_BYTES)
    assert done.get(timeout=WAIT_S) == Outcome(1, dict.fromkeys(range(count), errno.EPERM))
    kernel.submit = real
    drive.put(2, Op.READ, list(enumerate(singles(fd, make_memory(ALIGNMENT), 1))), ALIGNMENT)
    assert done.get(timeout=WAIT_S) == Outcome(2, {})


def test_a_library_of_another_version_is_not_used(monkeypatch, needs_queue):
    monkeypatch.setattr(aio, "_LAYOUT", aio._LAYOUT + 1)
    with pytest.raises(OSError, match="another version"):
        aio.library.__wrapped__()


def test_a_short_batch_is_not_held_up_by_a_long_one_before_it(kernel, drive, done, fd):
    """Of the long batch the kernel is given one call, and the others when all is over."""
    real, begun, held = kernel.submit, threading.Event(), []

    def only_the_first(context, count, calls):
        real(context, 1, calls)
        held.extend((context, call) for call in (ctypes.c_uint64 * count).from_address(calls)[1:])
        begun.set()
        return count

    kernel.submit = only_the_first
    *long, short = singles(fd, make_memory(4 * ALIGNMENT), 4)
    drive.put(1, Op.READ, list(enumerate(long)), ALIGNMENT)
    assert begun.wait(WAIT_S)
    drive.put(2, Op.READ, [(0, short)], ALIGNMENT)
    assert done.get(timeout=WAIT_S).ticket == 2
    for context, call in held:
        real(context, 1, ctypes.addressof(ctypes.c_uint64(call)))
    assert done.get(timeout=WAIT_S) == Outcome(1, {})


def test_writes_make_way_while_reads_are_under_way(kernel, drive, done, fd):
    """One call at a time, large as it is, until the last read has ended."""
    go, reading, given = threading.Event(), threading.Event(), []
    real = kernel.submit

    def submit(context, count, calls):
        if opcode(calls) == aio._OPCODES[Op.READ]:
            reading.set()
            assert go.wait(WAIT_S)
        elif calls:
            given.append(count)
        return real(context, count, calls)

    kernel.submit = submit
    writes = aio.KernelQueue("kvdisk-test-write", done.put, reads=drive)
    memory = make_memory(aio.LONGEST_BYTES)
    ahead = aio.WRITES_AHEAD_BYTES // aio.LONGEST_BYTES
    batch = [(at, Transfer(fd, 0, (memory,))) for at in range(2 * ahead)]
    try:
        drive.put(1, Op.READ, batch[:1], 4 * aio.LONGEST_BYTES)
        assert reading.wait(WAIT_S)
        writes.put(2, Op.WRITE, batch, 4 * aio.LONGEST_BYTES)
        assert done.get(timeout=WAIT_S) == Outcome(2, {})
        assert given == [1] * len(batch)
        go.set()
        assert done.get(timeout=WAIT_S) == Outcome(1, {})
        given.clear()
        writes.put(3, Op.WRITE, batch, 4 * aio.LONGEST_BYTES)
        assert done.get(timeout=WAIT_S) == Outcome(3, {})
        assert max(given) == ahead
    finally:
        go.set()
        writes.close()
