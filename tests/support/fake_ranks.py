# SPDX-License-Identifier: Apache-2.0
"""A worker without memory or drive: what its slots and GPU blocks hold is symbolic, and jobs run
leg by leg when told.

It does what a mover does and checks what a mover checks, and no more: whatever the manager lets
happen to a slot or a block between two legs happens here, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdisk.blocks import BlockKey, JobId, Slot, Tier, make_block_key
from kvdisk.messages import Job, JobKind, JobResult, Move, Plan, Reason, Report, SegmentSpec
from kvdisk.worker.routes import Leg
from support.fake_engine import StepWork
from support.fake_legs import DEVICE_LEGS, ROTTEN, TORN, Content, LateLeg, check_late, legs_of
from support.fake_neighbours import FakeHome, FakeNeighbours
from support.fake_requests import value_of


@dataclass(slots=True)
class _Work:
    """A job under way. ``legs``: those not run yet, by move; ``staging``: what staging holds for
    each move."""

    job: Job
    legs: list[deque[Leg]]
    staging: list[Content]
    failed: dict[int, Reason] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    told_copied: bool = False

    @property
    def open_moves(self) -> list[int]:
        return [at for at, legs in enumerate(self.legs) if legs]

    @property
    def for_device(self) -> list[int]:
        """The moves that the device has still to move."""
        return [at for at, legs in enumerate(self.legs) if not DEVICE_LEGS.isdisjoint(legs)]


class FakeRank:
    """``Rank``. ``gpu``: contents of GPU blocks by id; ``arena`` and ``drive``: of slots.

    ``segments``: files that exist on the drive, with their slot counts. A crash is ``survivor``.
    ``neighbours``: what it can open of other homes. ``most_gathers``: how many blocks of urgent and
    fenced stores it copies in a step before it gives them up.
    """

    def __init__(self, rank: int, neighbours: FakeNeighbours | None = None) -> None:
        self.rank = rank
        self.neighbours = neighbours if neighbours is not None else FakeNeighbours([])
        self._foreign: dict[int, FakeHome] = {}
        self._closed: set[int] = set()
        self.most_gathers = 1000
        self._weights = 0
        self.gpu: dict[int, str] = {}
        self.arena: dict[Slot, Content] = {}
        self.drive: dict[Slot, Content] = {}
        self.segments: dict[int, int] = {}
        self._open: set[int] = set()
        self._joined = False
        self._works: dict[JobId, _Work] = {}
        self._report = Report()
        self._loads: dict[JobId, Job] = {}
        self._void: set[JobId] = set()
        self._late: list[LateLeg] = []

    def survivor(self) -> FakeRank:
        """Return this rank after its process was killed, and what it had at the device has ended:
        the drive is left."""
        self.end_all_late()
        survivor = FakeRank(self.rank, self.neighbours)
        survivor.drive = dict(self.drive)
        survivor.segments = dict(self.segments)
        return survivor

    def end_all_late(self) -> None:
        """The device ends all that was given up."""
        while self._late:
            self.end_late()

    def work_off(self) -> None:
        while self.runnable:
            self.run_job(self.runnable[0])

    # -- steps ---------------------------------------------------------------------------------

    def before_forward(self, work: StepWork) -> None:
        """See ``Rank``."""
        self._weights = work.weights
        for block in work.new_blocks:
            assert not self.writers_of(block), f"block {block} is given away while rank {self.rank} still writes it"
            if work.zeroes:
                self.gpu[block] = "zeroed"
        self._protect(work.plan)
        self._submit(work.plan.jobs_beside, work.plan.void)

    def forward(self, work: StepWork) -> None:
        """See ``Rank``."""
        for group, block, digest in work.writes:
            assert not self.readers_of(block), "a block is overwritten while a store reads it"
            assert not self.writers_of(block), "a block is computed while a load writes it"
            self.gpu[block] = value_of(make_block_key(digest, group), work.weights, self.rank)

    def check_reads(self, work: StepWork) -> None:
        """See ``Rank``."""
        for group, block, digest in work.reads:
            self._check(block, make_block_key(digest, group), "reads")

    def after_forward(self, work: StepWork) -> None:
        """See ``Rank``."""
        self._submit(work.plan.jobs_after)

    def _check(self, block: int, key: BlockKey, what: str) -> None:
        found, right = self.gpu.get(block), value_of(key, self._weights, self.rank)
        assert found == right, f"rank {self.rank} {what} {found!r} where {right!r} should be"

    def _submit(self, jobs: Sequence[Job], void: Sequence[JobId] = ()) -> None:
        """Take jobs in. A store is handed in when the model has computed its blocks."""
        for job in jobs:
            if job.kind is JobKind.LOAD:
                self._loads[job.id] = job
            check_late(self._late, job)
            legs = [deque(legs_of(job.kind, move)) for move in job.moves]
            failed = {at: Reason.ABSENT for at, left in enumerate(legs) if not left}
            work = _Work(job, legs, [Content()] * len(legs), failed)
            self._works[job.id] = work
            if job.moves:
                self._finish_if_done(work)
        for job_id in void:
            if job_id in self._loads:
                self._void.add(job_id)

    def _protect(self, plan: Plan) -> None:
        """Copy what the step is about to overwrite: so many of the blocks, and the rest is given
        up."""
        most_gathers = self.most_gathers
        self._submit(plan.jobs_before)
        for job_id in (*plan.urgent, *plan.fence):
            work = self._works.get(job_id)
            if work is None:
                continue
            for at, move in enumerate(work.job.moves):
                if Leg.GATHER not in work.legs[at]:
                    continue
                if most_gathers > 0:
                    most_gathers -= 1
                    self._run(work, at, move, work.legs[at].popleft())
                else:
                    work.legs[at].clear()
                    work.failed[at] = Reason.DEADLINE if job_id in plan.urgent else Reason.OVERWRITTEN
            self._note_copied(work)
            self._finish_if_done(work)

    def take_report(self) -> tuple[Report, dict[str, list[int]]]:
        """See ``Rank``."""
        report, self._report = self._report, Report()
        ended: dict[str, list[int]] = {}
        for job_id, result in report.results.items():
            job = self._loads.pop(job_id, None)
            if job is not None:
                assert job.request_id is not None and job.request_id not in ended
                bad = range(len(job.moves)) if job_id in self._void else sorted(result.failed)
                self._void.discard(job_id)
                ended[job.request_id] = [job.moves[at].block for at in bad]
                for at, move in enumerate(job.moves):
                    if at not in bad:
                        self._check(move.block, move.key, "has loaded")
        return report, ended

    # -- progress ------------------------------------------------------------------------------

    @property
    def runnable(self) -> list[JobId]:
        """The jobs that can go on, in the order of their plans.

        Jobs of files keep their order, and what names a segment waits for those before it that open
        or drop it.
        """
        found: list[JobId] = []
        files_wait = False
        changing: set[int] = set()
        for job_id, work in self._works.items():
            if work.job.moves:
                slots = [move.slots.get(Tier.NVME) for move in work.job.moves]
                if not any(slot is not None and slot.segment in changing for slot in slots):
                    found.append(job_id)
                continue
            if not files_wait:
                found.append(job_id)
            files_wait = True
            if work.job.segment is not None:
                changing.add(work.job.segment.segment)
        return found

    def run_leg(self, job_id: JobId, pick: int = 0, failure: Reason | None = None) -> None:
        """Run one leg of one move (or a job of files), picked by ``pick`` modulo their number, or
        let it fail."""
        work = self._works[job_id]
        if not work.job.moves:
            self._run_file_job(work, failure)
            return
        at = work.open_moves[pick % len(work.open_moves)]
        move = work.job.moves[at]
        leg = work.legs[at].popleft()
        reason = self._void_reason(work, leg) or failure
        if reason is None:
            reason = self._run(work, at, move, leg)
        elif leg is Leg.WRITE:
            self._tear(work, at, move)
        if reason is not None:
            work.failed[at] = reason
            work.legs[at].clear()
        self._finish_if_done(work)

    def run_job(self, job_id: JobId) -> None:
        while job_id in self._works:
            self.run_leg(job_id)

    def fail_job(self, job_id: JobId, reason: Reason) -> None:
        """Let the job's moves that have not started fail, as a deadline does, and run the others to
        their end."""
        work = self._works[job_id]
        for at, move in enumerate(work.job.moves):
            if len(work.legs[at]) == len(legs_of(work.job.kind, move)):
                work.legs[at].clear()
                work.failed.setdefault(at, reason)
        if work.job.moves:
            self._finish_if_done(work)
        self.run_job(job_id)

    def hang(self, job_id: JobId, pick: int, *, whole: bool) -> None:
        """Let the device begin a leg of a move, or of all (``whole``), and not end it until it is
        given up."""
        work = self._works[job_id]
        candidates = work.for_device
        for at in candidates if whole else [candidates[pick % len(candidates)]]:
            while work.legs[at] and work.legs[at][0] not in DEVICE_LEGS:
                self._run(work, at, work.job.moves[at], work.legs[at].popleft())
            self._late.append(LateLeg(work.job, work.job.moves[at], at, work.legs[at][0], work.staging[at]))
            work.legs[at].clear()
            work.failed[at] = Reason.DEADLINE
            work.late.add(at)
        self._finish_if_done(work)

    @property
    def hangable(self) -> list[JobId]:
        """The jobs that can hang: those with a leg of the device left, whose segment is open."""
        return [job_id for job_id in self.runnable if self._can_hang(self._works[job_id])]

    def _can_hang(self, work: _Work) -> bool:
        places = [work.job.moves[at].slots.get(Tier.NVME) for at in work.for_device]
        return bool(places) and all(place is not None and place.segment in self._open for place in places)

    @property
    def late(self) -> int:
        """How many legs hang that were given up."""
        return len(self._late)

    def end_late(self, pick: int = 0, *, torn: bool = False) -> None:
        """Let a hanging leg end: it moves its bytes, or some of them (``torn``), and nobody looks
        at them."""
        late = self._late.pop(pick % len(self._late))
        (source_tier, source), (target_tier, target) = late.reads, late.writes
        if source is None:
            content = late.staging
        else:
            content = self._on_drive(source) if source_tier is Tier.NVME else self.arena.get(source, Content())
        if torn:
            content = content._replace(payload=TORN)
        if target is not None:
            (self.drive if target_tier is Tier.NVME else self.arena)[target] = content
        work = self._works.get(late.job.id)
        if work is not None:  # nobody was told that it is late
            work.late.discard(late.at)
        elif not any(other.job is late.job for other in self._late):
            self._report.released[late.job.id] = 1

    def check_slot(self, tier: Tier, slot: Slot, epoch: int, weights: int, key: BlockKey, generation: int) -> None:
        """Assert that a slot holds a block."""
        content = (self.arena if tier is Tier.CPU else self.drive).get(slot)
        value = value_of(key, weights, self.rank)
        right = content is not None and content.holds(epoch, key, generation, value)
        assert right, f"{tier.name} {slot} of rank {self.rank} has {content}, not {key!r} {generation} {value!r}"

    def rot(self, slot: Slot) -> None:
        """Let the drive lose the payload in a slot."""
        self.drive[slot] = self.drive[slot]._replace(payload=ROTTEN)

    def opens_home(self, job_id: JobId) -> bool:
        return self._works[job_id].job.kind is JobKind.OPEN_HOME

    def readers_of(self, block_id: int) -> list[JobId]:
        """Return the jobs that have still to read a GPU block."""
        return self._users(block_id, Leg.GATHER)

    def writers_of(self, block_id: int) -> list[JobId]:
        """Return the jobs that have still to write a GPU block."""
        return self._users(block_id, Leg.SCATTER)

    def _users(self, block_id: int, leg: Leg) -> list[JobId]:
        return [
            job_id
            for job_id, work in self._works.items()
            for move, legs in zip(work.job.moves, work.legs, strict=True)
            if move.block == block_id and leg in legs
        ]

    # -- legs ----------------------------------------------------------------------------------

    def _run(self, work: _Work, at: int, move: Move, leg: Leg) -> Reason | None:  # noqa: PLR0911 - one for each leg
        if leg is Leg.GATHER:
            self._put(work, at, move, self._get(work, at, move)._replace(payload=self.gpu[move.block]))
            self._note_copied(work)
            return None
        if leg is Leg.SEAL:
            payload = self._get(work, at, move).payload
            self._put(work, at, move, Content(work.job.epoch, move.key, move.generation, payload, payload))
            return None
        if leg is Leg.WRITE:
            if move.slots[Tier.NVME].segment not in self._open:
                return Reason.IO_ERROR
            segment, index = move.slots[Tier.NVME]
            assert index < self.segments[segment], "a slot behind the segment's last"
            self.drive[move.slots[Tier.NVME]] = self._get(work, at, move)
            return None
        if leg is Leg.READ:
            assert move.slots[Tier.NVME].segment not in self._closed, "a load reads a segment that was closed before it"
            if move.slots[Tier.NVME].segment not in self._open:
                return Reason.IO_ERROR
            self._put(work, at, move, self._on_drive(move.slots[Tier.NVME]))
            return None
        content = self._get(work, at, move)
        if leg is Leg.CHECK:
            if content[:3] != (work.job.epoch, move.key, move.generation):
                return Reason.HEADER
            return None if content.summed == content.payload else Reason.CHECKSUM
        assert leg is Leg.SCATTER
        assert not self.readers_of(move.block), "a load writes a block that a store has still to read"
        self.gpu[move.block] = content.payload
        return None

    def _on_drive(self, slot: Slot) -> Content:
        home = self._foreign.get(slot.segment)
        if home is None:
            return self.drive.get(slot, Content())
        contents = home.contents.get(slot.index)
        return Content() if contents is None else contents[self.rank]

    def _get(self, work: _Work, at: int, move: Move) -> Content:
        return work.staging[at] if Tier.CPU not in move.slots else self.arena.get(move.slots[Tier.CPU], Content())

    def _put(self, work: _Work, at: int, move: Move, content: Content) -> None:
        if Tier.CPU not in move.slots:
            work.staging[at] = content
        else:
            self.arena[move.slots[Tier.CPU]] = content

    def _tear(self, work: _Work, at: int, move: Move) -> None:
        if move.slots[Tier.NVME].segment in self._open:
            self.drive[move.slots[Tier.NVME]] = self._get(work, at, move)._replace(payload=TORN)

    def _void_reason(self, work: _Work, leg: Leg) -> Reason | None:
        """What has begun goes on to the next leg that would write the GPU; nothing reaches a block
        of a void load."""
        void = work.job.id in self._void and leg in {Leg.READ, Leg.SCATTER}
        return Reason.CANCELLED if void else None

    def _note_copied(self, work: _Work) -> None:
        reads = any(Leg.GATHER in legs for legs in work.legs)
        if not reads and not work.told_copied and Tier.CPU not in work.job.moves[0].slots:
            work.told_copied = True
            self._report.copied[work.job.id] = 1

    def _finish_if_done(self, work: _Work) -> None:
        if not work.open_moves:
            failed = work.failed
            if work.job.id in self._void:
                failed = dict.fromkeys(range(len(work.job.moves)), Reason.CANCELLED)
            self._end(work, failed)

    def _end(self, work: _Work, failed: dict[int, Reason]) -> None:
        del self._works[work.job.id]
        self._report.results[work.job.id] = JobResult(1, failed, set(work.late), 1 if work.late else 0)

    # -- files ---------------------------------------------------------------------------------

    def _run_file_job(self, work: _Work, failure: Reason | None) -> None:
        job = work.job
        reason = failure
        if reason is None and job.kind is JobKind.OPEN_HOME:
            assert job.home is not None and not self._joined
            for segment in [segment for segment in self.segments if segment not in job.home.known_segments]:
                self._remove(segment)
            self._joined = True
        elif reason is None:
            assert job.segment is not None
            reason = self._run_segment_job(job.kind, job.segment)
        self._end(work, {} if reason is None else {-1: reason})

    def _run_segment_job(self, kind: JobKind, spec: SegmentSpec) -> Reason | None:
        if not self._joined:
            return Reason.IO_ERROR
        if kind is JobKind.DROP_SEGMENT:
            if spec.source is not None:
                self._closed.add(spec.segment)
            self._remove(spec.segment)
            return None
        assert kind is JobKind.OPEN_SEGMENT and spec.segment not in self._open
        if spec.source is not None:
            home = self.neighbours.home(spec.source.home_id)
            if home is None or home.segment.segment != spec.source.segment:
                return Reason.IO_ERROR
            self._foreign[spec.segment] = home
        elif spec.create:
            self._remove(spec.segment)  # preallocation truncates what a crash left
            self.segments[spec.segment] = spec.slot_count
        elif self.segments.get(spec.segment) != spec.slot_count:
            return Reason.IO_ERROR
        self._open.add(spec.segment)
        return None

    def _remove(self, segment: int) -> None:
        for late in self._late:
            assert Tier.NVME in late.move.slots
            assert late.move.slots[Tier.NVME].segment != segment, "a segment goes that a late transfer may still touch"
        self.segments.pop(segment, None)
        self._open.discard(segment)
        self._foreign.pop(segment, None)
        for slot in [slot for slot in self.drive if slot.segment == segment]:
            del self.drive[slot]
