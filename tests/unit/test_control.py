# SPDX-License-Identifier: Apache-2.0
"""Which directory may be a store, how one is made, and the modes of all that is in it."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import fields as dataclass_fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdisk.device import paths
from kvdisk.device.control import HomeRecord, read_record, read_store, write_record
from kvdisk.device.listing import list_homes
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


def _symlink(path, patch):
    path.with_name("real").mkdir(0o700)
    path.symlink_to(path.with_name("real"))


def _foreign(path, patch):
    path.mkdir(0o700)
    patch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


def _writable(bits):
    def make(path, patch):
        path.mkdir()
        path.chmod(0o700 | bits)

    return make


def _occupied(path, patch):
    path.mkdir(0o700)
    (path / "thesis.txt").write_text("mine")


def _homes_alone(path, patch):
    (path / "homes" / ("a" * 32)).mkdir(parents=True)


def _newer(path, patch):
    Store.open(path)
    (path / "STORE").write_text(json.dumps({"format_version": 2}))


def _homes_elsewhere(path, patch):
    Store.open(path)
    (path / "homes").rename(path.parent / "elsewhere")
    (path / "homes").symlink_to(path.parent / "elsewhere")


def _file(path, patch):
    path.write_text("a file")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_symlink, "symbolic link"),
        (_foreign, "belongs to user"),
        (_writable(0o020), "can be written by others"),
        (_writable(0o002), "can be written by others"),
        (_occupied, "thesis.txt"),
        (_homes_alone, "is not a kvdisk store"),
        (_newer, "newer"),
        (_homes_elsewhere, "symbolic link"),
        (_file, "is not a directory"),
    ],
)
def test_what_is_not_fit_is_refused_in_one_sentence_and_left_alone(tmp_path, monkeypatch, make, why):
    path = tmp_path / "store"
    make(path, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    for create in (True, False):
        with pytest.raises(ConfigError, match=why) as caught:
            Store.open(path, create=create)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_is_made_only_when_asked_and_only_where_there_is_a_place(tmp_path):
    with pytest.raises(ConfigError, match="not a directory"):
        Store.open(tmp_path / "absent", create=False)
    with pytest.raises(ConfigError, match=str(tmp_path / "absent")):
        Store.open(tmp_path / "absent" / "store")
    (tmp_path / "empty").mkdir(0o755)
    with pytest.raises(ConfigError, match="not a kvdisk store"):
        Store.open(tmp_path / "empty", create=False)
    assert not list((tmp_path / "empty").iterdir())
    Store.open(tmp_path / "empty")
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o700


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [field.name for field in dataclass_fields(HomeRecord)]


@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_home_says_it_decodes_or_is_corrupt(tmp_path, changes):
    store = Store.open(tmp_path / "store")
    if not list_homes(store.path):
        store.acquire_home(MINE, {}, CAP).close(clean=True)
    (home,) = (store.path / "homes").iterdir()
    good = json.loads((home / "HOME").read_text())
    (home / "HOME").write_text(json.dumps(good | changes))
    try:
        record = read_record(home)
    except CorruptRecord:
        pass
    else:
        write_record(home, record, durable=False)
        assert read_record(home) == record
    finally:
        (home / "HOME").write_text(json.dumps(good))


@given(raw=st.binary(max_size=200) | st.just(b"[" * 200_000))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_bytes_store_has_it_is_refused_in_words(tmp_path, raw):
    (tmp_path / "STORE").write_bytes(raw)
    with pytest.raises((CorruptRecord, ConfigError)):
        read_store(tmp_path)


@pytest.fixture
def written(tmp_path):
    """A control file that was written twice: what it was before lies beside it."""
    for number in range(2):
        paths.write_control(tmp_path / "HOME", {"number": number, "long": "x" * 100}, durable=True)
    return tmp_path / "HOME"


def test_a_control_file_is_written_over_what_it_was_before(written):
    inodes = {written.stat().st_ino, written.with_name("HOME.tmp").stat().st_ino}
    length = written.stat().st_size
    for number in range(2, 5):
        paths.write_control(written, {"number": number}, durable=True)
        assert paths.read_control(written) == {"number": number}
        assert written.stat().st_size == length, "no byte is allocated or freed"
    assert inodes == {written.stat().st_ino, written.with_name("HOME.tmp").stat().st_ino}
    paths.write_control(written, {"number": 5, "long": "y" * 10_000}, durable=True)
    assert paths.read_control(written) == {"number": 5, "long": "y" * 10_000}


def test_a_control_file_has_its_name_after_its_bytes_are_on_the_drive(written, monkeypatch):
    """Else a loss of power could leave an empty one."""
    done, sync, exchange = [], os.fsync, paths._exchange
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd)))
    monkeypatch.setattr(paths, "_exchange", lambda *names: (done.append("named"), exchange(*names))[1])
    paths.write_control(written, {"number": 2}, durable=True)
    assert done == [f"{written}.tmp", "named", str(written.parent)]


def test_a_copy_by_hard_links_keeps_its_control_file(written, tmp_path):
    (tmp_path / "copy").hardlink_to(written)
    for number in range(2, 5):
        paths.write_control(written, {"number": number}, durable=True)
    assert paths.read_control(tmp_path / "copy")["number"] == 1
    assert paths.read_control(written) == {"number": 4}


def test_a_slow_reader_reads_again_what_may_have_been_written_over(written, monkeypatch):
    real, numbers = os.fdopen, iter(range(2, 5))

    def slow(fd, *how):
        for number in numbers:
            paths.write_control(written, {"number": number}, durable=True)
        return real(fd, *how)

    monkeypatch.setattr(paths.os, "fdopen", slow)
    assert paths.read_control(written) == {"number": 4}, "of 3 it might have seen a part"


def _to_symlink(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("damage", [os.mkfifo, _to_symlink, lambda path: path.write_bytes(bytes(1 << 20))])
def test_whatever_lies_beside_a_control_file_does_not_matter(written, damage):
    beside = written.with_name("HOME.tmp")
    if damage is not _to_symlink:
        beside.unlink()
    damage(beside)
    for number in range(2, 5):
        paths.write_control(written, {"number": number}, durable=True)
        assert paths.read_control(written) == {"number": number}
    assert not beside.is_symlink() and beside.stat().st_size < 1000
