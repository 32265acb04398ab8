# SPDX-License-Identifier: Apache-2.0
"""What ``BlockStore`` is to who uses one: its values, its calls, and what moves bytes for it.

``store`` has the one on drives, and says it all again by the same names; ``testing.memory_blocks``
has one for tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import chain
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvdisk.blocks import GROUP_BYTES, MAX_KEY_BYTES, BlockKey, make_block_key
from kvdisk.config import Config
from kvdisk.geometry import EPOCH_LIMIT, Geometry
from kvdisk.manager.events import Taken
from kvdisk.messages import Plan, Report
from kvdisk.stats import Stats
from kvdisk.worker.row_memory import RowMemory, Rows, arrays_of

__all__ = [
    "MOST_HOLD_S",
    "MOST_SALTS",
    "BlockKind",
    "BlockStoreFace",
    "CallCheck",
    "Ended",
    "Get",
    "Memory",
    "Presence",
    "Put",
    "Result",
    "Row",
    "RowMover",
    "Rows",
    "StartMover",
    "Usage",
    "need",
    "rows_of",
]

MOST_HOLD_S = 60.0
"""What ``BlockStoreFace.hold`` holds at most."""
MOST_SALTS = 1 << 16
"""Salts that a store remembers, the last that were named."""

Memory = Rows | Sequence[Rows]
"""The caller's memory: rows for the blocks on their way, and each row's bytes beside each other.
Rows lie at any regular distance. Those of several arrays are numbered through, one array after the
other. It stays the caller's, and must live until ``close``."""
Row = int | Sequence[int]
"""The row of a block, or of each of its pieces."""


class BlockKind(NamedTuple):
    """Blocks of one size. A key says in its last two bytes which kind it is of, by position: see
    ``kvdisk.blocks.make_block_key``.

    ``payload_bytes``: of a row that are kept, from its first on. ``tokens``: that a block stands
    for: kinds share the drive by their bytes a token. ``window_tokens``: only the last so many
    before a token are read for it. ``state_tokens``: it is a recurrent state, and one in so many
    tokens is kept; None: it is KV. ``element_bytes``: of one element, where all have as many;
    1 where not, or it is not known. ``remote_codec`` goes by it, and nothing else. ``piece_bytes``:
    of a block that lies in several rows, the bytes of each of them, ``payload_bytes`` together;
    empty: it lies in one. On the drive pieces lie one behind the other, so that blocks of the same
    bytes are found whatever their pieces.
    """

    payload_bytes: int
    tokens: int = 1
    window_tokens: int | None = None
    state_tokens: int | None = None
    element_bytes: int = 1
    piece_bytes: tuple[int, ...] = ()

    @property
    def pieces(self) -> tuple[int, ...]:
        """The bytes of a block in each of its rows."""
        return tuple(self.piece_bytes) or (self.payload_bytes,)


class Put(NamedTuple):
    """A block to keep: the bytes of ``row``, or of the row of each of its pieces. ``parent``: the
    block before it in its chain, without which nobody asks for it; None: it is the first. A block
    leaves before its parent does. ``salt``: whose it is, for ``usage``; "": nobody's. The drive has
    a digest of it."""

    key: BlockKey
    parent: BlockKey | None
    row: Row
    salt: str = ""


class Get(NamedTuple):
    """A block to bring into ``row``, or into the row of each of its pieces. Where that fails the
    row may hold anything."""

    key: BlockKey
    row: Row


class Presence(IntEnum):
    """What is known of a key. ASKED: others were asked for it. COMING: it is being written."""

    ABSENT = 0
    ASKED = 1
    COMING = 2
    READY = 3


class Result(IntEnum):
    """What became of one block of a job; a closed list.

    Of any job: DONE; IO_ERROR: the drive, or the remote store, failed; DEADLINE: it took longer
    than ``io_deadline_s``, or ``remote_deadline_s`` there; CANCELLED: ``forget``, ``delete``,
    ``clear`` or ``close`` came first, or the mover is gone. Of a put: PRESENT: it is there, or
    being written; REFUSED: admission does not want it; NO_ROOM: none came in time, or the write
    budget is spent; NO_SPACE: the drive is full. Of a get: ABSENT: it is not there (any more);
    HEADER, CHECKSUM: other bytes were there than were written, and are dropped. Of a deletion:
    ABSENT: it was not there; IO_ERROR, DEADLINE: it is gone for this process, and the next start
    may find it.
    """

    DONE = 0
    PRESENT = 1
    REFUSED = 2
    NO_ROOM = 3
    ABSENT = 4
    HEADER = 5
    CHECKSUM = 6
    IO_ERROR = 7
    NO_SPACE = 8
    DEADLINE = 9
    CANCELLED = 10


class Usage(NamedTuple):
    """Bytes that blocks take, without headers and free room. ``by_salt``: of each salt that was
    named since the store was opened and has blocks; "": of blocks without one. ``unnamed_bytes``:
    of salts that were not: the drive has digests, which say no salt."""

    total_bytes: int
    by_salt: Mapping[str, int]
    unnamed_bytes: int


class Ended(NamedTuple):
    """A job that has ended: its rows are the caller's again. ``results``: of its blocks, in their
    order. ``moved_bytes``: of the blocks that are DONE. ``seconds``: since it was asked for."""

    tag: int
    results: Sequence[Result]
    moved_bytes: int
    seconds: float


class RowMover(Protocol):
    """Moves bytes between rows and the drive: on a thread here, or in a process of its own. In a
    plan's moves, rows stand where GPU blocks stand. One thread at a time makes all calls but
    ``wait``."""

    def submit(self, plan: Plan) -> None:
        """Take over a plan; each job is reported once. Does not wait."""

    def poll(self, wait_s: float = 0.0) -> Report:
        """Return what was finished since the last call; where that is nothing, wait up to
        ``wait_s`` for something. ``Report.off``: it is gone, touches no row any more, and reports
        nothing more. What it raises is an error of ours: it may still touch rows until it says
        that it is gone, or is closed."""

    def wait(self, wait_s: float) -> None:
        """Wait up to ``wait_s`` for something that ``poll`` would return, and take nothing of it.
        Another thread may make other calls meanwhile, but ``close``."""

    def close(self) -> None:
        """Cancel what has not ended. Waits for what has begun, however long that takes: no row is
        touched afterwards. Idempotent."""


StartMover = Callable[[Config, Geometry, Memory], RowMover]


def need(is_right: bool, what: str) -> None:
    """Raise ValueError where a caller does something wrong. ``what``: what should be so."""
    if not is_right:
        raise ValueError(what)


def rows_of(row: Row) -> tuple[int, ...]:
    """Return the row of each piece of a block, as a caller names them."""
    return tuple(row) if isinstance(row, Iterable) else (row,)


class CallCheck:
    """What callers may name in a store of these kinds and rows. Every store checks a call by it
    before the call changes anything. All its methods raise ValueError."""

    def __init__(self, kinds: Sequence[BlockKind], memory: Memory) -> None:
        arrays = arrays_of(memory)
        need(bool(arrays), "there is memory: one array of rows, or several")
        for array in arrays:
            is_array = isinstance(array, np.ndarray) and array.ndim == 2 and array.dtype == np.uint8
            need(is_array and array.strides[1] == 1, "rows are rows of bytes: an array of uint8 with two dimensions")
            need(array.flags.writeable, "what is read comes into rows, so they can be written")
        need(0 < len(kinds) <= _MOST_KINDS, f"there are 1 to {_MOST_KINDS:,} kinds of blocks")
        row_bytes = [array.shape[1] for array in arrays]
        sizes = [size for kind in kinds for size in kind.pieces]
        need(all(0 < size <= max(row_bytes) for size in sizes), "a row holds a block of any kind, or a piece of it")
        are_whole = all(sum(kind.pieces) == kind.payload_bytes for kind in kinds)
        need(are_whole, "the pieces of a block have its bytes together")
        spans = [span for kind in kinds for span in (kind.tokens, kind.window_tokens, kind.state_tokens)]
        need(all(span is None or span > 0 for span in spans), "a block stands for one token at least")
        self._memory = RowMemory(arrays)
        self._pieces: dict[bytes, tuple[int, ...]]
        self._pieces = {make_block_key(b"", at): kind.pieces for at, kind in enumerate(kinds)}
        """By what a key ends with: the bytes of a block of its kind in each row."""
        self._any_row = max(sizes) <= min(row_bytes) and all(len(kind.pieces) == 1 for kind in kinds)
        """Whether any block has one row, and fits into any."""

    @property
    def most_blocks(self) -> int:
        """How many blocks of the kind with most pieces there are rows for."""
        return len(self._memory) // max(map(len, self._pieces.values()))

    def keys(self, keys: Collection[BlockKey]) -> None:
        """Check keys."""
        need(set(map(type, keys)) <= _KEY_TYPES, "a key is bytes")
        need(max(map(len, keys), default=0) <= MAX_KEY_BYTES, f"a key has {MAX_KEY_BYTES} bytes at most")
        need({key[-GROUP_BYTES:] for key in keys} <= self._pieces.keys(), "a key of a kind that there is not")

    def puts(self, blocks: Sequence[Put], wait_s: float | None) -> None:
        """Check blocks to put, and how long they may wait."""
        need(wait_s is None or isinstance(wait_s, Real), "a time is a number of seconds")
        need(all(isinstance(block, tuple) and len(block) in _PUT_FIELDS for block in blocks), "these are no Put values")
        self.keys([block[0] for block in blocks])
        self.keys([block[1] for block in blocks if block[1] is not None])
        need(not any(block[0] == block[1] for block in blocks), "no block follows itself")
        self._rows([block[0] for block in blocks], [block[2] for block in blocks])
        need(all(isinstance(salt, str) for block in blocks for salt in block[3:]), "a salt is text")

    def gets(self, blocks: Sequence[Get], arrival: int) -> None:
        """Check blocks to get, and their turn."""
        need(isinstance(arrival, Integral), "an arrival is a number")
        need(all(isinstance(block, tuple) and len(block) == 2 for block in blocks), "these are no Get values")
        self.keys([block[0] for block in blocks])
        self._rows([block[0] for block in blocks], [block[1] for block in blocks])

    def _rows(self, keys: Sequence[BlockKey], rows: Sequence[Row]) -> None:
        numbers: Sequence[Any] = rows
        sizes: list[int] = []
        if not self._any_row or not set(map(type, rows)) <= _ROW_TYPES:  # else in less time
            named, pieces = [rows_of(row) for row in rows], [self._pieces[key[-GROUP_BYTES:]] for key in keys]
            need(list(map(len, named)) == list(map(len, pieces)), "a row is named for each piece of a block")
            numbers, sizes = list(chain.from_iterable(named)), list(chain.from_iterable(pieces))
            need(all(isinstance(row, Integral) for row in numbers), "a row is a number")
        there = range(len(self._memory))
        need(not numbers or (min(numbers) in there and max(numbers) in there), "a row that there is not")
        is_long = not sizes or bool((self._memory.row_bytes(np.array(numbers)) >= sizes).all())
        need(is_long, "a row is too short for its block")

    @staticmethod
    def epoch(epoch: int) -> None:
        """Check an epoch."""
        need(isinstance(epoch, Integral) and 0 < epoch < EPOCH_LIMIT, "an epoch that there is not")

    def held(self, keys: Sequence[BlockKey], hold_s: float) -> None:
        """Check blocks to hold, and how long."""
        self.keys(keys)
        need(isinstance(hold_s, Real), "a time is a number of seconds")


_MOST_KINDS = 1 << 16
_KEY_TYPES = {bytes}
_PUT_FIELDS = {3, 4}
_READY = bytes([Presence.READY])
_ROW_TYPES = {int}


class BlockStoreFace(ABC):
    """Blocks of bytes by key. One thread at a time calls everything but ``wait``; it may be another
    each time. ``kvdisk.shared_store`` has a store for several.

    What a caller does wrong raises ValueError, and changes nothing: a row, a kind or an epoch that
    there is not, a tag that is in use, a store that is closed. See ``CallCheck``.
    """

    @abstractmethod
    def presence(self, keys: Sequence[BlockKey]) -> bytes:
        """Return the ``Presence`` of each key. Neither waits nor counts: about a microsecond a
        key."""

    def longest_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Return how many of the first keys are READY, up to the first that is not."""
        found = self.presence(keys)
        return len(found) - len(found.lstrip(_READY))

    @abstractmethod
    def hold(self, keys: Sequence[BlockKey], hold_s: float) -> None:
        """Keep those of some blocks that are READY, and what they follow, from eviction for so
        long: for MOST_HOLD_S at most, and no more blocks at once than a quarter of the tier
        (``pin_share``), the heads of chains before their tails. It holds back no ``delete``,
        ``clear`` or ``max_age_s``, and no drive that fails."""

    @abstractmethod
    def ask(self, keys: Sequence[BlockKey]) -> None:
        """Ask the other engines of the store for what is not here. ``keys``: of one prompt, in its
        order. Those are ASKED until an answer, or until ``lookup_wait_s`` is over."""

    @abstractmethod
    def reached(self, request: str | None, keys: Sequence[BlockKey]) -> None:
        """A request wants these blocks, or has used them. Once for each request, in the order of
        its prompt: what is kept and admitted follows it. ``request``: its name, where it may come
        again: it counts once; None: each call is a request of its own."""

    @abstractmethod
    def put(self, tag: int, blocks: Sequence[Put], wait_s: float | None = None) -> None:
        """Keep blocks. Their rows must not change until the tag has ended.

        ``wait_s``: how long all of its blocks may wait for room that is coming. None: 5 s, and no
        more blocks of all such puts together than a quarter of the rows. Of a key that comes twice
        the later is PRESENT.
        """

    @abstractmethod
    def get(self, tag: int, blocks: Sequence[Get], arrival: int = 0) -> None:
        """Bring blocks into rows, which are the store's until the tag has ended. Verified: what is
        DONE is what was put. ``arrival``: gets of lower ones go first."""

    @abstractmethod
    def delete(self, tag: int, keys: Sequence[BlockKey]) -> None:
        """Delete blocks: nobody finds them here from now on, nor, once the tag has ended as DONE or
        ABSENT, after a restart, however the process ended. A result for each key.

        An index that is lost, as in a crash of the machine, is rebuilt from the slots on the drive,
        and may name them again.

        A get under way ends as it would. A put under way leaves nothing, and one that waits for
        room is CANCELLED. Copies of other engines of the store, and in the remote store, stay:
        ``ask`` finds these again.
        """

    @abstractmethod
    def clear(self, tag: int) -> None:
        """Delete all that this engine store has, as ``delete`` does, of every epoch; also what
        nobody can read now. One result, DONE even where nothing was there. Files go some steps
        later."""

    @abstractmethod
    def step(self, now: float) -> bool:
        """Send what was asked for, and look after the store. ``now``: of ``time.monotonic``. Return
        whether to call again soon, though nothing is asked for: False lets an idle engine rest."""

    @abstractmethod
    def poll(self, wait_s: float = 0.0) -> list[Ended]:
        """Return the jobs that have ended, each once; where there are none, wait up to ``wait_s``
        for one. After ``close`` it returns what is left. Raises what is an error of ours in what
        moves bytes: the store is off then, and jobs that had begun end when that is gone, or with
        ``close``."""

    @abstractmethod
    def wait(self, wait_s: float) -> None:
        """Wait up to ``wait_s`` for something that ``poll`` would take in. Any thread, also while
        another makes another call; not after ``close`` has begun."""

    @property
    @abstractmethod
    def is_off(self) -> bool:
        """Whether it serves nothing until it is opened again: it is closed, or its mover is
        gone."""

    @abstractmethod
    def forget(self, epoch: int) -> None:
        """Serve nothing of before: what keys mean has changed, for this engine. ``epoch``: any
        number above 0 and below ``EPOCH_LIMIT`` that was never used. Jobs on their way end as
        CANCELLED. The next start with the same namespace finds what was written before the first
        call."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until every job has ended; ``poll`` returns them. Bounded by ``io_deadline_s``, and
        the wait for room."""

    @abstractmethod
    def changes(self) -> Taken:
        """Return which keys became READY and which went since the last call; the first one begins
        with all that are there."""

    @abstractmethod
    def keys(self) -> list[BlockKey]:
        """Return the keys of all blocks that are READY here, in no order: for people and tools, as
        millions take a second."""

    @abstractmethod
    def usage(self, salts: Iterable[str] = ()) -> Usage:
        """Return the bytes that blocks take here, by salt. ``salts``: named by this, as if by a
        put. The first call counts all blocks: about a second for some millions."""

    @abstractmethod
    def stats(self) -> Stats:
        """Return what was counted and measured since the last call, and how it is now:
        docs/METRICS.md."""

    @abstractmethod
    def close(self) -> None:
        """End every job, commit, and give the store back. Waits for the drive. Idempotent."""
