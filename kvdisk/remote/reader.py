# SPDX-License-Identifier: Apache-2.0
"""``RemoteIndex`` over ``Objects``, which is asked for one rank's object of a block.

Asking for each block of a long prompt would take thousands of questions. So the blocks before one
that is there are assumed to be there: where the store has evicted from the middle, a load fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvdisk.blocks import BlockKey
from kvdisk.reader_thread import ReaderThread
from kvdisk.remote.base import ObjectOp, Objects, RemoteAnswer, RemoteObject, Result

MOST_FAILED_ROUNDS = 8
"""Rounds of one question in which some objects were not answered; these objects are asked for
again."""
MOST_ALONE = 256
"""The most blocks in ``alone`` that are asked for: the last ones."""
WAYS = 16
_LOOK_INTERVAL_S = 0.25
_POLL_S = 0.01
_CLOSE_TIMEOUT_S = 10.0
_THERE = {Result.OK: True, Result.ABSENT: False}
"""The results that answer EXISTS."""


class ChainSearch:
    """A search for the length of the part of a chain that is there. ``there``: the blocks known to
    be there. ``gone``: the position of the first block known to be gone. The first probes are
    positions 0, 1, 3, 7 … and the last, later ones divide what is left in WAYS."""

    def __init__(self, count: int) -> None:
        self.there, self.gone = 0, count
        self._begun = False

    def probes(self) -> list[int]:
        """Return the positions to ask for next; none where the search is over."""
        start, count = self.there, self.gone - self.there
        if not self._begun:
            self._begun = True
            powers = [(1 << power) - 1 for power in range(count.bit_length())]
            return sorted({*powers, count - 1} - {-1})
        ways = min(WAYS, count)
        return [start + way * count // ways for way in range(ways)]

    def take_answers(self, there: dict[int, bool | None]) -> None:
        """Take in the answers to the ``probes``, by position. None: there was no answer, and the
        position may be asked for again."""
        self.gone = min([at for at, found in there.items() if found is False], default=self.gone)
        self.there = max([at + 1 for at, found in there.items() if found and at < self.gone], default=self.there)


class _Question:
    """A question under way. ``_asked``: chain and position of each block of the batch at the store;
    chain ``len(chains)`` stands for ``alone``."""

    def __init__(self, ticket: int, chains: Sequence[Sequence[BlockKey]], alone: Sequence[BlockKey]) -> None:
        self.ticket = ticket
        self._keys = [*chains, alone[-MOST_ALONE:]]
        self._searches = [ChainSearch(len(chain)) for chain in chains]
        self._alone = list(range(len(self._keys[-1])))
        """Positions in ``alone`` that are not answered yet."""
        self._found: list[BlockKey] = []
        self._asked: list[tuple[int, int]] = []
        self._failed_rounds = 0
        self._is_over = False

    def next(self) -> list[BlockKey]:
        """Return the blocks to ask for next; none where the question is answered, or given up."""
        self._asked = [(chain, at) for chain, search in enumerate(self._searches) for at in search.probes()]
        self._asked += [(len(self._searches), at) for at in self._alone]
        return [] if self._is_over else [self._keys[chain][at] for chain, at in self._asked]

    def take_answers(self, results: Sequence[Result]) -> None:
        """Take in the results for the blocks of ``next``. Those that were not answered are asked
        for again, unless none was, or that happens MOST_FAILED_ROUNDS times."""
        answers: dict[int, dict[int, bool | None]] = {}
        for (chain, at), result in zip(self._asked, results, strict=True):
            answers.setdefault(chain, {})[at] = _THERE.get(result)
        for chain, there in answers.items():
            if chain < len(self._searches):
                self._searches[chain].take_answers(there)
            else:
                self._found += [self._keys[chain][at] for at, found in there.items() if found]
                self._alone = [at for at, found in there.items() if found is None]
        self._failed_rounds += not _THERE.keys() >= set(results)
        self._is_over = self._failed_rounds >= MOST_FAILED_ROUNDS or _THERE.keys().isdisjoint(results)

    @property
    def answer(self) -> RemoteAnswer:
        """The answer as far as it is known."""
        pairs = zip(self._searches, self._keys, strict=False)
        chained = [key for search, keys in pairs for key in keys[: search.there]]
        is_whole = not self._alone and all(search.there >= search.gone for search in self._searches)
        return RemoteAnswer(self.ticket, frozenset(chained + self._found), is_whole)


class RemoteReader(ReaderThread[_Question, RemoteAnswer]):
    """See ``RemoteIndex`` and the module. The reader owns ``objects``: its thread makes all calls
    and closes it. ``name_of``: returns the name of the object that is asked for in place of all
    ranks' objects."""

    def __init__(self, objects: Objects, name_of: Callable[[BlockKey], str]) -> None:
        self._objects = objects
        self._name_of = name_of
        self.hint_life_s = objects.hint_life_s
        self._any = self._is_sound = True
        self._asked: dict[int, _Question] = {}
        """The questions at the store, by the ticket of their batch."""
        super().__init__("kvdisk-remote-reader", _CLOSE_TIMEOUT_S)

    # -- the scheduler's thread ----------------------------------------------------------------

    @property
    def any(self) -> bool:
        return self._any

    @property
    def is_sound(self) -> bool:
        return self._is_sound

    def ask(self, ticket: int, chains: Sequence[Sequence[BlockKey]], alone: Sequence[BlockKey]) -> bool:
        return self._queue(_Question(ticket, chains, alone), len(self._asked))

    # -- the reader's thread -------------------------------------------------------------------

    def _idle_s(self) -> float | None:
        if self._asked:
            return 0.0
        return None if self._any else _LOOK_INTERVAL_S

    def _look(self) -> None:
        outcomes = self._objects.poll(_POLL_S)
        # Set before the answers: a caller that has an answer then knows whether the store is sound.
        self._any, self._is_sound = self._objects.answers, self._objects.is_sound
        for outcome in outcomes:
            question = self._asked.pop(outcome.ticket)
            question.take_answers(outcome.results)
            self._begin(question)

    def _begin(self, question: _Question) -> None:
        """Ask it, or go on with it."""
        keys = question.next()
        if keys:
            batch = [RemoteObject(self._name_of(key)) for key in keys]
            self._asked[self._objects.submit(ObjectOp.EXISTS, batch)] = question
        else:
            self._answers.append(question.answer)

    def _end(self) -> None:
        self._any = False
        self._objects.close()
