# SPDX-License-Identifier: Apache-2.0
"""A damaged index can end the process that maps it, and not its owner, who hears of it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import lmdb
import pytest
from support.index_conformance import found_blocks, put_all, record_of

from kvdisk.errors import CorruptRecord
from kvdisk.index.base import IndexState, SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex

UNIT_BYTES = 4096
OWNER = """
import sys
from pathlib import Path
from kvdisk.errors import KvdiskError
from kvdisk.index.lmdb_index import LmdbIndex
try:
    index = LmdbIndex(Path(sys.argv[1]), map_bytes=8 << 20)
    list(index.segments()), list(index.blocks())
    if len(sys.argv) > 2:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    index.close()
except KvdiskError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def _own(path: Path, *more: str) -> tuple[int, str]:
    """Open, read and close an index as an engine does, in a process of its own."""
    child = subprocess.run(
        [sys.executable, "-c", OWNER, str(path), *more], capture_output=True, text=True, timeout=600, check=False
    )
    return child.returncode, child.stderr


def _write(path: Path, count: int = 1000) -> None:
    index = LmdbIndex(path, map_bytes=8 << 20, commit_s=3600.0)
    put_all(index, [record_of(number) for number in range(count)])
    index.put_segment(SegmentRecord(1, 8192, 4))
    index.close()


def _zero_unit(path: Path, unit: int) -> None:
    with (path / "data.mdb").open("r+b") as file:
        file.seek(unit * UNIT_BYTES)
        file.write(bytes(UNIT_BYTES))


def test_a_damaged_index_ends_no_owner(tmp_path: Path) -> None:
    """Each of its leaves in turn is zeros."""
    sound = tmp_path / "sound"
    _write(sound)
    units = (sound / "data.mdb").stat().st_size // UNIT_BYTES
    for unit in random.Random(1).sample(range(2, units), units - 2):
        path = tmp_path / str(unit)
        shutil.copytree(sound, path)
        _zero_unit(path, unit)
        code, said = _own(path)
        assert (code, said.partition(":")[0]) in {(0, ""), (1, "CorruptRecord"), (1, "IndexGone")}, said
        if "SIGABRT" in said:
            assert (path / "damaged").exists(), "the next owner knows"
            assert _own(path)[1] == said
            return
    raise AssertionError("LMDB survives everything now: the process of its own can go")


def test_an_owner_that_was_killed_costs_nothing(tmp_path: Path) -> None:
    _write(tmp_path / "index")
    assert _own(tmp_path / "index", "killed")[0] == -signal.SIGKILL
    index = LmdbIndex(tmp_path / "index", map_bytes=8 << 20)
    assert len(found_blocks(index)) == 1000
    index.close()


# -- damage that raises, and ends nobody -------------------------------------------------------


def _damage_free_list(path: Path) -> None:
    """Zero the root of LMDB's list of free units, as its newest meta unit names it."""
    with (path / "data.mdb").open("r+b") as file:
        metas = [file.read(UNIT_BYTES) for _ in range(2)]
        newest = max(metas, key=lambda meta: struct.unpack_from("<Q", meta, 144)[0])
        (root,) = struct.unpack_from("<Q", newest, 80)
        assert 2 <= root < os.fstat(file.fileno()).st_size // UNIT_BYTES
        file.seek(root * UNIT_BYTES)
        file.write(bytes(UNIT_BYTES))


def _cut_to_nothing(path: Path) -> None:
    os.truncate(path / "data.mdb", 0)


def _cut_to_half(path: Path) -> None:
    with closing(lmdb.Environment(str(path), readonly=True, lib_version=0)) as environment:
        used_bytes = environment.info()["last_pgno"] * environment.stat()["psize"]
    os.truncate(path / "data.mdb", used_bytes // 2)


@pytest.mark.parametrize("damage", [_cut_to_nothing, _damage_free_list, _cut_to_half])
def test_damage_that_raises_is_damage(tmp_path, damage):
    _write(tmp_path / "index")
    damage(tmp_path / "index")
    code, said = _own(tmp_path / "index")
    assert code == 1
    assert said.startswith("CorruptRecord"), said


def test_damage_that_a_commit_meets_is_noted_for_the_next_owner(tmp_path: Path) -> None:
    _write(tmp_path / "index")
    index = LmdbIndex(tmp_path / "index", map_bytes=8 << 20, commit_s=0.0)
    _damage_free_list(tmp_path / "index")
    index.put([record_of(5000)])
    index.flush(600)
    assert index.poll().state is IndexState.GONE
    assert (tmp_path / "index" / "damaged").exists()
    with pytest.raises(CorruptRecord, match="MDB_CORRUPTED"):
        index.close()
