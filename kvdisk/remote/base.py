# SPDX-License-Identifier: Apache-2.0
"""The ``Objects`` protocol: named objects of a store that hosts share, asked for in batches.

One rank's shard of a block is one object: its slot, header and payload, under a name that says
which block and which rank it is of; as it is, or coded, under a name that says so. The store evicts
as it likes, and there is no index of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, IntEnum
from typing import Any, NamedTuple, Protocol

from kvdisk.blocks import BlockKey
from kvdisk.geometry import Namespace

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class ObjectOp(Enum):
    """What a batch asks of each of its objects.

    PUT: have the object there; write the buffer's bytes if nothing of that length is there yet, so
    the first write wins. REPLACE: have just these bytes there, whatever there is. GET: fill the
    buffer. EXISTS: say whether the object is there.
    """

    PUT = "put"
    REPLACE = "replace"
    GET = "get"
    EXISTS = "exists"


class Result(IntEnum):
    """What came of one object of a batch; a closed list."""

    OK = 1
    """The object is there. After a GET the buffer has all its bytes."""
    ABSENT = 2
    BAD = 3
    """The object is there, but is none of ours: it has another length, lacks our seal, or cannot be
    decoded. Of a PUT or REPLACE: the buffer is not what was sealed (``RemoteObject.verify``)."""
    LATE = 4
    """No answer came in time."""
    REFUSED = 5
    """Not tried: too much is under way, or the store is left alone for now."""
    FAILED = 6


ANSWERS = frozenset({Result.OK, Result.ABSENT, Result.BAD})
"""The results that only a store that works can give."""


class RemoteObject(NamedTuple):
    """An object of a batch. ``buffer``: as long as the object, of one-byte items, writable for a
    GET; empty for EXISTS.

    For a store that codes: ``element_bytes``: of an element of what is put, 1 where that is not
    known. ``verify``: says of a copy of the buffer whether it is what was sealed, before it is
    coded; None: nobody asks. Any thread may call it, also after the batch has ended.
    """

    name: str
    buffer: memoryview = memoryview(b"")
    element_bytes: int = 1
    verify: Callable[[memoryview], bool] | None = None


class ObjectsOutcome(NamedTuple):
    """A batch that has ended. ``results``: one for each of its objects, in order. ``stored_bytes``:
    of those that were written, or read well, as the store keeps them."""

    ticket: int
    results: tuple[Result, ...]
    stored_bytes: int = 0


class Objects(Protocol):
    """A store of objects. One thread calls all methods. No operating failure is raised.

    From ``submit`` until ``poll`` has returned the outcome the caller keeps the buffers and does
    not touch them. After that nothing touches them, whatever the results are, LATE included. After
    a GET that is not OK the contents of the buffer are undefined.
    """

    @property
    def answers(self) -> bool:
        """Whether reads are tried now; False during a pause, in which the store is left alone."""

    @property
    def is_sound(self) -> bool:
        """Whether reads are tried and the last ones were answered: False from the beginning of a
        pause until a read is answered."""

    @property
    def pause_s(self) -> float:
        """Seconds until reads are tried again; 0 where they are tried now."""

    @property
    def hint_life_s(self) -> float:
        """Seconds for which an object is believed to be there after the store has said so."""

    def submit(self, op: ObjectOp, batch: Sequence[RemoteObject]) -> int:
        """Ask for a batch of one object or more, and return its ticket. Does not wait."""

    def poll(self, timeout_s: float = 0.0) -> list[ObjectsOutcome]:
        """Return the batches that ended since the last call. Where none has, wait up to
        ``timeout_s`` for the first. Returns at once when nothing is under way. Each batch ends
        within the store's deadline."""

    def close(self) -> None:
        """Give up what is under way. Nothing touches a buffer afterwards. Idempotent."""


class StoreBusy(Exception):
    """A ``Bucket`` raises this for a request that it did not try: requests that were given up hold
    all of its rooms."""


class Bucket(Protocol):
    """What a store's client must do. One thread calls all methods in an event loop, and may cancel
    the calls. Whatever they raise is a failure.

    ``name``: for the log. ``parallel``: the most requests that it is given at a time.
    ``hint_life_s``: seconds for which an object is believed to be there after the client has said
    so.
    """

    name: str
    parallel: int
    hint_life_s: float

    async def exists(self, name: str) -> bool:
        """Return whether an object is there."""

    async def get(self, name: str, most_bytes: int, take: Callable[[Any], Result]) -> Result | None:
        """Call ``take`` with the object's bytes, which are valid during that call only, and return
        what it returned; None where there is no such object. An object that is longer than
        ``most_bytes`` is not fetched: ``take`` is given none of its bytes. Others may still change
        the bytes meanwhile, and its length."""

    async def put(self, name: str, byte_count: int, fill: Callable[[Any], None], *, over: bool = False) -> None:
        """Have an object of that length there. Where there is none, or with ``over`` in any case,
        write what ``fill`` puts into the buffer that it is called with."""

    def close(self) -> None:
        """Release what the client holds. Called once, with nothing under way."""


class RemoteAnswer(NamedTuple):
    """Which blocks of a question the store had. They are hints: the store may evict a block at any
    time.

    ``is_whole``: the question was asked to its end; otherwise blocks that are not in ``found`` may
    be there too.
    """

    ticket: int
    found: frozenset[BlockKey]
    is_whole: bool = True


class RemoteIndex(Protocol):
    """Says which blocks a remote store has. One thread makes all calls; no call waits."""

    @property
    def any(self) -> bool:
        """Whether questions are tried now."""

    @property
    def is_sound(self) -> bool:
        """Whether the last questions that were tried were answered."""

    @property
    def hint_life_s(self) -> float:
        """Seconds for which an answer is believed."""

    def ask(self, ticket: int, chains: Sequence[Sequence[BlockKey]], alone: Sequence[BlockKey]) -> bool:
        """Queue a question, which ``poll`` answers later. Return False where too many are queued.

        ``chains``: in each, a block is of use only with all those before it. ``alone``: blocks that
        are of use alone.
        """

    def poll(self) -> list[RemoteAnswer]:
        """Return the answers since the last call."""

    def close(self) -> None:
        """Stop asking. Idempotent."""


def object_name(namespace: Namespace, key: BlockKey, part: int, shard_count: int) -> str:
    """Return the name of the object that has one rank's shard of a block. ``part``: the rank."""
    shown = key.hex()
    return f"kvdisk1/{namespace.fingerprint.hex()}/{namespace.epoch}/{shown[:2]}/{shown}/r{part}of{shard_count}"


class Health:
    """Decides when a store that does not answer is left alone: for FIRST_PAUSE_S, then twice as
    long each time, at most LONGEST_PAUSE_S. After each pause one batch tries it. One thread makes
    all calls."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = 0.0
        """Seconds of the pause that is under way; 0 where the store has answered since the last
        one."""
        self._until_s = 0.0
        self._trial: int | None = None

    @property
    def answers(self) -> bool:
        """Whether a batch may be sent now."""
        return not self._pause_s or (self._trial is None and self._clock() >= self._until_s)

    @property
    def is_sound(self) -> bool:
        """Whether the store has answered since the last pause began, or there was none."""
        return not self._pause_s

    @property
    def pause_s(self) -> float:
        """Seconds that are left of the pause; 0 where there is none."""
        return max(0.0, self._until_s - self._clock()) if self._pause_s else 0.0

    def begin(self, ticket: int) -> bool:
        """Return whether to send this batch. A batch that is sent has to be ended."""
        allowed = self.answers
        if allowed and self._pause_s:
            self._trial = ticket
        return allowed

    def end(self, ticket: int, *, answered: bool) -> bool:
        """Note that a batch has ended, and return whether a pause begins now. A batch that was sent
        before a pause and fails in it says nothing new."""
        fails = not answered and (ticket == self._trial or not self._pause_s)
        if answered:
            self._pause_s = 0.0
        elif fails:
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
            self._until_s = self._clock() + self._pause_s
        if answered or fails:
            self._trial = None
        return fails
