# SPDX-License-Identifier: Apache-2.0
"""Which directory may be a store, how one is made, and the modes of all that is in it."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import fields
from pathlib import Path

import pytest

from kvdisk.device import paths
from kvdisk.device.control import DriveName, HomeRecord, read_record, write_record
from kvdisk.device.drives import check_directories
from kvdisk.device.store import Store
from kvdisk.errors import ConfigError, CorruptRecord

MINE = bytes(range(32))
CAP = 64 << 20


@pytest.mark.parametrize("umask", [0, 0o377])
def test_directories_are_0700_and_files_0600_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        home = Store.open(tmp_path / "store").acquire_home(MINE, {}, CAP)
        home.mark_used()
    finally:
        os.umask(before)
    found = {path.relative_to(tmp_path): path for path in (tmp_path / "store").rglob("*")}
    inside = Path("store/homes", home.id)
    expected = {inside, *(inside / name for name in ("HOME", "HOME.tmp", "lock", "index", "segments"))}
    assert set(found) == expected | {Path("store", name) for name in ("STORE", "lock", "homes")}
    for path in [tmp_path / "store", *found.values()]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    home.close(clean=True)


def _homes_elsewhere(path):
    Store.open(path)
    (path / "homes").rename(path.parent / "elsewhere")
    (path / "homes").symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.symlink_to(path.parent), "symbolic link"),
        (lambda path: (Store.open(path), path.chmod(0o702)), "can be written by others"),
        (lambda path: (path / "thesis").mkdir(parents=True), "holds other files .thesis"),
        (lambda path: (path / "homes" / ("a" * 32)).mkdir(parents=True), "is not a kvdisk store"),
        (lambda path: (Store.open(path), (path / "STORE").write_text('{"format_version": 2}')), "newer"),
        (_homes_elsewhere, "symbolic link"),
        (lambda path: path.write_text("a file"), "is not a directory"),
    ],
)
def test_what_is_not_fit_is_refused_in_one_sentence_and_left_alone(tmp_path, make, why):
    path = tmp_path / "store"
    make(path)
    before = sorted(tmp_path.rglob("*"))
    for create in (True, False):
        with pytest.raises(ConfigError, match=why) as caught:
            Store.open(path, create=create)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=why):
        check_directories(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_is_made_only_when_asked_and_only_in_a_place_of_ones_own(tmp_path, monkeypatch):
    for name, create in (("absent", False), ("absent/store", True), ("", False)):
        with pytest.raises(ConfigError):
            Store.open(tmp_path / name, create=create)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        Store.open(tmp_path)


@pytest.mark.parametrize("field", [field.name for field in fields(HomeRecord)])
def test_whatever_home_says_it_decodes_or_is_corrupt(tmp_path, field):
    record = HomeRecord(1, MINE, {}, "", True, CAP, 1, 1, 0, "", (DriveName("a" * 32, ""),))
    write_record(tmp_path, record)
    good = json.loads((tmp_path / "HOME").read_text())
    for value in (None, True, -1, 0, 1 << 70, 1.5, "", "x", "é" * 32, [], [None], [[]], [{}], {}, {"folder": []}):
        (tmp_path / "HOME").write_text(json.dumps(good | {field: value}))
        try:
            record = read_record(tmp_path)
        except CorruptRecord:
            continue
        write_record(tmp_path, record)
        assert read_record(tmp_path) == record


# -- a control file ----------------------------------------------------------------------------


def write(path: Path, number: int) -> None:
    paths.write_control(path, {"number": number, "long": "x" * 100})


@pytest.fixture
def written(tmp_path):
    """A control file that was written twice: what it was before lies beside it."""
    for number in range(2):
        write(tmp_path / "HOME", number)
    return tmp_path / "HOME"


def test_it_is_written_over_what_it_was_before_and_needs_no_room(written):
    beside = written.with_name("HOME.tmp")
    inodes, length = {written.stat().st_ino, beside.stat().st_ino}, written.stat().st_size
    for number in range(2, 5):
        write(written, number)
        assert (paths.read_control(written)["number"], written.stat().st_size) == (number, length)
    assert inodes == {written.stat().st_ino, beside.stat().st_ino}
    paths.write_control(written, {"long": "y" * 10_000})
    assert paths.read_control(written) == {"long": "y" * 10_000}


def test_what_would_not_be_read_again_is_not_written(written):
    """Else the engine store would be gone with the next start, which takes it for damaged."""
    before = written.read_bytes()
    with pytest.raises(OSError, match="File too large"):
        paths.write_control(written, {"long": "x" * (1 << 20)})
    assert written.read_bytes() == before
    paths.write_control(written, {"long": "x" * ((1 << 20) - 32)})
    assert len(paths.read_control(written)["long"]) == (1 << 20) - 32


def test_a_control_file_has_its_name_after_its_bytes_are_on_the_drive(written, monkeypatch):
    """Else a loss of power could leave an empty one."""
    done, sync, exchange = [], os.fsync, paths._exchange
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd)))
    monkeypatch.setattr(paths, "_exchange", lambda *names: (done.append("named"), exchange(*names))[1])
    write(written, 2)
    assert done == [f"{written}.tmp", "named", str(written.parent)]


def test_who_reads_it_by_another_name_or_slowly_reads_one_state(written, tmp_path, monkeypatch):
    (tmp_path / "copy").hardlink_to(written)
    real, numbers = paths.open_own, iter(range(2, 5))

    def slow(path, *how):
        fd = real(path, *how)
        if path == written:  # other threads of this process may read others
            for number in numbers:
                write(written, number)
        return fd

    monkeypatch.setattr(paths, "open_own", slow)
    assert paths.read_control(written)["number"] == 4, "of 3 it might have seen a part"
    assert paths.read_control(tmp_path / "copy")["number"] == 1


@pytest.mark.parametrize("damage", [os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_whatever_lies_beside_it_does_not_matter(written, damage):
    beside = written.with_name("HOME.tmp")
    beside.rename(beside.with_name("elsewhere"))
    damage(beside)
    for number in range(2, 5):
        write(written, number)
        assert paths.read_control(written)["number"] == number
    assert not beside.is_symlink() and beside.stat().st_size < 1000
