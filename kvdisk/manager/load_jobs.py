# SPDX-License-Identifier: Apache-2.0
"""The loads of requests: the jobs that bring what was promised, and what becomes of a request when
they have ended. Scheduler thread only.

A hit of a long prompt has as many blocks as that. To plan all of them at once would hold up the
engine's step; so each step plans a part, as a job. All copies are pinned when the load begins, so
that the later jobs find them. vLLM hears of one load: workers report it when its last job has ended
(``Job.more``).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey, JobId, Tier
from kvdisk.manager.catalog import NONE, READY
from kvdisk.manager.copies import Copies, Read, moves_of
from kvdisk.manager.demand import Demand
from kvdisk.manager.hits import HitCounts, LoadedBlocks
from kvdisk.manager.jobs import JobRecord, MoveDetail
from kvdisk.manager.load_threshold import LoadThreshold
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.requests import RequestState
from kvdisk.manager.step_work import SHARES, Kind, Work
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import NO_BLOCK, JobKind, Move

_FEW = 32
"""Up to so many blocks lists are faster than arrays."""
_OF_OTHERS = 4
"""Looks that a block of a neighbour or the remote store takes: it is asked for alone."""
_STRETCH = 1024
"""Blocks that are looked at together for whether vLLM has given any."""
_READY = bytes([READY])


class GpuLoads:
    """Blocks that loads are just bringing to the GPU, so that one load serves all who need them.

    vLLM: it has a loaded block in its prefix cache before it looks up any waiting request again. So
    whoever has waited for the load finds its blocks on the GPU. A block that two loads bring is the
    later one's. ``enabled``: whether the engine has a prefix cache. Without one nothing is noted,
    and so nobody waits. ``changes`` rises whenever a load is noted or forgotten.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._loaders: dict[BlockKey, JobId] = {}
        self._keys: dict[JobId, Sequence[BlockKey]] = {}
        self.changes = 0
        self._unnoted: list[JobId] = []
        """Loads whose keys are not in ``_loaders`` yet: nobody has asked since they began."""

    def begin(self, load_id: JobId, keys: Sequence[BlockKey]) -> None:
        """Note a load, by its first job, and all that it brings."""
        if self._enabled:
            self._keys[load_id] = keys
            self.changes += 1
            self._unnoted.append(load_id)

    def _noted(self) -> dict[BlockKey, JobId]:
        """Return the load of each block."""
        for load_id in self._unnoted:
            self._loaders.update(dict.fromkeys(self._keys[load_id], load_id))
        self._unnoted.clear()
        return self._loaders

    def end(self, load_id: JobId | None) -> None:
        """Forget a load that has ended, or whose blocks nobody will use. It may be forgotten
        already."""
        keys = self._keys.pop(load_id, ()) if load_id is not None else ()
        self.changes += bool(keys)
        if load_id in self._unnoted:
            self._unnoted.remove(load_id)
            return
        loaders = self._loaders
        for key in keys:
            if loaders.get(key) == load_id:
                del loaders[key]

    def clear(self) -> None:
        """For a new epoch: no load on its way brings anything."""
        self.changes += 1
        self._keys.clear()
        self._unnoted.clear()
        self._loaders.clear()

    @property
    def any(self) -> bool:
        """Whether any load is on its way."""
        return bool(self._keys)

    def is_out(self, load_id: JobId | None) -> bool:
        """Whether a load is on its way."""
        return load_id in self._keys

    def loader_of(self, key: BlockKey) -> JobId | None:
        """Return the load that brings a block; None: none does."""
        return self._noted().get(key)

    def presences(self, keys: Sequence[BlockKey]) -> bytes:
        """Return a byte for each key, as ``Catalog.presences``: READY is on its way to the GPU."""
        return bytes(map(self._noted().__contains__, keys)).replace(b"\1", _READY)


@dataclass(slots=True)
class Rest:
    """What of a long load is planned job by job, the head of its prompt first.

    ``gpu_blocks``, ``rows``, ``groups``, ``positions``, ``tiers``: of all its blocks;
    ``gpu_blocks``: a row of ids for each, NO_BLOCK for what is not filled; ``rows``: NONE where no
    copy is pinned. ``order``: of their places there, in which they are planned. ``planned``: how
    many are.
    """

    gpu_blocks: NDArray[np.int32]
    rows: NDArray[np.intp]
    groups: NDArray[np.uint8]
    positions: NDArray[np.intp]
    tiers: NDArray[np.uint8]
    order: NDArray[np.intp]
    planned: int = 0

    def __len__(self) -> int:
        return len(self.order) - self.planned

    def take(self, most: int) -> NDArray[np.intp]:
        """Return which of the blocks come next, group by group; they are planned then."""
        taken = self.order[self.planned : self.planned + most]
        self.planned += len(taken)
        return np.sort(taken)


@dataclass(eq=False, slots=True)
class Load:
    """A request's load.

    ``keys``: of the blocks, as ``blocks`` has them. ``rest``: what later jobs bring; None: its
    first job has all, and fills ``gpu_blocks``. ``id``: its first job. ``arrived``: copies that it
    leaves in memory, by size class. ``jobs``: that are queued or out. ``failed``: groups and
    positions. ``failed_blocks``: on the GPU. ``sent_s``: when the first job was. ``is_left``: the
    request has ended. ``is_void``: all of it fails, also what was brought already.
    """

    request: RequestState
    blocks: LoadedBlocks
    keys: list[BlockKey]
    rest: Rest | None = None
    gpu_blocks: Sequence[tuple[int, ...]] = ()
    id: JobId | None = None
    arrived: Counter[int] = field(default_factory=Counter)
    jobs: set[JobId] = field(default_factory=set)
    failed: list[tuple[int, int]] = field(default_factory=list)
    failed_blocks: set[int] = field(default_factory=set)
    sent_s: float | None = None
    is_left: bool = False
    is_void: bool = False

    @property
    def is_planned(self) -> bool:
        """Whether its last job is queued or out, or was."""
        return not self.rest


def _given(block_ids: Sequence[int], each: int, most: int) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """Return the GPU blocks that vLLM gave to a stretch of a group, ``each`` to a block, in rows of
    ``most``, and the places of those blocks there.

    vLLM: it caches each block that it gave under its hash. So each is loaded or fails, even where
    ``lookup`` needed less of a window: else nobody would have written it.
    """
    start, stretch = 0, _STRETCH * each
    while start < len(block_ids) and not any(block_ids[start : start + stretch]):
        start += stretch  # before its window a group has none: an array of zeros takes longer to make
    given = np.array(block_ids[start:], np.int32).reshape(-1, each)
    places = np.flatnonzero(given.any(axis=1))
    found = np.full((len(places), most), NO_BLOCK, np.int32)
    found[:, :each] = np.where(given[places] == 0, NO_BLOCK, given[places])
    return found, places + start // each


def _is_short(blocks: int) -> bool:
    """Whether one job has a load of so many blocks, whatever else waits."""
    return 2 * blocks <= SHARES[Kind.LOADS].blocks


class LoadJobs:
    """Plans loads, and ends them. ``gpu_loads``: what they are just bringing."""

    def __init__(
        self,
        parts: Parts,
        tiers: Tiers,
        hits: HitCounts,
        demand: Demand,
        hints: PeerHints,
        threshold: LoadThreshold,
        copies: Copies,
    ) -> None:
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._transfers = parts.transfers
        self._state = parts.state
        self._work = parts.work
        self._tiers = tiers
        self._hits = hits
        self._demand = demand
        self._hints = hints
        self.gpu_loads = GpuLoads(enabled=parts.context.caches)
        self._threshold = threshold
        self._copies = copies
        self._by_job: dict[JobId, Load] = {}
        self._under_way: dict[JobId, Load] = {}
        """By their first job."""
        self._counts = [group.gpu_blocks for group in parts.geometry.groups]
        self._most_gpu_blocks = max(self._counts)

    # -- planning --------------------------------------------------------------------------------

    def begin(
        self, request: RequestState, local_tokens: int, external_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """See ``TierManager.plan_load``."""
        end_tokens = local_tokens + external_tokens
        groups = self._geometry.groups
        stretches, blocks = list[tuple[int, int]](), 0
        for group in groups:
            first, stop = local_tokens // group.block_tokens, end_tokens // group.block_tokens
            self._demand.reach(request, group.group, min(1, stop))
            stretches.append((first, stop))
            blocks += stop - first
            self._state.taken_blocks += (stop - first) * group.gpu_blocks
        # A short hit does not wait for a long one.
        most = max(1, SHARES[Kind.LOADS].blocks // 8, self._work.left(Kind.LOADS))
        reads: list[Read] = []
        if blocks <= min(_FEW, most):
            load, reads = self._find_few(request, stretches, block_ids)
        else:
            load = self._find(request, stretches, block_ids)
        request.loading = True
        request.load_start_tokens, request.load_end_tokens = local_tokens, end_tokens
        request.wait_started_s = None
        self._hits.scheduled(request, external_tokens, load.blocks)
        if load.rest is not None:
            # All of a long load is found and pinned in this call: half of the share is for another.
            most = most if _is_short(len(load.keys)) else most // 2
            reads = self._reads(load, load.rest, self._within(load.rest, most))
        self._work.spend(Kind.LOADS, self._plan_job(load, reads))
        assert load.id is not None
        request.load_job = load.id
        self._under_way[load.id] = load
        if load.rest:
            self._work.add(Kind.LOADS, load, self._plan_rest(load, load.rest))
        self.gpu_loads.begin(load.id, load.keys)

    def _plan_rest(self, load: Load, rest: Rest) -> Work:
        """Plan more of a load that has begun, a job in each step."""
        while rest:
            yield self._plan_job(load, self._reads(load, rest, self._within(rest, self._work.left(Kind.LOADS))))

    def _within(self, rest: Rest, most: int) -> int:
        """Return how many blocks of a load come within so many looks: one that leaves a copy in
        memory takes two, and one that another has ``_OF_OTHERS``."""
        arrival, coming = self._tiers.arrival_tier, rest.order[rest.planned : rest.planned + most]
        looks = 1 if arrival is None or (rest.tiers[coming] == arrival.tier).all() else 2
        if (rest.rows[coming] == NONE).any():
            looks = _OF_OTHERS
        return max(1, most // looks)

    def _find_few(
        self, request: RequestState, stretches: Sequence[tuple[int, int]], block_ids: Sequence[Sequence[int]]
    ) -> tuple[Load, list[Read]]:
        """Return the load of a short hit, and its reads. ``stretches``: the blocks of each group
        that a hit covers, from where to where."""
        reads: list[Read] = []
        for group, (first, stop) in zip(self._geometry.groups, stretches, strict=True):
            each, number = group.gpu_blocks, group.group
            nothing, given = (0,) * each, iter(block_ids[number][first * each : stop * each])
            reads += [
                Read(key, None, filled, number, at, request=request)
                for at, key, filled in zip(
                    range(first, stop),
                    request.keys[number][first:stop],
                    zip(*[given] * each, strict=True),
                    strict=False,
                )
                if filled != nothing  # vLLM gave it: see _given
            ]
        self._copies.pin_sources(reads, request.load_tiers)
        for read in reads:
            if 0 in read.gpu_blocks:
                read.gpu_blocks = tuple([block or NO_BLOCK for block in read.gpu_blocks])
            if read.row == NONE:
                read.parent = request.parent(read.group, read.position)
        each_read = [(read.key, read.gpu_blocks, read.group, read.position, read.source or 0) for read in reads]
        keys, gpu_blocks, groups, positions, tiers = zip(*each_read, strict=True) if each_read else ((),) * 5
        blocks = LoadedBlocks(bytes(groups), array("q", positions), bytes(tiers))
        return Load(request, blocks, list(keys), gpu_blocks=gpu_blocks), reads

    def _find(
        self, request: RequestState, stretches: Sequence[tuple[int, int]], block_ids: Sequence[Sequence[int]]
    ) -> Load:
        """Return the load of a hit, nothing of which is planned yet: its copies are pinned.
        ``stretches``: as in ``_find_few``."""
        keys: list[BlockKey] = []
        groups, positions, gpu_blocks, ends = [], [], [], []
        for group, (first, stop) in zip(self._geometry.groups, stretches, strict=True):
            each = group.gpu_blocks
            given, needed = _given(block_ids[group.group][first * each : stop * each], each, self._most_gpu_blocks)
            gpu_blocks.append(given)
            of_group = request.keys[group.group]
            keys += of_group[first:stop] if len(needed) == stop - first else of_group.of((needed + first).tolist())
            groups.append(np.full(len(needed), group.group, np.uint8))
            positions.append(needed + first)
            ends.append((needed + first + 1) * group.block_tokens)
        rows = self._catalog.find_many(keys)
        hints = self._hints.usable_in(request.load_tiers)
        tiers = self._catalog.readable_tiers(rows, request.load_tiers)
        self._copies.hold(rows, tiers)
        rows[tiers == 0] = NONE
        for at in np.flatnonzero(tiers == 0).tolist() if hints else ():
            if keys[at] in hints:
                tiers[at] = self._hints.tier_of(keys[at], request.load_tiers)
        numbers, places = np.concatenate(groups), np.concatenate(positions)
        blocks = LoadedBlocks(numbers.tobytes(), array("q", places.tobytes()), tiers.tobytes())
        order = np.arange(len(keys)) if _is_short(len(keys)) else np.argsort(np.concatenate(ends), kind="stable")
        rest = Rest(np.concatenate(gpu_blocks), rows, numbers, places, tiers, order)
        return Load(request, blocks, keys, rest)

    def _plan_job(self, load: Load, reads: list[Read]) -> int:
        """Plan a job of these reads, which come next; return how many looks they take."""
        of_others = sum(read.row == NONE for read in reads)
        arrived = self._let_arrive(load, reads)
        self._add(load, *moves_of(reads))
        return len(reads) + max(arrived, (_OF_OTHERS - 1) * of_others)

    def _add(self, load: Load, moves: list[Move], details: list[MoveDetail]) -> None:
        request = load.request
        record = self._transfers.add(
            JobKind.LOAD,
            moves,
            details,
            epoch=self._state.epoch,
            request_id=request.request_id,
            arrival=request.arrival,
            more=not load.is_planned,
        )
        load.id = load.id or record.job.id
        load.jobs.add(record.job.id)
        self._by_job[record.job.id] = load

    def _reads(self, load: Load, rest: Rest, most: int) -> list[Read]:
        """Return the reads of up to so many blocks that come next. What nobody has any more has no
        source."""
        taken = rest.take(most)
        gone = self._copies.let_go_unreadable(rest.rows[taken], rest.tiers[taken])
        rest.rows[taken[gone]] = NONE
        rows, tiers = rest.rows[taken].tolist(), rest.tiers[taken].tolist()
        reads = [
            Read(load.keys[at], None, gpu_blocks, group, position, row, request=load.request)
            for at, gpu_blocks, group, position, row in zip(
                taken.tolist(),
                self._gpu_blocks(rest, taken),
                rest.groups[taken].tolist(),
                rest.positions[taken].tolist(),
                rows,
                strict=True,
            )
        ]
        found: dict[Tier, list[Read]] = {}
        for read, tier in zip(reads, tiers, strict=True):
            if read.row != NONE:
                found.setdefault(tier, []).append(read)
            else:
                read.parent = load.request.parent(read.group, read.position)
                self._copies.take_from_others(read, load.request.load_tiers)
        for tier in self._catalog.tiers:
            self._copies.read_from(tier, found.get(tier, ()))
        return reads

    def _gpu_blocks(self, rest: Rest, taken: NDArray[np.intp]) -> list[tuple[int, ...]]:
        """Return the GPU blocks of some blocks."""
        found = list(zip(*rest.gpu_blocks[taken].T.tolist(), strict=True))
        if min(self._counts) < self._most_gpu_blocks:
            groups = rest.groups[taken].tolist()
            found = [blocks[: self._counts[group]] for blocks, group in zip(found, groups, strict=True)]
        return found

    def _let_arrive(self, load: Load, reads: Sequence[Read]) -> int:
        """Begin copies in memory of blocks that are read from elsewhere, where admission and room
        allow; return how many.

        The rest goes through staging. A load leaves no more copies than memory has room for: its
        later jobs would evict what the earlier ones have left.
        """
        arrival = self._tiers.arrival_tier
        tier = None if arrival is None else arrival.tier
        find = self._catalog.find  # of another's block no copy begins where this engine has a row
        others = [
            read
            for read in reads
            if read.source is not None and read.source is not tier and (read.row != NONE or find(read.key) == NONE)
        ]
        if arrival is None or not others:
            return 0
        groups, size_classes = self._geometry.groups, self._geometry.size_classes
        if len(groups) > 1:  # in the order of the prompt: where room is short, as much is kept of every group
            others.sort(key=lambda read: (read.position + 1) * groups[read.group].block_tokens)
        of_load = load.arrived
        most = [max(0, total - of_load[size_class]) for size_class, total in enumerate(arrival.pool.total)]
        slots = self._copies.take_arriving(others, most=most).slots
        arrived = [(read, slot) for read, slot in zip(others, slots, strict=True) if slot is not None]
        if arrived:
            self._copies.begin_arrivals(*zip(*arrived, strict=True))
        of_load.update([size_classes[read.group] for read, _ in arrived])
        return len(arrived)

    # -- the end ---------------------------------------------------------------------------------

    @property
    def unplanned(self) -> Collection[str]:
        """The requests with blocks that no job has yet."""
        if not self._work.has(Kind.LOADS):
            return ()
        loads = self._work.owners(Kind.LOADS)
        return [load.request.request_id for load in loads if isinstance(load, Load) and not load.is_planned]

    @property
    def failed_blocks(self) -> set[int]:
        """The GPU blocks that loads which go on have failed to fill, by jobs that were settled."""
        return set().union(*(load.failed_blocks for load in self._under_way.values()))

    def leave(self, request: RequestState) -> None:
        """A request has ended: the engine does not keep what its load brings."""
        self.gpu_loads.end(request.load_job)
        load = self._under_way.get(request.load_job) if request.load_job is not None else None
        if load is not None:
            load.is_left = True
            self._give_up(load)

    def reset(self) -> None:
        """The weights may have changed: loads fail whole, also what earlier jobs have brought."""
        for load in self._under_way.values():
            load.is_void = True
            of_rest = () if load.rest is None else load.rest.gpu_blocks.ravel().tolist()
            load.failed_blocks.update(of_rest, *load.gpu_blocks)
            self._give_up(load)
        self.gpu_loads.clear()

    def _give_up(self, load: Load) -> None:
        """Have what is not planned yet of a load fail: a job without a source, for its next block,
        from which on vLLM computes. Workers wait for that job to report the load."""
        rest = load.rest
        if not rest:
            return
        self._work.cancel(load)
        at = int(rest.order[rest.planned])
        left = rest.take(len(rest))
        self._copies.let_go(rest.rows[left], rest.tiers[left])
        group, position = load.blocks.groups[at], load.blocks.positions[at]
        (gpu_blocks,) = self._gpu_blocks(rest, np.array([at]))
        self._add(load, [Move(load.keys[at], 0, gpu_blocks)], [MoveDetail(NONE, group, position)])

    def settle(self, record: JobRecord, now: float) -> bool:
        """Note what a job has brought. With the load's last job let its request go on, and promise
        it no failed position again. Return whether its request is still there."""
        load = self._by_job.pop(record.job.id)
        load.jobs.discard(record.job.id)
        if record.sent_s is not None:
            load.sent_s = record.sent_s if load.sent_s is None else min(load.sent_s, record.sent_s)
        for at in record.failed:
            load.failed.append((record.details[at].group, record.details[at].position))
            load.failed_blocks.update(record.job.moves[at].filled_blocks)
        if load.is_planned and not load.jobs:
            self._end(load, now)
        return not load.is_left

    def _end(self, load: Load, now: float) -> None:
        assert load.id is not None
        del self._under_way[load.id]
        self.gpu_loads.end(load.id)
        if load.sent_s is not None and load.keys and not load.failed:
            self._threshold.loaded(load.blocks.slowest, now - load.sent_s)
        if not load.is_left:
            self._end_of_request(load, now)

    def _end_of_request(self, load: Load, now: float) -> None:
        request = load.request
        request.loading = False
        load_s = None if load.sent_s is None else max(0.0, now - load.sent_s)
        if load.is_void:
            blocks = load.blocks
            load.failed = list(zip(blocks.groups, blocks.positions, strict=True))
        first_failed = min((position for _, position in load.failed), default=None)
        self._hits.loaded(request, load.blocks, first_failed, load_s)
        end_tokens = request.load_end_tokens
        for group, position in load.failed:
            failed_tokens = position * self._geometry.groups[group].block_tokens
            end_tokens = min(end_tokens, failed_tokens)
            request.limit_loads(failed_tokens)
        request.loaded = (request.load_start_tokens, max(request.load_start_tokens, end_tokens))
