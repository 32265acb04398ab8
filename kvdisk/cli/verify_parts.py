# SPDX-License-Identifier: Apache-2.0
"""What ``verify`` reads, cut into parts of files, and read on threads: from the drives in turn, a few parts ahead."""

from __future__ import annotations

import errno
import mmap
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from kvdisk.blocks import Slot, group_of
from kvdisk.cli.block_reader import segment_of, slot_of, unpack
from kvdisk.device.control import DriveFolder
from kvdisk.device.rebuild import HomeShape
from kvdisk.device.segment import open_segment
from kvdisk.device.verify import NamedSlot, WrongSlot, check_slots, read_memory
from kvdisk.errors import DeviceError, KvdiskError
from kvdisk.geometry import Namespace
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.messages import SegmentSpec

THREADS_PER_DRIVE = 4
MOST_THREADS = 16
PART_BYTES = 64 << 20


class HomeToRead(NamedTuple):
    """A home whose slots can be read. ``folders``: by drive. ``blocks``: packed records, by segment and slot."""

    id: str
    path: Path
    shape: HomeShape
    folders: tuple[DriveFolder | None, ...]
    segments: dict[int, SegmentRecord]
    blocks: Sequence[bytes]

    def folder(self, drive: int) -> DriveFolder | None:
        """Return the home's part on a drive; None where its directory was not named."""
        return self.folders[drive] if drive < len(self.folders) else None


class Part(NamedTuple):
    """Slots of one file, by the packed records of their blocks, ascending; none where a segment is empty."""

    home: HomeToRead
    segment: SegmentRecord
    rank: int
    blocks: Sequence[bytes]

    @property
    def byte_count(self) -> int:
        """Bytes to read."""
        return len(self.blocks) * self.segment.slot_bytes

    def records(self) -> list[BlockRecord]:
        """Return the records."""
        return [unpack(packed) for packed in self.blocks]

    def record_of(self, slot: NamedSlot) -> BlockRecord:
        """Return the record of one of the slots."""
        where = Slot(self.segment.segment, slot.number)
        return BlockRecord(slot.namespace.epoch, slot.key, where, slot.generation, slot.parent)


class PartRead(NamedTuple):
    """What a part's slots are like. ``failed``: why the file cannot be used at all; ``missing``: there is none."""

    wrong: Sequence[WrongSlot] = ()
    failed: str | None = None
    missing: bool = False


def parts_of(home: HomeToRead) -> tuple[list[Part], list[BlockRecord]]:
    """Cut a home into parts. Also returns the blocks that lie where its segments have no slots."""
    by_segment: dict[int, list[bytes]] = {segment: [] for segment in home.segments}
    astray = []
    for packed in home.blocks:
        where = by_segment.get(segment_of(packed))
        if where is not None and slot_of(packed) < home.segments[segment_of(packed)].slot_count:
            where.append(packed)
        else:
            astray.append(unpack(packed))
    parts = []
    for number, blocks in by_segment.items():
        segment = home.segments[number]
        most = max(1, PART_BYTES // max(1, segment.slot_bytes))
        for start in range(0, max(1, len(blocks)), most):
            cut = blocks[start : start + most]
            parts += [Part(home, segment, rank, cut) for rank in range(home.shape.rank_count)]
    return parts, astray


def read_parts(parts: Iterable[Part]) -> Generator[tuple[Part, PartRead]]:
    """Read parts; yield them in order of the drives' turns. Ends its threads when it is closed."""
    by_drive: dict[Path | None, list[Part]] = {}
    for part in parts:
        folder = part.home.folder(part.segment.drive)
        by_drive.setdefault(folder.path.parent if folder else None, []).append(part)
    threads = min(MOST_THREADS, THREADS_PER_DRIVE * max(1, len(by_drive)))
    in_turn = (part for turn in zip_longest(*by_drive.values()) for part in turn if part is not None)
    memories: SimpleQueue[mmap.mmap] = SimpleQueue()

    def take_memory(slot_bytes: int) -> mmap.mmap:
        try:
            memory = memories.get_nowait()
        except Empty:
            memory = read_memory(slot_bytes)
        return memory if len(memory) >= slot_bytes else read_memory(slot_bytes)

    waiting: deque[tuple[Part, Future[PartRead]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="kvdisk-verify") as pool:
        try:
            for part in in_turn:
                waiting.append((part, pool.submit(read_part, part, take_memory, memories.put)))
                if len(waiting) > 2 * threads:
                    yield waiting[0][0], waiting[0][1].result()
                    waiting.popleft()
            while waiting:
                yield waiting[0][0], waiting[0][1].result()
                waiting.popleft()
        finally:
            for _, future in waiting:
                future.cancel()


def read_part(part: Part, take: Callable[[int], mmap.mmap], give_back: Callable[[mmap.mmap], None]) -> PartRead:
    """Read and check the slots of a part, in this thread. ``take``: memory for slots of so many bytes."""
    home, segment = part.home, part.segment
    folder = home.folder(segment.drive)
    if folder is None:
        return PartRead(failed=f"drive {segment.drive} was not looked at, name its directory too")
    wrong, slots = [], []
    for record in part.records():
        group = group_of(record.key)
        known = group < len(home.shape.groups) and home.shape.groups[group].slot_bytes == segment.slot_bytes
        payload_bytes = home.shape.groups[group].payload_bytes if known else 0
        namespace = Namespace(home.shape.fingerprint, record.epoch)
        slot = NamedSlot(record.slot.index, namespace, record.key, record.generation, record.parent, payload_bytes)
        if known:
            slots.append(slot)
        else:
            what = f"slots of {segment.slot_bytes} bytes hold no blocks of KV-cache group {group}"
            wrong.append(WrongSlot(slot, "group", what))
    ranks = home.shape.rank_count
    spec = SegmentSpec(segment.segment, segment.slot_bytes, segment.slot_count, segment.drive, create=False)
    try:
        file = open_segment(folder, spec, part.rank, ranks, home.shape.fingerprint, writable=False)
    except KvdiskError as error:
        missing = isinstance(error, DeviceError) and error.errno == errno.ENOENT
        said = "there is no such file" if missing else str(error).replace(f"{folder.path}/", "")
        return PartRead(failed=said, missing=missing)
    try:
        if slots:  # so the file is as long as HOME and the index say, however large that is
            memory = take(segment.slot_bytes)
            wrong += check_slots(file, ranks, slots, memory)
            give_back(memory)
    finally:
        file.close()
    return PartRead(wrong)
