# SPDX-License-Identifier: Apache-2.0
"""What a home's slot headers say of its blocks: all that an index can be made from.

Read are the segment headers and the 4 KiB header of every slot, on every rank; no payload: its
checksum decides when it is loaded. A block counts where the headers of all ranks agree.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvdisk.blocks import GROUP_BYTES, MAX_KEY_BYTES
from kvdisk.device import paths
from kvdisk.device.header import CHECKSUM_KINDS, HEADER_SUM_OFFSET, IDENTITY_FIELDS, MAGIC, REST_FIELDS
from kvdisk.device.segment import SEGMENTS, DriveFolder, SegmentFile, SegmentHeader, scan_file, segment_numbers
from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError, thread_errors
from kvdisk.geometry import ALIGNMENT, EPOCH_LIMIT, FORMAT_VERSION, HEADER_BYTES, slot_offset
from kvdisk.messages import FOREIGN_SEGMENTS, SegmentSpec

THREADS = 16
_TRIES, _PAUSE_S = 4, 1.0
"""How often headers of a file are read that cannot be read at once, and how long after each
other."""
_PIECE_BYTES = 1 << 20
_MOST_RANKS = 1 << 16
_FIELDS = (*IDENTITY_FIELDS, *REST_FIELDS, ("sum", "Q", HEADER_SUM_OFFSET))
_HEADER = np.dtype(
    {
        "names": [name for name, _, _ in _FIELDS],
        "formats": [f"({code[:-1]},)u1" if code.endswith("s") else np.dtype(f"<{code}") for _, code, _ in _FIELDS],
        "offsets": [offset for _, _, offset in _FIELDS],
        "itemsize": HEADER_BYTES,
    }
)
_BLOCK = np.dtype(
    [("segment", "u4"), ("index", "u4"), ("epoch", "u8"), ("generation", "u8"), ("key", "O"), ("parent", "O")]
)
Blocks: TypeAlias = NDArray[np.void]
"""Blocks as their headers name them, in the order of their places: rows of segment, index, epoch,
generation, and key and parent as bytes (no parent: empty)."""
_NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR})
"""What the system says where a segment's file is missing, or something else is in its directory's
place."""


class Shape(NamedTuple):
    """Sizes of one KV-cache group's blocks on one rank."""

    slot_bytes: int
    payload_bytes: int


class HomeShape(NamedTuple):
    """What a home holds, as its HOME describes it. ``groups``: by number."""

    fingerprint: bytes
    rank_count: int
    groups: tuple[Shape, ...]

    @classmethod
    def of(cls, fingerprint: bytes, description: Mapping[str, Any]) -> HomeShape:
        """Read it from what ``HomeRecord.description`` has under ``geometry``. Raises
        CorruptRecord."""
        try:
            geometry = description["geometry"]
            ranks = geometry["ranks"]
            groups = tuple(Shape(group["slot_bytes"], group["payload_bytes"]) for group in geometry["groups"])
        except (KeyError, TypeError) as error:
            raise CorruptRecord("HOME does not describe the sizes of its blocks") from error
        sizes = [ranks, *(size for group in groups for size in group)]
        if not groups or not all(isinstance(size, int) and size > 0 for size in sizes) or ranks > _MOST_RANKS:
            raise CorruptRecord("HOME does not describe the sizes of its blocks")
        if any(
            group.slot_bytes % ALIGNMENT or HEADER_BYTES + group.payload_bytes > group.slot_bytes for group in groups
        ):
            raise CorruptRecord("HOME describes blocks that do not fit into their slots")
        return cls(fingerprint, ranks, groups)


@dataclass(slots=True)
class Findings:
    """``segments``: those whose files are sound on every rank, ascending. ``blocks``: of each epoch
    and key the newest generation; ``older_copies``: how many more there were. ``lost``: useless
    segments, by drive and number, and why."""

    segments: list[SegmentSpec]
    blocks: Blocks
    older_copies: int
    lost: dict[tuple[int, int], str]


@thread_errors()
def scan_home(
    folders: Sequence[DriveFolder | None],
    shape: HomeShape,
    progress: Callable[[int, int], None],
    *,
    spread: bool = False,
    leave_unread: bool = False,
) -> Findings:
    """Read all headers of a home that no engine writes to. ``folders``: its parts, by drive.
    ``spread``: files of some ranks are on other hosts: those that are here say what there is, and
    loads find what is not so elsewhere.

    ``progress`` is called with segments read and segments in all. Writes nothing. Raises
    DeviceError where the directories, or all segments of a drive, cannot be read, or this process
    lacks open files or memory; with ``leave_unread`` where any segment cannot be read that is not
    known to be of no use.
    """
    places, lost = _find_segments(folders)
    segments: list[SegmentSpec] = []
    parts: list[Blocks] = []
    failed: dict[int, DeviceError] = {}
    with ThreadPoolExecutor(THREADS, thread_name_prefix="kvdisk-rebuild") as threads:

        def read(place: tuple[int, int]) -> tuple[SegmentSpec, Blocks] | KvdiskError:
            segment, drive = place
            folder = folders[drive]
            assert folder is not None
            try:
                return _read_segment(folder, segment, drive, shape, spread=spread)
            except KvdiskError as error:
                if error.is_of_process:
                    raise
                return error

        for count, (place, result) in enumerate(zip(places.items(), threads.map(read, places.items()), strict=True)):
            progress(count, len(places))
            if isinstance(result, KvdiskError):
                lost[place[1], place[0]] = str(result)
                if isinstance(result, DeviceError) and result.errno not in _NO_FILE:
                    failed[place[1]] = result
                    if leave_unread:
                        raise result
            else:
                segments.append(result[0])
                parts.append(result[1])
    for drive in failed.keys() - {segment.drive for segment in segments}:
        raise failed[drive]  # it is the drive, and its segments may be whole
    found = np.concatenate(parts) if parts else np.empty(0, _BLOCK)
    blocks = newest(found)
    return Findings(sorted(segments), blocks, len(found) - len(blocks), lost)


def _find_segments(folders: Sequence[DriveFolder | None]) -> tuple[dict[int, int], dict[tuple[int, int], str]]:
    """Return the drive of each segment, and why others are of no use. Raises DeviceError."""
    places: dict[int, int] = {}
    lost: dict[tuple[int, int], str] = {}
    for drive, folder in enumerate(folders):
        if folder is None:
            continue
        with paths.device_errors(f"looking for segments in {folder.segments_path}"):
            numbers = segment_numbers(folder.segments_path)
            others = {number for number in numbers if not paths.is_directory(folder.segments_path / str(number))}
        for segment in numbers:
            if segment >= FOREIGN_SEGMENTS:
                lost[drive, segment] = "no segment has such a number"
            elif segment in others:
                lost[drive, segment] = "it is not a directory"
            elif segment in places:
                lost[drive, segment] = f"drive {places[segment]} has a segment of that number too"
            else:
                places[segment] = drive
    return places, lost


def remove_lost(folders: Sequence[DriveFolder | None], lost: Sequence[tuple[int, int]]) -> None:
    """Remove the directories of segments that are of no use, by drive and number. Raises
    DeviceError."""
    for drive, segment in lost:
        folder = folders[drive]
        assert folder is not None
        with paths.device_errors(f"removing segment {segment}"):
            paths.remove_anything(folder.path.parent, folder.path.name, SEGMENTS, str(segment))


def _read_segment(
    folder: DriveFolder, segment: int, drive: int, shape: HomeShape, *, spread: bool
) -> tuple[SegmentSpec, Blocks]:
    """Read one segment on all ranks; ``spread``: on those that have a file here. Raises
    CorruptRecord, GeometryMismatch, DeviceError: it is of no use."""
    with ExitStack() as stack:
        files: list[SegmentFile] = []
        for rank in range(shape.rank_count):
            try:
                file = scan_file(folder, segment, rank)
            except DeviceError as error:
                if spread and error.errno in _NO_FILE and (files or rank < shape.rank_count - 1):
                    continue
                raise
            stack.callback(file.close)
            files.append(file)
            slot_bytes, slot_count = files[0].slot_bytes, files[0].slot_count
            if file.header != SegmentHeader(rank, shape.rank_count, segment, slot_bytes, slot_count, shape.fingerprint):
                raise CorruptRecord(f"segment {segment}: the header of rank {rank} says something else")
        if slot_bytes not in {group.slot_bytes for group in shape.groups}:
            raise CorruptRecord(f"segment {segment}: no block is of {slot_bytes} bytes")
        found = [_headers(file, shape) for file in files]
    return SegmentSpec(segment, slot_bytes, slot_count, drive, create=False), reduce(agreed, found)


def _headers(file: SegmentFile, shape: HomeShape) -> Blocks:
    """Return the slot headers of a file that can be read and are sound. Raises DeviceError where
    none can be read."""
    most = _PIECE_BYTES // HEADER_BYTES
    memory = mmap.mmap(-1, _PIECE_BYTES)  # anonymous maps have the alignment that O_DIRECT needs
    parts, unread = [], 0
    tries = _TRIES
    with memoryview(memory) as view:
        for first in range(0, file.slot_count, most):
            count = min(most, file.slot_count - first)
            missing = _read_headers(file, view, first, range(count))
            while missing and tries > 1:  # what is left out here is not found again
                tries -= 1
                time.sleep(_PAUSE_S)
                missing = _read_headers(file, view, first, missing)
            unread += len(missing)
            blocks = decode_headers(view, count, shape, file)
            blocks["index"] += first
            parts.append(blocks)
    if unread and unread == file.slot_count:
        raise DeviceError(errno.EIO, f"segment {file.segment}: no slot of rank {file.rank} can be read")
    return np.concatenate(parts)


def _read_headers(file: SegmentFile, view: memoryview, first: int, wanted: Iterable[int]) -> list[int]:
    """Read headers one by one, zeros where that fails; return which failed."""
    unread = []
    for number in wanted:
        place = view[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]
        try:
            whole = os.preadv(file.fd, [place], slot_offset(file.slot_bytes, first + number)) == HEADER_BYTES
        except OSError:
            whole = False
        if not whole:
            place[:] = bytes(HEADER_BYTES)
            unread.append(number)
    return unread


def decode_headers(view: memoryview, count: int, shape: HomeShape, file: SegmentFile) -> Blocks:
    """Return those of ``count`` headers in ``view`` that are sound and of this home and file.

    As ``header.read_header`` reads each, but many at once. ``index``: from 0. Keeps nothing of
    ``view``.
    """
    raw = np.frombuffer(view, _HEADER, count)
    likely = np.flatnonzero((raw["magic"] == np.frombuffer(MAGIC, np.uint8)).all(1) & (raw["rank"] == file.rank))
    raw = raw[likely]
    sums = [xxh3_64_intdigest(view[at : at + HEADER_SUM_OFFSET]) for at in (likely * HEADER_BYTES).tolist()]
    sizes = [group.payload_bytes if group.slot_bytes == file.slot_bytes else -1 for group in shape.groups]
    key_bytes, parent_bytes = raw["key_bytes"], raw["parent_bytes"]
    # A key ends with the number of its group.
    tails = np.minimum(key_bytes, MAX_KEY_BYTES).astype(np.intp)[:, None] - [2, 1]
    high, low = np.take_along_axis(raw["key"], np.maximum(tails, 0), 1).T.astype(np.int64)
    payload_bytes = np.array([*sizes, -1], np.int64)[np.minimum(high << 8 | low, len(sizes))]
    sound = (
        (np.array(sums, np.uint64) == raw["sum"])
        & (raw["version"] == FORMAT_VERSION)
        & np.isin(raw["kind"], CHECKSUM_KINDS)
        & (raw["rank_count"] == shape.rank_count)
        & (raw["fingerprint"] == np.frombuffer(shape.fingerprint, np.uint8)).all(1)
        & (raw["epoch"] < EPOCH_LIMIT)
        & (key_bytes >= GROUP_BYTES)
        & (key_bytes <= MAX_KEY_BYTES)
        & ((parent_bytes == 0) | ((parent_bytes >= GROUP_BYTES) & (parent_bytes <= MAX_KEY_BYTES)))
        & (payload_bytes >= 0)
        & (raw["payload_bytes"] == payload_bytes.astype(np.uint64))
    )
    raw = raw[sound]
    blocks = np.empty(len(raw), _BLOCK)
    blocks["segment"], blocks["index"] = file.segment, likely[sound]
    blocks["epoch"], blocks["generation"] = raw["epoch"], raw["generation"]
    for name in ("key", "parent"):
        joined, lengths = raw[name].tobytes(), raw[f"{name}_bytes"].tolist()
        starts = range(0, len(joined), MAX_KEY_BYTES)
        blocks[name] = [joined[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return blocks


def agreed(one: Blocks, other: Blocks) -> Blocks:
    """Return the blocks of a segment on which two ranks agree. Both ascend by slot."""
    _, mine, theirs = np.intersect1d(one["index"], other["index"], assume_unique=True, return_indices=True)
    one, other = one[mine], other[theirs]
    same: list[NDArray[np.bool_]] = [one[name] == other[name] for name in ("epoch", "generation", "key", "parent")]
    agreeing: Blocks = one[np.logical_and.reduce(same)]
    return agreeing


def newest(blocks: Blocks) -> Blocks:
    """Return the blocks without older copies: of one epoch and key the newest generation, of
    several the first."""
    order = np.lexsort((-np.arange(len(blocks)), blocks["generation"])).tolist()
    names = list(zip(blocks["epoch"].tolist(), blocks["key"].tolist(), strict=True))
    rows = {names[row]: row for row in order}  # the last of a name stays
    return blocks[sorted(rows.values())]
