# SPDX-License-Identifier: Apache-2.0
"""Who leaves by last use, with credit for uses before it: the eviction policy by default. Scheduler thread only."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey
from kvdisk.manager.key_numbers import number_of
from kvdisk.manager.row_lists import GROWN_ROWS, RowLists

_MOST_USES = 9
_CLASS_OF = bytes((0, 0, 1, 2, 2, 3, 3, 3, 3, 4))
"""Of a number of uses: how often it can be halved, rounded up."""
_CLASSES = max(_CLASS_OF) + 1
_NAME: Final = (1 << 61) - 1
_LAST: Final = (1 << 28) - 1
"""The bits of a key's number, and of a time, that are used in the table of keys that have left."""
_NOTHING = 1 << 62
"""Above all ranks."""
HORIZON: Final = 4.0
"""In mean intervals."""
_SHORTEST: Final = 0.0625
"""Uses that are less than so many mean intervals apart are one."""
MEMORY: Final = 4096
"""Uses over which the interval is averaged."""


class CreditPolicy:
    """Least recently used leaves first; what was used more often counts as used later than it was.

    How much later goes by the mean interval between two uses of a copy, which is learnt. A conversation that goes on
    does so about one interval later; one that was silent for ``HORIZON`` intervals is over, however often it was used
    before. So a copy whose last use was ``age`` ago counts as used later by half of what is left to that horizon,

        credit = class * max(0, horizon - age) / 2

    where the class rises by one with each doubling of its uses. In a tier so small that copies leave within an
    interval frequency decides, in one so large that they stay for many last use does. Time is counted in copies
    inserted or used.

    What has left is remembered with its uses and its last, as long as a table has place; if it comes back they count.
    Uses that follow each other within a small part of the interval are one: a request looks at a copy twice.
    The constants are those of decision 25.
    """

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self._keys = keys
        self._lists = RowLists(_CLASSES)
        # By row: how often it was used, up to the most that matter, and when last.
        self._uses = bytearray()
        self._last = array("Q")
        self._left = LeftKeys()
        self._now = 0
        self._learnt = 0
        self.interval = 0.0

    def insert(self, rows: Sequence[int]) -> None:
        """Make rows the newest; those that have left not long ago are used again."""
        if not rows:
            return
        self._grow((rows[0] if len(rows) == 1 else max(rows)) + 1)
        uses, last, now, keys = self._uses, self._last, self._now, self._keys
        known = self._left.take([keys[row] for row in rows], now) if self._left.place_count else {}
        for row in rows:
            now += 1
            uses[row] = 1
            last[row] = now
        self._now = now
        for at, (count, age) in known.items():
            uses[rows[at]] = self._count_use(count, age)
        if known:
            self._append(rows)
        else:
            self._lists.append(rows, 0)

    def access(self, rows: Sequence[int]) -> None:
        """Count a use of each, and make rows the newest."""
        lists, uses, last, now = self._lists, self._uses, self._last, self._now
        for row in lists.held(rows):
            before = uses[row]
            count = self._count_use(before, now - last[row])
            now += 1
            if count != before:
                uses[row] = count
            last[row] = now
            lists.move(row, _CLASS_OF[before], _CLASS_OF[count])
        self._now = now

    def postpone(self, row: int) -> None:
        """Make a row the newest of those used as often; it was not used."""
        if self._lists.holds(row):
            number = _CLASS_OF[self._uses[row]]
            self._now += 1
            self._last[row] = self._now
            self._lists.move(row, number, number)

    def remove(self, rows: Sequence[int]) -> None:
        """Take rows out, and remember them; those that are not there are ignored."""
        lists = self._lists
        count = sum(lists.counts)
        rows = lists.held(rows)
        for number, alike in self._by_class(rows):
            lists.remove(alike, number)
        self._left.add(rows, self._keys, self._uses, self._last, count)

    def fill(self, rows: NDArray[np.int32]) -> None:
        """Insert many rows, the oldest first: used once each, since nothing says how often they were."""
        count = int(rows.max()) + 1 if len(rows) else 0
        self._uses = bytearray(b"\1") * count
        last = np.zeros(count, np.uint64)
        last[rows] = np.arange(1, len(rows) + 1, dtype=np.uint64)
        self._last = array("Q", last.tobytes())
        self._now = len(rows)
        self._lists.fill(rows)

    def proposals(self) -> Iterator[int]:
        """Yield from the one on that counts as used longest ago. Within a class that is the order of last use."""
        lists, now = self._lists, self._now
        rows = [lists.oldest(number) for number in range(_CLASSES)]
        horizon = int(HORIZON * self.interval)
        ranks = [self._rank(number, rows[number], now, horizon) for number in range(_CLASSES)]
        while (least := min(ranks)) < _NOTHING:
            number = ranks.index(least)
            ranks[number] = _NOTHING
            others, row = min(ranks), rows[number]
            while row >= 0 and (least := self._rank(number, row, now, horizon)) <= others:
                newer = lists.newer(row)
                yield row
                row = newer
            rows[number] = row
            ranks[number] = least if row >= 0 else _NOTHING

    def _rank(self, number: int, row: int, now: int, horizon: int) -> int:
        """Return how long ago a row of a class counts as used, times -2; ``_NOTHING`` where there is no row."""
        if row < 0:
            return _NOTHING
        age = now - self._last[row]
        return (number * (horizon - age) if age < horizon else 0) - 2 * age

    def _count_use(self, count: int, age: int) -> int:
        """Return the uses of a copy that had ``count``, the last one ``age`` ago, and was used again; learn from it."""
        if age < _SHORTEST * self.interval:
            return count
        self._learnt = min(self._learnt + 1, MEMORY)
        self.interval += (age - self.interval) / self._learnt
        return min(count + 1, _MOST_USES)

    def _grow(self, count: int) -> None:
        lacking = count - len(self._uses)
        if lacking > 0:
            self._uses += bytes(lacking + GROWN_ROWS)
            self._last.frombytes(bytes(8 * (lacking + GROWN_ROWS)))

    def _append(self, rows: Sequence[int]) -> None:
        for number, alike in self._by_class(rows):
            self._lists.append(alike, number)

    def _by_class(self, rows: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
        """Return rows by class, each in the order given."""
        if len(rows) == 1:
            return [(_CLASS_OF[self._uses[rows[0]]], rows)]
        classes = bytes(map(self._uses.__getitem__, rows)).translate(_TO_CLASS)
        if not classes.strip(classes[:1]):  # all alike, as most are, or none
            return [(classes[0], rows)] if rows else []
        found = [(number, [r for r, c in zip(rows, classes, strict=True) if c == number]) for number in range(_CLASSES)]
        return [(number, alike) for number, alike in found if alike]


_TO_CLASS = bytes(_CLASS_OF[min(count, _MOST_USES)] for count in range(256))


class LeftKeys:
    """Keys that have left, with their uses and their last, in a table by number: 8 bytes a place.

    A later key takes a place over, so that about as many are remembered as there are places: one to two for each
    row, and no fewer than ``_FEWEST_PLACES``. Once in 2**27 times a key is taken for another: that decides nothing but
    who leaves first. ``place_count``: 0 before the first is remembered. All of a place is in one integer, as a place is
    hardly ever in the caches: from the top on 28 bits that tell keys apart, of which one is always set, 28 of the last
    use, and 4 of the number of uses. All integers here stay below 2**62, up to which they are quick to reckon with.
    """

    _FEWEST_PLACES = 1 << 18

    def __init__(self) -> None:
        self._table = array("Q", [0])
        self.place_count = 0

    def add(
        self, rows: Sequence[int], keys: Sequence[BlockKey], uses: Sequence[int], last: Sequence[int], total: int
    ) -> None:
        """Remember some rows, of a policy that had so many in total. ``keys``, ``uses``, ``last``: of all rows."""
        if not rows:
            return
        if self.place_count < max(total, 1):  # the larger table is empty; it doubles at least, so this is rare
            size = max(self._FEWEST_PLACES, 1 << (total - 1).bit_length())
            self._table = array("Q", [0]) * size
            self.place_count = size
        table, mask = self._table, self.place_count - 1
        for row in rows:
            name = number_of(keys[row]) & _NAME
            table[name & mask] = (name >> 33 | 1) << 32 | (last[row] & _LAST) << 4 | uses[row]

    def take(self, keys: Sequence[BlockKey], now: int) -> dict[int, tuple[int, int]]:
        """Return by position the uses of each key that is remembered, and how long ago the last was; forget it."""
        table, mask = self._table, self.place_count - 1
        found: dict[int, tuple[int, int]] = {}
        if mask < 0:
            return found
        for at, key in enumerate(keys):
            name = number_of(key) & _NAME
            place = name & mask
            content = table[place]
            if content >> 32 == name >> 33 | 1:
                table[place] = 0
                found[at] = content & 15, now - (content >> 4) & _LAST
        return found
