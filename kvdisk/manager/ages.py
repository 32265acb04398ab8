# SPDX-License-Identifier: Apache-2.0
"""How old blocks may get: with ``max_age_s`` none is served that was first stored longer ago, and
its copies end, some in each step. Scheduler thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvdisk.blocks import BlockKey
from kvdisk.manager.catalog import NONE
from kvdisk.manager.parts import Parts
from kvdisk.manager.tiers import Tiers, TierSpace

LOOK_S = 10
"""How often old copies are looked for: a million blocks take a millisecond or two. They are not
served meanwhile."""
MOST_ENDED = 256
"""Copies that a step ends."""


class Ages:
    """Hides blocks that are too old, and ends their copies. Without ``max_age_s`` it does
    nothing."""

    def __init__(self, parts: Parts, tiers: Tiers) -> None:
        self._config = parts.config
        self._catalog = parts.catalog
        self._stats = parts.stats
        self._state = parts.state
        self._tiers = tiers
        self._oldest_s = 0
        self._look_at_s = 0
        self._found: deque[tuple[TierSpace, int]] = deque()
        """Copies that were too old when they were looked for; a row may be another block's by
        now."""

    def note_time(self, now_s: int) -> None:
        """Set the time, in seconds since the Unix epoch."""
        self._state.now_s = now_s
        if self._config.max_age_s is None:
            return
        self._oldest_s = max(self._oldest_s, int(now_s - self._config.max_age_s))
        self._catalog.hide_older(self._oldest_s)

    @property
    def any(self) -> bool:
        """Whether copies wait to be ended."""
        return bool(self._found)

    def end_some(self) -> None:
        """End some of the copies that are too old, the oldest first. Call it once a step."""
        if not self._oldest_s:
            return
        if not self._found and self._state.now_s >= self._look_at_s:
            self._look_at_s = self._state.now_s + LOOK_S
            for space in self._tiers:
                self._found.extend((space, row) for row in self._catalog.columns(space.tier).too_old().tolist())
        for _ in range(min(MOST_ENDED, len(self._found))):
            space, row = self._found.popleft()
            self._end(space, (row,))

    def end(self, keys: Sequence[BlockKey]) -> None:
        """End those of these blocks' copies that are too old, because they are to be stored
        anew."""
        if self._oldest_s:
            rows = [row for row in self._catalog.find_all(keys) if row != NONE]
            for space in self._tiers:
                self._end(space, rows)

    def _end(self, space: TierSpace, rows: Sequence[int]) -> None:
        old = list(filter(self._catalog.columns(space.tier).is_too_old, rows))
        if old:
            space.discard(*old)
            self._stats.add(f"expired_blocks.{space.tier.label}", len(old))
