# SPDX-License-Identifier: Apache-2.0
"""Homes as one process sees them; test_home_processes.py has the owners that die."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from kvdisk.device import paths
from kvdisk.device.control import write_record
from kvdisk.device.listing import list_homes
from kvdisk.device.store import Store
from kvdisk.errors import CorruptRecord, DeviceError, GeometryMismatch, StoreLocked

MINE = bytes(range(32))
OTHER = b"\x77" * 32
MIB = 1 << 20
CAP = 64 * MIB
GEOMETRY = {"geometry": {"blocks": [1, 2]}, "model": "m"}


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 1_000_000.5

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    return Store.open(tmp_path / "store", boot_id="boot-1", clock=clock)


def put(home, byte_count, name="0") -> None:
    """Allocate so many bytes in a home."""
    directory = home.segments_path / name
    directory.mkdir(exist_ok=True)
    with (directory / "rank0.kv").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, byte_count)


def leave(store, fingerprint, byte_count=0, *, clean=True, description=None) -> str:
    """Make a home beside those that are there, fill it and leave it as an orphan; return its id."""
    home = store.acquire_home(fingerprint, description or {"geometry": {"made_as": os.urandom(4).hex()}}, CAP)
    assert home.fresh
    if byte_count:
        put(home, byte_count)
    home.close(clean)
    if description is None:
        edit(store, home.id, description={"geometry": {"blocks": [1, 2]}})
    return home.id


def edit(store, home_id, **changes) -> None:
    path = store.home_path(home_id) / "HOME"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def ids(store) -> set[str]:
    return {path.name for path in (store.path / "homes").iterdir()}


def test_a_new_home_belongs_to_its_owner_and_is_not_clean_until_closed(store, clock):
    home = store.acquire_home(MINE, GEOMETRY, CAP)
    assert home.fresh
    assert CAP - MIB < home.budget_bytes < CAP
    assert home.index_path.is_dir()
    assert home.index_is_sound()
    said = json.loads((home.path / "HOME").read_text())
    assert said == {
        "format_version": 1,
        "fingerprint": MINE.hex(),
        "description": GEOMETRY,
        "boot_id": "boot-1",
        "clean": False,
        "cap_bytes": CAP,
        "last_use_s": 1_000_000,
        "created_s": 1_000_000,
        "index_bytes": 0,
        "index_sum": "",
        "drives": [{"store_id": json.loads((store.path / "STORE").read_text())["store_id"], "folder": ""}],
    }
    assert home.drive_count == 1
    (summary,) = list_homes(store.path)
    assert (summary.id, summary.alive, summary.record.clean) == (home.id, True, False)
    clock.now += 60
    home.close(clean=True)
    home.close(clean=False)
    (summary,) = list_homes(store.path)
    assert (summary.alive, summary.record.clean, summary.record.last_use_s) == (False, True, 1_000_060)


def test_a_clean_home_is_taken_over_under_a_new_id(store, clock):
    old = leave(store, MINE, MIB, description=GEOMETRY)
    clock.now += 100
    again = Store.open(store.path, boot_id="boot-2", clock=clock)
    home = again.acquire_home(MINE, GEOMETRY | {"model": "the same under another name"}, 2 * CAP)
    assert not home.fresh
    assert (home.segments_path / "0" / "rank0.kv").stat().st_size == MIB
    assert ids(store) == {home.id}
    assert home.id != old
    (summary,) = list_homes(store.path)
    assert (summary.alive, summary.record.clean) == (True, False)
    assert (summary.record.cap_bytes, summary.record.created_s) == (2 * CAP, 1_000_000)
    assert summary.record.description["model"] == "the same under another name"
    with pytest.raises(DeviceError) as caught:
        store.join_home(old, MINE)
    assert caught.value.errno == errno.ENOENT
    home.close(clean=True)


def test_the_fullest_orphan_that_fits_is_taken_over(store, clock):
    """Whatever its boot; those of other contents stay."""
    left = {byte_count: leave(store, MINE, byte_count, clean=False) for byte_count in (2 * MIB, 5 * MIB, 3 * MIB)}
    others = {leave(store, OTHER, 6 * MIB), leave(store, MINE, 7 * MIB, description={"geometry": {"blocks": [1, 3]}})}
    home = Store.open(store.path, boot_id="boot-2", clock=clock).acquire_home(MINE, GEOMETRY, CAP)
    assert not home.fresh
    assert (home.segments_path / "0" / "rank0.kv").stat().st_size == 5 * MIB
    assert ids(store) == {home.id, left[2 * MIB], left[3 * MIB], *others}
    home.close(clean=True)


@pytest.fixture
def indexed(store):
    """A home that was closed in order, with bytes for an index."""
    home = store.acquire_home(MINE, GEOMETRY, CAP)
    (home.index_path / "data.mdb").write_bytes(b"index")
    home.close(clean=True)
    return home


def taken(store, boot_id):
    return Store.open(store.path, boot_id=boot_id).acquire_home(MINE, GEOMETRY, CAP)


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
    home = taken(store, "boot-1")
    assert not home.index_is_sound()
    (home.index_path / "data.mdb").write_bytes(b"index")
    assert home.index_is_sound()
    home.close(clean=False)


def test_a_note_of_use_that_is_late_does_not_undo_the_clean_end(store, indexed, monkeypatch):
    home = taken(store, "boot-1")
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
    closer.join(0.5)  # it would end now, if it did not wait
    go_on.set()
    for thread in (marker, closer):
        thread.join()
    (summary,) = list_homes(store.path)
    assert summary.record.clean and summary.record.index_sum
    home.mark_used()
    assert list_homes(store.path)[0].record == summary.record


@pytest.mark.parametrize("how", ["absent", "index symlink"])
def test_what_is_no_index_is_not_sound_and_is_replaced(store, indexed, tmp_path, how):
    home = taken(store, "boot-1")
    data = home.index_path / "data.mdb"
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data.mdb").write_bytes(b"index")
    data.unlink()
    if how == "index symlink":
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


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "HOME").unlink(),
        lambda path: (path / "lock").unlink(),
        lambda path: ((path / "HOME").unlink(), os.mkfifo(path / "HOME")),
    ],
)
def test_a_home_that_is_not_complete_is_deleted_once_nobody_holds_it(store, damage):
    left = leave(store, MINE, MIB)
    damage(store.home_path(left))
    (summary,) = list_homes(store.path)
    assert summary.alive is False
    home = store.acquire_home(MINE, GEOMETRY, CAP)
    assert home.fresh
    assert ids(store) == {home.id}
    (home.path / "HOME").write_text("{")
    other = store.acquire_home(MINE, GEOMETRY, CAP)
    assert ids(store) == {home.id, other.id}, "a damaged HOME does not make its owner dead"
    for closed in (home, other):
        closed.close(clean=True)


def test_deletion_follows_no_symlink(store, tmp_path):
    left = leave(store, MINE, MIB)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("kept")
    (store.home_path(left) / "segments" / "7").symlink_to(tmp_path / "precious")
    (store.home_path(left) / "HOME").unlink()
    (store.path / "homes" / ("d" * 32)).symlink_to(tmp_path / "precious")
    (store.path / "homes" / "notes").mkdir()
    home = store.acquire_home(MINE, GEOMETRY, CAP)
    assert ids(store) == {home.id, "d" * 32, "notes"}
    assert (tmp_path / "precious" / "file").read_text() == "kept"
    for names in [("d" * 32, "file"), ("notes", ".."), ("a/b",)]:
        with pytest.raises((OSError, AssertionError)):
            paths.remove_anything(store.path / "homes", *names, first="HOME")
    paths.remove_anything(store.path / "homes", "d" * 32, first="HOME")
    assert (tmp_path / "precious" / "file").read_text() == "kept"
    home.close(clean=True)


def test_a_deletion_that_breaks_off_leaves_no_home_to_take_over(store, monkeypatch):
    left = leave(store, MINE, 40 * MIB, description=GEOMETRY)

    def breaks_off(name, *, dir_fd):
        raise OSError(errno.EIO, "Input/output error")

    breaks_off.avoids_symlink_attacks = True
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", breaks_off)
        assert not store.remove_home(left)
        home = store.acquire_home(MINE, GEOMETRY, CAP)
        assert home.fresh, "took over what could not be deleted"
        home.close(clean=True)
    home = store.acquire_home(OTHER, GEOMETRY, CAP)
    assert home.fresh
    assert left not in ids(store)
    home.close(clean=True)


def test_joining_is_by_id_and_fingerprint(store, tmp_path):
    home = store.acquire_home(MINE, GEOMETRY, CAP)
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
    assert list_homes(store.path)[0].alive, "the rank still has it"
    joined.close()
    joined.close()
    assert not list_homes(store.path)[0].alive


def test_a_home_that_goes_away_while_it_is_joined_is_not_joined(store, monkeypatch):
    left = leave(store, MINE, MIB)
    real = paths.wait_lock

    def after_the_deletion(fd, kind, timeout_s, what):
        shutil.rmtree(store.home_path(left))
        real(fd, kind, timeout_s, what)

    monkeypatch.setattr(paths, "wait_lock", after_the_deletion)
    with pytest.raises(StoreLocked, match=left):
        store.join_home(left, MINE)


def test_clean_is_said_after_all_bytes_are_synced(store, monkeypatch):
    home = store.acquire_home(MINE, GEOMETRY, CAP)
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
