# SPDX-License-Identifier: Apache-2.0
"""Which copies this engine has, by key: arrays with a row per block, not an object. Scheduler thread only.

A row lives while its block has a copy in any tier. Each copy's life follows ``TRANSITIONS``; pins
count the jobs that use it. A copy is READY only when every rank's slot holds the key's bytes
(invariant 3); a WRITING or pinned copy is never dropped (invariant 4).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvdisk.blocks import CPU, NVME, BlockKey, Slot, Tier, make_slots, new_tuple
from kvdisk.manager.chains import NONE, Chains
from kvdisk.manager.events import Journal

number_of: Callable[[BlockKey], int] = xxh3_64_intdigest
"""Return a key's number, of 64 bits, for tables by hash: the same in every process, as ``hash`` of bytes is not."""


class CopyState(IntEnum):
    """State of one copy. DOOMED: not served any more, waits for its last pin."""

    ABSENT = 0
    WRITING = 1
    READY = 2
    DOOMED = 3


ABSENT: Final = int(CopyState.ABSENT)
WRITING: Final = int(CopyState.WRITING)
READY: Final = int(CopyState.READY)
DOOMED: Final = int(CopyState.DOOMED)
"""The same as plain integers, which is what columns hold; see ``kvdisk.blocks.CPU``."""


class Change(IntEnum):
    """What can happen to a copy."""

    BEGIN = 0
    READY = 1
    DOOM = 2
    DROP = 3


TRANSITIONS: dict[tuple[CopyState, Change], CopyState] = {
    (CopyState.ABSENT, Change.BEGIN): CopyState.WRITING,
    (CopyState.WRITING, Change.READY): CopyState.READY,
    (CopyState.WRITING, Change.DOOM): CopyState.DOOMED,
    (CopyState.WRITING, Change.DROP): CopyState.ABSENT,
    (CopyState.READY, Change.DOOM): CopyState.DOOMED,
    (CopyState.READY, Change.DROP): CopyState.ABSENT,
    (CopyState.DOOMED, Change.DROP): CopyState.ABSENT,
}
"""The whole life cycle of a copy. DROP asks for zero pins."""


class Presence(IntEnum):
    """Whether a block can be loaded: NOWHERE, from no tier; COMING: it is being written; READY: now."""

    NOWHERE = 0
    COMING = 1
    READY = 2


def _presence_by(cpu: int, nvme: int) -> Presence:
    if CopyState.READY in {cpu, nvme}:
        return Presence.READY
    return Presence.COMING if CopyState.WRITING in {cpu, nvme} else Presence.NOWHERE


NOWHERE: Final = int(Presence.NOWHERE)
COMING: Final = int(Presence.COMING)
ILLEGAL = 255
# By state and change, and by the states in both tiers, four of each: what is asked for every block of every job.
NEXT = bytes(TRANSITIONS.get((state, change), ILLEGAL) for state in CopyState for change in Change)
PRESENCES = bytes(_presence_by(cpu, nvme) for cpu in CopyState for nvme in CopyState)


class CommittedCopies(NamedTuple):
    """Columns of blocks whose NVMe copies a committed record names, a row each; arrays of one length.

    ``parent_rows``: positions in these columns, or -1 where the parent is not among them. ``parents``: the very
    objects of ``keys`` where it is.
    """

    keys: list[BlockKey]
    parents: list[BlockKey | None]
    parent_rows: NDArray[np.int32]
    generations: NDArray[np.uint64]
    segments: NDArray[np.uint32]
    indices: NDArray[np.uint32]


class TierColumns:
    """``states``: each copy's ``CopyState``; where there is one, ``segments`` and ``indices`` are its slot's.

    ``pins``: how many jobs use it, its writer counts. The catalog changes them, and nobody else. Unsigned integers of
    this size are set in two thirds of the time of others.
    """

    def __init__(self) -> None:
        self.states = bytearray()
        self.pins = array("I")
        self.segments = array("I")
        self.indices = array("I")

    def grow(self, count: int) -> None:
        """Make place for so many more rows."""
        self.states.extend(bytes([ABSENT]) * count)
        for column in (self.pins, self.segments, self.indices):
            column.frombytes(bytes(count * column.itemsize))

    def fill(self, copies: CommittedCopies) -> None:
        """Take over READY copies as rows 0, 1, ...; there are no rows yet."""
        assert not self.states
        self.states.extend(bytes([READY]) * len(copies.keys))
        self.pins.frombytes(bytes(self.pins.itemsize * len(copies.keys)))
        for column, values in ((self.segments, copies.segments), (self.indices, copies.indices)):
            column.frombytes(values.astype(np.uint32).tobytes())

    def any_in(self, state: int, rows: Sequence[int]) -> bool:
        """Whether the copy of any of these rows is in a state."""
        if len(rows) == 1:
            return self.states[rows[0]] == state
        return state in bytes(map(self.states.__getitem__, rows))

    def slots(self, rows: Sequence[int]) -> list[Slot]:
        """Return the slots of copies that are not ABSENT."""
        assert not self.any_in(ABSENT, rows)
        if len(rows) == 1:
            return [new_tuple(Slot, (self.segments[rows[0]], self.indices[rows[0]]))]
        return make_slots(map(self.segments.__getitem__, rows), map(self.indices.__getitem__, rows))

    def pin(self, rows: Iterable[int]) -> None:
        """Hold READY copies for one job."""
        states, pins = self.states, self.pins
        for row in rows:
            assert states[row] == READY
            pins[row] += 1

    def unpin(self, rows: Iterable[int]) -> None:
        """Give one pin of each copy back."""
        pins = self.pins
        for row in rows:
            assert pins[row] > 0
            pins[row] -= 1

    def evictable(self) -> Callable[[int], bool]:
        """Return who tells whether a row's copy may be dropped for room, READY and unpinned: to be used at once."""
        states, pins = self.states, self.pins
        return lambda row: states[row] == READY and pins[row] == 0

    def rows(self, segment: int | None = None) -> list[int]:
        """Return the rows with a copy, or with one in a segment, ascending; fast."""
        found = np.frombuffer(self.states, np.uint8) != ABSENT
        if segment is not None:
            found &= np.frombuffer(self.segments, np.uint32) == segment
        rows: list[int] = np.flatnonzero(found).tolist()
        return rows


_TIERS = (CPU, NVME)
_BEGIN, _FINISH, _DOOM, _DROP = map(int, Change)
_NOBODY = BlockKey(b"")
_GROWN_ROWS = 64


class Catalog:
    """Rows of blocks. Row numbers are reused; hold one only while a pin or a copy keeps the row alive.

    ``parents[row]`` is the very object of ``keys`` where the parent has a row. ``chains``: which rows follow which.
    ``gains`` rises whenever some block comes nearer to being loaded, in the order of ``Presence``, and ``losses``
    whenever some block comes to be farther from it: what was found holds until then.
    """

    def __init__(self) -> None:
        self._rows: dict[BlockKey, int] = {}
        self._vacant: list[int] = []
        self._hidden: frozenset[int] = frozenset()
        self.gains = self.losses = 0
        self.keys: list[BlockKey] = []
        self.parents: list[BlockKey | None] = []
        self.generations = array("Q")
        self.epochs = array("Q")
        self._cpu, self._nvme = TierColumns(), TierColumns()
        # The last is that of row -1, which no block has.
        self._presences = bytearray([NOWHERE])
        # That row, and all with a key that are not READY but for their drive: few, and soon looked up.
        self._unready = {NONE}
        self.chains = Chains()
        self.journal: Journal | None = None
        """Told of each copy that becomes READY or ends, of the current epoch; None: nobody listens."""

    def __len__(self) -> int:
        return len(self.keys) - len(self._vacant)

    def find(self, key: BlockKey) -> int:
        """Return the row of a block of the current epoch, or -1."""
        return self._rows.get(key, -1)

    def find_all(self, keys: Iterable[BlockKey]) -> list[int]:
        """Return the row, or -1, of each block: no Python call for each."""
        return list(map(self._rows.get, keys, repeat(NONE)))

    def has_none(self, keys: Sequence[BlockKey]) -> bool:
        """Whether ``find`` would find none of these blocks."""
        return keys[0] not in self._rows if len(keys) == 1 else self._rows.keys().isdisjoint(keys)

    def find_chain(self, keys: Sequence[BlockKey]) -> list[int]:
        """As ``find_all``, for keys that follow each other in a chain, each the parent of the next.

        The last one's row leads to those before it, through an array that is small beside a dictionary of as many
        keys: a third of the time. A key names all that is before it, so what has led there is the chain itself.
        """
        row = self._rows.get(keys[-1], NONE) if keys else NONE
        if row == NONE:
            return self.find_all(keys)
        parent_rows, rows = self.chains.parent_rows, [row]
        for _ in range(len(keys) - 1):
            row = parent_rows[row]
            rows.append(row)
            if row == NONE:
                return self.find_all(keys)
        rows.reverse()
        return rows if self.keys[row] == keys[0] else self.find_all(keys)

    def add(self, key: BlockKey, generation: int, epoch: int, parent: BlockKey | None) -> int:
        """Make a row without copies for a key that has none. The caller begins a copy at once."""
        if not self._vacant:
            self._grow()
        row, rows_of, keys_of, chains = self._vacant.pop(), self._rows, self.keys, self.chains
        assert key not in rows_of
        parent_row = NONE if parent is None else rows_of.get(parent, NONE)
        rows_of[key] = row
        keys_of[row] = key
        self.generations[row] = generation
        self.epochs[row] = epoch
        self.parents[row] = parent if parent_row == NONE else keys_of[parent_row]
        if chains.is_awaited(key):
            self._give_parent(key, row)
        chains.parent_rows[row] = parent_row
        if parent_row == NONE and parent is not None:
            chains.await_parent(row, parent)
        return row

    def begin_new(
        self,
        keys: Sequence[BlockKey],
        first_generation: int,
        epoch: int,
        parents: Sequence[BlockKey | None],
        tier: Tier,
        slots: Sequence[Slot],
    ) -> list[int]:
        """Make rows for many keys that have none, parents before those that follow them, and begin a copy of each.

        Generations count up from the first. Returns the rows. The same as ``add`` and ``begin``, but quicker.
        """
        columns, presences = self.columns(tier), self._presences
        states, pins, segments, indices = columns.states, columns.pins, columns.segments, columns.indices
        assert len(keys) == len(parents) == len(slots)
        rows = [self.add(key, first_generation + at, epoch, parents[at]) for at, key in enumerate(keys)]
        unready = self._unready
        for at, row in enumerate(rows):
            unready.add(row)
            states[row], presences[row], pins[row] = WRITING, COMING, 1
            segments[row], indices[row] = slots[at]
        self.gains += len(rows)
        self.chains.link(rows, tier)
        return rows

    def _give_parent(self, key: BlockKey, row: int) -> None:
        """Let the rows that have waited for a key's row follow it."""
        for child in self.chains.take_orphans(key):
            self.parents[child] = key
            self.chains.give_parent(child, row, [tier for tier in _TIERS if self.columns(tier).states[child] != ABSENT])

    def fill(self, tier: Tier, copies: CommittedCopies, epoch: int) -> None:
        """Take over many blocks at once as rows 0, 1, ... with a READY copy each; the catalog must be empty."""
        assert not self.keys and not self._hidden
        count = len(copies.keys)
        self.keys += copies.keys
        self.parents += copies.parents
        self._rows = dict(zip(copies.keys, range(count), strict=True))
        assert len(self._rows) == count, "a key twice"
        self.generations.frombytes(copies.generations.astype(np.uint64).tobytes())
        self.epochs = array("Q", [epoch]) * count
        self.columns(tier).fill(copies)
        self.columns(NVME if tier is CPU else CPU).grow(count)
        self._presences[:0] = bytes([READY]) * count
        self.gains += 1
        self.chains.fill(tier, copies.parent_rows, copies.parents)

    def _grow(self) -> None:
        """Make vacant rows, a few at a time: it takes a tenth as long as one by one."""
        count, first = _GROWN_ROWS, len(self.keys)
        self.keys += [_NOBODY] * count
        self.parents += [None] * count
        self.generations.frombytes(bytes(count * self.generations.itemsize))
        self.epochs.frombytes(bytes(count * self.epochs.itemsize))
        self._cpu.grow(count)
        self._nvme.grow(count)
        self._presences += bytes([NOWHERE]) * count
        self.chains.grow(count)
        self._vacant += range(first + count - 1, first - 1, -1)

    def state(self, row: int, tier: Tier) -> int:
        """Return the ``CopyState`` of a row's copy in a tier, as a plain int."""
        return self.columns(tier).states[row]

    def any_in(self, state: int, rows: Sequence[int], tier: Tier) -> bool:
        """Whether the copy of any of these rows is in a state."""
        return self.columns(tier).any_in(state, rows)

    def is_ready(self, row: int) -> bool:
        """Whether a row (or -1) can be loaded from some tier now."""
        return self._presences[row] == READY

    def are_ready(self, rows: Iterable[int]) -> bool:
        """Whether all rows can be loaded now; perhaps False although they can, while a drive is quarantined."""
        return not self._hidden and self._unready.isdisjoint(rows)

    def is_coming(self, row: int) -> bool:
        """Whether a row (or -1) can be loaded now, or is being written."""
        return self._presences[row] > 0

    def presences(self, keys: Sequence[BlockKey]) -> bytes:
        """Return the ``Presence`` of each key of a chain (see ``find_chain``) as a byte: no Python call for each."""
        rows = self.find_chain(keys)
        if self.are_ready(rows):
            return bytes([READY]) * len(rows)
        return bytes(map(self._presences.__getitem__, rows))

    @property
    def hidden_segments(self) -> frozenset[int]:
        """NVMe segments whose copies nobody is to read now: their drive is quarantined."""
        return self._hidden

    @hidden_segments.setter
    def hidden_segments(self, segments: frozenset[int]) -> None:
        if segments == self._hidden:
            return
        changed = list(segments ^ self._hidden)
        self._hidden = segments
        self.gains += 1
        self.losses += 1
        if self.keys:
            places = np.frombuffer(self._nvme.segments, np.uint32)
            states = np.frombuffer(self._nvme.states, np.uint8)
            rows = np.flatnonzero((states == READY) & np.isin(places, changed))
            nvme = np.where(np.isin(places[rows], list(segments)), ABSENT, READY)
            pairs = np.frombuffer(self._cpu.states, np.uint8)[rows] * len(CopyState) + nvme
            np.frombuffer(self._presences, np.uint8)[rows] = np.frombuffer(PRESENCES, np.uint8)[pairs]

    def columns(self, tier: Tier) -> TierColumns:
        """Return a tier's copies by row: to be read, and neither to be changed nor to be kept."""
        return self._cpu if tier is CPU else self._nvme

    def slot(self, row: int, tier: Tier) -> Slot:
        """Return the slot of a copy that is not ABSENT."""
        return self.columns(tier).slots((row,))[0]

    def slots(self, rows: Sequence[int], tier: Tier) -> list[Slot]:
        """Return the slots of copies that are not ABSENT."""
        return self.columns(tier).slots(rows)

    def readable(self, row: int, tier: Tier) -> bool:
        """Whether a copy is READY and its drive is not quarantined."""
        columns = self.columns(tier)
        shown = tier is CPU or not self._hidden or columns.segments[row] not in self._hidden
        return shown and columns.states[row] == READY

    def pins(self, row: int, tier: Tier) -> int:
        """Return how many jobs use a copy; its writer counts."""
        return self.columns(tier).pins[row]

    def begin(self, row: int, tier: Tier, slot: Slot) -> None:
        """Start writing a copy into ``slot``; the writer holds one pin."""
        self.begin_all((row,), tier, (slot,))

    def begin_all(self, rows: Sequence[int], tier: Tier, slots: Sequence[Slot]) -> None:
        """Start writing many copies, each into its slot."""
        columns = self.columns(tier)
        segments, indices, pins = columns.segments, columns.indices, columns.pins
        assert len(rows) == len(slots)
        for at, row in enumerate(rows):
            self._change(row, tier, _BEGIN)
            segments[row], indices[row] = slots[at]
            pins[row] = 1
        self.chains.link(rows, tier)

    def finish(self, rows: Sequence[int], tier: Tier) -> None:
        """The writers of some copies are done on every rank: READY, their pins are gone."""
        if self._hidden:
            for row in rows:
                self._change(row, tier, _FINISH)
            self.unpin(rows, tier)
        else:
            columns, presences, gains = self.columns(tier), self._presences, 0
            states, pins, unready = columns.states, columns.pins, self._unready
            for row in rows:
                unready.discard(row)
                assert states[row] == WRITING and pins[row] == 1, "nobody is writing it"
                gains += presences[row] != READY
                states[row], presences[row], pins[row] = READY, READY, 0
            self.gains += gains
        if self.journal is not None:
            self._note(rows, tier, stored=True)

    def doom(self, row: int, tier: Tier) -> None:
        """Serve this copy to nobody any more. The caller drops it when its pins are gone."""
        self._note((row,), tier, stored=False)
        self._change(row, tier, _DOOM)

    def drop(self, row: int, tier: Tier) -> Slot:
        """End an unpinned copy and return its slot; the row goes with its last copy."""
        return self.drop_all((row,), tier)[0]

    def drop_all(self, rows: Sequence[int], tier: Tier) -> list[Slot]:
        """End many unpinned copies, those that follow a copy before it."""
        columns, others, presences = self.columns(tier), self._cpu.states, self._presences
        if tier is CPU:
            others = self._nvme.states
        slots, states, pins = columns.slots(rows), columns.states, columns.pins
        if self.journal is not None:
            self._note(rows, tier, stored=False)
        gone: list[int] = []
        for row in rows:
            assert pins[row] == 0, "a pinned copy cannot be dropped"
            if others[row] != ABSENT:
                self._change(row, tier, _DROP)
                continue
            self.losses += presences[row] > 0
            states[row], presences[row] = ABSENT, NOWHERE
            gone.append(row)
        self.chains.unlink(rows, tier)
        self._vacate(gone)
        return slots

    def _vacate(self, rows: Sequence[int]) -> None:
        keys, parents, rows_of = self.keys, self.parents, self._rows
        names = [keys[row] if rows_of.get(keys[row]) == row else None for row in rows]
        for name in names:
            if name is not None:
                del rows_of[name]
        self.chains.remove(rows, [parents[row] for row in rows], names)
        for row in rows:
            keys[row] = _NOBODY
            parents[row] = None
        self._unready.difference_update(rows)
        self._vacant += rows

    def pin(self, rows: Iterable[int], tier: Tier) -> None:
        """Hold READY copies for one job."""
        self.columns(tier).pin(rows)

    def unpin(self, rows: Iterable[int], tier: Tier) -> None:
        """Give one pin of each copy back."""
        self.columns(tier).unpin(rows)

    def evictable_in(self, tier: Tier) -> Callable[[int], bool]:
        """Return who tells whether a row's copy may be dropped for room, READY and unpinned: to be used at once."""
        return self.columns(tier).evictable()

    def ready_keys(self, tier: Tier) -> list[BlockKey]:
        """Return the keys of all copies of the current epoch that are READY in a tier."""
        states = self.columns(tier).states
        return [key for key, row in self._rows.items() if states[row] == READY]

    def hide_all(self) -> None:
        """Forget every key, for a new epoch: rows stay for their slots' sake, and are found by nobody."""
        if self.journal is not None:
            for tier in _TIERS:
                self.journal.note(tier, False, self.ready_keys(tier))
        self._rows.clear()
        self.losses += 1
        self.chains.forget_orphans()

    def rows_in(self, tier: Tier, segment: int | None = None) -> list[int]:
        """Return the rows with a copy in a tier, or in one of its segments, hidden ones included, ascending; fast."""
        return self.columns(tier).rows(segment)

    def _note(self, rows: Iterable[int], tier: Tier, *, stored: bool) -> None:
        """Tell of those copies that are READY, unless a new epoch has hidden them: then their end was told already."""
        if self.journal is not None:
            states = self.columns(tier).states
            for row in rows:
                key = self.keys[row]
                if states[row] == READY and self._rows.get(key) == row:
                    self.journal.note(tier, stored, (key,))  # one by one: so they count for the journal's bound

    def rows(self) -> list[int]:
        """Return every live row, hidden ones included, ascending: for tests."""
        return sorted({*self.rows_in(CPU), *self.rows_in(NVME)})

    def _change(self, row: int, tier: Tier, change: int) -> None:
        states, presences = self.columns(tier).states, self._presences
        states[row] = target = NEXT[states[row] * 4 + change]
        assert target != ILLEGAL, f"{Change(change)!r} of a copy of row {row}"
        nvme = self._nvme.states[row]
        if self._hidden and nvme == READY and self._nvme.segments[row] in self._hidden:
            nvme = ABSENT
        before, now = presences[row], PRESENCES[self._cpu.states[row] * 4 + nvme]
        if now == READY:
            self._unready.discard(row)
        else:
            self._unready.add(row)  # it may be farther already, for its drive
        presences[row] = now
        self.gains += now > before
        self.losses += now < before
