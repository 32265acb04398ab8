# SPDX-License-Identifier: Apache-2.0
"""What is stored: the store policy's offers answered, and jobs for those taken. Scheduler thread only."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from itertools import compress
from typing import NamedTuple

from kvdisk.blocks import BlockKey, JobId, Slot, group_of
from kvdisk.geometry import GroupGeometry
from kvdisk.manager.admission import Demand
from kvdisk.manager.catalog import ABSENT
from kvdisk.manager.chains import NONE
from kvdisk.manager.jobs import MoveDetail, StoreSources
from kvdisk.manager.neighbours import NeighbourCopies
from kvdisk.manager.parts import Parts
from kvdisk.manager.requests import RequestState
from kvdisk.manager.store_policy import FreeOffer, Refusal, StorePolicy, own_method
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import JobKind, Move


class Table(NamedTuple):
    """A request's GPU blocks by group, 0 where it needs none, and how many of its tokens are computed in them.

    Of a group with a window the engine may have taken blocks since that lie wholly before the window.
    """

    computed_tokens: int
    block_ids: Sequence[Sequence[int]]


_EMPTY = Table(0, ())


MOST_LEFT = 4096
"""Blocks of requests that have ended which wait for a segment; the first that came are forgotten first."""
MOST_LEFT_OFFERS = 256
"""Of these, how many are offered in a step."""


class _Wanted(NamedTuple):
    """Blocks of one group of a request, ascending, that lack nothing but slots. ``blocks``: the group's block table."""

    group: GroupGeometry
    positions: Sequence[int]
    blocks: Sequence[int]


class _Taken(NamedTuple):
    """A block that has got a slot. ``group``, ``position``: its place in its request; -1: it is in none."""

    key: BlockKey
    parent: BlockKey | None
    gpu_block: int
    slot: Slot
    group: int = -1
    position: int = -1


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
        # None where the policy's is that of ``NoStores``.
        self._policy_reached = own_method(store_policy, "reached")
        self._policy_offers_free = own_method(store_policy, "free_offers")
        self._demand = demand
        self._sources = sources
        self._neighbours = neighbours
        self._generation = first_generation
        self._min_block_tokens = min(group.block_tokens for group in parts.geometry.groups)
        self._tables: dict[str, Table] = {}
        """What each running request held at its last step: a victim is named when its blocks have been freed."""
        self._left: deque[FreeOffer] = deque(maxlen=MOST_LEFT)
        """Blocks that waited for room when their requests ended, by request in the order of the prompt."""
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
        self._tables[request.request_id] = Table(computed_tokens, block_ids)
        storable_tokens = self._storable_tokens(request, computed_tokens)
        wanted = []
        for group in self._geometry.groups:
            keys, blocks = request.keys[group.group], block_ids[group.group]
            final_tokens = min(storable_tokens, max(0, computed_tokens - group.volatile_last))
            storable = min(final_tokens // group.block_tokens, len(keys), len(blocks))
            first = min(known_tokens // group.block_tokens, storable)
            self._note_reached(request, keys, first, storable)
            offers = self._store_policy.offers(request.request_id, group.group, storable, self._state.released, now)
            if offers:
                wanted.append(_Wanted(group, self._answer(request, group.group, offers, blocks, now), blocks))
        taken = self._take(request, wanted, now)
        self._queue(taken, request)

    def _storable_tokens(self, request: RequestState, computed_tokens: int) -> int:
        if request.store_limit_tokens is not None:
            computed_tokens = min(computed_tokens, request.store_limit_tokens)
        return computed_tokens if self._config.store_decode else min(computed_tokens, request.prompt_tokens)

    def _note_reached(self, request: RequestState, keys: Sequence[BlockKey], start: int, stop: int) -> None:
        """Record that a request reached these blocks: count the demand and refresh recency.

        Offer those that a tier has to the next one again: their count may have risen.
        """
        if start == stop:
            return
        if self._policy_reached is not None:
            self._policy_reached(request.request_id, keys, start, stop)
        wanted, catalog = keys[start:stop], self._catalog
        self._demand.count_demand(wanted, request.request_id)
        used = [row for row in catalog.find_all(wanted) if catalog.is_coming(row)]
        if not used:
            return
        for space in self._tiers:
            if space.lower is not None:
                space.lower.offer(used)
        used.reverse()  # the head last, so that it leaves last
        for space in self._tiers:
            space.reached(used)

    def restarted(self, request_id: str) -> None:
        """What a request has computed is gone: it begins anew."""
        self._tables.pop(request_id, _EMPTY)
        self._store_policy.request_finished(request_id)

    def finished(self, request: RequestState) -> None:
        """Forget a request; what of it waits for a segment may still be stored while the engine has it cached.

        Not what waits for a budget, or for others to leave: that room is for the requests that live.
        """
        can_wait = not request.loading and not request.stale
        if self._target.has_room_soon and can_wait and self._store_policy.waits(request.request_id):
            self._left.extend(self._unstored(request))
            self._left_at = -1
        self.restarted(request.request_id)

    def _unstored(self, request: RequestState) -> list[FreeOffer]:
        """Return a request's blocks that no tier has or gets, in the order of its prompt."""
        table, found = self._tables.get(request.request_id, _EMPTY), []
        storable_tokens = self._storable_tokens(request, table.computed_tokens)
        for group, blocks in zip(self._geometry.groups, table.block_ids, strict=False):
            final_tokens = min(storable_tokens, max(0, table.computed_tokens - group.volatile_last))
            keys = request.keys[group.group][: final_tokens // group.block_tokens]
            for position, (key, row, block) in enumerate(zip(keys, self._catalog.find_all(keys), blocks, strict=False)):
                if block and not self._is_there(key, row):
                    parent = keys[position - 1] if position else None
                    found.append(((position + 1) * group.block_tokens, FreeOffer(block, key, parent)))
        found.sort(key=lambda one: one[0])
        return [offer for _, offer in found]

    def has_leftovers(self, now: float) -> bool:
        """Whether blocks of requests that have ended wait for room, and some may have come free."""
        return bool(self._left) and self._state.released > self._left_at and self._target.may_write(now)

    def reset(self) -> None:
        """What requests hold, or have left in the engine's cache, may be wrong: nothing is saved or stored of it, but
        of what they are seen to have computed from now on."""
        self._tables.clear()
        self._left.clear()
        self._store_policy.reset()

    # -- preemption ----------------------------------------------------------------------------

    def save(self, request: RequestState, overwritten: Collection[int], now: float) -> JobId | None:
        """Plan the store of what a preempted request has lost; return its job, which is urgent, if there is one.

        Its blocks may be somebody else's by now.
        ``overwritten``: blocks that the step has written to by the time that the job can begin.
        """
        table = self._tables.pop(request.request_id, _EMPTY)
        if request.stale or not table.block_ids:
            return None
        wanted = []
        computed_tokens = table.computed_tokens
        if request.store_limit_tokens is not None:
            computed_tokens = min(computed_tokens, request.store_limit_tokens)
        for group in self._geometry.groups:
            keys = request.keys[group.group]
            blocks = [0 if block in overwritten else block for block in table.block_ids[group.group]]
            final_tokens = max(0, computed_tokens - group.volatile_last)
            storable = min(final_tokens // group.block_tokens, len(keys), len(blocks))
            self._leave_out_what_has_gone(group, keys, blocks, table.computed_tokens)
            offers = self._store_policy.preempted(request.request_id, group.group, storable)
            # Generated tokens too, which nobody has been told of without ``store_decode``.
            self._demand.count_demand([keys[position] for position in offers], request.request_id)
            wanted.append(_Wanted(group, self._answer(request, group.group, offers, blocks, now), blocks))
        # The copies come before all else of the step: nobody has to watch the blocks.
        return self._queue(self._take(request, wanted, now), request, watched=False)

    def _leave_out_what_has_gone(
        self, group: GroupGeometry, keys: Sequence[BlockKey], blocks: list[int], computed_tokens: int
    ) -> None:
        """Set blocks to 0 that the engine may have given away in earlier steps: those that are behind the window."""
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
        """Offer free blocks to the tiers, if the store policy wants to, or if they have waited for room since their
        requests ended; plan a job for those taken."""
        if self._left and self._state.released > self._left_at:
            self._plan_left(now)
        if self._policy_offers_free is None:
            return
        for offer in self._plan_offers(self._policy_offers_free(self._context, self._state.released, now), now):
            self._refuse_free(offer, Refusal.NO_ROOM, self._state.released, now)

    def _plan_left(self, now: float) -> None:
        left, block_of = self._left, self._context.get_block
        offers = [left.popleft() for _ in range(min(MOST_LEFT_OFFERS, len(left)))]
        # One request may have left what another has left, too.
        cached = {offer.key: offer for offer in offers if block_of(offer.block).key == offer.key}
        refused = self._plan_offers([*cached.values()], now)
        left.extendleft(reversed(refused))
        if refused:
            self._left_at = self._state.released

    def _plan_offers(self, offers: Sequence[FreeOffer], now: float) -> list[FreeOffer]:
        """Answer offers of cached blocks, and plan a job for those taken; return those refused for lack of room."""
        policy, lacking = self._store_policy, []
        wanted: dict[int, list[FreeOffer]] = {}
        for offer in offers:
            row = self._catalog.find(offer.key)
            if self._is_there(offer.key, row):
                policy.accept_free(offer.key)
            elif not self._target.admission.admits((offer.key,))[0]:
                self._refuse_free(offer, Refusal.NOT_REUSED, 0, now)
            elif row >= 0 and self._catalog.state(row, self._target.tier) != ABSENT:
                lacking.append(offer)
            else:
                wanted.setdefault(self._geometry.size_classes[group_of(offer.key)], []).append(offer)
        taken = []
        for size_class, alike in wanted.items():
            slots = self._allocate(size_class, len(alike), now)
            for offer, slot in zip(alike, slots, strict=False):
                policy.accept_free(offer.key)
                taken.append(_Taken(offer.key, offer.parent, offer.block, slot))
            lacking += alike[len(slots) :]
        self._queue(taken, None)
        return lacking

    def _refuse_free(self, offer: FreeOffer, why: Refusal, released: int, now: float) -> None:
        self._count_refusal(why)
        self._store_policy.refuse_free(offer.key, why, released, now)

    # -- answers -------------------------------------------------------------------------------

    def _is_there(self, key: BlockKey, row: int) -> bool:
        """Whether a block needs no store: a tier has or gets it, or a neighbour has it as near as the tier is."""
        return self._catalog.is_coming(row) or (self._target.holds_neighbours and self._neighbours.holds(key))

    def _answer(
        self, request: RequestState, group: int, offers: Sequence[int], blocks: Sequence[int], now: float
    ) -> Sequence[int]:
        """Answer one group's offers that need no slot: accept (there, or no block) or refuse. Return the rest."""
        keys, states = request.keys[group], self._catalog.columns(self._target.tier).states
        rows = self._catalog.find_all([keys[position] for position in offers])
        there: list[int] = []
        others: list[int] = []
        busy: set[int] = set()
        for position, row in zip(offers, rows, strict=True):
            if blocks[position] == 0 or self._is_there(keys[position], row):
                there.append(position)
            else:
                others.append(position)
                if row >= 0 and states[row] != ABSENT:
                    busy.add(position)
        if there:
            self._store_policy.accept(request.request_id, group, there)
        admitted = self._ask_admission(request, group, others)
        if not busy:
            return admitted
        self._refuse_for_room(request, group, [position for position in admitted if position in busy], now)
        return [position for position in admitted if position not in busy]

    def _ask_admission(self, request: RequestState, group: int, positions: Sequence[int]) -> Sequence[int]:
        """Return which of the offered blocks may enter; refuse the rest."""
        admission = self._target.admission
        if admission.is_open:
            return positions  # no question for each
        keys = request.keys[group]
        answers = admission.admits([keys[position] for position in positions])
        refused = [position for position, admitted in zip(positions, answers, strict=True) if not admitted]
        if refused:
            self._count_refusal(Refusal.NOT_REUSED, len(refused))
            unused = [keys[position] for position in refused]
            self._store_policy.refuse(request.request_id, group, refused, unused, Refusal.NOT_REUSED, 0, 0.0)
        return list(compress(positions, answers))

    def _count_refusal(self, why: Refusal, count: int = 1) -> None:
        if why is Refusal.NOT_REUSED:
            self._stats.add("refused_blocks.reuse", count)
        else:
            self._stats.add("refused_blocks.budget" if self._target.is_spent else "refused_blocks.room", count)

    def _refuse_for_room(self, request: RequestState, group: int, positions: Sequence[int], now: float) -> None:
        if positions:
            self._count_refusal(Refusal.NO_ROOM, len(positions))
            refused, released = [request.keys[group][position] for position in positions], self._state.released
            self._store_policy.refuse(request.request_id, group, positions, refused, Refusal.NO_ROOM, released, now)

    def _take(self, request: RequestState, wanted: Sequence[_Wanted], now: float) -> list[_Taken]:
        """Return as many blocks as get slots, from the prompt's head on in all groups alike; refuse the rest."""
        wanted = [one for one in wanted if one.positions]
        if not wanted:
            return []
        found: list[_Taken] = []
        counts, slots = self._divide(request, wanted, now)
        for (group, positions, blocks), count in zip(wanted, counts, strict=True):
            # Slices: what was offered may be the policy's own list, which it may change once it hears of it.
            accepted, refused = positions[:count], positions[count:]
            if accepted:
                keys, free = request.keys[group.group], slots[self._geometry.size_classes[group.group]]
                self._store_policy.accept(request.request_id, group.group, accepted)
                for position, slot in zip(accepted, free, strict=False):
                    parent = keys[position - 1] if position else None
                    found.append(_Taken(keys[position], parent, blocks[position], slot, group.group, position))
                del free[:count]
            self._refuse_for_room(request, group.group, refused, now)
        return found

    def _queue(self, taken: Sequence[_Taken], request: RequestState | None, *, watched: bool = True) -> JobId | None:
        """Begin copies, and plan the job that writes them; return it, None where there are none.

        ``request``: whose they are, if anybody's. ``watched``: have the engine name those of its blocks that it reuses.
        """
        if not taken:
            return None
        catalog, tier = self._catalog, self._target.tier
        rows, slots, moves, details = [], [], [], []
        for key, parent, gpu_block, slot, group, position in taken:
            row = catalog.find(key)
            if row < 0:
                self._generation += 1
                row = catalog.add(key, self._generation, self._state.epoch, parent)
            rows.append(row)
            slots.append(slot)
            moves.append(Move(key, catalog.generations[row], gpu_block, {tier: slot}, parent))
            details.append(MoveDetail(row, group, position, None, tier))
        catalog.begin(rows, tier, slots)
        request_id = None if request is None else request.request_id
        record = self._transfers.add(JobKind.STORE, moves, details, epoch=self._state.epoch, request_id=request_id)
        if watched:
            self._sources.add(record)
        return record.job.id

    def _divide(
        self, request: RequestState, wanted: Sequence[_Wanted], now: float
    ) -> tuple[list[int], dict[int, list[Slot]]]:
        """Take slots; return for how many blocks of each group they are, and the slots by size class.

        A hit needs the blocks of all groups: where some group's slots do not suffice, no other gets more of the prompt.
        """
        classes = [self._geometry.size_classes[one.group.group] for one in wanted]
        tails = self._pin_tails(request, wanted)
        if len(wanted) == 1:
            slots = {classes[0]: self._allocate(classes[0], len(wanted[0].positions), now)}
            counts = [len(slots[classes[0]])]
        else:
            ends = [
                ((position + 1) * one.group.block_tokens, at)
                for at, one in enumerate(wanted)
                for position in one.positions
            ]
            line = [at for _, at in sorted(ends)]  # in the order of the prompt
            needed = Counter(classes[at] for at in line)
            slots = {size_class: self._allocate(size_class, needed[size_class], now) for size_class in needed}
            left, counts = {size_class: len(found) for size_class, found in slots.items()}, [0] * len(wanted)
            for at in line:
                if not left[classes[at]]:
                    break
                left[classes[at]] -= 1
                counts[at] += 1
            for size_class, surplus in left.items():
                if surplus:
                    self._target.give_back(size_class, slots[size_class][-surplus:])
                    del slots[size_class][-surplus:]
        self._catalog.unpin(tails, self._target.tier)
        return counts, slots

    def _pin_tails(self, request: RequestState, wanted: Sequence[_Wanted]) -> list[int]:
        """Pin what is stored right before the wanted blocks, and return the rows: it does not leave for these.

        Only where that is the only copy. What is before a copy stays as long as that does.
        """
        tails: list[int] = []
        for group, positions, _ in wanted:
            row = self._catalog.find(request.keys[group.group][positions[0] - 1]) if positions[0] else NONE
            if row != NONE and self._catalog.is_only_in(self._target.tier, row):
                tails.append(row)
        self._catalog.pin(tails, self._target.tier)
        return tails

    def _allocate(self, size_class: int, count: int, now: float) -> list[Slot]:
        return self._target.allocate(size_class, count) if self._target.may_write(now) else []
