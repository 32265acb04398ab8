# SPDX-License-Identifier: Apache-2.0
"""A manager with its tiers, an engine and one rank, stepped by hand and watched in each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.fake_requests import FakeRequest
from support.manager_parts import Sizes
from support.small_engine import SmallEngine

from kvdisk.blocks import BlockKey, Tier, make_block_key
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry

GEOMETRY = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)
"""Blocks of two tokens, which are letters here."""


def keys_of(prompt: str) -> list[BlockKey]:
    """Return the keys of a prompt's full blocks, of one group."""
    return [make_block_key(prompt[:end].encode(), 0) for end in range(2, len(prompt) + 1, 2)]


class TierBench(SmallEngine):
    """``cpu_slots``, ``nvme_slots``: by size class; none: no such tier. ``how``: of the
    configuration, in which what was used longest ago is evicted."""

    budget_tokens = 8

    def __init__(
        self,
        cpu_slots: Sequence[int] = (),
        nvme_slots: Sequence[int] = (),
        *,
        geometry: Geometry = GEOMETRY,
        segments: int = 1,
        drives: int = 1,
        gpu_blocks: int = 40,
        most_running: int = 2**31,
        **how: Any,
    ) -> None:
        if nvme_slots:
            how |= {"store_dirs": (Path("/nowhere"),), "nvme_bytes": 1}
        config = Config(**{"cpu_bytes": int(bool(cpu_slots)), "eviction": "lru"} | how)
        segments *= bool(nvme_slots)
        tiers = (tuple(cpu_slots), tuple(nvme_slots), segments)
        super().__init__(Sizes(geometry, config, gpu_blocks, *tiers, (), drives=drives, most_running=most_running))

    def live(self, segments: int | None = None) -> None:
        super().live(segments)
        self.catalog, self.stats = self.parts.catalog, self.manager.stats

    def rows(self, prompt: str) -> list[int]:
        """Return the rows of a prompt's full blocks; negative: the catalog does not have it."""
        return [self.catalog.find(key) for key in keys_of(prompt)]

    def held(self, prompt: str, tier: Tier = Tier.NVME) -> list[bool]:
        """Return which of a prompt's full blocks a tier has."""
        return [row >= 0 and self.catalog.readable(row, tier) for row in self.rows(prompt)]

    def add(self, prompt: str, *, finishing: bool = True) -> FakeRequest:
        """Let a request come, which ends when its prompt is computed, or one token later."""
        return self.come(prompt, int(not finishing), finishing=finishing)

    def finish(self) -> None:
        """Step until there is nothing left to do."""
        while self.engine.requests:
            self.step()
        self.idle()

    def idle(self, *, seconds: float = 0.01) -> None:
        """Step until the manager asks for no more steps. ``seconds``: of each."""
        for _ in range(40):
            self.step(seconds=seconds)
            if not self.manager.has_pending_work(self.now):
                return
        raise AssertionError("it keeps an idle engine stepping")
