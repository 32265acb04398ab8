# SPDX-License-Identifier: Apache-2.0
"""The ``Index`` in RAM: the reference implementation, for tests and simulations. It commits when it
is told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from kvdisk.blocks import BlockKey
from kvdisk.index.base import BlockColumns, BlockRecord, IndexState, Progress, SegmentRecord
from kvdisk.index.columns import decode_blocks
from kvdisk.index.commit_writer import Table
from kvdisk.index.records import (
    decode_block,
    decode_segment,
    encode_block,
    encode_block_key,
    encode_segment,
    encode_segment_key,
)


class MemoryIndex:
    """See ``Index``. Nothing is committed but by ``commit``, ``flush`` and ``close``.

    So a test can hold commits back, or stop between any two. One thread calls everything; there is
    no other.

    ``max_queued``: ``put`` is refused while that many operations or more wait. ``refuse_puts``:
    while True, the state is REFUSING and ``put`` answers None; a test may set it at any time.
    """

    def __init__(self, *, max_queued: int = 65536, refuse_puts: bool = False) -> None:
        assert max_queued > 0
        self.refuse_puts = refuse_puts
        self._max_queued = max_queued
        self._tables: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
        self._queue: deque[tuple[Table, Sequence[tuple[bytes, bytes | None]]]] = deque()
        """Calls: keys with values, None to delete."""
        self._queued_count = 0
        self._last_ticket = 0
        self._dropped_puts = 0
        self._closed = False

    @property
    def pending_calls(self) -> int:
        """Calls that are queued and not yet dealt with."""
        return len(self._queue)

    def segments(self) -> Iterator[SegmentRecord]:
        """See ``Index.segments``."""
        return iter([decode_segment(*item) for item in self._items(Table.SEGMENTS)])

    def blocks(self) -> Iterator[BlockRecord]:
        """See ``Index.blocks``."""
        return iter([decode_block(*item) for item in self._items(Table.BLOCKS)])

    def block_columns(self) -> BlockColumns:
        """See ``Index.block_columns``."""
        items = self._items(Table.BLOCKS)
        return decode_blocks([key for key, _ in items], [value for _, value in items])

    def put(self, records: Sequence[BlockRecord]) -> int | None:
        """See ``Index.put``."""
        items = [encode_block(record) for record in records]
        if records and (self.refuse_puts or self._queued_count >= self._max_queued):
            return None
        return self._submit(Table.BLOCKS, items)

    def delete(self, keys: Sequence[tuple[int, BlockKey]]) -> int:
        """See ``Index.delete``."""
        return self._submit(Table.BLOCKS, [(encode_block_key(epoch, key), None) for epoch, key in keys])

    def put_segment(self, record: SegmentRecord) -> int:
        """See ``Index.put_segment``."""
        return self._submit(Table.SEGMENTS, [encode_segment(record)])

    def delete_segment(self, segment: int) -> int:
        """See ``Index.delete_segment``."""
        return self._submit(Table.SEGMENTS, [(encode_segment_key(segment), None)])

    def poll(self) -> Progress:
        """See ``Index.poll``."""
        state = IndexState.REFUSING if self.refuse_puts else IndexState.WRITABLE
        return Progress(self._last_ticket - len(self._queue), state, self._dropped_puts)

    def flush(self, timeout_s: float) -> bool:
        """See ``Index.flush``; takes no time."""
        assert timeout_s >= 0
        self.commit()
        return True

    def close(self) -> None:
        """See ``Index.close``."""
        self.commit()
        self._closed = True

    def commit(self, call_count: int | None = None, *, fail: bool = False) -> None:
        """Deal with the oldest ``call_count`` queued calls, by default all.

        ``fail``: as if the drive were full: puts are dropped (with the records that they were to
        replace), the other operations are committed, and ``refuse_puts`` is set.
        """
        for _ in range(len(self._queue) if call_count is None else min(call_count, len(self._queue))):
            table, items = self._queue.popleft()
            self._queued_count -= len(items)
            for key, value in items:
                dropped = fail and value is not None and table is Table.BLOCKS
                self._dropped_puts += dropped
                if value is None or dropped:
                    self._tables[table].pop(key, None)
                else:
                    self._tables[table][key] = value
        self.refuse_puts = self.refuse_puts or fail

    def reopened(self) -> MemoryIndex:
        """Return what the next process finds after this one was killed or closed: an index of what
        was committed."""
        survivor = MemoryIndex(max_queued=self._max_queued)
        survivor._tables = {table: dict(items) for table, items in self._tables.items()}
        return survivor

    def _items(self, table: Table) -> list[tuple[bytes, bytes]]:
        assert not self._closed
        return sorted(self._tables[table].items())

    def _submit(self, table: Table, items: Sequence[tuple[bytes, bytes | None]]) -> int:
        assert not self._closed
        if items:
            self._queue.append((table, items))
            self._queued_count += len(items)
            self._last_ticket += 1
        return self._last_ticket
