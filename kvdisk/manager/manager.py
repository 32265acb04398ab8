# SPDX-License-Identifier: Apache-2.0
"""``TierManager``: decides what is stored, loaded, demoted and evicted. Runs in the scheduler process.

One thread, the scheduler's, calls everything. Nothing here waits: time comes in as ``now`` (seconds,
monotonic), bytes are moved by the workers, records are committed by the index's own thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvdisk.blocks import BlockKey, JobId, Tier
from kvdisk.config import Config
from kvdisk.context import SchedulerContext
from kvdisk.geometry import FILE_EPOCH, Geometry
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.catalog import Catalog, CopyState
from kvdisk.manager.cpu_space import CpuSpace
from kvdisk.manager.lookup import first_needed, is_ready, longest_hit
from kvdisk.manager.requests import RequestState
from kvdisk.manager.segments import NvmeSpace
from kvdisk.manager.settlement import Settlement
from kvdisk.manager.store_policy import Refusal, StorePolicy
from kvdisk.manager.transfers import MoveDetail, Transfers
from kvdisk.messages import JobKind, Move, Plan, Report
from kvdisk.stats import Stats

MAX_DEMOTE_MOVES = 64
MAX_DEMOTE_JOBS = 4
MAX_IMMINENT_ANSWERS = 200
"""How often in a row, without any job settled, the engine may be told that a block is about to be freed."""


class TierManager:
    """See the module. ``cpu`` or ``nvme`` is None where the tier does not exist; not both."""

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
    ) -> None:
        assert cpu is not None or nvme is not None
        self._config = config
        self._geometry = geometry
        self._context = context
        self._catalog = catalog
        self._transfers = transfers
        self._cpu = cpu
        self._nvme = nvme
        self._store_policy = store_policy
        self._cpu_admission = cpu_admission
        self._nvme_admission = nvme_admission
        self._generation = first_generation
        self._epoch = FILE_EPOCH
        self._requests: dict[str, RequestState] = {}
        self._flush: list[JobId] = []
        self._void: list[JobId] = []
        self._imminent_answers = 0
        limit = config.max_pinned_gpu_blocks
        self._max_pinned = max(1, context.block_count // 4) if limit is None else limit
        self._min_block_tokens = min(group.block_tokens for group in geometry.groups)
        self.stats = stats
        self._settlement = Settlement(
            geometry, context, catalog, stats, cpu, nvme, store_policy, nvme_admission, self._requests
        )

    # -- requests ------------------------------------------------------------------------------

    def new_request(self, request_id: str, hashes: Sequence[bytes], prompt_tokens: int) -> None:
        """Follow a request from now on. ``hashes`` is the engine's growing list, read at each call."""
        self._requests[request_id] = RequestState.make(request_id, hashes, prompt_tokens, self._geometry)

    def follows(self, request_id: str) -> bool:
        """Whether the request is known: not so for those that kvdisk leaves alone."""
        return request_id in self._requests

    def request_finished(self, request_id: str) -> bool:
        """Forget a request; return whether its GPU blocks may be freed now: always, what copies need is touched."""
        if self._requests.pop(request_id, None) is not None:
            self._store_policy.request_finished(request_id)
        return True

    def preempt(self, request_ids: Iterable[str]) -> None:
        """Have the victims' copies from the GPU finished first, so that their blocks come free."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._flush.extend(sorted(request.store_jobs))

    # -- loads ---------------------------------------------------------------------------------

    def lookup(self, request_id: str, local_tokens: int, total_tokens: int, now: float) -> int | None:
        """Return how many tokens beyond ``local_tokens`` can be loaded, or None: ask again, a block is on its way.

        No side effect on blocks; may be repeated every step. At least one of the ``total_tokens``
        is left to compute, because the engine needs its logits. None is answered for at most
        ``lookup_wait_s`` in a request's life, per wait.
        """
        request = self._requests[request_id]
        request.looked_up = True
        request.update_keys(self._geometry)
        limit = total_tokens - 1
        if request.load_limit_tokens is not None:
            limit = min(limit, request.load_limit_tokens)
        hit = longest_hit(self._catalog, self._geometry, request.keys, local_tokens, limit, coming=False)
        if not request.gave_up_waiting:
            coming = longest_hit(self._catalog, self._geometry, request.keys, local_tokens, limit, coming=True)
            if coming > hit and self._may_wait(request, now):
                self.stats.add("lookup_waits")
                return None
        tokens = hit - local_tokens
        return tokens if tokens >= max(1, self._config.min_load_tokens) else 0

    def _may_wait(self, request: RequestState, now: float) -> bool:
        if request.wait_started_s is None:
            request.wait_started_s = now
        if now - request.wait_started_s < self._config.lookup_wait_s:
            return True
        request.gave_up_waiting = True
        self.stats.add("wait_timeouts")
        return False

    def plan_load(
        self, request_id: str, local_tokens: int, external_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """Plan one job that loads what ``lookup`` promised into the request's GPU blocks.

        ``block_ids``: the request's block table by group; 0 means that the engine needs no block
        there. A block that is gone by now becomes a failed move, which the engine recomputes.
        """
        request = self._requests[request_id]
        end_tokens = local_tokens + external_tokens
        moves: list[Move] = []
        details: list[MoveDetail] = []
        from_nvme: list[int] = []
        for group in self._geometry.groups:
            keys, blocks = request.keys[group.group], block_ids[group.group]
            first = first_needed(group, local_tokens, end_tokens)
            for position in range(first, end_tokens // group.block_tokens):
                if blocks[position] == 0:
                    continue
                move, row = self._source_of(keys[position], blocks[position], request_id)
                if move.nvme is not None:
                    from_nvme.append(len(moves))
                moves.append(move)
                details.append(MoveDetail(row, group=group.group, position=position))
        self._leave_cpu_copies(moves, details, from_nvme)
        request.loading = True
        request.wait_started_s = None
        self._count_served(request, local_tokens, external_tokens, moves, details)
        self._transfers.add(JobKind.LOAD, moves, details, epoch=self._epoch, request_id=request_id)

    def _source_of(self, key: BlockKey, block: int, request_id: str) -> tuple[Move, int]:
        """Pin the best copy of a key: a move without slots where there is none."""
        catalog = self._catalog
        row = catalog.find(key)
        if not is_ready(catalog, row):
            return Move(key, 0, block), -1
        self._cpu_admission.want(key, request_id)
        self._nvme_admission.want(key, request_id)
        tier = Tier.CPU if catalog.state(row, Tier.CPU) == CopyState.READY else Tier.NVME
        catalog.pin(row, tier)
        slot = catalog.slot(row, tier)
        parent = catalog.parents[row]
        if tier is Tier.CPU:
            return Move(key, catalog.generations[row], block, slot, None, parent), row
        return Move(key, catalog.generations[row], block, None, slot, parent), row

    def _leave_cpu_copies(self, moves: list[Move], details: list[MoveDetail], from_nvme: list[int]) -> None:
        """Let blocks read from NVMe land in CPU slots where admission and room allow; the rest goes through staging."""
        if self._cpu is None:
            return
        wanted: dict[int, list[int]] = {}
        for at in from_nvme:
            row = details[at].row
            if self._catalog.state(row, Tier.CPU) == CopyState.ABSENT and self._cpu_admission.admits(moves[at].key):
                wanted.setdefault(self._cpu.class_of(row), []).append(at)
        for size_class, positions in wanted.items():
            for at, slot in zip(positions, self._cpu.allocate(size_class, len(positions)), strict=False):
                self._catalog.begin(details[at].row, Tier.CPU, slot)
                moves[at] = moves[at]._replace(cpu=slot)

    def _count_served(
        self,
        request: RequestState,
        local_tokens: int,
        external_tokens: int,
        moves: list[Move],
        details: list[MoveDetail],
    ) -> None:
        """Split the hit by tier: a token counts as NVMe where any of its groups' blocks comes from there."""
        step = min(group.block_tokens for group in self._geometry.groups)
        on_nvme: set[int] = set()
        for move, detail in zip(moves, details, strict=True):
            if move.nvme is not None:
                start = detail.position * self._geometry.groups[detail.group].block_tokens
                on_nvme.update(range(start, start + self._geometry.groups[detail.group].block_tokens, step))
        nvme_tokens = min(len(on_nvme) * step, external_tokens)
        request.served = {Tier.CPU: external_tokens - nvme_tokens, Tier.NVME: nvme_tokens}
        self.stats.add("hit_tokens_cpu", external_tokens - nvme_tokens)
        self.stats.add("hit_tokens_nvme", nvme_tokens)
        self.stats.add("lookup_tokens", local_tokens + external_tokens)

    def served_tokens(self, request_id: str) -> dict[Tier, int]:
        """Return how the last planned load of a request divides between the tiers, in tokens."""
        request = self._requests.get(request_id)
        return dict(request.served) if request is not None else {}

    # -- stores --------------------------------------------------------------------------------

    def may_offer(self, request_id: str, computed_tokens: int) -> bool:
        """Whether ``plan_store`` could have something to do: cheap, for every request of every step."""
        request = self._requests.get(request_id)
        if request is None or request.loading:
            return False
        if not self._config.store_decode:
            computed_tokens = min(computed_tokens, request.prompt_tokens)
        return computed_tokens // self._min_block_tokens > request.offered_blocks or self._store_policy.waits(
            request_id
        )

    def plan_store(self, request_id: str, computed_tokens: int, block_ids: Sequence[Sequence[int]], now: float) -> None:
        """Offer a request's full, computed blocks of confirmed tokens to the tiers, and plan a job for those taken.

        ``computed_tokens``: tokens whose KV is on the GPU when this step's forward pass is over, and
        whose ids are final. ``block_ids``: the block table by group; a block with id 0 is skipped.
        """
        request = self._requests.get(request_id)
        if request is None or request.loading:
            return
        if not self._config.store_decode:
            computed_tokens = min(computed_tokens, request.prompt_tokens)
        request.update_keys(self._geometry)
        request.offered_blocks = computed_tokens // self._min_block_tokens
        moves: list[Move] = []
        details: list[MoveDetail] = []
        for group in self._geometry.groups:
            keys, blocks = request.keys[group.group], block_ids[group.group]
            storable = min(computed_tokens // group.block_tokens, len(keys), len(blocks))
            offers = self._store_policy.offers(
                request_id,
                group.group,
                storable,
                self._settlement.room,
                now,
                lambda position, keys=keys: self._cpu_admission.count(keys[position]),  # type: ignore[misc]
            )
            if offers:
                self._admit(request, group.group, offers, blocks, now, moves, details)
        if moves:
            self._context.touch([detail.block for detail in details])
            self._settlement.pinned_blocks += len(moves)
            record = self._transfers.add(JobKind.STORE, moves, details, epoch=self._epoch, request_id=request_id)
            request.store_jobs.add(record.job.id)

    def _admit(
        self,
        request: RequestState,
        group: int,
        offers: list[int],
        blocks: Sequence[int],
        now: float,
        moves: list[Move],
        details: list[MoveDetail],
    ) -> None:
        """Answer every offer of one group: accepted (there already, or no block), taken into a slot, or refused."""
        policy, catalog, keys = self._store_policy, self._catalog, request.keys[group]
        taken: list[int] = []
        for position in offers:
            key = keys[position]
            row = catalog.find(key)
            self._cpu_admission.want(key, request.request_id)
            if blocks[position] == 0 or self._is_held(row):
                policy.accept(request.request_id, group, position)
            elif not self._cpu_admission.admits(key):
                self.stats.add("refused_blocks")
                mark = self._cpu_admission.count(key)
                policy.refuse(request.request_id, group, position, Refusal.NOT_REUSED, mark, now)
            else:
                taken.append(position)
        allowed = max(0, self._max_pinned - self._settlement.pinned_blocks - len(moves))
        space = self._cpu if self._cpu is not None else self._nvme
        assert space is not None
        may_store = self._cpu is not None or (self._nvme is not None and self._nvme.may_write(now))
        size_class = self._geometry.size_classes[group]
        slots = space.allocate(size_class, min(allowed, len(taken))) if taken and may_store else []
        tier = Tier.CPU if self._cpu is not None else Tier.NVME
        for position, slot in zip(taken, slots, strict=False):
            policy.accept(request.request_id, group, position)
            parent = keys[position - 1] if position else None
            row = catalog.find(keys[position])
            if row < 0:
                self._generation += 1
                row = catalog.add(keys[position], self._generation, self._epoch, parent)
            catalog.begin(row, tier, slot)
            cpu, nvme = (slot, None) if tier is Tier.CPU else (None, slot)
            moves.append(Move(keys[position], catalog.generations[row], blocks[position], cpu, nvme, parent))
            details.append(MoveDetail(row, blocks[position], group, position))
        for position in taken[len(slots) :]:
            self.stats.add("refused_blocks")
            policy.refuse(request.request_id, group, position, Refusal.NO_ROOM, self._settlement.room, now)

    def _is_held(self, row: int) -> bool:
        """Whether some tier has or gets the block, or a doomed copy still blocks its place."""
        return row >= 0 and any(self._catalog.state(row, tier) != CopyState.ABSENT for tier in (Tier.CPU, Tier.NVME))

    # -- steps ---------------------------------------------------------------------------------

    def take_plan(self, now: float, *, idle: bool) -> Plan:
        """Return the step's plan: what was decided since the last one, and demotions."""
        if self._nvme is not None:
            self.commit()
            if self._cpu is not None:
                self._plan_demotions(self._cpu, self._nvme, now)
            else:
                self._nvme.make_room(now, [1] * len(self._geometry.slot_sizes))
        flush, self._flush = tuple(self._flush), []
        void, self._void = tuple(self._void), []
        return Plan(self._transfers.take_queued(), flush, void, idle)

    def _plan_demotions(self, cpu: CpuSpace, nvme: NvmeSpace, now: float) -> None:
        classes = range(len(self._geometry.slot_sizes))
        if not nvme.home_open:
            cpu.clear_backlog()
            return
        nvme.make_room(now, [cpu.backlog_count(size_class) for size_class in classes])
        for size_class in classes:
            while nvme.may_write(now) and self._transfers.count(JobKind.DEMOTE) < MAX_DEMOTE_JOBS:
                slots = nvme.allocate(size_class, min(MAX_DEMOTE_MOVES, cpu.backlog_count(size_class)))
                if not slots:
                    break
                moves, details = [], []
                for row, slot in zip(cpu.take_backlog(size_class, len(slots)), slots, strict=True):
                    self._catalog.pin(row, Tier.CPU)
                    self._catalog.begin(row, Tier.NVME, slot)
                    key, parent = self._catalog.keys[row], self._catalog.parents[row]
                    source = self._catalog.slot(row, Tier.CPU)
                    moves.append(Move(key, self._catalog.generations[row], -1, source, slot, parent))
                    details.append(MoveDetail(row))
                self._transfers.add(JobKind.DEMOTE, moves, details, epoch=self._epoch)

    def settle(self, report: Report, now: float, now_s: int) -> None:
        """Take in what the ranks finished. ``now_s``: seconds since the Unix epoch, for the index's records."""
        self.stats.merge(report.stats)
        records = self._transfers.absorb(report)
        if records:
            self._imminent_answers = 0
        for record in records:
            self._settlement.settle(record, now, now_s)

    def commit(self) -> None:
        """Learn how far the index's commits have come; never waits for one."""
        if self._nvme is not None and self._nvme.commit():
            self._settlement.room += 1

    def reset(self, epoch: int) -> None:
        """The weights may have changed: nothing stored before is served again by this engine.

        Moves to ``epoch`` (never used before, not FILE_EPOCH). Records of the old one stay on NVMe
        for engines that load the files. Jobs on their way end without leaving a copy; loads on
        their way end as failed, and are recomputed.
        """
        assert epoch not in {FILE_EPOCH, self._epoch}
        self._epoch = epoch
        self._cpu_admission.reset()
        self._nvme_admission.reset()
        self._void = list(self._transfers.sent_loads())
        for record in self._transfers.cancel_queued():
            self._settlement.cancel(record)
        for row in list(self._catalog.rows()):
            if self._cpu is not None and self._catalog.state(row, Tier.CPU) in {CopyState.WRITING, CopyState.READY}:
                self._cpu.discard(row)
        self._catalog.hide_all()
        for request in self._requests.values():
            request.served.clear()

    # -- questions of the engine ---------------------------------------------------------------

    def has_pending_work(self, now: float) -> bool:
        """Whether steps are needed: a job is out, a record is not committed, or a demotion can be planned."""
        if len(self._transfers) > 0:
            return True
        nvme, cpu = self._nvme, self._cpu
        if nvme is None:
            return False
        waiting = (
            cpu is not None
            and nvme.may_write(now)
            and any(
                cpu.backlog_count(size_class) > 0 and (nvme.has_room(size_class) or nvme.room_expected(size_class))
                for size_class in range(len(self._geometry.slot_sizes))
            )
        )
        return waiting or nvme.uncommitted

    def has_imminent_frees(self) -> bool:
        """Whether a copy on its way holds a block that nobody else does, so that waiting beats preempting; bounded."""
        if self._imminent_answers >= MAX_IMMINENT_ANSWERS:
            return False
        for block in self._transfers.touched_blocks():
            if self._context.get_block(block).ref_cnt == 1:
                self._imminent_answers += 1
                return True
        return False
