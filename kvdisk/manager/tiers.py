# SPDX-License-Identifier: Apache-2.0
"""The CPU tier's room: slots, eviction, and the backlog of copies that wait to be demoted. Scheduler thread only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvdisk.blocks import CPU, Slot, group_of
from kvdisk.geometry import Geometry
from kvdisk.manager.catalog import DOOMED, Catalog
from kvdisk.manager.eviction import EvictionPolicy, TailFirst
from kvdisk.manager.pool import SlotPool
from kvdisk.stats import Stats

_AHEAD_SHARE, _MOST_AHEAD = 256, 15
"""Slots that are freed beyond those asked for: one of so many, at most so many."""


class CpuSpace:
    """Slots of the arena that every rank has. A slot's segment is its size class.

    A copy in the backlog is not evicted: it is about to be written to NVMe. The backlog holds at
    most half of the slots, so that the other half always serves new blocks (invariant 8); of one slot that one.
    ``before_evict(row)`` is asked before a copy leaves for room: True: it was put in the backlog instead; never for
    one that is there. None: nobody else wants them.
    ``is_draining``: whether the backlog is being written. While it is not, its copies leave where nothing else can:
    they would hold back the copies before them for as long as the NVMe tier takes nothing.
    Where copies leave for room, some more than needed do: each time costs twice what one of many costs (decision 28).
    ``ahead``: how many more; None: by the tier's size.
    """

    def __init__(
        self,
        geometry: Geometry,
        slot_counts: tuple[int, ...],
        catalog: Catalog,
        stats: Stats,
        make_policy: Callable[[], EvictionPolicy],
        ahead: int | None = None,
    ) -> None:
        self._geometry = geometry
        self._catalog = catalog
        self._stats = stats
        self._policies = [TailFirst(make_policy(), catalog, CPU) for _ in slot_counts]
        self.pool = SlotPool(len(slot_counts))
        self.before_evict: Callable[[int], bool] | None = None
        self.is_draining = True
        self._limits = [max(1, count // 2) for count in slot_counts]
        self._ahead = [min(count // _AHEAD_SHARE, _MOST_AHEAD) if ahead is None else ahead for count in slot_counts]
        self._backlogs: list[OrderedDict[int, None]] = [OrderedDict() for _ in slot_counts]
        for size_class, count in enumerate(slot_counts):
            if count:
                self.pool.add_segment(size_class, size_class, count)

    def allocate(self, size_class: int, count: int, *, spare_backlog: bool = False) -> list[Slot]:
        """Take up to ``count`` slots, evicting where none is free; fewer where the rest is pinned or to be demoted.

        ``spare_backlog``: what is to be demoted stays, even while nothing of it can be written.
        """
        short = count - self.pool.free[size_class]
        while short > 0:
            rows = self._victims(size_class, short, spare_backlog)
            leaving = rows if self.before_evict is None else self._ask(rows, short, size_class, self.before_evict)
            self._drop(size_class, leaving)
            self._stats.add("evicted_blocks.cpu", len(leaving))
            short -= len(leaving)
            # Others may be found where some went to the backlog, which is bounded, or where that may leave as well.
            if not rows or (len(leaving) == len(rows) and (self.is_draining or spare_backlog)):
                break
        return self.pool.allocate(size_class, count)

    def give_back(self, size_class: int, slots: Sequence[Slot]) -> None:  # noqa: ARG002 - as the NVMe tier's
        """Return slots that were just taken, and not used."""
        self.pool.release(slots)

    def _ask(self, rows: list[int], needed: int, size_class: int, before_evict: Callable[[int], bool]) -> list[int]:
        """Return which of the victims, those that follow a copy before it, leave.

        No more than ``needed`` while the backlog has no room for those that are wanted.
        """
        leaving: list[int] = []
        held: set[int] = set()
        backlog, limit = self._backlogs[size_class], self._limits[size_class]
        for row in rows:
            if len(leaving) >= needed and len(backlog) >= limit:
                break
            # Where what follows a copy went to the backlog instead, the copy stays before it.
            if row in held or before_evict(row):
                held.add(self._catalog.chains.parent_rows[row])
            else:
                leaving.append(row)
        return leaving

    def _victims(self, size_class: int, count: int, spare_backlog: bool) -> list[int]:
        """Return ``count`` copies and those that leave ahead; of the backlog, where it has to leave, ``count``."""
        backlog, policy = self._backlogs[size_class], self._policies[size_class]
        evictable, more = self._catalog.evictable_in(CPU), self._ahead[size_class]
        if not backlog:
            return policy.victims(count, evictable, more)
        rows = policy.victims(count, lambda row: row not in backlog and evictable(row), more)
        if not rows and not self.is_draining and not spare_backlog:
            rows = policy.victims(count, evictable)
        return rows

    @property
    def room(self) -> tuple[int, int]:
        """Free slots, and all."""
        return sum(self.pool.free), sum(self.pool.total)

    def inserted(self, rows: Sequence[int]) -> None:
        """Copies became READY on every rank: of one chain the tail comes first."""
        if len(self._policies) == 1:
            self._policies[0].insert(rows)
            return
        for size_class, alike in self._by_class(rows):
            self._policies[size_class].insert(alike)

    def accessed(self, rows: Sequence[int]) -> None:
        """Copies were used: of one chain the tail is told first."""
        if len(self._policies) == 1:
            self._policies[0].access(rows)
            return
        for size_class, alike in self._by_class(rows):
            self._policies[size_class].access(alike)

    def drop(self, row: int) -> None:
        """End an unpinned copy; its slot is free at once."""
        self._drop(self.class_of(row), (row,))

    def _drop(self, size_class: int, rows: Sequence[int]) -> None:
        """End unpinned copies of one size class, those that follow a copy before it."""
        self._policies[size_class].remove(rows)
        backlog = self._backlogs[size_class]
        if backlog:
            for row in rows:
                backlog.pop(row, None)
        self.pool.release(self._catalog.drop_all(rows, CPU))

    def discard(self, row: int) -> None:
        """Serve a READY or WRITING copy to nobody any more, and end it as soon as no job uses it."""
        size_class = self.class_of(row)
        self._policies[size_class].remove((row,))
        self._backlogs[size_class].pop(row, None)
        self._catalog.doom(row, CPU)
        self._end_doomed(row)

    def unpin(self, rows: Sequence[int]) -> None:
        """Give back one pin of each copy; the last one of a doomed copy ends it."""
        self._catalog.unpin(rows, CPU)
        if self._catalog.any_in(DOOMED, rows, CPU):
            for row in reversed(rows):
                self._end_doomed(row)

    def _end_doomed(self, row: int) -> None:
        if self._catalog.state(row, CPU) == DOOMED and self._catalog.pins(row, CPU) == 0:
            self.drop(row)

    # -- waiting for NVMe ----------------------------------------------------------------------

    def enqueue(self, rows: Sequence[int]) -> int:
        """Put READY copies in the backlog; return how many: not those that are there already, nor more than fit."""
        taken = 0
        for size_class, alike in self._by_class(rows):
            backlog = self._backlogs[size_class]
            before = len(backlog)
            new = alike if backlog.keys().isdisjoint(alike) else [row for row in alike if row not in backlog]
            backlog.update(dict.fromkeys(new[: max(0, self._limits[size_class] - before)]))
            taken += len(backlog) - before
        return taken

    def backlog_count(self, size_class: int) -> int:
        """Return how many copies of a size class wait to be demoted."""
        return len(self._backlogs[size_class])

    def take_backlog(self, size_class: int, count: int) -> list[int]:
        """Take the first ``count`` rows out of the backlog."""
        backlog = self._backlogs[size_class]
        return [backlog.popitem(last=False)[0] for _ in range(min(count, len(backlog)))]

    def clear_backlog(self) -> None:
        """Forget who waits: there will be no demotion."""
        for backlog in self._backlogs:
            backlog.clear()

    def _by_class(self, rows: Sequence[int]) -> Iterable[tuple[int, Sequence[int]]]:
        """Return rows by the size class of their blocks, each in the order given."""
        if len(self._policies) == 1:
            return ((0, rows),)
        found: dict[int, list[int]] = {}
        for row in rows:
            found.setdefault(self.class_of(row), []).append(row)
        return found.items()

    def class_of(self, row: int) -> int:
        """Return the size class of a row's block."""
        if len(self._policies) == 1:
            return 0
        return self._geometry.size_classes[group_of(self._catalog.keys[row])]
