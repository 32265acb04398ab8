# SPDX-License-Identifier: Apache-2.0
"""What of a request's prefix can be loaded, whether it is worth it, and the jobs that load it.

A load takes its time however little it brings, and in that time the engine computes tokens. With
``min_load_tokens: "auto"`` the threshold is learnt, for the tier that the slowest block of a hit
comes from:

    least tokens = tokens computed per second x seconds of the quickest recent load from that tier

rounded down to whole blocks, and at most ``MOST_BLOCKS`` of them. Until both are known every hit is
loaded, and one request in ``TRIED_ANYWAY`` has its short hit loaded all the same, so that what was
learnt is tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

from kvdisk.blocks import BlockKey, JobId, Slot, Tier
from kvdisk.manager.catalog import ABSENT, NONE, READY
from kvdisk.manager.demand import Demand
from kvdisk.manager.hits import HitCounts
from kvdisk.manager.jobs import JobRecord, MoveDetail
from kvdisk.manager.lookup import Lookups, first_needed
from kvdisk.manager.parts import HasParts, Parts
from kvdisk.manager.remote import Hints
from kvdisk.manager.requests import Asked, RequestState
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import Job, JobKind, Move

_LOAD = JobKind.LOAD

MOST_BLOCKS = 4
TRIED_ANYWAY = 16
LEAST_STEP_TOKENS = 256
"""Steps of fewer tokens say how fast the engine decodes, not how fast it computes a prompt."""
LONGEST_STEP_S = 5.0
"""What takes longer is a pause between steps."""
_SMOOTHING = 1 / 8
"""Weight of a new observation."""
_READY = bytes([READY])


class LoadThreshold:
    """How long a hit must be to be worth a load.

    ``fixed_tokens``: given by the user; None: learn. ``step_tokens``: those of the largest block.
    ``most_tokens``: a hit of so many is always loaded.
    """

    def __init__(self, fixed_tokens: int | None, step_tokens: int) -> None:
        self.most_tokens = MOST_BLOCKS * step_tokens if fixed_tokens is None else fixed_tokens
        self._is_fixed = fixed_tokens is not None
        self._step_tokens = step_tokens
        self.rate = 0.0
        """Tokens computed per second; 0: not known."""
        self._seconds: dict[Tier, float] = {}
        self._last_step: tuple[float, int] | None = None

    def is_worth(self, tokens: int, tier: Tier, arrival: int) -> bool:
        """Whether to load a hit. ``tier``: the slowest that it comes from; ``arrival``: the
        request's number."""
        return tokens >= self.least_tokens(tier) or (not self._is_fixed and arrival % TRIED_ANYWAY == 0)

    def least_tokens(self, tier: Tier) -> int:
        """Return the shortest hit that is loaded from a tier."""
        if self._is_fixed:
            return self.most_tokens
        blocks = int(self.rate * self._seconds.get(tier, 0.0) / self._step_tokens)
        return min(blocks * self._step_tokens, self.most_tokens)

    def stepped(self, now: float, tokens: int) -> None:
        """Learn the engine's rate: a step begins that computes so many tokens."""
        last, self._last_step = self._last_step, (now, tokens)
        if last is not None and last[1] >= LEAST_STEP_TOKENS and 0 < now - last[0] <= LONGEST_STEP_S:
            rate = last[1] / (now - last[0])
            self.rate += (rate - self.rate) * (_SMOOTHING if self.rate else 1.0)

    def settled(self, record: JobRecord, now: float) -> None:
        """Learn the time of a settled load, if it brought all that it was sent for."""
        if record.sent_s is None or record.failed or not record.details:
            return
        tier = max({detail.source for detail in record.details if detail.source is not None})
        seconds = now - record.sent_s
        known = self._seconds.get(tier, seconds)
        # At once down, and slowly up: the quickest of the last loads or so.
        self._seconds[tier] = min(seconds, known + (seconds - known) * _SMOOTHING)


class GpuLoads:
    """Blocks that loads are just bringing to the GPU, so that one load serves all who need them.

    vLLM: it has a loaded block in its prefix cache before it looks up any waiting request again. So
    whoever has waited for the load finds its blocks on the GPU. A block that two jobs load is the
    later one's. ``enabled``: whether the engine has a prefix cache. Without one nothing is noted,
    and so nobody waits.
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

    def end(self, job_id: JobId | None) -> None:
        """Forget a load that was settled, or whose blocks nobody will use. It may be forgotten
        already."""
        job = self._jobs.pop(job_id, None) if job_id is not None else None
        for move in job.moves if job is not None else ():
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
        """As ``Catalog.presences``: READY is what is on its way to the GPU."""
        return bytes(map(self._loaders.__contains__, keys)).replace(b"\1", _READY)


@dataclass(slots=True)
class Read:
    """A block to be read. ``source``: the tier whose copy is read; None: there is none.

    ``target``: where the read leaves a copy, in ``row``; None: nowhere. ``gpu_block``, ``group``,
    ``position``: of a load.
    """

    key: BlockKey
    parent: BlockKey | None
    gpu_block: int = -1
    group: int = -1
    position: int = -1
    row: int = NONE
    generation: int = 0
    source: Tier | None = None
    target: Tier | None = None
    slots: dict[Tier, Slot] = field(default_factory=dict)

    @property
    def move(self) -> Move:
        """What the workers are told."""
        return Move(self.key, self.generation, self.gpu_block, self.slots, self.parent)

    @property
    def detail(self) -> MoveDetail:
        """What is to be finished when it is settled."""
        return MoveDetail(self.row, self.group, self.position, self.source, self.target)


class Reader(HasParts):
    """Takes hold of what is read, and begins the copies in memory that reads leave."""

    def __init__(self, parts: Parts, tiers: Tiers, hints: Hints) -> None:
        super().__init__(parts)
        self._landing = tiers.landing_tier
        self._hints = hints

    def pin_sources(self, reads: Sequence[Read]) -> None:
        """Find and pin the fastest copy of each block: in a tier, or another's."""
        catalog = self._catalog
        found: dict[Tier, list[Read]] = {}
        for read, row in zip(reads, catalog.find_all([read.key for read in reads]), strict=True):
            source = catalog.readable_tier(row)
            if source is not None:
                read.row, read.source, read.generation = row, source, catalog.generations[row]
                read.parent = catalog.parent(row)
                found.setdefault(source, []).append(read)
            elif (taken := self._hints.take(read.key)) is not None:
                read.source, slot, read.generation = taken
                read.slots[read.source] = slot
        for source, alike in found.items():
            rows = [read.row for read in alike]
            catalog.pin(rows, source)
            for read, slot in zip(alike, catalog.columns(source).slots(rows), strict=True):
                read.slots[source] = slot

    def land(self, reads: Sequence[Read], slots: Sequence[Slot]) -> None:
        """Begin a copy in memory of what each of some reads brings."""
        catalog, landing = self._catalog, self._landing
        assert landing is not None
        for read, slot in zip(reads, slots, strict=True):
            if read.row < 0:  # another's
                (read.row,) = catalog.add((read.key,), (read.generation,), self._state.epoch, (read.parent,))
                catalog.stored_s[read.row] = self._hints.neighbours.stored_s(read.key)
            read.target, read.slots[landing.tier] = landing.tier, slot
        catalog.begin([read.row for read in reads], landing.tier, slots)
        self._state.landing.update([read.key for read in reads])


class LoadPlanner(HasParts):
    """Answers lookups and plans loads."""

    def __init__(
        self,
        parts: Parts,
        tiers: Tiers,
        hits: HitCounts,
        demand: Demand,
        hints: Hints,
        gpu_loads: GpuLoads,
        threshold: LoadThreshold,
    ) -> None:
        super().__init__(parts)
        self._tiers = tiers
        self._hits = hits
        self._demand = demand
        self._hints = hints
        self._gpu_loads = gpu_loads
        self._threshold = threshold
        self._reader = Reader(parts, tiers, hints)

    def lookup(self, request: RequestState, local_tokens: int, total_tokens: int, now: float) -> int | None:
        """See ``TierManager.lookup``."""
        if request.limits.most_load_tokens == 0:
            request.asked = Asked(local_tokens, local_tokens, 0, total_tokens, now=now)
            return 0
        request.update_keys()
        if request.load_limit_tokens is not None and request.asked is not None and request.asked.promised_tokens:
            # vLLM: for a load it reserves what loads before it still need. It counts the load that
            # has failed among these, so that there may never be room for another one.
            request.limit_loads(0)
        limit = total_tokens - 1
        if request.load_limit_tokens is not None:
            limit = min(limit, request.load_limit_tokens)
        if request.limits.most_load_tokens is not None:
            limit = min(limit, local_tokens + request.limits.most_load_tokens)
        self._hints.refresh(request, now)
        may_hit = limit // self._geometry.step_tokens * self._geometry.step_tokens > local_tokens
        if may_hit and not request.gave_up_waiting and self._hints.is_asking(request) and self._may_wait(request, now):
            self._hits.waits(request, now)  # at once: many may wait, and with each answer a hit may be longer
            return None
        hints = self._hints.usable
        hit, coming = request.lookups.hits(
            self._catalog,
            self._geometry,
            request.keys,
            local_tokens,
            limit,
            hints,
            self._hints.changes if hints else -1,
        )
        loader = self._loader_of(request, local_tokens, hit, now)
        if loader is not None:
            request.await_load(loader)
        if not request.gave_up_waiting:
            being_read = self._is_being_read(request, local_tokens, hit)
            comes = coming > hit or being_read or loader is not None
            if comes and self._may_wait(request, now):
                self._state.read_awaited |= being_read and self._transfers.count(JobKind.PROMOTE) > 0
                self._hits.waits(request, now)
                return None
        tokens = hit - local_tokens
        short = False
        if tokens <= 0 or not self._is_worth(request, local_tokens, hit):
            short = tokens > 0
            self._stats.add("short_hits", int(short))
            tokens = 0
        else:
            request.wait_started_s = None
        request.asked = Asked(local_tokens, limit, tokens, total_tokens, short, now)
        self._hits.waited(request, now)
        return tokens

    def _needed_keys(self, request: RequestState, local_tokens: int, hit: int) -> list[list[BlockKey]]:
        """Return, group by group, the keys of what a hit needs from outside the GPU."""
        needed = []
        for group in self._geometry.groups:
            first = first_needed(group, local_tokens, hit)
            needed.append(request.keys[group.group][first : hit // group.block_tokens])
        return needed

    def _is_being_read(self, request: RequestState, local_tokens: int, hit: int) -> bool:
        """Whether a block of a hit is just being read into memory: once is enough."""
        landing = self._state.landing
        if not landing or hit <= local_tokens:
            return False
        return not all(map(landing.isdisjoint, self._needed_keys(request, local_tokens, hit)))

    def _loader_of(self, request: RequestState, local_tokens: int, hit: int, now: float) -> JobId | None:
        """Return the load of another request after which the GPU will have a part of a hit, if
        there is one.

        It is looked for once for each load that is waited for, and again when the time for it is
        over.
        """
        loads, awaited = self._gpu_loads, request.awaited_load
        if not loads.any or hit <= local_tokens:
            return None
        if loads.is_out(awaited) and not request.gave_up_waiting and not self._is_over(request, now):
            return awaited
        end = Lookups().find(loads.presences, self._geometry, request.keys, local_tokens, hit).ready
        if end <= local_tokens or not self._is_worth(request, local_tokens, end):
            return None
        return loads.loader_of(next(keys[0] for keys in self._needed_keys(request, local_tokens, end) if keys))

    def _is_worth(self, request: RequestState, local_tokens: int, hit: int) -> bool:
        """Whether a hit is long enough to be worth its load."""
        if hit - local_tokens >= self._threshold.most_tokens:
            return True
        slowest = self._tiers.first.tier
        for keys in self._needed_keys(request, local_tokens, hit):
            for key, row in zip(keys, self._catalog.find_all(keys), strict=True):
                slowest = max(slowest, self._catalog.readable_tier(row) or self._hints.tier_of(key))
        return self._threshold.is_worth(hit - local_tokens, slowest, request.arrival)

    def _may_wait(self, request: RequestState, now: float) -> bool:
        if request.wait_started_s is None:
            request.wait_started_s = now
        if not self._is_over(request, now):
            return True
        request.gave_up_waiting = True
        self._stats.add("wait_timeouts")
        return False

    def _is_over(self, request: RequestState, now: float) -> bool:
        started_s = request.wait_started_s
        return started_s is not None and now - started_s >= self._config.lookup_wait_s

    def plan(
        self, request: RequestState, local_tokens: int, external_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """See ``TierManager.plan_load``."""
        end_tokens = local_tokens + external_tokens
        reads: list[Read] = []
        for group in self._geometry.groups:
            keys, gpu_blocks = request.keys[group.group], block_ids[group.group]
            self._demand.reach(request, group.group, min(1, end_tokens // group.block_tokens))
            # vLLM: it caches each block that it gave under its hash. So each is loaded or fails,
            # even where ``lookup`` needed less of a window: else nobody would have written it.
            first, stop = local_tokens // group.block_tokens, end_tokens // group.block_tokens
            needed = [at for at, block in enumerate(gpu_blocks[first:stop], first) if block]
            reads += [
                Read(key, parent, gpu_blocks[at], group.group, at)
                for at, key, parent in zip(needed, keys.of(needed), keys.before(needed), strict=True)
            ]
        self._reader.pin_sources(reads)
        self._land(reads)
        moves, details = [read.move for read in reads], [read.detail for read in reads]
        request.loading = True
        request.load_start_tokens, request.load_end_tokens = local_tokens, end_tokens
        request.wait_started_s = None
        self._state.taken_blocks += len(reads)
        self._hits.scheduled(request, external_tokens, details)
        record = self._transfers.add(
            _LOAD, moves, details, epoch=self._state.epoch, request_id=request.request_id, arrival=request.arrival
        )
        request.load_job = record.job.id
        self._gpu_loads.begin(record.job)

    def _land(self, reads: Sequence[Read]) -> None:
        """Begin copies in memory of blocks that are read from elsewhere, where admission and room
        allow.

        The rest goes through staging.
        """
        landing = self._tiers.landing_tier
        if landing is None:
            return
        # In the order of the prompt: where room is short, as much is kept of every group.
        vacant = sorted(
            (read for read in reads if read.source not in {None, landing.tier} and self._is_vacant(read, landing.tier)),
            key=lambda read: (read.position + 1) * self._geometry.groups[read.group].block_tokens,
        )
        by_class: dict[int, list[Read]] = {}
        for read in compress(vacant, landing.admits([read.key for read in vacant], [read.parent for read in vacant])):
            by_class.setdefault(self._geometry.size_classes[read.group], []).append(read)
        for size_class, alike in by_class.items():
            slots = landing.allocate(size_class, len(alike))
            self._reader.land(alike[: len(slots)], slots)

    def _is_vacant(self, read: Read, tier: Tier) -> bool:
        """Whether a read may begin a copy: not where this engine is just writing or dropping
        one."""
        if read.row >= 0:
            return self._catalog.state(read.row, tier) == ABSENT
        return self._catalog.find(read.key) < 0
