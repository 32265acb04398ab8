# SPDX-License-Identifier: Apache-2.0
"""How many bytes the blocks of each tenant take in a tier. Scheduler thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import repeat

from kvdisk.blocks import Tier, groups_of
from kvdisk.geometry import Geometry
from kvdisk.manager.catalog import Catalog


class TenantBytes:
    """Counts the copies of each tenant, by its digest, from their beginning until they have ended;
    0: those of none. It begins with what there is."""

    def __init__(self, catalog: Catalog, tier: Tier, geometry: Geometry) -> None:
        self._keys, self._tenants = catalog.keys, catalog.tenants
        self._payloads = [group.payload_bytes * geometry.shard_count for group in geometry.groups]
        self._counts: Counter[tuple[int, int]] = Counter()
        """Copies by tenant and group."""
        self._count(catalog.rows_in(tier), 1)
        catalog.columns(tier).counters.append(self)

    def begun(self, rows: Sequence[int]) -> None:
        """Copies have begun."""
        self._count(rows, 1)

    def ended(self, rows: Sequence[int]) -> None:
        """Copies have ended; rows still have their keys."""
        self._count(rows, -1)

    def _count(self, rows: Sequence[int], amount: int) -> None:
        tenants = map(self._tenants.__getitem__, rows)
        groups = repeat(0) if len(self._payloads) == 1 else groups_of([self._keys[row] for row in rows])
        for which, count in Counter(zip(tenants, groups, strict=False)).items():
            self._counts[which] += amount * count
            if not self._counts[which]:
                del self._counts[which]

    def read(self) -> dict[int, int]:
        """Return the bytes of each tenant that has blocks: of their content, over all ranks."""
        found: Counter[int] = Counter()
        for (tenant, group), count in self._counts.items():
            found[tenant] += count * self._payloads[group]
        return dict(found)
