# SPDX-License-Identifier: Apache-2.0
"""A fake engine with one rank over a real manager, for tests of a few steps."""

from __future__ import annotations

from kvdisk.index.memory_index import MemoryIndex
from kvdisk.messages import Plan
from support.fake_ranks import FakeRank
from support.fake_requests import FakeRequest
from support.life import Life
from support.manager_parts import Sizes


class SmallEngine(Life):
    """A process, which is watched in each step. ``rank``: its only one."""

    def __init__(self, sizes: Sizes) -> None:
        self.begin(sizes, MemoryIndex())

    def start_ranks(self) -> list[FakeRank]:
        self.rank = self.ranks[0].survivor() if self.ranks else FakeRank(0, self.sizes.geometry, self.neighbours)
        return [self.rank]

    def live(self, segments: int | None = None) -> None:
        super().live(segments)
        self.manager = self.parts.manager

    def add(self, prompt: str, *, finishing: bool = False) -> FakeRequest:
        """Let a request come, which runs until it is told to finish."""
        return self.come(prompt, 0, finishing=finishing)

    def step(self, tokens: int | None = None, *, work: bool = True, seconds: float = 0.01) -> Plan:
        """Run a step, in which the rank ends all that it has, if it is to work; return its plan."""
        self.advance(seconds)
        self.engine.schedule(tokens or self.budget_tokens)
        self.engine.forward()
        if work:
            self.work()
        self.engine.update()
        self.watch.check()
        return self.engine.work.plan

    def end_round(self) -> None:
        self.step()

    def serve(self, prompt: str, *, cold: bool = False) -> None:
        """Serve a prompt, and step until nothing is left to do. ``cold``: the GPU has forgotten
        all."""
        if cold:
            self.engine.pool.forget_all()
        self.add(prompt)
        self.finish()
