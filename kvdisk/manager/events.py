# SPDX-License-Identifier: Apache-2.0
"""What became loadable from a tier and what left it, in order, for routers. Scheduler thread only.

There is a journal only where the engine publishes events. It is read in pieces, once a step, and is
bounded: when too much waits everything is forgotten, and the reader gets ``cleared``: nothing from
before holds. That hides blocks, and invents none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvdisk.blocks import BlockKey, Tier
from kvdisk.stats import Stats

MOST_WAITING = 65536
"""Changes that wait to be taken."""
MOST_TAKEN = 4096
"""Keys of a change, and of one ``take``: a start or a reset may have a million."""


class BlockChange(NamedTuple):
    """Copies of ``keys`` in one tier, all READY now (``stored``), or all gone."""

    tier: Tier
    stored: bool
    keys: Sequence[BlockKey]


@dataclass(slots=True)
class Taken:
    """``cleared``: forget all changes from before; then come ``changes``."""

    cleared: bool
    changes: list[BlockChange]


class Journal:
    """Changes of copies, the oldest first."""

    def __init__(self, stats: Stats, most_waiting: int = MOST_WAITING) -> None:
        self._stats = stats
        self._most_waiting = most_waiting
        self._waiting: deque[BlockChange] = deque()
        self._cleared = False

    def note(self, tier: Tier, stored: bool, keys: Sequence[BlockKey]) -> None:
        """Add a change. ``keys`` must not change any more."""
        for start in range(0, len(keys), MOST_TAKEN):
            if len(self._waiting) >= self._most_waiting:
                self._stats.add("lost_events", sum(len(change.keys) for change in self._waiting))
                self._waiting.clear()
                self._cleared = True
            self._waiting.append(BlockChange(tier, stored, keys[start : start + MOST_TAKEN]))

    @property
    def waits(self) -> bool:
        """Whether there is something to take."""
        return self._cleared or bool(self._waiting)

    def take(self) -> Taken:
        """Return the oldest changes, of ``MOST_TAKEN`` keys in all."""
        taken = Taken(self._cleared, [])
        self._cleared = False
        left = MOST_TAKEN
        while self._waiting and len(self._waiting[0].keys) <= left:
            taken.changes.append(self._waiting.popleft())
            left -= len(taken.changes[-1].keys)
        return taken
