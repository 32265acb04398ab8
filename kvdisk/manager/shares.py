# SPDX-License-Identifier: Apache-2.0
"""How much of a tier the blocks of one tenant may take. Scheduler thread only.

A tenant is all requests with one ``cache_salt``, known by its digest (``kvdisk.salts``). Requests
without a salt are no tenant: nothing bounds what they store (``docs/decisions/0055-tenants.md``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat

from kvdisk.blocks import group_of
from kvdisk.geometry import Geometry
from kvdisk.manager.catalog import Catalog


class TenantShare:
    """The copies of each tenant in one tier, and how many there may be, by size class.

    Copies count from their beginning until they have ended. ``slots``: returns the slots of a size
    class that there are, or may be. Only tenants with copies take memory.
    """

    def __init__(self, share: float, catalog: Catalog, geometry: Geometry, slots: Callable[[int], int]) -> None:
        self._share = share
        self._catalog, self._tenants = catalog, catalog.tenants
        self._class_of = geometry.size_classes
        self._slots = slots
        self._counts: list[dict[int, int]] = [{} for _ in geometry.slot_sizes]

    def begun(self, rows: Sequence[int]) -> None:
        """Copies have begun."""
        for size_class, tenant, added in self._by_tenant(rows):
            counts = self._counts[size_class]
            counts[tenant] = counts.get(tenant, 0) + added

    def ended(self, rows: Sequence[int]) -> None:
        """Copies have ended; rows still have their keys."""
        for size_class, tenant, ended in self._by_tenant(rows):
            counts = self._counts[size_class]
            counts[tenant] -= ended
            if not counts[tenant]:
                del counts[tenant]

    def _by_tenant(self, rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield size class, tenant, and how many of some rows are theirs."""
        tenants = map(self._tenants.__getitem__, rows)
        classes: Iterable[int] = repeat(0)
        if len(self._counts) > 1:
            groups = map(group_of, map(self._catalog.keys.__getitem__, rows))
            classes = map(self._class_of.__getitem__, groups)
        for (size_class, tenant), count in Counter(zip(classes, tenants, strict=False)).items():
            if tenant:
                yield size_class, tenant, count

    def count(self, size_class: int, tenant: int) -> int:
        """Return how many copies of a size class a tenant has."""
        return self._counts[size_class].get(tenant, 0)

    def limit(self, size_class: int) -> int:
        """Return how many copies of a size class a tenant may have: one at least."""
        return max(1, int(self._share * self._slots(size_class)))

    def left(self, size_class: int, tenant: int) -> int:
        """Return how many more a tenant may have; negative: it has too many, as where its share was
        larger before a restart."""
        return self.limit(size_class) - self.count(size_class, tenant)
