# SPDX-License-Identifier: Apache-2.0
"""The values that an index works with, and the protocol that asks the indexes of neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate, compress, pairwise, starmap
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey, Slot
from kvdisk.messages import SegmentSpec


class BlockRecord(NamedTuple):
    """A committed block: its slot, and what the headers of that slot say on every rank.

    ``parent``: the block before it in its chain. ``stored_s``: when it was first stored, in any
    tier of any engine, in whole seconds since the Unix epoch. ``tenant``: the digest of the salt in
    its key (``kvdisk.salts``), below 2^64; 0 where there is no salt, or where nobody knew it.
    """

    epoch: int
    key: BlockKey
    slot: Slot
    generation: int
    parent: BlockKey | None = None
    stored_s: int = 0
    tenant: int = 0


class BlockColumns(NamedTuple):
    """Many committed blocks, with a column for each field of ``BlockRecord`` and no object per
    block.

    Rows ascend by epoch, then by the bytes of the key, and no (epoch, key) occurs twice.
    ``parents``: the parents' keys, joined. ``parent_bytes``: the length of each parent's key, 0
    where there is no parent.
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
        """Yield each row's parent, empty where there is none. It is an iterator, as the parents of
        millions of blocks would take much memory."""
        ends = accumulate(self.parent_bytes.tolist(), initial=0)
        return (BlockKey(self.parents[start:end]) for start, end in pairwise(ends))

    def only(self, kept: NDArray[np.bool_]) -> BlockColumns:
        """Return the rows that are ``kept``."""
        return BlockColumns(
            self.epochs[kept],
            list(compress(self.keys, kept)),
            self.segments[kept],
            self.indices[kept],
            self.generations[kept],
            b"".join(compress(self.each_parent(), kept)),
            self.parent_bytes[kept],
            self.stored_s[kept],
            self.tenants[kept],
        )

    def records(self) -> Iterator[BlockRecord]:
        """Yield the rows as records."""
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
    """A segment whose files exist on every rank. ``drive``: its position in the engine store's list
    of drives."""

    segment: int
    slot_bytes: int
    slot_count: int
    drive: int = 0

    @classmethod
    def of(cls, spec: SegmentSpec) -> SegmentRecord:
        """Return the record of a segment that was made, or found on the drive."""
        return cls(spec.segment, spec.slot_bytes, spec.slot_count, spec.drive)


class ForeignCopy(NamedTuple):
    """A committed block of another engine store. ``generation``: what its slot headers say.
    ``stored_s``: as in ``BlockRecord``."""

    home_id: str
    segment: SegmentRecord
    slot_index: int
    generation: int
    stored_s: int


class Answer(NamedTuple):
    """What the neighbours' indexes answered to a question: the copies of each key that any of them
    has.

    The copies are hints: their owners may evict them at any time. A load finds out by the slot's
    header.
    """

    ticket: int
    copies: dict[BlockKey, tuple[ForeignCopy, ...]]


class Neighbours(Protocol):
    """The other engine stores that this engine can read. One thread makes all calls; no call
    waits."""

    @property
    def any(self) -> bool:
        """Whether there was another engine store when they were last looked for."""

    def ask(self, ticket: int, epoch: int, keys: Sequence[BlockKey]) -> bool:
        """Queue a question, which ``poll`` answers later. Return False where too many are
        queued."""

    def poll(self) -> list[Answer]:
        """Return the answers since the last call, in the order of their questions."""

    def close(self) -> None:
        """Stop asking. Idempotent."""


class IndexState(IntEnum):
    """Whether an index takes new blocks.

    WRITABLE: puts are committed. REFUSING: the last batch failed (map or disk full, or a write
    error) and its puts were dropped, or a commit takes long; deletions are retried with back-off,
    and the state becomes WRITABLE again by itself. GONE: nothing more is committed until the next
    start.
    """

    WRITABLE = 1
    REFUSING = 2
    GONE = 3


class Progress(NamedTuple):
    """How far an index has come with what was queued.

    ``committed``: the index is done with every operation whose ticket is at most this. Deletions
    and segment operations are then durable against a crash of the process; puts are too, or were
    dropped. ``dropped_puts``: puts lost since the index was opened.
    """

    committed: int
    state: IndexState
    dropped_puts: int
