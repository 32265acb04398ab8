# SPDX-License-Identifier: Apache-2.0
"""What becomes of copies and requests when a job is settled. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Sequence

from kvdisk.manager.copies import SOURCE_IS_BAD, Copies
from kvdisk.manager.jobs import JobRecord
from kvdisk.manager.load_jobs import LoadJobs
from kvdisk.manager.parts import Parts
from kvdisk.manager.remote import RemoteCopies
from kvdisk.manager.requests import RequestState
from kvdisk.manager.stores import StorePlanner
from kvdisk.manager.tiers import Tiers, TierSpace
from kvdisk.messages import JobKind, Reason

_WRITES = frozenset({JobKind.STORE, JobKind.DEMOTE})
_READS = frozenset({JobKind.LOAD, JobKind.PROMOTE})
_SECONDS = {kind: f"job_seconds.{kind.name.lower()}" for kind in JobKind}


class Settlement:
    """Ends jobs: gives back pins and slots, and passes their results to tiers and requests."""

    def __init__(
        self,
        parts: Parts,
        tiers: Tiers,
        stores: StorePlanner,
        requests: dict[str, RequestState],
        remote: RemoteCopies,
        loads: LoadJobs,
        copies: Copies,
    ) -> None:
        self._stats = parts.stats
        self._state = parts.state
        self._tiers = tiers
        self._listening = [space for space in tiers if type(space).on_settled is not TierSpace.on_settled]
        """Those that are told: others' ``on_settled`` does nothing."""
        self._stores = stores
        self._requests = requests
        self._remote = remote
        self._loads = loads
        self._copies = copies

    def settle(self, record: JobRecord, now: float) -> None:
        """End a job that every rank has answered."""
        if record.job.moves and record.sent_s is not None:
            self._stats.observe(_SECONDS[record.job.kind], max(0.0, now - record.sent_s))
        self._state.released += 1
        self._end(record, now)

    def cancel(self, record: JobRecord) -> None:
        """End a job that no worker has seen: every move has failed, and the tiers learn nothing
        from it."""
        record.failed = dict.fromkeys(range(len(record.details)), Reason.CANCELLED)
        self._end(record, 0.0)

    def _end(self, record: JobRecord, now: float) -> None:
        for space in self._listening:
            space.on_settled(record, now)
        if record.job.kind in _WRITES:
            self._end_write(record, now)
        elif record.job.kind in _READS:
            self._end_read(record, now)

    # -- what was written ------------------------------------------------------------------------

    def _end_write(self, record: JobRecord, now: float) -> None:
        """End a store or a demotion: the copies that it wrote, which the next tier is offered, and
        its sources."""
        is_store = record.job.kind is JobKind.STORE
        if not is_store and self._remote.tier in record.job.moves[0].slots:
            self._remote.sent(record)
        for tier, rows in self._copies.end_targets(record).items():
            self._stats.add("stored_blocks" if is_store else "demoted_blocks", len(rows))
            self._copies.offer_lower(rows[::-1], tier)
        self._copies.unpin_sources(record)
        for reason in record.failed.values():
            if reason is Reason.OVERWRITTEN:
                self._stats.add("overwritten_blocks")
            elif reason is not Reason.CANCELLED:
                self._stats.add("failed_stores")
        if is_store and record.failed and not record.by_key:
            self._stores.offer_again(record, self._requests, now)

    # -- what was read -----------------------------------------------------------------------------

    def _end_read(self, record: JobRecord, now: float) -> None:
        """End a load or a promotion: its sources, which were used or are bad, and the copies in
        memory it wrote."""
        if record.job.kind is JobKind.LOAD:
            goes_on = record.by_key or self._loads.settle(record, now)
            self._stats.add("loaded_blocks", len(record.details) - len(record.failed))
            if record.failed:
                never_tried = 0 if goes_on else sum(reason is Reason.ABSENT for reason in record.failed.values())
                self._stats.add("failed_loads", len(record.failed) - self._gone_from_others(record) - never_tried)
        self._copies.end_reads(record)
        arrived = [at for at, detail in enumerate(record.details) if detail.target is not None]
        ready = self._end_arrivals(record, arrived) if arrived else 0
        if record.job.kind is JobKind.PROMOTE:
            failed = sum(reason is not Reason.CANCELLED for reason in record.failed.values())
            self._stats.add("prefetched_blocks", ready if self._tiers.arrival_tier is not None else 0)
            self._stats.add("failed_promotions", failed - self._gone_from_others(record))

    def _end_arrivals(self, record: JobRecord, arrived: Sequence[int]) -> int:
        """End the copies that a job left, or should have left, on the way of what it read. Return
        how many can be read now."""
        self._stats.add("promoted_blocks", len([at for at in arrived if at not in record.failed]))
        if record.job.epoch == self._state.epoch:
            self._state.arriving.difference_update([record.job.moves[at].key for at in arrived])
        return sum(map(len, self._copies.end_targets(record).values()))

    def _gone_from_others(self, record: JobRecord) -> int:
        """Return how many of a job's moves failed because another engine's slot held something else
        by then: these are ``foreign_failures``, which a healthy machine has, too."""
        return sum(reason in SOURCE_IS_BAD and record.job.moves[at].is_foreign for at, reason in record.failed.items())
