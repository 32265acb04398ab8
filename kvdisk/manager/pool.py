# SPDX-License-Identifier: Apache-2.0
"""Slots of one tier: each is in exactly one of free, used or awaiting commit (invariant 1).

Used: held by one copy. Awaiting commit: its record's deletion is not committed yet. What a late
transfer may still touch is held by a dropped copy that keeps its pin. Scheduler thread only.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import Slot, records_of

FREE, USED, AWAITING = 1, 2, 3
_SHIFT = 32
"""A slot's position: its segment, shifted, and its index. Those of two segments never touch."""


_Range = tuple[int, int, int]
"""Slots that follow each other: segment, first index, length."""


class FreeRuns:
    """The runs of free slots of one size class on one drive, by length. A run is named by the
    position of its first slot. A run of no slots is none."""

    def __init__(self) -> None:
        self.starts: dict[int, dict[int, None]] = {}
        """By length. The latest of a length is used first."""

    def add(self, start: int, length: int) -> None:
        """Add a run."""
        if length:
            self.starts.setdefault(length, {})[start] = None

    def remove(self, start: int, length: int) -> None:
        """Remove a run."""
        if length:
            alike = self.starts[length]
            del alike[start]
            if not alike:
                del self.starts[length]

    def take(self, count: int) -> tuple[int, int]:
        """Take up to ``count`` slots of the shortest run that has so many, else of the longest:
        (first position, how many). There is a run."""
        length = min((length for length in self.starts if length >= count), default=max(self.starts))
        start = next(reversed(self.starts[length]))
        taken = min(count, length)
        self.remove(start, length)
        self.add(start + taken, length - taken)
        return start, taken

    def slots(self, shorter_than: float = math.inf) -> int:
        """Return how many slots there are, or how many in shorter runs."""
        return sum(length * len(starts) for length, starts in self.starts.items() if length < shorter_than)


class SlotPool:
    """The slots of a tier's segments, handed out in runs of neighbours where there are any.

    Each segment belongs to one size class and lies on one drive. ``free``, ``awaiting`` and
    ``total`` count slots by size class, of the segments in service.
    """

    def __init__(self, size_class_count: int) -> None:
        self.free = [0] * size_class_count
        self.total = [0] * size_class_count
        self.awaiting = [0] * size_class_count
        self.states: dict[int, bytearray] = {}
        """By segment, a byte for each slot: FREE, USED or AWAITING."""
        self._place_of: dict[int, tuple[int, int]] = {}
        """Size class and drive, by segment in service.
    """
        self._runs: defaultdict[tuple[int, int], FreeRuns] = defaultdict(FreeRuns)
        """By size class and drive."""
        self._awaiting: deque[tuple[int, list[_Range]]] = deque()

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
        self.return_segment(segment, size_class, drive)

    def return_segment(self, segment: int, size_class: int, drive: int = 0) -> None:
        """Take a segment that was retired into service again, as its slots are by now."""
        assert segment not in self._place_of
        states = self.states[segment]
        self._place_of[segment] = (size_class, drive)
        is_free = np.frombuffer(states, np.uint8) == FREE
        edges = np.flatnonzero(np.diff(is_free, prepend=False, append=False)).tolist()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            self._runs[size_class, drive].add((segment << _SHIFT) + start, end - start)
        self.free[size_class] += states.count(FREE)
        self.awaiting[size_class] += states.count(AWAITING)
        self.total[size_class] += len(states)

    def retire_segment(self, segment: int) -> None:
        """Take a segment out of service: no slot of it is handed out any more."""
        states, place = self.states[segment], self._place_of.pop(segment)
        for length, starts in list(self._runs[place].starts.items()):
            for start in [start for start in starts if start >> _SHIFT == segment]:
                self._runs[place].remove(start, length)
        size_class, _ = place
        self.free[size_class] -= states.count(FREE)
        self.awaiting[size_class] -= states.count(AWAITING)
        self.total[size_class] -= len(states)

    def forget_segment(self, segment: int) -> None:
        """Forget a segment that was retired, if it ever was in service, with what awaits a
        commit."""
        assert segment not in self._place_of
        self.states.pop(segment, None)

    def is_empty(self, segment: int) -> bool:
        """Whether no slot of a segment is used or awaits a commit."""
        states = self.states.get(segment, b"")
        return states.count(FREE) == len(states)

    def used_slots(self, segment: int) -> int:
        """Return how many slots of a segment copies hold."""
        return self.states[segment].count(USED)

    def used_part(self, segment: int) -> float:
        """Return which part of a segment's slots copies hold."""
        return self.used_slots(segment) / len(self.states[segment])

    def is_unused(self, segment: int) -> bool:
        """Whether no copy holds a slot of a segment."""
        return USED not in self.states.get(segment, b"")

    def free_in_short_runs(self, length: int) -> int:
        """Return how many free slots lie in runs shorter than ``length``."""
        return sum(runs.slots(shorter_than=length) for runs in self._runs.values())

    def free_on(self, size_class: int, drives: Collection[int]) -> int:
        """Return how many slots of a size class are free on some drives."""
        return sum(self._runs[size_class, drive].slots() for drive in drives)

    def allocate(self, size_class: int, count: int, drive: int = 0) -> list[Slot]:
        """Take up to ``count`` slots of a drive, all there are where there are fewer, in as few
        runs as there can be.

        The shortest run that is long enough is cut, and where none is, the longest are used up.
        """
        slots: list[Slot] = []
        runs = self._runs[size_class, drive]
        while len(slots) < count and runs.starts:
            position, length = runs.take(count - len(slots))
            segment, start = divmod(position, 1 << _SHIFT)
            self.states[segment][start : start + length] = bytes([USED]) * length
            slots += records_of(Slot, zip(repeat(segment), range(start, start + length)))
        self.free[size_class] -= len(slots)
        return slots

    def release(self, slots: Sequence[tuple[int, int]]) -> None:
        """Make used slots free at once: for those that no committed record names."""
        self._change(_neighbours(slots), USED, FREE)

    def retain(self, slots: Sequence[tuple[int, int]], ticket: int) -> None:
        """Keep used slots until ``ticket`` is committed. Tickets must not go down."""
        if slots:
            assert not self._awaiting or self._awaiting[-1][0] <= ticket
            ranges = _neighbours(slots)
            self._change(ranges, USED, AWAITING)
            self._awaiting.append((ticket, ranges))

    def free_committed(self, committed: int) -> None:
        """Free the slots that await a commit whose ticket is at most ``committed``."""
        while self._awaiting and self._awaiting[0][0] <= committed:
            known = [one for one in self._awaiting.popleft()[1] if one[0] in self.states]  # others were forgotten
            self._change(known, AWAITING, FREE)

    def _change(self, ranges: Sequence[_Range], source: int, target: int) -> None:
        for segment, start, length in ranges:
            states, end = self.states[segment], start + length
            found = states[start:end]
            assert found == bytes([source]) * length, f"slots {segment}/{start} and on are {list(found)}"
            states[start:end] = bytes([target]) * length
            if segment not in self._place_of:
                continue  # it was retired
            place = size_class, _ = self._place_of[segment]
            self.awaiting[size_class] += length * ((target == AWAITING) - (source == AWAITING))
            if target == FREE:
                self.free[size_class] += length
                runs, first = self._runs[place], segment << _SHIFT
                low, high = _free_around(states, start, end)
                runs.remove(first + low, start - low)
                runs.remove(first + end, high - end)
                runs.add(first + low, high - low)

    def has_segment(self, segment: int) -> bool:
        """Whether the segment is in service."""
        return segment in self._place_of


def _free_around(states: bytearray, start: int, end: int) -> tuple[int, int]:
    """Return the bounds of the free run around slots that have come free."""
    low, high = 0, len(states)
    for taken in (USED, AWAITING):
        low = max(low, states.rfind(taken, low, start) + 1)
        behind = states.find(taken, end, high)
        high = high if behind < 0 else behind
    return low, high


def _neighbours(slots: Sequence[tuple[int, int]]) -> list[_Range]:
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
