# SPDX-License-Identifier: Apache-2.0
"""Copies that a reset has left in a tier in memory. Scheduler thread only.

Nobody finds them any more: the catalog has forgotten their keys (``Catalog.hide_all``). They hold
their slots until a step ends them, or somebody needs the room.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import Tier
from kvdisk.manager.catalog import READY
from kvdisk.manager.parts import Parts


class ForgottenCopies:
    """Those of one tier, where a slot's segment is its size class. ``Tiers`` end them."""

    def __init__(self, parts: Parts, tier: Tier) -> None:
        self._catalog = parts.catalog
        self._state = parts.state
        self._tier = tier
        self._rows = np.zeros(0, np.intp)
        """Those that come next first, some of which have ended by now."""

    def __bool__(self) -> bool:
        return len(self._rows) > 0

    def take_all(self) -> list[int]:
        """Take all copies that there are, mostly the tails of chains first, before their keys are
        forgotten. Return those that a job uses: they are not among these, and end with it."""
        rows = self._catalog.kept(self._tier)[::-1]
        is_used = np.frombuffer(self._catalog.columns(self._tier).pins, np.uint32)[rows] > 0
        self._rows = rows[~is_used]
        used: list[int] = rows[is_used].tolist()
        return used

    def slots(self, size_class: int) -> int:
        """Return how many slots of a size class they hold."""
        return len(self.of(size_class))

    def next(self, most: int) -> list[int]:
        """Remove and return some that have not ended; none: all have."""
        while self:
            rows, self._rows = self._rows[:most], self._rows[most:]
            found: list[int] = rows[self._are_there(rows)].tolist()
            if found:
                return found
        return []

    def of(self, size_class: int) -> NDArray[np.intp]:
        """Return those of a size class. The caller may end some."""
        if not len(self._rows):
            return self._rows
        rows: NDArray[np.intp] = self._rows[self._are_there(self._rows)]
        self._rows = rows
        classes = np.frombuffer(self._catalog.columns(self._tier).segments, np.uint32)[rows]
        found: NDArray[np.intp] = rows[classes == size_class]
        return found

    def _are_there(self, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Whether each row still has its copy: it may be another block's, of this epoch."""
        states = np.frombuffer(self._catalog.columns(self._tier).states, np.uint8)
        epochs = np.frombuffer(self._catalog.epochs, np.uint64)
        found: NDArray[np.bool_] = (states[rows] == READY) & (epochs[rows] != self._state.epoch)
        return found
