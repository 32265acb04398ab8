# SPDX-License-Identifier: Apache-2.0
"""Which copies of a tier wait to be written to the next, as in a page cache.

A copy is *dirty* once the lower tier has admitted it, until it is being written there; any other
copy is *clean*. Only clean copies are evicted, and eviction passes over dirty ones where they stand
in its order. At most half of the tier's slots are dirty (at least one), so that the others always
serve new blocks (invariant 8): what is admitted beyond that stays clean, and may be lost.
Scheduler thread only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import merge
from itertools import repeat

from kvdisk.blocks import Tier, group_of
from kvdisk.manager import bounds
from kvdisk.manager.catalog import ABSENT, NONE, READY, WRITING
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.pool import SlotPool
from kvdisk.manager.row_lists import GROWN_ROWS, RowLists

_TURN_BITS = 20
"""Turns of one offer, of 64: what is left numbers offers for longer than an engine lives."""

ByClass = Callable[[Sequence[int]], Collection[tuple[int, Sequence[int]]]]
"""Returns rows by the size class of their blocks, each in the order given."""


class Dirty:
    """What of ``upper`` is dirty, and what of it would be of no use in ``lower``.

    ``blocked``: the lower tier takes no writes now. Dirty copies may then be evicted for room, and
    the lower tier never gets those. ``deferred``: by size class, copies whose eviction waits for
    their write, since the upper tier had room last. What they have below does not leave: it would
    be written again and again.
    """

    def __init__(
        self, parts: Parts, upper: Tier, lower: Tier, pool: SlotPool, by_class: ByClass, hints: PeerHints
    ) -> None:
        self._catalog = parts.catalog
        self._state = parts.state
        self._upper, self._lower = upper, lower
        self._pool = pool
        self._by_class = by_class
        self._groups = parts.geometry.groups
        self._hints = hints
        self._rows = RowLists(len(pool.total))
        """By size class, in the order of ``_turns``."""
        self._turns = array("Q")
        """By row of a dirty copy: the lowest turn is written first, whatever its size class."""
        self._offers = 0
        self.blocked = False
        self._behind: set[int] = set()
        """Copies that would serve nobody below, since what they follow is not there, or has the
        only room. They stay clean until they are used."""
        self.deferred: list[set[int]] = [set() for _ in pool.total]
        self.awaited: dict[object, int] = {}
        """By who stores a chain from its tail on: the row that what is stored of it follows. It
        comes with a later step."""

    # -- what is dirty -----------------------------------------------------------------------------

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    @property
    def contains(self) -> Callable[[int], bool]:
        """The test whether a copy is dirty: to be used at once."""
        return self._rows.__contains__

    @property
    def counts(self) -> Sequence[int]:
        """How many copies are dirty, by size class."""
        return self._rows.counts

    @property
    def total(self) -> int:
        """How many copies are dirty."""
        return sum(self._rows.counts)

    def limit(self, size_class: int) -> int:
        """Return how many copies of a size class may be dirty."""
        return max(1, self._pool.total[size_class] // 2)

    def walk(self, size_class: int) -> Iterator[int]:
        """Yield the dirty copies of a size class, the one that is written first first."""
        return self._rows.walk(size_class)

    def in_turn(self, classes: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Yield row and size class of the dirty copies of some classes: that is written first whose
        turn comes first."""
        turn = self._turns.__getitem__
        waiting = merge(*(zip(map(turn, self.walk(each)), self.walk(each), repeat(each)) for each in classes))
        return ((row, size_class) for _, row, size_class in waiting)

    # -- what becomes dirty ------------------------------------------------------------------------

    def lacking(self, rows: Sequence[int], *, own: bool = False) -> list[int]:
        """Return the READY copies that the lower tier lacks; unless ``own``, without those that a
        neighbour has."""
        keys, near = self._catalog.keys, self._hints.neighbours.near(self._lower)
        above, below = (self._catalog.columns(tier).states for tier in (self._upper, self._lower))
        lacking = [row for row in rows if above[row] == READY and below[row] == ABSENT]
        return [row for row in lacking if keys[row] not in near] if near and not own else lacking

    def add(self, rows: Sequence[int], *, whole: bool = False) -> list[int]:
        """Make clean copies dirty, as many as may be; return those. ``whole``: none where all could
        be dirty, but not now: parts of prompts would take the place of whole ones."""
        if all(count >= self.limit(each) for each, count in enumerate(self.counts)):
            return []
        rows = self._without_gaps(rows)
        before = set(self._rows.held(rows))
        by_class = self._by_class(self._take_turns([row for row in rows if row not in before]))
        if whole and any(
            self.limit(each) - self.counts[each] < len(alike) <= self.limit(each) for each, alike in by_class
        ):
            return []
        queued: list[int] = []
        for size_class, alike in by_class:
            fitting = alike[: max(0, self.limit(size_class) - self.counts[size_class])]
            self._rows.append(fitting, repeat(size_class))
            queued += fitting
        return queued

    def _without_gaps(self, rows: Sequence[int]) -> Sequence[int]:
        """Return the rows without those that would serve nobody below: they follow one that found
        no room there, or is in neither tier. A row's parent is put before it where that has left
        the lower tier and is in the upper one, within ``bounds.LOOKED_AT``. ``rows``: each chain in
        order, from its tail or its head."""
        above, behind = self._catalog.columns(self._upper).states, self._behind
        found: dict[int, None] = {}
        left = bounds.LOOKED_AT
        for row in rows:
            path, last = [row], row
            while (last := self._missing_parent(last)) != NONE and last not in found and above[last] == READY:
                path.append(last)
                left -= 1
                if left < 0:
                    path, last = [row], NONE
                    break
            if last != NONE and last not in found and above[last] != WRITING and last not in self.awaited.values():
                behind.add(path[-1])  # what is written, or will be, will be offered
            for each in reversed(path):
                if each in behind or self._catalog.parent_rows[each] in behind:
                    behind.add(each)
                else:
                    found[each] = None
        return list(found)

    def _missing_parent(self, row: int) -> int:
        """Return the parent of a row where the lower tier lacks it, and does not get it; else
        NONE. In a group that reads less than all before a block no parent is missed."""
        catalog, parent = self._catalog, self._catalog.parent_rows[row]
        if parent == NONE or parent in self._rows or catalog.columns(self._lower).states[parent] != ABSENT:
            return NONE
        is_whole = self._groups[group_of(catalog.keys[row])].reads_all
        return parent if is_whole and catalog.keys[parent] not in self._hints.known else NONE

    def _take_turns(self, rows: Sequence[int]) -> Sequence[int]:
        """Give rows that are offered together their turns, and return them in that order. The
        groups of a prompt take turns, because a hit needs them all."""
        lacking = max(rows, default=-1) + 1 - len(self._turns)
        if lacking > 0:
            self._turns.frombytes(bytes((lacking + GROWN_ROWS) * self._turns.itemsize))
        self._offers += 1
        first, turns = self._offers << _TURN_BITS, self._turns
        by_group: dict[int, list[int]] = {}
        for row in rows:
            by_group.setdefault(group_of(self._catalog.keys[row]), []).append(row)
        for alike in by_group.values():
            for at, row in enumerate(alike):
                turns[row] = first + (at << _TURN_BITS) // len(alike)
        return sorted(rows, key=turns.__getitem__)

    def defer(self, rows: Collection[int]) -> None:
        """The eviction of these copies waits for their write."""
        for size_class, alike in self._by_class(list(rows)):
            self.deferred[size_class].update(alike)

    # -- what becomes clean ------------------------------------------------------------------------

    def written(self, rows: Sequence[int]) -> None:
        """The writes of these copies begin."""
        self._rows.remove(rows)

    def refuse(self, rows: Collection[int]) -> None:
        """These copies get no room below: they are clean until they are used again, and may leave
        for what waits for room."""
        self._state.released += 1
        self._rows.remove(rows)
        self._behind.update(rows)

    def ended(self, rows: Sequence[int]) -> None:
        """Copies have ended in the upper tier."""
        self._rows.remove(rows)
        self.used(rows)

    def used(self, rows: Sequence[int]) -> None:
        """Copies were used in the upper tier: they do not leave it soon, and may become dirty
        again."""
        if self._behind:
            self._behind.difference_update(rows)
        for marked in self.deferred:
            if marked:
                marked.difference_update(rows)

    def clear(self) -> None:
        """Nothing is dirty: the lower tier never takes anything again, or all copies are
        forgotten."""
        self._rows = RowLists(len(self.counts))
        self._behind = set()
        self.deferred = [set() for _ in self.counts]
        self.awaited.clear()

    # -- who leaves the lower tier -----------------------------------------------------------------

    def leaving_below(self, rows: Sequence[int]) -> list[int]:
        """Return which copies of the lower tier may leave for what is dirty. One that a dirty copy
        follows stays, and that one becomes clean, with all dirty ones behind it: they would serve
        nobody there.

        ``rows``: the tail of a chain comes before its head.
        """
        if not self.total:
            return list(rows)
        staying, leaving, parent_rows = set[int](), list[int](), self._catalog.parent_rows
        for row in rows:
            waiting = self._waiting_behind(row)
            if waiting:
                self.refuse(waiting)
            if waiting or row in staying:
                staying.add(parent_rows[row])
            else:
                leaving.append(row)
        return leaving

    def _waiting_behind(self, row: int) -> list[int]:
        """Return the dirty copies that follow a row, directly or behind each other; none where a
        group reads less than all before a block: there the later block is worth more."""
        found: list[int] = []
        if self._groups[group_of(self._catalog.keys[row])].reads_all:
            columns, looked_at = self._catalog.columns(self._upper), [row]
            while looked_at:
                child = columns.first_child[looked_at.pop()]
                while child != NONE:
                    if child in self._rows:
                        found.append(child)
                        looked_at.append(child)
                    child = columns.next_child[child]
        return found
