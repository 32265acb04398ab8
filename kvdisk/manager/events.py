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
from kvdisk.manager import bounds
from kvdisk.stats import Stats


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

    def __init__(self, stats: Stats, most_waiting: int | None = None) -> None:
        self._stats = stats
        self._most_waiting = bounds.EVENTS if most_waiting is None else most_waiting
        self._waiting: deque[BlockChange] = deque()
        self._cleared = False

    def note(self, tier: Tier, stored: bool, keys: Sequence[BlockKey]) -> None:
        """Add a change. ``keys`` must not change any more."""
        for start in range(0, len(keys), bounds.EVENT_KEYS):
            if len(self._waiting) >= self._most_waiting:
                self._stats.add("lost_events", sum(len(change.keys) for change in self._waiting))
                self._waiting.clear()
                self._cleared = True
            self._waiting.append(BlockChange(tier, stored, keys[start : start + bounds.EVENT_KEYS]))

    @property
    def waits(self) -> bool:
        """Whether there is something to take."""
        return self._cleared or bool(self._waiting)

    def take(self) -> Taken:
        """Return the oldest changes, of ``bounds.EVENT_KEYS`` keys in all."""
        taken = Taken(self._cleared, [])
        self._cleared = False
        left = bounds.EVENT_KEYS
        while self._waiting and len(self._waiting[0].keys) <= left:
            taken.changes.append(self._waiting.popleft())
            left -= len(taken.changes[-1].keys)
        return taken
