# SPDX-License-Identifier: Apache-2.0
"""What must hold of a ``TierManager`` over a fake engine and fake ranks: the invariants of the design, as assertions.

``ManagerParts`` is the manager with what it stands on, as the assembly would put it together;
``ManagerWatch`` sees every call and plan, and keeps its own account of what should follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvdisk.blocks import BlockKey, JobId, Slot, Tier
from kvdisk.config import Config
from kvdisk.geometry import Geometry
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.admission import make_admission
from kvdisk.manager.catalog import Catalog, CopyState
from kvdisk.manager.cpu_space import CpuSpace
from kvdisk.manager.eviction import LruPolicy
from kvdisk.manager.manager import MAX_DEMOTE_JOBS, TierManager
from kvdisk.manager.pool import SlotPool
from kvdisk.manager.segments import NvmeLayout, NvmeSpace
from kvdisk.manager.store_policy import OnCompute, Refusal
from kvdisk.manager.transfers import Transfers
from kvdisk.messages import Job, JobKind, Plan, Report
from kvdisk.stats import Stats
from kvdisk.testing.fake_engine import FakeEngine
from kvdisk.testing.fake_ranks import FakeRank
from kvdisk.testing.fake_requests import FakeRequest, Status, key_of, value_of

FINGERPRINT = b"f" * 32
HOME_ID = "0" * 32
SHORTEST_BACK_OFF_S = 0.04
"""An offer refused for lack of room is not repeated sooner."""


@dataclass(frozen=True)
class Sizes:
    """What a manager is built with. ``cpu_slots``, ``segment_slots`` and ``segments`` by size class."""

    geometry: Geometry
    config: Config
    block_count: int
    cpu_slots: tuple[int, ...]
    segment_slots: tuple[int, ...]
    segments: int
    prompts: tuple[str, ...]
    most_outputs: int = 3

    @property
    def has_nvme(self) -> bool:
        """Whether there is an NVMe tier."""
        return bool(self.segment_slots)

    @property
    def has_cpu(self) -> bool:
        """Whether there is a CPU tier."""
        return bool(self.cpu_slots)


class WatchedPolicy(OnCompute):
    """``OnCompute`` that fails where an offer is repeated although nothing has changed.

    ``changes``: a number that rises whenever room may have come free. ``on_accept(request_id, group, position)`` is
    called with every offer that is accepted.
    """

    on_accept: Callable[[str, int, int], None]

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0
        self._answered: dict[tuple[str, int, int], tuple[Refusal | None, int, int, float]] = {}

    def offers(
        self, request_id: str, group: int, storable: int, room: int, now: float, count_of: Callable[[int], int]
    ) -> list[int]:
        """See ``OnCompute``."""
        positions = super().offers(request_id, group, storable, room, now, count_of)
        assert positions == sorted(set(positions)), f"offered twice at once, or out of order: {positions}"
        assert all(position < storable for position in positions)
        for position in positions:
            before = self._answered.get((request_id, group, position))
            if before is None:
                continue
            why, mark, changes, answered_s = before
            assert why is not None, "a block is offered again that was stored, or is on its way"
            if why is Refusal.NOT_REUSED:
                assert count_of(position) > mark, "an offer is repeated though the count has not risen"
            elif mark >= 0:
                assert now - answered_s >= SHORTEST_BACK_OFF_S, "an offer is repeated without a back-off"
                assert self.changes > changes, "an offer is repeated though no room can have come free"
        return positions

    def accept(self, request_id: str, group: int, position: int) -> None:
        """See ``OnCompute``."""
        super().accept(request_id, group, position)
        self.on_accept(request_id, group, position)
        self._answered[request_id, group, position] = (None, 0, 0, 0.0)

    def refuse(self, request_id: str, group: int, position: int, why: Refusal, mark: int, now: float) -> None:
        """See ``OnCompute``."""
        super().refuse(request_id, group, position, why, mark, now)
        watermark = self._watermarks.get((request_id, group))
        if watermark is None or position >= watermark.frontier:
            return  # it has not been offered yet
        before = self._answered.get((request_id, group, position))
        # A block that was taken and whose store failed waits for nothing but the back-off.
        changes = self.changes - 1 if before is not None and before[0] is None else self.changes
        self._answered[request_id, group, position] = (why, mark, changes, now)

    def request_finished(self, request_id: str) -> None:
        """See ``OnCompute``."""
        super().request_finished(request_id)
        for name in [name for name in self._answered if name[0] == request_id]:
            del self._answered[name]


class WatchedCpuSpace(CpuSpace):
    """``CpuSpace`` that fails where a copy leaves it that the NVMe tier wants and has not got.

    ``wanted(key)``: whether the NVMe tier's admission must let a block in.
    """

    wanted: Callable[[BlockKey], bool]

    def allocate(self, size_class: int, count: int) -> list[Slot]:
        """See ``CpuSpace``."""
        catalog = self._catalog
        only_here = [
            (row, catalog.keys[row])
            for row in catalog.rows()
            if catalog.state(row, Tier.CPU) == CopyState.READY
            and catalog.state(row, Tier.NVME) == CopyState.ABSENT
            and self.class_of(row) == size_class
        ]
        slots = super().allocate(size_class, count)
        full = self.backlog_count(size_class) >= self._limits[size_class]
        for row, key in only_here:
            left = catalog.state(row, Tier.CPU) == CopyState.ABSENT
            assert full or not left or not self.wanted(key), f"{key!r} left the CPU tier, and NVMe was not asked"
        return slots


@dataclass
class ManagerParts:
    """A manager and what it stands on."""

    manager: TierManager
    catalog: Catalog
    transfers: Transfers
    cpu: WatchedCpuSpace | None
    nvme: NvmeSpace | None
    policy: WatchedPolicy

    @classmethod
    def make(cls, sizes: Sizes, engine: FakeEngine, index: MemoryIndex, first_generation: int) -> ManagerParts:
        """Build a manager over an engine's pool, and restore what the index knows."""
        catalog, stats, transfers, policy = Catalog(), Stats(), Transfers(sizes.geometry.rank_count), WatchedPolicy()
        cpu = WatchedCpuSpace(sizes.geometry, sizes.cpu_slots, catalog, stats, LruPolicy) if sizes.has_cpu else None
        nvme = None
        if sizes.has_nvme:
            layout = _layout(sizes)
            nvme = NvmeSpace(sizes.geometry, layout, index, catalog, transfers, stats, LruPolicy)
            nvme.restore(HOME_ID, FINGERPRINT)
        manager = TierManager(
            sizes.config,
            sizes.geometry,
            engine.pool,
            catalog,
            transfers,
            stats,
            cpu,
            nvme,
            policy,
            make_admission(sizes.config.cpu_admission),
            make_admission(sizes.config.nvme_admission),
            first_generation,
        )
        return cls(manager, catalog, transfers, cpu, nvme, policy)


def _layout(sizes: Sizes) -> NvmeLayout:
    """Return room for exactly ``sizes.segments`` segments of each size class."""
    geometry = sizes.geometry
    file_bytes = [
        4096 + size * count for size, count in zip(geometry.slot_sizes, sizes.segment_slots, strict=True)
    ]  # as geometry.segment_file_bytes
    class_bytes = tuple(sizes.segments * each * geometry.rank_count for each in file_bytes)
    return NvmeLayout(0, sizes.segment_slots, class_bytes)


@dataclass
class ManagerWatch:
    """``Watch`` of one manager's life; ``check`` after every event, ``check_quiet`` when nothing is under way.

    ``weights``: those of each epoch.
    """

    sizes: Sizes
    parts: ManagerParts
    engine: FakeEngine
    ranks: Sequence[FakeRank]
    index: MemoryIndex
    weights: dict[int, int] = field(default_factory=lambda: {0: 0})
    _wait_started_s: dict[str, float] = field(default_factory=dict)
    _load_limits: dict[str, int] = field(default_factory=dict)
    _jobs: dict[JobId, tuple[Job, str | None]] = field(default_factory=dict)
    _ranks_left: dict[JobId, int] = field(default_factory=dict)
    _stored: set[tuple[str, BlockKey]] = field(default_factory=set)
    """Blocks of live requests that were seen in some tier, or on their way there, since they were offered."""
    _progress: tuple[int, bool] = (0, True)
    _planned_s: float = 0.0
    _wants: dict[BlockKey, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine.manager, self.engine.watch = self.parts.manager, self
        self.parts.policy.on_accept = self._accepted
        if self.parts.cpu is not None:
            self.parts.cpu.wanted = self._is_wanted_on_nvme

    def _is_wanted_on_nvme(self, key: BlockKey) -> bool:
        nvme = self.parts.nvme
        return nvme is not None and nvme.home_open and self._is_admitted(self.sizes.config.nvme_admission, key)

    def _is_admitted(self, admission: str, key: BlockKey) -> bool:
        needed = 0 if admission == "all" else int(admission[6:-1])
        return len(self._wants.get(key, ())) >= needed

    # -- what the engine saw -------------------------------------------------------------------

    def answered(self, request: FakeRequest, local_tokens: int, answer: int | None, now: float) -> None:
        """Waits are bounded, and no hit reaches to where a load has failed."""
        if answer is None:
            started_s = self._wait_started_s.setdefault(request.id, now)
            assert now - started_s <= self.sizes.config.lookup_wait_s, "a lookup waits for ever"
            return
        limit = self._load_limits.get(request.id)
        assert limit is None or answer == 0 or local_tokens + answer <= limit, "what failed to load is promised again"
        if answer:
            self._wait_started_s.pop(request.id, None)

    def offered(self, request: FakeRequest, computed_tokens: int) -> None:
        """Note which of the request's blocks some tier has or gets."""
        if not self.sizes.config.store_decode:
            computed_tokens = min(computed_tokens, request.prompt_tokens)
        for key in self._held_keys(request, computed_tokens):
            self._wants.setdefault(key, set()).add(request.id)
            if self._is_held(key):
                self._stored.add((request.id, key))

    def _accepted(self, request_id: str, group: int, position: int) -> None:
        key = key_of(self.engine.requests[request_id], self.sizes.geometry.groups[group], position)
        if self._is_held(key):
            self._stored.add((request_id, key))

    def _held_keys(self, request: FakeRequest, tokens: int) -> list[BlockKey]:
        return [
            key_of(request, group, position)
            for group, table in zip(self.sizes.geometry.groups, request.table, strict=True)
            for position in range(tokens // group.block_tokens)
            if table[position]
        ]

    def _is_held(self, key: BlockKey) -> bool:
        row, catalog = self.parts.catalog.find(key), self.parts.catalog
        return row >= 0 and any(
            catalog.state(row, tier) in {CopyState.WRITING, CopyState.READY} for tier in (Tier.CPU, Tier.NVME)
        )

    def planned(self, plan: Plan, preempted: Sequence[str]) -> None:
        """A victim's stores are flushed; every queue is bounded. Note that room may have come free."""
        nvme, policy = self.parts.nvme, self.parts.policy
        progress = (self.index.poll().committed, nvme is None or nvme.may_write(self.engine.now))
        # Within a second, a failed write's back-off can have begun and ended.
        policy.changes += progress != self._progress or self.engine.now >= self._planned_s + 1.0
        self._progress, self._planned_s = progress, self.engine.now
        victims = set(preempted) & set(self.engine.requests)
        outstanding = [job_id for job_id, (job, owner) in self._jobs.items() if owner in victims and _gathers(job)]
        assert set(outstanding) <= set(plan.flush), "a victim's store is not flushed"
        for job in plan.jobs:
            assert job.id not in self._jobs
            owner = self.parts.transfers._records[job.id].request_id
            self._jobs[job.id] = (job, owner)
            self._ranks_left[job.id] = len(self.ranks)
            if job.kind is JobKind.LOAD and owner is not None:
                for move in job.moves:
                    self._wants.setdefault(move.key, set()).add(owner)
        kinds = [job.kind for job, _ in self._jobs.values()]
        assert kinds.count(JobKind.DEMOTE) <= MAX_DEMOTE_JOBS
        touched = list(self.parts.transfers.touched_blocks())
        limit = self.sizes.config.max_pinned_gpu_blocks
        assert limit is None or len(touched) <= limit, "stores hold more GPU blocks than allowed"

    def settled(self, report: Report) -> None:
        """Note failed loads and stores, and that room may have come free."""
        for job_id, result in report.results.items():
            job, owner = self._jobs[job_id]
            self._ranks_left[job_id] -= result.ranks
            for position in result.failed:
                if position >= 0:
                    self._note_failure(job, owner, job.moves[position].key)
            if self._ranks_left[job_id] == 0:
                del self._jobs[job_id], self._ranks_left[job_id]
                self.parts.policy.changes += 1

    def _note_failure(self, job: Job, owner: str | None, key: BlockKey) -> None:
        if owner is None or owner not in self.engine.requests:
            return
        if _gathers(job):
            self._stored.discard((owner, key))
        elif job.kind is JobKind.LOAD:
            self._stored.discard((owner, key))
            group = self.sizes.geometry.groups[int.from_bytes(key[-2:], "big")]
            limit = (len(key) - 2) - group.block_tokens
            self._load_limits[owner] = min(limit, self._load_limits.get(owner, limit))

    def reset(self, epoch: int, weights: int) -> None:
        """The weights have changed: everything has to be stored again."""
        self.weights[epoch] = weights
        self._stored.clear()
        self._wants.clear()

    # -- what must hold ------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what holds at any time."""
        parts = self.parts
        for tier, space in ((Tier.CPU, parts.cpu), (Tier.NVME, parts.nvme)):
            if space is not None:
                space.pool.check()
                self._check_slots(tier, space.pool)
        self._check_copies()
        self._check_records()
        if parts.cpu is not None:
            for size_class, count in enumerate(self.sizes.cpu_slots):
                assert parts.cpu.backlog_count(size_class) <= count // 2, "the backlog is not bounded"

    def _check_slots(self, tier: Tier, pool: SlotPool) -> None:
        """Invariant 1: a used slot is held by one copy, and each copy in service holds one."""
        catalog = self.parts.catalog
        held = [catalog.slot(row, tier) for row in catalog.rows() if catalog.state(row, tier) != CopyState.ABSENT]
        assert len(set(held)) == len(held), "two copies in one slot"
        in_service = {slot for slot in held if pool.has_segment(slot.segment)}
        used = {
            Slot(segment, index)
            for segment in {slot.segment for slot in held} | _segments_of(self.sizes, self.parts, tier)
            if pool.has_segment(segment)
            for index in pool.used_indices(segment)
        }
        assert used == in_service, "a used slot without a copy, or a copy without its slot"
        for total, free, limbo in zip(pool.total, pool.free, pool.limbo, strict=True):
            assert free >= 0 and limbo >= 0 and free + limbo <= total

    def _check_copies(self) -> None:
        """Invariant 3: a READY copy's slot holds that key's bytes on every rank."""
        catalog = self.parts.catalog
        for row in catalog.rows():
            for tier in (Tier.CPU, Tier.NVME):
                if catalog.state(row, tier) == CopyState.READY:
                    key, epoch = catalog.keys[row], catalog.epochs[row]
                    self._check_slot(tier, catalog.slot(row, tier), epoch, key, catalog.generations[row])

    def _check_records(self) -> None:
        """Invariant 2: a committed record's slot holds that key's bytes on every rank."""
        for record in self.index.blocks():
            if record.epoch in self.weights:
                self._check_slot(Tier.NVME, record.slot, record.epoch, record.key, record.generation)

    def _check_slot(self, tier: Tier, slot: Slot, epoch: int, key: BlockKey, generation: int) -> None:
        for rank in self.ranks:
            content = (rank.arena if tier is Tier.CPU else rank.drive).get(slot)
            value = value_of(key, self.weights[epoch], rank.rank)
            right = content is not None and content.holds(epoch, key, generation, value)
            assert right, f"{tier.name} {slot} of rank {rank.rank} has {content}, not {key!r} {generation} {value!r}"

    def check_stored(self) -> None:
        """Nothing is skipped for good: call when all had time, and room, and the requests still live."""
        for request in self.engine.running:
            assert request.status is Status.RUNNING
            tokens = request.computed
            if not self.sizes.config.store_decode:
                tokens = min(tokens, request.prompt_tokens)
            admission = self.sizes.config.cpu_admission if self.sizes.has_cpu else self.sizes.config.nvme_admission
            for key in self._held_keys(request, tokens):
                stored = (request.id, key) in self._stored
                assert stored or not self._is_admitted(admission, key), f"{key!r} of {request.id} is never stored"

    def check_quiet(self) -> None:
        """Assert what holds when nothing is under way: invariants 4, 5 and 11."""
        parts, catalog = self.parts, self.parts.catalog
        assert len(parts.transfers) == 0 and not self._jobs, "a job is out"
        for row in catalog.rows():
            for tier in (Tier.CPU, Tier.NVME):
                assert catalog.pins(row, tier) == 0, "a pin is left"
                assert catalog.state(row, tier) in {CopyState.ABSENT, CopyState.READY}
        for block in range(1, self.engine.pool.block_count):
            held = self.engine.holders(block)
            assert self.engine.pool.get_block(block).ref_cnt == held, f"GPU block {block} is not given back"
        if parts.nvme is not None:
            assert not any(parts.nvme.pool.limbo), "a slot stays in limbo"
            committed = {(record.epoch, record.key, record.slot) for record in self.index.blocks()}
            named = {
                (catalog.epochs[row], catalog.keys[row], catalog.slot(row, Tier.NVME))
                for row in catalog.rows()
                if catalog.state(row, Tier.NVME) == CopyState.READY
            }
            assert committed <= named, "a record outlives its copy"


def _gathers(job: Job) -> bool:
    return job.kind is JobKind.STORE


def _segments_of(sizes: Sizes, parts: ManagerParts, tier: Tier) -> set[int]:
    if tier is Tier.CPU:
        return set(range(len(sizes.cpu_slots)))
    assert parts.nvme is not None
    return set(range(parts.nvme._next_segment))
