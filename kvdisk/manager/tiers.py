# SPDX-License-Identifier: Apache-2.0
"""The tiers: one protocol for all, and the one in CPU memory. Scheduler thread only.

Stores go to the first tier. A copy moves from each tier to the next by ``Demotions``, and is read
from the fastest that has it. What else a further tier needs is in ``docs/decisions/0030-tiers.md``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

from kvdisk.blocks import BlockKey, Medium, Slot, Tier, group_of
from kvdisk.manager.admission import AdmissionPolicy, AdmitLearned, AdmitReused
from kvdisk.manager.catalog import DOOMED, READY
from kvdisk.manager.eviction import TailFirst, make_eviction
from kvdisk.manager.jobs import JobRecord
from kvdisk.manager.parts import Parts
from kvdisk.manager.pool import SlotPool
from kvdisk.manager.shares import TenantShare
from kvdisk.manager.standings import PINNED

MOST_SURPLUS = 256
"""Copies of a tenant beyond its share that may leave at once beside those for which room is
needed."""


class TierStatus(NamedTuple):
    """The state of a tier; the defaults are those of one that can always be written.

    ``works``: False once the tier is off for good. ``is_spent``: whether it was a budget that
    forbade writing at the last ``update_writable``. ``has_room_soon``: whether there is room, or
    it comes without an eviction. ``uncommitted``: whether steps are needed until a commit.
    ``tickets``: of the last change that is to be committed, and of the last that is known to be.
    """

    works: bool = True
    is_spent: bool = False
    has_room_soon: bool = False
    uncommitted: bool = False
    tickets: tuple[int, int] = (0, 0)


_ALWAYS = TierStatus()


class WriteBehind(Protocol):
    """What a tier asks of the ``Demotions`` out of it, or into it: see there for each call.

    ``blocked``: the lower tier takes no writes now. ``deferred``: by size class, copies of the
    upper tier whose eviction waits for their write.
    """

    blocked: bool
    deferred: list[set[int]]

    def offer(self, rows: Sequence[int], *, own: bool = False) -> None:
        """Make copies dirty that the lower tier is to have."""

    def offer_before_eviction(self, rows: Sequence[int]) -> list[int]:
        """Offer copies once more, which are about to be evicted; return which may go."""

    def clean_followers(self, rows: Sequence[int]) -> list[int]:
        """Return which copies of the lower tier may leave for what is dirty; what is dirty behind
        the others becomes clean."""

    def is_dirty(self, row: int) -> bool:
        """Return whether a copy is dirty."""

    def count(self, size_class: int) -> int:
        """Return how many copies of a size class are dirty."""

    def used(self, rows: Sequence[int]) -> None:
        """Copies were used in the upper tier."""

    def forget(self, rows: Sequence[int]) -> None:
        """Copies have ended in the upper tier."""


class TierSpace:
    """A tier: its slots, the copies in them, who leaves and who may enter.

    These methods are those of a tier that is always there and can always be written.
    ``admission`` decides who may enter. ``lower``: where copies go that leave; None: nowhere.
    ``upper``: where they come from.
    ``capacity``: slots that there may be, by size class. ``share``: what one tenant may have of
    them; None: as much as finds room.
    """

    def __init__(self, parts: Parts, tier: Tier, admission: AdmissionPolicy) -> None:
        self.tier = tier
        self.admission = admission
        self.lower: WriteBehind | None = None
        self.upper: WriteBehind | None = None
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._history = parts.history
        self._stats = parts.stats
        self._standings = parts.standings
        self._pin_share = parts.config.pin_share
        self._slots_per_block = parts.geometry.rank_count
        """Slots that one block takes, over all ranks."""
        classes = range(len(parts.geometry.slot_sizes))
        self.pool = SlotPool(len(classes))
        self.capacity: Sequence[int] = self.pool.total
        self._evictors = [
            TailFirst(
                make_eviction(parts.config.eviction, parts.catalog.keys, parts.history),
                parts.catalog,
                tier,
                parts.history,
                parts.standings,
                partial(self._most_staying, size_class),
            )
            for size_class in classes
        ]
        admission.watch(self._evictors)
        self.share: TenantShare | None = None
        if parts.config.salt_share is not None:
            self.share = TenantShare(parts.config.salt_share, parts.catalog, parts.geometry, self._most_slots)
            parts.catalog.columns(tier).share = self.share
            for order in self._evictors:
                order.tell_apart(parts.catalog.tenants)

    # -- state -----------------------------------------------------------------------------------

    @property
    def in_memory(self) -> bool:
        """Whether a load can leave a copy here of what it reads from a slower tier; all of it is
        gone when the engine ends."""
        return self.tier.medium is Medium.MEMORY

    @property
    def status(self) -> TierStatus:
        """The state of the tier now."""
        return _ALWAYS

    @property
    def free_and_total(self) -> tuple[int, int]:
        """Slots that are or will be free without an eviction, and all that there may be, counted in
        slots of the smallest size."""
        unit = self._geometry.slot_sizes[0] * self._slots_per_block
        free, total = self._free_and_total_bytes()
        return free // unit, total // unit

    def _free_and_total_bytes(self) -> tuple[int, int]:
        pool, sizes = self.pool, self._geometry.slot_sizes
        slots = (map(int.__add__, pool.free, pool.limbo), pool.total)
        free, total = (sum(map(int.__mul__, counts, sizes)) * self._slots_per_block for counts in slots)
        return free, total

    def note_time(self, now_s: int) -> None:
        """Set the time, in seconds since the Unix epoch, for what is used from now on."""

    def lose(self, segments: Collection[int]) -> None:
        """Give up segments of which files were removed by others."""

    @property
    def is_searching(self) -> bool:
        """Whether the last search for room has ended early: the next one may find some."""
        return any(order.ended_early for order in self._evictors)

    def refresh(self, now: float) -> bool:  # noqa: ARG002
        """Refresh the state, once a step. Return whether room may have come free."""
        return False

    def commit(self) -> bool:
        """Take note of what was committed. Return whether room came free."""
        return False

    def update_writable(self, now: float) -> bool:  # noqa: ARG002
        """Find out whether copies may be written now; return that."""
        return True

    def on_settled(self, record: JobRecord, now: float) -> None:
        """Take note of what a settled job, of any tier, says of this one."""

    def gauges(self) -> dict[str, float]:
        """Return the tier's gauges, by series."""
        name, sizes = self.tier.label, self._geometry.slot_sizes
        pool, parts = self.pool, self._slots_per_block
        used = [total - free - limbo for total, free, limbo in zip(pool.total, pool.free, pool.limbo, strict=True)]
        return {
            f"used_bytes.{name}": sum(map(int.__mul__, used, sizes)) * parts,
            f"held_blocks.{name}": sum(used),
            f"capacity_bytes.{name}": sum(map(int.__mul__, self.capacity, sizes)) * parts,
        }

    def admits(self, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None]) -> Sequence[bool]:
        """Return for each block whether it may enter now. A pinned block always may; a block whose
        parent is refused never may, because it would serve nobody. ``keys``: each chain in order,
        from its tail or its head. ``parents``: of each."""
        if self.admission.admits_all:
            return [True] * len(keys)
        # What the history has forgotten would be refused as what nobody wants, and all behind it.
        by_history = isinstance(self.admission, AdmitLearned | AdmitReused)
        answers = list(self.admission.admits(self._history.nearest_known(keys, parents) if by_history else keys))
        if self._standings.held:
            answers = [answer or self._is_to_stay(key) for key, answer in zip(keys, answers, strict=True)]
        refused = {key for key, admitted in zip(keys, answers, strict=True) if not admitted}
        for at in chain(range(len(keys)), reversed(range(len(keys)))) if refused else ():
            if parents[at] in refused:
                answers[at] = False
                refused.add(keys[at])
        return answers

    def _is_to_stay(self, key: BlockKey) -> bool:
        order = self._evictors[self._geometry.size_classes[group_of(key)]]
        return self._standings.of(key) == PINNED and order.standings.may_stay()

    def _most_staying(self, size_class: int) -> int:
        """Return how many copies of a size class may stay, of all that there may be."""
        return int(self._pin_share * self.capacity[size_class])

    def _most_slots(self, size_class: int) -> int:
        """Return how many slots of a size class there may be; more where it was given the room of
        others."""
        return max(self.capacity[size_class], self.pool.total[size_class])

    def reorder(self, rows: Sequence[int]) -> None:
        """Blocks have another standing than before; of one chain the tail comes first."""
        for size_class, alike in self.by_class(rows):
            self._evictors[size_class].standings.reorder(alike)

    # -- room ----------------------------------------------------------------------------------

    def allocate(self, size_class: int, count: int, *, keep_dirty: bool = False) -> list[Slot]:
        """Take up to ``count`` slots; of a tier that cannot always be written, as the last
        ``update_writable`` found it.

        ``keep_dirty``: no dirty copy is evicted for them, whatever the next tier takes.
        """
        raise NotImplementedError

    def give_back(self, size_class: int, slots: Sequence[Slot]) -> None:  # noqa: ARG002 - for tiers with a budget
        """Return slots that were just taken, and not used."""
        self.pool.release(slots)

    @property
    def affordable_bytes(self) -> float:
        """Bytes that may be written, as of the last ``update_writable``."""
        return math.inf

    def bytes_of(self, size_class: int) -> int:
        """Return the bytes of a block over all ranks."""
        return self._geometry.slot_sizes[size_class] * self._slots_per_block

    def make_room(self, now: float, wanted: Sequence[int]) -> None:
        """Have ``wanted`` slots by size class free soon, where ``allocate`` evicts nothing."""

    def may_get_room(self, size_class: int, *, silent: bool) -> bool:  # noqa: ARG002
        """Whether ``make_room`` found a way to room. ``silent``: no commit is awaited."""
        return True

    def make_way(self, size_class: int, tenant: int, count: int, *, keep_dirty: bool = False) -> int:
        """Evict a tenant's own copies where its share has no room for ``count`` new ones. Return
        for how many there is room then. Tenant 0 is none, and has room for all. ``keep_dirty``: see
        ``allocate``."""
        if self.share is None or not tenant:
            return count
        left, freed = self.share.left(size_class, tenant), 0
        if left < count:
            surplus = min(MOST_SURPLUS, max(0, -left))
            freed = self._evict(size_class, count - max(0, left) + surplus, keep_dirty=keep_dirty, tenant=tenant)
            self._stats.add(f"share_evicted_blocks.{self.tier.label}", freed)
            left = self.share.left(size_class, tenant)
        # What has too much from before a restart may at least replace its own.
        return max(0, min(count, max(left, freed)))

    def fit_to_share(self, classes: Sequence[int], tenants: Sequence[int], *, in_order: bool) -> Sequence[int]:
        """Make way for blocks within the shares of their tenants (``make_way``). Return the places
        of those that may begin copies. ``classes``, ``tenants``: of each block. ``in_order``: none
        behind the first that may not."""
        if self.share is None or not any(tenants):
            return range(len(classes))
        names = list(zip(classes, tenants, strict=True))
        left = {name: self.make_way(*name, count) for name, count in Counter(names).items()}
        if len(left) == 1:
            return range(left[names[0]])
        found: list[int] = []
        for at, name in enumerate(names):
            if left[name]:
                left[name] -= 1
                found.append(at)
            elif in_order:
                break
        return found

    def _evictable_of(self, size_class: int) -> Callable[[int], bool]:
        evictable = self._evictable()
        above = self.upper.deferred[size_class] if self.upper is not None else None
        return (lambda row: evictable(row) and row not in above) if above else evictable

    def _evictable(self) -> Callable[[int], bool]:
        """Return the test whether a copy may be evicted for room: to be used at once."""
        return self._catalog.evictable_in(self.tier)

    def _evict(self, size_class: int, count: int, *, keep_dirty: bool = False, tenant: int = 0) -> int:
        """End up to ``count`` copies, of one tenant or (0) of any; the others are in use, or wait
        for their demotion. All its searches together are as long as one may be."""
        evicted, searched = 0, False
        while evicted < count:
            rows = self._victims(size_class, count - evicted, keep_dirty=keep_dirty, go_on=searched, tenant=tenant)
            searched = True
            may_leave = rows if self.upper is None else self.upper.clean_followers(rows)
            leaving = may_leave if self.lower is None else self.lower.offer_before_eviction(may_leave)
            self.drop(leaving)
            self._stats.add(f"evicted_blocks.{self.tier.label}", len(leaving))
            evicted += len(leaving)
            if len(may_leave) < len(rows):
                break  # less is dirty for the room now
            # Others may be found where some became dirty, which is bounded, or where those that are
            # may leave as well.
            blocked = self.lower is not None and self.lower.blocked and not keep_dirty
            if not rows or (len(leaving) == len(rows) and not blocked):
                break
        if self.lower is not None and evicted >= count and not tenant:
            self.lower.deferred[size_class].clear()  # it has room
        return evicted

    def _victims(
        self, size_class: int, count: int, *, keep_dirty: bool, go_on: bool = False, tenant: int = 0
    ) -> list[int]:
        """Return clean copies that may be evicted. ``go_on``, ``tenant``: as in
        ``TailFirst.victims``.

        While the next tier takes no writes, dirty copies may go where no clean one is found:
        otherwise they would hold back those before them in their chains.
        """
        order, lower, evictable = self._evictors[size_class], self.lower, self._evictable_of(size_class)
        if self._standings.held:
            order.standings.keep_at_most(int(self._pin_share * self.pool.total[size_class]))
        if lower is None:
            return order.victims(count, evictable, go_on=go_on, tenant=tenant)
        rows = order.victims(count, lambda row: evictable(row) and not lower.is_dirty(row), go_on=go_on, tenant=tenant)
        if not rows and lower.blocked and not keep_dirty and lower.count(size_class):
            rows = order.victims(count, evictable, go_on=go_on, tenant=tenant)
        return rows

    # -- the life of copies ----------------------------------------------------------------------

    def finish(self, rows: Sequence[int], now_s: int) -> list[int]:
        """Copies were written on every rank. Return those that are READY: not those that were
        doomed meanwhile.

        Of one chain the tail comes first. ``now_s``: seconds since the Unix epoch.
        """
        states = self._catalog.columns(self.tier).states
        ready, doomed = [row for row in rows if states[row] != DOOMED], [row for row in rows if states[row] == DOOMED]
        for row in doomed:
            self.abandon(row)
        self._catalog.finish(ready, self.tier)
        for size_class, alike in self.by_class(ready):
            self._evictors[size_class].insert(alike)
            for order in self._evictors if len(self._evictors) > 1 else ():
                order.unlist(map(self._catalog.parent_rows.__getitem__, alike))
        self._record(ready, now_s)
        return ready

    def _record(self, rows: Sequence[int], now_s: int) -> None:
        """Keep copies that have become READY beyond this process."""

    def abandon(self, row: int, *, late: bool = False) -> None:
        """A copy was not written, or is not needed any more: give back its writer's pin and its
        slot.

        ``late``: a device may still write to the slot. It stays taken until this is called again.
        """
        if not late:
            self._catalog.unpin((row,), self.tier)
            self.drop((row,))
        elif self._state(row) != DOOMED:
            self._catalog.doom(row, self.tier)

    def touch(self, rows: Sequence[int]) -> None:
        """Copies were used: of one chain the tail comes first."""
        for size_class, alike in self.by_class(rows):
            self._evictors[size_class].touch(alike)
        if self.lower is not None:
            self.lower.used(rows)

    def reached(self, rows: Sequence[int]) -> None:
        """A request reached these blocks, which are in some tier; the tail of a chain first."""
        states = self._catalog.columns(self.tier).states
        self.touch([row for row in rows if states[row] == READY])

    def drop(self, rows: Sequence[int]) -> None:
        """End unpinned copies, those that follow a copy before it."""
        self._forget(rows)
        self._free(self._catalog.drop(rows, self.tier))

    def _free(self, slots: Sequence[tuple[int, int]]) -> None:
        """The copies in these slots have ended."""
        self.pool.release(slots)

    def discard(self, *rows: int) -> None:
        """Let no request find these copies any more, and end each as soon as no job uses it."""
        pins = self._catalog.columns(self.tier).pins
        used, unused = [row for row in rows if pins[row]], [row for row in rows if not pins[row]]
        self._forget(used)
        for row in used:
            self._catalog.doom(row, self.tier)
        if unused:
            self.drop(unused)

    def _forget(self, rows: Sequence[int]) -> None:
        for size_class, alike in self.by_class(rows):
            before = self._evictors[size_class].remove(alike)
            for order in self._evictors if len(self._evictors) > 1 else ():
                order.list_tails(before)  # a state may be of another size than what it follows
        if self.lower is not None:
            self.lower.forget(rows)

    def unpin(self, rows: Sequence[int]) -> None:
        """Give back one pin of each copy; the last one of a doomed copy ends it."""
        self._catalog.unpin(rows, self.tier)
        self._drop_doomed(rows)

    def _drop_doomed(self, rows: Sequence[int]) -> None:
        columns = self._catalog.columns(self.tier)
        doomed = [row for row in rows if columns.states[row] == DOOMED and columns.pins[row] == 0]
        if doomed:
            self.drop(list(dict.fromkeys(doomed)))  # a job by key may have used one twice

    def reset(self) -> None:
        """The weights may have changed: drop the copies, and what was counted."""
        self.admission.reset()
        self.discard(*self._catalog.kept_in(self.tier))

    def _state(self, row: int) -> int:
        return self._catalog.state(row, self.tier)

    def by_class(self, rows: Sequence[int]) -> Collection[tuple[int, Sequence[int]]]:
        """Return rows by the size class of their blocks, each in the order given."""
        if len(self._evictors) == 1:
            return ((0, rows),)
        found: dict[int, list[int]] = {}
        for row in rows:
            found.setdefault(self._geometry.size_classes[group_of(self._catalog.keys[row])], []).append(row)
        return found.items()


class MemorySpace(TierSpace):
    """Slots of the arena that every rank has of a tier. A slot's segment is its size class.

    ``slot_counts``: by size class.
    """

    def __init__(
        self, parts: Parts, slot_counts: Sequence[int], admission: AdmissionPolicy, tier: Tier = Tier.CPU
    ) -> None:
        super().__init__(parts, tier, admission)
        self._is_short = [False] * len(slot_counts)
        """By size class, whether the last ``allocate`` has found too little room."""
        for size_class, count in enumerate(slot_counts):
            if count:
                self.pool.add_segment(size_class, size_class, count)

    def allocate(self, size_class: int, count: int, *, keep_dirty: bool = False) -> list[Slot]:
        """Take up to ``count`` slots, evicting where none is free."""
        self._evict(size_class, count - self.pool.free[size_class], keep_dirty=keep_dirty)
        slots = self.pool.allocate(size_class, count)
        self._is_short[size_class] = len(slots) < count
        return slots

    def may_get_room(self, size_class: int, *, silent: bool) -> bool:  # noqa: ARG002
        """Whether the last ``allocate`` was given all, or a slot has come free since; what a job
        holds comes free when that ends, in a later step."""
        return self.pool.free[size_class] > 0 or not self._is_short[size_class] or self.is_searching


class Tiers:
    """The tiers that there are, the fastest first; None: there is no such tier."""

    def __init__(self, *tiers: TierSpace | None) -> None:
        self._tiers = {space.tier: space for space in tiers if space is not None}
        assert self._tiers
        self._spaces = tuple(self._tiers.values())
        self.first = self._spaces[0]

    def __iter__(self) -> Iterator[TierSpace]:
        return iter(self._spaces)

    def __getitem__(self, tier: Tier) -> TierSpace:
        return self._tiers[tier]

    def __len__(self) -> int:
        return len(self._tiers)

    def get(self, tier: Tier) -> TierSpace | None:
        """Return a tier, if there is one."""
        return self._tiers.get(tier)

    @property
    def pairs(self) -> Iterator[tuple[TierSpace, TierSpace]]:
        """Return each tier that copies move down from, and the one that they move to."""
        return pairwise(self)

    @property
    def landing_tier(self) -> TierSpace | None:
        """The tier where a load may leave a copy of what it reads from a slower one, if any."""
        return self.first if self.first.in_memory else None
