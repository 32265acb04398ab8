# SPDX-License-Identifier: Apache-2.0
"""``TierManager``: decides what is stored, loaded, demoted and evicted. Runs in the scheduler process.

One thread, the scheduler's, calls everything. Nothing here waits: time comes in as ``now`` (seconds,
monotonic), bytes are moved by the workers, records are committed by the index's own thread.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat

from kvdisk.blocks import BlockKey, JobId, Tier
from kvdisk.config import Config
from kvdisk.context import SchedulerContext
from kvdisk.geometry import FILE_EPOCH, Geometry
from kvdisk.index.base import Neighbours
from kvdisk.manager.accounting import Served
from kvdisk.manager.admission import AdmissionPolicy, AdmitAll, Wants
from kvdisk.manager.catalog import READY, WRITING, Catalog
from kvdisk.manager.demotions import NvmeOffers
from kvdisk.manager.events import Journal
from kvdisk.manager.jobs import StoreSources, Transfers, make_details
from kvdisk.manager.loads import LoadPlanner, LoadPrice
from kvdisk.manager.neighbours import ForeignCopies
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.prefetch import GpuLoads, PendingReads, Promotions
from kvdisk.manager.requests import RequestLimits, RequestState
from kvdisk.manager.settlement import Settlement
from kvdisk.manager.store_policy import StorePolicy
from kvdisk.manager.stores import StorePlanner
from kvdisk.manager.tiers import CpuSpace
from kvdisk.messages import JobKind, Plan, Report, make_moves
from kvdisk.stats import Stats

MAX_DEMOTE_MOVES = 64
MAX_DEMOTE_JOBS = 4
LONGEST_SILENCE = 4
"""In ``io_deadline_s``: transfers are answered within one; jobs of files, and commits, never where a drive hangs."""


class TierManager:
    """See the module. ``cpu`` or ``nvme`` is None where the tier does not exist; not both.

    ``neighbours``: the other homes of the store; None: nobody else's blocks are looked for.
    """

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        context: SchedulerContext,
        catalog: Catalog,
        transfers: Transfers,
        stats: Stats,
        cpu: CpuSpace | None,
        nvme: NvmeSpace | None,
        store_policy: StorePolicy,
        cpu_admission: AdmissionPolicy,
        nvme_admission: AdmissionPolicy,
        first_generation: int,
        neighbours: Neighbours | None = None,
    ) -> None:
        assert cpu is not None or nvme is not None
        if nvme is None:
            nvme_admission = AdmitAll()  # nobody asks it, and counting costs
        self._geometry = geometry
        self._context = context
        self._catalog = catalog
        self._transfers = transfers
        self._cpu = cpu
        self._nvme = nvme
        self._cpu_admission = cpu_admission
        self._cpu_admission_learns = type(cpu_admission) is not AdmitAll
        self._nvme_admission = nvme_admission
        self._epoch = FILE_EPOCH
        self._requests: dict[str, RequestState] = {}
        self._urgent: list[JobId] = []
        self._void: list[JobId] = []
        self._heard_s = math.inf
        """When a job was last sent or answered, or a change of the index made or committed; at the start: not yet."""
        self._heard_tickets = (0, 0)
        self._longest_silence_s = LONGEST_SILENCE * config.io_deadline_s
        self.stats = stats
        self._arrivals = 0
        reads = self._reads = PendingReads(GpuLoads(enabled=context.caches))
        store_admission = cpu_admission if cpu is not None else nvme_admission
        wants = Wants(store_policy, store_admission, nvme_admission)
        price = self._price = LoadPrice(config.min_load_tokens, geometry.step_tokens)
        self._foreign = foreign = ForeignCopies(geometry, catalog, transfers, stats, neighbours)
        self._sources = sources = StoreSources(context)
        offers = NvmeOffers(catalog, stats, cpu, nvme, nvme_admission, foreign)
        self._settlement = Settlement(
            geometry, catalog, stats, cpu, nvme, store_policy, offers, self._requests, foreign, reads
        )
        parts = (config, geometry, context, catalog, transfers)
        self._promotions = Promotions(*parts, cpu, nvme, cpu_admission, wants, foreign, reads)
        if cpu is not None and nvme is not None:
            cpu.before_evict = offers.ask_before_leaving
        self._served = served = Served(geometry, stats, has_cpu=cpu is not None, has_nvme=nvme is not None)
        self._loads = LoadPlanner(
            config, geometry, catalog, transfers, served, cpu, cpu_admission, wants, foreign, reads, price
        )
        self._stores = StorePlanner(
            *parts,
            stats,
            cpu,
            nvme,
            store_policy,
            store_admission,
            wants,
            offers,
            self._settlement,
            sources,
            first_generation,
            foreign,
        )

    # -- requests ------------------------------------------------------------------------------

    def new_request(
        self, request_id: str, hashes: Sequence[bytes], prompt_tokens: int, limits: RequestLimits | None = None
    ) -> None:
        """Follow a request from now on, and ask the neighbours for what is missing of its prompt.

        ``hashes`` is the engine's growing list, read at each call.
        """
        request = RequestState(request_id, hashes, prompt_tokens, self._geometry, limits)
        self._requests[request_id] = request
        self._arrivals += 1
        request.arrival = self._arrivals
        request.update_keys(self._geometry)
        if request.most_load_tokens != 0:
            self._foreign.ask(request)
            self._promotions.enqueue(request)

    def prompt_changed(self, request_id: str, prompt_tokens: int) -> None:
        """A session's prompt may have grown: its last answer is a part of it, less that answer's last token."""
        request = self._requests.get(request_id)
        if request is None:
            return
        request.prompt_tokens = prompt_tokens
        if request.forget_changed_keys(self._geometry):
            self._stores.restarted(request_id)

    def follows(self, request_id: str) -> bool:
        """Whether the request is known: not so for those that kvdisk leaves alone."""
        return request_id in self._requests

    def request_finished(self, request_id: str) -> bool:
        """Forget a request; return whether its GPU blocks may be freed now: always, a fence protects copies."""
        self._promotions.leave(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._stores.finished(request)
            if request.load_job is not None:
                self._reads.to_gpu.end(request.load_job)  # the engine does not keep what it brings
        return True

    def preempt(self, request_ids: Iterable[str], now: float, overwritten: Collection[int] = ()) -> None:
        """Save what the victims have lost; they wait again.

        Once a step, before its stores are planned. What the store policy saves of them is in the step's plan as
        ``Plan.urgent``. ``overwritten``: GPU blocks that the model runner writes to before the urgent jobs begin.
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                request.may_wait_again()
                job_id = self._stores.save(request, overwritten, now, self._epoch)
                if job_id is not None:
                    self._urgent.append(job_id)
                if not request.loading and request.most_load_tokens != 0:  # it can have been taken up in this very step
                    self._promotions.enqueue_first(request)

    def elsewhere(self, key: BlockKey) -> bool:
        """Whether another home of the store is thought to have a block."""
        return self._foreign.holds(key)

    @property
    def foreign_segments(self) -> int:
        """Segments of other homes that are open for loads."""
        return self._foreign.open_count

    # -- loads ---------------------------------------------------------------------------------

    def lookup(self, request_id: str, local_tokens: int, total_tokens: int, now: float) -> int | None:
        """Return how many tokens beyond ``local_tokens`` can be loaded, or None: ask again, a block is on its way.

        No side effect on blocks; may be repeated every step. At least one of the ``total_tokens``
        is left to compute, because the engine needs its logits. None is answered for at most ``lookup_wait_s``,
        per wait; once that was too short, not again until the request is preempted.
        """
        request = self._requests[request_id]
        if request.stale:  # the engine asks for requests without computed tokens only: this one starts again
            request.stale = False
            self._stores.restarted(request_id)
        return self._loads.lookup(request, local_tokens, total_tokens, now)

    def plan_load(
        self, request_id: str, local_tokens: int, external_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """Plan one job that loads what ``lookup`` promised into the request's GPU blocks.

        ``block_ids``: the request's block table by group; 0 means that the engine needs no block
        there. A block that is gone by now becomes a failed move, which the engine recomputes.
        """
        self._promotions.leave(request_id)
        self._loads.plan(self._requests[request_id], local_tokens, external_tokens, block_ids, self._epoch)

    def served_tokens(self, request_id: str) -> dict[Tier, int]:
        """Return how the last planned load of a request divides between the tiers, in tokens."""
        request = self._requests.get(request_id)
        return dict(request.served) if request is not None else {}

    # -- stores --------------------------------------------------------------------------------

    def may_offer(self, request_id: str, computed_tokens: int) -> bool:
        """Whether ``plan_store`` could have something to do: cheap, for every request of every step, which runs."""
        self._promotions.leave(request_id)
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.asked is not None:
            self._served.passed_over(request)
        return self._stores.may_offer(request, computed_tokens)

    def plan_store(self, request_id: str, computed_tokens: int, block_ids: Sequence[Sequence[int]], now: float) -> None:
        """Offer a request's full, computed blocks of confirmed tokens to the tiers, and plan a job for those taken.

        ``computed_tokens``: tokens whose KV is on the GPU when this step's forward pass is over, and
        whose ids are final. ``block_ids``: the block table by group; a block with id 0 is skipped.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._stores.plan(request, computed_tokens, block_ids, now, self._epoch)

    # -- steps ---------------------------------------------------------------------------------

    def take_plan(
        self, now: float, *, idle: bool, step_tokens: int = 0, now_s: int = 0, overwritten: Collection[int] = ()
    ) -> Plan:
        """Return the step's plan: what was decided since the last one, stores of free blocks, demotions, promotions.

        ``step_tokens``: what the step computes; 0: not known, and nothing is learnt from it. ``now_s``: seconds since
        the Unix epoch, for what is told of uses; 0: as before. ``overwritten``: see ``preempt``.
        """
        if self._cpu is not None and self._cpu_admission_learns:
            free, total = self._cpu.room
            self._cpu_admission.note_room(free, total)
        if self._nvme is not None:
            self.commit()
            self._nvme.uses.count(now, now_s)
            free, total = self._nvme.room
            self._nvme_admission.note_room(free, total)
            self._foreign.absorb(now)
            self._settlement.room += self._nvme.resumes(now)
            if self._cpu is not None:
                self._plan_demotions(self._cpu, self._nvme, now)
                self._promotions.plan(self._epoch)
            else:
                self._nvme.make_room(now, [1] * len(self._geometry.slot_sizes))
        self._stores.plan_free(now, self._epoch)
        void, self._void = tuple(self._void), []
        fence = self._sources.take_fence(overwritten)
        jobs = self._transfers.take_queued(now)
        if jobs:
            self._heard_s = now
        self._price.stepped(now, step_tokens, jobs)
        urgent, self._urgent = tuple(self._urgent), []
        return Plan(jobs, fence, void, idle and self.has_pending_work(now), urgent)

    def _plan_demotions(self, cpu: CpuSpace, nvme: NvmeSpace, now: float) -> None:
        classes = range(len(self._geometry.slot_sizes))
        if not nvme.home_open:
            cpu.clear_backlog()
            return
        cpu.is_draining = nvme.may_write(now)
        nvme.make_room(now, [cpu.backlog_count(size_class) for size_class in classes])
        for size_class in classes:
            while (waiting := cpu.backlog_count(size_class)) and nvme.may_write(now):
                if self._transfers.count(JobKind.DEMOTE) >= MAX_DEMOTE_JOBS:
                    return
                slots = nvme.allocate(size_class, min(MAX_DEMOTE_MOVES, waiting))
                if not slots:
                    break
                rows, catalog = cpu.take_backlog(size_class, len(slots)), self._catalog
                catalog.begin_all(rows, Tier.NVME, slots)
                catalog.pin(rows, Tier.CPU)
                keys, generations, parents = (
                    map(column.__getitem__, rows) for column in (catalog.keys, catalog.generations, catalog.parents)
                )
                moves = make_moves(keys, generations, repeat(-1), catalog.slots(rows, Tier.CPU), slots, parents)
                details = make_details(rows, repeat(-1), repeat(-1))
                self._transfers.add(JobKind.DEMOTE, moves, details, epoch=self._epoch)

    def settle(self, report: Report, now: float, now_s: int) -> None:
        """Take in what the ranks finished. ``now_s``: seconds since the Unix epoch, for the index's records."""
        found = report.stats
        if found.counts or found.samples or found.gauges:
            self.stats.merge(found)
        records = self._transfers.absorb(report)
        if report.results or report.released or report.copied:
            self._heard_s = now
        for record in (*self._transfers.take_copied(), *records):
            if record.job.kind is JobKind.STORE:
                self._sources.end(record)
        self._settlement.settle_all(records, now, now_s)
        for record in records:
            if record.job.kind is JobKind.LOAD:
                self._price.settled(record, now)
        for record in self._transfers.take_released():
            self._settlement.release(record)

    def note_invalid_blocks(self, blocks: set[int], report: Report) -> None:
        """Learn which GPU blocks of a step were not filled by a load. Call it before ``settle`` of the same report.

        Those that are not of a load of kvdisk's own were for another connector to fill while the model ran, which has
        computed on what was there: no store that is out leaves a copy, and nothing is saved, or stored from the
        engine's cache, of a request that is preempted or ends before it has gone on. What is computed again is offered
        again.
        """
        if blocks - self._transfers.failed_load_blocks(report):
            self._transfers.fail_stores()
            self._stores.distrust()

    def publish(self) -> Journal:
        """Keep a journal of what becomes loadable and what goes, from what is there now on. At most once."""
        assert self._catalog.journal is None
        journal = self._catalog.journal = Journal(self.stats)
        for tier in (Tier.CPU, Tier.NVME):
            journal.note(tier, True, self._catalog.ready_keys(tier))
        return journal

    def commit(self) -> None:
        """Learn how far the index's commits have come; never waits for one."""
        if self._nvme is not None and self._nvme.commit():
            self._settlement.room += 1

    def reset(self, epoch: int) -> None:
        """The weights may have changed: nothing stored before is served again by this engine.

        Moves to ``epoch`` (never used before, not FILE_EPOCH). Records of the old one stay on NVMe
        for engines that load the files. Jobs on their way end without leaving a copy; loads on
        their way end as failed, and are recomputed. Requests that go on with what they have computed
        store nothing more; those that start again do.
        """
        assert epoch not in {FILE_EPOCH, self._epoch}
        self._epoch = epoch
        self._foreign.stop()
        self._cpu_admission.reset()
        self._nvme_admission.reset()
        self._stores.reset()
        self._urgent.clear()
        self._void = list(self._transfers.sent_loads())
        for record in self._transfers.cancel_queued():
            self._sources.end(record)
            self._settlement.cancel(record)
        self._promotions.reset()
        for row in self._catalog.rows_in(Tier.CPU):
            if self._cpu is not None and self._catalog.state(row, Tier.CPU) in {WRITING, READY}:
                self._cpu.discard(row)
        self._catalog.hide_all()
        for request in self._requests.values():
            request.served.clear()
            request.stale = True

    # -- questions of the engine ---------------------------------------------------------------

    def has_pending_work(self, now: float) -> bool:
        """Whether steps are needed: a job is out, a record is not committed, or a demotion can be planned, or a store
        that has waited for room.

        Not for zombies, nor when nothing has been heard of jobs and commits for long: a drive or a file system that
        never answers would keep an idle engine stepping.
        """
        if self._stores.is_owed(now):
            return True
        nvme, cpu = self._nvme, self._cpu
        if nvme is not None and nvme.tickets != self._heard_tickets:
            self._heard_tickets, self._heard_s = nvme.tickets, now
        if self._transfers.any_queued:
            return True
        silent = now - self._heard_s >= self._longest_silence_s
        if len(self._transfers) and not silent:
            return True
        if nvme is None:
            return False
        waiting = (
            cpu is not None
            and nvme.may_write(now)
            and any(
                cpu.backlog_count(size_class) > 0
                and not nvme.is_stuck(size_class)
                and not (silent and nvme.awaits_commit(size_class))
                for size_class in range(len(self._geometry.slot_sizes))
            )
        )
        return waiting or (nvme.uncommitted and not silent)
