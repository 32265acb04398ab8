# SPDX-License-Identifier: Apache-2.0
"""Slots of one tier: each is in exactly one of free, used or limbo (invariant 1).

Used: held by one copy. Limbo: its record's deletion is not committed yet. A zombie, which a late
transfer may still touch, is held by a doomed copy that keeps its pin. Scheduler thread only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import Slot

_FREE, _USED, _LIMBO = 1, 2, 3
_SHIFT = 32
_INDEX = (1 << _SHIFT) - 1
"""A slot's position is its segment's number times 2**32 and its index, so that those of two
segments never meet."""


_Range = tuple[int, int, int]
"""Slots that follow each other: segment, first index, length."""


class FreeRuns:
    """The free slots of one place as runs of neighbours, found by length.

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

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (first position, length) of each run."""
        yield from self._lengths.items()

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

    def fit(self, count: int) -> int:
        """Return the length of the shortest run of at least ``count``, else of the longest; 0 where
        nothing is free."""
        at = bisect_left(self._sorted, count)
        return self._sorted[min(at, len(self._sorted) - 1)] if self._sorted else 0

    def take(self, count: int) -> tuple[int, int]:
        """Take up to ``count`` neighbours of the run that ``fit`` finds: (first position, how
        many). Some are free."""
        start = next(reversed(self._by_length[self.fit(count)]))
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
        self._maps: dict[int, bytearray] = {}
        self._class_of: dict[int, int] = {}
        self._runs_of: dict[int, FreeRuns] = {}
        """By segment: those of its drive and size class."""
        self._runs: list[dict[int, FreeRuns]] = [{} for _ in range(size_class_count)]
        """By size class and drive."""
        self._limbo: deque[tuple[int, list[_Range]]] = deque()

    def add_segment(
        self, segment: int, size_class: int, slot_count: int, used: NDArray[np.uint32] | None = None, drive: int = 0
    ) -> None:
        """Add a segment; the indices in ``used`` are held by copies already, the rest is free."""
        assert segment not in self._maps
        states = bytearray([_FREE]) * slot_count
        taken = 0
        if used is not None:
            np.frombuffer(states, np.uint8)[used] = _USED
            taken = len(used)
            assert states.count(_USED) == taken, "two copies in one slot"
        self._maps[segment] = states
        self._class_of[segment] = size_class
        found = self._runs[size_class]
        if drive not in found:
            found[drive] = FreeRuns()
        runs = self._runs_of[segment] = found[drive]
        for start, end in _ranges_of(states, _FREE):
            runs.add((segment << _SHIFT) + start, end - start)
        self.free[size_class] += slot_count - taken
        self.total[size_class] += slot_count

    def retire_segment(self, segment: int) -> None:
        """Take a segment's free slots out of service for good; used ones leave as they are
        freed."""
        states = self._maps.pop(segment)
        size_class = self._class_of.pop(segment)
        self._runs_of.pop(segment).drop(segment << _SHIFT, segment + 1 << _SHIFT)
        self.free[size_class] -= states.count(_FREE)
        self.limbo[size_class] -= states.count(_LIMBO)
        self.total[size_class] -= len(states)

    def free_in_short_runs(self, length: int) -> int:
        """Return how many free slots lie in runs shorter than ``length``, over all size classes and
        drives."""
        return sum(runs.count_shorter(length) for found in self._runs for runs in found.values())

    def free_on(self, size_class: int, drives: Collection[int]) -> int:
        """Return how many slots of a size class are free on some drives."""
        return sum(runs.free for drive, runs in self._runs[size_class].items() if drive in drives)

    def allocate(self, size_class: int, count: int, drive: int | None = None) -> list[Slot]:
        """Take up to ``count`` slots, all there are where there are fewer, in as few runs as there
        can be.

        ``drive``: only from this one, by default from all. The shortest run that is long enough is
        cut, and where none is, the longest are used up.
        """
        slots: list[Slot] = []
        by_drive, wanted = self._runs[size_class], count
        places = [runs for place, runs in by_drive.items() if drive is None or place == drive]
        while wanted > 0:
            runs = _best(places, wanted)
            if runs is None or not runs.free:
                break
            position, length = runs.take(wanted)
            segment, start = position >> _SHIFT, position & _INDEX
            self._maps[segment][start : start + length] = bytes([_USED]) * length
            slots += [Slot(segment, index) for index in range(start, start + length)]
            wanted -= length
        self.free[size_class] -= count - wanted
        return slots

    def release(self, slots: Sequence[Slot]) -> None:
        """Make used slots free at once: for those that no committed record names."""
        self._change(_neighbours(slots), _USED, _FREE)

    def retain(self, slots: list[Slot], ticket: int) -> None:
        """Put used slots in limbo until the index has dealt with ``ticket``. Tickets must not go
        down."""
        if slots:
            assert not self._limbo or self._limbo[-1][0] <= ticket
            ranges = _neighbours(slots)
            self._change(ranges, _USED, _LIMBO)
            self._limbo.append((ticket, ranges))

    def settle_limbo(self, committed: int) -> None:
        """Free the slots in limbo whose ticket is at most ``committed``."""
        while self._limbo and self._limbo[0][0] <= committed:
            self._change(self._limbo.popleft()[1], _LIMBO, _FREE)

    def _change(self, ranges: Iterable[_Range], source: int, target: int) -> None:
        for segment, start, length in ranges:
            states = self._maps.get(segment)
            if states is None:
                continue  # its segment was retired
            end = start + length
            found = states[start:end]
            assert found == bytes([source]) * length, f"slots {segment}/{start}-{end - 1} are {list(found)}"
            states[start:end] = bytes([target]) * length
            size_class = self._class_of[segment]
            self.limbo[size_class] += length * ((target == _LIMBO) - (source == _LIMBO))
            if target == _FREE:
                self.free[size_class] += length
                self._runs_of[segment].add((segment << _SHIFT) + start, length)

    def used_indices(self, segment: int) -> list[int]:
        """Return the indices of a segment's slots that copies hold: for tests."""
        return [index for index, state in enumerate(self._maps[segment]) if state == _USED]

    def has_segment(self, segment: int) -> bool:
        """Whether the segment is in service."""
        return segment in self._maps

    def check(self) -> None:
        """Assert the counts and the runs against the maps (invariant 1). For tests."""
        for size_class, by_drive in enumerate(self._runs):
            maps = {segment: self._maps[segment] for segment, other in self._class_of.items() if other == size_class}
            assert self.free[size_class] == sum(states.count(_FREE) for states in maps.values())
            assert self.limbo[size_class] == sum(states.count(_LIMBO) for states in maps.values())
            assert self.total[size_class] == sum(len(states) for states in maps.values())
            assert self.free[size_class] == sum(runs.free for runs in by_drive.values())
            for runs in by_drive.values():
                expected = {
                    ((segment << _SHIFT) + start, end - start)
                    for segment, states in maps.items()
                    if self._runs_of[segment] is runs
                    for start, end in _ranges_of(states, _FREE)
                }
                assert set(runs) == expected
                assert runs.free == sum(length for _, length in expected)


def _best(places: Sequence[FreeRuns], count: int) -> FreeRuns | None:
    """Return the place with the shortest run of at least ``count``, else with the longest."""
    if len(places) == 1:
        return places[0]
    return min(places, key=lambda runs: ((fit := runs.fit(count)) < count, abs(fit - count)), default=None)


def _ranges_of(states: bytearray, state: int) -> list[tuple[int, int]]:
    """Return the ranges of slots in a state: first, and the one behind the last."""
    edges = np.flatnonzero(np.diff(np.frombuffer(states, np.uint8) == state, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _neighbours(slots: Sequence[Slot]) -> list[_Range]:
    """Return slots that follow each other up or down as ranges."""
    ranges: list[_Range] = []
    segment, start, end = -1, 0, 0
    for place, index in slots:
        if place == segment and index == end:
            end += 1
        elif place == segment and index == start - 1:
            start = index
        else:
            if end > start:
                ranges.append((segment, start, end - start))
            segment, start, end = place, index, index + 1
    if end > start:
        ranges.append((segment, start, end - start))
    return ranges
