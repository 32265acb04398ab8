# SPDX-License-Identifier: Apache-2.0
"""Another user who may rename what leads to a store, as in a volume of mode 0777 without a sticky
bit, and puts a store of their own in its place while an engine runs.

Both users are real, and so is all that each of them does, in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.drive_blocks import FACTS, NAMESPACE, make_room
from support.users import user

from kvdisk.blocks import make_block_key
from kvdisk.config import Config
from kvdisk.device import paths
from kvdisk.device.home_lock import HomeLock
from kvdisk.device.segment import DriveFolder, drop_segment, open_segment
from kvdisk.device.store import Store
from kvdisk.errors import ConfigError, DeviceError, KvdiskError
from kvdisk.index import neighbour_reader
from kvdisk.index.lmdb_tables import LmdbTables
from kvdisk.messages import ForeignSegment, SegmentSpec
from kvdisk.store import BlockKind, BlockStore, Get, Presence, Put, Result

ME, STRANGER = 12345, 12346
ROWS, ROW_BYTES, COUNT, CAP = 16, 8192, 8, 64 << 20
KEYS = [make_block_key(f"block {number}".encode().ljust(32), 0) for number in range(COUNT)]
MINE, THEIRS = 7, 8
"""What fills each row: of the blocks that this user stored, and of those of the other."""
ROUNDS = 150
"""How often an engine asks for what it must not be given. It was given it in the second."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")


@pytest.fixture
def volume() -> Iterator[Path]:
    """A directory that all users may write in, without a sticky bit."""
    around = Path(tempfile.mkdtemp())
    around.chmod(0o755)
    made = around / "kv"
    made.mkdir()
    made.chmod(0o777)
    keep(around / "imports", MINE)  # what other users may not read
    yield made
    shutil.rmtree(around)


class Process:
    """Another user, in a process that does something. ``wait_for`` in it waits for ``tell``."""

    def __init__(self, uid: int, act: Callable[[Process], object]) -> None:
        self._from_parent, self._to_child = os.pipe()
        self._from_child, self._to_parent = os.pipe()
        self._child = os.fork()
        if not self._child:
            with user(uid):
                os.setresuid(uid, uid, uid)  # for good
                code = 1
                try:
                    act(self)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                finally:
                    os._exit(code)
        os.close(self._to_parent)

    def pause(self) -> None:
        """In the process: let the test go on, and wait until it says so."""
        os.write(self._to_parent, b"!")
        assert os.read(self._from_parent, 1)

    def await_pause(self) -> None:
        """Wait until the process pauses."""
        assert os.read(self._from_child, 1), "it has failed"

    def end(self) -> None:
        """Let it go on; fail where it fails."""
        os.write(self._to_child, b"!")
        assert os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1]) == 0


def as_user(uid: int, act: Callable[[], object]) -> None:
    """Do something as another user, to the end. Fails where it fails."""
    Process(uid, lambda _: act()).end()


@contextmanager
def opened(volume: Path, fill: int = 0) -> Iterator[tuple[BlockStore, np.ndarray]]:
    rows = np.full((ROWS, ROW_BYTES), fill, np.uint8)
    config = Config.from_mapping(
        {"store_dirs": str(volume), "nvme_bytes": CAP, "segment_bytes": "1MiB", "index_commit_s": 0.005}
    )
    store = BlockStore.open(config, NAMESPACE, FACTS, [BlockKind(ROW_BYTES)], rows)
    try:
        yield store, rows
    finally:
        store.close()


def results(store: BlockStore, tag: int) -> list[Result]:
    while True:
        store.step(time.monotonic())
        for ended in store.poll(0.01):
            assert ended.tag == tag
            return list(ended.results)


def keep(volume: Path, fill: int) -> None:
    """Leave a store with all the blocks, whose rows are filled so."""
    with opened(volume, fill) as (store, _):
        make_room(store)
        store.reached("a request", KEYS)
        store.put(1, [Put(key, None, row) for row, key in enumerate(KEYS)])
        assert set(results(store, 1)) == {Result.DONE}


def loaded(store: BlockStore, rows: np.ndarray) -> set[int]:
    """Ask others for the blocks, load what they have, and return what fills it."""
    for _ in range(ROUNDS):
        store.ask(KEYS)
        store.step(time.monotonic())
        store.poll(0.02)
        if store.presence(KEYS) == bytes([Presence.READY] * COUNT):
            break
    rows[:] = 0
    store.get(2, [Get(key, row) for row, key in enumerate(KEYS)])
    done = [row for row, result in enumerate(results(store, 2)) if result is Result.DONE]
    return set(rows[done].ravel().tolist())


def replace(volume: Path) -> None:
    """Put a store of one's own, which all can read and write, in the place of the other user's."""
    mine = volume / f"kvdisk-{STRANGER}"
    for path in (mine, *mine.rglob("*")):
        path.chmod(path.stat().st_mode | (0o077 if path.is_dir() else 0o066))
    (volume / f"kvdisk-{ME}").rename(volume / "away")
    mine.rename(volume / f"kvdisk-{ME}")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_an_engine_loads_what_its_own_user_stored_and_nothing_else(volume, monkeypatch, is_replaced):
    monkeypatch.setattr(neighbour_reader, "LOOK_INTERVAL_S", 0.01)

    def serve(process: Process) -> None:
        with opened(volume) as (store, rows):
            make_room(store)
            process.pause()
            assert loaded(store, rows) == (set() if is_replaced else {MINE})

    engine = Process(ME, serve)
    engine.await_pause()
    if is_replaced:
        as_user(STRANGER, lambda: (keep(volume, THEIRS), replace(volume)))
    else:
        as_user(ME, lambda: keep(volume, MINE))
    engine.end()


# -- the steps of an engine, each by itself ------------------------------------------------------


def listed(path: Path) -> dict[str, tuple[int, ...]]:
    """Return what lies in a directory, and what changes where somebody writes there."""
    found = {}
    for each in (path, *path.rglob("*")):
        status = each.lstat()
        found[str(each)] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def make_home(volume: Path, home_id: str | None = None) -> tuple[Store, str]:
    """Make a store with an engine store, under an id, and a segment in it."""
    store = Store.open(volume)
    home = store.acquire_home(NAMESPACE, FACTS, CAP)
    joined = store.join_home(home.id, NAMESPACE)
    store.make_segment(joined, SEGMENT, 0, 1).close()
    joined.close()
    home.await_index()
    home.close(clean=True)
    if home_id is not None:
        home.path.rename(home.path.with_name(home_id))
    return store, home_id or home.id


SEGMENT = SegmentSpec(0, 8192, 8)
STEPS: dict[str, Callable[[Store, str], object]] = {
    "own the home": lambda store, _: store.acquire_home(NAMESPACE, FACTS, CAP).close(clean=True),
    "join the home": lambda store, home_id: store.join_home(home_id, NAMESPACE).close(),
    "tidy": lambda store, _: store.tidy(),
    "delete it": lambda store, home_id: store.remove_home(home_id),
    "find a file of its own": lambda store, home_id: store.foreign_folder(ForeignSegment(home_id, 0), 0),
    "open a file of it": lambda store, home_id: open_segment(
        DriveFolder(store.home_path(home_id)), SEGMENT, 0, 1, NAMESPACE
    ).close(),
    "remove files of it": lambda store, home_id: drop_segment(DriveFolder(store.home_path(home_id)), 0, None),
    "read an index": lambda store, home_id: LmdbTables(store.home_path(home_id) / "index", readonly=True).close(),
    "take a lock": lambda store, home_id: HomeLock.join(store.home_path(home_id), 0.0, "a test").release(),
}


@pytest.mark.parametrize("step", STEPS)
def test_what_was_put_in_the_place_of_a_store_is_neither_read_nor_changed(volume, step):
    with user(ME):
        store, home_id = make_home(volume)
        LmdbTables(store.home_path(home_id) / "index", 1 << 20).close()
    with user(STRANGER):
        other, _ = make_home(volume, home_id)
        LmdbTables(other.home_path(home_id) / "index", 1 << 20).close()
        replace(volume)
    before = listed(volume)
    with user(ME):
        with pytest.raises((KvdiskError, PermissionError, FileNotFoundError)):
            STEPS[step](store, home_id)
        with pytest.raises(ConfigError, match=f"belongs to user {STRANGER}, not to user {ME}"):
            Store.open(volume)
    assert listed(volume) == before


def test_a_link_in_the_place_of_a_store_leads_to_no_other_store_of_the_same_user(volume):
    with user(ME):
        store, home_id = make_home(volume)
        elsewhere, other_id = make_home(volume / "of its own")
    with user(STRANGER):
        (volume / f"kvdisk-{ME}").rename(volume / "away")
        (volume / f"kvdisk-{ME}").symlink_to(elsewhere.path)
    before = listed(volume)
    with user(ME):
        for step in ("own the home", "tidy"):
            with pytest.raises(KvdiskError):
                STEPS[step](store, home_id)
        with pytest.raises(KvdiskError):
            store.remove_home(other_id)
    assert listed(volume) == before


def test_a_directory_of_the_same_user_in_the_place_of_a_store_is_left_alone(volume):
    """As where somebody moves the store and makes it anew while an engine runs."""
    with user(ME):
        store, _ = make_home(volume)
        elsewhere, other_id = make_home(volume / "of its own")
        (volume / f"kvdisk-{ME}").rename(volume / "away")
        elsewhere.path.rename(volume / f"kvdisk-{ME}")
        before = listed(volume)
        with pytest.raises(DeviceError, match="another directory is in its place"):
            store.remove_home(other_id)
    assert listed(volume) == before


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
@pytest.mark.parametrize("owner", [0, ME, STRANGER])
def test_a_file_is_opened_where_this_user_or_root_alone_could_have_written_it(volume, mode, owner):
    file = volume.parent / "imports" / "file"
    file.write_bytes(b"bytes")
    os.chown(file, owner, owner)
    file.chmod(mode)
    file.parent.chmod(0o755)
    os.chown(file.parent, ME, ME)
    with user(ME, 0):
        if owner == STRANGER or mode == 0o666 or (owner == 0 and mode == 0o600):
            with pytest.raises(PermissionError):
                os.close(paths.open_own(file, os.O_RDONLY))
        else:
            fd = paths.open_own(file, os.O_RDONLY)
            assert os.read(fd, 10) == b"bytes"
            os.close(fd)
    file.chmod(0o600)
    os.chown(file, ME, ME)
    for of, way in ((STRANGER, 0o755), (ME, 0o757)):
        os.chown(file.parent, of, of)
        file.parent.chmod(way)
        with user(ME), pytest.raises(PermissionError, match=r"belongs to user 12346|can be written by others"):
            paths.open_own(file, os.O_RDONLY)


@pytest.mark.parametrize("times", [1, 1000])
def test_a_file_that_was_opened_elsewhere_than_in_the_directory_that_was_checked_is_not_used(
    volume, monkeypatch, times
):
    """The file is this user's own, and the other user has moved it into a directory of theirs."""
    place, others = volume / "place", volume / "others"
    for directory, owner in ((place, STRANGER), (others, ME)):
        directory.mkdir()
        os.chown(directory, owner, owner)
        (directory / "HOME").write_text(f"of {owner}")
        os.chown(directory / "HOME", ME, ME)
    swaps, real = [], paths.open_regular

    def opening(path: Path, flags: int) -> int:
        fd = real(path, flags)
        if len(swaps) < times:
            swaps.append(place.rename(volume / "between"))
            others.rename(place)
            (volume / "between").rename(others)
        return fd

    monkeypatch.setattr(paths, "open_regular", opening)
    with user(ME):
        if times > 1:
            with pytest.raises(PermissionError):
                paths.open_own(place / "HOME", os.O_RDONLY)
            return
        with os.fdopen(paths.open_own(place / "HOME", os.O_RDONLY)) as file:
            assert file.read() == f"of {ME}"
