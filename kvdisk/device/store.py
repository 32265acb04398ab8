# SPDX-License-Identifier: Apache-2.0
"""The store and its homes: who owns which, who comes after whom.

Under the first of a store's directories lie ``STORE``, ``lock`` and
``homes/<id>/{HOME,lock,index/,segments/}``; see ``drives`` for the others. Every process of an
owner holds a shared flock on its home's ``lock`` for its life, through a descriptor that it opened
itself: one that came by a fork would be the parent's. The process that has the index open holds a
lock of its own on that, which the next owner awaits: see ``Home.await_index``. A home whose lock
can be taken exclusively is unowned. That is tried only under the store's ``lock``, so two who try
never take each other for an owner.

A takeover renames a home, so a worker of the owner before finds no home of its id, and cannot write
into one that another engine owns.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvdisk.device import paths
from kvdisk.device.cap import Holding, Stock
from kvdisk.device.control import (
    HOME_FILE,
    HOMES,
    INDEX,
    LOCK_FILE,
    HomeRecord,
    StoreRecord,
    home_ids,
    is_home_id,
    opened,
    read_record,
    read_store,
    write_record,
)
from kvdisk.device.drives import (
    Directories,
    Drive,
    check_is_first,
    folders_of,
    list_directories,
    list_folders,
    make_folders,
    make_store,
    open_further,
    prepare_directory,
    remove_folder,
    serves,
    with_all,
)
from kvdisk.device.home import Home, JoinedHome
from kvdisk.device.segment import DriveFolder, SegmentFile, create_segment, drop_segment
from kvdisk.errors import ConfigError, CorruptRecord, DeviceError, GeometryMismatch, StoreLocked
from kvdisk.geometry import FINGERPRINT_BYTES, FORMAT_VERSION, segment_charge_bytes
from kvdisk.messages import ForeignSegment, SegmentSpec

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
STORE_LOCK_TIMEOUT_S = 120.0
LOCK_WAIT_S = 2.0
"""How long a worker, or a thread beside an engine, waits for the store lock."""


class Store:
    """A store. Made by ``open``; holds no descriptor and no lock between calls.

    ``path``: its first directory. ``drives``: all that could be opened. ``boot_id`` and ``clock``
    (seconds since the Unix epoch) are there for tests.
    """

    def __init__(self, path: Path, *, boot_id: str | None, clock: Callable[[], float]) -> None:
        self.path = path
        self.drives: tuple[Drive, ...] = ()
        self.boot_id = boot_id if boot_id is not None else _boot_id()
        self._measured: dict[Path, int] = {}
        """Bytes of a home's folders when they could last be measured."""
        self._clock = clock

    @classmethod
    def open(
        cls,
        directories: Directories,
        create: bool = True,
        *,
        need_all: bool = True,
        boot_id: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Store:
        """Open a store, or make one with ``create``.

        ``need_all`` False: further directories that cannot be opened are left out. Raises
        ConfigError where a directory is not fit, of another format or part of another store,
        CorruptRecord where STORE does not decode, StoreLocked, DeviceError.
        """
        path, *further = list_directories(directories)
        with paths.device_errors(f"opening the store {path}"):
            store = cls(path, boot_id=boot_id, clock=clock)
            prepare_directory(path, create=create)
            record = read_store(path)
            if record is not None:
                check_is_first(path, record)
            if record is None or not os.path.lexists(path / LOCK_FILE):
                if not create:
                    lacks = "" if record is None else f": it has no file named {LOCK_FILE}, as after a copy without it"
                    raise ConfigError(f"store_dirs: {path} is not a {'whole ' if lacks else ''}kvdisk store{lacks}")
                record = store._make()
            store.drives = (Drive(path, record.store_id),)
            if further:
                with store.locked() if create else nullcontext():
                    store.drives = open_further(
                        store.drives[0], further, create=create, need_all=need_all, now_s=store.now_s()
                    )
        return store

    def acquire_home(
        self,
        fingerprint: bytes,
        description: dict[str, Any],
        cap_bytes: int,
        *,
        index_bytes: int = 0,
        except_ids: Collection[str] = (),
    ) -> Home:
        """Take over the fullest unowned home that fits, or make a home. HOME then says *not clean*.

        A home fits if all its drives are among the store's; further ones are added to it. Whether
        its index can be trusted is the next question: see ``Home``. Unowned homes go that are not
        complete, or that ``cap`` says must go for this one to fit; on a drive without room even for
        HOME others go too, one by one. ``cap_bytes``: over all ranks. ``index_bytes``: what the
        index may grow to. ``except_ids``: homes that are left alone. Raises StoreLocked,
        DeviceError.
        """
        assert len(fingerprint) == FINGERPRINT_BYTES
        assert cap_bytes > 0
        description = json.loads(json.dumps(description))  # as HOME will have it, to be compared
        with self._stock() as stock:
            stock.homes = [home for home in stock.homes if home.id not in except_ids]
            for home in stock.unowned:
                if home.record is None:
                    self._delete(stock, home)
            self._remove_loose(stock)
            mine = self._choose(stock, fingerprint, description)
            now_s = self.now_s()
            old = mine.record if mine else None
            record = HomeRecord(
                format_version=FORMAT_VERSION,
                fingerprint=fingerprint,
                description=description,
                boot_id=old.boot_id if old else self.boot_id,
                clean=False,
                cap_bytes=cap_bytes,
                last_use_s=now_s,
                created_s=old.created_s if old else now_s,
                index_bytes=index_bytes,
                index_sum=old.index_sum if old else "",
                drives=with_all(self.drives, old.drives if old else ()),
            )
            self._make_room(stock, mine, record)
            home_id = uuid.uuid4().hex
            if mine is not None:
                self.home_path(mine.id).rename(self.home_path(home_id))
            others = iter(stock.unowned_to_delete(fingerprint))
            while True:
                try:
                    make = self._make_home if mine is None else partial(self._take_over, mine.lock_fd)
                    return self._held(home_id, record, lock_fd=make(home_id, record), fresh=mine is None)
                except OSError as error:
                    if error.errno not in paths.NO_ROOM or (spare := next(others, None)) is None:
                        raise
                    self._delete(stock, spare)

    def _choose(self, stock: Stock, fingerprint: bytes, description: dict[str, Any]) -> Holding | None:
        fit = [
            (home.allocated_bytes, home.record.last_use_s, home)
            for home in stock.unowned
            if home.record and home.record.suits(fingerprint, description) and serves(self.drives, home.record)
        ]
        return max(fit, key=lambda found: found[:2])[2] if fit else None

    def _make_room(self, stock: Stock, mine: Holding | None, record: HomeRecord) -> None:
        """Delete unowned homes until all fits once this home is owned; it counts with its cap at
        most."""
        charged = record.index_bytes
        if mine is not None:
            stock.homes.remove(mine)
            index_bytes = paths.allocated_bytes(self.home_path(mine.id) / INDEX)
            charged = mine.allocated_bytes + max(0, record.index_bytes - index_bytes)
        stock.homes.append(Holding("", record, True, 0, min(charged, record.cap_bytes), -1))
        self._trim(stock, record.fingerprint, 0)

    def hold_home(self, home_id: str) -> Home:
        """Own an unowned home under its id, to look after its files. HOME stays as it is. Raises
        CorruptRecord where HOME does not decode, StoreLocked where it has an owner, DeviceError
        (ENOENT where there is no such home)."""
        with self._unowned(home_id) as found:
            if found.lock_fd < 0:
                raise DeviceError(errno.ENOENT, f"engine store {home_id} has no lock file")
            record = found.record or read_record(self.home_path(home_id))
            return self._held(home_id, record, lock_fd=_keep(found.lock_fd), fresh=False)

    def join_home(self, home_id: str, fingerprint: bytes) -> JoinedHome:
        """Enter the home that this engine's scheduler acquired. Raises CorruptRecord where
        ``home_id`` is no id, DeviceError (ENOENT where there is no such home), StoreLocked where it
        is being taken away, GeometryMismatch where it is of another fingerprint."""
        if not is_home_id(home_id):
            raise CorruptRecord(f"the id of an engine store has 32 hex digits, not {home_id!r}")
        path = self.home_path(home_id)
        with paths.device_errors(f"joining engine store {home_id}"):
            lock_fd = paths.take_lock(path / LOCK_FILE, fcntl.LOCK_SH, STORE_LOCK_TIMEOUT_S, f"engine store {home_id}")
            try:
                record = read_record(path)
                if record.fingerprint != fingerprint:
                    raise GeometryMismatch(f"engine store {home_id} is of another namespace")
            except BaseException:
                os.close(lock_fd)
                raise
        return JoinedHome(path, record, self.folders(home_id, record), lock_fd)

    def foreign_folder(self, source: ForeignSegment, drive: int) -> DriveFolder:
        """Return another home's part on one of *its* drives. Takes no lock: it may vanish. Raises
        CorruptRecord where ``source`` names no home id or HOME does not decode, DeviceError."""
        if not is_home_id(source.home_id):
            raise CorruptRecord(f"the id of an engine store has 32 hex digits, not {source.home_id!r}")
        with paths.device_errors(f"looking into engine store {source.home_id}"):
            folders = self.folders(source.home_id, read_record(self.home_path(source.home_id)))
        return opened(folders, drive, source.home_id)

    def home_path(self, home_id: str) -> Path:
        """Directory of the home with this id."""
        assert is_home_id(home_id)
        return self.path / HOMES / home_id

    def folders(self, home_id: str, record: HomeRecord) -> tuple[DriveFolder | None, ...]:
        """Return a home's folders in the order of its ``drives``; None on a drive not opened
        here."""
        return folders_of(self.drives, self.home_path(home_id), record)

    def now_s(self) -> int:
        """Whole seconds since the Unix epoch."""
        return int(self._clock())

    @contextmanager
    def locked(self, *, readonly: bool = False, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the store lock. ``readonly``: of a store that cannot be written. Raises StoreLocked,
        DeviceError."""
        wait_s = STORE_LOCK_TIMEOUT_S if timeout_s is None else timeout_s
        lock, what = self.path / LOCK_FILE, f"the store {self.path}"
        with paths.device_errors(f"store {self.path}"):
            fd = paths.take_lock(lock, fcntl.LOCK_EX, wait_s, what, readonly=readonly)
            try:
                yield
            finally:
                paths.unlock(fd)

    def delete_home(self, home_id: str, record: HomeRecord | None) -> bool:
        """Delete a home, and its folders on all drives; return whether all is gone. The caller
        holds the store lock and the home's; ``record`` is what HOME says."""
        # HOME goes first: what a crash leaves of the rest is then not a complete home, and its
        # folders belong to no home.
        folders = self.folders(home_id, record)[1:] if record else ()
        try:
            paths.remove_anything(self.path / HOMES, home_id, HOME_FILE)
            paths.remove_anything(self.path / HOMES, home_id)
        except OSError:
            return False
        gone = [remove_folder(folder.path) for folder in folders if folder is not None]
        return all(gone)

    def remove_home(self, home_id: str) -> bool:
        """Delete a home without an owner, readable or not; return whether all of it is gone. Raises
        StoreLocked where it has an owner, DeviceError (ENOENT where there is no such home)."""
        with self._unowned(home_id) as found:
            return self.delete_home(home_id, found.record)

    @contextmanager
    def _unowned(self, home_id: str) -> Iterator[Holding]:
        """Hold the store lock and that of a home without an owner. Raises StoreLocked where it has
        one, DeviceError."""
        with self.locked(), ExitStack() as stack:
            self.home_path(home_id).stat()
            found = self._take_stock_of(home_id, stack)
            if found.live:
                raise StoreLocked(f"engine store {home_id} has a live owner")
            yield found

    def discard(self, home: Home) -> None:
        """Release and delete a home that no rank has joined. Raises StoreLocked, DeviceError."""
        with self.locked():
            self.delete_home(home.id, home.record)
            home.release()

    # -- room ----------------------------------------------------------------------------------

    def measure(self, home_id: str, record: HomeRecord | None) -> int:
        """Return the bytes allocated for a home on all drives. Raises OSError of the first
        drive."""
        total = paths.allocated_bytes(self.home_path(home_id))
        if record is not None:
            total += sum(self._measure(folder.path) for folder in self.folders(home_id, record)[1:] if folder)
        return total

    def trim(self, fingerprint: bytes, unused_s: int = 0) -> bool:
        """Delete unowned homes until all fit the live owners' caps; return whether they do.

        An owner may die between two segments, and its cap with it. Homes of ``fingerprint`` go
        last; those used within ``unused_s`` stay, whose owner may be starting again. Any thread.
        Raises StoreLocked where another process holds the store lock for long, DeviceError.
        """
        with self._stock(LOCK_WAIT_S) as stock:
            return self._trim(stock, fingerprint, 0, self.now_s() - unused_s)

    def tidy(self) -> None:
        """Remove the folders that no home names. Raises StoreLocked, DeviceError."""
        with self._stock() as stock:
            self._remove_loose(stock)

    def make_segment(self, home: JoinedHome, spec: SegmentSpec, rank: int, rank_count: int) -> SegmentFile:
        """Make a rank's file of a segment, if the cap allows it; the store stays locked meanwhile.

        Raises DeviceError with nothing left behind: ENOSPC where the cap or the drive has no room,
        EAGAIN where another process holds the store lock for long, and as ``create_segment``.
        """
        folder = home.folder(spec.drive)
        needed_bytes = segment_charge_bytes(spec.slot_bytes, spec.slot_count)
        what = f"making segment {spec.segment} for rank {rank}"
        try:
            with self._stock(LOCK_WAIT_S) as stock:
                mine = next((each for each in stock.homes if each.id == home.id), None)
                if mine is None or mine.record is None:
                    raise DeviceError(errno.ENOENT, f"{what}: the engine store is gone, or its HOME does not decode")
                if mine.charged_bytes + needed_bytes > mine.record.cap_bytes:
                    raise DeviceError(errno.ENOSPC, f"{what}: the cap of this engine is reached")
                if not self._trim(stock, mine.record.fingerprint, needed_bytes):
                    raise DeviceError(errno.ENOSPC, f"{what}: the caps of all engines of the store are reached")
                file = create_segment(folder, spec, rank, rank_count, mine.record.fingerprint)
                if os.fstat(file.fd).st_blocks * paths.STAT_BLOCK_BYTES > needed_bytes:
                    file.close()
                    drop_segment(folder, spec.segment, rank)
                    raise DeviceError(errno.ENOSPC, f"{what}: the file system needs more for it than it has bytes")
                return file
        except StoreLocked as error:
            raise DeviceError(errno.EAGAIN, f"{what}: {error}") from None

    @contextmanager
    def _stock(self, timeout_s: float | None = None) -> Iterator[Stock]:
        """Hold the store lock, and of each unowned home the lock; yield what all homes hold. Raises
        StoreLocked, DeviceError."""
        with self.locked(timeout_s=timeout_s), ExitStack() as stack:
            homes = [self._take_stock_of(home_id, stack) for home_id in home_ids(self.path)]
            named = {name for home in homes if home.record for name in home.record.drives}
            loose = [path for name, path in list_folders(self.drives).items() if name not in named]
            yield Stock(homes, loose, sum(map(self._measure, loose)))

    def _take_stock_of(self, home_id: str, stack: ExitStack) -> Holding:
        path = self.home_path(home_id)
        lock_fd, record = -1, None
        with suppress(FileNotFoundError):  # without a lock file it was never finished: nobody can own it
            lock_fd = paths.open_regular(path / LOCK_FILE, os.O_RDWR)
            if lock_fd >= 0:
                stack.callback(os.close, lock_fd)
        live = lock_fd >= 0 and not paths.try_lock(lock_fd, fcntl.LOCK_EX)
        if lock_fd >= 0:
            with suppress(FileNotFoundError, CorruptRecord):
                record = read_record(path)
        allocated = charged = self.measure(home_id, record)
        if live and record is not None:
            charged += max(0, record.index_bytes - paths.allocated_bytes(path / INDEX))
        return Holding(home_id, record, live, allocated, charged, lock_fd)

    def _measure(self, folder: Path) -> int:
        # A drive that fails shall not stop the others: its part counts as it was when it last could
        # be measured.
        with suppress(OSError):
            self._measured[folder] = paths.allocated_bytes(folder)
        return self._measured.get(folder, 0)

    def _trim(self, stock: Stock, fingerprint: bytes, needed_bytes: int, unused_since_s: float = math.inf) -> bool:
        """Delete what broken deletions left, then unowned homes last used by ``unused_since_s``,
        until ``needed_bytes`` more fit; return whether they do."""
        if stock.exceeds(needed_bytes):
            self._remove_loose(stock)
        for home in stock.unowned_to_delete(fingerprint):
            last_use_s = home.record.last_use_s if home.record else -1
            if stock.exceeds(needed_bytes) and last_use_s <= unused_since_s:
                self._delete(stock, home)
        return not stock.exceeds(needed_bytes)

    def _delete(self, stock: Stock, home: Holding) -> None:
        """Delete an unowned home. What cannot be deleted still counts, and is not taken over."""
        stock.homes.remove(home)
        if not self.delete_home(home.id, home.record):
            stock.homes.append(home._replace(record=None))

    def _remove_loose(self, stock: Stock) -> None:
        """Remove the folders that no home names, unless a live home's HOME cannot be read: they may
        be its own."""
        if all(home.record is not None for home in stock.homes if home.live):
            stock.loose = [path for path in stock.loose if not remove_folder(path)]
            stock.loose_bytes = sum(map(self._measure, stock.loose))

    # -- making --------------------------------------------------------------------------------

    def _held(self, home_id: str, record: HomeRecord, *, lock_fd: int, fresh: bool) -> Home:
        return Home(
            self.home_path(home_id),
            record,
            self.folders(home_id, record),
            lock_fd=lock_fd,
            fresh=fresh,
            boot_id=self.boot_id,
            now_s=self.now_s,
        )

    def _take_over(self, held_fd: int, home_id: str, record: HomeRecord) -> int:
        """Own the home that now has this id; return its lock's descriptor. Raises OSError."""
        write_record(self.home_path(home_id), record)
        make_folders(self.folders(home_id, record))
        return _keep(held_fd)

    def _make_home(self, home_id: str, record: HomeRecord) -> int:
        """Make a home and own it; return its lock's descriptor. Raises OSError, leaving nothing."""
        path = self.home_path(home_id)
        lock_fd = -1
        try:
            paths.make_directory(path)
            lock_fd = paths.create_file(path / LOCK_FILE)
            fcntl.flock(lock_fd, fcntl.LOCK_SH)
            paths.make_directory(path / INDEX)
            make_folders(self.folders(home_id, record))
            write_record(path, record)
        except BaseException:
            self.delete_home(home_id, record)
            paths.unlock(lock_fd)
            raise
        return lock_fd

    def _make(self) -> StoreRecord:
        self.path.chmod(paths.DIRECTORY_MODE)
        with suppress(FileExistsError):
            os.close(paths.create_file(self.path / LOCK_FILE))
        with self.locked():
            return read_store(self.path) or StoreRecord(make_store(self.path, self.now_s(), None), None)


def _keep(lock_fd: int) -> int:
    """Own the home whose lock is held exclusively until the store lock is released; return a
    descriptor of its own."""
    kept = os.dup(lock_fd)  # the same lock
    # A conversion lets go for an instant, in which only holders of the store lock would try.
    fcntl.flock(kept, fcntl.LOCK_SH)
    return kept


def _boot_id() -> str:
    try:
        return BOOT_ID_PATH.read_text("ascii").strip()
    except OSError:
        return uuid.uuid4().hex  # where boots cannot be told apart, each start counts as one
