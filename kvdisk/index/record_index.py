# SPDX-License-Identifier: Apache-2.0
"""``Index``: where blocks are on NVMe, durably. An index is one home's and one process's.

It has encoded records, wherever it keeps them. Writes are queued and committed in batches; no call
but ``flush`` and ``close`` waits for a disk, a commit, or a lock that either can hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from kvdisk.blocks import BlockKey
from kvdisk.index.base import BlockColumns, BlockRecord, Progress, SegmentRecord
from kvdisk.index.columns import join_columns
from kvdisk.index.records import (
    Operation,
    Table,
    decode_blocks,
    decode_segments,
    encode_block,
    encode_block_key,
    encode_segment,
    encode_segment_key,
)

Part = TypeVar("Part")


class Index(ABC):
    """See the module. One scheduler thread calls everything.

    Operations are committed in the order in which they were queued; a ticket is the number of those
    queued so far. What reads raises CorruptRecord where a record does not decode. A subclass keeps
    what is queued, and says what is committed.
    """

    def __init__(self) -> None:
        self._last_ticket = 0

    @abstractmethod
    def _read(self, table: Table, decode: Callable[[list[bytes], list[bytes]], Part]) -> list[Part]:
        """Return what is committed, ascending: what ``decode`` makes of the keys and values of each
        part."""

    @abstractmethod
    def _takes_puts(self) -> bool:
        """Whether records of blocks are taken now."""

    @abstractmethod
    def _queue(self, operations: Sequence[Operation]) -> None:
        """Queue one call."""

    @abstractmethod
    def poll(self) -> Progress:
        """Return how far commits have come. Never waits."""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Wait until all that is queued has been dealt with; False when the time ran out."""

    @abstractmethod
    def close(self) -> None:
        """Commit what is queued (bounded wait), stop the writer and close. Idempotent."""

    def segments(self) -> Iterator[SegmentRecord]:
        """Yield every committed segment, ascending."""
        return chain.from_iterable(self._read(Table.SEGMENTS, decode_segments))

    def blocks(self) -> Iterator[BlockRecord]:
        """Yield every committed block of every epoch."""
        return self.block_columns().records()

    def block_columns(self) -> BlockColumns:
        """Return what ``blocks`` yields, all at once and much faster."""
        return join_columns(self._read(Table.BLOCKS, decode_blocks))

    def put(self, records: Sequence[BlockRecord]) -> int | None:
        """Queue records (replacing those of the same epoch and key); return a ticket, or None when
        the queue is full and nothing was queued."""
        return self._submit(Table.BLOCKS, map(encode_block, records)) if self._takes_puts() or not records else None

    def delete(self, keys: Sequence[tuple[int, BlockKey]]) -> int:
        """Queue the deletion of records by (epoch, key), absent ones included; return a ticket.
        Never refused: the caller bounds deletions by the slots it has."""
        return self._submit(Table.BLOCKS, ((encode_block_key(epoch, key), None) for epoch, key in keys))

    def put_segment(self, record: SegmentRecord) -> int:
        """Queue a segment record; return a ticket."""
        return self._submit(Table.SEGMENTS, [encode_segment(record)])

    def delete_segment(self, segment: int) -> int:
        """Queue the deletion of a segment record; return a ticket."""
        return self._submit(Table.SEGMENTS, [(encode_segment_key(segment), None)])

    def _submit(self, table: Table, items: Iterable[tuple[bytes, bytes | None]]) -> int:
        operations = [Operation(table, key, value) for key, value in items]
        self._last_ticket += len(operations)
        if operations:
            self._queue(operations)
        return self._last_ticket
