# SPDX-License-Identifier: Apache-2.0
"""Which blocks are being read just now, and which are read ahead from NVMe. Scheduler thread only.

A request that waits in the engine's queue has its NVMe blocks promoted, so that the queue hides the
disk. A promoted copy is an ordinary CPU copy: once evicted, its request reads the block from NVMe.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from itertools import islice

from kvdisk.blocks import BlockKey, JobId, Slot, Tier, group_of
from kvdisk.manager.admission import Demand
from kvdisk.manager.catalog import ABSENT, READY
from kvdisk.manager.jobs import MoveDetail
from kvdisk.manager.lookup import Reachable, first_needed, longest_hit
from kvdisk.manager.neighbours import NeighbourCopies
from kvdisk.manager.parts import Parts
from kvdisk.manager.requests import RequestState
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import Job, JobKind, Move

_READY = bytes([READY])


class GpuLoads:
    """Blocks that loads are just bringing to the GPU, so that one load serves all who need them.

    vLLM: it has a loaded block in its prefix cache before it looks up any waiting request again. So
    whoever has waited for the load finds its blocks on the GPU. A block that two jobs load is the
    later one's.

    ``enabled``: whether the engine has a prefix cache. Without one nothing is noted, and so nobody
    waits.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._loaders: dict[BlockKey, JobId] = {}
        self._jobs: dict[JobId, Job] = {}

    def begin(self, job: Job) -> None:
        """Note a planned load."""
        if self._enabled:
            self._jobs[job.id] = job
            self._loaders.update(dict.fromkeys([move.key for move in job.moves], job.id))

    def end(self, job_id: JobId) -> None:
        """Forget a load that was settled, or whose blocks nobody will use. It may be forgotten
        already."""
        job = self._jobs.pop(job_id, None)
        if job is not None:
            for move in job.moves:
                if self._loaders.get(move.key) == job_id:
                    del self._loaders[move.key]

    def clear(self) -> None:
        """For a new epoch: no load on its way brings anything."""
        self._jobs.clear()
        self._loaders.clear()

    @property
    def any(self) -> bool:
        """Whether any load is on its way."""
        return bool(self._jobs)

    def is_out(self, job_id: JobId | None) -> bool:
        """Whether a load is on its way."""
        return job_id in self._jobs

    def loader_of(self, key: BlockKey) -> JobId | None:
        """Return the job that loads a block; None: none does."""
        return self._loaders.get(key)

    def presences(self, keys: Sequence[BlockKey]) -> bytes:
        """Return, as ``Catalog.presences``: READY for what is on its way to the GPU."""
        return bytes(map(self._loaders.__contains__, keys)).replace(b"\1", _READY)


MAX_PROMOTE_JOBS = 4
"""Promotions queued or out; the worker reads for them only where loads leave half of its reads."""
MAX_PROMOTE_MOVES = 64
PREFETCH_DIVISOR = 2
"""Of each size class's CPU slots, one in so many may hold, or get, blocks read ahead for requests
that still wait."""
MOST_EXAMINED = 4
"""Requests whose blocks are looked for in one step: bounds a step."""
MOST_SEEN = 16
"""Requests at the head of the queue that one step goes over; some may wait for an answer of the
neighbours."""


class PendingReads:
    """Blocks whose bytes are just being read into a CPU slot, with the row whose copy is written:
    once is enough.

    ``to_gpu``: those that loads bring to the GPU, from wherever.
    """

    def __init__(self, to_gpu: GpuLoads) -> None:
        self.to_gpu = to_gpu
        self._rows: dict[JobKind, dict[BlockKey, int]] = {JobKind.LOAD: {}, JobKind.PROMOTE: {}}

    def begin(self, kind: JobKind, keys: Sequence[BlockKey], rows: Sequence[int]) -> None:
        """Note that a job reads blocks into the CPU slots of their rows."""
        self._rows[kind].update(zip(keys, rows, strict=True))

    def end(self, kind: JobKind, keys: Sequence[BlockKey], rows: Sequence[int]) -> None:
        """Forget the blocks of a settled job. After a reset a key may stand for another row."""
        rows_of = self._rows[kind]
        for key, row in zip(keys, rows, strict=True):
            if rows_of.get(key) == row:
                del rows_of[key]

    def reader_of(self, keys: Collection[BlockKey]) -> JobKind | None:
        """Return what kind of job reads one of these blocks, PROMOTE before LOAD; None: none is
        read."""
        for kind in (JobKind.PROMOTE, JobKind.LOAD):
            if self._rows[kind] and not self._rows[kind].keys().isdisjoint(keys):
                return kind
        return None

    @property
    def any(self) -> bool:
        """Whether any block is being read."""
        return any(self._rows.values())

    def forget_all(self) -> None:
        """For a new epoch: nobody finds these blocks any more."""
        self.to_gpu.clear()
        for rows in self._rows.values():
            rows.clear()


_Wanted = deque[tuple[BlockKey, BlockKey | None]]
"""A waiting request's blocks to be read ahead, with their parents, in the order of its prompt."""


class Promotions:
    """Reads ahead for the requests that wait, in order of arrival. Does nothing without a slower
    tier, or if told so.

    Each block is read ahead once for a request's stay in the queue: that bounds the reads.
    """

    def __init__(
        self, parts: Parts, tiers: Tiers, demand: Demand, neighbours: NeighbourCopies, reads: PendingReads
    ) -> None:
        self._geometry = parts.geometry
        self._context = parts.context
        self._catalog = parts.catalog
        self._transfers = parts.transfers
        self._state = parts.state
        self._tiers = tiers
        landing = tiers.landing
        self._landing = landing if parts.config.prefetch and len(tiers) > 1 else None
        self._demand = demand
        self._neighbours = neighbours
        self._reads = reads
        self._waiting: OrderedDict[RequestState, _Wanted | None] = OrderedDict()
        """Those with something left to be read ahead, or (None) not looked at yet; in order of
        arrival."""
        self._ahead: dict[str, list[int]] = {}
        """By waiting request: slots by size class that were taken for it."""
        self._taken = [0] * len(parts.geometry.slot_sizes)
        self._limits = [total // PREFETCH_DIVISOR for total in landing.pool.total] if landing is not None else []

    # -- the queue -----------------------------------------------------------------------------

    def enqueue(self, request: RequestState, *, first: bool = False) -> None:
        """Read ahead for a request that waits; with ``first`` before all others."""
        if self._landing is not None:
            self.leave(request)
            self._waiting[request] = None
            self._waiting.move_to_end(request, last=not first)

    def leave(self, request: RequestState) -> None:
        """Read nothing more ahead for a request. What was read ahead for it is left to the tier."""
        self._waiting.pop(request, None)
        for size_class, count in enumerate(self._ahead.pop(request.request_id, ())):
            self._taken[size_class] -= count

    def reset(self) -> None:
        """Forget what was read ahead, which is gone with the weights, and look for it anew."""
        self._waiting = OrderedDict.fromkeys(self._waiting)
        self._ahead.clear()
        self._taken = [0] * len(self._taken)
        self._reads.forget_all()

    # -- steps ---------------------------------------------------------------------------------

    def plan(self) -> None:
        """Plan promotions for the requests that wait, as far as the bounds allow.

        Plans nothing while a scheduled request waits for a prefetch, to let that finish first.
        """
        awaited, self._state.prefetch_awaited = self._state.prefetch_awaited, False
        if self._landing is None or awaited or not self._waiting:
            return
        if not any(space.status.is_open for space in self._tiers if space is not self._landing):
            return
        examined = 0
        for request, wanted in list(islice(self._waiting.items(), MOST_SEEN)):
            if wanted is None:
                if self._neighbours.is_asking(request):
                    continue
                if examined >= MOST_EXAMINED:
                    return
                examined += 1
                wanted = self._waiting[request] = self._find_wanted(request)  # noqa: PLW2901
            while wanted:
                if self._transfers.count(JobKind.PROMOTE) >= MAX_PROMOTE_JOBS:
                    return
                if not self._plan_job(request.request_id, wanted):
                    return  # for want of room: those behind it would take what comes free
            del self._waiting[request]

    def _find_wanted(self, request: RequestState) -> _Wanted:
        """Return what of a request's hit is to be read ahead; what the CPU tier has of it counts as
        used."""
        request.update_keys(self._geometry)
        known = max(request.prompt_tokens, len(request.hashes) * self._geometry.hash_tokens)
        limit = known - 1 if request.load_limit_tokens is None else min(known - 1, request.load_limit_tokens)
        if request.most_load_tokens is not None:
            limit = min(limit, self._local_tokens(request) + request.most_load_tokens)
        catalog, source = self._catalog, Reachable(self._catalog, self._neighbours.usable_hints)
        # To the end of what is there or on its way: behind a block that is just being stored there
        # may be others.
        hit = longest_hit(source, self._geometry, request.keys, 0, limit, coming=True)
        found: list[tuple[int, BlockKey, BlockKey | None]] = []
        held: list[int] = []
        for group in self._geometry.groups:
            keys = request.keys[group.group]
            for position in range(first_needed(group, 0, hit), hit // group.block_tokens):
                row = catalog.find(keys[position])
                if self._landing is not None and row >= 0 and catalog.state(row, self._landing.tier) == READY:
                    held.append(row)
                elif self._is_wanted(keys[position]):
                    parent = keys[position - 1] if position else None
                    found.append((position * group.block_tokens, keys[position], parent))
        if found and self._landing is not None:
            self._landing.access(held[::-1])  # or reading ahead would make room by letting just these leave
        found.sort(key=lambda block: block[0])
        return deque((key, parent) for _, key, parent in found)

    def _is_wanted(self, key: BlockKey) -> bool:
        """Whether a drive has a block that neither the GPU nor memory has or gets."""
        catalog, row = self._catalog, self._catalog.find(key)
        assert self._landing is not None
        if self._reads.to_gpu.loader_of(key) is not None:
            return False
        if row >= 0 and (catalog.state(row, self._landing.tier) != ABSENT or catalog.readable_tier(row) is None):
            return False
        return (row >= 0 or key in self._neighbours.usable_hints) and not self._context.is_cached(key)

    def _local_tokens(self, request: RequestState) -> int:
        """Return how much of a request's prompt the GPU has now, by the groups that need all of
        it."""
        found = [0]
        for group in self._geometry.groups:
            if group.window_tokens is None:
                keys = request.keys[group.group]
                blocks = next((at for at, key in enumerate(keys) if not self._context.is_cached(key)), len(keys))
                found.append(blocks * group.block_tokens)
        return min(found[1:] or found)

    def _plan_job(self, request_id: str, wanted: _Wanted) -> bool:
        """Plan one job of a request's first wanted blocks; False where there is no room for any."""
        assert self._landing is not None
        picked: list[tuple[BlockKey, BlockKey | None]] = []
        while wanted and len(picked) < MAX_PROMOTE_MOVES:
            key, parent = wanted.popleft()
            if self._is_wanted(key):
                self._demand.count_demand((key,), request_id)
                if self._landing.admission.admits((key,))[0]:
                    picked.append((key, parent))
        slots = self._take_slots(request_id, [key for key, _ in picked])
        made: list[tuple[Move, MoveDetail]] = []
        left: list[tuple[BlockKey, BlockKey | None]] = []
        for key, parent in picked:
            of_class = slots[self._geometry.size_classes[group_of(key)]]
            if of_class:
                made.append(self._make_move(key, parent, of_class.popleft(), self._landing.tier))
            else:
                left.append((key, parent))
        wanted.extendleft(reversed(left))
        if made:
            moves, details = map(list, zip(*made, strict=True))
            self._reads.begin(JobKind.PROMOTE, [move.key for move in moves], [detail.row for detail in details])
            self._transfers.add(JobKind.PROMOTE, moves, details, epoch=self._state.epoch, request_id=request_id)
        return bool(made) or not left

    def _take_slots(self, request_id: str, keys: list[BlockKey]) -> list[deque[Slot]]:
        """Take CPU slots for blocks, by size class, within the share of what may be read ahead."""
        assert self._landing is not None
        wanted = Counter(self._geometry.size_classes[group_of(key)] for key in keys)
        ahead = self._ahead.setdefault(request_id, [0] * len(self._taken))
        slots: list[deque[Slot]] = []
        for size_class, limit in enumerate(self._limits):
            count = min(wanted[size_class], limit - self._taken[size_class])
            taken = self._landing.allocate(size_class, count, keep_queued=True) if count > 0 else []
            ahead[size_class] += len(taken)
            self._taken[size_class] += len(taken)
            slots.append(deque(taken))
        return slots

    def _make_move(self, key: BlockKey, parent: BlockKey | None, slot: Slot, target: Tier) -> tuple[Move, MoveDetail]:
        """Pin a block's copy on a drive and begin one in memory."""
        catalog = self._catalog
        row = catalog.find(key)
        source = catalog.readable_tier(row)
        if source is not None:
            catalog.pin((row,), source)
            read_slot, parent = catalog.slot(row, source), catalog.parent(row)
        else:
            taken = self._neighbours.take(key)
            assert taken is not None
            source, read_slot, generation = taken
            row = catalog.add(key, generation, self._state.epoch, parent)
        catalog.begin((row,), target, (slot,))
        move = Move(key, catalog.generations[row], slots={source: read_slot, target: slot}, parent=parent)
        return move, MoveDetail(row, source=source, target=target)
