# SPDX-License-Identifier: Apache-2.0
"""The ``Index`` in LMDB (``lmdb_tables``), with batched commits on one writer thread
(``commit_writer``)."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvdisk.blocks import BlockKey
from kvdisk.errors import CorruptRecord, DeviceError
from kvdisk.index.base import BlockColumns, BlockRecord, IndexState, Progress, SegmentRecord
from kvdisk.index.columns import decode_blocks, encode_blocks, join_columns
from kvdisk.index.commit_writer import CommitWriter, Operation, Table
from kvdisk.index.lmdb_tables import MIN_MAP_BYTES, LmdbTables, map_bytes_for
from kvdisk.index.records import (
    decode_block,
    decode_segment,
    encode_block,
    encode_block_key,
    encode_segment,
    encode_segment_key,
)

__all__ = ["MIN_MAP_BYTES", "LmdbIndex", "map_bytes_for", "write_index"]

CLOSE_TIMEOUT_S = 10.0


def write_index(path: Path | str, segments: Sequence[SegmentRecord], columns: BlockColumns, *, map_bytes: int) -> None:
    """Make an index of these records in the directory ``path``, which exists and is empty, and sync
    it.

    Raises DeviceError; what is in ``path`` is then of no use.
    """
    tables = LmdbTables(Path(path), map_bytes, readonly=False)
    try:
        tables.append(Table.BLOCKS, *encode_blocks(columns))
        encoded = [encode_segment(segment) for segment in sorted(segments)]
        tables.append(Table.SEGMENTS, [key for key, _ in encoded], [value for _, value in encoded])
    finally:
        tables.close()


class LmdbIndex:
    """See ``Index``. One environment in directory ``path``, which is made where it is missing (mode
    0700, files 0600).

    ``map_bytes``: what the data file may grow to, at least MIN_MAP_BYTES. A part of it is kept for
    deletions, so that a full index can always delete (``map_bytes_for`` says how much is enough).
    ``commit_s``: longest time in seconds from a call to the start of its commit. ``max_queued``:
    ``put`` is refused while that many operations or more wait.

    ``readonly``: for the tools and for other engines: only ``segments``, ``blocks``,
    ``block_columns``, ``poll``, ``flush`` and ``close``; ``map_bytes`` and ``commit_s`` mean
    nothing. Where there is no lock file, or it cannot be opened (a copy in a read-only directory),
    it reads without a lock, which is safe only while nobody writes. It makes no file.

    A put that is dropped takes the record that it was to replace with it: that one may name a slot
    of another block.

    One thread calls everything; the writer's thread is inside. ``put``, ``delete``,
    ``put_segment``, ``delete_segment`` and ``poll`` take at most a lock that is never held during
    I/O. Not to be carried over a fork.

    Raises StoreLocked where this process has the environment open already, CorruptRecord where the
    files are no index (opening, ``segments`` and ``blocks``), DeviceError where the system refuses.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        map_bytes: int = 0,
        commit_s: float = 0.05,
        readonly: bool = False,
        max_queued: int = 65536,
    ) -> None:
        assert readonly or map_bytes >= MIN_MAP_BYTES, map_bytes
        assert commit_s >= 0 and max_queued > 0
        self._max_queued = max_queued
        self._last_ticket = 0
        self._closed = False
        self._tables = LmdbTables(Path(path), map_bytes, readonly)
        self._writer = None if readonly else CommitWriter(self._tables, commit_s)

    @property
    def complete(self) -> bool:
        """Whether the owner had made the tables when this read-only index was opened; else open it
        again later."""
        return self._tables.complete

    @property
    def damaged(self) -> bool:
        """Whether a commit has met damage. It is noted beside the file, which no owner opens any
        more."""
        return self._tables.damaged

    def segments(self) -> Iterator[SegmentRecord]:
        """See ``Index.segments``. One read transaction, which ends with the iterator."""
        assert not self._closed
        for part in self._tables.scan(Table.SEGMENTS):
            yield from map(decode_segment, *part)

    def blocks(self) -> Iterator[BlockRecord]:
        """See ``Index.blocks``. One read transaction, which ends with the iterator: open, it makes
        the file grow."""
        assert not self._closed
        for part in self._tables.scan(Table.BLOCKS):
            yield from map(decode_block, *part)

    def find(self, epoch: int, keys: Sequence[BlockKey]) -> list[tuple[int, BlockRecord]]:
        """Return the committed records of these keys, each with the key's position; in one short
        read transaction.

        Waits for the disk where the file is not in memory. Raises CorruptRecord, DeviceError.
        """
        assert not self._closed
        names = [encode_block_key(epoch, key) for key in keys]
        found = self._tables.get(Table.BLOCKS, names)
        return [(at, decode_block(names[at], value)) for at, value in enumerate(found) if value is not None]

    def block_columns(self) -> BlockColumns:
        """See ``Index.block_columns``."""
        assert not self._closed
        return join_columns([decode_blocks(*part) for part in self._tables.scan(Table.BLOCKS)])

    def put(self, records: Sequence[BlockRecord]) -> int | None:
        """See ``Index.put``."""
        items = [encode_block(record) for record in records]
        writer = self._open_writer()
        if not items:
            return self._last_ticket
        if writer.waiting >= self._max_queued or not writer.admits_put():
            return None
        return self._submit(Table.BLOCKS, items)

    def delete(self, keys: Sequence[tuple[int, BlockKey]]) -> int:
        """See ``Index.delete``."""
        return self._submit(Table.BLOCKS, [(encode_block_key(epoch, key), None) for epoch, key in keys])

    def put_segment(self, record: SegmentRecord) -> int:
        """See ``Index.put_segment``. Never dropped: retried until it is committed."""
        return self._submit(Table.SEGMENTS, [encode_segment(record)])

    def delete_segment(self, segment: int) -> int:
        """See ``Index.delete_segment``."""
        return self._submit(Table.SEGMENTS, [(encode_segment_key(segment), None)])

    def poll(self) -> Progress:
        """See ``Index.poll``. A read-only index is REFUSING."""
        return self._writer.progress if self._writer else Progress(0, IndexState.REFUSING, 0)

    def flush(self, timeout_s: float) -> bool:
        """See ``Index.flush``. Wakes the writer at once, out of a back-off too (once)."""
        return self._writer.flush(self._last_ticket, timeout_s) if self._writer else True

    def close(self) -> None:
        """See ``Index.close``; at the end the files are synced.

        Raises DeviceError when the sync failed or a commit hangs, CorruptRecord where a commit met
        damage; then the caller must not set a clean flag.
        """
        if self._closed:
            return
        self._closed = True
        committed = True
        if self._writer:
            if not self._writer.stop(self._last_ticket, CLOSE_TIMEOUT_S):
                raise DeviceError(errno.ETIMEDOUT, "index: the last commit has not ended, the environment stays open")
            committed = self._writer.progress.committed >= self._last_ticket
        self._tables.close(in_order=committed)
        if self.damaged:
            raise CorruptRecord("index: a commit found it damaged")

    def _open_writer(self) -> CommitWriter:
        assert self._writer and not self._closed, "the index is closed or read-only"
        return self._writer

    def _submit(self, table: Table, items: Sequence[tuple[bytes, bytes | None]]) -> int:
        writer = self._open_writer()
        if items:
            self._last_ticket += 1
            operations = [Operation(0, table, key, value) for key, value in items]
            operations[-1] = operations[-1]._replace(ticket=self._last_ticket)
            writer.submit(operations)
        return self._last_ticket
