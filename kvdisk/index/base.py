# SPDX-License-Identifier: Apache-2.0
"""What an index says of blocks and segments, and how other engines' are asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise, starmap
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey, Slot


class BlockRecord(NamedTuple):
    """A committed block: where it is, and what its slot headers say on every rank.

    ``parent``: the block before it in its chain. ``stored_s``: when it was first stored, in any
    tier of any engine: whole seconds since the Unix epoch. ``tenant``: the digest of the salt that
    its key has (``kvdisk.salts``), below 2^64; 0: it has none, or nobody knew it.
    """

    epoch: int
    key: BlockKey
    slot: Slot
    generation: int
    parent: BlockKey | None = None
    stored_s: int = 0
    tenant: int = 0


class BlockColumns(NamedTuple):
    """Many committed blocks, a column for each field of ``BlockRecord``: no object per block.

    Ascending by epoch, then by the bytes of the key; no pair of them twice. ``parents``: the
    parents' keys, joined; ``parent_bytes``: the length of each, 0 where there is none.
    """

    epochs: NDArray[np.uint64]
    keys: list[BlockKey]
    segments: NDArray[np.uint32]
    indices: NDArray[np.uint32]
    generations: NDArray[np.uint64]
    parents: bytes
    parent_bytes: NDArray[np.int64]
    stored_s: NDArray[np.uint32]
    tenants: NDArray[np.uint64]

    def each_parent(self) -> Iterator[BlockKey]:
        """Yield the parents, empty where there is none: of millions, all at once would be many."""
        ends = accumulate(self.parent_bytes.tolist(), initial=0)
        return (BlockKey(self.parents[start:end]) for start, end in pairwise(ends))

    def records(self) -> Iterator[BlockRecord]:
        """Yield the blocks one by one."""
        rows = zip(
            self.epochs.tolist(),
            self.keys,
            map(Slot, self.segments.tolist(), self.indices.tolist()),
            self.generations.tolist(),
            (parent or None for parent in self.each_parent()),
            self.stored_s.tolist(),
            self.tenants.tolist(),
            strict=True,
        )
        return starmap(BlockRecord, rows)


class SegmentRecord(NamedTuple):
    """A segment whose files exist on every rank. ``drive``: position in the home's list."""

    segment: int
    slot_bytes: int
    slot_count: int
    drive: int = 0


class ForeignCopy(NamedTuple):
    """A committed block of another home. ``generation``: what its slot headers say. ``stored_s``:
    as in ``BlockRecord``."""

    home_id: str
    segment: SegmentRecord
    slot_index: int
    generation: int
    stored_s: int


class Answer(NamedTuple):
    """What the other homes said to a question: copies by key, of those that any has.

    Their owners may evict them at any time: only the slot's header shows at the load.
    """

    ticket: int
    copies: dict[BlockKey, tuple[ForeignCopy, ...]]


class Neighbours(Protocol):
    """The other homes that this engine can read. One thread calls everything; no call waits."""

    @property
    def any(self) -> bool:
        """Whether there was another home a moment ago."""

    def ask(self, ticket: int, epoch: int, keys: Sequence[BlockKey]) -> bool:
        """Queue a question, which ``poll`` answers some time later; False where too many wait."""

    def poll(self) -> list[Answer]:
        """Return the answers since the last call, in the order of their questions."""

    def close(self) -> None:
        """Stop asking. Idempotent."""


class IndexState(IntEnum):
    """WRITABLE: puts are committed. REFUSING: the last batch failed (map or disk full, write
    error), and its puts were dropped; or one takes long. Deletions are retried with back-off, and
    the state returns by itself. GONE: nothing more is committed until the next start."""

    WRITABLE = 1
    REFUSING = 2
    GONE = 3


class Progress(NamedTuple):
    """``committed``: every operation with a ticket up to this one has been dealt with: deletions
    and segment operations are durable against a crash of the process, puts are too or have been
    dropped. ``dropped_puts``: puts lost since the index was opened."""

    committed: int
    state: IndexState
    dropped_puts: int
