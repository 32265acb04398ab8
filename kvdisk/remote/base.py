# SPDX-License-Identifier: Apache-2.0
"""The ``Objects`` protocol: named objects of a store that other hosts share, asked for in batches.

One rank's shard of a block is one object: its slot as it is, header and all, under a name that says
whose it is. The store evicts as it likes, and there is no index of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, IntEnum
from typing import NamedTuple, Protocol

from kvdisk.blocks import BlockKey
from kvdisk.geometry import Namespace

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class ObjectOp(Enum):
    """What is asked of each object of a batch.

    PUT: have it there, with the buffer's bytes if nothing of that length is there yet: the first
    write wins. REPLACE: have just these bytes there, whatever there is. GET: fill the buffer.
    EXISTS: is it there?
    """

    PUT = "put"
    REPLACE = "replace"
    GET = "get"
    EXISTS = "exists"


class Result(IntEnum):
    """What came of one object; a closed list."""

    OK = 1
    """It is there; of a GET, the buffer has all its bytes."""
    ABSENT = 2
    BAD = 3
    """It is there, and is not what we write: of another length, or without our seal."""
    LATE = 4
    """No answer came in time."""
    REFUSED = 5
    """It was not tried: too much is under way, or the store is left alone for now."""
    FAILED = 6


ANSWERS = frozenset({Result.OK, Result.ABSENT, Result.BAD})
"""Results that only a store gives that works."""


class RemoteObject(NamedTuple):
    """An object of a batch. ``buffer``: as long as the object, one-byte items, writable for a GET;
    empty for EXISTS."""

    name: str
    buffer: memoryview = memoryview(b"")


class ObjectsOutcome(NamedTuple):
    """A batch that has ended. ``results``: of each of its objects, in order."""

    ticket: int
    results: tuple[Result, ...]


class Objects(Protocol):
    """A store of objects. One thread calls all methods. No operating failure is raised.

    From ``submit`` until ``poll`` has returned the outcome the caller keeps the buffers and does
    not touch them. After that nothing touches them, whatever the results are: not of what is LATE
    either. What an object that is not OK left in the buffer of a GET is undefined.
    """

    @property
    def answers(self) -> bool:
        """Whether reads are tried now: False while the store is left alone."""

    @property
    def is_sound(self) -> bool:
        """Whether reads are tried and the last ones were answered: False from a pause's beginning
        until a read is answered."""

    @property
    def pause_s(self) -> float:
        """For how long from now on reads are left alone; 0: they are tried."""

    @property
    def hint_life_s(self) -> float:
        """How long what it has said to be there is believed to be."""

    def submit(self, op: ObjectOp, batch: Sequence[RemoteObject]) -> int:
        """Ask for a batch (one object or more), and return its ticket. Does not wait."""

    def poll(self, timeout_s: float = 0.0) -> list[ObjectsOutcome]:
        """Return the batches that ended since the last call; where none has, wait up to
        ``timeout_s`` for the first. Returns at once when nothing is under way. Each batch ends
        within the store's deadline."""

    def close(self) -> None:
        """Give up what is under way. Nothing touches a buffer afterwards. Idempotent."""


class RemoteAnswer(NamedTuple):
    """What the store was thought to have of a question's blocks. It may evict them at any time.

    ``is_whole``: it was asked to the end; else what is not in ``found`` may be there.
    """

    ticket: int
    found: frozenset[BlockKey]
    is_whole: bool = True


class RemoteIndex(Protocol):
    """Which blocks a store has. One thread calls everything; no call waits."""

    @property
    def any(self) -> bool:
        """Whether questions are tried now."""

    @property
    def is_sound(self) -> bool:
        """Whether the last questions that were tried were answered."""

    @property
    def hint_life_s(self) -> float:
        """How long an answer is believed."""

    def ask(self, ticket: int, chains: Sequence[Sequence[BlockKey]], alone: Sequence[BlockKey]) -> bool:
        """Queue a question, which ``poll`` answers some time later; False where too many wait.

        ``chains``: blocks of which each is of use only with those before it. ``alone``: others.
        """

    def poll(self) -> list[RemoteAnswer]:
        """Return the answers since the last call."""

    def close(self) -> None:
        """Stop asking. Idempotent."""


def object_name(namespace: Namespace, key: BlockKey, part: int, shard_count: int) -> str:
    """Return the name of one rank's part of a block."""
    shown = key.hex()
    return f"kvdisk1/{namespace.fingerprint.hex()}/{namespace.epoch}/{shown[:2]}/{shown}/r{part}of{shard_count}"


class Health:
    """Leaves a store alone that does not answer: FIRST_PAUSE_S, then twice as long each time. After
    each pause one batch tries it. One thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = 0.0
        """0: it has answered."""
        self._until_s = 0.0
        self._trial: int | None = None

    @property
    def answers(self) -> bool:
        """Whether a batch may be sent now."""
        return not self._pause_s or (self._trial is None and self._clock() >= self._until_s)

    @property
    def is_sound(self) -> bool:
        """Whether no pause has begun since it has answered."""
        return not self._pause_s

    @property
    def pause_s(self) -> float:
        """How long the pause goes on that is under way."""
        return max(0.0, self._until_s - self._clock()) if self._pause_s else 0.0

    def begin(self, ticket: int) -> bool:
        """Whether to send a batch. It then has to end."""
        allowed = self.answers
        if allowed and self._pause_s:
            self._trial = ticket
        return allowed

    def end(self, ticket: int, *, answered: bool) -> bool:
        """A batch has ended. Returns whether a pause begins by that: what was sent before a pause,
        and fails in it, says nothing new."""
        fails = not answered and (ticket == self._trial or not self._pause_s)
        if answered:
            self._pause_s = 0.0
        elif fails:
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
            self._until_s = self._clock() + self._pause_s
        if answered or fails:
            self._trial = None
        return fails
