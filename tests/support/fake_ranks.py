# SPDX-License-Identifier: Apache-2.0
"""A worker without memory or drive: what its slots and GPU blocks hold is symbolic, and jobs run
leg by leg when told.

It does what a mover does and checks what a mover checks, and no more: whatever the manager lets
happen to a slot or a block between two legs happens here, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvdisk.blocks import BY_KEY_OVER, KEPT_TIERS, BlockKey, JobId, Slot, Tier, group_of, make_block_key
from kvdisk.geometry import Geometry
from kvdisk.messages import NO_BLOCK, Job, JobKind, JobResult, Move, Plan, Reason, Report, SegmentSpec
from kvdisk.worker.request_loads import RequestLoads
from kvdisk.worker.routes import Leg, route_of
from support.fake_engine import StepWork
from support.fake_neighbours import FakeHome, FakeNeighbours
from support.fake_remote import FakeRemote
from support.fake_requests import BESIDE, value_of, values_of
from support.fake_slots import ROTTEN, TORN, Content

_DEVICE_LEGS = frozenset({Leg.WRITE, Leg.READ})


@dataclass(slots=True)
class _Way:
    """A move under way. ``legs``: those not run yet; ``staging``: what it holds there."""

    at: int
    move: Move
    legs: deque[Leg]
    staging: Content = field(default_factory=Content)
    begun: bool = False


class _Work:
    """A job under way. ``failed`` and ``late``: positions of its moves."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ways: list[_Way] = []
        self.failed: dict[int, Reason] = {}
        self.late: set[int] = set()
        self.told_copied = False
        for at, move in enumerate(job.moves):
            route = route_of(job.kind, move)
            self.ways.append(_Way(at, move, deque(route.legs if route is not None else ())))
            if route is None:
                self.failed[at] = Reason.ABSENT

    @property
    def is_sent(self) -> bool:
        """Whether it reads a tier here, and writes the remote store."""
        return self.job.kind is JobKind.DEMOTE

    @property
    def open_ways(self) -> list[_Way]:
        return [way for way in self.ways if way.legs]

    @property
    def for_device(self) -> list[_Way]:
        """The moves that the device has still to move."""

        def is_for_device(way: _Way) -> bool:
            legs = {Leg.READ} if self.is_sent and Tier.REMOTE in way.move.slots else _DEVICE_LEGS
            return Tier.NVME in way.move.slots and not legs.isdisjoint(way.legs)

        return list(filter(is_for_device, self.ways))

    def fail(self, way: _Way, reason: Reason) -> None:
        way.legs.clear()
        self.failed[way.at] = reason


class FakeRank:
    """``Rank``. ``gpu``: contents of GPU blocks by id; ``arena`` and ``drive``: of slots.

    ``segments``: files that exist on the drive, with their slot counts. A crash is ``survivor``.
    ``neighbours``: what it can open of other homes. ``most_gathers``: how many blocks of urgent and
    fenced stores it copies in a step before it gives them up.
    """

    def __init__(
        self,
        rank: int,
        geometry: Geometry,
        neighbours: FakeNeighbours | None = None,
        remote: FakeRemote | None = None,
    ) -> None:
        self.rank = rank
        self._groups = geometry.groups
        self._geometry = geometry
        self.remote = remote if remote is not None else FakeRemote()
        self.neighbours = neighbours if neighbours is not None else FakeNeighbours([])
        self._foreign: dict[int, FakeHome] = {}
        self._closed: set[int] = set()
        self.most_gathers = 1000
        self._weights = 0
        self.gpu: dict[int, str] = {}
        self.arena: dict[Slot, Content] = {}
        self.drive: dict[Slot, Content] = {}
        self._right: dict[Tier, dict[Slot, tuple[object, ...]]] = {tier: {} for tier in KEPT_TIERS}
        """What ``check_slot`` found right last of a slot: its content, and what was asked."""
        self.segments: dict[int, int] = {}
        self._open: set[int] = set()
        self._joined = False
        self._dropped: set[int] = set()
        self._works: dict[JobId, _Work] = {}
        self._report = Report()
        self._loads = RequestLoads()
        self._void: set[JobId] = set()
        self._late: list[tuple[Job, _Way]] = []
        """Moves that were given up, and whose first leg the device has begun."""

    def survivor(self) -> FakeRank:
        """Return this rank after its process was killed, and what it had at the device has ended:
        the drive is left."""
        self.end_all_late()
        survivor = FakeRank(self.rank, self._geometry, self.neighbours, self.remote)
        survivor.drive = dict(self.drive)
        survivor.segments = dict(self.segments)
        return survivor

    # -- steps ---------------------------------------------------------------------------------

    def before_forward(self, work: StepWork) -> None:
        self._weights = work.weights
        for block in work.new_blocks:
            assert not self.writers_of(block), f"block {block} is given away while rank {self.rank} still writes it"
            if work.zeroes:
                self.gpu[block] = "zeroed"
        self._protect(work.plan)
        self._submit(work.plan.jobs_beside)
        self._loads.void(work.plan.void)
        self._void.update(job_id for job_id in work.plan.void if job_id in self._loads)

    def forward(self, work: StepWork) -> None:
        for group, block, digest in work.writes:
            assert not self.readers_of(block), "a block is overwritten while a store reads it"
            assert not self.writers_of(block), "a block is computed while a load writes it"
            self.gpu[block] = value_of(make_block_key(digest, group), work.weights, self.rank)

    def check_reads(self, work: StepWork) -> None:
        for group, block, digest in work.reads:
            self._check(block, make_block_key(digest, group), "reads")

    def after_forward(self, work: StepWork) -> None:
        self._submit(work.plan.jobs_after)

    def take_report(self) -> tuple[Report, dict[str, list[int]]]:
        report, self._report = self._report, Report()
        ended: dict[JobId, Collection[int]] = {}
        for job_id, result in report.results.items():
            if job_id in self._loads:
                moves = self._loads.jobs[job_id].moves
                ended[job_id] = bad = range(len(moves)) if job_id in self._void else sorted(result.failed)
                self._void.discard(job_id)
                for at, move in enumerate(moves):
                    if at not in bad:
                        self._check_loaded(move)
        return report, self._loads.end(ended)

    def _check_loaded(self, move: Move) -> None:
        values = values_of(move.key, self._weights, self.rank, self._groups[group_of(move.key)])
        for block, right in zip(move.gpu_blocks, values, strict=True):
            found = right if block == NO_BLOCK else self.gpu.get(block)
            assert found == right, f"rank {self.rank} has loaded {found!r} where {right!r} should be"

    def _check(self, block: int, key: BlockKey, what: str) -> None:
        found, right = self.gpu.get(block), value_of(key, self._weights, self.rank)
        assert found == right, f"rank {self.rank} {what} {found!r} where {right!r} should be"

    def _submit(self, jobs: Sequence[Job]) -> None:
        """Take jobs in. A store is handed in when the model has computed its blocks."""
        self._loads.begin(jobs)
        for job in jobs:
            self._check_late(job)
            work = self._works[job.id] = _Work(job)
            if job.moves:
                self._finish_if_done(work)

    def _check_late(self, job: Job) -> None:
        """Assert that a new job has nothing to do with a slot that a late move may still touch."""
        touched = {place for _, late in self._late for place in late.move.slots.items()}
        written = {
            (tier, late.move.slots.get(tier))
            for _, late in self._late
            for tier in (Tier.NVME if late.legs[0] is Leg.WRITE else Tier.CPU,)
        }
        for move in job.moves:
            for place in move.slots.items():
                assert place not in written, f"{place} is used, and a late transfer may still write it"
                is_sent = Tier.REMOTE in move.slots and job.kind is JobKind.DEMOTE
                target = place[0] is (Tier.NVME if job.kind is JobKind.DEMOTE else Tier.CPU) and not is_sent
                if job.kind is JobKind.STORE or (target and (job.kind is not JobKind.LOAD or len(move.slots) > 1)):
                    assert place not in touched, f"{place} is given away, and a late transfer still reads it"

    def _protect(self, plan: Plan) -> None:
        """Copy what the step is about to overwrite: so many of the blocks, and the rest is given
        up."""
        most_gathers = self.most_gathers
        self._submit(plan.jobs_before)
        for job_id in (*plan.urgent, *plan.fence):
            work = self._works.get(job_id)
            if work is None:
                continue
            for way in [way for way in work.ways if Leg.GATHER in way.legs]:
                if most_gathers > 0:
                    most_gathers -= 1
                    self._run(work, way)
                else:
                    work.fail(way, Reason.DEADLINE if job_id in plan.urgent else Reason.OVERWRITTEN)
            self._note_copied(work)
            self._finish_if_done(work)

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

    def work_off(self) -> None:
        while self.runnable:
            self.run_job(self.runnable[0])

    def run_leg(self, job_id: JobId, pick: int = 0, failure: Reason | None = None) -> None:
        """Run one leg of one move (or a job of files), picked by ``pick`` modulo their number, or
        let it fail."""
        work = self._works[job_id]
        if not work.job.moves:
            self._run_file_job(work, failure)
            return
        way = work.open_ways[pick % len(work.open_ways)]
        # What has begun of a void load goes on to the next leg that would write the GPU.
        void = job_id in self._void and way.legs[0] in {Leg.READ, Leg.SCATTER}
        reason = Reason.CANCELLED if void else failure
        if reason is None:
            reason = self._run(work, way)
        elif (
            way.legs[0] is Leg.WRITE and Tier.NVME in way.move.slots and way.move.slots[Tier.NVME].segment in self._open
        ):
            self._transfer(way, Leg.WRITE, torn=True)
        if reason is not None:
            work.fail(way, reason)
        self._finish_if_done(work)

    def run_job(self, job_id: JobId) -> None:
        while job_id in self._works:
            self.run_leg(job_id)

    def fail_job(self, job_id: JobId, reason: Reason) -> None:
        """Let the job's moves that have not started fail, as a deadline does, and run the others to
        their end."""
        work = self._works[job_id]
        for way in work.open_ways:
            if not way.begun:
                work.fail(way, reason)
        if work.job.moves:
            self._finish_if_done(work)
        self.run_job(job_id)

    # -- what hangs ----------------------------------------------------------------------------

    @property
    def hangable(self) -> list[JobId]:
        """The jobs that can hang: those with a leg of the device left, whose segment is open."""
        return [job_id for job_id in self.runnable if self._can_hang(self._works[job_id])]

    def _can_hang(self, work: _Work) -> bool:
        segments = {way.move.slots[Tier.NVME].segment for way in work.for_device}
        return bool(segments) and segments <= self._open

    def hang(self, job_id: JobId, pick: int, *, whole: bool) -> None:
        """Let the device begin a leg of a move, or of all (``whole``), and not end it until it is
        given up."""
        work = self._works[job_id]
        candidates = work.for_device
        for way in candidates if whole else [candidates[pick % len(candidates)]]:
            while way.legs[0] not in _DEVICE_LEGS:
                self._run(work, way)
            self._late.append((work.job, _Way(way.at, way.move, deque(way.legs), way.staging)))
            work.fail(way, Reason.DEADLINE)
            work.late.add(way.at)
        self._finish_if_done(work)

    @property
    def late(self) -> int:
        """How many legs hang that were given up."""
        return len(self._late)

    def end_late(self, pick: int = 0, *, torn: bool = False) -> None:
        """Let a hanging leg end: it moves its bytes, or some of them (``torn``), and nobody looks
        at them."""
        job, way = self._late.pop(pick % len(self._late))
        self._transfer(way, way.legs[0], torn=torn)
        work = self._works.get(job.id)
        if work is not None:  # nobody was told that it is late
            work.late.discard(way.at)
        elif not any(other is job for other, _ in self._late):
            self._report.released[job.id] = 1

    def end_all_late(self) -> None:
        while self._late:
            self.end_late()

    # -- questions -----------------------------------------------------------------------------

    def check_slot(self, tier: Tier, slot: Slot, epoch: int, weights: int, key: BlockKey, generation: int) -> None:
        content = (self.arena if tier is Tier.CPU else self.drive).get(slot)
        asked = content, epoch, weights, key, generation
        if self._right[tier].get(slot) == asked:
            return
        value = value_of(key, weights, self.rank, self._groups[group_of(key)])
        right = content is not None and content.holds(epoch, key, generation, value)
        assert right, f"{tier.name} {slot} of rank {self.rank} has {content}, not {key!r} {generation} {value!r}"
        self._right[tier][slot] = asked

    def opens_segment(self, job_id: JobId) -> bool:
        return self._works[job_id].job.kind is JobKind.OPEN_SEGMENT

    def opens_home(self, job_id: JobId) -> bool:
        return self._works[job_id].job.kind is JobKind.OPEN_HOME

    def readers_of(self, block_id: int) -> list[JobId]:
        """Return the jobs that have still to read a GPU block."""
        return self._users(block_id, Leg.GATHER)

    def writers_of(self, block_id: int) -> list[JobId]:
        """Return the jobs that have still to write a GPU block."""
        return self._users(block_id, Leg.SCATTER)

    def _users(self, block_id: int, leg: Leg) -> list[JobId]:
        works = self._works.items()
        return [
            job_id for job_id, work in works for way in work.ways if block_id in way.move.gpu_blocks and leg in way.legs
        ]

    # -- legs ----------------------------------------------------------------------------------

    def _run(self, work: _Work, way: _Way) -> Reason | None:
        """Run a move's next leg; return why it failed."""
        leg, move, content = way.legs.popleft(), way.move, self._in_memory(way)
        way.begun = True
        if leg is Leg.GATHER:
            payload = BESIDE.join(self.gpu[block] for block in move.gpu_blocks)
            self._keep(way, content._replace(payload=payload))
            self._note_copied(work)
        elif leg is Leg.SEAL:
            self._keep(way, Content(work.job.epoch, move.key, move.generation, content.payload, content.payload))
        elif leg in _DEVICE_LEGS and Tier.REMOTE in move.slots and not (leg is Leg.READ and work.is_sent):
            name = work.job.epoch, move.key, self.rank
            if leg is Leg.WRITE:
                there = {} if move.slots[Tier.REMOTE] == BY_KEY_OVER else self.remote.objects
                self.remote.objects[name] = there.get(name, content)
            elif name not in self.remote.objects:
                return Reason.ABSENT
            else:
                self._keep(way, self.remote.objects[name])
        elif leg in _DEVICE_LEGS:
            segment, index = move.slots[Tier.NVME]
            assert leg is Leg.WRITE or segment not in self._closed, "a load reads a segment that was closed before it"
            if segment not in self._open:
                return Reason.IO_ERROR
            assert leg is Leg.READ or index < self.segments[segment], "a slot behind the segment's last"
            self._transfer(way, leg)
        elif leg is Leg.CHECK:
            if Tier.REMOTE in move.slots and not work.is_sent:  # whatever its generation there
                content = content._replace(generation=move.generation)
                self._keep(way, content)
            if content[:3] != (work.job.epoch, move.key, move.generation):
                return Reason.HEADER
            return None if content.summed == content.payload else Reason.CHECKSUM
        else:
            assert leg is Leg.SCATTER
            self._fill(move, content)
        return None

    def _fill(self, move: Move, content: Content) -> None:
        for block, value in zip(move.gpu_blocks, content.payload.split(BESIDE), strict=True):
            if block != NO_BLOCK:
                assert not self.readers_of(block), "a load writes a block that a store has still to read"
                self.gpu[block] = value

    def _transfer(self, way: _Way, leg: Leg, *, torn: bool = False) -> None:
        """Move a block between memory and drive, or half of it."""
        slot = way.move.slots[Tier.NVME]
        content = self._in_memory(way) if leg is Leg.WRITE else self._on_drive(slot)
        if torn:
            content = content._replace(payload=TORN)
        if leg is Leg.WRITE:
            self.drive[slot] = content
        else:
            self._keep(way, content)

    def _on_drive(self, slot: Slot) -> Content:
        home = self._foreign.get(slot.segment)
        if home is None:
            return self.drive.get(slot, Content())
        contents = home.contents.get(slot.index)
        return Content() if contents is None else contents[self.rank]

    def _in_memory(self, way: _Way) -> Content:
        slot = way.move.slots.get(Tier.CPU)
        return way.staging if slot is None else self.arena.get(slot, Content())

    def _keep(self, way: _Way, content: Content) -> None:
        slot = way.move.slots.get(Tier.CPU)
        if slot is None:
            way.staging = content
        else:
            self.arena[slot] = content

    def rot(self, slot: Slot) -> None:
        """Let the drive lose the payload in a slot."""
        self.drive[slot] = self.drive[slot]._replace(payload=ROTTEN)

    def _note_copied(self, work: _Work) -> None:
        reads = any(Leg.GATHER in way.legs for way in work.ways)
        if not reads and not work.told_copied and Tier.CPU not in work.job.moves[0].slots:
            work.told_copied = True
            self._report.copied[work.job.id] = 1

    def _finish_if_done(self, work: _Work) -> None:
        if not work.open_ways:
            void = work.job.id in self._void
            self._end(work, dict.fromkeys(range(len(work.ways)), Reason.CANCELLED) if void else work.failed)

    def _end(self, work: _Work, failed: dict[int, Reason]) -> None:
        del self._works[work.job.id]
        self._report.results[work.job.id] = JobResult(1, failed, set(work.late), 1 if work.late else 0)

    # -- files ---------------------------------------------------------------------------------

    def _run_file_job(self, work: _Work, failure: Reason | None) -> None:
        job = work.job
        reason = failure
        if job.segment is not None:  # what could not be dropped is removed when the home is opened again
            dropped = job.kind is JobKind.DROP_SEGMENT
            (self._dropped.add if dropped else self._dropped.discard)(job.segment.segment)
        if reason is None and job.kind is JobKind.OPEN_HOME:
            assert job.home is not None
            for segment in [segment for segment in self.segments if segment not in job.home.known_segments]:
                assert not self._joined or segment in self._dropped, "a segment that is in use is unknown"
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
        assert kind is JobKind.OPEN_SEGMENT
        if spec.segment in self._open:
            assert not spec.create and spec.source is None
            return None
        if spec.source is not None:
            home = self.neighbours.home(spec.source.home_id)
            if home is None or home.segment.segment != spec.source.segment:
                return Reason.IO_ERROR
            self._foreign[spec.segment] = home
        elif spec.create:
            self._remove(spec.segment)  # preallocation truncates what a crash left
            self.segments[spec.segment] = spec.slot_count
        elif self.segments.get(spec.segment) != spec.slot_count:
            return Reason.HEADER if spec.segment in self.segments else Reason.ABSENT
        self._open.add(spec.segment)
        return None

    def _remove(self, segment: int) -> None:
        for _, late in self._late:
            assert late.move.slots[Tier.NVME].segment != segment, "a segment goes that a late transfer may still touch"
        self.segments.pop(segment, None)
        self._open.discard(segment)
        self._foreign.pop(segment, None)
        for slot in [slot for slot in self.drive if slot.segment == segment]:
            del self.drive[slot]
