# SPDX-License-Identifier: Apache-2.0
"""What the control files STORE and HOME say, and which directory may be a store."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvdisk.device import paths
from kvdisk.device.segment import SegmentFileSummary
from kvdisk.errors import ConfigError, CorruptRecord
from kvdisk.geometry import FINGERPRINT_BYTES, FORMAT_VERSION

STORE_FILE = "STORE"
HOME_FILE = "HOME"
LOCK_FILE = "lock"
HOMES = "homes"
INDEX = "index"
SEGMENTS = "segments"

_HEX_DIGITS = frozenset("0123456789abcdef")
# A store whose maker died, and what a fresh file system holds, may become a store.
_BEFORE_STORE = frozenset({LOCK_FILE, HOMES, STORE_FILE, STORE_FILE + ".tmp", "lost+found"})


@dataclass(frozen=True, slots=True)
class HomeRecord:
    """What a HOME file says.

    ``description``: plain JSON values for people and tools; the value under ``geometry`` must be equal for a
    takeover. ``clean``: the last owner closed the home in order. Times: whole seconds since the Unix epoch.
    """

    format_version: int
    fingerprint: bytes
    description: dict[str, Any]
    boot_id: str
    clean: bool
    cap_bytes: int
    last_use_s: int
    created_s: int

    def suits(self, fingerprint: bytes, description: dict[str, Any]) -> bool:
        """Return whether an engine of this fingerprint and description can read what the home holds."""
        return self.fingerprint == fingerprint and self.description.get("geometry") == description.get("geometry")


class HomePaths:
    """Where the parts of a home are."""

    __slots__ = ()
    path: Path

    @property
    def index_path(self) -> Path:
        """Directory of the LMDB environment."""
        return self.path / INDEX

    @property
    def segments_path(self) -> Path:
        """Directory of the segments."""
        return self.path / SEGMENTS


@dataclass(frozen=True, slots=True)
class HomeSummary(HomePaths):
    """A home as ``list_homes`` found it. ``record`` is None where HOME is missing or does not decode.

    ``alive``: a process of its owner lives. ``allocated_bytes``: all the home's files and directories.
    """

    id: str
    path: Path
    record: HomeRecord | None
    alive: bool
    allocated_bytes: int
    segments: tuple[SegmentFileSummary, ...]


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


def read_record(home_path: Path) -> HomeRecord:
    """Read HOME. Raises CorruptRecord where it does not decode or is of another format, OSError."""
    fields = paths.read_control(home_path / HOME_FILE)
    try:
        fields["fingerprint"] = bytes.fromhex(fields["fingerprint"])
        record = HomeRecord(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptRecord(f"{home_path / HOME_FILE} does not have the fields of a home") from error
    numbers = (record.format_version, record.cap_bytes, record.last_use_s, record.created_s)
    if (
        not all(isinstance(number, int) for number in numbers)
        or not isinstance(record.description, dict)
        or not isinstance(record.boot_id, str)
        or not isinstance(record.clean, bool)
        or len(record.fingerprint) != FINGERPRINT_BYTES
        or record.format_version != FORMAT_VERSION
    ):
        raise CorruptRecord(f"{home_path / HOME_FILE} is of another format")
    return record


def complete_record(home_path: Path) -> HomeRecord | None:
    """Read HOME, or return None where it or a directory of the home is missing or does not decode. Raises OSError."""
    if not (paths.is_directory(home_path / INDEX) and paths.is_directory(home_path / SEGMENTS)):
        return None
    with suppress(FileNotFoundError, CorruptRecord):
        return read_record(home_path)
    return None


def write_record(home_path: Path, record: HomeRecord, *, durable: bool) -> None:
    """Replace HOME in one step. Raises OSError."""
    fields = asdict(record) | {"fingerprint": record.fingerprint.hex()}
    paths.write_control(home_path / HOME_FILE, fields, durable=durable)


def check_directory(path: Path) -> None:
    """Raise ConfigError unless ``path`` is a directory that this user alone writes, and no symlink."""
    if path.is_symlink():
        raise ConfigError(f"store_dirs: {path} is a symbolic link, name the directory itself")
    if not paths.is_directory(path):
        raise ConfigError(f"store_dirs: {path} is not a directory")
    status = path.lstat()
    if status.st_uid != os.geteuid():
        raise ConfigError(f"store_dirs: {path} belongs to user {status.st_uid}, not to user {os.geteuid()}")
    if status.st_mode & 0o022:
        raise ConfigError(
            f"store_dirs: {path} can be written by others than its owner (mode {status.st_mode & 0o777:o})"
        )


def is_store(path: Path) -> bool:
    """Return whether a directory is a store of this format; False where it is empty, or was left half made.

    Raises ConfigError where it is a store of another format or holds other files, CorruptRecord, OSError.
    """
    try:
        version = paths.read_control(path / STORE_FILE).get("format_version")
    except FileNotFoundError:
        others = sorted(set(os.listdir(path)) - _BEFORE_STORE) or home_ids(path)
        if others and os.path.lexists(path / STORE_FILE):
            return is_store(path)  # another process made it meanwhile
        if others:
            raise ConfigError(f"store_dirs: {path} is not a kvdisk store and holds other files ({others[0]})") from None
        return False
    if not isinstance(version, int):
        raise CorruptRecord(f"{path / STORE_FILE} names no format version")
    if version != FORMAT_VERSION:
        age = "a newer" if version > FORMAT_VERSION else "an older"
        raise ConfigError(f"store_dirs: {path} was made by {age} kvdisk (format {version}, not {FORMAT_VERSION})")
    return True
