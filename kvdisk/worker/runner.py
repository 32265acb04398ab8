# SPDX-License-Identifier: Apache-2.0
"""Runs jobs leg by leg: what ``Mover`` does on its thread.

Work is taken in batches of a few MiB and the queues are looked at between batches, so that a load
waits for the batches under way and never for a long store. Several batches are under way at once:
while one is verified and scattered, the next one's read is in flight. The bounds below are numbers
of batches.
"""

from __future__ import annotations

import logging
import math
import threading
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvdisk.blocks import JobId, Medium
from kvdisk.device.base import Outcome
from kvdisk.errors import QuietLog
from kvdisk.messages import Job, JobKind, JobResult, Reason, Report
from kvdisk.stats import Stats
from kvdisk.worker.arena_io import copy_slots
from kvdisk.worker.copier_base import Slots
from kvdisk.worker.cutter import BatchCutter
from kvdisk.worker.device_io import DeviceIo
from kvdisk.worker.files import FILE_KINDS, FileJobs
from kvdisk.worker.remote_io import RemoteIo
from kvdisk.worker.resources import Resources
from kvdisk.worker.routes import Batch, Leg, Route, Work
from kvdisk.worker.slot_headers import SlotHeaders

if TYPE_CHECKING:
    from kvdisk.worker.copier_base import Event

logger = logging.getLogger("kvdisk.worker")

BATCH_BYTES = 8 << 20
MOST_READS = 4
"""Read batches at the device; what is no load starts only below half of it."""
MOST_WRITES = 8
"""Batches from gather to the end of their write: some are gathered and sealed while others are
written. The device gives the kernel no more of them than the drive needs."""
MOST_RELAYS = 2
"""Batches on their way from a drive to the remote store, and as many back: they hold staging while
that is slow."""
MOST_LATE, MOST_LATE_WRITES = 16, 4
"""So many late reads of a drive stop every batch there: it does not answer; so many late writes
stop its writes only. Late batches count nowhere else."""
MOST_GATHERS = 2
MOST_SCATTERS = 4

_COUNTED = {
    Reason.HEADER: "verification_failures.header",
    Reason.CHECKSUM: "verification_failures.checksum",
    Reason.DEADLINE: "deadline_misses",
}
_UNANSWERED = frozenset({Reason.DEADLINE, Reason.CANCELLED, Reason.REMOTE_ERROR})
"""Reasons with which the remote store has said nothing about an object."""
_SUMS = frozenset({Leg.CHECK, Leg.SEAL})
_ON_BLOCKS = frozenset({Leg.GATHER, Leg.SCATTER})
"""Legs that wait for the model's work on vLLM's blocks."""


class ThreadDone:
    """``Event`` of what checksum threads do."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def query(self) -> bool:
        """See ``Event``."""
        return self.future.done()

    def synchronize(self) -> None:
        """See ``Event``."""
        wait([self.future])


class Runner:
    """See the module. One thread calls everything but ``give_up``, ``halt`` and those of sleep.

    ``fingerprint``: of the namespace until a home is named. ``io_deadline_s``: how long a batch may
    be at the device. ``batch_bytes``: aim for the size of a batch. ``threaded``: see ``FileJobs``.
    ``given_up``: stores of which no copy from the GPU may begin any more.
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
        self.given_up: set[JobId] = set()
        self._gathering = threading.Lock()
        """Held while a copy from the GPU begins."""
        self._touching = threading.Lock()
        """Held while any work on the GPU begins."""
        self._unmapped = False
        """No work on the GPU may begin: vLLM has taken its memory away, or is about to."""
        self._resources = resources
        self._clock = clock
        self._io_deadline_s = io_deadline_s
        self._headers = SlotHeaders(resources.geometry, resources.rank, fingerprint, resources.direct)
        self._report = Report()
        self._stats = Stats()
        self._log = QuietLog(clock, logger)
        self._device_io = DeviceIo(resources.device, self._stats, self._log)
        remote = resources.remote
        self._remote_io = (
            None if remote is None else RemoteIo(remote, resources.geometry, resources.rank, self._headers)
        )
        self._files = FileJobs(
            resources.files, resources.device, self._log, uses=self._device_io.uses, threaded=threaded
        )
        self._works: dict[JobId, Work] = {}
        self._queues: dict[tuple[Route, bool], list[Batch]] = {}
        """Batches that have not started, by route and whether they are urgent; in order in each."""
        self._soonest_s = math.inf
        """No job's deadline that has not been looked at is sooner."""
        self._waiting: list[Work] = []
        """Jobs that name a segment which is being opened or dropped."""
        self._under_way: list[Batch] = []
        """Batches that have started and not ended, late ones too."""
        self._batches = BatchCutter(resources, batch_bytes)
        self._direct = resources.direct
        self._stopping = False
        self._threads = None
        if resources.checksum_threads:
            self._threads = ThreadPoolExecutor(resources.checksum_threads, "kvdisk-checksum")

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
        if self._files.is_blocked(job):
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
        batches = self._take_queued(lambda batch: batch.work is work)
        work.urgent = work.fenced = True
        self._fail_unstarted(Reason.OVERWRITTEN, lambda each, _: each is work)
        self._enqueue(batches)

    def has_launched(self, job_id: JobId) -> bool:
        """Whether every copy from the GPU of a job that was added has begun, or never will."""
        work = self._works.get(job_id)
        return work is None or (
            work not in self._waiting and not any(batch.work is work and batch.route.gathers for batch in self.queued)
        )

    def _admit(self, work: Work) -> None:
        batches = self._batches.cut(work, self._files.open)
        if work.left == 0:
            self._finish(work)
        self._enqueue(batches)

    def _enqueue(self, batches: Iterable[Batch]) -> None:
        """Let batches wait for their turn."""
        for batch in batches:
            insort(self._queues.setdefault((batch.route, batch.work.urgent), []), batch, key=_urgency)

    def _note_files(self, ended: Iterable[tuple[Job, Reason | None]]) -> bool:
        """Finish ended jobs of files, and admit what waited for them; return whether any ended."""
        happened = False
        for job, reason in ended:
            happened = True
            work = self._works[job.id]
            if reason is not None:
                work.failed[-1] = reason
            if self._direct is not None and job.segment is not None:
                self._direct.note_changed(job.segment.segment)
            self._finish(work)
        for work in [work for work in self._waiting if happened and not self._files.is_blocked(work.job)]:
            self._waiting.remove(work)
            self._admit(work)
        return happened

    # -- turns ---------------------------------------------------------------------------------

    @property
    def queued(self) -> list[Batch]:
        """The batches that have not started."""
        return [batch for batches in self._queues.values() for batch in batches]

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
        """Whether a copy that goes on has to be asked for its end; not one that waits for the
        model's work, which takes as long as a step."""
        return any(
            batch.pending is not None
            and (batch.leg not in _ON_BLOCKS or batch.work.after is None or batch.work.after.query())
            for batch in self._under_way
        )

    def turn(self, now_s: float, wait_s: float = 0.0) -> bool:
        """Note what has ended, and start one batch at most. Return whether anything happened.

        ``wait_s``: how long to wait for the device, where something is at it and nothing has ended;
        where nothing is, for the remote store.
        """
        outcomes = self._device_io.poll(wait_s)
        self._reap(outcomes)
        happened = bool(outcomes) | self._reap_remote(0.0 if self._device_io.busy else wait_s) | self._reap_copies()
        happened |= self._note_files(self._files.turn())
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

    def give_up(self, job_ids: Iterable[JobId]) -> None:
        """Give stores up. Any thread. Of their copies from the GPU none begins after it returns."""
        self.given_up.update(job_ids)
        with self._gathering:
            pass

    def leave_gpu(self) -> None:
        """Let no work on the GPU begin until ``return_to_gpu``; return when none is under way. Any
        thread. What would begin fails as CANCELLED; the rest goes on."""
        with self._touching:
            self._unmapped = True
        for batch in list(self._under_way):
            copy = batch.pending
            if copy is not None:
                copy.synchronize()
        self._resources.copier.settle()

    def return_to_gpu(self) -> None:
        """The GPU's memory is there again. Any thread."""
        self._unmapped = False

    def await_copies(self) -> None:
        """Begin nothing more, and wait until no copy touches the GPU's blocks. Does not raise."""
        self.halt()
        for batch in self._under_way:
            with suppress(Exception):  # a call that a capture forbids, or a GPU that fails
                if batch.pending is not None:
                    batch.pending.synchronize()
        self._resources.copier.settle()

    def close(self) -> None:
        """Close device and files, after ``await_copies``. Waits for what has begun, and reports
        nothing of it."""
        with suppress(Exception):
            if self._remote_io is not None:
                self._remote_io.close()
        with suppress(Exception):
            self._resources.device.drain()
        if self._threads is not None:
            self._threads.shutdown()
        self._files.close()
        self._resources.device.close()

    def _start(self) -> bool:
        """Start the first batch that can be. One that cannot holds up its route."""
        for batch in sorted((batches[0] for batches in self._queues.values() if batches), key=_urgency):
            route, work = batch.route, batch.work
            if self._has_room(route, work.urgent) and self._batches.lend(batch, self._under_way):
                self._queues[route, work.urgent].pop(0)
                self._under_way.append(batch)
                self._advance(batch)
                return True
            if work.fenced or (route.gathers and work.job.id in self.given_up):
                self._queues[route, work.urgent].pop(0)
                self._fail(work, dict.fromkeys(batch.positions, Reason.OVERWRITTEN))
                return True
        return False

    def _has_room(self, route: Route, urgent: bool) -> bool:
        """Whether one more batch of a route may be under way."""
        others = [batch for batch in self._under_way if not batch.late]
        reads = sum(batch.leg is Leg.READ and batch.route.source is route.source for batch in others)
        writes = sum(batch.route.writes and batch.route.target is route.target for batch in others)
        of_stores = sum(batch.route.gathers and batch.pending is not None for batch in others)
        of_loads = sum(batch.route.scatters and batch.pending is not None for batch in others)
        summing = self._resources.checksum_threads
        return (
            not (route.reads and reads >= (MOST_READS if route.scatters else MOST_READS // 2))
            and not (route.writes and writes >= MOST_WRITES)
            and not (route.relays and sum(batch.route is route for batch in others) >= MOST_RELAYS)
            and not (route.gathers and of_stores >= MOST_GATHERS + summing and not urgent)
            and not (route.scatters and of_loads >= MOST_SCATTERS + summing)
        )

    def _expire(self, now_s: float) -> bool:
        """Fail what has not started by its deadline, and what its drive would not take."""
        stuck = self._stuck()
        if not stuck and now_s <= self._soonest_s:
            return False  # the usual case, in which the queue is not looked at
        failed = self._fail_unstarted(
            Reason.DEADLINE,
            lambda work, batch: work.deadline_s < now_s or (batch and (batch.drive, batch.route.writes_drive) in stuck),
        )
        left = [batch.work.deadline_s for batch in self.queued] + [work.deadline_s for work in self._waiting]
        self._soonest_s = min(left, default=math.inf)
        if failed:
            self._log.warn("deadline", "the drive or the copies cannot keep up: moves were dropped before they started")
        return failed

    def _stuck(self) -> set[tuple[int, bool]]:
        """Return the drives that are given no more reads (False) or writes (True)."""
        late = Counter((batch.drive, batch.leg is Leg.WRITE) for batch in self._under_way if batch.late)
        found: set[tuple[int, bool]] = set()
        for (drive, writes), count in late.items():
            if count >= (MOST_LATE_WRITES if writes else MOST_LATE):
                found |= {(drive, writes), (drive, True)}
        return found

    def _give_up_late(self, now_s: float) -> bool:
        """Fail the moves of batches that are too long at the device. Their memory stays taken."""
        overdue = [
            batch
            for batch in self._under_way
            if batch.transfers and not batch.late and batch.began_s < now_s - self._io_deadline_s
        ]
        for batch in overdue:
            late = dict.fromkeys(batch.positions, Reason.DEADLINE)
            self._log.warn("late", f"a drive has not finished {len(late)} blocks in {self._io_deadline_s:g} s")
            self._stats.add("late_moves", len(late))
            batch.late = True
            self._fail(batch.work, late)
        return bool(overdue)

    # -- legs ----------------------------------------------------------------------------------

    def _advance(self, batch: Batch) -> None:
        """Take a batch from leg to leg until it waits for copier or device, or has ended.

        What has started ends as usual; when stopping, no further leg starts.
        """
        legs, direct = batch.route.legs, batch.route.direct
        while batch.positions and batch.begun < len(legs):
            if batch.begun == 1 and batch.route.gathers:
                self._note_copied(batch.work)
            batch.begun += 1
            batch.began_s = self._clock()
            if batch.leg is Leg.CHECK or (batch.leg is Leg.SEAL and not direct):
                if not self._sum(batch):
                    return
            elif batch.begun > 1 and self._stopping:
                self._drop(batch, dict.fromkeys(batch.positions, Reason.CANCELLED))
            elif self._send(batch) if batch.leg in {Leg.READ, Leg.WRITE} else self._copy(batch):
                return
        self._end(batch)

    def _send(self, batch: Batch) -> bool:
        """Send a batch to the device, the remote store, or another arena; return whether it is
        there."""
        if batch.far.medium is Medium.MEMORY:
            arena = self._resources.arenas[batch.far]
            if self._threads is None:
                copy_slots(batch, arena)
                self._count(batch, len(batch.positions))
                return False
            batch.pending = ThreadDone(self._threads.submit(copy_slots, batch, arena))
        elif batch.far.medium is Medium.OBJECTS:
            assert self._remote_io is not None, "a move names the remote store, and there is none"
            self._remote_io.send(batch)
        elif (batch.drive, batch.leg is Leg.WRITE) in self._stuck():
            self._drop(batch, dict.fromkeys(batch.positions, Reason.DEADLINE))
        else:
            self._drop(batch, self._device_io.send(batch, self._files.open))
        return bool(batch.positions)

    def _copy(self, batch: Batch) -> bool:
        """Start a leg on copier or GPU, unless its store was given up; return whether it runs."""
        if batch.leg in _ON_BLOCKS and batch.memory.is_pageable and batch.work.after is not None:
            batch.work.after.synchronize()  # or the copy would wait for it, and who gives stores up for the locks
        with self._touching, self._gathering if batch.leg is Leg.GATHER else nullcontext():
            if self._unmapped:
                self._drop(batch, dict.fromkeys(batch.positions, Reason.CANCELLED))
                return False
            if batch.leg is Leg.GATHER and batch.work.job.id in self.given_up:
                self._drop(batch, dict.fromkeys(batch.positions, Reason.OVERWRITTEN))
                return False
            batch.pending = copy = self._start_copy(batch)
        if copy is None:
            text = "the GPU has no memory left for copies: blocks are not stored, or computed instead of loaded"
            self._log.warn("gpu memory", text)
            self._drop(batch, dict.fromkeys(batch.positions, Reason.NO_GPU_MEMORY))
            return False
        return not self._reap_copy(batch, copy)

    def _start_copy(self, batch: Batch) -> Event | None:
        """Start the copy; None: the GPU has no memory for it."""
        copier, work = self._resources.copier, batch.work
        if batch.leg in {Leg.SUM, Leg.SEAL}:
            assert self._direct is not None
            staging = self._direct.staging
            if batch.leg is Leg.SEAL:
                self._headers.seal(batch)
                return staging.start_headers(batch.size_class, batch.slots)
            from kvdisk.worker.copier import Lane  # imports torch

            lane = Lane.STORE if batch.route.gathers else Lane.LOAD
            return staging.start_sums(batch.size_class, batch.slots, self._payload_bytes(batch), lane)
        blocks = [block for position in batch.positions for block in work.job.moves[position].gpu_blocks]
        slots = Slots(batch.memory, batch.size_class, batch.slots)
        if batch.leg is Leg.GATHER:
            return copier.gather(batch.group, blocks, slots, work.after)
        return copier.scatter(batch.group, slots, blocks, work.after)

    def _reap_copy(self, batch: Batch, copy: Event) -> bool:
        """Note a copy, or a seal or check on another thread, that has ended."""
        if not copy.query():
            return False
        copy.synchronize()
        batch.pending = None
        if isinstance(copy, ThreadDone) and batch.leg in _SUMS:
            self._note_summed(batch, copy.future.result())
        else:
            self._count(batch, len(batch.positions))
        return True

    def _reap_copies(self) -> bool:
        copying = [(batch, batch.pending) for batch in self._under_way if batch.pending is not None]
        ended = [batch for batch, copy in copying if self._reap_copy(batch, copy)]
        for batch in ended:
            self._advance(batch)
        return bool(ended)

    def _reap(self, outcomes: Sequence[Outcome]) -> None:
        for batch, failed in self._device_io.reap(outcomes, self._files.open):
            if batch.late:
                self._end_late(batch)
                continue
            self._count(batch, len(batch.positions) - len(failed))
            self._drop(batch, self._leave_direct(batch, failed) if failed and batch.route.direct else failed)
            self._advance(batch)

    def _reap_remote(self, wait_s: float) -> bool:
        """Go on with the batches that the remote store has ended; return whether there were any.

        Where it failed a job in batch, nothing more of that is started: it would hold the request
        for as long again, and what follows in the prompt is computed anyway."""
        ended = [] if self._remote_io is None else list(self._remote_io.reap(wait_s))
        for batch, failed in ended:
            self._count(batch, len(batch.positions) - len(failed))
            for position in [at for at, reason in failed.items() if reason is Reason.HEADER]:
                self._warn_of_object(batch, position, "length or seal")
            self._drop(batch, failed)
            self._advance(batch)
        broken = {batch.work.job.id for batch, failed in ended if not _UNANSWERED.isdisjoint(failed.values())}
        if broken:
            self._fail_unstarted(
                Reason.CANCELLED,
                lambda work, batch: batch and work.job.id in broken and batch.route.by_key,
            )
        return bool(ended)

    def _count(self, batch: Batch, moved: int) -> None:
        """Count what a leg has moved between two kinds of memory, and how long it took."""
        at_device = batch.leg in {Leg.READ, Leg.WRITE}
        if not moved or (batch.route.direct and not at_device):
            return
        near, far = batch.route.fast.label, batch.far.label if at_device else "gpu"
        route = f"{far}_to_{near}" if batch.leg in {Leg.READ, Leg.GATHER} else f"{near}_to_{far}"
        moved_bytes = moved * (batch.slot_bytes if at_device else self._payload_bytes(batch))
        self._stats.observe(f"transfer_bytes.{route}", moved_bytes)
        self._stats.observe(f"transfer_seconds.{route}", max(0.0, self._clock() - batch.began_s))
        if at_device and batch.far.medium is Medium.FILES:
            counter = "drive_read_bytes" if batch.leg is Leg.READ else "drive_written_bytes"
            self._stats.add(f"{counter}.{batch.drive}", moved_bytes)

    def _payload_bytes(self, batch: Batch) -> int:
        return self._resources.geometry.groups[batch.group].payload_bytes

    def _sum(self, batch: Batch) -> bool:
        """Seal or verify a batch's slots; return whether that has ended."""
        act = self._headers.check if batch.leg is Leg.CHECK else self._headers.seal
        if self._threads is None or batch.route.direct:
            self._note_summed(batch, act(batch))
            return True
        batch.pending = ThreadDone(self._threads.submit(act, batch))
        return False

    def _note_summed(self, batch: Batch, found: tuple[dict[int, Reason], list[int]] | None) -> None:
        """Note the end of a seal (None), or what a check found."""
        bad, unknown = found or ({}, [])
        self._load_by_host(batch, unknown)
        for position, reason in bad.items():
            move = batch.work.job.moves[position]
            if batch.is_of_objects:
                self._warn_of_object(batch, position, "header" if reason is Reason.HEADER else "checksum")
            else:
                self._log.warn(reason.name, f"a block was refused: {reason.name} of {dict(move.slots)}")
        self._drop(batch, bad)

    def _warn_of_object(self, batch: Batch, position: int, what: str) -> None:
        assert self._remote_io is not None
        name = self._remote_io.name_of(batch, position)
        self._log.warn(f"object's {what}", f"wrong {what}: object {name} of the remote store is not used")

    def _leave_direct(self, batch: Batch, failed: Mapping[int, Reason]) -> Mapping[int, Reason]:
        """The drive has failed moves on the GPU's way: use it less, and load them by the host's.

        Returns the failures that stay.
        """
        assert self._direct is not None
        broken = [position for position, reason in failed.items() if reason is Reason.IO_ERROR]
        if batch.route.reads:
            if broken and self._direct.note_failed_read():
                self._log.warn(
                    "direct reads",
                    "reads with GPUDirect Storage keep failing: all blocks go through host memory until the next start",
                )
            self._load_by_host(batch, broken)
            return {position: reason for position, reason in failed.items() if reason is not Reason.IO_ERROR}
        if broken:
            self._direct.store_by_host()
            self._log.warn("direct", "a write with GPUDirect Storage failed: from now on all go through host memory")
        return failed

    def _load_by_host(self, batch: Batch, positions: Sequence[int]) -> None:
        """Take moves out of a batch; load them, and all of their segments, through host memory."""
        positions = [position for position in batch.positions if position in positions]  # in the order of their slots
        if positions:
            assert self._direct is not None
            self._direct.load_by_host(batch.work.job.moves[position] for position in positions)
            batch.drop(dict.fromkeys(positions, Reason.IO_ERROR))
            self._enqueue(self._batches.cut_by_host(batch, positions))

    # -- endings -------------------------------------------------------------------------------

    def _drop(self, batch: Batch, failed: Mapping[int, Reason]) -> None:
        """Take failed moves out of a batch; the others go on."""
        if failed:
            batch.drop(failed)
            self._fail(batch.work, failed)

    def _end(self, batch: Batch) -> None:
        self._under_way.remove(batch)
        self._batches.give_back(batch)
        self._close_moves(batch.work, len(batch.positions))

    def _end_late(self, batch: Batch) -> None:
        """The device has ended a late batch: its slots are free to be used."""
        self._under_way.remove(batch)
        self._batches.give_back(batch)
        if batch.work.left == 0 and not self._late_of(batch.work):
            self._report.released[batch.work.job.id] = 1

    def _late_of(self, work: Work) -> set[int]:
        """Return the moves that have failed, and that the device has not ended."""
        return {
            position for batch in self._under_way if batch.late and batch.work is work for position in batch.positions
        }

    def _fail_unstarted(self, reason: Reason, wanted: Callable[[Work, Batch | None], object]) -> bool:
        """Fail the jobs that wait for files (batch None) and the queued batches that are
        ``wanted``; return whether there were any."""
        waiting = [work for work in self._waiting if wanted(work, None)]
        for work in waiting:
            self._waiting.remove(work)
            work.left = len(work.job.moves)
            self._fail(work, dict.fromkeys(range(work.left), reason))
        batches = self._take_queued(lambda batch: wanted(batch.work, batch))
        for batch in batches:
            self._fail(batch.work, dict.fromkeys(batch.positions, reason))
        return bool(waiting or batches)

    def _take_queued(self, wanted: Callable[[Batch], object]) -> list[Batch]:
        taken = [batch for batch in self.queued if wanted(batch)]
        if taken:
            self._queues = {
                lane: [batch for batch in batches if not wanted(batch)] for lane, batches in self._queues.items()
            }
        return taken

    def _fail(self, work: Work, failed: Mapping[int, Reason]) -> None:
        work.failed.update(failed)
        for position, reason in failed.items():
            # What another engine's slot holds by now is no failure: the manager counts it.
            if reason is Reason.DEADLINE or (reason in _COUNTED and not work.job.moves[position].is_foreign):
                self._stats.add(_COUNTED[reason])
        self._note_copied(work)
        self._close_moves(work, len(failed))

    def _close_moves(self, work: Work, count: int) -> None:
        work.left -= count
        assert work.left >= 0
        if count and work.left == 0:
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
            batch.work is work and batch.leg is Leg.GATHER and batch.pending is not None for batch in self._under_way
        )

    def _finish(self, work: Work) -> None:
        self._note_copied(work)
        del self._works[work.job.id]
        late = self._late_of(work)
        self._report.results[work.job.id] = JobResult(1, work.failed, late, 1 if late else 0)


_urgency = attrgetter("urgency")
