# SPDX-License-Identifier: Apache-2.0
"""Who owns which home, who takes it over, and what is believed of its index.

An owner that is released without being closed is one that was killed; ``tests/crash`` kills
processes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvdisk.device import mounts, paths
from kvdisk.device import store as store_module
from kvdisk.device.control import write_record
from kvdisk.device.listing import list_homes
from kvdisk.device.store import Store
from kvdisk.errors import CorruptRecord, DeviceError, GeometryMismatch, StoreLocked
from kvdisk.messages import SegmentSpec

MINE = bytes(range(32))
OTHER = b"\x77" * 32
MIB = 1 << 20
CAP = 64 * MIB
GEOMETRY = {"geometry": {"blocks": [1, 2]}, "model": "m"}


@pytest.fixture
def clock():
    """Seconds that pass when told."""
    return Mock(return_value=1_000_000.5)


@pytest.fixture
def store(tmp_path, clock):
    return Store.open(tmp_path / "store", boot_id="boot-1", clock=clock)


def acquire(store, fingerprint=MINE, geometry=GEOMETRY, **more):
    return store.acquire_home(fingerprint, geometry, CAP, **more)


def put(home, byte_count) -> None:
    """Allocate so many bytes in a home."""
    directory = home.segments_path / "0"
    directory.mkdir(exist_ok=True)
    with (directory / "rank0.kv").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, byte_count)


def leave(store, byte_count=MIB, fingerprint=MINE, geometry=GEOMETRY) -> str:
    """Make a home, fill it and leave it without an owner; return its id."""
    home = acquire(store, fingerprint, geometry)
    assert home.fresh
    put(home, byte_count)
    home.close(clean=True)
    return home.id


def ids(store) -> set[str]:
    return {path.name for path in (store.path / "homes").iterdir()}


def alive(store) -> dict[str, bool]:
    return {summary.id: summary.alive for summary in list_homes(store.path)}


def test_a_new_home_is_not_clean_until_closed_and_is_taken_over_under_a_new_id(store, clock):
    home = acquire(store)
    assert home.fresh and home.index_is_sound() and home.index_path.is_dir()
    assert json.loads((home.path / "HOME").read_text()) == {
        "format_version": 1,
        "fingerprint": MINE.hex(),
        "description": GEOMETRY | {"together": {"nvme_bytes": CAP, "at_s": 1_000_000}},
        "boot_id": "boot-1",
        "clean": False,
        "cap_bytes": CAP,
        "last_use_s": 1_000_000,
        "created_s": 1_000_000,
        "index_bytes": 0,
        "index_sum": "",
        "drives": [{"store_id": json.loads((store.path / "STORE").read_text())["store_id"], "folder": ""}],
    }
    put(home, MIB)
    clock.return_value += 60
    home.close(clean=True)
    home.close(clean=False)
    home.mark_used()
    (summary,) = list_homes(store.path)
    assert (summary.alive, summary.record.clean, summary.record.last_use_s) == (False, True, 1_000_060)
    clock.return_value += 40
    renamed = GEOMETRY | {"model": "the same under another name"}
    after = Store.open(store.path, boot_id="boot-2", clock=clock).acquire_home(MINE, renamed, 2 * CAP)
    assert not after.fresh and after.id != home.id
    assert (after.segments_path / "0" / "rank0.kv").stat().st_size == MIB
    (summary,) = list_homes(store.path)
    assert (summary.id, summary.alive, summary.record.clean) == (after.id, True, False)
    assert (summary.record.cap_bytes, summary.record.created_s) == (2 * CAP, 1_000_000)
    assert summary.record.description == renamed | {"together": {"nvme_bytes": 2 * CAP, "at_s": 1_000_100}}
    with pytest.raises(DeviceError) as caught:
        store.join_home(home.id, MINE)
    assert caught.value.errno == errno.ENOENT
    after.close(clean=True)


def test_a_living_owner_is_left_alone_and_a_dead_ones_home_is_taken_over(store):
    first, beside = acquire(store), acquire(store)
    put(first, MIB)
    assert first.fresh and beside.fresh
    assert alive(store) == {first.id: True, beside.id: True}
    first.release()
    assert alive(store) == {first.id: False, beside.id: True}
    with pytest.raises(StoreLocked):
        store.hold_home(beside.id)
    after = acquire(store)
    assert not after.fresh and (after.segments_path / "0").exists()
    assert alive(store) == {after.id: True, beside.id: True}
    with store.locked(), pytest.raises(StoreLocked, match="locked by another"), store.locked(timeout_s=0.05):
        pass
    for home in (after, beside):
        home.close(clean=True)


def test_the_fullest_home_that_fits_is_taken_over(store, clock):
    """Whatever its boot; those of other contents stay."""
    held = [acquire(store) for _ in range(3)]
    for home, size in zip(held, (2 * MIB, 5 * MIB, 3 * MIB), strict=True):
        put(home, size)
    others = {leave(store, 6 * MIB, OTHER), leave(store, 7 * MIB, MINE, {"geometry": {"blocks": [1, 3]}})}
    for home in held:
        home.release()
    home = acquire(Store.open(store.path, boot_id="boot-2", clock=clock))
    assert not home.fresh
    assert (home.segments_path / "0" / "rank0.kv").stat().st_size == 5 * MIB
    assert ids(store) == {home.id, held[0].id, held[2].id, *others}
    home.close(clean=True)


def test_a_home_that_a_start_did_not_come_to_cut_is_taken_over_by_the_next(store):
    """As where it was killed, or could not read the index: HOME says the smaller cap by then."""
    home = acquire(store)
    put(home, 5 * MIB)
    home.close(clean=True)
    for _ in range(2):
        home = store.acquire_home(MINE, GEOMETRY, 2 * MIB)
        assert (home.segments_path / "0" / "rank0.kv").exists()
        home.release()
    assert ids(store) == {home.id}


class Refusing:
    """Lets a home not be renamed, as overlayfs where it came with the image; or its HOME not be
    written."""

    def __init__(self, monkeypatch, call: str, number: int) -> None:
        self.refused: set[str] = set()
        self._error = OSError(number, os.strerror(number))
        real_rename, real_exchange = Path.rename, paths._exchange

        def rename(path, target):
            if call == "rename" and path.name in self.refused:
                raise self._error
            if path.name in self.refused:
                self.refused.add(Path(target).name)
            return real_rename(path, target)

        def exchange(one, other):
            if call == "HOME" and other.parent.name in self.refused:
                raise self._error
            return real_exchange(one, other)

        monkeypatch.setattr(Path, "rename", rename)
        monkeypatch.setattr(paths, "_exchange", exchange)


@pytest.mark.parametrize(("call", "number"), [("rename", errno.EXDEV), ("HOME", errno.EIO)])
def test_a_home_that_cannot_be_taken_over_stays_and_the_next_one_is(store, clock, monkeypatch, caplog, call, number):
    held = [acquire(store) for _ in range(2)]
    for home, size in zip(held, (5 * MIB, 3 * MIB), strict=True):
        put(home, size)
        home.close(clean=True)
    refusing = Refusing(monkeypatch, call, number)
    refusing.refused = {held[0].id}
    home = acquire(store)
    assert (home.segments_path / "0" / "rank0.kv").stat().st_size == 3 * MIB
    assert "leaves engine store" in caplog.text and len(ids(store)) == 2
    (left,) = ids(store) - {home.id}
    clock.return_value += 10**6
    store.keep(home)
    assert left in home.record.leaves and left in ids(store)
    home.close(clean=True)
    refusing.refused |= {home.id}
    fresh = acquire(store)
    assert fresh.fresh and len(ids(store)) == 3
    assert ids(store) - {fresh.id} <= fresh.record.leaves
    refusing.refused.clear()
    again = acquire(store)
    assert (again.segments_path / "0" / "rank0.kv").stat().st_size == 5 * MIB
    for home in (fresh, again):
        home.close(clean=True)


@pytest.mark.parametrize(("call", "number"), [("rename", errno.EXDEV), ("HOME", errno.EIO)])
def test_a_home_that_could_not_be_taken_over_to_be_cut_is_cut_by_the_next_start(store, monkeypatch, call, number):
    """Beside the store that was made instead, which has the smaller cap; another one stays."""
    larger = acquire(store)
    put(larger, 6 * MIB)
    refusing = Refusing(monkeypatch, call, number)
    refusing.refused = {leave(store, 5 * MIB)}
    beside = store.acquire_home(MINE, GEOMETRY, 2 * MIB)
    assert beside.fresh
    for home in (beside, larger):
        home.close(clean=True)
    refusing.refused.clear()
    home = store.acquire_home(MINE, GEOMETRY, 2 * MIB)
    assert (home.segments_path / "0" / "rank0.kv").stat().st_size == 5 * MIB
    home.close(clean=True)


def test_a_store_whose_home_cannot_be_made_deletes_none_for_it(store, monkeypatch):
    for fingerprint in (OTHER, MINE):
        leave(store, 40 * MIB, fingerprint)
    before = ids(store)
    monkeypatch.setattr(store_module, "write_record", Mock(side_effect=OSError(errno.EIO, "no")))
    with pytest.raises(DeviceError, match="errno 5"):
        store.acquire_home(b"\x01" * 32, GEOMETRY, CAP)
    assert ids(store) == before


# -- the index ---------------------------------------------------------------------------------


@pytest.fixture
def indexed(store):
    """A home that was closed in order, with bytes for an index."""
    home = acquire(store)
    (home.index_path / "data.mdb").write_bytes(b"index")
    home.close(clean=True)
    return home


def taken(store, boot_id="boot-1"):
    return acquire(Store.open(store.path, boot_id=boot_id))


def test_after_a_clean_end_the_sum_of_the_index_decides_in_any_boot(store, indexed):
    for boot_id in ("boot-1", "boot-2"):
        home = taken(store, boot_id)
        assert home.index_is_sound()
        home.close(clean=False)  # nothing was written to: it is as clean as before
        assert list_homes(store.path)[0].record.clean
    for boot_id in ("boot-1", "boot-2"):
        home = taken(store, boot_id)
        (home.index_path / "data.mdb").write_bytes(b"jndex")
        assert not home.index_is_sound()
        home.close(clean=True)  # does not make it sound
    home = taken(store)
    assert not home.index_is_sound()
    (home.index_path / "data.mdb").write_bytes(b"index")
    assert home.index_is_sound()
    home.adopt_index()
    home.release()  # as one that was killed while it wrote
    for boot_id, sound in (("boot-1", True), ("boot-2", False)):
        home = taken(store, boot_id)
        assert home.index_is_sound() is sound, "without a sum the boot decides"
        home.close(clean=False)


def test_a_note_of_use_that_is_late_does_not_undo_the_clean_end(store, indexed, monkeypatch):
    home = taken(store)
    home.adopt_index()
    inside, go_on = threading.Event(), threading.Event()

    def write_late(path, record, **how):
        if threading.current_thread() is marker:
            inside.set()
            go_on.wait()
        write_record(path, record, **how)

    monkeypatch.setattr("kvdisk.device.home.write_record", write_late)
    marker = threading.Thread(target=home.mark_used)
    closer = threading.Thread(target=home.close, args=(True,))
    marker.start()
    inside.wait()
    closer.start()
    closer.join(0.2)  # it would end now, if it did not wait
    go_on.set()
    for thread in (marker, closer):
        thread.join()
    (summary,) = list_homes(store.path)
    assert summary.record.clean and summary.record.index_sum


@pytest.mark.parametrize("symlink", [False, True])
def test_what_is_no_index_is_not_sound_and_is_replaced(store, indexed, tmp_path, symlink):
    home = taken(store)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data.mdb").write_bytes(b"index")
    (home.index_path / "data.mdb").unlink()
    if symlink:
        home.index_path.rmdir()
        home.index_path.symlink_to(precious)
    assert not home.index_is_sound()
    home.remove_index()
    assert not os.path.lexists(home.index_path)
    (home.new_index_path / "data.mdb").write_bytes(b"new")
    assert not home.index_is_sound()
    home.place_index()
    assert not home.index_is_sound(), "a crash here means: once more"
    home.adopt_index()
    assert home.index_is_sound()
    home.close(clean=True)
    assert (precious / "data.mdb").read_bytes() == b"index"
    after = taken(store, "boot-2")
    assert after.index_is_sound()
    after.close(clean=False)


@pytest.mark.parametrize("call", ["close", "flock"])
def test_a_home_on_a_file_system_that_goes_away_is_released_all_the_same(store, monkeypatch, call):
    """As NFS and FUSE fail: the locks cannot be released in order, and nothing else is left
    open."""
    home, real = acquire(store), os.close

    def fails(fd, *_):
        if call == "close":
            real(fd)
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(fcntl if call == "flock" else os, call, fails)
    home.release()
    home.release()
    monkeypatch.undo()
    assert alive(store) == {home.id: False}


def test_clean_is_said_after_all_bytes_are_synced(store, monkeypatch):
    home = acquire(store)
    put(home, MIB)
    (home.index_path / "data.mdb").write_bytes(b"index")
    synced = []
    real = os.fsync

    def fsync(fd):
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        clean = json.loads((home.path / "HOME").read_text())["clean"]
        synced.append((str(path.relative_to(home.path)), clean))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    home.close(clean=True)
    before = {name for name, clean in synced if not clean}
    assert {"segments/0/rank0.kv", "segments/0", "index/data.mdb", "index", "HOME.tmp"} <= before
    assert synced[-1] == (".", True)


# -- deletion ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "HOME").unlink(),
        lambda path: ((path / "HOME").unlink(), (path / "HOME.tmp").unlink(), os.mkfifo(path / "HOME")),
    ],
)
def test_a_home_that_is_not_complete_is_deleted_once_nobody_holds_it(store, damage):
    left = leave(store)
    damage(store.home_path(left))
    assert alive(store) == {left: False}
    home = acquire(store)
    assert home.fresh and ids(store) == {home.id}
    (home.path / "HOME").write_text("{")
    other = acquire(store)
    assert ids(store) == {home.id, other.id}, "a damaged HOME does not make its owner dead"
    for closed in (home, other):
        closed.close(clean=True)


@pytest.mark.parametrize("bit", range(8))
def test_what_home_said_before_is_used_where_one_bit_of_it_is_wrong(store, bit, caplog):
    left = leave(store)
    said = bytearray((store.home_path(left) / "HOME").read_bytes())
    said[5] ^= 1 << bit
    (store.home_path(left) / "HOME").write_bytes(said)
    assert alive(store) == {left: False}
    home = acquire(store)
    assert not home.fresh and (home.segments_path / "0").exists() and ids(store) == {home.id}
    assert "its previous version, HOME.tmp, is used" in caplog.text
    home.close(clean=True)


def test_what_home_said_before_names_the_fingerprint_that_was_found_late(store):
    home = acquire(store, OTHER)
    home.mark_used()
    home.name(MINE, {})
    home.release()
    (home.path / "HOME").write_text("{")
    after = acquire(store)
    assert not after.fresh and ids(store) == {after.id}
    after.close(clean=True)


def test_a_home_both_of_whose_records_are_damaged_goes_with_a_line(store, caplog):
    left = leave(store)
    for name in ("HOME", "HOME.tmp"):
        (store.home_path(left) / name).write_text("{")
    acquire(store).close(clean=True)
    assert f"deletes engine store {left}" in caplog.text and left not in ids(store)


def test_a_home_without_home_is_no_home_whatever_home_tmp_says(store):
    """A deletion begins with HOME, and may have been broken off."""
    left = leave(store)
    (store.home_path(left) / "HOME").unlink()
    home = acquire(store)
    assert home.fresh and ids(store) == {home.id}
    home.close(clean=True)


@pytest.mark.parametrize("what", ["HOME", "lock", "segments"])
def test_an_unowned_home_that_cannot_be_read_now_stops_nobody_and_stays(store, monkeypatch, caplog, what):
    """Running engines make segments beside it, and others start."""
    left = leave(store, 8 * MIB)
    mine = acquire(store, OTHER)
    real_open, real_scan = os.open, os.scandir

    def refuse(path) -> None:
        if str(path).startswith(str(store.home_path(left) / what)):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def opening(path, *more, **how):
        refuse(path)
        return real_open(path, *more, **how)

    def scanning(path=".") -> Any:
        refuse(path)
        return real_scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opening)
        patch.setattr(os, "scandir", scanning)
        joined = store.join_home(mine.id, OTHER)
        store.make_segment(joined, SegmentSpec(0, 8192, 7000), 0, 1).close()
        beside = acquire(store)
        assert beside.fresh, "nobody knows what it is"
        beside.close(clean=True)
    assert f"engine store {left} cannot be read now" in caplog.text
    after = acquire(store)
    assert not after.fresh and (after.segments_path / "0").exists() and left not in ids(store)
    for held in (joined, mine, after):
        held.close(clean=True) if held is not joined else held.close()


def test_a_store_whose_lock_files_were_removed_is_left_alone_while_it_is_used_and_taken_over_then(store):
    """As by who removes what is older than a week; also by commands."""
    home = acquire(store)
    put(home, MIB)
    rank = store.join_home(home.id, MINE)
    for lock in (store.path / "lock", home.path / "lock"):
        lock.unlink()
    other = acquire(Store.open(store.path, boot_id="boot-1"), OTHER)
    assert alive(store) == {home.id: True, other.id: True} and ids(store) == {home.id, other.id}
    with pytest.raises(StoreLocked):
        store.remove_home(home.id)
    home.close(clean=True)
    assert alive(store)[home.id], "the rank still has it"
    rank.close()
    assert alive(store) == {home.id: False, other.id: True}
    after = acquire(store)
    assert not after.fresh and (after.segments_path / "0").exists() and (after.path / "lock").exists()
    for closed in (after, other):
        closed.close(clean=True)


def used_ago(home, seconds, **more) -> None:
    """Have HOME say when the home was used last."""
    write_record(home.path, replace(home.record, last_use_s=int(time.time()) - seconds, **more))


def test_what_lost_its_lock_file_and_was_used_a_moment_ago_is_left_alone(tmp_path):
    """Its owner may be an older kvdisk, which locks nothing but the file."""
    store = Store.open(tmp_path / "store")
    home = acquire(store)
    home.release()
    (home.path / "lock").unlink()
    assert alive(store) == {home.id: True}
    beside = acquire(store)
    assert beside.fresh
    beside.close(clean=True)
    used_ago(home, 400)
    assert alive(store) == {home.id: False, beside.id: False}
    put(home, MIB)
    assert not acquire(store).fresh


@pytest.fixture
def on(tmp_path, monkeypatch):
    """Have the system say that all lies on a file system of a kind."""

    def say(kind: str) -> None:
        (tmp_path / "mountinfo").write_text(f"1 0 8:1 / / rw - {kind} /dev/sda rw\n")
        monkeypatch.setattr(mounts, "MOUNTINFO_PATH", tmp_path / "mountinfo")

    return say


@pytest.mark.parametrize("used_s", [60, -3600])
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_what_lies_on_a_local_drive_is_no_other_machines(store, on, tmp_path, monkeypatch, clock, kind, used_s):
    """It was lost where a machine that was reset starts with its clock behind, or where the drive
    of one that failed is given to another."""
    clock.return_value = time.time()
    monkeypatch.setattr(mounts, "NFS_SERVER_PATH", tmp_path / "none")
    home = acquire(store)
    put(home, MIB)
    home.release()
    used_ago(home, used_s, boot_id="theirs")
    on("nfs4")
    assert alive(store) == {home.id: True}
    on(kind)
    monkeypatch.setattr(mounts, "NFS_SERVER_PATH", tmp_path)
    assert alive(store) == {home.id: True}, "this machine may serve it to others"
    monkeypatch.setattr(mounts, "NFS_SERVER_PATH", tmp_path / "none")
    assert alive(store) == {home.id: False}
    after = acquire(Store.open(store.path))
    assert not after.fresh
    after.close(clean=True)


def test_what_another_machine_used_a_moment_ago_is_left_alone(tmp_path, caplog, on):
    """Where locks are each machine's own; not where this machine has started again since."""
    on("nfs4")
    store = Store.open(tmp_path / "store")
    home = acquire(store)
    put(home, MIB)
    home.release()
    used_ago(home, 60, boot_id="theirs")
    assert alive(store) == {home.id: True}
    beside = acquire(store)
    assert beside.fresh
    (said,) = [line for line in caplog.messages if "another machine used it" in line]
    assert said.startswith(f"kvdisk leaves engine store {home.id} alone")
    with pytest.raises(StoreLocked):
        store.hold_home(home.id)
    just_started = Store.open(store.path, boot_id="a new boot of the same machine")
    assert not just_started.is_of_another_machine(home.record)
    used_ago(home, 60, boot_id="theirs", clean=True)
    assert alive(store) == {home.id: False, beside.id: True}, "it was closed in order"
    used_ago(home, -3600, boot_id="theirs")
    assert alive(store) == {home.id: True, beside.id: True}, "its clock may be ahead of this one's"
    for seconds in (-2 * 86_400, 400):
        used_ago(home, seconds, boot_id="theirs")
        assert alive(store) == {home.id: False, beside.id: True}
    after = acquire(store)
    assert not after.fresh and after.record.boot_id != "theirs", "or it would be another machine's if this one died"
    for closed in (after, beside):
        closed.close(clean=True)


def test_deletion_follows_no_symlink(store, tmp_path):
    left, homes = leave(store), store.path / "homes"
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("kept")
    (store.home_path(left) / "segments" / "7").symlink_to(tmp_path / "precious")
    (store.home_path(left) / "HOME").unlink()
    (homes / ("d" * 32)).symlink_to(tmp_path / "precious")
    (homes / "notes").mkdir()
    home = acquire(store)
    assert ids(store) == {home.id, "d" * 32, "notes"}
    for names in [("d" * 32, "file"), ("notes", ".."), ("a/b",)]:
        with pytest.raises((OSError, AssertionError)):
            paths.remove_anything(homes, *names)
    paths.remove_anything(homes, "d" * 32)
    assert ids(store) == {home.id, "notes"}
    assert (tmp_path / "precious" / "file").read_text() == "kept"
    home.close(clean=True)


def test_a_deletion_that_breaks_off_leaves_no_home_to_take_over(store, monkeypatch, caplog):
    left = leave(store, 40 * MIB)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        assert not store.remove_home(left)
        home = acquire(store)
        assert home.fresh, "took over what could not be deleted"
        assert f"engine store {left} should be deleted to make room, and cannot be" in caplog.text
        home.close(clean=True)
    home = acquire(store, OTHER)
    assert home.fresh and left not in ids(store)
    home.close(clean=True)


# -- ranks -------------------------------------------------------------------------------------


def test_joining_is_by_id_and_fingerprint(store):
    home = acquire(store)
    joined = Store.open(store.path, create=False).join_home(home.id, MINE)
    assert joined.segments_path == home.segments_path
    with pytest.raises(GeometryMismatch):
        store.join_home(home.id, OTHER)
    for wrong in ["../" + home.id, home.id[:31], home.id.upper() + "0", "", "g" * 32, home.id[:30] + "/."]:
        with pytest.raises(CorruptRecord):
            store.join_home(wrong, MINE)
    with pytest.raises(DeviceError):
        store.join_home("0" * 32, MINE)
    home.close(clean=True)
    assert alive(store) == {home.id: True}, "the rank still has it"
    joined.close()
    joined.close()
    assert alive(store) == {home.id: False}


def test_a_home_that_goes_away_while_it_is_joined_is_not_joined(store, monkeypatch):
    left, real = leave(store), paths.try_lock

    def after_the_deletion(fd, kind):
        shutil.rmtree(store.home_path(left))
        return real(fd, kind)

    monkeypatch.setattr(paths, "try_lock", after_the_deletion)
    with pytest.raises(StoreLocked, match=left):
        store.join_home(left, MINE)
