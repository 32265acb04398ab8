# SPDX-License-Identifier: Apache-2.0
"""One rank's segment file, ``segments/<n>/rank<r>.kv``: a 4 KiB header, then slots. docs/STORE.md
has the layout."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import struct
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvdisk.device import paths
from kvdisk.errors import CorruptRecord, DeviceError, GeometryMismatch
from kvdisk.geometry import FINGERPRINT_BYTES, FORMAT_VERSION, SEGMENT_HEADER_BYTES, segment_file_bytes
from kvdisk.messages import SegmentSpec

SEGMENTS = "segments"
_MAGIC = b"KVDSEGM\0"
_FIELDS = struct.Struct(f"<8sHHH2xQQQ{FINGERPRINT_BYTES}s")
_SUM = struct.Struct("<Q")
_SUM_OFFSET = SEGMENT_HEADER_BYTES - _SUM.size
_FILE_NAME = re.compile(r"rank(0|[1-9][0-9]*)\.kv")
_SEGMENT_NAME = re.compile(r"0|[1-9][0-9]*")
_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_FOLDER_TRIES = 10


class DriveFolder(NamedTuple):
    """The part of an engine store that is on one drive: ``<store_dir>/homes/<id or folder>``."""

    path: Path

    @property
    def segments_path(self) -> Path:
        """The directory of the segments on this drive."""
        return self.path / SEGMENTS


class SegmentHeader(NamedTuple):
    """What a segment file's header says, in the file's order."""

    rank: int
    rank_count: int
    segment: int
    slot_bytes: int
    slot_count: int
    fingerprint: bytes


class SegmentFileSummary(NamedTuple):
    """A segment file as a listing found it. ``drive``: its position in the engine store's list of
    drives."""

    segment: int
    rank: int
    length_bytes: int
    allocated_bytes: int
    drive: int = 0


class SegmentFile:
    """An open segment file, which owns ``fd`` until ``close``. See ``make_direct``."""

    __slots__ = ("fd", "header", "rank", "segment", "slot_bytes", "slot_count")

    def __init__(self, fd: int, header: SegmentHeader) -> None:
        self.fd = fd
        self.header = header
        self.segment = header.segment
        self.rank = header.rank
        self.slot_bytes = header.slot_bytes
        self.slot_count = header.slot_count

    def close(self) -> None:
        """Close the file; ``fd`` becomes -1. The caller has detached it from its device before.
        Idempotent."""
        if self.fd >= 0:
            paths.close(self.fd)
            self.fd = -1


def create_segment(
    folder: DriveFolder, spec: SegmentSpec, rank: int, rank_count: int, fingerprint: bytes
) -> SegmentFile:
    """Make this rank's file of a segment with all its bytes allocated, and open it. Waits for the
    drive.

    The file gets its name only when it is complete. Raises DeviceError, with nothing left behind:
    ENOSPC, EDQUOT or EFBIG where there is no room, EEXIST where the file exists already, ...
    """
    header = SegmentHeader(rank, rank_count, spec.segment, spec.slot_bytes, spec.slot_count, fingerprint)
    final, fd = segment_path(folder, spec.segment, rank), -1
    temporary = _temporary(final)
    with paths.device_errors(f"making segment {spec.segment} for rank {rank}"):
        paths.check_way(*final.parents[:3])
        try:
            if os.path.lexists(final):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
            temporary.unlink(missing_ok=True)
            fd = _create_with_folder(temporary)
            # Before it is direct: where a file system cannot allocate, libc writes single bytes.
            paths.allocate(fd, segment_file_bytes(spec.slot_bytes, spec.slot_count))
            encoded = _encode(header)
            make_direct(fd, lambda: _write_header(fd, encoded))
            temporary.rename(final)
        except BaseException:
            if fd >= 0:
                _discard(fd, temporary)
            _remove_if_empty(final.parent)
            raise
    return SegmentFile(fd, header)


def _create_with_folder(path: Path) -> int:
    """Make a file, and its folder where that is missing: another rank that cleans up may remove the
    folder while it is empty."""
    for tries_left in reversed(range(_FOLDER_TRIES)):
        try:
            paths.make_directory(path.parent, exist_ok=True)
            return paths.create_file(path)
        except FileNotFoundError:
            if not tries_left:
                raise
    raise AssertionError("unreachable")


def open_segment(
    folder: DriveFolder, spec: SegmentSpec, rank: int, rank_count: int, fingerprint: bytes, *, writable: bool = True
) -> SegmentFile:
    """Open this rank's file of a segment. Waits for the drive. Raises DeviceError (ENOENT where
    there is none), CorruptRecord where its header does not decode or the file is too short,
    GeometryMismatch where it was made for something else."""
    file = scan_file(folder, spec.segment, rank, os.O_RDWR if writable else os.O_RDONLY)
    expected = SegmentHeader(rank, rank_count, spec.segment, spec.slot_bytes, spec.slot_count, fingerprint)
    for name, found, wanted in zip(SegmentHeader._fields, file.header, expected, strict=True):
        if found != wanted:
            file.close()
            raise GeometryMismatch(f"segment {spec.segment} of rank {rank}: {name} is {found!r}, not {wanted!r}")
    return file


def scan_file(folder: DriveFolder, segment: int, rank: int, flags: int = os.O_RDONLY) -> SegmentFile:
    """Open a segment file, by default for reading, whatever it was made for. Raises as
    ``open_segment``."""
    path = segment_path(folder, segment, rank)
    with paths.device_errors(f"opening segment {segment} of rank {rank}"):
        paths.check_way(*path.parents[:3])
        fd = paths.open_own(path, flags)
        if fd < 0:
            raise CorruptRecord(f"{path} is not a file")
        block = mmap.mmap(-1, SEGMENT_HEADER_BYTES)

        def read_first() -> None:
            if os.preadv(fd, [block], 0) != SEGMENT_HEADER_BYTES:
                raise CorruptRecord(f"{path} ends within its header")

        try:
            make_direct(fd, read_first)
            header = _decode(block[:])
            length_bytes = os.fstat(fd).st_size
            if length_bytes < segment_file_bytes(header.slot_bytes, header.slot_count):
                raise CorruptRecord(f"{path} has {length_bytes} bytes, too few for its {header.slot_count} slots")
        except BaseException:
            paths.close(fd)
            raise
    return SegmentFile(fd, header)


def read_segment_header(folder: DriveFolder, segment: int, rank: int) -> SegmentHeader:
    """Return a segment file's header, for tools that know nothing about it yet. Raises as
    ``open_segment``."""
    file = scan_file(folder, segment, rank)
    file.close()
    return file.header


def drop_segment(folder: DriveFolder, segment: int, rank: int | None) -> None:
    """Remove this rank's closed file of a segment, and its directory with the last rank's; of all
    ranks with None. Gone already is no error. Raises DeviceError."""
    with paths.device_errors(f"dropping segment {segment} of {'all ranks' if rank is None else f'rank {rank}'}"):
        if rank is None:
            names = []
            with suppress(FileNotFoundError, NotADirectoryError):
                names = os.listdir(folder.segments_path / str(segment))
        else:
            path = segment_path(folder, segment, rank)
            names = [_temporary(path).name, path.name]
        _remove_files(folder, segment, names)


def free_bytes(fd: int, length: int) -> None:
    """Free the bytes of an open file that has no name, and keep its length: reads return zeros.
    Raises OSError."""
    os.ftruncate(fd, 0)
    os.ftruncate(fd, length)


def remove_unknown_segments(folder: DriveFolder, rank: int, known: Collection[int], *, of_all: bool = False) -> None:
    """Remove what a crash left of this rank: files of segments not in ``known``, and files never
    completed. ``of_all``: such segments of all ranks, which may be on other hosts by now. Raises
    DeviceError."""
    with paths.device_errors(f"removing unknown segments of rank {rank}"):
        for segment in segment_numbers(folder.segments_path):
            path = segment_path(folder, segment, rank)
            if segment in known:
                if paths.is_directory(path.parent):
                    _remove_files(folder, segment, (_temporary(path).name,))
            elif of_all:
                drop_segment(folder, segment, None)
            else:
                _remove_files(folder, segment, (_temporary(path).name, path.name))


def scan_folders(folders: Sequence[DriveFolder | None]) -> tuple[SegmentFileSummary, ...]:
    """List the segment files of an engine store on all its drives, by segment and rank. Raises
    OSError."""
    found = []
    places = [
        (segment, drive, folder.segments_path / str(segment))
        for drive, folder in enumerate(folders)
        if folder is not None
        for segment in segment_numbers(folder.segments_path)
    ]
    for segment, drive, directory in places:
        if not paths.is_directory(directory):
            continue
        with suppress(FileNotFoundError), os.scandir(directory) as files:
            for file in files:
                match = _FILE_NAME.fullmatch(file.name)
                if match and file.is_file(follow_symlinks=False):
                    status = file.stat(follow_symlinks=False)
                    allocated = status.st_blocks * paths.STAT_BLOCK_BYTES
                    found.append(SegmentFileSummary(segment, int(match[1]), status.st_size, allocated, drive))
    return tuple(sorted(found))


def segment_numbers(segments_path: Path) -> list[int]:
    """List the segments that have a directory, or anything else of that name, in ascending order.
    Raises OSError."""
    with suppress(FileNotFoundError):
        return sorted(int(name) for name in os.listdir(segments_path) if _SEGMENT_NAME.fullmatch(name))
    return []


def segment_path(folder: DriveFolder, segment: int, rank: int) -> Path:
    """Return the path of this rank's file of a segment, whether it exists or not."""
    assert segment >= 0
    assert rank >= 0
    return folder.segments_path / str(segment) / f"rank{rank}.kv"


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _remove_files(folder: DriveFolder, segment: int, names: Collection[str]) -> None:
    """Remove files of a segment, whatever is in their place, and their directory where it is empty
    or no directory."""
    homes, way = folder.path.parent, (folder.path.name, SEGMENTS, str(segment))
    for name in names:
        with suppress(NotADirectoryError):
            paths.remove_anything(homes, *way, name)
    directory = folder.segments_path / str(segment)
    if paths.is_other_than_directory(directory):
        paths.remove_anything(homes, *way)
    _remove_if_empty(directory)


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):  # other ranks may still have files in it, or may have removed it first
        directory.rmdir()


def _discard(fd: int, path: Path) -> None:
    # Freeing the bytes first: a failed posix_fallocate leaves the space taken, and a descriptor
    # elsewhere would keep it taken after the unlink.
    with suppress(OSError):
        os.truncate(fd, 0)
    with suppress(OSError):
        path.unlink()
    paths.close(fd)


def make_direct(fd: int, first: Callable[[], object]) -> bool:
    """Let transfers of an open file bypass the kernel's cache (O_DIRECT), unless the file system
    refuses that; return whether they do.

    ``first`` makes the first transfer. It may be what the file system refuses; then it is made
    again, without O_DIRECT. Raises what ``first`` raises.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        first()
    except OSError as error:
        if error.errno not in _NOT_DIRECT:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        first()
        return False
    return True


def _write_header(fd: int, encoded: bytes) -> None:
    block = mmap.mmap(-1, SEGMENT_HEADER_BYTES)  # anonymous maps have the alignment that O_DIRECT needs
    block[:] = encoded
    if os.pwritev(fd, [block], 0) != SEGMENT_HEADER_BYTES:
        raise DeviceError(errno.EIO, "the segment header was written in part")


def _encode(header: SegmentHeader) -> bytes:
    assert len(header.fingerprint) == FINGERPRINT_BYTES
    padded = _FIELDS.pack(_MAGIC, FORMAT_VERSION, *header).ljust(_SUM_OFFSET, b"\0")
    return padded + _SUM.pack(xxh3_64_intdigest(padded))


def _decode(encoded: bytes) -> SegmentHeader:
    magic, version, *fields = _FIELDS.unpack_from(encoded)
    if magic != _MAGIC or xxh3_64_intdigest(encoded[:_SUM_OFFSET]) != _SUM.unpack_from(encoded, _SUM_OFFSET)[0]:
        raise CorruptRecord("segment header: no magic, or its checksum does not match")
    if version != FORMAT_VERSION:
        raise GeometryMismatch(f"segment header: format version {version}, this kvdisk reads {FORMAT_VERSION}")
    return SegmentHeader(*fields)
