# SPDX-License-Identifier: Apache-2.0
"""``TierManager``: decides what is stored, loaded, demoted and evicted. Runs in the scheduler
process.

One thread, the scheduler's, calls everything. Nothing here waits: time comes in as ``now``
(seconds, monotonic), bytes are moved by the workers, records are committed by the index's own
thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from kvdisk.blocks import KEPT_TIERS, BlockKey, JobId, Tier, in_record_s
from kvdisk.config import Config
from kvdisk.context import HandedState
from kvdisk.errors import ConfigError
from kvdisk.geometry import FILE_EPOCH, Geometry
from kvdisk.index.base import Neighbours
from kvdisk.manager import bounds
from kvdisk.manager.admission import AdmissionPolicy, make_admission
from kvdisk.manager.ages import Ages
from kvdisk.manager.block_jobs import BlockJobs
from kvdisk.manager.copies import Copies
from kvdisk.manager.demand import Demand
from kvdisk.manager.demotions import Demotions
from kvdisk.manager.events import Journal
from kvdisk.manager.garbage import let_go, uncollected
from kvdisk.manager.hit_lookup import HitLookup
from kvdisk.manager.hits import HitCounts
from kvdisk.manager.intake import Intake
from kvdisk.manager.jobs import JobRecord, Transfers
from kvdisk.manager.kv_hints import Hinted, KVHints
from kvdisk.manager.load_jobs import LoadJobs
from kvdisk.manager.load_threshold import LoadThreshold
from kvdisk.manager.neighbours import NeighbourCopies
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.prefetch import Promotions
from kvdisk.manager.remote import RemoteCopies
from kvdisk.manager.requests import NO_LIMITS, KVHint, RequestLimits, RequestOutcome, RequestState
from kvdisk.manager.settlement import Settlement
from kvdisk.manager.silent_ranks import SilentRanks
from kvdisk.manager.step_work import Kind
from kvdisk.manager.store_policy import StorePolicy
from kvdisk.manager.stores import StorePlanner
from kvdisk.manager.tiers import Cleared, Tiers
from kvdisk.manager.victims import Victims
from kvdisk.manager.write_budget import WriteBudget
from kvdisk.messages import JobKind, Plan, Report
from kvdisk.remote.base import RemoteIndex


class TierManager:
    """See the module.

    ``first_generation``: larger than any that this engine's store has seen, if no clock was ahead.
    ``neighbours``: the other engines of the store; None: their blocks are not looked for. ``tell``:
    takes what each request found, once its load has ended. ``remote``: what the remote store has;
    None: there is none.
    """

    def __init__(
        self,
        parts: Parts,
        tiers: Tiers,
        store_policy: StorePolicy,
        first_generation: int,
        neighbours: Neighbours | None = None,
        tell: Callable[[RequestOutcome], None] | None = None,
        remote: RemoteIndex | None = None,
    ) -> None:
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._transfers = parts.transfers
        self._history = parts.history
        self._state = parts.state
        self._work = parts.work
        self.stats = parts.stats
        self._requests: dict[str, RequestState] = {}
        self._urgent: list[JobId] = []
        self._void: list[JobId] = []
        self._heard_s = math.inf
        """When a job was last sent or answered, or a change of the index made or committed; at the
        start: not yet."""
        self._longest_silence_s = bounds.SILENT_DEADLINES * parts.config.io_deadline_s
        self._arrivals = 0
        self._tiers = tiers
        self._heard_tickets = [(0, 0)] * len(tiers)
        parts.state.generation = first_generation
        near = NeighbourCopies(parts, neighbours)
        self._remote = _make_remote(parts, remote, tiers.first.tier)
        self._hints = PeerHints(near, self._remote, parts.state)
        copies = self._copies = Copies(parts, tiers, self._hints)
        self._remote.send_by(copies.begin_moves)
        tiers.write_behind(parts, self._hints)
        self._demotions = [Demotions(parts, *pair, copies) for pair in tiers.pairs]
        self.gauges = Gauges(parts.transfers, tiers, self._remote)
        self._silent_ranks = SilentRanks(parts.transfers, parts.config.io_deadline_s)
        admissions = [space.admission for space in tiers]
        self._told_of_room = [
            space for space in tiers if type(space.admission).note_room is not AdmissionPolicy.note_room
        ]
        """Tiers whose admission is told: others' ``note_room`` does nothing."""
        parts.work.open_when(Kind.SENDS, self._may_send)
        demand = self._demand = Demand(
            parts.history, admissions + ([self._remote.admission] if self._remote.admission else []), parts.work
        )
        self._threshold = LoadThreshold(parts.config.min_load_tokens, parts.geometry.alignment_tokens)
        self._hits = HitCounts(parts, tiers, self._threshold, tell)
        self._loads = LoadJobs(parts, tiers, self._hits, demand, self._hints, self._threshold, copies)
        gpu_loads = self._loads.gpu_loads
        self._promotions = Promotions(parts, tiers, demand, self._hints, gpu_loads, copies)
        self._kv_hints = KVHints(parts, tiers, self._promotions)
        self._lookups = HitLookup(parts, tiers, self._hits, self._hints, gpu_loads, self._threshold)
        self._ages = Ages(parts, tiers)
        intake = Intake(parts, tiers, copies, self._ages)
        self._stores = StorePlanner(parts, tiers, store_policy, demand, self._hints, intake)
        self._victims = Victims(parts, tiers, store_policy, demand, self._stores)
        self.blocks = BlockJobs(parts, tiers, demand, copies, self._hints, intake)
        self._settlement = Settlement(parts, tiers, self._stores, self._requests, self._remote, self._loads, copies)

    # -- requests ------------------------------------------------------------------------------

    def new_request(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        prompt_tokens: int,
        now: float,
        limits: RequestLimits = NO_LIMITS,
    ) -> None:
        """Follow a request from now on, and ask others for what is missing of its prompt.

        ``hashes`` is the engine's growing list, read at each call.
        """
        self._state.now = now
        self._arrivals += 1
        request = RequestState(request_id, hashes, prompt_tokens, self._geometry, limits, self._arrivals)
        self._requests[request_id] = request
        request.update_keys()
        if request.limits.most_load_tokens != 0:
            self._hints.ask(request)
            self._promotions.enqueue(request)

    @uncollected
    def hint(self, request_id: str, kv_hints: tuple[KVHint, ...], now: float) -> None:
        """Do what a new request's sender says of its blocks, now and when it has ended."""
        request = self._requests[request_id]
        request.kv_hints = kv_hints
        self._state.now = now
        self._kv_hints.refresh()
        self._kv_hints.apply(request, ended=False)

    def prompt_changed(self, request_id: str, prompt_tokens: int) -> None:
        """Take in a session's new prompt: its last answer is a part of it, less that answer's last
        token."""
        request = self._requests.get(request_id)
        if request is not None:
            request.prompt_tokens = prompt_tokens
            if request.forget_changed_keys():
                self._demand.forget(request)
                self._victims.keys_changed(request)
                self._stores.forget(request)

    @uncollected
    def request_finished(self, request_id: str) -> None:
        """Forget a request. Its GPU blocks may be freed now: the fence protects copies."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._promotions.leave(request)
            self._stores.finished(request)
            self._loads.leave(request)
            if request.kv_hints:
                self._kv_hints.apply(request, ended=True)

    @uncollected
    def preempt(self, request_ids: Iterable[str], now: float, overwritten: Collection[int] = ()) -> None:
        """Save what the victims have lost; they wait again. Call it once a step, before stores are
        planned.

        The step's plan has what the store policy saves of them as ``Plan.urgent``. ``overwritten``:
        GPU blocks that the model runner writes to before the urgent jobs begin.
        """
        self._state.now = now
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                request.reset_wait()
                job_id = self._victims.save(request, overwritten, now)
                if job_id is not None:
                    self._urgent.append(job_id)
                if (
                    not request.loading and request.limits.most_load_tokens != 0
                ):  # it can have been taken up in this very step
                    self._promotions.enqueue(request, first=True)

    # -- loads ---------------------------------------------------------------------------------

    @uncollected
    def lookup(self, request_id: str, local_tokens: int, total_tokens: int, now: float) -> int | None:
        """Return how many tokens beyond ``local_tokens`` can be loaded, or None: ask again, a block
        is on its way.

        No side effect on blocks; may be repeated every step. At least one of the ``total_tokens``
        is left to compute, because the engine needs its logits. None is answered for at most
        ``lookup_wait_s``, per wait; once that was too short, not again until the request is
        preempted.
        """
        request = self._requests[request_id]
        if request.stale:  # vLLM: it asks for requests without computed tokens only; this one starts again
            request.stale = False
            self._stores.forget(request)
        self._state.now = now
        self._history.note_time(now)
        return self._lookups.lookup(request, local_tokens, total_tokens, now)

    @uncollected
    def plan_load(
        self, request_id: str, local_tokens: int, external_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """Begin to load what ``lookup`` promised into the request's GPU blocks: of a long hit each
        step plans a part.

        ``block_ids``: the request's block table by group; 0 means that the engine needs no block
        there. A block that is gone by now becomes a failed move, which the engine recomputes.
        """
        request = self._requests[request_id]
        self._promotions.leave(request)
        self._loads.begin(request, local_tokens, external_tokens, block_ids)

    @property
    def unplanned_loads(self) -> Collection[str]:
        """The requests whose load goes on in later plans."""
        return self._loads.unplanned

    def served_tokens(self, request_id: str) -> dict[Tier, int]:
        """Return how the last planned load of a request divides between the tiers, in tokens."""
        request = self._requests.get(request_id)
        return {} if request is None else request.hit_tokens

    # -- stores --------------------------------------------------------------------------------

    def note_scheduled(self, request_id: str, computed_tokens: int) -> bool:
        """A step runs this request. Return whether ``plan_stores`` may have something to do.

        Cheap: call it for every request that a step runs. It ends the request's prefetch, and
        counts what the request found when it is the first step after a lookup."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._promotions.leave(request)
        if request.asked is not None:
            self._hits.scheduled(request)
        return self._stores.may_offer(request, computed_tokens)

    def plan_store(self, request_id: str, computed_tokens: int, block_ids: Sequence[Sequence[int]], now: float) -> None:
        """Do what ``plan_stores`` does, of one request."""
        self.plan_stores([(request_id, computed_tokens, block_ids)], now)

    @uncollected
    def plan_stores(self, computed: Iterable[tuple[str, int, Sequence[Sequence[int]]]], now: float) -> None:
        """Offer the full, computed blocks of confirmed tokens of some requests to the tiers, and
        plan jobs for those taken. Call it once for all that a step runs: a job is then for many.

        ``computed``: of each request, once, its id; how many of its tokens have their KV on the GPU
        when this step's forward pass is over, and ids that are final; and its block table by group:
        a block with id 0 is skipped.
        """
        self._state.now = now
        self._history.note_time(now)
        requests = self._requests
        self._stores.plan([(requests[request_id], tokens, blocks) for request_id, tokens, blocks in computed], now)

    def plan_states(self, request_id: str, states: Iterable[HandedState], now: float) -> None:
        """Offer the recurrent states of a request that the engine hands off in this step: there is
        no other way to find one. Call it after ``plan_stores`` of the step."""
        self._state.now = now
        self._stores.plan_states(self._requests[request_id], states, now)

    # -- steps ---------------------------------------------------------------------------------

    def note_time(self, now_s: int) -> None:
        """Set the time, in seconds since the Unix epoch, for the uses and ages of blocks. Call it
        before lookups and before stores are planned: a step may be the first one for long."""
        if now_s != self._state.now_s:  # it is told some times in a step
            self._state.now_s = in_record_s(now_s)
            self._ages.note_time()
            for space in self._tiers:
                space.note_time(self._state.now_s)

    @uncollected
    def take_plan(
        self, now: float, *, idle: bool, scheduled_tokens: int = 0, overwritten: Collection[int] = ()
    ) -> Plan:
        """Return the step's plan.

        ``scheduled_tokens``: what the step computes, which may take as many GPU blocks; 0: nothing.
        ``overwritten``: see ``preempt``.
        """
        self._state.now = now
        self._history.note_time(now)
        for space in self._tiers:
            self._state.released += space.refresh(now)
        for space in self._told_of_room:
            space.admission.note_room(*space.free_and_total)
        # A lower tier's room reaches the first one only through a demotion, which settles.
        self._state.released += self._tiers.first.is_searching
        self._ages.look()
        self._kv_hints.refresh()
        self._hints.absorb()
        self._tiers.first.make_room(now, self.blocks.wanted)
        for demotions in self._demotions:
            demotions.plan(now)
        self._work.run()
        self._state.read_awaited = False
        # A token takes a block at most in each group.
        self._state.taken_blocks += scheduled_tokens * len(self._geometry.groups)
        self._stores.plan_free(now)
        void, self._void = tuple(self._void), []
        fence = self._stores.sources.take_fence(overwritten)
        jobs = self._transfers.take_queued(now)
        if jobs:
            self._heard_s = now
        self._silent_ranks.look(now)
        self._threshold.stepped(now, scheduled_tokens)
        self._work.end_step()
        urgent, self._urgent = tuple(self._urgent), []
        return Plan(jobs, fence, void, idle and self.has_pending_work(now), urgent)

    @uncollected
    def settle(self, report: Report, now: float, now_s: int) -> None:
        """Take in what the ranks finished. ``now_s``: seconds since the Unix epoch, for the index's
        records."""
        self._state.now = now
        self.note_time(now_s)
        self.stats.merge(report.stats)
        ended = self._transfers.absorb(report)
        if report.results or report.released or report.copied:
            self._heard_s = now
        for record in (*ended.copied, *ended.settled):
            if record.job.kind is JobKind.STORE and not record.by_key:
                self._stores.sources.end(record)
        for record in ended.settled:
            self._settlement.settle(record, now)
            if record.by_key:
                self.blocks.fetches.forget_failed(record)
        for record in ended.released:
            self._copies.release(record)
        if report.removed:
            for space in self._tiers:
                space.lose(report.removed)
        if report.remote_pause_s:
            self._remote.pause(report.remote_pause_s)

    def note_invalid_blocks(self, blocks: set[int], report: Report) -> None:
        """Take note of the GPU blocks of a step that no load has filled. Call it before ``settle``
        of the same report.

        Blocks that no load of kvdisk's own failed to fill were another connector's, and the model
        has computed on what was there.
        """
        if blocks - self._transfers.failed_load_blocks(report) - self._loads.failed_blocks:
            self.lose_gpu()

    def lose_gpu(self) -> None:
        """The GPU's blocks are not what they were: no store that is out leaves a copy, and what
        requests hold is not stored, or saved, until it is computed again. The tiers stay."""
        self._transfers.fail_stores()
        self._forget_computed()

    def fail_stores(self) -> None:
        """Have the stores that are out leave no copy: what they hold may be another's."""
        self._transfers.fail_stores()

    def _forget_computed(self) -> None:
        """What requests have computed may be wrong: what they compute from now on is stored
        again."""
        self._stores.reset()
        self._victims.reset()
        for request in self._requests.values():
            request.forget_gpu_blocks()

    def publish(self) -> Journal:
        """Keep a journal of what becomes loadable and what goes, from what is there now on. At most
        once."""
        assert self._catalog.journal is None
        journal = self._catalog.journal = Journal(self.stats)
        for tier in self._catalog.tiers:
            if tier is not Tier.NVME or self._state.is_identified:
                journal.note(tier, True, self._catalog.ready_keys(tier))
        return journal

    def identify(self, fingerprint: bytes) -> None:
        """Use what outlives the process from now on: the engine's fingerprint is known. Where
        another was assumed, what is in memory names that one, and is forgotten."""
        if fingerprint != self._state.fingerprint:
            self._clear_all_memory()
            self._state.fingerprint = fingerprint
        self._state.is_identified = True
        if self._catalog.journal is not None:
            self._catalog.journal.note(Tier.NVME, True, self._catalog.ready_keys(Tier.NVME))

    def commit(self) -> None:
        """Free the slots whose deletion is committed by now. Waits for no commit."""
        for space in self._tiers:
            self._state.released += space.commit()

    @uncollected
    def reset(self, epoch: int) -> None:
        """Load nothing from before any more, because the weights may have changed: move to
        ``epoch``.

        ``epoch``: never used before, not FILE_EPOCH. Records of the old one stay on NVMe for
        engines that load the files. Jobs on their way leave no copy; loads on their way fail, and
        are recomputed. Requests that go on with what they have computed store nothing more; those
        that start again do.
        """
        assert epoch not in {FILE_EPOCH, self._state.epoch}
        self._state.epoch = epoch
        self._state.arriving.clear()
        self._work.clear()
        self._hints.stop()
        self._forget_computed()
        self._urgent.clear()
        self._loads.reset()
        self._void = self._transfers.sent_loads()
        for record in self._transfers.cancel_queued():
            self._stores.sources.end(record)
            self._settlement.cancel(record)
        self._promotions.reset()
        self._kv_hints.reset()
        for space in self._tiers:
            space.reset()
        self._history.clear()
        self.blocks.reset()
        let_go(self._work, self._catalog.hide_all())
        for request in self._requests.values():
            request.hit_tokens.clear()
            request.stale = True
            request.count_anew()

    def hold(self, keys: Sequence[BlockKey], seconds: float, now: float) -> None:
        """Let blocks stay for so long from now on, as a KV hint does that pins them."""
        self._state.now = now
        self._kv_hints.hold(keys, seconds)

    @uncollected
    def hint_keys(self, prompt: Hinted, now: float, *, ended: bool) -> None:
        """Do what the sender of a prompt says of its blocks, which this follows by key alone, when
        it has come, or when it has ended."""
        self._state.now = now
        self._kv_hints.refresh()
        self._kv_hints.place(prompt, ended=ended)

    def held(self) -> str:
        """Say in words what a reset drops."""
        gauges = self.gauges.read()
        found = [
            f"{gauges[name]:,.0f} blocks in {tier.word} {'go' if tier is Tier.CPU else 'stay for the next start'}"
            for tier in KEPT_TIERS
            if (name := f"held_blocks.{tier.label}") in gauges
        ]
        return ", ".join([*found, f"{len(self._transfers.sent_loads()):,} loads on their way are computed"])

    @property
    def last_generation(self) -> int:
        """The last that was given to a block. Any thread may read it."""
        return self._state.generation

    @uncollected
    def clear_memory(self, up_to: float = math.inf) -> Cleared:
        """Delete some of what is in memory, ``bounds.CLEARED`` copies at most, of the blocks that
        have no generation above ``up_to``, as an operator asked for: what a job uses ends with
        that."""
        for space in self._tiers:
            if space.in_memory:
                cleared = space.clear(self._catalog.kept(space.tier), up_to)
                if cleared.blocks:
                    return cleared._replace(more=True)
        return Cleared()

    def _clear_all_memory(self) -> None:
        while self.clear_memory().more:
            pass

    # -- questions of the engine ---------------------------------------------------------------

    def is_under_way(self, record: JobRecord) -> bool:
        """Whether a job has not ended, nor was taken back."""
        return record.job.id in self._transfers

    def has_pending_work(self, now: float) -> bool:
        """Whether steps are needed: for a job, a commit, a demotion, or what ended requests left.

        Not for zombies, nor where jobs and commits have been silent for long: a drive or a file
        system that never answers must not keep an idle engine stepping.
        """
        self._state.now = now
        tickets = [space.status.tickets for space in self._tiers]
        if tickets != self._heard_tickets:
            self._heard_tickets, self._heard_s = tickets, now
        silent = now - self._heard_s >= self._longest_silence_s
        return (
            self._work.is_pending(silent=silent)
            or self._transfers.any_queued
            or (not silent and self.gauges.busy)
            or any(demotions.has_work(now, silent=silent) for demotions in self._demotions)
        )

    def _may_send(self) -> bool:
        """Whether the drive's backlog is written, or cannot be now: only then anything is sent to
        the remote store."""
        return self._state.is_identified and not any(
            space.dirty.total and not space.dirty.blocked for space in self._tiers if space.dirty is not None
        )


def _make_remote(parts: Parts, index: RemoteIndex | None, source: Tier) -> RemoteCopies:
    """Return the remote store, which may be none. ``source``: the tier whose copies are sent there.
    Raises ConfigError."""
    config = parts.config
    if index is None or config.remote_read_only:
        return RemoteCopies(parts, index, source, None)
    budget = make_remote_budget(config, parts.geometry)
    admission = make_admission(config.remote_admission, parts.history, "remote_admission")
    return RemoteCopies(parts, index, source, admission, budget)


def make_remote_budget(config: Config, geometry: Geometry) -> WriteBudget | None:
    """Return the budget of bytes sent to a remote store; None where there is none. Raises
    ConfigError where it would hardly allow a block."""
    rate = config.remote_write_bytes_per_s
    if not rate or config.remote_read_only:
        return None
    largest = geometry.shard_count * max(geometry.slot_sizes)
    if 60 * rate < 2 * largest:
        raise ConfigError(f"remote_write_bytes_per_s {rate} sends no two blocks of {largest} bytes in a minute.")
    return WriteBudget.within(60 * rate, 60.0, largest)


class Gauges:
    """How full the tiers are, and what waits: read now and then, see ``kvdisk.stats``."""

    def __init__(self, transfers: Transfers, tiers: Tiers, remote: RemoteCopies) -> None:
        self._transfers = transfers
        self._remote = remote
        self._tiers = tiers

    @property
    def busy(self) -> bool:
        """Whether a job, or a commit of the index, is under way."""
        return len(self._transfers) > 0 or any(space.status.uncommitted for space in self._tiers)

    @property
    def planned_jobs(self) -> int:
        """Jobs that were ever planned. Without new ones, nor busy, no gauge changes."""
        return self._transfers.planned

    def read(self) -> dict[str, float]:
        """Return every gauge, by series."""
        count = self._transfers.count
        moves = (JobKind.STORE, JobKind.LOAD, JobKind.DEMOTE, JobKind.PROMOTE)
        found: dict[str, float] = {f"queued_jobs.{kind.name.lower()}": count(kind) for kind in moves}
        found["queued_jobs.files"] = sum(count(kind) for kind in JobKind if kind not in moves)
        for space in self._tiers:
            found |= space.gauges()
        if (paused := self._remote.is_paused) is not None:
            found["remote_paused"] = float(paused)
        if self._tiers.arrival_tier is not None:
            found["backlog_blocks"] = sum(space.dirty.total for space in self._tiers if space.dirty is not None)
        return found
