# SPDX-License-Identifier: Apache-2.0
"""What becomes of copies, pins and requests when a job is settled. Scheduler thread only.

A late move has failed, and a device may still touch its slots: its target is DOOMED and keeps its
writer's pin, and its source keeps its pin, until ``release``. Of one chain the tail is settled
first, so that its head ends as the most recently used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kvdisk.blocks import Slot, Tier
from kvdisk.manager.catalog import READY
from kvdisk.manager.jobs import JobRecord
from kvdisk.manager.load_jobs import LoadJobs
from kvdisk.manager.parts import HasParts, Parts
from kvdisk.manager.remote import Hints
from kvdisk.manager.requests import RequestState
from kvdisk.manager.stores import StorePlanner
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import JobKind, Move, Reason

_WRITES = frozenset({JobKind.STORE, JobKind.DEMOTE})
_READS = frozenset({JobKind.LOAD, JobKind.PROMOTE})
_SOURCE_IS_BAD = frozenset({Reason.HEADER, Reason.CHECKSUM, Reason.IO_ERROR})
"""Failures of a load after which its source copy is dropped. A deadline says nothing about the
copy."""


class Settlement(HasParts):
    """Ends jobs: gives back pins and slots, and passes their results to tiers and requests."""

    def __init__(
        self,
        parts: Parts,
        tiers: Tiers,
        stores: StorePlanner,
        requests: dict[str, RequestState],
        hints: Hints,
        loads: LoadJobs,
    ) -> None:
        super().__init__(parts)
        self._tiers = tiers
        self._stores = stores
        self._requests = requests
        self._neighbours = hints.neighbours
        self._remote = hints.remote
        self._loads = loads

    def settle(self, record: JobRecord, now: float, now_s: int) -> None:
        """End a job that every rank has answered. ``now_s``: seconds since the Unix epoch."""
        if record.job.moves and record.sent_s is not None:
            self._stats.observe(f"job_seconds.{record.job.kind.name.lower()}", max(0.0, now - record.sent_s))
        self._state.released += 1
        self._end(record, now, now_s)

    def cancel(self, record: JobRecord) -> None:
        """End a job that no worker has seen: every move has failed, and the tiers learn nothing
        from it."""
        record.failed = dict.fromkeys(range(len(record.details)), Reason.CANCELLED)
        self._end(record, 0.0, 0)

    def _end(self, record: JobRecord, now: float, now_s: int) -> None:
        for space in self._tiers:
            space.on_settled(record, now)
        if record.job.kind in _WRITES:
            self._end_write(record, now, now_s)
        elif record.job.kind in _READS:
            self._end_read(record, now, now_s)

    def release(self, record: JobRecord) -> None:
        """Give back the pins of a settled job's late moves: nothing touches their slots any
        more."""
        self._state.released += 1
        for at in sorted(record.late, reverse=True):
            detail, move = record.details[at], record.job.moves[at]
            foreign = self._neighbours.slot_of(move)
            if foreign is not None:
                self._neighbours.unpin(foreign)
            elif detail.source is not None:  # never the remote store: nothing of it is late
                self._tiers[detail.source].unpin((detail.row,))
            if detail.target is not None:
                self._tiers[detail.target].abandon(detail.row)

    # -- what was written ------------------------------------------------------------------------

    def _end_write(self, record: JobRecord, now: float, now_s: int) -> None:
        """End a store or a demotion: the copies that it wrote, which the next tier is offered, and
        its sources."""
        is_store = record.job.kind is JobKind.STORE
        if not is_store and self._remote.tier in record.job.moves[0].slots:
            self._remote.sent(record, now)
        for tier, rows in self._end_targets(record, now_s).items():
            self._stats.add("stored_blocks" if is_store else "demoted_blocks", len(rows))
            self._offer_lower(rows[::-1], tier)
        for at, detail in enumerate(record.details):
            if detail.source is not None and at not in record.late:
                self._tiers[detail.source].unpin((detail.row,))
        for reason in record.failed.values():
            if reason is Reason.OVERWRITTEN:
                self._stats.add("overwritten_blocks")
            elif reason is not Reason.CANCELLED:
                self._stats.add("failed_stores")
        if is_store and record.failed:
            self._stores.offer_again(record, self._requests.get(record.request_id or ""), now)

    def _end_targets(self, record: JobRecord, now_s: int) -> dict[Tier, list[int]]:
        """End the copies that a job wrote, or failed to. Return the READY ones by tier, the tail
        first.

        The slot of a late move stays taken until ``release``.
        """
        written: dict[Tier, list[int]] = {}
        for at in reversed(range(len(record.details))):
            detail = record.details[at]
            if detail.target is not None:
                rows = written.setdefault(detail.target, [])
                if at not in record.failed:
                    rows.append(detail.row)
        ready = {tier: self._tiers[tier].finish(rows, now_s) for tier, rows in written.items()}
        for at in sorted(record.failed, reverse=True):
            detail = record.details[at]
            if detail.target is not None:
                self._tiers[detail.target].abandon(detail.row, late=at in record.late)
        return ready

    # -- what was read -----------------------------------------------------------------------------

    def _end_read(self, record: JobRecord, now: float, now_s: int) -> None:
        """End a load or a promotion: its sources, which were used or are bad, and the copies in
        memory it wrote."""
        if record.job.kind is JobKind.LOAD:
            given_up = 0
            if not self._loads.settle(record, now):  # what was never tried, because its request has ended
                given_up = sum(reason is Reason.ABSENT for reason in record.failed.values())
            self._stats.add("loaded_blocks", len(record.details) - len(record.failed))
            self._stats.add("failed_loads", len(record.failed) - self._gone_from_others(record) - given_up)
        self._end_sources(record)
        landed = [at for at, detail in enumerate(record.details) if detail.target is not None]
        self._stats.add("promoted_blocks", len([at for at in landed if at not in record.failed]))
        if record.job.epoch == self._state.epoch:
            self._state.landing.difference_update([record.job.moves[at].key for at in landed])
        ready = sum(map(len, self._end_targets(record, now_s).values()))
        if record.job.kind is JobKind.PROMOTE:
            failed = sum(reason is not Reason.CANCELLED for reason in record.failed.values())
            self._stats.add("prefetched_blocks", ready)
            self._stats.add("failed_promotions", failed - self._gone_from_others(record))

    def _gone_from_others(self, record: JobRecord) -> int:
        """Return how many of a job's moves failed because another engine's slot held something else
        by then: these are ``foreign_failures``, which a healthy machine has, too."""
        return sum(reason in _SOURCE_IS_BAD and record.job.moves[at].is_foreign for at, reason in record.failed.items())

    def _end_sources(self, record: JobRecord) -> None:
        """Give back the pins of sources, drop the bad ones, and note that the others were used."""
        sound: defaultdict[Tier, list[int]] = defaultdict(list)
        used: defaultdict[Tier, list[int]] = defaultdict(list)
        reached: list[int] = []
        spent: defaultdict[Tier, list[int]] = defaultdict(list)
        states = {space.tier: self._catalog.columns(space.tier).states for space in self._tiers}
        for at in reversed(range(len(record.details))):
            (row, group, _, tier, _), move = record.details[at], record.job.moves[at]
            reason, late = record.failed.get(at), at in record.late
            if tier is self._remote.tier:
                self._remote.loaded(move, reason)
                continue
            foreign = self._neighbours.slot_of(move) if tier is self._neighbours.tier else None
            if foreign is not None:
                self._end_foreign(move, foreign, reason, late=late)
                self._stats.add("loaded_blocks_foreign", int(reason is None and record.job.kind is JobKind.LOAD))
                continue
            assert tier is not None or reason is not None, "nothing was read, and the move has not failed"
            if tier is None:
                continue
            if not late:
                spent[tier].append(row)
            if reason is not None and self._is_bad(row, tier, reason):
                self._tiers[tier].discard(row)
            elif states[tier][row] == READY:
                sound[tier].append(row)
                if reason is not None:
                    continue
                is_state = group >= 0 and self._geometry.groups[group].state_tokens is not None
                if record.job.kind is JobKind.LOAD and not is_state:
                    reached.append(row)
                else:
                    used[tier].append(row)
        for space in self._tiers:
            self._offer_lower(sound[space.tier], space.tier)  # their counts rose when the load was planned
            space.unpin(spent[space.tier])
            space.reached(reached)  # so that the request need not do it again
            space.touch(used[space.tier])

    def _is_bad(self, row: int, tier: Tier, reason: Reason) -> bool:
        """Whether to drop a copy that was read. One on a drive that was given up for now is as good
        as before."""
        if reason not in _SOURCE_IS_BAD or self._catalog.state(row, tier) != READY:
            return False
        return reason is not Reason.IO_ERROR or self._catalog.readable(row, tier)

    def _end_foreign(self, move: Move, slot: Slot, reason: Reason | None, *, late: bool) -> None:
        """End the read of a neighbour's copy."""
        if reason in _SOURCE_IS_BAD:
            self._neighbours.reject(move.key, slot, move.generation)
        if not late:
            self._neighbours.unpin(slot)

    def _offer_lower(self, rows: Sequence[int], tier: Tier) -> None:
        """Offer copies that have become READY, or were used, to the next tier, and to the remote
        store."""
        lower = self._tiers[tier].lower
        if lower is not None:
            lower.offer(rows)
        if tier is self._remote.source:
            self._remote.offer(rows)
