# SPDX-License-Identifier: Apache-2.0
"""What a home's slot headers say of its blocks: all that an index can be made from.

Read are the segment headers and the 4 KiB header of every slot, on every rank; no payload: its checksum decides when it
is loaded. A block counts where the headers of all ranks agree.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvdisk.blocks import GROUP_BYTES, BlockKey, group_of
from kvdisk.device import paths
from kvdisk.device.control import SEGMENTS, DriveFolder
from kvdisk.device.header import SlotHeader, read_header
from kvdisk.device.segment import SegmentFile, SegmentHeader, scan_file, segment_numbers
from kvdisk.errors import CorruptRecord, KvdiskError
from kvdisk.geometry import HEADER_BYTES, slot_offset
from kvdisk.messages import FOREIGN_SEGMENTS

THREADS = 8
_PIECE_BYTES = 1 << 20
_SMALL_SLOT_BYTES = 64 << 10
"""Slots up to this size are read through, larger ones by their headers."""
_EPOCH_LIMIT = 2**63
_MOST_RANKS = 1 << 16


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
        """Read it from what ``HomeRecord.description`` has under ``geometry``. Raises CorruptRecord."""
        try:
            geometry = description["geometry"]
            ranks = geometry["ranks"]
            groups = tuple(Shape(group["slot_bytes"], group["payload_bytes"]) for group in geometry["groups"])
        except (KeyError, TypeError) as error:
            raise CorruptRecord("HOME does not describe the sizes of its blocks") from error
        sizes = [ranks, *(size for group in groups for size in group)]
        if not groups or not all(isinstance(size, int) and size > 0 for size in sizes) or ranks > _MOST_RANKS:
            raise CorruptRecord("HOME does not describe the sizes of its blocks")
        return cls(fingerprint, ranks, groups)


class FoundSegment(NamedTuple):
    """A segment whose files are sound on every rank."""

    segment: int
    slot_bytes: int
    slot_count: int
    drive: int


class FoundBlock(NamedTuple):
    """A block whose headers agree on every rank."""

    epoch: int
    key: BlockKey
    segment: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which no block needs
    generation: int
    parent: BlockKey | None


@dataclass(slots=True)
class Findings:
    """``blocks``: by epoch and key, the newest generation of each. ``lost``: segments with files that are of no use,
    by drive and number, and why. ``older_copies``: blocks that a newer generation of the same key has replaced.
    """

    segments: list[FoundSegment] = field(default_factory=list)
    blocks: dict[tuple[int, BlockKey], FoundBlock] = field(default_factory=dict)
    lost: dict[tuple[int, int], str] = field(default_factory=dict)
    older_copies: int = 0

    def add(self, block: FoundBlock) -> None:
        """Count a block in, unless a newer one of its key is known."""
        where = (block.epoch, block.key)
        known = self.blocks.get(where)
        self.older_copies += known is not None
        if known is None or known.generation < block.generation:
            self.blocks[where] = block


def scan_home(
    folders: Sequence[DriveFolder | None], shape: HomeShape, progress: Callable[[int, int], None]
) -> Findings:
    """Read all headers of a home that nobody writes to. ``folders``: its parts, by drive.

    ``progress`` is called with segments read and segments in all, in this thread. Writes nothing. Raises DeviceError
    where the directories cannot be read.
    """
    found = Findings()
    places: dict[int, int] = {}
    for drive, folder in enumerate(folders):
        if folder is None:
            continue
        with paths.device_errors(f"looking for segments in {folder.segments_path}"):
            numbers = segment_numbers(folder.segments_path)
        for segment in numbers:
            if segment >= FOREIGN_SEGMENTS:
                found.lost[drive, segment] = "no segment has such a number"
            elif segment in places:
                found.lost[drive, segment] = f"drive {places[segment]} has a segment of that number too"
            else:
                places[segment] = drive
    with ThreadPoolExecutor(THREADS, thread_name_prefix="kvdisk-rebuild") as threads:

        def read(place: tuple[int, int]) -> tuple[FoundSegment, list[FoundBlock]] | str:
            segment, drive = place
            folder = folders[drive]
            assert folder is not None
            try:
                return _read_segment(folder, segment, drive, shape)
            except KvdiskError as error:
                return str(error)

        for count, (place, result) in enumerate(zip(places.items(), threads.map(read, places.items()), strict=True)):
            progress(count, len(places))
            if isinstance(result, str):
                found.lost[place[1], place[0]] = result
                continue
            found.segments.append(result[0])
            for block in result[1]:
                found.add(block)
    found.segments.sort()
    return found


def remove_lost(folders: Sequence[DriveFolder | None], lost: Sequence[tuple[int, int]]) -> None:
    """Remove the directories of segments that are of no use, by drive and number. Raises DeviceError."""
    for drive, segment in lost:
        folder = folders[drive]
        assert folder is not None
        with paths.device_errors(f"removing segment {segment}"):
            paths.remove_anything(folder.path.parent, folder.path.name, SEGMENTS, str(segment))


def _read_segment(
    folder: DriveFolder, segment: int, drive: int, shape: HomeShape
) -> tuple[FoundSegment, list[FoundBlock]]:
    """Read one segment on all ranks. Raises CorruptRecord, GeometryMismatch, DeviceError: it is of no use."""
    with ExitStack() as stack:
        files: list[SegmentFile] = []
        for rank in range(shape.rank_count):
            header, file = scan_file(folder, segment, rank)
            stack.callback(file.close)
            files.append(file)
            mine = SegmentHeader(segment, rank, shape.rank_count, *files[0].sizes, shape.fingerprint)
            if header != mine:
                raise CorruptRecord(f"segment {segment}: the header of rank {rank} says something else")
        slot_bytes, slot_count = files[0].sizes
        if slot_bytes not in {group.slot_bytes for group in shape.groups}:
            raise CorruptRecord(f"segment {segment}: no block is of {slot_bytes} bytes")
        agreed: dict[int, FoundBlock] = {}
        for rank, file in enumerate(files):
            told = {
                index: FoundBlock(header.namespace.epoch, header.key, segment, index, header.generation, header.parent)
                for index, header in _headers(file)
                if _fits(header, rank, slot_bytes, shape)
            }
            agreed = (
                told if rank == 0 else {index: block for index, block in agreed.items() if told.get(index) == block}
            )
    return FoundSegment(segment, slot_bytes, slot_count, drive), list(agreed.values())


def _fits(header: SlotHeader, rank: int, slot_bytes: int, shape: HomeShape) -> bool:
    if len(header.key) < GROUP_BYTES or (header.parent is not None and len(header.parent) < GROUP_BYTES):
        return False
    group = group_of(header.key)
    return (
        (header.rank, header.rank_count) == (rank, shape.rank_count)
        and header.namespace.fingerprint == shape.fingerprint
        and header.namespace.epoch < _EPOCH_LIMIT
        and group < len(shape.groups)
        and shape.groups[group] == Shape(slot_bytes, header.payload_bytes)
    )


def _headers(file: SegmentFile) -> Iterator[tuple[int, SlotHeader]]:
    """Yield the sound slot headers of a file; one that cannot be read is like one that is not sound."""
    slots = 1 if file.slot_bytes > _SMALL_SLOT_BYTES else max(1, _PIECE_BYTES // file.slot_bytes)
    most_bytes = HEADER_BYTES + (slots - 1) * file.slot_bytes
    memory = mmap.mmap(-1, most_bytes)  # anonymous maps have the alignment that O_DIRECT needs
    with memoryview(memory) as view:
        for first in range(0, file.slot_count, slots):
            count = min(slots, file.slot_count - first)
            wanted_bytes = HEADER_BYTES + (count - 1) * file.slot_bytes
            try:
                got_bytes = os.preadv(file.fd, [view[:wanted_bytes]], slot_offset(file.slot_bytes, first))
            except OSError:
                got_bytes = 0
            if got_bytes < wanted_bytes and slots > 1:
                yield from _headers_one_by_one(file, view, range(first, first + count))
                continue
            for number in range(count if got_bytes == wanted_bytes else 0):
                header = _decoded(view[number * file.slot_bytes :][:HEADER_BYTES])
                if header is not None:
                    yield first + number, header


def _headers_one_by_one(file: SegmentFile, view: memoryview, slots: range) -> Iterator[tuple[int, SlotHeader]]:
    for index in slots:
        try:
            whole = os.preadv(file.fd, [view[:HEADER_BYTES]], slot_offset(file.slot_bytes, index)) == HEADER_BYTES
        except OSError:
            continue
        header = _decoded(view[:HEADER_BYTES]) if whole else None
        if header is not None:
            yield index, header


def _decoded(head: memoryview) -> SlotHeader | None:
    if not head[0]:
        return None  # never written
    try:
        return read_header(head)
    except KvdiskError:
        return None
