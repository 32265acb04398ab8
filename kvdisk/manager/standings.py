# SPDX-License-Identifier: Apache-2.0
"""For how long which blocks leave before others, after them, or not at all, because a KV hint says
so: by key, whether a tier has the block yet or not. Scheduler thread only."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Final

from kvdisk.blocks import BlockKey

FIRST, LATE, STAYS = range(3)
"""The standings of a block: it leaves before all others, after them, or not at all."""
MOST_STANDINGS: Final = 1 << 18
MOST_ENDED: Final = 1024
"""Standings that end in one step, at most: the others end in the next."""


class Standings:
    """The standings of blocks, each until its second is over. Time is what ``take_ended`` was given
    last.

    ``held``: standing and end of each block that has one. ``clipped``: whether more were to stay,
    or to have a standing, than may, since this was last set to False.
    """

    def __init__(self) -> None:
        self.held: dict[BlockKey, tuple[int, int]] = {}
        self.now = 0.0
        self.clipped = False
        self._ends: dict[int, dict[BlockKey, None]] = {}
        """The blocks by the second in which their standing ends."""
        self._seconds: list[int] = []
        """Those seconds, as a heap."""

    def of(self, key: BlockKey) -> int | None:
        """Return a block's standing; None: it leaves as it deserves."""
        held = self.held.get(key)
        return None if held is None else held[0]

    def set(self, key: BlockKey, standing: int, seconds: float) -> None:
        """Give a block a standing for so long from now on.

        Of two that are to keep it, the stronger holds, and of equal ones the longer. FIRST ends
        both.
        """
        end = math.ceil(self.now + seconds)
        held = self.held.get(key)
        if held is not None:
            if standing != FIRST and held >= (standing, end):
                return
            self.forget(key)
        elif len(self.held) >= MOST_STANDINGS:
            self.clipped = True
            return
        if end not in self._ends:
            self._ends[end] = {}
            heappush(self._seconds, end)
        self._ends[end][key] = None
        self.held[key] = (standing, end)

    def forget(self, key: BlockKey) -> None:
        """End a block's standing, if it has one."""
        held = self.held.pop(key, None)
        if held is not None:
            del self._ends[held[1]][key]

    def take_ended(self, now: float) -> list[BlockKey]:
        """Learn the time. Return blocks whose standing has ended by now."""
        self.now = now
        ended: list[BlockKey] = []
        while self._seconds and self._seconds[0] <= now and len(ended) < MOST_ENDED:
            keys = self._ends[self._seconds[0]]
            if keys:
                key, _ = keys.popitem()
                del self.held[key]
                ended.append(key)
            else:
                del self._ends[heappop(self._seconds)]
        return ended
