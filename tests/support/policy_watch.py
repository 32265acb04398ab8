# SPDX-License-Identifier: Apache-2.0
"""What must hold of what each store policy stores, beside what holds of every store: a part of
``ManagerWatch``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdisk.blocks import BlockKey, group_of
from kvdisk.messages import Job, JobKind, Plan
from support.fake_engine import FakeEngine
from support.fake_requests import FakeRequest, key_of
from support.manager_parts import ManagerParts, Sizes


@dataclass
class PolicyWatch:
    """Looks at one manager's life. ``answered``, ``planned`` and ``reset``: see ``Watch``."""

    sizes: Sizes
    parts: ManagerParts
    engine: FakeEngine
    _saved: dict[str, set[BlockKey]] = field(default_factory=dict)
    """By victim, the blocks whose stores were urgent, and have not failed."""

    def planned(self, plan: Plan, preempted: Sequence[str]) -> None:
        """Only what the policy is there for is stored."""
        name = self.sizes.config.store_policy
        assert name == "on_preemption" or not plan.urgent
        for job in [job for job in plan.jobs if job.kind is JobKind.STORE]:
            if name == "on_preemption":
                self._check_saved(job, plan, preempted)
            elif name == "spillover":
                for move in job.moves:
                    block = self.engine.pool.get_block(move.block)
                    assert block.key == move.key, "a block is stored under another name than it has"
                    assert block.ref_cnt == 0, "a block is stored that was not free"

    def _check_saved(self, job: Job, plan: Plan, preempted: Sequence[str]) -> None:
        owner = self.parts.transfers._records[job.id].request_id
        assert owner is not None and owner in preempted and job.id in plan.urgent, "stored, and nobody was preempted"
        request = self.engine.requests[owner]
        computed, table = self.engine.victims[owner]
        for move in job.moves:
            group = self.sizes.geometry.groups[group_of(move.key)]
            places = {
                key_of(request, group, at): table[group.group][at] for at in range(computed // group.block_tokens)
            }
            assert move.key in places, "a block is stored that the victim had not computed"
            # 0: the window has left it behind in the very step that preempts, and nobody has
            # written to it yet.
            assert places[move.key] in {0, move.block}, "a block is stored that the victim did not hold"
        self._saved.setdefault(owner, set()).update(move.key for move in job.moves)

    def failed(self, job: Job, position: int) -> None:
        """A move of a job has failed."""
        if position >= 0 and job.kind is JobKind.STORE:
            for keys in self._saved.values():
                keys.discard(job.moves[position].key)

    def answered(self, request: FakeRequest, local_tokens: int, answer: int | None, limit: int | None) -> None:
        """A victim that comes back is promised what was saved of it, or has to wait for it."""
        saved = self._saved.get(request.id)
        if not saved or answer is None or len(self.sizes.geometry.groups) > 1:
            return
        (group,) = self.sizes.geometry.groups
        most = len(request.tokens) - 1 if limit is None else min(len(request.tokens) - 1, limit)
        catalog, end = self.parts.catalog, local_tokens
        while end + group.block_tokens <= most:
            key = key_of(request, group, end // group.block_tokens)
            if key not in saved or catalog.readable_tier(catalog.find(key)) is None:
                break
            end += group.block_tokens
        assert local_tokens + answer >= end, f"{request.id} does not get what was saved of it"

    def reset(self) -> None:
        """Nothing from before is served."""
        self._saved.clear()
