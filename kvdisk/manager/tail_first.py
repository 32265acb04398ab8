# SPDX-License-Identifier: Apache-2.0
"""Who leaves a tier, such that of one chain the tail leaves before the head. Scheduler thread only.

A block without those before it cannot be served, so whatever a policy proposes, a copy leaves for room
only when no copy in its tier follows it. Copies that may not leave now hold back those before them.
"""

from __future__ import annotations

from collections.abc import Callable

from kvdisk.blocks import Tier
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.chains import NONE
from kvdisk.manager.eviction import EvictionPolicy

MAX_SKIPPED = 1024
"""Proposals that one search passes over because nothing of them may leave now: bounds a step."""
MAX_STEPS = 4096
"""Rows that one search looks at on its way from proposed heads to tails, besides those that it was asked for."""


class TailFirst:
    """One tier's and size class's copies under an ``EvictionPolicy``; READY copies are inserted, and removed once.

    ``insert``, ``access`` (of one chain the tail first), ``remove`` and ``fill`` are the policy's own.
    """

    def __init__(self, policy: EvictionPolicy, catalog: Catalog, tier: Tier) -> None:
        self._policy = policy
        self.insert, self.access, self.remove, self.fill = policy.insert, policy.access, policy.remove, policy.fill
        self._catalog = catalog
        self._tier = tier
        self._steps = 0
        self._held: set[int] = set()
        # Where the last descent ended: the proposed row, the row reached, and that row's generation.
        self._reached = (NONE, NONE, 0)

    def victims(self, count: int, evictable: Callable[[int], bool], more: int = 0) -> list[int]:
        """Return up to ``count`` rows that may leave, in an order in which each leaves after all that follow it.

        With ``more``: up to so many more, as long as each that is proposed may leave. Removes none. The search is
        bounded: where it ends early, the next one goes on from there. What held it up (copies in use, and those before
        them) is postponed, so that it does not hold up the next one too.
        """
        found: dict[int, None] = {}
        passed: list[int] = []
        most = count + more
        first = self._catalog.chains.firsts(self._tier)
        self._held.clear()
        self._steps = MAX_STEPS + 4 * count
        for row in self._policy.proposals() if count > 0 else ():
            before = len(found)
            if row not in found and row not in self._held:
                if evictable(row) and (first[row] == NONE or self._nothing_stays_behind(row, found)):
                    found[row] = None
                else:
                    self._gather(row, most, evictable, found)
            if len(found) >= most or self._steps <= 0:
                break
            if len(found) == before and row not in found:
                passed.append(row)
                if len(passed) >= MAX_SKIPPED or len(found) >= count:
                    break
        if len(found) < count:
            for row in reversed(passed):
                self._policy.postpone(row)
        return list(found)

    def _gather(self, top: int, count: int, evictable: Callable[[int], bool], found: dict[int, None]) -> None:
        """Add to ``found`` what may leave of the tree under ``top``, from its tails on."""
        before = len(found)
        start = self._start(top)
        self._walk(top, start, count, evictable, found)
        if len(found) == before and start != top and self._steps > 0:
            self._walk(top, top, count, evictable, found)  # what it reached last time is held back now

    def _start(self, top: int) -> int:
        known, row, generation = self._reached
        catalog = self._catalog
        same = known == top and catalog.generations[row] == generation and catalog.evictable_in(self._tier)(row)
        return row if same else top

    def _walk(self, top: int, start: int, count: int, evictable: Callable[[int], bool], found: dict[int, None]) -> None:
        """Go through the tree under ``top``, children before parents, from ``start`` on towards ``top``."""
        chains, tier, held = self._catalog.chains, self._tier, self._held
        row, down = start, True
        while self._steps > 0:
            self._steps -= 1
            if down and row not in found and row not in held:
                child = chains.first(row, tier)
                if child != NONE:
                    row = child
                    continue
            if row not in found:
                if evictable(row) and self._nothing_stays_behind(row, found):
                    found[row] = None
                else:
                    held.add(row)
            parent = chains.parent_rows[row]
            if row == top or parent == NONE or len(found) >= count:
                break
            sibling = chains.next(row, tier)
            down = sibling != NONE
            row = sibling if down else parent
        # A row that was found is about to leave; its parent stays.
        if row in found and row != top and chains.parent_rows[row] != NONE:
            row = chains.parent_rows[row]
        self._reached = (top, row, self._catalog.generations[row])

    def _nothing_stays_behind(self, row: int, found: dict[int, None]) -> bool:
        """Whether all that follows a row's copy in the tier leaves before it."""
        chains, tier = self._catalog.chains, self._tier
        child = chains.first(row, tier)
        while child != NONE and child in found:
            self._steps -= 1
            child = chains.next(child, tier)
        return child == NONE
