# SPDX-License-Identifier: Apache-2.0
"""What is stored: offers of the store policy are answered, and a job is planned for those taken.

There are three ways in: ``plan`` (what a running request has computed), ``save`` (what a preemption
takes away) and ``plan_free`` (free blocks of the engine's cache). Each sorts its blocks by what
becomes of them (``_sort``), takes slots of the first tier, and queues a job (``_queue``). Scheduler
thread only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvdisk.blocks import BlockKey, JobId, Slot, group_of
from kvdisk.geometry import GroupGeometry
from kvdisk.manager.admission import Demand
from kvdisk.manager.catalog import ABSENT, NONE
from kvdisk.manager.jobs import MoveDetail, StoreSources
from kvdisk.manager.neighbours import NeighbourCopies
from kvdisk.manager.parts import Parts
from kvdisk.manager.requests import RequestState
from kvdisk.manager.store_policy import FreeOffer, Refusal, StorePolicy
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import JobKind, Move

MOST_LEFT = 4096
"""Blocks of requests that have ended which wait for a segment; the first that came are forgotten
first."""
MOST_LEFT_OFFERS = 256
"""Of these, how many are offered in a step."""


class Table(NamedTuple):
    """A request's GPU blocks by group, 0 where it needs none, and how many of its tokens are
    computed in them.

    Of a group with a window the engine may have taken blocks since that lie wholly before the
    window.
    """

    computed_tokens: int
    block_ids: Sequence[Sequence[int]]


_EMPTY = Table(0, ())


class _Block(NamedTuple):
    """A block that is offered. ``position``: in its group of its request; -1: it is in no
    request."""

    key: BlockKey
    parent: BlockKey | None
    gpu_block: int
    group: int
    position: int = -1


class _Sorted(NamedTuple):
    """Offered blocks by what becomes of them: there already (or gone from the GPU), not admitted,
    without room now because the tier is just dropping a copy, and those that lack nothing but a
    slot."""

    there: list[_Block]
    unused: list[_Block]
    busy: list[_Block]
    wanted: list[_Block]


class StorePlanner:
    """Takes offers into slots of the first tier, and has their GPU blocks watched.

    ``first_generation``: larger than any that this engine's store has seen.
    """

    def __init__(
        self,
        parts: Parts,
        tiers: Tiers,
        store_policy: StorePolicy,
        demand: Demand,
        sources: StoreSources,
        neighbours: NeighbourCopies,
        first_generation: int,
    ) -> None:
        self._config = parts.config
        self._geometry = parts.geometry
        self._context = parts.context
        self._catalog = parts.catalog
        self._transfers = parts.transfers
        self._stats = parts.stats
        self._state = parts.state
        self._tiers = tiers
        self._target = tiers.first
        self._store_policy = store_policy
        self._demand = demand
        self._sources = sources
        self._neighbours = neighbours
        self._generation = first_generation
        self._min_block_tokens = min(group.block_tokens for group in parts.geometry.groups)
        self._tables: dict[str, Table] = {}
        """What each running request held at its last step: a victim is named when its blocks have
        been freed."""
        self._left: deque[FreeOffer] = deque(maxlen=MOST_LEFT)
        """Blocks that waited for room when their requests ended, by request in the order of the
        prompt."""
        self._left_at = -1
        """The number of ``released`` when these were last offered."""

    # -- what requests have computed ------------------------------------------------------------

    def may_offer(self, request: RequestState, computed_tokens: int) -> bool:
        """See ``TierManager.may_offer``."""
        if request.loading or request.stale:
            return False
        if not self._store_policy.saves_victims:
            computed_tokens = self._storable_tokens(request, computed_tokens)
        known_tokens = self._tables.get(request.request_id, _EMPTY).computed_tokens
        new_blocks = computed_tokens // self._min_block_tokens > known_tokens // self._min_block_tokens
        return new_blocks or self._store_policy.waits(request.request_id)

    def plan(self, request: RequestState, computed_tokens: int, block_ids: Sequence[Sequence[int]], now: float) -> None:
        """See ``TierManager.plan_store``."""
        if request.loading or request.stale:
            return
        request.update_keys(self._geometry)
        known_tokens = self._tables.get(request.request_id, _EMPTY).computed_tokens
        table = self._tables[request.request_id] = Table(computed_tokens, block_ids)
        storable_tokens = self._storable_tokens(request, computed_tokens)
        wanted = []
        for group in self._geometry.groups:
            storable = self._full_blocks(request, group, table, storable_tokens)
            self._count_reached(request, group, min(known_tokens // group.block_tokens, storable), storable)
            offers = self._store_policy.offers(request.request_id, group.group, storable, self._state.released, now)
            wanted.append(self._answer(request, group, offers, block_ids[group.group], now))
        self._queue(self._take(request, wanted, now), request)

    def _storable_tokens(self, request: RequestState, computed_tokens: int) -> int:
        if request.store_limit_tokens is not None:
            computed_tokens = min(computed_tokens, request.store_limit_tokens)
        return computed_tokens if self._config.store_decode else min(computed_tokens, request.prompt_tokens)

    def _full_blocks(self, request: RequestState, group: GroupGeometry, table: Table, storable_tokens: int) -> int:
        """Return how many blocks of a group are full, final and hashed, within
        ``storable_tokens``."""
        final_tokens = min(storable_tokens, max(0, table.computed_tokens - group.volatile_last))
        known = min(len(request.keys[group.group]), len(table.block_ids[group.group]))
        return min(final_tokens // group.block_tokens, known)

    def _count_reached(self, request: RequestState, group: GroupGeometry, start: int, stop: int) -> None:
        """Record that a request reached these blocks: count the demand and refresh recency.

        Offer those that a tier has to the next one again: their count may have risen.
        """
        if start == stop:
            return
        keys, catalog = request.keys[group.group], self._catalog
        self._store_policy.reached(request.request_id, keys, start, stop)
        self._demand.count_demand(keys[start:stop], request.request_id)
        used = [row for row in catalog.find_all(keys[start:stop]) if catalog.is_coming(row)]
        if not used:
            return
        for space in self._tiers:
            if space.lower is not None:
                space.lower.offer(used)
        used.reverse()  # the head last, so that it leaves last
        for space in self._tiers:
            space.reached(used)

    def restarted(self, request_id: str) -> None:
        """Forget what a request has computed: it begins anew."""
        self._tables.pop(request_id, None)
        self._store_policy.request_finished(request_id)

    def finished(self, request: RequestState) -> None:
        """Forget a request; what of it waits for a segment may still be stored while the engine has
        it cached.

        Not what waits for a budget, or for others to leave: that room is for the requests that
        live.
        """
        can_wait = not request.loading and not request.stale
        if self._target.status.has_room_soon and can_wait and self._store_policy.waits(request.request_id):
            self._left.extend(self._unstored(request))
            self._left_at = -1
        self.restarted(request.request_id)

    def _unstored(self, request: RequestState) -> list[FreeOffer]:
        """Return a request's blocks that no tier has or gets, in the order of its prompt."""
        table, found = self._tables.get(request.request_id, _EMPTY), []
        if not table.block_ids:
            return []
        storable_tokens = self._storable_tokens(request, table.computed_tokens)
        for group in self._geometry.groups:
            count = self._full_blocks(request, group, table, storable_tokens)
            for block in self._blocks(request, group, range(count), table.block_ids[group.group]):
                if block.gpu_block and not self._is_there(block.key, self._catalog.find(block.key)):
                    end_tokens = (block.position + 1) * group.block_tokens
                    found.append((end_tokens, FreeOffer(block.gpu_block, block.key, block.parent)))
        found.sort(key=lambda one: one[0])
        return [offer for _, offer in found]

    def has_leftovers(self, now: float) -> bool:
        """Whether blocks of requests that have ended wait for room, and some may have come free."""
        return bool(self._left) and self._state.released > self._left_at and self._target.refresh_writable(now)

    def reset(self) -> None:
        """Forget what requests hold, or have left in the engine's cache: it may be wrong.

        What they are seen to compute from now on is stored again.
        """
        self._tables.clear()
        self._left.clear()
        self._store_policy.reset()

    # -- preemption ----------------------------------------------------------------------------

    def save(self, request: RequestState, overwritten: Collection[int], now: float) -> JobId | None:
        """Plan the store of what a preempted request has lost; return its job, which is urgent, if
        there is one.

        Its blocks may be somebody else's by now.
        ``overwritten``: blocks that the step has written to by the time that the job can begin.
        """
        table = self._tables.pop(request.request_id, _EMPTY)
        if request.stale or not table.block_ids:
            return None
        wanted = []
        storable_tokens = table.computed_tokens
        if request.store_limit_tokens is not None:
            storable_tokens = min(storable_tokens, request.store_limit_tokens)
        for group in self._geometry.groups:
            keys = request.keys[group.group]
            blocks = [0 if block in overwritten else block for block in table.block_ids[group.group]]
            self._leave_out_what_has_gone(group, keys, blocks, table.computed_tokens)
            storable = self._full_blocks(request, group, table, storable_tokens)
            offers = self._store_policy.preempted(request.request_id, group.group, storable)
            # Generated tokens too, whose demand was not counted without ``store_decode``.
            self._demand.count_demand([keys[position] for position in offers], request.request_id)
            wanted.append(self._answer(request, group, offers, blocks, now))
        # The copies come before all else of the step: nobody has to watch the blocks.
        return self._queue(self._take(request, wanted, now), request, watched=False)

    def _leave_out_what_has_gone(
        self, group: GroupGeometry, keys: Sequence[BlockKey], blocks: list[int], computed_tokens: int
    ) -> None:
        """Set blocks to 0 that the engine may have given away in earlier steps: those that are
        behind the window."""
        if group.window_tokens is None:
            return
        # The table is noted again when the next block is full.
        most_tokens = (computed_tokens // self._min_block_tokens + 1) * self._min_block_tokens - 1
        behind = max(0, most_tokens - group.window_tokens + 1) // group.block_tokens
        for position in range(min(behind, len(blocks), len(keys))):
            if blocks[position] and self._context.get_block(blocks[position]).key != keys[position]:
                blocks[position] = 0

    # -- free blocks ---------------------------------------------------------------------------

    def plan_free(self, now: float) -> None:
        """Store free blocks that the store policy offers, and those left by requests that ended
        before there was room.

        The latter only where room may have come free since they were refused.
        """
        if self._left and self._state.released > self._left_at:
            left, block_of = self._left, self._context.get_block
            offers = [left.popleft() for _ in range(min(MOST_LEFT_OFFERS, len(left)))]
            # One request may have left what another has left, too.
            cached = {offer.key: offer for offer in offers if block_of(offer.block).key == offer.key}
            refused = self._store_free(cached.values(), now)
            left.extendleft(reversed(refused))
            if refused:
                self._left_at = self._state.released
        free = self._store_policy.free_offers(self._context, self._state.released, now)
        for offer in self._store_free(free, now):
            self._refuse_free(offer.key, Refusal.NO_ROOM, self._state.released, now)

    def _store_free(self, offers: Iterable[FreeOffer], now: float) -> list[FreeOffer]:
        """Answer offers of cached blocks, and plan a job for those taken; return those refused for
        lack of room."""
        blocks = [_Block(offer.key, offer.parent, offer.block, group_of(offer.key)) for offer in offers]
        found = self._sort(blocks)
        for block in found.there:
            self._store_policy.accept_free(block.key)
        for block in found.unused:
            self._refuse_free(block.key, Refusal.NOT_REUSED, 0, now)
        lacking, taken = found.busy, []
        by_class: dict[int, list[_Block]] = {}
        for block in found.wanted:
            by_class.setdefault(self._geometry.size_classes[block.group], []).append(block)
        for size_class, alike in by_class.items():
            slots = self._allocate(size_class, len(alike), now)
            for block, slot in zip(alike, slots, strict=False):
                self._store_policy.accept_free(block.key)
                taken.append((block, slot))
            lacking += alike[len(slots) :]
        self._queue(taken, None)
        return [FreeOffer(block.gpu_block, block.key, block.parent) for block in lacking]

    def _refuse_free(self, key: BlockKey, why: Refusal, released: int, now: float) -> None:
        self._count_refusal(why, 1)
        self._store_policy.refuse_free(key, why, released, now)

    # -- answers -------------------------------------------------------------------------------

    def _blocks(
        self, request: RequestState, group: GroupGeometry, positions: Sequence[int], gpu_blocks: Sequence[int]
    ) -> list[_Block]:
        keys, number = request.keys[group.group], group.group
        return [_Block(keys[at], keys[at - 1] if at else None, gpu_blocks[at], number, at) for at in positions]

    def _is_there(self, key: BlockKey, row: int) -> bool:
        """Whether a block needs no store: a tier has or gets it, or a neighbour has it as near as
        the tier is."""
        return self._catalog.is_coming(row) or self._neighbours.holds(key, self._target.tier)

    def _sort(self, blocks: Sequence[_Block]) -> _Sorted:
        """Sort offered blocks by what becomes of them; each list keeps the order."""
        found = _Sorted([], [], [], [])
        states = self._catalog.columns(self._target.tier).states
        others = []
        for block, row in zip(blocks, self._catalog.find_all([block.key for block in blocks]), strict=True):
            if block.gpu_block == 0 or self._is_there(block.key, row):
                found.there.append(block)
            else:
                others.append((block, row))
        answers = self._target.admission.admits([block.key for block, _ in others])
        for (block, row), admitted in zip(others, answers, strict=True):
            if not admitted:
                found.unused.append(block)
            elif row >= 0 and states[row] != ABSENT:
                found.busy.append(block)
            else:
                found.wanted.append(block)
        return found

    def _answer(
        self, request: RequestState, group: GroupGeometry, offers: Sequence[int], blocks: Sequence[int], now: float
    ) -> list[_Block]:
        """Answer those of one group's offers that need no slot; return the others."""
        if not offers:
            return []
        found = self._sort(self._blocks(request, group, offers, blocks))
        self._accept(request, found.there)
        self._refuse(request, found.unused, Refusal.NOT_REUSED, 0.0)
        self._refuse(request, found.busy, Refusal.NO_ROOM, now)
        return found.wanted

    def _accept(self, request: RequestState, blocks: Sequence[_Block]) -> None:
        """Tell the policy that blocks of one group are taken, or there."""
        if blocks:
            self._store_policy.accept(request.request_id, blocks[0].group, [block.position for block in blocks])

    def _refuse(self, request: RequestState, blocks: Sequence[_Block], why: Refusal, now: float) -> None:
        """Tell the policy that blocks of one group are refused."""
        if blocks:
            self._count_refusal(why, len(blocks))
            positions, keys = [block.position for block in blocks], [block.key for block in blocks]
            released = self._state.released if why is Refusal.NO_ROOM else 0
            self._store_policy.refuse(request.request_id, blocks[0].group, positions, keys, why, released, now)

    def _count_refusal(self, why: Refusal, count: int) -> None:
        if why is Refusal.NOT_REUSED:
            self._stats.add("refused_blocks.reuse", count)
        else:
            self._stats.add("refused_blocks.budget" if self._target.status.is_spent else "refused_blocks.room", count)

    # -- slots and jobs ------------------------------------------------------------------------

    def _take(self, request: RequestState, wanted: Sequence[list[_Block]], now: float) -> list[tuple[_Block, Slot]]:
        """Take slots for blocks of each group, from the prompt's head on in all groups alike;
        refuse the rest.

        A hit needs the blocks of all groups: where some group's slots do not suffice, no other gets
        more of the prompt. What is stored right before them is pinned meanwhile: it does not leave
        for these.
        """
        wanted = [blocks for blocks in wanted if blocks]
        if not wanted:
            return []
        tails = self._pin_tails(wanted)
        groups, classes = self._geometry.groups, self._geometry.size_classes
        needed = Counter({classes[group.group]: 0 for group in groups})
        for blocks in wanted:
            needed[classes[blocks[0].group]] += len(blocks)
        free = {size_class: self._allocate(size_class, count, now) for size_class, count in needed.items() if count}
        self._catalog.unpin(tails, self._target.tier)
        counts = self._divide(wanted, {size_class: len(slots) for size_class, slots in free.items()})
        taken: list[tuple[_Block, Slot]] = []
        for blocks, count in zip(wanted, counts, strict=True):
            slots = free[classes[blocks[0].group]]
            self._accept(request, blocks[:count])
            taken += zip(blocks[:count], slots, strict=False)
            del slots[:count]
            self._refuse(request, blocks[count:], Refusal.NO_ROOM, now)
        for size_class, surplus in free.items():
            if surplus:
                self._target.give_back(size_class, surplus)
        return taken

    def _divide(self, wanted: Sequence[list[_Block]], free: dict[int, int]) -> list[int]:
        """Return how many blocks of each group get one of the free slots, in the order of the
        prompt."""
        classes, groups = self._geometry.size_classes, self._geometry.groups
        if len(wanted) == 1:
            return [min(len(wanted[0]), free[classes[wanted[0][0].group]])]
        line = [
            ((block.position + 1) * groups[block.group].block_tokens, at)
            for at, blocks in enumerate(wanted)
            for block in blocks
        ]
        counts = [0] * len(wanted)
        for _, at in sorted(line):
            size_class = classes[wanted[at][0].group]
            if not free[size_class]:
                break
            free[size_class] -= 1
            counts[at] += 1
        return counts

    def _pin_tails(self, wanted: Sequence[Sequence[_Block]]) -> list[int]:
        """Pin what is stored right before the wanted blocks, where that is the only copy; return
        the rows.

        What is before a copy stays as long as that does.
        """
        parents = [blocks[0].parent for blocks in wanted]
        rows = [NONE if parent is None else self._catalog.find(parent) for parent in parents]
        tails = [row for row in rows if row != NONE and self._catalog.is_only_in(self._target.tier, row)]
        self._catalog.pin(tails, self._target.tier)
        return tails

    def _allocate(self, size_class: int, count: int, now: float) -> list[Slot]:
        return self._target.allocate(size_class, count) if self._target.refresh_writable(now) else []

    def _queue(
        self, taken: Sequence[tuple[_Block, Slot]], request: RequestState | None, *, watched: bool = True
    ) -> JobId | None:
        """Begin copies, and plan the job that writes them; return it, None where there are none.

        ``request``: whose they are, if anybody's. ``watched``: have the engine name those of its
        blocks that it reuses.
        """
        if not taken:
            return None
        catalog, tier = self._catalog, self._target.tier
        rows, moves, details = [], [], []
        for (key, parent, gpu_block, group, position), slot in taken:
            row = catalog.find(key)
            if row < 0:
                self._generation += 1
                row = catalog.add(key, self._generation, self._state.epoch, parent)
            rows.append(row)
            moves.append(Move(key, catalog.generations[row], gpu_block, {tier: slot}, parent))
            details.append(MoveDetail(row, group, position, None, tier))
        catalog.begin(rows, tier, [slot for _, slot in taken])
        request_id = None if request is None else request.request_id
        record = self._transfers.add(JobKind.STORE, moves, details, epoch=self._state.epoch, request_id=request_id)
        if watched:
            self._sources.add(record)
        return record.job.id
