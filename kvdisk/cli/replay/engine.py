# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: it takes a trace's requests one by one through the ``TierManager``.

A request is looked up, what hits is loaded, the rest of its prompt is computed in steps of
``STEP_TOKENS``, and its blocks are offered to the tiers in the step that computes them. Then its
GPU blocks are freed, and idle steps pass until the tiers have nothing left to do. Answers are not
stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from kvdisk.blocks import Tier, make_block_keys
from kvdisk.cli.replay.pool import GpuPool
from kvdisk.cli.replay.trace import Trace, TracedRequest
from kvdisk.errors import KvdiskError
from kvdisk.manager.manager import TierManager
from kvdisk.messages import Job, JobKind, Move, Plan, Reason, Report

STEP_TOKENS = 8192
"""Tokens of a prompt that one step computes: vLLM's ``max_num_batched_tokens`` on a server."""
_MOST_WAITING_STEPS = 64
"""At most so many of the steps in which a request generates are taken to wait for room."""
_MOST_IDLE_STEPS = 10_000


class Backend(Protocol):
    """What runs the plans, the bytes of the GPU's blocks if there are any, and the clock."""

    @property
    def now(self) -> float:
        """The time in seconds. It never goes back."""

    def arrive(self, time_s: float) -> None:
        """A request comes at this time of the trace."""

    def run(self, plan: Plan, *, idle: bool) -> Report:
        """Run a step: hand the plan over, and return what has ended. ``idle``: it may wait."""

    def computed(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """These blocks are computed in this step."""

    def loaded(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """These blocks have been loaded."""


@dataclass(slots=True)
class Counts:
    """What an engine counts. ``written``, ``read``: blocks. ``waits_s``: of each load."""

    hit_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    hit_blocks: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    written: int = 0
    read: int = 0
    waits_s: list[float] = field(default_factory=list)


class Engine:
    """See the module. ``pool`` has room for the longest prompt twice."""

    def __init__(self, trace: Trace, manager: TierManager, pool: GpuPool, backend: Backend) -> None:
        self.manager = manager
        self.counts = Counts()
        self._trace = trace
        self._pool = pool
        self._backend = backend
        self._block_tokens = trace.block_tokens
        self._step_blocks = max(1, STEP_TOKENS // trace.block_tokens)
        self._load_job: Job | None = None
        self._loaded: tuple[Job, Mapping[int, Reason]] | None = None

    def serve(self, number: int, request: TracedRequest) -> None:
        """Take a request from its arrival to its end, and let the tiers finish their work."""
        manager, backend = self.manager, self._backend
        backend.arrive(request.time_s)
        request_id = f"request {number}"
        hashes, count = request.hashes, len(request.hashes)
        # A token follows the last block: one is always left to compute, and all blocks may hit.
        prompt_tokens = count * self._block_tokens
        manager.new_request(request_id, hashes, prompt_tokens + 1)
        keys = make_block_keys(hashes, 0) if self._pool.caches else []
        blocks = self._pool.hit(keys)
        local = len(blocks)
        self._count(request, Tier.GPU, 0, local)
        loaded = self._load(request_id, request, blocks, prompt_tokens + 1)
        blocks += self._pool.take(count - len(blocks))
        done, refused = local + loaded, self._refused_for_room
        self._pool.cache(keys[local:done], blocks[local:done])
        backend.loaded(hashes[local:done], blocks[local:done])
        backend.computed(hashes[done:], blocks[done:])
        while True:
            done = min(count, done + self._step_blocks)
            tokens = done * self._block_tokens
            if manager.may_offer(request_id, tokens):
                manager.plan_store(request_id, tokens, [blocks], backend.now)
            self._step()
            if done == count:
                break
        self._pool.cache(keys, blocks)
        if self._refused_for_room > refused:
            self._wait_for_room(request_id, request, blocks)
        manager.request_finished(request_id)
        self._pool.free_blocks(reversed(blocks))
        self.settle()

    @property
    def _refused_for_room(self) -> int:
        counts = self.manager.stats.counts
        return counts.get("refused_blocks.room", 0) + counts.get("refused_blocks.budget", 0)

    def settle(self) -> None:
        """Let idle steps pass until the tiers have nothing to do."""
        for _ in range(_MOST_IDLE_STEPS):
            if not self.manager.has_pending_work(self._backend.now):
                return
            self._step(idle=True)
        raise KvdiskError("the tiers do not come to rest: the drive does not answer")

    def _load(self, request_id: str, request: TracedRequest, blocks: list[int], total_tokens: int) -> int:
        """Load what hits behind ``blocks``; add its GPU blocks to them, and return how many."""
        manager, backend, local = self.manager, self._backend, len(blocks)
        local_tokens, came_s = local * self._block_tokens, backend.now
        while (tokens := manager.lookup(request_id, local_tokens, total_tokens, backend.now)) is None:
            self._step(idle=True)
        count = tokens // self._block_tokens
        if not count:
            return 0
        blocks += self._pool.take(count)
        manager.plan_load(request_id, local_tokens, tokens, [[0] * local + blocks[local:]])
        self._loaded = None
        self._step(idle=True)
        while self._loaded is None:
            self._step(idle=True)
        job, failed = self._loaded
        self.counts.waits_s.append(backend.now - came_s)
        first, start = 0, local
        # What failed is computed again, and so is what comes behind it: it is one prefix.
        good = min(failed, default=count)
        for tier, moves in groupby(job.moves[:good], key=_source_of):
            start += first
            first = len(list(moves))
            self._count(request, tier, start, start + first)
        return good

    def _count(self, request: TracedRequest, tier: Tier, first: int, last: int) -> None:
        """Count a prompt's blocks from ``first`` to before ``last`` as hits of a tier."""
        self.counts.hit_blocks[tier] += last - first
        self.counts.hit_tokens[tier] += self._trace.token_span(request, first, last)

    def _wait_for_room(self, request_id: str, request: TracedRequest, blocks: list[int]) -> None:
        """Take some of the steps in which a request generates, while blocks of it wait for room."""
        tokens = len(blocks) * self._block_tokens
        for _ in range(min(request.output_tokens, _MOST_WAITING_STEPS)):
            if not self.manager.may_offer(request_id, tokens):
                break
            self.manager.plan_store(request_id, tokens, [blocks], self._backend.now)
            self._step()

    def _step(self, *, idle: bool = False) -> None:
        manager, backend = self.manager, self._backend
        plan = manager.take_plan(backend.now, idle=idle)
        for job in plan.jobs:
            if job.kind is JobKind.LOAD:
                self._load_job = job  # there is one: requests come one at a time
            self._count_moves(job)
        report = backend.run(plan, idle=idle)
        load = self._load_job
        if load is not None and load.id in report.results:
            self._loaded, self._load_job = (load, report.results[load.id].failed), None
        manager.settle(report, backend.now, int(backend.now))

    def _count_moves(self, job: Job) -> None:
        if job.kind in {JobKind.STORE, JobKind.DEMOTE}:
            self.counts.written += len(job.moves) if Tier.NVME in job.moves[0].slots else 0
        elif job.kind in {JobKind.LOAD, JobKind.PROMOTE}:
            self.counts.read += sum(Tier.NVME in move.slots for move in job.moves)


def _source_of(move: Move) -> Tier:
    return Tier.NVME if Tier.NVME in move.slots else Tier.CPU
