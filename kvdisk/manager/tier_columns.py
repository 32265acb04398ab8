# SPDX-License-Identifier: Apache-2.0
"""The copies of one tier in columns, one place for each of the catalog's rows. Pure; scheduler thread only."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvdisk.blocks import Slot, make_slots, new_tuple
from kvdisk.manager.copies import ABSENT, READY, CommittedCopies


class TierColumns:
    """``states``: each copy's ``CopyState``; where there is one, ``segments`` and ``indices`` are its slot's.

    ``pins``: how many jobs use it, its writer counts. The catalog changes them, and nobody else. Unsigned integers of
    this size are set in two thirds of the time of others.
    """

    def __init__(self) -> None:
        self.states = bytearray()
        self.pins = array("I")
        self.segments = array("I")
        self.indices = array("I")

    def grow(self, count: int) -> None:
        """Make place for so many more rows."""
        self.states.extend(bytes([ABSENT]) * count)
        for column in (self.pins, self.segments, self.indices):
            column.frombytes(bytes(count * column.itemsize))

    def fill(self, copies: CommittedCopies) -> None:
        """Take over READY copies as rows 0, 1, ...; there are no rows yet."""
        assert not self.states
        self.states.extend(bytes([READY]) * len(copies.keys))
        self.pins.frombytes(bytes(self.pins.itemsize * len(copies.keys)))
        for column, values in ((self.segments, copies.segments), (self.indices, copies.indices)):
            column.frombytes(values.astype(np.uint32).tobytes())

    def any_in(self, state: int, rows: Sequence[int]) -> bool:
        """Whether the copy of any of these rows is in a state."""
        if len(rows) == 1:
            return self.states[rows[0]] == state
        return state in bytes(map(self.states.__getitem__, rows))

    def slots(self, rows: Sequence[int]) -> list[Slot]:
        """Return the slots of copies that are not ABSENT."""
        assert not self.any_in(ABSENT, rows)
        if len(rows) == 1:
            return [new_tuple(Slot, (self.segments[rows[0]], self.indices[rows[0]]))]
        return make_slots(map(self.segments.__getitem__, rows), map(self.indices.__getitem__, rows))

    def pin(self, rows: Iterable[int]) -> None:
        """Hold READY copies for one job."""
        states, pins = self.states, self.pins
        for row in rows:
            assert states[row] == READY
            pins[row] += 1

    def unpin(self, rows: Iterable[int]) -> None:
        """Give one pin of each copy back."""
        pins = self.pins
        for row in rows:
            assert pins[row] > 0
            pins[row] -= 1

    def evictable(self) -> Callable[[int], bool]:
        """Return who tells whether a row's copy may be dropped for room, READY and unpinned: to be used at once."""
        states, pins = self.states, self.pins
        return lambda row: states[row] == READY and pins[row] == 0

    def rows(self, segment: int | None = None) -> list[int]:
        """Return the rows with a copy, or with one in a segment, ascending; fast."""
        found = np.frombuffer(self.states, np.uint8) != ABSENT
        if segment is not None:
            found &= np.frombuffer(self.segments, np.uint32) == segment
        rows: list[int] = np.flatnonzero(found).tolist()
        return rows
