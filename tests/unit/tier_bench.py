# SPDX-License-Identifier: Apache-2.0
"""A manager with its tiers, an engine and one rank, stepped by hand and watched in each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.fake_engine import FakeEngine
from support.fake_neighbours import FakeNeighbours
from support.fake_ranks import FakeRank
from support.fake_requests import FakeRequest
from support.manager_parts import ManagerParts, Sizes
from support.manager_watch import ManagerWatch

from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.memory_index import MemoryIndex

GEOMETRY = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)
"""Blocks of two tokens, which are letters here."""


class TierBench:
    """``cpu_slots``, ``nvme_slots``: by size class; none: no such tier. ``how``: of the
    configuration."""

    def __init__(
        self,
        cpu_slots: Sequence[int] = (),
        nvme_slots: Sequence[int] = (),
        *,
        geometry: Geometry = GEOMETRY,
        segments: int = 1,
        drives: int = 1,
        gpu_blocks: int = 40,
        most_running: int | None = None,
        **how: Any,
    ) -> None:
        if nvme_slots:
            how |= {"store_dirs": (Path("/nowhere"),), "nvme_bytes": 1}
        running = {} if most_running is None else {"most_running": most_running}
        config = Config(cpu_bytes=int(bool(cpu_slots)), **how)
        sizes = Sizes(
            geometry,
            config,
            gpu_blocks,
            tuple(cpu_slots),
            tuple(nvme_slots),
            segments * bool(nvme_slots),
            (),
            drives=drives,
            **running,
        )
        self.rank, self.index, self.neighbours, self.added = FakeRank(0), MemoryIndex(), FakeNeighbours([]), 0
        self.engine = FakeEngine(geometry, sizes.block_count, [self.rank], *running.values())
        self.engine.now = 1000.0
        self.parts = ManagerParts.make(sizes, self.engine, self.index, 0, self.neighbours if nvme_slots else None)
        self.watch = ManagerWatch(sizes, self.parts, self.engine, [self.rank], self.index)
        self.manager, self.catalog, self.stats = self.parts.manager, self.parts.catalog, self.parts.manager.stats

    def add(self, prompt: str, *, finishing: bool = True) -> FakeRequest:
        """Let a request come, which ends when its prompt is computed."""
        self.added += 1
        request = self.engine.add(f"request {self.added}", prompt, int(not finishing))
        request.finishing = finishing
        return request

    def step(self, tokens: int = 8, *, work: bool = True, seconds: float = 0.01) -> None:
        """Run one step of the engine. ``work``: the rank and the index end what they have."""
        self.engine.now += seconds
        self.engine.schedule(tokens)
        self.engine.forward()
        while work and self.rank.runnable:
            self.rank.run_job(self.rank.runnable[0])
        self.engine.update()
        if work:
            self.index.commit()
        self.watch.check()

    def serve(self, prompt: str, *, cold: bool = False) -> None:
        """Serve a prompt to its end, and step until nothing is left to do. ``cold``: the GPU has
        forgotten all."""
        if cold:
            self.engine.pool.forget_all()
        request = self.add(prompt)
        while request.id in self.engine.requests:
            self.step()
        self.idle()

    def idle(self) -> None:
        """Step until the manager asks for no more steps."""
        for _ in range(40):
            self.step()
            if not self.manager.has_pending_work(self.engine.now):
                return
        raise AssertionError("it keeps an idle engine stepping")
