# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: it takes the requests of a trace one by one through the ``TierManager``, as vLLM would.

A request is looked up, what hits is loaded, the rest of its prompt is computed in steps of ``STEP_TOKENS``, and its
blocks are offered to the tiers in the step that computes them. Then its GPU blocks are freed, and idle steps go by
until the tiers have nothing left to do. Answers are of no interest: nothing of them is stored by default.
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
"""Tokens of a prompt that one step computes, as vLLM's ``max_num_batched_tokens`` has it on a server."""
_MOST_WAITING_STEPS = 64
"""Steps, of those in which a request generates, that are gone through while blocks of it wait for room."""
_MOST_IDLE_STEPS = 10_000


class Clock(Protocol):
    """Seconds, never back. ``advance_to``: when a request comes; ``step``: a step of the engine has gone by."""

    @property
    def now(self) -> float:
        """The time."""

    def advance_to(self, time_s: float) -> None:
        """Go to a time, if it is not past."""

    def step(self) -> None:
        """Let a step's time pass."""


class Ranks(Protocol):
    """What runs plans. ``idle``: nothing is computed in this step, so it may wait a little for what is out."""

    def run(self, plan: Plan, *, idle: bool) -> Report:
        """Hand a plan over, and return what has ended by now."""


class Memory(Protocol):
    """The bytes of the GPU's blocks, where there are any."""

    def computed(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """These blocks are computed in this step."""

    def loaded(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """These blocks have been loaded."""


@dataclass(slots=True)
class Served:
    """Where the prompts' blocks came from: tokens and blocks by tier. ``waits_s``: each load's time, as measured."""

    tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    blocks: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    waits_s: list[float] = field(default_factory=list)


class Engine:
    """See the module. ``pool`` has room for the longest prompt twice. ``memory``: None: no bytes are moved."""

    def __init__(
        self,
        trace: Trace,
        manager: TierManager,
        pool: GpuPool,
        ranks: Ranks,
        clock: Clock,
        memory: Memory | None = None,
    ) -> None:
        self._trace = trace
        self._manager = manager
        self._pool = pool
        self._ranks = ranks
        self._clock = clock
        self._memory = memory
        self._block_tokens = trace.block_tokens
        self._step_blocks = max(1, STEP_TOKENS // trace.block_tokens)
        self._load_job: Job | None = None
        self._loaded: tuple[Job, Mapping[int, Reason]] | None = None
        self.served = Served()

    def serve(self, number: int, request: TracedRequest) -> None:
        """Take a request from its arrival to its end, and let the tiers finish what it has left them to do."""
        manager, clock = self._manager, self._clock
        clock.advance_to(request.time_s)
        request_id = f"request {number}"
        hashes, count = request.hashes, len(request.hashes)
        # A token follows the last block, so that all of them may hit: one is always left to compute.
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
        if self._memory is not None:
            self._memory.loaded(hashes[local:done], blocks[local:done])
            self._memory.computed(hashes[done:], blocks[done:])
        while True:
            done = min(count, done + self._step_blocks)
            tokens = done * self._block_tokens
            if manager.may_offer(request_id, tokens):
                manager.plan_store(request_id, tokens, [blocks], clock.now)
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
        counts = self._manager.stats.counts
        return counts.get("refused_blocks.room", 0) + counts.get("refused_blocks.budget", 0)

    def settle(self) -> None:
        """Let idle steps go by until the tiers have nothing to do."""
        for _ in range(_MOST_IDLE_STEPS):
            if not self._manager.has_pending_work(self._clock.now):
                return
            self._step(idle=True)
        raise KvdiskError("the tiers do not come to rest: the drive does not answer")

    def _load(self, request_id: str, request: TracedRequest, blocks: list[int], total_tokens: int) -> int:
        """Load what hits behind the first ``blocks``; add its GPU blocks to them, and return how many."""
        manager, clock, local = self._manager, self._clock, len(blocks)
        local_tokens, came_s = local * self._block_tokens, clock.now
        while (tokens := manager.lookup(request_id, local_tokens, total_tokens, clock.now)) is None:
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
        self.served.waits_s.append(clock.now - came_s)
        first, start = 0, local
        # What failed is computed again; what comes behind it, too, for it is one prefix.
        good = min(failed, default=count)
        for tier, moves in groupby(job.moves[:good], key=_source_of):
            start += first
            first = len(list(moves))
            self._count(request, tier, start, start + first)
        return good

    def _count(self, request: TracedRequest, tier: Tier, first: int, last: int) -> None:
        """Note that blocks of a prompt, from ``first`` to before ``last``, came from a tier."""
        self.served.blocks[tier] += last - first
        self.served.tokens[tier] += self._trace.token_span(request, first, last)

    def _wait_for_room(self, request_id: str, request: TracedRequest, blocks: list[int]) -> None:
        """Go through some of the steps in which a request generates, if blocks of it wait for room."""
        tokens = len(blocks) * self._block_tokens
        for _ in range(min(request.output_tokens, _MOST_WAITING_STEPS)):
            if not self._manager.may_offer(request_id, tokens):
                break
            self._manager.plan_store(request_id, tokens, [blocks], self._clock.now)
            self._step()

    def _step(self, *, idle: bool = False) -> None:
        manager, clock = self._manager, self._clock
        plan = manager.take_plan(clock.now, idle=idle)
        loads = [job for job in plan.jobs if job.kind is JobKind.LOAD]
        if loads:
            (self._load_job,) = loads  # one request at a time
        report = self._ranks.run(plan, idle=idle)
        clock.step()
        job = self._load_job
        if job is not None and job.id in report.results:
            self._loaded, self._load_job = (job, report.results[job.id].failed), None
        manager.settle(report, clock.now, int(clock.now))


def _source_of(move: Move) -> Tier:
    return Tier.CPU if move.nvme is None else Tier.NVME
