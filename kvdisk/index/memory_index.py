# SPDX-License-Identifier: Apache-2.0
"""The reference ``Index``, in RAM, for tests, simulations and replays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvdisk.index.base import IndexState, Progress
from kvdisk.index.packed import Operation, Packed, Table
from kvdisk.index.record_index import Index, Part


class MemoryIndex(Index):
    """See ``Index``. Only ``commit``, ``flush`` and ``close`` commit: a test can stop between any
    two.

    ``max_queued``: ``put`` is refused while that many operations or more wait. ``refuse_puts``:
    while True, the state is REFUSING and ``put`` returns None; a test may set it at any time.
    ``is_gone``: once True, the state is GONE and nothing is committed; a test may set it.
    """

    def __init__(self, *, max_queued: int = 65536) -> None:
        assert max_queued > 0
        super().__init__()
        self.refuse_puts = False
        self.is_gone = False
        self._max_queued = max_queued
        self._tables: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
        self._calls: deque[Sequence[Operation]] = deque()
        self._queued_count = 0
        self._dropped_puts = 0
        self._closed = False

    @property
    def pending_calls(self) -> int:
        """The calls that are queued and not yet committed."""
        return len(self._calls)

    def poll(self) -> Progress:
        state = IndexState.REFUSING if self.refuse_puts else IndexState.WRITABLE
        if self.is_gone:
            state = IndexState.GONE
        return Progress(self._last_ticket - self._queued_count, state, self._dropped_puts)

    def flush(self, timeout_s: float) -> bool:
        """See ``Index.flush``; takes no time."""
        assert timeout_s >= 0
        self.commit()
        return not self._calls

    def close(self) -> None:
        self.commit()
        self._closed = True

    def commit(self, call_count: int | None = None, *, fail: bool = False) -> None:
        """Commit the oldest ``call_count`` queued calls, by default all.

        ``fail``: act as if the drive were full. Puts are dropped (with the records that they were
        to replace), the other operations are committed, and ``refuse_puts`` is set.
        """
        if self.is_gone:
            return
        for _ in range(len(self._calls) if call_count is None else min(call_count, len(self._calls))):
            operations = self._calls.popleft()
            self._queued_count -= len(operations)
            for operation in operations:
                table, key, value = operation
                dropped = fail and operation.droppable
                self._dropped_puts += dropped
                if value is None or dropped:
                    self._tables[table].pop(key, None)
                else:
                    self._tables[table][key] = value
        self.refuse_puts = self.refuse_puts or fail

    def reopened(self) -> MemoryIndex:
        """Return an index of what was committed, as the next process would find it."""
        survivor = MemoryIndex(max_queued=self._max_queued)
        survivor._tables = {table: dict(items) for table, items in self._tables.items()}
        return survivor

    def _read(self, table: Table, decode: Callable[[Packed], Part]) -> list[Part]:
        assert not self._closed
        items = sorted(self._tables[table].items())
        return [decode(Packed.of([key for key, _ in items], [value for _, value in items]))]

    def _takes_puts(self) -> bool:
        return not (self.refuse_puts or self.is_gone) and self._queued_count < self._max_queued

    def _queue(self, operations: Sequence[Operation]) -> None:
        assert not self._closed
        self._calls.append(operations)
        self._queued_count += len(operations)
