# SPDX-License-Identifier: Apache-2.0
"""What must hold of loads and reads from NVMe: none twice at a time for nothing; what is read ahead
is bounded.

A part of ``ManagerWatch``, which tells it what it sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from kvdisk.blocks import BlockKey, JobId, Tier, group_of
from kvdisk.manager import bounds
from kvdisk.manager.jobs import JobRecord
from kvdisk.manager.prefetch import PREFETCH_DIVISOR
from kvdisk.messages import Job, JobKind
from support.fake_engine import FakeEngine
from support.fake_requests import FakeRequest, Status, key_of
from support.manager_parts import ManagerParts, Sizes


@dataclass
class _Wait:
    """A request's wait. ``first_s``: when it began; ``started_s``: when it began anew, since loads
    that began later followed it: ``seen`` are those that had begun."""

    first_s: float
    started_s: float
    seen: set[JobId] = field(default_factory=set)


@dataclass
class ReadWatch:
    """See the module."""

    sizes: Sizes
    parts: ManagerParts
    engine: FakeEngine
    _waits: dict[str, _Wait] = field(default_factory=dict)
    _gave_up: set[str] = field(default_factory=set)
    """Requests that have waited for as long as they may."""
    _reads: dict[tuple[int, BlockKey], JobId] = field(default_factory=dict)
    """By epoch and key: the job that is reading a block into a CPU slot."""
    _impatient: set[JobId] = field(default_factory=set)
    """Those of requests that have waited for as long as they may, also for a load of which a part
    is not planned yet: when that is, it may read what these read."""
    _last_loads: dict[BlockKey, JobId] = field(default_factory=dict)
    """The last load of a block: one that two load is the later one's, also when
    that ends before."""
    _ahead: dict[str, Counter[int]] = field(default_factory=dict)
    """By waiting request: blocks that were read ahead, by size class."""

    hopes: dict[BlockKey, set[str]] = field(default_factory=dict)
    """Requests that waited and could have had a block read ahead."""

    def answered(self, request: FakeRequest, answer: int | None, now: float) -> None:
        """Waits are bounded."""
        longest_s = self.sizes.config.lookup_wait_s
        wait = self._waits.get(request.id)
        if answer is None:
            wait = self._waits.setdefault(request.id, _Wait(now, now))
            if now - wait.started_s > longest_s:
                fresh = self._loads_of(request) - wait.seen
                assert fresh, "a lookup waits for ever"
                wait.seen |= fresh
                wait.started_s = now
        elif now - (wait.first_s if wait is not None else now) >= longest_s:
            self._gave_up.add(request.id)
        if answer:
            self._waits.pop(request.id, None)

    def _loads_of(self, request: FakeRequest) -> set[JobId]:
        """Return the loads on their way of any of a request's blocks, also those of which no job is
        out just now."""
        keys = {
            key_of(request, group, position)
            for group in self.sizes.geometry.groups
            for position in range(len(request.tokens) // group.block_tokens)
        }
        loads = self.parts.manager._loads._under_way
        return {load_id for load_id, load in loads.items() if not keys.isdisjoint(load.keys)}

    def _loads(self) -> list[JobRecord]:
        transfers = self.parts.transfers
        return [transfers._records[job_id] for job_id in transfers.sent_loads()]

    def planned(self, preempted: Collection[str]) -> None:
        """A plan is made, whose jobs come next: of those that wait no more nothing is read ahead.

        Victims may wait again.
        """
        for request_id in preempted:
            self._waits.pop(request_id, None)
            self._gave_up.discard(request_id)
        for request_id in list(self._ahead):
            request = self.engine.requests.get(request_id)
            if request is None or request.status is not Status.WAITING or request_id in preempted:
                del self._ahead[request_id]
        for request in self.engine.waiting if self.sizes.has_nvme and self.sizes.has_cpu else ():
            for group in self.sizes.geometry.groups:
                for position in range(len(request.tokens) // group.block_tokens):
                    self.hopes.setdefault(key_of(request, group, position), set()).add(request.id)

    def note_job(self, job: Job, owner: str | None) -> None:
        if job.kind is JobKind.LOAD:
            assert owner is not None
            self._note_load(job, owner)
        kinds = {JobKind.LOAD, JobKind.PROMOTE}
        is_later_part = job.kind is JobKind.LOAD and self.parts.manager._loads._by_job[job.id].id != job.id
        patient = job.kind is JobKind.PROMOTE or owner not in self._gave_up
        if not patient:
            self._impatient.add(job.id)
        for move in job.moves if job.kind in kinds else ():
            if Tier.NVME not in move.slots and Tier.REMOTE not in move.slots:
                continue
            first = self._reads.get((job.epoch, move.key))
            may_read = first is None or not patient or (is_later_part and first in self._impatient)
            assert may_read, f"{move.key!r} is read a second time before the first has ended"
            if Tier.CPU in move.slots:
                self._reads[job.epoch, move.key] = job.id
        if job.kind is JobKind.PROMOTE:
            self._note_promotion(job, owner)

    def _note_load(self, job: Job, owner: str) -> None:
        # Of several groups one may need what another's load does not bring all of.
        if len(self.sizes.geometry.groups) > 1 or not job.moves:
            return
        key = job.moves[0].key
        last = self._last_loads.get(key)
        self._last_loads.update(dict.fromkeys([move.key for move in job.moves], job.id))
        is_first_of_load = self.parts.manager._loads._by_job[job.id].id == job.id
        if owner in self._gave_up or not is_first_of_load:
            return
        for other in self._loads():
            request = self.engine.requests.get(other.job.request_id or "")
            is_live = request is not None and request.status is Status.LOADING and other.job.epoch == job.epoch
            # Where the cache was emptied meanwhile, the other may bring blocks without those before
            # them: of no use.
            again = is_live and other.job.id == last
            assert not again, f"{key!r} is loaded again before the first load has ended"

    def _note_promotion(self, job: Job, owner: str | None) -> None:
        assert owner is not None
        if owner.endswith(", prefetch"):  # a KV hint asks for it
            return
        assert self.sizes.config.prefetch, "a promotion that nobody wanted"
        assert self.engine.requests[owner].status is Status.WAITING, "a block is read ahead for one that does not wait"
        assert len(job.moves) <= bounds.MOVES
        classes = self.sizes.geometry.size_classes
        self._ahead.setdefault(owner, Counter()).update(classes[group_of(move.key)] for move in job.moves)
        for size_class, slots in enumerate(self.sizes.cpu_slots):
            taken = sum(ahead[size_class] for ahead in self._ahead.values())
            assert taken <= slots // PREFETCH_DIVISOR, "more is read ahead than may be"

    def check_bounds(self, jobs: Collection[Job]) -> None:
        """Assert that of the jobs under way not too many are promotions, of the remote store or of
        drives, and none is of both."""
        ahead = [{Tier.REMOTE in move.slots for move in job.moves} for job in jobs if job.kind is JobKind.PROMOTE]
        assert max(map(len, ahead), default=1) == 1
        assert max(ahead.count({True}), ahead.count({False})) <= bounds.JOBS

    def settled(self, job: Job) -> None:
        """Every rank has answered a job."""
        for name in [name for name, job_id in self._reads.items() if job_id == job.id]:
            del self._reads[name]

    def reset(self) -> None:
        """The weights have changed: what was read ahead is gone."""
        self._ahead.clear()
        self.hopes.clear()

    def check_quiet(self) -> None:
        """Assert that nothing is left when nothing is under way."""
        promotions = self.parts.manager._promotions
        assert not self._reads
        manager = self.parts.manager
        assert not manager._loads.gpu_loads.any, "a load that has ended is still waited for"
        assert not manager._loads._under_way and not manager.unplanned_loads and not manager._loads._by_job
        assert not promotions._waiting and not any(promotions._taken.values()), (
            "one that has ended is still read ahead for"
        )
