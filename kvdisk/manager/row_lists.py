# SPDX-License-Identifier: Apache-2.0
"""Ordered lists of rows of the catalog, without an object for a row. Scheduler thread only."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

NO_LIST: Final = 255
GROWN_ROWS = 64
"""Rows that an array grows by at a time."""


class RowLists:
    """Ordered lists of rows: a row is in one list at most. Lists are numbered from 0.

    ``counts``: rows by list.
    """

    def __init__(self, list_count: int) -> None:
        # The first places are the lists' own ends; row r lives at r + list_count.
        self._ends = list_count
        self._older = array("I", range(list_count))
        self._newer = array("I", range(list_count))
        self._number_of = bytearray()
        self.counts = [0] * list_count

    def append(self, rows: Sequence[int], numbers: Iterable[int] = repeat(0)) -> None:
        """Make each row in turn the newest of a list. ``numbers``: the list of each."""
        self._reserve(max(rows, default=-1))
        olders, newers, number_of, counts, ends = self._older, self._newer, self._number_of, self.counts, self._ends
        for row, number in zip(rows, numbers, strict=False):
            assert number_of[row] == NO_LIST, "inserted twice"
            older, place = olders[number], row + ends
            newers[older] = olders[number] = place
            olders[place], newers[place] = older, number
            number_of[row] = number
            counts[number] += 1

    def _reserve(self, row: int) -> None:
        """Have place for rows up to this one."""
        lacking = row + 1 - len(self._number_of)
        if lacking > 0:
            nothing = array("I", [0]) * (lacking + GROWN_ROWS)
            self._older += nothing
            self._newer += nothing
            self._number_of += bytes([NO_LIST]) * (lacking + GROWN_ROWS)

    def remove(self, rows: Iterable[int]) -> None:
        """Take rows out of their lists; those that are in none are ignored."""
        olders, newers, numbers, counts, ends = self._older, self._newer, self._number_of, self.counts, self._ends
        end = len(numbers)
        for row in rows:
            number = numbers[row] if row < end else NO_LIST
            if number != NO_LIST:
                older, newer = olders[row + ends], newers[row + ends]
                newers[older], olders[newer] = newer, older
                counts[number] -= 1
                numbers[row] = NO_LIST

    def move(self, rows: Iterable[int], numbers: Iterable[int]) -> None:
        """Make each row in turn the newest of another list, or of the same; those that are in none
        are ignored."""
        olders, newers, number_of, counts, ends = self._older, self._newer, self._number_of, self.counts, self._ends
        end = len(number_of)
        for row, number in zip(rows, numbers, strict=True):
            before = number_of[row] if row < end else NO_LIST
            if before == NO_LIST:
                continue
            place = row + ends
            older, newer = olders[place], newers[place]
            newers[older], olders[newer] = newer, older
            newest = olders[number]
            newers[newest] = olders[number] = place
            olders[place], newers[place] = newest, number
            number_of[row] = number
            counts[before] -= 1
            counts[number] += 1

    def insert_before(self, row: int, newer: int) -> None:
        """Put a row that is in no list before one that is in some."""
        self._reserve(row)
        number = self._number_of[newer]
        olders, newers, place, newer = self._older, self._newer, row + self._ends, newer + self._ends
        assert self._number_of[row] == NO_LIST and number != NO_LIST
        older = olders[newer]
        newers[older] = olders[newer] = place
        olders[place], newers[place] = older, newer
        self._number_of[row] = number
        self.counts[number] += 1

    def number_of(self, row: int) -> int:
        """Return the list that a row is in."""
        number = self._number_of[row]
        assert number != NO_LIST
        return number

    def numbers_of(self, rows: Iterable[int]) -> list[int]:
        """Return the lists that rows are in: each is in one."""
        return list(map(self._number_of.__getitem__, rows))

    def among(self, rows: Iterable[int]) -> list[int]:
        """Return those of some rows that are in a list; NONE is in none."""
        numbers, end = self._number_of, len(self._number_of)
        return [row for row in rows if 0 <= row < end and numbers[row] != NO_LIST]

    def __contains__(self, row: int) -> bool:
        return row < len(self._number_of) and self._number_of[row] != NO_LIST

    def held(self, rows: Iterable[int]) -> list[int]:
        """Return those of some rows that are in any list."""
        number_of, end = self._number_of, len(self._number_of)
        return [row for row in rows if row < end and number_of[row] != NO_LIST]

    def oldest(self, number: int = 0) -> int:
        """Return the oldest row of a list; negative where it is empty."""
        return self._newer[number] - self._ends

    def newer(self, row: int) -> int:
        """Return the row after this one in its list; negative after the newest."""
        return self._newer[row + self._ends] - self._ends

    def walk(self, number: int = 0) -> Iterator[int]:
        """Yield the rows of a list from the oldest on."""
        row = self.oldest(number)
        while row >= 0:
            yield row
            row = self.newer(row)

    def fill(self, rows: NDArray[np.int32], numbers: NDArray[np.uint8]) -> None:
        """Fill empty lists with rows, the oldest first. ``numbers``: the list of each."""
        assert sum(self.counts) == 0
        count = int(rows.max(initial=-1)) + 1
        number_of = np.full(count, NO_LIST, np.uint8)
        number_of[rows] = numbers
        older, newer = (np.arange(count + self._ends, dtype=np.uint32) for _ in range(2))
        for number in range(self._ends):
            alike = rows[numbers == number].astype(np.uint32) + self._ends
            ring = np.concatenate(([number], alike)).astype(np.uint32)
            older[ring], newer[ring] = np.roll(ring, 1), np.roll(ring, -1)
            self.counts[number] = len(alike)
        self._number_of = bytearray(number_of)
        self._older, self._newer = array("I", older.tobytes()), array("I", newer.tobytes())
