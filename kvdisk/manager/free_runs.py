# SPDX-License-Identifier: Apache-2.0
"""The free slots of one place as runs of neighbours, found by length. Pure; scheduler thread only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

LONGEST = 2048
"""Runs of this length and more are told apart only where one is not enough: else the bit set of a fresh tier of a
million slots would have as many bits, and each call would copy them."""
_LONG_ONLY: Final = 1 << LONGEST
"""The bit set of a place without shorter ones, as a fresh tier is."""


class FreeRuns:
    """Positions are plain integers; neighbours are those that differ by one. ``free``: how many there are.

    Each call takes time by the runs that it changes, not by those that there are: finding one is a look at a few
    words of a bit set, in which bit n says that there is a run of n, and the last one that there are longer ones.
    """

    __slots__ = ("_by_length", "_ends", "_lengths", "_starts", "free")

    def __init__(self) -> None:
        self.free = 0
        self._starts: dict[int, int] = {}
        """Length of each run, by its first position."""
        self._ends: dict[int, int] = {}
        """First position of each run, by the position behind its last."""
        self._by_length: dict[int, dict[int, None]] = {}
        self._lengths = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (first position, length) of each run. For tests and for dropping a segment."""
        yield from self._starts.items()

    def add(self, start: int, length: int) -> None:
        """Free a range, none of which was free."""
        self.free += length
        end = start + length
        after = self._starts.get(end)
        if after is not None:
            self._remove(end, after)
            end += after
        before = self._ends.get(start)
        if before is not None:
            self._remove(before, start - before)
            start = before
        self._insert(start, end - start)

    def count_shorter(self, length: int) -> int:
        """Return how many positions lie in runs shorter than ``length``, which is at most LONGEST."""
        assert length <= LONGEST
        return sum(short * len(self._by_length.get(short, ())) for short in range(1, length))

    def fit(self, count: int) -> int:
        """Return the length of the shortest run of at least ``count``, else of the longest; 0 where nothing is free.

        LONGEST stands for all lengths from there on.
        """
        least = min(count, LONGEST)
        longer = self._lengths >> least
        if longer:
            return least + (longer & -longer).bit_length() - 1
        return max(0, self._lengths.bit_length() - 1)

    def take(self, count: int) -> tuple[int, int]:
        """Take up to ``count`` neighbours of the run that ``fit`` finds: (first position, how many). Some are free."""
        kind = LONGEST if self._lengths == _LONG_ONLY else self.fit(count)
        found, starts = self._by_length[kind], self._starts
        start = next(reversed(found))
        length = starts[start]
        if length < count and kind == LONGEST:
            start = max(found, key=starts.__getitem__)  # there are few so long
            length = starts[start]
        if length - count >= LONGEST:  # it stays among the longest: as when a fresh tier fills
            del found[start], starts[start]
            rest = start + count
            found[rest] = None
            starts[rest] = length - count
            self._ends[start + length] = rest
            length = count
        else:
            self._remove(start, length)
            if length > count:
                self._insert(start + count, length - count)
                length = count
        self.free -= length
        return start, length

    def drop(self, first: int, end: int) -> None:
        """Forget all runs within a range."""
        gone = [(start, length) for start, length in self._starts.items() if first <= start < end]
        for start, length in gone:
            self._remove(start, length)
            self.free -= length

    def _insert(self, start: int, length: int) -> None:
        self._starts[start] = length
        self._ends[start + length] = start
        kind = min(length, LONGEST)
        same = self._by_length.get(kind)
        if same is None:
            self._by_length[kind] = {start: None}
            self._lengths |= 1 << kind
        else:
            same[start] = None

    def _remove(self, start: int, length: int) -> None:
        del self._starts[start], self._ends[start + length]
        kind = min(length, LONGEST)
        same = self._by_length[kind]
        del same[start]
        if not same:
            del self._by_length[kind]
            self._lengths ^= 1 << kind
