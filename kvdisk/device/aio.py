# SPDX-License-Identifier: Apache-2.0
"""A drive's queue in the kernel: Linux AIO, which ``drive_queue.c`` keeps full without Python.

A Python thread that calls ``preadv`` waits for the interpreter lock after each call, 5 ms while
Python code runs elsewhere in the process. Here a whole batch is handed over at once, and one wait
ends with it. The queue is asynchronous only for O_DIRECT, and only on some file systems. Threads
serve the others, and all where ``drive_queue.c`` was not compiled.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kvdisk.device.base import Buffer, Op, Outcome, Transfer
from kvdisk.device.batches import Call, cut
from kvdisk.errors import NoThread, start_thread
from kvdisk.geometry import ALIGNMENT, round_up

SHORTEST_BYTES, LONGEST_BYTES = 512 << 10, 2 << 20
"""Bytes of one call: long enough for the drive, short enough that one batch keeps it busy."""
AHEAD_BYTES = 16 << 20
"""Bytes of reads that the kernel is given ahead: enough for the drive, and so few that batches end
one by one, in order, and one is verified while the next is read."""
WRITES_AHEAD_BYTES = 32 << 20
"""Bytes of writes that the kernel is given ahead. Nothing is done after a write; with fewer, the
drive idles while this process waits for a processor."""
BESIDE_READS_BYTES = 1 << 20
"""Bytes of writes given ahead while reads are under way, so that a load waits for no more."""
_LEAST_CALLS = 4
"""The fewest calls that a batch is cut into, unless they would be shorter than SHORTEST_BYTES."""
_ASYNC_FILE_SYSTEMS = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010})
"""The file systems on which a direct call on allocated blocks is asynchronous: ext2 to ext4, XFS,
btrfs, F2FS."""
_OPCODES = {Op.READ: 7, Op.WRITE: 8}
"""The kernel's numbers IOCB_CMD_PREADV and IOCB_CMD_PWRITEV."""
_HEAD = struct.Struct("=qqqq")
"""``CallHead`` of the C file: fd, offset, position of its transfer, number of vectors."""
_REPORT = struct.Struct("=qqq")
"""``Report`` of the C file: ticket, position (-1: the batch has ended), errno."""
_MOST_REPORTS = 512
_LAYOUT = 2
"""The version of these structures: a library compiled from other sources has another number."""
NOT_COMPILED = (
    "drive_queue.c was not compiled when kvdisk was installed, for want of a C compiler or its headers: install gcc "
    "and libc6-dev, then kvdisk anew with pip's --force-reinstall --no-deps --no-cache-dir"
)
NOT_ASYNCHRONOUS = "the kernel's queue is for files with O_DIRECT on ext4, XFS, btrfs or F2FS"
_VECTOR = struct.Struct("=QQ")
"""``struct iovec``: address and length."""


@cache
def library() -> tuple[Any, Any]:
    """Return the functions of ``drive_queue.c`` twice: to be called with the interpreter lock held
    (short functions, which would wait to get it back), and without it. Raises OSError where the
    library is missing."""
    path = Path(__file__).with_name("drive_queue.abi3.so")
    if not path.exists():
        raise OSError(errno.ENOENT, NOT_COMPILED)
    try:
        holding, waiting = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        if holding.queue_layout() != _LAYOUT:
            raise OSError(errno.ENOENT, f"{path.name} is of another version of kvdisk: install it anew")
    except (AttributeError, OSError) as error:
        raise OSError(errno.ENOENT, getattr(error, "strerror", None) or f"{path.name}: {error}") from error
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    for dll in (holding, waiting):
        for name, result, arguments in (
            ("queue_open", pointer, (ctypes.c_size_t, ctypes.c_size_t, pointer, pointer, pointer)),
            ("queue_put", number, (pointer, number, number, number, pointer, pointer)),
            ("queue_wait", number, (pointer, pointer, number)),
            ("queue_close", None, (pointer,)),
            ("queue_free", None, (pointer,)),
        ):
            function = getattr(dll, name)
            function.restype, function.argtypes = result, arguments
    return holding, waiting


def serves(fd: int) -> bool:
    """Return whether calls on an open file are asynchronous, so that the queue may serve it."""
    try:
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            return False
        room = (ctypes.c_long * 32)()  # struct statfs, which begins with the file system's number
        libc = ctypes.CDLL(None, use_errno=True)
        return libc.fstatfs(ctypes.c_int(fd), ctypes.byref(room)) == 0 and room[0] in _ASYNC_FILE_SYSTEMS
    except (OSError, ValueError, AttributeError):
        return False


class KernelQueue:
    """``DriveQueue`` over a context of Linux AIO, with two threads: the one of ``drive_queue.c``
    submits calls and takes their ends, and a Python thread waits for batches to report.

    ``report``: called for each batch, on the Python thread. ``longest_bytes``: the most bytes of
    one call. ``reads``: given for a queue of writes, the queue of the same drive's reads, to which
    the writes give way. Raises OSError where there is no library, and where the kernel has no such
    queue, forbids it or has no room (``fs.aio-max-nr``): then ``filename`` is the call.
    """

    way = "aio"

    def __init__(
        self,
        name: str,
        report: Callable[[Outcome], None],
        longest_bytes: int = LONGEST_BYTES,
        reads: KernelQueue | None = None,
    ) -> None:
        self._holding, self._waiting = library()
        error, call = ctypes.c_int64(), ctypes.c_char_p()
        self._queue: int | None = self._holding.queue_open(
            WRITES_AHEAD_BYTES if reads else AHEAD_BYTES,
            BESIDE_READS_BYTES,
            reads._queue if reads else None,
            ctypes.byref(error),
            ctypes.byref(call),
        )
        if not self._queue:
            raise OSError(error.value, os.strerror(error.value), (call.value or b"").decode())
        self._report = report
        self._longest_bytes = min(longest_bytes, LONGEST_BYTES)
        self._flights: dict[int, tuple[Sequence[tuple[int, Transfer]], dict[int, int]]] = {}
        """What the kernel may touch, and the errors so far, by ticket."""
        self._thread = threading.Thread(target=self._report_all, name=f"{name}-report", daemon=True)
        try:
            start_thread(self._thread)
        except NoThread:
            queue, self._queue = self._queue, None
            self._waiting.queue_close(queue)
            self._waiting.queue_free(queue)
            raise

    def put(self, ticket: int, op: Op, known: Sequence[tuple[int, Transfer]], batch_bytes: int) -> int:
        share_bytes = round_up(-(-batch_bytes // _LEAST_CALLS), ALIGNMENT)
        call_bytes = min(max(share_bytes, SHORTEST_BYTES), self._longest_bytes)
        heads, vectors, count = bytearray(), bytearray(), 0
        for position, transfer in known:
            for call in _calls(position, transfer, call_bytes):
                heads += _HEAD.pack(call.fd, call.offset, call.position, len(call.buffers))
                for buffer in call.buffers:
                    vectors += _VECTOR.pack(_address(buffer), buffer.nbytes)
                count += 1
        self._flights[ticket] = (known, {})
        given = ((ctypes.c_char * len(made)).from_buffer(made) for made in (heads, vectors))
        failed = self._holding.queue_put(self._queue, ticket, _OPCODES[op], count, *given)
        if failed:
            del self._flights[ticket]
            self._report(Outcome(ticket, dict.fromkeys((position for position, _ in known), -failed)))
        return 1

    def close(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            self._waiting.queue_close(queue)
            self._thread.join()
            self._waiting.queue_free(queue)

    def _report_all(self) -> None:
        queue, found = self._queue, ctypes.create_string_buffer(_REPORT.size * _MOST_REPORTS)
        while count := self._waiting.queue_wait(queue, found, _MOST_REPORTS):
            for ticket, position, error in _REPORT.iter_unpack(found.raw[: count * _REPORT.size]):
                if position >= 0:
                    self._flights[ticket][1].setdefault(position, error)
                else:
                    self._report(Outcome(ticket, self._flights.pop(ticket)[1]))


def _calls(position: int, transfer: Transfer, call_bytes: int) -> Iterable[Call]:
    """Return the calls of a transfer, of up to ``call_bytes`` each."""
    if len(transfer.buffers) == 1 and transfer.buffers[0].nbytes <= call_bytes:
        return (Call(position, *transfer),)  # as of most blocks: cutting takes thrice as long
    return chain.from_iterable(cut([(position, transfer)], call_bytes))


def _address(buffer: Buffer) -> int:
    """Return a buffer's address; 0, for which the kernel fails the call, where it has none."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except (ValueError, TypeError, BufferError):  # slower, but it takes what is read-only too
        try:
            return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
        except (ValueError, TypeError, BufferError):
            return 0
