# SPDX-License-Identifier: Apache-2.0
"""From a tier to the next: which copies that is asked to take, which of them wait, and the jobs
that write them.

A copy that waits is not evicted: it is about to be written. At most half of the upper tier's slots
wait, so that the other half always serves new blocks (invariant 8); of one slot that one. Scheduler
thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, repeat

from kvdisk.blocks import JobId
from kvdisk.manager.catalog import ABSENT, NONE, READY
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

    def offer(self, rows: Sequence[int], *, own: bool = False) -> None:
        """Queue those READY copies that the lower tier admits, and neither has nor can read from a
        neighbour; no more than there is place for.

        Asked when a copy becomes READY, and each time its key's count may have risen. ``own``: also
        what a neighbour has.
        """
        if self._lower.status.is_open:
            self._queue(self._admitted(self._lacking(rows, own=own)))

    def leaving(self, rows: Sequence[int]) -> list[int]:
        """Offer copies once more before they leave for room. Return which leave: not those that
        wait for their demotion from now on, nor what these follow.

        Counts why those that will be nowhere then were not wanted. ``rows``: of one chain the tail
        first.
        """
        status = self._lower.status
        if not status.is_open:
            return list(rows)
        lacking = self._lacking(rows)
        admitted = self._admitted(lacking)
        stay, parent_rows = set(self._queue(admitted)), self._catalog.parent_rows
        leaving: list[int] = []
        for row in rows:
            if row in stay:
                stay.add(parent_rows[row])
            else:
                leaving.append(row)
        lost = set(lacking).intersection(leaving)
        unserved = lost.intersection(admitted)
        self._stats.add("left_blocks.reuse", len(lost) - len(unserved))
        self._stats.add("left_blocks.budget" if status.is_spent else "left_blocks.room", len(unserved))
        return leaving

    def _lacking(self, rows: Sequence[int], *, own: bool = False) -> list[int]:
        """Return of which READY copies the lower tier has none, nor (unless ``own``) a neighbour of
        it."""
        keys, near = self._catalog.keys, self._neighbours.near(self._lower.tier)
        above, below = (self._catalog.columns(space.tier).states for space in (self._upper, self._lower))
        lacking = [row for row in rows if above[row] == READY and below[row] == ABSENT]
        return [row for row in lacking if keys[row] not in near] if near and not own else lacking

    def _admitted(self, rows: Sequence[int]) -> Sequence[int]:
        """Return which copies the lower tier lets in: also what copies there follow, for these
        would serve nobody without it."""
        if not rows or self._lower.admission.is_open:
            return rows
        keys, parents = [self._catalog.keys[row] for row in rows], list(map(self._catalog.parent, rows))
        followers, answers = self._catalog.columns(self._lower.tier).first_child, self._lower.admits(keys, parents)
        return [row for row, is_let_in in zip(rows, answers, strict=True) if is_let_in or followers[row] != NONE]

    def _queue(self, rows: Sequence[int]) -> list[int]:
        """Queue what is not queued, as far as there is place; return that."""
        before = set(self._queued.held(rows))
        queued: list[int] = []
        for size_class, alike in self._upper.by_class([row for row in rows if row not in before]):
            fitting = alike[: max(0, self.limit(size_class) - self.count(size_class))]
            self._queued.append(fitting, repeat(size_class))
            queued += fitting
        return queued

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
