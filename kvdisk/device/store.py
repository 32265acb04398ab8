# SPDX-License-Identifier: Apache-2.0
"""The store and its homes: who owns which, who comes after whom.

Under the first of a store's directories lie ``STORE``, ``lock`` and
``homes/<id>/{HOME,lock,index/,segments/}``; see ``drives`` for the others. Every process of an
owner holds a shared flock on its home's ``lock``, and on the home's directory, for its life,
through descriptors that it opened itself: those that came by a fork would be the parent's. The
process that has the index open holds a lock of its own on that, which the next owner awaits: see
``Home.await_index``. A home whose locks can be taken exclusively is unowned, unless another machine
has used it a moment ago. That is tried only under the store's ``lock``, so two who try never take
each other for an owner.

A takeover renames a home, so a worker of the owner before finds no home of its id, and cannot write
into one that another engine owns.

Ranks on another host than their scheduler's have a guest home there, of the same id: it has HOME,
lock and segments, and no index. The first rank on the host makes it, or renames one of the same
lineage, which has the files of the owners before. See docs/decisions/0057-several-machines.md.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvdisk.blocks import AHEAD_S
from kvdisk.device import paths
from kvdisk.device.cap import (
    BLANK_INDEX_BYTES,
    HOME_OVERHEAD_BYTES,
    ORPHAN_SPARED_S,
    Holding,
    Stock,
    reserve_bytes,
)
from kvdisk.device.control import (
    HOME_FILE,
    HOMES,
    INDEX,
    JOINT_CAP,
    LEAVES,
    LOCK_FILE,
    SALT_KEY_FILE,
    STORE_FILE,
    TOGETHER,
    HomeRecord,
    JointCap,
    StoreRecord,
    has_sound_store,
    home_ids,
    is_home_id,
    opened,
    read_record,
    read_salt_key,
    read_store,
    write_record,
    write_salt_key,
)
from kvdisk.device.drives import (
    Directories,
    Drive,
    check_is_first,
    list_directories,
    list_folders,
    make_folders,
    make_store,
    mend_store,
    open_further,
    prepare_directory,
    remove_folder,
    serves,
    with_all,
    write_store,
)
from kvdisk.device.home import Home, JoinedHome, Place
from kvdisk.device.home_lock import HomeLock, lock_directory, unlock_directory
from kvdisk.device.mounts import sees_all_locks
from kvdisk.device.segment import DriveFolder, SegmentFile, create_segment, drop_segment
from kvdisk.errors import (
    OF_PROCESS,
    ConfigError,
    CorruptRecord,
    DeviceError,
    GeometryMismatch,
    KvdiskError,
    QuietLog,
    StoreLocked,
)
from kvdisk.geometry import FINGERPRINT_BYTES, FORMAT_VERSION, segment_charge_bytes
from kvdisk.messages import ForeignSegment, GuestSpec, SegmentSpec
from kvdisk.salts import make_salt_key

logger = logging.getLogger("kvdisk")

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
STORE_LOCK_TIMEOUT_S = 120.0
LOCK_WAIT_S = 2.0
"""How long a worker, or a thread beside an engine, waits for the store lock."""
TENDED_S = 20
"""How long after its last use a guest is noted as used again: one of its ranks suffices."""
_LOOK_S = 0.05
IN_USE_S = 300
"""How long after its last use a home that was not closed in order counts as in use, where no lock
can say so. An owner notes its use every half minute."""
LEFT_TEXT = "kvdisk leaves engine store %s as it is until the next start, and uses the room beside it: %s"
JOINT_WAIT_S = 10.0
"""How long a start waits for the end of the owner before, whose processes may be ending, where a
joint cap has no room for another home."""
MOST_AHEAD_S = 86_400
"""How far the clock of another machine, which has such a home in use, may be ahead of this one's.
One that is behind by more than IN_USE_S cannot be told from one that has stopped."""


class Store:
    """A store. Made by ``open``; holds no descriptor and no lock between calls.

    ``path``: its first directory. ``drives``: all that could be opened. ``boot_id``, ``clock``
    (seconds since the Unix epoch) and ``steady`` (seconds that nobody moves; without it ``clock``)
    are there for tests.
    """

    def __init__(
        self,
        path: Path,
        *,
        boot_id: str | None = None,
        clock: Callable[[], float] | None = None,
        steady: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock or time.time
        self._steady = steady or clock or time.monotonic
        self._offset_s, self._moved_s = self._clock() - self._steady(), -math.inf
        """The time of day less the steady time, and when by the latter it was found moved last."""
        self.path = path
        self.drives: tuple[Drive, ...] = ()
        self.boot_id, self._boot_s = _boot(self._clock()) if boot_id is None else (boot_id, self._clock())
        self._log = QuietLog(time.monotonic, logger)
        self._noted: list[tuple[int, int] | None] = []
        """What tells the directories of ``drives`` from any others, as they were opened."""
        self._ahead: dict[str, int] = {}
        """When unowned homes were first seen whose last use is still to come."""
        self._measured: dict[Path, int] = {}
        """Bytes of a home's folders when they could last be measured."""
        self._more_bytes: dict[int, int] = {}
        """The most that a file system (``st_dev``) took for a segment beyond its charge: one with
        large clusters, or a hint of the size of extents."""
        self._opened_s = self.now_s()
        self._salt_key: bytes | None = None

    @classmethod
    def open(
        cls,
        directories: Directories,
        create: bool = True,
        *,
        need_all: bool = True,
        boot_id: str | None = None,
        clock: Callable[[], float] | None = None,
        steady: Callable[[], float] | None = None,
    ) -> Store:
        """Open a store, or make one with ``create``.

        ``need_all`` False: further directories that cannot be opened are left out. Raises
        ConfigError where a directory is not fit, of another format or part of another store,
        CorruptRecord where STORE does not decode, StoreLocked, DeviceError.
        """
        path, *further = list_directories(directories)
        with paths.device_errors(f"opening the store {path}"):
            store = cls(path, boot_id=boot_id, clock=clock, steady=steady)
            prepare_directory(path, create=create)
            record = read_store(path)
            if record is not None:
                check_is_first(path, record)
            is_whole = os.path.lexists(path / LOCK_FILE) and (has_sound_store(path) or not create)
            if record is None or not is_whole:
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
            store._noted = [_named(drive.path) for drive in store.drives]
        return store

    def keep_salt_key(self) -> bytes:
        """Return the key of the store's digests of salts. Where there is none, or a damaged one, it
        is made: what was stored by another one is then of tenants that nobody knows. Raises
        StoreLocked, DeviceError."""
        with paths.device_errors(f"keeping {self.path / SALT_KEY_FILE}"), self.locked():
            with suppress(CorruptRecord):
                self._salt_key = read_salt_key(self.path)
            if self._salt_key is None:
                self._salt_key = make_salt_key()
                write_salt_key(self.path, self._salt_key)
        return self._salt_key

    def look(self) -> None:
        """Look at every home as ``acquire_home`` does, and take none. A home that has lost its lock
        gets one. Raises StoreLocked, DeviceError, for what would keep it from one."""
        with self._stock():
            if not os.access(self.path / HOMES, os.W_OK | os.X_OK, effective_ids=True):
                raise DeviceError(errno.EACCES, f"{self.path / HOMES} cannot be written in")

    def acquire_home(
        self,
        fingerprint: bytes,
        description: dict[str, Any],
        cap_bytes: int,
        *,
        index_bytes: int = 0,
        spread: bool = False,
        except_ids: Collection[str] = (),
        joint: JointCap | None = None,
    ) -> Home:
        """Take over the fullest unowned home that fits, or make a home. HOME then says *not clean*.
        Where one is of an owner with this very cap, none of another cap is taken that would have to
        be cut.

        A home fits if all its drives are among the store's; further ones are added to it. Whether
        its index can be trusted is the next question: see ``Home``. Unowned homes go that are not
        complete, or that ``cap`` says must go for this one to fit; on a drive without room even for
        HOME others go too, one by one. ``cap_bytes``: over all ranks. ``index_bytes``: what the
        index may grow to. ``spread``: ranks may be on other hosts. ``except_ids``: homes that
        cannot be opened now: they stay, and count, while the owner lives; so does one that cannot
        be renamed, or its HOME written. ``joint``: what bounds this home and others together. Where
        that has no room for another of this cap, and the same member lives, this waits for its end,
        up to JOINT_WAIT_S. Raises StoreLocked, DeviceError.
        """
        assert len(fingerprint) == FINGERPRINT_BYTES
        assert cap_bytes > 0
        description = json.loads(json.dumps(description))  # as HOME will have it, to be compared
        for ours in (JOINT_CAP, TOGETHER, LEAVES):
            description.pop(ours, None)
        if joint is not None:
            description[JOINT_CAP] = joint._asdict()
            self._await_end(fingerprint, description, joint, cap_bytes)
        with self._stock() as stock:
            left = [home for home in stock.homes if home.id in except_ids]
            stock.homes = [home for home in stock.homes if home not in left]
            leaves = {home.record.lineage for home in left if home.record}.union(except_ids) - {""} if left else set()
            if left:
                description[LEAVES] = sorted(leaves)
            self._tell_of_other_machines(stock, fingerprint, description)
            self._delete_incomplete(stock)
            self._remove_loose(stock)
            new = HomeRecord(
                format_version=FORMAT_VERSION,
                fingerprint=fingerprint,
                description=description,
                boot_id=self.boot_id,
                clean=False,
                cap_bytes=cap_bytes,
                last_use_s=self.now_s(),
                created_s=self.now_s(),
                index_bytes=index_bytes,
                index_sum="",
                drives=(),
            ).with_together(stock.together_at_start(cap_bytes, joint))
            while True:
                mine, home_id = self._choose(stock, new, joint), uuid.uuid4().hex
                record = new if mine is None or mine.record is None else self._after(mine.record, new)
                lineage = (record.lineage or home_id) if spread else ""
                record = replace(record, drives=with_all(self.drives, record.drives), lineage=lineage)
                try:
                    lock = self._own(stock, mine, home_id, record)
                    return self._held(home_id, record, lock, None if mine is None else mine.id)
                except OSError as error:
                    if mine is None or error.errno in OF_PROCESS:
                        raise
                    logger.warning(LEFT_TEXT, mine.id, error)
                    stock.homes.remove(mine)
                    leaves |= {mine.id, home_id, record.lineage} - {""}  # it may have that id by now
                    new = replace(new, description={**new.description, LEAVES: sorted(leaves)})

    def _after(self, old: HomeRecord, new: HomeRecord) -> HomeRecord:
        """Return what HOME says of a home that an owner takes over: ``new``, with what stays of
        ``old``."""
        return replace(
            new,
            boot_id=self._boot_of(old),
            created_s=old.created_s,
            index_sum=old.index_sum,
            drives=old.drives,
            lineage=old.lineage,
        )

    def _delete_incomplete(self, stock: Stock) -> None:
        for home in stock.unowned:
            if home.record is None:
                if os.path.lexists(self.home_path(home.id) / HOME_FILE):
                    logger.warning("kvdisk deletes engine store %s, whose HOME and HOME.tmp are damaged", home.id)
                self._delete(stock, home)

    def _await_end(self, fingerprint: bytes, description: dict[str, Any], joint: JointCap, needed_bytes: int) -> None:
        """Wait for the end of an owner whose home this one could take over, where there is no room
        for another. Raises StoreLocked, DeviceError."""
        end_s = time.monotonic() + JOINT_WAIT_S
        while time.monotonic() < end_s:
            with self._stock() as stock:
                alike = [
                    home.live
                    for home, record in _that_suit(stock.of(joint), fingerprint, description)
                    if record.is_of_member(joint)
                ]
                if not alike or not all(alike) or not stock.exceeds_joint(joint, needed_bytes):
                    return
            time.sleep(_LOOK_S)

    def _own(self, stock: Stock, mine: Holding | None, home_id: str, record: HomeRecord) -> HomeLock:
        """Give a home, or a new one, this id and record; return its lock. Others go where there is
        no room. Raises OSError."""
        others = [home for home in stock.unowned_to_delete(record.fingerprint) if home is not mine]
        make = self._make_home if mine is None else partial(self._take_over, mine)
        while True:
            try:
                lock = make(home_id, record)
                break
            except OSError as error:
                if error.errno not in paths.NO_ROOM:
                    raise
                drive = os.stat(self._drive_named_by(error)).st_dev
                spare = next((home for home in others if self._is_on(home, drive)), None)
                if spare is None:
                    raise
                others.remove(spare)
                self._delete(stock, spare)
        self._make_room(stock, mine, home_id, record)  # not before: for a home that cannot be had none goes
        return lock

    def _drive_named_by(self, error: OSError) -> Path:
        """Return the directory of the store on whose drive a call for a home failed. A call that
        names no path writes to HOME, which is on the first."""
        named = error.filename
        inner = Path(named) if isinstance(named, str | os.PathLike) else self.path
        return next((drive.path for drive in self.drives if inner.is_relative_to(drive.path)), self.path)

    def _tell_of_other_machines(self, stock: Stock, fingerprint: bytes, description: dict[str, Any]) -> None:
        for home, record in _that_suit(stock.homes, fingerprint, description):
            if home.live and self.is_of_another_machine(record):
                ago_s = self.now_s() - record.last_use_s
                when = f"{ago_s} s ago" if ago_s >= -AHEAD_S else f"by a clock that is {-ago_s} s ahead of this one"
                logger.warning("kvdisk leaves engine store %s alone: another machine used it %s", home.id, when)

    def _choose(self, stock: Stock, new: HomeRecord, joint: JointCap | None) -> Holding | None:
        """Return the home that an owner takes over whose HOME would say ``new``; None: there is
        none."""
        fit = [
            (home, record)
            for home, record in _that_suit(stock.unowned, new.fingerprint, new.description)
            if record.is_of_member(joint) and serves(self.drives, record)
        ]
        alike = [record for _, record in fit if record.cap_bytes == new.cap_bytes]
        if alike:
            # What would be cut is of an engine with more room, which may start after this one; or
            # of a start with this cap that did not come to cut it, and may have left it.
            left = frozenset[str]().union(*(record.leaves for record in alike))
            fit = [
                (home, record)
                for home, record in fit
                if record.cap_bytes == new.cap_bytes or home.allocated_bytes <= new.cap_bytes or home.id in left
            ]
        return max((home for home, _ in fit), key=lambda home: (home.allocated_bytes, home.last_use_s), default=None)

    def _make_room(self, stock: Stock, mine: Holding | None, home_id: str, record: HomeRecord) -> None:
        """Delete unowned homes until all fits beside this home, which is owned now; it counts with
        its cap at most."""
        if mine is not None:
            stock.homes.remove(mine)
        charged, _ = self._charge(home_id, record, 0 if mine is None else mine.allocated_bytes)
        stock.homes.append(
            Holding("", record, record.last_use_s, True, 0, min(charged, record.cap_bytes), HomeLock(-1, -1))
        )
        self._trim(stock, record.fingerprint, 0, joint=record.joint_cap)

    def hold_home(self, home_id: str) -> Home:
        """Own an unowned home under its id, to look after its files. HOME stays as it is. Raises
        CorruptRecord where HOME does not decode, StoreLocked where it has an owner, DeviceError
        (ENOENT where there is no such home)."""
        with self._unowned(home_id) as found:
            if not found.lock.is_held:
                raise DeviceError(errno.ENOENT, f"engine store {home_id} has no lock file")
            record = found.record or read_record(self.home_path(home_id))
            return self._held(home_id, record, found.lock.keep(), home_id)

    def join_home(self, home_id: str, fingerprint: bytes, guests: GuestSpec | None = None) -> JoinedHome:
        """Enter the home that this engine's scheduler acquired; with ``guests``, where there is no
        such home on this host, enter a guest of that id, which is taken over or made. Raises
        CorruptRecord where ``home_id`` is no id, DeviceError (ENOENT where there is no such home),
        StoreLocked where it is being taken away, GeometryMismatch where it is of another
        fingerprint."""
        if not is_home_id(home_id):
            raise CorruptRecord(f"the id of an engine store has 32 hex digits, not {home_id!r}")
        path = self.home_path(home_id)
        with paths.device_errors(f"joining engine store {home_id}"):
            if guests is None:
                lock = HomeLock.join(path, STORE_LOCK_TIMEOUT_S, f"engine store {home_id}")
            else:
                lock = self._join_or_make(home_id, fingerprint, guests)
            try:
                record = read_record(path)
                if record.fingerprint != fingerprint:
                    raise GeometryMismatch(f"engine store {home_id} is of another namespace")
            except BaseException:
                lock.release()
                raise
        return JoinedHome(path, record, self.folders(home_id, record), lock)

    def _join_or_make(self, home_id: str, fingerprint: bytes, guests: GuestSpec) -> HomeLock:
        """Hold the home of this id, or a guest. Raises StoreLocked, OSError."""
        path, now_s = self.home_path(home_id), self.now_s()
        with self._stock() as stock:
            there = next((home for home in stock.homes if home.id == home_id), None)
            if there is not None and there.record is None and not there.live:  # a crash left it half made
                self._delete(stock, there)
                there = None
            old = None if there is None else there.record
            if there is not None and not (old and old.is_guest_of(guests.lineage, fingerprint, guests.description)):
                return HomeLock.join(path, LOCK_WAIT_S, f"engine store {home_id}") if there.live else there.lock.keep()
            if there is None:
                there = self._choose_guest(stock, fingerprint, guests)
                self._check_none_waits(stock, there, fingerprint, guests)
                old = None if there is None else there.record
            is_first = there is None or not there.live
            record = HomeRecord(
                format_version=FORMAT_VERSION,
                fingerprint=fingerprint,
                description=dict(guests.description),
                boot_id=self.boot_id,
                clean=False,
                cap_bytes=guests.rank_bytes + (HOME_OVERHEAD_BYTES if is_first or old is None else old.cap_bytes),
                last_use_s=now_s,
                created_s=old.created_s if old else now_s,
                index_bytes=0,
                index_sum="",
                drives=with_all(self.drives, old.drives if old else ()),
                lineage=guests.lineage,
                guest=True,
            )
            if is_first:
                record = record.with_together(stock.together_at_start(record.cap_bytes, None))
                return self._own(stock, there, home_id, record)
            record = record.with_together(stock.together(old.together if old else None))
            lock = HomeLock.join(path, LOCK_WAIT_S, f"engine store {home_id}")
            try:
                write_record(path, record)
            except BaseException:
                lock.release()
                raise
            return lock

    def _choose_guest(self, stock: Stock, fingerprint: bytes, guests: GuestSpec) -> Holding | None:
        """Return the unowned guest of the owner before, or else of the last one of that lineage
        that came to this host. Its index knows nothing of the files of others."""
        fit = [
            (home.id == guests.previous_id, home.last_use_s, home)
            for home in stock.unowned
            if home.record
            and home.record.is_guest_of(guests.lineage, fingerprint, guests.description)
            and home.record.drives[0].store_id == self.drives[0].store_id
        ]
        return max(fit, key=lambda found: found[:2])[2] if fit else None

    def _check_none_waits(self, stock: Stock, chosen: Holding | None, fingerprint: bytes, guests: GuestSpec) -> None:
        """Raise StoreLocked where the guest of the owner before may be there, and cannot be taken
        yet: a worker may hold it, or its HOME cannot be read. Beside another one its files would
        be lost."""
        if not guests.previous_id or (chosen is not None and chosen.id == guests.previous_id):
            return
        for home in stock.homes:
            if home.live and (
                home.id == guests.previous_id
                if home.record is None
                else home.record.is_guest_of(guests.lineage, fingerprint, guests.description)
            ):
                raise StoreLocked(f"engine store {home.id}, which has this rank's files, cannot be taken over yet")

    def folders_again(self, home: JoinedHome) -> tuple[DriveFolder | None, ...]:
        """Return a joined home's folders, with those on drives that can be opened by now. Raises
        CorruptRecord, DeviceError."""
        with paths.device_errors(f"looking for the drives of engine store {home.id}"):
            return self.folders(home.id, read_record(home.path))

    def tend(self, home: JoinedHome) -> None:
        """Do for a guest what its owner does for a home: note that it is used, trim what others
        left, and make anew what they removed around it. Any thread, one at a time. Raises
        StoreLocked, DeviceError."""
        if home.place() is not Place.THERE:
            return
        self.mend(home)
        with paths.device_errors(f"tending engine store {home.id}"):
            if self._is_tended(read_record(home.path)):
                return
            with self._stock(LOCK_WAIT_S) as stock:
                record = read_record(home.path)
                if not self._is_tended(record):  # by another rank, meanwhile
                    record = record.with_together(stock.together(record.together))
                    write_record(home.path, replace(record, clean=False, last_use_s=self.now_s()))
                    self._trim(stock, record.fingerprint, 0, stock.spared_since_s)

    def _is_tended(self, record: HomeRecord) -> bool:
        return not record.clean and abs(self.now_s() - record.last_use_s) < TENDED_S

    def leave(self, home: JoinedHome) -> None:
        """Release a home that a rank joined. A guest was closed in order by the last of them.
        Idempotent; raises nothing that a drive can cause."""
        if home.is_guest and home.is_held:
            with suppress(OSError, KvdiskError), self.locked(timeout_s=LOCK_WAIT_S):
                if home.place() is Place.THERE:
                    write_record(home.path, replace(read_record(home.path), clean=True, last_use_s=self.now_s()))
        home.close()

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
        where = {drive.store_id: drive.path / HOMES for drive in self.drives[1:]}
        further = [
            DriveFolder(where[name.store_id] / name.folder) if name.store_id in where else None
            for name in record.drives[1:]
        ]
        return DriveFolder(self.home_path(home_id)), *further

    def now_s(self) -> int:
        """Whole seconds since the Unix epoch."""
        return int(self._clock())

    @contextmanager
    def locked(self, *, readonly: bool = False, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the store lock: of its file, which may be removed and made anew, and of its
        directory. ``readonly``: of a store that cannot be written. Raises StoreLocked,
        DeviceError."""
        wait_s = STORE_LOCK_TIMEOUT_S if timeout_s is None else timeout_s
        lock, what = self.path / LOCK_FILE, f"the store {self.path}"
        with paths.device_errors(f"store {self.path}"):
            fd, directory_fd = paths.take_lock(lock, fcntl.LOCK_EX, wait_s, what, readonly=readonly), -1
            try:
                directory_fd = lock_directory(self.path, fcntl.LOCK_EX, wait_s, what)
                if self._noted and _named_by(os.fstat(directory_fd)) != self._noted[0]:
                    raise OSError(errno.ESTALE, "another directory is in its place")
                yield
            finally:
                unlock_directory(directory_fd)
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
            found = self._take_stock(home_id, stack)
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

    def keep(self, home: Home) -> bool:
        """Note that a home is used, and delete unowned homes until all fit the live owners' caps;
        return whether they do.

        An owner may die between two segments, and its cap with it. Homes of the same namespace go
        last; those used a moment ago stay, whose owner may be starting again. Any thread. Raises
        StoreLocked where another process holds the store lock for long, DeviceError.
        """
        together = None
        try:
            with self._stock(LOCK_WAIT_S) as stock:
                together, joint = stock.together(home.record.together), home.record.joint_cap
                return self._trim(stock, home.fingerprint, 0, stock.spared_since_s, joint)
        finally:  # after that: a drive without room for the note may have some now
            home.mark_used(together)

    def tidy(self) -> None:
        """Remove the folders that no home names. Raises StoreLocked, DeviceError."""
        with self._stock() as stock:
            self._remove_loose(stock)

    def mend(self, home: Home | JoinedHome) -> list[str]:
        """Make anew what others removed around a home that this process owns, or a guest; return
        the names of that. Any thread. Raises StoreLocked, DeviceError."""
        with paths.device_errors(f"mending the store {self.path}"):
            lock, mended = self.path / LOCK_FILE, []
            lacking = [drive for drive in self._in_place() if not os.path.lexists(drive.path / STORE_FILE)]
            without = [folder for folder in home.folders if folder and self._lacks_folder(folder)]
            key = None if self.drives[0] not in self._in_place() else self._salt_key
            lacks_key = key is not None and not os.path.lexists(self.path / SALT_KEY_FILE)
            if not os.path.lexists(lock):
                with suppress(FileExistsError):
                    os.close(paths.create_file(lock))
                mended.append(LOCK_FILE)
            elif not (lacking or without or lacks_key) and home.holds_its_file():
                return []
            with self.locked(timeout_s=LOCK_WAIT_S):
                for drive in lacking:
                    part_of = None if drive is self.drives[0] else self.drives[0].store_id
                    write_store(drive.path, drive.store_id, self.now_s(), part_of)
                if home.hold_again():
                    mended.append(f"{HOMES}/{home.id}/{LOCK_FILE}")
                if key is not None and lacks_key:
                    write_salt_key(self.path, key)
                    mended.append(SALT_KEY_FILE)
                for folder in without:
                    paths.make_directory(folder.path.parent, exist_ok=True)
                make_folders(without)
        mended += [STORE_FILE] * bool(lacking)
        return mended + [str(folder.segments_path) for folder in without]

    def _in_place(self) -> list[Drive]:
        """Return the drives whose directories are those that were opened."""
        return [drive for drive, noted in zip(self.drives, self._noted, strict=True) if _named(drive.path) == noted]

    def _lacks_folder(self, folder: DriveFolder) -> bool:
        directory = folder.path.parent.parent
        return any(drive.path == directory for drive in self._in_place()) and not paths.is_directory(
            folder.segments_path
        )

    def make_segment(self, home: JoinedHome, spec: SegmentSpec, rank: int, rank_count: int) -> SegmentFile:
        """Make a rank's file of a segment, if the cap allows it; the store stays locked meanwhile.

        Where the file system takes more for it than it has bytes, there must be room for that, too.
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
                drive = os.stat(folder.path).st_dev
                while True:
                    more_bytes = self._more_bytes.get(drive, 0)
                    self._make_room_on(folder, stock, mine, needed_bytes + more_bytes, what)
                    file = create_segment(folder, spec, rank, rank_count, mine.record.fingerprint)
                    taken_bytes = os.fstat(file.fd).st_blocks * paths.STAT_BLOCK_BYTES
                    if taken_bytes <= needed_bytes + more_bytes:
                        return file
                    file.close()
                    drop_segment(folder, spec.segment, rank)
                    self._more_bytes[drive] = taken_bytes - needed_bytes
                    self._log.warn(
                        "more",
                        f"the file system of {folder.path} takes {taken_bytes} bytes for a file of {needed_bytes}: "
                        "the NVMe tier holds less than nvme_bytes",
                    )
        except StoreLocked as error:
            raise DeviceError(errno.EAGAIN, f"{what}: {error}") from None

    def _make_room_on(self, folder: DriveFolder, stock: Stock, mine: Holding, needed_bytes: int, what: str) -> None:
        """Make room for so many bytes of segments. Raises DeviceError (ENOSPC) where the caps or
        the drive have none."""
        assert mine.record is not None
        charge_bytes = mine.owed_bytes + needed_bytes
        if mine.charged_bytes + charge_bytes > mine.record.cap_bytes:
            raise DeviceError(errno.ENOSPC, f"{what}: the cap of this engine is reached")
        if not self._trim(stock, mine.record.fingerprint, charge_bytes, joint=mine.record.joint_cap):
            raise DeviceError(errno.ENOSPC, f"{what}: the caps of all engines of the store are reached")
        if not self._has_room(stock, mine, folder, needed_bytes):
            raise DeviceError(errno.ENOSPC, f"{what}: the drive has no room")

    def room_bytes(self, home_id: str) -> int:
        """Return what a home has on the drives, with what they have free and what may make room for
        it. Raises StoreLocked, DeviceError."""
        with self._stock() as stock:
            left = stock.left
            held = sum(
                home.allocated_bytes for home in stock.homes if home.id == home_id or not (home.live or home.id in left)
            )
            free = {os.stat(drive.path).st_dev: _free_bytes(drive.path) for drive in self.drives}
        return held + sum(free.values())

    def _has_room(self, stock: Stock, mine: Holding, folder: DriveFolder, needed_bytes: int) -> bool:
        """Whether a drive has room for so many bytes of segments, beside what the index needs
        there. Unowned homes that have something there go for it, but for those that an engine may
        be about to take over."""
        assert mine.record is not None
        drive = os.stat(folder.path).st_dev
        if drive == os.stat(self.path).st_dev:
            index_bytes = paths.allocated_bytes(self.home_path(mine.id) / INDEX)
            segments_bytes = mine.allocated_bytes - index_bytes + needed_bytes
            needed_bytes += reserve_bytes(mine.record, segments_bytes, index_bytes)
        for home in stock.unowned_to_delete(mine.record.fingerprint):
            if _free_bytes(folder.path) >= needed_bytes:
                break
            seen_s = max(home.last_use_s, self._opened_s)  # its owner may be starting after this one
            if seen_s <= stock.spared_since_s and self._is_on(home, drive):
                self._delete(stock, home)
        return _free_bytes(folder.path) >= needed_bytes

    def _is_on(self, home: Holding, drive: int) -> bool:
        """Whether a home has a folder on a file system."""
        folders = self.folders(home.id, home.record) if home.record else (DriveFolder(self.home_path(home.id)),)
        with suppress(OSError):
            return any(os.stat(folder.path).st_dev == drive for folder in folders if folder is not None)
        return False

    @contextmanager
    def _stock(self, timeout_s: float | None = None) -> Iterator[Stock]:
        """Hold the store lock, and of each unowned home the lock; yield what all homes hold. Raises
        StoreLocked, DeviceError."""
        with self.locked(timeout_s=timeout_s), ExitStack() as stack:
            homes = [self._take_stock_of(home_id, stack) for home_id in home_ids(self.path)]
            named = {name for home in homes if home.record for name in home.record.drives}
            loose = [path for name, path in list_folders(self.drives).items() if name not in named]
            known = all(home.record is not None for home in homes if home.live)  # they may be those of one that is not
            loose_bytes = sum(map(self._measure, loose)) if known else 0
            yield Stock(homes, loose, loose_bytes, self.now_s(), self._clock_was_moved())

    def _take_stock_of(self, home_id: str, stack: ExitStack) -> Holding:
        try:
            return self._take_stock(home_id, stack)
        except OSError as error:
            if error.errno in OF_PROCESS:
                raise
            # It may have an owner: nobody takes or deletes it. Nor is it in anybody's way.
            self._log.warn("look", f"engine store {home_id} cannot be read now, and is skipped: {error}")
            return Holding(home_id, None, -1, True, 0, 0, HomeLock(-1, -1))

    def _take_stock(self, home_id: str, stack: ExitStack) -> Holding:
        """Look at a home, and hold it until ``stack`` is closed where nobody does. Raises
        OSError."""
        path, record = self.home_path(home_id), None
        lock = HomeLock.look(path)
        stack.callback(lock.close)
        with suppress(FileNotFoundError, CorruptRecord):
            record = read_record(path, self._tell_of_damage)
        live = not lock.try_exclusive() or self.is_used(record, lock)
        if not live and not lock.is_held:
            # HOME is made last and removed first: with it the lock file was there, and was removed
            # by who removes old files. Without it, nobody can own what was never finished.
            with suppress(FileNotFoundError):
                if record is not None:
                    paths.remove_anything(path, LOCK_FILE)  # it is no file
                    lock.make_file(path)
            record = record if lock.is_held else None
        allocated = self.measure(home_id, record)
        charged, owed = self._charge(home_id, record, allocated) if live and record is not None else (allocated, 0)
        return Holding(home_id, record, self._last_use_s(home_id, record, live), live, allocated, charged, lock, owed)

    def _charge(self, home_id: str, record: HomeRecord, allocated_bytes: int) -> tuple[int, int]:
        """Return what a home of a live owner counts with, and what its first segment adds to
        that."""
        index_bytes = self._measure(self.home_path(home_id) / INDEX)
        rest = max(0, record.index_bytes - index_bytes)
        # Ranks on other hosts have segments that are not here.
        if index_bytes > BLANK_INDEX_BYTES or record.is_spread or self._may_have_segments(home_id, record):
            return allocated_bytes + rest, 0
        now = min(rest, BLANK_INDEX_BYTES - index_bytes)
        return allocated_bytes + now, rest - now

    def _may_have_segments(self, home_id: str, record: HomeRecord) -> bool:
        """Whether files are where a home's segments lie, or that cannot be seen."""
        folders = self.folders(home_id, record)
        try:
            return any(folder is None or bool(os.listdir(folder.segments_path)) for folder in folders)
        except OSError:
            return True

    def _last_use_s(self, home_id: str, record: HomeRecord | None, live: bool) -> int:
        """Return when a home was used last, -1 without a record. A time that is still to come says
        nothing: an unowned home then counts as used when this process saw it first."""
        now_s = self.now_s()
        if live or record is None or record.last_use_s <= now_s + AHEAD_S:
            self._ahead.pop(home_id, None)
            return -1 if record is None else record.last_use_s
        return self._ahead.setdefault(home_id, now_s)

    def is_used(self, record: HomeRecord | None, lock: HomeLock) -> bool:
        """Whether a home that no process here holds may be in use all the same.

        It was used a moment ago, and was not closed in order: in another boot that is no earlier
        one of this machine, so by another machine; or it has lost its lock file, and its owner may
        be one that locks that alone.
        """
        if record is None or record.clean:
            return False
        if not -MOST_AHEAD_S <= self.now_s() - record.last_use_s <= IN_USE_S:
            return False
        # Whoever holds a guest locks its directory, too.
        return (not lock.is_held and not record.guest) or self.is_of_another_machine(record)

    def _tell_of_damage(self, error: CorruptRecord) -> None:
        self._log.warn("HOME", f"{error}; its previous version, HOME.tmp, is used")

    def _clock_was_moved(self) -> bool:
        """Whether the time of day moved by itself since this process looked last, or a moment
        before: a machine may start with a wrong clock, which is put right while its engines
        start."""
        steady_s = self._steady()
        offset_s = self._clock() - steady_s
        if abs(offset_s - self._offset_s) > AHEAD_S:
            self._moved_s = steady_s
        self._offset_s = offset_s
        return steady_s - self._moved_s < ORPHAN_SPARED_S

    def is_of_another_machine(self, record: HomeRecord) -> bool:
        """Whether a home was used in another boot, after this machine had begun its own. On a local
        drive that was this one by a wrong clock, or one that had the drive before."""
        in_another = record.boot_id not in {"", self.boot_id} and record.last_use_s > self._boot_s
        return in_another and not sees_all_locks(self.path)

    def _boot_of(self, old: HomeRecord) -> str:
        """Return what HOME says of boots while this machine looks at a home's index: not another
        boot, or the home would seem to be another machine's if this engine died over it."""
        return self.boot_id if old.index_sum or old.boot_id == self.boot_id else ""

    def _measure(self, folder: Path) -> int:
        # A drive that fails shall not stop the others: its part counts as it was when it last could
        # be measured.
        with suppress(OSError):
            self._measured[folder] = paths.allocated_bytes(folder)
        return self._measured.get(folder, 0)

    def _trim(
        self,
        stock: Stock,
        fingerprint: bytes,
        needed_bytes: int,
        unused_since_s: float = math.inf,
        joint: JointCap | None = None,
    ) -> bool:
        """Delete what broken deletions left, then unowned homes last used by ``unused_since_s``,
        until ``needed_bytes`` more fit, also within a joint cap; return whether they do."""
        if stock.exceeds(needed_bytes):
            self._remove_loose(stock)
        mine = {home.id for home in stock.of(joint)} - stock.left
        for home in stock.unowned:
            if home.id in mine and stock.exceeds_joint(joint, needed_bytes) and home.last_use_s <= unused_since_s:
                self._delete(stock, home)
        for home in stock.unowned_to_delete(fingerprint):
            if stock.exceeds(needed_bytes) and home.last_use_s <= unused_since_s:
                self._delete(stock, home)
        return not stock.exceeds(needed_bytes) and not stock.exceeds_joint(joint, needed_bytes)

    def _delete(self, stock: Stock, home: Holding) -> None:
        """Delete an unowned home. What cannot be deleted still counts, and is not taken over."""
        stock.homes.remove(home)
        if not self.delete_home(home.id, home.record):
            self._log.warn("delete", f"engine store {home.id} should be deleted to make room, and cannot be")
            stock.homes.append(home._replace(record=None, last_use_s=-1))

    def _remove_loose(self, stock: Stock) -> None:
        """Remove the folders that no home names, unless a live home's HOME cannot be read: they may
        be its own."""
        if all(home.record is not None for home in stock.homes if home.live):
            stock.loose = [path for path in stock.loose if not remove_folder(path)]
            stock.loose_bytes = sum(map(self._measure, stock.loose))

    # -- making --------------------------------------------------------------------------------

    def _held(self, home_id: str, record: HomeRecord, lock: HomeLock, previous_id: str | None) -> Home:
        return Home(
            self.home_path(home_id),
            record,
            self.folders(home_id, record),
            lock=lock,
            previous_id=previous_id,
            boot_id=self.boot_id,
            now_s=self.now_s,
        )

    def _take_over(self, mine: Holding, home_id: str, record: HomeRecord) -> HomeLock:
        """Own a home, which gets this id; return its lock. Raises OSError; it may have the id then,
        and this may be tried again."""
        if not os.path.lexists(self.home_path(home_id)):
            self.home_path(mine.id).rename(self.home_path(home_id))
        write_record(self.home_path(home_id), record)
        make_folders(self.folders(home_id, record))
        return mine.lock.keep()

    def _make_home(self, home_id: str, record: HomeRecord) -> HomeLock:
        """Make a home and own it; return its lock. Raises OSError, leaving nothing."""
        path = self.home_path(home_id)
        lock = HomeLock(-1, -1)
        try:
            paths.make_directory(path)
            lock = HomeLock.make(path)
            make_folders(self.folders(home_id, record))
            if not record.guest:
                paths.make_directory(path / INDEX)
            write_record(path, record)
        except BaseException:
            self.delete_home(home_id, record)
            lock.release()
            raise
        return lock

    def _make(self) -> StoreRecord:
        paths.keep_others_out(self.path)
        with suppress(FileExistsError):
            os.close(paths.create_file(self.path / LOCK_FILE))
        with self.locked():
            record = read_store(self.path) or StoreRecord(make_store(self.path, self.now_s(), None), None)
            mend_store(self.path, record, self.now_s())
            return record


def _that_suit(
    homes: Iterable[Holding], fingerprint: bytes, description: dict[str, Any]
) -> Iterator[tuple[Holding, HomeRecord]]:
    """Yield the homes that an engine of this fingerprint and description can read."""
    for home in homes:
        if home.record is not None and home.record.suits(fingerprint, description):
            yield home, home.record


def _free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _named(path: Path) -> tuple[int, int] | None:
    """Return what tells a directory from any other; None where it does not say."""
    with suppress(OSError):
        return _named_by(path.lstat())
    return None


def _named_by(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _boot(now_s: float) -> tuple[str, float]:
    """Return the boot's id, and when it began in seconds since the Unix epoch."""
    try:
        return BOOT_ID_PATH.read_text("ascii").strip(), now_s - seconds_since_boot()
    except OSError:
        return uuid.uuid4().hex, math.inf  # where boots cannot be told apart, each start counts as one


def seconds_since_boot() -> float:
    """Return how long this machine has been up."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
