# SPDX-License-Identifier: Apache-2.0
"""The store directory and its homes: who owns which, and how many bytes an engine may allocate.

Under ``<store_dir>`` lie ``STORE``, ``lock`` and ``homes/<id>/{HOME,lock,index/,segments/}``. Every process of
an owner holds a shared flock on its home's ``lock`` for its life, through a descriptor that it opened itself
(a flock belongs to the open file, so one that came by a fork would be the parent's). A home whose lock can be
taken exclusively is an orphan. That is tried only while holding the store's ``lock``, so two who try never
take each other for an owner.

A home's id lasts for one owner: a takeover renames it. So a worker that was started by the owner before
finds no such home, instead of writing into one that another engine has taken over.

Kept orphans are charged to the engine that started last: its ``budget_bytes`` is its cap less their bytes. An
engine that started earlier, and outlives an owner that died since, is not charged until it calls ``make_room``.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.device import paths
from kvdisk.device.control import (
    HOME_FILE,
    HOMES,
    INDEX,
    LOCK_FILE,
    SEGMENTS,
    STORE_FILE,
    HomeRecord,
    HomeSummary,
    check_directory,
    complete_record,
    home_ids,
    is_home_id,
    is_store,
    read_record,
    write_record,
)
from kvdisk.device.home import Home, JoinedHome
from kvdisk.device.segment import scan_segments
from kvdisk.errors import ConfigError, CorruptRecord, GeometryMismatch, StoreLocked
from kvdisk.geometry import FINGERPRINT_BYTES, FORMAT_VERSION

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
STORE_LOCK_TIMEOUT_S = 120.0


class Orphan(NamedTuple):
    """A home without a live owner; ``record`` is None where it is not complete. Locked while the store is."""

    id: str
    record: HomeRecord | None
    allocated_bytes: int
    lock_fd: int


class Store:
    """A store directory. Made by ``open``; holds no descriptor and no lock between calls.

    ``boot_id`` and ``clock`` (seconds since the Unix epoch) are there for tests.
    """

    def __init__(self, path: Path, *, boot_id: str | None, clock: Callable[[], float]) -> None:
        self.path = path
        self._boot_id = boot_id if boot_id is not None else _boot_id()
        self._clock = clock

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        create: bool = True,
        *,
        boot_id: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Store:
        """Open a store, or with ``create`` make one (its parent must exist; the directory may, if empty).

        Raises ConfigError where the directory is not fit to be a store or is one of another format,
        CorruptRecord where STORE does not decode, StoreLocked, DeviceError.
        """
        path = Path(path).absolute()
        with paths.device_errors(f"opening the store {path}"):
            store = cls(path, boot_id=boot_id, clock=clock)
            if create and not os.path.lexists(path):
                if not path.parent.is_dir():
                    raise ConfigError(f"store_dirs: {path.parent}, where {path} would be made, is not a directory")
                paths.make_directory(path, exist_ok=True)
            check_directory(path)
            complete = is_store(path) and os.path.lexists(path / LOCK_FILE)
            if not complete and not create:
                raise ConfigError(f"store_dirs: {path} is not a kvdisk store")
            if not complete:
                store._make()
        return store

    def acquire_home(self, fingerprint: bytes, description: dict[str, Any], cap_bytes: int) -> Home:
        """Take over the fullest orphan of this fingerprint and geometry, or make a home. HOME then says *not clean*.

        Deleted are: orphans that are not complete, those of this fingerprint whose last owner went down with the
        machine (rebuilding them from their headers comes later), and then, oldest use first, those that leave less
        than half of ``cap_bytes``, or than what the home taken over has, for this home. ``cap_bytes``: over all ranks.
        Raises StoreLocked, DeviceError.
        """
        assert len(fingerprint) == FINGERPRINT_BYTES
        assert cap_bytes > 0
        description = json.loads(json.dumps(description))  # as HOME will have it, to be compared
        with self.locked(), ExitStack() as stack:
            orphans = self._delete_untrusted(self.find_orphans(stack), fingerprint)
            mine = max(
                (orphan for orphan in orphans if orphan.record and orphan.record.suits(fingerprint, description)),
                key=lambda orphan: (orphan.allocated_bytes, orphan.record.last_use_s if orphan.record else 0),
                default=None,
            )
            mine_bytes = mine.allocated_bytes if mine else 0
            others = [orphan for orphan in orphans if orphan is not mine]
            kept_bytes = self.delete_oldest(others, cap_bytes - max(mine_bytes, cap_bytes // 2))
            now_s = self.now_s()
            record = HomeRecord(
                format_version=FORMAT_VERSION,
                fingerprint=fingerprint,
                description=description,
                boot_id=self._boot_id,
                clean=False,
                cap_bytes=cap_bytes,
                last_use_s=now_s,
                created_s=mine.record.created_s if mine and mine.record else now_s,
            )
            home_id, lock_fd = self._take_over(mine, record) if mine else self._make_home(record)
            return Home(self, home_id, record, lock_fd=lock_fd, kept_bytes=kept_bytes, fresh=mine is None)

    def join_home(self, home_id: str, fingerprint: bytes) -> JoinedHome:
        """Enter the home that this process's scheduler acquired.

        Raises CorruptRecord where ``home_id`` is not an id, DeviceError (ENOENT) where there is no such home,
        StoreLocked where it is being taken away, GeometryMismatch where it is of another fingerprint.
        """
        if not is_home_id(home_id):
            raise CorruptRecord(f"a home id has 32 hex digits, not {home_id!r}")
        path = self.home_path(home_id)
        with paths.device_errors(f"joining home {home_id}"):
            lock_fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
            try:
                paths.wait_lock(lock_fd, fcntl.LOCK_SH, STORE_LOCK_TIMEOUT_S, f"home {home_id}")
                if not paths.same_file(lock_fd, path / LOCK_FILE):
                    raise StoreLocked(f"home {home_id} was taken over or deleted while it was being joined")
                if read_record(path).fingerprint != fingerprint:
                    raise GeometryMismatch(f"home {home_id} is of another namespace")
            except BaseException:
                os.close(lock_fd)
                raise
        return JoinedHome(path, fingerprint, lock_fd)

    def home_path(self, home_id: str) -> Path:
        """Directory of the home with this id."""
        assert is_home_id(home_id)
        return self.path / HOMES / home_id

    def now_s(self) -> int:
        """Whole seconds since the Unix epoch."""
        return int(self._clock())

    @contextmanager
    def locked(self, *, readonly: bool = False) -> Iterator[None]:
        """Hold the store lock; ``readonly``: of a store that cannot be written. Raises StoreLocked, DeviceError."""
        with paths.device_errors(f"store {self.path}"):
            fd = os.open(self.path / LOCK_FILE, (os.O_RDONLY if readonly else os.O_RDWR) | os.O_NOFOLLOW)
            try:
                paths.wait_lock(fd, fcntl.LOCK_EX, STORE_LOCK_TIMEOUT_S, f"the store {self.path}")
                yield
            finally:
                paths.unlock(fd)

    def find_orphans(self, stack: ExitStack) -> list[Orphan]:
        """Lock every orphan exclusively until ``stack`` ends, oldest use first. The caller holds the store lock."""
        orphans = []
        for home_id in home_ids(self.path):
            path = self.home_path(home_id)
            lock_fd = -1
            with suppress(FileNotFoundError):  # without a lock file it was never finished: nobody can own it
                lock_fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
                stack.callback(os.close, lock_fd)
            if lock_fd < 0 or paths.try_lock(lock_fd, fcntl.LOCK_EX):
                record = complete_record(path) if lock_fd >= 0 else None
                orphans.append(Orphan(home_id, record, paths.allocated_bytes(path), lock_fd))
        return sorted(orphans, key=lambda orphan: orphan.record.last_use_s if orphan.record else -1)

    def delete_oldest(self, orphans: Iterable[Orphan], most_bytes: int) -> int:
        """Delete orphans in their order until the rest come to ``most_bytes`` or less; return what the rest come to.

        One that cannot be deleted counts with the rest. The caller holds the store lock.
        """
        orphans = list(orphans)
        total = sum(orphan.allocated_bytes for orphan in orphans)
        for orphan in orphans:
            if total <= most_bytes:
                break
            if self.delete_home(orphan.id):
                total -= orphan.allocated_bytes
        return total

    def _delete_untrusted(self, orphans: Iterable[Orphan], fingerprint: bytes) -> list[Orphan]:
        kept = []
        for orphan in orphans:
            record = orphan.record
            trusted = record is not None and (
                record.fingerprint != fingerprint or record.clean or record.boot_id == self._boot_id
            )
            if trusted or not self.delete_home(orphan.id):
                # What should go and cannot still takes room, but nobody may take it over.
                kept.append(orphan if trusted else orphan._replace(record=None))
        return kept

    def delete_home(self, home_id: str) -> bool:
        """Delete a home and return whether all of it is gone. The caller holds the store lock and the home's."""
        # HOME goes first: what a crash leaves of the rest is then not a complete home.
        with suppress(OSError):
            paths.remove_directory(self.path / HOMES, home_id, first=HOME_FILE)
            return True
        return False

    def _take_over(self, orphan: Orphan, record: HomeRecord) -> tuple[str, int]:
        home_id = uuid.uuid4().hex
        path = self.home_path(home_id)
        self.home_path(orphan.id).rename(path)
        write_record(path, record, durable=True)
        lock_fd = os.dup(orphan.lock_fd)  # the same lock; the orphan's own descriptor closes with the store lock
        # A conversion lets go for an instant, in which only holders of the store lock would try.
        fcntl.flock(lock_fd, fcntl.LOCK_SH)
        return home_id, lock_fd

    def _make_home(self, record: HomeRecord) -> tuple[str, int]:
        home_id = uuid.uuid4().hex
        path = self.home_path(home_id)
        paths.make_directory(path)
        lock_fd = paths.create_file(path / LOCK_FILE)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_SH)
            paths.make_directory(path / INDEX)
            paths.make_directory(path / SEGMENTS)
            write_record(path, record, durable=True)
        except BaseException:
            os.close(lock_fd)
            raise
        return home_id, lock_fd

    def _make(self) -> None:
        self.path.chmod(paths.DIRECTORY_MODE)
        with suppress(FileExistsError):
            os.close(paths.create_file(self.path / LOCK_FILE))
        with self.locked():
            if is_store(self.path):
                return
            paths.make_directory(self.path / HOMES, exist_ok=True)
            store = {"format_version": FORMAT_VERSION, "store_id": uuid.uuid4().hex, "created_s": self.now_s()}
            paths.write_control(self.path / STORE_FILE, store, durable=True)


def list_homes(path: str | os.PathLike[str]) -> list[HomeSummary]:
    """Describe every home of a store, by id. Writes nothing.

    Holds the store lock while it tries the homes' locks, not while it measures. Raises as ``Store.open``.
    """
    store = Store.open(path, create=False)
    with store.locked(readonly=True):
        alive = {home_id: _is_owned(store.home_path(home_id)) for home_id in home_ids(store.path)}
    homes = []
    for home_id in sorted(alive):
        home_path = store.home_path(home_id)
        record = None
        with paths.device_errors(f"reading home {home_id}"):
            with suppress(FileNotFoundError, CorruptRecord):
                record = read_record(home_path)
            allocated_bytes = paths.allocated_bytes(home_path)
            segments = scan_segments(home_path / SEGMENTS)
        homes.append(HomeSummary(home_id, home_path, record, alive[home_id], allocated_bytes, segments))
    return homes


def _is_owned(home_path: Path) -> bool:
    try:
        fd = os.open(home_path / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not paths.try_lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _boot_id() -> str:
    try:
        return BOOT_ID_PATH.read_text("ascii").strip()
    except OSError:
        return uuid.uuid4().hex  # where nothing tells boots apart, each start counts as one
