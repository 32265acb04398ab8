# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: schedules requests over a small block pool and calls the
``TierManager`` as vLLM would.

A token is a letter, and the KV of a block is a function of the text up to its end, the weights'
number, the rank and the group. So it is known at any time what a block must hold, and each rank
looks at what is loaded and read. A step has three phases, between which a test may let other things
happen: ``schedule`` (lookups, allocation, preemption, the plan), ``forward`` and ``update``
(reports, sampling, endings).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.catalog import TierChoice
from kvdisk.manager.manager import TierManager
from kvdisk.manager.requests import RequestLimits
from kvdisk.messages import Plan, Report
from support.fake_pool import FakePool
from support.fake_requests import BlockTables, FakeRequest, Status


class Phase(Enum):
    """What the current step has behind it."""

    IDLE = "idle"
    SCHEDULED = "scheduled"
    COMPUTED = "computed"


@dataclass(slots=True)
class StepWork:
    """A step's work for a rank. ``writes`` and ``reads``: (group, block id, hash) of what the model
    computes and reads.

    ``weights``: number of the weights in memory. ``new_blocks``: which were given away in this
    step; ``zeroes``: the engine overwrites them before a copy can begin.
    """

    plan: Plan
    weights: int
    new_blocks: set[int] = field(default_factory=set)
    zeroes: bool = False
    writes: list[tuple[int, int, bytes]] = field(default_factory=list)
    reads: list[tuple[int, int, bytes]] = field(default_factory=list)

    def add(self, request: FakeRequest, start: int, groups: Sequence[GroupGeometry]) -> None:
        for group, table in zip(groups, request.table, strict=True):
            if group.state_tokens is not None:
                self._add_state(request, start, group, table)
                continue
            for position in range(math.ceil(request.computed / group.block_tokens)):
                if not table[position]:
                    assert position < start // group.block_tokens, "a token is computed into the null block"
                    continue
                end = min((position + 1) * group.block_tokens, request.computed)
                block = (group.group, table[position], request.hash_of(end))
                if end > start:
                    self.writes.append(block)
                self.reads.append(block)

    def _add_state(self, request: FakeRequest, start: int, group: GroupGeometry, table: Sequence[int]) -> None:
        """The state at ``start`` is read, and that of the step's end is written, in place or to
        another block."""
        before, at = ((tokens - 1) // group.block_tokens for tokens in (start, request.computed))
        state = (group.group, table[at], request.hash_of(request.computed))
        self.writes += [state] if request.computed > start else []
        self.reads.append(state)
        if start and before != at:
            assert start % group.block_tokens == 0, "the state of a block's end is lost"
            self.reads.append((group.group, table[before], request.hash_of(start)))


class Rank(Protocol):
    """What stands for vLLM's model runner on one rank, with kvdisk's worker under it."""

    def before_forward(self, work: StepWork) -> None:
        """Begin with what does not wait for the model's work, what the model waits for first.

        What the model writes and reads is not known yet.
        """

    def forward(self, work: StepWork) -> None:
        """Write what the model computes."""

    def check_reads(self, work: StepWork) -> None:
        """Assert that all blocks that the model reads hold what they must."""

    def after_forward(self, work: StepWork) -> None:
        """Begin with the stores of what the model has computed."""

    def take_report(self) -> tuple[Report, dict[str, list[int]]]:
        """Return what ended since the last call, and for each load among it its request and the
        blocks that failed; the others hold what they must."""


class Watch:
    """What a test wants to see of an engine's dealings with the manager; this one, nothing."""

    def answered(self, request: FakeRequest, local_tokens: int, answer: int | None, now: float) -> None:
        """A lookup was answered."""

    def offered(self, request: FakeRequest, computed_tokens: int) -> None:
        """A request's blocks were, or could have been, offered."""

    def planned(self, plan: Plan, preempted: Sequence[str]) -> None:
        """The step's plan is made."""

    def settled(self, report: Report) -> None:
        """A merged report is about to be settled."""

    def note_settled(self) -> None:
        """The manager has settled it."""


class FakeEngine:
    """See the module. ``now``: the clock, set by the test; ``clock_ahead_s``: how far the time of
    day is ahead of it. ``weights``: number of the weights in memory.

    ``zeroes``: new blocks are overwritten before fenced copies can begin, as some of vLLM's runners
    do. ``victims``: how many tokens each request that was preempted since the last step had
    computed, and in which blocks. ``most_running``: while so many requests run or are loaded, the
    others wait, and are not looked up.
    """

    request_type: type[FakeRequest] = FakeRequest

    def __init__(self, geometry: Geometry, block_count: int, ranks: Sequence[Rank], most_running: int = 2**31) -> None:
        self._geometry = geometry
        self._ranks = ranks
        self._new_blocks: set[int] = set()
        self.pool = FakePool(block_count, self._new_blocks.add)
        self._tables = BlockTables(geometry, self.pool)
        self.manager: TierManager
        self.watch = Watch()
        self.most_running = most_running
        self.now = 0.0
        self.clock_ahead_s = 0
        self.weights = 0
        self.phase = Phase.IDLE
        self.step_count = 0
        self.requests: dict[str, FakeRequest] = {}
        self.running: list[FakeRequest] = []
        self.waiting: list[FakeRequest] = []
        self._loaded: dict[str, set[int]] = {}
        """By request under load: the blocks that it fills."""
        self._scheduled: dict[FakeRequest, int] = {}
        self._preempted: list[str] = []
        """By a reset since the last step."""
        self.zeroes = False
        self.victims: dict[str, tuple[int, list[list[int]]]] = {}
        self.work = StepWork(Plan(), 0)
        self.drift: Callable[[], object] = lambda: None
        """Called where time passes within a step."""
        self.tenant_of: Callable[[str], int] = lambda _: 0
        """Returns the tenant of a prompt."""

    # -- requests ------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: str, most_outputs: int, load_tiers: TierChoice = None) -> FakeRequest:
        table: list[list[int]] = [[] for _ in self._geometry.groups]
        request = self.request_type(request_id, prompt, len(prompt), len(prompt) + most_outputs, table)
        request.extend_hashes(self._geometry.hash_tokens)
        request.load_tiers = load_tiers
        self.requests[request_id] = request
        self.waiting.append(request)
        tiers = None if load_tiers is None else frozenset(load_tiers)
        limits = RequestLimits(load_tiers=tiers, tenant=self.tenant_of(prompt))
        self.manager.new_request(request_id, request.hashes, len(prompt), self.now, limits)
        return request

    def abort(self, request: FakeRequest) -> None:
        """End a request where it is. The blocks of a load under way stay held until it is
        reported."""
        assert self.phase is not Phase.SCHEDULED
        self._scheduled.pop(request, None)
        under_way = request.status is Status.LOADING and request.recved < len(self._ranks)
        self.manager.request_finished(request.id)
        self._leave(request)
        if not under_way:
            self._forget(request)

    def reset(self, epoch: int) -> None:
        """Change the weights: running requests start again, what the GPU holds is forgotten, the
        manager is told."""
        assert self.phase is Phase.IDLE
        while self.running:
            self._preempted.append(self.running[-1].id)
            self._preempt(self.running.pop())
        for request in [request for request in self.waiting if request.computed]:
            if request.status is Status.LOADING and self._will_fail_whole(request):
                continue
            self.abort(request)
        self.pool.forget_all()
        self.weights += 1
        self.manager.reset(epoch)

    def _will_fail_whole(self, request: FakeRequest) -> bool:
        """Whether a load under way leaves nothing of the old weights: it has not ended, and there
        was no local hit."""
        held = {block for table in request.table for block in table if block}
        return request.recved < len(self._ranks) and held == self._loaded[request.id]

    def _leave(self, request: FakeRequest) -> None:
        request.status = Status.GONE
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)

    def _forget(self, request: FakeRequest) -> None:
        self._loaded.pop(request.id, None)
        self._tables.free(request)
        del self.requests[request.id]

    @property
    def clock_s(self) -> int:
        """The time of day."""
        return int(self.now + self.clock_ahead_s)

    # -- scheduling ----------------------------------------------------------------------------

    def schedule(self, budget_tokens: int) -> None:
        """Begin a step that computes at most ``budget_tokens`` of each request."""
        assert self.phase is Phase.IDLE and budget_tokens > 0
        self.phase = Phase.SCHEDULED
        self.step_count += 1
        self._scheduled = {}
        self._new_blocks.clear()
        preempted: list[str] = []
        self.manager.note_time(self.clock_s)
        self._schedule_running(budget_tokens, preempted)
        if not preempted:
            self._schedule_waiting(budget_tokens)
        preempted += self._preempted
        self._preempted = []
        overwritten = self._new_blocks if self.zeroes else ()
        self.manager.preempt(preempted, self.now, overwritten)
        computed = {
            request: min(request.computed + new_tokens, len(request.tokens))
            for request, new_tokens in self._scheduled.items()
        }
        wanted = [(each, tokens) for each, tokens in computed.items() if self.manager.note_scheduled(each.id, tokens)]
        self.manager.plan_stores([(each.id, tokens, each.copied_table()) for each, tokens in wanted], self.now)
        for request, computed_tokens in computed.items():
            self.watch.offered(request, computed_tokens)
        for request, new_tokens in self._scheduled.items():
            if states := self._tables.states_of(request, request.computed + new_tokens) if new_tokens else ():
                self.manager.plan_states(request.id, states, self.now)
        scheduled_tokens = sum(self._scheduled.values())
        plan = self.manager.take_plan(
            self.now, idle=scheduled_tokens == 0, scheduled_tokens=scheduled_tokens, overwritten=overwritten
        )
        self.watch.planned(plan, preempted)
        self.victims.clear()
        self.work = StepWork(plan, self.weights, set(self._new_blocks), self.zeroes)
        for rank in self._ranks:
            rank.before_forward(self.work)
        self.drift()
        for request, new_tokens in self._scheduled.items():
            request.computed += new_tokens
            self.work.add(request, request.computed - new_tokens, self._geometry.groups)

    def _schedule_running(self, budget_tokens: int, preempted: list[str]) -> None:
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted for one before it
            new_tokens = self._tables.step_tokens(request, request.computed, budget_tokens)
            if not new_tokens and request.computed < len(request.tokens):
                continue
            while not self._tables.allocate(request, request.computed + new_tokens):
                victim = self.running.pop()
                self._preempt(victim)
                preempted.append(victim.id)
                if victim is request:
                    return
            self._scheduled[request] = new_tokens
            self._tables.cache(request, request.computed + new_tokens)

    def _schedule_waiting(self, budget_tokens: int) -> None:
        # Those that hold blocks come first, as in vLLM.
        for request in sorted(self.waiting, key=lambda request: not any(request.table)):
            if request.status is Status.LOADING and not self._finish_load(request):
                continue
            loading = sum(other.status is Status.LOADING for other in self.waiting)
            if len(self.running) + loading >= self.most_running and not any(request.table):
                continue
            local: list[list[int]] = [[] for _ in self._geometry.groups]
            if request.computed == 0 and not any(request.table):
                local, local_tokens = self._tables.local_hit(request)
                answer = self.manager.lookup(request.id, local_tokens, len(request.tokens), self.now)
                self.watch.answered(request, local_tokens, answer, self.now)
                if answer is None:
                    continue
                if answer:
                    if not self._start_load(request, local, local_tokens, answer):
                        return
                    continue
                computed = local_tokens
            else:
                computed = request.computed
            new_tokens = self._tables.step_tokens(request, computed, budget_tokens)
            if not new_tokens and computed < len(request.tokens):
                return
            if not self._tables.allocate(request, computed + new_tokens, local, computed):
                return
            request.computed = computed
            request.status = Status.RUNNING
            self.waiting.remove(request)
            self.running.append(request)
            self._scheduled[request] = new_tokens
            self._tables.cache(request, computed + new_tokens)

    def _start_load(self, request: FakeRequest, local: list[list[int]], local_tokens: int, tokens: int) -> bool:
        """Allocate and plan a load; False where it does not fit beside what is in flight."""
        end = local_tokens + tokens
        assert tokens > 0 and end % self._tables.alignment_tokens == 0 and end < len(request.tokens)
        reserved = sum(
            self._tables.missing_blocks(other)
            for other in self.waiting
            if other is not request and (other.status is Status.LOADING or other.computed)
        )
        if self.pool.free_count < self._tables.missing_blocks(request) + reserved:
            return False
        if not self._tables.allocate(request, end, local, end):
            return False
        blocks = [
            [0 if not block or self.pool.get_block(block).key is not None else block for block in table]
            for table in request.table
        ]
        self.manager.plan_load(request.id, local_tokens, tokens, blocks)
        self._loaded[request.id] = {block for table in blocks for block in table if block}
        request.computed = end
        request.status = Status.LOADING
        request.recved = 0
        request.load_failed = False
        return True

    def _finish_load(self, request: FakeRequest) -> bool:
        """Let a request whose load has ended on every rank go on; False where it has not."""
        if request.recved < len(self._ranks):
            return False
        del self._loaded[request.id]
        request.status = Status.WAITING
        if request.load_failed and request.computed == 0:
            self._tables.free(request)
        else:
            self._tables.cache(request, request.computed)
        return True

    def _preempt(self, request: FakeRequest) -> None:
        self.victims[request.id] = (request.computed, request.copied_table())
        self._tables.free(request)
        request.computed = 0
        request.status = Status.WAITING
        self.waiting.insert(0, request)

    # -- the model -----------------------------------------------------------------------------

    def forward(self) -> None:
        """Run the model on every rank, while transfers go on: write what the step computes, and
        check all that it reads."""
        assert self.phase is Phase.SCHEDULED
        self.phase = Phase.COMPUTED
        for rank in self._ranks:
            rank.forward(self.work)
        self.drift()
        for rank in self._ranks:
            rank.check_reads(self.work)
            rank.after_forward(self.work)

    # -- the end of a step ---------------------------------------------------------------------

    def update(self) -> None:
        """End a step: failed loads, sampled tokens, endings, settlement, finished loads: in vLLM's
        order."""
        assert self.phase is Phase.COMPUTED
        self.phase = Phase.IDLE
        report = Report()
        ended: list[str] = []
        for rank in self._ranks:
            mine, loads = rank.take_report()
            report.merge(mine)
            for request_id, bad in loads.items():
                ended.append(request_id)
                if bad:
                    self._fail_load(self.requests[request_id], bad)
        for request in self._scheduled:
            if request.computed == len(request.tokens):
                self._sample(request)
        self._scheduled = {}
        self.watch.settled(report)
        self.manager.settle(report, self.now, self.clock_s)
        self.watch.note_settled()
        for request_id in ended:
            self._note_recved(self.requests[request_id])

    def _fail_load(self, request: FakeRequest, bad: Sequence[int]) -> None:
        if request.status is Status.GONE:
            return
        request.load_failed = True
        if len(self._geometry.groups) > 1:
            request.computed = 0
            return
        block_tokens = self._geometry.groups[0].block_tokens
        for position, block in enumerate(request.table[0][: math.ceil(request.computed / block_tokens)]):
            if block in bad:
                request.computed = position * block_tokens
                return

    def _sample(self, request: FakeRequest) -> None:
        if request.finishing:
            # The token sampled last has no KV, and is not among ``tokens``.
            if self.manager.note_scheduled(request.id, request.computed):
                self.manager.plan_store(request.id, request.computed, request.copied_table(), self.now)
            self.watch.offered(request, request.computed)
            self.manager.request_finished(request.id)
            self._leave(request)
            self._forget(request)
        elif len(request.tokens) < request.most_tokens:
            request.tokens += "z"
            request.extend_hashes(self._geometry.hash_tokens)

    def _note_recved(self, request: FakeRequest) -> None:
        request.recved += 1
        if request.status is Status.GONE and request.recved == len(self._ranks):
            self._forget(request)

    # -- questions -----------------------------------------------------------------------------

    @property
    def queued(self) -> list[FakeRequest]:
        return self.running + self.waiting

    def holders(self, block_id: int) -> int:
        return sum(table.count(block_id) for request in self.requests.values() for table in request.table)
