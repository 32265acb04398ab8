# SPDX-License-Identifier: Apache-2.0
"""The process that has an index open ends, hangs, or finds its files cut short: its owner goes
on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support import dying_index, namesake_index
from support.index_conformance import found_blocks, key_of, put_all, record_of
from support.waits import WAIT_S, lives, until

from kvdisk.errors import CorruptRecord, DeviceError, NumberTaken
from kvdisk.index import lmdb_index
from kvdisk.index.base import IndexState, SegmentRecord
from kvdisk.index.index_process import IndexProcess
from kvdisk.index.lmdb_index import LmdbIndex, TablesProcess
from kvdisk.index.reader_process import ReaderProcess

MAP_BYTES = 8 << 20
ONLY_WHEN_TOLD_S = 3600.0
COUNT = 300


def opened(path: Path) -> LmdbIndex:
    return LmdbIndex(path, map_bytes=MAP_BYTES, commit_s=ONLY_WHEN_TOLD_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def index(path: Path) -> Iterator[LmdbIndex]:
    """An index with some blocks. The test closes it, or leaves it to die."""
    made = opened(path)
    put_all(made, [record_of(number) for number in range(COUNT)])
    made.put_segment(SegmentRecord(3, 8192, COUNT))
    assert made.flush(WAIT_S)
    yield made
    made._tables.kill()


def test_its_process_starts_without_what_takes_long_to_import() -> None:
    """One is started for each engine, and for each command that reads a store."""
    code = "import sys; from kvdisk.index.child_main import main; assert not {'numpy', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def end(index: LmdbIndex, number: int = signal.SIGKILL) -> None:
    """End the process of an index, and see it end."""
    pid = index.pid
    assert pid is not None
    os.kill(pid, number)
    if number != signal.SIGSTOP:
        until(lambda: not lives(pid), "the end of the process")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_another_process_goes_on_where_one_ended(index, path, caplog, number):
    end(index, number)
    index.delete([(0, key_of(0))])
    put_all(index, [record_of(COUNT)])
    assert index.flush(WAIT_S)
    assert index.poll().state is IndexState.WRITABLE and index.poll().dropped_puts == 0
    (said,) = caplog.messages
    assert number.name in said and "a new process takes over" in said
    assert sorted(found_blocks(index)) == sorted((0, key_of(at)) for at in range(1, COUNT + 1))
    index.close()
    assert not (path / "damaged").exists()


@pytest.mark.parametrize("done", ["before", "after"])
def test_a_commit_in_which_the_process_dies_is_done_once(path, monkeypatch, done):
    monkeypatch.setattr(lmdb_index, "TablesProcess", partial(TablesProcess, main=dying_index.__name__))
    index = opened(path)
    put_all(index, [record_of(1), record_of(2)])
    assert index.flush(WAIT_S)
    first = index.pid
    (path / dying_index.ORDERS).write_text(done)
    index.delete([(0, key_of(1))])
    put_all(index, [record_of(2, index=7), record_of(3)])
    index.put_segment(SegmentRecord(3, 8192, 4))
    assert index.flush(WAIT_S)
    assert index.pid != first
    assert found_blocks(index) == {(0, key_of(2)): record_of(2, index=7), (0, key_of(3)): record_of(3)}
    assert index.poll().dropped_puts == 0
    index.close()


def test_a_process_that_ends_again_soon_has_no_successor(index, path, caplog):
    end(index)
    index.delete([(0, key_of(0))])
    assert index.flush(WAIT_S)
    end(index)
    committed = index.poll().committed
    index.delete([(0, key_of(1))])
    index.put([record_of(COUNT)])
    assert not index.flush(WAIT_S)
    assert index.poll() == (committed, IndexState.GONE, 1)
    assert index.put([record_of(5)]) is None
    assert [text for text in caplog.messages if "until the next start" in text] == caplog.messages[1:]
    with pytest.raises(CorruptRecord):
        index.close()
    assert not (path / "damaged").exists(), "nothing says that it is"
    again = opened(path)
    assert sorted(found_blocks(again)) == sorted((0, key_of(at)) for at in range(1, COUNT))
    again.close()


@pytest.mark.parametrize("units", [0, 2, 8])
def test_a_file_that_is_cut_short_ends_the_process_and_no_block_more_is_taken(index, path, caplog, units):
    """What was committed is not committed any more: the next start makes the index anew."""
    os.truncate(path / "data.mdb", units * 4096)
    index.delete([(0, key_of(at)) for at in range(COUNT)])
    assert not index.flush(WAIT_S)
    assert index.poll().state is IndexState.GONE
    assert index.put([record_of(5)]) is None
    assert (path / "damaged").exists()
    (said,) = caplog.messages
    assert "takes no new blocks on NVMe until the next start" in said
    with pytest.raises(CorruptRecord):
        index.close()


def test_a_lock_file_that_is_cut_short_costs_the_process_and_nothing_else(index, path, caplog):
    os.truncate(path / "lock.mdb", 0)
    index.delete([(0, key_of(0))])
    assert index.flush(WAIT_S)
    assert len(found_blocks(index)) == COUNT - 1
    assert "SIGBUS" in caplog.text and "a new process takes over" in caplog.text
    index.close()


def test_a_file_in_the_place_of_the_one_that_was_committed_is_not_gone_on_with(index, path, tmp_path):
    """An older one, sound in itself: its records may name slots of other blocks by now."""
    older = (path / "data.mdb").read_bytes()
    for at in range(3):
        index.delete([(0, key_of(at))])
        assert index.flush(WAIT_S)
    (path / "data.mdb").unlink()
    (path / "data.mdb").write_bytes(older)
    end(index)
    index.delete([(0, key_of(5))])
    assert not index.flush(WAIT_S)
    assert index.poll().state is IndexState.GONE and (path / "damaged").exists()


@pytest.mark.parametrize("waiting", [True, False])
def test_a_process_that_hangs_holds_up_no_call_and_no_end(index, path, monkeypatch, waiting):
    monkeypatch.setattr(lmdb_index, "CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(lmdb_index, "SYNC_TIMEOUT_S", 0.1)
    pid = index.pid
    end(index, signal.SIGSTOP)
    if waiting:
        index.delete([(0, key_of(0))])
        put_all(index, [record_of(number) for number in range(COUNT, 50_000)])
        assert not index.flush(0.1)
        assert index.put([record_of(number) for number in range(20_000)]) is not None
        assert index.put([record_of(1)]) is None, "the queue is full"
        index.poll()
    with pytest.raises(DeviceError) as raised:
        index.close()
    assert raised.value.errno == errno.ETIMEDOUT
    until(lambda: not lives(pid), "the end of the process")
    again = opened(path)
    assert len(found_blocks(again)) == COUNT
    again.close()


OWNER = """
import sys, time
from pathlib import Path
from kvdisk.index.lmdb_index import LmdbIndex
index = LmdbIndex(Path(sys.argv[1]), map_bytes=8 << 20, commit_s=0.0)
print(index.pid, flush=True)
for line in sys.stdin:
    index.put_segment(__import__("kvdisk.index.base").index.base.SegmentRecord(int(line), 8192, 4))
    print(index.flush(60), flush=True)
index.close()
print("lmdb" in sys.modules, "data.mdb" in Path("/proc/self/maps").read_text(), flush=True)
"""


@pytest.fixture
def owner(path: Path) -> Iterator[subprocess.Popen[str]]:
    """An owner in a process and a group of its own."""
    command = [sys.executable, "-c", OWNER, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield process
        process.kill()


def test_the_process_ends_with_an_owner_that_is_killed_and_the_next_one_has_the_index(owner, path):
    pid = int(owner.stdout.readline())
    owner.kill()
    again = opened(path)  # which waits for it
    assert not lives(pid) or again.pid != pid
    until(lambda: not lives(pid), "the end of the process")
    again.close()


def test_interrupts_of_the_group_do_not_reach_it(owner, path):
    """As Ctrl-C in a terminal does, which is sent to all that run there."""
    pid = int(owner.stdout.readline())
    assert os.getpgid(pid) != os.getpgid(owner.pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    owner.stdin.write("7\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "True\n"
    assert lives(pid)
    owner.stdin.close()
    assert owner.stdout.readline() == "False False\n", "the owner has neither imported LMDB nor mapped the file"
    until(lambda: not lives(pid), "the end of the process")


def test_the_process_inherits_no_descriptor(tmp_path):
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        index = opened(tmp_path / "index")
        names = [os.readlink(link) for link in Path(f"/proc/{index.pid}/fd").iterdir()]
        assert not any("secret" in name for name in names), names
        index.close()


def test_a_process_that_cannot_start_is_no_damage(path, monkeypatch):
    with pytest.raises(DeviceError, match="cannot start"):
        IndexProcess("no.such.module").ask(WAIT_S, "anything")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(DeviceError, match="cannot start"):
        opened(path)


def test_an_answer_that_is_not_taken_whole_ends_the_process(index):
    child = IndexProcess()
    parts = child.parts(WAIT_S, "read", str(index._tables._path))
    next(parts)
    parts.close()
    assert child.pid is None


def meet_namesakes(path, count):
    """Have so many processes find that their numbers are taken, one after the other."""
    (path.parent / namesake_index.NAMESAKES).mkdir(exist_ok=True)
    for number in range(count):
        (path.parent / namesake_index.NAMESAKES / str(number)).touch()


def test_an_owner_opens_an_index_that_a_process_of_its_number_reads_in_another_container(index, path, monkeypatch):
    index.close()
    meet_namesakes(path, 2)
    monkeypatch.setattr(lmdb_index, "TablesProcess", partial(TablesProcess, main=namesake_index.__name__))
    again = opened(path)
    assert sorted(found_blocks(again)) == sorted((0, key_of(at)) for at in range(COUNT))
    again.close()


def test_a_reader_whose_number_is_taken_in_another_container_does_not_read_without_a_lock(index, path):
    child = ReaderProcess(namesake_index.__name__)
    for read in (lambda: len(child.read(path).segments), lambda: len(child.find("1", path, 0, [key_of(0)], WAIT_S))):
        meet_namesakes(path, 2)
        child.stop()
        child._start()
        first = child.pid
        assert read()
        assert child.pid != first, "it would read what the owner writes over"
    child.stop()
    index.close()


def test_a_process_whose_number_is_taken_is_replaced_a_few_times_only(index, path):
    index.close()
    meet_namesakes(path, 100)
    with pytest.raises(NumberTaken):
        TablesProcess(path, MAP_BYTES, main=namesake_index.__name__)
    child = ReaderProcess(namesake_index.__name__)
    with pytest.raises(CorruptRecord, match="process number"):
        child.read(path)
    assert child.pid is None
    assert len(list((path.parent / namesake_index.NAMESAKES).iterdir())) > 60
