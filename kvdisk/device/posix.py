# SPDX-License-Identifier: Apache-2.0
"""The device that needs nothing but the kernel: its own queue, or ``preadv`` and ``pwritev`` on a
few threads.

While Python code runs elsewhere in the process, each system call waits for the interpreter lock
when it returns. So few calls are made: the kernel's queue (``aio``) takes a whole batch in one
call, and for threads a batch is cut into about as many tasks as there are threads.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvdisk.device import aio
from kvdisk.device.base import Buffer, Op, Outcome, Transfer
from kvdisk.device.batches import Call, DriveQueue, cut, without
from kvdisk.device.paths import refusal
from kvdisk.errors import NoThread, start_thread
from kvdisk.geometry import ALIGNMENT, round_up

SHORTEST_BYTES = 1 << 20
"""The least bytes of one thread's task: a drive reaches its speed at 1-2 MiB in a few calls at
once."""
LONGEST_BYTES = 16 << 20

logger = logging.getLogger("kvdisk.device")


Run: TypeAlias = Callable[[Op, Call], int]
"""Moves every byte of a call. Returns 0, or the errno of the failure."""


class _ThreadQueue:
    """``DriveQueue`` of threads, each of which waits in its system call."""

    way = "threads"

    def __init__(self, name: str, count: int, report: Callable[[Outcome], None], run: Run, longest_bytes: int) -> None:
        self._report = report
        self._run = run
        self._longest_bytes = longest_bytes
        self._tasks: queue.SimpleQueue[tuple[int, Op, list[Call]] | None] = queue.SimpleQueue()
        """The tasks to do: a ticket, and the calls that a thread makes before it reports. None ends
        a thread."""
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            start_thread(thread)

    def put(self, ticket: int, op: Op, known: Sequence[tuple[int, Transfer]], batch_bytes: int) -> int:
        share_bytes = round_up(-(-batch_bytes // len(self._threads)), ALIGNMENT)
        task_bytes = min(max(share_bytes, SHORTEST_BYTES), self._longest_bytes)
        tasks = [(ticket, op, calls) for calls in cut(known, task_bytes)]
        for task in tasks:
            self._tasks.put(task)
        return len(tasks)

    def close(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            ticket, op, calls = task
            errors: dict[int, int] = {}
            for call in calls:
                number = self._run(op, call)
                if number:
                    errors.setdefault(call.position, number)
            # Whoever gets the report may release the memory: no view of it may be left in this
            # frame.
            del task, calls, call
            self._report(Outcome(ticket, errors))


class PosixDevice:
    """``Device`` over system calls, with a queue for each drive and direction.

    ``threads``: of each queue that is not the kernel's. ``longest_bytes``: the most bytes of a
    call. ``kernel_queue``: False uses threads for all. A transfer of a file that is not attached
    fails with EBADF: so a descriptor number that somebody else uses by now is never written to. The
    error of a transfer is that of its first call to fail.
    """

    def __init__(self, threads: int = 4, *, longest_bytes: int = LONGEST_BYTES, kernel_queue: bool = True) -> None:
        assert threads > 0
        assert longest_bytes > 0
        assert longest_bytes % ALIGNMENT == 0
        self.kernel_queue = kernel_queue
        self.without_queue = ""
        """Why the kernel's queue does not serve the last drive for which it was wanted; "" where it
        does."""
        self._threads = threads
        self._longest_bytes = longest_bytes
        self._files: dict[int, dict[Op, DriveQueue]] = {}
        """The queues of the drive that a file is on, by descriptor."""
        self._queues: dict[tuple[int, bool], dict[Op, DriveQueue]] = {}
        """The queues, by drive (``st_dev``) and whether the kernel's are wanted. Each drive has its
        own: one that hangs does not hold up the others."""
        self._last_ticket = 0
        self._in_flight: dict[int, tuple[int, dict[int, int]]] = {}
        """The number of reports that are still to come, and the errors so far, by ticket."""
        self._done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        """What the queues' threads have reported."""
        self._closed = False

    @property
    def name(self) -> str:
        """See ``Device``. With a file attached it says what serves: ``posix-aio``,
        ``posix-threads``, or both."""
        ways = {place.way for places in self._queues.values() for place in places.values()}
        return f"posix-{'/'.join(sorted(ways))}" if ways else "posix"

    def attach_memory(self, memory: Buffer) -> None:
        """See ``Device``. Does nothing: system calls need no registration."""

    def attach_file(self, fd: int) -> None:
        place = os.fstat(fd).st_dev, self.kernel_queue and aio.serves(fd)
        if self.kernel_queue and not place[1]:
            self.without_queue = aio.NOT_ASYNCHRONOUS
        if place not in self._queues:
            self._queues[place] = self._make_queues(in_kernel=place[1])
        self._files[fd] = self._queues[place]

    def detach_file(self, fd: int) -> None:
        self._files.pop(fd, None)

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        assert not self._closed, "the device is closed"
        assert batch
        self._last_ticket += 1
        errors: dict[int, int] = {}
        known: dict[DriveQueue, list[tuple[int, Transfer]]] = {}
        batch_bytes = 0
        for position, transfer in enumerate(batch):
            batch_bytes += _checked_bytes(op, transfer)
            places = self._queues_of(transfer)
            if places is None:
                errors[position] = errno.EBADF
            else:
                known.setdefault(places[op], []).append((position, transfer))
        reports = sum(place.put(self._last_ticket, op, part, batch_bytes) for place, part in known.items())
        self._in_flight[self._last_ticket] = (max(1, reports), errors)
        if not reports:
            self._done.put(Outcome(self._last_ticket, {}))
        return self._last_ticket

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        ended: list[Outcome] = []
        deadline_s = time.monotonic() + timeout_s
        while self._in_flight:
            remaining_s = 0.0 if ended else deadline_s - time.monotonic()
            try:
                done = self._done.get(timeout=remaining_s) if remaining_s > 0 else self._done.get_nowait()
            except queue.Empty:
                break
            self._count_report(done, ended)
        return ended

    def drain(self) -> list[Outcome]:
        ended: list[Outcome] = []
        while self._in_flight:
            self._count_report(self._done.get(), ended)
        return ended

    def close(self) -> None:
        self.drain()
        self._closed = True
        for places in self._queues.values():
            for place in places.values():
                place.close()
        self._queues.clear()
        self._files.clear()

    def _queues_of(self, transfer: Transfer) -> dict[Op, DriveQueue] | None:
        """Return the queues that serve a transfer; None where its file is not attached."""
        return self._files.get(transfer.fd)

    def _count_report(self, done: Outcome, ended: list[Outcome]) -> None:
        """Count a report. Of two errors of one transfer the first to come is kept."""
        left, errors = self._in_flight.pop(done.ticket)
        for position, number in done.errors.items():
            errors.setdefault(position, number)
        if left > 1:
            self._in_flight[done.ticket] = (left - 1, errors)
        else:
            ended.append(Outcome(done.ticket, errors))

    def _make_queues(self, in_kernel: bool) -> dict[Op, DriveQueue]:
        name = f"kvdisk-posix-{len(self._queues) + 1}"
        if in_kernel:
            try:
                reads = aio.KernelQueue(f"{name}-read", self._done.put, self._longest_bytes)
                try:
                    writes = aio.KernelQueue(f"{name}-write", self._done.put, self._longest_bytes, reads)
                except (OSError, NoThread):
                    reads.close()
                    raise
                return {Op.WRITE: writes, Op.READ: reads}  # writes look at the reads' queue: they close first
            except OSError as error:
                self.without_queue = _why_lost(error)
                _say_lost(self.without_queue)
        return self._make_thread_queues(name, self._threads, _run)

    def _make_thread_queues(self, name: str, count: int, run: Run) -> dict[Op, DriveQueue]:
        return {op: _ThreadQueue(f"{name}-{op.value}", count, self._done.put, run, self._longest_bytes) for op in Op}


def _why_lost(error: OSError) -> str:
    if error.filename is None:
        return str(error.strerror)  # there is no library
    if (error.filename, error.errno) == ("io_setup", errno.EAGAIN):
        return "fs.aio-max-nr is used up"
    return refusal(error.filename, error)


@functools.cache
def _say_lost(why: str) -> None:
    """Warn once in a process: otherwise each drive and each device would repeat it."""
    logger.warning(
        "kvdisk: threads move blocks instead of the kernel's queue (Linux AIO), and slow down while Python is busy: %s",
        why,
    )


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


def _run(op: Op, call: Call) -> int:
    """Move every byte of a call. Return 0, or the errno of the failure."""
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
            buffers = without(buffers, moved)
    except OSError as error:
        return error.errno or errno.EIO
    except Exception:
        return errno.EFAULT  # Python refused the buffers; a thread that died of it would never report
    return 0
