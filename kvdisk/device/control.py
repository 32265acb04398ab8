# SPDX-License-Identifier: Apache-2.0
"""What the control files STORE and HOME say, and which directory may be a store."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.device import paths
from kvdisk.device.segment import SEGMENTS, DriveFolder, SegmentFileSummary
from kvdisk.errors import ConfigError, CorruptRecord, DeviceError
from kvdisk.geometry import FINGERPRINT_BYTES, FORMAT_VERSION
from kvdisk.salts import SALT_KEY_BYTES

STORE_FILE = "STORE"
HOME_FILE = "HOME"
LOCK_FILE = "lock"
USES_FILE = "USES"
SALT_KEY_FILE = "SALT_KEY"
HOMES = "homes"
PRIVATE = "kvdisk-"
"""With a user's number behind it: that user's store in a directory where others may write too."""
INDEX = "index"

_NUMBER_LIMIT = 1 << 62
PLATFORM = "platform"
"""In the description of a guest: on what its ranks computed. The fingerprint has that of the
scheduler's host alone."""
_SELDOM_FIELDS = ("lineage", "guest")
"""Of HOME: written only where they say something."""
JOINT_CAP = "joint_cap"
"""In the description of a home: there an older kvdisk lets it be. Another field is damage to
it."""
TOGETHER = "together"
LEAVES = "leaves"
"""In the description of a home, likewise."""
_HEX_DIGITS = frozenset("0123456789abcdef")
# A store whose maker died, and what a fresh file system holds, may become a store.
_BEFORE_STORE = frozenset({LOCK_FILE, HOMES, STORE_FILE, STORE_FILE + ".tmp", "lost+found"})


@dataclass(frozen=True, slots=True)
class DriveName:
    """A part of a home: the ``folder`` (32 hex digits) under ``homes`` in the directory with this
    ``store_id``. Empty for a home's first part, which is its own directory."""

    store_id: str
    folder: str


class JointCap(NamedTuple):
    """The most bytes that several engine stores of one store have on its drives together: those of
    this name, whether their owners live or not. ``member``: which of them this is. It takes over
    what the same one left, and nothing of another."""

    name: str
    nvme_bytes: int
    member: str = ""


class Together(NamedTuple):
    """The most bytes that the owners of a store's homes might have at once, and when that was last
    so, in seconds since the Unix epoch."""

    nvme_bytes: int
    at_s: int


@dataclass(frozen=True, slots=True)
class HomeRecord:
    """What a HOME file says.

    ``description``: plain JSON values for people and tools; what is under ``geometry`` must be
    equal for a takeover. ``boot_id``: of the boot during which the index is whole; empty: it is
    not. ``clean``: the last owner closed the home in order. ``index_sum``: of the index's data file
    since then; empty while an owner may write to it. ``index_bytes``: what the index may grow to.
    ``drives``: where the segments lie. Times: whole seconds since the Unix epoch.
    ``lineage``: of a home whose ranks may be on several hosts: the id that it had first; empty: all
    its files are here. ``guest``: it has files of ranks that are on this host, and no index: that
    is in the home of this lineage, on the host of the engine's scheduler.
    """

    format_version: int
    fingerprint: bytes
    description: dict[str, Any]
    boot_id: str
    clean: bool
    cap_bytes: int
    last_use_s: int
    created_s: int
    index_bytes: int
    index_sum: str
    drives: tuple[DriveName, ...]
    lineage: str = ""
    guest: bool = False

    @property
    def is_spread(self) -> bool:
        """Whether files of some ranks may be on other hosts."""
        return bool(self.lineage)

    @property
    def joint_cap(self) -> JointCap | None:
        """What bounds this home together with others, beside its own cap; None: nothing does."""
        said = self.description.get(JOINT_CAP)
        if not isinstance(said, dict):
            return None
        name, count, member = said.get("name"), said.get("nvme_bytes"), said.get("member", "")
        if not isinstance(name, str) or not isinstance(count, int) or not isinstance(member, str):
            return None
        return JointCap(name, count, member) if 0 < count < _NUMBER_LIMIT else None

    @property
    def together(self) -> Together | None:
        """What this home's owner and those beside it might have; None: HOME does not say."""
        said = self.description.get(TOGETHER)
        if not isinstance(said, dict):
            return None
        count, at_s = said.get("nvme_bytes"), said.get("at_s")
        if not isinstance(count, int) or not isinstance(at_s, int):
            return None
        return Together(count, at_s) if 0 < count < _NUMBER_LIMIT else None

    def with_together(self, together: Together) -> HomeRecord:
        """Return this with another ``together``."""
        return replace(self, description={**self.description, TOGETHER: together._asdict()})

    @property
    def leaves(self) -> frozenset[str]:
        """The ids and lineages of homes that the owner could not open at its start. They stay for
        the next one: nobody deletes them for room while the owner lives."""
        said = self.description.get(LEAVES)
        return frozenset(name for name in said if isinstance(name, str)) if isinstance(said, list) else frozenset()

    def is_of_member(self, joint: JointCap | None) -> bool:
        """Return whether an owner with this joint cap may take the home over: it is not another
        member's."""
        mine = self.joint_cap
        return mine is None or joint is None or mine.member == joint.member

    def suits(self, fingerprint: bytes, description: dict[str, Any]) -> bool:
        """Return whether an engine of this fingerprint and description can read what the home
        holds, by an index that is in it."""
        return (
            not self.guest
            and self.fingerprint == fingerprint
            and self.description.get("geometry") == description.get("geometry")
        )

    def is_guest_of(self, lineage: str, fingerprint: bytes, description: Mapping[str, Any]) -> bool:
        """Return whether this has files of ranks of an engine whose home is of this lineage, made
        on the platform that ``description`` names."""
        return (
            self.guest
            and self.lineage == lineage
            and self.fingerprint == fingerprint
            and all(self.description.get(name) == description.get(name) for name in ("geometry", PLATFORM))
        )


class HomePaths:
    """Where the parts of a home are. ``folders``: by drive, None where one is not open here."""

    __slots__ = ()
    path: Path
    folders: tuple[DriveFolder | None, ...]

    @property
    def index_path(self) -> Path:
        """Directory of the LMDB environment."""
        return self.path / INDEX

    @property
    def segments_path(self) -> Path:
        """Directory of the segments on the first drive."""
        return self.path / SEGMENTS

    def folder(self, drive: int) -> DriveFolder:
        """Return the home's part on a drive. Raises DeviceError (ENODEV) if it is not open here."""
        return opened(self.folders, drive, self.path.name)


def opened(folders: Sequence[DriveFolder | None], drive: int, home_id: str) -> DriveFolder:
    """Return a home's part on a drive, of all its parts. Raises DeviceError (ENODEV) if it is not
    open here."""
    folder = folders[drive] if drive < len(folders) else None
    if folder is None:
        raise DeviceError(errno.ENODEV, f"drive {drive} of engine store {home_id} could not be opened")
    return folder


@dataclass(frozen=True, slots=True)
class HomeSummary(HomePaths):
    """A home as ``list_homes`` found it.

    ``record``: None where HOME is missing or does not decode. ``alive``: a process of its owner
    lives. ``folders``: by position in the record's ``drives``; None where the directory was not
    named.
    """

    id: str
    path: Path
    record: HomeRecord | None
    alive: bool
    allocated_bytes: int
    segments: tuple[SegmentFileSummary, ...]
    folders: tuple[DriveFolder | None, ...] = ()


def is_home_id(text: str) -> bool:
    """Return whether ``text`` is 32 lower-case hex digits."""
    return len(text) == 32 and _HEX_DIGITS.issuperset(text)


def home_ids(store_path: Path) -> list[str]:
    """List the ids of a store's homes, ascending. Raises OSError."""
    try:
        with os.scandir(store_path / HOMES) as found:
            return sorted(item.name for item in found if is_home_id(item.name) and item.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def read_record(home_path: Path, damaged: Callable[[CorruptRecord], object] | None = None) -> HomeRecord:
    """Read HOME; where that does not decode, HOME.tmp, which has what it said before. What it says
    of the index is checked when that is opened. ``damaged`` is told. Raises CorruptRecord where
    neither decodes, or they are of another format, OSError: FileNotFoundError where there is no
    HOME, whatever HOME.tmp says, as the deletion of a home begins with that."""
    try:
        return _read_record(home_path / HOME_FILE)
    except CorruptRecord as error:
        with suppress(CorruptRecord, FileNotFoundError):
            record = _read_record(paths.kept_beside(home_path / HOME_FILE))
            if damaged is not None:
                damaged(error)
            return record
        raise


def _read_record(path: Path) -> HomeRecord:
    fields = paths.read_control(path)
    try:
        fields["fingerprint"] = bytes.fromhex(fields["fingerprint"])
        fields["drives"] = tuple(DriveName(**drive) for drive in fields["drives"])
        record = HomeRecord(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptRecord(f"{path} does not have the fields of an engine store") from error
    if not _is_sound(record):
        raise CorruptRecord(f"{path} is of another format")
    return record


def _is_sound(record: HomeRecord) -> bool:
    numbers = (record.format_version, record.cap_bytes, record.last_use_s, record.created_s, record.index_bytes)
    return (
        all(isinstance(number, int) and 0 <= number < _NUMBER_LIMIT for number in numbers)
        and isinstance(record.description, dict)
        and isinstance(record.boot_id, str)
        and isinstance(record.clean, bool)
        and isinstance(record.index_sum, str)
        and _are_drives(record.drives)
        and (isinstance(record.lineage, str) and (not record.lineage or is_home_id(record.lineage)))
        and isinstance(record.guest, bool)
        and not (record.guest and not record.lineage)
        and len(record.fingerprint) == FINGERPRINT_BYTES
        and record.format_version == FORMAT_VERSION
    )


def _are_drives(drives: tuple[DriveName, ...]) -> bool:
    return (
        all(isinstance(drive.store_id, str) and is_home_id(drive.store_id) for drive in drives)
        and [drive.folder for drive in drives[:1]] == [""]
        and all(isinstance(drive.folder, str) and is_home_id(drive.folder) for drive in drives[1:])
        and len({drive.store_id for drive in drives}) == len(drives)
    )


def write_record(home_path: Path, record: HomeRecord) -> None:
    """Replace HOME in one step; it survives a loss of power. Raises OSError."""
    assert _is_sound(record), "the next start would take it for damaged, and delete the engine store"
    fields = asdict(record) | {"fingerprint": record.fingerprint.hex()}
    for name in _SELDOM_FIELDS:  # an older kvdisk takes no field that it does not know
        if not fields[name]:
            del fields[name]
    paths.write_control(home_path / HOME_FILE, fields)


def store_directory(path: Path) -> Path:
    """Return where the store of a directory that a user names lies: there; or in a directory of
    this user's own in it, where the one that is named belongs to others or is open to them, as
    volumes in containers are. Raises nothing: what is there is looked at later."""
    own = path / f"{PRIVATE}{os.geteuid()}"
    with suppress(OSError):
        status = path.lstat()
        named_is_store = not stat.S_ISDIR(status.st_mode) or os.path.lexists(path / STORE_FILE)
        is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not named_is_store and (os.path.lexists(own) or not is_private):
            return own
    return path


def why_no_store(path: Path) -> str:
    """Say why there is nothing at a ``store_directory``. Raises OSError."""
    if path.name != f"{PRIVATE}{os.geteuid()}" or not paths.is_directory(path.parent):
        return f"{path} is not a directory"
    around = path.parent
    if not paths.may(around, os.R_OK | os.X_OK):
        return f"user {os.geteuid()} has no permission to read {around}, which belongs to {_user(around)}"
    if others := sorted(around.glob(PRIVATE + "*")):
        return f"the store in {around} belongs to {_user(others[0])}: run this as that user"
    return f"{around} is not a kvdisk store"


def _user(path: Path) -> str:
    return f"user {path.lstat().st_uid}"


def check_directory(path: Path) -> None:
    """Raise ConfigError unless ``path``, and ``homes`` in it, are directories that this user alone
    writes."""
    _check_own(path)
    if os.path.lexists(path / HOMES):
        _check_own(path / HOMES)


def _check_own(path: Path) -> None:
    if path.is_symlink():
        raise ConfigError(f"store_dirs: {path} is a symbolic link, name the directory itself")
    if not paths.is_directory(path):
        raise ConfigError(f"store_dirs: {path} is not a directory")
    status = path.lstat()
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"store_dirs: {path} belongs to user {status.st_uid}, not to user {os.geteuid()}: run this as its owner"
        )
    if status.st_mode & 0o002 or (status.st_mode & 0o020 and _has_others(status.st_gid)):
        raise ConfigError(
            f"store_dirs: {path} can be written by others than its owner (mode {status.st_mode & 0o777:o}): set its "
            "mode to 700 if nobody else has written there, or delete it"
        )


def _has_others(group: int) -> bool:
    """Whether this machine knows another user of a group than this one and root.

    A container knows none of the group that Kubernetes gives a volume (fsGroup), nor a host of a
    user's private group.
    """
    members = {user.pw_name for user in pwd.getpwall() if user.pw_gid == group}
    with suppress(KeyError):
        members.update(grp.getgrgid(group).gr_mem)
    with suppress(KeyError):
        members.discard(pwd.getpwuid(os.geteuid()).pw_name)
    return bool(members - {"root"})


class StoreRecord(NamedTuple):
    """What a STORE file says. ``part_of``: store id of the store's first directory; None: this is
    it."""

    store_id: str
    part_of: str | None


def read_salt_key(path: Path) -> bytes | None:
    """Return the key of a store's digests of salts; None: there is none, as in a store that was
    never used since digests are kept. Raises CorruptRecord, OSError."""
    try:
        fields = paths.read_control(path / SALT_KEY_FILE)
    except FileNotFoundError:
        return None
    with suppress(KeyError, TypeError, ValueError):
        key = bytes.fromhex(fields["key"])
        if len(key) == SALT_KEY_BYTES:
            return key
    raise CorruptRecord(f"{path / SALT_KEY_FILE} has no key")


def write_salt_key(path: Path, key: bytes) -> None:
    """Write the key of a store's digests of salts. Raises OSError. The caller holds the store
    lock."""
    paths.write_control(path / SALT_KEY_FILE, {"key": key.hex()})


def is_store(path: Path) -> bool:
    """Return whether a directory has all of a store's own files. Raises nothing."""
    return os.path.lexists(path / STORE_FILE) and os.path.lexists(path / LOCK_FILE)


def read_store(path: Path, first: Path | None = None) -> StoreRecord | None:
    """Read STORE of a directory; None where the directory is empty, or was left half made. Where
    STORE is gone or damaged, return what it must have said by the HOMEs in ``first``, the store's
    first directory (None: this is it).

    Raises ConfigError where it is a store of another format or holds other files, CorruptRecord,
    OSError.
    """
    try:
        return _read_store(path)
    except FileNotFoundError:
        others = sorted(set(os.listdir(path)) - _BEFORE_STORE) or home_ids(path)
        if others and os.path.lexists(path / STORE_FILE):
            return read_store(path, first)  # another process made it meanwhile
        if others and (said := _said_by_homes(path, first)) is not None:
            return said
        if others:
            raise ConfigError(f"store_dirs: {path} is not a kvdisk store and holds other files ({others[0]})") from None
        return None
    except CorruptRecord:
        if (said := _said_by_homes(path, first)) is not None:
            return said
        raise


def has_sound_store(path: Path) -> bool:
    """Return whether STORE of a directory is there and decodes. Raises ConfigError where it is of
    another format, OSError."""
    with suppress(CorruptRecord, FileNotFoundError):
        return bool(_read_store(path))
    return False


def _said_by_homes(path: Path, first: Path | None) -> StoreRecord | None:
    """Return what the HOMEs of a store say of one of its directories; None where they say nothing,
    or not the same. Raises OSError."""
    found: set[StoreRecord] = set()
    for home_id in home_ids(first or path):
        with suppress(CorruptRecord, OSError):
            mine, *others = read_record((first or path) / HOMES / home_id).drives
            if first is None:
                found.add(StoreRecord(mine.store_id, None))
            else:
                there = (name for name in others if os.path.lexists(path / HOMES / name.folder))
                found.update(StoreRecord(name.store_id, mine.store_id) for name in there)
    return found.pop() if len(found) == 1 else None


def _read_store(path: Path) -> StoreRecord:
    fields = paths.read_control(path / STORE_FILE)
    version, store_id, part_of = (fields.get(name) for name in ("format_version", "store_id", "part_of"))
    if not isinstance(version, int):
        raise CorruptRecord(f"{path / STORE_FILE} names no format version")
    if version != FORMAT_VERSION:
        age = "a newer" if version > FORMAT_VERSION else "an older"
        raise ConfigError(f"store_dirs: {path} was made by {age} kvdisk (format {version}, not {FORMAT_VERSION})")
    if not (isinstance(store_id, str) and is_home_id(store_id)) or not (
        part_of is None or (isinstance(part_of, str) and is_home_id(part_of))
    ):
        raise CorruptRecord(f"{path / STORE_FILE} names no store id")
    return StoreRecord(store_id, part_of)
