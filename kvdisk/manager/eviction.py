# SPDX-License-Identifier: Apache-2.0
"""Who leaves a tier: the policies by name, and the rule that of one chain the tail leaves before
the head.

A policy knows rows of the catalog and their order, nothing else. Scheduler thread only."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey, Tier, group_of
from kvdisk.config import EVICTIONS, make_own
from kvdisk.manager import bounds
from kvdisk.manager.catalog import NONE, Catalog
from kvdisk.manager.chances import CLASSES
from kvdisk.manager.reuse import ReuseHistory
from kvdisk.manager.row_lists import GROWN_ROWS, RowLists
from kvdisk.manager.shares import TenantLists
from kvdisk.manager.standings import DEMOTED, PINNED, CopyStandings, Standings

Keys = NDArray[np.object_] | Sequence[BlockKey]
"""The keys of the catalog's rows, by row."""
_NOT_HERE: Final = 255
_BLOCKS: Final = 0xFFFFFFFF
"""The blocks of a time of ``LearnedPolicy``."""
_NOBODY: Final = (math.inf, NONE)
_STATELESS: Final = -1.0
"""Worth less than anything else."""
_WORTH_OF: Final = (-1.0, 2.0**1000, math.inf)
"""What a copy is worth, by its standing: less than any that has none, or more."""


class EvictionPolicy:
    """Order of the copies of one tier and size class: the lowest worth leaves first. Here that is
    the least recently used; a subclass says what copies are worth otherwise.

    Only tails can leave: copies that no other in the tier follows. Each class of copies has a list
    of its tails, in order of last use, so that only the oldest of each has to be compared. A row is
    inserted once and removed once; other calls ignore rows that are not there. Time is the
    history's, unless a subclass has a clock of its own. What a policy knows of rows is in arrays,
    not in a Python object for each row (``tests/unit/test_garbage.py``), and it grows them itself
    when a higher row comes.

    A class of the user's derives from this one, and says what copies are worth: the classes that it
    divides them into, a clock of its own, or ``proposals`` altogether.

    Tails with a standing are in lists of their own, behind those of the classes: one for each
    standing. Those that stay are never proposed, and all of them are listed.

    ``keys``: of the catalog's rows, read when a row is given. ``history``: what is known of them.
    """

    classes = 1
    """How many, within ``bounds``. A copy stays in its class where its block's is 0 by now."""

    def __init__(self, keys: Keys, history: ReuseHistory) -> None:
        most = bounds.POLICY_CLASSES
        assert 0 < self.classes <= most, f"a policy has up to {most} classes, and not {self.classes}"
        self._keys = keys
        self._history = history
        self._kinds = self.classes + 3
        self._lists = RowLists(self._kinds)
        """The tails of each class and standing."""
        self._own: TenantLists | None = None
        """The same of each tenant, where these are told apart, but for those that stay."""
        self._list_of = bytearray()
        """By row: its class, or ``classes`` and its standing; ``_NOT_HERE``."""
        self._counts = [0] * self._kinds
        self._last = array("Q")
        """By row: when it was last used or postponed."""

    def classes_of(self, rows: Sequence[int]) -> list[int]:
        """Return the class of each row's block by now."""
        return [0] * len(rows)

    def worth(self, number: int, last: int) -> float:  # noqa: ARG002 - there is one class
        """Return what a copy of a class, last used then, is worth now. Of one class the older is
        worth less."""
        return float(last)

    @property
    def now(self) -> int:
        """The time of a use: it never falls."""
        return self._history.now

    def tell_apart(self, tenants: Sequence[int]) -> None:
        """List the tails of each tenant as well. ``tenants``: by row, 0: none. Before any row is
        inserted."""
        self._own = TenantLists(tenants)

    # -- rows ------------------------------------------------------------------------------------

    def insert(self, rows: Sequence[int]) -> None:
        """Copies became READY. None is proposed before ``list_tails`` names it."""
        lacking = max(rows, default=-1) + 1 - len(self._last)
        if lacking > 0:
            self._last.extend(bytes(lacking + GROWN_ROWS))
            self._list_of.extend(bytes([_NOT_HERE]) * (lacking + GROWN_ROWS))
        last, numbers, counts, now = self._last, self._list_of, self._counts, self.now
        for row, number in zip(rows, self.classes_of(rows), strict=True):
            assert numbers[row] == _NOT_HERE, "inserted twice"
            last[row], numbers[row] = now, number
            counts[number] += 1

    def list_tails(self, rows: Iterable[int]) -> None:
        """Nothing follows these rows any more: propose them from now on, each by its last use. Of
        rows of the same use the later ones come before the earlier, but for those that were used
        just now."""
        lists, last, now = self._lists, self._last, self.now
        for row in self._held(rows):
            if row in lists:
                continue
            number = self._list_of[row]
            newer = -1 if last[row] == now else self._first_not_older(lists, lists.oldest(number), last[row])
            if newer < 0:
                lists.append((row,), (number,))
            else:
                lists.insert_before(row, newer)
            if self._own is not None:
                self._list_own(self._own, row, number)

    def _list_own(self, own: TenantLists, row: int, number: int) -> None:
        """List a tail among those of its tenant, if it has one: by its last use, as among all."""
        tenant, used = own.tenants[row], self._last[row]
        newer = -1
        if tenant and used != self.now:
            newer = self._first_not_older(own, own.oldest(tenant, number), used)
        if newer < 0:
            own.append((row,), (number,))
        else:
            own.insert_before(row, newer)

    def _first_not_older(self, lists: RowLists | TenantLists, row: int, used: int) -> int:
        """Return the oldest of a list, which begins with ``row``, that was not used before
        ``used``, or, of a long list, one that was; negative: all were, and the list is short."""
        for _ in range(bounds.TAILS_LOOKED_AT):
            if row < 0 or self._last[row] >= used:
                break
            row = lists.newer(row)
        return row

    def unlist(self, rows: Iterable[int]) -> None:
        """Something follows these rows: propose them no more until they are tails again. NONE is
        ignored."""
        lists, numbers, staying = self._lists, self._list_of, self.classes + PINNED
        followed = [row for row in lists.among(rows) if numbers[row] != staying]
        lists.remove(followed)
        if self._own is not None:
            self._own.remove(followed)

    def touch(self, rows: Sequence[int]) -> None:
        """Copies were used: the earliest first.

        One request may use a copy up to three times: when it is read ahead for, when it has loaded
        the copy, and when it reaches the block. The history counts that once.
        """
        rows = self._held(rows)
        last, numbers, counts, now = self._last, self._list_of, self._counts, self.now
        for row, number in zip(rows, self.classes_of(rows), strict=True):
            last[row], before = now, numbers[row]
            # A key may be forgotten, but not while its copy is here.
            if number and number != before < self.classes:
                numbers[row] = number
                counts[before] -= 1
                counts[number] += 1
        self._lists.move(rows, map(numbers.__getitem__, rows))
        if self._own is not None:
            self._append_own(self._own, self._lists.held(rows))

    def postpone(self, row: int) -> None:
        """A tail could not leave now: propose it later than others of its class. That is no use."""
        if row in self._lists:
            self._last[row] = self.now
            self._lists.move((row,), (self._list_of[row],))
            if self._own is not None:
                self._append_own(self._own, (row,))

    def _append_own(self, own: TenantLists, tails: Sequence[int]) -> None:
        """Make each tail in turn the newest of its tenant, unless it is to stay."""
        own.remove(tails)
        staying = self.classes + PINNED
        leaving = [row for row in tails if self._list_of[row] != staying]
        own.append(leaving, map(self._list_of.__getitem__, leaving))

    def remove(self, rows: Sequence[int]) -> None:
        """Copies left the tier, for whatever reason; rows still have their keys."""
        self._lists.remove(rows)
        if self._own is not None:
            self._own.remove(rows)
        numbers, counts, end = self._list_of, self._counts, len(self._list_of)
        for row in rows:
            if row < end and (number := numbers[row]) != _NOT_HERE:
                counts[number] -= 1
                numbers[row] = _NOT_HERE

    def fill(self, rows: NDArray[np.int32], uses: NDArray[np.uint32], is_tail: NDArray[np.bool_]) -> None:
        """Insert many rows at once, the oldest first, into an empty policy, and into the history:
        what was there before a restart. ``uses``: how often each was used since it was stored;
        ``is_tail``: of each row."""
        # Keys are read in the order in which they lie: in that of their last use each is far away.
        count = int(rows.max(initial=-1)) + 1
        are_here, places = np.zeros(count, np.bool_), np.zeros(count, np.intp)
        are_here[rows] = True
        ascending = np.flatnonzero(are_here)
        places[ascending] = np.arange(len(ascending))
        keys = np.asarray(self._keys, np.object_)[ascending].tolist()
        found = self._classes_restored(rows, self._history.restore(keys, places[rows], uses))
        last, numbers = np.zeros(count, np.uint64), np.full(count, _NOT_HERE, np.uint8)
        last[rows] = np.maximum(np.arange(1 - len(rows), 1) + self.now, 0)
        numbers[rows] = found
        self._last, self._list_of = array("Q", last.tobytes()), bytearray(numbers)
        self._counts = np.bincount(found, minlength=self._kinds).tolist()
        self._lists.fill(rows[is_tail], found[is_tail])
        if self._own is not None:
            self._own.append(rows[is_tail].tolist(), found[is_tail].tolist())

    def _classes_restored(self, rows: NDArray[np.int32], known: NDArray[np.uint8]) -> NDArray[np.uint8]:  # noqa: ARG002
        """Return ``classes_of`` rows of before a restart. ``known``: the class that the history has
        just put each in."""
        return np.array(self.classes_of(rows.tolist()), np.uint8)

    def _held(self, rows: Iterable[int]) -> list[int]:
        numbers, end = self._list_of, len(self._list_of)
        return [row for row in rows if row < end and numbers[row] != _NOT_HERE]

    # -- standings -------------------------------------------------------------------------------

    def held_rows(self) -> list[int]:
        """Return the rows that have a standing; fast."""
        numbers = np.frombuffer(self._list_of, np.uint8)
        rows: list[int] = np.flatnonzero((numbers >= self.classes) & (numbers != _NOT_HERE)).tolist()
        return rows

    def holds(self, row: int) -> bool:
        """Return whether a row is here."""
        return row < len(self._list_of) and self._list_of[row] != _NOT_HERE

    def count(self, standing: int) -> int:
        """Return how many rows have a standing."""
        return self._counts[self.classes + standing]

    @property
    def proposed(self) -> int:
        """How many rows are proposed, or will be: tails that are not to stay."""
        return sum(self._lists.counts[: self.classes + PINNED])

    def standing(self, row: int) -> int | None:
        """Return a row's standing; None: it has none, or is not here."""
        number = self._list_of[row] - self.classes if self.holds(row) else -1
        return number if number >= 0 else None

    def place(self, row: int, standing: int | None) -> bool:
        """Give a row a standing, or (None) none: as if it was used now. Return whether it had
        another one; one that is not here has none."""
        if not self.holds(row) or self.standing(row) == standing:
            return False
        if standing is None:
            self._last[row] = self.now
        number = self.classes_of((row,))[0] if standing is None else self.classes + standing
        self._counts[self._list_of[row]] -= 1
        self._counts[number] += 1
        self._list_of[row] = number
        if row in self._lists:  # also what stayed, and is no tail: that is seen when it is proposed
            self._lists.move((row,), (number,))
            if self._own is not None:
                self._append_own(self._own, (row,))
        elif standing == PINNED:
            self._lists.append((row,), (number,))
        return True

    def oldest(self, standing: int) -> int:
        """Return the tail that has a standing, of PINNED any copy, and was used longest ago. There
        is one."""
        return self._lists.oldest(self.classes + standing)

    # -- who is next -----------------------------------------------------------------------------

    def worth_of(self, row: int) -> float:
        """Return what a row is worth now; infinite where it is not here."""
        number = self._list_of[row] if row < len(self._list_of) else _NOT_HERE
        return math.inf if number == _NOT_HERE else self._worth(number, self._last[row])

    def worths(self) -> Callable[[int], float]:
        """Return ``worth_of`` for one search: of copies of a class that were used at once it finds
        it once."""
        if type(self).worth_of is not EvictionPolicy.worth_of:
            return self.worth_of
        numbers, last, end, worth = self._list_of, self._last, len(self._list_of), self._worth
        known: dict[tuple[int, int], float] = {}

        def worth_of(row: int) -> float:
            number = numbers[row] if row < end else _NOT_HERE
            if number == _NOT_HERE:
                return math.inf
            place = number, last[row]
            found = known.get(place)
            if found is None:
                found = known[place] = worth(*place)
            return found

        return worth_of

    def _worth(self, number: int, last: int) -> float:
        return self.worth(number, last) if number < self.classes else _WORTH_OF[number - self.classes]

    def value_of(self, row: int) -> float:
        """Return how soon a row's copy can be expected to be of use, whatever class it is of: what
        was not used for twice as long has half of it. Infinite where it is not here, or is to
        stay."""
        worth = self.worth_of(row)
        return 1.0 / (1 + self.now - self._last[row]) if math.isfinite(worth) else math.inf

    def proposals(self) -> Iterator[tuple[float, int]]:
        """Return an iterator of worth and row, the lowest worth first. A step reads only the first
        of them: find each when it is asked for.

        Removes none: a row that the caller leaves where it is is proposed again by a later call.
        Between two rows the caller may ``unlist`` the first, and nothing else.
        """
        numbers = [number for number in range(self.classes + PINNED) if self._lists.counts[number]]
        return self._in_order(self._lists, numbers, [self._lists.oldest(number) for number in numbers])

    def proposals_of(self, tenant: int) -> Iterator[tuple[float, int]]:
        """Return the ``proposals`` among the rows of one tenant, where tenants are told apart. A
        class that overrides ``proposals`` may override this, too."""
        assert self._own is not None
        oldest = [(number, self._own.oldest(tenant, number)) for number in range(self.classes + PINNED)]
        found = [(number, row) for number, row in oldest if row >= 0]
        return self._in_order(self._own, [number for number, _ in found], [row for _, row in found])

    def _in_order(
        self, lists: RowLists | TenantLists, numbers: Sequence[int], rows: list[int]
    ) -> Iterator[tuple[float, int]]:
        """Yield worth and row of some lists, the lowest worth first. ``rows``: the oldest of
        each."""
        last = self._last
        worths = [self._worth(number, last[row]) for number, row in zip(numbers, rows, strict=True)]
        while (least := min(worths, default=math.inf)) < math.inf:
            at = worths.index(least)
            row, used = rows[at], last[rows[at]]
            while row >= 0 and last[row] == used:  # of one list those used at once are worth the same
                newer = lists.newer(row)
                yield least, row
                row = newer
            rows[at] = row
            worths[at] = self._worth(numbers[at], last[row]) if row >= 0 else math.inf


class LearnedPolicy(EvictionPolicy):
    """What brings the fewest hits for the time that it is kept leaves first.

    What a copy brings goes by its block's class and by how long ago it was last used; the history
    learns it from what requests come to (``ReuseHistory.rate``). Where classes differ in nothing,
    this is the order of last use.
    """

    classes = CLASSES

    def classes_of(self, rows: Sequence[int]) -> list[int]:
        """Return the class that the history has each row's block in."""
        return self._history.classes_of([self._keys[row] for row in rows])

    def _classes_restored(self, rows: NDArray[np.int32], known: NDArray[np.uint8]) -> NDArray[np.uint8]:
        # A user's class may derive from this one, and divide copies in its own way.
        is_own = type(self).classes_of is not LearnedPolicy.classes_of
        return super()._classes_restored(rows, known) if is_own else known

    def value_of(self, row: int) -> float:
        """Return what the history says that a copy brings."""
        return self.worth_of(row)

    def worth(self, number: int, last: int) -> float:
        """Return what the history says that a copy brings."""
        history = self._history
        blocks = history.came - last & _BLOCKS
        return history.rate(number, blocks if blocks <= _BLOCKS >> 1 else 0, max(0, history.tick - (last >> 32)))

    @property
    def now(self) -> int:
        """Both clocks of the history: ticks, and below them 32 bits of the blocks."""
        return self._history.tick << 32 | self._history.now & _BLOCKS


class TailFirst:
    """One tier's and size class's copies under an ``EvictionPolicy``; READY copies are inserted,
    and removed once.

    A block without those before it cannot be served. So a copy leaves for room only when no copy in
    its tier follows it, and the policy lists only those. What comes to be followed by a READY copy
    is taken out; it is listed again, by its own last use, when what followed it goes. Of what is
    listed a few may be followed by a copy that is being written, or is dropped. ``insert`` and
    ``touch`` take of one chain the tail first.

    What a block's standing says goes before what the policy says (``standings``).

    Where a recurrent state leaves all tiers, the KV that it follows serves nobody any more, back to
    where something else follows: unless it has a standing, it leaves next, if nothing follows it by
    then.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        catalog: Catalog,
        tier: Tier,
        history: ReuseHistory,
        standings: Standings,
        most_staying: Callable[[], int],
    ) -> None:
        self._policy = policy
        self._history = history
        self.list_tails, self.unlist, self.held_rows = policy.list_tails, policy.unlist, policy.held_rows
        self._catalog = catalog
        self._columns = catalog.columns(tier)
        self._tier = tier
        self.standings = CopyStandings(policy, catalog, tier, standings, most_staying)
        self._may_skip = bounds.TAILS_SKIPPED
        """Tails that may not leave, and that the next search may pass over if it goes on."""
        self.ended_early = False
        """Whether the last search for victims found too few, and the next one goes on from where it
        ended: there may be more."""
        self._in_vain = 0
        """Tails that searches have passed over since one was found, or something left."""
        self._stateless: set[int] = set()
        """Tails behind which a state has left."""

    def insert(self, rows: Sequence[int]) -> None:
        """Copies became READY: the earliest first. What they follow in another order is to be told
        (``unlist``)."""
        first_child = self._columns.first_child
        self._policy.unlist(map(self._catalog.parent_rows.__getitem__, rows))
        self._policy.insert(rows)
        self._policy.list_tails([row for row in rows if first_child[row] == NONE])
        self.standings.insert(rows)

    def fill(self, rows: NDArray[np.int32], uses: NDArray[np.uint32]) -> None:
        """See ``EvictionPolicy.fill``. The catalog has the copies already."""
        first_child = np.frombuffer(self._columns.first_child, np.int32)
        self._policy.fill(rows, uses, first_child[rows] == NONE)

    def touch(self, rows: Sequence[int]) -> None:
        """Copies were used: the earliest first. None of them is to leave first any more."""
        for row in self.standings.forget_first(rows):
            self._policy.place(row, None)
        self._policy.touch(rows)

    def remove(self, rows: Sequence[int]) -> list[int]:
        """Copies end, or are of use to nobody any more. Return what they follow and nothing else
        does, which are tails now: where another order has such a copy, that is to be told
        (``list_tails``)."""
        parent_rows = self._catalog.parent_rows
        self.standings.forget_first(rows)
        gone, staying = dict.fromkeys(rows), dict[int, int]()
        before = dict.fromkeys(map(parent_rows.__getitem__, rows))
        tails = [row for row in before if row != NONE and row not in gone and not self._is_followed(row, gone, staying)]
        if self._history.state_groups:
            for row in rows:
                self._note_stateless(row, self._stateless, gone)
            self._stateless.difference_update(rows)
        self._policy.remove(rows)
        if tails:
            self._policy.list_tails(tails)
        if rows:
            self._in_vain = 0
        return tails

    def _note_stateless(self, row: int, stateless: set[int], gone: dict[int, None]) -> None:
        """Add to ``stateless`` what a copy follows, if that serves nobody once it and all that is
        ``gone`` have left."""
        catalog = self._catalog
        parent, group = catalog.parent_rows[row], group_of(catalog.keys[row])
        # What is of another size, or a state before a state, is left to the policy.
        if parent == NONE or not self._policy.holds(parent) or self._is_followed(parent, gone, {}):
            return
        is_state = group in self._history.state_groups and group_of(catalog.keys[parent]) != group
        if row in stateless or (is_state and catalog.is_only_in(self._tier, row)):
            stateless.add(parent)

    # -- who is next -----------------------------------------------------------------------------

    def least_rate(self) -> float:
        """Return what the copy that would leave next brings (``ReuseHistory.rate``); 0: there is
        none."""
        for row in self._tails({}):
            if row in self._stateless:
                return 0.0
            return self._history.rate(*self._history.known(self._catalog.keys[row])[1:])
        return 0.0

    def value_of(self, row: int) -> float:
        """Return what a copy brings, as the policy sees it; see ``EvictionPolicy.value_of``."""
        return 0.0 if row in self._stateless else self._policy.value_of(row)

    def least_value(self) -> float:
        """Return what the copy brings that would leave next; 0: there is none."""
        return next((self.value_of(row) for row in self._tails({})), 0.0)

    def tell_apart(self, tenants: Sequence[int]) -> None:
        """See ``EvictionPolicy.tell_apart``."""
        self._policy.tell_apart(tenants)

    def victims(
        self, count: int, evictable: Callable[[int], bool], *, go_on: bool = False, tenant: int = 0
    ) -> list[int]:
        """Return up to ``count`` rows that may leave, in an order in which each leaves after all
        that follow it.

        Removes none. The search is bounded: where it ends early, the next one goes on from there.
        ``go_on``: by what the last one has left of its bound. ``tenant``: whose copies may leave;
        0: anybody's. Copies that may not leave now are postponed where they held it up, so that
        they do not hold up the next one too.
        """
        found: dict[int, None] = {}
        passed: list[int] = []
        if not go_on:
            self._may_skip = bounds.TAILS_SKIPPED
        left, may_skip = count, self._may_skip
        for row in self._tails(found, tenant) if count > 0 else ():
            if evictable(row):
                found[row] = None
                left -= 1
            else:
                passed.append(row)
                may_skip -= 1
            if left <= 0 or may_skip <= 0:
                break
        self._may_skip -= len(passed)
        if len(found) < count:
            for row in reversed(passed):
                self._stateless.discard(row)
                if self._policy.standing(row) == DEMOTED:
                    self._policy.place(row, None)
                self._policy.postpone(row)
        # Tails that were passed over come last: so the searches that end early are bounded, too.
        self._in_vain = 0 if found else self._in_vain + len(passed)
        is_cut = len(found) < count and self._may_skip <= 0
        self.ended_early = is_cut and self._in_vain < self._policy.proposed
        return list(found)

    def _tails(self, found: dict[int, None], tenant: int = 0) -> Iterator[int]:
        """Yield rows that nothing follows but what is ``found`` already, the lowest worth first.

        The caller adds to ``found`` what it was given, or does not. ``tenant``: whose rows; 0:
        anybody's.
        """
        policy, parent_rows, tenants = self._policy, self._catalog.parent_rows, self._catalog.tenants
        staying: dict[int, int] = {}
        worth_of = policy.worths()
        stateless = {row for row in self._stateless if tenants[row] == tenant} if tenant else self._stateless.copy()
        freed = sorted(
            (self._worth_of(row, stateless, worth_of), row)
            for row in stateless
            if not self._is_followed(row, found, staying)
        )
        heappush(freed, _NOBODY)
        proposals, given = policy.proposals_of(tenant) if tenant else policy.proposals(), set[int]()
        proposed = next(proposals, _NOBODY)
        while True:
            is_proposed = proposed <= freed[0]
            if not is_proposed:
                _, row = heappop(freed)
            elif proposed == _NOBODY:
                return
            else:
                row = proposed[1]
                if self._is_followed(row, found, staying):
                    policy.unlist((row,))
                    proposed = next(proposals, _NOBODY)
                    continue
            is_new = row not in given
            if is_new:
                given.add(row)
                yield row
            if is_proposed:  # found only now: mostly nobody asks for another
                proposed = next(proposals, _NOBODY)
            if not is_new:
                continue
            parent = parent_rows[row]
            if tenant and parent != NONE and tenants[parent] != tenant:  # it was stored before tenants were known
                continue
            if row in found and parent != NONE and not self._is_followed(parent, found, staying):
                if self._history.state_groups:
                    self._note_stateless(row, stateless, found)
                if parent != proposed[1] or parent in stateless:  # else it comes by itself
                    heappush(freed, (self._worth_of(parent, stateless, worth_of), parent))

    def _worth_of(self, row: int, stateless: Collection[int], worth_of: Callable[[int], float]) -> float:
        if row in stateless and self._policy.standing(row) is None:
            return _STATELESS
        return worth_of(row)

    def _is_followed(self, row: int, found: dict[int, None], staying: dict[int, int]) -> bool:
        """Whether a copy in the tier follows a row's that does not leave before it.

        ``staying``: of rows that this search asked for, the first that may be such a copy: of many
        that follow one row, none is looked at twice.
        """
        columns = self._columns
        child = staying[row] if row in staying else columns.first_child[row]
        while child != NONE and child in found:
            child = columns.next_child[child]
        staying[row] = child
        return child != NONE


_POLICIES: Mapping[str, type[EvictionPolicy]] = {"learned": LearnedPolicy, "lru": EvictionPolicy}
assert tuple(_POLICIES) == EVICTIONS


def make_eviction(name: str, keys: Keys, history: ReuseHistory) -> EvictionPolicy:
    """Return a new policy; ``name``: one of ``EVICTIONS``, or a class of the user's as
    ``module:Class``. Raises ConfigError."""
    if ":" not in name:
        return _POLICIES[name](keys, history)
    own: EvictionPolicy = make_own("eviction", name, EvictionPolicy, keys, history)
    return own
