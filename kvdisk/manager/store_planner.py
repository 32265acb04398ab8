# SPDX-License-Identifier: Apache-2.0
"""What of a request is stored: the store policy's offers answered, and jobs for those taken. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Sequence

from kvdisk.blocks import Tier
from kvdisk.config import Config
from kvdisk.context import SchedulerContext
from kvdisk.geometry import Geometry
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.catalog import Catalog, CopyState
from kvdisk.manager.cpu_space import CpuSpace
from kvdisk.manager.foreign import ForeignCopies
from kvdisk.manager.lookup import is_coming
from kvdisk.manager.nvme_space import NvmeSpace
from kvdisk.manager.requests import RequestState
from kvdisk.manager.settlement import Settlement
from kvdisk.manager.store_policy import Refusal, StorePolicy
from kvdisk.manager.transfers import MoveDetail, Transfers
from kvdisk.messages import JobKind, Move
from kvdisk.stats import Stats


class StorePlanner:
    """Takes offers into slots and touches their GPU blocks. ``cpu`` or ``nvme`` is None where the tier does not exist.

    ``first_generation``: larger than any that this home has seen.
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
        settlement: Settlement,
        first_generation: int,
        foreign: ForeignCopies,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._context = context
        self._catalog = catalog
        self._transfers = transfers
        self._stats = stats
        self._cpu = cpu
        self._nvme = nvme
        self._store_policy = store_policy
        self._nvme_admission = nvme_admission
        self._target = Tier.CPU if cpu is not None else Tier.NVME
        self._admission = cpu_admission if cpu is not None else nvme_admission
        self._settlement = settlement
        self._foreign = foreign
        self._generation = first_generation
        limit = config.max_pinned_gpu_blocks
        self._max_pinned = max(1, context.block_count // 2) if limit is None else limit
        self._min_block_tokens = min(group.block_tokens for group in geometry.groups)

    def may_offer(self, request: RequestState, computed_tokens: int) -> bool:
        """See ``TierManager.may_offer``."""
        if request.loading or request.stale:
            return False
        computed_tokens = self._storable_tokens(request, computed_tokens)
        return computed_tokens // self._min_block_tokens > request.offered_blocks or self._store_policy.waits(
            request.request_id
        )

    def plan(
        self,
        request: RequestState,
        computed_tokens: int,
        block_ids: Sequence[Sequence[int]],
        now: float,
        epoch: int,
    ) -> None:
        """See ``TierManager.plan_store``. ``epoch``: the current one."""
        if request.loading or request.stale:
            return
        computed_tokens = self._storable_tokens(request, computed_tokens)
        request.update_keys(self._geometry)
        request.offered_blocks = computed_tokens // self._min_block_tokens
        moves: list[Move] = []
        details: list[MoveDetail] = []
        for group in self._geometry.groups:
            keys, blocks = request.keys[group.group], block_ids[group.group]
            storable = min(computed_tokens // group.block_tokens, len(keys), len(blocks))
            offers = self._store_policy.offers(
                request.request_id,
                group.group,
                storable,
                self._settlement.room,
                now,
                lambda position, keys=keys: self._admission.count(keys[position]),  # type: ignore[misc]
            )
            if offers:
                taken = self._answer(request, group.group, offers, blocks, now)
                self._take(request, group.group, taken, blocks, now, epoch, moves, details)
        if moves:
            self._context.touch([detail.block for detail in details])
            self._settlement.pinned_blocks += len(moves)
            record = self._transfers.add(JobKind.STORE, moves, details, epoch=epoch, request_id=request.request_id)
            request.store_jobs.add(record.job.id)

    def _storable_tokens(self, request: RequestState, computed_tokens: int) -> int:
        if request.store_limit_tokens is not None:
            computed_tokens = min(computed_tokens, request.store_limit_tokens)
        return computed_tokens if self._config.store_decode else min(computed_tokens, request.prompt_tokens)

    def _answer(
        self, request: RequestState, group: int, offers: list[int], blocks: Sequence[int], now: float
    ) -> list[int]:
        """Answer one group's offers that need no slot: accept (there already, or no block) or refuse. Return the rest.

        Where the CPU tier has the block already, NVMe is asked again: its count may have risen.
        """
        policy, keys = self._store_policy, request.keys[group]
        taken: list[int] = []
        used: list[int] = []
        for position in offers:
            key = keys[position]
            row = self._catalog.find(key)
            self._admission.want(key, request.request_id)
            self._nvme_admission.want(key, request.request_id)
            if blocks[position] == 0 or is_coming(self._catalog, row):
                policy.accept(request.request_id, group, position)
                if row >= 0:
                    used.append(row)
                    self._settlement.offer_to_nvme(row)
            elif self._target is Tier.NVME and self._foreign.holds(key):
                policy.accept(request.request_id, group, position)
            elif not self._admission.admits(key):
                self._stats.add("refused_blocks")
                self._stats.add("refused_reuse")
                policy.refuse(request.request_id, group, position, Refusal.NOT_REUSED, self._admission.count(key), now)
            elif row >= 0 and self._catalog.state(row, self._target) != CopyState.ABSENT:
                self._refuse_for_room(request, group, position, now)
            else:
                taken.append(position)
        self._note_use(used)
        return taken

    def _note_use(self, rows: list[int]) -> None:
        """Count a request that has blocks, from a tier or from the engine's own cache, as a use of their copies."""
        for space, tier in ((self._cpu, Tier.CPU), (self._nvme, Tier.NVME)):
            if space is not None:
                for row in reversed(rows):  # the head last, so that it leaves last
                    if self._catalog.state(row, tier) == CopyState.READY:
                        space.accessed(row)

    def _refuse_for_room(self, request: RequestState, group: int, position: int, now: float) -> None:
        self._stats.add("refused_blocks")
        spent = self._cpu is None and self._nvme is not None and self._nvme.is_spent
        self._stats.add("refused_budget" if spent else "refused_room")
        room = self._settlement.room
        self._store_policy.refuse(request.request_id, group, position, Refusal.NO_ROOM, room, now)

    def _take(
        self,
        request: RequestState,
        group: int,
        taken: list[int],
        blocks: Sequence[int],
        now: float,
        epoch: int,
        moves: list[Move],
        details: list[MoveDetail],
    ) -> None:
        """Begin copies of as many blocks as there are slots for; refuse the rest."""
        policy, catalog, keys = self._store_policy, self._catalog, request.keys[group]
        allowed = max(0, self._max_pinned - self._settlement.pinned_blocks - len(moves))
        space = self._cpu if self._cpu is not None else self._nvme
        assert space is not None
        may_store = self._cpu is not None or (self._nvme is not None and self._nvme.may_write(now))
        size_class = self._geometry.size_classes[group]
        slots = space.allocate(size_class, min(allowed, len(taken))) if taken and may_store else []
        for position, slot in zip(taken, slots, strict=False):
            policy.accept(request.request_id, group, position)
            parent = keys[position - 1] if position else None
            row = catalog.find(keys[position])
            if row < 0:
                self._generation += 1
                row = catalog.add(keys[position], self._generation, epoch, parent)
            catalog.begin(row, self._target, slot)
            cpu, nvme = (slot, None) if self._target is Tier.CPU else (None, slot)
            moves.append(Move(keys[position], catalog.generations[row], blocks[position], cpu, nvme, parent))
            details.append(MoveDetail(row, blocks[position], group, position))
        for position in taken[len(slots) :]:
            self._refuse_for_room(request, group, position, now)
