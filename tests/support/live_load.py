# SPDX-License-Identifier: Apache-2.0
"""Load on a live engine, from one seed: requests that come, generate, are aborted, and weights that
change."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from support.live_engine import LiveEngine
from support.live_model import PromptTree


@dataclass(frozen=True, slots=True)
class LoadShape:
    """How a load is. ``width``: of the tree of prompts; ``at_once``: requests in the engine.

    ``resets``, ``forgets``: likelihood, per step, that the weights change, and that the GPU's
    prefix cache is emptied (so that more comes from the tiers). ``aborts``: likelihood, per
    request, that it is aborted on the way.
    """

    width: int = 6
    at_once: int = 6
    most_tokens: int = 60
    aborts: float = 0.1
    forgets: float = 0.05
    resets: float = 0.0


class LiveLoad:
    """Drives an engine. The choices depend on the seed and on what the engine does, not on a clock
    of their own."""

    def __init__(self, engine: LiveEngine, seed: int, shape: LoadShape | None = None) -> None:
        self.engine = engine
        self.seed = seed
        self.finished = 0
        self._shape = shape or LoadShape()
        self._rng = random.Random(seed)
        self._tree = PromptTree(self._shape.width, most_tokens=self._shape.most_tokens)
        self._started = 0
        self._doomed: dict[str, int] = {}
        """Steps until a request is aborted."""

    def run(self, done: Callable[[], bool]) -> None:
        """Run until ``done()``, which is asked after each step, or until an error. Requests may be
        left over."""
        while not done():
            self.step()

    def run_requests(self, count: int) -> None:
        """Run so many requests to their end, and then until the engine is quiet."""
        last = self._started + count
        while self._started < last or self.engine.requests:
            self.step(more=self._started < last)
        self.engine.run_until_quiet()

    def end(self) -> None:
        """Abort what is left, and run until the engine is quiet."""
        for request in list(self.engine.queued):
            self.engine.abort(request)
        self._doomed.clear()
        self.engine.run_until_quiet()

    def step(self, *, more: bool = True) -> None:
        """Let things happen, and run a step of the engine."""
        engine, rng, shape = self.engine, self._rng, self._shape
        if rng.random() < shape.forgets:
            engine.pool.forget_all()
        if rng.random() < shape.resets:
            engine.change_weights()
        while more and len(engine.queued) < shape.at_once and rng.random() < 0.7:
            self._add()
        self._abort_doomed()
        before = set(engine.requests)
        engine.step(rng.choice((4, 16, 64)))
        for request in list(engine.running):
            if len(request.tokens) >= request.most_tokens:
                request.finishing = True
        self.finished += len(before - set(engine.requests))

    def _add(self) -> None:
        rng = self._rng
        self._started += 1
        request = self.engine.add(f"s{self.seed}-{self._started}", self._tree.draw(rng), rng.randrange(7))
        if rng.random() < self._shape.aborts:
            self._doomed[request.id] = rng.randrange(12)

    def _abort_doomed(self) -> None:
        for request in list(self.engine.queued):
            if request.id in self._doomed:
                self._doomed[request.id] -= 1
                if self._doomed[request.id] < 0:
                    del self._doomed[request.id]
                    self.engine.abort(request)
