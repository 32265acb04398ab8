# SPDX-License-Identifier: Apache-2.0
"""Who leaves a tier. A policy knows rows of the catalog and their order, nothing else. Scheduler thread only.

That of one chain the tail leaves before the head is not a policy's business: see ``tail_first``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey
from kvdisk.errors import ConfigError


class EvictionPolicy(Protocol):
    """Order of the copies of one tier and size class. A row is inserted once and removed once."""

    def insert(self, row: int) -> None:
        """A copy became READY."""

    def access(self, row: int) -> None:
        """A copy was used. Rows that are not there are ignored."""

    def remove(self, row: int) -> None:
        """A copy left the tier, for whatever reason; the row still has its key. Rows that are not there are ignored."""

    def fill(self, rows: NDArray[np.int32]) -> None:
        """Insert many rows at once, in this order, into an empty policy: what was there before a restart."""

    def proposals(self) -> Iterator[int]:
        """Yield rows in the order in which they should leave. Removes none: a row that the caller leaves where it is
        is proposed again by a later call. Not to be advanced after any other call."""


class RowLists:
    """Ordered lists of rows in two arrays: a row is in one list at most. Lists are numbered from 0.

    ``counts``: rows by list. Walk a list with ``oldest`` and ``newer``.
    """

    def __init__(self, list_count: int) -> None:
        # The first places are the lists' own ends; row r lives at r + list_count. Neighbours of an absent row are -1.
        self._ends = list_count
        self._older = array("i", range(list_count))
        self._newer = array("i", range(list_count))
        self.counts = [0] * list_count

    def append(self, row: int, number: int = 0) -> None:
        """Make a row the newest of a list."""
        place = row + self._ends
        while len(self._older) <= place:
            self._older.append(-1)
            self._newer.append(-1)
        assert self._older[place] == -1, "inserted twice"
        newest = self._older[number]
        self._older[place], self._newer[place] = newest, number
        self._newer[newest] = place
        self._older[number] = place
        self.counts[number] += 1

    def remove(self, row: int, number: int = 0) -> None:
        """Take a row out of the list that it is in."""
        place = row + self._ends
        older, newer = self._older[place], self._newer[place]
        assert older != -1
        self._newer[older], self._older[newer] = newer, older
        self._older[place] = self._newer[place] = -1
        self.counts[number] -= 1

    def holds(self, row: int) -> bool:
        """Whether the row is in any list."""
        place = row + self._ends
        return place < len(self._older) and self._older[place] != -1

    def oldest(self, number: int = 0) -> int:
        """Return the oldest row of a list; negative where it is empty."""
        return self._newer[number] - self._ends

    def newer(self, row: int) -> int:
        """Return the row after this one in its list; negative after the newest."""
        return self._newer[row + self._ends] - self._ends

    def fill(self, rows: NDArray[np.int32], number: int = 0) -> None:
        """Fill an empty list with rows that are in none, the oldest first."""
        if not len(rows):
            return
        assert sum(self.counts) == 0
        places = rows.astype(np.int32) + self._ends
        older = np.full(int(places.max()) + 1, -1, np.int32)
        older[: self._ends] = np.arange(self._ends)
        newer = older.copy()
        older[places[1:]], newer[places[:-1]] = places[:-1], places[1:]
        older[places[0]], newer[places[-1]] = number, number
        older[number], newer[number] = places[-1], places[0]
        self._older, self._newer = array("i", older.tobytes()), array("i", newer.tobytes())
        self.counts[number] = len(rows)


class LruPolicy:
    """Least recently used leaves first. Callers insert and access the blocks of a chain tail first."""

    def __init__(self) -> None:
        self._rows = RowLists(1)

    def insert(self, row: int) -> None:
        """Make a row the newest."""
        self._rows.append(row)

    def access(self, row: int) -> None:
        """Make a row the newest again."""
        if self._rows.holds(row):
            self._rows.remove(row)
            self._rows.append(row)

    def remove(self, row: int) -> None:
        """Take a row out; rows that are not there are ignored."""
        if self._rows.holds(row):
            self._rows.remove(row)

    def fill(self, rows: NDArray[np.int32]) -> None:
        """Insert many rows, the oldest first."""
        self._rows.fill(rows)

    def proposals(self) -> Iterator[int]:
        """Yield from the oldest on."""
        row = self._rows.oldest()
        while row >= 0:
            yield row
            row = self._rows.newer(row)


EVICTIONS = ("lru",)


def make_eviction(name: str, keys: Sequence[BlockKey]) -> EvictionPolicy:  # noqa: ARG001
    """Return a new policy by its configuration name. ``keys``: of the catalog's rows, read when a row is given."""
    if name == "lru":
        return LruPolicy()
    raise ConfigError(f"eviction must be 'lru', not {name!r}.")
