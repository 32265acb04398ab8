# SPDX-License-Identifier: Apache-2.0
"""Slots of one tier: each is in exactly one of free, used or limbo (invariant 1).

Used: held by one copy. Limbo: its record's deletion is not committed yet. A zombie, which a late transfer may still
touch, is held by a doomed copy that keeps its pin. Scheduler thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import Slot, make_slots, new_tuple

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


_FREE, _USED, _LIMBO = 1, 2, 3
_SHIFT = 32
_INDEX = (1 << _SHIFT) - 1
"""A slot's position is its segment's number times 2**32 and its index, so that those of two segments never meet."""


_Range = tuple[int, int, int]
"""Slots that follow each other: segment, first index, length."""


class SlotPool:
    """The slots of a tier's segments, handed out in runs of neighbours where there are any.

    Each segment belongs to one size class and lies on one drive. ``free``, ``limbo`` and ``total`` count slots by size
    class.
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
        self._places: list[list[FreeRuns]] = [[] for _ in range(size_class_count)]
        """The same, by size class."""
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
            self._places[size_class].append(found[drive])
        runs = self._runs_of[segment] = found[drive]
        for start, end in _ranges_of(states, _FREE):
            runs.add((segment << _SHIFT) + start, end - start)
        self.free[size_class] += slot_count - taken
        self.total[size_class] += slot_count

    def retire_segment(self, segment: int) -> None:
        """Take a segment's free slots out of service for good; used ones leave as they are freed."""
        states = self._maps.pop(segment)
        size_class = self._class_of.pop(segment)
        self._runs_of.pop(segment).drop(segment << _SHIFT, segment + 1 << _SHIFT)
        self.free[size_class] -= states.count(_FREE)
        self.limbo[size_class] -= states.count(_LIMBO)
        self.total[size_class] -= len(states)

    def free_in_short_runs(self, length: int) -> int:
        """Return how many free slots lie in runs shorter than ``length``, over all size classes and drives."""
        return sum(runs.count_shorter(length) for found in self._runs for runs in found.values())

    def free_on(self, size_class: int, drives: Collection[int]) -> int:
        """Return how many slots of a size class are free on some drives."""
        return sum(runs.free for drive, runs in self._runs[size_class].items() if drive in drives)

    def allocate(self, size_class: int, count: int, drive: int | None = None) -> list[Slot]:
        """Take up to ``count`` slots, all there are where there are fewer, in as few runs as there can be.

        ``drive``: only from this one, by default from all. The shortest run that is long enough is cut, and where none
        is, the longest are used up.
        """
        slots: list[Slot] = []
        places, wanted = self._places[size_class], count
        if drive is not None:
            places = [runs for place, runs in self._runs[size_class].items() if place == drive]
        while wanted > 0:
            runs = places[0] if len(places) == 1 else _best(places, wanted)
            if runs is None or not runs.free:
                break
            position, length = runs.take(wanted)
            segment, start = position >> _SHIFT, position & _INDEX
            if length == 1:
                self._maps[segment][start] = _USED
                slots.append(new_tuple(Slot, (segment, start)))
            else:
                self._maps[segment][start : start + length] = bytes([_USED]) * length
                slots += make_slots(repeat(segment, length), range(start, start + length))
            wanted -= length
        self.free[size_class] -= count - wanted
        return slots

    def release(self, slots: Sequence[Slot]) -> None:
        """Make used slots free at once: for those that no committed record names."""
        self._change(_neighbours(slots), _USED, _FREE)

    def retain(self, slots: list[Slot], ticket: int) -> None:
        """Put used slots in limbo until the index has dealt with ``ticket``. Tickets must not go down."""
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
            if length == 1:
                assert states[start] == source, f"slot {segment}/{start} is {states[start]}"
                states[start] = target
            else:
                found = states[start:end]
                assert found == bytes([source]) * length, f"slots {segment}/{start}-{end - 1} are {list(found)}"
                states[start:end] = bytes([target]) * length
            size_class = self._class_of[segment]
            self.limbo[size_class] += length * ((target == _LIMBO) - (source == _LIMBO))
            if target == _FREE:
                self.free[size_class] += length
                self._runs_of[segment].add((segment << _SHIFT) + start, length)

    def used_indices(self, segment: int) -> list[int]:
        """Return the indices of a segment's slots that copies hold. For tests and for dropping a segment."""
        states = self._maps[segment]
        return [index for index in range(len(states)) if states[index] == _USED]

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
