# SPDX-License-Identifier: Apache-2.0
"""Which block follows which, tier by tier: trees over the catalog's rows, in arrays. Scheduler
thread only.

A block's parent is the block before it in its chain. A tier's tree links the copies in that tier to
the row of their parent, whether or not that has a copy there too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import Tier

NONE = -1
TIERS: tuple[Tier, ...] = tuple(tier for tier in Tier if tier is not Tier.GPU)
"""Those that keep copies, the fastest first."""


class Chains:
    """Trees of rows, which the catalog keeps. ``parent_rows[row]``: NONE where the block is the
    first of its chain.

    ``child_counts[row]``: how many rows have this one as their parent, with copies or not yet.
    """

    def __init__(self) -> None:
        self.parent_rows = array("i")
        self.child_counts = array("I")
        # Of a row: its first child in a tier. Of a copy: its neighbours among the children of its
        # parent.
        self._first = {tier: array("i") for tier in TIERS}
        self._next = {tier: array("i") for tier in TIERS}
        self._previous = {tier: array("i") for tier in TIERS}

    def first(self, row: int, tier: Tier) -> int:
        """Return a row whose copy in ``tier`` follows this row's block; NONE where there is
        none."""
        return self._first[tier][row]

    def next(self, row: int, tier: Tier) -> int:
        """Return another row whose copy follows the same parent; NONE after the last."""
        return self._next[tier][row]

    def grow(self, count: int) -> None:
        """Make place for so many more rows."""
        nothing = array("i", [NONE]) * count
        self.child_counts.frombytes(bytes(count * self.child_counts.itemsize))
        self.parent_rows += nothing
        for arrays in (self._first, self._next, self._previous):
            for links in arrays.values():
                links.extend(nothing)

    def set_parent(self, row: int, parent_row: int) -> None:
        """A row that has no copies and no parent yet gets its parent."""
        self.parent_rows[row] = parent_row
        self.child_counts[parent_row] += 1

    def leave_parent(self, row: int) -> int:
        """A row has lost its last copy. Return the row of its parent, or NONE, which it does not
        follow any more."""
        parent_row = self.parent_rows[row]
        if parent_row != NONE:
            self.parent_rows[row] = NONE
            self.child_counts[parent_row] -= 1
        return parent_row

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

    def fill(self, tier: Tier, parent_rows: NDArray[np.int32]) -> None:
        """Take over rows 0, 1, ... as if ``link`` were told of one after the other; there are none
        yet."""
        assert not self.parent_rows
        count = len(parent_rows)
        self.grow(count)
        children = np.flatnonzero(parent_rows != NONE).astype(np.int32)
        children = children[np.argsort(parent_rows[children], kind="stable")]
        parents = parent_rows[children]
        first, after, before = (
            np.frombuffer(links[tier], np.int32) for links in (self._first, self._next, self._previous)
        )
        first[parents] = children  # the last of each parent's
        same = parents[1:] == parents[:-1]
        after[children[1:][same]] = children[:-1][same]
        before[children[:-1][same]] = children[1:][same]
        np.frombuffer(self.parent_rows, np.int32)[:] = parent_rows
        np.frombuffer(self.child_counts, np.uint32)[:] = np.bincount(parents, minlength=count)
