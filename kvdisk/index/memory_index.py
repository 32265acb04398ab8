# SPDX-License-Identifier: Apache-2.0
"""The ``Index`` in RAM: the reference implementation, for tests and simulations. It commits when it is told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvdisk.blocks import BlockKey
from kvdisk.index.base import BlockColumns, BlockRecord, IndexState, Progress, SegmentRecord
from kvdisk.index.columns import decode_blocks
from kvdisk.index.records import encode_block, encode_block_key, encode_segment, encode_segment_key


class _Call(NamedTuple):
    """One queued call; one of the tuples is filled."""

    ticket: int
    put_blocks: tuple[BlockRecord, ...] = ()
    delete_blocks: tuple[tuple[int, BlockKey], ...] = ()
    put_segments: tuple[SegmentRecord, ...] = ()
    delete_segments: tuple[int, ...] = ()

    @property
    def operation_count(self) -> int:
        return sum(len(operations) for operations in self[1:])


class MemoryIndex:
    """See ``Index``. Nothing is committed but by ``commit``, ``flush`` and ``close``.

    So a test can hold commits back, or stop between any two. One thread calls everything; there is no other.

    ``max_queued``: ``put`` is refused while that many operations or more wait. ``refuse_puts``: while True, the state
    is REFUSING and ``put`` answers None; a test may set it at any time.
    """

    def __init__(self, *, max_queued: int = 65536, refuse_puts: bool = False) -> None:
        assert max_queued > 0
        self.refuse_puts = refuse_puts
        self._max_queued = max_queued
        self._blocks: dict[tuple[int, BlockKey], BlockRecord] = {}
        self._segments: dict[int, SegmentRecord] = {}
        self._queue: deque[_Call] = deque()
        self._queued_count = 0
        self._last_ticket = 0
        self._committed = 0
        self._dropped_puts = 0
        self._closed = False

    @property
    def pending_calls(self) -> int:
        """Calls that are queued and not yet dealt with."""
        return len(self._queue)

    def segments(self) -> Iterator[SegmentRecord]:
        """See ``Index.segments``."""
        assert not self._closed
        return iter(sorted(self._segments.values()))

    def blocks(self) -> Iterator[BlockRecord]:
        """See ``Index.blocks``."""
        assert not self._closed
        return iter(list(self._blocks.values()))

    def block_columns(self) -> BlockColumns:
        """See ``Index.block_columns``."""
        assert not self._closed
        encoded = sorted(map(encode_block, self._blocks.values()))
        return decode_blocks([key for key, _ in encoded], [value for _, value in encoded])

    def put(self, records: Sequence[BlockRecord]) -> int | None:
        """See ``Index.put``."""
        for record in records:
            encode_block(record)  # only for its assertions: what LMDB cannot hold must not pass here either
        if records and (self.refuse_puts or self._queued_count >= self._max_queued):
            return None
        return self._submit(_Call(self._last_ticket + 1, put_blocks=tuple(records)))

    def delete(self, keys: Sequence[tuple[int, BlockKey]]) -> int:
        """See ``Index.delete``."""
        for epoch, key in keys:
            encode_block_key(epoch, key)
        return self._submit(_Call(self._last_ticket + 1, delete_blocks=tuple(keys)))

    def put_segment(self, record: SegmentRecord) -> int:
        """See ``Index.put_segment``."""
        encode_segment(record)
        return self._submit(_Call(self._last_ticket + 1, put_segments=(record,)))

    def delete_segment(self, segment: int) -> int:
        """See ``Index.delete_segment``."""
        encode_segment_key(segment)
        return self._submit(_Call(self._last_ticket + 1, delete_segments=(segment,)))

    def poll(self) -> Progress:
        """See ``Index.poll``."""
        state = IndexState.REFUSING if self.refuse_puts else IndexState.WRITABLE
        return Progress(self._committed, state, self._dropped_puts)

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

        ``fail``: as if the drive were full: puts are dropped (with the records that they were to replace), the other
        operations are committed, and ``refuse_puts`` is set.
        """
        for _ in range(len(self._queue) if call_count is None else min(call_count, len(self._queue))):
            call = self._queue.popleft()
            self._queued_count -= call.operation_count
            self._apply(call, fail)
            self._committed = call.ticket
        self.refuse_puts = self.refuse_puts or fail

    def reopened(self) -> MemoryIndex:
        """Return what the next process finds after this one was killed or closed: an index of what was committed."""
        survivor = MemoryIndex(max_queued=self._max_queued)
        survivor._blocks = dict(self._blocks)
        survivor._segments = dict(self._segments)
        return survivor

    def _submit(self, call: _Call) -> int:
        assert not self._closed
        if call.operation_count:
            self._queue.append(call)
            self._queued_count += call.operation_count
            self._last_ticket = call.ticket
        return self._last_ticket

    def _apply(self, call: _Call, fail: bool) -> None:
        for record in call.put_blocks:
            if fail:
                self._blocks.pop((record.epoch, record.key), None)
                self._dropped_puts += 1
            else:
                self._blocks[record.epoch, record.key] = record
        for name in call.delete_blocks:
            self._blocks.pop(name, None)
        for segment in call.put_segments:
            self._segments[segment.segment] = segment
        for number in call.delete_segments:
            self._segments.pop(number, None)
