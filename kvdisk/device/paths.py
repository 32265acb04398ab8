# SPDX-License-Identifier: Apache-2.0
"""File-system calls that the rooms of the store share: modes, control files, locks, sums,
removal."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from kvdisk.errors import CorruptRecord, DeviceError, StoreLocked

logger = logging.getLogger("kvdisk.device")

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
STAT_BLOCK_BYTES = 512
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
LOCK_POLL_S = 0.02
STOPPED_WAIT_S = 1.0
_LONGEST_CONTROL_FILE_BYTES = 1 << 20
_LONGEST_KEPT_BYTES = 64 << 10
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def device_errors(what: str) -> Iterator[None]:
    """Turn an OSError inside into a DeviceError with its errno."""
    try:
        yield
    except OSError as error:
        raise DeviceError(error.errno or errno.EIO, f"{what}: {error.strerror}") from error


def make_directory(path: Path, *, exist_ok: bool = False) -> None:
    """Make one directory of mode 0700, whatever the umask. Raises OSError: NotADirectoryError for a
    symlink, FileNotFoundError also where somebody removes it meanwhile."""
    try:
        path.mkdir(DIRECTORY_MODE)
    except FileExistsError:
        if not exist_ok:
            raise
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        return
    path.chmod(DIRECTORY_MODE)


def is_directory(path: Path) -> bool:
    """Return whether there is a directory, itself no symlink."""
    return stat.S_ISDIR(_mode(path))


def is_other_than_directory(path: Path) -> bool:
    """Return whether there is something that is no directory; looks once, while others make and
    remove it."""
    mode = _mode(path)
    return mode != 0 and not stat.S_ISDIR(mode)


def _mode(path: Path) -> int:
    """Type and permissions of what is there, itself if a symlink; 0: nothing is."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0


def create_file(path: Path) -> int:
    """Create a file of mode 0600, whatever the umask, that must not exist; return a descriptor to
    read and write it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE)
    os.fchmod(fd, FILE_MODE)
    return fd


def open_regular(path: Path, flags: int) -> int:
    """Open a file that exists; return its descriptor, or -1 where something else is in its place.
    Raises OSError."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return -1
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe in its place must not stop us
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
            return -1
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return -1


def replace_file(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace a file in one step, whatever is in its place; unsynced. Raises OSError, and leaves
    what was there."""
    temporary = path.with_name(path.name + ".tmp")
    remove_anything(temporary.parent, temporary.name)
    try:
        with os.fdopen(create_file(temporary), "wb") as file:
            file.writelines(pieces)
        if is_directory(path):
            remove_anything(path.parent, path.name)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def encode_json(value: dict[str, Any]) -> bytes:
    """Return the bytes of a JSON file."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def write_control(path: Path, value: dict[str, Any], *, durable: bool) -> None:
    """Replace a JSON file in one step. ``durable``: it survives a loss of power from here on.
    Raises OSError.

    What it replaces stays beside it, under another name, and is written over the next time, which
    then needs no room.
    """
    temporary = path.with_name(path.name + ".tmp")
    encoded = encode_json(value)
    fd = _open_kept(temporary)
    if fd < 0:
        remove_anything(temporary.parent, temporary.name)
        fd = create_file(temporary)
    try:
        encoded = encoded.ljust(os.fstat(fd).st_size)  # spaces, so that no length changes
        if os.pwrite(fd, encoded, 0) != len(encoded):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary))
        if durable:
            os.fsync(fd)
        if not _exchange(temporary, path):
            temporary.replace(path)
    finally:
        os.close(fd)
    if durable:
        sync(path.parent)


def _open_kept(path: Path) -> int:
    """Open what a control file was before, to write; -1 where there is none, or it is somebody
    else's file, too."""
    try:
        fd = open_regular(path, os.O_WRONLY)
    except OSError:
        return -1
    if fd >= 0 and (os.fstat(fd).st_nlink > 1 or os.fstat(fd).st_size > _LONGEST_KEPT_BYTES):
        os.close(fd)
        return -1
    return fd


def _exchange(one: Path, other: Path) -> bool:
    """Let two files change names in one step; False where there is only one, or the system cannot
    do that."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def read_control(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CorruptRecord, also for what is no regular file, or
    OSError (FileNotFoundError where there is none)."""
    is_current = False
    while not is_current:  # what has been replaced meanwhile may have been written over
        if (fd := open_regular(path, os.O_RDONLY)) < 0:
            raise CorruptRecord(f"{path} is not a file")
        with os.fdopen(fd, "rb") as file:
            text = file.read(_LONGEST_CONTROL_FILE_BYTES)
            is_current = same_file(fd, path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptRecord(f"{path} does not decode") from error
    if not isinstance(value, dict):
        raise CorruptRecord(f"{path} does not hold an object")
    return value


def try_lock(fd: int, kind: int) -> bool:
    """Take a flock of ``kind`` (LOCK_SH or LOCK_EX) if that needs no wait; return whether it was
    taken."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_lock(fd: int, kind: int, timeout_s: float, what: str) -> None:
    """Take a flock, waiting up to ``timeout_s``. Raises StoreLocked, which names ``what``."""
    deadline = time.monotonic() + timeout_s
    while not try_lock(fd, kind):
        if time.monotonic() >= deadline:
            raise StoreLocked(f"{what} has been locked by another process for {timeout_s:g} s")
        time.sleep(LOCK_POLL_S)


def take_named_lock(path: Path, timeout_s: float, what: str, *, readonly: bool) -> int:
    """Take the exclusive flock on a file that says who holds it; return its descriptor, for
    ``drop_named_lock``. Needs no room. Raises StoreLocked, OSError.

    A holder that is stopped (SIGSTOP) holds nobody up: after STOPPED_WAIT_S a new file replaces the
    old one, and the old lock means nothing. So what is done under it must not rely on it alone.
    """
    deadline = time.monotonic() + timeout_s
    look_at = time.monotonic() + STOPPED_WAIT_S
    while True:
        fd = os.open(path, (os.O_RDONLY if readonly else os.O_RDWR) | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if try_lock(fd, fcntl.LOCK_EX) and same_file(fd, path):
                if not readonly:
                    _sign(fd, str(os.getpid()))
                taken, fd = fd, -1
                return taken
            if time.monotonic() >= deadline:
                raise StoreLocked(f"{what} has been locked by another process for {timeout_s:g} s")
            if not readonly and time.monotonic() >= look_at and _holder_is_stopped(fd):
                with suppress(OSError):  # a drive without room for a new file: it may go on, or be ended
                    _replace_lock(fd, path)
        finally:
            if fd >= 0:
                os.close(fd)
        time.sleep(LOCK_POLL_S)


def _sign(fd: int, name: str) -> None:
    """Write who holds a lock, always over the same bytes; where the drive has no room for them,
    nobody is named."""
    try:
        os.pwrite(fd, f"{name:<16}".encode(), 0)
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, 0)


def drop_named_lock(fd: int, *, readonly: bool) -> None:
    """Release what ``take_named_lock`` has taken."""
    if not readonly:
        _sign(fd, "")  # a reader that holds the lock next leaves no name, and is not taken for us
    unlock(fd)


def _holder_is_stopped(fd: int) -> bool:
    try:
        holder = int(os.pread(fd, 16, 0))
        state = Path(f"/proc/{holder}/stat").read_text().rpartition(")")[2].split()[0]
    except (ValueError, IndexError, OSError):
        return False
    return state in {"T", "t"}


def _replace_lock(fd: int, path: Path) -> None:
    """Put a new lock file in the place of the one that ``fd`` is open on; one process at a time."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if try_lock(directory, fcntl.LOCK_EX) and same_file(fd, path):
            temporary = path.with_name(path.name + ".tmp")
            with suppress(FileNotFoundError):
                temporary.unlink()
            os.close(create_file(temporary))
            temporary.replace(path)
            logger.warning("kvdisk: a process that is stopped holds %s; it is left behind.", path)
    finally:
        os.close(directory)


def unlock(fd: int) -> int:
    """Release a lock, close its descriptor (-1: there is none) and return -1."""
    if fd >= 0:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing alone would leave it to a child that a fork gave the descriptor
        os.close(fd)
    return -1


def same_file(fd: int, path: Path) -> bool:
    """Return whether ``path`` names the file that ``fd`` is open on: a lock on a removed file
    protects nothing."""
    try:
        now = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), now)


def sync(path: Path) -> None:
    """Make a file's bytes, or a directory's names, survive a loss of power. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(directory: Path) -> None:
    """``sync`` every file and directory below ``directory``, and itself. Follows no symlink."""
    with os.scandir(directory) as found:
        for item in found:
            if item.is_dir(follow_symlinks=False):
                sync_tree(directory / item.name)
            elif item.is_file(follow_symlinks=False):
                sync(directory / item.name)
    sync(directory)


def sum_of_file(path: Path) -> str:
    """Return the xxh3_128 of a file's bytes as hex digits. Raises OSError; FileNotFoundError also
    for what is no regular file."""
    if (fd := open_regular(path, os.O_RDONLY)) < 0:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with os.fdopen(fd, "rb") as file:
        return hashlib.file_digest(file, xxh3_128).hexdigest()


def allocated_bytes(path: Path) -> int:
    """Return the bytes that the file system holds for ``path`` and all below it; what vanishes
    meanwhile counts 0."""
    try:
        status = path.lstat()
        total = status.st_blocks * STAT_BLOCK_BYTES
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(path) as found:
                total += sum(allocated_bytes(path / item.name) for item in found)
    except FileNotFoundError:
        return 0
    return total


@contextmanager
def _inside(directory: Path, names: Sequence[str]) -> Iterator[int]:
    """Open ``directory/names[0]/names[1]/...`` but for the last and yield its descriptor. No
    symlink is followed."""
    assert names and all(name not in {"", ".", ".."} and "/" not in name for name in names)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    fd = os.open(directory, flags)
    try:
        for name in names[:-1]:
            outer, fd = fd, os.open(name, flags, dir_fd=fd)
            os.close(outer)
        yield fd
    finally:
        os.close(fd)


def remove_anything(directory: Path, *names: str, first: str | None = None) -> None:
    """Remove ``directory/names[0]/names[1]/...``, whatever it is: a tree, a file, a symlink. Gone
    already is no error.

    ``first``: what goes before the rest of a tree. No symlink is followed, neither on the way nor
    below. Raises OSError.
    """
    with _inside(directory, names) as parent, suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(names[-1], dir_fd=parent).st_mode):
            os.unlink(names[-1], dir_fd=parent)
        else:
            if first is not None:
                with _inside(directory, (*names, first)) as tree, suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(first, dir_fd=tree)
            assert shutil.rmtree.avoids_symlink_attacks
            shutil.rmtree(names[-1], dir_fd=parent)
