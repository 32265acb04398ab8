# SPDX-License-Identifier: Apache-2.0
"""Another engine's home, without the engine: what its index says, what its slots hold, and a reader
that answers late.

The two can be made to disagree, as they do between a question and the load: the owner evicts, and
overwrites.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdisk.blocks import BlockKey
from kvdisk.geometry import GroupGeometry
from kvdisk.index.base import Answer, ForeignCopy, SegmentRecord
from support.fake_requests import value_of
from support.fake_slots import TORN, Content


@dataclass(slots=True)
class FakeHome:
    """One home with one segment. ``copies``: what its index says; ``contents``: what the ranks'
    slots hold, by slot."""

    home_id: str
    segment: SegmentRecord
    copies: dict[BlockKey, ForeignCopy] = field(default_factory=dict)
    contents: dict[int, list[Content]] = field(default_factory=dict)

    def store(
        self, key: BlockKey, place: int, generation: int, ranks: int, torn_rank: int | None, group: GroupGeometry
    ) -> None:
        """Store what a block must hold, on every rank but one that broke off, in the slot that
        ``place`` wraps to. The record of what it held before goes."""
        slot = place % self.segment.slot_count
        self.copies = {other: copy for other, copy in self.copies.items() if copy.slot_index != slot}
        self.copies[key] = ForeignCopy(self.home_id, self.segment, slot, generation, stored_s=0)
        values = [value_of(key, 0, rank, group) for rank in range(ranks)]
        self.contents[slot] = [Content(0, key, generation, value, value) for value in values]
        if torn_rank is not None:
            self.contents[slot][torn_rank] = self.contents[slot][torn_rank]._replace(payload=TORN)


class FakeNeighbours:
    """``Neighbours`` over fake homes: questions wait until ``answer`` is called. ``most_questions``
    bounds them."""

    def __init__(self, homes: Sequence[FakeHome], most_questions: int = 4) -> None:
        self.homes = list(homes)
        self._most_questions = most_questions
        self._questions: deque[tuple[int, int, tuple[BlockKey, ...]]] = deque()
        self._answers: list[Answer] = []

    @property
    def any(self) -> bool:
        return bool(self.homes)

    @property
    def waiting(self) -> int:
        return len(self._questions)

    def home(self, home_id: str) -> FakeHome | None:
        return next((home for home in self.homes if home.home_id == home_id), None)

    def ask(self, ticket: int, epoch: int, keys: Sequence[BlockKey]) -> bool:
        if len(self._questions) >= self._most_questions:
            return False
        self._questions.append((ticket, epoch, tuple(keys)))
        return True

    def answer(self, count: int | None = None) -> None:
        """Answer the oldest ``count`` questions, by default all, with what the indexes say now; of
        FILE_EPOCH."""
        for _ in range(len(self._questions) if count is None else min(count, len(self._questions))):
            ticket, epoch, keys = self._questions.popleft()
            found: dict[BlockKey, tuple[ForeignCopy, ...]] = {}
            for key in keys:
                copies = tuple(home.copies[key] for home in self.homes if key in home.copies)
                if copies and epoch == 0:
                    found[key] = copies
            self._answers.append(Answer(ticket, found))

    def poll(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """See ``Neighbours``."""
