# SPDX-License-Identifier: Apache-2.0
"""The free slots of one place as runs of neighbours, found by length. Pure; scheduler thread only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

LONGEST = 2048
"""Runs of this length and more are told apart only where one is not enough: else the bit set of a fresh tier of a
million slots would have as many bits, and each call would copy them."""
_LONG: Final = 1 << LONGEST


class FreeRuns:
    """Positions are plain integers; neighbours are those that differ by one. ``free``: how many there are.

    Each call takes time by the runs that it changes, not by those that there are: finding one is a look at a few
    words of a bit set, in which bit n says that there is a run of n, and the last one that there are longer ones.
    One of the longest is open: it is cut without changing the tables, as when a fresh tier fills.
    """

    __slots__ = ("_by_length", "_ends", "_lengths", "_open", "_open_length", "_starts", "free")

    def __init__(self) -> None:
        self.free = 0
        self._starts: dict[int, int] = {}
        """Length of each run, by its first position."""
        self._ends: dict[int, int] = {}
        """First position of each run, by the position behind its last."""
        self._by_length: dict[int, dict[int, None]] = {}
        self._lengths = 0
        # First position and length of the open run, which is in no table; 0: there is none.
        self._open = self._open_length = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (first position, length) of each run. For tests and for dropping a segment."""
        if self._open_length:
            yield self._open, self._open_length
        yield from self._starts.items()

    def add(self, start: int, length: int) -> None:
        """Free a range, none of which was free."""
        self.free += length
        end = start + length
        if self._open_length and (end == self._open or start == self._open + self._open_length):
            self._close()
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
        least, lengths = min(count, LONGEST), self._lengths
        if self._open_length:
            if not lengths:
                return LONGEST
            lengths |= _LONG
        longer = lengths >> least
        if longer:
            return least + (longer & -longer).bit_length() - 1
        return max(0, lengths.bit_length() - 1)

    def take(self, count: int) -> tuple[int, int]:
        """Take up to ``count`` neighbours of the run that ``fit`` finds: (first position, how many). Some are free."""
        if not self._lengths and self._open_length >= LONGEST + count:  # a fresh tier fills
            start = self._open
            self._open += count
            self._open_length -= count
            self.free -= count
            return start, count
        kind = self.fit(count)
        if kind == LONGEST:
            if self._open_length < count:
                self._open_for(count)
            start, length = self._open, min(count, self._open_length)
            self._open += length
            self._open_length -= length
            if self._open_length < LONGEST:
                self._close()
        else:
            start = next(reversed(self._by_length[kind]))
            length = self._starts[start]
            self._remove(start, length)
            if length > count:
                self._insert(start + count, length - count)
                length = count
        self.free -= length
        return start, length

    def _open_for(self, count: int) -> None:
        """Open one of the longest runs, the longest of them where ``count`` needs that. There are few so long."""
        self._close()
        found, starts = self._by_length[LONGEST], self._starts
        start = next(reversed(found))
        if starts[start] < count:
            start = max(found, key=starts.__getitem__)
        length = starts[start]
        self._remove(start, length)
        self._open, self._open_length = start, length

    def _close(self) -> None:
        if self._open_length:
            length, self._open_length = self._open_length, 0
            self._insert(self._open, length)

    def drop(self, first: int, end: int) -> None:
        """Forget all runs within a range."""
        if first <= self._open < end:
            self._close()
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
