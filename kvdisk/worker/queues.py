# SPDX-License-Identifier: Apache-2.0
"""What waits to be started, the most urgent first, and the staging slots that are free for it. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvdisk.blocks import JobId
from kvdisk.worker.legs import Lot, Part, Route


class LotQueues:
    """A queue of lots for each route, and for each route of stores one of the urgent: those that a step waits for.

    The urgent come first, then loads, those of requests that arrived earlier before others; then stores, promotions
    and demotions.
    """

    def __init__(self) -> None:
        self._queues: dict[Route, deque[Lot]] = {route: deque() for route in Route}
        self._urgent: dict[Route, deque[Lot]] = {route: deque() for route in Route if route.gathers}
        self._loads = [self._queues[route] for route in Route if route.scatters]
        others = [self._queues[route] for route in Route if not route.scatters]
        self._others = others
        self._order = [*self._urgent.values(), *self._loads, *self._others]

    def add(self, lot: Lot) -> None:
        """Put a lot behind the others of its route, but for loads of requests that arrived later."""
        queue = (self._urgent if lot.work.urgent else self._queues)[lot.route]
        at = len(queue)
        while at and queue[at - 1].work.job.arrival > lot.work.job.arrival:
            at -= 1
        queue.insert(at, lot)

    def hurry(self, job_id: JobId) -> None:
        """Let a store go before all else."""
        for route, urgent in self._urgent.items():
            queue = self._queues[route]
            moved = [lot for lot in queue if lot.work.job.id == job_id]
            for lot in moved:
                queue.remove(lot)
            urgent.extend(moved)

    def heads(self) -> Iterator[Lot]:
        """Yield the first lot of each queue. A lot that is taken whole has to be passed to ``pop`` at once."""
        yield from (queue[0] for queue in self._urgent.values() if queue)
        yield from sorted((queue[0] for queue in self._loads if queue), key=lambda lot: lot.work.job.arrival)
        for queue in self._others:
            if queue:
                yield queue[0]

    def pop(self, lot: Lot) -> None:
        """Take out the first lot of its queue."""
        for queue in self._order:
            if queue and queue[0] is lot:
                queue.popleft()
                return
        raise AssertionError("not the first of any queue")

    def remove(self, wanted: Callable[[Lot], bool]) -> list[Lot]:
        """Take out all lots that are ``wanted``, and return them."""
        found: list[Lot] = []
        for queue in filter(None, self._order):
            gone = [lot for lot in queue if wanted(lot)]
            for lot in gone:
                queue.remove(lot)
            found += gone
        return found


class FreeStaging:
    """The free slots of staging, by size class. ``part_slots``: how many a part should take, likewise."""

    def __init__(self, slot_counts: Sequence[int], part_slots: Sequence[int]) -> None:
        self._free = [list(range(count)) for count in slot_counts]
        self._counts = tuple(slot_counts)
        # A quarter of staging for a part of a load, an eighth of a store: MOST_WRITES of them leave half to loads.
        self._most = {
            writes: [min(most, max(1, count // share)) for most, count in zip(part_slots, slot_counts, strict=True)]
            for writes, share in ((False, 4), (True, 8))
        }

    def take(self, size_class: int, wanted: int, *, writes: bool) -> list[int]:
        """Take slots for a part of at most ``wanted``, to be written to a drive or read; empty where it has to wait."""
        assert self._counts[size_class], "there is no staging for this size of slot"
        free = self._free[size_class]
        count = min(wanted, self._most[writes][size_class])
        if count > len(free):
            return []
        taken = free[:count]
        del free[:count]
        return taken

    def give_back(self, part: Part) -> None:
        """Make a part's slots free: nothing touches them any more."""
        if part.staging:
            free = self._free[part.size_class]
            free.extend(part.staging)
            free.sort()  # so that parts find neighbours

    @property
    def all_free(self) -> bool:
        """Whether every slot has been given back."""
        return tuple(map(len, self._free)) == self._counts
