# SPDX-License-Identifier: Apache-2.0
"""Slots of one tier: each is in exactly one of free, used or limbo (invariant 1).

Used: held by one copy. Limbo: its record's deletion is not committed yet. A zombie, which a late transfer may still
touch, is held by a doomed copy that keeps its pin. Scheduler thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import Slot, make_slots

_FREE, _USED, _LIMBO = 1, 2, 3
_FREE_SLOT, _USED_SLOT = bytes([_FREE]), bytes([_USED])


class SlotPool:
    """The slots of a tier's segments, handed out in runs of neighbours where there are any.

    Each segment belongs to one size class. ``free``, ``limbo`` and ``total`` count slots by size class.
    """

    def __init__(self, size_class_count: int) -> None:
        self.free = [0] * size_class_count
        self.total = [0] * size_class_count
        self.limbo = [0] * size_class_count
        self._maps: dict[int, bytearray] = {}
        self._class_of: dict[int, int] = {}
        self._segments: list[list[int]] = [[] for _ in range(size_class_count)]
        self._open: list[dict[int, None]] = [{} for _ in range(size_class_count)]
        """Those of them that have a free slot: few of many, in a tier that is full."""
        self._cursors: dict[int, int] = {}
        self._free_in: dict[int, int] = {}
        self._limbo: deque[tuple[int, list[Slot]]] = deque()

    def add_segment(
        self, segment: int, size_class: int, slot_count: int, used: NDArray[np.uint32] | None = None
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
        self._segments[size_class].append(segment)
        self._cursors[segment] = 0
        self._free_in[segment] = slot_count - taken
        if slot_count > taken:
            self._open[size_class][segment] = None
        self.free[size_class] += slot_count - taken
        self.total[size_class] += slot_count

    def retire_segment(self, segment: int) -> None:
        """Take a segment's free slots out of service for good; used ones leave as they are freed."""
        states = self._maps.pop(segment)
        size_class = self._class_of.pop(segment)
        self._segments[size_class].remove(segment)
        self._open[size_class].pop(segment, None)
        del self._cursors[segment], self._free_in[segment]
        self.free[size_class] -= states.count(_FREE)
        self.limbo[size_class] -= states.count(_LIMBO)
        self.total[size_class] -= len(states)

    def free_in(self, size_class: int, segments: Collection[int]) -> int:
        """Return how many slots of a size class are free in some of its segments."""
        return sum(self._free_in[segment] for segment in self._open[size_class] if segment in segments)

    def allocate(self, size_class: int, count: int, segments: Collection[int] | None = None) -> list[Slot]:
        """Take up to ``count`` slots, all there are where there are fewer, in as few runs as is cheap to find.

        ``segments``: only from these, by default from all.
        """
        slots: list[Slot] = []
        places = list(self._open[size_class])
        free = self.free[size_class]
        if segments is not None:
            places = [segment for segment in places if segment in segments]
            free = sum(self._free_in[segment] for segment in places)
        want = min(count, free)
        run = want
        while want > 0:
            run = min(run, want)
            found = self._find_run(places, run)
            if found is None:
                assert run > 1, "free slots are counted but not there"
                run //= 2
                continue
            segment, start = found
            self._maps[segment][start : start + run] = _USED_SLOT * run
            self._cursors[segment] = start + run
            self.free[size_class] -= run
            self._free_in[segment] -= run
            if not self._free_in[segment]:
                del self._open[size_class][segment]
            slots += make_slots(repeat(segment), range(start, start + run))
            want -= run
        return slots

    def _find_run(self, segments: Iterable[int], length: int) -> tuple[int, int] | None:
        pattern = _FREE_SLOT * length
        for segment in segments:
            states = self._maps[segment]
            start = states.find(pattern, self._cursors[segment])
            if start < 0:
                start = states.find(pattern)
            if start >= 0:
                return segment, start
        return None

    def release(self, slots: Iterable[Slot]) -> None:
        """Make used slots free at once: for those that no committed record names."""
        self._change(slots, _USED, _FREE)

    def retain(self, slots: list[Slot], ticket: int) -> None:
        """Put used slots in limbo until the index has dealt with ``ticket``. Tickets must not go down."""
        if slots:
            assert not self._limbo or self._limbo[-1][0] <= ticket
            self._change(slots, _USED, _LIMBO)
            self._limbo.append((ticket, slots))

    def settle_limbo(self, committed: int) -> None:
        """Free the slots in limbo whose ticket is at most ``committed``."""
        while self._limbo and self._limbo[0][0] <= committed:
            self._change(self._limbo.popleft()[1], _LIMBO, _FREE)

    def _change(self, slots: Iterable[Slot], source: int, target: int) -> None:
        counts: dict[int, int] = {}
        for segment, index in slots:
            states = self._maps.get(segment)
            if states is None:
                continue  # its segment was retired
            assert states[index] == source, f"slot {segment}/{index} is {states[index]}, not {source}"
            states[index] = target
            counts[segment] = counts.get(segment, 0) + 1
        for segment, count in counts.items():
            size_class = self._class_of[segment]
            self.limbo[size_class] += count * ((target == _LIMBO) - (source == _LIMBO))
            if target == _FREE:
                self.free[size_class] += count
                self._free_in[segment] += count
                self._open[size_class][segment] = None

    def used_indices(self, segment: int) -> list[int]:
        """Return the indices of a segment's slots that copies hold. For tests and for dropping a segment."""
        return [index for index, state in enumerate(self._maps[segment]) if state == _USED]

    def has_segment(self, segment: int) -> bool:
        """Whether the segment is in service."""
        return segment in self._maps

    def check(self) -> None:
        """Assert the counts against the maps (invariant 1). For tests."""
        for size_class, segments in enumerate(self._segments):
            maps = [self._maps[segment] for segment in segments]
            assert self.free[size_class] == sum(states.count(_FREE) for states in maps)
            assert self.limbo[size_class] == sum(states.count(_LIMBO) for states in maps)
            assert all(self._free_in[segment] == self._maps[segment].count(_FREE) for segment in segments)
            assert self.total[size_class] == sum(len(states) for states in maps)
            assert set(self._open[size_class]) == {segment for segment in segments if self._free_in[segment]}
