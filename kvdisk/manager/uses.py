# SPDX-License-Identifier: Apache-2.0
"""How often each NVMe copy was used since it was stored, and when last: a record for each row of
the catalog.

A use is a request that came to a block and found it, wherever. After a restart the eviction goes on
with it, and it is shown to people (``kvdisk inspect``). The scheduler thread changes it; another
may call ``records``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvdisk.device.uses import USES_RECORD, UsesRecords, find_uses


class Uses:
    """See the module. ``is_changed``: whether ``records`` has changed since it was set back."""

    def __init__(self) -> None:
        self.table: UsesRecords = np.zeros(0, USES_RECORD)
        self._now_s = 0
        self._reached = array("i")
        self.is_changed = False

    def fill(self, generations: NDArray[np.uint64], known: UsesRecords) -> None:
        """Begin with rows 0, 1, ... of these generations, and what was known of them before."""
        self.table, _ = find_uses(known, generations)
        self.table["generation"] = generations

    def begin(self, rows: Sequence[int], generations: Sequence[int]) -> None:
        """Copies became READY."""
        self.count(self._now_s)
        places = self._places_of(rows)
        self.table["generation"][places] = 0  # whoever reads meanwhile shall not see another block's uses
        self.table["uses"][places] = 0
        self.table["last_use_s"][places] = 0
        self.table["generation"][places] = generations
        self.is_changed = True

    def end(self, rows: Sequence[int]) -> None:
        """Copies have left."""
        places = self._places_of(rows)
        self.table["generation"][places] = 0

    def reached(self, rows: Sequence[int]) -> None:
        """A request came to these blocks; those without an NVMe copy count for nothing."""
        self._reached.extend(rows)

    def count(self, now_s: int) -> None:
        """Count the blocks reached since the last call. ``now_s``: seconds since the Unix epoch."""
        self._now_s = now_s
        if self._reached:
            places = self._places_of(self._reached)
            np.add.at(self.table["uses"], places, 1)
            self.table["last_use_s"][places] = now_s
            self._reached = array("i")
            self.is_changed = True

    def records(self) -> UsesRecords:
        """Return what is known of all NVMe copies."""
        table = self.table
        found: UsesRecords = table[table["generation"] != 0]
        return found

    def _places_of(self, rows: Sequence[int]) -> NDArray[np.intp]:
        places = np.array(rows, np.intp)
        lacking = int(places.max(initial=-1)) + 1 - len(self.table)
        if lacking > 0:
            more = np.zeros(lacking + len(self.table) // 8, USES_RECORD)
            self.table = np.concatenate((self.table, more))
        return places
