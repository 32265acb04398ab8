# SPDX-License-Identifier: Apache-2.0
"""Which copies this engine has, by key: arrays with a row per block, not an object. Scheduler thread only.

A row lives while its block has a copy in any tier. Each copy's life follows ``TRANSITIONS``; pins
count the jobs that use it. A copy is READY only when every rank's slot holds the key's bytes
(invariant 3); a WRITING or pinned copy is never dropped (invariant 4).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat

import numpy as np

from kvdisk.blocks import CPU, NVME, BlockKey, Slot, Tier, make_slots
from kvdisk.manager.chains import NONE, Chains
from kvdisk.manager.copies import ABSENT, ILLEGAL, NEXT, PRESENCES, READY, Change, CommittedCopies, CopyState, Presence
from kvdisk.manager.events import Journal

_TIERS = (CPU, NVME)
_BEGIN, _FINISH, _DOOM, _DROP = map(int, Change)
_NOBODY = BlockKey(b"")
_MOST_PINS, _GROWN_ROWS = 2**16 - 1, 64


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
        self._cpu_states, self._nvme_states = bytearray(), bytearray()
        self._states = {CPU: self._cpu_states, NVME: self._nvme_states}
        self._others = {CPU: self._nvme_states, NVME: self._cpu_states}
        # The last is that of row -1, which no block has.
        self._presences = bytearray([Presence.NOWHERE])
        # That row, and all with a key that are not READY but for their drive: few, and soon looked up.
        self._unready = {NONE}
        self._pins = {tier: array("H") for tier in _TIERS}
        self._segments = {tier: array("I") for tier in _TIERS}
        self._indices = {tier: array("I") for tier in _TIERS}
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
        return self.add_all((key,), generation, epoch, (parent,))[0]

    def add_all(
        self, keys: Sequence[BlockKey], first_generation: int, epoch: int, parents: Sequence[BlockKey | None]
    ) -> list[int]:
        """Make rows for many keys that have none, parents before those that follow them; see ``add``.

        Generations count up from the first.
        """
        count, vacant = len(keys), self._vacant
        while len(vacant) < count:
            self._grow()
        rows = vacant[: -count - 1 : -1]
        del vacant[-count:]
        rows_of, keys_of, parents_of, chains = self._rows, self.keys, self.parents, self.chains
        generations, epochs, parent_rows = self.generations, self.epochs, chains.parent_rows
        assert len(parents) == count
        for at, row in enumerate(rows):
            key, parent = keys[at], parents[at]
            assert key not in rows_of
            parent_row = NONE if parent is None else rows_of.get(parent, NONE)
            rows_of[key] = row
            keys_of[row] = key
            generations[row] = first_generation + at
            epochs[row] = epoch
            parents_of[row] = parent if parent_row == NONE else keys_of[parent_row]
            if chains.is_awaited(key):
                self._give_parent(key, row)
            parent_rows[row] = parent_row
            if parent_row == NONE and parent is not None:
                chains.await_parent(row, parent)
        return rows

    def _give_parent(self, key: BlockKey, row: int) -> None:
        """Let the rows that have waited for a key's row follow it."""
        for child in self.chains.take_orphans(key):
            self.parents[child] = key
            self.chains.give_parent(child, row, [tier for tier in _TIERS if self._states[tier][child] != ABSENT])

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
        for other in _TIERS:
            mine = other is tier
            self._states[other].extend(bytes([READY if mine else ABSENT]) * count)
            self._pins[other] = array("H", [0]) * count
            for columns, values in ((self._segments, copies.segments), (self._indices, copies.indices)):
                columns[other].frombytes(values.astype(np.uint32).tobytes() if mine else bytes(4 * count))
        self._presences[:0] = bytes([Presence.READY]) * count
        self.gains += 1
        self.chains.fill(tier, copies.parent_rows, copies.parents)

    def _grow(self) -> None:
        """Make vacant rows, a few at a time: it takes a tenth as long as one by one."""
        count, first = _GROWN_ROWS, len(self.keys)
        self.keys += [_NOBODY] * count
        self.parents += [None] * count
        self.generations.frombytes(bytes(count * self.generations.itemsize))
        self.epochs.frombytes(bytes(count * self.epochs.itemsize))
        for tier in _TIERS:
            self._states[tier].extend(bytes([ABSENT]) * count)
            for column in (self._pins[tier], self._segments[tier], self._indices[tier]):
                column.frombytes(bytes(count * column.itemsize))
        self._presences += bytes([Presence.NOWHERE]) * count
        self.chains.grow(count)
        self._vacant += range(first + count - 1, first - 1, -1)

    def state(self, row: int, tier: Tier) -> int:
        """Return the ``CopyState`` of a row's copy in a tier, as a plain int."""
        return self._states[tier][row]

    def any_in(self, state: int, rows: Iterable[int], tier: Tier) -> bool:
        """Whether the copy of any of these rows is in a state."""
        return state in bytes(map(self._states[tier].__getitem__, rows))

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
            return bytes([Presence.READY]) * len(rows)
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
            places = np.frombuffer(self._segments[NVME], np.uint32)
            states = np.frombuffer(self._nvme_states, np.uint8)
            rows = np.flatnonzero((states == READY) & np.isin(places, changed))
            nvme = np.where(np.isin(places[rows], list(segments)), ABSENT, READY)
            pairs = np.frombuffer(self._cpu_states, np.uint8)[rows] * len(CopyState) + nvme
            np.frombuffer(self._presences, np.uint8)[rows] = np.frombuffer(PRESENCES, np.uint8)[pairs]

    def columns(self, tier: Tier) -> tuple[bytearray, array[int], array[int]]:
        """Return a tier's columns, states, segments and indices, by row. Neither to be changed nor to be kept."""
        return self._states[tier], self._segments[tier], self._indices[tier]

    def slot(self, row: int, tier: Tier) -> Slot:
        """Return the slot of a copy that is not ABSENT."""
        return self.slots((row,), tier)[0]

    def slots(self, rows: Sequence[int], tier: Tier) -> list[Slot]:
        """Return the slots of copies that are not ABSENT."""
        if len(rows) == 1:
            assert self._states[tier][rows[0]] != ABSENT
            return [Slot(self._segments[tier][rows[0]], self._indices[tier][rows[0]])]
        assert ABSENT not in bytes(map(self._states[tier].__getitem__, rows))
        return make_slots(map(self._segments[tier].__getitem__, rows), map(self._indices[tier].__getitem__, rows))

    def readable(self, row: int, tier: Tier) -> bool:
        """Whether a copy is READY and its drive is not quarantined."""
        return self._states[tier][row] == READY and (
            tier is CPU or not self._hidden or self._segments[tier][row] not in self._hidden
        )

    def pins(self, row: int, tier: Tier) -> int:
        """Return how many jobs use a copy; its writer counts."""
        return self._pins[tier][row]

    def begin(self, row: int, tier: Tier, slot: Slot) -> None:
        """Start writing a copy into ``slot``; the writer holds one pin."""
        self.begin_all((row,), tier, (slot,))

    def begin_all(self, rows: Sequence[int], tier: Tier, slots: Sequence[Slot]) -> None:
        """Start writing many copies, each into its slot."""
        self._change(rows, tier, _BEGIN)
        segments, indices, pins = self._segments[tier], self._indices[tier], self._pins[tier]
        assert len(rows) == len(slots)
        for at, row in enumerate(rows):
            segments[row], indices[row] = slots[at]
            pins[row] = 1
        self.chains.link(rows, tier)

    def finish(self, rows: Sequence[int], tier: Tier) -> None:
        """The writers of some copies are done on every rank: READY, their pins are gone."""
        self._change(rows, tier, _FINISH)
        self.unpin(rows, tier)
        self._note(rows, tier, stored=True)

    def doom(self, row: int, tier: Tier) -> None:
        """Serve this copy to nobody any more. The caller drops it when its pins are gone."""
        self._note((row,), tier, stored=False)
        self._change((row,), tier, _DOOM)

    def drop(self, row: int, tier: Tier) -> Slot:
        """End an unpinned copy and return its slot; the row goes with its last copy."""
        return self.drop_all((row,), tier)[0]

    def drop_all(self, rows: Sequence[int], tier: Tier) -> list[Slot]:
        """End many unpinned copies, those that follow a copy before it."""
        slots = self.slots(rows, tier)
        assert not any(map(self._pins[tier].__getitem__, rows)), "a pinned copy cannot be dropped"
        self._note(rows, tier, stored=False)
        self._change(rows, tier, _DROP)
        self.chains.unlink(rows, tier)
        cpu, nvme = self._cpu_states, self._nvme_states
        self._vacate([row for row in rows if cpu[row] == nvme[row] == ABSENT])
        return slots

    def _vacate(self, rows: Sequence[int]) -> None:
        keys, parents, rows_of = self.keys, self.parents, self._rows
        names: list[BlockKey | None] = []
        for row in rows:
            key = keys[row]
            found = rows_of.get(key) == row
            if found:
                del rows_of[key]
            names.append(key if found else None)
        self.chains.remove(rows, [parents[row] for row in rows], names)
        for row in rows:
            keys[row] = _NOBODY
            parents[row] = None
        self._unready.difference_update(rows)
        self._vacant += rows

    def pin(self, rows: Iterable[int], tier: Tier) -> None:
        """Hold READY copies for one job."""
        states, pins = self._states[tier], self._pins[tier]
        for row in rows:
            assert states[row] == READY
            assert pins[row] < _MOST_PINS
            pins[row] += 1

    def unpin(self, rows: Iterable[int], tier: Tier) -> None:
        """Give one pin of each copy back."""
        pins = self._pins[tier]
        for row in rows:
            assert pins[row] > 0
            pins[row] -= 1

    def evictable(self, row: int, tier: Tier) -> bool:
        """Whether a copy may be dropped for room: READY and unpinned."""
        return self._states[tier][row] == READY and self._pins[tier][row] == 0

    def evictable_in(self, tier: Tier) -> Callable[[int], bool]:
        """Return ``evictable`` for one tier: to be asked for many rows at once, and not kept."""
        states, pins = self._states[tier], self._pins[tier]
        return lambda row: states[row] == READY and pins[row] == 0

    def ready_keys(self, tier: Tier) -> list[BlockKey]:
        """Return the keys of all copies of the current epoch that are READY in a tier."""
        states = self._states[tier]
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
        """Return the rows with a copy in a tier, or in one of its segments, hidden ones included; fast."""
        found = np.frombuffer(self._states[tier], np.uint8) != ABSENT
        if segment is not None:
            found &= np.frombuffer(self._segments[tier], np.uint32) == segment
        rows: list[int] = np.flatnonzero(found).tolist()
        return rows

    def _note(self, rows: Iterable[int], tier: Tier, *, stored: bool) -> None:
        """Tell of those copies that are READY, unless a new epoch has hidden them: then their end was told already."""
        if self.journal is not None:
            states = self._states[tier]
            for row in rows:
                key = self.keys[row]
                if states[row] == READY and self._rows.get(key) == row:
                    self.journal.note(tier, stored, (key,))  # one by one: so they count for the journal's bound

    def rows(self) -> Iterator[int]:
        """Yield every live row, hidden ones included. Takes seconds for a million: for tests."""
        for row in range(len(self.keys)):
            if any(self._states[tier][row] != ABSENT for tier in _TIERS):
                yield row

    def _change(self, rows: Sequence[int], tier: Tier, change: int) -> None:
        if len(rows) > 1 and not self._hidden:
            before = bytes(map(self._states[tier].__getitem__, rows))
            if not before.strip(before[:1]) and not any(map(self._others[tier].__getitem__, rows)):
                self._change_alike(rows, tier, before[0], change)
                return
        for row in rows:
            self._change_one(row, tier, change)

    def _change_alike(self, rows: Sequence[int], tier: Tier, state: int, change: int) -> None:
        """What ``_change_one`` does, for rows that have a copy in one tier at most, all in one state, as most have."""
        target = NEXT[state * 4 + change]
        assert target != ILLEGAL, f"{Change(change)!r} of copies that are {CopyState(state)!r}"
        scale = 4 if tier is CPU else 1
        before, now = PRESENCES[state * scale], PRESENCES[target * scale]
        states, presences = self._states[tier], self._presences
        for row in rows:
            states[row] = target
            presences[row] = now
        if now == READY:
            self._unready.difference_update(rows)
        else:
            self._unready.update(rows)
        if now > before:
            self.gains += len(rows)
        elif now < before:
            self.losses += len(rows)

    def _change_one(self, row: int, tier: Tier, change: int) -> None:
        states, presences = self._states[tier], self._presences
        states[row] = target = NEXT[states[row] * 4 + change]
        assert target != ILLEGAL, f"{Change(change)!r} of a copy of row {row}"
        nvme = self._nvme_states[row]
        if self._hidden and nvme == READY and self._segments[NVME][row] in self._hidden:
            nvme = ABSENT
        before, now = presences[row], PRESENCES[self._cpu_states[row] * 4 + nvme]
        if now == READY:
            self._unready.discard(row)
        else:
            self._unready.add(row)  # it may be farther already, for its drive
        presences[row] = now
        self.gains += now > before
        self.losses += now < before
