# SPDX-License-Identifier: Apache-2.0
"""The ``Index`` protocol: where blocks are on NVMe, durably. One index belongs to one home and one
owner process.

Writes are queued and committed in batches by the implementation; no call but ``flush`` and
``close`` waits for a disk, a commit, or a lock that either can hold.
"""

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

    ``parent``: key of the block before it in its chain, or None. ``stored_s``: seconds since the
    Unix epoch, whole.
    """

    epoch: int
    key: BlockKey
    slot: Slot
    generation: int
    parent: BlockKey | None = None
    stored_s: int = 0


class BlockColumns(NamedTuple):
    """Many committed blocks, a column for each field of ``BlockRecord``, all of one length: no
    object per block.

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
    """A committed block of another home: where it is, and the generation that its slot headers
    have."""

    home_id: str
    segment: SegmentRecord
    slot_index: int
    generation: int


class Answer(NamedTuple):
    """What the other homes said to a question: copies by key; a key that nobody has is not there.

    Committed when it was read; its owner may evict it at any time, so only the slot's header tells
    at the load.
    """

    ticket: int
    copies: dict[BlockKey, tuple[ForeignCopy, ...]]


class Neighbours(Protocol):
    """The other homes of this store that this engine can read. One thread calls everything; no call
    waits."""

    @property
    def any(self) -> bool:
        """Whether there was another home at the last look, a moment ago: without one there is
        nobody to ask."""

    def ask(self, ticket: int, epoch: int, keys: Sequence[BlockKey]) -> bool:
        """Queue a question, answered by ``poll`` some time later; False where too many wait, and it
        will not be."""

    def poll(self) -> list[Answer]:
        """Return the answers that have come since the last call, in the order of their
        questions."""

    def close(self) -> None:
        """Stop asking. Idempotent."""


class IndexState(IntEnum):
    """WRITABLE: puts are committed. REFUSING: the last batch failed (map or disk full, write
    error); its puts were dropped, deletions are retried with back-off, and the state returns by
    itself."""

    WRITABLE = 1
    REFUSING = 2


class Progress(NamedTuple):
    """``committed``: every operation with a ticket up to this one has been dealt with: deletions
    and segment operations are durable against a crash of the process, puts are too or have been
    dropped. ``dropped_puts``: puts lost since the index was opened."""

    committed: int
    state: IndexState
    dropped_puts: int


class Index(Protocol):
    """See the module. One scheduler thread calls everything; an implementation may have a writer
    thread of its own."""

    def segments(self) -> Iterator[SegmentRecord]:
        """Yield every committed segment, ascending. Raises CorruptRecord where one does not
        decode."""

    def blocks(self) -> Iterator[BlockRecord]:
        """Yield every committed block of every epoch. Raises CorruptRecord where one does not
        decode."""

    def block_columns(self) -> BlockColumns:
        """Return what ``blocks`` yields, all at once and much faster. Raises CorruptRecord as it
        does."""

    def put(self, records: Sequence[BlockRecord]) -> int | None:
        """Queue records (replacing those of the same epoch and key); return a ticket, or None when
        the queue is full and nothing was queued."""

    def delete(self, keys: Sequence[tuple[int, BlockKey]]) -> int:
        """Queue the deletion of records by (epoch, key), absent ones included; return a ticket.
        Never refused: the caller bounds deletions by the slots it has."""

    def put_segment(self, record: SegmentRecord) -> int:
        """Queue a segment record; return a ticket. Committed after all that was queued before
        it."""

    def delete_segment(self, segment: int) -> int:
        """Queue the deletion of a segment record; return a ticket. Committed after all that was
        queued before it."""

    def poll(self) -> Progress:
        """Return how far commits have come. Never waits."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that is queued has been dealt with; False when the time ran out. For
        shutdown and tools."""

    def close(self) -> None:
        """Commit what is queued (bounded wait), stop the writer and close. Idempotent."""
