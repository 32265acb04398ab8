# SPDX-License-Identifier: Apache-2.0
"""A Hypothesis state machine over the real ``TierManager``, with a fake engine, fake ranks and an
index in RAM.

Everything is tiny, so that slots, GPU blocks and queues run out all the time. Hypothesis chooses
what requests come, when they step, end or are aborted, when each rank runs which leg of which job
and which of them fail, when the index commits, when the clock moves, when the weights change and
when the process is killed. ``ManagerWatch`` says what must hold.
"""

from __future__ import annotations

import sys
from enum import Enum

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdisk.blocks import JobId, make_block_key
from kvdisk.geometry import FILE_EPOCH
from kvdisk.index.base import SegmentRecord
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.kv_hints import ACTIONS
from kvdisk.manager.requests import KVHint
from kvdisk.messages import Reason
from support.fake_engine import Phase
from support.fake_neighbours import FakeHome
from support.fake_ranks import FakeRank
from support.fake_requests import value_of
from support.fake_slots import ROTTEN, TORN, Content
from support.life import LONGEST_QUARANTINE_S, Life
from support.manager_sizes import RANKS

MOST_REQUESTS = 4
BUDGET_TOKENS = 8
PATIENCE_ROUNDS = 40
MOST_PEACE_STEPS = 5
"""Steps of the engine between two rare events, at least."""
LONGEST_BACK_OFF_S = 61.0
NEIGHBOUR_SLOTS = 4

_picks = st.integers(0, 7)
_budgets = st.sampled_from((1, 2, 4, BUDGET_TOKENS))
_rarely = st.integers(0, 7).map(lambda number: number == 7)
_mostly = st.integers(0, 3).map(bool)
_seconds = st.sampled_from((1.0, 5.0, 1000.0))


class Event(Enum):
    """What happens rarely."""

    RESET = "the weights change"
    KILLED = "the process is killed, and another one finds what is on the drive"
    RESTARTED = "the process ends well, and another one finds what is on the drive"
    REFUSING = "the index begins, or ends, to refuse puts"
    ROTTEN = "a drive loses a block"
    GIVEN_TIME = "everything works for a while"
    QUIET = "everything works, and all requests end"


class ManagerMachine(Life, RuleBasedStateMachine):
    """See the module. ``sizes``: of the manager."""

    budget_tokens = BUDGET_TOKENS
    quiet_rounds = 80

    @initialize()
    def start(self) -> None:
        self.neighbour_generation = 2**40
        self.begin(self.sizes, MemoryIndex(max_queued=6))
        for prompt in range(self.sizes.stored):
            self.serve(prompt, finishing=True, cold=False, steps=3, hanging=0)
            self._run_until_quiet()
        if self.sizes.stored:
            self.restart()

    def live(self, segments: int | None = None) -> None:
        super().live(segments)
        self.last_event = 0

    def start_ranks(self) -> list[FakeRank]:
        return [rank.survivor() for rank in self.ranks] or [
            FakeRank(at, self.sizes.geometry, self.neighbours, self.remote) for at in range(RANKS)
        ]

    # -- requests ------------------------------------------------------------------------------

    @precondition(lambda self: len(self.engine.requests) < MOST_REQUESTS)
    @rule(prompt=_picks, outputs=st.integers(0, 3), finishing=st.booleans(), cold=st.booleans())
    def add_request(self, prompt: int, outputs: int, finishing: bool, cold: bool) -> None:
        """A request comes. ``finishing``: it ends with its first token; ``cold``: the GPU has
        cached nothing."""
        if cold and self.engine.phase is Phase.IDLE:
            self.engine.pool.forget_all()
        text = self.sizes.prompts[prompt % len(self.sizes.prompts)]
        self.come(text, min(outputs, self.sizes.most_outputs), finishing=finishing)

    @precondition(lambda self: len(self.engine.requests) < MOST_REQUESTS)
    @rule(prompt=_picks, finishing=st.booleans(), cold=_mostly, steps=st.integers(1, 4), hanging=st.integers(0, 31))
    def serve(self, prompt: int, finishing: bool, cold: bool, steps: int, hanging: int) -> None:
        """A request comes, and all goes well for a few steps; or in one of them devices hang
        (``hanging``)."""
        self.finish_step()
        self.add_request(prompt, 0, finishing, cold)
        self.neighbours.answer()
        self.remote.answer()
        for step in range(steps):
            self.run_step(BUDGET_TOKENS)
            for rank in [rank for rank in self.ranks if hanging // 4 == step and hanging >> rank.rank & 1]:
                while rank.hangable:
                    rank.hang(rank.hangable[0], 0, whole=False)
            self.work()

    @precondition(lambda self: len(self.engine.requests) <= MOST_REQUESTS - 2)
    @rule(prompts=st.tuples(_picks, _picks), steps=st.integers(0, 3))
    def crowd(self, prompts: tuple[int, int], steps: int) -> None:
        """Two requests come at once, and the GPU has cached nothing."""
        self.finish_step()
        for prompt in prompts:
            self.add_request(prompt, 0, finishing=True, cold=True)
        for _ in range(steps):
            self.run_step(BUDGET_TOKENS)
            self.ranks[0].work_off()

    @precondition(lambda self: self.engine.queued)
    @rule(pick=_picks, abort=st.booleans())
    def end_request(self, pick: int, abort: bool) -> None:
        """A request is aborted, whatever it does, or will end with its next token."""
        request = self.engine.queued[pick % len(self.engine.queued)]
        if not abort:
            request.finishing = True
        elif self.engine.phase is not Phase.SCHEDULED:
            self.engine.abort(request)

    @precondition(lambda self: self.engine.queued and self.engine.phase is Phase.IDLE)
    @rule(pick=_picks, action=st.sampled_from(ACTIONS), tokens=st.sampled_from((None, 2, 4)), seconds=_seconds)
    def hint(self, pick: int, action: str, tokens: int | None, seconds: float) -> None:
        """A request turns out to have come with a KV hint."""
        request = self.engine.queued[pick % len(self.engine.queued)]
        self.parts.manager.hint(request.id, (KVHint(action, tokens, seconds),), self.now)

    # -- steps ---------------------------------------------------------------------------------

    @rule(budget=_budgets)
    def step(self, budget: int) -> None:
        """Finish the step under way, if any, and run one."""
        self.finish_step()
        self.run_step(budget)

    @rule(budget=_budgets, ranks=st.integers(0, 2**RANKS - 1))
    def step_and_work(self, budget: int, ranks: int) -> None:
        """Run a step, in the course of which some ranks end all their work."""
        self.finish_step()
        self.engine.schedule(budget)
        self.engine.forward()
        for rank in [rank for rank in self.ranks if ranks >> rank.rank & 1]:
            rank.work_off()
        self.engine.update()

    @rule(budget=_budgets)
    def phase(self, budget: int) -> None:
        if self.engine.phase is Phase.IDLE:
            self.engine.schedule(budget)
        elif self.engine.phase is Phase.SCHEDULED:
            self.engine.forward()
        else:
            self.engine.update()

    # -- ranks ---------------------------------------------------------------------------------

    @precondition(lambda self: any(rank.runnable for rank in self.ranks))
    @rule(pick=_picks, job=_picks, move=_picks, whole=st.booleans())
    def work_on(self, pick: int, job: int, move: int, whole: bool) -> None:
        """One rank runs one leg, or all that is left of a job."""
        rank, job_id = self._pick_job(pick, job)
        if whole:
            rank.run_job(job_id)
        else:
            rank.run_leg(job_id, move)

    @precondition(lambda self: any(rank.runnable for rank in self.ranks))
    @rule(pick=_picks, job=_picks, move=_picks, reason=st.sampled_from(Reason))
    def fail(self, pick: int, job: int, move: int, reason: Reason) -> None:
        """A leg fails on one rank; or what has not started of a job, at its deadline.

        A home fails only in the rarest case: it takes the NVMe tier away.
        """
        rank, job_id = self._pick_job(pick, job)
        if job == move == 7 or not rank.opens_home(job_id):
            if reason is Reason.DEADLINE:
                rank.fail_job(job_id, reason)
            else:
                rank.run_leg(job_id, move, reason)

    @precondition(lambda self: any(rank.hangable for rank in self.ranks))
    @rule(ranks=st.integers(1, 2**RANKS - 1), job=_picks, move=_picks, whole=st.booleans(), settle=_mostly)
    def hang(self, ranks: int, job: int, move: int, whole: bool, settle: bool) -> None:
        """On some ranks the device does not end what it has begun of a job, until its deadline has
        passed.

        ``settle``: the rest of the job ends, and the engine hears of it.
        """
        hanging = [rank for rank in self.ranks if ranks >> rank.rank & 1 and rank.hangable]
        jobs = sorted({job_id for rank in hanging for job_id in rank.hangable})
        if jobs:
            job_id = jobs[job % len(jobs)]
            for rank in [rank for rank in hanging if job_id in rank.hangable]:
                rank.hang(job_id, move, whole=whole)
            if settle:
                for rank in [rank for rank in self.ranks if job_id in rank.runnable]:
                    rank.run_job(job_id)
                self.finish_step()
                self.run_step(BUDGET_TOKENS)

    @precondition(lambda self: any(rank.late for rank in self.ranks))
    @rule(pick=_picks, late=_picks, torn=_rarely, settle=_mostly)
    def end_late(self, pick: int, late: int, torn: bool, settle: bool) -> None:
        """A device ends at last what was given up. ``settle``: the engine hears of it."""
        ranks = [rank for rank in self.ranks if rank.late]
        ranks[pick % len(ranks)].end_late(late, torn=torn)
        if settle:
            self.finish_step()
            self.run_step(BUDGET_TOKENS)

    def _end_all_late(self) -> None:
        for rank in self.ranks:
            rank.end_all_late()

    @rule(most=st.sampled_from((0, 1, 2, 1000, 1000)))
    def copy_slowly(self, most: int) -> None:
        """From now on no rank copies more blocks than that before it gives up those that a step
        waits for."""
        for rank in self.ranks:
            rank.most_gathers = most

    def _pick_job(self, pick: int, job: int) -> tuple[FakeRank, JobId]:
        busy = [rank for rank in self.ranks if rank.runnable]
        rank = busy[pick % len(busy)]
        return rank, rank.runnable[job % len(rank.runnable)]

    # -- another engine of the store -----------------------------------------------------------

    @precondition(lambda self: self.sizes.has_nvme)
    @rule(prompt=_picks, blocks=st.integers(1, 4), first=st.integers(0, NEIGHBOUR_SLOTS - 1), torn=_rarely)
    def neighbour_stores(self, prompt: int, blocks: int, first: int, torn: bool) -> None:
        """It stores the first blocks of a prompt, over what it had there; or is killed while it
        writes (``torn``)."""
        group = self.sizes.geometry.groups[prompt % len(self.sizes.geometry.groups)]
        if not self.neighbours.homes:
            segment = SegmentRecord(prompt, group.slot_bytes, NEIGHBOUR_SLOTS)
            self.request_count += 1
            self.neighbours.homes.append(FakeHome(f"{self.request_count:032x}", segment))
        text = self.sizes.prompts[prompt % len(self.sizes.prompts)]
        for position in range(min(blocks, len(text) // group.block_tokens)):
            key = make_block_key(text[: (position + 1) * group.block_tokens].encode(), group.group)
            self.neighbour_generation -= 1
            torn_rank = position % RANKS if torn else None
            self.neighbours.homes[0].store(key, first + position, self.neighbour_generation, RANKS, torn_rank, group)

    @precondition(lambda self: self.neighbours.waiting)
    @rule(count=st.integers(1, 4))
    def neighbours_answer(self, count: int) -> None:
        """The reader of the other homes gets on."""
        self.neighbours.answer(count)

    @precondition(lambda self: self.neighbours.homes)
    @rule(sure=_rarely)
    def neighbour_goes(self, sure: bool) -> None:
        if sure:
            self.neighbours.homes.clear()

    # -- the remote store ----------------------------------------------------------------------

    @precondition(lambda self: self.sizes.config.remote)
    @rule(prompt=_picks, blocks=st.integers(1, 4), torn=_rarely)
    def another_host_sends(self, prompt: int, blocks: int, torn: bool) -> None:
        """Another host sends the first blocks of a prompt; of one, the second rank's part is not
        what it should be (``torn``)."""
        text = self.sizes.prompts[prompt % len(self.sizes.prompts)]
        for group in self.sizes.geometry.groups:
            for position in range(min(blocks, len(text) // group.block_tokens)):
                key = make_block_key(text[: (position + 1) * group.block_tokens].encode(), group.group)
                for rank in range(RANKS):
                    value = value_of(key, 0, rank, group)
                    content = Content(FILE_EPOCH, key, 2**50, value, TORN if torn and rank else value)
                    self.remote.objects.setdefault((FILE_EPOCH, key, rank), content)

    @precondition(lambda self: self.remote.waiting)
    @rule(count=st.integers(1, 4))
    def remote_answers(self, count: int) -> None:
        """The reader of the remote store gets on."""
        self.remote.answer(count)

    @precondition(lambda self: self.remote.objects)
    @rule(pick=_picks, whole=_mostly)
    def remote_loses(self, pick: int, whole: bool) -> None:
        """It evicts one rank's part of a block, or somebody writes other bytes there."""
        self.remote.lose(pick, whole=whole)

    @precondition(lambda self: self.sizes.config.remote)
    @rule()
    def remote_goes_or_comes(self) -> None:
        """It answers no more, or again."""
        self.remote.any = not self.remote.any

    # -- index and clock -----------------------------------------------------------------------

    @precondition(lambda self: self.index.pending_calls > 0)
    @rule(count=st.integers(1, 4), fail=_rarely)
    def commit(self, count: int, fail: bool) -> None:
        """The index commits some of what is queued; or its drive is full: puts are lost, and
        refused from now on."""
        self.index.commit(count, fail=fail)

    @rule(seconds=st.sampled_from((0.01, 0.06, 0.3, 1.5, 3.0, LONGEST_BACK_OFF_S)))
    def wait(self, seconds: float) -> None:
        self.advance(seconds)

    # -- catastrophes, and their opposite ------------------------------------------------------

    @precondition(lambda self: self.engine.step_count - self.last_event >= MOST_PEACE_STEPS)
    @rule(kind=st.sampled_from(Event), pick=_picks)
    def happen(self, kind: Event, pick: int) -> None:
        self.finish_step()
        if kind is Event.RESET:
            self.change_weights()
        elif kind in {Event.KILLED, Event.RESTARTED}:
            go_on = self.restart if kind is Event.RESTARTED else self.succeed
            go_on(max(1, pick % (self.sizes.segments + 1)))
            if kind is Event.RESTARTED and pick % 3 == 2:
                self._bar(pick)
        elif kind is Event.REFUSING:
            self.index.refuse_puts = not self.index.refuse_puts
        elif kind is Event.ROTTEN:
            self._lose_block(pick)
        elif kind is Event.GIVEN_TIME:
            self._give_time()
        else:
            self._run_until_quiet()
        self.last_event = self.engine.step_count

    def _bar(self, pick: int) -> None:
        """A rank cannot open some of the files that there are, or its home, for now."""
        self.run_step(BUDGET_TOKENS)
        rank, number = self.ranks[pick % len(self.ranks)], 0
        while rank.runnable and (rank.opens_home(rank.runnable[0]) or rank.opens_segment(rank.runnable[0])):
            if pick >> number % 4 & 1:
                rank.run_leg(rank.runnable[0], failure=Reason.IO_ERROR)
            else:
                rank.run_job(rank.runnable[0])
            number += 1
        self.run_step(BUDGET_TOKENS)

    def _lose_block(self, pick: int) -> None:
        """A drive loses what is in a slot, and says nothing."""
        rank = self.ranks[pick % len(self.ranks)]
        slots = sorted(slot for slot, content in rank.drive.items() if content.payload not in {TORN, ROTTEN})
        if slots:
            rank.rot(slots[pick % len(slots)])

    def _give_time(self) -> None:
        """Everything works, and requests live on: what they offered is stored in the end."""
        self._end_all_late()
        self.copy_slowly(1000)
        self.advance(LONGEST_QUARANTINE_S)
        for _ in range(PATIENCE_ROUNDS):
            self.end_round()
        if self.parts.cpu is not None or (self.parts.nvme is not None and self.parts.nvme.works):
            self.watch.check_stored()

    def _run_until_quiet(self) -> None:
        """Everything works, and every request ends: first with what the devices still do not end,
        for which nobody waits, and then without."""
        self.finish()
        if any(rank.late for rank in self.ranks):
            self._end_all_late()
            self.run_step(BUDGET_TOKENS)
            self.finish()

    def end_round(self) -> None:
        self.neighbours.answer()
        super().end_round()

    @invariant()
    def holds(self) -> None:
        self.watch.check()

    def teardown(self) -> None:
        """Let every example that has not failed end in quiet."""
        if sys.exc_info()[0] is None and hasattr(self, "watch"):
            self._run_until_quiet()
