# SPDX-License-Identifier: Apache-2.0
"""Which copies this engine has, by key: arrays with a row per block, not an object. Scheduler
thread only.

A row lives while its block has a copy in any tier. Each copy's life follows ``BEFORE``; pins
count the jobs that use it. A copy is READY only when every rank's slot holds the key's bytes
(invariant 3); a WRITING or pinned copy never ends (invariant 4).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import IntEnum
from functools import reduce
from itertools import compress, repeat
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvdisk.blocks import KEPT_TIERS, LATEST_S, BlockKey, Slot, Tier, records_of
from kvdisk.index.base import BlockColumns, BlockRecord
from kvdisk.manager.events import Journal
from kvdisk.manager.parents import KeyBytes, parents_among, without_circles

NONE: Final = -1
"""No row."""

TierChoice = Collection[Tier] | None
"""Tiers that count; None: all."""

key_hash: Callable[[BlockKey], int] = xxh3_64_intdigest
"""Return the 64-bit hash of a key, for tables by hash: the same in every process."""


class CopyState(IntEnum):
    """State of one copy. DROPPED: found by no lookup any more, waits for its last pin."""

    ABSENT = 0
    WRITING = 1
    READY = 2
    DROPPED = 3


ABSENT, WRITING, READY, DROPPED = CopyState
BEFORE: Final = {
    WRITING: (ABSENT,),
    READY: (WRITING,),
    DROPPED: (WRITING, READY),
    ABSENT: (WRITING, READY, DROPPED),
}
"""The whole life of a copy: which states come before each. ABSENT asks for zero pins."""
_PRESENCE_OF = bytes((ABSENT, WRITING, READY, ABSENT))
"""The presence of a block, by the state of its only copy where that can be read."""
_PRESENCES = _PRESENCE_OF.ljust(256, b"\0")
"""The same, for ``bytes.translate``."""
_READY = bytes([READY])
_NOBODY = BlockKey(b"")
_GROWN_ROWS = 64
_FEW = 8
"""Keys below which an array costs more than it saves."""
_IN_TURN = 32
"""Rows up to which presences are told without an array."""


class CopyCounter(Protocol):
    """Is told which copies of a tier begin and end."""

    def begun(self, rows: Sequence[int]) -> None:
        """Copies have begun."""

    def ended(self, rows: Sequence[int]) -> None:
        """Copies have ended; rows still have their keys."""


class TierColumns:
    """One tier's copies by row. Only the catalog changes them.

    ``states``: each copy's ``CopyState``; where there is one, ``segments`` and ``indices`` are its
    slot's. ``pins``: how many jobs use it, its writer counts. ``hidden``: segments that nobody is
    to read now. Copies in the tier hang on the row of their parent, whether or not that has one
    too: ``first_child`` of it is one of them, and ``next_child`` of each is another; NONE after the
    last. ``oldest_s``, ``latest_s``: READY copies of blocks that were first stored before or after
    count as absent. ``counters``: are told which copies begin and end. ``gains``,
    ``losses``: as those of ``Catalog``, of this tier alone, whatever others have.
    """

    def __init__(self, parent_rows: array[int], stored_s: array[int]) -> None:
        self._parent_rows, self._stored_s = parent_rows, stored_s
        self.oldest_s, self.latest_s = 0, LATEST_S
        self.counters: list[CopyCounter] = []
        self.gains = self.losses = 0
        self.states = bytearray()
        self.pins, self.segments, self.indices = array("I"), array("I"), array("I")
        self.first_child, self.next_child, self._previous_child = array("i"), array("i"), array("i")
        self.hide(frozenset())

    @property
    def are_all_shown(self) -> bool:
        """Whether no READY copy counts as absent: then each state tells the presence."""
        return not self.hidden and not self.oldest_s and self.latest_s == LATEST_S

    def hide(self, segments: frozenset[int]) -> None:
        """See ``Catalog.hide``."""
        self.hidden, self._hidden = segments, np.fromiter(segments, np.uint32)

    def grow(self, count: int) -> None:
        """Make place for so many more rows."""
        self.states.extend(bytes([ABSENT]) * count)
        for column in (self.pins, self.segments, self.indices):
            column.frombytes(bytes(count * column.itemsize))
        for links in (self.first_child, self.next_child, self._previous_child):
            links.extend(array("i", [NONE]) * count)

    def fill(self, segments: NDArray[np.uint32], indices: NDArray[np.uint32]) -> None:
        """Make of the rows that there are READY copies in these slots; parents are set."""
        self.states[:] = bytes([READY]) * len(segments)
        np.frombuffer(self.segments, np.uint32)[:] = segments
        np.frombuffer(self.indices, np.uint32)[:] = indices
        self._link_all()

    def _link_all(self) -> None:
        """Hang the copies of all rows on their parents, as ``link`` does one by one; none hangs
        yet."""
        parent_rows = np.frombuffer(self._parent_rows, np.int32)
        first, after, before = (
            np.frombuffer(links, np.int32) for links in (self.first_child, self.next_child, self._previous_child)
        )
        rows = np.flatnonzero(parent_rows != NONE).astype(np.int32)
        first[parent_rows[rows]] = rows  # the last of each parent stays
        has_several = np.zeros(len(first), np.bool_)
        has_several[parent_rows[rows[first[parent_rows[rows]] != rows]]] = True
        rows = rows[has_several[parent_rows[rows]]]
        rows = rows[np.argsort(parent_rows[rows], kind="stable")]
        are_siblings = parent_rows[rows[1:]] == parent_rows[rows[:-1]]
        after[rows[1:][are_siblings]] = rows[:-1][are_siblings]
        before[rows[:-1][are_siblings]] = rows[1:][are_siblings]

    def link(self, rows: Iterable[int]) -> None:
        """Hang copies that have begun on their parents."""
        first, after, before = self.first_child, self.next_child, self._previous_child
        for row in rows:
            parent_row = self._parent_rows[row]
            if parent_row != NONE:
                sibling = first[parent_row]
                after[row], before[row] = sibling, NONE
                if sibling != NONE:
                    before[sibling] = row
                first[parent_row] = row

    def unlink(self, rows: Iterable[int]) -> None:
        """Take copies that have ended from their parents."""
        first, after, before = self.first_child, self.next_child, self._previous_child
        for row in rows:
            parent_row = self._parent_rows[row]
            if parent_row != NONE:
                younger, older = after[row], before[row]
                if older == NONE:
                    first[parent_row] = younger
                else:
                    after[older] = younger
                if younger != NONE:
                    before[younger] = older

    def slots(self, rows: Sequence[int]) -> list[Slot]:
        """Return the slot of each copy; none is ABSENT."""
        return records_of(Slot, self.places(rows))

    def places(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return the slot of each copy as its segment and index: what a ``Slot`` takes to make is
        left out."""
        assert ABSENT not in map(self.states.__getitem__, rows)
        return list(zip(map(self.segments.__getitem__, rows), map(self.indices.__getitem__, rows), strict=True))

    def presence(self, row: int) -> int:
        """Return the presence of a row's block by this copy alone."""
        state = self.states[row]
        if state == READY and (
            not self.oldest_s <= self._stored_s[row] <= self.latest_s
            or (self.hidden and self.segments[row] in self.hidden)
        ):
            return ABSENT
        return _PRESENCE_OF[state]

    def presences_in_turn(self, rows: Sequence[int]) -> bytes:
        """Return the ``presence`` of each row, of NONE ABSENT: for few."""
        if self.are_all_shown and NONE not in rows:
            return bytes(map(self.states.__getitem__, rows)).translate(_PRESENCES)
        return bytes([ABSENT if row == NONE else self.presence(row) for row in rows])

    def presences(self, rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        """Return the ``presence`` of each row."""
        states = np.frombuffer(self.states, np.uint8)[rows]
        found = np.frombuffer(_PRESENCE_OF, np.uint8)[states]
        if self.hidden:
            hidden = np.isin(np.frombuffer(self.segments, np.uint32)[rows], self._hidden)
            found[hidden & (states == READY)] = ABSENT
        if self.oldest_s:
            stored_s = np.frombuffer(self._stored_s, np.uint32)[rows]
            found[((stored_s < self.oldest_s) | (stored_s > self.latest_s)) & (states == READY)] = ABSENT
        return found

    def is_of_no_age(self, row: int) -> bool:
        """Whether a row has a copy of before ``oldest_s`` or after ``latest_s`` that has not
        ended."""
        return not self.oldest_s <= self._stored_s[row] <= self.latest_s and self.states[row] in {WRITING, READY}

    def too_old(self, *, also_ahead: bool) -> NDArray[np.intp]:
        """Return the rows with copies of before ``oldest_s`` that have not ended, the oldest first,
        of one time the latest; fast. ``also_ahead``: those of after ``latest_s``, too."""
        states, stored_s = np.frombuffer(self.states, np.uint8), np.frombuffer(self._stored_s, np.uint32)
        is_old = stored_s < self.oldest_s
        if also_ahead:
            is_old |= stored_s > self.latest_s
        rows = np.flatnonzero(is_old & (states != ABSENT) & (states != DROPPED))
        order: NDArray[np.intp] = np.lexsort((-rows, stored_s[rows]))
        return np.take(rows, order)

    def rows(self, segment: int | None = None) -> NDArray[np.intp]:
        """Return the rows with a copy, or with one in a segment, ascending; fast."""
        found = np.frombuffer(self.states, np.uint8) != ABSENT
        if segment is not None:
            found &= np.frombuffer(self.segments, np.uint32) == segment
        return np.flatnonzero(found)


class Catalog:
    """Rows of blocks. Row numbers are reused; hold one only while a pin or a copy keeps the row
    alive.

    A parent without copies keeps a row, too, as long as a block follows it: a placeholder, which
    nobody finds. Nothing here is walked by the garbage collector block by block: a list or an
    object for each block would be. ``keys``: by row, always the same array. ``parent_rows``: by row
    that of the block before it in its chain; NONE of the first. ``stored_s``: by row when its block
    was first stored, in any tier of any engine: who begins its first copy says it. ``tenants``: by
    row the digest of the salt in its block's key; 0: it has none, or nobody knows it. ``lives``: by
    row a number that changes when its key is not found there any more. ``gains``
    rises whenever some block comes nearer to being loaded (see ``presences``), and ``losses``
    whenever some block comes to be farther from it: what was found holds until then.
    """

    def __init__(self, tiers: Iterable[Tier] = KEPT_TIERS) -> None:
        self._rows: dict[BlockKey, int] = {}
        """Those of the current epoch, placeholders too."""
        self._is_placeholder = bytearray()
        self._vacant = array("i")
        self.gains = self.losses = 0
        self.keys: NDArray[np.object_] = np.empty(0, np.object_)
        self.generations = array("Q")
        self.epochs = array("Q")
        self.stored_s = array("I")
        self.tenants = array("Q")
        self.keeps_tenants = True
        """Whether records say whose blocks they are: False where no digest would mean the same
        after a restart."""
        self.lives = array("I")
        self.parent_rows = array("i")
        self._child_counts = array("I")
        """By row: how many rows have it as their parent, with copies or not yet."""
        self._columns: dict[Tier, TierColumns] = {}
        """Of the tiers that there are, the fastest first."""
        self._all: Sequence[TierColumns] = ()
        """The same columns, without their tiers."""
        self._others: dict[Tier, list[TierColumns]] = {}
        for tier in tiers:
            self.add_tier(tier)
        self.journal: Journal | None = None
        """Notes each copy that becomes READY or ends; None: no events are published."""

    def __len__(self) -> int:
        return len(self.rows())

    def add_tier(self, tier: Tier) -> None:
        """Have columns for the copies of a tier, empty ones. Before there are rows; one that there
        is not costs nothing."""
        assert not self.generations
        self._columns[tier] = TierColumns(self.parent_rows, self.stored_s)
        self._columns = dict(sorted(self._columns.items()))
        self._all = tuple(self._columns.values())
        self._others = {
            each: [other for tier, other in self._columns.items() if tier is not each] for each in self._columns
        }

    @property
    def tiers(self) -> Collection[Tier]:
        """The tiers that there are, the fastest first."""
        return self._columns

    def _of(self, tiers: TierChoice) -> Sequence[TierColumns]:
        """Return the columns of these tiers, the fastest first."""
        if tiers is None:
            return self._all
        return [columns for tier, columns in self._columns.items() if tier in tiers]

    # -- rows ----------------------------------------------------------------------------------

    def find(self, key: BlockKey) -> int:
        """Return the row of a block of the current epoch, or -1."""
        row = self._rows.get(key, NONE)
        return NONE if row != NONE and self._is_placeholder[row] else row

    def find_all(self, keys: Iterable[BlockKey]) -> list[int]:
        """Return the row, or -1, of each block."""
        is_placeholder = self._is_placeholder
        found = map(self._rows.get, keys, repeat(NONE))
        return [NONE if row != NONE and is_placeholder[row] else row for row in found]

    def find_many(self, keys: Iterable[BlockKey]) -> NDArray[np.intp]:
        """Return what ``find_all`` does, as an array: for many keys."""
        rows = np.array(list(map(self._rows.get, keys, repeat(NONE))), np.intp)
        if self._is_placeholder:
            rows[np.frombuffer(self._is_placeholder, np.bool_)[rows]] = NONE  # the last one's, where there is none
        return rows

    def parent(self, row: int) -> BlockKey | None:
        """Return the key of the block before a row's in its chain; None of the first."""
        parent_row = self.parent_rows[row]
        return None if parent_row == NONE else self.keys[parent_row]

    def parents(self, rows: Sequence[int]) -> list[BlockKey | None]:
        """Return what ``parent`` does, of each row."""
        parent_rows, keys = self.parent_rows, self.keys
        return [None if (parent := parent_rows[row]) == NONE else keys[parent] for row in rows]

    def follower_count(self, row: int) -> int:
        """Return how many blocks follow a row's, with copies or not yet."""
        return self._child_counts[row]

    def add(
        self,
        keys: Sequence[BlockKey],
        generations: Iterable[int],
        epoch: int,
        parents: Sequence[BlockKey | None],
        tenants: Sequence[int] | None = None,
    ) -> list[int]:
        """Make rows without copies for keys that have none. The caller begins their copies at once.
        ``tenants``: of each; None: no block has one."""
        rows, is_placeholder = self._rows_of(keys), self._is_placeholder
        tenants = [0] * len(rows) if tenants is None else tenants
        for row, generation, tenant in zip(rows, generations, tenants, strict=True):
            assert is_placeholder[row], "it has a row"
            is_placeholder[row] = False
            self.generations[row], self.epochs[row], self.tenants[row] = generation, epoch, tenant
        followers = [(row, parent) for row, parent in zip(rows, parents, strict=True) if parent is not None]
        if followers:
            self._follow(*zip(*followers, strict=True))
        return rows

    def _follow(self, rows: Sequence[int], parents: Sequence[BlockKey]) -> None:
        parent_rows, child_counts, followed = self.parent_rows, self._child_counts, list[int]()
        for row, parent_row in zip(rows, self._rows_of(parents), strict=True):
            parent_rows[row] = parent_row
            child_counts[parent_row] += 1
            if child_counts[row]:
                followed.append(row)
        if followed:
            self._cut_circles(followed)

    def _cut_circles(self, rows: Sequence[int]) -> None:
        """Let one of these rows follow nothing where the way to the head of its chain comes back,
        as whoever names the parents can have it: in a circle no copy is the last one, so that none
        would ever leave. ``rows``: those that others followed before they followed any: each circle
        has one."""
        parent_rows, cuttable, walked = self.parent_rows, set(rows), dict[int, int]()
        for start in rows:
            row = start
            while row != NONE and row not in walked:
                walked[row] = start
                row = parent_rows[row]
            if row == NONE or walked[row] != start:
                continue
            while row not in cuttable:
                row = parent_rows[row]
            self._child_counts[parent_rows[row]] -= 1
            parent_rows[row] = NONE

    def _rows_of(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the row of each block; where there is none it gets one, as a placeholder."""
        rows = self._rows
        found = list(map(rows.get, keys, repeat(NONE)))
        if NONE not in found:
            return found
        new = [key for key in dict.fromkeys(keys) if key not in rows]
        taken = self._take_vacant(len(new))
        rows.update(zip(new, taken, strict=True))
        for row in taken:
            self._is_placeholder[row] = True
        if len(new) < _FEW:
            for row, key in zip(taken, new, strict=True):
                self.keys[row] = key
        else:
            self.keys[taken] = new
        return list(map(rows.__getitem__, keys))

    def _take_vacant(self, count: int) -> array[int]:
        """Return rows that are nobody's; make as many as are missing."""
        taken = self._vacant[: -count - 1 : -1]
        del self._vacant[-count:]
        missing = count - len(taken)
        if missing:
            first, made = len(self.generations), -(-missing // _GROWN_ROWS) * _GROWN_ROWS
            self._grow(made)
            taken.extend(range(first, first + missing))
            self._vacant.extend(range(first + made - 1, first + missing - 1, -1))
        return taken

    def _grow(self, count: int) -> None:
        """Make so many more rows."""
        first = len(self.generations)
        if first + count > len(self.keys):
            self.keys.resize(first + count + first // 8, refcheck=False)
        for column in (self.generations, self.epochs, self.stored_s, self.tenants, self.lives, self._child_counts):
            column.frombytes(bytes(count * column.itemsize))
        self.parent_rows.extend(array("i", [NONE]) * count)
        for columns in self._columns.values():
            columns.grow(count)
        self._is_placeholder += bytes(count)

    def records(self, rows: Sequence[int], tier: Tier, now_s: int) -> list[BlockRecord]:
        """Return what an index keeps of rows' copies in a tier. ``now_s``: when a block was first
        stored of which nobody has said it."""
        return [
            BlockRecord(
                self.epochs[row],
                self.keys[row],
                slot,
                self.generations[row],
                parent,
                self.stored_s[row] or now_s,
                self.tenants[row] if self.keeps_tenants else 0,
            )
            for row, slot, parent in zip(rows, self._columns[tier].slots(rows), self.parents(rows), strict=True)
        ]

    def fill(self, tier: Tier, blocks: BlockColumns, keys: KeyBytes | None) -> None:
        """Take over many blocks as rows 0, 1, ... with a READY copy each; there are no rows yet.
        ``keys``: the ``bytes_of`` theirs."""
        assert not self.generations
        count = len(blocks.keys)
        self._grow(count)
        self.keys[:count] = blocks.keys
        self._rows = dict(zip(blocks.keys, range(count), strict=True))
        assert len(self._rows) == count, "a key twice"
        np.frombuffer(self.generations, np.uint64)[:] = blocks.generations
        np.frombuffer(self.epochs, np.uint64)[:] = blocks.epochs
        np.frombuffer(self.stored_s, np.uint32)[:] = blocks.stored_s
        np.frombuffer(self.tenants, np.uint64)[:] = blocks.tenants
        parent_rows = parents_among(blocks, keys, self._rows)
        lacking = (parent_rows == NONE) & (blocks.parent_bytes > 0)
        parent_rows = without_circles(parent_rows)
        np.frombuffer(self.parent_rows, np.int32)[:] = parent_rows
        counts = np.bincount(parent_rows[parent_rows != NONE], minlength=count)
        np.frombuffer(self._child_counts, np.uint32)[:] = counts
        self._columns[tier].fill(blocks.segments, blocks.indices)
        if rows := np.flatnonzero(lacking).tolist():
            self._follow(rows, list(compress(blocks.each_parent(), lacking)))
            self._columns[tier].link(rows)
        for counter in self._columns[tier].counters:
            counter.begun(range(count))
        self.gains += 1

    def hide_all(self) -> dict[BlockKey, int]:
        """Forget every key, for a new epoch: rows stay until their copies end. Return what is to be
        let go of."""
        if self.journal is not None:
            for tier in self._columns:
                self.journal.note(tier, False, self.ready_keys(tier))
        forgotten, self._rows = self._rows, {}
        if self.lives:
            np.frombuffer(self.lives, np.uint32)[:] += 1
        self.losses += 1
        return forgotten

    def rows_in(self, tier: Tier, segment: int | None = None) -> list[int]:
        """Return the rows with a copy in a tier, or in one of its segments, of all epochs."""
        rows: list[int] = self._columns[tier].rows(segment).tolist()
        return rows

    def kept(self, tier: Tier, segment: int | None = None) -> NDArray[np.intp]:
        """Return the ``rows_in``, but for DROPPED copies, as an array; fast."""
        rows = self._columns[tier].rows(segment)
        kept: NDArray[np.intp] = rows[np.frombuffer(self._columns[tier].states, np.uint8)[rows] != DROPPED]
        return kept

    def kept_in(self, tier: Tier, segment: int | None = None) -> list[int]:
        """Return what is ``kept``, as a list."""
        rows: list[int] = self.kept(tier, segment).tolist()
        return rows

    def rows(self) -> list[int]:
        """Return every row with a copy, of all epochs, ascending."""
        rows: list[int] = np.unique(np.concatenate([columns.rows() for columns in self._columns.values()])).tolist()
        return rows

    # -- what there is ---------------------------------------------------------------------------

    def changes(self, tiers: TierChoice = None) -> tuple[int, int]:
        """Return ``gains`` and ``losses`` as those see them who may load from some tiers: what a
        faster tier has hides nothing of the others from them."""
        if tiers is None or len(of_some := self._of(tiers)) == len(self._columns):
            return self.gains, self.losses
        gains, losses = sum(columns.gains for columns in of_some), sum(columns.losses for columns in of_some)
        return self.gains + gains, self.losses + losses

    def state(self, row: int, tier: Tier) -> int:
        """Return the ``CopyState`` of a row's copy in a tier, as a plain int."""
        return self._columns[tier].states[row] if tier in self._columns else ABSENT

    def pins(self, row: int, tier: Tier) -> int:
        """Return how many jobs use a copy; its writer counts."""
        return self._columns[tier].pins[row] if tier in self._columns else 0

    def slot(self, row: int, tier: Tier) -> Slot:
        """Return the slot of a copy that is not ABSENT."""
        return self._columns[tier].slots((row,))[0]

    def columns(self, tier: Tier) -> TierColumns:
        """Return a tier's copies by row: to be read, and neither to be changed nor to be kept."""
        return self._columns[tier]

    def readable(self, row: int, tier: Tier) -> bool:
        """Whether a copy is READY and not hidden."""
        return tier in self._columns and self._columns[tier].presence(row) == READY

    def readable_tier(self, row: int, tiers: TierChoice = None) -> Tier | None:
        """Return the fastest tier, of some, that a row (or -1) can be loaded from now."""
        return self.readable_in_turn((row,), tiers)[0]

    def readable_in_turn(self, rows: Sequence[int], tiers: TierChoice = None) -> list[Tier | None]:
        """Return the ``readable_tier`` of each row: for few."""
        wanted = [
            (tier, columns, columns.states, columns.are_all_shown)
            for tier, columns in self._columns.items()
            if tiers is None or tier in tiers
        ]
        found: list[Tier | None] = []
        for row in rows:
            for tier, columns, states, is_shown in wanted if row != NONE else ():
                if states[row] == READY and (is_shown or columns.presence(row) == READY):
                    found.append(tier)
                    break
            else:
                found.append(None)
        return found

    def readable_tiers(self, rows: NDArray[np.intp], tiers: TierChoice = None) -> NDArray[np.uint8]:
        """Return the ``readable_tier`` of each row, 0: none."""
        found = np.zeros(len(rows), np.uint8)
        there = np.flatnonzero(rows != NONE)
        for tier, columns in reversed(self._columns.items()) if len(there) else ():
            if tiers is None or tier in tiers:
                found[there[columns.presences(rows[there]) == READY]] = tier
        return found

    def is_only_in(self, tier: Tier, row: int) -> bool:
        """Whether a row has a READY copy in a tier, and none elsewhere that is or gets READY."""
        return self._columns[tier].states[row] == READY and all(
            columns.states[row] in {ABSENT, DROPPED} for other, columns in self._columns.items() if other is not tier
        )

    def presences(self, keys: Sequence[BlockKey], tiers: TierChoice = None) -> bytes:
        """Return of each key how near its block is to be loaded from some tiers, as a byte: READY,
        it can be; WRITING, it is on its way to one; ABSENT."""
        return self.presences_of(self.rows_by_key(keys), tiers)

    def rows_by_key(self, keys: Iterable[BlockKey]) -> list[int]:
        """Return the row of each block, also where it is a placeholder, or NONE: for
        ``presences_of``."""
        return list(map(self._rows.get, keys, repeat(NONE)))

    def are_ready(self, rows: array[int], lives: array[int], tiers: TierChoice = None) -> NDArray[np.bool_]:
        """Return of each block whether its presence is READY in the row that it had, or NONE, when
        the row's ``lives`` was this: fast, for many."""
        found: NDArray[np.bool_] = np.frombuffer(self.presences_of(rows, tiers), np.uint8) == READY
        if found.any():
            found &= np.frombuffer(self.lives, np.uint32)[np.frombuffer(rows, np.int32)] == lives
        return found

    def states_of(self, rows: NDArray[np.signedinteger[Any]], tier: Tier) -> NDArray[np.uint8]:
        """Return the ``state`` of each row's copy in a tier; that of NONE is ABSENT."""
        found = np.full(len(rows), ABSENT, np.uint8)
        is_row = rows != NONE
        found[is_row] = np.frombuffer(self._columns[tier].states, np.uint8)[rows[is_row]]
        return found

    def presences_of(self, rows: Sequence[int], tiers: TierChoice = None) -> bytes:
        """Return the ``presences`` of rows; that of NONE is ABSENT."""
        wanted = self._of(tiers)
        if not self._rows or not wanted:
            return bytes(len(rows))
        if len(rows) <= _IN_TURN:
            few = wanted[0].presences_in_turn(rows)
            for columns in wanted[1:] if few.strip(_READY) else ():
                few = bytes(map(max, few, columns.presences_in_turn(rows)))
            return few
        places = np.array(rows, np.intp)
        found = reduce(np.maximum, [each.presences(places) for each in wanted])
        found[places == NONE] = ABSENT
        return found.tobytes()

    def ready_keys(self, tier: Tier) -> list[BlockKey]:
        """Return the keys of all copies of the current epoch that are READY in a tier."""
        states = self._columns[tier].states if tier in self._columns else b""
        return [key for key, row in self._rows.items() if states[row] == READY] if states else []

    def evictable_in(self, tier: Tier) -> Callable[[int], bool]:
        """Return the test whether a row's copy is READY and unpinned: to be used at once."""
        states, pins = self._columns[tier].states, self._columns[tier].pins
        return lambda row: states[row] == READY and pins[row] == 0

    def hide(self, tier: Tier, segments: frozenset[int]) -> None:
        """Make copies in these segments of a tier unreadable, and all others readable again."""
        if segments != self._columns[tier].hidden:
            self._columns[tier].hide(segments)
            self.gains += 1
            self.losses += 1

    def limit_ages(self, oldest_s: int, latest_s: int) -> None:
        """Make READY copies of blocks that were first stored before ``oldest_s`` or after
        ``latest_s`` unreadable, and all others readable."""
        limits = oldest_s, latest_s
        if any(limits != (columns.oldest_s, columns.latest_s) for columns in self._columns.values()):
            for columns in self._columns.values():
                columns.oldest_s, columns.latest_s = limits
            self.gains += 1
            self.losses += 1

    # -- the life of copies ------------------------------------------------------------------------

    def begin(self, rows: Sequence[int], tier: Tier, slots: Sequence[Slot]) -> None:
        """Start writing copies, each into its slot; the writer holds one pin."""
        columns = self._columns[tier]
        segments, indices, pins = columns.segments, columns.indices, columns.pins
        self._change(rows, tier, WRITING)
        for row, slot in zip(rows, slots, strict=True):
            segments[row], indices[row] = slot
            pins[row] = 1
        columns.link(rows)
        for counter in columns.counters:
            counter.begun(rows)

    def finish(self, rows: Sequence[int], tier: Tier) -> None:
        """The writers of some copies are done on every rank: READY, their pins are gone."""
        self._change(rows, tier, READY)
        self.unpin(rows, tier)
        self._note(rows, tier, stored=True)

    def drop(self, row: int, tier: Tier) -> None:
        """Let no request find this copy any more. The caller ends it when its pins are gone."""
        self._note((row,), tier, stored=False)
        self._change((row,), tier, DROPPED)

    def end(self, rows: Sequence[int], tier: Tier) -> list[tuple[int, int]]:
        """End unpinned copies, those that follow a copy before it, and return their slots: segments
        and indices.

        A row goes with its last copy.
        """
        columns = self._columns[tier]
        slots = columns.places(rows)
        self._note(rows, tier, stored=False)
        assert not any(map(columns.pins.__getitem__, rows)), "a pinned copy cannot end"
        self._change(rows, tier, ABSENT)
        columns.unlink(rows)
        for counter in columns.counters:
            counter.ended(rows)
        for other in self._others[tier]:
            rows = [row for row in rows if other.states[row] == ABSENT]
        self._vacate(rows)
        return slots

    def _vacate(self, rows: Iterable[int]) -> None:
        """Rows have no copy: each is a placeholder while others follow it, then vacant."""
        parent_rows, child_counts, is_placeholder = self.parent_rows, self._child_counts, self._is_placeholder
        for row in rows:
            parent_row = parent_rows[row]
            is_placeholder[row] = True
            if parent_row != NONE:
                parent_rows[row] = NONE
                child_counts[parent_row] -= 1
                if is_placeholder[parent_row] and not child_counts[parent_row]:
                    self._forget(parent_row)
            if not child_counts[row]:
                self._forget(row)

    def _forget(self, row: int) -> None:
        key = self.keys[row]
        if self._rows.get(key) == row:  # of the current epoch
            del self._rows[key]
        self._is_placeholder[row] = False
        self.keys[row] = _NOBODY
        self.lives[row] = (self.lives[row] + 1) & 0xFFFFFFFF
        self._vacant.append(row)

    def pin(self, rows: Iterable[int], tier: Tier) -> None:
        """Hold READY copies for one job."""
        states, pins = self._columns[tier].states, self._columns[tier].pins
        for row in rows:
            assert states[row] == READY
            pins[row] += 1

    def pin_many(self, rows: NDArray[np.intp], tier: Tier) -> None:
        """Hold READY copies for one job: for many rows, each of which is there once."""
        states, pins = self._columns[tier].states, self._columns[tier].pins
        assert (np.frombuffer(states, np.uint8)[rows] == READY).all()
        np.frombuffer(pins, np.uint32)[rows] += 1

    def unpin(self, rows: Iterable[int], tier: Tier) -> None:
        """Give one pin of each copy back."""
        pins = self._columns[tier].pins
        for row in rows:
            assert pins[row] > 0
            pins[row] -= 1

    def _note(self, rows: Iterable[int], tier: Tier, *, stored: bool) -> None:
        """Journal READY copies, but for those of an earlier epoch: their end was journaled."""
        if self.journal is not None:
            states = self._columns[tier].states
            for row in rows:
                key = self.keys[row]
                if states[row] == READY and self._rows.get(key) == row:
                    self.journal.note(tier, stored, (key,))  # one by one: so they count for the journal's bound

    def _change(self, rows: Iterable[int], tier: Tier, target: CopyState) -> None:
        """Bring copies to a state; count whether some block comes nearer to being loaded, or
        farther from it, in this tier and in all. A change in a hidden segment may count, too."""
        columns, legal = self._columns[tier], BEFORE[target]
        others = [(other, other.states, other.are_all_shown) for other in self._others[tier]]
        states = columns.states
        now, is_changed, is_noted = _PRESENCE_OF[target], False, False
        for row in rows:
            assert states[row] in legal, f"{CopyState(states[row])!r} to {CopyState(target)!r} in row {row}"
            before = _PRESENCE_OF[states[row]]
            states[row] = target
            if not is_noted and before != now:  # one is enough
                nearer, is_changed, is_noted = max(before, now), True, True
                for other, of_other, is_shown in others:
                    is_noted &= (_PRESENCE_OF[of_other[row]] if is_shown else other.presence(row)) < nearer
        # What becomes READY in a hidden segment is not on its way any more.
        is_gain, is_loss = now != ABSENT, now == ABSENT or bool(columns.hidden)
        columns.gains += is_changed and is_gain
        columns.losses += is_changed and is_loss
        self.gains += is_noted and is_gain
        self.losses += is_noted and is_loss
