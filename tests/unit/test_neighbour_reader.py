# SPDX-License-Identifier: Apache-2.0
"""Reading other homes' indexes through a child process, and what a bad or stopped one does to it:
nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.small_drive import tmpfs
from support.waits import lives, until

from kvdisk.blocks import BlockKey, Slot, make_block_key
from kvdisk.index import neighbour_reader
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for
from kvdisk.index.neighbour_reader import NeighbourReader

WAIT_S = 600.0
SEGMENT = SegmentRecord(3, 8192, 100, 0)


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    """No child is given up, or left to itself, because the machine is busy."""
    monkeypatch.setattr(neighbour_reader, "ANSWER_TIMEOUT_S", 60.0)
    monkeypatch.setattr(neighbour_reader, "_CLOSE_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(neighbour_reader, "LOOK_INTERVAL_S", 0.002)


def keys(count: int, first: int = 0) -> list[BlockKey]:
    return [make_block_key(number.to_bytes(32, "big"), 0) for number in range(first, first + count)]


def records(names, epoch: int = 0) -> list[BlockRecord]:
    return [BlockRecord(epoch, key, Slot(3, at), 1000 + at) for at, key in enumerate(names)]


@contextmanager
def home(path, names=()):
    """An owner's index of some blocks."""
    index = LmdbIndex(path, map_bytes=map_bytes_for(1000), commit_s=0.0)
    index.put_segment(SEGMENT)
    index.put(records(names))
    assert index.flush(WAIT_S)
    try:
        yield index
    finally:
        index.close()


@contextmanager
def reader(homes):
    found = NeighbourReader(lambda: dict(homes))
    try:
        yield found
    finally:
        found.close()


def answer(found: NeighbourReader, names, *, epoch: int = 0, within_s: float = WAIT_S):
    """Ask, and wait for the answer."""
    assert found.ask(7, epoch, names)
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for each in found.poll():
            assert each.ticket == 7
            return each.copies
        time.sleep(0.002)
    raise AssertionError("no answer")


def test_what_another_home_has_committed_is_found_in_its_newest_file(tmp_path) -> None:
    names = keys(40)
    with reader({"one": tmp_path / "one"}) as found:
        with home(tmp_path / "one", names[:30]) as owner:
            assert found.any
            copies = answer(found, names)
            assert set(copies) == set(names[:30])
            (copy,) = copies[names[4]]
            assert (copy.home_id, copy.segment, copy.slot_index, copy.generation) == ("one", SEGMENT, 4, 1004)
            owner.put(records(names[30:]))
            owner.delete([(0, names[0])])
            assert owner.flush(WAIT_S)
            assert set(answer(found, names)) == set(names[1:])
            assert answer(found, names, epoch=5) == {}
        (tmp_path / "one" / "data.mdb").unlink()
        with home(tmp_path / "one", keys(3, 7)):
            assert set(answer(found, names)) == set(keys(3, 7))
        child = found._reader.pid
    assert not lives(child) and not found.any, "closing ends the child"
    assert not found.ask(1, 0, keys(1))


def test_an_index_on_another_file_system_is_another_though_its_inode_is_the_same(tmp_path) -> None:
    with tmpfs(tmp_path), reader({"one": tmp_path / "one"}) as found, home(tmp_path / "one", keys(3)):
        assert set(answer(found, keys(9))) == set(keys(3))
        before = (tmp_path / "one" / "data.mdb").stat()
        with tmpfs(tmp_path), home(tmp_path / "one", keys(3, 5)):
            after = (tmp_path / "one" / "data.mdb").stat()
            assert before.st_ino == after.st_ino and before.st_dev != after.st_dev
            assert set(answer(found, keys(9))) == set(keys(3, 5))


def test_homes_come_and_go_and_a_child_that_was_killed_is_started_anew(tmp_path) -> None:
    homes: dict[str, Path] = {}
    with reader(homes) as found, home(tmp_path / "a", keys(2)), home(tmp_path / "b", keys(4, 1)):
        assert not found.any
        assert answer(found, keys(2)) == {}
        homes.update(a=tmp_path / "a", b=tmp_path / "b")

        def holders() -> dict[BlockKey, list[str]]:
            return {key: [copy.home_id for copy in copies] for key, copies in answer(found, keys(3)).items()}

        one, two, three = keys(3)
        while holders() != {one: ["a"], two: ["a", "b"], three: ["b"]}:
            pass
        os.kill(found._reader.pid, signal.SIGKILL)
        # The first home is blamed for it; the second is read by a new child.
        assert holders() == {two: ["b"], three: ["b"]}
        del homes["b"]
        while left := holders():
            assert left == {two: ["b"], three: ["b"]}
        assert found._reader.pid is None, "it keeps nothing of a home that is gone open"


def test_a_damaged_index_is_left_alone_and_the_others_are_read(tmp_path, caplog) -> None:
    with home(tmp_path / "good", keys(3)), home(tmp_path / "bad", keys(500)):
        pass
    data = tmp_path / "bad" / "data.mdb"
    data.write_bytes(data.read_bytes()[:8192] + os.urandom(data.stat().st_size - 8192))
    with reader({"bad": tmp_path / "bad", "good": tmp_path / "good"}) as found:
        assert set(answer(found, keys(3))) == set(keys(3))
        for _ in range(3):
            assert set(answer(found, keys(3))) == set(keys(3))
        assert caplog.text.count("does not read engine store bad") == 1


def test_the_child_ends_with_its_parent(tmp_path) -> None:
    code = (
        "import sys, os, time\n"
        "from pathlib import Path\n"
        "from kvdisk.index.neighbour_reader import NeighbourReader\n"
        "found = NeighbourReader(lambda: {'one': Path(sys.argv[1])})\n"
        "found.ask(1, 0, [b'x' * 34])\n"
        "while not found.poll(): time.sleep(0.01)\n"
        "print(found._reader.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    with home(tmp_path / "one", keys(3)):
        ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "one")], stdout=subprocess.PIPE, check=False)
        assert ended.returncode == -9
        child = int(ended.stdout)
        until(lambda: not lives(child), "the end of the child")
