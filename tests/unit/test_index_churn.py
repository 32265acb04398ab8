# SPDX-License-Identifier: Apache-2.0
"""The index's file grows with the records that there are at a time, and not with replacements."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

from support.index_conformance import record_of
from support.waits import WAIT_S

from kvdisk.blocks import Slot, make_block_key
from kvdisk.index.base import BlockRecord
from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for
from kvdisk.index.lmdb_tables import LmdbTables
from kvdisk.index.map_size import planned_bytes
from kvdisk.index.packed import Operation, Table
from kvdisk.index.records import encode_block


class Churned:
    """An index with so many records as those of sha256 hashes, replaced at random."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        self.index = LmdbIndex(path, map_bytes=map_bytes_for(count), commit_s=0.001)
        self._rng = random.Random(count)
        self._live: list[BlockRecord] = []
        self._put(count)

    def replace_all(self) -> None:
        """Delete every record, in any order, and put as many others, in the steps of an engine."""
        gone, self._live = self._live, []
        self._rng.shuffle(gone)
        self._put(len(gone), gone)

    def _put(self, count: int, gone: Sequence[BlockRecord] = ()) -> None:
        for start in range(0, count, 250):
            self.index.delete([(record.epoch, record.key) for record in gone[start : start + 250]])
            fresh = [self._record() for _ in range(min(250, count - start))]
            while self.index.put(fresh) is None:
                assert self.index.flush(WAIT_S)
            self._live += fresh
        assert self.index.flush(WAIT_S)
        assert self.index.poll().dropped_puts == 0

    def _record(self) -> BlockRecord:
        key, parent = (make_block_key(self._rng.randbytes(32), 0) for _ in range(2))
        return BlockRecord(0, key, Slot(1, 2), 3, parent, 4)

    @property
    def sizes(self) -> tuple[int, int]:
        """Length of the file and what is allocated of it, in bytes."""
        status = (self.path / "data.mdb").stat()
        return status.st_size, status.st_blocks * 512


def test_replacements_at_constant_size_do_not_grow_the_file(tmp_path):
    churned = Churned(tmp_path / "index", 500)
    churned.replace_all()
    sizes = churned.sizes
    assert sizes[1] >= sizes[0], "all of it is allocated"
    for _ in range(10):
        churned.replace_all()
        assert churned.sizes == sizes
    churned.index.close()
    assert churned.sizes == sizes


def test_the_file_grows_with_the_records(tmp_path):
    small, large = (Churned(tmp_path / str(count), count) for count in (1000, 12_000))
    assert large.sizes[0] - small.sizes[0] >= 11_000 * 200
    assert large.sizes[0] <= planned_bytes(12_000) <= map_bytes_for(12_000)
    for churned in (small, large):
        churned.index.close()


def test_a_drive_without_room_for_what_is_planned_is_written_all_the_same(tmp_path, monkeypatch):
    tables = LmdbTables(tmp_path / "index", map_bytes_for(500))
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "no")))
    tables.commit([Operation(Table.BLOCKS, *encode_block(record_of(number))) for number in range(500)])
    assert sum(len(part.key_bytes) for part in tables.scan(Table.BLOCKS)) == 500
    tables.close()
