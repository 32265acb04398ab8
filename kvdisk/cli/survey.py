# SPDX-License-Identifier: Apache-2.0
"""What is in a store, as plain values. Prints nothing, writes nothing; works on a store in use and on a copy.

``survey_store`` is the one call. A count that cannot be known, because a home's index or HOME file cannot be read,
is None, and ``problems`` of the home says why.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvdisk.cli.index_reader import BlockTally, IndexFacts, read_indexes
from kvdisk.device import paths
from kvdisk.device.control import STORE_FILE, HomeRecord, HomeSummary, read_record
from kvdisk.device.drives import Directories, list_directories
from kvdisk.device.listing import list_homes, scan_folders
from kvdisk.device.segment import SegmentFileSummary, open_segment, read_segment_header
from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError
from kvdisk.messages import SegmentSpec

_ATTEMPTS = 3
_MOST_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """A segment of a home. ``files``: those that exist, by rank.

    ``used_slots`` is None where the index cannot be read; ``slot_bytes`` and ``slots`` then come from a file's header,
    and are None where that cannot be read either. ``indexed``: the index has a record of it; one that is being
    made, or that a crash has left, has none yet.
    """

    segment: int
    drive: int
    slot_bytes: int | None
    slots: int | None
    used_slots: int | None
    indexed: bool
    files: tuple[SegmentFileSummary, ...]

    @property
    def fill(self) -> float | None:
        """Share of the slots that hold blocks, 0 to 1."""
        return self.used_slots / self.slots if self.slots and self.used_slots is not None else None

    def used_bytes(self, ranks: int) -> int | None:
        """Bytes of the slots that hold blocks, on all ranks, headers included."""
        if self.used_slots is None or self.slot_bytes is None:
            return None
        return self.used_slots * self.slot_bytes * ranks


@dataclass(frozen=True)
class HomeFacts:
    """A home. ``alive``: a process of its owner lives. ``record``: what HOME says, None where it cannot be read.

    ``tallies``: of all blocks in its index, None where that cannot be read.
    """

    id: str
    path: Path
    alive: bool
    record: HomeRecord | None
    allocated_bytes: int
    segments: tuple[SegmentFacts, ...]
    tallies: tuple[BlockTally, ...] | None
    problems: tuple[str, ...]

    @cached_property
    def ranks(self) -> int:
        """Ranks that hold a part of each block: as HOME says, else as many as have files."""
        return _ranks(self.record, (file for segment in self.segments for file in segment.files))

    @cached_property
    def blocks(self) -> int | None:
        """Blocks in the index; a block has a slot on every rank and counts once."""
        return None if self.tallies is None else sum(tally.blocks for tally in self.tallies)

    @cached_property
    def slots(self) -> int:
        """Slots of all segments whose size is known; a slot is there on every rank and counts once."""
        return sum(segment.slots or 0 for segment in self.segments)

    @cached_property
    def used_bytes(self) -> int | None:
        """Bytes of the slots that hold blocks, on all ranks, headers included."""
        if self.tallies is None:
            return None
        return sum(segment.used_bytes(self.ranks) or 0 for segment in self.segments)

    @property
    def fill(self) -> float | None:
        """Share of the cap that blocks take, 0 to 1."""
        if self.record is None or self.record.cap_bytes <= 0 or self.used_bytes is None:
            return None
        return self.used_bytes / self.record.cap_bytes


@dataclass(frozen=True)
class NamespaceFacts:
    """All homes of one fingerprint, the last used first."""

    fingerprint: bytes
    homes: tuple[HomeFacts, ...]

    @cached_property
    def description(self) -> dict[str, Any]:
        """What the engine that used it last says of itself, in one flat dictionary; nothing in it is certain."""
        record = self.homes[0].record
        assert record is not None
        geometry = record.description.get("geometry")
        return record.description | (geometry if isinstance(geometry, dict) else {})

    @cached_property
    def blocks_by_epoch(self) -> dict[int, int]:
        """Blocks of each epoch, over the homes whose index can be read; a block that two homes hold counts twice."""
        return _sum_blocks((tally.epoch, tally.blocks) for tally in _tallies(self.homes))

    @cached_property
    def blocks_by_group(self) -> dict[int, int]:
        """Blocks of each KV-cache group, over the homes whose index can be read."""
        return _sum_blocks((tally.group, tally.blocks) for tally in _tallies(self.homes))

    @cached_property
    def used_bytes(self) -> int:
        """``used_bytes`` of the homes whose index can be read."""
        return sum(home.used_bytes or 0 for home in self.homes)


@dataclass(frozen=True)
class StoreFacts:
    """A store at one moment. Times: whole seconds since the Unix epoch; ``homes`` by last use, the last first."""

    path: Path
    store_id: str | None
    format_version: int
    created_s: int | None
    surveyed_s: int
    homes: tuple[HomeFacts, ...]

    @cached_property
    def namespaces(self) -> tuple[NamespaceFacts, ...]:
        """The homes whose HOME can be read, by fingerprint, in the order of ``homes``."""
        found: dict[bytes, list[HomeFacts]] = {}
        for home in self.homes:
            if home.record is not None:
                found.setdefault(home.record.fingerprint, []).append(home)
        return tuple(NamespaceFacts(fingerprint, tuple(homes)) for fingerprint, homes in found.items())

    @cached_property
    def cap_bytes(self) -> int | None:
        """What all files may come to: the caps of the live owners together, None while none lives."""
        caps = [home.record.cap_bytes for home in self.homes if home.alive and home.record is not None]
        return sum(caps) if caps else None

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that is wrong, a sentence each, with the home it is wrong in."""
        return tuple(f"home {home.id}: {problem}" for home in self.homes for problem in home.problems)


def stored_range(homes: Iterable[HomeFacts]) -> tuple[int, int] | None:
    """Return when the oldest and the newest block of these homes were stored, or None where there are none."""
    tallies = list(_tallies(homes))
    if not tallies:
        return None
    return min(tally.oldest_stored_s for tally in tallies), max(tally.newest_stored_s for tally in tallies)


def survey_store(directories: Directories) -> StoreFacts:
    """Return what is in the store in these directories. Waits for the disk, and for an engine that is just starting.

    Raises ConfigError where it is no store that this kvdisk and this user can read, CorruptRecord where its STORE
    file does not decode, StoreLocked, DeviceError.
    """
    path, *further = list_directories(directories)
    homes: list[HomeFacts] = []
    for _ in range(_ATTEMPTS):
        summaries = list_homes([path, *further])
        indexes = read_indexes([summary.index_path for summary in summaries])
        homes = [_home_facts(summary, index) for summary, index in zip(summaries, indexes, strict=True)]
        still_there = [home for home in homes if home.path.exists()]
        # A home that has got another name, or dropped a segment, meanwhile looks wrong: look again.
        if len(still_there) == len(homes) and not any(home.alive and home.problems for home in homes):
            break
        homes = still_there
    homes.sort(key=lambda home: home.record.last_use_s if home.record else 0, reverse=True)
    with paths.device_errors(f"reading {path / STORE_FILE}"):
        store = paths.read_control(path / STORE_FILE)
    return StoreFacts(
        path=path,
        store_id=store.get("store_id"),
        format_version=store["format_version"],
        created_s=store.get("created_s"),
        surveyed_s=int(time.time()),
        homes=tuple(homes),
    )


def _home_facts(summary: HomeSummary, index: IndexFacts) -> HomeFacts:
    with paths.device_errors(f"reading home {summary.id}"):
        # Files that are newer than the index: it may name segments that were not there before.
        summary = replace(summary, segments=scan_folders(summary.folders))
    problems = [
        f"drive {drive} was not looked at, name its directory too"
        for drive, folder in enumerate(summary.folders)
        if folder is None
    ]
    if summary.record is None:
        problems.append(_why_no_record(summary))
    if index.problem is not None:
        problems.append(f"its index cannot be read ({index.problem})")
    elif not index.exists and summary.segments:
        problems.append("its index is missing")
    readable = index.problem is None and (index.exists or not summary.segments)
    segments = tuple(_segments(summary, index, readable))
    if readable:
        problems += _wrong_records(segments, index)
        problems += _wrong_files(summary, segments)
    return HomeFacts(
        id=summary.id,
        path=summary.path,
        alive=summary.alive,
        record=summary.record,
        allocated_bytes=summary.allocated_bytes,
        segments=segments,
        tallies=index.tallies if readable else None,
        problems=tuple(problems),
    )


def _why_no_record(summary: HomeSummary) -> str:
    try:
        read_record(summary.path)
    except FileNotFoundError:
        return "its HOME file is missing, as after an interrupted deletion; the next engine that starts removes it"
    except CorruptRecord as error:
        return f"its HOME file cannot be read ({str(error).replace(f'{summary.path}/', '')})"
    except OSError as error:
        return f"its HOME file cannot be read ({error.strerror})"
    return "its HOME file was being replaced"


def _segments(summary: HomeSummary, index: IndexFacts, readable: bool) -> Iterator[SegmentFacts]:
    used: dict[int, int] = {}
    for tally in index.tallies:
        used[tally.segment] = used.get(tally.segment, 0) + tally.blocks
    records = {record.segment: record for record in index.segments}
    files: dict[int, list[SegmentFileSummary]] = {}
    for file in summary.segments:
        files.setdefault(file.segment, []).append(file)
    for segment in sorted(records.keys() | files.keys()):
        found = tuple(files.get(segment, ()))
        record = records.get(segment)
        if record is not None:
            slot_bytes, slots, drive = record.slot_bytes, record.slot_count, record.drive
            yield SegmentFacts(segment, drive, slot_bytes, slots, used.get(segment, 0), True, found)
        else:
            sizes = _sizes_from_header(summary, found[0])
            yield SegmentFacts(segment, found[0].drive, *sizes, 0 if readable else None, False, found)


def _sizes_from_header(summary: HomeSummary, file: SegmentFileSummary) -> tuple[int | None, int | None]:
    try:
        folder = summary.folders[file.drive]
        assert folder is not None, "a file was found there"
        header = read_segment_header(folder, file.segment, file.rank)
    except KvdiskError:
        return None, None
    return header.slot_bytes, header.slot_count


def _wrong_records(segments: Iterable[SegmentFacts], index: IndexFacts) -> Iterator[str]:
    slots = {segment.segment: segment.slots or 0 for segment in segments if segment.indexed}
    lost = sum(tally.blocks for tally in index.tallies if tally.segment not in slots)
    if lost:
        yield f"{lost} blocks are in segments that the index does not have"
    for segment, count in slots.items():
        highest = max((tally.highest_slot for tally in index.tallies if tally.segment == segment), default=-1)
        if highest >= count:
            yield f"segment {segment} has {count} slots, and the index has a block in slot {highest}"


def _wrong_files(summary: HomeSummary, segments: Iterable[SegmentFacts]) -> Iterator[str]:
    """Open each file that should be there as an engine would, to read."""
    if summary.record is None:
        return
    ranks = _ranks(summary.record, summary.segments)
    for segment in segments:
        if not segment.indexed or segment.slot_bytes is None or segment.slots is None:
            continue
        spec = SegmentSpec(segment.segment, segment.slot_bytes, segment.slots, segment.drive, create=False)
        folder = summary.folders[segment.drive] if segment.drive < len(summary.folders) else None
        if folder is None:
            continue
        for rank in range(ranks):
            try:
                open_segment(folder, spec, rank, ranks, summary.record.fingerprint, writable=False).close()
            except DeviceError as error:
                # Dropping a segment takes its blocks first, then its files, then its record.
                if error.errno != errno.ENOENT:
                    yield str(error)
                elif segment.used_slots:
                    yield f"segment {segment.segment} of rank {rank} is missing"
            except KvdiskError as error:
                yield str(error).replace(f"{summary.path}/", "")


def _ranks(record: HomeRecord | None, files: Iterable[SegmentFileSummary]) -> int:
    description = record.description if record else {}
    geometry = description.get("geometry")
    ranks = (geometry if isinstance(geometry, dict) else description).get("ranks")
    if isinstance(ranks, int) and 0 < ranks <= _MOST_RANKS:
        return ranks
    return max(1, len({file.rank for file in files}))


def _tallies(homes: Iterable[HomeFacts]) -> Iterator[BlockTally]:
    return (tally for home in homes for tally in home.tallies or ())


def _sum_blocks(counts: Iterable[tuple[int, int]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for name, blocks in counts:
        total[name] = total.get(name, 0) + blocks
    return dict(sorted(total.items()))
