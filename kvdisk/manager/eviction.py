# SPDX-License-Identifier: Apache-2.0
"""Who leaves a tier. A policy knows rows of the catalog and their order, nothing else. Scheduler thread only.

That of one chain the tail leaves before the head is not a policy's business: see ``tail_first``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey
from kvdisk.errors import ConfigError
from kvdisk.manager.credit import CreditPolicy
from kvdisk.manager.key_numbers import numbers_of
from kvdisk.manager.row_lists import GROWN_ROWS, RowLists


class EvictionPolicy(Protocol):
    """Order of the copies of one tier and size class. A row is inserted once and removed once.

    Many come, and go, at a time: a prompt's blocks, and those that make room for them.
    """

    def insert(self, rows: Sequence[int]) -> None:
        """Copies became READY, the first of them first."""

    def access(self, rows: Sequence[int]) -> None:
        """Copies were used, the first of them first. Rows that are not there are ignored."""

    def postpone(self, row: int) -> None:
        """A copy that could not leave is proposed later than others. Rows that are not there are ignored."""

    def remove(self, rows: Sequence[int]) -> None:
        """Copies left the tier, for whatever reason; rows still have their keys. Those not there are ignored."""

    def fill(self, rows: NDArray[np.int32]) -> None:
        """Insert many rows at once, in this order, into an empty policy: what was there before a restart."""

    def proposals(self) -> Iterator[int]:
        """Yield rows in the order in which they should leave. Removes none: a row that the caller leaves where it is
        is proposed again by a later call. Not to be advanced after any other call."""


class LruPolicy:
    """Least recently used leaves first. Callers insert and access the blocks of a chain tail first."""

    def __init__(self) -> None:
        self._rows = RowLists(1)

    def insert(self, rows: Sequence[int]) -> None:
        """Make rows the newest."""
        self._rows.append(rows)

    def access(self, rows: Sequence[int]) -> None:
        """Make rows the newest again."""
        for row in rows:
            self.postpone(row)

    def postpone(self, row: int) -> None:
        """Make a row the newest again."""
        if self._rows.holds(row):
            self._rows.move(row, 0, 0)

    def remove(self, rows: Sequence[int]) -> None:
        """Take rows out; those that are not there are ignored."""
        self._rows.remove([row for row in rows if self._rows.holds(row)])

    def fill(self, rows: NDArray[np.int32]) -> None:
        """Insert many rows, the oldest first."""
        self._rows.fill(rows)

    def proposals(self) -> Iterator[int]:
        """Yield from the oldest on."""
        row = self._rows.oldest()
        while row >= 0:
            yield row
            row = self._rows.newer(row)


class S3FifoPolicy:
    """S3-FIFO: new copies pass through a probation queue, and only those used there get into the main queue.

    So a scan of blocks that nobody asks for again costs the main queue nothing. A copy that leaves the probation
    queue is remembered for a while; if it comes back, it goes to the main queue at once. In the main queue a copy
    gets one more round for each use, up to three. The shares are those that did best on a trace (decision 12).
    """

    _PROBATION_SHARE = 0.7
    _MOST_USES = 3
    _MOST_MOVES = 4096
    """Rows that one search moves from queue to queue before it proposes them as they stand: bounds a step."""
    _LONGEST_STREAK = 8
    """Rows of the main queue that are proposed before one on probation is, whatever the shares."""

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self._keys = keys
        self._queues = RowLists(2)
        # By row: uses since it came to its queue, and whether that is the main one.
        self._uses = bytearray()
        self._is_main = bytearray()
        self._left = RecentKeys()

    def insert(self, rows: Sequence[int]) -> None:
        """Put rows on probation, or in the main queue where they have left not long ago."""
        if not rows:
            return
        lacking = max(rows) + 1 - len(self._uses)
        if lacking > 0:
            nothing = bytes(lacking + GROWN_ROWS)
            self._uses += nothing
            self._is_main += nothing
        uses, is_main, keys = self._uses, self._is_main, self._keys
        back = self._left.take([keys[row] for row in rows])
        for row, was_here in zip(rows, back, strict=True):
            uses[row] = 0
            is_main[row] = was_here
        if any(back):
            self._queues.append([row for row in rows if is_main[row]], 1)
            rows = [row for row in rows if not is_main[row]]
        self._queues.append(rows, 0)

    def access(self, rows: Sequence[int]) -> None:
        """Count a use of each."""
        for row in rows:
            self.postpone(row)

    def postpone(self, row: int) -> None:
        """Count a use."""
        if self._queues.holds(row) and self._uses[row] < self._MOST_USES:
            self._uses[row] += 1

    def remove(self, rows: Sequence[int]) -> None:
        """Take rows out; those on probation are remembered. Rows that are not there are ignored."""
        queues, is_main, keys = self._queues, self._is_main, self._keys
        holds, life = queues.holds, sum(queues.counts)
        on_probation = [row for row in rows if holds(row) and not is_main[row]]
        in_main = [row for row in rows if holds(row) and is_main[row]] if len(on_probation) < len(rows) else ()
        queues.remove(on_probation, 0)
        queues.remove(in_main, 1)
        self._left.add([keys[row] for row in on_probation], life)

    def fill(self, rows: NDArray[np.int32]) -> None:
        """Insert many rows, the oldest first: all on probation, since nothing says which were used."""
        count = int(rows.max()) + 1 if len(rows) else 0
        self._uses, self._is_main = bytearray(count), bytearray(count)
        self._queues.fill(rows)

    def proposals(self) -> Iterator[int]:
        """Yield from the oldest on of the queue that is above its share; rows that were used move on."""
        queues, uses = self._queues, self._uses
        places = [queues.oldest(0), queues.oldest(1)]
        waiting = list(queues.counts)  # rows that this search has not looked at
        moves, streak = self._MOST_MOVES, 0
        while places[0] >= 0 or places[1] >= 0:
            surplus = waiting[0] >= self._PROBATION_SHARE * (waiting[0] + waiting[1])
            # Those of a main queue that is all in use must not keep the others from being proposed at all.
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
            queues.remove((row,), number)
            queues.append((row,), 1)
            self._is_main[row] = 1
            waiting[1] += 1
            if places[1] < 0:
                places[1] = row


class RecentKeys:
    """Keys that were added not long ago, by their hashes in a fixed table: 8 bytes a place, one or two places a row.

    A place keeps a part of the hash, never 0, and when it was written; a later key takes it over. A key may be
    forgotten early, and, once in 2**32 times, another be taken for it: it decides nothing but who leaves first.
    """

    def __init__(self) -> None:
        self._marks = array("I", [0])
        self._times = array("I", [0])
        self._mask = 0
        self._now = 0
        self._life = 0

    def add(self, keys: Sequence[BlockKey], life: int) -> None:
        """Remember each key until about ``life`` more have been added."""
        if not keys:
            return
        if self._mask + 1 < life:  # the larger table is empty; it grows to more than asked for, so this is rare
            size = 1 << (life - 1).bit_length()
            self._marks, self._times, self._mask = array("I", [0]) * size, array("I", [0]) * size, size - 1
        self._life = life
        marks, times, mask, now = self._marks, self._times, self._mask, self._now
        for name in numbers_of(keys):
            now = (now + 1) & 0xFFFFFFFF
            place = name & mask
            marks[place] = name >> 31 & 0xFFFFFFFF | 1
            times[place] = now
        self._now = now

    def take(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return for each key whether it is remembered; forget it."""
        marks, times, mask, now, life = self._marks, self._times, self._mask, self._now, self._life
        found = []
        for name in numbers_of(keys):
            place = name & mask
            known = marks[place] == name >> 31 & 0xFFFFFFFF | 1 and (now - times[place]) & 0xFFFFFFFF < life
            if known:
                marks[place] = 0
            found.append(known)
        return found


_POLICIES: Mapping[str, Callable[[Sequence[BlockKey]], EvictionPolicy]] = {
    "credit": CreditPolicy,
    "lru": lambda _: LruPolicy(),
    "s3fifo": S3FifoPolicy,
}
EVICTIONS = tuple(_POLICIES)


def make_eviction(name: str, keys: Sequence[BlockKey]) -> EvictionPolicy:
    """Return a new policy by its configuration name. ``keys``: of the catalog's rows, read when a row is given."""
    make = _POLICIES.get(name)
    if make is None:
        raise ConfigError(f"eviction must be one of {', '.join(map(repr, _POLICIES))}, not {name!r}.")
    return make(keys)
