# SPDX-License-Identifier: Apache-2.0
"""What the blocks of a tenant take of a tier, and how much they may take. Scheduler thread only.

A tenant is all requests with one ``cache_salt``, known by its digest (``kvdisk.salts``). Requests
without a salt are no tenant: nothing bounds what they store (``docs/decisions/0055-tenants.md``).
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Final

from kvdisk.blocks import BlockKey, Tier, group_of, groups_of
from kvdisk.context import SchedulerContext
from kvdisk.geometry import Geometry
from kvdisk.manager.catalog import NONE, Catalog
from kvdisk.manager.requests import RequestState
from kvdisk.manager.row_lists import GROWN_ROWS, NO_LIST

_NO_ROW: Final = -1


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

    def is_one(self, requests: Iterable[RequestState]) -> bool:
        """Whether what these requests store is of one tenant, or all of it of none."""
        return len({request.limits.tenant for request in requests}) < 2


class FreeTenants:
    """Whose blocks are that may be offered when no request has them any more: of as many as the
    engine has, and as many again."""

    def __init__(self, catalog: Catalog, context: SchedulerContext) -> None:
        self._catalog = catalog
        self._context = context
        self._reached_by: OrderedDict[BlockKey, int] = OrderedDict()

    def note(self, request: RequestState, keys: Sequence[BlockKey], start: int, stop: int) -> None:
        """A request has reached these of its blocks."""
        tenant, reached_by = request.limits.tenant, self._reached_by
        if not tenant:
            return
        for key in keys[start:stop]:
            reached_by[key] = tenant
            reached_by.move_to_end(key)
        while len(reached_by) > 2 * self._context.block_count:
            reached_by.popitem(last=False)

    def of(self, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None]) -> list[int]:
        """Return the tenant of each block: the one that reached it, or that has what is before
        it."""
        return list(map(self._find, keys, parents))

    def _find(self, key: BlockKey, parent: BlockKey | None) -> int:
        tenant = self._reached_by.get(key, 0)
        if not tenant and parent is not None and (row := self._catalog.find(parent)) != NONE:
            tenant = self._catalog.tenants[row]
        return tenant


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


class TenantLists:
    """``RowLists`` with a list for each number and tenant. Rows of no tenant are left out.

    ``tenants``: by row, 0: none; that of a row in a list stays as it is.
    """

    def __init__(self, tenants: Sequence[int]) -> None:
        self.tenants = tenants
        self._older, self._newer = array("i"), array("i")
        self._number_of = bytearray()
        self._ends: dict[tuple[int, int], tuple[int, int]] = {}
        """By tenant and number, for each list that is not empty: its oldest and its newest row."""

    def append(self, rows: Iterable[int], numbers: Iterable[int]) -> None:
        """Make each row in turn the newest of a list of its tenant's."""
        for row, number in zip(rows, numbers, strict=True):
            tenant = self.tenants[row]
            if tenant:
                self._reserve(row)
                assert self._number_of[row] == NO_LIST, "inserted twice"
                oldest, newest = self._ends.get((tenant, number), (row, _NO_ROW))
                self._older[row], self._newer[row], self._number_of[row] = newest, _NO_ROW, number
                if newest != _NO_ROW:
                    self._newer[newest] = row
                self._ends[tenant, number] = oldest, row

    def insert_before(self, row: int, newer: int) -> None:
        """Put a row of a tenant, which is in no list, before one that is in some of that
        tenant's."""
        self._reserve(row)
        tenant, number, older = self.tenants[row], self._number_of[newer], self._older[newer]
        assert self._number_of[row] == NO_LIST and number != NO_LIST
        assert tenant and tenant == self.tenants[newer]
        self._older[row], self._newer[row], self._number_of[row] = older, newer, number
        self._older[newer] = row
        if older != _NO_ROW:
            self._newer[older] = row
        else:
            self._ends[tenant, number] = row, self._ends[tenant, number][1]

    def remove(self, rows: Iterable[int]) -> None:
        """Take rows out of their lists; those that are in none are ignored."""
        olders, newers, numbers, end = self._older, self._newer, self._number_of, len(self._number_of)
        for row in rows:
            number = numbers[row] if row < end else NO_LIST
            if number == NO_LIST:
                continue
            name, older, newer = (self.tenants[row], number), olders[row], newers[row]
            oldest, newest = self._ends[name]
            numbers[row] = NO_LIST
            if older != _NO_ROW:
                newers[older] = newer
            if newer != _NO_ROW:
                olders[newer] = older
            if oldest == newest:
                del self._ends[name]
            else:
                self._ends[name] = newer if row == oldest else oldest, older if row == newest else newest

    def oldest(self, tenant: int, number: int) -> int:
        """Return the oldest row of a list; negative where it is empty."""
        return self._ends.get((tenant, number), (_NO_ROW, _NO_ROW))[0]

    def newer(self, row: int) -> int:
        """Return the row after this one in its list; negative after the newest."""
        return self._newer[row]

    def _reserve(self, row: int) -> None:
        """Have place for rows up to this one."""
        lacking = row + 1 - len(self._number_of)
        if lacking > 0:
            for links in (self._older, self._newer):
                links.extend(array("i", [_NO_ROW]) * (lacking + GROWN_ROWS))
            self._number_of += bytes([NO_LIST]) * (lacking + GROWN_ROWS)
