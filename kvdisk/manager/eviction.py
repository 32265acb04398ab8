# SPDX-License-Identifier: Apache-2.0
"""Who leaves a tier: the policies by name, and the rule that of one chain the tail leaves before
the head.

A policy knows rows of the catalog and their order, nothing else. Scheduler thread only."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey, Tier
from kvdisk.config import EVICTIONS
from kvdisk.errors import ConfigError
from kvdisk.manager.catalog import NONE, Catalog, number_of
from kvdisk.manager.row_lists import GROWN_ROWS, RowLists

Keys = NDArray[np.object_] | Sequence[BlockKey]
"""The keys of the catalog's rows, by row."""


class EvictionPolicy:
    """Order of the copies of one tier and size class. What is here keeps the order of last use.

    Many rows come, and go, at a time: a prompt's blocks, and those that make room for them. Of a
    chain the tail comes before the head. A row is inserted once and removed once; other calls
    ignore rows that are not there. A policy has no clock: it counts what is inserted and used. What
    it knows of rows is in arrays, not in a Python object for each row
    (``tests/unit/test_garbage.py``), and it grows them itself when a higher row comes.

    ``keys``: of the catalog's rows, read when a row is given.
    """

    _LISTS = 1

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._lists = RowLists(self._LISTS)

    def insert(self, rows: Sequence[int]) -> None:
        """Copies became READY: the earliest first."""
        self._lists.append(rows)

    def access(self, rows: Sequence[int]) -> None:
        """Copies were used: the earliest first.

        One request may use a copy up to three times: when it is read ahead for, when it has loaded
        the copy, and when it reaches the block. A policy that counts uses counts those once.
        """
        for row in self._lists.held(rows):
            self._lists.move(row, 0)

    def postpone(self, row: int) -> None:
        """A copy could not leave now: propose it later than others of its list. That is no use."""
        if row in self._lists:
            self._lists.move(row, self._lists.number_of(row))

    def remove(self, rows: Sequence[int]) -> None:
        """Copies left the tier, for whatever reason; rows still have their keys."""
        self._lists.remove(rows)

    def fill(self, rows: NDArray[np.int32], uses: NDArray[np.uint32]) -> None:  # noqa: ARG002 - LRU counts none
        """Insert many rows at once, the oldest first, into an empty policy: what was there before a
        restart.

        ``uses``: how often each was used since it was stored.
        """
        self._lists.fill(rows, np.zeros(len(rows), np.uint8))

    def proposals(self) -> Iterator[int]:
        """Yield rows in the order in which they should leave. A step reads only the first of them:
        find each when it is asked for. Removes none: a row that the caller leaves where it is is
        proposed again by a later call. Not to be advanced after any other call."""
        return self._lists.walk()


def _grow(column: bytearray | array[int], rows: Sequence[int]) -> None:
    """Make place in a column by row for these rows, and some more."""
    lacking = max(rows, default=-1) + 1 - len(column)
    if lacking > 0:
        column.extend(bytes(lacking + GROWN_ROWS))


class LruPolicy(EvictionPolicy):
    """Least recently used leaves first."""


class S3FifoPolicy(EvictionPolicy):
    """S3-FIFO: new copies pass through a probation queue, and only those used there get into the
    main queue.

    So a scan of blocks that nobody asks for again costs the main queue nothing. A copy that leaves
    the probation queue is remembered for a while; if it comes back, it goes to the main queue at
    once. In the main queue a copy gets one more round for each use, up to three. The shares are
    those that did best on a trace (decision 12).
    """

    _LISTS = 2
    """List 0 is the probation queue, 1 the main one."""
    _PROBATION_SHARE = 0.7
    _MOST_USES = 3
    _MOST_MOVES = 4096
    """Rows that one search moves between queues before it proposes them as they stand."""
    _LONGEST_STREAK = 8
    """Rows of the main queue that are proposed before one on probation is, whatever the shares."""

    def __init__(self, keys: Keys) -> None:
        super().__init__(keys)
        self._uses = bytearray()
        """By row, since it came to its queue."""
        self._left = LeftKeys(1)
        self._now = self._life = 0

    def insert(self, rows: Sequence[int]) -> None:
        """Put rows on probation, or in the main queue where they have left not long ago."""
        _grow(self._uses, rows)
        known = self._left.take([self._keys[row] for row in rows], self._now)
        for row in rows:
            self._uses[row] = 0
        self._lists.append(rows, [int(at in known and known[at][1] < self._life) for at in range(len(rows))])

    def access(self, rows: Sequence[int]) -> None:
        """Count a use of each."""
        for row in self._lists.held(rows):
            self._uses[row] = min(self._uses[row] + 1, self._MOST_USES)

    def remove(self, rows: Sequence[int]) -> None:
        """Take rows out; those on probation are remembered."""
        life = sum(self._lists.counts)
        left = [row for row in self._lists.held(rows) if self._lists.number_of(row) == 0]
        super().remove(rows)
        if left:
            times = range(self._now + 1, self._now + 1 + len(left))
            self._left.add([self._keys[row] for row in left], [0] * len(left), times, life)
            self._now, self._life = times[-1], life

    def fill(self, rows: NDArray[np.int32], uses: NDArray[np.uint32]) -> None:
        """Insert rows, all on probation, which those that were used leave for the main queue."""
        by_row = np.zeros(int(rows.max(initial=-1)) + 1, np.uint8)
        by_row[rows] = np.minimum(uses, self._MOST_USES)
        self._uses = bytearray(by_row)
        super().fill(rows, uses)

    def proposals(self) -> Iterator[int]:
        """Yield the oldest of the queue that is above its share; rows that were used move on."""
        queues, uses = self._lists, self._uses
        places = [queues.oldest(0), queues.oldest(1)]
        waiting = list(queues.counts)  # rows that this search has not looked at
        moves, streak = self._MOST_MOVES, 0
        while places[0] >= 0 or places[1] >= 0:
            surplus = waiting[0] >= self._PROBATION_SHARE * (waiting[0] + waiting[1])
            # Those of a main queue that is all in use must not keep the others from being proposed
            # at all.
            number = 0 if places[0] >= 0 and (surplus or places[1] < 0 or streak >= self._LONGEST_STREAK) else 1
            row = places[number]
            places[number] = queues.newer(row)
            waiting[number] -= 1
            if not uses[row] or moves <= 0:
                streak = streak + 1 if number else 0
                yield row
                continue
            moves -= 1
            uses[row] = uses[row] - 1 if number else 0
            queues.move(row, 1)
            waiting[1] += 1
            if places[1] < 0:
                places[1] = row


class CreditPolicy(EvictionPolicy):
    """Least recently used leaves first; what was used more often counts as used later than it was.

    How much later goes by the mean interval between two uses of a copy, which is learnt. A
    conversation that goes on does so about one interval later; one that was silent for ``HORIZON``
    intervals is over, however often it was used before. So a copy whose last use was ``age`` ago
    counts as used later by half of what is left to that horizon,

        credit = class * max(0, horizon - age) / 2

    where the class rises by one with each doubling of its uses. In a tier so small that copies
    leave within an interval frequency decides, in one so large that they stay for many last use
    does. Time is counted in copies inserted or used. Each class has its list.

    What has left is remembered with its uses and its last, as long as a table has place; if it
    comes back they count. Uses that follow each other within a small part of the interval are one:
    a request looks at a copy up to three times. The constants are those of decision 25.
    """

    HORIZON: Final = 4.0
    """In mean intervals."""
    MEMORY: Final = 4096
    """Uses over which the interval is averaged."""
    _SHORTEST: Final = 0.0625
    """Uses that are less than so many mean intervals apart are one."""
    _MOST_USES: Final = 9
    _CLASS_OF: Final = bytes((0, 0, 1, 2, 2, 3, 3, 3, 3)).ljust(256, b"\4")
    """Of a number of uses: how often it can be halved, rounded up."""
    _LISTS = max(_CLASS_OF) + 1
    _NOTHING: Final = 1 << 62
    """Above all ranks."""
    _FEWEST_PLACES: Final = 1 << 18
    """Of the keys that have left."""

    def __init__(self, keys: Keys) -> None:
        super().__init__(keys)
        # By row: how often it was used, up to the most that matter, and when last.
        self._uses = bytearray()
        self._last = array("Q")
        self._left = LeftKeys(self._FEWEST_PLACES)
        self._now = 0
        self._learnt = 0
        self.interval = 0.0

    def insert(self, rows: Sequence[int]) -> None:
        """Make rows the newest; those that have left not long ago are used again."""
        _grow(self._uses, rows)
        _grow(self._last, rows)
        known = self._left.take([self._keys[row] for row in rows], self._now)
        for at, row in enumerate(rows):
            self._uses[row] = self._count_use(*known[at]) if at in known else 1
            self._now += 1
            self._last[row] = self._now
        self._lists.append(rows, [self._CLASS_OF[self._uses[row]] for row in rows])

    def access(self, rows: Sequence[int]) -> None:
        """Count a use of each, and make rows the newest."""
        uses, last = self._uses, self._last
        for row in self._lists.held(rows):
            uses[row] = self._count_use(uses[row], self._now - last[row])
            self._now += 1
            last[row] = self._now
            self._lists.move(row, self._CLASS_OF[uses[row]])

    def postpone(self, row: int) -> None:
        """Make a row the newest of those used as often; it was not used."""
        super().postpone(row)
        if row in self._lists:
            self._now += 1
            self._last[row] = self._now

    def remove(self, rows: Sequence[int]) -> None:
        """Take rows out, and remember them."""
        count, rows, keys = sum(self._lists.counts), self._lists.held(rows), self._keys
        super().remove(rows)
        uses, last = [self._uses[row] for row in rows], [self._last[row] for row in rows]
        self._left.add([keys[row] for row in rows], uses, last, count)

    def fill(self, rows: NDArray[np.int32], uses: NDArray[np.uint32]) -> None:
        """Insert rows as if one were used after the other; being stored counts as a use."""
        counts = np.minimum(uses, self._MOST_USES - 1).astype(np.uint8) + np.uint8(1)
        count = int(rows.max(initial=-1)) + 1
        by_row, last = np.ones(count, np.uint8), np.zeros(count, np.uint64)
        by_row[rows], last[rows] = counts, np.arange(1, len(rows) + 1, dtype=np.uint64)
        self._uses, self._last = bytearray(by_row), array("Q", last.tobytes())
        self._now = len(rows)
        self._lists.fill(rows, np.frombuffer(self._CLASS_OF, np.uint8)[counts])

    def proposals(self) -> Iterator[int]:
        """Yield from the one on that counts as used longest ago; that of a class is its oldest."""
        lists, now = self._lists, self._now
        rows = [lists.oldest(number) for number in range(self._LISTS)]
        horizon = int(self.HORIZON * self.interval)
        ranks = [self._rank(number, row, now, horizon) for number, row in enumerate(rows)]
        while (least := min(ranks)) < self._NOTHING:
            number = ranks.index(least)
            ranks[number] = self._NOTHING
            others, row = min(ranks), rows[number]
            while row >= 0 and (least := self._rank(number, row, now, horizon)) <= others:
                newer = lists.newer(row)
                yield row
                row = newer
            rows[number] = row
            ranks[number] = least if row >= 0 else self._NOTHING

    def _rank(self, number: int, row: int, now: int, horizon: int) -> int:
        """Return how long ago a row (or -1) of a class counts as used, times -2."""
        if row < 0:
            return self._NOTHING
        age = now - self._last[row]
        return (number * (horizon - age) if age < horizon else 0) - 2 * age

    def _count_use(self, count: int, age: int) -> int:
        """Return the uses of a copy that had ``count`` ``age`` ago, and is used again; learn."""
        if age < self._SHORTEST * self.interval:
            return count
        self._learnt = min(self._learnt + 1, self.MEMORY)
        self.interval += (age - self.interval) / self._learnt
        return min(count + 1, self._MOST_USES)


class LeftKeys:
    """Keys that have left, with their uses and their last, in a table by number: 8 bytes a place.

    A later key takes a place over, so that about as many are remembered as there are places: one to
    two for each row, and no fewer than ``fewest_places``. Once in 2**27 times a key is taken for
    another: that decides nothing but who leaves first. A place is one integer below 2**60, as it is
    hardly ever in the caches: from the top on 28 bits that tell keys apart, of which one is always
    set, 28 of the last use, and 4 of the number of uses.
    """

    _NAME: Final = (1 << 61) - 1
    """The bits of a key's number that are used."""
    _LAST: Final = (1 << 28) - 1
    """The bits of a time that are."""

    def __init__(self, fewest_places: int) -> None:
        self._fewest = fewest_places
        self._table = array("Q")

    def add(self, keys: Sequence[BlockKey], uses: Sequence[int], last: Sequence[int], total: int) -> None:
        """Remember keys of a policy that had ``total`` rows. ``uses`` and ``last``: of each."""
        assert max(uses, default=0) < 16
        if keys and len(self._table) < max(total, 1):  # the larger table is empty; it doubles at least: this is rare
            self._table = array("Q", [0]) * max(self._fewest, 1 << (total - 1).bit_length())
        table, mask = self._table, len(self._table) - 1
        for key, count, time in zip(keys, uses, last, strict=True):
            name = number_of(key) & self._NAME
            table[name & mask] = (name >> 33 | 1) << 32 | (time & self._LAST) << 4 | count

    def take(self, keys: Sequence[BlockKey], now: int) -> dict[int, tuple[int, int]]:
        """Forget keys; return by position the uses of those known, and how long ago the last."""
        table, mask = self._table, len(self._table) - 1
        found: dict[int, tuple[int, int]] = {}
        for at, key in enumerate(keys) if table else ():
            name = number_of(key) & self._NAME
            content = table[name & mask]
            if content >> 32 == name >> 33 | 1:
                table[name & mask] = 0
                found[at] = content & 15, now - (content >> 4) & self._LAST
        return found


class TailFirst:
    """One tier's and size class's copies under an ``EvictionPolicy``; READY copies are inserted,
    and removed once.

    A block without those before it cannot be served. So, whatever a policy proposes, a copy leaves
    for room only when no copy in its tier follows it. Copies that may not leave now hold back those
    before them.

    ``insert``, ``access`` (of one chain the tail first), ``remove`` and ``fill`` are the policy's
    own.
    """

    MAX_SKIPPED = 1024
    """Proposals of which nothing may leave that one search passes over: bounds a step."""
    MAX_STEPS = 4096
    """Rows that one search looks at on its way from heads to tails, besides four a victim."""

    def __init__(self, policy: EvictionPolicy, catalog: Catalog, tier: Tier) -> None:
        self._policy = policy
        self.insert, self.access, self.remove, self.fill = policy.insert, policy.access, policy.remove, policy.fill
        self._catalog = catalog
        self._tier = tier
        self._steps = 0
        self._held: set[int] = set()
        # Where the last descent ended: the proposed row, the row reached, and that row's
        # generation.
        self._reached = (NONE, NONE, 0)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Return up to ``count`` rows that may leave, in an order in which each leaves after all
        that follow it.

        Removes none. The search is bounded: where it ends early, the next one goes on from there.
        What held it up (copies in use, and those before them) is postponed, so that it does not
        hold up the next one too.
        """
        found: dict[int, None] = {}
        passed: list[int] = []
        self._held.clear()
        self._steps = self.MAX_STEPS + 4 * count
        for row in self._policy.proposals() if count > 0 else ():
            before = len(found)
            if row not in found and row not in self._held:
                if evictable(row) and self._nothing_stays_behind(row, found):
                    found[row] = None
                else:
                    self._gather(row, count, evictable, found)
            if len(found) >= count or self._steps <= 0:
                break
            if len(found) == before and row not in found:
                passed.append(row)
                if len(passed) >= self.MAX_SKIPPED:
                    break
        if len(found) < count:
            for row in reversed(passed):
                self._policy.postpone(row)
        return list(found)

    def _gather(self, top: int, count: int, evictable: Callable[[int], bool], found: dict[int, None]) -> None:
        """Add to ``found`` what may leave of the tree under ``top``, from its tails on."""
        before, catalog = len(found), self._catalog
        known, start, generation = self._reached
        if known != top or catalog.generations[start] != generation or not catalog.evictable_in(self._tier)(start):
            start = top
        self._walk(top, start, count, evictable, found)
        if len(found) == before and start != top and self._steps > 0:
            self._walk(top, top, count, evictable, found)  # what it reached last time is held back now

    def _walk(self, top: int, start: int, count: int, evictable: Callable[[int], bool], found: dict[int, None]) -> None:
        """Go through the tree under ``top`` from ``start`` on, children before parents."""
        parent_rows, columns, held = self._catalog.parent_rows, self._catalog.columns(self._tier), self._held
        row, down = start, True
        while self._steps > 0:
            self._steps -= 1
            if down and row not in found and row not in held:
                child = columns.first_child[row]
                if child != NONE:
                    row = child
                    continue
            if row not in found:
                if evictable(row) and self._nothing_stays_behind(row, found):
                    found[row] = None
                else:
                    held.add(row)
            parent = parent_rows[row]
            if row == top or parent == NONE or len(found) >= count:
                break
            sibling = columns.next_child[row]
            down = sibling != NONE
            row = sibling if down else parent
        # A row that was found is about to leave; its parent stays.
        if row in found and row != top and parent_rows[row] != NONE:
            row = parent_rows[row]
        self._reached = (top, row, self._catalog.generations[row])

    def _nothing_stays_behind(self, row: int, found: dict[int, None]) -> bool:
        """Whether all that follows a row's copy in the tier leaves before it."""
        columns = self._catalog.columns(self._tier)
        child = columns.first_child[row]
        while child != NONE and child in found:
            self._steps -= 1
            child = columns.next_child[child]
        return child == NONE


_POLICIES: Mapping[str, type[EvictionPolicy]] = {"credit": CreditPolicy, "lru": LruPolicy, "s3fifo": S3FifoPolicy}
assert tuple(_POLICIES) == EVICTIONS


def make_eviction(name: str, keys: Keys) -> EvictionPolicy:
    """Return a new policy by its configuration name. Raises ConfigError."""
    if name not in _POLICIES:
        raise ConfigError(f"eviction must be one of {', '.join(map(repr, _POLICIES))}, not {name!r}.")
    return _POLICIES[name](keys)
