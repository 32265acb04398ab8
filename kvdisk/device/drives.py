# SPDX-License-Identifier: Apache-2.0
"""The directories of a store, one per drive, and which folders on them belong to which home.

The first directory has the store's lock and, of each home, HOME, lock, index and a part of the
segments. A further one has ``STORE``, which names the first (``part_of``), and
``homes/<folder>/segments``. HOME says which folders are its own; what no HOME names was left by a
crash.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import uuid
from array import array
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from kvdisk.device import paths
from kvdisk.device.control import (
    HOMES,
    STORE_FILE,
    DriveName,
    HomeRecord,
    StoreRecord,
    check_directory,
    has_sound_store,
    home_ids,
    read_record,
    read_store,
    store_directory,
    why_no_store,
)
from kvdisk.device.mounts import check_mount, is_on_root
from kvdisk.device.segment import DriveFolder
from kvdisk.errors import ConfigError, CorruptRecord, DeviceError, KvdiskError
from kvdisk.geometry import FORMAT_VERSION

logger = logging.getLogger("kvdisk")

_GET_FLAGS, _SET_FLAGS, _NO_COPY_ON_WRITE = 0x80086601, 0x40086602, 0x00800000
"""FS_IOC_GETFLAGS, FS_IOC_SETFLAGS and FS_NOCOW_FL of ``linux/fs.h``, for 64 bits."""

Directories: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
"""A store's directory, or all of them, the first one first."""


class Drive(NamedTuple):
    """A directory of a store that could be opened."""

    path: Path
    store_id: str


def list_directories(directories: Directories) -> tuple[Path, ...]:
    """Return where a store of these directories lies, as absolute paths, the first one first."""
    listed = [directories] if isinstance(directories, str | os.PathLike) else list(directories)
    assert listed, "a store has a directory"
    return tuple(store_directory(Path(directory).absolute()) for directory in listed)


def make_store(path: Path, now_s: int, part_of: str | None) -> str:
    """Make a directory of a store; return its store id. Raises OSError. The caller holds the store
    lock."""
    paths.make_directory(path / HOMES, exist_ok=True)
    store_id = uuid.uuid4().hex
    write_store(path, store_id, now_s, part_of)
    return store_id


def mend_store(path: Path, record: StoreRecord, now_s: int) -> None:
    """Write STORE of a directory anew unless it is sound. Raises OSError. The caller holds the
    store lock."""
    if not has_sound_store(path):
        write_store(path, record.store_id, now_s, record.part_of)
        logger.warning("kvdisk wrote %s anew, which was gone or damaged, by what is in the store.", path / STORE_FILE)


def write_store(path: Path, store_id: str, now_s: int, part_of: str | None) -> None:
    """Write STORE of a directory. Raises OSError. The caller holds the store lock."""
    fields = {"format_version": FORMAT_VERSION, "store_id": store_id, "created_s": now_s}
    paths.write_control(path / STORE_FILE, fields | ({"part_of": part_of} if part_of else {}))


def prepare_directory(path: Path, *, create: bool = True) -> None:
    """Check that a directory may be a store's; with ``create`` make it where it is missing, and
    keep others out that could write there. Raises ConfigError where it is not fit or cannot be
    made, OSError."""
    if not os.path.lexists(path):
        if not create:
            raise ConfigError(f"store_dirs: {why_no_store(path)}")
        _check_can_be_made(path)
        paths.make_directory(path, exist_ok=True)
    check_directory(path)
    if create and path.lstat().st_mode & 0o022:
        paths.keep_others_out(path)


def _check_can_be_made(path: Path) -> None:
    try:
        is_directory = path.parent.is_dir()
    except PermissionError:
        raise ConfigError(f"store_dirs: user {os.geteuid()} has no permission to look at {path.parent}") from None
    if not is_directory:
        raise ConfigError(f"store_dirs: {path.parent}, where {path} would be made, is not a directory")
    _check_not_readonly(path.parent)
    if not paths.may(path.parent, os.W_OK | os.X_OK):
        status = path.parent.stat()
        raise ConfigError(
            f"store_dirs: user {os.geteuid()} has no permission to write in {path.parent}, which belongs to user "
            f"{status.st_uid} (mode {status.st_mode & 0o7777:o}): give it to that user, or name a directory of theirs"
        )


def _check_not_readonly(path: Path) -> None:
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise ConfigError(f"store_dirs: {path} is on a file system that is mounted read-only")


def check_directories(directories: Directories) -> None:
    """Raise ConfigError, CorruptRecord or DeviceError for what would keep this user's engine from a
    store in these directories. Writes nothing."""
    first: StoreRecord | None = None
    listed = list_directories(directories)
    for path in listed:
        with paths.device_errors(f"opening {path}"):
            check_mount(path)
            if not os.path.lexists(path):
                _check_can_be_made(path)
                continue
            check_directory(path)
            _check_not_readonly(path)
            record = read_store(path, None if path == listed[0] else listed[0])
            if record is not None and path == listed[0]:
                check_is_first(path, first := record)
            elif record is not None:
                _check_is_part(path, record, first.store_id if first else "", listed[0])


def check_is_first(path: Path, record: StoreRecord) -> None:
    """Raise ConfigError where a directory is a further one of a store."""
    if record.part_of is not None:
        raise ConfigError(f"store_dirs: {path} is part of another store, and cannot be the first directory of one")


def _check_is_part(path: Path, record: StoreRecord, first_id: str, first_path: Path) -> None:
    if record.part_of is None and record.store_id != first_id:
        raise ConfigError(f"store_dirs: {path} is a store of its own, and cannot be part of the one in {first_path}")
    if record.part_of not in {None, first_id}:
        raise ConfigError(f"store_dirs: {path} is part of another store than the one in {first_path}")


def check_first_is_mounted(directories: Directories) -> None:
    """Raise DeviceError (ENODEV) where the first directory is no store, and on the root file
    system: its drive is not mounted, or has never been."""
    path = list_directories(directories)[0]
    if not os.path.lexists(path / STORE_FILE) and is_on_root(path):
        text = "is no store, and on the root file system, as the scheduler's is not: is its drive mounted?"
        raise DeviceError(errno.ENODEV, f"{path} {text}")


def _check_is_mounted(first: Path, path: Path, here: Collection[str]) -> None:
    """Raise ConfigError where a directory that is to become part of a store is on the root file
    system, as the first is not, and an engine store has a part on a drive that is not ``here``."""
    if not is_on_root(path) or is_on_root(first):
        return
    for home_id in home_ids(first):
        with suppress(CorruptRecord, OSError):
            if any(drive.store_id not in here for drive in read_record(first / HOMES / home_id).drives):
                raise ConfigError(
                    f"store_dirs: {path} is no store, and on the root file system, while engine store {home_id} has a "
                    "part on a drive that is not here: mount it, or delete that engine store"
                )


def _store_ids(directories: Iterable[Path]) -> set[str]:
    """Return the store ids of those directories that have one that can be read."""
    found = set()
    for path in directories:
        with suppress(KvdiskError, OSError):
            record = read_store(path)
            found.update([] if record is None else [record.store_id])
    return found


def open_further(
    first: Drive, further: Iterable[Path], *, create: bool, need_all: bool, now_s: int
) -> tuple[Drive, ...]:
    """Return the drives of the store whose first is ``first``; with ``create`` make what lacks.

    Without ``need_all``, those that cannot be opened are left out. Raises ConfigError where a
    directory is not fit or belongs elsewhere, CorruptRecord, DeviceError. To create, the caller
    holds the store lock.
    """
    drives, further = [first], tuple(further)
    for path in further:
        try:
            if create and not os.path.lexists(path / STORE_FILE):
                _check_is_mounted(first.path, path, _store_ids((first.path, *further)))
            drive = Drive(path, _store_id_of(first, path, create, now_s))
        except KvdiskError:
            if need_all:
                raise
            continue
        if any(drive.store_id == other.store_id for other in drives):
            raise ConfigError(f"store_dirs: {path} is listed twice")
        drives.append(drive)
    return tuple(drives)


def _store_id_of(first: Drive, path: Path, create: bool, now_s: int) -> str:
    with paths.device_errors(f"opening {path}"):
        prepare_directory(path, create=create)
        record = read_store(path, first.path)
        if record is None:
            if not create:
                raise ConfigError(f"store_dirs: {path} is not a kvdisk store")
            paths.keep_others_out(path)
            return make_store(path, now_s, first.store_id)
        _check_is_part(path, record, first.store_id, first.path)
        if create:
            mend_store(path, record, now_s)
    return record.store_id


def serves(drives: Sequence[Drive], record: HomeRecord) -> bool:
    """Whether every drive of a home is among these, the first as the first."""
    return record.drives[0].store_id == drives[0].store_id and {name.store_id for name in record.drives} <= {
        drive.store_id for drive in drives
    }


def with_all(drives: Sequence[Drive], names: Sequence[DriveName]) -> tuple[DriveName, ...]:
    """Return a home's drives, and behind them those that it has no folder on yet."""
    known = {name.store_id for name in names} | {drives[0].store_id}
    new = [DriveName(drive.store_id, uuid.uuid4().hex) for drive in drives if drive.store_id not in known]
    return (DriveName(drives[0].store_id, ""), *names[1:], *new)


def make_folders(folders: Iterable[DriveFolder | None]) -> None:
    """Make what is missing of a home's folders; what is no directory there is removed. Raises
    OSError."""
    for folder in folders:
        if folder is None:
            continue  # on a drive that is not here now
        for path in (folder.path, folder.segments_path):
            if not paths.is_directory(path):
                paths.remove_anything(path.parent, path.name)
                paths.make_directory(path, exist_ok=True)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                write_in_place(fd)
            finally:
                os.close(fd)


def write_in_place(fd: int) -> None:
    """Let an empty file, or what will be made in a directory, be overwritten in place.

    On btrfs the submission of a write would wait for a copy and its checksum, and on a full one
    neither HOME nor the index could be written. Others need it not.
    """
    flags = array("l", [0])
    with suppress(OSError):
        fcntl.ioctl(fd, _GET_FLAGS, flags)
        flags[0] |= _NO_COPY_ON_WRITE
        fcntl.ioctl(fd, _SET_FLAGS, flags)


def list_folders(drives: Sequence[Drive]) -> dict[DriveName, Path]:
    """List what lies in further directories under the names of homes' folders; without what a drive
    refuses to say."""
    found = {}
    for drive in drives[1:]:
        with suppress(OSError):
            for folder in home_ids(drive.path):
                found[DriveName(drive.store_id, folder)] = drive.path / HOMES / folder
    return found


def remove_folder(path: Path) -> bool:
    """Remove a folder of a further directory; return whether all of it is gone."""
    with suppress(OSError):
        paths.remove_anything(path.parent, path.name)
    return not os.path.lexists(path)
