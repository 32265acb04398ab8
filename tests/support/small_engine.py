# SPDX-License-Identifier: Apache-2.0
"""A fake engine with one rank over a real manager, for tests of a few steps."""

from __future__ import annotations

from kvdisk.index.memory_index import MemoryIndex
from kvdisk.messages import Plan
from support.fake_engine import FakeEngine
from support.fake_neighbours import FakeNeighbours
from support.fake_ranks import FakeRank
from support.fake_requests import FakeRequest
from support.manager_parts import ManagerParts, Sizes
from support.manager_watch import ManagerWatch


class SmallEngine:
    """One process after another (``live``) over one rank and one index."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.rank, self.index, self.now = sizes, FakeRank(0), MemoryIndex(), 1000.0
        self.live(0)

    def live(self, first_generation: int) -> None:
        """Start a process that finds what is on the drive."""
        self.engine = FakeEngine(self.sizes.geometry, self.sizes.block_count, [self.rank], self.sizes.most_running)
        self.engine.now = self.now
        self.parts = ManagerParts.make(self.sizes, self.engine, self.index, first_generation, FakeNeighbours([]))
        self.manager = self.parts.manager
        self.watch = ManagerWatch(self.sizes, self.parts, self.engine, [self.rank], self.index)
        self._added = 0

    def restart(self) -> None:
        """End the process well, and start another."""
        assert self.index.flush(0.0)
        self.rank, self.index = self.rank.survivor(), self.index.reopened()
        self.live(10_000)

    def add(self, prompt: str) -> FakeRequest:
        """Let a request come, which runs until it is told to finish."""
        self._added += 1
        return self.engine.add(f"request {self._added}", prompt, 0)

    def step(self, *, work: bool = True, seconds: float = 0.01) -> Plan:
        """Run a step, in which the rank ends all that it has, if it is to work; return its plan."""
        self.now += seconds
        self.engine.now = self.now
        self.engine.schedule(16)
        plan = self.engine._work.plan
        self.engine.forward()
        if work:
            self.work()
        self.engine.update()
        self.watch.check()
        return plan

    def work(self) -> None:
        """Let the rank and the index end all that they have."""
        self.rank.work_off()
        self.index.commit()

    def serve(self, prompt: str) -> None:
        self.add(prompt)
        self.finish()

    def finish(self) -> None:
        for _ in range(100):
            for request in self.engine.queued:
                request.finishing = True
            if not self.engine.requests and not self.manager.has_pending_work(self.now):
                self.watch.check_quiet()
                return
            self.step()
        raise AssertionError("it never becomes quiet")
