# SPDX-License-Identifier: Apache-2.0
"""What becomes of copies, pins and touched blocks when a job is settled. Scheduler thread only.

A late move has failed, and its slots are zombies: its target is DOOMED and keeps its writer's pin, its source
keeps its pin, until ``release``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvdisk.blocks import CPU, NVME, BlockKey, Tier
from kvdisk.geometry import Geometry
from kvdisk.manager.catalog import DOOMED, READY, Catalog
from kvdisk.manager.demotions import NvmeOffers
from kvdisk.manager.jobs import JobRecord
from kvdisk.manager.neighbours import ForeignCopies, is_foreign
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.prefetch import PendingReads
from kvdisk.manager.requests import RequestState
from kvdisk.manager.store_policy import Refusal, StorePolicy
from kvdisk.manager.tiers import CpuSpace
from kvdisk.messages import JobKind, Move, Reason
from kvdisk.stats import Stats

_SOURCE_IS_BAD = frozenset({Reason.HEADER, Reason.CHECKSUM, Reason.IO_ERROR})
"""Failures of a load after which its source copy is dropped. A deadline says nothing about the copy."""
_STORE, _LOAD, _PROMOTE = JobKind.STORE, JobKind.LOAD, JobKind.PROMOTE
_TIMED = {
    JobKind.STORE: "job_seconds.store",
    JobKind.LOAD: "job_seconds.load",
    JobKind.DEMOTE: "job_seconds.demote",
    JobKind.PROMOTE: "job_seconds.promote",
}


class Settlement:
    """Ends jobs. ``pinned_blocks``: GPU blocks touched for stores. ``room`` rises when room may have come free."""

    def __init__(
        self,
        geometry: Geometry,
        catalog: Catalog,
        stats: Stats,
        cpu: CpuSpace | None,
        nvme: NvmeSpace | None,
        store_policy: StorePolicy,
        offers: NvmeOffers,
        requests: dict[str, RequestState],
        foreign: ForeignCopies,
        reads: PendingReads,
    ) -> None:
        self._geometry = geometry
        self._catalog = catalog
        self._stats = stats
        self._cpu = cpu
        self._nvme = nvme
        self._store_policy = store_policy
        self._offers = offers
        self._requests = requests
        self._foreign = foreign
        self._reads = reads
        self.room = 0

    def settle_all(self, records: Iterable[JobRecord], now: float, now_s: int) -> None:
        """End jobs that every rank has answered, in order: at once those stores that follow each other."""
        stored: list[JobRecord] = []
        for record in records:
            kind = record.job.kind
            series = _TIMED.get(kind)
            if series is not None and record.sent_s is not None:
                self._stats.observe(series, max(0.0, now - record.sent_s))
            if kind is _STORE and not record.failed:
                stored.append(record)
                continue
            self._settle_whole(stored, now, now_s)
            stored = []
            self.settle(record, now, now_s)
        self._settle_whole(stored, now, now_s)

    def _settle_whole(self, stored: list[JobRecord], now: float, now_s: int) -> None:
        if stored:
            self.room += len(stored)
            self._settle_stores(stored, now, now_s)

    def settle(self, record: JobRecord, now: float, now_s: int) -> None:
        """End a job that every rank has answered. ``now_s``: seconds since the Unix epoch."""
        self.room += 1
        kind = record.job.kind
        if kind is _STORE:
            self._settle_store(record, now, now_s)
        elif kind is _LOAD:
            self._settle_load(record, now)
        elif kind is _PROMOTE:
            self._settle_promote(record, now)
        elif kind is JobKind.DEMOTE:
            self._settle_demote(record, now, now_s)
        elif record.job.segment is None or record.job.segment.source is None:
            assert kind in {JobKind.OPEN_HOME, JobKind.OPEN_SEGMENT, JobKind.DROP_SEGMENT} and self._nvme is not None
            self._nvme.settle_files(record, now)

    def release(self, record: JobRecord) -> None:
        """Nothing touches the slots of a settled job's late moves any more: give their pins back."""
        self.room += 1
        kind = record.job.kind
        for at in sorted(record.late, reverse=True):
            row, move = record.details[at].row, record.job.moves[at]
            if kind in {_LOAD, _PROMOTE}:
                if is_foreign(move.nvme):
                    assert move.nvme is not None
                    self._foreign.unpin(move.nvme)
                else:
                    self._space(NVME).unpin((row,))
                if move.cpu is not None:
                    self._abandon(row, CPU)
            else:
                self._abandon(row, NVME)
                if kind is JobKind.DEMOTE:
                    self._space(CPU).unpin((row,))

    def cancel(self, record: JobRecord) -> None:
        """End a job that no worker has seen: as if every move had failed, with no consequence for the tiers."""
        record.failed = dict.fromkeys(range(len(record.details)), Reason.CANCELLED)
        if record.job.kind is _STORE:
            self._settle_store(record, 0.0, 0)
        elif record.job.kind is _PROMOTE:
            self._settle_promote(record, 0.0)
        else:
            self._settle_demote(record, 0.0, 0)

    # -- stores --------------------------------------------------------------------------------

    def _settle_store(self, record: JobRecord, now: float, now_s: int) -> None:
        self._settle_stores((record,), now, now_s)
        tier = NVME if self._cpu is None else CPU
        for at in sorted(record.failed, reverse=True):
            detail, key = record.details[at], record.job.moves[at].key
            self._fail(detail.row, tier, at in record.late)
            if record.failed[at] is Reason.OVERWRITTEN:
                self._stats.add("overwritten_blocks")
            elif record.failed[at] is not Reason.CANCELLED:
                self._stats.add("failed_stores")
            # It had its slot, and that is free again: only the back-off stands before the next offer.
            why = (Refusal.NO_ROOM, self.room - 1, now)
            if record.request_id is None:
                self._store_policy.refuse_free(key, *why)
            else:
                self._store_policy.refuse(record.request_id, detail.group, (detail.position,), (key,), *why)

    def _settle_stores(self, records: Sequence[JobRecord], now: float, now_s: int) -> None:
        """End stores but for their moves that failed."""
        written: list[int] = []
        # The tail of a chain first, so that its head ends as the most recently used.
        for record in reversed(records):
            moves = range(len(record.details) - 1, -1, -1)
            written += [record.details[at].row for at in moves if at not in record.failed]
        self._stats.add("stored_blocks", len(written))
        stored = self._finish(written, NVME if self._cpu is None else CPU)
        if self._nvme is None:
            return
        if self._cpu is None:
            self._nvme.record(stored, now_s)
            for record in records:
                self._nvme.note_writes(record, now)
        else:
            self._offers.offer(stored[::-1])

    def _finish(self, rows: Sequence[int], tier: Tier) -> Sequence[int]:
        """Copies were written on every rank: READY, but for those that were doomed on the way. Return the READY ones.

        Of one chain the tail comes first.
        """
        catalog = self._catalog
        if catalog.any_in(DOOMED, rows, tier):
            doomed = [row for row in rows if catalog.state(row, tier) == DOOMED]
            for row in doomed:
                self._abandon(row, tier)
            rows = [row for row in rows if row not in doomed]
        catalog.finish(rows, tier)
        self._space(tier).inserted(rows)
        return rows

    def _abandon(self, row: int, tier: Tier) -> None:
        """A copy was not written, or is not wanted any more: give back its writer's pin and its slot."""
        if tier is CPU:
            assert self._cpu is not None
            self._catalog.unpin((row,), tier)
            self._cpu.drop(row)
        else:
            assert self._nvme is not None
            self._catalog.unpin((row,), tier)
            self._nvme.drop([row])

    def _fail(self, row: int, tier: Tier, late: bool) -> None:
        """A copy was not written; where its move is late its slot stays taken until ``release``."""
        if not late:
            self._abandon(row, tier)
        elif self._catalog.state(row, tier) != DOOMED:
            self._catalog.doom(row, tier)

    # -- demotions -----------------------------------------------------------------------------

    def _settle_demote(self, record: JobRecord, now: float, now_s: int) -> None:
        assert self._cpu is not None and self._nvme is not None
        rows = [detail.row for detail in record.details]
        written = self._finish([row for at, row in reversed([*enumerate(rows)]) if at not in record.failed], NVME)
        for at in reversed(range(len(rows))):
            reason = record.failed.get(at)
            if reason is not None:
                if reason is not Reason.CANCELLED:
                    self._stats.add("failed_stores")
                self._fail(rows[at], NVME, at in record.late)
        self._cpu.unpin([row for at, row in enumerate(rows) if at not in record.late])
        self._stats.add("demoted_blocks", len(written))
        self._nvme.record(written, now_s)
        self._nvme.note_writes(record, now)

    # -- loads ---------------------------------------------------------------------------------

    def _settle_load(self, record: JobRecord, now: float) -> None:
        """Unpin sources, keep or drop CPU copies, drop bad sources, and never promise a failed position again."""
        request = self._requests.get(record.request_id or "")
        if request is not None:
            request.loading = False
        self._reads.to_gpu.end(record.job.id)
        if self._nvme is not None:
            self._nvme.note_reads(record, now)
        for at in sorted(record.failed, reverse=True) if record.failed else ():
            detail = record.details[at]
            limit = detail.position * self._geometry.groups[detail.group].block_tokens
            if request is not None:
                if request.load_limit_tokens is None or limit < request.load_limit_tokens:
                    request.load_limit_tokens = limit
                place, key = (request.request_id, detail.group, (detail.position,)), record.job.moves[at].key
                self._store_policy.refuse(*place, (key,), Refusal.NO_ROOM, -1, 0.0)
        if record.failed:
            self._stats.add("failed_loads", len(record.failed))
        self._stats.add("loaded_blocks", len(record.details) - len(record.failed))
        self._settle_reads(record)

    def _settle_promote(self, record: JobRecord, now: float) -> None:
        """As a load, but for the request: it was promised nothing, and reads from NVMe what was not promoted."""
        assert self._nvme is not None
        self._nvme.note_reads(record, now)
        self._stats.add("prefetched_blocks", self._settle_reads(record))
        self._stats.add("failed_promotions", sum(reason is not Reason.CANCELLED for reason in record.failed.values()))

    def _settle_reads(self, record: JobRecord) -> int:
        """End moves that read: unpin the sources, which were used, or drop bad ones; keep the CPU copies that were
        written, and return how many, or drop them."""
        from_cpu: list[int] = []
        from_nvme: list[int] = []
        keys: list[BlockKey] = []
        rows: list[int] = []
        failed, foreign = record.failed, 0
        # Tail first, so that the head of the chain ends as the most recently used.
        sources = [move.nvme for move in record.job.moves]
        if sources and not failed and sources.count(None) == len(sources):
            from_cpu = [detail.row for detail in reversed(record.details)]
            assert -1 not in from_cpu, "nothing was read, and nobody said so"
            self._settle_sources(from_cpu, CPU)
            return 0
        for at in reversed(range(len(sources))):
            move, row, nvme = record.job.moves[at], record.details[at].row, sources[at]
            if nvme is not None and move.cpu is not None:
                keys.append(move.key)
                rows.append(row)
            if at in failed:
                continue
            if is_foreign(nvme):
                foreign += 1
                self._settle_foreign(move, None, late=False)
            else:
                (from_cpu if nvme is None else from_nvme).append(row)
        assert -1 not in from_cpu, "nothing was read, and nobody said so"
        if from_cpu:
            self._settle_sources(from_cpu, CPU)
        if from_nvme:
            self._settle_sources(from_nvme, NVME)
        if foreign and record.job.kind is _LOAD:
            self._stats.add("loaded_blocks_foreign", foreign)
        if keys:
            self._reads.end(record.job.kind, keys, rows)
        if failed:
            rows = self._settle_failed_reads(record)
        kept = self._finish(rows, CPU) if rows else ()
        if rows:
            self._stats.add("promoted_blocks", len(rows))
        return len(kept)

    def _settle_sources(self, rows: Sequence[int], tier: Tier) -> None:
        """Copies were read well, the tail of a chain first."""
        space, catalog, used = self._space(tier), self._catalog, rows
        any_doomed = catalog.any_in(DOOMED, rows, tier)
        if any_doomed:
            used = [row for row in rows if catalog.state(row, tier) == READY]
        if tier is CPU and self._nvme is not None:
            self._offers.offer(used)  # their counts rose when the load was planned
        if any_doomed:
            space.unpin(rows)
        else:
            catalog.unpin(rows, tier)
        space.accessed(used)

    def _settle_failed_reads(self, record: JobRecord) -> list[int]:
        """End those moves of a job that failed; return the rows of the CPU copies that the others wrote."""
        written: list[int] = []
        for at in reversed(range(len(record.details))):
            row, move = record.details[at].row, record.job.moves[at]
            reason, late = record.failed.get(at), at in record.late
            lands = move.nvme is not None and move.cpu is not None
            if reason is None:
                written += [row] * lands
                continue
            if is_foreign(move.nvme):
                self._settle_foreign(move, reason, late)
            elif row >= 0:
                self._settle_failed_source(row, CPU if move.nvme is None else NVME, reason, late)
            if lands:
                self._fail(row, CPU, late)
        return written

    def _settle_foreign(self, move: Move, reason: Reason | None, late: bool) -> None:
        assert move.nvme is not None
        if reason in _SOURCE_IS_BAD:
            self._foreign.deny(move.key, self._foreign.home_of(move.nvme), move.generation)
        if not late:
            self._foreign.unpin(move.nvme)

    def _settle_failed_source(self, row: int, tier: Tier, reason: Reason, late: bool) -> None:
        space = self._space(tier)
        if self._catalog.state(row, tier) == READY:
            # A copy on a drive that was given up for now is none the worse for it.
            if reason in _SOURCE_IS_BAD and (reason is not Reason.IO_ERROR or self._catalog.readable(row, tier)):
                space.discard(row)
            elif tier is CPU:
                self._offers.offer((row,))
        if not late:
            space.unpin((row,))

    def _space(self, tier: Tier) -> CpuSpace | NvmeSpace:
        space = self._cpu if tier is CPU else self._nvme
        assert space is not None
        return space
