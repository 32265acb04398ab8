# SPDX-License-Identifier: Apache-2.0
"""Neighbours' copies: hints, asked for once per request, and their segments while loads read them.

A neighbour is another engine on this host with the same store. What it answers is a hint: it may
evict or overwrite the slot at any time. A load then fails verification and is recomputed, and the
copy is not asked for again. A segment is open only while a load uses it: an open file keeps its
space on the drive. Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from typing import Final

from kvdisk.blocks import AHEAD_S, BlockKey, Slot, Tier, group_of
from kvdisk.geometry import FILE_EPOCH
from kvdisk.index.base import Answer, ForeignCopy, Neighbours
from kvdisk.manager import bounds
from kvdisk.manager.hint_source import HintSource
from kvdisk.manager.parts import Parts
from kvdisk.manager.questions import Asking
from kvdisk.messages import FOREIGN_SEGMENTS, ForeignSegment, JobKind, Move, SegmentSpec

HINT_LIFE_S = 300.0
"""How long after an answer a copy is thought to be there."""


class NeighbourCopies(HintSource[Answer, ForeignCopy]):
    """What neighbours are thought to have. Without ``neighbours`` (no NVMe tier) none is asked.
    ``tier``: what their copies are read as."""

    tier: Final = Tier.NVME

    def __init__(self, parts: Parts, neighbours: Neighbours | None) -> None:
        super().__init__(parts, neighbours, "foreign_questions")
        self._config = parts.config
        self._geometry = parts.geometry
        self._transfers = parts.transfers
        self._stats = parts.stats
        self._neighbours = neighbours
        self._rejected: OrderedDict[tuple[str, BlockKey, int], None] = OrderedDict()
        self._next_segment = FOREIGN_SEGMENTS
        self._numbers: dict[ForeignSegment, int] = {}
        self._open: dict[int, SegmentSpec] = {}
        self._users: Counter[int] = Counter()
        """By number of an open segment: moves on their way that read it."""

    # -- questions -----------------------------------------------------------------------------

    @property
    def hint_life_s(self) -> float:
        """See ``HintSource``."""
        return HINT_LIFE_S

    def ask(self, request: Asking) -> None:
        """Ask the neighbours for what of a request's blocks this engine has not got. ``keys`` are
        up to date."""
        number = self._ask(request)
        if number is not None:
            request.question = number

    def is_asking(self, request: Asking) -> bool:
        """Whether the answer to a request's question is still to come."""
        return self._is_asking(request.question)

    def _send(self, ticket: int, missing: list[list[BlockKey]]) -> bool:
        assert self._neighbours is not None
        return self._neighbours.ask(ticket, FILE_EPOCH, [key for keys in missing for key in keys])

    def _hear(self, key: BlockKey, answer: Answer) -> None:
        hinted = next((copy for copy in answer.copies.get(key, ()) if self._is_fit(key, copy)), None)
        if hinted is None:
            self._table.forget(key)
        else:
            self._table.put(key, hinted, self._state.now)

    def _is_fit(self, key: BlockKey, copy: ForeignCopy) -> bool:
        groups, group = self._geometry.groups, group_of(key)
        return (
            group < len(groups)
            and copy.segment.slot_bytes == groups[group].slot_bytes
            and copy.slot_index < copy.segment.slot_count
            and (copy.home_id, key, copy.generation) not in self._rejected
            and (
                self._config.max_age_s is None
                or -AHEAD_S <= self._state.now_s - copy.stored_s <= self._config.max_age_s - HINT_LIFE_S
            )
        )

    def stored_s(self, key: BlockKey) -> int:
        """Return when a block was first stored that is read from elsewhere; of the remote store
        nobody knows it."""
        return self.hints[key][0].stored_s if key in self.hints else self._state.now_s

    def near(self, tier: Tier) -> Collection[BlockKey]:
        """Return the blocks that a neighbour is thought to have as near as ``tier`` is, so that
        they need not be written there."""
        return self.hints if tier is self.tier else ()

    # -- loads ---------------------------------------------------------------------------------

    @property
    def usable_hints(self) -> Mapping[BlockKey, tuple[ForeignCopy, float]]:
        """What of ``hints`` a lookup may count as READY now: all or nothing."""
        if not self.hints:
            return self.hints
        count = self._transfers.count
        return self.hints if count(JobKind.OPEN_SEGMENT) + count(JobKind.DROP_SEGMENT) < bounds.FILE_JOBS else {}

    def take(self, key: BlockKey) -> tuple[Tier, Slot, int] | None:
        """Return where a move can read a neighbour's copy, pinned, and its generation; None: none
        named one.

        Its segment is opened first, by a job of its own.
        """
        if key not in self.hints:
            return None
        copy, _ = self.hints[key]
        name = ForeignSegment(copy.home_id, copy.segment.segment)
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._next_segment
            self._next_segment += 1
            spec = self._open[number] = SegmentSpec(number, *copy.segment[1:], create=False, source=name)
            self._transfers.add(JobKind.OPEN_SEGMENT, [], [], segment=spec)
        self._users[number] += 1
        return self.tier, Slot(number, copy.slot_index), copy.generation

    @property
    def are_read(self) -> bool:
        """Whether a job on its way reads a neighbour's copy."""
        return bool(self._open)

    def slot_of(self, move: Move) -> Slot | None:
        """Return the slot of a neighbour that a move reads; None: it reads none."""
        slot = move.slots.get(self.tier)
        return slot if slot is not None and slot.segment >= FOREIGN_SEGMENTS else None

    def unpin(self, slot: Slot) -> None:
        """Note that a move is settled; the last one's segment is closed."""
        self._users[slot.segment] -= 1
        if self._users[slot.segment] == 0:
            spec = self._open.pop(slot.segment)
            assert spec.source is not None
            del self._users[slot.segment], self._numbers[spec.source]
            self._transfers.add(JobKind.DROP_SEGMENT, [], [], segment=spec)

    def reject(self, key: BlockKey, slot: Slot, generation: int) -> None:
        """Never ask for the copy in this pinned slot again: it did not hold what its index said."""
        name = self._open[slot.segment].source
        assert name is not None
        home_id = name.home_id
        self._stats.add("foreign_failures")
        self._rejected[home_id, key, generation] = None
        if len(self._rejected) > bounds.REJECTED:
            self._rejected.popitem(last=False)
        hinted = self.hints.get(key)
        if hinted is not None and (hinted[0].home_id, hinted[0].generation) == (home_id, generation):
            self._table.forget(key)
