# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import lmdb
import pytest
from support.index_conformance import found_blocks, put_all, record_of
from support.waits import WAIT_S, until

from kvdisk.errors import CorruptRecord, DeviceError, StoreLocked
from kvdisk.index import lmdb_tables
from kvdisk.index.base import IndexState, SegmentRecord
from kvdisk.index.commit_writer import CommitWriter
from kvdisk.index.lmdb_index import MIN_MAP_BYTES, LmdbIndex
from kvdisk.index.lmdb_tables import LmdbTables
from kvdisk.index.packed import Operation, Table
from kvdisk.index.records import encode_block

ONLY_WHEN_TOLD_S = 3600.0


def opened(path: Path, map_bytes: int = 8 << 20) -> closing[LmdbIndex]:
    return closing(LmdbIndex(path, map_bytes=map_bytes, commit_s=ONLY_WHEN_TOLD_S))


def fill(index: LmdbIndex, rng: random.Random, batch: int) -> None:
    """Put records until the map refuses some."""
    dropped_puts = index.poll().dropped_puts
    while index.poll().dropped_puts == dropped_puts:
        put_all(index, [record_of(rng.randrange(2**200)) for _ in range(batch)])
        assert index.flush(WAIT_S)


@pytest.mark.parametrize(("order", "batch", "deletions"), [("shuffled", 40, 1000), ("sorted", 1, 3)])
def test_a_full_index_can_always_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, batch: int, deletions: int
) -> None:
    back_offs: list[CommitWriter] = []  # one begins when deletions have failed, alone and in small transactions

    def note(writer: CommitWriter) -> None:
        back_offs.append(writer)

    monkeypatch.setattr(CommitWriter, "_back_off", note)
    rng = random.Random(f"{order} {batch} {deletions}")
    # Puts of one record fill a map to the last unit that they may have.
    with opened(tmp_path / "index", MIN_MAP_BYTES if batch == 1 else 2 << 20) as index:
        for _ in range(2):
            until(lambda: index.put([record_of(0)]) is not None)  # in the second round, after a back-off
            assert index.flush(WAIT_S)
            dropped_puts = index.poll().dropped_puts
            fill(index, rng, batch)
            assert index.poll().dropped_puts == dropped_puts + batch
            assert index.put_segment(SegmentRecord(9, 8192, 4))
            names = sorted(found_blocks(index))
            assert len(names) > 500
            if order == "shuffled":
                rng.shuffle(names)
            for start in range(0, len(names), deletions):
                index.delete(names[start : start + deletions])
                assert index.flush(WAIT_S)
            assert list(index.blocks()) == []
            assert list(index.segments()) == [SegmentRecord(9, 8192, 4)]
    assert back_offs == []


def test_deletions_wait_for_a_foreign_reader_and_go_on_when_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "index"
    with opened(path, MIN_MAP_BYTES) as index:
        fill(index, random.Random(4), batch=20)
        names = sorted(found_blocks(index))
        program = (
            "import sys; from pathlib import Path\n"
            "from kvdisk.index.lmdb_tables import LmdbTables, Table\n"
            "blocks = LmdbTables(Path(sys.argv[1]), readonly=True).scan(Table.BLOCKS)\n"
            "next(blocks); print('reading', flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", program, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
            assert reader.stdout
            assert reader.stdout.readline() == b"reading\n"
            left = list(names)
            ticket = 0
            while index.poll().state is not IndexState.REFUSING or index.flush(0.0):
                index.put_segment(SegmentRecord(1, 4096, len(left)))
                ticket = index.delete([left.pop()])
                index.flush(0.05)
            assert index.poll().committed < ticket
            assert index.put([record_of(1)]) is None
            reader.kill()
        assert index.flush(WAIT_S)
        assert sorted(found_blocks(index)) == left


def test_an_environment_that_has_panicked_is_opened_anew(tmp_path: Path) -> None:
    tables = LmdbTables(tmp_path / "index", 8 << 20)
    tables.commit([Operation(Table.BLOCKS, *encode_block(record_of(1)))])
    panicked = tables._environment = Mock(wraps=tables._environment)
    panicked.begin.side_effect = lmdb.PanicError("meta block")
    for _ in range(2):
        with pytest.raises(DeviceError):
            tables.commit([Operation(Table.BLOCKS, *encode_block(record_of(2)))])
    tables.recover()
    tables.commit([Operation(Table.BLOCKS, *encode_block(record_of(3)))])
    (packed,) = tables.scan(Table.BLOCKS)
    assert [key for key, _ in packed.items()] == [encode_block(record_of(number))[0] for number in (1, 3)]
    tables.close()


def test_an_index_has_one_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "index") as index:
        put_all(index, [record_of(1)])
        monkeypatch.setattr(lmdb_tables, "LOCK_WAIT_S", 0.05)
        with pytest.raises(StoreLocked, match="another process has had it open"):
            LmdbTables(tmp_path / "index", 8 << 20)
        assert index.flush(WAIT_S)
        assert list(index.blocks()) == [record_of(1)]
    LmdbTables(tmp_path / "index", 8 << 20).close()


def test_an_owner_that_nobody_wants_touches_nothing(tmp_path: Path) -> None:
    """Its engine was killed while it waited for the owner before, and another may have it now."""
    with pytest.raises(StoreLocked):
        LmdbTables(tmp_path / "index", 8 << 20, is_wanted=lambda: False)
    assert os.listdir(tmp_path / "index") == []
    LmdbTables(tmp_path / "index", 8 << 20).close()


@pytest.mark.parametrize("table", ["blocks", "segments"])
def test_a_record_that_does_not_decode_is_corrupt(tmp_path: Path, table: str) -> None:
    with opened(tmp_path) as index:
        put_all(index, [record_of(1)])
    with lmdb.open(str(tmp_path), max_dbs=2, lib_version=0) as environment, environment.begin(write=True) as txn:
        txn.put(b"\0" * 4, b"nonsense", db=environment.open_db(table.encode(), txn=txn))
    with pytest.raises(CorruptRecord), opened(tmp_path) as index:  # and it does not end in order
        list(index.blocks() if table == "blocks" else index.segments())
