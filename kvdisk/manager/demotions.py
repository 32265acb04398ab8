# SPDX-License-Identifier: Apache-2.0
"""From a tier to the next: which copies that is asked to take, which of them wait, and the jobs
that write them.

A copy that waits is not evicted: it is about to be written. At most half of the upper tier's slots
wait, so that the other half always serves new blocks (invariant 8); of one slot that one. Scheduler
thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, islice, repeat

from kvdisk.blocks import JobId
from kvdisk.manager.catalog import ABSENT, READY
from kvdisk.manager.jobs import MoveDetail
from kvdisk.manager.neighbours import NeighbourCopies
from kvdisk.manager.parts import Parts
from kvdisk.manager.row_lists import RowLists
from kvdisk.manager.tiers import TierSpace
from kvdisk.messages import JobKind, Move

MAX_DEMOTE_MOVES = 64
MAX_DEMOTE_JOBS = 4
"""Queued or out, from one tier to the next."""


class Demotions:
    """Moves copies from one tier to the next.

    ``stalls``: the lower tier takes no writes now. Then queued copies may be evicted for room, too,
    and the lower tier never gets those.
    """

    def __init__(self, parts: Parts, upper: TierSpace, lower: TierSpace, neighbours: NeighbourCopies) -> None:
        self._catalog = parts.catalog
        self._transfers = parts.transfers
        self._stats = parts.stats
        self._state = parts.state
        self._upper = upper
        self._lower = lower
        self._neighbours = neighbours
        self._queued = RowLists(len(upper.pool.total))
        """By size class."""
        self._jobs: list[JobId] = []
        self.stalls = False
        upper.lower = self

    # -- what is asked -----------------------------------------------------------------------------

    def offer(self, rows: Sequence[int], *, own: bool = False) -> int:
        """Queue those READY copies that the lower tier admits, and neither has nor can read from a
        neighbour.

        Asked when a copy becomes READY, each time its key's count may have risen, and before it
        leaves. ``own``: also what a neighbour has. Returns how many were queued: not those that are
        already, nor more than there is place for.
        """
        keys = self._catalog.keys
        above, below = (self._catalog.columns(space.tier).states for space in (self._upper, self._lower))
        wanted = [row for row in rows if above[row] == READY and below[row] == ABSENT]
        if not wanted or not self._lower.status.is_open:
            return 0
        near = self._neighbours.near(self._lower.tier)
        if near and not own:
            wanted = [row for row in wanted if keys[row] not in near]
        if not self._lower.admission.is_open:
            parents = map(self._catalog.parent, wanted)
            wanted = list(compress(wanted, self._lower.admits([keys[row] for row in wanted], list(parents))))
        queued, taken = set(self._queued.held(wanted)), 0
        for size_class, alike in self._upper.by_class([row for row in wanted if row not in queued]):
            fitting = alike[: max(0, self.limit(size_class) - self.count(size_class))]
            self._queued.append(fitting, repeat(size_class))
            taken += len(fitting)
        return taken

    def keeps(self, row: int) -> bool:
        """Ask once more before a copy leaves for room. True: it waits for its demotion instead.

        Counts why a copy that will be nowhere then was not wanted.
        """
        if self._catalog.state(row, self._lower.tier) != ABSENT:
            return False
        if self.offer((row,)):
            return True
        if self._catalog.keys[row] in self._neighbours.near(self._lower.tier):
            return False
        status = self._lower.status
        if status.is_open:
            if not self._lower.admission.admits((self._catalog.keys[row],))[0]:
                self._stats.add("left_blocks.reuse")
            else:
                self._stats.add("left_blocks.budget" if status.is_spent else "left_blocks.room")
        return False

    # -- what is queued ----------------------------------------------------------------------------

    def is_queued(self, row: int) -> bool:
        """Whether a copy waits for its demotion."""
        return row in self._queued

    def forget(self, rows: Sequence[int]) -> None:
        """Copies have ended."""
        self._queued.remove(rows)

    def count(self, size_class: int) -> int:
        """Return how many copies of a size class are queued."""
        return self._queued.counts[size_class]

    def limit(self, size_class: int) -> int:
        """Return how many copies of a size class may be queued."""
        return max(1, self._upper.pool.total[size_class] // 2)

    @property
    def total(self) -> int:
        """How many copies are queued."""
        return sum(self._queued.counts)

    # -- steps -------------------------------------------------------------------------------------

    def plan(self, now: float) -> None:
        """Make room in the lower tier for what is queued; plan jobs for what finds some."""
        lower = self._lower
        if not lower.status.is_open:
            self._queued = RowLists(len(self._queued.counts))
            return
        self._jobs = [job_id for job_id in self._jobs if job_id in self._transfers]
        self.stalls = not lower.refresh_writable(now)
        lower.make_room(now, list(self._queued.counts))
        for size_class in range(len(self._queued.counts)):
            while self.count(size_class) and lower.refresh_writable(now):
                if len(self._jobs) >= MAX_DEMOTE_JOBS:
                    return
                if not self._plan_job(size_class):
                    break

    def _plan_job(self, size_class: int) -> bool:
        """Plan one job of the first that are queued; False where there is no room for any."""
        slots = self._lower.allocate(size_class, min(MAX_DEMOTE_MOVES, self.count(size_class)))
        if not slots:
            return False
        rows, catalog = list(islice(self._queued.walk(size_class), len(slots))), self._catalog
        self._queued.remove(rows)
        source, target = self._upper.tier, self._lower.tier
        catalog.begin(rows, target, slots)
        catalog.pin(rows, source)
        moves = [
            Move(
                catalog.keys[row],
                catalog.generations[row],
                slots={source: above, target: below},
                parent=catalog.parent(row),
            )
            for row, above, below in zip(rows, catalog.columns(source).slots(rows), slots, strict=True)
        ]
        details = [MoveDetail(row, source=source, target=target) for row in rows]
        record = self._transfers.add(JobKind.DEMOTE, moves, details, epoch=self._state.epoch)
        self._jobs.append(record.job.id)
        return True

    def can_go_on(self, now: float, *, silent: bool) -> bool:
        """Whether what is queued can be planned. False lets an idle engine sleep: what is queued
        stays in the upper tier, and waits. ``silent``: nothing was heard of commits for long: none
        is awaited."""
        lower = self._lower
        return lower.refresh_writable(now) and any(
            count and lower.may_get_room(size_class, silent=silent)
            for size_class, count in enumerate(self._queued.counts)
        )
