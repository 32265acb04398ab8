# SPDX-License-Identifier: Apache-2.0
"""The lock of an engine store: a flock on its file ``lock``, and one on its directory.

A program that removes old files takes the file, but no directory that is not empty. So the
directory still says whether the engine store is in use. See
docs/decisions/0046-stores-that-go-away.md.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from kvdisk.device import paths
from kvdisk.device.control import LOCK_FILE
from kvdisk.errors import StoreLocked


def lock_directory(path: Path, kind: int, timeout_s: float, what: str) -> int:
    """Take the flock of a directory, waiting up to ``timeout_s``, and return its descriptor, for
    ``unlock_directory``. A file system without such locks counts as one that gave it. Raises
    StoreLocked, OSError."""
    fd = paths.open_directory(path)
    try:
        deadline = time.monotonic() + timeout_s
        while not _try_directory(fd, kind):
            if time.monotonic() >= deadline:
                raise StoreLocked(f"{what} has been locked by another process for {timeout_s:g} s")
            time.sleep(paths.LOCK_POLL_S)
    except BaseException:
        os.close(fd)
        raise
    return fd


def unlock_directory(fd: int) -> None:
    """Release the lock of a directory and close its descriptor; -1: there is none."""
    if fd >= 0:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        paths.close(fd)


def _try_directory(fd: int, kind: int) -> bool:
    try:
        return paths.try_lock(fd, kind)
    except OSError:  # not every file system locks directories: there the file alone says it
        return True


class HomeLock:
    """Descriptors of an engine store's lock file and of its directory; -1 where there is none.
    ``join``, ``make`` and ``try_exclusive`` take the locks. They are held until ``release``, or
    until ``close`` where they were only tried."""

    __slots__ = ("directory_fd", "file_fd")

    def __init__(self, file_fd: int, directory_fd: int) -> None:
        self.file_fd = file_fd
        self.directory_fd = directory_fd

    # -- to try ----------------------------------------------------------------------------------

    @classmethod
    def look(cls, home_path: Path, *, readonly: bool = False) -> HomeLock:
        """Open what there is of an engine store's lock, and take nothing. Raises OSError."""
        lock = cls(-1, -1)
        try:
            with suppress(FileNotFoundError, NotADirectoryError):
                lock.directory_fd = paths.open_directory(home_path)
                lock.file_fd = paths.open_own(home_path / LOCK_FILE, os.O_RDONLY if readonly else os.O_RDWR)
        except OSError:
            lock.close()
            raise
        return lock

    def try_exclusive(self) -> bool:
        """Hold the engine store exclusively, if no other process holds it; return whether it is
        held. Call under the store lock only. Raises OSError."""
        return (self.file_fd < 0 or paths.try_lock(self.file_fd, fcntl.LOCK_EX)) and (
            self.directory_fd < 0 or _try_directory(self.directory_fd, fcntl.LOCK_EX)
        )

    def make_file(self, home_path: Path) -> None:
        """Make the lock file of an engine store that is held exclusively and lacks one. Raises
        OSError."""
        assert self.file_fd < 0
        self.file_fd = paths.create_file(home_path / LOCK_FILE)
        fcntl.flock(self.file_fd, fcntl.LOCK_EX)

    def close(self) -> None:
        """Close the descriptors that ``look`` opened."""
        for fd in (self.file_fd, self.directory_fd):
            if fd >= 0:
                paths.close(fd)
        self.file_fd = self.directory_fd = -1

    # -- to hold ---------------------------------------------------------------------------------

    @classmethod
    def join(cls, home_path: Path, timeout_s: float, what: str) -> HomeLock:
        """Hold an engine store beside its owner. Raises StoreLocked, OSError."""
        lock = cls(paths.take_lock(home_path / LOCK_FILE, fcntl.LOCK_SH, timeout_s, what), -1)
        try:
            lock.directory_fd = lock_directory(home_path, fcntl.LOCK_SH, timeout_s, what)
        except BaseException:
            lock.release()
            raise
        return lock

    @classmethod
    def make(cls, home_path: Path) -> HomeLock:
        """Make the lock file of a new engine store, and hold the engine store. Raises OSError."""
        lock = cls(-1, paths.open_directory(home_path))
        try:
            _try_directory(lock.directory_fd, fcntl.LOCK_SH)
            lock.file_fd = paths.create_file(home_path / LOCK_FILE)
            fcntl.flock(lock.file_fd, fcntl.LOCK_SH)
        except BaseException:
            lock.release()
            raise
        return lock

    def keep(self) -> HomeLock:
        """Own the engine store that is held exclusively until the store lock is released; return a
        lock with descriptors of its own."""
        kept = HomeLock(os.dup(self.file_fd), os.dup(self.directory_fd))  # the same locks
        # Converting a lock gives it up for an instant. Only holders of the store lock would try
        # then.
        fcntl.flock(kept.file_fd, fcntl.LOCK_SH)
        _try_directory(kept.directory_fd, fcntl.LOCK_SH)
        return kept

    @property
    def is_held(self) -> bool:
        """Whether the lock file is open, so that the engine store was not released."""
        return self.file_fd >= 0

    def hold_again(self, home_path: Path) -> bool:
        """Hold the file that is at the lock's path by now, and make one where there is none. Return
        whether it was another file. Call under the store lock only. Raises OSError."""
        if paths.same_file(self.file_fd, home_path / LOCK_FILE):
            return False
        with suppress(FileExistsError):
            os.close(paths.create_file(home_path / LOCK_FILE))
        fd = paths.open_own(home_path / LOCK_FILE, os.O_RDWR)
        if fd < 0 or not paths.try_lock(fd, fcntl.LOCK_SH):
            if fd >= 0:
                os.close(fd)
            return False
        paths.unlock(self.file_fd)
        self.file_fd = fd
        return True

    def release(self) -> None:
        """Release the engine store. Idempotent."""
        self.file_fd = paths.unlock(self.file_fd)
        unlock_directory(self.directory_fd)
        self.directory_fd = -1
