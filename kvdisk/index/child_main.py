# SPDX-License-Identifier: Apache-2.0
"""The only process that maps LMDB files: it answers the questions of ``index_process``.

It owns one index, which it writes, or it reads the indexes of others. It answers one question after
the other.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from kvdisk.child import ParentPipe
from kvdisk.errors import DeviceError, KvdiskError
from kvdisk.index.lmdb_tables import LmdbTables
from kvdisk.index.packed import Operation, Packed, Table, segment_key_in

MOST_OPEN = 64
"""Indexes of others that the process keeps open. It closes the oldest first."""
_Identity = tuple[int, int]
"""Device and inode of a file: inodes alone are alike on two file systems."""


class Server:
    """Answers questions: each public method is one, and yields the parts of its answer. All raise
    KvdiskError.

    ``pipe``: to the parent.
    """

    def __init__(self, pipe: ParentPipe) -> None:
        self._pipe = pipe
        self._own: LmdbTables | None = None
        self._others: dict[str, tuple[_Identity | None, LmdbTables]] = {}
        """The data file and the open tables of each index of others in which keys were looked up,
        by path."""

    # -- the own index -------------------------------------------------------------------------

    def open(self, path: str, map_bytes: int) -> Iterator[int]:
        """Own an index, to write. Yield the number of its last transaction."""
        self._own = LmdbTables(Path(path), map_bytes, is_wanted=self._is_wanted)
        yield self._own.transaction

    def check(self) -> Iterator[None]:
        """Read every record once, so that damage shows now."""
        for table in Table:
            for _ in self._tables.scan(table):
                pass
        yield None

    def scan(self, table: Table) -> Iterator[Packed]:
        """See ``LmdbTables.scan``."""
        return self._tables.scan(table)

    def commit(self, operations: Sequence[tuple[int, bytes, bytes | None]]) -> Iterator[int]:
        """Commit the operations in one transaction. Yield its number."""
        self._tables.commit([Operation(Table(table), key, value) for table, key, value in operations])
        yield self._tables.transaction

    def append(self, table: Table, items: Sequence[tuple[bytes, bytes]]) -> Iterator[None]:
        """See ``LmdbTables.append``."""
        self._tables.append(table, items)
        yield None

    def recover(self) -> Iterator[None]:
        """See ``LmdbTables.recover``."""
        self._tables.recover()
        yield None

    def close(self) -> Iterator[None]:
        """Sync and close the own index."""
        self._tables.close()
        yield None

    @property
    def _tables(self) -> LmdbTables:
        assert self._own is not None
        return self._own

    def _is_wanted(self) -> bool:
        # The parent sends nothing while it awaits an answer: what can be read is the pipe's end.
        return not self._pipe.has_something()

    # -- those of others -----------------------------------------------------------------------

    def find(self, path: str, keys: Sequence[bytes]) -> Iterator[tuple[Packed, Packed]]:
        """Yield the committed records of blocks that have these ``keys``, and of their segments;
        none where there is no index."""
        try:
            yield _find(self._get(path), keys)
        except KvdiskError as error:
            self._close(path)
            if not _is_missing(error):
                raise
            yield Packed.of((), ()), Packed.of((), ())

    def read(self, path: str) -> Iterator[tuple[Table, Packed]]:
        """Yield all records of an index, blocks before segments; nothing where there is no
        index."""
        try:
            with closing(LmdbTables(Path(path), readonly=True)) as tables:
                # A segment's record is committed before those of its blocks.
                for table in (Table.BLOCKS, Table.SEGMENTS):
                    yield table, Packed.of((), ())
                    for packed in tables.scan(table):
                        yield table, packed
        except KvdiskError as error:
            if not _is_missing(error):
                raise

    def _get(self, path: str) -> LmdbTables:
        identity, known = _identity(path), self._others.get(path)
        # A rebuilt index is a new file under the same path.
        if known is not None and known[0] == identity and known[1].complete:
            return known[1]
        self._close(path)
        tables = LmdbTables(Path(path), readonly=True)
        self._others[path] = (identity, tables)
        if len(self._others) > MOST_OPEN:
            self._close(next(iter(self._others)))
        return tables

    def _close(self, path: str) -> None:
        known = self._others.pop(path, None)
        if known is not None:
            known[1].close()


def _is_missing(error: KvdiskError) -> bool:
    return isinstance(error, DeviceError) and error.errno == errno.ENOENT


def _find(tables: LmdbTables, keys: Sequence[bytes]) -> tuple[Packed, Packed]:
    blocks = _those_there(keys, tables.get(Table.BLOCKS, keys))
    wanted = sorted({segment_key_in(value) for _, value in blocks.items()})
    return blocks, _those_there(wanted, tables.get(Table.SEGMENTS, wanted))


def _those_there(keys: Sequence[bytes], values: Sequence[bytes | None]) -> Packed:
    found = [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
    return Packed.of([key for key, _ in found], [value for _, value in found])


def _identity(path: str) -> _Identity | None:
    """Return what tells the data file of an index from any other; None where it cannot be seen."""
    try:
        status = os.stat(Path(path) / "data.mdb", follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def main(descriptor: int, parent: int, make: type[Server] = Server) -> None:
    """Be the child: answer questions until the parent is gone."""
    pipe = ParentPipe(descriptor, parent)
    with closing(pipe), suppress(EOFError, ConnectionError):
        server = make(pipe)
        pipe.send((True, "started"))
        while True:
            what, *asked = pipe.receive()
            problem: Any = None
            try:
                for part in getattr(server, what)(*asked):
                    pipe.send((True, part))
            except (KvdiskError, OSError) as error:
                problem = error if isinstance(error, KvdiskError) else DeviceError(error.errno or errno.EIO, str(error))
            pipe.send((False, problem))
