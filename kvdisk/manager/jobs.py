# SPDX-License-Identifier: Apache-2.0
"""Jobs from plan to settlement, and the fence of those that still copy from the GPU. Scheduler
thread only.

A job is settled exactly once, when every rank has answered (invariant 5). A settled job with late
moves is a zombie: the device of some rank may still touch their slots. It is released exactly once,
when each rank concerned has said that its device has ended them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import NamedTuple

from kvdisk.blocks import JobId, Tier
from kvdisk.context import SchedulerContext
from kvdisk.messages import HomeSpec, Job, JobKind, Move, Reason, Report, SegmentSpec, StoreMoves

_STORE, _LOAD = JobKind.STORE, JobKind.LOAD
_CANCELLABLE = frozenset({_STORE, JobKind.DEMOTE, JobKind.PROMOTE})


class MoveDetail(NamedTuple):
    """What the manager has to undo or finish for one move of a job.

    ``row``: of the catalog, pinned until the job is settled, or where the move is late until it is
    released; -1: none. ``group`` and ``position``: the block's place in its request. ``source``:
    the tier that is read, a neighbour's included; ``target``: the one whose copy is written; None:
    none.
    """

    row: int
    group: int = -1
    position: int = -1
    source: Tier | None = None
    target: Tier | None = None


@dataclass(eq=False, slots=True)
class JobRecord:
    """A job on its way, or settled. ``owners``: of each move the request that it is for; empty:
    they are for none. A load's is ``Job.request_id``.

    ``failed``: the failed moves of all ranks, by position. ``sent_s``: when its plan was taken,
    None: not yet. ``ranks``, ``copied``: how many have answered, and read nothing more from the
    GPU. ``late``: those of the failed moves that ``late_ranks`` ranks reported late, ``released``
    of which have taken that back; empty once nothing is late any more. ``by_key``: it was asked for
    by key: no planner of requests waits for it.
    """

    job: Job
    details: list[MoveDetail]
    owners: Sequence[str] = ()
    failed: dict[int, Reason] = field(default_factory=dict)
    sent_s: float | None = None
    ranks: int = 0
    late: set[int] = field(default_factory=set)
    late_ranks: int = 0
    released: int = 0
    copied: int = 0
    by_key: bool = False


class Ended(NamedTuple):
    """What a report has ended. ``copied``: stores of which no rank reads the GPU any more, though
    they go on. ``settled``: jobs, in the order of their plans. ``released``: zombies: nothing
    touches the slots of their ``late`` moves any more."""

    copied: list[JobRecord]
    settled: list[JobRecord]
    released: list[JobRecord]


class Transfers:
    """The table of jobs. ``rank_count`` answers settle a job.

    Zombies count nowhere, since nobody waits for them. The ranks bound their late batches, and so
    the zombies.
    """

    def __init__(self, rank_count: int) -> None:
        self.rank_count = rank_count
        self._next_id = 1
        self._queued: list[Job] = []
        self._records: dict[JobId, JobRecord] = {}
        self._counts = dict.fromkeys(JobKind, 0)
        self._zombies: dict[JobId, JobRecord] = {}
        self.has_settled = False
        """Whether all ranks have answered a job."""

    def __contains__(self, job_id: JobId) -> bool:
        """Whether a job is queued or out."""
        return job_id in self._records

    def __len__(self) -> int:
        return len(self._records)

    def count(self, kind: JobKind) -> int:
        """Return the jobs of a kind that are queued or out."""
        return self._counts[kind]

    def add(
        self,
        kind: JobKind,
        moves: Sequence[Move],
        details: list[MoveDetail],
        *,
        epoch: int = 0,
        request_id: str | None = None,
        home: HomeSpec | None = None,
        segment: SegmentSpec | None = None,
        arrival: int = 0,
        more: bool = False,
    ) -> JobRecord:
        """Queue a job for the next plan. ``moves``, ``details``: of each of its blocks.
        ``request_id``: of a load."""
        assert len(moves) == len(details)
        kept = moves if type(moves) is StoreMoves else tuple(moves)
        job = Job(JobId(self._next_id), kind, kept, epoch, request_id, home, segment, arrival, more)
        self._next_id += 1
        record = self._records[job.id] = JobRecord(job, details)
        self._counts[kind] += 1
        self._queued.append(job)
        return record

    @property
    def oldest(self) -> JobRecord | None:
        """The job that was planned first of those that are queued or out; None: there is none."""
        return next(iter(self._records.values()), None)

    @property
    def planned(self) -> int:
        """Jobs that were ever planned."""
        return self._next_id - 1

    @property
    def any_queued(self) -> bool:
        """Whether a job waits for the next plan."""
        return bool(self._queued)

    def take_queued(self, now: float) -> tuple[Job, ...]:
        """Return the jobs that no plan has carried yet, in order."""
        queued, self._queued = self._queued, []
        for job in queued:
            self._records[job.id].sent_s = now
        return tuple(queued)

    def cancel_queued(self) -> list[JobRecord]:
        """Take back the jobs that no plan has carried yet. Jobs of files and loads stay: somebody
        waits for them."""
        queued = self._queued
        self._queued = [job for job in queued if job.kind not in _CANCELLABLE]
        return [self._remove(job.id) for job in queued if job.kind in _CANCELLABLE]

    def sent_loads(self) -> list[JobId]:
        """Return the loads that are queued or out."""
        return [job_id for job_id, record in self._records.items() if record.job.kind is _LOAD]

    def failed_load_blocks(self, report: Report) -> set[int]:
        """Return the GPU blocks that the loads under way have failed to fill, with those of a
        report that is not absorbed yet."""
        return {
            block
            for job_id, record in self._records.items()
            if record.job.kind is _LOAD
            for position in (*record.failed, *(report.results[job_id].failed if job_id in report.results else ()))
            for block in record.job.moves[position].filled_blocks
        }

    def fail_stores(self) -> None:
        """Have every move of the stores that are queued or out fail, whatever their ranks
        answer."""
        for record in self._records.values():
            if record.job.kind is _STORE:
                for position in range(len(record.details)):
                    record.failed.setdefault(position, Reason.CANCELLED)

    def absorb(self, report: Report) -> Ended:
        """Count a report's answers; return what has ended by it."""
        ended = Ended([], [], [])
        for job_id, ranks in report.released.items():
            record = self._records.get(job_id) or self._zombies.get(job_id)
            assert record is not None, f"job {job_id} was released more than once per rank, or nothing of it was late"
            record.released += ranks
            if job_id in self._zombies:
                assert record.released <= record.late_ranks
                if record.released == record.late_ranks:
                    ended.released.append(self._zombies.pop(job_id))
        for job_id, ranks in report.copied.items():
            record = self._records.get(job_id)
            if record is not None:
                record.copied += ranks
                if record.copied == self.rank_count:
                    ended.copied.append(record)
        # In the order of the plans: a rank that lags can answer a segment's opening in the report
        # in which another answers its drop.
        for job_id, result in sorted(report.results.items(), key=lambda answer: answer[0]):
            record = self._records.get(job_id)
            assert record is not None, f"job {job_id} answered more than once per rank, or never planned"
            record.ranks += result.ranks
            assert record.ranks <= self.rank_count
            for position, reason in result.failed.items():
                record.failed.setdefault(position, reason)
            record.late |= result.late
            record.late_ranks += result.late_ranks
            if record.ranks == self.rank_count:
                self.has_settled = True
                ended.settled.append(self._remove(job_id))
                if record.released == record.late_ranks:
                    record.late.clear()
                else:
                    self._zombies[job_id] = record
        return ended

    def _remove(self, job_id: JobId) -> JobRecord:
        record = self._records.pop(job_id)
        self._counts[record.job.kind] -= 1
        return record


class StoreSources:
    """The fence: which GPU blocks stores still copy from, and which of them a step is about to
    overwrite.

    vLLM: it frees and reuses a GPU block when a request ends, is aborted or preempted, or its
    window moves on; a store holds no reference that would keep it. The worker delays the step that
    overwrites it until it is copied.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context
        self._records: dict[int, JobRecord] = {}
        self._reused: list[tuple[int, JobRecord]] = []
        """Sources that were handed out, for the next fence."""

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: JobRecord) -> None:
        """A store was planned. Its blocks hold what it stores, or will when this step's forward
        pass is over."""
        self._note_reused()  # of this step: from now on the blocks belong to the new store
        blocks = _gpu_blocks_of(record)
        self._records.update(dict.fromkeys(blocks, record))
        self._context.watch(blocks)

    def end(self, record: JobRecord) -> None:
        """The job's copies out of the GPU have ended on every rank, or will never begin."""
        self._note_reused()
        self._reused = [(block, other) for block, other in self._reused if other is not record]
        blocks = _gpu_blocks_of(record)
        held = list(map(self._records.pop, blocks, repeat(None)))
        if held.count(record) < len(held):  # some belong to newer stores, or are nobody's
            newer = [(block, other) for block, other in zip(blocks, held, strict=True) if other is not record]
            self._records.update((block, other) for block, other in newer if other is not None)
            blocks = [block for block, other in zip(blocks, held, strict=True) if other is record]
        self._context.unwatch(blocks)

    def take_fence(self, overwritten: Collection[int]) -> tuple[JobId, ...]:
        """Return the stores whose sources this step writes to.

        ``overwritten``: blocks that the model runner may write to before the worker can wait. A
        move from one of them fails whatever the ranks answer, because nobody can tell what it
        copied.
        """
        self._note_reused()
        if not self._reused:
            return ()
        found = tuple(dict.fromkeys(record.job.id for _, record in self._reused))
        for block, record in self._reused:
            if block in overwritten:
                for position, move in enumerate(record.job.moves):
                    if block in move.gpu_blocks:
                        record.failed.setdefault(position, Reason.OVERWRITTEN)
        self._reused = []
        return found

    def _note_reused(self) -> None:
        for block in self._context.take_reused():
            record = self._records.pop(block, None)
            if record is not None:
                self._reused.append((block, record))


def _gpu_blocks_of(record: JobRecord) -> list[int]:
    moves = record.job.moves
    return list(
        chain.from_iterable(moves.gpu_blocks if type(moves) is StoreMoves else [each.gpu_blocks for each in moves])
    )
