# SPDX-License-Identifier: Apache-2.0
"""A Hypothesis state machine over the real ``TierManager``, with a fake engine, fake ranks and an index in RAM.

Everything is tiny, so that slots, GPU blocks and queues run out all the time. Hypothesis chooses what
requests come, when they step, end or are aborted, when each rank runs which leg of which job and
which of them fail, when the index commits, when the clock moves, when the weights change and when the
process is killed. ``ManagerWatch`` says what must hold.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdisk.blocks import Slot
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.messages import Reason
from kvdisk.testing.fake_engine import FakeEngine, Phase
from kvdisk.testing.fake_ranks import ROTTEN, TORN, FakeRank
from kvdisk.testing.manager_watch import ManagerParts, ManagerWatch, Sizes

RANKS = 2
MOST_REQUESTS = 4
BUDGET_TOKENS = 8
QUIET_ROUNDS = 80
LONGEST_BACK_OFF_S = 61.0

_ONE_GROUP = Geometry((GroupGeometry(0, 2, 4096),), RANKS, 2)
_TWO_GROUPS = Geometry((GroupGeometry(0, 4, 8192), GroupGeometry(1, 2, 4096, window_tokens=4)), RANKS, 2)
_PROMPTS = ("aab", "aabb", "aabbt", "aabbcc", "aabbcct", "aabbddt", "eet", "eefft")
_LONG_PROMPTS = ("aabbt", "aabbccddt", "aabbccdd", "aabbeefft", "gghht", "aabbcct")


def _config(**changes: object) -> Config:
    values = {"store_dirs": (Path("/nowhere"),), "nvme_bytes": 1, "cpu_bytes": 1, "max_pinned_gpu_blocks": 3}
    return Config(**(values | changes))  # type: ignore[arg-type]


ONE_GROUP = Sizes(_ONE_GROUP, _config(), 7, (2,), (2,), 2, _PROMPTS)
WINDOW = Sizes(_TWO_GROUPS, _config(max_pinned_gpu_blocks=5), 10, (2, 2), (2, 2), 2, _LONG_PROMPTS, most_outputs=2)
REUSE = Sizes(_ONE_GROUP, _config(nvme_admission="reuse(2)"), 7, (2,), (3,), 2, _PROMPTS)
REUSE_CPU = Sizes(_ONE_GROUP, _config(cpu_admission="reuse(2)", store_decode=True), 7, (3,), (2,), 1, _PROMPTS)
NVME_ONLY = Sizes(_ONE_GROUP, _config(cpu_bytes=0), 7, (), (2,), 2, _PROMPTS)
CPU_ONLY = Sizes(_ONE_GROUP, _config(store_dirs=(), nvme_bytes=None), 7, (2,), (), 0, _PROMPTS)
ALL_SIZES = (ONE_GROUP, WINDOW, REUSE, REUSE_CPU, NVME_ONLY, CPU_ONLY)

_picks = st.integers(0, 7)
_ranks = st.integers(0, RANKS - 1)


class ManagerMachine(RuleBasedStateMachine):
    """See the module. ``all_sizes``: Hypothesis starts with one of them."""

    all_sizes: ClassVar[tuple[Sizes, ...]] = ALL_SIZES

    @initialize(pick=st.integers(0, 5))
    def start(self, pick: int) -> None:
        """Choose sizes and start a first life."""
        self.sizes = self.all_sizes[pick % len(self.all_sizes)]
        self.index = MemoryIndex(max_queued=6)
        self.ranks = [FakeRank(rank) for rank in range(RANKS)]
        self.lives = 0
        self.request_count = 0
        self.now = 1000.0
        self._live()

    def _live(self) -> None:
        self.lives += 1
        self.engine = FakeEngine(self.sizes.geometry, self.sizes.block_count, self.ranks)
        self.engine.now = self.now
        self.parts = ManagerParts.make(self.sizes, self.engine, self.index, self.lives * 10_000)
        self.watch = ManagerWatch(self.sizes, self.parts, self.engine, self.ranks, self.index)

    # -- requests ------------------------------------------------------------------------------

    @precondition(lambda self: len(self.engine.requests) < MOST_REQUESTS)
    @rule(prompt=_picks, outputs=st.integers(0, 3), finishing=st.booleans())
    def add_request(self, prompt: int, outputs: int, finishing: bool) -> None:
        """A request comes; ``finishing``: it ends as soon as its first token is sampled."""
        self.request_count += 1
        text = self.sizes.prompts[prompt % len(self.sizes.prompts)]
        outputs = min(outputs, self.sizes.most_outputs)
        request = self.engine.add(f"request {self.request_count}", text, outputs)
        request.finishing = finishing

    @precondition(lambda self: self.engine.requests)
    @rule(pick=_picks)
    def finish_request(self, pick: int) -> None:
        """A request will end with its next token."""
        requests = list(self.engine.requests.values())
        requests[pick % len(requests)].finishing = True

    @precondition(lambda self: self.engine.phase is not Phase.SCHEDULED and self.engine.queued)
    @rule(pick=_picks)
    def abort_request(self, pick: int) -> None:
        """A request is aborted, whatever it does."""
        self.engine.abort(self.engine.queued[pick % len(self.engine.queued)])

    # -- steps ---------------------------------------------------------------------------------

    @rule(budget=st.integers(1, BUDGET_TOKENS))
    def step(self, budget: int) -> None:
        """Finish the step under way, if any, and run one."""
        self._finish_step()
        self._step(budget)

    @rule(budget=st.integers(1, BUDGET_TOKENS))
    def step_and_work(self, budget: int) -> None:
        """Run a step, and everything that the ranks and the index have to do."""
        self._finish_step()
        self._step(budget)
        for rank in self.ranks:
            self._work_off(rank)
        self.index.commit()

    @rule(budget=st.integers(1, BUDGET_TOKENS))
    def phase(self, budget: int) -> None:
        """Run one phase of a step."""
        if self.engine.phase is Phase.IDLE:
            self.engine.schedule(budget)
        elif self.engine.phase is Phase.SCHEDULED:
            self.engine.forward()
        else:
            self.engine.update()

    def _step(self, budget: int) -> None:
        self.engine.schedule(budget)
        self._finish_step()

    def _finish_step(self) -> None:
        if self.engine.phase is Phase.SCHEDULED:
            self.engine.forward()
        if self.engine.phase is Phase.COMPUTED:
            self.engine.update()

    # -- ranks ---------------------------------------------------------------------------------

    @rule(rank=_ranks, job=_picks, move=_picks)
    def run_leg(self, rank: int, job: int, move: int) -> None:
        """One rank runs one leg."""
        runnable = self.ranks[rank].runnable
        if runnable:
            self.ranks[rank].run_leg(runnable[job % len(runnable)], move)

    @rule(rank=_ranks, job=_picks)
    def run_job(self, rank: int, job: int) -> None:
        """One rank runs all that is left of a job."""
        runnable = self.ranks[rank].runnable
        if runnable:
            self.ranks[rank].run_job(runnable[job % len(runnable)])

    @rule(rank=_ranks)
    def run_everything(self, rank: int) -> None:
        """One rank runs all its jobs."""
        self._work_off(self.ranks[rank])

    @rule(rank=_ranks, job=_picks, move=_picks, reason=st.sampled_from(Reason))
    def fail_leg(self, rank: int, job: int, move: int, reason: Reason) -> None:
        """A leg fails on one rank (a home only in the rarest case: it takes the NVMe tier away)."""
        runnable = self.ranks[rank].runnable
        if runnable and (job == move == 7 or not self.ranks[rank].opens_home(runnable[job % len(runnable)])):
            self.ranks[rank].run_leg(runnable[job % len(runnable)], move, reason)

    @rule(rank=_ranks, job=_picks)
    def miss_deadline(self, rank: int, job: int) -> None:
        """What has not started of a job is given up on one rank."""
        runnable = self.ranks[rank].runnable
        if runnable:
            self.ranks[rank].fail_job(runnable[job % len(runnable)], Reason.DEADLINE)

    @rule(rank=_ranks, pick=_picks)
    def lose_block(self, rank: int, pick: int) -> None:
        """A drive loses what is in a slot, and says nothing."""
        slots = [slot for slot, content in self.ranks[rank].drive.items() if content.payload not in {TORN, ROTTEN}]
        if slots:
            self.ranks[rank].rot(Slot(*sorted(slots)[pick % len(slots)]))

    def _work_off(self, rank: FakeRank) -> None:
        while rank.runnable:
            rank.run_job(rank.runnable[0])

    # -- index and clock -----------------------------------------------------------------------

    @rule(count=st.integers(1, 4))
    def commit(self, count: int) -> None:
        """The index commits some of what is queued."""
        self.index.commit(count)
        self.parts.policy.changes += 1

    @rule(count=st.integers(1, 4))
    def fail_commit(self, count: int) -> None:
        """The index's drive is full: puts are lost, and refused from now on."""
        self.index.commit(count, fail=True)
        self.parts.policy.changes += 1

    @rule(refuse=st.booleans())
    def change_index(self, refuse: bool) -> None:
        """The index begins, or ends, to refuse puts."""
        self.index.refuse_puts = refuse

    @rule(seconds=st.sampled_from((0.01, 0.06, 0.3, 1.5, 3.0, LONGEST_BACK_OFF_S)))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self._advance(seconds)

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        self.engine.now = self.now
        if seconds >= 1.0:
            self.parts.policy.changes += 1  # a back-off may be over

    # -- catastrophes --------------------------------------------------------------------------

    @rule()
    def reset(self) -> None:
        """The weights change."""
        self._finish_step()
        epoch = 1000 * self.lives + self.engine.weights + 1
        self.watch.reset(epoch, self.engine.weights + 1)
        self.engine.reset(epoch)

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        """The process ends, or is killed; another one finds what is on the drive."""
        if clean:
            assert self.index.flush(0.0)
        self.ranks = [rank.survivor() for rank in self.ranks]
        self.index = self.index.reopened()
        self._live()

    # -- quiet ---------------------------------------------------------------------------------

    @rule()
    def give_time(self) -> None:
        """Everything works, and requests live on: what they offered is stored in the end."""
        self._finish_step()
        self._advance(LONGEST_BACK_OFF_S)
        for _ in range(12):
            self._round()
        if self.parts.cpu is not None or (self.parts.nvme is not None and self.parts.nvme.home_open):
            self.watch.check_stored()

    @rule()
    def run_until_quiet(self) -> None:
        """Everything works, and every request ends: then nothing is left of them."""
        self._finish_step()
        for request in self.engine.requests.values():
            request.finishing = True
        for _ in range(QUIET_ROUNDS):
            if not self.engine.requests and not self.parts.manager.has_pending_work(self.now):
                break
            self._round()
        else:
            raise AssertionError("it never becomes quiet")
        self.watch.check_quiet()

    def _round(self) -> None:
        for rank in self.ranks:
            self._work_off(rank)
        self.index.refuse_puts = False
        self.index.commit()
        self._advance(2.5)
        self._step(BUDGET_TOKENS)

    @invariant()
    def holds(self) -> None:
        """Assert what holds at any time."""
        self.watch.check()

    def teardown(self) -> None:
        """Let every example that has not failed end in quiet."""
        if sys.exc_info()[0] is None and hasattr(self, "watch"):
            self.run_until_quiet()
            self.watch.check()
