# SPDX-License-Identifier: Apache-2.0
"""The ``Index`` in LMDB, with batched commits on a writer thread."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from kvdisk.errors import CorruptRecord, DeviceError
from kvdisk.index.base import BlockColumns, Progress, SegmentRecord
from kvdisk.index.commit_writer import CommitWriter
from kvdisk.index.lmdb_tables import MIN_MAP_BYTES, LmdbTables, map_bytes_for, was_left_open
from kvdisk.index.reader_process import try_out
from kvdisk.index.record_index import Index, Scan
from kvdisk.index.records import Operation, Table, encode_block, encode_segment

__all__ = ["MIN_MAP_BYTES", "LmdbIndex", "map_bytes_for", "write_index"]

CLOSE_TIMEOUT_S = 10.0


def write_index(path: Path | str, segments: Sequence[SegmentRecord], columns: BlockColumns, *, map_bytes: int) -> None:
    """Make a synced index of these records in the empty directory ``path``. Raises DeviceError."""
    tables = LmdbTables(Path(path), map_bytes)
    try:
        tables.append(Table.BLOCKS, map(encode_block, columns.records()))
        tables.append(Table.SEGMENTS, map(encode_segment, sorted(segments)))
    finally:
        tables.close()


class LmdbIndex(Index):
    """See ``Index``. One environment in directory ``path``, which is made where it is missing.

    ``map_bytes``: what the data file may grow to, at least MIN_MAP_BYTES; see ``map_bytes_for``. A
    part of it is kept, so that a full index can always delete. ``commit_s``: longest time from a
    call to the start of its commit. ``max_queued``: ``put`` is refused while so many operations
    wait.

    A put that is dropped takes the record that it was to replace with it: that one may name a slot
    of another block. Operations on segments are tried until they are committed. An iterator of
    ``segments`` or ``blocks`` is one read transaction: open, it makes the file grow. Not to be
    carried over a fork.

    Raises StoreLocked where this process has the environment open already, CorruptRecord where the
    files are no index, DeviceError where the system refuses.
    """

    def __init__(self, path: Path | str, *, map_bytes: int, commit_s: float = 0.05, max_queued: int = 65536) -> None:
        assert map_bytes >= MIN_MAP_BYTES, map_bytes
        assert commit_s >= 0 and max_queued > 0
        super().__init__()
        self._max_queued = max_queued
        self._closed = False
        path = Path(path)
        if was_left_open(path):
            try_out(path)
        self._tables = LmdbTables(path, map_bytes)
        self._writer = CommitWriter(self._tables, commit_s)

    @property
    def damaged(self) -> bool:
        """Whether a commit has met damage: then no owner opens the file any more."""
        return self._tables.damaged

    def poll(self) -> Progress:
        """See ``Index.poll``."""
        return self._writer.progress

    def flush(self, timeout_s: float) -> bool:
        """See ``Index.flush``. Wakes the writer at once, out of a back-off too (once)."""
        return self._writer.flush(timeout_s)

    def close(self) -> None:
        """See ``Index.close``; at the end the files are synced.

        Raises DeviceError when the sync failed or a commit hangs, CorruptRecord where a commit met
        damage: the end is not clean then.
        """
        if self._closed:
            return
        self._closed = True
        if not self._writer.stop(CLOSE_TIMEOUT_S):
            raise DeviceError(errno.ETIMEDOUT, "index: the last commit has not ended, the environment stays open")
        self._tables.close(in_order=not self._writer.waiting)
        if self.damaged:
            raise CorruptRecord("index: a commit found it damaged")

    def _scan(self, table: Table) -> Scan:
        assert not self._closed
        return self._tables.scan(table)

    def _takes_puts(self) -> bool:
        return self._writer.takes_puts and self._writer.waiting < self._max_queued

    def _queue(self, operations: Sequence[Operation]) -> None:
        assert not self._closed
        self._writer.submit(operations)
