# SPDX-License-Identifier: Apache-2.0
"""A remote store without network: what it has of each rank, and questions that wait until they are
answered."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from itertools import takewhile

from kvdisk.blocks import BlockKey
from kvdisk.geometry import FILE_EPOCH, Namespace
from kvdisk.remote.base import ObjectsOutcome, RemoteAnswer, Result, object_name
from support.fake_slots import TORN, Content
from support.memory_objects import MemoryObjects
from support.sim_drive import Weather


class FakeRemote:
    """``RemoteIndex``, and the objects. ``any``: whether it answers now."""

    hint_life_s = 60.0

    def __init__(self, most_questions: int = 4) -> None:
        self.any = True
        self.objects: dict[tuple[int, BlockKey, int], Content] = {}
        """By epoch, key and rank."""
        self._most_questions = most_questions
        self._questions: deque[tuple[int, Sequence[Sequence[BlockKey]], Sequence[BlockKey]]] = deque()
        self._answers: list[RemoteAnswer] = []

    @property
    def waiting(self) -> int:
        return len(self._questions)

    @property
    def is_sound(self) -> bool:
        return self.any

    def ask(self, ticket: int, chains: Sequence[Sequence[BlockKey]], alone: Sequence[BlockKey]) -> bool:
        if len(self._questions) >= self._most_questions:
            return False
        self._questions.append((ticket, chains, alone))
        return True

    def answer(self, count: int | None = None) -> None:
        """Answer the oldest ``count`` questions, by default all, with what rank 0 has now; nothing
        where it does not answer."""
        for _ in range(len(self._questions) if count is None else min(count, len(self._questions))):
            ticket, chains, alone = self._questions.popleft()
            found = [key for chain in chains for key in takewhile(self._has, chain)] + list(filter(self._has, alone))
            self._answers.append(RemoteAnswer(ticket, frozenset(found if self.any else ())))

    def _has(self, key: BlockKey) -> bool:
        return (FILE_EPOCH, key, 0) in self.objects

    def poll(self) -> list[RemoteAnswer]:
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """See ``RemoteIndex``."""

    def lose(self, pick: int, *, whole: bool) -> None:
        """It evicts one object, or has other bytes in it from now on."""
        names = sorted(self.objects)
        if names:
            name = names[pick % len(names)]
            if whole:
                del self.objects[name]
            else:
                self.objects[name] = self.objects[name]._replace(payload=TORN)


class SimRemote(FakeRemote):
    """The same over the bytes that ranks have put. ``contents``: by name."""

    def __init__(self, fingerprint: bytes, ranks: int) -> None:
        super().__init__()
        self.contents: dict[str, bytes] = {}
        self._namespace = Namespace(fingerprint, FILE_EPOCH)
        self._ranks = ranks

    def _has(self, key: BlockKey) -> bool:
        return object_name(self._namespace, key, 0, self._ranks) in self.contents


class SimObjects(MemoryObjects):
    """What one rank asks of it: batches end late, or fail, as the weather says of drives.

    ``waits``: a batch may be under way for a while. ``seen``: how often what came of an object.
    """

    waits = True

    def __init__(self, contents: dict[str, bytes], weather: Weather, rng: random.Random) -> None:
        super().__init__(contents)
        self._weather, self._rng = weather, rng
        self.seen: Counter[str] = Counter()

    def poll(self, timeout_s: float = 0.0) -> list[ObjectsOutcome]:
        batches, self._batches = self._batches, []
        outcomes: list[ObjectsOutcome] = []
        for batch in batches:
            ticket, op, objects = batch
            fate = self._rng.random()
            if self.waits and fate < 0.5:
                self._batches.append(batch)
                continue
            failure = self._rng.choices(
                (None, Result.FAILED, Result.LATE), (1.0, self._weather.eio, self._weather.hang)
            )[0]
            results = tuple(self._do(op, each) if failure is None else failure for each in objects)
            self.seen.update(f"{op.value} {result.name}" for result in results)
            outcomes.append(ObjectsOutcome(ticket, results))
        return outcomes
