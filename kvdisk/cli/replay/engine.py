# SPDX-License-Identifier: Apache-2.0
"""An engine without a model or bytes: it takes requests one by one through the ``TierManager``.

It looks a request up, loads its hit, computes the rest of its prompt in steps of ``STEP_TOKENS``,
and offers the blocks to the tiers in the step that computes them. Then it frees the GPU blocks, and
idle steps pass until the tiers have nothing left to do. Answers are not stored. Every job succeeds
in the step that plans it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, takewhile

from kvdisk.blocks import KEPT_TIERS, BlockKey, Tier, make_block_keys
from kvdisk.cli.replay.trace import Trace, TracedRequest
from kvdisk.manager.manager import TierManager
from kvdisk.messages import Job, JobKind, JobResult, Move, Plan, Report
from kvdisk.stats import REFUSALS

STEP_TOKENS = 8192
"""Tokens of a prompt that one step computes: vLLM's ``max_num_batched_tokens`` on a server."""
STEP_S = 0.05
_MOST_WAITING_STEPS = 64
"""The most steps of a request's generation in which its blocks wait for room; the number of steps
where the trace does not say how much is generated."""
_DONE, _NOTHING = JobResult(), Report()


class Engine:
    """See the module. ``pool`` must have room for the longest prompt twice.

    The clock is the trace's; a step takes ``STEP_S``. ``written``, ``read``: blocks written to and
    read from NVMe.
    """

    def __init__(self, trace: Trace, manager: TierManager, pool: GpuPool) -> None:
        self.manager = manager
        self.hit_tokens = dict.fromkeys((Tier.GPU, *KEPT_TIERS), 0)
        self.hit_blocks = dict.fromkeys((Tier.GPU, *KEPT_TIERS), 0)
        self.written = self.read = 0
        self._trace = trace
        self._pool = pool
        self._block_tokens = trace.block_tokens
        self._step_blocks = max(1, STEP_TOKENS // trace.block_tokens)
        self._now = 0.0

    def serve(self, number: int, request: TracedRequest) -> None:
        """Take a request from its arrival to its end, and let the tiers finish their work."""
        manager, pool = self.manager, self._pool
        self._now = max(self._now, request.time_s - self._trace.requests[0].time_s)
        request_id = f"request {number}"
        hashes, count = request.hashes, len(request.hashes)
        # A token follows the last block: one is always left to compute, and all blocks may hit.
        prompt_tokens = count * self._block_tokens
        manager.new_request(request_id, hashes, prompt_tokens + 1, self._now)
        keys = make_block_keys(hashes, 0) if pool.caches else []
        blocks = pool.hit(keys)
        local = len(blocks)
        self._count(request, Tier.GPU, 0, local)
        self._load(request_id, request, blocks, prompt_tokens + 1)
        done, refused = len(blocks), self._refused_for_room
        blocks += pool.take(count - done)
        pool.cache(keys[local:done], blocks[local:done])
        while True:
            step_blocks = min(count - done, self._step_blocks)
            done += step_blocks
            tokens = done * self._block_tokens
            if manager.note_scheduled(request_id, tokens):
                manager.plan_store(request_id, tokens, [blocks], self._now)
            self._step(step_blocks * self._block_tokens)
            if done == count:
                break
        pool.cache(keys, blocks)
        if self._refused_for_room > refused:
            self._wait_for_room(request_id, request, blocks)
        manager.request_finished(request_id)
        pool.free_blocks(reversed(blocks))
        self.settle()

    @property
    def _refused_for_room(self) -> int:
        counts = self.manager.stats.counts
        return sum(counts.get(f"refused_blocks.{why}", 0) for why in REFUSALS if why != "reuse")

    def settle(self) -> None:
        """Let idle steps pass until the tiers have nothing to do."""
        while self.manager.has_pending_work(self._now):
            self._step(idle=True)

    def _load(self, request_id: str, request: TracedRequest, blocks: list[int], total_tokens: int) -> None:
        """Load the hit behind ``blocks``, and add its GPU blocks to them."""
        manager, local = self.manager, len(blocks)
        local_tokens = local * self._block_tokens
        while (tokens := manager.lookup(request_id, local_tokens, total_tokens, self._now)) is None:
            self._step(idle=True)
        if not tokens:
            return
        blocks += self._pool.take(tokens // self._block_tokens)
        manager.plan_load(request_id, local_tokens, tokens, [[0] * local + blocks[local:]])
        loads: list[Job] = []
        while not loads or loads[-1].more:  # all are of this one: requests come one at a time
            loads += [job for job in self._step(idle=True).jobs if job.kind is JobKind.LOAD]
        start = local
        for tier, moves in groupby((move for job in loads for move in job.moves), key=_source_of):
            end = start + len(list(moves))
            self._count(request, tier, start, end)
            start = end

    def _count(self, request: TracedRequest, tier: Tier, first: int, last: int) -> None:
        """Count a prompt's blocks from ``first`` to before ``last`` as hits of a tier."""
        self.hit_blocks[tier] += last - first
        self.hit_tokens[tier] += self._trace.token_span(request, first, last)

    def _wait_for_room(self, request_id: str, request: TracedRequest, blocks: list[int]) -> None:
        """Run steps as if the request generated, while blocks of it wait for room."""
        tokens = len(blocks) * self._block_tokens
        for _ in range(min(request.output_tokens or _MOST_WAITING_STEPS, _MOST_WAITING_STEPS)):
            if not self.manager.note_scheduled(request_id, tokens):
                break
            self.manager.plan_store(request_id, tokens, [blocks], self._now)
            self._step()

    def _step(self, tokens: int = 0, *, idle: bool = False) -> Plan:
        """Run a step that computes so many tokens of a prompt."""
        plan = self.manager.take_plan(self._now, idle=idle, scheduled_tokens=tokens)
        for job in plan.jobs:
            on_drive = sum(Tier.NVME in move.slots for move in job.moves)
            if job.kind in {JobKind.STORE, JobKind.DEMOTE}:
                self.written += on_drive
            elif job.kind in {JobKind.LOAD, JobKind.PROMOTE}:
                self.read += on_drive
        self._now += STEP_S
        results = dict.fromkeys([job.id for job in plan.jobs], _DONE)
        report = Report(results, stats=_NOTHING.stats) if results else _NOTHING
        self.manager.settle(report, self._now, int(self._now))
        return plan


def _source_of(move: Move) -> Tier:
    return max(move.slots)  # a faster one keeps what is read on its way


# -- its GPU -----------------------------------------------------------------------------------


@dataclass(slots=True)
class GpuBlock:
    """``KVCacheBlockView`` of a block of this pool."""

    block_id: int
    ref_cnt: int = 0
    key: BlockKey | None = None


class GpuPool:
    """``SchedulerContext`` of this engine. ``block_count``: includes the null block, number 0. One
    thread makes all calls.

    ``caches``: whether a free block keeps its content until it is handed out; the block that was
    freed first is handed out first. ``step_blocks``: see ``SchedulerContext``.
    """

    def __init__(self, block_count: int, step_blocks: int, *, caches: bool) -> None:
        self.block_count = block_count
        self._blocks = [GpuBlock(number) for number in range(block_count)]
        self._free = dict.fromkeys(range(1, block_count))
        self.caches = caches
        self._cached: dict[BlockKey, int] = {}
        self.step_blocks = step_blocks
        self._watched: set[int] = set()
        self._reused: list[int] = []

    # -- SchedulerContext ----------------------------------------------------------------------

    @property
    def free_count(self) -> int:
        return len(self._free)

    def get_block(self, block_id: int) -> GpuBlock:
        return self._blocks[block_id]

    def watch(self, block_ids: Sequence[int]) -> None:
        self._watched.update(block_ids)

    def unwatch(self, block_ids: Iterable[int]) -> None:
        self._watched.difference_update(block_ids)

    def take_reused(self) -> Sequence[int]:
        reused, self._reused = self._reused, []
        return reused

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Give back one reference on each block, in this order."""
        blocks, free = self._blocks, self._free
        for block_id in block_ids:
            block = blocks[block_id]
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            if not block.ref_cnt:
                free[block_id] = None

    def is_cached(self, key: BlockKey) -> bool:
        return key in self._cached

    def find_block(self, key: BlockKey) -> int | None:
        """See ``SchedulerContext``."""
        return self._cached.get(key)

    def iter_free_blocks(self) -> Iterator[GpuBlock]:
        return map(self._blocks.__getitem__, self._free)

    # -- the engine's side ---------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """Hand out the first blocks of the free queue; their content is forgotten."""
        free, blocks, cached = self._free, self._blocks, self._cached
        assert count <= len(free), "the pool is sized for the longest prompt"
        taken = list(islice(free, count))
        if not self._watched.isdisjoint(taken):
            self._reused += self._watched.intersection(taken)
            self._watched.difference_update(taken)
        for block_id in taken:
            del free[block_id]
            block = blocks[block_id]
            block.ref_cnt = 1
            if block.key is not None:
                del cached[block.key]
                block.key = None
        return taken

    def hit(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the blocks of the longest prefix in the cache, and take a reference on each."""
        found = [self._cached[key] for key in takewhile(self._cached.__contains__, keys)]
        for block_id in found:
            block = self._blocks[block_id]
            if not block.ref_cnt:
                del self._free[block_id]
            block.ref_cnt += 1
        return found

    def cache(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> None:
        """Make computed or loaded blocks known to the cache, if there is one; keys that are known
        already keep their block."""
        if self.caches:
            for key, block_id in zip(keys, block_ids, strict=True):
                if self._cached.setdefault(key, block_id) == block_id:
                    self._blocks[block_id].key = key
