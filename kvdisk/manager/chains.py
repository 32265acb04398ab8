# SPDX-License-Identifier: Apache-2.0
"""Which block follows which, tier by tier: trees over the catalog's rows, in arrays. Scheduler thread only.

A block's parent is the block before it in its chain. A tier's tree links the copies in that tier to
the row of their parent, whether or not that has a copy there too. A row whose parent has no row is
kept by the parent's key, until the parent comes (back).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey, Tier

NONE = -1
TIERS: tuple[Tier, ...] = tuple(tier for tier in Tier if tier is not Tier.GPU)
"""Those that keep copies, the fastest first."""


class Chains:
    """Trees of rows, which the catalog keeps. ``parent_rows[row]``, which the catalog sets for a row that comes: NONE
    where no row is the parent's."""

    def __init__(self) -> None:
        self.parent_rows = array("i")
        # Of a row: its first child in a tier. Of a copy: its neighbours among the children of its parent.
        self._first = {tier: array("i") for tier in TIERS}
        self._next = {tier: array("i") for tier in TIERS}
        self._previous = {tier: array("i") for tier in TIERS}
        self._orphans: dict[BlockKey, set[int]] = {}

    def first(self, row: int, tier: Tier) -> int:
        """Return a row whose copy in ``tier`` follows this row's block; NONE where there is none."""
        return self._first[tier][row]

    def next(self, row: int, tier: Tier) -> int:
        """Return another row whose copy follows the same parent; NONE after the last."""
        return self._next[tier][row]

    def grow(self, count: int) -> None:
        """Make place for so many more rows."""
        nothing = array("i", [NONE]) * count
        self.parent_rows += nothing
        for arrays in (self._first, self._next, self._previous):
            for links in arrays.values():
                links.extend(nothing)

    def await_parent(self, row: int, parent: BlockKey) -> None:
        """A row has come whose parent has none."""
        self._orphans.setdefault(parent, set()).add(row)

    def take_orphans(self, key: BlockKey) -> Iterable[int]:
        """Return the rows that waited for their parent ``key``, which wait no more."""
        return self._orphans.pop(key, ())

    def give_parent(self, row: int, parent_row: int, tiers: Iterable[Tier]) -> None:
        """A row's parent has come. ``tiers``: where the row has copies."""
        self.parent_rows[row] = parent_row
        for tier in tiers:
            self.link((row,), tier)

    def remove(self, row: int, parent: BlockKey | None, key: BlockKey | None) -> None:
        """A row has lost its last copy. ``key``: its own, for which children wait; None: never back."""
        if parent is not None and self.parent_rows[row] == NONE:
            self._forget_orphan(row, parent)
        self.parent_rows[row] = NONE
        for first in self._first.values():
            if first[row] != NONE:
                self._leave_children(row, key)
                break

    def _forget_orphan(self, row: int, parent: BlockKey) -> None:
        waiting = self._orphans.get(parent)
        if waiting is not None:
            waiting.discard(row)
            if not waiting:
                del self._orphans[parent]

    def _leave_children(self, row: int, key: BlockKey | None) -> None:
        children: set[int] = set()
        for tier in TIERS:
            child = self._first[tier][row]
            while child != NONE:
                children.add(child)
                child = self._next[tier][child]
            self._first[tier][row] = NONE
        for child in children:
            self.parent_rows[child] = NONE
        if children and key is not None:
            self._orphans[key] = children

    def forget_orphans(self) -> None:
        """No parent that somebody waits for will come: its weights are gone."""
        self._orphans.clear()

    def link(self, rows: Iterable[int], tier: Tier) -> None:
        """Some rows' copies in a tier have begun."""
        parent_rows, first = self.parent_rows, self._first[tier]
        after, before = self._next[tier], self._previous[tier]
        for row in rows:
            parent_row = parent_rows[row]
            if parent_row == NONE:
                continue
            sibling = first[parent_row]
            after[row], before[row] = sibling, NONE
            if sibling != NONE:
                before[sibling] = row
            first[parent_row] = row

    def unlink(self, rows: Iterable[int], tier: Tier) -> None:
        """Some rows' copies in a tier have ended."""
        parent_rows, first = self.parent_rows, self._first[tier]
        after, before = self._next[tier], self._previous[tier]
        for row in rows:
            parent_row = parent_rows[row]
            if parent_row == NONE:
                continue
            younger, older = after[row], before[row]
            if older == NONE:
                first[parent_row] = younger
            else:
                after[older] = younger
            if younger != NONE:
                before[younger] = older

    def fill(self, tier: Tier, parent_rows: NDArray[np.int32], parents: Sequence[BlockKey | None]) -> None:
        """Take over rows 0, 1, ... which all have a copy in ``tier`` and nowhere else; there are none yet."""
        assert not self.parent_rows
        count = len(parent_rows)
        nothing = np.full(count, NONE, np.int32)
        children = np.flatnonzero(parent_rows != NONE).astype(np.int32)
        first, after, before = nothing.copy(), nothing.copy(), nothing.copy()
        first[parent_rows[children]] = children
        # Most are the only child; the others are linked in ascending order.
        several = np.bincount(parent_rows[children], minlength=count) > 1
        children = children[several[parent_rows[children]]]
        children = children[np.argsort(parent_rows[children], kind="stable")]
        same = parent_rows[children[1:]] == parent_rows[children[:-1]]
        after[children[:-1][same]] = children[1:][same]
        before[children[1:][same]] = children[:-1][same]
        heads = children[np.concatenate(([True], ~same))] if len(children) else children
        first[parent_rows[heads]] = heads
        self.parent_rows = _array(parent_rows)
        for other in TIERS:
            mine = other is tier
            self._first[other] = _array(first if mine else nothing)
            self._next[other] = _array(after if mine else nothing)
            self._previous[other] = _array(before if mine else nothing)
        for row in np.flatnonzero(parent_rows == NONE).tolist():
            parent = parents[row]
            if parent is not None:
                self._orphans.setdefault(parent, set()).add(row)


def _array(values: NDArray[np.int32]) -> array[int]:
    filled = array("i")
    filled.frombytes(np.ascontiguousarray(values, np.int32).tobytes())
    return filled
