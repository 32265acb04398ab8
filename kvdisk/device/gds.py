# SPDX-License-Identifier: Apache-2.0
"""GPUDirect Storage through kvikio: whether it is here, and the device of GPU memory. ``kvikio`` is imported in this
room only, and late.

An import that works says nothing: kvikio imports and opens files without a GPU, falls back to host memory
silently, and spins for ever where ``/proc/modules`` is missing. So what can be seen in files is looked at
first, and kvikio is asked in a child process, which may hang or die without harm.

What a kvikio future leaves to its user, each at its place below: of an operation that kvikio cuts in tasks the future
ends with the last task, while others may still move bytes if that one failed, so one call is one task; errors come
without a number; what it was given has to live until then; a result can be taken once; nothing can be cancelled.
A call may first wait for the model's work on the GPU's default stream. So threads of ours make the calls.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.util
import logging
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.device.base import Buffer, Op, Outcome, Transfer
from kvdisk.device.batches import Done, Tickets
from kvdisk.device.pair import GpuRange
from kvdisk.errors import ConfigError
from kvdisk.geometry import ALIGNMENT

logger = logging.getLogger("kvdisk")

PIECE_BYTES = 16 << 20
"""What cuFile moves in one go at most."""
_PIECES_AT_ONCE = 4
"""Calls of one thread of ours under way at once."""
_KVIKIO_THREADS = 128
"""In one pool for all drives. With eight threads of ours for each, a drive that hangs leaves enough to three others."""

_ASK_TIMEOUT_S = 60.0
_ASK = """
import ctypes
code = ctypes.CDLL("libcuda.so.1").cuInit(0)
import kvikio.cufile_driver as driver, kvikio.defaults as defaults
if code: print(f"the CUDA driver does not start (error {code})")
elif defaults.is_compat_mode_preferred(): print("kvikio prefers its way through host memory")
elif not driver.get("is_gds_available"): print("the cuFile driver says that it is not available")
else: print("here")
"""


def gds_unavailable(proc: Path = Path("/proc")) -> str | None:
    """Return why GPUDirect Storage cannot be used on this machine, as one clause, or None where it can.

    None says that driver and library are there; whether a file system takes part only a checked write and
    read of a file on it can say. Where everything is there kvikio is asked in a child process, which takes
    a second or two and never more than a minute; otherwise the answer comes at once. Any thread; raises
    nothing. ``proc``: for tests.
    """
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed"
    if not (proc / "modules").exists():
        return f"{proc / 'modules'} is missing, without which the cuFile driver hangs"
    if not (proc / "driver" / "nvidia-fs").exists():
        return "the kernel module nvidia-fs is not loaded"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 cannot be loaded"
    return _ask_kvikio(_ASK, _ASK_TIMEOUT_S)


def _ask_kvikio(script: str, timeout_s: float) -> str | None:
    try:
        child = subprocess.run(  # noqa: S603 - a script of ours, in this same interpreter
            [sys.executable, "-c", script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"kvikio did not answer within {timeout_s:g} s"
    except OSError as error:
        return f"kvikio cannot be asked: {error.strerror}"
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"its process ended with {child.returncode}"])[-1]
        return f"kvikio does not start: {last[:200]}"
    said = child.stdout.strip()
    return None if said == "here" else said


class _Piece(NamedTuple):
    """One call's worth of the transfer at ``position`` in its batch. ``file``: a ``CuFile``."""

    position: int
    file: Any
    offset: int
    buffer: Buffer


class _Task(NamedTuple):
    ticket: int
    op: Op
    pieces: list[_Piece]


class GdsDevice:
    """``Device`` between files and GPU memory (``GpuRange`` in the place of ``Buffer``), without a copy in host memory.

    ``threads``: for each drive and direction, so that where writes hang, as on a frozen file system, reads go on; each
    has up to four calls under way. To be made only where ``gds_unavailable``
    answered None: it forbids kvikio to fall back, so that what cannot be moved directly fails. ``compat``: for tests
    with a stub of the driver only; buffers are host memory then. Files have to lie where O_DIRECT is; one that cuFile
    cannot take fails all its transfers with EIO. Raises ConfigError where kvikio cannot be used at all.

    kvikio's settings are those of the process, and are all set here.
    """

    def __init__(self, threads: int = 4, *, compat: bool = False) -> None:
        assert threads > 0
        try:
            import kvikio
            from kvikio import CompatMode, defaults
        except Exception as error:  # without nvidia-cufile it is no ImportError
            raise ConfigError(f"kvikio cannot be used: {error}") from error
        self._kvikio = kvikio
        self._compat = compat
        settings = {
            "compat_mode": CompatMode.ON if compat else CompatMode.OFF,
            "num_threads": _KVIKIO_THREADS,
            "task_size": PIECE_BYTES,
            "gds_threshold": ALIGNMENT,  # nothing is smaller: all goes to the GPU's way
            "bounce_buffer_size": PIECE_BYTES,
            "auto_direct_io_read": True,
            "auto_direct_io_write": True,
        }
        defaults.set(settings)
        logger.info("kvdisk uses kvikio %s: %s", kvikio.__version__, _listed(settings))
        self._thread_count = threads
        self._registered: list[GpuRange] = []
        self._files: dict[int, tuple[int, Any]] = {}
        """Number of the drive (``st_dev``), and the ``CuFile`` or None, by descriptor."""
        self._tickets = Tickets()
        self._tasks: dict[tuple[int, Op], queue.SimpleQueue[_Task | None]] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def name(self) -> str:
        """See ``Device``."""
        return "gds"

    def attach_memory(self, memory: Buffer) -> None:
        """See ``Device``. GPU memory is registered whole, as it was allocated; what is not is copied within the GPU."""
        if not isinstance(memory, GpuRange) or self._compat:
            return
        try:
            self._kvikio.memory_register(memory)
            self._registered.append(memory)
        except RuntimeError as error:
            logger.warning("kvdisk could not register %d bytes of GPU memory with cuFile: %s", memory.nbytes, error)

    def attach_file(self, fd: int) -> None:
        """See ``Device``. kvikio opens the file once more by its descriptor, whatever its name is by now."""
        drive, file = -1, None
        try:
            drive = os.fstat(fd).st_dev
            writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            file = self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r+" if writable else "r")
        except (OSError, RuntimeError) as error:
            logger.warning("kvdisk cannot open a segment for GPUDirect: %s", error)
        self._files[fd] = drive, file
        for op in Op:
            if (drive, op) in self._tasks:
                continue
            tasks = self._tasks[drive, op] = queue.SimpleQueue()
            for number in range(self._thread_count):
                name = f"kvdisk-gds-{len(self._tasks)}-{number}"
                thread = threading.Thread(target=_work, args=(tasks, self._tickets.report), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def detach_file(self, fd: int) -> None:
        """See ``Device``."""
        _, file = self._files.pop(fd, (-1, None))
        if file is not None:
            file.close()

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        """See ``Device``."""
        assert not self._closed, "the device is closed"
        assert batch
        ticket = self._tickets.take()
        errors: dict[int, int] = {}
        by_drive: dict[int, list[_Piece]] = {}
        for position, transfer in enumerate(batch):
            assert transfer.offset >= 0 and transfer.offset % ALIGNMENT == 0
            assert transfer.buffers
            drive, file = self._files.get(transfer.fd, (-1, None))
            if file is None:
                errors[position] = errno.EIO if transfer.fd in self._files else errno.EBADF
            else:
                by_drive.setdefault(drive, []).extend(_cut(op, position, file, transfer))
        tasks = [
            (drive, _Task(ticket, op, share)) for drive, pieces in by_drive.items() for share in self._shares(pieces)
        ]
        for drive, task in tasks:
            self._tasks[drive, op].put(task)
        self._tickets.expect(ticket, len(tasks), errors)
        return ticket

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        """See ``Device``."""
        return self._tickets.poll(timeout_s)

    def drain(self) -> list[Outcome]:
        """See ``Device``."""
        return self._tickets.drain()

    def close(self) -> None:
        """See ``Device``. Registered memory is still there: it is closed after the device."""
        self.drain()
        self._closed = True
        for tasks in self._tasks.values():
            for _ in range(self._thread_count):
                tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads, self._tasks = [], {}
        for fd in list(self._files):
            self.detach_file(fd)
        while self._registered:
            try:
                self._kvikio.memory_deregister(self._registered.pop())
            except RuntimeError as error:
                logger.warning("kvdisk could not take GPU memory back from cuFile: %s", error)

    def _shares(self, pieces: list[_Piece]) -> list[list[_Piece]]:
        """Deal pieces out to as many tasks as there are threads, neighbours to different ones."""
        return [share for start in range(self._thread_count) if (share := pieces[start :: self._thread_count])]


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {getattr(value, 'name', value)}" for name, value in settings.items())


def _cut(op: Op, position: int, file: Any, transfer: Transfer) -> Iterator[_Piece]:
    offset = transfer.offset
    for buffer in transfer.buffers:
        assert buffer.nbytes > 0 and buffer.nbytes % ALIGNMENT == 0
        assert op is Op.WRITE or not buffer.readonly
        for start in range(0, buffer.nbytes, PIECE_BYTES):
            piece = buffer[start : start + PIECE_BYTES]
            yield _Piece(position, file, offset, piece)
            offset += piece.nbytes


def _work(tasks: queue.SimpleQueue[_Task | None], tell: Callable[[Done], None]) -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        report = Done(task.ticket, _run(task))
        # Whoever hears of the end may release the memory: no view of it may be left in this frame.
        del task
        tell(report)


def _run(task: _Task) -> dict[int, int]:
    """Move all pieces of a task; return errno by position of those that failed. Returns when nothing moves any more."""
    errors: dict[int, int] = {}
    under_way: deque[tuple[_Piece, Any]] = deque()
    waiting = deque(task.pieces)
    while waiting or under_way:
        if waiting and len(under_way) < _PIECES_AT_ONCE:
            piece = waiting.popleft()
            move = piece.file.pread if task.op is Op.READ else piece.file.pwrite
            try:  # one call is one task of kvikio's, or its future could end before all its bytes are at rest
                under_way.append((piece, move(piece.buffer, None, piece.offset, piece.buffer.nbytes)))
            except Exception as error:
                errors.setdefault(piece.position, _errno_of(error))
            continue
        piece, future = under_way.popleft()
        try:
            if future.get() != piece.buffer.nbytes:
                errors.setdefault(piece.position, errno.EIO)
        except Exception as error:
            errors.setdefault(piece.position, _errno_of(error))
    return errors


_TELLING = {
    os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENODEV)
}


def _errno_of(error: Exception) -> int:
    """Return what an error of kvikio's says in words; EIO for a short read ("EOF") and whatever else it may be."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return next((number for words, number in _TELLING.items() if words in str(error)), errno.EIO)
