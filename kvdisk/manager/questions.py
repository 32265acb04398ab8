# SPDX-License-Identifier: Apache-2.0
"""What others are asked of requests' prompts, stretch after stretch. Scheduler thread only.

A hit needs blocks of every KV-cache group at the same places. So a question is cut by tokens, alike
in every group: it is first for what is missing of a stretch of the prompt, and when that is
answered for the next one, for as long as no chain has a hole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Protocol

from kvdisk.blocks import BlockKey, Tier
from kvdisk.manager import bounds
from kvdisk.manager.catalog import READY
from kvdisk.manager.parts import Parts
from kvdisk.manager.step_work import Kind, Work

_READY = bytes([READY])
_NOT_READY = bytes(presence != READY for presence in range(256))


class Asking(Protocol):
    """Who has a question: a request, mostly.

    ``keys``: of its prompt, by group. ``question``, ``remote_question``: what the neighbours, and
    the remote store, were asked last; 0: nothing. ``asked_s``: when. ``load_tiers``: as those of
    which it may ask; None: all.
    """

    question: int
    remote_question: int
    asked_s: float | None

    @property
    def keys(self) -> tuple[Sequence[BlockKey], ...]:
        """See the class."""

    @property
    def load_tiers(self) -> frozenset[Tier] | None:
        """See the class."""


@dataclass(slots=True, eq=False)
class Question:
    """What is asked for a request. ``known``: what need not be asked for. ``tokens``: up to where
    it was looked at; ``asked``: blocks that were asked for by now. ``missing``: of the stretch
    under way, by group."""

    number: int
    request: Asking
    known: Collection[BlockKey] = ()
    tokens: int = 0
    asked: int = 0
    missing: list[list[BlockKey]] = field(default_factory=list)


class Questions:
    """The questions to one index, and its answers.

    ``send``: asks it for the missing blocks of one stretch, by group, with a ticket, and returns
    whether that was taken. ``counter``: of the requests for which it was asked.
    """

    def __init__(
        self,
        parts: Parts,
        send: Callable[[int, list[list[BlockKey]]], bool],
        counter: str,
    ) -> None:
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._stats = parts.stats
        self._work = parts.work
        self._send = send
        self._counter = counter
        self._last_number = self._last_ticket = 0
        self._open: set[int] = set()
        self._under_way: dict[int, Question] = {}
        """By ticket."""

    def ask(self, request: Asking, known: Collection[BlockKey] = ()) -> int:
        """Ask for what is missing of a request's prompt, and is not ``known``, now or soon; return
        the question's number. ``keys`` are up to date."""
        self._last_number += 1
        if len(self._open) < bounds.QUESTIONS:
            self._open.add(self._last_number)
            self._work.add(Kind.QUESTIONS, self, self._ask_on(Question(self._last_number, request, known)))
            self._work.run(Kind.QUESTIONS)
        return self._last_number

    def is_asking(self, number: int) -> bool:
        """Whether something of a question is not answered yet."""
        return number in self._open

    def take_in(self, answers: Iterable[Work]) -> None:
        """Let steps take answers in, those that came before first."""
        for answer in answers:
            self._work.add(Kind.ANSWERS, self, answer)

    def answered(self, ticket: int) -> Question | None:
        """Return the question whose stretch was answered; ``ended`` follows when the answer is
        taken in."""
        return self._under_way.pop(ticket, None)

    def ended(self, question: Question, found: Collection[BlockKey]) -> None:
        """The answer to a stretch is taken in: go on with the next, unless a chain has a hole in
        it."""
        groups = zip(self._geometry.groups, question.missing, strict=True)
        lacking = [key for group, keys in groups if group.reads_all for key in keys if key not in found]
        question.missing = []
        is_whole = not self._catalog.presences(lacking, question.request.load_tiers).strip(_READY)
        # Beyond half of the hints' room it would push out its own head.
        if is_whole and self._has_more(question) and question.asked < bounds.HINTS // 2:
            self._work.add(Kind.QUESTIONS, self, self._ask_on(question), first=True)
        else:
            self._open.discard(question.number)

    def _ask_on(self, question: Question) -> Work:
        """Ask for the next stretch of which something is missing, when the index takes it."""
        while self._has_more(question):
            start = question.tokens
            looked = self._look_at_next(question)
            if not any(question.missing):
                yield looked
                continue
            self._last_ticket += 1
            self._work.spend(Kind.QUESTIONS, looked)
            if self._send(self._last_ticket, question.missing):
                self._stats.add(self._counter, int(not question.asked))
                question.asked += sum(map(len, question.missing))
                self._under_way[self._last_ticket] = question
                return
            question.tokens = start  # some of it may be here by the next time
            yield 0
        self._open.discard(question.number)

    def drop_waiting(self) -> None:
        """Send nothing of what waits: the index is not asked now."""
        if self._work.has(Kind.QUESTIONS, self):
            self._work.cancel(self, Kind.QUESTIONS)
            under_way = {question.number for question in self._under_way.values()}
            self._open &= under_way

    def clear(self) -> None:
        """Forget all questions and answers."""
        self._work.cancel(self)
        self._open.clear()
        self._under_way.clear()

    def _has_more(self, question: Question) -> bool:
        """Whether a part of the prompt was not looked at yet."""
        groups = zip(self._geometry.groups, question.request.keys, strict=True)
        return any(len(keys) * group.block_tokens > question.tokens for group, keys in groups)

    def _look_at_next(self, question: Question) -> int:
        """Look for what is missing of the next stretch in the tiers that the request may load from;
        return how many blocks that has."""
        groups, step = self._geometry.groups, self._geometry.alignment_tokens
        step_keys = sum(step // group.block_tokens for group in groups)
        start, most = question.tokens, min(bounds.QUESTION_BLOCKS, self._work.left(Kind.QUESTIONS))
        end = question.tokens = start + max(1, most // step_keys) * step
        question.missing, looked = [], 0
        for group, keys in zip(groups, question.request.keys, strict=True):
            some = keys[start // group.block_tokens : end // group.block_tokens]
            presences = self._catalog.presences(some, question.request.load_tiers)
            missing = compress(some, presences.translate(_NOT_READY))
            question.missing.append([key for key in missing if key not in question.known])
            looked += len(some)
        return max(1, looked)
