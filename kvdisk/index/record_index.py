# SPDX-License-Identifier: Apache-2.0
"""``Index``: which block is in which NVMe slot, durably. An index belongs to one engine store and
one process.

Records are kept encoded, wherever they are kept. Writes are queued and committed in batches. Only
``flush`` and ``close`` wait for a disk, for a commit, or for a lock that either can hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from kvdisk.blocks import BlockKey
from kvdisk.index.base import BlockColumns, BlockRecord, Progress, SegmentRecord
from kvdisk.index.columns import join_columns
from kvdisk.index.packed import Operation, Packed, Table
from kvdisk.index.records import (
    decode_blocks,
    decode_segments,
    encode_block,
    encode_block_key,
    encode_segment,
    encode_segment_key,
)

Part = TypeVar("Part")


class Index(ABC):
    """See the module. One scheduler thread makes all calls.

    Operations are committed in the order in which they were queued. A ticket is the number of
    operations queued so far. Every read raises CorruptRecord where a record does not decode. A
    subclass keeps the queue, and says what is committed.
    """

    def __init__(self) -> None:
        self._last_ticket = 0

    @abstractmethod
    def _read(self, table: Table, decode: Callable[[Packed], Part]) -> list[Part]:
        """Return what ``decode`` makes of each part of what is committed, in ascending order."""

    @abstractmethod
    def _takes_puts(self) -> bool:
        """Return whether records of blocks are taken now."""

    @abstractmethod
    def _queue(self, operations: Sequence[Operation]) -> None:
        """Queue the operations of one call, in order."""

    @abstractmethod
    def poll(self) -> Progress:
        """Return how far commits have come. Never waits."""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Wait until all that is queued is committed or dropped; return False when the time ran
        out."""

    @abstractmethod
    def close(self) -> None:
        """Commit what is queued (the wait is bounded), stop the writer and close. Idempotent."""

    def segments(self) -> Iterator[SegmentRecord]:
        """Yield every committed segment, ascending."""
        return chain.from_iterable(self._read(Table.SEGMENTS, decode_segments))

    def blocks(self) -> Iterator[BlockRecord]:
        """Yield every committed block of every epoch."""
        return self.block_columns().records()

    def block_columns(self) -> BlockColumns:
        """Return what ``blocks`` yields, as columns: much faster."""
        return join_columns(self._read(Table.BLOCKS, decode_blocks))

    def put(self, records: Sequence[BlockRecord]) -> int | None:
        """Queue records, which replace those of the same epoch and key. Return a ticket, or None
        when puts are refused or the queue is full; nothing is queued then."""
        return self._submit(Table.BLOCKS, map(encode_block, records)) if self._takes_puts() or not records else None

    def delete(self, keys: Sequence[tuple[int, BlockKey]]) -> int:
        """Queue the deletion of records by (epoch, key), absent ones included; return a ticket. It
        is never refused: the caller bounds deletions by the slots it has."""
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
