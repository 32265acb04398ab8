# SPDX-License-Identifier: Apache-2.0
"""What must hold of a ``TierManager`` over a fake engine and fake ranks: the invariants of the
design, as assertions.

``ManagerWatch`` sees every call and plan, and keeps its own account of what should follow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Protocol

import numpy as np

from kvdisk.blocks import BY_KEY_OVER, GROUP_BYTES, KEPT_TIERS, BlockKey, JobId, Slot, Tier, group_of, make_block_key
from kvdisk.geometry import GroupGeometry
from kvdisk.index.base import BlockRecord
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.index.packed import Table
from kvdisk.manager import bounds
from kvdisk.manager.catalog import NONE, CopyState, TierChoice
from kvdisk.manager.load_jobs import Load
from kvdisk.manager.pool import USED, SlotPool
from kvdisk.manager.prefix_match import Lookups, first_needed
from kvdisk.manager.standings import DEMOTED, PINNED
from kvdisk.manager.step_work import Kind
from kvdisk.messages import Job, JobKind, Move, Plan, Reason, Report
from support.fake_engine import FakeEngine, Watch
from support.fake_requests import FakeRequest, Status, key_of
from support.manager_parts import DAY_S, ManagerParts, Sizes, WatchedCpuSpace, is_neighbours
from support.pool_check import check_pool
from support.read_watch import ReadWatch

_READY = int(CopyState.READY)
_BAD_COPY = frozenset({Reason.HEADER, Reason.CHECKSUM, Reason.IO_ERROR})
_READS = frozenset({JobKind.LOAD, JobKind.PROMOTE})
_BAD_WRITE = frozenset({Reason.NO_SPACE, Reason.IO_ERROR})
SHORTEST_BACK_OFF_S = 0.04
"""An offer refused for lack of room is not repeated sooner."""
FIRST_BACK_OFF_S = 1.0
"""Nothing is written to NVMe for so long after a write has failed."""


class WatchedRank(Protocol):
    def check_slot(self, tier: Tier, slot: Slot, epoch: int, weights: int, key: BlockKey, generation: int) -> None:
        """Assert that a slot holds a block."""


def _gpu_blocks(group: GroupGeometry, table: Sequence[int], at: int) -> Sequence[int]:
    """Return the GPU blocks that a block of a group has, 0 for those that are not there."""
    return table[at * group.gpu_blocks : (at + 1) * group.gpu_blocks]


@dataclass
class ManagerWatch(Watch):
    """``Watch`` of one manager's life; ``check`` after every event, ``check_quiet`` when nothing is
    under way.

    ``weights``: those of each epoch. ``note``: takes what happens, for a trace.
    """

    sizes: Sizes
    parts: ManagerParts
    engine: FakeEngine
    ranks: Sequence[WatchedRank]
    index: MemoryIndex
    note: Callable[[str], object] = lambda _: None
    weights: dict[int, int] = field(default_factory=lambda: {0: 0})
    preempted = 0
    _load_limits: dict[str, int] = field(default_factory=dict)
    _jobs: dict[JobId, tuple[Job, Sequence[str]]] = field(default_factory=dict)
    _ranks_left: dict[JobId, int] = field(default_factory=dict)
    _failures: dict[JobId, dict[int, Reason]] = field(default_factory=dict)
    _stored: set[tuple[str, BlockKey]] = field(default_factory=set)
    """Blocks of live requests that were seen in some tier, or on their way there, since they were
    offered."""
    _refused: dict[tuple[str, BlockKey, int], tuple[int, float]] = field(default_factory=dict)
    """Offers that found no room, by request and epoch: ``_changes`` then, and when."""
    _at_rest: bool = False
    _changes: int = 0
    """Rises whenever room may have come free."""
    _not_admitted: set[tuple[str, BlockKey]] = field(default_factory=set)
    """Blocks that too few requests had wanted when their request offered them, or that were behind
    one that no tier had then: others store them."""
    _progress: tuple[int, bool, int] = (0, True, 0)
    _planned_s: float = 0.0
    _bad_copies: set[tuple[BlockKey, int, Tier, Slot | None]] = field(default_factory=set)
    _bad_objects: dict[BlockKey, float] = field(default_factory=dict)
    """Blocks whose object has failed its check, and when, until this engine has written it over."""
    _written_over: set[BlockKey] = field(default_factory=set)
    _io_errors: list[Move] = field(default_factory=list)
    """Reads that failed with IO_ERROR, of the report that is being settled."""
    _pinned: set[BlockKey] = field(default_factory=set)
    """Blocks that a KV hint has pinned, ever."""
    _late: dict[JobId, tuple[Job, set[int]]] = field(default_factory=dict)
    _late_ranks: Counter[JobId] = field(default_factory=Counter)
    """Jobs with late moves, and how many ranks have not released them."""
    _write_failed_s: float = -FIRST_BACK_OFF_S
    _first_paused: int = 0
    _wants: dict[BlockKey, set[str]] = field(default_factory=dict)
    _known: set[BlockKey] = field(default_factory=set)
    """Blocks that came from before a restart, and those before them: somebody wanted these."""
    _saved: dict[str, set[BlockKey]] = field(default_factory=dict)
    """By victim, the blocks whose stores were urgent, and have not failed."""
    tenant_of: Callable[[str], int] = lambda _: 0
    must_stay: set[int] = field(default_factory=set)
    """Segments that some rank could not open, for no reason by which they are lost."""
    _unopened: set[int] = field(default_factory=set)
    """Segments that some rank could not open, as the report says that is being settled."""
    _first_held: dict[Tier, Counter[tuple[int, int]]] = field(default_factory=dict)
    """See ``_held_of_tenants``, at the start."""
    stored_s: dict[tuple[BlockKey, int], int] = field(default_factory=dict)
    """When each block was first stored, by key and generation, also by processes before."""
    _committed: dict[bytes, bytes] = field(default_factory=dict)
    _records: list[BlockRecord] = field(default_factory=list)
    """What was committed at the last look."""
    _allowed_bytes: float = 0.0
    """Of the budget of written bytes: an hour's at most, none at the start."""

    def __post_init__(self) -> None:
        self._budget_filled_s = self.engine.now
        self.engine.manager, self.engine.watch = self.parts.manager, self
        self.reads = ReadWatch(self.sizes, self.parts, self.engine)
        self._store = self.parts.manager._stores.store
        self.parts.manager._stores.store = self._watched_store  # type: ignore[method-assign]
        self._look_at = self.parts.manager._stores._look_at
        self.parts.manager._stores._look_at = self._watched_look  # type: ignore[method-assign]
        if isinstance(self.parts.cpu, WatchedCpuSpace):
            self.parts.cpu.wanted = self._is_wanted_on_nvme
        self._first_held = {space.tier: self._held_of_tenants(space.tier) for space in self.parts.manager._tiers}
        for key in map(self.parts.catalog.keys.__getitem__, self.parts.catalog.rows()):
            group, tokens = group_of(key), key[:-2]
            step = self.sizes.geometry.groups[group].block_tokens
            self._known |= {make_block_key(tokens[:end], group) for end in range(step, len(tokens) + 1, step)}

    def _is_wanted_on_nvme(self, key: BlockKey) -> bool:
        nvme = self.parts.nvme
        if nvme is None or not nvme.works or self.parts.neighbour_has(key):
            return False
        return self._is_admitted(self.sizes.config.nvme_admission, key)

    def _is_admitted(self, admission: str, key: BlockKey, hopes: Collection[str] = ()) -> bool:
        """Whether enough requests wanted a block; ``learned`` may let any in, and need not, as a
        user's own.

        ``hopes``: requests that may have wanted it, besides.
        """
        by_name = {"all": 0, "learned": math.inf}
        needed = int(admission[6:-1]) if "(" in admission else 0 if ":" in admission else by_name[admission]
        return len(self._wants.get(key, set()).union(hopes)) >= needed

    @property
    def _first_admission(self) -> str:
        return self.sizes.config.cpu_admission if self.sizes.has_cpu else self.sizes.config.nvme_admission

    # -- what the engine saw -------------------------------------------------------------------

    def answered(self, request: FakeRequest, local_tokens: int, answer: int | None, now: float) -> None:
        """Waits are bounded, no hit reaches to where a load has failed, and what is promised is
        there now.

        A victim gets what was saved of it.
        """
        self.note(f"{request.id} has {local_tokens} tokens and is promised {answer}")
        self.reads.answered(request, answer, now)
        self._check_memory(request, local_tokens)
        if answer is None:
            return
        limit = self._load_limits.get(request.id)
        self._check_victim(request, local_tokens, answer, limit)
        assert limit is None or answer == 0 or local_tokens + answer <= limit, "what failed to load is promised again"
        if answer:
            end = local_tokens + answer
            for group in self.sizes.geometry.groups:
                for position in range(first_needed(group, local_tokens, end), end // group.block_tokens):
                    key = key_of(request, group, position)
                    assert self._is_loadable(key, request.load_tiers), f"{key!r} is promised, and nobody has it"

    def _check_memory(self, request: FakeRequest, local_tokens: int) -> None:
        """What a request's lookups remember is what would be found without."""
        manager = self.parts.manager
        state, find = manager._requests[request.id], manager._lookups.find
        asked = (state, local_tokens, manager._lookups._limit_of(state, local_tokens, len(request.tokens)))
        found, remembered = find(*asked, self.engine.now), state.lookups
        state.lookups = Lookups()
        assert found == find(*asked, self.engine.now), "an answer is remembered, and is not right any more"
        state.lookups = remembered

    def _is_loadable(self, key: BlockKey, load_tiers: TierChoice) -> bool:
        """Whether a copy in one of these tiers can be read now, by the copies' own states, or
        another home is thought to have the block."""
        row, catalog = self.parts.catalog.find(key), self.parts.catalog
        tiers = KEPT_TIERS if load_tiers is None else load_tiers
        own = row >= 0 and any(catalog.readable(row, tier) for tier in KEPT_TIERS if tier in tiers)
        near = Tier.NVME in tiers and self.parts.neighbour_has(key)
        far = (load_tiers is None or Tier.REMOTE in tiers) and self.parts.remote_has(key)
        return own or near or far

    def offered(self, request: FakeRequest, computed_tokens: int) -> None:
        """Note which of the request's blocks some tier has or gets."""
        if not self.sizes.config.store_decode:
            computed_tokens = min(computed_tokens, request.prompt_tokens)
        self._come(request, computed_tokens)
        for key in self._held_keys(request, computed_tokens):
            self._wants.setdefault(key, set()).add(request.id)
            if self._is_held(key):
                self._stored.add((request.id, key))
            elif not self._is_admitted(self._first_admission, key):
                self._not_admitted.add((request.id, key))

    def _come(self, request: FakeRequest, tokens: int) -> None:
        """A request that comes to its first blocks wants all of its prompt."""
        for group in self.sizes.geometry.groups:
            for position in range(request.prompt_tokens // group.block_tokens if tokens >= group.block_tokens else 0):
                self._wants.setdefault(key_of(request, group, position), set()).add(request.id)

    def _watched_look(self, rest: Any, stop: int) -> None:
        """What was put off is offered once for each request, whatever another's offer became."""
        self._at_rest = True
        self._look_at(rest, stop)
        self._at_rest = False

    def _watched_store(self, offers: Any, now: float, owners: Sequence[str] = (), **how: Any) -> Any:
        """Offers are answered: what was refused is offered again only where something has changed.

        And not before a back-off; but what an ended request has left is, as it may be gone then,
        and what a search that ended early found no room for.
        ``how``: of a victim's blocks, which are gone when there is room.
        """
        owner_of, epoch = dict(zip(offers.keys, owners or repeat(""), strict=False)), self.parts.manager._state.epoch
        left: set[BlockKey] = set()
        if not owners and not how:
            self.note_progress()
            left = {*self.parts.manager._stores._left.keys}
        for key in offers.keys if not how and not self._at_rest else ():
            if self._is_state(key):
                continue  # the step that leaves it tries twice
            changes, refused_s = self._refused.pop((owner_of[key], key, epoch), (-1, -math.inf))
            waited = key in left or now - refused_s >= SHORTEST_BACK_OFF_S
            assert waited, "an offer is repeated without a back-off"
            assert self._changes > changes, "an offer is repeated though no room can have come free"
        # One of these may leave for one behind it, where what lies between has left the tier.
        held = {key for key in offers.keys if self._is_held(key)}
        self._not_admitted |= {(owner_of[key], key) for key in self._behind_gaps(offers)}
        answer = self._store(offers, now, owners, **how)
        is_final = not how and not self.parts.manager._tiers.first.is_searching
        for key in answer.unserved.keys if is_final else ():
            self._refused[owner_of[key], key, epoch] = self._changes, now
        held |= {key for key in offers.keys if self._is_held(key)}
        self._stored |= {(owner_of[key], key) for key in held.difference(answer.unserved.keys)}
        return answer

    def _behind_gaps(self, offers: Any) -> set[BlockKey]:
        """Return the keys of offers behind a block that no tier has, nor is offered: these are not
        stored, though another request may store that block a moment later."""
        offered, found = {*offers.keys}, set[BlockKey]()
        for key, parent, group in zip(offers.keys, offers.parents, offers.groups, strict=True):
            is_there = parent in offered or parent in self.parts.manager._hints.known
            if parent in found or (
                parent is not None
                and self.sizes.geometry.groups[group].reads_all
                and not is_there
                and self.parts.catalog.find(parent) == NONE
            ):
                found.add(key)
        return found

    def _is_state(self, key: BlockKey) -> bool:
        return self.sizes.geometry.groups[group_of(key)].state_tokens is not None

    def _held_keys(self, request: FakeRequest, tokens: int) -> list[BlockKey]:
        return [
            key_of(request, group, position)
            for group, table in zip(self.sizes.geometry.groups, request.table, strict=True)
            for position in range(tokens // group.block_tokens)
            if all(_gpu_blocks(group, table, position))
        ]

    def _is_held(self, key: BlockKey) -> bool:
        """Whether a tier has or gets a block, or, without a CPU tier, another home is thought to
        have it."""
        if not self.sizes.has_cpu and self.parts.neighbour_has(key):
            return True
        row, catalog = self.parts.catalog.find(key), self.parts.catalog
        return row >= 0 and any(
            catalog.state(row, tier) in {CopyState.WRITING, CopyState.READY} for tier in (Tier.CPU, Tier.NVME)
        )

    def planned(self, plan: Plan, preempted: Sequence[str]) -> None:
        """Every queue is bounded."""
        if preempted or plan.fence or plan.void:
            self.note(f"preempted {list(preempted)}, fence {plan.fence}, void {plan.void}")
        for job in plan.jobs:
            moves = [(move.key, move.generation, move.gpu_blocks, dict(move.slots)) for move in job.moves]
            self.note(f"plan {job.kind.name} {job.id}: {moves or job.segment or job.home}")
        self.preempted += len(preempted)
        self.note_progress()
        self.reads.planned(preempted)
        for job in plan.jobs:
            self._note_job(job)
        self._check_stores(plan, preempted)
        self.reads.check_bounds([job for job, _ in self._jobs.values()])
        far = [Tier.REMOTE in job.moves[0].slots for job, _ in self._jobs.values() if job.kind is JobKind.DEMOTE]
        assert far.count(False) <= bounds.JOBS
        assert far.count(True) <= bounds.JOBS

    def _is_open(self, job: Job, position: int) -> bool:
        """Whether a move writes to a segment whose files are there, as far as is known: elsewhere a
        failed write says nothing of the drive."""
        nvme, slot = self.parts.nvme, job.moves[position].slots.get(Tier.NVME) if position >= 0 else None
        if nvme is None or slot is None:
            return True
        return not any(slot.segment in some for some in (nvme._drops, nvme.segments.away, self._unopened))

    def note_progress(self) -> None:
        """Note that room may have come free: call when the manager has looked at the index."""
        nvme, cpu = self.parts.nvme, self.parts.cpu
        forgotten = getattr(cpu, "ended_forgotten", 0)
        progress = (self.index.poll().committed, nvme is None or nvme.update_writable(self.engine.now), forgotten)
        # Within a second, a failed write's back-off can have begun and ended.
        self._changes += progress != self._progress or self.engine.now >= self._planned_s + 1.0
        self._progress, self._planned_s = progress, self.engine.now
        self._changes += self.parts.manager._tiers.first.is_searching  # the next search may find some

    def _note_job(self, job: Job) -> None:
        assert job.id not in self._jobs
        owners = self.parts.transfers._records[job.id].owners
        owner = owners[0] if owners else job.request_id
        self._jobs[job.id] = (job, owners or [owner or ""] * len(job.moves))
        self._ranks_left[job.id] = len(self.ranks)
        self.reads.note_job(job, owner)
        config = self.sizes.config
        request = self.engine.requests.get(owner or "")
        for each, move in zip(owners, job.moves, strict=bool(owners)) if job.kind is JobKind.STORE else ():
            request = self.engine.requests.get(each)
            if request is not None and config.store_policy == "on_compute":
                of_prompt = len(move.key) - 2 <= request.prompt_tokens
                assert config.store_decode or of_prompt, "a generated block is stored, and nobody asked"
        writes = _writes(job)
        paused = self.engine.now < self._write_failed_s + FIRST_BACK_OFF_S and job.id >= self._first_paused
        assert not (writes and paused), "a write during a back-off"
        if writes:
            self._spend(sum(self.sizes.slot_bytes_of(move.key) for move in job.moves) * len(self.ranks))
        for move in job.moves:
            self._bad_copies.discard(_target(job, move))
            self._note_age(job, move)
            if job.kind in _READS:
                tier = _source(move)[2]
                may_load = job.kind is JobKind.PROMOTE or request is None or request.load_tiers is None
                may_load |= not move.slots or (request is not None and tier in (request.load_tiers or ()))
                assert may_load, f"{move.key!r} is loaded from {tier.name}, which the request leaves out"
                assert not self._is_bad(move), "a copy that failed to load is loaded again"
                foreign = is_neighbours(move.slots.get(Tier.NVME))
                foreign |= Tier.REMOTE in move.slots
                assert not foreign or self.weights[job.epoch] == 0, "another engine's block, of other weights"
                if owner is not None:  # it came to those before it as well, which the GPU may have had
                    tokens = self.sizes.geometry.groups[group_of(move.key)].block_tokens
                    for end in range(tokens, len(move.key) - GROUP_BYTES + 1, tokens):
                        before = make_block_key(move.key[:end], group_of(move.key))
                        self._wants.setdefault(before, set()).add(owner)
                    if request is not None:
                        self._come(request, len(move.key) - GROUP_BYTES)
            if job.kind is not JobKind.LOAD:
                admission = config.nvme_admission if writes else config.cpu_admission
                if job.kind is JobKind.DEMOTE and not writes:
                    admission = config.remote_admission
                    assert self.weights[job.epoch] == 0, "sent, and of other weights"
                hopes = set(self.reads.hopes.get(move.key, ()))
                hopes |= {"before"} if move.key in self._known else set()
                may_enter = admission == "learned" or self._is_admitted(admission, move.key, hopes)
                self._note_pinned()
                may_enter |= move.key in self._pinned
                if move.slots.get(Tier.REMOTE) == BY_KEY_OVER:
                    may_enter |= move.key in self._bad_objects
                    assert move.key not in self._written_over, "an object is written over twice"
                assert may_enter, "a block has entered a tier that does not admit it"

    def _note_age(self, job: Job, move: Move) -> None:
        """A copy is as old as the first one of its block that has not ended, and is not read when
        that is too old."""
        catalog, name = self.parts.catalog, (move.key, move.generation)
        if job.kind is JobKind.STORE:
            row = catalog.find(move.key)
            is_first = all(catalog.state(row, tier) != CopyState.READY for tier in KEPT_TIERS)
            if is_first or name not in self.stored_s:
                self.stored_s[name] = int(self.engine.now)
        max_age_s = self.sizes.config.max_age_s
        if job.kind in _READS and max_age_s is not None and name in self.stored_s:
            oldest_s = int(int(self.engine.now) - max_age_s)
            assert self.stored_s[name] >= oldest_s, f"{move.key!r} is read, and is too old"

    def _is_bad(self, move: Move) -> bool:
        """Whether what a read is planned of has failed its check. An object is tried again after a
        while: somebody may have repaired it."""
        if Tier.REMOTE in move.slots:
            return self.engine.now < self._bad_objects.get(move.key, -math.inf) + bounds.READ_AGAIN.first_s
        return _source(move) in self._bad_copies

    def _spend(self, written_bytes: int) -> None:
        """A second account of the bytes written to NVMe, beside the product's."""
        bytes_per_day, now = self.sizes.config.nvme_write_bytes_per_day, self.engine.now
        if bytes_per_day is not None:
            burst = max(bytes_per_day / 24, self.sizes.largest_bytes)
            filled = (now - self._budget_filled_s) * (bytes_per_day - burst) / DAY_S
            self._allowed_bytes = min(burst, self._allowed_bytes + filled) - written_bytes
            self._budget_filled_s = now
            assert self._allowed_bytes >= -1.0, "the budget of written bytes is overdrawn"

    def _check_stores(self, plan: Plan, preempted: Sequence[str]) -> None:
        """Only what the policy is there for is stored."""
        name = self.sizes.config.store_policy
        assert name == "on_preemption" or not plan.urgent
        for job in [job for job in plan.jobs if job.kind is JobKind.STORE]:
            if name == "on_preemption":
                self._check_saved(job, plan, preempted)
            elif name == "spillover":
                for move in job.moves:
                    blocks = [self.engine.pool.get_block(block) for block in move.gpu_blocks]
                    assert blocks[-1].key == move.key, "a block is stored under another name than it has"
                    assert len(blocks) == self.sizes.geometry.groups[group_of(move.key)].gpu_blocks
                    assert all(block.key is not None for block in blocks), "a unit is stored that is not all there"
                    is_again = self._is_state(move.key)  # its store failed: whoever needs it now
                    keys = {block.key for block in blocks}  # there may be several of a key
                    is_free = any(block.key in keys for block in self.engine.pool.iter_free_blocks())
                    assert is_free or is_again, "a block is stored that was not free"

    def _check_saved(self, job: Job, plan: Plan, preempted: Sequence[str]) -> None:
        owners = {*self.parts.transfers._records[job.id].owners}
        if not owners:  # what of a long prompt a later step saves
            self._check_still_cached(job, plan)
            return
        (owner,) = owners
        assert owner in preempted and job.id in plan.urgent, "stored, and nobody was preempted"
        request = self.engine.requests[owner]
        computed, table = self.engine.victims[owner]
        for move in job.moves:
            group = self.sizes.geometry.groups[group_of(move.key)]
            places = {
                key_of(request, group, at): _gpu_blocks(group, table[group.group], at)
                for at in range(computed // group.block_tokens)
            }
            assert move.key in places, "a block is stored that the victim had not computed"
            # 0: the window has left it behind in the very step that preempts, and nobody has
            # written to it yet.
            held = zip(places[move.key], move.gpu_blocks, strict=True)
            assert all(was in {0, block} for was, block in held), "a block is stored that the victim did not hold"
        self._saved.setdefault(owner, set()).update(move.key for move in job.moves)

    def _check_still_cached(self, job: Job, plan: Plan) -> None:
        assert self.preempted and job.id not in plan.urgent
        for move in job.moves:
            blocks = [self.engine.pool.get_block(block) for block in move.gpu_blocks]
            assert blocks[-1].key == move.key, "a block is stored under another name than it has"
            assert all(block.key is not None for block in blocks), "a block is stored that is not all there"

    def _check_victim(self, request: FakeRequest, local_tokens: int, answer: int, limit: int | None) -> None:
        """A victim that comes back is promised what was saved of it."""
        saved, groups = self._saved.get(request.id), self.sizes.geometry.groups
        if not saved or len(groups) > 1:
            return
        most = len(request.tokens) - 1 if limit is None else min(len(request.tokens) - 1, limit)
        catalog, end = self.parts.catalog, local_tokens // groups[0].block_tokens * groups[0].block_tokens
        while end + groups[0].block_tokens <= most:
            key = key_of(request, groups[0], end // groups[0].block_tokens)
            if key not in saved or catalog.readable_tier(catalog.find(key), request.load_tiers) is None:
                break
            end += groups[0].block_tokens
        assert local_tokens + answer >= end, f"{request.id} does not get what was saved of it"

    def settled(self, report: Report) -> None:
        """Note failed loads and stores, and that room may have come free."""
        self._unopened.clear()
        for job_id, ranks in report.released.items():
            self._late_ranks[job_id] -= ranks
            self._changes += 1
        for job_id, result in sorted(report.results.items()):  # in the order in which the manager ends them
            job, owners = self._jobs[job_id]
            self._late_ranks[job_id] += result.late_ranks
            self._late.setdefault(job_id, (job, set()))[1].update(result.late)
            self._ranks_left[job_id] -= result.ranks
            for position, reason in result.failed.items():
                self._failures.setdefault(job_id, {}).setdefault(position, reason)
            if self._ranks_left[job_id] == 0:
                del self._jobs[job_id], self._ranks_left[job_id]
                self.reads.settled(job)
                self._changes += 1
                late = self._late[job_id][1] if self._late_ranks[job_id] else ()
                failures = self._failures.pop(job_id, {})
                over = [at for at, move in enumerate(job.moves) if move.slots.get(Tier.REMOTE) == BY_KEY_OVER]
                for key in [job.moves[at].key for at in over if at not in failures]:
                    self._written_over.add(key)
                    self._bad_objects.pop(key, None)
                for position, reason in failures.items():
                    owner = owners[position] if position >= 0 else ""
                    self._note_failure(job, owner, position, reason, late=position in late)
                self._note_opened(job, failures.get(-1))
        self.must_stay -= report.removed
        for job_id in [job_id for job_id in self._late if job_id not in self._jobs and not self._late_ranks[job_id]]:
            del self._late[job_id], self._late_ranks[job_id]

    def _note_opened(self, job: Job, failure: Reason | None) -> None:
        """Only what is known to be lost may be given up."""
        spec, nvme = job.segment, self.parts.nvme
        if job.kind is not JobKind.OPEN_SEGMENT or spec is None or spec.source is not None or spec.create:
            return
        assert nvme is not None
        self.must_stay.discard(spec.segment)
        self._unopened.update([spec.segment] if failure is not None else [])
        if failure not in {None, Reason.ABSENT, Reason.HEADER} and spec.segment not in nvme._drops:
            self.must_stay.add(spec.segment)

    def _note_failure(self, job: Job, owner: str, position: int, reason: Reason, *, late: bool) -> None:
        nvme = self.parts.nvme
        bad_write = _writes(job) and (late or (reason in _BAD_WRITE and self._is_open(job, position)))
        if nvme is not None and nvme.update_writable(self.engine.now) and bad_write:
            self._write_failed_s = self.engine.now
            self._first_paused = self.parts.transfers._next_id
        if position < 0:
            return
        move = job.moves[position]
        if Tier.REMOTE in move.slots and reason not in {Reason.HEADER, Reason.CHECKSUM}:
            pass  # its bytes may be as good as before, and what is gone may come back
        elif Tier.REMOTE in move.slots and job.kind in _READS:
            self._bad_objects[move.key] = self.engine.now
        elif reason is Reason.IO_ERROR and Tier.NVME in move.slots and move.slots[Tier.NVME].segment in self.must_stay:
            pass  # it was never open
        elif job.kind in _READS and reason in _BAD_COPY:
            self._bad_copies.add(_source(move))
            if reason is Reason.IO_ERROR:
                self._io_errors.append(move)
        if owner and job.kind in {JobKind.STORE, JobKind.LOAD}:
            self._stored.discard((owner, move.key))
            if job.kind is JobKind.STORE:
                for keys in self._saved.values():
                    keys.discard(move.key)
            if job.kind is JobKind.LOAD:
                limit = len(move.key) - 2 - self.sizes.geometry.groups[group_of(move.key)].block_tokens
                self._load_limits[owner] = min(limit, self._load_limits.get(owner, limit))

    def note_settled(self) -> None:
        """The manager has settled a report. Copies that it kept on a drive that is given up for now
        are not bad."""
        catalog = self.parts.catalog
        for move in self._io_errors:
            row = catalog.find(move.key)
            kept = row >= 0 and catalog.state(row, Tier.NVME) == CopyState.READY
            kept = kept and catalog.slot(row, Tier.NVME) == move.slots.get(Tier.NVME)
            if kept and not catalog.readable(row, Tier.NVME):
                self._bad_copies.discard(_source(move))
        self._io_errors.clear()

    def reset(self, epoch: int, weights: int) -> None:
        """The weights have changed: everything has to be stored again."""
        self._saved.clear()
        self.weights[epoch] = weights
        self._stored.clear()
        self._not_admitted.clear()
        self.reads.reset()
        self._wants.clear()
        self._known.clear()

    # -- what must hold ------------------------------------------------------------------------

    def check(self) -> None:
        parts = self.parts
        for tier, space in ((Tier.CPU, parts.cpu), (Tier.NVME, parts.nvme)):
            if space is not None:
                check_pool(space.pool)
                self._check_slots(tier, space.pool)
        self._changes += parts.manager._tiers.first.is_searching
        self._note_pinned()
        self._check_copies()
        self._check_shares()
        self._check_standings()
        self._check_records()
        self._check_zombies()
        nvme, now = parts.nvme, self.engine.now
        if nvme is not None:
            assert not self.must_stay & nvme._drops.keys(), "what a rank cannot open now is given up"
            away = nvme.segments.away.keys()
            assert self.must_stay <= away | nvme.segments.opening
            assert away <= parts.catalog.columns(Tier.NVME).hidden and not any(map(nvme.pool.has_segment, away))
        if nvme is not None and not (len(parts.transfers) or nvme.status.uncommitted or nvme.update_writable(now)):
            work = parts.manager._work
            pending = parts.manager.has_pending_work(now) and not work.has(Kind.SENDS)
            searches = parts.cpu is not None and work.has(Kind.LEFT)
            # What only looks ends by itself, whatever may be written.
            searches |= any(map(work.has, (Kind.PUT_OFF, Kind.DEMAND, Kind.GONE, Kind.KV_HINTS, Kind.AGES)))
            goes_on = work.has(Kind.ASKED) or work.has(Kind.LOADS)
            idle = not pending or goes_on or searches
            assert idle, "an idle engine steps although nothing may be written"
        if parts.dirty is not None:
            for size_class, count in enumerate(self.sizes.cpu_slots):
                assert parts.dirty.counts[size_class] <= max(1, count // 2), "the backlog is not bounded"

    def _check_slots(self, tier: Tier, pool: SlotPool) -> None:
        """Invariant 1: a used slot is held by one copy, and each copy in service holds one."""
        catalog = self.parts.catalog
        held = catalog.columns(tier).places(catalog.rows_in(tier))
        assert len(set(held)) == len(held), "two copies in one slot"
        segments = {segment for segment, _ in held} | _segments_of(self.sizes, self.parts, tier)
        in_pool = set(filter(pool.has_segment, segments))
        in_service = {place for place in held if place[0] in in_pool}
        used = {
            (segment, index)
            for segment in in_pool
            for index in np.flatnonzero(np.frombuffer(pool.states[segment], np.uint8) == USED).tolist()
        }
        assert used == in_service, "a used slot without a copy, or a copy without its slot"
        for total, free, awaiting in zip(pool.total, pool.free, pool.awaiting, strict=True):
            assert free >= 0 and awaiting >= 0 and free + awaiting <= total

    def _check_copies(self) -> None:
        """Invariant 3: a READY copy's slot holds that key's bytes on every rank. And along a chain
        uses never rise; a recurrent state, which is wanted alone, follows the KV beside it."""
        catalog, known = self.parts.catalog, self.parts.manager._history.known
        keys, epochs, generations = catalog.keys, catalog.epochs, catalog.generations
        for row in catalog.rows():
            key, parent = keys[row], catalog.parent(row)
            if parent is None:
                continue
            if self._is_state(key):
                assert not self._is_state(parent), f"{key!r} follows {parent!r}, and not what it serves with"
            else:
                rises = 0 < known(parent)[0] < known(key)[0]
                assert not rises, f"{key!r} was used more often than {parent!r} before it"
        for tier in catalog.tiers:
            rows = [row for row in catalog.rows_in(tier) if catalog.columns(tier).states[row] == _READY]
            for row, slot in zip(rows, catalog.columns(tier).slots(rows), strict=True):
                assert epochs[row] in self.weights, "a copy of weights that this process never had"
                self._check_slot(tier, slot, epochs[row], keys[row], generations[row])

    def _held_of_tenants(self, tier: Tier) -> Counter[tuple[int, int]]:
        """Return how many copies each tenant has in a tier, by size class and tenant."""
        catalog, classes = self.parts.catalog, self.sizes.geometry.size_classes
        rows = [row for row in catalog.rows() if catalog.tenants[row] and catalog.state(row, tier) != CopyState.ABSENT]
        return Counter((classes[group_of(catalog.keys[row])], catalog.tenants[row]) for row in rows)

    def _check_shares(self) -> None:
        """Each copy counts for the tenant of its block, who has no more than its share, or than it
        had at the start."""
        if self.sizes.config.salt_share is None:
            return
        catalog = self.parts.catalog
        for row in catalog.rows():
            key = catalog.keys[row]
            assert catalog.tenants[row] == self.tenant_of(key.decode("latin-1")), f"{key!r} is another tenant's"
        for space in self.parts.manager._tiers:
            share, held = space.share, self._held_of_tenants(space.tier)
            assert share is not None
            counted = {(at, tenant): count for at, each in enumerate(share._counts) for tenant, count in each.items()}
            assert held == counted
            for (size_class, tenant), count in held.items():
                most = self._first_held[space.tier][size_class, tenant]
                assert count <= max(share.limit(size_class), most), "a tenant has more than its share"

    def _note_pinned(self) -> None:
        held = self.parts.manager._kv_hints._standings.held
        self._pinned |= {key for key, (standing, _) in held.items() if standing == PINNED}

    def _check_standings(self) -> None:
        """Of each tier no more stays than may, and what it follows stays, too. What has no standing
        any more leaves as others."""
        catalog, standings = self.parts.catalog, self.parts.manager._kv_hints._standings
        for space in self.parts.manager._tiers:
            for size_class, order in enumerate(space._evictors):
                assert order._policy.count(PINNED) <= space._most_staying(size_class)
            for row in catalog.rows_in(space.tier):
                size_class = self.sizes.geometry.size_classes[group_of(catalog.keys[row])]
                policy = space._evictors[size_class]._policy
                is_so, parent = policy.standing(row), catalog.parent_rows[row]
                if is_so in {None, DEMOTED}:
                    continue
                told = standings.of(catalog.keys[row]) if catalog.find(catalog.keys[row]) == row else None
                is_old = catalog.epochs[row] != self.parts.manager._state.epoch and self.parts.manager._work.has(
                    Kind.GONE
                )
                assert told in {is_so, PINNED} or is_old
                if is_so == PINNED and parent != NONE and policy.holds(parent):
                    assert policy.standing(parent) == PINNED

    def _check_records(self) -> None:
        """Invariant 2: a committed record's slot holds that key's bytes on every rank."""
        committed = self.index._tables[Table.BLOCKS] if isinstance(self.index, MemoryIndex) else None
        if committed is None or committed != self._committed:
            self._committed, self._records = dict(committed or {}), list(self.index.blocks())
        for record in self._records:
            if record.epoch in self.weights:
                self._check_slot(Tier.NVME, record.slot, record.epoch, record.key, record.generation)

    def _check_zombies(self) -> None:
        """What a late move of a settled job may still touch is held, and pinned, until all ranks
        have released it."""
        catalog, zombies = self.parts.catalog, self._zombie_pins()
        for tier in {tier for tier, _ in zombies}:
            pins = {catalog.slot(row, tier): catalog.pins(row, tier) for row in catalog.rows_in(tier)}
            for (at, slot), count in zombies.items():
                assert at is not tier or pins.get(slot, 0) >= count, f"{tier.name} {slot} is not held for a late move"

    def _check_slot(self, tier: Tier, slot: Slot, epoch: int, key: BlockKey, generation: int) -> None:
        for rank in self.ranks:
            rank.check_slot(tier, slot, epoch, self.weights[epoch], key, generation)

    def check_stored(self) -> None:
        """Nothing is skipped for good: call when all had time, and room, and the requests still
        live.

        Of a prompt that is longer than the CPU tier, or its tenant's share, there may be no more
        than its head. Behind a block that has left all tiers nothing is stored.
        """
        if self.sizes.config.store_policy != "on_compute":
            return
        for request in self.engine.running:
            assert request.status is Status.RUNNING
            tokens = request.computed
            if not self.sizes.config.store_decode:
                tokens = min(tokens, request.prompt_tokens)
            for key in self._held_keys(request, tokens):
                group = self.sizes.geometry.groups[group_of(key)]
                if self._is_state(key):
                    continue  # it is offered for as long as the engine keeps it
                slots = (
                    self.sizes.cpu_slots[self.sizes.geometry.size_classes[group.group]] if self.sizes.has_cpu else None
                )
                share = self.parts.manager._tiers.first.share
                if share is not None and self.tenant_of(request.tokens):
                    slots = share.limit(self.sizes.geometry.size_classes[group.group])
                    slots -= self._pinned_beside(request, tokens)
                if slots is not None and (len(key) - 2) // group.block_tokens > slots:
                    continue
                ends = range(group.block_tokens, len(key) - GROUP_BYTES, group.block_tokens)
                before = [make_block_key(key[:end], group.group) for end in ends]
                if group.reads_all and NONE in self.parts.catalog.find_all(before):
                    continue
                stored = (request.id, key) in self._stored | self._not_admitted
                assert stored, f"{key!r} of {request.id} is never stored"

    def _pinned_beside(self, request: FakeRequest, tokens: int) -> int:
        """Return how many blocks that hints have pinned, of a request's tenant and not of its
        prompt, may have its share: they do not leave for others."""
        tenant, mine, catalog = (
            self.tenant_of(request.tokens),
            set(self._held_keys(request, tokens)),
            self.parts.catalog,
        )
        rows = [row for row in catalog.rows() if catalog.keys[row] in self._pinned and catalog.tenants[row] == tenant]
        return len({catalog.keys[row] for row in rows} - mine)

    def check_quiet(self) -> None:
        """Assert what holds when nothing is under way but late moves of settled jobs: invariants 4,
        5 and 11."""
        parts, catalog = self.parts, self.parts.catalog
        zombies = self._zombie_pins()
        assert len(parts.transfers) == 0 and not self._jobs, "a job is out"
        self.reads.check_quiet()
        assert self._late or not parts.manager._hints.neighbours._open, "another home's segment stays open"
        for row in catalog.rows():
            for tier in (Tier.CPU, Tier.NVME):
                state = catalog.state(row, tier)
                pins = 0 if state == CopyState.ABSENT else zombies.pop((tier, catalog.slot(row, tier)), 0)
                assert catalog.pins(row, tier) == pins, "a pin is left, or was given back too early"
                assert state in {CopyState.ABSENT, CopyState.READY} or (pins and state == CopyState.DROPPED)
        assert not zombies, f"slots that a late transfer may touch are not held: {zombies}"
        for block in range(1, self.engine.pool.block_count):
            held = self.engine.holders(block)
            assert self.engine.pool.get_block(block).ref_cnt == held, f"GPU block {block} is not given back"
        if parts.nvme is not None:
            assert not any(parts.nvme.pool.awaiting), "a slot awaits a commit for ever"
            committed = {(record.epoch, record.key, record.slot) for record in self.index.blocks()}
            named = {
                (catalog.epochs[row], catalog.keys[row], catalog.slot(row, Tier.NVME))
                for row in catalog.rows()
                if catalog.state(row, Tier.NVME) in {CopyState.READY, CopyState.DROPPED}
            }
            assert committed <= named, "a record outlives its copy"

    def _zombie_pins(self) -> Counter[tuple[Tier, Slot]]:
        """Return how many pins each slot has to have for late moves of settled jobs."""
        assert all(ranks >= 0 for ranks in self._late_ranks.values())
        pins: Counter[tuple[Tier, Slot]] = Counter()
        settled = [record for job_id, record in self._late.items() if job_id not in self._jobs]
        for job, late in settled:
            for move in (job.moves[at] for at in late):
                places = [place for place in move.slots.items() if place[0] is not Tier.REMOTE]
                pins.update((tier, slot) for tier, slot in places if slot and not is_neighbours(slot))
        return pins


def _writes(job: Job) -> bool:
    target = max(job.moves[0].slots, default=None) if job.moves else None
    return job.kind in {JobKind.DEMOTE, JobKind.STORE} and target is Tier.NVME


def _source(move: Move) -> tuple[BlockKey, int, Tier, Slot | None]:
    """Return the copy that a load reads."""
    if Tier.REMOTE in move.slots:
        return move.key, 0, Tier.REMOTE, None
    if Tier.NVME not in move.slots:
        return move.key, move.generation, Tier.CPU, move.slots.get(Tier.CPU)
    # The number that a foreign segment is opened under changes; generations do not repeat.
    slot = move.slots[Tier.NVME]
    return move.key, move.generation, Tier.NVME, None if is_neighbours(slot) else slot


def _target(job: Job, move: Move) -> tuple[BlockKey, int, Tier, Slot | None]:
    """Return the copy that a move of a job writes, if any."""
    if job.kind in _READS:
        return move.key, move.generation, Tier.CPU, move.slots.get(Tier.CPU) if len(move.slots) > 1 else None
    if Tier.REMOTE in move.slots:
        return move.key, -1, Tier.REMOTE, None  # nobody knows what it does with a write
    return _source(move)


def _segments_of(sizes: Sizes, parts: ManagerParts, tier: Tier) -> set[int]:
    if tier is Tier.CPU:
        return set(range(len(sizes.cpu_slots)))
    assert parts.nvme is not None
    return set(range(parts.nvme.segments._next))


def check_pins(parts: ManagerParts) -> None:
    """Assert that each copy has as many pins as jobs that read or write it, or may still do so
    (invariant 4)."""
    transfers, catalog = parts.transfers, parts.catalog
    expected: Counter[tuple[int, Tier]] = Counter()
    held = [(record, range(len(record.details))) for record in transfers._records.values()]
    for record, positions in [*held, *((zombie, zombie.late) for zombie in transfers._zombies.values())]:
        for move, detail in ((record.job.moves[at], record.details[at]) for at in positions):
            for tier, slot in move.slots.items():
                if detail.row >= 0 and not is_neighbours(slot):
                    expected[detail.row, tier] += 1
    for load in parts.manager._work.owners(Kind.LOADS):
        assert isinstance(load, Load) and load.rest is not None
        rest = load.rest.order[load.rest.planned :]
        for tier in catalog.tiers:
            rows = load.rest.rows[rest][load.rest.tiers[rest] == tier]
            expected.update((row, tier) for row in rows.tolist() if row >= 0)
    for row in catalog.rows():
        for tier in catalog.tiers:
            assert catalog.pins(row, tier) == expected[row, tier], f"pins of row {row} in {tier!r}"
