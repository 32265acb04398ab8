# SPDX-License-Identifier: Apache-2.0
"""A drive's queue in the kernel: Linux AIO (``io_submit``), where a batch is one system call.

A thread that calls ``preadv`` waits for the interpreter lock after each call: 5 ms, while Python
code runs elsewhere in the process. Here calls and their ends go together. It is asynchronous for
O_DIRECT only, and on some file systems; threads serve others. Unlike io_uring, the usual profile of
containers allows it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvdisk.device.base import Buffer, Op, Outcome, Transfer
from kvdisk.device.batches import Call, cut, without
from kvdisk.geometry import ALIGNMENT, round_up

SHORTEST_BYTES, LONGEST_BYTES = 512 << 10, 2 << 20
"""Of a call: long enough for the drive, short enough that a batch keeps it busy."""
AHEAD_BYTES = 16 << 20
"""What the kernel is given before any of it has ended: enough for the drive, and so little that
batches end one by one, in their order."""
BESIDE_READS_BYTES = 1 << 20
"""The same of writes while reads are under way, so that a load waits for no more."""
_LEAST_CALLS = 4
"""That a batch is cut into, unless they would be too short."""
_MOST_EVENTS = 512
"""Of each of a drive's two contexts: the machine's bound (``fs.aio-max-nr``) counts them."""
_FULL_WAIT_S = 0.001
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""System calls by machine: io_setup, io_destroy, io_getevents, io_submit."""
_ASYNC_FILE_SYSTEMS = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010})
"""ext2 to ext4, XFS, btrfs, F2FS: a direct call on allocated blocks ends later."""
_OPCODES = {Op.READ: 7, Op.WRITE: 8}
"""IOCB_CMD_PREADV and IOCB_CMD_PWRITEV."""


_IOCB = struct.Struct("=QIiHhIQQqQII")
"""``struct iocb``: data, key, rw_flags, opcode, priority, fd, buffer, length, offset, reserved,
flags, event fd."""
_EVENT = struct.Struct("=QQqq")
"""``struct io_event``: data, iocb, and the result twice."""


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_GATHER_WAIT = _Timespec(0, 2_000_000)
"""Longest wait for a whole batch, in case a shorter one has been put behind it."""


class _Kernel:
    """The four system calls, with the arguments that the manual gives them; errors are OSErrors."""

    def __init__(self) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None or ctypes.sizeof(ctypes.c_void_p) != 8:
            raise OSError(errno.ENOSYS, "the numbers of the system calls are not known here")
        self._setup, self._destroy, self._getevents, self._submit = map(ctypes.c_long, numbers)
        self._libc = ctypes.CDLL(None, use_errno=True)  # lets other threads run meanwhile
        self._call = self._libc.syscall
        self._call.restype = ctypes.c_long

    def setup(self, most_events: int) -> ctypes.c_ulong:
        context = ctypes.c_ulong(0)
        self._checked(self._call(self._setup, ctypes.c_uint(most_events), ctypes.byref(context)))
        return context

    def destroy(self, context: ctypes.c_ulong) -> None:
        self._checked(self._call(self._destroy, context))

    def submit(self, context: ctypes.c_ulong, count: int, pointers: Any) -> int:
        return self._checked(self._call(self._submit, context, ctypes.c_long(count), pointers))

    def getevents(self, context: ctypes.c_ulong, least: int, most: int, events: Any, timeout: _Timespec | None) -> int:
        until = None if timeout is None else ctypes.byref(timeout)
        return self._checked(
            self._call(self._getevents, context, ctypes.c_long(least), ctypes.c_long(most), events, until)
        )

    @staticmethod
    def _checked(result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result


def serves(fd: int) -> bool:
    """Whether calls on an open file end later than they are submitted, so that the queue may be
    used for it."""
    try:
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            return False
        room = (ctypes.c_long * 32)()  # struct statfs, which begins with the file system's number
        libc = ctypes.CDLL(None, use_errno=True)
        return libc.fstatfs(ctypes.c_int(fd), ctypes.byref(room)) == 0 and room[0] in _ASYNC_FILE_SYSTEMS
    except (OSError, ValueError, AttributeError):
        return False


@dataclass(slots=True, eq=False)
class _Flight:
    """A batch's share of this drive. ``left``: calls that have not ended."""

    ticket: int
    op: Op
    left: int
    errors: dict[int, int] = field(default_factory=dict)


class KernelQueue:
    """``DriveQueue`` over a context of the kernel's. One thread waits for the ends, and submits
    what comes next; a second one submits where the first has nothing to wait for, so that no caller
    waits for a drive that hangs.

    ``report`` is called for each batch, on one of the two. ``longest_bytes``: of a call, at most.
    ``reads``: the queue of the drive's reads, if this is that of its writes, which make way for
    them. Raises OSError where the kernel has none, forbids it or has no room (``fs.aio-max-nr``).
    """

    way = "aio"

    def __init__(
        self,
        name: str,
        report: Callable[[Outcome], None],
        longest_bytes: int = LONGEST_BYTES,
        reads: KernelQueue | None = None,
    ) -> None:
        self._reads = reads
        self._kernel = _Kernel()
        self._context = self._kernel.setup(_MOST_EVENTS)
        self._report = report
        self._longest_bytes = min(longest_bytes, LONGEST_BYTES)
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Under the lock, which nobody holds while waiting for anything:
        self._flights: dict[int, _Flight] = {}
        self._waiting: deque[tuple[_Flight, Call, int]] = deque()
        """Calls, with their bytes, that the kernel has not been given."""
        self._calls: dict[int, tuple[_Flight, Call, int]] = {}
        """By number: what the kernel has, and may still touch."""
        self._bytes = 0
        self._numbers = 0
        self._threads = [
            threading.Thread(target=target, name=f"{name}-{what}", daemon=True)
            for target, what in ((self._submit_all, "submit"), (self._reap_all, "reap"))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, ticket: int, op: Op, known: Sequence[tuple[int, Transfer]], batch_bytes: int) -> int:
        """See ``DriveQueue``."""
        share_bytes = round_up(-(-batch_bytes // _LEAST_CALLS), ALIGNMENT)
        call_bytes = min(max(share_bytes, SHORTEST_BYTES), self._longest_bytes)
        calls: list[tuple[Call, int]] = []
        for each in known:
            for part in cut([each], call_bytes):
                calls += [(call, sum(buffer.nbytes for buffer in call.buffers)) for call in part]
        flight = _Flight(ticket, op, len(calls))
        with self._lock:
            self._flights[ticket] = flight
            self._waiting.extend((flight, call, size) for call, size in calls)
            wake = self._has_room
        if wake:
            self._wakes.put(True)
        return 1

    def close(self) -> None:
        """See ``DriveQueue``."""
        submitter, reaper = self._threads
        self._wakes.put(False)
        submitter.join()
        self._kernel.destroy(self._context)  # the reaper's wait ends with EINVAL
        reaper.join()

    def _submit_all(self) -> None:
        while self._wakes.get():
            self._submit()

    @property
    def _has_room(self) -> bool:
        """Whether the kernel may have more. There is always room for one call, after whose end this
        is asked again."""
        making_way = self._reads is not None and bool(self._reads._flights)
        return self._bytes < (BESIDE_READS_BYTES if making_way else AHEAD_BYTES)

    def _submit(self) -> None:
        """Give the kernel what it may have. Either thread."""
        with self._lock:
            first, taken = self._numbers, []
            while self._waiting and self._has_room and len(self._calls) < _MOST_EVENTS:
                flight, call, size = self._calls[self._numbers] = self._waiting.popleft()
                taken.append((flight.op, call))
                self._numbers += 1
                self._bytes += size
        if not taken:
            return
        vectors: list[Any] = []  # of buffers, which have to be there until the calls are submitted
        iocbs = bytearray(_IOCB.size * len(taken))
        base = ctypes.addressof(ctypes.c_char.from_buffer(iocbs))
        for at, (op, call) in enumerate(taken):
            vector = (_Vector * len(call.buffers))(*(_Vector(_address(each), each.nbytes) for each in call.buffers))
            vectors.append(vector)
            head = first + at, 0, 0, _OPCODES[op], 0, call.fd
            _IOCB.pack_into(iocbs, at * _IOCB.size, *head, ctypes.addressof(vector), len(vector), call.offset, 0, 0, 0)
        # Whoever hears of the end may release the memory: no view of it may be left in this frame.
        del call
        taken.clear()
        pointers = (ctypes.c_uint64 * len(vectors))(*range(base, base + len(iocbs), _IOCB.size))
        done = 0
        while done < len(vectors):
            rest = ctypes.byref(pointers, done * ctypes.sizeof(ctypes.c_uint64))
            try:
                done += self._kernel.submit(self._context, len(vectors) - done, rest)
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    time.sleep(_FULL_WAIT_S)  # the kernel is short of something
                elif error.errno != errno.EINTR:
                    self._fail(first + done, error.errno or errno.EIO)
                    done += 1

    # -- the reaping thread --------------------------------------------------------------------

    def _reap_all(self) -> None:
        events = bytearray(_EVENT.size * _MOST_EVENTS)
        place = (ctypes.c_char * len(events)).from_buffer(events)
        patient = False
        while True:
            least = self._least() if patient else 1
            timeout = _GATHER_WAIT if least > 1 else None
            try:
                count = self._kernel.getevents(self._context, least, _MOST_EVENTS, place, timeout)
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                return  # the context is gone
            patient = count > 0
            found = memoryview(events)[: _EVENT.size * count]
            with self._lock:
                settled = [self._settle(number, result) for number, _, result, _ in _EVENT.iter_unpack(found)]
            self._submit()
            for flight in filter(None, settled):
                self._report(Outcome(flight.ticket, flight.errors))

    def _least(self) -> int:
        """Return how many ends to wait for: each look costs the interpreter lock, and no batch ends
        with fewer."""
        with self._lock:
            least = min([flight.left for flight in self._flights.values()], default=1)
            if self._waiting:
                least = min(least, len(self._calls) // 2)  # and then the kernel is given more
        return max(1, least)

    def _settle(self, number: int, result: int) -> _Flight | None:
        """Take in a call's result, under the lock: bytes, or minus an errno. Return its batch if
        that has ended with it."""
        flight, call, wanted = self._calls.pop(number)
        self._bytes -= wanted
        if result != wanted:
            if result > 0 and result % ALIGNMENT == 0:  # it stopped short: the rest is another call
                rest = call._replace(offset=call.offset + result, buffers=without(call.buffers, result))
                self._waiting.appendleft((flight, rest, wanted - result))
                return None
            # It failed, met the end of the file, or left a rest that O_DIRECT cannot go on from.
            flight.errors.setdefault(call.position, -result if result < 0 else errno.EIO)
        flight.left -= 1
        if flight.left:
            return None
        del self._flights[flight.ticket]
        return flight

    def _fail(self, number: int, error: int) -> None:
        """Settle a call that the kernel was not given, with an errno."""
        with self._lock:
            flight = self._settle(number, -error)
            wake = bool(self._waiting)
        if flight is not None:
            self._report(Outcome(flight.ticket, flight.errors))
        if wake:
            self._wakes.put(True)


def _address(buffer: Buffer) -> int:
    """Return where a buffer lies; 0, for which the kernel fails the call, where it is none."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except (ValueError, TypeError, BufferError):  # slower, but it takes what is read-only too
        try:
            return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
        except (ValueError, TypeError, BufferError):
            return 0
