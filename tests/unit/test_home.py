# SPDX-License-Identifier: Apache-2.0
"""Homes as one process sees them; test_home_processes.py has the owners that die."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from kvdisk.device import paths
from kvdisk.device.store import Store, list_homes
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
    assert home.budget_bytes == CAP
    assert home.index_path.is_dir()
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
    }
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
    assert (summary.alive, summary.record.clean, summary.record.boot_id) == (True, False, "boot-2")
    assert (summary.record.cap_bytes, summary.record.created_s) == (2 * CAP, 1_000_000)
    assert summary.record.description["model"] == "the same under another name"
    with pytest.raises(DeviceError) as caught:
        store.join_home(old, MINE)
    assert caught.value.errno == errno.ENOENT
    home.close(clean=True)


def test_a_home_with_a_live_owner_is_not_taken_over(store):
    first = store.acquire_home(MINE, GEOMETRY, CAP)
    second = store.acquire_home(MINE, GEOMETRY, CAP)
    assert second.fresh
    assert ids(store) == {first.id, second.id}
    for home in (first, second):
        home.close(clean=True)


def test_the_fullest_orphan_is_taken_over(store):
    left = {byte_count: leave(store, MINE, byte_count) for byte_count in (2 * MIB, 5 * MIB, 3 * MIB)}
    home = store.acquire_home(MINE, GEOMETRY, CAP)
    assert (home.segments_path / "0" / "rank0.kv").stat().st_size == 5 * MIB
    assert ids(store) == {home.id, left[2 * MIB], left[3 * MIB]}
    assert home.budget_bytes == CAP - home.foreign_bytes()
    assert 5 * MIB <= home.foreign_bytes() < 6 * MIB
    home.close(clean=True)


@pytest.mark.parametrize("what", ["fingerprint", "geometry"])
def test_a_home_of_other_contents_is_kept_and_not_taken_over(store, what):
    leave(store, OTHER if what == "fingerprint" else MINE, MIB)
    geometry = GEOMETRY if what == "fingerprint" else {"geometry": {"blocks": [1, 3]}}
    home = store.acquire_home(MINE, geometry, CAP)
    assert home.fresh
    assert len(ids(store)) == 2
    assert MIB <= CAP - home.budget_bytes == home.foreign_bytes() < 2 * MIB
    home.close(clean=True)


def test_orphans_may_keep_half_the_cap_and_the_least_recently_used_goes_first(store, clock):
    left = []
    for fingerprint in (b"a" * 32, b"b" * 32, b"c" * 32):
        clock.now += 10
        left.append(leave(store, fingerprint, 10 * MIB))
    # The oldest home is used once more, so that the second is the one to go.
    edit(store, left[0], last_use_s=int(clock.now) + 5)
    home = store.acquire_home(MINE, GEOMETRY, 44 * MIB)
    assert ids(store) == {home.id, left[0], left[2]}
    assert 20 * MIB <= home.foreign_bytes() < 22 * MIB
    assert home.budget_bytes == 44 * MIB - home.foreign_bytes()
    home.close(clean=True)


def test_what_a_taken_over_home_has_goes_before_orphans(store):
    leave(store, OTHER, 10 * MIB)
    leave(store, MINE, 40 * MIB)
    home = store.acquire_home(MINE, GEOMETRY, 48 * MIB)
    assert not home.fresh
    assert ids(store) == {home.id}
    assert home.budget_bytes == 48 * MIB
    assert 40 * MIB <= home.allocated_bytes() < 41 * MIB
    home.close(clean=True)


def test_room_is_made_from_orphans_and_never_from_live_owners(store, clock):
    live = store.acquire_home(OTHER, GEOMETRY, CAP)
    put(live, 20 * MIB)
    old = leave(store, b"a" * 32, 10 * MIB)
    clock.now += 10
    new = leave(store, b"b" * 32, 10 * MIB)
    home = store.acquire_home(MINE, GEOMETRY, CAP)
    put(home, 30 * MIB)
    os.truncate(home.segments_path / "0" / "rank0.kv", 2 * CAP)  # a length that takes no room
    assert 13 * MIB <= home.make_room(13 * MIB) < 14 * MIB, "both orphans fit beside that"
    assert {old, new} < ids(store)
    more = home.make_room(20 * MIB)
    assert ids(store) == {live.id, home.id, new}
    assert 20 * MIB <= more == home.budget_bytes - home.allocated_bytes()
    assert home.budget_bytes == CAP - home.foreign_bytes()
    more = home.make_room(2 * CAP)
    assert ids(store) == {live.id, home.id}
    assert more == CAP - home.allocated_bytes()
    put(home, CAP + MIB, name="1")
    assert home.make_room(1) == 0
    for closed in (live, home):
        closed.close(clean=True)


def test_after_a_crash_of_the_machine_only_a_clean_home_is_trusted(store, clock):
    dirty = leave(store, MINE, MIB, clean=False)
    clean = leave(store, MINE, MIB, clean=True)
    foreign = leave(store, OTHER, MIB, clean=False)
    (store.home_path(clean) / "index" / "mark").write_text("clean")
    later = Store.open(store.path, boot_id="boot-2", clock=clock)
    home = later.acquire_home(MINE, GEOMETRY, CAP)
    assert (home.index_path / "mark").read_text() == "clean"
    assert ids(store) == {home.id, foreign}
    assert dirty not in ids(store)
    home.close(clean=False)
    again = Store.open(store.path, boot_id="boot-3", clock=clock).acquire_home(MINE, GEOMETRY, CAP)
    assert again.fresh
    again.close(clean=True)


def test_in_the_same_boot_a_home_is_trusted_though_not_clean(store):
    leave(store, MINE, MIB, clean=False)
    home = store.acquire_home(MINE, GEOMETRY, CAP)
    assert not home.fresh
    home.close(clean=True)


def _damage(name):
    def remove(path):
        (path / name).unlink() if (path / name).is_file() else (path / name).rmdir()

    return remove


@pytest.mark.parametrize(
    "damage",
    [
        _damage("HOME"),
        _damage("lock"),
        _damage("index"),
        lambda path: (path / "HOME").write_text("{"),
        lambda path: (path / "HOME").write_text("[]"),
        lambda path: (path / "HOME").write_text((path / "HOME").read_text().replace('"clean"', '"neat"')),
        lambda path: (path / "HOME").write_text((path / "HOME").read_text().replace(": true", ": 1")),
        lambda path: (path / "HOME").write_text(
            (path / "HOME").read_text().replace('"format_version": 1', '"format_version": 2')
        ),
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
    for names in [("d" * 32,), ("d" * 32, "file"), ("notes", "..")]:
        with pytest.raises((OSError, AssertionError)):
            paths.remove_directory(store.path / "homes", *names, first="HOME")
    for name in ["..", ".", "", "a/b", "/tmp"]:  # noqa: S108 - refused
        with pytest.raises(AssertionError):
            paths.remove_directory(store.path / "homes", name, first="HOME")
    assert (tmp_path / "precious" / "file").read_text() == "kept"
    home.close(clean=True)


def test_a_deletion_that_breaks_off_leaves_no_home_to_take_over(store, monkeypatch):
    leave(store, MINE, MIB, description=GEOMETRY, clean=False)
    left = leave(store, OTHER, 40 * MIB, description=GEOMETRY)
    store = Store.open(store.path, boot_id="boot-2")

    def breaks_off(name, *, dir_fd):
        raise OSError(errno.EIO, "Input/output error")

    breaks_off.avoids_symlink_attacks = True
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", breaks_off)
        home = store.acquire_home(MINE, GEOMETRY, CAP)
        assert home.fresh, "took over what could not be deleted"
        assert CAP - 42 * MIB < home.budget_bytes < CAP - 41 * MIB, "what could not go is still charged"
        home.close(clean=True)
    assert not (store.home_path(left) / "HOME").exists()
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


def test_a_home_that_cannot_be_synced_is_released_and_not_clean(store, monkeypatch):
    home = store.acquire_home(MINE, GEOMETRY, CAP)

    def fails(fd):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(DeviceError) as caught:
            home.close(clean=True)
    assert caught.value.errno == errno.EIO
    (summary,) = list_homes(store.path)
    assert (summary.alive, summary.record.clean) == (False, False)


def test_mark_used_moves_the_last_use(store, clock):
    home = store.acquire_home(MINE, GEOMETRY, CAP)
    clock.now += 500
    home.mark_used()
    (summary,) = list_homes(store.path)
    assert (summary.record.last_use_s, summary.record.created_s) == (1_000_500, 1_000_000)
    assert not summary.record.clean
    home.close(clean=True)
    with pytest.raises(AssertionError):
        home.mark_used()


def test_listing_says_everything_and_writes_nothing(store):
    left = leave(store, OTHER, 3 * MIB)
    home = store.acquire_home(MINE, GEOMETRY, CAP)
    put(home, MIB, name="12")

    def snapshot():
        found = [store.path, *sorted(store.path.rglob("*"))]
        return [(path, path.lstat().st_mtime_ns, path.lstat().st_ctime_ns) for path in found]

    before = snapshot()
    summaries = {summary.id: summary for summary in list_homes(store.path)}
    assert snapshot() == before
    assert summaries.keys() == {left, home.id}
    assert summaries[home.id].alive
    assert not summaries[left].alive
    assert [(file.segment, file.rank, file.length_bytes) for file in summaries[home.id].segments] == [(12, 0, MIB)]
    assert 3 * MIB <= summaries[left].segments[0].allocated_bytes <= summaries[left].allocated_bytes < 4 * MIB
    assert summaries[left].record.fingerprint == OTHER
    assert summaries[home.id].segments_path == home.segments_path
    home.close(clean=True)


def test_a_discarded_home_is_gone_and_never_taken_over(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    home = store.acquire_home(b"f" * 32, {"geometry": {}}, 1 << 20)
    home.discard()
    assert not home.path.exists()
    assert list_homes(tmp_path / "store") == []
    again = store.acquire_home(b"f" * 32, {"geometry": {}}, 1 << 20)
    assert again.fresh
    again.close(clean=True)
