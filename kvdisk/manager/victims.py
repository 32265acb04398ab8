# SPDX-License-Identifier: Apache-2.0
"""What is saved of a request that the engine preempts. Scheduler thread only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import chain

from kvdisk.blocks import JobId
from kvdisk.geometry import GroupGeometry
from kvdisk.manager.catalog import NONE
from kvdisk.manager.copies import Offers
from kvdisk.manager.demand import Demand
from kvdisk.manager.gpu_offers import GpuOffers
from kvdisk.manager.parts import Parts
from kvdisk.manager.requests import BlockKeys, RequestState
from kvdisk.manager.step_work import Kind, Work
from kvdisk.manager.store_policy import StorePolicy
from kvdisk.manager.stores import StorePlanner
from kvdisk.manager.tiers import Tiers

_STRETCH = 1024
"""Blocks that are looked at together for whether there are any."""


class Victims:
    """Offers a victim's blocks to the first tier: at once what the engine may take in its next
    step, the rest in later steps."""

    def __init__(
        self, parts: Parts, tiers: Tiers, store_policy: StorePolicy, demand: Demand, stores: StorePlanner
    ) -> None:
        self._geometry = parts.geometry
        self._context = parts.context
        self._catalog = parts.catalog
        self._work = parts.work
        self._target = tiers.first
        self._store_policy = store_policy
        self._demand = demand
        self._stores = stores
        self._offers = GpuOffers(parts)
        self._min_block_tokens = min(group.block_tokens for group in parts.geometry.groups)

    def save(self, request: RequestState, overwritten: Collection[int], now: float) -> JobId | None:
        """Plan the store of what a preempted request has lost; return its job, which is urgent, if
        there is one.

        Its blocks may be somebody else's by now. Of a long prompt the job has the head, and of the
        tail, which the engine takes first, what it has taken, and what it can take in its next
        step. Steps save what lies between, from its tail on, while the engine has it cached.
        ``overwritten``: blocks that the step has written to by the time that the job can begin.
        """
        if request.stale or not request.held_blocks:
            return None
        storable_tokens = self._stores.allowed_tokens(request, request.held_tokens)
        saved: list[Sequence[int]] = []
        for group in self._geometry.groups:
            storable = self._stores.full_blocks(request, group, storable_tokens)
            saved.append(self._store_policy.preempted(request.request_id, group.group, storable))
            # Generated tokens too, whose demand was not counted without ``store_decode``.
            self._demand.reach(request, group.group, max(saved[-1], default=-1) + 1)
        places, later = self._divide(request, saved)
        offers = self._still_held(self._offers.of_request(request, places, request.held_blocks), request, overwritten)
        self._work.spend(Kind.SAVES, len(offers.keys))
        # Never offered again: they are overwritten before room comes free.
        offers = offers._replace(positions=[-1] * len(offers.keys))
        # The copies come before all else of the step: nobody has to watch the blocks.
        owners = [request.request_id] * len(offers.keys)
        record = self._stores.store(offers, now, owners, watched=False).record
        for group, positions in zip(self._geometry.groups, later, strict=True):
            if positions:
                self._await_before(request.request_id, group, request.keys[group.group], positions, len(positions))
                rest = self._save_rest(request, group, request.held_blocks[group.group], positions, self._stores.losses)
                self._work.add(Kind.SAVES, (request, group.group), rest)
        request.forget_gpu_blocks()
        return None if record is None else record.job.id

    def _divide(
        self, request: RequestState, saved: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[int, int]], list[Sequence[int]]]:
        """Return which of a victim's blocks are saved at once, by group and position, and of each
        group which are later, ascending. ``saved``: of each group all."""
        groups, step = self._geometry.groups, self._geometry.alignment_tokens
        most = max(self._work.left(Kind.SAVES), len(groups))
        if not self._context.caches or sum(map(len, saved)) <= most:
            return [(group.group, at) for group in groups for at in saved[group.group]], [() for _ in groups]
        head_tokens = most // sum(step // group.block_tokens for group in groups) * step
        places: list[tuple[int, int]] = []
        later: list[Sequence[int]] = []
        for group, positions in zip(groups, saved, strict=True):
            first = bisect_left(positions, head_tokens // group.block_tokens)
            stop = self._safe_until(request, group, positions, first)
            places += [(group.group, at) for at in chain(positions[:first], positions[stop:])]
            if not group.reads_all:
                first = self._held_from(request, group, positions, first, stop)
            later.append(positions[first:stop])
        return places, later

    def _safe_until(self, request: RequestState, group: GroupGeometry, positions: Sequence[int], first: int) -> int:
        """Return up to which of a victim's blocks of a group, from the ``first`` on, the engine has
        given none away, nor does in its next step. vLLM: it frees the tail first, and gives away
        what it has freed first."""
        keys, blocks, each = request.keys[group.group], request.held_blocks[group.group], group.gpu_blocks
        stop, size = len(positions), max(1, self._context.step_blocks // each)
        while stop > first:
            some = positions[max(first, stop - size) : stop]
            stop = max(first, stop - size)
            # Of a unit the last block was freed first. It has the unit's key.
            lasts = [blocks[(at + 1) * each - 1] for at in some]
            named = zip(lasts, keys.of(some), strict=True)
            if all(self._context.get_block(block).key == key for block, key in named if block):
                break
        return stop

    def _held_from(
        self, request: RequestState, group: GroupGeometry, positions: Sequence[int], first: int, stop: int
    ) -> int:
        """Return from which on a victim may have had blocks of a window's group. vLLM: it has freed
        all behind the window, the last first."""
        each, blocks = group.gpu_blocks, request.held_blocks[group.group]
        while stop > first:
            start = max(first, stop - _STRETCH)
            if not any(blocks[positions[start] * each : (positions[stop - 1] + 1) * each]):
                break
            stop = start
        return stop

    def _still_held(self, offers: Offers, request: RequestState, overwritten: Collection[int]) -> Offers:
        """Return a victim's blocks without those that are ``overwritten``, and those that the
        engine may have given away in earlier steps: that no token reads any more."""
        # The table is noted again when the next block is full.
        most_tokens = (request.held_tokens // self._min_block_tokens + 1) * self._min_block_tokens - 1
        behind = [
            0 if group.reads_all else group.first_read(most_tokens) // group.gpu_block_tokens
            for group in self._geometry.groups
        ]
        if not overwritten and not any(behind):
            return offers
        kept: list[int] = []
        for at, (group, position, blocks) in enumerate(
            zip(offers.groups, offers.positions, offers.gpu_blocks, strict=True)
        ):
            left = max(0, behind[group] - position * len(blocks))
            named = zip(blocks[:left], request.keys[group].of_gpu(position) if left else (), strict=False)
            is_there = all(self._context.get_block(block).key == key for block, key in named)
            if is_there and not any(block in overwritten for block in blocks):
                kept.append(at)
        return offers.at(kept)

    def _save_rest(
        self,
        request: RequestState,
        group: GroupGeometry,
        blocks: Sequence[int],
        positions: Sequence[int],
        losses: int,
    ) -> Work:
        """Store a victim's blocks of a group from the tail on, while the engine has them cached.
        ``blocks``: the group's table, as it was. ``losses``: of the GPU's blocks by then: none of
        them may be stored after another."""
        keys, end = request.keys[group.group], len(positions)
        while end and losses == self._stores.losses:
            # At least as many as the engine may take in its next step.
            most = max(self._work.left(Kind.SAVES), self._context.step_blocks // group.gpu_blocks)
            start = max(0, end - most)
            offers = self._offers.named(request, group.group, blocks, positions[start:end])
            looked = max(1, len(offers.keys))
            offers = offers.at(self._offers.cached(offers))
            if offers.keys:
                self._stores.store_or_leave(offers)
            end = start
            self._await_before(request.request_id, group, keys, positions, end)
            yield looked

    def _await_before(
        self, request_id: str, group: GroupGeometry, keys: BlockKeys, positions: Sequence[int], end: int
    ) -> None:
        """Have those of a victim's blocks that are stored wait in the tier for those before them,
        of which the first ``end`` come later: nothing is refused behind these meanwhile."""
        dirty, name = self._target.dirty, (request_id, group.group)
        if dirty is not None:
            dirty.awaited.pop(name, None)
            row = self._catalog.rows_by_key((keys[positions[end - 1]],))[0] if end else NONE
            if row != NONE:
                dirty.awaited[name] = row

    def keys_changed(self, request: RequestState) -> None:
        """A request has another prompt: what waits for the blocks before it has none any more."""
        if self._target.dirty is not None:
            for group in range(len(request.keys)):
                self._target.dirty.awaited.pop((request.request_id, group), None)

    def reset(self) -> None:
        """Forget what waits for the blocks before it."""
        if self._target.dirty is not None:
            self._target.dirty.awaited.clear()
