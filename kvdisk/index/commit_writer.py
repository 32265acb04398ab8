# SPDX-License-Identifier: Apache-2.0
"""The queue before an index's transactions, the thread that commits them, and its retries."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvdisk.errors import CorruptRecord, KvdiskError, QuietLog, start_thread
from kvdisk.index.base import IndexState, Progress
from kvdisk.index.map_size import MAX_TRANSACTION
from kvdisk.index.packed import Operation

logger = logging.getLogger(__name__)

SMALL_TRANSACTION = 16
"""Operations in one transaction after a failure: few, so that a small reserve of space is
enough."""
FIRST_BACK_OFF_S = 0.1
LAST_BACK_OFF_S = 5.0
LATE_S = 30.0
"""Seconds after which a commit is late: new puts are refused until it ends."""


class IndexGone(CorruptRecord):
    """Nothing more is committed until the next start."""


class Tables(Protocol):
    """What transactions are applied to. The writer's thread calls both methods."""

    def commit(self, operations: Sequence[Operation]) -> None:
        """Apply all operations in order in one transaction, or none and raise a KvdiskError.
        IndexGone says that they may have been applied, and that nothing else will be."""

    def recover(self) -> None:
        """Make a retry promising after a failed commit. Raises KvdiskError."""


class CommitWriter:
    """Commits operations in order, on a thread of its own.

    A batch is committed ``commit_s`` seconds after its first operation, or when MAX_TRANSACTION
    operations have gathered. When a commit fails, the droppable operations of the batch become
    deletions of their keys: such a put may have been meant to replace a record whose slot is then
    reused. Then all is tried again in small transactions. What fails again is held, and retried
    with back-off before anything else. The state is REFUSING until the back-off is over and nothing
    is held. The next back-off is longer unless puts have been committed meanwhile. After IndexGone
    nothing is tried any more, and what is queued stays queued.

    One lock guards the queue and the conditions of waiting; it is never held during a transaction.
    ``progress`` is replaced as a whole and read without the lock.
    """

    def __init__(self, tables: Tables, commit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.progress = Progress(0, IndexState.WRITABLE, 0)
        self._tables = tables
        self._commit_s = commit_s
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[Operation] = deque()
        self._submitted_count = 0  # written by the caller's thread only
        self._flush_count = 0
        self._failures = 0  # tries after which operations were still held
        self._retry_now = False
        self._stopping = False
        self._held: list[Operation] = []
        self._back_off_s = 0.0
        self._retry_at_s = 0.0
        self._began_s = math.inf  # when the transaction that is under way began
        self._log, self._log_late = QuietLog(clock, logger), QuietLog(clock, logger)  # one for each thread
        self._thread = threading.Thread(target=self._run, name="kvdisk-index", daemon=True)
        start_thread(self._thread)

    # The caller's thread.

    @property
    def waiting(self) -> int:
        """The operations that are neither committed nor dropped."""
        return self._submitted_count - self.progress.committed

    @property
    def takes_puts(self) -> bool:
        """Whether the last transaction that ended leaves puts possible."""
        return self.progress.state is IndexState.WRITABLE

    def look(self) -> Progress:
        """Return the progress. The state is REFUSING also while a commit is late."""
        progress = self.progress
        if self.takes_puts and self._clock() > self._began_s + LATE_S:
            self._log_late.warn("late", f"index takes no new blocks: a commit has not ended after {LATE_S:.0f} s")
            return progress._replace(state=IndexState.REFUSING)
        return progress

    def submit(self, operations: Sequence[Operation]) -> None:
        """Queue operations, in order. The caller's thread."""
        self._submitted_count += len(operations)
        with self._changed:
            queued = len(self._queue)
            self._queue.extend(operations)
            # The writer waits for the first of a batch and for a full batch; waking it in between
            # costs the caller.
            if queued == 0 or queued < MAX_TRANSACTION <= len(self._queue):
                self._changed.notify_all()

    def flush(self, timeout_s: float, tries: int = 2) -> bool:
        """Wait until all that was submitted is committed or dropped. Return False after
        ``timeout_s``, or after ``tries`` that failed. Wakes the writer at once, once out of a
        back-off too."""
        with self._changed:
            self._flush_count = self._submitted_count
            self._retry_now = True
            self._changed.notify_all()
            most_failures = self._failures + tries
            self._changed.wait_for(
                lambda: not self.waiting or self._stopping or self._failures >= most_failures, timeout_s
            )
            return not self.waiting

    def stop(self, timeout_s: float) -> bool:
        """Flush, and end the thread. Return False where the thread hangs in a commit."""
        if not self.flush(timeout_s, tries=1):
            logger.warning("index: stopped with %d operations not committed", self.waiting)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        return self.join(timeout_s)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread. Return False where it hangs in a commit."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The writer's thread.

    def _run(self) -> None:
        operations: list[Operation] = []
        try:
            while not self._stopping:
                operations = self._held or self._take()
                if operations:
                    self._deal(operations)
                if self._held:
                    self._back_off()
        except IndexGone as error:
            with self._changed:
                lost = sum(operation.droppable for operation in (*(self._held or operations), *self._queue))
            self._publish(self.progress._replace(state=IndexState.GONE, dropped_puts=self.progress.dropped_puts + lost))
            if not self._stopping:
                text = "kvdisk takes no new blocks on NVMe until the next start, and goes on serving those it has: %s"
                logger.warning(text, error)
        except Exception:
            logger.exception("kvdisk stores nothing more on NVMe, because of this error; please report it.")
        finally:
            # Also when a bug has ended the loop: nothing more will be committed, so nothing more
            # may be stored, and no caller is to wait for it.
            self._stopping = True
            self._publish(self.progress._replace(state=IndexState.GONE))

    def _take(self) -> list[Operation]:
        """Wait for a batch and return it: an empty one at the end of a back-off, or of the
        thread."""
        with self._changed:
            rest_s = None if self.takes_puts else max(0.0, self._retry_at_s - self._clock())
            self._changed.wait_for(lambda: self._queue or self._stopping, rest_s)
            if not self.takes_puts and self._clock() >= self._retry_at_s:
                self._publish(self.progress._replace(state=IndexState.WRITABLE))
            if self._queue:
                self._changed.wait_for(self._batch_is_due, self._commit_s)
            return [self._queue.popleft() for _ in range(min(len(self._queue), MAX_TRANSACTION))]

    def _batch_is_due(self) -> bool:
        flushing = self._flush_count > self.progress.committed
        return len(self._queue) >= MAX_TRANSACTION or flushing or self._stopping

    def _back_off(self) -> None:
        with self._changed:
            wait_s = max(0.0, self._retry_at_s - self._clock())
            self._changed.wait_for(lambda: self._retry_now or self._stopping, wait_s)
            self._retry_now = False

    def _deal(self, operations: list[Operation]) -> None:
        try:
            self._commit(operations)
        except IndexGone:
            raise
        except KvdiskError as error:
            self._deal_without_puts(operations, error)
        else:
            self._held = []
            if any(operation.droppable for operation in operations):
                self._back_off_s = self._retry_at_s = 0.0
            self._advance(operations)

    def _deal_without_puts(self, operations: list[Operation], error: KvdiskError) -> None:
        dropped_count = sum(operation.droppable for operation in operations)
        if dropped_count:
            self._refuse(error, dropped_count)
        self._held = [operation._replace(value=None) if operation.droppable else operation for operation in operations]
        try:
            self._tables.recover()
            while self._held:
                part = self._held[:SMALL_TRANSACTION]
                self._commit(part)
                del self._held[:SMALL_TRANSACTION]
                self._advance(part)
        except IndexGone:
            raise
        except KvdiskError as again:
            if not dropped_count:
                self._refuse(again, 0)
            with self._changed:
                self._failures += 1
                self._changed.notify_all()

    def _commit(self, operations: Sequence[Operation]) -> None:
        self._began_s = self._clock()
        try:
            self._tables.commit(operations)
        finally:
            self._began_s = math.inf

    def _refuse(self, error: KvdiskError, dropped_count: int) -> None:
        now = self._clock()
        if now >= self._retry_at_s:  # what was queued before the failure must not lengthen the back-off
            self._back_off_s = min(max(2 * self._back_off_s, FIRST_BACK_OFF_S), LAST_BACK_OFF_S)
            self._retry_at_s = now + self._back_off_s
        self._log.warn("commit", f"index takes no new blocks until a commit succeeds again: {error}")
        dropped_puts = self.progress.dropped_puts + dropped_count
        self._publish(self.progress._replace(state=IndexState.REFUSING, dropped_puts=dropped_puts))

    def _advance(self, operations: Sequence[Operation]) -> None:
        self._publish(self.progress._replace(committed=self.progress.committed + len(operations)))

    def _publish(self, progress: Progress) -> None:
        with self._changed:
            self.progress = progress
            self._changed.notify_all()
