# SPDX-License-Identifier: Apache-2.0
"""What is in a store, as plain values. Prints nothing, writes nothing; works on a store in use and on a copy.

``survey_store`` is the one call. A count that cannot be known, because a home's index or HOME file cannot be read,
is None, and ``problems`` of the home says why.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kvdisk.cli.block_facts import PrefixTree
from kvdisk.cli.index_reader import IndexedHome, IndexedNamespace, IndexFacts, read_indexes
from kvdisk.cli.store_facts import (
    HomeFacts,
    NamespaceFacts,
    SegmentFacts,
    StoreFacts,
    ranks_of,
    stored_range,
)
from kvdisk.device import paths
from kvdisk.device.control import STORE_FILE, USES_FILE, HomeSummary, read_record
from kvdisk.device.drives import Directories, list_directories
from kvdisk.device.listing import list_homes, scan_folders
from kvdisk.device.segment import SegmentFileSummary, open_segment, read_segment_header
from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError
from kvdisk.messages import SegmentSpec

__all__ = [
    "HomeFacts",
    "NamespaceFacts",
    "SegmentFacts",
    "StoreFacts",
    "index_namespaces",
    "stored_range",
    "survey_store",
]

PREFIXES = 12
"""How many prefixes a survey looks for, in each namespace."""
_ATTEMPTS = 3
_MOST_TOKENS = 1 << 20


def survey_store(
    directories: Directories, *, prefixes: int = PREFIXES, prefixes_in_all: int | None = None, shared_only: bool = True
) -> StoreFacts:
    """Return what is in the store in these directories. Waits for the disk, and for an engine that is just starting.

    ``prefixes``: the biggest of each namespace, fewer where there would be more than ``prefixes_in_all``; with
    ``shared_only`` only what several chains have or requests have
    used again. Raises ConfigError where it is no store that this kvdisk and this user can read, CorruptRecord where its
    STORE file does not decode, StoreLocked, DeviceError.
    """
    path, *further = list_directories(directories)
    homes: list[HomeFacts] = []
    trees: dict[bytes, PrefixTree | None] = {}
    now_s = 0
    for _ in range(_ATTEMPTS):
        summaries = list_homes([path, *further])
        now_s = int(time.time())
        groups, namespaces = index_namespaces(summaries)
        most = prefixes if prefixes_in_all is None else min(prefixes, prefixes_in_all // max(1, len(namespaces)))
        found, grown = read_indexes(namespaces, now_s, most, shared_only=shared_only)
        homes = [
            _home_facts(summary, index)
            for group, indexes in zip(groups, found, strict=True)
            for summary, index in zip(group, indexes, strict=True)
        ]
        trees = {
            group[0].record.fingerprint: tree for group, tree in zip(groups, grown, strict=True) if group[0].record
        }
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
        surveyed_s=now_s,
        homes=tuple(homes),
        trees=trees,
    )


def index_namespaces(summaries: Sequence[HomeSummary]) -> tuple[list[list[HomeSummary]], list[IndexedNamespace]]:
    """Return homes by namespace, each namespace as the process that reads indexes is told of it.

    A home whose HOME cannot be read is alone.
    """
    groups: dict[object, list[HomeSummary]] = {}
    for summary in summaries:
        groups.setdefault(summary.record.fingerprint if summary.record else summary.id, []).append(summary)
    namespaces = []
    for group in groups.values():
        latest = max(group, key=lambda summary: summary.record.last_use_s if summary.record else 0)
        homes = [
            IndexedHome(each.index_path, each.path / USES_FILE, ranks_of(each.record, each.segments)) for each in group
        ]
        namespaces.append(IndexedNamespace(tuple(homes), block_tokens_of(latest)))
    return list(groups.values()), namespaces


def block_tokens_of(summary: HomeSummary) -> tuple[int | None, ...]:
    """Return the tokens of a block by KV-cache group, as HOME describes them; nothing in it is certain."""
    description = summary.record.description if summary.record else {}
    geometry = description.get("geometry")
    groups = (geometry if isinstance(geometry, dict) else description).get("groups")
    if not isinstance(groups, list):
        return ()
    sizes = [group.get("block_tokens") if isinstance(group, dict) else None for group in groups]
    return tuple(size if isinstance(size, int) and 0 < size <= _MOST_TOKENS else None for size in sizes)


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
        folders=summary.folders,
        blocks_in_mass=index.blocks if readable else None,
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
    layouts = {layout.segment: layout for layout in (index.blocks.layouts if index.blocks else ())}
    files: dict[int, list[SegmentFileSummary]] = {}
    for file in summary.segments:
        files.setdefault(file.segment, []).append(file)
    for segment in sorted(records.keys() | files.keys()):
        found = tuple(files.get(segment, ()))
        record = records.get(segment)
        if record is not None:
            slot_bytes, slots, drive = record.slot_bytes, record.slot_count, record.drive
            layout = layouts.get(segment)
            yield SegmentFacts(segment, drive, slot_bytes, slots, used.get(segment, 0), True, found, layout)
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
    ranks = ranks_of(summary.record, summary.segments)
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
