# SPDX-License-Identifier: Apache-2.0
"""One rank's mover in a process of its own, beside an engine whose Python is busy: as a thread
there it would wait for the interpreter more than for the drive.

Blocks are rows of memory that both processes map. Plans go down the pipe of a ``ChildProcess`` and
reports come up. The process alone gives up a job while it lives; one that does not answer is killed
before its jobs are given up, or it could write to a row that belongs to somebody else by then.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvdisk.assembly import assemble_row_worker
from kvdisk.blocks import JobId
from kvdisk.child import ChildProcess, ParentPipe
from kvdisk.config import Config
from kvdisk.device.paths import device_errors
from kvdisk.errors import DeviceError, KvdiskError
from kvdisk.geometry import Geometry
from kvdisk.messages import JobResult, Plan, Reason, Report
from kvdisk.worker.mover import Mover
from kvdisk.worker.row_memory import Rows, arrays_of

logger = logging.getLogger("kvdisk.worker")

START_S = 120.0
"""What the process may take to start, on a machine that may be busy: it also tries the drive."""
GRACE_S = 10.0
"""Beside twice ``io_deadline_s``, and ``remote_deadline_s`` where there is a remote store, within
which every job that moves blocks has its answer: how long nothing may come of a process that has
some."""
CLOSE_S = 10.0
"""How long what has begun is waited for at the end; then the process is killed."""
REAP_S = 1.0
"""How long the end of a killed process is awaited: an engine's step may be what waits."""
_MOST_UNSEEN_S = 1.0
"""What counts at most of the time between two looks: the process may have stood still, too."""
_LOOK_S = 0.05
"""How often the process looks for what is no result: statistics, late moves, its parent."""
_STARTED = "started"


class _Mapped(NamedTuple):
    """A place in a file that is mapped, to share it: the file, as the kernel names what it maps
    (device and inode), and the offset."""

    file: tuple[str, int]
    offset: int


class SharedRows(NamedTuple):
    """Where rows lie in a file that is mapped: its descriptor, the first one's place, and bytes
    from each to the next."""

    fd: int
    offset: int
    pitch: int
    row_bytes: int
    row_count: int

    @classmethod
    def of(cls, rows: Rows) -> SharedRows:
        """Find the file that an array is mapped from: one without a name will do, too. ``fd`` is
        the caller's, to close."""
        assert rows.ndim == 2 and rows.dtype == np.uint8 and rows.strides[1] == 1, (rows.shape, rows.strides)
        count, row_bytes = rows.shape
        first, size = rows.ctypes.data, (count - 1) * rows.strides[0] + row_bytes
        place, end = _mapped_at(first), _mapped_at(first + size - 1)
        assert place and end == _Mapped(place.file, place.offset + size - 1), "rows lie in one shared mapping"
        found: dict[tuple[int, int], int] = {}
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError), ExitStack() as undo:
                fd = os.dup(int(name))  # another thread may close the number, or give it to another file
                undo.callback(os.close, fd)
                status = os.fstat(fd)
                if (status.st_dev, status.st_ino) not in found and _is_mapped(fd, place, size):
                    found[status.st_dev, status.st_ino] = fd
                    undo.pop_all()
        if len(found) != 1:  # subvolumes of btrfs number their files alike
            for fd in found.values():
                os.close(fd)
        assert len(found) == 1, "the file that rows are mapped from is open, and no other could be it"
        (fd,) = found.values()
        return cls(fd, place.offset, rows.strides[0], row_bytes, count)

    def mapped(self) -> Rows:
        """Map them, here."""
        memory = mmap.mmap(self.fd, self.offset + (self.row_count - 1) * self.pitch + self.row_bytes)
        shape, strides = (self.row_count, self.row_bytes), (self.pitch, 1)
        return np.ndarray(shape, np.uint8, buffer=memory, offset=self.offset, strides=strides)


def _mapped_at(address: int) -> _Mapped | None:
    """Return what is mapped at an address, to share it; None: no file is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"(\w+)-(\w+) ...(.) (\w+) (\S+) (\d+)", line)
        if found is not None and int(found[1], 16) <= address < int(found[2], 16):
            place = _Mapped((found[5], int(found[6])), address - int(found[1], 16) + int(found[4], 16))
            return place if found[3] == "s" and place.file[1] else None
    return None


def _is_mapped(fd: int, place: _Mapped, size: int) -> bool:
    """Whether an open file is the one that is mapped, with at least ``size`` bytes from there on:
    mapped once more, it has the same name. Raises OSError where it cannot be mapped to write."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size < place.offset + size:
        return False
    start = place.offset - place.offset % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(fd, mmap.PAGESIZE, offset=start) as memory:
        view = np.frombuffer(memory, np.uint8)
        again = _mapped_at(view.ctypes.data)
        del view  # or the mapping could not be closed
    return again is not None and again.file == place.file


class _Line(NamedTuple):
    """A line of the process's log."""

    name: str
    level: int
    path: str
    line: int
    text: str


class MoverProcess:
    """The parent's end. It has the face of a mover: see ``store.RowMover``. One thread at a time
    makes all calls but ``wait``.

    ``memory``: rows, in one array or several, for each of which see ``SharedRows``; they must live
    until ``close``. Waits for the start. Raises what the process cannot start for: ConfigError,
    DeviceError.
    """

    def __init__(self, config: Config, geometry: Geometry, memory: Rows | Sequence[Rows]) -> None:
        remote_s = 0.0 if config.remote is None else config.remote_deadline_s
        self._answer_s = 2 * config.io_deadline_s + remote_s + GRACE_S
        self._out: dict[JobId, int] = {}
        """Moves of each job that has no answer."""
        self._started = self._killed = self._closing = self._ended = False
        self._how = ""
        """How it has ended."""
        self._looked_s, self._unheard_s = time.monotonic(), 0.0
        self._report = Report()
        with ExitStack() as undo, ExitStack() as files:
            shared = []
            with device_errors("looking in /proc for the file that the engine's memory is"):
                for rows in arrays_of(memory):
                    shared.append(SharedRows.of(rows))
                    files.callback(os.close, shared[-1].fd)
            try:
                self._child = ChildProcess(__name__, fds=[each.fd for each in shared])
            except OSError as error:
                raise DeviceError(error.errno or errno.EIO, "the mover process cannot start") from error
            undo.callback(self._end)
            self._child.pipe.post((config, geometry, shared))
            self._await_start()
            undo.pop_all()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether the last look has found it ended: it touches no row any more."""
        return self._ended

    def submit(self, plan: Plan) -> None:
        """Take over a plan; each of its jobs is reported once. Does not wait."""
        assert not plan.fence and not plan.urgent, "no model writes to rows"
        self._out.update((job.id, len(job.moves)) for job in plan.jobs)
        if plan.jobs or plan.void:
            self._child.pipe.post(plan)

    def poll(self, wait_s: float = 0.0) -> Report:
        """Return what was finished since the last call; where that is nothing, wait up to
        ``wait_s`` for something. ``Report.off``: the process has ended, and touches no row any
        more; all that had no answer is CANCELLED."""
        self._look(0.0)
        if self._report.empty and not self._ended and wait_s > 0:
            self._look(wait_s)
        self._watch()
        report, self._report = self._report, Report()
        if self._ended:
            report.off = True
            for job_id, moves in self._out.items():
                report.results[job_id] = JobResult(1, dict.fromkeys(range(moves) or (-1,), Reason.CANCELLED))
        for job_id in report.results:
            self._out.pop(job_id, None)
        return report

    def wait(self, wait_s: float) -> None:
        """Wait up to ``wait_s`` for something that ``poll`` would return; take nothing of it.
        Another thread may make other calls meanwhile, but ``close`` and ``kill``."""
        if self._report.empty and not self._ended:
            self._child.pipe.wait(wait_s)

    def close(self) -> None:
        """Cancel what has not ended; wait for what has begun, for a while, and end the process. No
        row is touched afterwards. Idempotent."""
        self._closing = True
        self._child.pipe.finish()
        end_s = time.monotonic() + CLOSE_S
        while not self._ended and (left_s := end_s - time.monotonic()) > 0:
            self._look(left_s)
        self._end()

    def kill(self) -> None:
        """End the process now. No row is touched when this returns. Idempotent."""
        self._closing = True
        end_s = time.monotonic() + CLOSE_S
        if not self._ended:
            self._child.kill()
            while self._child.may_run and time.monotonic() < end_s:
                time.sleep(0.001)
        self._end()

    def _look(self, wait_s: float) -> None:
        """Send what waits, and take what has come; where that is nothing, wait for it."""
        if self._ended:
            return
        for message in self._child.pipe.look(wait_s):
            self._take(message)
        if self._child.pipe.has_ended:
            self._end()

    def _take(self, message: Any) -> None:
        self._unheard_s = 0.0
        if isinstance(message, Report):
            self._report.merge(message)
        elif isinstance(message, _Line):
            log = logging.getLogger(message.name)
            if log.isEnabledFor(message.level):  # made here: an engine may have records of its own kind
                log.handle(
                    log.makeRecord(message.name, message.level, message.path, message.line, message.text, (), None)
                )
        elif message == _STARTED:
            self._started = True
        else:
            assert isinstance(message, KvdiskError), message
            raise message

    # -- its end -------------------------------------------------------------------------------

    def _await_start(self) -> None:
        end_s = time.monotonic() + START_S
        while not self._started:
            left_s = end_s - time.monotonic()
            if self._ended or left_s <= 0:
                why = self._how if self._ended else f"it took longer than {START_S:g} s"
                raise DeviceError(errno.EIO, f"the mover process cannot start: {why}")
            self._look(left_s)

    def _watch(self) -> None:
        """Kill a process that has blocks to move and does not answer; note the end of one that was
        killed."""
        now_s = time.monotonic()
        if any(self._out.values()):  # jobs of files have no moves, and wait for drives and locks as long as it takes
            self._unheard_s += min(now_s - self._looked_s, _MOST_UNSEEN_S)
        else:
            self._unheard_s = 0.0
        self._looked_s = now_s
        if self._unheard_s > self._answer_s and not self._killed and not self._ended:
            logger.error("kvdisk kills its mover process, which has not answered for %.0f s.", self._unheard_s)
            self._child.kill()
            self._killed = True
        if self._killed and not self._ended and not self._child.may_run:
            self._end()

    def _end(self) -> None:
        """Kill the process, unless it has ended. It runs no more."""
        if self._ended:
            return
        self._ended = True
        self._how = self._child.end(reap_s=REAP_S).how
        if self._started and not self._closing:
            logger.error("kvdisk's mover process exited: %s.", self._how)


# -- the process -----------------------------------------------------------------------------------


class _Answers(logging.Handler):
    """The process's end: what it sends, the lines of its log among them. Any thread."""

    def __init__(self, pipe: ParentPipe) -> None:
        super().__init__()
        self._pipe = pipe

    def send(self, what: Any) -> None:
        """Send one thing."""
        with suppress(OSError):  # the parent's end is seen where plans are read
            self._pipe.send(what)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line of the log, as text alone."""
        self.send(_Line(record.name, record.levelno, record.pathname, record.lineno, self.format(record)))


def main(descriptor: int, parent: int) -> None:
    """Be the process: follow plans until the parent's end of the pipe is closed."""
    pipe = ParentPipe(descriptor, parent)
    answers = _Answers(pipe)
    logging.basicConfig(handlers=[answers], level=logging.INFO)
    try:
        config, geometry, shared = pipe.receive()
        parts = assemble_row_worker(config, geometry, [rows.mapped() for rows in shared])
    except (KvdiskError, OSError) as error:
        answers.send(error if isinstance(error, KvdiskError) else DeviceError(error.errno or errno.EIO, str(error)))
        return
    threading.Thread(target=_report, args=(parts.mover, pipe, answers), daemon=True).start()
    with suppress(OSError):  # this thread alone: a plan that wakes it shall not cost its step the core
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    answers.send(_STARTED)
    with suppress(EOFError):
        while True:
            parts.mover.submit(pipe.receive())
    late = threading.Timer(CLOSE_S, os._exit, (1,))
    late.daemon = True
    late.start()
    parts.close()
    answers.send(parts.mover.poll())
    os._exit(0)


def _report(mover: Mover, pipe: ParentPipe, answers: _Answers) -> None:
    """Send what the mover has finished, as long as there is a parent."""
    try:
        while pipe.has_parent:
            mover.wait_any(_LOOK_S)
            report = mover.poll()
            if not report.empty:
                answers.send(report)
    except Exception:
        logger.exception("an error in kvdisk's mover process")
    os._exit(1)
