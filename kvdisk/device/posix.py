# SPDX-License-Identifier: Apache-2.0
"""The device that needs nothing but the kernel: ``preadv`` and ``pwritev`` on a few threads.

While Python code runs elsewhere in the process, each system call waits for the interpreter lock when it
returns. So few long calls are made: a batch is cut into about as many tasks as there are threads, each
a list of calls of up to ``longest_bytes``; the kernel keeps the drive busy within a long call.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvdisk.device.base import Buffer, Op, Outcome, Transfer
from kvdisk.geometry import ALIGNMENT, round_up

MOST_BUFFERS = 1024
"""IOV_MAX of Linux: buffers of one call."""
SHORTEST_BYTES = 1 << 20
"""A task is not cut smaller than this: a drive reaches its speed at 1-2 MiB in a few calls at once."""
LONGEST_BYTES = 16 << 20


class _Call(NamedTuple):
    """One system call's worth of the transfer at ``position`` in its batch."""

    position: int
    fd: int
    offset: int
    buffers: list[Buffer]


class _Task(NamedTuple):
    """What a thread does before it reports."""

    ticket: int
    op: Op
    calls: list[_Call]


class _Done(NamedTuple):
    """A task that has ended, with errno by position of the failed transfers."""

    ticket: int
    errors: dict[int, int]


class PosixDevice:
    """``Device`` over system calls on ``threads`` threads for each drive, in files opened with O_DIRECT or without.

    A transfer of a file that is not attached fails with EBADF, so that a descriptor number used anew by
    somebody else is never written to. Errors of a transfer are those of its first failed call in time.
    """

    def __init__(self, threads: int = 4, *, longest_bytes: int = LONGEST_BYTES) -> None:
        assert threads > 0
        assert longest_bytes > 0
        assert longest_bytes % ALIGNMENT == 0
        self._thread_count = threads
        self._longest_bytes = longest_bytes
        self._files: dict[int, int] = {}
        """Number of the drive that a file lies on (``st_dev``), by descriptor."""
        self._tickets = 0
        self._in_flight: dict[int, tuple[int, dict[int, int]]] = {}
        """Tasks that have not reported, and errors so far, by ticket."""
        self._done: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._tasks: dict[int, queue.SimpleQueue[_Task | None]] = {}
        """By drive, each with threads of its own: those of one that hangs are of no use to the others."""
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def name(self) -> str:
        """See ``Device``."""
        return "posix"

    def attach_memory(self, memory: Buffer) -> None:
        """See ``Device``; system calls need no registration."""

    def attach_file(self, fd: int) -> None:
        """See ``Device``."""
        try:
            drive = os.fstat(fd).st_dev
        except OSError:
            drive = -1  # its transfers will say what is wrong with it
        self._files[fd] = drive
        if drive not in self._tasks:
            tasks = self._tasks[drive] = queue.SimpleQueue()
            for number in range(self._thread_count):
                name = f"kvdisk-posix-{len(self._tasks)}-{number}"
                thread = threading.Thread(target=_work, args=(tasks, self._done), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def detach_file(self, fd: int) -> None:
        """See ``Device``."""
        self._files.pop(fd, None)

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        """See ``Device``."""
        assert not self._closed, "the device is closed"
        assert batch
        self._tickets += 1
        ticket = self._tickets
        errors: dict[int, int] = {}
        known: dict[int, list[tuple[int, Transfer]]] = {}
        total_bytes = 0
        for position, transfer in enumerate(batch):
            total_bytes += _checked_bytes(op, transfer)
            drive = self._files.get(transfer.fd)
            if drive is None:
                errors[position] = errno.EBADF
            else:
                known.setdefault(drive, []).append((position, transfer))
        share_bytes = round_up(-(-total_bytes // self._thread_count), ALIGNMENT)
        task_bytes = min(max(share_bytes, SHORTEST_BYTES), self._longest_bytes)
        tasks = [(drive, _Task(ticket, op, calls)) for drive, part in known.items() for calls in _cut(part, task_bytes)]
        self._in_flight[ticket] = (max(1, len(tasks)), errors)
        for drive, task in tasks:
            self._tasks[drive].put(task)
        if not tasks:
            self._done.put(_Done(ticket, {}))
        return ticket

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        """See ``Device``."""
        ended: list[Outcome] = []
        self._collect(ended)
        deadline = time.monotonic() + timeout_s
        while not ended and self._in_flight:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                break
            try:
                self._note(self._done.get(timeout=remaining_s), ended)
            except queue.Empty:
                break
            self._collect(ended)
        return ended

    def drain(self) -> list[Outcome]:
        """See ``Device``."""
        ended: list[Outcome] = []
        while self._in_flight:
            self._note(self._done.get(), ended)
        return ended

    def close(self) -> None:
        """See ``Device``."""
        self.drain()
        self._closed = True
        for tasks in self._tasks.values():
            for _ in range(self._thread_count):
                tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._tasks = {}

    def _collect(self, ended: list[Outcome]) -> None:
        while True:
            try:
                self._note(self._done.get_nowait(), ended)
            except queue.Empty:
                return

    def _note(self, done: _Done, ended: list[Outcome]) -> None:
        tasks_left, errors = self._in_flight[done.ticket]
        for position, number in done.errors.items():
            errors.setdefault(position, number)
        if tasks_left > 1:
            self._in_flight[done.ticket] = (tasks_left - 1, errors)
        else:
            del self._in_flight[done.ticket]
            ended.append(Outcome(done.ticket, errors))


def _checked_bytes(op: Op, transfer: Transfer) -> int:
    assert transfer.offset >= 0
    assert transfer.offset % ALIGNMENT == 0
    assert transfer.buffers
    total_bytes = 0
    for buffer in transfer.buffers:
        assert buffer.nbytes > 0
        assert buffer.nbytes % ALIGNMENT == 0
        assert op is Op.WRITE or not buffer.readonly
        total_bytes += buffer.nbytes
    return total_bytes


def _cut(known: Sequence[tuple[int, Transfer]], task_bytes: int) -> Iterator[list[_Call]]:
    """Yield the calls of tasks of up to ``task_bytes`` (a multiple of ALIGNMENT) each, in order of the batch."""
    calls: list[_Call] = []
    room_bytes = task_bytes
    for position, transfer in known:
        offset = transfer.offset
        buffers: list[Buffer] = []
        for buffer in transfer.buffers:
            rest = buffer
            while rest.nbytes:
                if not buffers:
                    calls.append(_Call(position, transfer.fd, offset, buffers))
                piece = rest[:room_bytes]
                buffers.append(piece)
                offset += piece.nbytes
                room_bytes -= piece.nbytes
                rest = rest[piece.nbytes :]
                if not room_bytes:
                    yield calls
                    calls, buffers, room_bytes = [], [], task_bytes
                elif len(buffers) == MOST_BUFFERS:
                    buffers = []
    if calls:
        yield calls


def _work(tasks: queue.SimpleQueue[_Task | None], done: queue.SimpleQueue[_Done]) -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        errors: dict[int, int] = {}
        for call in task.calls:
            number = _run(task.op, call)
            if number:
                errors.setdefault(call.position, number)
        report = _Done(task.ticket, errors)
        # Whoever hears of the end may release the memory: no view of it may be left in this frame.
        del task, call
        done.put(report)


def _run(op: Op, call: _Call) -> int:
    """Move every byte of a call; return 0 or the errno of the failure."""
    move = os.preadv if op is Op.READ else os.pwritev
    offset, buffers = call.offset, call.buffers
    try:
        while buffers:
            try:
                moved = move(call.fd, buffers, offset)
            except InterruptedError:
                continue
            if moved <= 0 or moved % ALIGNMENT:
                return errno.EIO  # the end of the file, or a rest that O_DIRECT cannot go on from
            offset += moved
            buffers = _without(buffers, moved)
    except OSError as error:
        return error.errno or errno.EIO
    except Exception:
        return errno.EFAULT  # Python refused the buffers; a thread that died of it would never report
    return 0


def _without(buffers: list[Buffer], moved: int) -> list[Buffer]:
    """Return what is left of ``buffers`` after their first ``moved`` bytes."""
    for position, buffer in enumerate(buffers):
        if moved < buffer.nbytes:
            return [buffer[moved:], *buffers[position + 1 :]]
        moved -= buffer.nbytes
    return []
