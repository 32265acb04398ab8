# SPDX-License-Identifier: Apache-2.0
"""What another store is thought to have: the questions to its index, and a table of what it has
answered. Scheduler thread only.

Neighbours and the remote store are one each. What they answer is a hint: the block may be gone when
it is read. A load then fails verification and is recomputed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from kvdisk.blocks import BlockKey
from kvdisk.manager import bounds
from kvdisk.manager.garbage import let_go
from kvdisk.manager.parts import Parts
from kvdisk.manager.questions import Asking, Questions
from kvdisk.manager.step_work import Kind, Work


class Ticketed(Protocol):
    """An answer. ``ticket``: of its question."""

    @property
    def ticket(self) -> int:
        """See the class."""


AnswerT = TypeVar("AnswerT", bound=Ticketed)
AnswerT_co = TypeVar("AnswerT_co", bound=Ticketed, covariant=True)
WhatT = TypeVar("WhatT")


class Answering(Protocol[AnswerT_co]):
    """An index that answers questions some time later. No call waits."""

    @property
    def any(self) -> bool:
        """Whether questions are tried now."""

    def poll(self) -> Sequence[AnswerT_co]:
        """Return the answers since the last call."""


class HintTable(Generic[WhatT]):
    """Blocks that a store is thought to have, what it said of each, and when; beyond
    ``bounds.HINTS`` the first heard of are forgotten first.

    ``found``: by key; only this class changes it. ``changes`` rises whenever other keys are in
    ``found`` than before.
    """

    def __init__(self) -> None:
        self.found: OrderedDict[BlockKey, tuple[WhatT, float]] = OrderedDict()
        self.changes = 0

    def put(self, key: BlockKey, what: WhatT, now: float) -> None:
        """The store has a block, and said so now."""
        self.changes += key not in self.found
        self.found[key] = what, now
        self.found.move_to_end(key)
        if len(self.found) > bounds.HINTS:
            self.found.popitem(last=False)
            self.changes += 1

    def forget(self, key: BlockKey) -> None:
        """The store does not have a block, or nobody knows it any more."""
        if self.found.pop(key, None) is not None:
            self.changes += 1

    def forget_older(self, before_s: float, most: int) -> int:
        """Forget up to so many that were heard of before then; return how many."""
        for count in range(min(most, len(self.found))):
            key = next(iter(self.found))
            if self.found[key][1] >= before_s:
                return count
            self.forget(key)
        return min(most, len(self.found))

    def clear(self) -> OrderedDict[BlockKey, tuple[WhatT, float]]:
        """Forget all; return what is to be let go of."""
        self.changes += 1
        forgotten, self.found = self.found, OrderedDict()
        return forgotten


class HintSource(ABC, Generic[AnswerT, WhatT]):
    """See the module.

    ``index``: None: there is no such store, or it is asked no more. ``counter``: of the requests
    for which it was asked.
    """

    def __init__(
        self,
        parts: Parts,
        index: Answering[AnswerT] | None,
        counter: str,
    ) -> None:
        self.exists = index is not None
        """Whether there was an index at the start."""
        self._answering = index
        self._state = parts.state
        self._work = parts.work
        self._table: HintTable[WhatT] = HintTable()
        self._questions = Questions(parts, self._send, counter)

    @property
    def hints(self) -> Mapping[BlockKey, tuple[WhatT, float]]:
        """What it is thought to have: what it said of each block, and when; the oldest first."""
        return self._table.found

    @property
    def changes(self) -> int:
        """Rises with each change of which keys may be found there."""
        return self._table.changes

    @property
    @abstractmethod
    def hint_life_s(self) -> float:
        """How long a hint is kept."""

    @abstractmethod
    def _send(self, ticket: int, missing: list[list[BlockKey]]) -> bool:
        """Ask for the missing blocks of one stretch, by group; return whether that was taken."""

    @abstractmethod
    def _hear(self, key: BlockKey, answer: AnswerT) -> None:
        """Take in what an answer says of a block that was asked for."""

    @property
    def _is_asked(self) -> bool:
        """Whether questions are tried now."""
        return self._answering is not None and self._answering.any

    def _ask(self, request: Asking, known: Collection[BlockKey] = ()) -> int | None:
        """Ask for what of a request's blocks neither this engine has nor is ``known``; return the
        question's number, None where nothing is asked. ``keys`` are up to date."""
        if not self._is_asked:
            return None
        return self._questions.ask(request, known)

    def _is_asking(self, number: int) -> bool:
        """Whether the answer to a question is still to come."""
        return self._questions.is_asking(number) and self._is_asked

    def absorb(self) -> None:
        """Take in the answers that have come, as far as the step allows it, ask for the rest, and
        forget hints that are too old."""
        if self._answering is None:
            return
        if answers := self._answering.poll():
            self._questions.take_in(self._take_in(answer) for answer in answers)
        if not self._answering.any:
            self._questions.drop_waiting()
        if self.hints and not self._work.has(Kind.HINT_ENDS, self):
            self._work.add(Kind.HINT_ENDS, self, self._forget_old())
        self._work.run(Kind.ANSWERS, Kind.QUESTIONS, Kind.HINT_ENDS)

    def _take_in(self, answer: AnswerT) -> Work:
        question = self._questions.answered(answer.ticket)
        if question is None:
            return
        for keys in question.missing:
            start = 0
            while start < len(keys):
                some = keys[start : start + self._work.left(Kind.ANSWERS)]
                for key in some:
                    self._hear(key, answer)
                start += len(some)
                yield len(some)
        self._questions.ended(question, self.hints)

    def _forget_old(self) -> Work:
        while self.hints:
            yield self._table.forget_older(self._state.now - self.hint_life_s, self._work.left(Kind.HINT_ENDS))

    def stop(self) -> None:
        """Ask no more, because this engine's weights are no longer those of the files."""
        self._answering = None
        let_go(self._work, self._table.clear())
        self._questions.clear()
        self._work.cancel(self)
