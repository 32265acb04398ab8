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
from kvdisk.manager.catalog import NONE, Catalog
from kvdisk.manager.reuse import CLASSES, ReuseHistory
from kvdisk.manager.row_lists import GROWN_ROWS, RowLists
from kvdisk.manager.standings import DEMOTED, PINNED, CopyStandings, Standings

Keys = NDArray[np.object_] | Sequence[BlockKey]
"""The keys of the catalog's rows, by row."""
MOST_CLASSES: Final = 100
_NOBODY: Final = (math.inf, NONE)
_USELESS: Final = -1.0
"""Worth less than anything else."""
_WORTH_OF: Final = (-1.0, 2.0**1000, math.inf)
"""What a copy is worth, by its standing: less than any that has none, or more."""


class EvictionPolicy:
    """Order of the copies of one tier and size class: the lowest worth leaves first. Here that is
    the least recently used; a subclass says what copies are worth otherwise.

    Each class of copies has its list, in order of last use, so that only the oldest of each has to
    be compared. A row is inserted once and removed once; other calls ignore rows that are not
    there. Time is the history's, unless a subclass has a clock of its own. What a policy knows of
    rows is in arrays, not in a Python object for each row (``tests/unit/test_garbage.py``), and it
    grows them itself when a higher row comes.

    A class of the user's derives from this one, and says what copies are worth: the classes that it
    divides them into, a clock of its own, or ``proposals`` altogether.

    Rows that cannot leave, whatever they are worth, are parked: they are nobody's oldest until they
    are used, or called back. Rows with a standing are in lists of their own, behind those of the
    classes: one for each standing, of which those that stay are never proposed.

    ``keys``: of the catalog's rows, read when a row is given. ``history``: what is known of them.
    """

    classes = 1
    """How many, up to ``MOST_CLASSES``. A block's class only rises while its copy is here."""

    def __init__(self, keys: Keys, history: ReuseHistory) -> None:
        assert 0 < self.classes <= MOST_CLASSES, f"a policy has up to {MOST_CLASSES} classes, and not {self.classes}"
        self._keys = keys
        self._history = history
        self._kinds = self.classes + 3
        self._lists = RowLists(2 * self._kinds)
        """Of each class and standing, then what is parked of each."""
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

    # -- rows ------------------------------------------------------------------------------------

    def insert(self, rows: Sequence[int]) -> None:
        """Copies became READY: the earliest first."""
        lacking = max(rows, default=-1) + 1 - len(self._last)
        if lacking > 0:
            self._last.extend(bytes(lacking + GROWN_ROWS))
        last, now = self._last, self.now
        for row in rows:
            last[row] = now
        self._lists.append(rows, self.classes_of(rows))

    def touch(self, rows: Sequence[int]) -> None:
        """Copies were used: the earliest first.

        One request may use a copy up to three times: when it is read ahead for, when it has loaded
        the copy, and when it reaches the block. The history counts that once.
        """
        last, now, rows = self._last, self.now, self._lists.held(rows)
        for row in rows:
            last[row] = now
        # A key may be forgotten, but not while its copy is here.
        before = [number % self._kinds for number in self._lists.numbers_of(rows)]
        numbers = list(map(max, self.classes_of(rows), before))
        self._lists.remove(rows)
        self._lists.append(rows, numbers)

    def postpone(self, row: int) -> None:
        """A copy could not leave now: propose it later than others of its class. That is no use."""
        if row in self._lists:
            self._last[row] = self.now
            self._lists.move(row, self._class(row))

    def park(self, row: int) -> None:
        """Propose a row, the oldest of its class, no more until it is called back, or used."""
        self._lists.move(row, self._kinds + self._class(row))

    def call_back(self, rows: Iterable[int]) -> None:
        """Propose parked rows again: each was older than all of its class when it was parked."""
        for row in self._lists.held(rows):
            number = self._lists.number_of(row) - self._kinds
            if number >= 0:
                self._lists.move(row, number, oldest=True)

    def remove(self, rows: Sequence[int]) -> None:
        """Copies left the tier, for whatever reason; rows still have their keys."""
        self._lists.remove(rows)

    def fill(self, rows: NDArray[np.int32], uses: NDArray[np.uint32]) -> None:
        """Insert many rows at once, the oldest first, into an empty policy, and into the history:
        what was there before a restart. ``uses``: how often each was used since it was stored."""
        numbers = self._history.restore([self._keys[row] for row in rows.tolist()], uses)
        if self.classes != CLASSES:
            numbers = np.array(self.classes_of(rows.tolist()), np.uint8)
        last = np.zeros(int(rows.max(initial=-1)) + 1, np.uint64)
        last[rows] = np.maximum(np.arange(1 - len(rows), 1) + self.now, 0)
        self._last = array("Q", last.tobytes())
        self._lists.fill(rows, numbers)

    # -- standings -------------------------------------------------------------------------------

    def holds(self, row: int) -> bool:
        """Return whether a row is here."""
        return row in self._lists

    def count(self, standing: int) -> int:
        """Return how many rows have a standing."""
        number = self.classes + standing
        return self._lists.counts[number] + self._lists.counts[number + self._kinds]

    @property
    def parked(self) -> int:
        """How many rows are parked."""
        return sum(self._lists.counts[self._kinds :])

    @property
    def proposed(self) -> int:
        """How many rows are proposed, or will be: neither parked nor to stay."""
        return sum(self._lists.counts[: self.classes + PINNED])

    def standing(self, row: int) -> int | None:
        """Return a row's standing; None: it has none, or is not here."""
        number = self._class(row) - self.classes if row in self._lists else -1
        return number if number >= 0 else None

    def place(self, row: int, standing: int | None) -> bool:
        """Give a row a standing, or (None) none: as if it was used now. Return whether it had
        another one; one that is not here has none."""
        if row not in self._lists or self.standing(row) == standing:
            return False
        if standing is None:
            self._last[row] = self.now
        self._lists.move(row, self.classes_of((row,))[0] if standing is None else self.classes + standing)
        return True

    def oldest(self, standing: int) -> int:
        """Return the row that has a standing and was used longest ago. There is one, and it is not
        parked."""
        return self._lists.oldest(self.classes + standing)

    # -- who is next -----------------------------------------------------------------------------

    def worth_of(self, row: int) -> float:
        """Return what a row is worth now; infinite where it is not here."""
        return self._worth(self._class(row), self._last[row]) if row in self._lists else math.inf

    def _worth(self, number: int, last: int) -> float:
        return self.worth(number, last) if number < self.classes else _WORTH_OF[number - self.classes]

    def value_of(self, row: int) -> float:
        """Return how soon a row's copy can be expected to be of use, whatever class it is of: what
        was not used for twice as long has half of it. Infinite where it is not here, or is to
        stay."""
        worth = self.worth_of(row)
        return 1.0 / (1 + self.now - self._last[row]) if math.isfinite(worth) else math.inf

    def proposals(self) -> Iterator[tuple[float, int]]:
        """Yield worth and row, the lowest worth first. A step reads only the first of them: find
        each when it is asked for.

        Removes none: a row that the caller leaves where it is is proposed again by a later call.
        Between two rows the caller may park the first, and nothing else.
        """
        lists, last = self._lists, self._last
        numbers = [number for number in range(self.classes + PINNED) if lists.counts[number]]
        rows = [lists.oldest(number) for number in numbers]
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

    def _class(self, row: int) -> int:
        return self._lists.number_of(row) % self._kinds


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

    def value_of(self, row: int) -> float:
        """Return what the history says that a copy brings."""
        return self.worth_of(row)

    def worth(self, number: int, last: int) -> float:
        """Return what the history says that a copy brings."""
        return self._history.rate(number, self._history.now - last)


class TailFirst:
    """One tier's and size class's copies under an ``EvictionPolicy``; READY copies are inserted,
    and removed once.

    A block without those before it cannot be served. So a copy leaves for room only when no copy in
    its tier follows it, and only those are proposed: what a policy proposes too early is parked
    until something that follows it goes. ``insert`` and ``touch`` take of one chain the tail
    first; ``fill`` and ``call_back`` are the policy's own.

    What a block's standing says goes before what the policy says (``standings``).

    Where a recurrent state leaves all tiers, the KV that it follows serves nobody any more, back to
    where something else follows: unless it has a standing, it leaves next, if nothing follows it by
    then.
    """

    MAX_SKIPPED = 1024
    """Tails that may not leave that one search passes over: bounds a step."""
    MAX_STEPS = 4096
    """Rows that one search parks or looks at, besides four a victim."""

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
        self.fill, self.call_back = policy.fill, policy.call_back
        self._catalog = catalog
        self._tier = tier
        self.standings = CopyStandings(policy, catalog, tier, standings, most_staying)
        self._steps = 0
        self.ended_early = False
        """Whether the last search for victims found too few, and the next one goes on from where it
        ended: there may be more."""
        self._in_vain = 0
        """Tails that searches have passed over since one was found, or something left."""
        self._useless: set[int] = set()
        """Tails behind which a state has left."""

    def insert(self, rows: Sequence[int]) -> None:
        """Copies became READY: the earliest first."""
        self._policy.insert(rows)
        self.standings.insert(rows)

    def touch(self, rows: Sequence[int]) -> None:
        """Copies were used: the earliest first. None of them is to leave first any more."""
        for row in self.standings.forget_first(rows):
            self._policy.place(row, None)
        self._policy.touch(rows)

    def remove(self, rows: Sequence[int]) -> list[int]:
        """Copies end, or are of use to nobody any more. Return what they follow, which may be tails
        now: where another order has it, that is to be told (``call_back``)."""
        parent_rows = self._catalog.parent_rows
        self.standings.forget_first(rows)
        before = [parent_rows[row] for row in rows if parent_rows[row] != NONE]
        if self._history.state_groups:
            gone = dict.fromkeys(rows)
            for row in rows:
                self._note_useless(row, self._useless, gone)
            self._useless.difference_update(rows)
        self._policy.remove(rows)
        self._policy.call_back(before)
        if rows:
            self._in_vain = 0
        return before

    def _note_useless(self, row: int, useless: set[int], gone: dict[int, None]) -> None:
        """Add to ``useless`` what a copy follows, if that serves nobody once it and all that is
        ``gone`` have left."""
        catalog = self._catalog
        parent, group = catalog.parent_rows[row], group_of(catalog.keys[row])
        # What is of another size, or a state before a state, is left to the policy.
        if parent == NONE or not self._policy.holds(parent) or self._is_followed(parent, gone, {}):
            return
        is_state = group in self._history.state_groups and group_of(catalog.keys[parent]) != group
        if row in useless or (is_state and catalog.is_only_in(self._tier, row)):
            useless.add(parent)

    # -- who is next -----------------------------------------------------------------------------

    def least_rate(self) -> float:
        """Return what the copy that would leave next brings (``ReuseHistory.rate``); 0: there is
        none."""
        self._steps = self.MAX_STEPS
        for row in self._tails({}):
            if row in self._useless:
                return 0.0
            _, number, age = self._history.known(self._catalog.keys[row])
            return self._history.rate(number, age)
        return 0.0

    def value_of(self, row: int) -> float:
        """Return what a copy brings, as the policy sees it; see ``EvictionPolicy.value_of``."""
        return 0.0 if row in self._useless else self._policy.value_of(row)

    def least_value(self) -> float:
        """Return what the copy brings that would leave next; 0: there is none."""
        self._steps = self.MAX_STEPS
        return next((self.value_of(row) for row in self._tails({})), 0.0)

    def victims(self, count: int, evictable: Callable[[int], bool], *, go_on: bool = False) -> list[int]:
        """Return up to ``count`` rows that may leave, in an order in which each leaves after all
        that follow it.

        Removes none. The search is bounded: where it ends early, the next one goes on from there.
        ``go_on``: by what the last one has left of its bound.
        Copies that may not leave now are postponed where they held it up, so that they do not hold
        up the next one too.
        """
        found: dict[int, None] = {}
        passed: list[int] = []
        parked = self._policy.parked
        if not go_on:
            self._steps = self.MAX_STEPS + 4 * count
        for row in self._tails(found) if count > 0 else ():
            if evictable(row):
                found[row] = None
            else:
                passed.append(row)
            if len(found) >= count or len(passed) >= self.MAX_SKIPPED:
                break
        if len(found) < count:
            for row in reversed(passed):
                self._useless.discard(row)
                if self._policy.standing(row) == DEMOTED:
                    self._policy.place(row, None)
                self._policy.postpone(row)
        # Rows that were parked are not looked at again, and tails that were passed over come last:
        # so the searches that end early are bounded, too.
        self._in_vain = 0 if found else self._in_vain + len(passed)
        is_cut = len(found) < count and (self._steps <= 0 or len(passed) >= self.MAX_SKIPPED)
        self.ended_early = is_cut and (self._policy.parked > parked or self._in_vain < self._policy.proposed)
        return list(found)

    def _tails(self, found: dict[int, None]) -> Iterator[int]:
        """Yield rows that nothing follows but what is ``found`` already, the lowest worth first.

        The caller adds to ``found`` what it was given, or does not.
        """
        policy, parent_rows = self._policy, self._catalog.parent_rows
        staying: dict[int, int] = {}
        useless = self._useless.copy()
        freed = sorted(
            (self._worth_of(row, useless), row) for row in useless if not self._is_followed(row, found, staying)
        )
        heappush(freed, _NOBODY)
        proposals, given = policy.proposals(), set[int]()
        proposed = next(proposals, _NOBODY)
        while self._steps > 0:
            self._steps -= 1
            if proposed <= freed[0]:
                if proposed == _NOBODY:
                    return
                row = proposed[1]
                follows = self._is_followed(row, found, staying)
                if follows:
                    policy.park(row)
                proposed = next(proposals, _NOBODY)
                if follows:
                    continue
            else:
                _, row = heappop(freed)
            if row in given:
                continue
            given.add(row)
            yield row
            parent = parent_rows[row]
            if row in found and parent != NONE and not self._is_followed(parent, found, staying):
                if self._history.state_groups:
                    self._note_useless(row, useless, found)
                if parent != proposed[1] or parent in useless:  # else it comes by itself
                    heappush(freed, (self._worth_of(parent, useless), parent))

    def _worth_of(self, row: int, useless: Collection[int]) -> float:
        if row in useless and self._policy.standing(row) is None:
            return _USELESS
        return self._policy.worth_of(row)

    def _is_followed(self, row: int, found: dict[int, None], staying: dict[int, int]) -> bool:
        """Whether a copy in the tier follows a row's that does not leave before it.

        ``staying``: of rows that this search asked for, the first that may be such a copy: of many
        that follow one row, none is looked at twice.
        """
        columns = self._catalog.columns(self._tier)
        child = staying.get(row, columns.first_child[row])
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
