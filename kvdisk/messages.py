# SPDX-License-Identifier: Apache-2.0
"""The whole wire between the manager (scheduler process) and the workers: plain values.

A ``Plan`` goes down in each engine step, and a ``Report`` comes back. They hold no path, no
address, and no value of another package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, islice
from typing import Any, NamedTuple, overload

from kvdisk.blocks import BlockKey, JobId, Slot, Tier
from kvdisk.stats import Stats


class JobKind(IntEnum):
    """The kinds of jobs. Each rank reports each job once.

    STORE: GPU blocks to a CPU slot; without a CPU slot, through staging to the NVMe slot. LOAD: a
    CPU slot, or an NVMe slot (into the CPU slot where one is named, otherwise into staging),
    verified, then to the GPU blocks. DEMOTE: CPU slot to NVMe slot. PROMOTE: NVMe slot to CPU slot,
    verified. In the last three the remote store may take the place of the NVMe slot, as ``BY_KEY``,
    or in a DEMOTE as ``BY_KEY_OVER``. OPEN_HOME, OPEN_SEGMENT, DROP_SEGMENT: files; every rank runs
    them before later jobs of the plan. What a rank could not open may be named again: on a rank
    that has it open already that does nothing.
    """

    STORE = 1
    LOAD = 2
    DEMOTE = 3
    PROMOTE = 4
    OPEN_HOME = 5
    OPEN_SEGMENT = 6
    DROP_SEGMENT = 7


class Reason(IntEnum):
    """Why a move failed; a closed list."""

    ABSENT = 1
    """No source was named: the copy was gone when the job was planned. Or the file of a segment is
    known to be gone: its directory can be read, and has none."""
    HEADER = 2
    """The slot's header, or the file's, is not that of this key, generation, namespace and
    length."""
    CHECKSUM = 3
    """The header is right, and the payload is not."""
    IO_ERROR = 4
    """The device failed, or moved fewer bytes than asked. Or a file cannot be opened now, whatever
    keeps it: that says nothing of what is in it."""
    NO_SPACE = 5
    """The drive is full (ENOSPC, EDQUOT)."""
    DEADLINE = 6
    """The leg had not started at its deadline, or the device had not ended it by then
    (``JobResult.late``)."""
    CANCELLED = 7
    """Not tried: the worker shut down first, or the remote store is left alone."""
    OVERWRITTEN = 8
    """The engine needed a store's GPU block before its copy had ended, or could begin."""
    NO_GPU_MEMORY = 9
    """The GPU had no memory left for what a copy needs beside its blocks."""
    REMOTE_ERROR = 10
    """The remote store failed, which says nothing about a drive that the move goes from or to."""


NO_BLOCK = -1


class Move(NamedTuple):
    """One block of a job. Fields that the route does not use are empty.

    ``gpu_blocks``: the ids of the block's GPU blocks, as many as its group says; NO_BLOCK in place
    of one that a load leaves alone. ``slots``: the slot in each tier that the move reads or writes.
    ``parent``: the key of the block before this one in its chain, where known.
    """

    key: BlockKey
    generation: int
    gpu_blocks: tuple[int, ...] = ()
    slots: Mapping[Tier, Slot] = {}  # never written to
    parent: BlockKey | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether the move reads another engine's slot."""
        return any(slot.segment >= FOREIGN_SEGMENTS for slot in self.slots.values())

    @property
    def filled_blocks(self) -> list[int]:
        """The GPU blocks that the move reads or fills."""
        return [block for block in self.gpu_blocks if block != NO_BLOCK]


class StoreMoves(Sequence[Move]):
    """The moves of a store, as columns: each has one slot in ``tier``. A ``Move`` is made only
    where somebody asks for one: an object for each block would take a good part of an engine's
    step. ``gpu_blocks``: of a job by key, the row of the caller's memory in their place."""

    def __init__(
        self,
        keys: Sequence[BlockKey],
        generations: Sequence[int],
        gpu_blocks: Sequence[tuple[int, ...]],
        tier: Tier,
        slots: Sequence[Slot],
        parents: Sequence[BlockKey | None],
    ) -> None:
        assert len(keys) == len(generations) == len(gpu_blocks) == len(slots) == len(parents)
        self.gpu_blocks = gpu_blocks
        self._keys, self._generations = keys, generations
        self._tier, self._slots, self._parents = tier, slots, parents

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, at: int) -> Move: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Move]: ...
    def __getitem__(self, at: int | slice) -> Move | Sequence[Move]:
        if isinstance(at, slice):
            return tuple(self)[at]
        slots = {self._tier: self._slots[at]}
        return Move(self._keys[at], self._generations[at], self.gpu_blocks[at], slots, self._parents[at])

    def __iter__(self) -> Iterator[Move]:
        slots = ({self._tier: slot} for slot in self._slots)
        return map(Move, self._keys, self._generations, self.gpu_blocks, slots, self._parents)

    def places(self, tier: Tier) -> Sequence[Slot | None]:
        """Return the slot of each move in a tier; None: it has none there."""
        return self._slots if tier is self._tier else [None] * len(self)

    def pack(self) -> tuple[object, ...]:
        """Return what ``_unpack`` makes moves of."""
        segments, indexes = zip(*self._slots, strict=True) if self._slots else ((), ())
        tiers = ((self._tier,),), bytes(len(self))
        return self._keys, self._generations, *_pack_blocks(self.gpu_blocks), self._parents, *tiers, segments, indexes


def places_in(moves: Sequence[Move], tier: Tier) -> Sequence[Slot | None]:
    """Return the slot of each move in a tier; None: it has none there."""
    return moves.places(tier) if type(moves) is StoreMoves else [move.slots.get(tier) for move in moves]


class GuestSpec(NamedTuple):
    """What ranks on another host than the engine store's need to make a guest there: a home of the
    same id, for their files. ``lineage``: see ``HomeRecord``. ``previous_id``: the id that the home
    had under its last owner; empty: it is new. ``rank_bytes``: the most that one rank's files may
    take. ``description``: what HOME shall say. ``mounted``: whether the engine store's directory is
    on another file system than the root."""

    lineage: str
    previous_id: str
    rank_bytes: int
    description: Mapping[str, Any]
    mounted: bool = False


class HomeSpec(NamedTuple):
    """The engine store that ranks are to open: its id (32 hex digits; empty: there is none) and
    namespace fingerprint.

    ``known_segments``: what the index knows; files of other segments were left by a crash and go.
    ``guests``: for ranks on other hosts; None: the home is there on each rank's host.
    """

    home_id: str
    fingerprint: bytes
    known_segments: tuple[int, ...] = ()
    guests: GuestSpec | None = None


FOREIGN_SEGMENTS = 1 << 31
"""The least number of a segment in another engine's store: the manager numbers those from here on,
and its own below."""


class ForeignSegment(NamedTuple):
    """A segment as another engine store numbers it."""

    home_id: str
    segment: int


class SegmentSpec(NamedTuple):
    """A segment to open or drop. ``create``: make the files; False: they must exist.

    ``drive``: its position in its own engine store's list of drives. ``source``: None for a segment
    of the engine store that was opened. Otherwise it is another engine's, opened only to read:
    dropping it closes it, and leaves the files alone.
    """

    segment: int
    slot_bytes: int
    slot_count: int
    drive: int = 0
    create: bool = True
    source: ForeignSegment | None = None


class Job(NamedTuple):
    """Work for every rank. ``epoch`` is part of each slot header. Only a LOAD has ``request_id``
    and ``arrival``.

    ``arrival``: the number of its request in order of arrival: loads of earlier requests go first.
    ``more``: the load of its request goes on in a job of a later plan, and ends with the last one.
    """

    id: JobId
    kind: JobKind
    moves: Sequence[Move] = ()
    epoch: int = 0
    request_id: str | None = None
    home: HomeSpec | None = None
    segment: SegmentSpec | None = None
    arrival: int = 0
    more: bool = False

    def __reduce__(self) -> tuple[Callable[..., Job], tuple[object, ...]]:
        """Pickle the moves by column. The engine's step waits until a plan is pickled, and
        thousands of moves one by one take fifty milliseconds."""
        return _unpack, (self._replace(moves=())._asdict(), *_pack(self.moves))


def _pack(moves: Sequence[Move]) -> tuple[object, ...]:
    """Return the arguments from which ``_unpack`` makes the moves: their columns, the combinations
    of tiers that their slots are in, which combination each move has, and the numbers of the slots,
    one after the other."""
    if not moves:
        return ()
    if type(moves) is StoreMoves:
        return moves.pack()
    keys, generations, gpu_blocks, slots, parents = zip(*moves, strict=True)
    known: dict[tuple[Tier, ...], int] = {}
    tiers = bytes(known.setdefault(tuple(each), len(known)) for each in slots)
    places = [slot for each in slots for slot in each.values()]
    segments, indexes = [slot.segment for slot in places], [slot.index for slot in places]
    return keys, generations, *_pack_blocks(gpu_blocks), parents, tuple(known), tiers, segments, indexes


def _pack_blocks(gpu_blocks: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """Return how many GPU blocks each move has, one number where all have as many, and these."""
    counts = list(map(len, gpu_blocks))
    return counts[:1] if len(set(counts)) == 1 else counts, list(chain.from_iterable(gpu_blocks))


def _unpack(job: dict[str, Any], *columns: Any) -> Job:
    """Return the job that was pickled."""
    if not columns:
        return Job(**job)
    keys, generations, counts, blocks, parents, known, tiers, segments, indexes = columns
    each = iter(blocks)
    gpu_blocks = [tuple(islice(each, count)) for count in (counts * len(keys) if len(counts) == 1 else counts)]
    places = map(Slot, segments, indexes)
    slots = ({tier: next(places) for tier in known[at]} for at in tiers)
    job["moves"] = tuple(map(Move, keys, generations, gpu_blocks, slots, parents))
    return Job(**job)


class Plan(NamedTuple):
    """One step's work.

    ``fence``: stores, of earlier plans or this one, whose GPU blocks this step overwrites. The
    model waits until their copies from the GPU have ended; a copy that cannot begin at once is
    given up. ``urgent``: stores of this plan that save what a preemption takes away: like
    ``fence``, but a copy may wait a moment before it begins. ``void``: loads of earlier plans whose
    bytes are no longer right, after a reset: they end as failed. ``idle``: no model runs in this
    step, so that a worker may wait briefly for transfers. ``off``: the scheduler's half has
    switched itself off for good; the worker does so too, and its loads end as failed.
    """

    jobs: tuple[Job, ...] = ()
    fence: tuple[JobId, ...] = ()
    void: tuple[JobId, ...] = ()
    idle: bool = False
    urgent: tuple[JobId, ...] = ()
    off: bool = False

    @property
    def jobs_before(self) -> tuple[Job, ...]:
        """The stores of this plan that the step's model has to wait for."""
        return tuple(job for job in self.jobs if job.id in self.urgent or job.id in self.fence)

    @property
    def jobs_beside(self) -> tuple[Job, ...]:
        """The jobs that do not read what the step's model computes."""
        return tuple(job for job in self.jobs if job.kind is not JobKind.STORE)

    @property
    def jobs_after(self) -> tuple[Job, ...]:
        """The stores of what the step's model computes, or leaves as it is."""
        before = {*self.urgent, *self.fence}
        return tuple(job for job in self.jobs if job.kind is JobKind.STORE and job.id not in before)


@dataclass(slots=True)
class JobResult:
    """How a job ended. ``ranks``: how many ranks have answered. ``failed``: the moves that failed
    on any of them, by position in ``Job.moves``, and why; a failed job without moves has position
    -1.

    ``late``: moves that failed with DEADLINE after the device of some rank had begun them. The
    device may still touch their slots, in memory and on the drive, until all ``late_ranks`` ranks
    have named the job in ``Report.released``.
    """

    ranks: int = 1
    failed: dict[int, Reason] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    late_ranks: int = 0


@dataclass(slots=True)
class Report:
    """What one rank, or several after ``merge``, finished since the last report.

    ``released``: by job, on how many ranks its late moves have ended; never before the job's
    result. ``copied``: by store that has not ended, on how many ranks it has stopped reading the
    GPU. ``off``: a rank has switched itself off, and results may be missing: the scheduler's half
    switches itself off too. ``remote_pause_s``: a rank has begun to leave reads from the remote
    store alone, for so many seconds from now on. ``removed``: segments of which others have removed
    a rank's file, that is still open; named again as long as it is.
    """

    results: dict[JobId, JobResult] = field(default_factory=dict)
    released: dict[JobId, int] = field(default_factory=dict)
    copied: dict[JobId, int] = field(default_factory=dict)
    stats: Stats = field(default_factory=Stats)
    off: bool = False
    remote_pause_s: float = 0.0
    removed: set[int] = field(default_factory=set)

    def merge(self, other: Report) -> Report:
        """Add another rank's report of the same step to this one, and return this one. A move
        failed if any rank failed it."""
        for job_id, result in other.results.items():
            mine = self.results.setdefault(job_id, JobResult(ranks=0))
            mine.ranks += result.ranks
            mine.late |= result.late
            mine.late_ranks += result.late_ranks
            for position, reason in result.failed.items():
                mine.failed.setdefault(position, reason)
        for counts, others in ((self.released, other.released), (self.copied, other.copied)):
            for job_id, ranks in others.items():
                counts[job_id] = counts.get(job_id, 0) + ranks
        self.stats.merge(other.stats)
        self.off |= other.off
        self.remote_pause_s = max(self.remote_pause_s, other.remote_pause_s)
        self.removed |= other.removed
        return self

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        news = self.results or self.released or self.copied or self.off or self.remote_pause_s or self.removed
        return not news and self.stats.empty
