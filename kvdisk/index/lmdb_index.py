# SPDX-License-Identifier: Apache-2.0
"""The ``Index`` in LMDB: a writer thread commits batches through a process that maps the files."""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from kvdisk.child import REAP_S
from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError
from kvdisk.index.base import BlockColumns, IndexState, Progress, SegmentRecord
from kvdisk.index.commit_writer import CommitWriter, IndexGone
from kvdisk.index.index_process import MAIN, ChildEnded, IndexProcess, Killed
from kvdisk.index.map_size import MIN_MAP_BYTES, map_bytes_for
from kvdisk.index.packed import Operation, Packed, Table
from kvdisk.index.record_index import Index, Part
from kvdisk.index.records import encode_block, encode_segment

__all__ = ["MIN_MAP_BYTES", "LmdbIndex", "TablesProcess", "map_bytes_for", "write_index"]

logger = logging.getLogger("kvdisk")

CLOSE_TIMEOUT_S = 10.0
SYNC_TIMEOUT_S = 60.0
OPEN_TIMEOUT_S = 300.0
"""Seconds that opening and reading an index may take while an engine serves."""
LEAST_LIFE_S = 3600.0
"""Seconds that a process must live after it took another's place to get a successor itself."""
DAMAGED_MARK = "damaged"
"""The name of a file beside LMDB's that says: no owner trusts this index any more (see
``device.home``)."""
_PART_RECORDS = 16384
_KILL_INTERVAL_S = 0.1


def write_index(path: Path | str, segments: Sequence[SegmentRecord], columns: BlockColumns, *, map_bytes: int) -> None:
    """Make a synced index of these records in the empty directory ``path``. Raises DeviceError."""
    try:
        tables = TablesProcess(Path(path), map_bytes)
        try:
            tables.append(Table.BLOCKS, map(encode_block, columns.records()))
            tables.append(Table.SEGMENTS, map(encode_segment, sorted(segments)))
            tables.close()
        finally:
            tables.stop()
    except CorruptRecord as error:  # nothing was there that could be damaged
        raise DeviceError(errno.EIO, str(error)) from error


class TablesProcess:
    """The tables of an owner's index, in a process of its own: ``LmdbTables`` says what the methods
    do.

    The process may end at any time. The question under way is then asked of a new process, once,
    where the index is found to be what was committed: a transaction that is already there changes
    nothing when it comes again. Otherwise the index is gone: IndexGone. Where damage was the
    reason, a file (DAMAGED_MARK) has the next owner make the index anew.

    ``main``: see ``IndexProcess``. One thread at a time waits for an answer. The constructor raises
    StoreLocked, CorruptRecord or DeviceError.
    """

    def __init__(self, path: Path, map_bytes: int, *, main: str = MAIN) -> None:
        self._path = path
        self._map_bytes = map_bytes
        self._process = IndexProcess(main)
        self._asking = threading.Lock()
        self._gone: IndexGone | None = None
        self._killed = False
        self._successor_s = -math.inf
        self._transaction = 0
        try:
            self._transaction = self._open(math.inf)
        except ChildEnded as error:
            about = f"index {path}: {error}"
            raise Killed(errno.EIO, about) if error.killed else CorruptRecord(about) from error
        except BaseException:
            self._process.stop()
            raise

    @property
    def pid(self) -> int | None:
        """The number of the process, None while there is none."""
        return self._process.pid

    def read(self, table: Table, decode: Callable[[Packed], Part]) -> list[Part]:
        """See ``Index._read``. Raises IndexGone, also for a record that does not decode; Killed."""
        with self._asking, closing(self._process.parts(math.inf, "scan", table)) as parts:
            if self._gone is not None:
                raise self._gone
            try:
                return [decode(packed) for packed in parts]
            except (ChildEnded, CorruptRecord) as error:
                gone = self._given_up(error)
                if isinstance(error, ChildEnded) and error.killed:
                    raise Killed(errno.EIO, str(gone)) from error
                raise gone from error

    def commit(self, operations: Sequence[Operation]) -> None:
        plain = [(int(table), key, value) for table, key, value in operations]
        self._transaction = self._ask(math.inf, "commit", plain)

    def recover(self) -> None:
        self._ask(math.inf, "recover")

    def append(self, table: Table, items: Iterable[tuple[bytes, bytes]]) -> None:
        left = iter(items)
        while part := list(islice(left, _PART_RECORDS)):
            self._ask(math.inf, "append", table, part, again=False)

    def close(self) -> None:
        """Sync, close, and end the process. Raises IndexGone or DeviceError; ETIMEDOUT says that
        the drive hangs."""
        try:
            self._ask(SYNC_TIMEOUT_S, "close")
        finally:
            self.stop()

    def kill(self) -> None:
        """End the process for good, even at work: whoever waits for its answer gets IndexGone. Any
        thread may call this."""
        self._killed = True
        self._process.kill()

    def stop(self) -> None:
        """End the process for good, with nothing under way. Idempotent."""
        self._killed = True
        self._process.stop()

    def _open(self, timeout_s: float) -> int:
        return int(self._process.ask(timeout_s, "open", str(self._path), self._map_bytes))

    def _ask(self, timeout_s: float, *question: Any, again: bool = True) -> Any:
        """Return the answer. ``again``: ask a new process where the first one ended."""
        with self._asking:
            if self._gone is not None:
                raise self._gone
            try:
                return self._process.ask(timeout_s, *question)
            except CorruptRecord as error:
                raise self._given_up(error) from error
            except ChildEnded as error:
                if error.late:
                    raise DeviceError(errno.ETIMEDOUT, f"index {self._path}: {error}") from error
                if self._killed or not again:
                    raise self._given_up(error) from error
                ended = error
            self._start_anew(ended)
            try:
                return self._process.ask(timeout_s, *question)
            except (ChildEnded, CorruptRecord) as error:
                raise self._given_up(error) from error

    def _start_anew(self, ended: ChildEnded) -> None:
        """Start another process in the place of one that ended. Raises IndexGone."""
        try:
            if time.monotonic() < self._successor_s + LEAST_LIFE_S:
                raise ended
            self._successor_s = time.monotonic()
            transaction = self._open(OPEN_TIMEOUT_S)
            self._process.ask(OPEN_TIMEOUT_S, "check")
            # The last process may have completed the transaction that was under way.
            if not self._transaction <= transaction <= self._transaction + 1:
                raise CorruptRecord("the file is not what was committed last")
        except KvdiskError as error:
            raise self._given_up(error) from error
        logger.warning("kvdisk: index %s: %s; a new process takes over.", self._path, ended)

    def _given_up(self, why: KvdiskError) -> IndexGone:
        """Note that the index is gone, and return the error to raise."""
        self.stop()
        if isinstance(why, CorruptRecord) or (isinstance(why, ChildEnded) and why.damaged):
            with suppress(OSError):  # as it is, the next owner finds out by reading it
                os.close(os.open(self._path / DAMAGED_MARK, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
        about = f"index {self._path}: "
        self._gone = IndexGone(about + str(why).removeprefix(about))
        return self._gone


class LmdbIndex(Index):
    """See ``Index``. One LMDB environment in the directory ``path``, which is made where it is
    missing.

    ``map_bytes``: the size that the data file may grow to, at least MIN_MAP_BYTES; see
    ``map_bytes_for``. A part of it is kept free, so that a full index can always delete.
    ``commit_s``: the longest time from a call to the start of its commit. ``max_queued``: ``put``
    is refused while this many operations wait.

    A put that is dropped takes the record that it was to replace with it: that record may name a
    slot of another block. Operations on segments are tried until they are committed. An index must
    not be carried over a fork.

    Raises StoreLocked where another process has it open, CorruptRecord where the files are no
    index, DeviceError where the system refuses (``Killed`` where it ends the process; so does a
    read).
    """

    def __init__(self, path: Path | str, *, map_bytes: int, commit_s: float = 0.05, max_queued: int = 65536) -> None:
        assert map_bytes >= MIN_MAP_BYTES, map_bytes
        assert commit_s >= 0 and max_queued > 0
        super().__init__()
        self._max_queued = max_queued
        self._closed = False
        self._tables = TablesProcess(Path(path), map_bytes)
        self._writer = CommitWriter(self._tables, commit_s)

    @property
    def pid(self) -> int | None:
        """The number of the process that has the files open."""
        return self._tables.pid

    def poll(self) -> Progress:
        return self._writer.look()

    def flush(self, timeout_s: float) -> bool:
        """See ``Index.flush``. Wakes the writer at once, out of a back-off too (once)."""
        return self._writer.flush(timeout_s)

    def close(self) -> None:
        """See ``Index.close``; at the end the files are synced.

        Where this raises, the end is not clean: CorruptRecord where the index is gone, DeviceError
        where the sync failed. ETIMEDOUT says that the drive hangs in the sync, or in a commit.
        """
        if self._closed:
            return
        self._closed = True
        if not self._writer.stop(CLOSE_TIMEOUT_S):
            end_s = time.monotonic() + REAP_S
            while time.monotonic() < end_s and not self._writer.join(_KILL_INTERVAL_S):
                self._tables.kill()  # what it is at is done whole, or not at all
            raise DeviceError(errno.ETIMEDOUT, "index: the last commit has not ended")
        self._tables.close()

    def abandon(self) -> None:
        """Close after an error, which says more than what ``close`` would raise of it."""
        with suppress(CorruptRecord, DeviceError):
            self.close()

    def _read(self, table: Table, decode: Callable[[Packed], Part]) -> list[Part]:
        assert not self._closed
        return self._tables.read(table, decode)

    def _takes_puts(self) -> bool:
        return self.poll().state is IndexState.WRITABLE and self._writer.waiting < self._max_queued

    def _queue(self, operations: Sequence[Operation]) -> None:
        assert not self._closed
        self._writer.submit(operations)
