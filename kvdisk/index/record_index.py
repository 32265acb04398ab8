# SPDX-License-Identifier: Apache-2.0
"""What every ``Index`` of encoded records does the same way, wherever it keeps them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from kvdisk.blocks import BlockKey
from kvdisk.index.base import BlockColumns, BlockRecord, SegmentRecord
from kvdisk.index.columns import join_columns
from kvdisk.index.records import (
    Operation,
    Table,
    decode_blocks,
    decode_segment,
    encode_block,
    encode_block_key,
    encode_segment,
    encode_segment_key,
)

Scan = Iterable[tuple[list[bytes], list[bytes]]]
"""Keys and values of a table, ascending, part by part."""


def read_segments(parts: Scan) -> Iterator[SegmentRecord]:
    """Yield the records of the segments' table."""
    for part in parts:
        yield from map(decode_segment, *part)


def read_columns(parts: Scan) -> BlockColumns:
    """Return the records of the blocks' table."""
    return join_columns([decode_blocks(*part) for part in parts])


class RecordIndex(ABC):
    """See ``Index``. A subclass keeps what is queued, and says what is committed.

    A ticket is the number of operations queued so far.
    """

    def __init__(self) -> None:
        self._last_ticket = 0

    @abstractmethod
    def _scan(self, table: Table) -> Scan:
        """Return what is committed."""

    @abstractmethod
    def _takes_puts(self) -> bool:
        """Whether records of blocks are taken now."""

    @abstractmethod
    def _queue(self, operations: Sequence[Operation]) -> None:
        """Queue one call."""

    def segments(self) -> Iterator[SegmentRecord]:
        """See ``Index.segments``."""
        return read_segments(self._scan(Table.SEGMENTS))

    def blocks(self) -> Iterator[BlockRecord]:
        """See ``Index.blocks``."""
        for part in self._scan(Table.BLOCKS):
            yield from decode_blocks(*part).records()

    def block_columns(self) -> BlockColumns:
        """See ``Index.block_columns``."""
        return read_columns(self._scan(Table.BLOCKS))

    def put(self, records: Sequence[BlockRecord]) -> int | None:
        """See ``Index.put``."""
        return self._submit(Table.BLOCKS, map(encode_block, records)) if self._takes_puts() or not records else None

    def delete(self, keys: Sequence[tuple[int, BlockKey]]) -> int:
        """See ``Index.delete``."""
        return self._submit(Table.BLOCKS, ((encode_block_key(epoch, key), None) for epoch, key in keys))

    def put_segment(self, record: SegmentRecord) -> int:
        """See ``Index.put_segment``."""
        return self._submit(Table.SEGMENTS, [encode_segment(record)])

    def delete_segment(self, segment: int) -> int:
        """See ``Index.delete_segment``."""
        return self._submit(Table.SEGMENTS, [(encode_segment_key(segment), None)])

    def _submit(self, table: Table, items: Iterable[tuple[bytes, bytes | None]]) -> int:
        operations = [Operation(table, key, value) for key, value in items]
        self._last_ticket += len(operations)
        if operations:
            self._queue(operations)
        return self._last_ticket
