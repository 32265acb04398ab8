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
from kvdisk.manager.admission import Demand
from kvdisk.manager.catalog import ABSENT, NONE, TIERS
from kvdisk.manager.jobs import JobRecord, MoveDetail
from kvdisk.manager.lookup import first_needed, longest_hit
from kvdisk.manager.neighbours import NeighbourCopies
from kvdisk.manager.parts import Parts
from kvdisk.manager.prefetch import PendingReads
from kvdisk.manager.requests import HitCounts, RequestState
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
_SLACK = 0.5
"""Blocks by which the estimate must leave the range of the threshold in use before that changes."""


class LoadThreshold:
    """How long a hit must be to be worth a load.

    ``fixed_tokens``: given by the user; None: learn. ``step_tokens``: those of the largest block.
    """

    def __init__(self, fixed_tokens: int | None, step_tokens: int) -> None:
        self._fixed_tokens = fixed_tokens
        self._step_tokens = step_tokens
        self._rate: float | None = None
        self._seconds: dict[Tier, float] = {}
        self._least: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self._last_step: tuple[float, int] | None = None
        self._sent_s: dict[JobId, float] = {}

    def may_refuse(self, tokens: int) -> bool:
        """Whether a hit is so short that ``is_worth`` has to be asked."""
        bound = MOST_BLOCKS * self._step_tokens if self._fixed_tokens is None else self._fixed_tokens
        return tokens < bound

    def is_worth(self, tokens: int, tier: Tier, arrival: int) -> bool:
        """Whether to load a hit. ``tier``: the slowest that it comes from; ``arrival``: the
        request's number."""
        if self._fixed_tokens is not None:
            return tokens >= self._fixed_tokens
        return tokens >= self._least[tier] or arrival % TRIED_ANYWAY == 0

    def least_tokens(self, tier: Tier) -> int:
        """Return the shortest hit that is loaded from a tier."""
        return self._least[tier] if self._fixed_tokens is None else self._fixed_tokens

    def stepped(self, now: float, tokens: int, jobs: tuple[Job, ...]) -> None:
        """Learn the engine's rate: a step begins that computes so many tokens, and sends these jobs
        out."""
        if self._fixed_tokens is not None:
            return
        last, self._last_step = self._last_step, (now, tokens)
        if last is not None and last[1] >= LEAST_STEP_TOKENS and 0 < now - last[0] <= LONGEST_STEP_S:
            rate = last[1] / (now - last[0])
            self._rate = rate if self._rate is None else self._rate + (rate - self._rate) * _SMOOTHING
            self._update()
        for job in jobs:
            if job.kind is _LOAD:
                self._sent_s[job.id] = now

    def settled(self, record: JobRecord, now: float) -> None:
        """Learn the time of a settled load, if it brought all that it was sent for."""
        sent_s = self._sent_s.pop(record.job.id, None)
        if sent_s is None or record.failed or not record.job.moves:
            return
        tier = max(detail.source for detail in record.details if detail.source is not None)
        seconds, known = now - sent_s, self._seconds.get(tier)
        # At once down, and slowly up: the quickest of the last loads or so.
        quicker = known is None or seconds <= known
        self._seconds[tier] = seconds if known is None or quicker else known + (seconds - known) * _SMOOTHING
        self._update()

    def _update(self) -> None:
        """Take over what the estimates say, where they have left the range of the thresholds in
        use."""
        if self._rate is None:
            return
        for tier, seconds in self._seconds.items():
            blocks = min(self._rate * seconds / self._step_tokens, MOST_BLOCKS)
            current = self._least[tier] // self._step_tokens
            if not current - _SLACK <= blocks < current + 1 + _SLACK:
                self._least[tier] = int(blocks) * self._step_tokens


@dataclass(slots=True)
class _Block:
    """A block to be loaded. ``source``: the tier whose copy is read; None: there is none.

    ``target``: where the load leaves a copy, in ``row``; None: nowhere.
    """

    key: BlockKey
    parent: BlockKey | None
    group: int
    position: int
    gpu_block: int
    row: int = NONE
    generation: int = 0
    source: Tier | None = None
    target: Tier | None = None
    slots: dict[Tier, Slot] = field(default_factory=dict)


class LoadPlanner:
    """Answers lookups and plans loads."""

    def __init__(
        self,
        parts: Parts,
        tiers: Tiers,
        hits: HitCounts,
        demand: Demand,
        neighbours: NeighbourCopies,
        reads: PendingReads,
        threshold: LoadThreshold,
    ) -> None:
        self._config = parts.config
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._transfers = parts.transfers
        self._stats = parts.stats
        self._state = parts.state
        self._tiers = tiers
        self._hits = hits
        self._demand = demand
        self._neighbours = neighbours
        self._reads = reads
        self._threshold = threshold

    def lookup(self, request: RequestState, local_tokens: int, total_tokens: int, now: float) -> int | None:
        """See ``TierManager.lookup``."""
        if request.most_load_tokens == 0:
            return 0
        request.update_keys(self._geometry)
        limit = total_tokens - 1
        if request.load_limit_tokens is not None:
            limit = min(limit, request.load_limit_tokens)
        if request.most_load_tokens is not None:
            limit = min(limit, local_tokens + request.most_load_tokens)
        self._neighbours.refresh(request, now)
        hints = self._neighbours.usable_hints
        hit, coming = request.lookups.hits(
            self._catalog,
            self._geometry,
            request.keys,
            local_tokens,
            limit,
            hints,
            self._neighbours.changes if hints else -1,
        )
        loader = self._loader_of(request, local_tokens, hit, now)
        if loader is not None:
            request.await_load(loader)
        if not request.gave_up_waiting:
            step = self._geometry.step_tokens
            asking = coming < limit // step * step and self._neighbours.is_asking(request)
            reader = self._reader_of(request, local_tokens, hit)
            comes = coming > hit or asking or reader is not None or loader is not None
            if comes and self._may_wait(request, now):
                self._state.prefetch_awaited |= reader is JobKind.PROMOTE
                self._hits.waits(request, now)
                return None
        tokens = hit - local_tokens
        if tokens <= 0 or (self._threshold.may_refuse(tokens) and not self._is_worth(request, local_tokens, hit)):
            self._stats.add("short_hits", int(tokens > 0))
            tokens = 0
        else:
            request.wait_started_s = None
        request.asked = (local_tokens, limit, tokens)
        self._hits.waited(request, now)
        return tokens

    def _needed_keys(self, request: RequestState, local_tokens: int, hit: int) -> list[list[BlockKey]]:
        """Return, group by group, the keys of what a hit needs from outside the GPU."""
        needed = []
        for group in self._geometry.groups:
            first = first_needed(group, local_tokens, hit)
            needed.append(request.keys[group.group][first : hit // group.block_tokens])
        return needed

    def _reader_of(self, request: RequestState, local_tokens: int, hit: int) -> JobKind | None:
        """Return what kind of job is just reading a block of a hit into a CPU slot, where one
        is."""
        if not self._reads.any or hit <= local_tokens:
            return None
        readers = [self._reads.reader_of(keys) for keys in self._needed_keys(request, local_tokens, hit)]
        return JobKind.PROMOTE if JobKind.PROMOTE in readers else next(filter(None, readers), None)

    def _loader_of(self, request: RequestState, local_tokens: int, hit: int, now: float) -> JobId | None:
        """Return the load of another request after which the GPU will have a part of a hit, if
        there is one.

        It is looked for once for each load that is waited for, and again when the time for it is
        over.
        """
        loads, awaited = self._reads.to_gpu, request.awaited_load
        if not loads.any or hit <= local_tokens:
            return None
        if loads.is_out(awaited) and not request.gave_up_waiting and not self._is_over(request, now):
            return awaited
        end = longest_hit(loads, self._geometry, request.keys, local_tokens, hit, coming=False)
        saved = end - local_tokens
        if saved <= 0 or (self._threshold.may_refuse(saved) and not self._is_worth(request, local_tokens, end)):
            return None
        return loads.loader_of(next(keys[0] for keys in self._needed_keys(request, local_tokens, end) if keys))

    def _is_worth(self, request: RequestState, local_tokens: int, hit: int) -> bool:
        """Whether a short hit is worth its load."""
        slowest = self._tiers.first.tier
        for keys in self._needed_keys(request, local_tokens, hit):
            for row in self._catalog.find_all(keys):
                slowest = max(slowest, self._catalog.readable_tier(row) or self._neighbours.tier)
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
        blocks: list[_Block] = []
        for group in self._geometry.groups:
            # vLLM: it caches each block that it gave under its hash. So each is loaded or fails,
            # even where ``lookup`` needed less of a window: else nobody would have written it.
            positions = range(local_tokens // group.block_tokens, end_tokens // group.block_tokens)
            blocks += self._find_sources(request, group.group, positions, block_ids[group.group])
        self._land(blocks)
        moves = [Move(one.key, one.generation, one.gpu_block, one.slots, one.parent) for one in blocks]
        details = [MoveDetail(one.row, one.group, one.position, one.source, one.target) for one in blocks]
        request.loading = True
        request.wait_started_s = None
        self._hits.loaded(request, local_tokens, external_tokens, details)
        record = self._transfers.add(
            _LOAD, moves, details, epoch=self._state.epoch, request_id=request.request_id, arrival=request.arrival
        )
        request.load_job = record.job.id
        self._reads.to_gpu.begin(record.job)

    def _find_sources(
        self, request: RequestState, group: int, positions: range, gpu_blocks: Sequence[int]
    ) -> list[_Block]:
        """Find and pin the fastest copy of each block that the engine gave a place: in a tier, or a
        neighbour's."""
        catalog, keys, found = self._catalog, request.keys[group], []
        pinned: dict[Tier, list[int]] = {}
        for position, row in zip(positions, catalog.find_all(keys[positions.start : positions.stop]), strict=True):
            if not gpu_blocks[position]:
                continue
            key, source = keys[position], catalog.readable_tier(row)
            block = _Block(key, keys[position - 1] if position else None, group, position, gpu_blocks[position])
            found.append(block)
            taken = self._neighbours.take(key) if source is None else None
            if source is not None:
                pinned.setdefault(source, []).append(row)
                block.row, block.source, block.slots[source] = row, source, catalog.slot(row, source)
                block.generation, block.parent = catalog.generations[row], catalog.parent(row)
            elif taken is not None:
                block.source, slot, block.generation = taken
                block.slots[block.source] = slot
        for tier, rows in pinned.items():
            catalog.pin(rows, tier)
        self._demand.count_demand([block.key for block in found if block.source is not None], request.request_id)
        return found

    def _land(self, blocks: Sequence[_Block]) -> None:
        """Begin copies in memory of blocks that are read from elsewhere, where admission and room
        allow.

        The rest goes through staging.
        """
        landing, catalog = self._tiers.landing, self._catalog
        if landing is None:
            return
        vacant = []
        for block in blocks:
            if block.source is not None and block.source is not landing.tier:
                # A neighbour's block gets a row of its own, unless this engine is just writing or
                # dropping that block.
                row = block.row
                if catalog.state(row, landing.tier) == ABSENT if row >= 0 else catalog.find(block.key) < 0:
                    vacant.append(block)
        wanted: dict[int, list[_Block]] = {}
        for block in compress(vacant, landing.admission.admits([block.key for block in vacant])):
            wanted.setdefault(self._geometry.size_classes[block.group], []).append(block)
        for size_class, alike in wanted.items():
            slots = landing.allocate(size_class, len(alike))
            landed = alike[: len(slots)]
            for block, slot in zip(landed, slots, strict=True):
                if block.row < 0:
                    block.row = catalog.add(block.key, block.generation, self._state.epoch, block.parent)
                block.target, block.slots[landing.tier] = landing.tier, slot
            rows = [block.row for block in landed]
            catalog.begin(rows, landing.tier, slots)
            self._reads.begin(_LOAD, [block.key for block in landed], rows)
