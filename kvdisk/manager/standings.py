# SPDX-License-Identifier: Apache-2.0
"""Which blocks leave before others, after them, or not at all, and for how long, because a KV hint
says so: by key, whether a tier has the block yet or not; and what that makes of the copies in a
tier. Scheduler thread only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import chain
from typing import Final, Protocol

from kvdisk.blocks import BlockKey, Tier
from kvdisk.manager import bounds
from kvdisk.manager.catalog import NONE, READY, Catalog

DEMOTED, RETAINED, PINNED = range(3)
"""The standings of a block: it leaves before all others, after them, or not at all."""
_FEW_SECONDS: Final = 64
"""Seconds without a block that may stay in the heap."""


class Standings:
    """The standings of blocks, each until its second is over; times are in seconds, monotonic.

    ``held``: standing and end of each block that has one. ``clipped``: whether more were to stay,
    or to have a standing, than may, since this was last set to False.
    """

    def __init__(self) -> None:
        self.held: dict[BlockKey, tuple[int, int]] = {}
        self.clipped = False
        self._ends: dict[int, dict[BlockKey, None]] = {}
        """The blocks by the second in which their standing ends."""
        self._seconds: list[int] = []
        """Those seconds, as a heap; among them some that no block has any more."""

    def of(self, key: BlockKey) -> int | None:
        """Return a block's standing; None: it leaves as it deserves."""
        held = self.held.get(key)
        return None if held is None else held[0]

    def stays_until(self, key: BlockKey, end: float) -> bool:
        """Whether a block stays at least until then."""
        return self.held.get(key, (DEMOTED, 0)) >= (PINNED, math.ceil(end))

    def set(self, key: BlockKey, standing: int, end_s: float) -> None:
        """Give a block a standing until then.

        Of two that are to keep it, the stronger holds, and of equal ones the longer. DEMOTED ends
        both.
        """
        end = math.ceil(end_s)
        held = self.held.get(key)
        if held is not None:
            if standing != DEMOTED and held >= (standing, end):
                return
            self.forget(key)
        elif len(self.held) >= bounds.STANDINGS:
            self.clipped = True
            return
        if end not in self._ends:
            self._ends[end] = {}
            heappush(self._seconds, end)
        self._ends[end][key] = None
        self.held[key] = (standing, end)

    def forget(self, key: BlockKey) -> None:
        """End a block's standing, if it has one."""
        held = self.held.pop(key, None)
        if held is None:
            return
        keys = self._ends[held[1]]
        del keys[key]
        if not keys:
            del self._ends[held[1]]
            if len(self._seconds) > 2 * len(self._ends) + _FEW_SECONDS:
                self._seconds = sorted(self._ends)  # which is a heap

    def clear(self) -> tuple[dict[BlockKey, tuple[int, int]], dict[int, dict[BlockKey, None]]]:
        """End all standings; return what is to be let go of."""
        forgotten = self.held, self._ends
        self.held, self._ends, self._seconds = {}, {}, []
        return forgotten

    def take_ended(self, now: float, most: int) -> list[BlockKey]:
        """Return up to so many blocks whose standing has ended by now."""
        ended: list[BlockKey] = []
        while self._seconds and self._seconds[0] <= now and len(ended) < most:
            keys = self._ends.get(self._seconds[0])
            if keys:
                key, _ = keys.popitem()
                del self.held[key]
                ended.append(key)
            else:
                self._ends.pop(heappop(self._seconds), None)
        return ended


class Order(Protocol):
    """What ``EvictionPolicy`` does for standings: see there."""

    def holds(self, row: int) -> bool:
        """Return whether a row is here."""

    def count(self, standing: int) -> int:
        """Return how many rows have a standing."""

    def standing(self, row: int) -> int | None:
        """Return a row's standing; None: it has none, or is not here."""

    def place(self, row: int, standing: int | None) -> bool:
        """Give a row a standing, or (None) none; return whether it had another one."""

    def oldest(self, standing: int) -> int:
        """Return which of those with a standing was used longest ago. There is one."""


class CopyStandings:
    """Places the copies of one tier and size class in its eviction order by the standings of their
    blocks.

    Of copies whose blocks stay, no more do than ``most_staying`` returns, the heads of chains
    before their tails; the others leave late. So a copy that stays holds back only copies that
    stay.
    """

    def __init__(
        self,
        policy: Order,
        catalog: Catalog,
        tier: Tier,
        standings: Standings,
        most_staying: Callable[[], int],
    ) -> None:
        self._policy = policy
        self._catalog = catalog
        self._tier = tier
        self._standings = standings
        self._most_staying = most_staying

    def insert(self, rows: Sequence[int]) -> None:
        """Copies were inserted."""
        if self._standings.held:
            self.reorder([*chain.from_iterable(map(self._followers, rows)), *rows])

    def reorder(self, rows: Sequence[int]) -> None:
        """Place copies by the standing that their blocks have by now, and with them what follows
        them, which stays only if they do. ``rows``: of one chain the tail first."""
        todo = list(rows)
        while todo:
            row = todo.pop()
            if self._policy.holds(row) and self._policy.place(row, self._standing_of(row)):
                todo += self._followers(row)

    def keep_at_most(self, count: int) -> None:
        """Let more than ``count`` copies not stay any more, for there is less room than there
        was."""
        while self._policy.count(PINNED) > count:
            row = self._policy.oldest(PINNED)
            self._policy.place(row, RETAINED)
            self.reorder(self._followers(row))

    def left(self) -> int:
        """Return how many more copies may stay; below 0: there are too many."""
        return self._most_staying() - self._policy.count(PINNED)

    def may_stay(self) -> bool:
        """Whether one more copy may stay."""
        return self.left() > 0

    def _standing_of(self, row: int) -> int | None:
        key, had = self._catalog.keys[row], self._policy.standing(row)
        standing = self._standings.of(key)
        if standing is None or self._catalog.find(key) != row:  # or it is of another epoch
            return DEMOTED if had == DEMOTED else None  # until it is used
        if standing == PINNED:
            if had != PINNED and not self.may_stay():
                self._standings.clipped = True
                return RETAINED
            parent = self._catalog.parent_rows[row]
            # Of what is of another size nobody knows here whether it stays.
            is_here = parent != NONE and self._catalog.state(parent, self._tier) == READY
            if is_here and self._policy.standing(parent) != PINNED:
                return RETAINED
        return standing

    def _followers(self, row: int) -> list[int]:
        """Return the rows whose copies in the tier follow a row's."""
        columns, found = self._catalog.columns(self._tier), []
        child = columns.first_child[row]
        while child != NONE:
            found.append(child)
            child = columns.next_child[child]
        return found

    def forget_first(self, rows: Sequence[int]) -> list[int]:
        """Return which of some rows were to leave first; they are not any more elsewhere, nor
        later."""
        if not self._policy.count(DEMOTED):
            return []
        found = [row for row in rows if self._policy.standing(row) == DEMOTED]
        for row in found:
            self._standings.forget(self._catalog.keys[row])
        return found
