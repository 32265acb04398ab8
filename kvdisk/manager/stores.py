# SPDX-License-Identifier: Apache-2.0
"""What is stored: the store policy's offers are answered, and a job is planned for those taken.

Offers come from three sides: what a running request has computed (``plan``), what a preemption
takes away (``Victims``), and free blocks of the engine's cache (``plan_free``). ``Intake`` answers
them all. What finds no room is offered again after a back-off. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from kvdisk.blocks import BlockKey
from kvdisk.context import HandedState
from kvdisk.geometry import GroupGeometry
from kvdisk.manager.catalog import ABSENT, NONE, READY
from kvdisk.manager.copies import Offers
from kvdisk.manager.demand import Demand, Stretch
from kvdisk.manager.free_units import FreeUnits
from kvdisk.manager.gpu_offers import GpuOffers
from kvdisk.manager.intake import Answer, Intake
from kvdisk.manager.jobs import JobRecord, StoreSources
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.requests import BackOff, RequestState
from kvdisk.manager.step_work import SHARES, Kind, Work
from kvdisk.manager.store_policy import AHEAD_STEPS, FreeOffer, StorePolicy
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import Reason

_TOGETHER = 32
"""Blocks of several requests that a job stores at most: a step that overwrites one of them waits
for all."""


@dataclass(slots=True)
class _Rest:
    """A request's blocks of a group from ``start`` to before ``stop``, and the group's GPU blocks,
    0: none. ``positions``: of those that the store policy offers; None: it is told part by part.
    ``used_at``: from where on a load has just used them. ``put_off``: what of them is not counted
    yet."""

    request: RequestState
    group: int
    blocks: Sequence[int]
    positions: Collection[int] | None
    start: int
    stop: int
    used_at: int
    put_off: Stretch | None = None


class _Due(NamedTuple):
    """What of a request is offered now; and the ``later`` blocks, by group and position."""

    request: RequestState
    offers: Offers
    later: list[tuple[int, int]]


class StorePlanner:
    """Offers blocks to the first tier, and has their GPU blocks watched: ``sources``."""

    def __init__(
        self, parts: Parts, tiers: Tiers, store_policy: StorePolicy, demand: Demand, hints: PeerHints, intake: Intake
    ) -> None:
        self._config = parts.config
        self._geometry = parts.geometry
        self._context = parts.context
        self._catalog = parts.catalog
        self._transfers = parts.transfers
        self._stats = parts.stats
        self._state = parts.state
        self._work = parts.work
        self._tiers = tiers
        self._target = tiers.first
        self._store_policy = store_policy
        self._demand = demand
        self.sources = StoreSources(parts.context)
        self._hints = hints
        self._intake = intake
        groups = parts.geometry.groups
        self._min_block_tokens = min(group.block_tokens for group in groups)
        self._behind = {group.volatile_tokens for group in groups}
        """By how many tokens blocks become final behind the last that was computed."""
        self._prompt_only = any(group.prompt_only for group in groups)
        offers_free = type(store_policy).free_offers is not StorePolicy.free_offers
        has_units = any(group.gpu_blocks > 1 for group in groups)
        self._free_units = FreeUnits(parts.context, parts.geometry) if has_units and offers_free else None
        self._offers = GpuOffers(parts, self._free_units)
        self._free_back_off = BackOff()
        """The pause after offers of free blocks were refused."""
        self._left = Offers()
        """Blocks that wait for room, the newest: of requests that have ended, and recurrent
        states."""
        self._left_at = -1
        """``released`` when these were last offered."""
        self.losses = 0
        """How often the GPU's blocks were lost."""
        self._work.open_when(Kind.LEFT, self._may_store_left)
        self._wrong_up_to = 0
        """The last job of before the last reset."""

    # -- what requests have computed ------------------------------------------------------------

    def may_offer(self, request: RequestState, computed_tokens: int) -> bool:
        """See ``TierManager.note_scheduled``."""
        if request.loading or request.stale:
            return False
        if request.due or request.is_behind:
            return True
        if not self._has_filled(request, computed_tokens):
            return False
        return self._store_policy.saves_victims or self._has_filled(
            request, self._storable_tokens(request, computed_tokens)
        )

    def _has_filled(self, request: RequestState, tokens: int) -> bool:
        """Whether a request may have come to the end of a block since its last offers."""
        size, held_tokens = self._min_block_tokens, request.held_tokens
        for behind in self._behind:  # noqa: SIM110 - any() takes twice as long, of every request in every step
            if (tokens - behind) // size > (held_tokens - behind) // size:
                return True
        return False

    def plan(self, computed: Iterable[tuple[RequestState, int, Sequence[Sequence[int]]]], now: float) -> None:
        """See ``TierManager.plan_stores``.

        The few blocks that each of many requests fills in a step are offered together: most of what
        an offer costs it costs once.
        """
        together: list[_Due] = []
        keys: set[BlockKey] = set()
        for request, computed_tokens, block_ids in computed:
            if request.loading or request.stale:
                continue
            due = self._come_to(request, computed_tokens, block_ids, now)
            if due is None:
                continue
            if together and not self._may_join(due, together, keys):
                self._offer(together, now)
                together, keys = [], set()
            together.append(due)
            keys.update(due.offers.keys)
        self._offer(together, now)

    def _may_join(self, due: _Due, others: Sequence[_Due], keys: Collection[BlockKey]) -> bool:
        """Whether a request's blocks may be offered with those of ``others``, which have ``keys``:
        few, and none that another offers, too. Where there are shares who has all of theirs would
        stand before the next."""
        return (
            len(keys) + len(due.offers.keys) <= _TOGETHER
            and (self._target.share is None or self._target.share.is_one(each.request for each in (due, *others)))
            and all(key not in keys for key in due.offers.keys)
        )

    def _offer(self, together: Sequence[_Due], now: float) -> None:
        """Offer blocks of several requests as one.

        Where blocks find no room nothing behind them is offered before they are: without them it
        serves nobody.
        """
        if not together:
            return
        owners = [due.request.request_id for due in together for _ in due.offers.keys]
        offers = together[0].offers if len(together) == 1 else Offers.joined([due.offers for due in together])
        answer = self.store(offers, now, owners)
        taken, unserved = {*answer.taken.keys}, {*answer.unserved.keys}
        for request, own, later in together:
            if not taken.isdisjoint(own.keys):
                request.back_off.accept()
            if not unserved.isdisjoint(own.keys):
                each = zip(own.keys, own.groups, own.positions, strict=True)
                later[:0] = [(group, at) for key, group, at in each if key in unserved]
                if not self._target.is_searching:
                    request.back_off.refuse(self._state.released, now)
            request.due = later

    def _come_to(
        self, request: RequestState, computed_tokens: int, block_ids: Sequence[Sequence[int]], now: float
    ) -> _Due | None:
        """Count and use the blocks that a request has come to; return what of it is offered now, if
        anything is."""
        request.update_keys()
        most = max(self._work.left(Kind.REACHED), self._computed_blocks(computed_tokens - request.held_tokens))
        request.held_tokens, request.held_blocks = computed_tokens, block_ids
        had_due, holds = bool(request.due), request.back_off.holds(self._state.released, now)
        storable_tokens = self._storable_tokens(request, computed_tokens)
        self._put_off_loaded(request, storable_tokens, most)
        new: list[tuple[int, int]] = []
        for group, start, stop in self._next_blocks(request, storable_tokens, most):
            self._work.spend(Kind.REACHED, stop - start)
            self._demand.reach(request, group.group, stop)
            if group.state_tokens is None:
                new += [(group.group, at) for at in self._offered_of(request, group, start, stop, holds=holds)]
        request.due += self._offers.in_order(new)
        states, request.states = request.states, []
        if states:
            self._use(states)
        if not request.due or holds:
            return None
        due, later = request.due[:most], request.due[most:]
        if had_due:  # of what was offered before the request may hold less by now, or have reached it again
            due = [(group, at) for group, at in due if at < request.reached[group]]
        return _Due(request, self._offers.of_request(request, due, block_ids), later)

    def _offered_of(
        self, request: RequestState, group: GroupGeometry, start: int, stop: int, *, holds: bool
    ) -> Sequence[int]:
        """Use blocks that a request has come to, which are counted; return the positions of those
        that the store policy offers. ``holds``: whether they are offered later."""
        keys = request.keys[group.group]
        if not request.loaded[1]:
            self._use(keys[start:stop])
            return self._reach(request, group.group, start, stop)
        first, last = (min(max(start, tokens // group.block_tokens), stop) for tokens in request.loaded)
        for begin, end, are_new in ((start, first, True), (first, last, False), (last, stop, True)):
            if begin < end:
                self._use(keys[begin:end], are_new=are_new)
        positions = self._reach(request, group.group, start, stop)
        if first < last and not holds:  # what a load has brought is mostly still in a tier
            there = self._catalog.presences(keys[first:last])
            positions = [at for at in positions if not first <= at < last or there[at - first] != READY]
        return positions

    def _computed_blocks(self, tokens: int) -> int:
        """Return how many blocks a request has come to by computing ``tokens``: so many a step
        looks at of it in any case, or it would fall behind for ever."""
        groups, blocks = self._geometry.groups, 0
        for group in groups:
            blocks += -(-tokens // group.block_tokens)
        return min(max(blocks, len(groups)), self._context.step_blocks)

    def _put_off_loaded(self, request: RequestState, storable_tokens: int, most: int) -> None:
        """Put off what a long load has brought, and what lies before it: later steps look at it.
        What is computed behind it comes first, because a request may end soon."""
        first_tokens, last_tokens = request.loaded
        if not last_tokens:
            return
        ends = [
            (group, request.reached[group.group], self.full_blocks(request, group, min(last_tokens, storable_tokens)))
            for group in self._geometry.groups
            if group.state_tokens is None
        ]
        if sum(end - start for _, start, end in ends) <= most:
            return
        for group, start, end in ends:
            if start < end:
                put_off = self._demand.put_off(request, group.group, end)
                used_at = min(max(start, first_tokens // group.block_tokens), end)
                self._look_later(request, group.group, start, end, used_at, put_off)
                request.reached[group.group] = end

    def _look_later(
        self, request: RequestState, group: int, start: int, stop: int, used_at: int, put_off: Stretch | None = None
    ) -> None:
        """Put off blocks. ``used_at``, ``put_off``: as in ``_Rest``."""
        if start < stop:
            is_told = not getattr(self._store_policy, "is_told_later", False)  # a user's own may not say it
            positions = self._reach_some(request, group, start, stop) if is_told else None
            rest = _Rest(request, group, request.held_blocks[group], positions, start, stop, used_at, put_off)
            self._work.add(Kind.PUT_OFF, (request, group), self._look_at_all(rest, self.losses))

    def _reach_some(self, request: RequestState, group: int, start: int, stop: int) -> Collection[int]:
        """Return what ``_reach`` does, of which positions are in it can be asked one by one."""
        positions = self._reach(request, group, start, stop)
        return positions if isinstance(positions, range) else frozenset(positions)

    def _reach(self, request: RequestState, group: int, start: int, stop: int) -> Sequence[int]:
        """Return the positions of those blocks of a group that the store policy offers now."""
        is_state = self._geometry.groups[group].state_tokens is not None
        if is_state or not self._store_policy.offers_all or self._free_units is not None:
            self._offers.may_come_free(request, group, start, stop)
        return self._store_policy.reached(request.request_id, request.keys[group], start, stop)

    def _next_blocks(
        self, request: RequestState, storable_tokens: int, most: int
    ) -> list[tuple[GroupGeometry, int, int]]:
        """Return which blocks of a request are full and computed, and were not before, by group:
        from where to where; of more than ``most`` the first, alike in all groups. They are reached
        then."""
        groups = self._geometry.groups
        full = [self.full_blocks(request, group, storable_tokens) for group in groups]
        starts = request.reached
        request.is_behind = sum(full) - sum(starts) > most
        stops = full
        if request.is_behind:
            step = self._geometry.alignment_tokens
            first = min(start * group.block_tokens for start, group in zip(starts, groups, strict=True))
            blocks = sum(step // group.block_tokens for group in groups)
            end = (first // step + max(1, most // blocks)) * step
            stops = [
                max(start, min(stop, end // group.block_tokens))
                for start, stop, group in zip(starts, full, groups, strict=True)
            ]
            request.is_behind = stops != full
        request.reached = stops
        return [each for each in zip(groups, starts, stops, strict=True) if each[1] < each[2]]

    def plan_states(self, request: RequestState, states: Iterable[HandedState], now: float) -> None:
        """See ``TierManager.plan_states``.

        A state is stored only where the engine's own cache knows the block by its key: the block is
        then what that says when this step's forward pass is over, until the engine hands it out.
        """
        if request.loading or request.stale:
            return
        request.update_keys()
        left: list[FreeOffer] = []
        for group, gpu_block, tokens in states:
            keys, at = request.keys[group], tokens // self._geometry.groups[group].block_tokens - 1
            if (
                0 <= at < len(keys)
                and self._context.get_block(gpu_block).key == keys[at]
                and self._storable_tokens(request, tokens) == tokens
            ):
                self._demand.leave_state(request, keys[at])
                if self._reach(request, group, at, at + 1):
                    left.append(FreeOffer(gpu_block, keys[at], request.parent(group, at)))
        self.leave(self.store(self._offers.of_free(left), now).unserved)

    def _storable_tokens(self, request: RequestState, computed_tokens: int) -> int:
        tokens = self.allowed_tokens(request, computed_tokens)
        return tokens if self._config.store_decode else min(tokens, request.prompt_tokens)

    def allowed_tokens(self, request: RequestState, tokens: int) -> int:
        """Return of how many of a request's ``tokens`` the blocks may be stored, generated ones
        too."""
        if request.limits.store_limit_tokens is not None:
            tokens = min(tokens, request.limits.store_limit_tokens)
        return min(tokens, request.first_prompt_tokens) if self._prompt_only else tokens

    def full_blocks(self, request: RequestState, group: GroupGeometry, storable_tokens: int) -> int:
        """Return how many blocks of a group are full, final and hashed, within
        ``storable_tokens``."""
        final_tokens = min(storable_tokens, max(0, request.held_tokens - group.volatile_tokens))
        known = min(len(request.keys[group.group]), len(request.held_blocks[group.group]) // group.gpu_blocks)
        return min(final_tokens // group.block_tokens, known)

    def _use(self, keys: Sequence[BlockKey], *, are_new: bool = True) -> None:
        """Refresh the recency of blocks that a request has reached, and offer those that a tier has
        to the next one again: their count has risen. ``are_new``: no load has just used them."""
        catalog = self._catalog
        rows = [row for row in catalog.find_all(keys) if row != NONE]
        if not rows:
            return
        used = list(compress(rows, catalog.presences_of(rows)))
        for space in self._tiers:
            space.offer(used)
        self._hints.remote.offer(used)
        used.reverse()  # the head last, so that it leaves last
        for space in self._tiers if are_new else ():
            space.reached(used)

    def finished(self, request: RequestState) -> None:
        """Forget a request. What of it waits for a segment, or for a search for room to go on, may
        still be stored while the engine has it cached; room that others leave is for the requests
        that live."""
        comes = self._target.status.has_room_soon or self._target.is_searching
        if request.due and not request.stale and comes:
            due = [(group, at) for group, at in request.due if at < request.reached[group]]
            due = due[: SHARES[Kind.LEFT].blocks]
            offers = self._offers.of_request(request, due, request.held_blocks)
            gpu_keys = [
                request.keys[group].of_gpu(at) for group, at in zip(offers.groups, offers.positions, strict=True)
            ]
            self.leave(offers._replace(positions=[-1] * len(gpu_keys), gpu_keys=gpu_keys))
        if request.is_behind and not request.stale:
            storable_tokens = self._storable_tokens(request, request.held_tokens)
            for group in self._geometry.groups:
                if group.state_tokens is None:
                    stop = self.full_blocks(request, group, storable_tokens)
                    self._look_later(request, group.group, request.reached[group.group], stop, stop)
        self.forget(request)

    def _look_at_all(self, rest: _Rest, losses: int) -> Work:
        """Go on with blocks that were put off after so many losses of the GPU's blocks. After
        another one they are only counted."""
        # Of a unit that the store policy is told of each GPU block is noted.
        looks = 1 if self._free_units is None else self._geometry.groups[rest.group].gpu_blocks
        while rest.start < rest.stop:
            start, stop = rest.start, min(rest.stop, rest.start + max(1, self._work.left(Kind.PUT_OFF) // looks))
            if rest.put_off is not None:
                self._demand.go_on(rest.put_off, stop)
            if losses == self.losses:
                self._look_at(rest, stop)
            rest.start = stop
            yield (stop - start) * looks

    def _look_at(self, rest: _Rest, stop: int) -> None:
        """Use blocks that are counted by now; what no tier has of them is stored while the engine
        has it cached."""
        start, request = rest.start, rest.request
        of_group = request.keys[rest.group]
        keys, used_at = of_group[start:stop], min(max(0, rest.used_at - start), stop - start)
        positions = rest.positions
        if positions is None:
            positions = self._reach_some(request, rest.group, start, stop)
        self._use(keys[:used_at])
        self._use(keys[used_at:], are_new=False)
        waiting, presences = {*self._left.keys}, self._catalog.presences(keys)
        at_all = [
            at
            for at, key, presence in zip(range(start, stop), keys, presences, strict=True)
            if presence == ABSENT and key not in waiting and at in positions
        ]
        offers = self._offers.named(request, rest.group, rest.blocks, at_all)
        offers = offers.at(self._offers.cached(offers))
        if offers.keys:
            self.store_or_leave(offers)

    def store_or_leave(self, offers: Offers) -> None:
        """Offer blocks that no request offers any more. Those without room are left, and offered
        again once some may have come free."""
        self.leave(self.store(offers, self._state.now).unserved)
        self._left_at = self._state.released

    def leave(self, offers: Offers) -> None:
        """Have blocks offered again while the engine has them cached, whoever needs them: of more
        than a step looks at the newest."""
        most = SHARES[Kind.LEFT].blocks
        left = Offers.joined([self._left, offers.at(range(min(most, len(offers.keys))))])
        self._left = left.at(range(max(0, len(left.keys) - most), len(left.keys)))
        if self._left.keys and not self._work.has(Kind.LEFT, self):
            self._work.add(Kind.LEFT, self, self._offer_left())

    def _offer_left(self) -> Work:
        """Offer what was left, once in a step."""
        while (left := self._left).keys:
            self._left_at, looked = self._state.released, len(left.keys)
            # One request may have left what another has left, too.
            cached = {left.keys[at]: at for at in self._offers.cached(left)}
            unserved = self.store(left.at(list(cached.values())), self._state.now).unserved
            # What has an old copy there that is being dropped does not wait for room: a drive that
            # hangs may hold it for long, and no search would go on meanwhile.
            rows, states = self._catalog.find_all(unserved.keys), self._catalog.columns(self._target.tier).states
            self._left = unserved.at([at for at, row in enumerate(rows) if row == NONE or states[row] == ABSENT])
            yield looked
            yield 0

    def _may_store_left(self) -> bool:
        """Whether room may have come free for what was left."""
        return (self._left_at < self._state.released or self._target.is_searching) and self._target.update_writable(
            self._state.now
        )

    def reset(self) -> None:
        """Forget what requests have left in the engine's cache: it may be wrong."""
        self._work.cancel(self)
        self._left = Offers()
        self.losses += 1
        self._wrong_up_to = self._transfers.planned
        self._store_policy.reset()
        if self._free_units is not None:
            self._free_units.clear()

    def forget(self, request: RequestState) -> None:
        """Forget what a request has computed: it has ended, or begins anew."""
        request.forget_gpu_blocks()
        self._store_policy.request_finished(request.request_id)

    def offer_again(self, record: JobRecord, requests: Mapping[str, RequestState], now: float) -> None:
        """Have the blocks of a store's failed moves offered again, of ``requests`` that still live.

        Their slots are free again: only the back-off stands before the next offer. Where the engine
        took a block there is none: it says nothing of the tier, and most of what was given up with
        it is still there. No state of before a reset is offered, though vLLM may still know its
        block by its key.
        """
        released, back_offs = self._state.released - 1, list[BackOff]()
        if not record.owners:
            failed, groups = sorted(record.failed), self._geometry.groups
            states = [
                record.job.moves[at] for at in failed if groups[record.details[at].group].state_tokens is not None
            ]
            if record.job.id > self._wrong_up_to:
                self.leave(
                    self._offers.of_free([FreeOffer(move.gpu_blocks[0], move.key, move.parent) for move in states])
                )
            self._offer_free_again([record.job.moves[at].key for at in failed])
            back_offs.append(self._free_back_off)
        for owner in {record.owners[at] for at in record.failed} if record.owners else ():
            if (request := requests.get(owner)) is not None:
                details = [record.details[at] for at in record.failed if record.owners[at] == owner]
                # First: what follows them in the prompt would be left out as behind a gap.
                again = self._offers.in_order(
                    [(detail.group, detail.position) for detail in details if detail.position >= 0]
                )
                request.due = again + request.due
                back_offs.append(request.back_off)
        if set(record.failed.values()) != {Reason.OVERWRITTEN}:
            for back_off in back_offs:
                back_off.refuse(released, now)

    # -- free blocks ---------------------------------------------------------------------------

    def plan_free(self, now: float) -> None:
        """Store free blocks that the store policy offers.

        The policy is asked when the engine may have taken as many blocks as a step can since the
        last time. Where few are free it is asked in each step: what is freed then is near the
        front at once. An ordinary step with many free blocks does not look at the free queue.
        """
        step_blocks = self._context.step_blocks
        is_time = self._state.taken_blocks >= step_blocks or self._context.free_count < AHEAD_STEPS * step_blocks
        if not is_time or self._free_back_off.holds(self._state.released, now):
            return
        self._state.taken_blocks = 0
        found = self._store_policy.free_offers(self._free_units or self._context)
        if not found:
            return
        answer = self.store(self._offers.of_free(found), now)
        if answer.record is not None:
            self._free_back_off.accept()
        if answer.unserved.keys:
            self._offer_free_again(answer.unserved.keys)
            if not self._target.is_searching:
                self._free_back_off.refuse(self._state.released, now)

    def _offer_free_again(self, keys: Sequence[BlockKey]) -> None:
        """Have free blocks offered again, as soon as no back-off holds."""
        self._store_policy.refuse_free(keys)
        self._state.taken_blocks = self._context.step_blocks

    # -- answers -------------------------------------------------------------------------------

    def _without_gaps(self, missing: Offers) -> Offers:
        """Return the missing blocks but for those behind one that no tier has, nor is offered: it
        was refused, or has left. No hit gets there."""
        keys, parents, groups = missing.keys, missing.parents, self._geometry.groups
        offered, hints = {*keys}, self._hints.known
        first = [(at, parent) for at, parent in enumerate(parents) if parent is not None and parent not in offered]
        if not first:
            return missing
        rows = self._catalog.find_all([parent for _, parent in first])
        gone: set[BlockKey | None] = {
            keys[at]
            for (at, parent), row in zip(first, rows, strict=True)
            if row == NONE and groups[missing.groups[at]].reads_all and parent not in hints
        }
        if not gone:
            return missing
        kept: list[int] = []
        for at, key in enumerate(keys):
            if key in gone or parents[at] in gone:
                gone.add(key)
            else:
                kept.append(at)
        why = "room" if self._target.admission.admits_all else "reuse"
        self._stats.add(f"refused_blocks.{why}", len(keys) - len(kept))
        return missing.at(kept)

    def store(self, offers: Offers, now: float, owners: Sequence[str] = (), *, watched: bool = True) -> Answer:
        """Plan a job for the offers that are missing and admitted, from the first on, as far as
        there is room. ``owners``: the request of each; empty: they are no request's.

        A hit needs the blocks of all groups, and what follows a gap serves nobody: of requests',
        all are refused from the first on that has no slot. One whose old copy is just being dropped
        is refused alone: a drive that hangs may hold it for long. ``watched``: have the engine name
        those of its blocks that it reuses.
        """
        missing = self._intake.missing(offers)
        if self._store_policy.offers_all:
            missing = self._without_gaps(missing)
        if owners and len(missing.keys) < len(owners):
            owner_of = dict(zip(offers.keys, owners, strict=True))
            owners = [owner_of[key] for key in missing.keys]
        answer = self._intake.store(missing, now, owners=owners)
        if answer.unserved.keys:
            why = "budget" if self._target.is_spent else "room"
            self._stats.add(f"refused_blocks.{why}", len(answer.unserved.keys) - answer.beyond_share)
            self._stats.add("refused_blocks.share", answer.beyond_share)
        if watched and answer.record is not None:
            self.sources.add(answer.record)
        return answer
