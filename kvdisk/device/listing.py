# SPDX-License-Identifier: Apache-2.0
"""What homes a store has, as tools see them, and as an engine sees those of its neighbours."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.device import paths
from kvdisk.device.control import (
    HOME_FILE,
    HOMES,
    INDEX,
    LOCK_FILE,
    DriveFolder,
    HomeRecord,
    HomeSummary,
    home_ids,
    read_record,
)
from kvdisk.device.drives import Directories
from kvdisk.device.segment import SegmentFileSummary, scan_segments
from kvdisk.device.store import Store
from kvdisk.errors import CorruptRecord

_TICK_NS = 100_000_000


def list_homes(directories: Directories) -> list[HomeSummary]:
    """Describe every home of a store, by id. Writes nothing.

    ``directories``: the store's first, and those of the others that shall be looked into. Holds the
    store lock while it tries the homes' locks, not while it measures. Raises as ``Store.open``.
    """
    store = Store.open(directories, create=False)
    with store.locked(readonly=True):
        alive = {home_id: _is_owned(store, home_id) for home_id in home_ids(store.path)}
    homes = []
    for home_id in sorted(alive):
        path = store.home_path(home_id)
        record = None
        with paths.device_errors(f"reading home {home_id}"):
            with suppress(FileNotFoundError, CorruptRecord):
                record = read_record(path)
            allocated_bytes = store.measure(home_id, record)
            folders = store.folders(home_id, record) if record else (DriveFolder(path),)
            segments = scan_folders(folders)
        homes.append(HomeSummary(home_id, path, record, alive[home_id], allocated_bytes, segments, folders))
    return homes


class HomeOwner(NamedTuple):
    """A home as ``list_owners`` found it. ``alive``: a process of its owner lives."""

    id: str
    path: Path
    record: HomeRecord | None
    alive: bool


def list_owners(directories: Directories, timeout_s: float) -> list[HomeOwner]:
    """Say of every home of a store, by id, whether it has an owner. Writes and measures nothing.

    For those who look again and again. Waits so long for the store lock; raises as ``Store.open``.
    """
    store = Store.open(directories, create=False, need_all=False)
    with store.locked(readonly=True, timeout_s=timeout_s):
        alive = {home_id: _is_owned(store, home_id) for home_id in home_ids(store.path)}
    owners = []
    for home_id in sorted(alive):
        path, record = store.home_path(home_id), None
        with suppress(OSError, CorruptRecord):
            record = read_record(path)
        if record is not None or os.path.lexists(path):  # it can be gone by now
            owners.append(HomeOwner(home_id, path, record, alive[home_id]))
    return owners


def scan_folders(folders: tuple[DriveFolder | None, ...]) -> tuple[SegmentFileSummary, ...]:
    """List the segment files of a home on all its drives, by segment and rank. Raises OSError."""
    found = [scan_segments(folder.segments_path, drive) for drive, folder in enumerate(folders) if folder is not None]
    return tuple(sorted(summary for of_drive in found for summary in of_drive))


def _is_owned(store: Store, home_id: str) -> bool:
    try:
        fd = paths.open_regular(store.home_path(home_id) / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    if fd < 0:
        return False
    try:
        return not paths.try_lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


class ReadableHome(NamedTuple):
    """Another engine's home, or an orphan. ``index_path``: its LMDB environment, to be read.

    ``stamp`` changes when the index at that path becomes another one; the id when the home's owner
    does.
    """

    id: str
    index_path: Path
    stamp: tuple[int, ...]


class ReadableHomes:
    """The homes of a store that an engine may read. One thread calls everything.

    Takes no lock, and looks only into what has changed: cheap enough for every few milliseconds.
    """

    def __init__(self, store: Store) -> None:
        self._store_path = store.path
        self._homes = str(store.path / HOMES)  # paths as text: this is asked for often
        self._boot_id = store.boot_id
        self._listed_at: tuple[int, int] | None = None
        self._ids: list[str] = []
        self._records: dict[str, tuple[tuple[int, int], HomeRecord | None]] = {}
        self._geometry: tuple[object, object] = (None, None)

    def find(self, fingerprint: bytes, description: dict[str, Any], except_id: str) -> list[ReadableHome]:
        """List the readable homes of this fingerprint and geometry, by id. Raises DeviceError."""
        with paths.device_errors(f"looking into the store {self._store_path}"):
            return self._find(fingerprint, description, except_id)

    def _find(self, fingerprint: bytes, description: dict[str, Any], except_id: str) -> list[ReadableHome]:
        if self._geometry[0] is not description:
            self._geometry = (description, json.loads(json.dumps(description)))
        wanted = self._geometry[1]
        assert isinstance(wanted, dict)
        self._list()
        found = []
        for home_id in self._ids:
            record = self._record(home_id) if home_id != except_id else None
            # An index that was not closed in order is whole only while the machine that wrote it
            # runs.
            if record and record.suits(fingerprint, wanted) and (record.index_sum or record.boot_id == self._boot_id):
                index_path = f"{self._homes}/{home_id}/{INDEX}"
                with suppress(FileNotFoundError, NotADirectoryError):
                    status = os.lstat(index_path)
                    if not stat.S_ISDIR(status.st_mode):
                        continue
                    found.append(ReadableHome(home_id, Path(index_path), (status.st_ino, status.st_mtime_ns)))
        return found

    def _list(self) -> None:
        try:
            status = os.lstat(self._homes)
        except FileNotFoundError:
            self._ids, self._listed_at = [], None
            return
        if self._listed_at != (status.st_ino, status.st_mtime_ns):
            self._ids = home_ids(self._store_path)
            # A second change within a tick of the file system's clock would not show.
            settled = abs(time.time_ns() - status.st_mtime_ns) > _TICK_NS
            self._listed_at = (status.st_ino, status.st_mtime_ns) if settled else None
            self._records = {home_id: found for home_id, found in self._records.items() if home_id in self._ids}

    def _record(self, home_id: str) -> HomeRecord | None:
        path = f"{self._homes}/{home_id}"
        try:
            status = os.lstat(f"{path}/{HOME_FILE}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        at = (status.st_ino, status.st_mtime_ns)
        known = self._records.get(home_id)
        if known is None or known[0] != at:
            record = None
            try:
                record = read_record(Path(path))
            except CorruptRecord:
                pass
            except OSError:
                return None  # one home that cannot be read now shall not hide the others
            known = self._records[home_id] = (at, record)
        return known[1]
