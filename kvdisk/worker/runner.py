# SPDX-License-Identifier: Apache-2.0
"""Runs jobs leg by leg: what ``Mover`` does on its thread. A job is cut into batches, which wait
for their turn, and each leg of a batch runs on a ``Backend``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from kvdisk.blocks import JobId, Medium
from kvdisk.errors import QuietLog
from kvdisk.messages import Job, JobKind, JobResult, Reason, Report
from kvdisk.stats import Stats
from kvdisk.worker.backend import Backend, Progress, fail_all
from kvdisk.worker.batch_queue import BatchQueue
from kvdisk.worker.block_copies import BlockCopies
from kvdisk.worker.cutter import BatchCutter
from kvdisk.worker.device_io import DeviceIo
from kvdisk.worker.files import FILE_KINDS, FileJobs
from kvdisk.worker.host_work import HostWork
from kvdisk.worker.remote_io import RemoteIo
from kvdisk.worker.resources import Resources
from kvdisk.worker.routes import Batch, Leg, Work
from kvdisk.worker.slot_headers import SlotHeaders

if TYPE_CHECKING:
    from kvdisk.worker.copier_base import Event

logger = logging.getLogger("kvdisk.worker")

BATCH_BYTES = 8 << 20

_COUNTED = {
    Reason.HEADER: "verification_failures.header",
    Reason.CHECKSUM: "verification_failures.checksum",
    Reason.DEADLINE: "deadline_misses",
}
_READS = frozenset({JobKind.LOAD, JobKind.PROMOTE})
_SUMS = frozenset({Leg.SEAL, Leg.CHECK, Leg.SUM})


class Runner:
    """See the module. One thread calls everything but ``halt`` and what ``copies`` has for any.

    ``fingerprint``: of the namespace until a home is named. ``io_deadline_s``: how long a batch may
    be at the device. ``batch_bytes``: aim for the size of a batch. ``threaded``: see ``FileJobs``.
    """

    def __init__(
        self,
        resources: Resources,
        *,
        fingerprint: bytes,
        io_deadline_s: float,
        clock: Callable[[], float],
        batch_bytes: int,
        threaded: bool,
    ) -> None:
        self._resources = resources
        self._clock = clock
        self._report = Report()
        self._stats = Stats()
        self._log = QuietLog(clock, logger)
        self._headers = SlotHeaders(resources.geometry, resources.rank, fingerprint, resources.direct)
        self._device_io = DeviceIo(
            resources.device, resources.direct, io_deadline_s=io_deadline_s, stats=self._stats, log=self._log
        )
        remote = resources.remote
        self._remote_io = None if remote is None else RemoteIo(remote, self._headers, self._stats, self._log)
        self.copies = BlockCopies(resources, self._headers, self._log)
        self._host_work = HostWork(self._headers, resources.arenas, self._log, resources.checksum_threads)
        backends = (self._device_io, self._remote_io, self.copies, self._host_work)
        self._backends: list[Backend] = [each for each in backends if each is not None]
        """In the order in which they are asked."""
        self._files = FileJobs(resources.files, self._device_io, self._log, threaded=threaded)
        self._cutter = BatchCutter(resources, batch_bytes)
        self._batches = BatchQueue(resources)
        self._works: dict[JobId, Work] = {}
        self._waiting: list[Work] = []
        """Jobs that name a segment which is being opened or dropped."""
        self._files_hang = False
        """A read has waited in vain for such a segment, and no job of files has ended since: reads
        fail at once there, rather than hold up a request each."""
        self._soonest_s = math.inf
        """No job's deadline that has not been looked at is sooner."""
        self._stopping = False

    def attach(self) -> None:
        """Make the memory known to the device. Once, before the first turn."""
        for slots in self._resources.memories.values():
            self._resources.device.attach_memory(slots.memory)

    # -- intake --------------------------------------------------------------------------------

    def add(self, job: Job, after: Event | None, deadline_s: float, *, urgent: bool = False) -> None:
        """Take a job in. It waits for earlier jobs that open or drop a segment of its own."""
        job = job._replace(moves=tuple(job.moves))  # each is asked for several times
        work = Work(job, after, deadline_s, urgent=urgent)
        self._soonest_s = min(self._soonest_s, deadline_s)
        self._works[job.id] = work
        if job.kind in FILE_KINDS:
            if job.home is not None:
                self._headers.fingerprint = job.home.fingerprint
            if job.home is not None and not job.home.home_id:
                self._finish(work)
            else:
                self._files.add(job)
            return
        if self._files.is_blocked(job) and not (self._files_hang and job.kind in _READS):
            self._waiting.append(work)
        else:
            self._admit(work)

    def fence(self, job_ids: Iterable[JobId]) -> None:
        """Begin these stores' copies from the GPU first; what cannot begin at once fails."""
        for job_id in job_ids:
            work = self._works.get(job_id)
            if work is not None and not self.has_launched(job_id):
                self._fence(work)

    def _fence(self, work: Work) -> None:
        batches = self._batches.remove(lambda batch: batch.work is work)
        work.urgent = work.fenced = True
        self._fail_unstarted(Reason.OVERWRITTEN, lambda each, _: each is work)
        self._batches.add(batches)

    def has_launched(self, job_id: JobId) -> bool:
        """Whether every copy from the GPU of a job that was added has begun, or never will."""
        work = self._works.get(job_id)
        return work is None or (
            work not in self._waiting
            and not any(batch.work is work and batch.route.gathers for batch in self._batches.queued)
        )

    def _admit(self, work: Work) -> None:
        batches = self._cutter.cut(work, self._device_io.open)
        if work.left == 0:
            self._finish(work)
        self._batches.add(batches)

    def _note_files(self) -> bool:
        """Finish jobs of files that have ended, and admit what waited for them; return whether any
        has."""
        ended = self._files.turn()
        self._files_hang &= not ended
        for job, reason in ended:
            work = self._works[job.id]
            if reason is not None:
                work.failed[-1] = reason
            if self._resources.direct is not None and job.segment is not None:
                self._resources.direct.note_changed(job.segment.segment)
            self._finish(work)
        for work in [work for work in self._waiting if ended and not self._files.is_blocked(work.job)]:
            self._waiting.remove(work)
            self._admit(work)
        return bool(ended)

    # -- turns ---------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether every job has ended."""
        return not self._works

    @property
    def at_device(self) -> bool:
        """Whether ``turn`` can wait for the device, or the remote store."""
        return self._device_io.busy or (self._remote_io is not None and self._remote_io.busy)

    @property
    def copying(self) -> bool:
        """Whether something goes on that ends soon, and has to be asked for its end."""
        return self._host_work.busy or self.copies.ends_soon

    def turn(self, now_s: float, wait_s: float = 0.0) -> bool:
        """Note what has ended, and start one batch at most. Return whether anything happened.

        ``wait_s``: how long to wait for the device, where something is at it and nothing has ended;
        where nothing is, for the remote store.
        """
        happened = False
        for backend in self._backends:
            happened |= self._poll(backend, wait_s)
            wait_s = 0.0 if backend.busy else wait_s
        happened |= self._note_files()
        happened |= self._give_up_late(now_s)
        happened |= self._expire(now_s)
        if self._stopping:
            return self._fail_unstarted(Reason.CANCELLED, lambda *_: True) or happened
        return self._start() or happened

    def take_report(self) -> Report:
        """Return what has ended since the last call."""
        report, self._report = self._report, Report()
        report.stats = self._stats.take()
        report.removed = self._files.take_removed()
        if self._remote_io is not None:
            report.remote_pause_s = self._remote_io.take_pause_s()
        return report

    def halt(self) -> None:
        """Begin no leg any more; what has begun ends, the rest is CANCELLED. Any thread."""
        self._stopping = True

    def await_copies(self) -> None:
        """Begin nothing more, and wait until no copy touches the GPU's blocks. Does not raise."""
        self.halt()
        self.copies.settle()

    def close(self) -> None:
        """Close device and files, after ``await_copies``. Waits for what has begun, and reports
        nothing of it."""
        with suppress(Exception):
            if self._remote_io is not None:
                self._remote_io.close()
        with suppress(Exception):
            self._resources.device.drain()
        self._host_work.close()
        self._files.close()
        self._resources.device.close()

    def _start(self) -> bool:
        """Start the first batch that can be."""
        taken = self._batches.take(self.copies.given_up)
        if taken is not None:
            batch, begins = taken
            if begins:
                self._advance(batch)
            else:
                self._fail(batch.work, dict.fromkeys(batch.positions, Reason.OVERWRITTEN))
        return taken is not None

    def _expire(self, now_s: float) -> bool:
        """Fail what has not started by its deadline, and what its drive would not take."""
        stuck = self._device_io.stuck
        if not stuck and now_s <= self._soonest_s:
            return False  # the usual case, in which the queue is not looked at
        hangs = any(work.deadline_s < now_s and work.job.kind in _READS for work in self._waiting)
        failed = self._fail_unstarted(
            Reason.DEADLINE,
            lambda work, batch: work.deadline_s < now_s or (batch and (batch.drive, batch.route.writes_drive) in stuck),
        )
        if hangs:
            self._files_hang = True
            for work in [work for work in self._waiting if work.job.kind in _READS]:
                self._waiting.remove(work)
                self._admit(work)
        left = [batch.work.deadline_s for batch in self._batches.queued] + [work.deadline_s for work in self._waiting]
        self._soonest_s = min(left, default=math.inf)
        if failed:
            self._log.warn("deadline", "the drive or the copies cannot keep up: moves were dropped before they started")
        return failed

    def _give_up_late(self, now_s: float) -> bool:
        """Fail what is too long at the device."""
        late = self._device_io.give_up_late(now_s)
        for progress in late:
            self._note(progress)
        return bool(late)

    # -- legs ----------------------------------------------------------------------------------

    def _advance(self, batch: Batch) -> None:
        """Take a batch from leg to leg until a backend has it, or it has ended.

        When stopping, what has begun ends as usual, and then no leg begins but the last look at
        what was moved.
        """
        while batch.positions and batch.begun < len(batch.route.legs):
            if batch.begun == 1 and batch.route.gathers:
                self._note_copied(batch.work)
            batch.begun += 1
            batch.began_s = self._clock()
            if self._stopping and batch.begun > 1 and not batch.sums_on_host:
                progress = fail_all(batch, Reason.CANCELLED)
            else:
                progress = self._backend_of(batch).start(batch)
            if not self._note(progress):
                return
        self._batches.end(batch)
        if batch.work.close_moves(len(batch.positions)):
            self._finish(batch.work)

    def _backend_of(self, batch: Batch) -> Backend:
        """Return what runs the leg that a batch has come to."""
        if batch.sums_on_host:
            return self._host_work
        if batch.leg not in {Leg.READ, Leg.WRITE}:
            return self.copies
        if batch.far.medium is Medium.FILES:
            return self._device_io
        if batch.far.medium is Medium.MEMORY:
            return self._host_work
        assert self._remote_io is not None, "a move names the remote store, and there is none"
        return self._remote_io

    def _poll(self, backend: Backend, wait_s: float) -> bool:
        """Go on with what a backend has ended; return whether it said anything."""
        happened = False
        for progress in backend.poll(wait_s):
            happened = True
            if self._note(progress):
                self._advance(progress.batch)
            if progress.unanswered:
                self._fail_unasked(progress.batch.work)
        return happened

    def _note(self, progress: Progress) -> bool:
        """Note what a backend says of a batch; return whether its leg has ended: then what is left
        of it goes on to the next."""
        batch, failed, by_host, ended, _ = progress
        if batch.late:  # its moves have failed, and its slots stay taken until this is the end
            if ended:
                self._end_late(batch)
            else:
                batch.work.late.update(failed)
                self._fail(batch.work, failed)
            return False
        if ended:
            self._count(batch, len(batch.positions) - len(failed) - len(by_host))
        if by_host:
            self._load_by_host(batch, by_host)
        if failed:
            batch.drop(failed)
            self._fail(batch.work, failed)
        return ended

    def _fail_unasked(self, work: Work) -> None:
        """The remote store failed a job in a batch: start nothing more of it. It would hold the
        request for as long again, and what follows in the prompt is computed anyway."""
        self._fail_unstarted(Reason.CANCELLED, lambda each, batch: batch and each is work and batch.route.by_key)

    def _load_by_host(self, batch: Batch, positions: Collection[int]) -> None:
        """Take moves out of a direct batch; load them, and all of their segments, through host
        memory."""
        direct = self._resources.direct
        assert direct is not None
        again = [position for position in batch.positions if position in positions]  # in the order of their slots
        direct.load_by_host(batch.work.job.moves[position] for position in again)
        batch.drop(again)
        self._batches.add(self._cutter.cut_by_host(batch, again))

    def _count(self, batch: Batch, moved: int) -> None:
        """Count what a leg has moved between two kinds of memory, and how long it took."""
        at_device = batch.leg in {Leg.READ, Leg.WRITE}
        if not moved or batch.leg in _SUMS or (batch.route.direct and not at_device):
            return
        near, far = batch.route.fast.label, batch.far.label if at_device else "gpu"
        route = f"{far}_to_{near}" if batch.leg in {Leg.READ, Leg.GATHER} else f"{near}_to_{far}"
        moved_bytes = moved * (
            batch.slot_bytes if at_device else self._resources.geometry.groups[batch.group].payload_bytes
        )
        self._stats.observe(f"transfer_bytes.{route}", moved_bytes)
        self._stats.observe(f"transfer_seconds.{route}", max(0.0, self._clock() - batch.began_s))
        if at_device and batch.far.medium is Medium.FILES:
            counter = "drive_read_bytes" if batch.leg is Leg.READ else "drive_written_bytes"
            self._stats.add(f"{counter}.{batch.drive}", moved_bytes)

    # -- endings -------------------------------------------------------------------------------

    def _end_late(self, batch: Batch) -> None:
        """The device has ended a late batch: its slots are free to be used."""
        self._batches.end(batch)
        batch.work.late.difference_update(batch.positions)
        if batch.work.left == 0 and not batch.work.late:
            self._report.released[batch.work.job.id] = 1

    def _fail_unstarted(self, reason: Reason, wanted: Callable[[Work, Batch | None], object]) -> bool:
        """Fail the jobs that wait for files (batch None) and the queued batches that are
        ``wanted``; return whether there were any."""
        waiting = [work for work in self._waiting if wanted(work, None)]
        for work in waiting:
            self._waiting.remove(work)
            work.left = len(work.job.moves)
            self._fail(work, dict.fromkeys(range(work.left), reason))
        batches = self._batches.remove(lambda batch: wanted(batch.work, batch))
        for batch in batches:
            self._fail(batch.work, dict.fromkeys(batch.positions, reason))
        return bool(waiting or batches)

    def _fail(self, work: Work, failed: Mapping[int, Reason]) -> None:
        """Moves of a job have failed: count them, and finish the job with its last."""
        work.failed.update(failed)
        for position, reason in failed.items():
            # What another engine's slot holds by now is no failure: the manager counts it.
            if reason is Reason.DEADLINE or (reason in _COUNTED and not work.job.moves[position].is_foreign):
                self._stats.add(_COUNTED[reason])
        self._note_copied(work)
        if work.close_moves(len(failed)):
            self._finish(work)

    def _note_copied(self, work: Work) -> None:
        """Report once that nothing of a store to the drive reads the GPU any more."""
        if work.job.kind is not JobKind.STORE or work.copied or self._resources.arenas:
            return
        if self.has_launched(work.job.id) and not self._is_gathering(work):
            work.copied = True
            self._report.copied[work.job.id] = 1

    def _is_gathering(self, work: Work) -> bool:
        """Whether a copy of a store from the GPU goes on."""
        return any(
            batch.work is work and batch.leg is Leg.GATHER and batch.pending for batch in self._batches.under_way
        )

    def _finish(self, work: Work) -> None:
        """A job has ended: report it. What is late of it is released later."""
        self._note_copied(work)
        del self._works[work.job.id]
        self._report.results[work.job.id] = JobResult(1, work.failed, {*work.late}, 1 if work.late else 0)
