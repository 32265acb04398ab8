# SPDX-License-Identifier: Apache-2.0
"""Runs jobs leg by leg: what ``Mover`` does on its thread, without a thread, a lock or a clock of its own.

Work is taken in parts of a few MiB and the queues are looked at between parts, so that a load waits
for the parts under way and never for a long store. Several parts are under way at once: while one is
verified and scattered, the next one's read is in flight. The bounds below are numbers of parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdisk.blocks import JobId
from kvdisk.device.base import Device, Op, Outcome
from kvdisk.geometry import Geometry
from kvdisk.messages import Job, JobKind, JobResult, Reason
from kvdisk.stats import Stats
from kvdisk.worker.arena import Arena
from kvdisk.worker.files import SegmentFiles
from kvdisk.worker.legs import Leg, Lot, Part, Route, Work, lots_of
from kvdisk.worker.quiet_log import QuietLog
from kvdisk.worker.seals import check_part, seal_part
from kvdisk.worker.shuttle import Shuttle

if TYPE_CHECKING:
    from kvdisk.worker.copier import Copier, CopyTicket, Mark

PART_BYTES = 8 << 20
MOST_READS = 4
"""Read batches at the device; promotions start only below half of it."""
MOST_WRITES = 2
MOST_GATHERS = 2
MOST_SCATTERS = 4

_FILE_KINDS = frozenset({JobKind.OPEN_HOME, JobKind.OPEN_SEGMENT, JobKind.DROP_SEGMENT})
_COUNTED = {
    Reason.HEADER: "header_failures",
    Reason.CHECKSUM: "checksum_failures",
    Reason.DEADLINE: "deadline_misses",
}


@dataclass(frozen=True, slots=True, eq=False)
class Gear:
    """What a rank moves bytes with; ``Mover`` describes each."""

    geometry: Geometry
    rank: int
    arena: Arena | None
    staging: Arena
    copier: Copier
    device: Device
    files: SegmentFiles


class Runner:
    """See the module. One thread calls everything. ``finished``: results not yet taken; ``stats``: counts likewise.

    ``fingerprint``: of the namespace until a home is open. ``part_bytes``: aim for the size of a part.
    """

    def __init__(self, gear: Gear, *, fingerprint: bytes, clock: Callable[[], float], part_bytes: int) -> None:
        self._gear = gear
        self._geometry = gear.geometry
        self._fingerprint = fingerprint
        self.finished: list[tuple[JobId, JobResult]] = []
        self.stats = Stats()
        self._log = QuietLog(clock)
        self._shuttle = Shuttle(gear.device, gear.files, self.stats, self._log)
        self._works: dict[JobId, Work] = {}
        self._queues: dict[Route, deque[Lot]] = {route: deque() for route in Route}
        self._flushed: dict[Route, deque[Lot]] = {route: deque() for route in Route if route.gathers}
        loads = [self._queues[route] for route in Route if route.scatters]
        others = [self._queues[route] for route in Route if not route.scatters]
        self._order = [*loads, *self._flushed.values(), *others]
        self._held: deque[Work] = deque()
        """A DROP_SEGMENT that waits for batches of its segment, and the jobs of files and the drive behind it."""
        counts = gear.staging.slot_counts
        self._staging_free = [list(range(count)) for count in counts]
        self._part_slots = [max(1, part_bytes // size) for size in self._geometry.slot_sizes]
        # A quarter of staging for a part: several are under way, and MOST_WRITES of stores leave half to loads.
        self._staged_slots = [
            min(most, max(1, count // 4)) for most, count in zip(self._part_slots, counts, strict=True)
        ]
        self._copies: tuple[deque[tuple[Part, CopyTicket]], ...] = (deque(), deque())
        """Gathers and scatters under way. The copier keeps the order of each kind."""
        self._writes = 0
        self._stopping = False

    def attach(self) -> None:
        """Make the memory known to the device. Once, before the first turn."""
        for arena in (self._gear.staging, self._gear.arena):
            if arena is not None:
                self._gear.device.attach_memory(arena.memory)

    # -- intake --------------------------------------------------------------------------------

    def add(self, job: Job, mark: Mark, deadline_s: float) -> None:
        """Take a job in. Jobs of files run here, at once, unless one has to wait for batches under way."""
        work = Work(job, mark, deadline_s)
        self._works[job.id] = work
        if self._held and _needs_files(job):
            self._held.append(work)
        else:
            self._admit(work)

    def flush(self, job_ids: Iterable[JobId]) -> None:
        """Let what has not started of these stores run before all other stores."""
        wanted = set(job_ids)
        for route, flushed in self._flushed.items():
            queue = self._queues[route]
            moved = [lot for lot in queue if lot.work.job.id in wanted]
            if moved:
                kept = [lot for lot in queue if lot.work.job.id not in wanted]
                queue.clear()
                queue.extend(kept)
                flushed.extend(moved)

    def void(self, job_ids: Iterable[JobId]) -> None:
        """Let these loads end as failed, starting nothing more of them; those that have ended stay as they are."""
        for job_id in job_ids:
            work = self._works.get(job_id)
            if work is not None and work.job.kind is JobKind.LOAD:
                work.void = True
        for queue in self._queues.values():
            for lot in [lot for lot in queue if lot.work.void]:
                queue.remove(lot)
                self._fail_rest(lot, Reason.CANCELLED)

    def _admit(self, work: Work) -> None:
        job = work.job
        if job.kind not in _FILE_KINDS:
            for lot in lots_of(work, self._geometry):
                self._queues[lot.route].append(lot)
            if work.left == 0:
                self._finish(work)
        elif self._must_wait(job):
            self._held.appendleft(work)
        else:
            reason = self._shuttle.run_file_job(job)
            if reason is not None:
                work.failed[-1] = reason
            elif job.home is not None:
                self._fingerprint = job.home.fingerprint
            self._finish(work)

    def _must_wait(self, job: Job) -> bool:
        return job.kind is JobKind.DROP_SEGMENT and job.segment is not None and self._shuttle.uses(job.segment.segment)

    def _release_held(self) -> bool:
        released = False
        while self._held and not self._must_wait(self._held[0].job):
            released = True
            self._admit(self._held.popleft())
        return released

    # -- turns ---------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether every job has ended."""
        return not self._works

    @property
    def at_device(self) -> bool:
        """Whether ``turn`` can wait for the device."""
        return self._shuttle.busy

    @property
    def copying(self) -> bool:
        """Whether a copy has to be asked for its end."""
        return any(self._copies)

    def turn(self, now_s: float, wait_s: float = 0.0) -> bool:
        """Note what has ended, and start one part at most. Return whether anything happened.

        ``wait_s``: how long to wait for the device, where something is at it and nothing has ended.
        """
        outcomes = self._shuttle.poll(wait_s)
        self._reap(outcomes)
        happened = bool(outcomes)
        happened |= self._reap_copies()
        happened |= self._release_held()
        happened |= self._expire(now_s)
        return self._start() or happened

    def stop(self) -> None:
        """End what is under way, however long that takes, and fail the rest with CANCELLED. Afterwards ``idle``."""
        self._stopping = True
        for queue in self._order:
            while queue:
                self._fail_rest(queue.popleft(), Reason.CANCELLED)
        while self._held:
            self._finish(_cancelled(self._held.popleft()))
        while self._shuttle.busy:
            self._reap(self._shuttle.drain())
        for copies in self._copies:
            while copies:
                part, ticket = copies.popleft()
                self._gear.copier.wait(ticket)
                self._advance(part)
        assert self.idle

    def abandon(self) -> None:
        """After an error of ours: wait until nothing is in flight, then fail every open job with CANCELLED."""
        self._shuttle.abandon()
        for copies in self._copies:
            for _, ticket in copies:
                self._gear.copier.wait(ticket)
            copies.clear()
        for work in list(self._works.values()):
            self._finish(_cancelled(work))

    def close(self) -> None:
        """Close device and files. The runner is ``idle``, or ``abandon`` was called."""
        self._shuttle.close()

    def _start(self) -> bool:
        for queue in self._order:
            if queue:
                lot = queue[0]
                part = self._take(lot)
                if part is not None:
                    if lot.taken == len(lot.positions):
                        queue.popleft()
                    self._writes += part.route.writes
                    self._advance(part)
                    return True
        return False

    def _take(self, lot: Lot) -> Part | None:
        """Cut the next part from a lot; None where it has to wait for parts under way."""
        route, gear = lot.route, self._gear
        gathers, scatters = self._copies
        if (
            (route.reads and self._shuttle.reads >= (MOST_READS // 2 if route is Route.PROMOTE else MOST_READS))
            or (route.writes and self._writes >= MOST_WRITES)
            or (route.gathers and len(gathers) >= MOST_GATHERS)
            or (route.scatters and len(scatters) >= MOST_SCATTERS)
        ):
            return None
        size_class = self._geometry.size_classes[lot.group]
        if route.staged:
            arena, staging = gear.staging, self._take_staging(lot, size_class)
            if not staging:
                return None
            positions = lot.positions[lot.taken : lot.taken + len(staging)]
            slots = list(staging)
        else:
            assert gear.arena is not None, "a move names a CPU slot, and there is no CPU tier"
            arena, staging = gear.arena, []
            positions = lot.positions[lot.taken : lot.taken + self._part_slots[size_class]]
            slots = [lot.work.job.moves[position].cpu.index for position in positions]  # type: ignore[union-attr]
        lot.taken += len(positions)
        return Part(lot.work, route, lot.group, size_class, arena, positions, slots, staging)

    def _take_staging(self, lot: Lot, size_class: int) -> list[int]:
        """Take staging slots for a lot's next part; an empty list where it has to wait."""
        assert self._gear.staging.slot_counts[size_class], "there is no staging for this size of slot"
        free = self._staging_free[size_class]
        count = min(len(lot.positions) - lot.taken, self._staged_slots[size_class])
        if count > len(free):
            return []
        staging = free[:count]
        del free[:count]
        return staging

    def _expire(self, now_s: float) -> bool:
        late = [lot for queue in self._order for lot in queue if lot.work.deadline_s < now_s]
        held = [work for work in self._held if work.deadline_s < now_s and work.job.moves]
        if not late and not held:
            return False
        self._log.warn("deadline", "the drive or the copies cannot keep up: moves were given up unstarted")
        for lot in late:
            for queue in self._order:
                if lot in queue:
                    queue.remove(lot)
            self._fail_rest(lot, Reason.DEADLINE)
        for work in held:
            self._held.remove(work)
            work.left = len(work.job.moves)
            self._fail(work, dict.fromkeys(range(work.left), Reason.DEADLINE))
        return True

    # -- legs ----------------------------------------------------------------------------------

    def _advance(self, part: Part) -> None:
        """Take a part onto its next leg, and on, until it waits for the copier or the device or has ended.

        ``part.leg``: legs begun. What has started ends as usual; when stopping, or void, no further leg starts.
        """
        legs = part.route.legs
        while part.positions and part.leg < len(legs):
            leg = legs[part.leg]
            part.leg += 1
            if leg is Leg.SEAL:
                seal_part(part, self._fingerprint, self._geometry, self._gear.rank)
            elif leg is Leg.CHECK:
                self._check(part)
            elif part.leg > 1 and (self._stopping or part.work.void):
                self._drop(part, dict.fromkeys(part.positions, Reason.CANCELLED))
            elif leg in {Leg.READ, Leg.WRITE}:
                self._drop(part, self._shuttle.send(part, Op.READ if leg is Leg.READ else Op.WRITE))
                if part.positions:
                    return
            elif not self._copy(part, leg):
                return
        self._end(part)

    def _copy(self, part: Part, leg: Leg) -> bool:
        """Start a gather or scatter; return whether it has ended already."""
        copier, moves, after = self._gear.copier, part.work.job.moves, part.work.mark
        blocks = [moves[position].block for position in part.positions]
        copied_bytes = len(blocks) * self._geometry.groups[part.group].payload_bytes
        if leg is Leg.GATHER:
            ticket = copier.gather(part.group, blocks, part.arena, part.size_class, part.slots, after=after)
            self.stats.add("rank_bytes_gpu_to_cpu", copied_bytes)
        else:
            ticket = copier.scatter(part.group, part.arena, part.size_class, part.slots, blocks, after=after)
            self.stats.add("rank_bytes_cpu_to_gpu", copied_bytes)
        copies = self._copies[leg is Leg.SCATTER]
        if not copies and copier.done(ticket):
            return True
        copies.append((part, ticket))
        return False

    def _reap(self, outcomes: Sequence[Outcome]) -> None:
        for part, failed in self._shuttle.ended(outcomes):
            self._drop(part, failed)
            self._advance(part)

    def _reap_copies(self) -> bool:
        ended = False
        for copies in self._copies:
            while copies and self._gear.copier.done(copies[0][1]):
                ended = True
                self._advance(copies.popleft()[0])
        return ended

    def _check(self, part: Part) -> None:
        bad = check_part(part, self._fingerprint, self._geometry, self._gear.rank)
        for position, reason in bad.items():
            move = part.work.job.moves[position]
            self._log.warn(reason.name, f"a block was refused: {reason.name} of {move.nvme or move.cpu}")
        self._drop(part, bad)

    # -- endings -------------------------------------------------------------------------------

    def _drop(self, part: Part, failed: Mapping[int, Reason]) -> None:
        """Take failed moves out of a part; the others go on."""
        if failed:
            part.drop(failed)
            self._fail(part.work, failed)

    def _end(self, part: Part) -> None:
        free = self._staging_free[part.size_class]
        if part.staging:
            free.extend(part.staging)
            free.sort()  # so that parts find neighbours
        self._writes -= part.route.writes
        self._close_moves(part.work, len(part.positions))

    def _fail_rest(self, lot: Lot, reason: Reason) -> None:
        self._fail(lot.work, dict.fromkeys(lot.positions[lot.taken :], reason))

    def _fail(self, work: Work, failed: Mapping[int, Reason]) -> None:
        work.failed.update(failed)
        for reason in failed.values():
            if reason in _COUNTED:
                self.stats.add(_COUNTED[reason])
        self._close_moves(work, len(failed))

    def _close_moves(self, work: Work, count: int) -> None:
        work.left -= count
        assert work.left >= 0
        if count and work.left == 0:
            self._finish(work)

    def _finish(self, work: Work) -> None:
        del self._works[work.job.id]
        self.finished.append((work.job.id, work.result()))


def _needs_files(job: Job) -> bool:
    return job.kind in _FILE_KINDS or any(move.nvme is not None for move in job.moves)


def _cancelled(work: Work) -> Work:
    moves = len(work.job.moves)
    work.failed = dict.fromkeys(range(moves) if moves else (-1,), Reason.CANCELLED)
    return work
