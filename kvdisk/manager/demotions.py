# SPDX-License-Identifier: Apache-2.0
"""Write-behind from a tier to the next: the jobs that write what is dirty (``dirty.py``). Scheduler
thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from kvdisk.blocks import JobId
from kvdisk.manager import bounds
from kvdisk.manager.copies import Copies
from kvdisk.manager.parts import Parts
from kvdisk.manager.tiers import TierSpace
from kvdisk.messages import JobKind


class Demotions:
    """Writes the dirty copies of a tier to the next."""

    def __init__(self, parts: Parts, upper: TierSpace, lower: TierSpace, copies: Copies) -> None:
        assert upper.dirty is not None
        self._transfers = parts.transfers
        self._state = parts.state
        self._upper = upper
        self._lower = lower
        self.dirty = upper.dirty
        self._copies = copies
        self._jobs: list[JobId] = []

    def plan(self, now: float) -> None:
        """Make room in the lower tier for what is dirty; plan jobs for what finds some."""
        lower, dirty = self._lower, self.dirty
        if not lower.works:
            dirty.clear()
            return
        if self._jobs:
            self._jobs = [job_id for job_id in self._jobs if job_id in self._transfers]
        dirty.blocked = not self._affordable_bytes(now)
        most = 0 if dirty.blocked else bounds.MOVES * (bounds.JOBS - len(self._jobs))
        lower.make_room_for_dirty(now, most)
        has_room = {size_class for size_class, count in enumerate(dirty.counts) if count}
        while has_room and len(self._jobs) < bounds.JOBS and (affordable := self._affordable_bytes(now)):
            wanted = self._next_rows(has_room, affordable)
            if not any(wanted.values()):
                return  # what is written next is what has waited longest
            has_room -= self._plan_job(wanted)

    def _affordable_bytes(self, now: float) -> float:
        """Return how many bytes may go to the lower tier now, 0 where they are less than a block.

        A limit of demotions lowers this, and learns in ``_charge`` what was planned. While this is
        0 dirty copies may be evicted, an idle engine sleeps until it has something else to do, and
        the remote store does not wait for what is dirty.
        """
        return self._lower.affordable_bytes if self._lower.update_writable(now) else 0

    def _charge(self, byte_count: int) -> None:
        """So many bytes were planned to be written. The lower tier keeps account of its own."""

    def _next_rows(self, classes: Collection[int], left: float) -> dict[int, list[int]]:
        """Return by size class the dirty copies of these classes whose turn is next: as many as one
        job takes, of ``left`` bytes at most."""
        wanted: dict[int, list[int]] = {size_class: [] for size_class in classes}
        for row, size_class in islice(self.dirty.in_turn(classes), bounds.MOVES):
            left -= self._lower.bytes_of(size_class)
            if left < 0:
                break
            wanted[size_class].append(row)
        return wanted

    def _plan_job(self, wanted: Mapping[int, Sequence[int]]) -> set[int]:
        """Plan one job that writes dirty copies, given by size class. Return the classes that are
        done: there is no room for all of theirs, or none is dirty any more."""
        rows, moves, details = self._copies.begin_demotions(wanted, self._upper, self._lower)
        ended = {
            size_class
            for size_class, alike in wanted.items()
            if len(rows[size_class]) < len(alike) or len(alike) == self.dirty.counts[size_class]
        }
        for size_class, alike in rows.items():
            self._charge(len(alike) * self._lower.bytes_of(size_class))
            self.dirty.written(alike)
        if moves:
            record = self._transfers.add(JobKind.DEMOTE, moves, details, epoch=self._state.epoch)
            self._jobs.append(record.job.id)
        return ended

    def has_work(self, now: float, *, silent: bool) -> bool:
        """Return whether dirty copies can be written by further steps. False lets an idle engine
        sleep: they stay in the upper tier. ``silent``: commits were silent for long, and none is
        awaited."""
        return bool(self._affordable_bytes(now)) and any(
            count and self._lower.may_get_room(size_class, silent=silent)
            for size_class, count in enumerate(self.dirty.counts)
        )
