# SPDX-License-Identifier: Apache-2.0
"""A home whose index is lost, damaged or not to be trusted is rebuilt from its slots at the next
start."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
from rebuild_stores import (
    GEOMETRY,
    allocated,
    end,
    file_of,
    fill,
    hold,
    home_path,
    key_of,
    make_large_store,
    make_segment,
    make_store,
    rows,
    served,
    start,
    write_block,
)
from support import dying_index

from kvdisk import recovery
from kvdisk.blocks import BlockKey, Slot
from kvdisk.device import home as homes
from kvdisk.device import paths, rebuild
from kvdisk.device.drives import check_directories
from kvdisk.device.listing import list_homes
from kvdisk.device.segment import scan_file
from kvdisk.errors import CorruptRecord, DeviceError
from kvdisk.geometry import slot_offset
from kvdisk.index import lmdb_index
from kvdisk.index.base import BlockRecord
from kvdisk.index.lmdb_index import TablesProcess
from kvdisk.index.lmdb_tables import LmdbTables
from kvdisk.index.packed import Operation, Table
from kvdisk.index.reader_process import IndexContent, read_indexes
from kvdisk.index.records import decode_segments, encode_segment


def _garbage(index: Path) -> None:
    (index / "data.mdb").write_bytes(random.Random(1).randbytes(50_000))


@pytest.mark.parametrize(("damage", "clean"), [(shutil.rmtree, True), (_garbage, False), (_garbage, True)])
def test_whatever_happened_to_the_index_the_blocks_are_served(path, damage, clean, caplog):
    expected = make_store(path, clean=clean)
    damage(home_path(path) / "index")
    assert served(path) == expected
    assert "20 blocks in 4 segments; 0 segments dropped" in caplog.text
    caplog.clear()
    assert served(path) == expected
    assert "rebuil" not in caplog.text, "once is enough"


def content_of(path: Path) -> IndexContent:
    (content,) = read_indexes([home_path(path) / "index"])
    return content


@pytest.mark.parametrize("cut_first", [False, True])
def test_an_index_that_was_emptied_is_made_anew_in_the_same_boot(path, caplog, cut_first):
    """As a file system leaves it that was shut down and mounted again: nothing of it had reached
    the drive. Nothing is cut from the home before."""
    expected = make_store(path, clean=False)
    os.truncate(home_path(path) / "index" / "data.mdb", 0)
    if cut_first:
        home = hold(path)
        with pytest.raises(CorruptRecord):
            recovery.cut_home(home, [(0, key_of(0))], [3])
        home.close(clean=False)
    assert served(path) == expected
    assert caplog.text.count("rebuilds the index of engine store") == 1
    assert served(path) == expected


def test_a_record_that_names_a_segment_as_none_is_numbered_has_the_index_made_anew(path, caplog):
    """A flipped bit of its key. The numbers behind it would be those of neighbours' segments."""
    expected = make_store(path, clean=False)
    tables = LmdbTables(home_path(path) / "index", 8 << 20)
    key, value = encode_segment(decode_segments(next(tables.scan(Table.SEGMENTS)))[0])
    tables.commit([Operation(Table.SEGMENTS, key, None), Operation(Table.SEGMENTS, b"\x80" + key[1:], value)])
    tables.close()
    assert served(path) == expected
    assert "segment record: number 2147483648, which no segment has" in caplog.text


def test_parents_epochs_and_times_are_kept_in_order(path):
    make_store(path)
    home = hold(path)
    write_block(home, Slot(0, 6), key_of(900), 7, parent=key_of(3), epoch=42)
    home.close(clean=False)
    before = {record.key: record for record in content_of(path).blocks.records()}
    shutil.rmtree(home_path(path) / "index")
    home = hold(path)
    done = recovery.rebuild_index(home, 8 << 20)
    assert (len(done.blocks), len(done.segments), done.lost) == (21, 4, {})
    after = {record.key: record for record in content_of(path).blocks.records()}
    private = after.pop(key_of(900))
    assert (private.epoch, private.parent, private.slot, private.generation) == (42, key_of(3), Slot(0, 6), 7)
    assert {key: record._replace(stored_s=0) for key, record in after.items()} == {
        key: record._replace(stored_s=0) for key, record in before.items()
    }
    times = sorted((before[key].stored_s, after[key].stored_s) for key in before)
    for (before_s, after_s), (later_s, then_s) in pairwise(times):
        assert (after_s < then_s) == (before_s < later_s), "of the same time: a chain leaves tail first"
    home.close(clean=False)
    assert key_of(900) not in {row.key for row in served(path)}, "of another engine's weights"


# -- what is not recovered ---------------------------------------------------------------------


def change_header(home, at: int) -> None:
    slot_bytes = GEOMETRY.groups[0].slot_bytes
    with file_of(home, 2, 1).open("r+b") as file:
        file.seek(slot_offset(slot_bytes, 3) + at)
        byte = file.read(1)[0]
        file.seek(slot_offset(slot_bytes, 3) + at)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (lambda home: file_of(home, 2, 1).unlink(), lambda slot: slot.segment == 2),
        (lambda home: shutil.copyfile(file_of(home, 2, 0), file_of(home, 2, 1)), lambda slot: slot.segment == 2),
        (lambda home: change_header(home, 24), lambda slot: slot == Slot(2, 3)),
        (lambda home: change_header(home, 4090), lambda slot: slot == Slot(2, 3)),
    ],
    ids=["missing", "of another rank", "key", "seal"],
)
def test_what_is_not_sound_on_every_rank_is_no_block(path, damage, lost):
    expected = make_store(path)
    home = hold(path)
    damage(home)
    home.close(clean=False)
    shutil.rmtree(home_path(path) / "index")
    assert served(path) == {row for row in expected if not lost(row.slot)}


def test_a_file_of_a_segments_name_is_no_segment(tmp_path, caplog):
    """Neither one that a rebuild could take for another drive's, nor one that an index lacks."""
    dirs = [tmp_path / "a", tmp_path / "b"]
    expected = make_store(dirs, 4, drives=2)
    home = hold(dirs)
    (home.folder(0).segments_path / "3").touch()
    home.close(clean=False)
    shutil.rmtree(home_path(dirs[0]) / "index")
    assert served(dirs) == expected
    assert "dropped segment 3 on drive 0" in caplog.text
    caplog.clear()
    assert served(tmp_path / "c") == set()
    (home_path(tmp_path / "c") / "segments" / "3").touch()
    assert served(tmp_path / "c") == set()
    assert "rebuild" not in caplog.text


# -- broken off --------------------------------------------------------------------------------

DEATHS = (
    (paths, "remove_anything"),
    (paths, "make_directory"),
    (recovery, "scan_home"),
    (recovery, "remove_lost"),
    (recovery, "write_index"),
    (TablesProcess, "append"),
    (TablesProcess, "close"),
    (homes, "write_record"),
    (homes.Home, "place_index"),
    (homes.Home, "adopt_index"),
)
"""The calls that a rebuild dies before."""


def start_and_die(path: Path, at: int) -> None:
    """Start an engine, die before the so-manieth of these calls; at the end where there are
    fewer."""
    left = at

    def die_at(call):
        def counted(*arguments, **named):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return counted

    for owner, name in DEATHS:
        setattr(owner, name, die_at(getattr(owner, name)))
    start(path)
    os._exit(0)


def test_a_rebuild_that_is_killed_is_done_again(path):
    expected = make_store(path)
    for at in range(1, 60, 4):
        index = home_path(path) / "index"
        if index.is_dir() and (index / "data.mdb").exists():
            _garbage(index)
        child = multiprocessing.get_context("fork").Process(target=start_and_die, args=(path, at))
        child.start()
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        assert served(path) == expected, f"killed at {at}"
    else:
        raise AssertionError("it never came to its end")
    assert at > 10
    assert served(path) == expected
    assert not (home_path(path) / "index.new").exists()


def test_a_home_that_does_not_say_what_it_holds_is_given_up(path, monkeypatch, caplog):
    make_store(path)
    old = home_path(path)
    shutil.rmtree(old / "index")
    with monkeypatch.context() as patch:
        patch.setattr(rebuild.HomeShape, "of", Mock(side_effect=CorruptRecord("no sizes")))
        assert served(path) == set()
    assert "gives up engine store" in caplog.text
    assert not old.exists()


def kill_readers(path: Path, count: int) -> None:
    """Have the next readers of the index of an engine store killed, as where memory is short."""
    deaths = home_path(path) / dying_index.DEATHS
    deaths.mkdir()
    for number in range(count):
        (deaths / str(number)).touch()


@pytest.fixture
def mortal(monkeypatch):
    """The processes of indexes heed ``kill_readers``."""
    monkeypatch.setattr(lmdb_index, "TablesProcess", partial(TablesProcess, main=dying_index.__name__))


@pytest.mark.usefixtures("mortal")
def test_an_index_whose_reader_is_killed_is_read_once_more(path, caplog):
    expected = make_store(path)
    kill_readers(path, 1)
    assert served(path) == expected
    assert "once more: index" in caplog.text and "SIGKILL" in caplog.text
    assert "rebuil" not in caplog.text
    assert served(path) == expected


@pytest.mark.usefixtures("mortal")
@pytest.mark.parametrize("damage", [None, _garbage])
def test_readers_that_are_killed_cost_this_start_and_no_block(path, caplog, damage):
    """They say nothing of the blocks, nor of the index."""
    expected = make_store(path)
    if damage is not None:
        damage(home_path(path) / "index")
    kill_readers(path, 2)
    assert served(path) == set()
    assert "leaves engine store" in caplog.text and "gives up" not in caplog.text
    assert caplog.text.count("rebuilds the index") == (damage is not None)
    caplog.clear()
    assert served(path) == expected
    assert "rebuil" not in caplog.text


@pytest.mark.usefixtures("mortal")
def test_a_new_index_whose_readers_are_killed_is_a_device_error(path):
    """With which the engine starts without NVMe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(homes.Home, "await_index", lambda _: kill_readers(path, 2))
        with pytest.raises(DeviceError, match="SIGKILL"):
            start(path)
    assert not list((path / "homes").iterdir())
    assert served(path) == set()


@pytest.mark.parametrize("call", ["scan_home", "remove_lost", "write_index"])
def test_a_drive_that_fails_in_a_rebuild_costs_this_start_and_no_block(path, monkeypatch, caplog, call):
    expected = make_store(path)
    shutil.rmtree(home_path(path) / "index")
    with monkeypatch.context() as patch:
        patch.setattr(recovery, call, Mock(side_effect=DeviceError(errno.EIO, "no")))
        parts = start(path)
        assert parts.home.fresh and rows(parts) == set()
        parts.close()
    (said,) = [record.message for record in caplog.records if "leaves engine store" in record.message]
    assert "until the next start" in said
    assert served(path) == expected, "the fullest home"
    assert len(os.listdir(path / "homes")) == 2


def test_an_index_file_that_goes_while_it_is_opened_costs_no_block(path, monkeypatch, caplog):
    """As where somebody deletes it just then."""
    expected = make_store(path)
    real = recovery._open

    def open_and_remove(home, *arguments):
        index = real(home, *arguments)
        (home.index_path / "data.mdb").unlink()
        monkeypatch.setattr(recovery, "_open", real)
        return index

    monkeypatch.setattr(recovery, "_open", open_and_remove)
    assert served(path) == expected
    assert caplog.text.count("rebuilds the index") == 1
    assert served(path) == expected


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_a_drive_none_of_whose_segments_can_be_read_loses_none(tmp_path, monkeypatch, number):
    """It is the drive, and not the segments; or the process, which then ends."""
    dirs = [tmp_path / "a", tmp_path / "b"]
    expected = make_store(dirs, 4, drives=2)
    shutil.rmtree(home_path(dirs[0]) / "index")

    def scan(folder, segment, rank):
        if folder.path.is_relative_to(dirs[1]):
            raise DeviceError(number, "no")
        return scan_file(folder, segment, rank)

    with monkeypatch.context() as patch:
        patch.setattr(rebuild, "scan_file", scan)
        if number == errno.EIO:
            assert served(dirs) == set()
        else:
            with pytest.raises(DeviceError, match="no"):
                start(dirs)
    assert served(dirs) == expected
    if number == errno.EMFILE:
        assert [record.drive for record in content_of(dirs[0]).segments] == [0, 0, 1, 1]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ETIMEDOUT])
def test_a_segment_that_cannot_be_read_in_a_rebuild_leaves_the_engine_store_for_later(
    path, monkeypatch, caplog, number
):
    """Its files would go, and others would get its number. ``kvdisk repair`` does without it."""
    expected = make_store(path)
    shutil.rmtree(home_path(path) / "index")

    def scan(folder, segment, rank):
        if segment == 2:
            raise DeviceError(number, "opening segment 2")
        return scan_file(folder, segment, rank)

    with monkeypatch.context() as patch:
        patch.setattr(rebuild, "scan_file", scan)
        assert served(path) == set()
    assert "leaves engine store" in caplog.text
    assert served(path) == expected


def test_slots_that_cannot_be_read_for_a_moment_are_found_by_a_rebuild(path, monkeypatch):
    expected = make_store(path)
    shutil.rmtree(home_path(path) / "index")
    monkeypatch.setattr(rebuild, "_PAUSE_S", 0.0)
    read, failures = os.preadv, iter(range(7))

    def failing(fd, buffers, offset):
        if offset and next(failures, None) is not None:
            raise OSError(errno.EIO, "no")
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    assert served(path) == expected


@pytest.mark.parametrize("drive", [0, 1])
@pytest.mark.parametrize("text", [None, "", '{"format_version": 1, "store_id": "x"}'], ids=["gone", "empty", "no id"])
def test_a_store_file_that_is_gone_or_damaged_costs_no_block(tmp_path, caplog, drive, text):
    dirs = [tmp_path / "a", tmp_path / "b"]
    expected = make_store(dirs, 4, drives=2)
    file = dirs[drive] / "STORE"
    before = json.loads(file.read_text())
    file.unlink()
    if text is not None:
        file.write_text(text)
    check_directories(dirs)
    assert len(list_homes(dirs)) == 1 and not (file.exists() and file.read_text() != text)
    assert served(dirs) == expected
    assert f"wrote {file} anew" in caplog.text
    caplog.clear()
    after = json.loads(file.read_text())
    assert {**after, "created_s": 0} == {**before, "created_s": 0}
    assert served(dirs) == expected and "anew" not in caplog.text


def test_a_store_whose_homes_do_not_agree_which_it_is_is_refused(tmp_path):
    for name in "ab":
        make_store(tmp_path / name)
    other = home_path(tmp_path / "b")
    shutil.copytree(other, tmp_path / "a" / "homes" / other.name)
    (tmp_path / "a" / "STORE").write_text("")
    with pytest.raises(CorruptRecord, match="STORE does not decode"):
        start(tmp_path / "a")
    assert len(os.listdir(tmp_path / "a" / "homes")) == 2


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("elsewhere")], ids=["directory", "symlink"])
def test_what_is_no_file_in_the_place_of_a_homes_lock_costs_no_block(path, make):
    expected = make_store(path)
    lock = home_path(path) / "lock"
    lock.unlink()
    make(lock)
    assert served(path) == expected
    assert (home_path(path) / "lock").read_bytes() == b""


# -- cut to the cap ----------------------------------------------------------------------------


def test_a_smaller_cap_is_kept_when_the_start_is_over(path):
    make_large_store(path)
    small = 24 << 20
    assert allocated(path / "homes") > small
    parts = start(path, cap_bytes=small)
    assert allocated(home_path(path)) <= small, "before the engine runs"
    kept = rows(parts)
    assert 0 < len(kept) < 10
    assert {row.slot.segment for row in kept} == {int(name) for name in os.listdir(home_path(path) / "segments")}
    assert {record.segment for record in parts.index.segments()} == {row.slot.segment for row in kept}
    parts.close()
    assert served(path, cap_bytes=small) == kept


@pytest.mark.parametrize("clean", [True, False])
def test_an_engine_with_a_smaller_cap_leaves_the_store_of_a_larger_one_whole(path, clean):
    """Both were down, and the smaller one is back first: it has a store of its own cap."""
    small = 24 << 20
    make_large_store(path)
    large, beside = start(path), start(path, cap_bytes=small)
    expected = rows(large)
    fill(beside.home, beside.index)
    end(beside, clean=clean)
    end(large, clean=clean)
    beside = start(path, cap_bytes=small)
    assert len(rows(beside)) == 20
    large = start(path)
    assert rows(large) == expected
    end(large)
    end(beside)


def test_on_a_full_drive_the_files_go_before_the_records(path, monkeypatch):
    """Else there would never be room for the commit."""
    expected = make_store(path)
    commit = TablesProcess.commit

    def wants_room(tables, operations):
        if (tables._path.parent / "segments" / "3").exists():
            raise DeviceError(errno.ENOSPC, "no room")
        return commit(tables, operations)

    home = hold(path)
    with monkeypatch.context() as patch:
        patch.setattr(TablesProcess, "commit", wants_room)
        recovery.cut_home(home, [], [3])
    home.close(clean=True)
    assert served(path) == {row for row in expected if row.slot.segment != 3}


def test_an_index_file_that_is_too_long_for_the_cap_is_made_anew(path):
    large = start(path, cap_bytes=1 << 30)
    keys = [BlockKey(number.to_bytes(4, "big") * 31 + bytes(2)) for number in range(40_000)]
    for first in range(0, len(keys), 1000):
        batch = [BlockRecord(9, key, Slot(0, 0), 1, key) for key in keys[first : first + 1000]]
        assert large.index.put(batch)
    assert large.index.flush(60)
    large.index.delete([(9, key) for key in keys])
    large.index.put_segment(make_segment(large.home, 0))
    write_block(large.home, Slot(0, 0), key_of(1), 7)
    large.index.put([BlockRecord(0, key_of(1), Slot(0, 0), 7)])
    end(large)
    file = home_path(path) / "index" / "data.mdb"
    before = file.stat().st_size
    small = start(path, cap_bytes=16 << 20)
    after = (small.home.index_path / "data.mdb").stat().st_size
    assert after <= small.home.record.index_bytes < before
    assert {row.key for row in rows(small)} == {key_of(1)}
    small.close()
