# SPDX-License-Identifier: Apache-2.0
"""What became loadable from a tier and what left it, in order, for whoever routes requests.
Scheduler thread only.

There is a journal only where somebody listens. It is read in pieces, once a step, and is bounded:
when too much waits everything is forgotten, and the reader is told that nothing of before holds.
That hides blocks, and invents none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvdisk.blocks import BlockKey, Tier
from kvdisk.stats import Stats

MOST_WAITING = 65536
"""Changes that wait to be taken; many keys of one call count as one."""
MOST_TAKEN = 4096
"""Keys that one ``take`` returns: bounds a step, where a start or a reset has a million to tell."""


class BlockChange(NamedTuple):
    """Copies of ``keys`` in one tier, all READY now (``stored``), or all gone."""

    tier: Tier
    stored: bool
    keys: Sequence[BlockKey]


@dataclass(slots=True)
class Taken:
    """What ``take`` returns. ``cleared``: forget all that was told before; then come
    ``changes``."""

    cleared: bool
    changes: list[BlockChange]


class Journal:
    """Changes of copies, the oldest first."""

    def __init__(self, stats: Stats, most_waiting: int = MOST_WAITING) -> None:
        self._stats = stats
        self._most_waiting = most_waiting
        self._waiting: deque[BlockChange] = deque()
        self._taken_of_first = 0
        self._cleared = False

    def note(self, tier: Tier, stored: bool, keys: Sequence[BlockKey]) -> None:
        """Add a change. ``keys`` must not change any more."""
        if not keys:
            return
        if len(self._waiting) >= self._most_waiting:
            self._stats.add("lost_events", sum(len(change.keys) for change in self._waiting) - self._taken_of_first)
            self._waiting.clear()
            self._taken_of_first = 0
            self._cleared = True
        self._waiting.append(BlockChange(tier, stored, keys))

    @property
    def waits(self) -> bool:
        """Whether there is something to take."""
        return self._cleared or bool(self._waiting)

    def take(self, most_keys: int = MOST_TAKEN) -> Taken:
        """Return the oldest changes, of ``most_keys`` keys in all."""
        taken = Taken(self._cleared, [])
        self._cleared = False
        left = most_keys
        while self._waiting and left > 0:
            tier, stored, keys = self._waiting[0]
            start = self._taken_of_first
            piece = keys if start == 0 and len(keys) <= left else keys[start : start + left]
            taken.changes.append(BlockChange(tier, stored, piece))
            left -= len(piece)
            self._taken_of_first = start + len(piece)
            if self._taken_of_first == len(keys):
                self._waiting.popleft()
                self._taken_of_first = 0
        return taken
