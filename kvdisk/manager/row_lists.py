# SPDX-License-Identifier: Apache-2.0
"""Ordered lists of rows of the catalog, without an object for a row. Scheduler thread only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ABSENT: Final = 2**32 - 1
"""Both neighbours of a row that is in no list."""
GROWN_ROWS = 64
"""Rows that an array grows by at a time."""


class RowLists:
    """Ordered lists of rows in two arrays: a row is in one list at most. Lists are numbered from 0.

    ``counts``: rows by list. Walk a list with ``oldest`` and ``newer``.
    """

    def __init__(self, list_count: int) -> None:
        # The first places are the lists' own ends; row r lives at r + list_count.
        self._ends = list_count
        self._older = array("I", range(list_count))
        self._newer = array("I", range(list_count))
        self.counts = [0] * list_count

    def append(self, rows: Sequence[int], number: int = 0) -> None:
        """Make rows the newest of a list, the last of them the newest of all."""
        if not rows:
            return
        ends = self._ends
        lacking = max(rows) + ends + 1 - len(self._older)
        if lacking > 0:
            nothing = array("I", [_ABSENT]) * (lacking + GROWN_ROWS)
            self._older += nothing
            self._newer += nothing
        older, newer = self._older, self._newer
        newest = older[number]
        for row in rows:
            place = row + ends
            assert older[place] == _ABSENT, "inserted twice"
            older[place] = newest
            newer[newest] = place
            newest = place
        newer[newest] = number
        older[number] = newest
        self.counts[number] += len(rows)

    def remove(self, rows: Sequence[int], number: int = 0) -> None:
        """Take rows out of the list that all of them are in."""
        ends, olders, newers = self._ends, self._older, self._newer
        for row in rows:
            place = row + ends
            older, newer = olders[place], newers[place]
            assert older != _ABSENT
            newers[older] = newer
            olders[newer] = older
            olders[place] = newers[place] = _ABSENT
        self.counts[number] -= len(rows)

    def move(self, row: int, source: int, target: int) -> None:
        """Make a row of one list the newest of another, or of the same."""
        olders, newers, place = self._older, self._newer, row + self._ends
        older, newer = olders[place], newers[place]
        assert older != _ABSENT
        newers[older], olders[newer] = newer, older
        newest = olders[target]
        newers[newest] = olders[target] = place
        olders[place], newers[place] = newest, target
        if source != target:
            self.counts[source] -= 1
            self.counts[target] += 1

    def holds(self, row: int) -> bool:
        """Whether the row is in any list."""
        place = row + self._ends
        return place < len(self._older) and self._older[place] != _ABSENT

    def held(self, rows: Sequence[int]) -> list[int]:
        """Return those of some rows that are in any list."""
        older, ends, end = self._older, self._ends, len(self._older) - self._ends
        return [row for row in rows if row < end and older[row + ends] != _ABSENT]

    def oldest(self, number: int = 0) -> int:
        """Return the oldest row of a list; negative where it is empty."""
        return self._newer[number] - self._ends

    def newer(self, row: int) -> int:
        """Return the row after this one in its list; negative after the newest."""
        return self._newer[row + self._ends] - self._ends

    def first(self, count: int, number: int = 0) -> list[int]:
        """Return the oldest rows of a list, which has so many."""
        rows = [self.oldest(number)]
        while len(rows) < count:
            rows.append(self.newer(rows[-1]))
        return rows

    def fill(self, rows: NDArray[np.int32], numbers: NDArray[np.uint8]) -> None:
        """Fill empty lists with rows, the oldest first. ``numbers``: the list of each."""
        assert sum(self.counts) == 0
        places = rows.astype(np.uint32) + self._ends
        older = np.full(int(places.max(initial=self._ends - 1)) + 1, _ABSENT, np.uint32)
        older[: self._ends] = np.arange(self._ends)
        newer = older.copy()
        for number in range(self._ends):
            alike = places[numbers == number]
            ring = np.concatenate(([number], alike)).astype(np.uint32)
            older[ring], newer[ring] = np.roll(ring, 1), np.roll(ring, -1)
            self.counts[number] = len(alike)
        self._older, self._newer = array("I", older.tobytes()), array("I", newer.tobytes())
