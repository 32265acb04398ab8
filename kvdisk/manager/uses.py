# SPDX-License-Identifier: Apache-2.0
"""How often each NVMe copy was used since it was stored, and when last. Scheduler thread, and a writer's own calls.

A use is a request that came to a block and found it, wherever. The step only appends row numbers to a log; they are
counted many at a time, in arrays with a place for each slot, which speaks of the block of its generation. It is kept
for people (``kvdisk inspect``), and decides nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import invert
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import Tier
from kvdisk.geometry import USES_UNIT_SLOTS
from kvdisk.manager.catalog import READY, Catalog

MOST_LOGGED = 4096
COUNT_INTERVAL_S = 5.0
_Number = TypeVar("_Number", np.uint64, np.uint32, np.uint8)


class UsesView(NamedTuple):
    """The arrays at one moment. Those of a segment begin at its place, and are whole units long.

    Replaced as a whole where segments come and go, so that another thread can read one while that happens.
    """

    places: dict[int, tuple[int, int]]
    """By segment: the first place, and how many slots there are."""
    generations: NDArray[np.uint64]
    uses: NDArray[np.uint32]
    last_use_s: NDArray[np.uint32]
    changed: NDArray[np.uint8]
    """A byte a unit. The writer sets it back before it reads the unit; what changes from then on sets it again."""


class ChangedUnit(NamedTuple):
    """A unit of a segment that has changed: its first slot, and columns for it and those behind it."""

    segment: int
    first: int
    generations: NDArray[np.uint64]
    uses: NDArray[np.uint32]
    last_use_s: NDArray[np.uint32]


class Uses:
    """See the module. ``log``: rows of the catalog, in the order of events; ``~row``: its NVMe copy became READY.

    The owner extends ``log``, and calls ``count`` every step. ``now_s``: the time of uses that are counted next, in
    seconds since the Unix epoch.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.log = array("i")
        self.now_s = 0
        self._counted_at = 0.0
        self._vacant: dict[int, list[int]] = {}
        self.view = UsesView({}, _none(np.uint64), _none(np.uint32), _none(np.uint32), _none(np.uint8))

    # -- segments ------------------------------------------------------------------------------

    def add_segments(self, segments: Iterable[tuple[int, int]]) -> None:
        """Make place for segments: pairs of number and slot count."""
        places, length = dict(self.view.places), len(self.view.generations)
        for segment, slot_count in segments:
            units = -(-slot_count // USES_UNIT_SLOTS)
            vacant = self._vacant.get(units)
            if vacant:
                places[segment] = (vacant.pop(), slot_count)
            else:
                places[segment] = (length, slot_count)
                length += units * USES_UNIT_SLOTS
        more, old = length - len(self.view.generations), self.view
        self.view = UsesView(
            places,
            _longer(old.generations, more),
            _longer(old.uses, more),
            _longer(old.last_use_s, more),
            _longer(old.changed, more // USES_UNIT_SLOTS),
        )

    def drop_segment(self, segment: int) -> None:
        """Forget a segment, if it is known."""
        places = dict(self.view.places)
        first, slot_count = places.pop(segment, (0, 0))
        if slot_count:
            units = -(-slot_count // USES_UNIT_SLOTS)
            self._vacant.setdefault(units, []).append(first)
            self.view.generations[first : first + slot_count] = 0
            self.view = self.view._replace(places=places)

    # -- start ---------------------------------------------------------------------------------

    def adopt_all(self) -> None:
        """Begin with the copies that the catalog has: used never, as far as is known."""
        rows = np.array(self._catalog.rows_in(Tier.NVME), np.int64)
        self._begin(*self._places_of(rows))

    def recall(
        self,
        segment: int,
        first: int,
        generations: NDArray[np.uint64],
        uses: NDArray[np.uint32],
        last_use_s: NDArray[np.uint32],
    ) -> bool:
        """Take over what was known of some slots before, where the same blocks are in them; return whether all are.

        What was known of blocks that are gone is to be written over.
        """
        start, slot_count = self.view.places[segment]
        assert first % USES_UNIT_SLOTS == 0 and first + len(generations) <= slot_count
        here = slice(start + first, start + first + len(generations))
        same = self.view.generations[here] == generations
        self.view.uses[here][same] = uses[same]
        self.view.last_use_s[here][same] = last_use_s[same]
        is_all = bool(same.all())
        self.view.changed[(start + first) // USES_UNIT_SLOTS] = not is_all
        return is_all

    # -- steps ---------------------------------------------------------------------------------

    def begin(self, rows: Sequence[int]) -> None:
        """Copies became READY."""
        self.log.extend(map(invert, rows))

    def count(self, now: float, now_s: int) -> None:
        """Count what was logged, now and then. ``now``: monotonic, seconds; ``now_s``: see the class, 0: as before."""
        self.now_s = now_s or self.now_s
        if len(self.log) >= MOST_LOGGED or now - self._counted_at >= COUNT_INTERVAL_S:
            self._counted_at = now
            if self.log:
                self.count_all()

    def count_all(self) -> None:
        """Count what was logged."""
        logged = np.array(self.log, np.int64)
        del self.log[:]
        is_use = logged >= 0
        used, begun = logged[is_use], ~logged[~is_use]
        if len(begun):
            # A row that has begun anew was another block before that.
            if len(used) and not {*begun.tolist()}.isdisjoint(used.tolist()):
                began = dict(zip(begun.tolist(), np.flatnonzero(~is_use).tolist(), strict=True))
                uses = zip(np.flatnonzero(is_use).tolist(), used.tolist(), strict=True)
                used = np.array([row for at, row in uses if at > began.get(row, -1)], np.int64)
            self._begin(*self._places_of(begun))
        places = self._places_of(used)[1]
        view = self.view
        np.add.at(view.uses, places, np.uint32(1))
        view.last_use_s[places] = self.now_s
        view.changed[places // USES_UNIT_SLOTS] = 1

    def _places_of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return those rows whose copies are READY, and their places."""
        columns = self._catalog.columns(Tier.NVME)
        rows = rows[np.frombuffer(columns.states, np.uint8)[rows] == READY]
        numbers, which = np.unique(np.frombuffer(columns.segments, np.uint32)[rows], return_inverse=True)
        known = [self.view.places.get(number, (-1, 0))[0] for number in numbers.tolist()]
        firsts = np.array(known, np.int64)[which]
        rows, firsts = rows[firsts >= 0], firsts[firsts >= 0]  # not those of a segment on its way out
        return rows, firsts + np.frombuffer(columns.indices, np.uint32)[rows]

    def _begin(self, rows: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        view, generations = self.view, np.frombuffer(self._catalog.generations, np.uint64)[rows]
        # The generation last: whoever reads meanwhile shall not see another block's uses under it.
        view.uses[places] = 0
        view.last_use_s[places] = 0
        view.generations[places] = generations
        view.changed[places // USES_UNIT_SLOTS] = 1

    # -- the writer's thread -------------------------------------------------------------------

    def take_changed(self) -> tuple[list[ChangedUnit], frozenset[int]]:
        """Return the units that have changed since they were last taken, and the segments that there are.

        Counts may be of two moments; never are they those of another block than the generation's.
        """
        view = self.view
        taken = []
        for segment, (start, slot_count) in view.places.items():
            first_unit, units = start // USES_UNIT_SLOTS, -(-slot_count // USES_UNIT_SLOTS)
            for unit in np.flatnonzero(view.changed[first_unit : first_unit + units]).tolist():
                view.changed[first_unit + unit] = 0
                first = unit * USES_UNIT_SLOTS
                here = slice(start + first, start + min(first + USES_UNIT_SLOTS, slot_count))
                generations = view.generations[here].copy()  # first: see _begin
                taken.append(
                    ChangedUnit(segment, first, generations, view.uses[here].copy(), view.last_use_s[here].copy())
                )
        return taken, frozenset(view.places)

    def want_all(self) -> None:
        """All units are to be written again."""
        self.view.changed[:] = 1


def _none(dtype: type[_Number]) -> NDArray[_Number]:
    return np.zeros(0, dtype)


def _longer(column: NDArray[_Number], more: int) -> NDArray[_Number]:
    return np.concatenate((column, np.zeros(more, column.dtype)))
