# SPDX-License-Identifier: Apache-2.0
"""What is stored: the store policy's offers answered, and jobs for those taken. Scheduler thread only."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import compress, repeat
from typing import NamedTuple

from kvdisk.blocks import CPU, NVME, BlockKey, JobId, Slot, Tier, group_of, new_tuple
from kvdisk.config import Config
from kvdisk.context import SchedulerContext
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.admission import AdmissionPolicy, Wants
from kvdisk.manager.catalog import ABSENT, READY, Catalog
from kvdisk.manager.chains import NONE
from kvdisk.manager.demotions import NvmeOffers
from kvdisk.manager.jobs import MoveDetail, StoreSources, Transfers, make_details
from kvdisk.manager.lookup import is_coming
from kvdisk.manager.neighbours import ForeignCopies
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.requests import RequestState
from kvdisk.manager.settlement import Settlement
from kvdisk.manager.store_policy import FreeOffer, Refusal, StorePolicy, own_method
from kvdisk.manager.tiers import CpuSpace
from kvdisk.messages import JobKind, Move, make_moves
from kvdisk.stats import Stats


class Table:
    """A request's GPU blocks by group, 0 where it needs none, and how many of its tokens are computed in them.

    Never changed. Of a group with a window the engine may have taken blocks since that lie wholly before the window.
    """

    def __init__(self, computed_tokens: int, block_ids: Sequence[Sequence[int]]) -> None:
        self.computed_tokens = computed_tokens
        self.block_ids = block_ids


EMPTY = Table(0, ())


class BlockTables:
    """The tables of requests that have been scheduled. A victim is named when its blocks have been freed already."""

    def __init__(self) -> None:
        self._tables: dict[str, Table] = {}

    def get(self, request_id: str) -> Table:
        """Return a request's table; ``EMPTY`` where it holds nothing that is known."""
        return self._tables.get(request_id, EMPTY)

    def put(self, request_id: str, table: Table) -> Table:
        """Note what a request holds from now on; return what ``get`` would have returned."""
        before = self._tables.get(request_id, EMPTY)
        self._tables[request_id] = table
        return before

    def take(self, request_id: str) -> Table:
        """Forget a request's table, and return it."""
        return self._tables.pop(request_id, EMPTY)

    def clear(self) -> None:
        """Forget all: what the blocks hold is of no use any more."""
        self._tables.clear()


NO_PLACE: tuple[int, Iterable[int]] = (-1, repeat(-1))
"""Of free blocks: in no request."""


class StoreDraft:
    """A job in the making. ``request``: whose blocks it stores; None: nobody's, they are free."""

    def __init__(self, request: RequestState | None, epoch: int) -> None:
        self.request = request
        self.epoch = epoch
        self.moves: list[Move] = []
        self.details: list[MoveDetail] = []


class StoreDrafts:
    """Fills drafts, and queues them. ``target``: the tier that stores go to.

    ``first_generation``: larger than any that this home has seen.
    """

    def __init__(
        self,
        catalog: Catalog,
        transfers: Transfers,
        sources: StoreSources,
        target: Tier,
        first_generation: int,
    ) -> None:
        self._catalog = catalog
        self._transfers = transfers
        self._sources = sources
        self._target = target
        self._generation = first_generation

    def begin(
        self,
        draft: StoreDraft,
        keys: Sequence[BlockKey],
        parents: Sequence[BlockKey | None],
        blocks: Sequence[int],
        slots: Sequence[Slot],
        place: tuple[int, Iterable[int]],
        *,
        are_new: bool = False,
    ) -> None:
        """Begin copies in slots, and add their moves. ``place``: their group, and their positions in the request.

        ``are_new``: the catalog is known to have none of the keys. It has a copy of none of them in the target.
        """
        catalog = self._catalog
        if are_new:
            first = self._generation + 1
            rows = catalog.begin_new(keys, first, draft.epoch, parents, self._target, slots)
            self._generation += len(rows)
        else:
            rows = catalog.find_all(keys)
            for at, row in enumerate(rows):
                if row < 0:
                    self._generation += 1
                    rows[at] = catalog.add(keys[at], self._generation, draft.epoch, parents[at])
            catalog.begin_all(rows, self._target, slots)
        on_cpu, (group, positions) = self._target is CPU, place
        if len(rows) == 1:  # as when a request decodes: columns would take longer than their one block
            row, block, slot = rows[0], blocks[0], slots[0]
            cpu_slot, nvme_slot = (slot, None) if on_cpu else (None, slot)
            generation, position = catalog.generations[row], next(iter(positions))
            draft.moves.append(new_tuple(Move, (keys[0], generation, block, cpu_slot, nvme_slot, parents[0])))
            draft.details.append(new_tuple(MoveDetail, (row, group, position)))
            return
        generations = map(catalog.generations.__getitem__, rows)
        cpu, nvme = (slots, repeat(None)) if on_cpu else (repeat(None), slots)
        draft.moves += make_moves(keys, generations, blocks, cpu, nvme, parents)
        draft.details += make_details(rows, repeat(group), positions)

    def queue(self, draft: StoreDraft, *, watched: bool = True) -> JobId | None:
        """Queue the draft's job; return it, None where there are no moves.

        ``watched``: False where its blocks may be somebody else's by now, so that its copies come before all else.
        """
        if not draft.moves:
            return None
        request_id = draft.request.request_id if draft.request is not None else None
        record = self._transfers.add(
            JobKind.STORE, draft.moves, draft.details, epoch=draft.epoch, request_id=request_id
        )
        if watched:
            self._sources.add(record)
        return record.job.id


MOST_LEFT = 4096
"""Blocks of requests that have ended which wait for a segment; the first that came are forgotten first."""
MOST_LEFT_OFFERS = 256
"""Of these, how many are offered in a step."""


class _Wanted(NamedTuple):
    """Blocks of one group of a request, ascending, that lack nothing but slots. ``blocks``: the group's block table.

    ``are_new``: the catalog is known to have none of them.
    """

    group: GroupGeometry
    positions: Sequence[int]
    blocks: Sequence[int]
    are_new: bool


class StorePlanner:
    """Takes offers into slots, and has their GPU blocks watched.

    ``cpu`` or ``nvme`` is None where the tier does not exist.

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
        admission: AdmissionPolicy,
        wants: Wants,
        offers: NvmeOffers,
        settlement: Settlement,
        sources: StoreSources,
        first_generation: int,
        foreign: ForeignCopies,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._context = context
        self._catalog = catalog
        self._stats = stats
        self._cpu = cpu
        self._nvme = nvme
        self._store_policy = store_policy
        # None where the policy's is that of ``NoStores``.
        self._policy_reached = own_method(store_policy, "reached")
        self._policy_offers_free = own_method(store_policy, "free_offers")
        self._target = CPU if cpu is not None else NVME
        self._admission = admission
        self._wants = wants
        self._offers = offers
        self._settlement = settlement
        self._foreign = foreign
        self._drafts = StoreDrafts(catalog, transfers, sources, self._target, first_generation)
        self._min_block_tokens = min(group.block_tokens for group in geometry.groups)
        self._tables = BlockTables()
        self._left: deque[FreeOffer] = deque(maxlen=MOST_LEFT)
        """Blocks that waited for room when their requests ended, by request in the order of the prompt."""
        self._left_mark = -1
        """The number of room when these were last offered."""

    # -- what requests have computed ------------------------------------------------------------

    def may_offer(self, request: RequestState, computed_tokens: int) -> bool:
        """See ``TierManager.may_offer``."""
        if request.loading or request.stale:
            return False
        if not self._store_policy.saves_victims:
            computed_tokens = self._storable_tokens(request, computed_tokens)
        known_tokens = self._tables.get(request.request_id).computed_tokens
        new_blocks = computed_tokens // self._min_block_tokens > known_tokens // self._min_block_tokens
        return new_blocks or self._store_policy.waits(request.request_id)

    def plan(
        self, request: RequestState, computed_tokens: int, block_ids: Sequence[Sequence[int]], now: float, epoch: int
    ) -> None:
        """See ``TierManager.plan_store``. ``epoch``: the current one."""
        if request.loading or request.stale:
            return
        request.update_keys(self._geometry)
        known_tokens = self._tables.put(request.request_id, Table(computed_tokens, block_ids)).computed_tokens
        storable_tokens = self._storable_tokens(request, computed_tokens)
        draft, wanted = StoreDraft(request, epoch), []
        for group in self._geometry.groups:
            keys, blocks = request.keys[group.group], block_ids[group.group]
            final_tokens = min(storable_tokens, max(0, computed_tokens - group.volatile_last))
            full = min(len(keys), len(blocks))
            storable = min(final_tokens // group.block_tokens, full)
            first = min(known_tokens // group.block_tokens, storable)
            are_new = self._note_reached(request, keys, first, storable)
            room = self._settlement.room
            offers = self._store_policy.offers(request.request_id, group.group, storable, room, now)
            if offers:
                are_new = are_new and offers[0] >= first
                taken = self._answer(request, group.group, offers, blocks, now, are_new)
                wanted.append(_Wanted(group, taken, blocks, are_new))
        self._take(draft, request, wanted, now)
        self._drafts.queue(draft)

    def _storable_tokens(self, request: RequestState, computed_tokens: int) -> int:
        if request.store_limit_tokens is not None:
            computed_tokens = min(computed_tokens, request.store_limit_tokens)
        return computed_tokens if self._config.store_decode else min(computed_tokens, request.prompt_tokens)

    def _note_reached(self, request: RequestState, keys: Sequence[BlockKey], start: int, stop: int) -> bool:
        """A request has come to blocks of one group, computed or loaded: it wants them, and uses their copies.

        Where the CPU tier has a block already, NVMe is asked again: its count may have risen. Returns whether the
        catalog has none of them.
        """
        if start == stop:
            return False
        if self._policy_reached is not None:
            self._policy_reached(request.request_id, keys, start, stop)
        wanted = keys[start:stop]
        self._wants.note(wanted, request.request_id)
        if self._catalog.has_none(wanted):
            return True
        used = [row for row in self._catalog.find_all(wanted) if is_coming(self._catalog, row)]
        self._offers.offer(used)
        for space, tier in ((self._cpu, CPU), (self._nvme, NVME)):
            if space is not None:  # the head last, so that it leaves last
                space.accessed([row for row in reversed(used) if self._catalog.state(row, tier) == READY])
        if self._nvme is not None:
            self._nvme.uses.log.extend(used)
        return False

    def restarted(self, request_id: str) -> None:
        """What a request has computed is gone: it begins anew."""
        self._tables.take(request_id)
        self._store_policy.request_finished(request_id)

    def finished(self, request: RequestState) -> None:
        """Forget a request; what of it waits for a segment may still be stored while the engine has it cached.

        Not what waits for a budget, or for others to leave: that room is for the requests that live.
        """
        nvme = self._nvme
        soon = self._cpu is None and nvme is not None and nvme.has_room_soon
        if soon and self._store_policy.waits(request.request_id) and not request.loading and not request.stale:
            self._left.extend(self._unstored(request))
            self._left_mark = -1
        self.restarted(request.request_id)

    def _unstored(self, request: RequestState) -> list[FreeOffer]:
        """Return a request's blocks that no tier has or gets, in the order of its prompt."""
        table, found = self._tables.get(request.request_id), []
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

    def is_owed(self, now: float) -> bool:
        """Whether blocks of requests that have ended wait for room, and some may have come free."""
        due = bool(self._left) and self._settlement.room > self._left_mark
        return due and self._nvme is not None and self._nvme.may_write(now)

    def distrust(self) -> None:
        """What requests hold, or have left in the engine's cache, may be wrong: nothing is saved or stored of it, but
        of what they are seen to have computed from now on."""
        self._tables.clear()
        self._left.clear()
        self._store_policy.reset()

    def reset(self) -> None:
        """The weights may have changed: nothing that was computed before is offered."""
        self._tables.clear()
        self._left.clear()
        self._store_policy.reset()

    # -- preemption ----------------------------------------------------------------------------

    def save(self, request: RequestState, overwritten: Collection[int], now: float, epoch: int) -> JobId | None:
        """Plan the store of what a preempted request has lost; return its job, which is urgent, if there is one.

        Its blocks may be somebody else's by now.
        ``overwritten``: blocks that the step has written to by the time that the job can begin.
        """
        table = self._tables.take(request.request_id)
        if request.stale:
            return None
        draft, wanted = StoreDraft(request, epoch), []
        computed_tokens = table.computed_tokens
        if request.store_limit_tokens is not None:
            computed_tokens = min(computed_tokens, request.store_limit_tokens)
        for group in self._geometry.groups:
            if not table.block_ids:
                break
            keys = request.keys[group.group]
            blocks = [0 if block in overwritten else block for block in table.block_ids[group.group]]
            final_tokens = max(0, computed_tokens - group.volatile_last)
            storable = min(final_tokens // group.block_tokens, len(keys), len(blocks))
            self._leave_out_what_has_gone(group, keys, blocks, table.computed_tokens)
            offers = self._store_policy.preempted(request.request_id, group.group, storable)
            # Generated tokens too, which nobody has been told of without ``store_decode``.
            self._wants.note([keys[position] for position in offers], request.request_id)
            taken = self._answer(request, group.group, offers, blocks, now, are_new=False)
            wanted.append(_Wanted(group, taken, blocks, are_new=False))
        self._take(draft, request, wanted, now)
        return self._drafts.queue(draft, watched=False)

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

    def plan_free(self, now: float, epoch: int) -> None:
        """Offer free blocks to the tiers, if the store policy wants to, or if they have waited for room since their
        requests ended; plan a job for those taken."""
        if self._left and self._settlement.room > self._left_mark:
            self._plan_left(now, epoch)
        if self._policy_offers_free is None:
            return
        offers = self._policy_offers_free(self._context, self._settlement.room, now)
        for offer in self._plan_offers(offers, now, epoch) if offers else ():
            self._refuse_free(offer, Refusal.NO_ROOM, self._settlement.room, now)

    def _plan_left(self, now: float, epoch: int) -> None:
        left, block_of = self._left, self._context.get_block
        offers = [left.popleft() for _ in range(min(MOST_LEFT_OFFERS, len(left)))]
        # One request may have left what another has left, too.
        cached = {offer.key: offer for offer in offers if block_of(offer.block).key == offer.key}
        refused = self._plan_offers([*cached.values()], now, epoch)
        left.extendleft(reversed(refused))
        if refused:
            self._left_mark = self._settlement.room

    def _plan_offers(self, offers: Sequence[FreeOffer], now: float, epoch: int) -> list[FreeOffer]:
        """Answer offers of cached blocks, and plan a job for those taken; return those refused for lack of room."""
        policy, lacking = self._store_policy, []
        taken: dict[int, list[FreeOffer]] = {}
        for offer in offers:
            row = self._catalog.find(offer.key)
            if self._is_there(offer.key, row):
                policy.accept_free(offer.key)
            elif not self._admission.admits((offer.key,))[0]:
                self._refuse_free(offer, Refusal.NOT_REUSED, 0, now)
            elif row >= 0 and self._catalog.state(row, self._target) != ABSENT:
                lacking.append(offer)
            else:
                taken.setdefault(self._geometry.size_classes[group_of(offer.key)], []).append(offer)
        draft = StoreDraft(None, epoch)
        for size_class, wanted in taken.items():
            slots = self._allocate(size_class, len(wanted), now)
            accepted, refused = wanted[: len(slots)], wanted[len(slots) :]
            for offer in accepted:
                policy.accept_free(offer.key)
            keys, parents = [offer.key for offer in accepted], [offer.parent for offer in accepted]
            self._drafts.begin(draft, keys, parents, [offer.block for offer in accepted], slots, NO_PLACE)
            lacking += refused
        self._drafts.queue(draft)
        return lacking

    def _refuse_free(self, offer: FreeOffer, why: Refusal, mark: int, now: float) -> None:
        self._count_refusal(why)
        self._store_policy.refuse_free(offer.key, why, mark, now)

    # -- answers -------------------------------------------------------------------------------

    def _is_there(self, key: BlockKey, row: int) -> bool:
        """Whether a block needs no store: it is in a tier, or on its way there, or on another home's drive likewise."""
        return is_coming(self._catalog, row) or (self._target is NVME and self._foreign.holds(key))

    def _answer(
        self,
        request: RequestState,
        group: int,
        offers: Sequence[int],
        blocks: Sequence[int],
        now: float,
        are_new: bool,
    ) -> Sequence[int]:
        """Answer one group's offers that need no slot: accept (there, or no block) or refuse. Return the rest.

        ``are_new``: the catalog is known to have none of them.
        """
        if not offers:
            return offers
        policy, keys, catalog = self._store_policy, request.keys[group], self._catalog
        rows = [] if are_new else catalog.find_all([keys[position] for position in offers])
        may_be_abroad = self._target is NVME and self._foreign.known
        if (are_new or max(rows) < 0) and not may_be_abroad and all(map(blocks.__getitem__, offers)):
            return self._ask_admission(request, group, offers)  # new blocks of a prompt
        rows = rows or [NONE] * len(offers)
        there: list[int] = []
        others: list[int] = []
        states = catalog.columns(self._target).states
        busy: set[int] = set()
        for position, row in zip(offers, rows, strict=True):
            if blocks[position] == 0 or self._is_there(keys[position], row):
                there.append(position)
            else:
                others.append(position)
                if row >= 0 and states[row] != ABSENT:
                    busy.add(position)
        policy.accept(request.request_id, group, there)
        admitted = self._ask_admission(request, group, others)
        if not busy:
            return admitted
        self._refuse_for_room(request, group, [position for position in admitted if position in busy], now)
        return [position for position in admitted if position not in busy]

    def _ask_admission(self, request: RequestState, group: int, positions: Sequence[int]) -> Sequence[int]:
        """Return which of the offered blocks may enter; refuse the rest."""
        if self._admission.is_open:
            return positions  # no question for each
        keys = request.keys[group]
        answers = self._admission.admits([keys[position] for position in positions])
        refused = [position for position, admitted in zip(positions, answers, strict=True) if not admitted]
        if refused:
            self._count_refusal(Refusal.NOT_REUSED, len(refused))
            unused = [keys[position] for position in refused]
            self._store_policy.refuse(request.request_id, group, refused, unused, Refusal.NOT_REUSED, 0, 0.0)
        return list(compress(positions, answers))

    def _count_refusal(self, why: Refusal, count: int = 1) -> None:
        spent = self._cpu is None and self._nvme is not None and self._nvme.is_spent
        if why is Refusal.NOT_REUSED:
            self._stats.add("refused_blocks.reuse", count)
        else:
            self._stats.add("refused_blocks.budget" if spent else "refused_blocks.room", count)

    def _refuse_for_room(self, request: RequestState, group: int, positions: Sequence[int], now: float) -> None:
        if positions:
            self._count_refusal(Refusal.NO_ROOM, len(positions))
            keys, room = request.keys[group], self._settlement.room
            refused = [keys[position] for position in positions]
            self._store_policy.refuse(request.request_id, group, positions, refused, Refusal.NO_ROOM, room, now)

    def _take(self, draft: StoreDraft, request: RequestState, wanted: Sequence[_Wanted], now: float) -> None:
        """Begin copies of as many blocks as there are slots for, from the prompt's head on in all groups alike.

        Refuse the rest.
        """
        wanted = [one for one in wanted if one.positions]
        if not wanted:
            return
        counts, slots = self._divide(request, wanted, now)
        for (group, taken, blocks, are_new), count in zip(wanted, counts, strict=True):
            # Slices: what was offered may be the policy's own list, which it may change once it hears of it.
            accepted, refused = taken[:count], taken[count:]
            if accepted:
                keys, free = request.keys[group.group], slots[self._geometry.size_classes[group.group]]
                mine, free[:count] = free[:count], []
                self._store_policy.accept(request.request_id, group.group, accepted)
                taken_keys, parents, taken_blocks = _columns_of(keys, blocks, accepted)
                place = (group.group, accepted)
                self._drafts.begin(draft, taken_keys, parents, taken_blocks, mine, place, are_new=are_new)
            self._refuse_for_room(request, group.group, refused, now)

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
                    self._give_back(size_class, slots[size_class][-surplus:])
                    del slots[size_class][-surplus:]
        self._catalog.unpin(tails, CPU)
        return counts, slots

    def _pin_tails(self, request: RequestState, wanted: Sequence[_Wanted]) -> list[int]:
        """Pin what is stored right before the wanted blocks, and return the rows: it does not leave for these.

        Only where the CPU tier has the only copy. What is before a copy stays as long as that does.
        """
        tails: list[int] = []
        for one in wanted if self._cpu is not None else ():
            first = one.positions[0]
            row = self._catalog.find(request.keys[one.group.group][first - 1]) if first else NONE
            if row != NONE and self._catalog.state(row, CPU) == READY and self._catalog.state(row, NVME) == ABSENT:
                tails.append(row)
        self._catalog.pin(tails, CPU)
        return tails

    def _allocate(self, size_class: int, count: int, now: float) -> list[Slot]:
        """Take slots of the tier that stores go to."""
        space = self._cpu if self._cpu is not None else self._nvme
        assert space is not None
        may_store = self._cpu is not None or (self._nvme is not None and self._nvme.may_write(now))
        return space.allocate(size_class, count) if count > 0 and may_store else []

    def _give_back(self, size_class: int, slots: Sequence[Slot]) -> None:
        """Return slots that were just taken."""
        space = self._cpu if self._cpu is not None else self._nvme
        assert space is not None
        space.give_back(size_class, slots)


def _columns_of(
    keys: Sequence[BlockKey], blocks: Sequence[int], positions: Sequence[int]
) -> tuple[Sequence[BlockKey], Sequence[BlockKey | None], Sequence[int]]:
    """Return keys, parents and GPU blocks of some positions, ascending."""
    first, last = positions[0], positions[-1]
    if first == last:
        return [keys[first]], [keys[first - 1] if first else None], [blocks[first]]
    if last - first == len(positions) - 1:  # all in a row, as most are
        parents = keys[first - 1 : last] if first else [None, *keys[:last]]
        return keys[first : last + 1], parents, blocks[first : last + 1]
    return (
        [keys[position] for position in positions],
        [keys[position - 1] if position else None for position in positions],
        [blocks[position] for position in positions],
    )
