# SPDX-License-Identifier: Apache-2.0
"""An engine without a model, and with everything else real: manager, movers, files, index, store
directory.

It schedules as ``FakeEngine`` does, which does what vLLM does. What a block holds comes from
``LiveModel``, the time from the system, and a request goes on only with blocks that hold, byte by
byte, what they must.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

from kvdisk.assembly import SchedulerHalf, assemble_scheduler
from kvdisk.config import Config
from kvdisk.identity import Identity
from kvdisk.messages import JobKind, Plan
from support.fake_engine import FakeEngine, Watch
from support.fake_requests import engine_geometry
from support.live_model import HashedRequest, LiveModel
from support.live_rank import LiveRank, LocalRank

MakeRank = Callable[[Config, LiveModel, int, int], LiveRank]
STUCK_S = 600.0
"""What takes so long hangs, on however busy a machine."""


class _Counting(Watch):
    """Counts what was planned."""

    def __init__(self) -> None:
        self.jobs = dict.fromkeys(JobKind, 0)
        self.preempted = 0

    def planned(self, plan: Plan, preempted: Sequence[str]) -> None:
        self.preempted += len(preempted)
        for job in plan.jobs:
            self.jobs[job.kind] += 1


class LiveEngine(FakeEngine):
    """See the module. Takes a home in the store of ``config``; ``ranks`` are its own from here on.

    ``clock``: seconds since the Unix epoch. ``identity``: None: the model's, known at once. Raises
    what ``assemble_scheduler`` raises; the ranks are closed then. One thread calls everything.
    """

    request_type = HashedRequest

    def __init__(
        self,
        config: Config,
        model: LiveModel,
        make_rank: MakeRank = LocalRank,
        block_count: int = 64,
        clock: Callable[[], float] = time.time,
        identity: Identity | None = None,
    ) -> None:
        self.model = model
        self._clock = clock
        self._live_ranks: list[LiveRank] = []
        super().__init__(engine_geometry(model.geometry), block_count, self._live_ranks)
        self.watch = self.counting = _Counting()
        identity = identity or Identity.certain(model.fingerprint, {"model": model.name})
        self.parts: SchedulerHalf = assemble_scheduler(config, model.geometry, self.pool, identity)
        self.manager = self.parts.manager
        self._closed = False
        try:
            for rank in range(model.ranks):
                self._live_ranks.append(make_rank(config, model, rank, block_count))
        except BaseException:
            self.close()
            raise

    # -- steps ---------------------------------------------------------------------------------

    def step(self, budget_tokens: int = 16) -> None:
        self.now = self._clock()
        self.parts.mailbox.work()
        self.schedule(budget_tokens)
        self.forward()
        self.update()
        self.parts.telemetry.take(self.now)

    def run_until_quiet(self) -> None:
        """Step until no request is left, no job or commit is under way, and no demotion can be
        planned."""
        end_s = time.monotonic() + STUCK_S
        while self.requests or self.manager.has_pending_work(self._clock()) or self.parts.mailbox.work():
            assert time.monotonic() < end_s, f"stuck: {self.describe()}"
            self.step()

    def serve(self, prompts: Sequence[str], outputs: int = 1) -> None:
        """Serve prompts one after the other, each from a cold GPU, until all that follows from it
        is committed."""
        for prompt in prompts:
            self.pool.forget_all()
            self.add(f"at step {self.step_count}", prompt, outputs).finishing = True
            self.run_until_quiet()
        index = self.parts.index
        if index is not None:
            assert index.flush(STUCK_S)
            self.step()

    def describe(self) -> str:
        requests = ", ".join(f"{one.id} {one.status.value} {one.computed}/{len(one.tokens)}" for one in self.queued)
        return f"requests [{requests}], free blocks {self.pool.free_count}, {self.manager.stats.counts}"

    # -- resets and the end --------------------------------------------------------------------

    def change_weights(self) -> None:
        """Put other weights into memory, as an update does: from here on blocks hold something
        else."""
        epoch = 1 + secrets.randbits(62)
        self.reset(epoch)
        self.weights = epoch

    def close(self) -> None:
        """End in vLLM's order: the ranks finish what the device has started, then the scheduler
        commits. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for rank in self._live_ranks:
            rank.close()
        self.parts.close()
