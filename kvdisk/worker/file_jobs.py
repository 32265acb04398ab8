# SPDX-License-Identifier: Apache-2.0
"""Jobs of files (OPEN_HOME, OPEN_SEGMENT, DROP_SEGMENT) in their order, on a thread of their own.

They wait for the disk and for locks, for seconds where a file is preallocated; transfers go on meanwhile.
The thread calls nothing but ``SegmentFiles``: the device hears of a file on the mover's thread.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvdisk.device.base import Device
from kvdisk.errors import CorruptRecord, DeviceError, GeometryMismatch, KvdiskError
from kvdisk.messages import Job, JobKind, Reason
from kvdisk.worker.files import SegmentFiles
from kvdisk.worker.legs import OpenFile
from kvdisk.worker.quiet_log import QuietLog
from kvdisk.worker.shuttle import NO_SPACE

FILE_KINDS = frozenset({JobKind.OPEN_HOME, JobKind.OPEN_SEGMENT, JobKind.DROP_SEGMENT})


class _Done(NamedTuple):
    """What became of a job. ``fd``: of the segment it opened, if any; ``started``: False where it was to stop."""

    fd: int = -1
    error: BaseException | None = None
    started: bool = True


class FileJobs:
    """Runs the jobs in the order of ``add``; the mover's thread calls everything.

    ``open``: the segment files that can be used, by segment. ``uses(segment)``: whether a batch at the device names
    it: its drop waits for that. ``ended``: how many jobs have ended; the n-th that was added has number n.
    ``threaded``: False: they run within ``turn``.
    """

    def __init__(
        self, files: SegmentFiles, device: Device, log: QuietLog, *, uses: Callable[[int], bool], threaded: bool
    ) -> None:
        self._files = files
        self._device = device
        self._log = log
        self._uses = uses
        self._threaded = threaded
        self.open: dict[int, OpenFile] = {}
        self.ended = 0
        self._queued: deque[Job] = deque()
        self._out: deque[Job] = deque()
        """Jobs with the thread, in order, and those of which ``turn`` has not heard the end."""
        self._tasks: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def add(self, job: Job) -> None:
        """Queue a job."""
        assert job.kind in FILE_KINDS
        self._queued.append(job)

    def needed_by(self, job: Job) -> int:
        """Return the number of the last job on its way that opens or drops a segment of ``job``'s moves; 0: none."""
        last = 0
        if self._out or self._queued:
            named = {move.nvme.segment for move in job.moves if move.nvme is not None}
            for number, other in enumerate((*self._out, *self._queued), self.ended + 1):
                if other.segment is not None and other.segment.segment in named:
                    last = number
        return last

    def turn(self) -> list[tuple[Job, Reason | None]]:
        """Start what can start; return the jobs that have ended since the last call, and why they failed."""
        ended: list[tuple[Job, Reason | None]] = []
        while self._hand_over() | self._collect(ended):
            pass
        return ended

    def stop(self) -> list[tuple[Job, Reason | None]]:
        """End what has started, however long that takes; return all jobs that are left, the others as CANCELLED."""
        self._stopping = True
        ended: list[tuple[Job, Reason | None]] = []
        while self._out:
            ended.append(self._note(self._done.get()))
        while self._queued:
            ended.append((self._queued.popleft(), Reason.CANCELLED))
            self.ended += 1
        return ended

    def close(self) -> None:
        """End the thread, when it is through with what has started, and close the files. No batch is under way."""
        self._stopping = True
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None
        for opened in self.open.values():
            self._device.detach_file(opened.fd)
        self.open.clear()
        self._files.close()

    def _hand_over(self) -> bool:
        handed = False
        while self._queued and not self._must_wait(self._queued[0]):
            job = self._queued.popleft()
            if job.kind is JobKind.DROP_SEGMENT and job.segment is not None:
                opened = self.open.pop(job.segment.segment, None)
                if opened is not None:
                    self._device.detach_file(opened.fd)
            self._out.append(job)
            handed = True
            if not self._threaded:
                self._done.put(self._run(job))
                continue
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kvdisk-files", daemon=True)
                self._thread.start()
            self._tasks.put(job)
        return handed

    def _must_wait(self, job: Job) -> bool:
        """Whether a drop has to wait: for batches of its segment, or for what may still be opening it."""
        if job.kind is not JobKind.DROP_SEGMENT:
            return False
        assert job.segment is not None
        return bool(self._out) or self._uses(job.segment.segment)

    def _collect(self, ended: list[tuple[Job, Reason | None]]) -> bool:
        count = len(ended)
        while self._out and not self._done.empty():
            ended.append(self._note(self._done.get()))
        return len(ended) > count

    def _note(self, done: _Done) -> tuple[Job, Reason | None]:
        job = self._out.popleft()
        self.ended += 1
        if not done.started:
            return job, Reason.CANCELLED
        if isinstance(done.error, KvdiskError):
            self._log.warn(job.kind.name, f"{job.kind.name} failed: {done.error}")
            return job, _reason_of(done.error)
        if done.error is not None:
            raise done.error
        if job.kind is JobKind.OPEN_SEGMENT and done.fd >= 0:
            assert job.segment is not None
            self._device.attach_file(done.fd)
            _, slot_bytes, slot_count, drive, *_ = job.segment
            self.open[job.segment.segment] = OpenFile(done.fd, slot_bytes, slot_count, drive)
        return job, None

    # -- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._tasks.get()) is not None:
            self._done.put(_Done(started=False) if self._stopping else self._run(job))

    def _run(self, job: Job) -> _Done:
        try:
            return _Done(self._change(job))
        except BaseException as error:  # the mover's thread tells failures from errors of ours
            return _Done(error=error)

    def _change(self, job: Job) -> int:
        if job.kind is JobKind.OPEN_HOME:
            assert job.home is not None
            self._files.open_home(job.home)
            return -1
        assert job.segment is not None
        if job.kind is JobKind.OPEN_SEGMENT:
            return self._files.open_segment(job.segment)
        self._files.drop_segment(job.segment)
        return -1


def _reason_of(error: KvdiskError) -> Reason:
    if isinstance(error, DeviceError) and error.errno in NO_SPACE:
        return Reason.NO_SPACE
    return Reason.HEADER if isinstance(error, GeometryMismatch | CorruptRecord) else Reason.IO_ERROR
