# SPDX-License-Identifier: Apache-2.0
"""The kernel's queue: calls that stop short, refused and failing submissions, and which files it is
for."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import queue
import threading

import pytest

from kvdisk.device import aio, posix
from kvdisk.device.base import Op, Transfer
from kvdisk.device.batches import Done
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
def edits(monkeypatch):
    """What is in it changes (number, result) of each event of the kernel's."""
    real, found = aio._Kernel.getevents, []

    def getevents(kernel, context, least, most, events, timeout):
        count = real(kernel, context, least, most, events, timeout)
        raw = memoryview(events).cast("B")
        for at in range(0, count * aio._EVENT.size, aio._EVENT.size):
            number, iocb, result, result2 = aio._EVENT.unpack_from(raw, at)
            for edit in found:
                result = edit(number, result)
            aio._EVENT.pack_into(raw, at, number, iocb, result, result2)
        return count

    monkeypatch.setattr(aio._Kernel, "getevents", getevents)
    return found


@pytest.fixture
def drive(done, edits):
    made = aio.KernelQueue("kvdisk-test", done.put)
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvdisk-test")]


def kernel_names():
    return [t.name for t in threading.enumerate() if t.name.startswith("kvdisk-posix") and t.name.endswith("-reap")]


def test_a_call_that_stops_short_is_continued(drive, done, fd, path, edits):
    cut = {}

    def shorten(number, result):
        """Each first call moves one block only, as far as anybody hears."""
        return result if cut.setdefault(number, not cut) is False else ALIGNMENT

    memory = make_memory(8 * ALIGNMENT)
    data = fill(memory, 1)
    path.write_bytes(data)
    memory[:] = bytes(len(memory))
    edits.append(shorten)
    views = (memory[4 * ALIGNMENT :], memory[: 4 * ALIGNMENT])
    assert drive.put(5, Op.READ, [(0, Transfer(fd, 0, views))], ALIGNMENT) == 1
    assert done.get(timeout=WAIT_S) == Done(5, {})
    assert bytes(views[0]) + bytes(views[1]) == data
    assert list(cut.values()) == [True, False], "the rest was another call"


def test_calls_that_the_kernel_refuses_do_not_hold_up_the_others(drive, done, fd, path, tmp_path):
    gone = os.open(tmp_path / "gone", os.O_RDWR | os.O_CREAT, 0o600)
    os.close(gone)
    memory = make_memory(4 * ALIGNMENT)
    data = fill(memory, 2)
    views = [memory[at * ALIGNMENT :][:ALIGNMENT] for at in range(4)]
    places = [Transfer(gone if at % 2 else fd, at * ALIGNMENT, (view,)) for at, view in enumerate(views)]
    drive.put(1, Op.WRITE, list(enumerate(places)), ALIGNMENT)
    assert done.get(timeout=WAIT_S) == Done(1, {1: errno.EBADF, 3: errno.EBADF})
    assert path.read_bytes()[:ALIGNMENT] == data[:ALIGNMENT]


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


def test_memory_cannot_go_away_under_a_batch(drive, done, fd, monkeypatch):
    go, started = threading.Event(), threading.Event()
    real = aio._Kernel.submit

    def late(*arguments):
        started.set()
        assert go.wait(WAIT_S)
        return real(*arguments)

    monkeypatch.setattr(aio._Kernel, "submit", late)
    mapping = mmap.mmap(-1, ALIGNMENT)
    with memoryview(mapping) as memory:
        drive.put(1, Op.WRITE, [(0, Transfer(fd, 0, (memory,)))], ALIGNMENT)
    assert started.wait(WAIT_S)
    with pytest.raises(BufferError):
        mapping.close()
    go.set()
    assert done.get(timeout=WAIT_S) == Done(1, {})
    mapping.close()


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


@pytest.mark.parametrize("served", [True, False])
def test_a_device_has_queues_for_each_drive_and_kind(fd, path, tmp_path, monkeypatch, served):
    monkeypatch.setattr(aio, "serves", lambda number: served and number == fd)
    buffered = os.open(tmp_path / "buffered", os.O_RDWR | os.O_CREAT, 0o600)
    device = PosixDevice(threads=2)
    try:
        for number in (fd, buffered, fd):
            device.attach_file(number)
        assert len(kernel_names()) == (2 if served else 0), "of each direction one"
        memory = make_memory(2 * ALIGNMENT)
        data = fill(memory, 3)
        device.submit(Op.WRITE, [Transfer(fd, 0, (memory[:ALIGNMENT],)), Transfer(buffered, 0, (memory[ALIGNMENT:],))])
        assert [outcome.errors for outcome in device.drain()] == [{}]
        assert path.read_bytes()[:ALIGNMENT] + os.pread(buffered, ALIGNMENT, 0) == data
    finally:
        device.close()
        os.close(buffered)
    assert kernel_names() == []


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.EAGAIN, "fs.aio-max-nr is used up"),
        (errno.ENOSYS, "refuses it (refused)"),
        (errno.EPERM, "refuses it (refused)"),
    ],
)
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
            assert kernel_names() == []
            device.submit(Op.READ, [Transfer(fd, 0, (make_memory(ALIGNMENT),))])
            assert [outcome.errors for outcome in device.drain()] == [{}]
            device.close()
    (record,) = caplog.records
    assert "threads" in record.getMessage() and why in record.getMessage()
