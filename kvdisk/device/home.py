# SPDX-License-Identifier: Apache-2.0
"""Holds on one home: its owner's, and those of the owner's ranks. ``store`` hands them out."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from kvdisk.device import paths
from kvdisk.device.control import INDEX, LOCK_FILE, HomePaths, HomeRecord, Together, write_record
from kvdisk.device.home_lock import HomeLock, lock_directory, unlock_directory
from kvdisk.device.segment import DriveFolder
from kvdisk.errors import DeviceError, StoreLocked

INDEX_FILE = "data.mdb"
INDEX_DAMAGED = "damaged"
"""A file beside it: a commit has met damage. ``index.lmdb_index`` leaves it."""
NEW_INDEX = "index.new"
INDEX_WAIT_S = 15.0


def index_is_sound(index_path: Path, record: HomeRecord, boot_id: str) -> bool:
    """Whether an index is what its last owner committed, as far as its file shows. Raises
    OSError."""
    file = index_path / INDEX_FILE
    if not paths.is_directory(index_path) or os.path.lexists(index_path / INDEX_DAMAGED):
        return False
    if record.index_sum:
        with suppress(FileNotFoundError):
            return paths.sum_of_file(file) == record.index_sum
        return False
    return record.boot_id == boot_id and file.is_file() and not file.is_symlink()


_Value = TypeVar("_Value")


class Place(Enum):
    """Where the directory of a held home is: at its path, at another, or nowhere."""

    THERE = "there"
    MOVED = "moved"
    REMOVED = "removed"


class _HeldHome(HomePaths):
    """A home whose lock this process holds, shared, through descriptors of its own."""

    def __init__(self, path: Path, record: HomeRecord, folders: tuple[DriveFolder | None, ...], lock: HomeLock) -> None:
        self.id = path.name
        self.path = path
        self.fingerprint = record.fingerprint
        self.folders = folders
        self.is_spread = record.is_spread
        self._lock = lock
        self._ending = threading.Lock()
        """Held while HOME is written, so that ``mark_used`` and ``close`` do not undo each other,
        and while the lock changes."""

    def place(self) -> Place:
        """Say where the directory is by now. Raises OSError."""
        fd = self._lock.directory_fd
        if fd >= 0 and paths.same_file(fd, self.path):
            return Place.THERE
        return Place.MOVED if fd >= 0 and os.fstat(fd).st_nlink else Place.REMOVED

    @property
    def open_path(self) -> Path:
        """The directory that is held, wherever it is; without ``/proc`` its path, as it was."""
        through = Path(f"/proc/self/fd/{self._lock.directory_fd}")
        return through if os.path.lexists(through) else self.path

    def when_there(self, write: Callable[[Path, _Value], None], value: _Value) -> None:
        """Write a file that the next owner can do without, unless the directory is not at its path:
        what is there then is another's. Raises OSError."""
        if self.place() is Place.THERE:
            write(self.path, value)

    def holds_its_file(self) -> bool:
        """Whether the lock file at its path is the one that is held. Raises OSError."""
        with self._ending:
            return not self._lock.is_held or paths.same_file(self._lock.file_fd, self.path / LOCK_FILE)

    def hold_again(self) -> bool:
        """Hold the lock file that is at its path, which is made where it was removed; return
        whether it was another one. Under the store lock only. Any thread. Raises DeviceError."""
        with self._ending, paths.device_errors(f"locking engine store {self.id}"):
            return self._lock.is_held and self._lock.hold_again(self.path)

    @property
    def is_held(self) -> bool:
        """Whether it was not released."""
        return self._lock.is_held

    def release(self) -> None:
        """Release the home as it is: HOME stays what it says. Its files are closed. Idempotent."""
        self._lock.release()


class JoinedHome(_HeldHome):
    """A rank's hold on its engine's home, from ``Store.join_home`` until ``close``. ``is_guest``:
    the home has no owner beside its ranks, which look after it (``Store.tend``)."""

    def __init__(self, path: Path, record: HomeRecord, folders: tuple[DriveFolder | None, ...], lock: HomeLock) -> None:
        super().__init__(path, record, folders, lock)
        self.is_guest = record.guest

    def drive_of(self, folder: DriveFolder) -> int:
        """Return the number, in this home, of the drive that a part of another home is on. Raises
        DeviceError (ENODEV) where this home is not open there."""
        for drive, mine in enumerate(self.folders):
            if mine is not None and mine.path.parent == folder.path.parent:
                return drive
        raise DeviceError(errno.ENODEV, f"engine store {self.id} is not open on the drive of {folder.path}")

    def clean_drives(self, clean: Callable[[DriveFolder], object]) -> None:
        """Call ``clean`` for every part of the home; a further drive on which that fails is no
        longer open. Raises DeviceError of the first drive."""
        kept: list[DriveFolder | None] = []
        for drive, folder in enumerate(self.folders):
            kept.append(folder)
            if folder is not None:
                try:
                    clean(folder)
                except DeviceError:
                    if drive == 0:
                        raise
                    kept[-1] = None
        self.folders = tuple(kept)

    close = _HeldHome.release


class Home(_HeldHome):
    """The owner's hold on a home, until ``close``. One thread calls all, and waits for the disk.

    ``fresh``: made new, so that it is empty. ``previous_id``: that it had under its owner before;
    empty, or None to make it: it is new. ``cap_bytes``: a home taken over can be above it, and
    its owner cuts it first. ``now_s``: gives whole seconds since the Unix epoch. Before the owner
    opens the index to write, it calls ``await_index``, asks ``index_is_sound``, has it rebuilt
    where that is False (``remove_index``, ``place_index``), and calls ``adopt_index``.
    """

    def __init__(
        self,
        path: Path,
        record: HomeRecord,
        folders: tuple[DriveFolder | None, ...],
        *,
        lock: HomeLock,
        previous_id: str | None,
        boot_id: str,
        now_s: Callable[[], int],
    ) -> None:
        super().__init__(path, record, folders, lock)
        self.cap_bytes = record.cap_bytes
        self.fresh = fresh = previous_id is None
        self.record = record
        """What HOME says."""
        self.previous_id = previous_id or ""
        self._adopted = fresh
        self._boot_id = boot_id
        self._now_s = now_s

    @property
    def drive_count(self) -> int:
        """Drives on which the home may have segments; the first is the one with the index."""
        return len(self.folders)

    def mark_used(self, together: Together | None = None) -> None:
        """Note in HOME that the home is used now, and what its owner may have ``together`` with
        others; nothing once it is closed. Any thread. Raises DeviceError."""
        with self._ending:
            if self._lock.is_held:
                record = self.record if together is None else self.record.with_together(together)
                self._write(replace(record, last_use_s=self._now_s()))

    def name(self, fingerprint: bytes, description: Mapping[str, Any]) -> None:
        """Have HOME say of which fingerprint the home is: one that has no blocks, and no rank has
        joined. ``description``: replaces the entries that it has. Any thread. Raises
        DeviceError."""
        with self._ending:
            if self._lock.is_held:
                described = {**self.record.description, **description}
                for _ in range(1 if fingerprint == self.fingerprint else 2):  # HOME.tmp shall say it, too
                    self._write(replace(self.record, fingerprint=fingerprint, description=described))
                self.fingerprint = fingerprint

    # -- the index -----------------------------------------------------------------------------

    def await_index(self) -> None:
        """Wait until the process by which the owner before had the index open has ended: that of a
        killed engine ends its commit first. It holds no lock on the home, but an exclusive one on
        the directory of the index. Raises DeviceError (EBUSY) where it does not end."""
        what = f"the index of engine store {self.id}"
        for place in (self.index_path, self.new_index_path):
            with suppress(OSError):  # it is not there
                try:
                    unlock_directory(lock_directory(place, fcntl.LOCK_EX, INDEX_WAIT_S, what))
                except StoreLocked as error:
                    raise DeviceError(errno.EBUSY, str(error)) from error

    def index_is_sound(self) -> bool:
        """Whether the index is what its last owner committed: by its sum after a clean end, by the
        boot after a crash. Raises DeviceError."""
        if self.fresh:
            return True
        with paths.device_errors(f"reading the index of engine store {self.id}"):
            return index_is_sound(self.index_path, self.record, self._boot_id)

    def adopt_index(self) -> None:
        """Note that the index is whole and is about to be written to. Raises DeviceError."""
        self._write(replace(self.record, boot_id=self._boot_id, index_sum="", clean=False))
        self._adopted = True

    def remove_index(self) -> None:
        """Note that there is no index, and remove what is in its place. Raises DeviceError.

        Unlinked, not truncated: others may have the file mapped.
        """
        self._write(replace(self.record, boot_id="", index_sum="", clean=False))
        self._adopted = False
        with paths.device_errors(f"removing the index of engine store {self.id}"):
            for name in (INDEX, NEW_INDEX):
                paths.remove_anything(self.path.parent, self.id, name)
            paths.make_directory(self.path / NEW_INDEX)

    def place_index(self) -> None:
        """Put the closed index from ``new_index_path`` into its place. Raises DeviceError."""
        with paths.device_errors(f"placing the index of engine store {self.id}"):
            self.new_index_path.rename(self.index_path)

    @property
    def new_index_path(self) -> Path:
        """Directory in which an index is made that is not yet this home's."""
        return self.path / NEW_INDEX

    # -- the end -------------------------------------------------------------------------------

    def close(self, clean: bool, *, used: bool = True) -> None:
        """Release the home, after its files are closed and its ranks have left. Idempotent.

        ``clean``: sync all files, and have HOME say with a sum of the index that they survive a
        stop of the machine; False: the owner could not commit. ``used``: False leaves the time of
        its last use. Raises DeviceError; the home is released all the same.
        """
        with self._ending:
            if self._lock.is_held:
                self._close(clean, used)

    def _close(self, clean: bool, used: bool) -> None:
        try:
            record = replace(self.record, last_use_s=self._now_s()) if used else self.record
            with paths.device_errors(f"closing engine store {self.id}"):
                if clean and self._adopted:
                    for folder in self.folders:
                        if folder is not None:
                            paths.sync_tree(folder.path)
                    index_sum = ""
                    with suppress(FileNotFoundError):
                        index_sum = paths.sum_of_file(self.index_path / INDEX_FILE)
                    record = replace(record, clean=True, index_sum=index_sum)
                elif not self._adopted:  # nothing was written: what was true of the index still is
                    record = replace(record, clean=bool(record.index_sum))
            self._write(record)
        finally:
            self._lock.release()

    def _write(self, record: HomeRecord) -> None:
        with paths.device_errors(f"writing HOME of {self.id}"):
            if self.place() is not Place.THERE:
                raise FileNotFoundError(errno.ENOENT, "it is not at its path any more")
            write_record(self.path, record)
        self.record = record
