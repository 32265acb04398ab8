# SPDX-License-Identifier: Apache-2.0
"""Room in a tier: its slots, who may enter, and who leaves for whom. Scheduler thread only.

There is one way to a slot. ``Copies`` asks ``Room.take`` for whoever wants to write: it makes way
within the tenant's share, has as many copies leave as there are slots too few (``_evict``), or a
few more, and hands out what is free then. A drive's slots come free with a commit, so room there is
made ahead (``make_room``), and ``take`` has nothing leave. Who may leave is asked in one place,
``_victims``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain, islice, repeat, takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey, Slot, Tier, group_of
from kvdisk.manager import bounds
from kvdisk.manager.admission import AdmissionPolicy, AdmitLearned, AdmitReused
from kvdisk.manager.catalog import NONE
from kvdisk.manager.dirty import Dirty
from kvdisk.manager.eviction import TailFirst, make_eviction
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.pool import SlotPool
from kvdisk.manager.shares import TenantBytes, TenantShare
from kvdisk.manager.standings import PINNED


class TierStatus(NamedTuple):
    """The state of a tier; the defaults are those of one that can always be written.

    ``has_room_soon``: whether there is room, or it comes without an eviction. ``uncommitted``:
    whether steps are needed until a commit. ``tickets``: of the last change that is to be
    committed, and of the last that is known to be.
    """

    has_room_soon: bool = False
    uncommitted: bool = False
    tickets: tuple[int, int] = (0, 0)


_ALWAYS = TierStatus()
_NO_ROWS = np.zeros(0, np.intp)


class Room(ABC):
    """A tier's room; what it says is of a tier that is always there and can always be written.

    ``admission`` decides who may enter. ``capacity``: slots that there may be, by size class.
    ``share``: what one tenant may have of them; None: as much as finds room. ``below``: the tier
    that copies go to when they leave; None: nowhere. ``dirty``: those that are to go there.
    ``above``: the dirty ones of the tier that copies come from.
    """

    def __init__(self, parts: Parts, tier: Tier, admission: AdmissionPolicy) -> None:
        parts.catalog.add_tier(tier)
        self.tier = tier
        self.admission = admission
        self.below: Room | None = None
        self.dirty: Dirty | None = None
        self.above: Dirty | None = None
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._history = parts.history
        self._stats = parts.stats
        self._standings = parts.standings
        self._pin_share = parts.config.pin_share
        self._slots_per_block = parts.geometry.rank_count
        """Slots that one block takes, over all ranks."""
        self._needs_all = len(parts.geometry.groups) > 1
        """Whether a part of a prompt's blocks can serve nobody."""
        classes = range(len(parts.geometry.slot_sizes))
        self.pool = SlotPool(len(classes))
        self.capacity: Sequence[int] = self.pool.total
        self._is_short = [False] * len(classes)
        """By size class, whether the last search for room has found too little."""
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
        self._tenant_bytes: TenantBytes | None = None
        """None: nobody has asked yet."""
        self.share: TenantShare | None = None
        if parts.config.salt_share is not None:
            self.share = TenantShare(parts.config.salt_share, parts.catalog, parts.geometry, self._most_slots)
            parts.catalog.columns(tier).counters.append(self.share)
            for order in self._evictors:
                order.tell_apart(parts.catalog.tenants)

    def write_behind(self, parts: Parts, below: Room, hints: PeerHints) -> None:
        """Have copies go to the tier below."""
        self.below = below
        self.dirty = below.above = Dirty(parts, self.tier, below.tier, self.pool, self.by_class, hints)

    # -- state -------------------------------------------------------------------------------------

    @property
    def works(self) -> bool:
        """False once the tier is off for good."""
        return True

    @property
    def is_spent(self) -> bool:
        """Whether it was a budget that forbade writing at the last ``update_writable``."""
        return False

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
        pool, free, total = self.pool, 0, 0
        for size_class, size in enumerate(self._geometry.slot_sizes):
            free += (pool.free[size_class] + pool.awaiting[size_class]) * size
            total += pool.total[size_class] * size
        return free * self._slots_per_block, total * self._slots_per_block

    @property
    def is_searching(self) -> bool:
        """Whether the last search for room has ended early: the next one may find some."""
        return any(order.ended_early for order in self._evictors)

    def update_writable(self, now: float) -> bool:  # noqa: ARG002
        """Find out whether copies may be written now; return that."""
        return True

    @property
    def affordable_bytes(self) -> float:
        """Bytes that may be written, as of the last ``update_writable``."""
        return math.inf

    def bytes_of(self, size_class: int) -> int:
        """Return the bytes of a block over all ranks."""
        return self._geometry.slot_sizes[size_class] * self._slots_per_block

    def by_class(self, rows: Sequence[int]) -> Collection[tuple[int, Sequence[int]]]:
        """Return rows by the size class of their blocks, each in the order given."""
        if len(self._evictors) == 1:
            return ((0, rows),)
        found: dict[int, list[int]] = {}
        for row in rows:
            found.setdefault(self._geometry.size_classes[group_of(self._catalog.keys[row])], []).append(row)
        return found.items()

    # -- who may enter -----------------------------------------------------------------------------

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

    def _admitted(self, rows: Sequence[int]) -> Sequence[int]:
        """Return which copies of the tier above may enter. One that others here follow always may:
        they would serve nobody without it."""
        if not rows or self.admission.admits_all:
            return rows
        catalog = self._catalog
        answers = self.admits([catalog.keys[row] for row in rows], catalog.parents(rows))
        followers = catalog.columns(self.tier).first_child
        return [row for row, is_let_in in zip(rows, answers, strict=True) if is_let_in or followers[row] != NONE]

    def _is_to_stay(self, key: BlockKey) -> bool:
        order = self._evictors[self._geometry.size_classes[group_of(key)]]
        return self._standings.of(key) == PINNED and order.standings.may_stay()

    def left_to_stay(self, size_class: int) -> int:
        """Return how many more copies of a size class may stay."""
        return max(0, self._evictors[size_class].standings.left())

    def _most_staying(self, size_class: int) -> int:
        """Return how many copies of a size class may stay, of all that there may be."""
        return int(self._pin_share * self.capacity[size_class])

    def _most_slots(self, size_class: int) -> int:
        """Return how many slots of a size class there may be; more where it was given the room of
        others."""
        return max(self.capacity[size_class], self.pool.total[size_class])

    # -- the one way to a slot ---------------------------------------------------------------------

    def take(
        self,
        classes: Sequence[int],
        tenants: Sequence[int],
        groups: Sequence[int],
        *,
        in_order: bool = False,
        keep_dirty: bool = False,
        most: Sequence[int] | None = None,
    ) -> tuple[list[Slot | None], int]:
        """Take slots for blocks. Return each one's slot, if it got one, and how many got none
        because their tenant has its share.

        ``classes``, ``tenants``, ``groups``: of each. The slots of one group lie beside each other.
        ``in_order``: none behind the first that gets none. ``keep_dirty``: no dirty copy leaves for
        them, whatever the next tier takes. ``most``: blocks by size class. A tier that cannot
        always be written is taken as the last ``update_writable`` found it.
        """
        if self.share is None and not self._needs_all:  # all are alike
            count = len(classes) if most is None else min(len(classes), most[0])
            found = self.allocate(0, count, keep_dirty=keep_dirty)
            return [*found, *repeat(None, len(classes) - len(found))], 0
        wanted = range(len(classes)) if most is None else _within(classes, most)
        places = self._fit_to_share(wanted, classes, tenants, in_order=in_order, keep_dirty=keep_dirty)
        by_class: dict[int, list[int]] = {}
        for at in places:
            by_class.setdefault(classes[at], []).append(at)
        free = {each: self.allocate(each, len(alike), keep_dirty=keep_dirty) for each, alike in by_class.items()}
        end = len(classes)
        if in_order:
            ends = (alike[len(free[each])] for each, alike in by_class.items() if len(free[each]) < len(alike))
            end = min(ends, default=end)
        slots: list[Slot | None] = [None] * len(classes)
        for size_class, found in free.items():
            served = [at for at in by_class[size_class][: len(found)] if at < end]
            if len(self._geometry.groups) > 1:
                served.sort(key=groups.__getitem__)
            for at, slot in zip(served, found, strict=False):
                slots[at] = slot
            if len(served) < len(found):
                self.give_back(size_class, found[len(served) :])
        return slots, len(wanted) - len(places)

    def allocate(self, size_class: int, count: int, *, keep_dirty: bool = False) -> list[Slot]:
        """Take up to ``count`` slots, evicting where none is free. See ``take``, which calls it."""
        ahead = min(bounds.EVICTED_AHEAD, self.capacity[size_class] // bounds.SLOTS_PER_AHEAD)
        self._evict(size_class, count - self.pool.free[size_class], keep_dirty=keep_dirty, ahead=ahead)
        slots = self.pool.allocate(size_class, count)
        self._is_short[size_class] = len(slots) < count
        return slots

    def give_back(self, size_class: int, slots: Sequence[Slot]) -> None:  # noqa: ARG002 - for tiers with a budget
        """Return slots that were just taken, and not used."""
        self.pool.release(slots)

    def make_room(self, now: float, wanted: Sequence[int]) -> None:  # noqa: B027 - not all need it
        """Have ``wanted`` slots by size class free soon, where ``allocate`` evicts nothing."""

    def make_room_for_dirty(self, now: float, most: int) -> None:
        """Have room soon for what is dirty above, of which up to ``most`` copies of each size class
        may be written now. What finds no room in its tenant's share becomes clean."""
        assert self.above is not None
        self.make_room(now, list(self.above.counts) if self.share is None else self._within_shares(self.above, most))

    def _within_shares(self, dirty: Dirty, most: int) -> list[int]:
        wanted: list[int] = []
        for size_class in range(len(dirty.counts)):
            rows = list(islice(dirty.walk(size_class), most))
            classes, tenants = [size_class] * len(rows), [self._catalog.tenants[row] for row in rows]
            let_in = self._fit_to_share(range(len(rows)), classes, tenants, in_order=False)
            if len(let_in) < len(rows):
                dirty.refuse(set(rows).difference([rows[at] for at in let_in]))
            wanted.append(sum(row in dirty for row in rows))  # another may have gone, whose parent was to leave
        return wanted

    def may_get_room(self, size_class: int, *, silent: bool) -> bool:  # noqa: ARG002
        """Whether the last search for room found enough, or more may come. ``silent``: no commit is
        awaited."""
        return self.pool.free[size_class] > 0 or not self._is_short[size_class] or self.is_searching

    # -- within a share ----------------------------------------------------------------------------

    def _fit_to_share(
        self,
        places: Sequence[int],
        classes: Sequence[int],
        tenants: Sequence[int],
        *,
        in_order: bool,
        keep_dirty: bool = False,
    ) -> Sequence[int]:
        """Make way for the blocks at some places within the shares of their tenants. Return the
        places of those that may begin copies."""
        if self.share is None or not any(tenants):
            return places
        names = [(classes[at], tenants[at]) for at in places]
        left = {name: self.make_way(*name, count, keep_dirty=keep_dirty) for name, count in Counter(names).items()}
        if len(left) == 1:
            return places[: left[names[0]]]
        found: list[int] = []
        for at, name in zip(places, names, strict=True):
            if left[name]:
                left[name] -= 1
                found.append(at)
            elif in_order:
                break
        return found

    def make_way(self, size_class: int, tenant: int, count: int, *, keep_dirty: bool = False) -> int:
        """Evict a tenant's own copies where its share has no room for ``count`` new ones. Return
        for how many there is room then. Tenant 0 is none, and has room for all. ``keep_dirty``: see
        ``take``."""
        if self.share is None or not tenant:
            return count
        left, freed = self.share.left(size_class, tenant), 0
        if left < count:
            surplus = min(bounds.EVICTED, max(0, -left))
            freed = self._evict(size_class, count - max(0, left) + surplus, keep_dirty=keep_dirty, tenant=tenant)
            self._stats.add(f"share_evicted_blocks.{self.tier.label}", freed)
            left = self.share.left(size_class, tenant)
        # What has too much from before a restart may at least replace its own.
        return max(0, min(count, max(left, freed)))

    def _is_beyond_share(self, row: int) -> bool:
        """Whether the tenant of a block has its share of this tier."""
        share, tenant = self.share, self._catalog.tenants[row]
        size_class = self._geometry.size_classes[group_of(self._catalog.keys[row])]
        return share is not None and tenant != 0 and share.left(size_class, tenant) <= 0

    def bytes_by_tenant(self) -> dict[int, int]:
        """Return the bytes of each tenant, by its digest."""
        if self._tenant_bytes is None:
            self._tenant_bytes = TenantBytes(self._catalog, self.tier, self._geometry)
        return self._tenant_bytes.read()

    # -- who leaves --------------------------------------------------------------------------------

    def _evict(self, size_class: int, count: int, *, keep_dirty: bool = False, tenant: int = 0, ahead: int = 0) -> int:
        """Evict up to ``count`` copies, of one tenant or (0) of any; return how many. All searches
        of one call share one bound.

        ``ahead``: so many may leave together, because a search for one costs half of what it takes
        to store a block. The tier below lacks none of those beyond ``count`` that it wants.
        """
        dirty, searched = self.dirty, False
        evicted = self._end_forgotten(size_class, count, tenant) if count > 0 else 0
        while evicted < count:
            most = count - evicted if searched else max(count - evicted, ahead)
            rows = self._victims(size_class, most, keep_dirty=keep_dirty, go_on=searched, tenant=tenant)
            searched = True
            if len(rows) > count - evicted:
                rows[count - evicted :] = self._unmissed(rows[count - evicted :])
            may_leave = rows if self.above is None else self.above.leaving_below(rows)
            leaving = self.offer_before_eviction(may_leave)
            self.end(leaving)
            self._stats.add(f"evicted_blocks.{self.tier.label}", len(leaving))
            evicted += len(leaving)
            if len(may_leave) < len(rows):
                break  # less is dirty for the room now
            # Others may be found where some became dirty, which is bounded, or where those that are
            # may leave as well.
            blocked = dirty is not None and dirty.blocked and not keep_dirty
            if not rows or (len(leaving) == len(rows) and not blocked):
                break
        if dirty is not None and evicted >= count and not tenant:
            dirty.deferred[size_class].clear()  # it has room
        return evicted

    def _unmissed(self, rows: Sequence[int]) -> list[int]:
        """Return the first of these copies, up to one that the tier below wants, and lacks."""
        below, dirty = self.below, self.dirty
        if below is None or dirty is None or not below.works:
            return list(rows)
        missed = set(below._admitted(dirty.lacking(rows)))
        return list(takewhile(lambda row: row not in missed, rows))

    def _end_forgotten(self, size_class: int, count: int, tenant: int) -> int:
        """End up to ``count`` copies that a reset has left, of one tenant or (0) of any; return how
        many."""
        rows = self._forgotten_rows(size_class)
        if not len(rows):
            return 0
        if tenant:
            rows = rows[np.frombuffer(self._catalog.tenants, np.uint64)[rows] == tenant]
        ended: list[int] = rows[:count].tolist()
        if ended:
            self.end(ended)
        return len(ended)

    def _forgotten_rows(self, size_class: int) -> NDArray[np.intp]:  # noqa: ARG002 - of memory
        """Return the copies of a size class that a reset has left: they go before all others."""
        return _NO_ROWS

    def _victims(
        self, size_class: int, count: int, *, keep_dirty: bool, go_on: bool = False, tenant: int = 0
    ) -> list[int]:
        """Return clean copies that may be evicted. ``go_on``, ``tenant``: as in
        ``TailFirst.victims``.

        While the next tier takes no writes, dirty copies may go where no clean one is found:
        otherwise they would hold back those before them in their chains.
        """
        order, dirty, may_leave = self._evictors[size_class], self.dirty, self._evictable()
        if self.above is not None and (deferred := self.above.deferred[size_class]):
            anyone = may_leave
            may_leave = lambda row: anyone(row) and row not in deferred  # noqa: E731 - asked of each copy
        if self._standings.held:
            order.standings.keep_at_most(int(self._pin_share * self.pool.total[size_class]))
        if dirty is None or not dirty.counts[size_class]:
            return order.victims(count, may_leave, go_on=go_on, tenant=tenant)
        is_dirty = dirty.contains
        rows = order.victims(count, lambda row: may_leave(row) and not is_dirty(row), go_on=go_on, tenant=tenant)
        if not rows and dirty.blocked and not keep_dirty:
            rows = order.victims(count, may_leave, go_on=go_on, tenant=tenant)
        return rows

    def _evictable(self) -> Callable[[int], bool]:
        """Return the test whether a copy may be evicted for room: to be used at once."""
        return self._catalog.evictable_in(self.tier)

    @abstractmethod
    def end(self, rows: Sequence[int]) -> None:
        """End unpinned copies, those that follow a copy before it."""

    # -- what goes to the tier below ---------------------------------------------------------------

    def offer(self, rows: Sequence[int], *, own: bool = False) -> None:
        """Make READY copies dirty that the tier below admits, and neither has nor can read from a
        neighbour; no more than may be dirty.

        Called when a copy becomes READY, and each time its key's count may have risen. ``own``:
        also copies that a neighbour has; all of these leave as soon as the tier below has them.
        """
        below, dirty = self.below, self.dirty
        if below is not None and dirty is not None and below.works:
            queued = dirty.add(below._admitted(dirty.lacking(rows, own=own)), whole=self._needs_all)
            if own:
                dirty.defer(queued)

    def offer_before_eviction(self, rows: Sequence[int]) -> Sequence[int]:
        """Offer copies once more, which are about to be evicted. Return which may go: not those
        that become dirty by it, nor what these follow. One that was dirty already goes.

        Counts the copies that will be in no tier then, by the reason. ``rows``: the tail of a chain
        comes before its head.
        """
        below, dirty = self.below, self.dirty
        if below is None or dirty is None or not below.works:
            return rows
        lacking = dirty.lacking(rows)
        if not lacking:
            return rows
        admitted = below._admitted(lacking)
        stay, parent_rows = set(dirty.add(admitted)), self._catalog.parent_rows
        dirty.defer(stay)
        leaving: list[int] = []
        for row in rows:
            if row in stay:
                stay.add(parent_rows[row])
            else:
                leaving.append(row)
        lost = set(lacking).intersection(leaving)
        if not lost:
            return leaving
        unserved = lost.intersection(admitted)
        beyond_share = sum(map(below._is_beyond_share, unserved)) if below.share is not None else 0
        self._stats.add("evicted_unwritten.reuse", len(lost) - len(unserved))
        self._stats.add("evicted_unwritten.share", beyond_share)
        why = "evicted_unwritten.budget" if below.is_spent else "evicted_unwritten.room"
        self._stats.add(why, len(unserved) - beyond_share)
        return leaving


def _within(classes: Sequence[int], most: Sequence[int]) -> list[int]:
    """Return the places of the first ``most`` blocks of each size class."""
    left, found = list(most), list[int]()
    for at, size_class in enumerate(classes):
        if left[size_class] > 0:
            left[size_class] -= 1
            found.append(at)
    return found
