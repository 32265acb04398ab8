# SPDX-License-Identifier: Apache-2.0
"""Who leaves a tier. A policy knows rows of the catalog and their order, nothing else. Scheduler thread only."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol

from kvdisk.errors import ConfigError


class EvictionPolicy(Protocol):
    """Order of the copies of one tier and size class. A row is inserted once and removed once."""

    def insert(self, row: int) -> None:
        """A copy became READY."""

    def access(self, row: int) -> None:
        """A copy was used by a load."""

    def remove(self, row: int) -> None:
        """A copy left the tier, for whatever reason. Rows that are not there are ignored."""

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Return up to ``count`` rows that may leave, the first to leave first. Does not remove them."""


class LruPolicy:
    """Least recently used leaves first: a doubly linked list in two arrays, row by row.

    Callers insert and access the blocks of a chain tail first, so that of one chain the tail leaves
    before the head.
    """

    _MAX_SKIPPED = 256
    """Rows that one search passes over because they are pinned: bounds a step, not the result in practice."""

    def __init__(self) -> None:
        # Position 0 is the list's own end; row r lives at r + 1. older/newer of an absent row are -1.
        self._older = array("l", [0])
        self._newer = array("l", [0])

    def insert(self, row: int) -> None:
        """Make a row the newest."""
        place = row + 1
        while len(self._older) <= place:
            self._older.append(-1)
            self._newer.append(-1)
        assert self._older[place] == -1, "inserted twice"
        newest = self._older[0]
        self._older[place], self._newer[place] = newest, 0
        self._newer[newest] = place
        self._older[0] = place

    def access(self, row: int) -> None:
        """Make a row the newest again."""
        if self.holds(row):
            self.remove(row)
            self.insert(row)

    def remove(self, row: int) -> None:
        """Take a row out; rows that are not there are ignored."""
        if not self.holds(row):
            return
        place = row + 1
        older, newer = self._older[place], self._newer[place]
        self._newer[older], self._older[newer] = newer, older
        self._older[place] = self._newer[place] = -1

    def holds(self, row: int) -> bool:
        """Whether the row is in the list."""
        return row + 1 < len(self._older) and self._older[row + 1] != -1

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Return the oldest evictable rows."""
        found: list[int] = []
        skipped = 0
        place = self._newer[0]
        while place and len(found) < count and skipped < self._MAX_SKIPPED:
            if evictable(place - 1):
                found.append(place - 1)
            else:
                skipped += 1
            place = self._newer[place]
        return found


def make_eviction(name: str) -> EvictionPolicy:
    """Return a new policy by its configuration name."""
    if name == "lru":
        return LruPolicy()
    raise ConfigError(f"eviction must be 'lru', not {name!r}.")
