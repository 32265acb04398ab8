# SPDX-License-Identifier: Apache-2.0
"""A damaged index can end the process that reads it; the next owner then gives it up instead of
dying too."""

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

from kvdisk.errors import CorruptRecord
from kvdisk.index.base import SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex
from kvdisk.testing.index_conformance import found_blocks, put_all, record_of

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


@pytest.fixture(scope="module")
def deadly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index whose reading ends the process: one of its leaves is zeros."""
    sound = tmp_path_factory.mktemp("sound")
    _write(sound)
    units = (sound / "data.mdb").stat().st_size // UNIT_BYTES
    for unit in random.Random(1).sample(range(2, units), units - 2):
        path = tmp_path_factory.mktemp("damaged")
        shutil.copytree(sound, path, dirs_exist_ok=True)
        _zero_unit(path, unit)
        if _own(path)[0] == -signal.SIGABRT:
            shutil.copyfile(sound / "data.mdb", path / "data.mdb")
            (path / "open").unlink()
            _zero_unit(path, unit)
            return path
    raise AssertionError("LMDB survives everything now: the mark and the child can go")


def test_a_damaged_index_ends_one_owner_and_not_the_next(deadly: Path, tmp_path: Path) -> None:
    shutil.copytree(deadly, tmp_path / "index")
    assert _own(tmp_path / "index")[0] == -signal.SIGABRT
    for _ in range(2):
        code, said = _own(tmp_path / "index")
        assert code == 1
        assert said.startswith("CorruptRecord"), said
        assert "damaged" in said


def test_an_owner_that_was_killed_costs_a_look_and_nothing_else(tmp_path: Path) -> None:
    _write(tmp_path / "index")
    assert not (tmp_path / "index" / "open").exists(), "an owner that closes takes its mark away"
    assert _own(tmp_path / "index", "killed")[0] == -signal.SIGKILL
    assert (tmp_path / "index" / "open").exists()
    index = LmdbIndex(tmp_path / "index", map_bytes=8 << 20)
    assert len(found_blocks(index)) == 1000
    index.close()
    assert not (tmp_path / "index" / "open").exists()


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


@pytest.mark.parametrize(
    ("damage", "killed"), [(_cut_to_nothing, True), (_damage_free_list, True), (_cut_to_half, False)]
)
def test_damage_that_raises_is_damage(tmp_path, damage, killed):
    """Whether or not its owner's death makes a child look at it first."""
    _write(tmp_path / "index")
    if killed:
        assert _own(tmp_path / "index", "killed")[0] == -signal.SIGKILL
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
    assert index.damaged
    assert (tmp_path / "index" / "damaged").exists()
    with pytest.raises(CorruptRecord, match="damaged"):
        index.close()
    assert not (tmp_path / "index" / "open").exists(), "one mark became the other, which takes no room"
    with pytest.raises(CorruptRecord, match="damaged"):
        LmdbIndex(tmp_path / "index", map_bytes=8 << 20)
