# SPDX-License-Identifier: Apache-2.0
"""File-system calls that the store's modules share: modes, control files, locks, sums, removal."""

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from kvdisk.errors import CorruptRecord, DeviceError, StoreLocked

logger = logging.getLogger("kvdisk.device")

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
STAT_BLOCK_BYTES = 512
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The errnos by which the system says that a drive is full."""
REFUSED = frozenset({errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.ENOLCK})
"""The errnos by which a sandbox, or a file system, says that it does not let a call through."""
LOCK_POLL_S = 0.02
_LONGEST_CONTROL_FILE_BYTES = 1 << 20
_LONGEST_KEPT_BYTES = 64 << 10
_MOST_TRIES = 100
_PIECE_BYTES = 1 << 20
"""Bytes of zeros that are written at once."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def refusal(call: str, error: OSError) -> str:
    """Say that a system call is refused, and what helps."""
    return (
        f"the kernel, a container or the file system refuses {call} ({os.strerror(error.errno or 0)}): allow it, as in "
        "the container's seccomp profile"
    )


@contextmanager
def _named(call: str) -> Iterator[None]:
    """Have an OSError in the body say which call is refused, where that is what it says."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        raise OSError(error.errno, f"{refusal(call, error)}, or name a directory on another file system") from error


@contextmanager
def device_errors(what: str) -> Iterator[None]:
    """Turn an OSError in the body into a DeviceError with its errno, and with ``what`` in its
    text."""
    try:
        yield
    except OSError as error:
        raise DeviceError(error.errno or errno.EIO, f"{what}: {error.strerror}") from error


def make_directory(path: Path, *, exist_ok: bool = False) -> None:
    """Make one directory of mode 0700, whatever the umask. Raises OSError: NotADirectoryError where
    something else is there, a symlink included; FileNotFoundError also where it is removed
    meanwhile."""
    try:
        path.mkdir(DIRECTORY_MODE)
    except FileExistsError:
        if not exist_ok:
            raise
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        return
    keep_others_out(path)


def keep_others_out(path: Path) -> None:
    """Set the mode of a directory of this user's to 0700. Raises OSError, as ``open_directory``."""
    fd = open_directory(path)
    try:
        _set_mode(fd, DIRECTORY_MODE)
    finally:
        os.close(fd)


def open_directory(path: Path, *, dir_fd: int | None = None) -> int:
    """Open a directory that this user, or root, has written alone, and return its descriptor.
    Raises OSError: NotADirectoryError where something else is there, a symlink included;
    PermissionError where others could have written it.

    Where others may rename what a path leads over, only what is open can be checked: the path may
    lead elsewhere a moment later. What is found from the descriptor of a checked directory was put
    there by this user or root.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)
    return _checked(fd, path)


def open_own(path: Path, flags: int) -> int:
    """``open_regular`` a file of a store: raises PermissionError where it, or the directory that it
    lies in, belongs to another user or can be written by others."""
    for _ in range(_MOST_TRIES):
        if (fd := open_regular(path, flags)) < 0:
            return fd
        _checked(fd, path)
        try:
            if _lies_in_own_directory(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # as where its owner has just replaced it
    raise OSError(errno.ESTALE, "it is replaced again and again", str(path))


def _lies_in_own_directory(fd: int, path: Path) -> bool:
    """Whether an open file has its name in the directory that its path leads to by now. Raises
    OSError, as ``open_directory``."""
    directory = open_directory(path.parent)
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path.name, dir_fd=directory, follow_symlinks=False))
    finally:
        os.close(directory)


def _checked(fd: int, path: Path) -> int:
    """Return a descriptor; where others could have written what it is open on, close it and raise
    PermissionError."""
    status = os.fstat(fd)
    if status.st_uid in {0, os.geteuid()} and not status.st_mode & 0o002:
        return fd
    os.close(fd)
    said = f"belongs to user {status.st_uid}" if status.st_uid != os.geteuid() else "can be written by others"
    raise PermissionError(errno.EACCES, f"{path} {said}")


def may(path: Path | str, mode: int) -> bool:
    """Return whether this user may do what ``mode`` says of ``os.access``.

    The call that asks for a user other than the real one is a newer one, which old sandboxes
    refuse: the answer would be no.
    """
    is_other = (os.geteuid(), os.getegid()) != (os.getuid(), os.getgid())
    return os.access(path, mode, effective_ids=is_other)


def is_directory(path: Path) -> bool:
    """Return whether there is a directory that is no symlink."""
    return stat.S_ISDIR(_mode(path))


def is_other_than_directory(path: Path) -> bool:
    """Return whether there is something other than a directory, in one system call."""
    mode = _mode(path)
    return mode != 0 and not stat.S_ISDIR(mode)


def check_way(*directories: Path) -> None:
    """Raise NotADirectoryError where one of these exists and is no directory, or is a symlink."""
    for directory in directories:
        if is_other_than_directory(directory):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))


def _mode(path: Path) -> int:
    """Return type and permissions of what is there, of a symlink itself; 0 where nothing is."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0


def create_file(path: Path) -> int:
    """Create a file of mode 0600, whatever the umask. It must not exist. Return a descriptor to
    read and write it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE)
    _set_mode(fd, FILE_MODE)
    return fd


def _set_mode(fd: int, mode: int) -> None:
    """Set a mode where the umask, a group or an ACL left another."""
    if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
        with _named("chmod"):
            os.fchmod(fd, mode)


def allocate(fd: int, byte_count: int) -> None:
    """Allocate the bytes of an empty file; where that is refused, write them. Raises OSError where
    there is no room."""
    try:
        os.posix_fallocate(fd, 0, byte_count)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        _say_refused(f"{refusal('fallocate', error)}; until then new segments are filled with zeros, and take longer")
        zeros, written = memoryview(bytes(_PIECE_BYTES)), 0
        while written < byte_count:
            written += os.pwrite(fd, zeros[: byte_count - written], written)


@cache
def _say_refused(what: str) -> None:
    """Warn once in a process."""
    logger.warning("kvdisk: %s.", what)


def open_regular(path: Path, flags: int) -> int:
    """Open a file that exists. Return its descriptor, or -1 where something else is in its place.
    Raises OSError."""
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
    """Replace a file in one step, whatever is in its place, without a sync. Raises OSError, and
    then leaves what was there."""
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
    """Return a value as the bytes of a JSON file."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def write_control(path: Path, value: dict[str, Any]) -> None:
    """Replace a JSON file in one step. It survives a loss of power from here on. Raises OSError:
    EFBIG where ``read_control`` would not read all of it.

    The file that it replaces stays beside it (``kept_beside``). The next call writes over it, and
    so needs no room.
    """
    temporary = kept_beside(path)
    encoded = encode_json(value)
    if len(encoded) > _LONGEST_CONTROL_FILE_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    fd = _open_kept(temporary)
    if fd < 0:
        remove_anything(temporary.parent, temporary.name)
        fd = create_file(temporary)
    try:
        encoded = encoded.ljust(os.fstat(fd).st_size)  # spaces, so that no length changes
        if os.pwrite(fd, encoded, 0) != len(encoded):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary))
        fsync(fd)
        if not _exchange(temporary, path):
            temporary.replace(path)
    finally:
        os.close(fd)
    sync(path.parent)


def kept_beside(path: Path) -> Path:
    """Return where ``write_control`` leaves what a control file said before."""
    return path.with_name(path.name + ".tmp")


def _open_kept(path: Path) -> int:
    """Open for writing the file that ``write_control`` left beside a control file; -1 where there
    is none that can be used."""
    try:
        fd = open_own(path, os.O_WRONLY)
    except OSError:
        return -1
    if fd >= 0 and (os.fstat(fd).st_nlink > 1 or os.fstat(fd).st_size > _LONGEST_KEPT_BYTES):
        os.close(fd)
        return -1
    return fd


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two files in one step. Return False where that is not possible."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def read_control(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CorruptRecord, also where it is no regular file, and
    OSError (FileNotFoundError where there is none)."""
    is_current = False
    while not is_current:  # what has been replaced meanwhile may have been written over
        if (fd := open_own(path, os.O_RDONLY)) < 0:
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
    """Take a flock (LOCK_SH or LOCK_EX) without waiting; return whether it was taken."""
    try:
        with _named("flock"):
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def take_lock(path: Path, kind: int, timeout_s: float, what: str, *, readonly: bool = False) -> int:
    """Take the flock of a file, waiting up to ``timeout_s``; return its descriptor, for ``unlock``.

    ``readonly``: for a file on a file system that cannot be written. Raises StoreLocked, which
    names ``what``, also where the file was removed meanwhile and its lock protects nothing. Raises
    OSError.
    """
    if (fd := open_own(path, os.O_RDONLY if readonly else os.O_RDWR)) < 0:
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    try:
        deadline = time.monotonic() + timeout_s
        while not try_lock(fd, kind):
            if time.monotonic() >= deadline:
                raise StoreLocked(f"{what} has been locked by another process for {timeout_s:g} s")
            time.sleep(LOCK_POLL_S)
        if not same_file(fd, path):
            raise StoreLocked(f"{what} was taken over or deleted while its lock was awaited")
    except BaseException:
        os.close(fd)
        raise
    return fd


def unlock(fd: int) -> int:
    """Release a lock, close its descriptor (-1: there is none) and return -1."""
    if fd >= 0:
        with suppress(OSError):  # closing alone would leave it to a child that a fork gave the descriptor
            fcntl.flock(fd, fcntl.LOCK_UN)
        close(fd)
    return -1


def close(fd: int) -> None:
    """Close a descriptor of a file that nobody writes any more. The number is free whatever the
    file system says then: NFS and FUSE fail while their server is away."""
    try:
        os.close(fd)
    except OSError as error:
        if error.errno == errno.EBADF:
            raise


def same_file(fd: int, path: Path) -> bool:
    """Return whether ``path`` names the file that ``fd`` is open on."""
    try:
        now = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(os.fstat(fd), now)


def fsync(fd: int) -> None:
    """Make what is open survive a loss of power. Raises OSError."""
    with _named("fsync"):
        os.fsync(fd)


def sync(path: Path) -> None:
    """Make a file's bytes, or a directory's names, survive a loss of power. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fsync(fd)
    finally:
        os.close(fd)


def sync_tree(directory: Path) -> None:
    """``sync`` every file and directory below ``directory``, and the directory itself. Follows no
    symlink. Raises OSError."""
    with os.scandir(directory) as found:
        for item in found:
            if item.is_dir(follow_symlinks=False):
                sync_tree(directory / item.name)
            elif item.is_file(follow_symlinks=False):
                sync(directory / item.name)
    sync(directory)


def sum_of_file(path: Path) -> str:
    """Return the xxh3_128 of a file as hex digits. Raises OSError; FileNotFoundError also where it
    is no regular file."""
    if (fd := open_own(path, os.O_RDONLY)) < 0:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with os.fdopen(fd, "rb") as file:
        return hashlib.file_digest(file, xxh3_128).hexdigest()


def allocated_bytes(path: Path) -> int:
    """Return the bytes allocated for ``path`` and all below it; what vanishes meanwhile counts
    0."""
    try:
        status = path.lstat()
        total = status.st_blocks * STAT_BLOCK_BYTES
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(path) as found:
                total += sum(allocated_bytes(path / item.name) for item in found)
    except FileNotFoundError:
        return 0
    return total


def remove_anything(directory: Path, *names: str) -> None:
    """Remove ``directory/names[0]/names[1]/...``, whatever it is: a tree, a file, a symlink. It is
    no error if it is gone already. No symlink below ``directory`` is followed. Raises OSError."""
    assert names and all(name not in {"", ".", ".."} and "/" not in name for name in names)
    *way, last = names
    with suppress(FileNotFoundError), ExitStack() as stack:
        fd = open_directory(directory)
        stack.callback(os.close, fd)
        for name in way:
            fd = open_directory(Path(name), dir_fd=fd)
            stack.callback(os.close, fd)
        if stat.S_ISDIR(os.stat(last, dir_fd=fd, follow_symlinks=False).st_mode):
            shutil.rmtree(last, dir_fd=fd)
        else:
            os.unlink(last, dir_fd=fd)


def files_below(folder: Path, on_error: Callable[[OSError], None] | None = None) -> list[Path]:
    """Return all files below a directory, also behind links to other ones, which ``rglob`` leaves
    out. ``on_error``: takes what keeps a directory from being listed; None: that is left out."""
    found, been = list[Path](), set[str]()
    for place, folders, files in os.walk(folder, onerror=on_error, followlinks=True):
        folders.sort()  # the same on every host, also where a link leads to what is there anyway
        if (real := os.path.realpath(place)) in been and Path(place).is_symlink():
            folders.clear()  # a circle of links, or one that leads where the others have been
        been.add(real)
        found += [Path(place) / file for file in files]
    return sorted(found)
