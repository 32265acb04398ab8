# SPDX-License-Identifier: Apache-2.0
"""Runs jobs leg by leg: what ``Mover`` does on its thread. No thread, lock or clock of its own.

Work is taken in parts of a few MiB and the queues are looked at between parts, so that a load waits
for the parts under way and never for a long store. Several parts are under way at once: while one
is verified and scattered, the next one's read is in flight. The bounds below are numbers of parts.
"""

from __future__ import annotations

import logging
import math
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, is_
from typing import TYPE_CHECKING

from kvdisk.blocks import JobId
from kvdisk.device.base import Op, Outcome
from kvdisk.errors import QuietLog
from kvdisk.messages import Job, JobKind, Reason, Report
from kvdisk.stats import Stats
from kvdisk.worker.device_io import DeviceIo
from kvdisk.worker.files import FILE_KINDS, FileJobs
from kvdisk.worker.routes import Leg, Part, PartCutter, Resources, Route, Work
from kvdisk.worker.slot_headers import SlotHeaders

if TYPE_CHECKING:
    from kvdisk.worker.copier import Event

logger = logging.getLogger("kvdisk.worker")

PART_BYTES = 8 << 20
MOST_READS = 4
"""Read batches at the device; promotions start only below half of it."""
MOST_WRITES = 4
"""Parts from gather to the end of their write: one is gathered while others are written."""
MOST_LATE = 16
"""So many late reads of a drive stop every batch there: it does not answer.

MOST_WRITES late writes stop its writes only. Late batches count nowhere else.
"""
MOST_GATHERS = 2
MOST_SCATTERS = 4

_COUNTED = {
    Reason.HEADER: "verification_failures.header",
    Reason.CHECKSUM: "verification_failures.checksum",
    Reason.DEADLINE: "deadline_misses",
}


@dataclass(slots=True)
class Gate:
    """``given_up``: stores of which no copy from the GPU may begin any more. One begins within
    ``lock``."""

    given_up: set[JobId] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def give_up(self, job_ids: Iterable[JobId]) -> None:
        """Give stores up; when it returns, each of their copies from the GPU has begun, or never
        will."""
        self.given_up.update(job_ids)
        with self.lock:
            pass


class Runner:
    """See the module. One thread calls everything.

    ``fingerprint``: of the namespace until a home is named. ``io_deadline_s``: how long a batch may
    be at the device. ``part_bytes``: aim for the size of a part. ``threaded``: see ``FileJobs``.
    """

    def __init__(
        self,
        resources: Resources,
        gate: Gate,
        *,
        fingerprint: bytes,
        io_deadline_s: float,
        clock: Callable[[], float],
        part_bytes: int,
        threaded: bool,
    ) -> None:
        self._resources = resources
        self._gate = gate
        self._clock = clock
        self._io_deadline_s = io_deadline_s
        self._headers = SlotHeaders(resources.geometry, resources.rank, fingerprint, resources.direct)
        self._report = Report()
        self._stats = Stats()
        self._log = QuietLog(clock, logger)
        self._device_io = DeviceIo(resources.device, self._stats, self._log, clock)
        self._files = FileJobs(
            resources.files, resources.device, self._log, uses=self._device_io.uses, threaded=threaded
        )
        self._works: dict[JobId, Work] = {}
        self._queues: dict[tuple[Route, bool], list[Part]] = {}
        """Parts that have not started, by route and whether they are urgent; in order in each."""
        self._soonest_s = math.inf
        """No job's deadline that has not been looked at is sooner."""
        self._waiting: list[Work] = []
        """Jobs that name a segment which is being opened or dropped."""
        self._parts = PartCutter(resources, part_bytes)
        self._direct = resources.direct
        self._copies = Copies(resources, self._stats, clock)
        self._writes = 0
        self._stopping = False

    def attach(self) -> None:
        """Make the memory known to the device. Once, before the first turn."""
        for memory in self._resources.memories:
            self._resources.device.attach_memory(memory)

    # -- intake --------------------------------------------------------------------------------

    def add(self, job: Job, after: Event | None, deadline_s: float, *, urgent: bool = False) -> None:
        """Take a job in. It waits for earlier jobs that open or drop a segment of its own."""
        work = Work(job, after, deadline_s, urgent=urgent)
        self._soonest_s = min(self._soonest_s, deadline_s)
        self._works[job.id] = work
        if job.kind in FILE_KINDS:
            if job.home is not None:
                self._headers.fingerprint = job.home.fingerprint
            self._files.add(job)
            return
        work.waits_for = self._files.needed_by(job)
        if work.waits_for:
            self._waiting.append(work)
        else:
            self._admit(work)

    def fence(self, job_ids: Iterable[JobId]) -> None:
        """Begin these stores' copies from the GPU first; what cannot begin at once fails."""
        for job_id in job_ids:
            work = self._works.get(job_id)
            if work is not None and not self.has_launched(job_id):
                parts = self._take_queued(partial(_is_of, work))
                work.urgent = work.fenced = True
                self._enqueue(parts)
                if work in self._waiting:
                    self._fail_waiting(work, Reason.OVERWRITTEN)

    def has_launched(self, job_id: JobId) -> bool:
        """Whether every copy from the GPU of a job that was added has begun, or never will."""
        work = self._works.get(job_id)
        return work is None or (
            work not in self._waiting and not any(part.work is work and part.route.gathers for part in self.queued)
        )

    def void(self, job_ids: Iterable[JobId]) -> None:
        """End these loads as failed, and start nothing more of them. Ended ones stay as they
        are."""
        for job_id in job_ids:
            work = self._works.get(job_id)
            if work is not None and work.job.kind is JobKind.LOAD:
                work.void = True
        self._fail_queued(lambda part: part.work.void, Reason.CANCELLED)

    def _admit(self, work: Work) -> None:
        parts = self._parts.cut(work, self._files.open)
        if work.left == 0:
            self._finish(work)
        self._enqueue(parts)

    def _enqueue(self, parts: Iterable[Part]) -> None:
        """Let parts wait for their turn, unless nothing of their job may start any more."""
        for part in parts:
            if part.work.void or self._stopping:
                self._fail(part.work, dict.fromkeys(part.positions, Reason.CANCELLED))
            else:
                insort(self._queues.setdefault((part.route, part.work.urgent), []), part, key=_urgency)

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
        for work in [work for work in self._waiting if work.waits_for <= self._files.ended]:
            self._waiting.remove(work)
            self._admit(work)
        return happened

    # -- turns ---------------------------------------------------------------------------------

    @property
    def queued(self) -> list[Part]:
        """The parts that have not started."""
        return [part for parts in self._queues.values() for part in parts]

    @property
    def idle(self) -> bool:
        """Whether every job has ended."""
        return not self._works

    @property
    def at_device(self) -> bool:
        """Whether ``turn`` can wait for the device."""
        return self._device_io.busy

    @property
    def copying(self) -> bool:
        """Whether a copy has to be asked for its end."""
        return self._copies.busy

    def turn(self, now_s: float, wait_s: float = 0.0) -> bool:
        """Note what has ended, and start one part at most. Return whether anything happened.

        ``wait_s``: how long to wait for the device, where something is at it and nothing has ended.
        """
        outcomes = self._device_io.poll(wait_s)
        self._reap(outcomes)
        happened = bool(outcomes) | self._reap_copies()
        happened |= self._note_files(self._files.turn())
        happened |= self._give_up(now_s)
        happened |= self._expire(now_s)
        return (self._cancel_unstarted() if self._stopping else self._start()) or happened

    def take_report(self) -> Report:
        """Return what has ended since the last call."""
        report, self._report = self._report, Report()
        report.stats = self._stats.take()
        return report

    def halt(self) -> None:
        """Begin no leg any more; what has begun ends, the rest is CANCELLED. Any thread."""
        self._stopping = True

    def _cancel_unstarted(self) -> bool:
        waiting = list(self._waiting)
        for work in waiting:
            self._fail_waiting(work, Reason.CANCELLED)
        return self._fail_queued(lambda _: True, Reason.CANCELLED) or bool(waiting)

    def stop(self) -> None:
        """End what is under way, however long it takes; the rest is CANCELLED. Then ``idle``."""
        self.halt()
        self._cancel_unstarted()
        self._note_files(self._files.stop())
        while self._device_io.busy:
            self._reap(self._device_io.drain())
        self._reap_copies(wait=True)
        assert self.idle

    def await_copies(self) -> None:
        """After an error of ours: wait until no copy touches the GPU's blocks. Does not raise."""
        self.halt()
        self._copies.abandon()

    def abandon(self) -> None:
        """After ``await_copies``: wait for the device. Nothing is reported any more."""
        self._resources.device.drain()

    def close(self) -> None:
        """Close device and files, when ``idle`` or after ``abandon``."""
        self._files.close()
        self._resources.device.close()

    def _start(self) -> bool:
        """Start the first part that can be. One that cannot holds up what is behind it on its
        route."""
        for part in sorted((parts[0] for parts in self._queues.values() if parts), key=_urgency):
            route, work = part.route, part.work
            if self._has_room(part) and self._parts.lend(part):
                self._queues[route, work.urgent].pop(0)
                self._writes += route.writes
                self._advance(part)
                return True
            if work.fenced or (route.gathers and work.job.id in self._gate.given_up):
                return self._fail_queued(partial(is_, part), Reason.OVERWRITTEN)
        return False

    def _has_room(self, part: Part) -> bool:
        """Whether one more part of its route may be under way."""
        route = part.route
        most_reads = MOST_READS // 2 if route is Route.PROMOTE else MOST_READS
        return (
            not (route.reads and self._device_io.reads >= most_reads)
            and not (route.writes and self._writes >= MOST_WRITES)
            and not (route.gathers and self._copies.of_stores >= MOST_GATHERS and not part.work.urgent)
            and not (route.scatters and self._copies.of_loads >= MOST_SCATTERS)
        )

    def _expire(self, now_s: float) -> bool:
        """Fail what has not started by its deadline, and what its drive would not take."""
        stuck = {(drive, op is Op.WRITE) for drive, _ in self._device_io.late for op in Op if self._is_stuck(drive, op)}
        if not stuck and now_s <= self._soonest_s:
            return False  # the usual case, in which nothing that grows with the queue is looked at
        waiting = [work for work in self._waiting if work.deadline_s < now_s]
        for work in waiting:
            self._fail_waiting(work, Reason.DEADLINE)
        failed = self._fail_queued(
            lambda part: part.work.deadline_s < now_s or (part.drive, part.route.writes) in stuck, Reason.DEADLINE
        )
        left = [part.work.deadline_s for part in self.queued] + [work.deadline_s for work in self._waiting]
        self._soonest_s = min(left, default=math.inf)
        if failed or waiting:
            self._log.warn("deadline", "the drive or the copies cannot keep up: moves were given up unstarted")
        return failed or bool(waiting)

    def _is_stuck(self, drive: int, op: Op) -> bool:
        late = self._device_io.late
        return late[drive, Op.READ] >= MOST_LATE or (op is Op.WRITE and late[drive, op] >= MOST_WRITES)

    def _give_up(self, now_s: float) -> bool:
        """Fail the moves of batches that are too long at the device. Their memory stays taken."""
        found = self._device_io.overdue(now_s - self._io_deadline_s)
        for part, failed in found:
            late = [position for position, reason in failed.items() if reason is Reason.DEADLINE]
            self._log.warn("late", f"a drive has not moved {len(late)} blocks in {self._io_deadline_s:g} s")
            self._stats.add("late_moves", len(late))
            self._writes -= part.route.writes
            part.work.late.update(late)
            part.work.late_parts += 1
            self._fail(part.work, failed)
        return bool(found)

    # -- legs ----------------------------------------------------------------------------------

    def _advance(self, part: Part) -> None:
        """Take a part from leg to leg until it waits for copier or device, or has ended.

        ``part.leg``: legs begun. What has started ends as usual; when stopping, or void, no further
        leg starts.
        """
        legs, direct = part.route.legs, part.route.direct
        while part.positions and part.leg < len(legs):
            if part.leg == 1 and part.route.gathers:
                self._note_copied(part.work)
            leg = legs[part.leg]
            part.leg += 1
            if leg is Leg.CHECK:
                self._check(part)
            elif leg is Leg.SEAL and not direct:
                self._headers.seal(part)
            elif part.leg > 1 and (self._stopping or part.work.void):
                self._drop(part, dict.fromkeys(part.positions, Reason.CANCELLED))
            elif leg in {Leg.READ, Leg.WRITE}:
                self._drop(part, self._send(part, Op.READ if leg is Leg.READ else Op.WRITE))
                if part.positions:
                    return
            else:
                if leg is Leg.SEAL:
                    self._headers.seal(part)
                if not (self._gather(part) if leg is Leg.GATHER else self._copies.start(part, leg)):
                    return
        self._end(part)

    def _gather(self, part: Part) -> bool:
        """Start a part's copy from the GPU, unless its store was given up; return whether that has
        ended."""
        with self._gate.lock:
            if part.work.job.id not in self._gate.given_up:
                return self._copies.start(part, Leg.GATHER)
        self._drop(part, dict.fromkeys(part.positions, Reason.OVERWRITTEN))
        return True

    def _send(self, part: Part, op: Op) -> dict[int, Reason]:
        if self._is_stuck(part.drive, op):
            return dict.fromkeys(part.positions, Reason.DEADLINE)
        return self._device_io.send(part, op, self._files.open, self._clock())

    def _reap(self, outcomes: Sequence[Outcome]) -> None:
        for part, failed in self._device_io.ended(outcomes):
            if part.late:
                self._end_late(part)
            else:
                self._drop(part, self._note_direct(part, failed) if failed and part.route.direct else failed)
                self._advance(part)

    def _reap_copies(self, *, wait: bool = False) -> bool:
        ended = False
        for part in self._copies.ended(wait=wait):
            ended = True
            self._advance(part)
        return ended

    def _check(self, part: Part) -> None:
        bad, unknown = self._headers.check(part)
        if self._direct is not None and unknown:
            self._direct.note_of_host(part.work.job.moves[position] for position in unknown)
            self._load_by_host(part, unknown)
        for position, reason in bad.items():
            move = part.work.job.moves[position]
            self._log.warn(reason.name, f"a block was refused: {reason.name} of {dict(move.slots)}")
        self._drop(part, bad)

    def _note_direct(self, part: Part, failed: Mapping[int, Reason]) -> Mapping[int, Reason]:
        """Count failures of the drive on the GPU's way; such loads go the host's way once more.

        Returns the failures that stay.
        """
        assert self._direct is not None
        mine = [position for position, reason in failed.items() if reason is Reason.IO_ERROR]
        if self._direct.note_failures(len(mine)):
            self._log.warn("direct", "GPUDirect has failed too often: all blocks go through host memory from now on")
        if not part.route.reads:
            return failed
        self._load_by_host(part, mine)
        return {position: reason for position, reason in failed.items() if reason is not Reason.IO_ERROR}

    def _load_by_host(self, part: Part, positions: Sequence[int]) -> None:
        """Take moves out of a part, and load them through host memory."""
        if not positions:
            return
        positions = [position for position in part.positions if position in positions]  # in the order of their slots
        part.drop(dict.fromkeys(positions, Reason.IO_ERROR))
        self._enqueue(self._parts.cut_by_host(part, positions))

    # -- endings -------------------------------------------------------------------------------

    def _drop(self, part: Part, failed: Mapping[int, Reason]) -> None:
        """Take failed moves out of a part; the others go on."""
        if failed:
            part.drop(failed)
            self._fail(part.work, failed)

    def _end(self, part: Part) -> None:
        self._parts.give_back(part)
        self._writes -= part.route.writes
        self._close_moves(part.work, len(part.positions))

    def _end_late(self, part: Part) -> None:
        """The device has ended a late part: its slots are free to be used."""
        self._parts.give_back(part)
        work = part.work
        work.late_parts -= 1
        if work.left:  # nobody has been told
            work.late.difference_update(part.positions)
        elif not work.late_parts:
            self._report.released[work.job.id] = 1

    def _fail_queued(self, wanted: Callable[[Part], bool], reason: Reason) -> bool:
        """Fail the parts of the queue that are ``wanted``; return whether there were any."""
        gone = self._take_queued(wanted)
        for part in gone:
            self._fail(part.work, dict.fromkeys(part.positions, reason))
        return bool(gone)

    def _take_queued(self, wanted: Callable[[Part], bool]) -> list[Part]:
        taken: list[Part] = []
        for lane, parts in self._queues.items():
            kept: list[Part] = []
            for part in parts:
                (taken if wanted(part) else kept).append(part)
            self._queues[lane] = kept
        return taken

    def _fail_waiting(self, work: Work, reason: Reason) -> None:
        """Fail a job that waits for its files."""
        self._waiting.remove(work)
        work.left = len(work.job.moves)
        self._fail(work, dict.fromkeys(range(work.left), reason))

    def _fail(self, work: Work, failed: Mapping[int, Reason]) -> None:
        work.failed.update(failed)
        for reason in failed.values():
            if reason in _COUNTED:
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
        if work.job.kind is not JobKind.STORE or work.copied or self._resources.arena is not None:
            return
        if self.has_launched(work.job.id) and not self._copies.gathers(work):
            work.copied = True
            self._report.copied[work.job.id] = 1

    def _finish(self, work: Work) -> None:
        self._note_copied(work)
        del self._works[work.job.id]
        self._report.results[work.job.id] = work.result()


_urgency = attrgetter("urgency")


def _is_of(work: Work, part: Part) -> bool:
    return part.work is work


class Copies:
    """Copies under way on copier and GPU. The mover's thread calls everything.

    ``clock``: as the mover's. A copy takes from its start, which waits for the model's work before
    it, to its end.
    """

    def __init__(self, resources: Resources, stats: Stats, clock: Callable[[], float]) -> None:
        self._resources = resources
        self._stats = stats
        self._clock = clock
        self._under_way: tuple[deque[Part], ...] = (deque(), deque())
        """Of stores and of loads. The order of each kind is kept: they are a lane of the GPU
        each."""

    @property
    def of_stores(self) -> int:
        """Number of parts that were gathered, or are just being."""
        return len(self._under_way[0])

    @property
    def of_loads(self) -> int:
        """Number of parts that are being verified on the GPU, or scattered."""
        return len(self._under_way[1])

    def gathers(self, work: Work) -> bool:
        """Whether a copy of a store reads the GPU's blocks."""
        return any(part.work is work and part.leg == 1 for part in self._under_way[0])

    @property
    def busy(self) -> bool:
        """Whether a copy has to be asked for its end."""
        return any(self._under_way)

    def start(self, part: Part, leg: Leg) -> bool:
        """Start a leg of a part; return whether it has ended already. If not, ``ended`` yields
        it."""
        part.began_s = self._clock()
        part.end = self._begin(part, leg)
        copies = self._under_way[not part.route.gathers]
        copies.append(part)
        if len(copies) > 1 or not part.end.query():
            return False
        self._count(copies.popleft())
        return True

    def ended(self, *, wait: bool = False) -> Iterator[Part]:
        """Yield the parts whose copies have ended. ``wait``: for all of them."""
        for copies in self._under_way:
            while copies and (wait or _end_of(copies[0]).query()):
                part = copies.popleft()
                _end_of(part).synchronize()
                self._count(part)
                yield part

    def abandon(self) -> None:
        """After an error of ours: wait for each copy under way, and forget it. Does not raise."""
        for copies in self._under_way:
            while copies:
                with suppress(Exception):  # a GPU that fails copies nothing any more
                    _end_of(copies[0]).synchronize()
                copies.popleft()

    def _count(self, part: Part) -> None:
        """Count what a copy has moved between GPU and host memory, if anything."""
        if not part.route.direct:
            route = "gpu_to_cpu" if part.route.gathers else "cpu_to_gpu"
            self._stats.observe(f"transfer_bytes.{route}", len(part.positions) * self._payload_bytes(part))
            self._stats.observe(f"transfer_seconds.{route}", max(0.0, self._clock() - part.began_s))

    def _payload_bytes(self, part: Part) -> int:
        return self._resources.geometry.groups[part.group].payload_bytes

    def _begin(self, part: Part, leg: Leg) -> Event:
        from kvdisk.worker.copier import Lane, Slots  # imports torch

        copier, moves, after = self._resources.copier, part.work.job.moves, part.work.after
        if leg is Leg.SUM or leg is Leg.SEAL:
            assert self._resources.direct is not None
            staging = self._resources.direct.staging
            if leg is Leg.SEAL:
                return staging.start_headers(part.size_class, part.slots)
            lane = Lane.STORE if part.route.gathers else Lane.LOAD
            return staging.start_sums(part.size_class, part.slots, self._payload_bytes(part), lane)
        blocks = [moves[position].block for position in part.positions]
        slots = Slots(part.arena, part.size_class, part.slots)
        if leg is Leg.GATHER:
            return copier.gather(part.group, blocks, slots, after)
        return copier.scatter(part.group, slots, blocks, after)


def _end_of(part: Part) -> Event:
    assert part.end is not None, "no copy of it is under way"
    return part.end
