# SPDX-License-Identifier: Apache-2.0
"""The batches that wait and those under way, and when one may begin: every limit of batches is
here.

Work is taken in batches of a few MiB and the queues are looked at between batches, so that a load
waits for the batches under way and never for a long store. Several batches are under way at once:
while one is verified and scattered, the next one's read is in flight.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable
from operator import attrgetter

from kvdisk.blocks import JobId
from kvdisk.worker.resources import Resources
from kvdisk.worker.routes import Batch, Leg, Memory, Route, Staging

MOST_READS = 4
"""Read batches at the device; what is no load starts only below half of it."""
MOST_WRITES = 8
"""Batches from gather to the end of their write: some are gathered and sealed while others are
written. The device gives the kernel no more of them than the drive needs."""
MOST_RELAYS = 2
"""Batches on their way from a drive to the remote store, and as many back: they hold staging while
that is slow."""
MOST_GATHERS = 2
MOST_SCATTERS = 4


class BatchQueue:
    """Keeps batches until they may begin, and lends them staging. Stores leave half of it to loads.

    ``under_way``: the batches that have begun and not ended, late ones too. The mover's thread
    calls everything, in each of its turns: it asks again for what has to wait, and needs no call
    when that may begin.
    """

    def __init__(self, resources: Resources) -> None:
        self.under_way: list[Batch] = []
        self._queues: dict[tuple[Route, bool], list[Batch]] = {}
        """Batches that have not begun, by route and whether they are urgent; in order in each."""
        self._summing = resources.checksum_threads
        self._free: dict[Memory, list[list[int]]] = {
            memory: [list(range(count)) for count in slots.slot_counts]
            for memory, slots in resources.memories.items()
            if isinstance(memory, Staging)
        }

    @property
    def queued(self) -> list[Batch]:
        """The batches that have not begun."""
        return [batch for batches in self._queues.values() for batch in batches]

    def add(self, batches: Iterable[Batch]) -> None:
        """Let batches wait for their turn."""
        for batch in batches:
            insort(self._queues.setdefault((batch.route, batch.work.urgent), []), batch, key=_urgency)

    def remove(self, wanted: Callable[[Batch], object]) -> list[Batch]:
        """Take the ``wanted`` out of those that wait, and return them."""
        taken = [batch for batch in self.queued if wanted(batch)]
        if taken:
            self._queues = {
                lane: [batch for batch in batches if not wanted(batch)] for lane, batches in self._queues.items()
            }
        return taken

    def take(self, given_up: Collection[JobId]) -> tuple[Batch, bool] | None:
        """Take out the first batch that may begin (True: it is under way from now on), or that
        never will (False): it cannot at once, and is of a store that is fenced or ``given_up``. One
        that has to wait holds up its route."""
        for batch in sorted((batches[0] for batches in self._queues.values() if batches), key=_urgency):
            route, work = batch.route, batch.work
            begins = self._has_room(batch) and self._lend(batch)
            if begins or work.fenced or (route.gathers and work.job.id in given_up):
                self._queues[route, work.urgent].pop(0)
                if begins:
                    self.under_way.append(batch)
                return batch, begins
        return None

    def end(self, batch: Batch) -> None:
        """Note that nothing is under way for a batch any more."""
        self.under_way.remove(batch)
        self.give_back(batch)

    def give_back(self, batch: Batch) -> None:
        """Take a batch's staging back, if it has any: nothing touches it any more."""
        if batch.staging:
            free = self._free[batch.route.memory][batch.size_class]
            free.extend(batch.staging)
            free.sort()  # so that batches find neighbours

    def _has_room(self, batch: Batch) -> bool:
        """Whether one more batch like this may be under way."""
        route = batch.route
        others = [other for other in self.under_way if not other.late]
        reads = sum(other.leg is Leg.READ and other.route.source is route.source for other in others)
        writes = sum(other.route.writes and other.route.target is route.target for other in others)
        of_stores = sum(other.route.gathers and other.pending for other in others)
        of_loads = sum(other.route.scatters and other.pending for other in others)
        return (
            not (route.reads and reads >= (MOST_READS if route.scatters else MOST_READS // 2))
            and not (route.writes and writes >= MOST_WRITES)
            and not (route.relays and sum(other.route is route for other in others) >= MOST_RELAYS)
            and not (route.gathers and of_stores >= MOST_GATHERS + self._summing and not batch.work.urgent)
            and not (route.scatters and of_loads >= MOST_SCATTERS + self._summing)
        )

    def _lend(self, batch: Batch) -> bool:
        """Lend a batch its staging, where it needs any; return False where it has to wait. What is
        late holds no other store up."""
        if batch.route.staged:
            memory, size_class, count = batch.route.memory, batch.size_class, len(batch.positions)
            free = self._free[memory][size_class]
            of_stores = sum(
                len(other.staging)
                for other in self.under_way
                if other.route.writes and other.route.memory is memory and other.size_class == size_class
                if not other.late
            )
            half = batch.memory.slot_counts[size_class] // 2  # the first store goes, however little there is
            if count > len(free) or (batch.route.writes and of_stores and of_stores + count > half):
                return False
            batch.staging, batch.slots = free[:count], free[:count]
            del free[:count]
        return True


_urgency = attrgetter("urgency")
