# SPDX-License-Identifier: Apache-2.0
"""Who leaves a tier: the policies by name, and the rule that of one chain the tail leaves before
the head.

A policy knows rows of the catalog and their order, nothing else. Scheduler thread only."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey, Tier
from kvdisk.config import EVICTIONS
from kvdisk.errors import ConfigError
from kvdisk.manager.catalog import NONE, Catalog
from kvdisk.manager.reuse import CLASSES, ReuseHistory
from kvdisk.manager.row_lists import GROWN_ROWS, RowLists

Keys = NDArray[np.object_] | Sequence[BlockKey]
"""The keys of the catalog's rows, by row."""


class EvictionPolicy:
    """Order of the copies of one tier and size class. What is here keeps the order of last use.

    Many rows come, and go, at a time: a prompt's blocks, and those that make room for them. Of a
    chain the tail comes before the head. A row is inserted once and removed once; other calls
    ignore rows that are not there. A policy has no clock: it counts what is inserted and used. What
    it knows of rows is in arrays, not in a Python object for each row
    (``tests/unit/test_garbage.py``), and it grows them itself when a higher row comes.

    ``keys``: of the catalog's rows, read when a row is given. ``history``: what is known of them.
    """

    _LISTS = 1

    def __init__(self, keys: Keys, history: ReuseHistory) -> None:
        self._keys = keys
        self._history = history
        self._lists = RowLists(self._LISTS)

    def insert(self, rows: Sequence[int]) -> None:
        """Copies became READY: the earliest first."""
        self._lists.append(rows)

    def access(self, rows: Sequence[int]) -> None:
        """Copies were used: the earliest first.

        One request may use a copy up to three times: when it is read ahead for, when it has loaded
        the copy, and when it reaches the block. The history counts that once.
        """
        for row in self._lists.held(rows):
            self._lists.move(row, 0)

    def postpone(self, row: int) -> None:
        """A copy could not leave now: propose it later than others of its list. That is no use."""
        if row in self._lists:
            self._lists.move(row, self._lists.number_of(row))

    def remove(self, rows: Sequence[int]) -> None:
        """Copies left the tier, for whatever reason; rows still have their keys."""
        self._lists.remove(rows)

    def fill(self, rows: NDArray[np.int32], uses: NDArray[np.uint32]) -> None:  # noqa: ARG002 - LRU counts none
        """Insert many rows at once, the oldest first, into an empty policy: what was there before a
        restart.

        ``uses``: how often each was used since it was stored.
        """
        self._lists.fill(rows, np.zeros(len(rows), np.uint8))

    def proposals(self) -> Iterator[int]:
        """Yield rows in the order in which they should leave. A step reads only the first of them:
        find each when it is asked for. Removes none: a row that the caller leaves where it is is
        proposed again by a later call. Not to be advanced after any other call."""
        return self._lists.walk()


class LruPolicy(EvictionPolicy):
    """Least recently used leaves first."""


class LearnedPolicy(EvictionPolicy):
    """What brings the fewest hits for the time that it is kept leaves first.

    What a copy brings goes by its block's class and by how long ago it was last used; the history
    learns it from what requests come to (``ReuseHistory.rate``). Each class has its list, in order
    of last use; the oldest of one is the next of it to leave. Where classes differ in nothing, this
    is the order of last use.
    """

    _LISTS = CLASSES
    _NOTHING: Final = math.inf
    """Above all rates."""

    def __init__(self, keys: Keys, history: ReuseHistory) -> None:
        super().__init__(keys, history)
        self._last = array("Q")
        """By row: when it was last used or postponed, in the history's time."""

    def insert(self, rows: Sequence[int]) -> None:
        """Make rows the newest of their blocks' classes."""
        lacking = max(rows, default=-1) + 1 - len(self._last)
        if lacking > 0:
            self._last.extend(bytes(lacking + GROWN_ROWS))
        for row in rows:
            self._last[row] = self._history.now
        self._lists.append(rows, [self._history.known(self._keys[row])[1] for row in rows])

    def access(self, rows: Sequence[int]) -> None:
        """Make rows the newest of what their blocks' classes are by now."""
        for row in self._lists.held(rows):
            # A key may be forgotten, but not while its copy is here.
            number = max(self._history.known(self._keys[row])[1], self._lists.number_of(row))
            self._last[row] = self._history.now
            self._lists.move(row, number)

    def postpone(self, row: int) -> None:
        """Make a row the newest of its class."""
        super().postpone(row)
        if row in self._lists:
            self._last[row] = self._history.now

    def fill(self, rows: NDArray[np.int32], uses: NDArray[np.uint32]) -> None:
        """Insert rows as if one were used after the other; being stored counts as a use."""
        before = self._history.now
        self._history.restore([self._keys[row] for row in rows], uses)
        last = np.zeros(int(rows.max(initial=-1)) + 1, np.uint64)
        last[rows] = np.arange(before + 1, before + 1 + len(rows), dtype=np.uint64)
        self._last = array("Q", last.tobytes())
        self._lists.fill(rows, np.array([self._history.known(self._keys[row])[1] for row in rows], np.uint8))

    def proposals(self) -> Iterator[int]:
        """Yield from the one on that brings the least; that of a class is its oldest."""
        lists = self._lists
        rows = [lists.oldest(number) for number in range(self._LISTS)]
        rates = [self._rate(number, row) for number, row in enumerate(rows)]
        while (least := min(rates)) < self._NOTHING:
            number = rates.index(least)
            rates[number] = self._NOTHING
            others, row = min(rates), rows[number]
            while row >= 0 and (least := self._rate(number, row)) <= others:
                newer = lists.newer(row)
                yield row
                row = newer
            rows[number] = row
            rates[number] = least if row >= 0 else self._NOTHING

    def _rate(self, number: int, row: int) -> float:
        return self._history.rate(number, self._history.now - self._last[row]) if row >= 0 else self._NOTHING


class TailFirst:
    """One tier's and size class's copies under an ``EvictionPolicy``; READY copies are inserted,
    and removed once.

    A block without those before it cannot be served. So, whatever a policy proposes, a copy leaves
    for room only when no copy in its tier follows it. Copies that may not leave now hold back those
    before them.

    ``insert``, ``access`` (of one chain the tail first), ``remove`` and ``fill`` are the policy's
    own.
    """

    MAX_SKIPPED = 1024
    """Proposals of which nothing may leave that one search passes over: bounds a step."""
    MAX_STEPS = 4096
    """Rows that one search looks at on its way from heads to tails, besides four a victim."""

    def __init__(self, policy: EvictionPolicy, catalog: Catalog, tier: Tier, history: ReuseHistory) -> None:
        self._policy = policy
        self._history = history
        self.insert, self.access, self.remove, self.fill = policy.insert, policy.access, policy.remove, policy.fill
        self._catalog = catalog
        self._tier = tier
        self._steps = 0
        self._held: set[int] = set()
        # Where the last descent ended: the proposed row, the row reached, and that row's
        # generation.
        self._reached = (NONE, NONE, 0)

    def least_rate(self) -> float:
        """Return what the copy that would leave next brings (``ReuseHistory.rate``); 0: there is
        none."""
        row = next(self._policy.proposals(), NONE)
        if row == NONE:
            return 0.0
        _, number, age = self._history.known(self._catalog.keys[row])
        return self._history.rate(number, age)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Return up to ``count`` rows that may leave, in an order in which each leaves after all
        that follow it.

        Removes none. The search is bounded: where it ends early, the next one goes on from there.
        What held it up (copies in use, and those before them) is postponed, so that it does not
        hold up the next one too.
        """
        found: dict[int, None] = {}
        passed: list[int] = []
        self._held.clear()
        self._steps = self.MAX_STEPS + 4 * count
        for row in self._policy.proposals() if count > 0 else ():
            before = len(found)
            if row not in found and row not in self._held:
                if evictable(row) and self._nothing_stays_behind(row, found):
                    found[row] = None
                else:
                    self._gather(row, count, evictable, found)
            if len(found) >= count or self._steps <= 0:
                break
            if len(found) == before and row not in found:
                passed.append(row)
                if len(passed) >= self.MAX_SKIPPED:
                    break
        if len(found) < count:
            for row in reversed(passed):
                self._policy.postpone(row)
        return list(found)

    def _gather(self, top: int, count: int, evictable: Callable[[int], bool], found: dict[int, None]) -> None:
        """Add to ``found`` what may leave of the tree under ``top``, from its tails on."""
        before, catalog = len(found), self._catalog
        known, start, generation = self._reached
        if known != top or catalog.generations[start] != generation or not catalog.evictable_in(self._tier)(start):
            start = top
        self._walk(top, start, count, evictable, found)
        if len(found) == before and start != top and self._steps > 0:
            self._walk(top, top, count, evictable, found)  # what it reached last time is held back now

    def _walk(self, top: int, start: int, count: int, evictable: Callable[[int], bool], found: dict[int, None]) -> None:
        """Go through the tree under ``top`` from ``start`` on, children before parents."""
        parent_rows, columns, held = self._catalog.parent_rows, self._catalog.columns(self._tier), self._held
        row, down = start, True
        while self._steps > 0:
            self._steps -= 1
            if down and row not in found and row not in held:
                child = columns.first_child[row]
                if child != NONE:
                    row = child
                    continue
            if row not in found:
                if evictable(row) and self._nothing_stays_behind(row, found):
                    found[row] = None
                else:
                    held.add(row)
            parent = parent_rows[row]
            if row == top or parent == NONE or len(found) >= count:
                break
            sibling = columns.next_child[row]
            down = sibling != NONE
            row = sibling if down else parent
        # A row that was found is about to leave; its parent stays.
        if row in found and row != top and parent_rows[row] != NONE:
            row = parent_rows[row]
        self._reached = (top, row, self._catalog.generations[row])

    def _nothing_stays_behind(self, row: int, found: dict[int, None]) -> bool:
        """Whether all that follows a row's copy in the tier leaves before it."""
        columns = self._catalog.columns(self._tier)
        child = columns.first_child[row]
        while child != NONE and child in found:
            self._steps -= 1
            child = columns.next_child[child]
        return child == NONE


_POLICIES: Mapping[str, type[EvictionPolicy]] = {"learned": LearnedPolicy, "lru": LruPolicy}
assert tuple(_POLICIES) == EVICTIONS


def make_eviction(name: str, keys: Keys, history: ReuseHistory) -> EvictionPolicy:
    """Return a new policy by its configuration name. Raises ConfigError."""
    if name not in _POLICIES:
        raise ConfigError(f"eviction must be one of {', '.join(map(repr, _POLICIES))}, not {name!r}.")
    return _POLICIES[name](keys, history)
