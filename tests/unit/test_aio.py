# SPDX-License-Identifier: Apache-2.0
"""The kernel's queue: calls that stop short, refused and failing submissions, and which files it is
for."""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading

import pytest

from kvdisk.device import aio, posix
from kvdisk.device.base import Op, Transfer
from kvdisk.device.base import Outcome as Done
from kvdisk.device.posix import PosixDevice
from kvdisk.geometry import ALIGNMENT
from kvdisk.testing.device_conformance import WAIT_S, fill, make_memory


@pytest.fixture
def fd(tmp_path):
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(number, 0, 2 * aio.LONGEST_BYTES)
    yield number
    os.close(number)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


@pytest.fixture
def done():
    return queue.SimpleQueue()


@pytest.fixture
def cut_short(monkeypatch):
    """Each first call moves one block only, as far as anybody hears. By number: whether it was."""
    real, found = aio._Kernel.getevents, {}

    def getevents(kernel, context, least, most, events, timeout):
        count = real(kernel, context, least, most, events, timeout)
        raw = memoryview(events).cast("B")
        for at in range(0, count * aio._EVENT.size, aio._EVENT.size):
            number, iocb, result, result2 = aio._EVENT.unpack_from(raw, at)
            if found.setdefault(number, not found):
                result = ALIGNMENT
            aio._EVENT.pack_into(raw, at, number, iocb, result, result2)
        return count

    monkeypatch.setattr(aio._Kernel, "getevents", getevents)
    return found


@pytest.fixture
def drive(done):
    made = aio.KernelQueue("kvdisk-test", done.put)
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvdisk-test")]


def test_a_call_that_stops_short_is_continued(cut_short, drive, done, fd, path):
    memory = make_memory(8 * ALIGNMENT)
    data = fill(memory, 1)
    path.write_bytes(data)
    memory[:] = bytes(len(memory))
    views = (memory[4 * ALIGNMENT :], memory[: 4 * ALIGNMENT])
    assert drive.put(5, Op.READ, [(0, Transfer(fd, 0, views))], ALIGNMENT) == 1
    assert done.get(timeout=WAIT_S) == Done(5, {})
    assert bytes(views[0]) + bytes(views[1]) == data
    assert list(cut_short.values()) == [True, False], "the rest was another call"


def test_a_full_queue_takes_the_rest_later(drive, done, fd, monkeypatch):
    real, calls = aio._Kernel.submit, []

    def submit(kernel, context, count, pointers):
        calls.append(count)
        if len(calls) % 2:
            raise OSError(errno.EAGAIN, "full")
        return real(kernel, context, 1, pointers)

    monkeypatch.setattr(aio._Kernel, "submit", submit)
    memory = make_memory(3 * ALIGNMENT)
    batch = [(at, Transfer(fd, at * ALIGNMENT, (memory[at * ALIGNMENT :][:ALIGNMENT],))) for at in range(3)]
    drive.put(1, Op.READ, batch, ALIGNMENT)
    assert done.get(timeout=WAIT_S) == Done(1, {})
    assert calls == [3, 3, 2, 2, 1, 1]


def test_a_short_batch_is_not_held_up_by_a_long_one_before_it(drive, done, fd, monkeypatch):
    """The reaper waits for many ends at once, but not for ever: here the long batch never ends."""
    real, begun = aio._Kernel.submit, threading.Event()

    def only_the_first(kernel, context, count, pointers):
        real(kernel, context, 1, pointers)
        begun.set()
        return count

    memory = make_memory(4 * ALIGNMENT)
    long = [(at, Transfer(fd, 0, (memory[at * ALIGNMENT :][:ALIGNMENT],))) for at in range(3)]
    monkeypatch.setattr(aio._Kernel, "submit", only_the_first)
    drive.put(1, Op.READ, long, ALIGNMENT)
    assert begun.wait(WAIT_S)
    drive.put(2, Op.READ, [(0, Transfer(fd, 0, (memory[3 * ALIGNMENT :],)))], ALIGNMENT)
    assert done.get(timeout=WAIT_S).ticket == 2


def test_writes_make_way_while_reads_are_under_way(drive, done, fd, monkeypatch):
    """One call at a time, large as it is, until the last read has ended."""
    go, reading, given = threading.Event(), threading.Event(), []
    writes = aio.KernelQueue("kvdisk-test-write", done.put, reads=drive)
    real = aio._Kernel.submit

    def submit(kernel, context, count, pointers):
        if context is drive._context:
            reading.set()
            assert go.wait(WAIT_S)
        else:
            given.append(writes._bytes)
        return real(kernel, context, count, pointers)

    monkeypatch.setattr(aio._Kernel, "submit", submit)
    memory = make_memory(aio.LONGEST_BYTES)
    batch = [(at, Transfer(fd, 0, (memory,))) for at in range(2 * aio.AHEAD_BYTES // aio.LONGEST_BYTES)]
    try:
        drive.put(1, Op.READ, batch[:1], 4 * aio.LONGEST_BYTES)
        assert reading.wait(WAIT_S)
        writes.put(2, Op.WRITE, batch, 4 * aio.LONGEST_BYTES)
        assert done.get(timeout=WAIT_S) == Done(2, {})
        assert given == [aio.LONGEST_BYTES] * len(batch)
        go.set()
        assert done.get(timeout=WAIT_S) == Done(1, {})
        given.clear()
        writes.put(3, Op.WRITE, batch, 4 * aio.LONGEST_BYTES)
        assert done.get(timeout=WAIT_S) == Done(3, {})
        assert max(given) == aio.AHEAD_BYTES
    finally:
        go.set()
        writes.close()


@pytest.mark.parametrize(("number", "why"), [(errno.EAGAIN, "fs.aio-max-nr"), (errno.EPERM, "refuses it (refused)")])
def test_a_kernel_that_offers_none_is_served_by_threads_and_that_is_said_once(fd, monkeypatch, caplog, number, why):
    def refuse(_kernel, _most_events):
        raise OSError(number, "refused")

    monkeypatch.setattr(aio, "serves", lambda _fd: True)
    monkeypatch.setattr(aio._Kernel, "setup", refuse)
    posix._say_lost.cache_clear()
    with caplog.at_level(logging.WARNING, "kvdisk"):
        for _ in range(2):
            device = PosixDevice(threads=2)
            device.attach_file(fd)
            assert device.name == "posix-threads"
            device.submit(Op.READ, [Transfer(fd, 0, (make_memory(ALIGNMENT),))])
            assert [outcome.errors for outcome in device.drain()] == [{}]
            device.close()
    (record,) = caplog.records
    assert "threads" in record.getMessage() and why in record.getMessage()
