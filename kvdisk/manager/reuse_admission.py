# SPDX-License-Identifier: Apache-2.0
"""Admission by how many requests wanted a block. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Sequence

from kvdisk.blocks import BlockKey
from kvdisk.manager.reuse import ReuseTable


class AdmitReused:
    """A block may enter once ``needed`` distinct requests wanted it. ``places``: of the ``ReuseTable``."""

    def __init__(self, needed: int, places: int) -> None:
        self._needed = needed
        self.table = ReuseTable(needed, places)

    @property
    def is_open(self) -> bool:
        """Return False."""
        return False

    def want(self, keys: Sequence[BlockKey], request_id: str) -> Sequence[BlockKey]:
        """Count a request once per key."""
        return self.table.want(keys, request_id)[0]

    def admits(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return of each block whether enough distinct requests wanted it."""
        needed = self._needed
        return [count >= needed for count in self.table.counts(keys)]

    def note_room(self, free: int, total: int) -> None:
        """It makes no difference."""

    def reset(self) -> None:
        """Forget all counts."""
        self.table.clear()


class AdmitAdaptive(AdmitReused):
    """Admits everything while there is room, and the fewer blocks that one request wanted the sooner copies leave.

    ``distance``: how many keys are met, on average, between the first and the second request that want a block.
    A tier of ``total`` slots that admits all holds a new block while about ``total`` others are met. So where ``total``
    is ``distance`` or more, most of what comes back is still there, and all may enter. Below, new blocks push each
    other out before they are used, and only a share of the requests, ``(total / distance) ** 6``, has its new blocks
    admitted at once; those of others enter when a second request wants them. Which requests these are goes by a hash
    of their names: one request's blocks are all in or all out, and asking twice changes nothing. A reset forgets the
    counts, not the distance, which says nothing of the KV.
    """

    _STEEPNESS = 6
    """So that small tiers are written little (decision 25)."""
    _MEMORY = 2000
    """Second requests over which the distance is averaged."""

    def __init__(self, places: int) -> None:
        super().__init__(2, places)
        self._total = 0
        self._is_full = False
        self._seconds = 0
        self.distance = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether there is room, or all requests have their new blocks admitted."""
        return not self._is_full or self.share >= 1.0

    def want(self, keys: Sequence[BlockKey], request_id: str) -> Sequence[BlockKey]:
        """Count a request once per key, and learn from the second."""
        risen, ages = self.table.want(keys, request_id)
        for age in ages:
            self._seconds = min(self._seconds + 1, self._MEMORY)
            self.distance += (age - self.distance) / self._seconds
        return risen

    def admits(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return whether there is room, or of each block whether two wanted it, or the first is one of the share."""
        if self.is_open:
            return [True] * len(keys)
        share = self.share
        return [first < share for first in self.table.first_requests(keys, self._needed)]

    @property
    def share(self) -> float:
        """Of the requests, how many have their new blocks admitted when the tier is full."""
        return 1.0 if self.distance <= self._total else (self._total / self.distance) ** self._STEEPNESS

    def note_room(self, free: int, total: int) -> None:
        """A tier is full from when an eighth of it or less is free until half of it is."""
        self._total = total
        self._is_full = free * 2 <= total if self._is_full else free * 8 <= total
