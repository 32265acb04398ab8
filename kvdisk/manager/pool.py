# SPDX-License-Identifier: Apache-2.0
"""Slots of one tier: each is in exactly one of free, used or limbo (invariant 1).

Used: held by one copy. Limbo: its record's deletion is not committed yet. A zombie, which a late
transfer may still touch, is held by a doomed copy that keeps its pin. Scheduler thread only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import Slot

FREE, USED, LIMBO = 1, 2, 3
_SHIFT = 32
_INDEX = (1 << _SHIFT) - 1
"""A slot's position: its segment, shifted, and its index. Those of two segments never touch."""


_Range = tuple[int, int, int]
"""Slots that follow each other: segment, first index, length."""


class FreeRuns:
    """The free slots of one size class on one drive as runs of neighbours, found by length.

    Positions are plain integers; neighbours differ by one. ``free``: how many there are.
    """

    def __init__(self) -> None:
        self.free = 0
        self._lengths: dict[int, int] = {}
        """Length of each run, by its first position."""
        self._starts: dict[int, int] = {}
        """First position of each run, by the position behind its last."""
        self._by_length: dict[int, dict[int, None]] = {}
        self._sorted: list[int] = []
        """The lengths that there are, ascending."""

    def add(self, start: int, length: int) -> None:
        """Free a range, none of which was free."""
        self.free += length
        end = start + length
        if end in self._lengths:
            end += self._remove(end)
        if start in self._starts:
            start = self._starts[start]
            self._remove(start)
        self._insert(start, end - start)

    def count_shorter(self, length: int) -> int:
        """Return how many positions lie in runs shorter than ``length``."""
        return sum(short * len(self._by_length.get(short, ())) for short in range(1, length))

    def take(self, count: int) -> tuple[int, int]:
        """Take up to ``count`` neighbours of the shortest run that has so many, else of the
        longest: (first position, how many). Some are free."""
        at = min(bisect_left(self._sorted, count), len(self._sorted) - 1)
        start = next(reversed(self._by_length[self._sorted[at]]))
        length = self._remove(start)
        if length > count:
            self._insert(start + count, length - count)
            length = count
        self.free -= length
        return start, length

    def drop(self, first: int, end: int) -> None:
        """Forget all runs within a range."""
        for start in [start for start in self._lengths if first <= start < end]:
            self.free -= self._remove(start)

    def _insert(self, start: int, length: int) -> None:
        self._lengths[start] = length
        self._starts[start + length] = start
        if length not in self._by_length:
            self._by_length[length] = {}
            insort(self._sorted, length)
        self._by_length[length][start] = None

    def _remove(self, start: int) -> int:
        """Take a run out of the tables; return its length."""
        length = self._lengths.pop(start)
        del self._starts[start + length]
        alike = self._by_length[length]
        del alike[start]
        if not alike:
            del self._by_length[length]
            del self._sorted[bisect_left(self._sorted, length)]
        return length


class SlotPool:
    """The slots of a tier's segments, handed out in runs of neighbours where there are any.

    Each segment belongs to one size class and lies on one drive. ``free``, ``limbo`` and ``total``
    count slots by size class.
    """

    def __init__(self, size_class_count: int) -> None:
        self.free = [0] * size_class_count
        self.total = [0] * size_class_count
        self.limbo = [0] * size_class_count
        self.states: dict[int, bytearray] = {}
        """Of each slot, by segment: FREE, USED or LIMBO."""
        self._place_of: dict[int, tuple[int, int]] = {}
        """Size class and drive, by segment."""
        self._runs: defaultdict[tuple[int, int], FreeRuns] = defaultdict(FreeRuns)
        """By size class and drive."""
        self._limbo: deque[tuple[int, list[_Range]]] = deque()

    def add_segment(
        self, segment: int, size_class: int, slot_count: int, used: NDArray[np.uint32] | None = None, drive: int = 0
    ) -> None:
        """Add a segment; the indices in ``used`` are held by copies already, the rest is free."""
        assert segment not in self.states
        states = bytearray([FREE]) * slot_count
        if used is not None:
            np.frombuffer(states, np.uint8)[used] = USED
            assert states.count(USED) == len(used), "two copies in one slot"
        self.states[segment] = states
        self._place_of[segment] = (size_class, drive)
        is_free = np.frombuffer(states, np.uint8) == FREE
        edges = np.flatnonzero(np.diff(is_free, prepend=False, append=False)).tolist()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            self._runs[size_class, drive].add((segment << _SHIFT) + start, end - start)
        self.free[size_class] += states.count(FREE)
        self.total[size_class] += slot_count

    def retire_segment(self, segment: int) -> None:
        """Take a segment out of service; its used slots leave as they are released."""
        states, place = self.states.pop(segment), self._place_of.pop(segment)
        self._runs[place].drop(segment << _SHIFT, segment + 1 << _SHIFT)
        size_class, _ = place
        self.free[size_class] -= states.count(FREE)
        self.limbo[size_class] -= states.count(LIMBO)
        self.total[size_class] -= len(states)

    def free_in_short_runs(self, length: int) -> int:
        """Return how many free slots lie in runs shorter than ``length``."""
        return sum(runs.count_shorter(length) for runs in self._runs.values())

    def free_on(self, size_class: int, drives: Collection[int]) -> int:
        """Return how many slots of a size class are free on some drives."""
        return sum(self._runs[size_class, drive].free for drive in drives)

    def allocate(self, size_class: int, count: int, drive: int = 0) -> list[Slot]:
        """Take up to ``count`` slots of a drive, all there are where there are fewer, in as few
        runs as there can be.

        The shortest run that is long enough is cut, and where none is, the longest are used up.
        """
        slots: list[Slot] = []
        runs = self._runs[size_class, drive]
        while len(slots) < count and runs.free:
            position, length = runs.take(count - len(slots))
            segment, start = position >> _SHIFT, position & _INDEX
            self.states[segment][start : start + length] = bytes([USED]) * length
            slots += [Slot(segment, index) for index in range(start, start + length)]
        self.free[size_class] -= len(slots)
        return slots

    def release(self, slots: Sequence[Slot]) -> None:
        """Make used slots free at once: for those that no committed record names."""
        self._change(_neighbours(slots), USED, FREE)

    def retain(self, slots: list[Slot], ticket: int) -> None:
        """Put used slots in limbo until ``ticket`` is committed. Tickets must not go down."""
        if slots:
            assert not self._limbo or self._limbo[-1][0] <= ticket
            ranges = _neighbours(slots)
            self._change(ranges, USED, LIMBO)
            self._limbo.append((ticket, ranges))

    def settle_limbo(self, committed: int) -> None:
        """Free the slots in limbo whose ticket is at most ``committed``."""
        while self._limbo and self._limbo[0][0] <= committed:
            self._change(self._limbo.popleft()[1], LIMBO, FREE)

    def _change(self, ranges: Sequence[_Range], source: int, target: int) -> None:
        for segment, start, length in ranges:
            states = self.states.get(segment)
            if states is None:
                continue  # its segment was retired
            found = states[start : start + length]
            assert found == bytes([source]) * length, f"slots {segment}/{start} and on are {list(found)}"
            states[start : start + length] = bytes([target]) * length
            place = size_class, _ = self._place_of[segment]
            self.limbo[size_class] += length * ((target == LIMBO) - (source == LIMBO))
            if target == FREE:
                self.free[size_class] += length
                self._runs[place].add((segment << _SHIFT) + start, length)

    def has_segment(self, segment: int) -> bool:
        """Whether the segment is in service."""
        return segment in self.states


def _neighbours(slots: Sequence[Slot]) -> list[_Range]:
    """Return slots that follow each other up or down as ranges."""
    ranges: list[_Range] = []
    segment, start, length = -1, 0, 0
    for place, index in slots:
        if place == segment and index in {start - 1, start + length}:
            start, length = min(start, index), length + 1
            ranges[-1] = (segment, start, length)
        else:
            segment, start, length = place, index, 1
            ranges.append((segment, start, length))
    return ranges
