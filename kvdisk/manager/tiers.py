# SPDX-License-Identifier: Apache-2.0
"""The tiers: one protocol for all, and those in memory. Scheduler thread only.

Stores go to the first tier. A copy moves from each tier to the next by ``Demotions``, and is read
from the fastest that has it. What else a further tier needs is in ``docs/decisions/0030-tiers.md``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import Medium, Tier
from kvdisk.manager import bounds
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.catalog import DROPPED, READY
from kvdisk.manager.forgotten import ForgottenCopies
from kvdisk.manager.jobs import JobRecord
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.room import Room
from kvdisk.manager.step_work import Kind, Work


class Cleared(NamedTuple):
    """What was deleted for an operator: blocks, and the bytes, over all ranks, of the segment that
    goes with them, 0: none. ``more``: whether the same call may have more to delete."""

    blocks: int = 0
    segment_bytes: int = 0
    more: bool = False


class TierSpace(Room):
    """A tier: its room, and the life of the copies in it.

    These methods are those of a tier that is always there and can always be written.
    """

    # -- state -----------------------------------------------------------------------------------

    @property
    def in_memory(self) -> bool:
        """Whether a load can leave a copy here of what it reads from a slower tier; all of it is
        gone when the engine ends."""
        return self.tier.medium is Medium.MEMORY

    def note_time(self, now_s: int) -> None:
        """Set the time, in seconds since the Unix epoch, for what is used from now on."""

    def lose(self, segments: Collection[int]) -> None:
        """Give up segments of which files were removed by others."""

    def refresh(self, now: float) -> bool:  # noqa: ARG002
        """Refresh the state, once a step. Return whether room may have come free."""
        return False

    def commit(self) -> bool:
        """Take note of what was committed. Return whether room came free."""
        return False

    def on_settled(self, record: JobRecord, now: float) -> None:
        """Take note of what a settled job, of any tier, says of this one."""

    def gauges(self) -> dict[str, float]:
        """Return the tier's gauges, by series."""
        name, sizes = self.tier.label, self._geometry.slot_sizes
        pool, parts = self.pool, self._slots_per_block
        used = [
            total - free - awaiting for total, free, awaiting in zip(pool.total, pool.free, pool.awaiting, strict=True)
        ]
        return {
            f"used_bytes.{name}": sum(map(int.__mul__, used, sizes)) * parts,
            f"held_blocks.{name}": sum(used),
            f"capacity_bytes.{name}": sum(map(int.__mul__, self.capacity, sizes)) * parts,
        }

    def reorder(self, rows: Sequence[int]) -> None:
        """Blocks have another standing than before; of one chain the tail comes first."""
        for size_class, alike in self.by_class(rows):
            self._evictors[size_class].standings.reorder(alike)

    def held_rows(self) -> list[int]:
        """Return the rows whose blocks have a standing here; fast."""
        return [row for order in self._evictors for row in order.held_rows()]

    # -- the life of copies ----------------------------------------------------------------------

    def finish(self, rows: Sequence[int]) -> list[int]:
        """Copies were written on every rank. Return those that are READY: not those that were
        dropped meanwhile.

        Of one chain the tail comes first.
        """
        states = self._catalog.columns(self.tier).states
        ready = [row for row in rows if states[row] != DROPPED]
        for row in [row for row in rows if states[row] == DROPPED]:
            self.abandon(row)
        self._catalog.finish(ready, self.tier)
        for size_class, alike in self.by_class(ready):
            self._evictors[size_class].insert(alike)
            for order in self._evictors if len(self._evictors) > 1 else ():
                order.unlist(map(self._catalog.parent_rows.__getitem__, alike))
        self._record(ready)
        return ready

    def _record(self, rows: Sequence[int]) -> None:
        """Keep copies that have become READY beyond this process."""

    def abandon(self, row: int, *, late: bool = False) -> None:
        """A copy was not written, or is not needed any more: give back its writer's pin and its
        slot.

        ``late``: a device may still write to the slot. It stays taken until this is called again.
        """
        if not late:
            self._catalog.unpin((row,), self.tier)
            self.end((row,))
        elif self._state(row) != DROPPED:
            self._catalog.drop(row, self.tier)

    def touch(self, rows: Sequence[int]) -> None:
        """Copies were used: of one chain the tail comes first."""
        for size_class, alike in self.by_class(rows):
            self._evictors[size_class].touch(alike)
        if self.dirty is not None:
            self.dirty.used(rows)

    def reached(self, rows: Sequence[int]) -> None:
        """A request reached these blocks, which are in some tier; the tail of a chain first."""
        states = self._catalog.columns(self.tier).states
        if ready := [row for row in rows if states[row] == READY]:
            self.touch(ready)

    def end(self, rows: Sequence[int]) -> None:
        """End unpinned copies, those that follow a copy before it."""
        self._forget(rows)
        self._free(self._catalog.end(rows, self.tier))

    def _free(self, slots: Sequence[tuple[int, int]]) -> None:
        """The copies in these slots have ended."""
        self.pool.release(slots)

    def discard(self, *rows: int) -> None:
        """Let no request find these copies any more, and end each as soon as no job uses it."""
        pins = self._catalog.columns(self.tier).pins
        used, unused = [row for row in rows if pins[row]], [row for row in rows if not pins[row]]
        self._forget(used)
        for row in used:
            self._catalog.drop(row, self.tier)
        if unused:
            self.end(unused)

    def _forget(self, rows: Sequence[int]) -> None:
        for size_class, alike in self.by_class(rows):
            before = self._evictors[size_class].remove(alike)
            for order in self._evictors if len(self._evictors) > 1 else ():
                order.list_tails(before)  # a state may be of another size than what it follows
        if self.dirty is not None:
            self.dirty.ended(rows)

    def clear(self, rows: NDArray[np.intp], up_to: float) -> Cleared:
        """Discard some of these copies, ``bounds.CLEARED`` at most, of each chain the tail first:
        those of blocks that have no generation above ``up_to``."""
        if up_to < math.inf:
            rows = rows[np.frombuffer(self._catalog.generations, np.uint64)[rows] <= up_to]
        going: list[int] = rows[::-1][: bounds.CLEARED].tolist()
        self.discard(*going)
        return Cleared(len(going), more=len(going) < len(rows))

    def unpin(self, rows: Sequence[int]) -> None:
        """Give back one pin of each copy; the last one of a dropped copy ends it."""
        self._catalog.unpin(rows, self.tier)
        self._end_dropped(rows)

    def _end_dropped(self, rows: Sequence[int]) -> None:
        columns = self._catalog.columns(self.tier)
        dropped = [row for row in rows if columns.states[row] == DROPPED and columns.pins[row] == 0]
        if dropped:
            self.end(list(dict.fromkeys(dropped)))  # a job by key may have used one twice

    def reset(self) -> None:
        """The weights may have changed: forget what was counted. Call it before the catalog forgets
        the keys. What is in files stays for engines that load them."""
        self.admission.reset()

    def _state(self, row: int) -> int:
        return self._catalog.state(row, self.tier)


class MemorySpace(TierSpace):
    """Slots of the arena that every rank has of a tier. A slot's segment is its size class.

    ``slot_counts``: by size class.
    """

    def __init__(
        self, parts: Parts, slot_counts: Sequence[int], admission: AdmissionPolicy, tier: Tier = Tier.CPU
    ) -> None:
        super().__init__(parts, tier, admission)
        self._step_state, self._work = parts.state, parts.work
        self._forgotten = ForgottenCopies(parts, tier)
        for size_class, count in enumerate(slot_counts):
            if count:
                self.pool.add_segment(size_class, size_class, count)

    # -- a reset ---------------------------------------------------------------------------------

    def reset(self) -> None:
        """See ``TierSpace``. The copies that a job uses end with that, and steps end the others:
        nobody finds any of them."""
        super().reset()
        if self.dirty is not None:
            self.dirty.clear()
        self.discard(*self._forgotten.take_all())
        self._work.cancel(self, Kind.GONE)
        self._work.add(Kind.GONE, self, self._end_all_forgotten())

    def _end_all_forgotten(self) -> Work:
        while rows := self._forgotten.next(self._work.left(Kind.GONE)):
            self.end(rows)
            self._step_state.released += 1
            yield len(rows)

    def _forgotten_rows(self, size_class: int) -> NDArray[np.intp]:
        return self._forgotten.of(size_class)

    def _free_and_total_bytes(self) -> tuple[int, int]:
        free, total = super()._free_and_total_bytes()
        if not self._forgotten:
            return free, total
        sizes = enumerate(self._geometry.slot_sizes)
        forgotten = sum(self._forgotten.slots(size_class) * size for size_class, size in sizes)
        return free + forgotten * self._slots_per_block, total


class Tiers:
    """The tiers that there are, the fastest first; None: there is no such tier.

    ``first``: the fastest. ``arrival_tier``: the one where a load may leave a copy of what it reads
    from a slower one, if any.
    """

    def __init__(self, *tiers: TierSpace | None) -> None:
        self._tiers = {space.tier: space for space in tiers if space is not None}
        assert self._tiers
        self._spaces = tuple(self._tiers.values())
        self.first = self._spaces[0]
        self.arrival_tier = self.first if self.first.in_memory else None

    def __iter__(self) -> Iterator[TierSpace]:
        return iter(self._spaces)

    def __getitem__(self, tier: Tier) -> TierSpace:
        return self._tiers[tier]

    def __len__(self) -> int:
        return len(self._tiers)

    def get(self, tier: Tier) -> TierSpace | None:
        """Return a tier, if there is one."""
        return self._tiers.get(tier)

    def write_behind(self, parts: Parts, hints: PeerHints) -> None:
        """Have copies go from each tier to the next."""
        for upper, lower in self.pairs:
            upper.write_behind(parts, lower, hints)

    @property
    def pairs(self) -> Iterator[tuple[TierSpace, TierSpace]]:
        """Return each tier that copies move down from, and the one that they move to."""
        return pairwise(self)
