# SPDX-License-Identifier: Apache-2.0
"""What is in a store: ``Survey``, which is also what ``kvdisk inspect --json`` prints.

``survey_store`` is the one call. It writes nothing, and works on a store in use and on a copy.

The shape of the JSON changes only with ``json_version``. ``*_s`` are whole seconds since the Unix
epoch. ``null`` is what cannot be known: a file cannot be read, or there is nothing to tell (no
block, no live owner). A block, or a slot, has a shard on every rank and counts once; bytes are
those of all ranks together. Used bytes: those of slots that hold blocks, with their headers.
Allocated bytes: what the file system holds, with index and control files. Fill: the used bytes of
all engine stores, divided by the caps of all live engines, which bound a store. The engine store
that was used last comes first.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvdisk.cli.indexes import (
    HomeColumns,
    ReadHome,
    ReadNamespace,
    by_namespace,
    described_geometry,
    join,
    not_named,
    of_segments,
    places_of,
    read_homes,
    why_no_record,
)
from kvdisk.cli.output import engine_store, plural
from kvdisk.cli.prefixes import PrefixTree, find_prefixes
from kvdisk.device import paths
from kvdisk.device.cap import bytes_allowed
from kvdisk.device.control import STORE_FILE, JointCap, has_sound_store, read_store
from kvdisk.device.drives import Directories, list_directories
from kvdisk.device.segment import SegmentFileSummary, open_segment, read_segment_header, scan_folders
from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError
from kvdisk.geometry import FORMAT_VERSION
from kvdisk.index.base import SegmentRecord
from kvdisk.messages import SegmentSpec

JSON_VERSION = 5
PREFIXES = 12
"""Prefixes that a survey looks for in each namespace."""
AGE_BOUNDS_S = (60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400)
AGE_NAMES = ("< 1 min", "1-10 min", "10-60 min", "1-6 h", "6-24 h", "1-7 d", "7-30 d", "> 30 d")
REUSE_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64)
REUSE_NAMES = ("0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "> 64")
_SHORT_RUN_BYTES = 2 << 20
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of an engine store. ``drive``: its position among the engine store's drives.

    ``indexed``: whether the index has a record of it; a segment that is being made, or that a crash
    has left, has none. ``slot_bytes``: on one rank. ``fill``: used_slots / slots.
    ``fragmentation``: the share of free bytes in runs of less than 2 MiB on a rank, which a larger
    write passes over; null where nothing is free. ``read_run_blocks``: how many blocks are read at
    a time, on average, where chains are read in order: a block behind its parent is read with it.
    ``files``: one for each rank, with segment, rank, length_bytes, allocated_bytes, drive.
    """

    segment: int
    drive: int
    indexed: bool
    slot_bytes: int | None
    slots: int | None
    used_slots: int | None
    used_bytes: int | None
    fill: float | None = None
    free_slots: int | None = None
    free_runs: int | None = None
    longest_free_run_slots: int | None = None
    fragmentation: float | None = None
    read_run_blocks: float | None = None
    files: tuple[Mapping[str, int], ...] = ()


@dataclass(frozen=True)
class Home:
    """An engine store. ``owner``: "alive" while a process of its engine lives, otherwise "stopped".

    ``clean``: its last owner closed it in order; false while one lives. ``cap_bytes``: of its last
    owner; it counts while that lives. ``joint_cap``: what bounds it with others, as HOME says it.
    ``read_run_bytes``: bytes of one rank that are read at a
    time, in the mean. ``drives``: the stores' ids of its drives. ``problems``: sentences.
    ``kind``: "whole": all is here; "spread": files of some ranks may be on other hosts; "guest": it
    has files of ranks on this host, and the index is in a "spread" one on another.
    """

    id: str
    kind: Literal["whole", "spread", "guest"]
    path: Path
    fingerprint: str | None
    owner: Literal["alive", "stopped"]
    clean: bool | None
    ranks: int
    cap_bytes: int | None
    joint_cap: dict[str, Any] | None
    allocated_bytes: int
    used_bytes: int | None
    blocks: int | None
    slots: int
    fragmentation: float | None
    read_run_blocks: float | None
    read_run_bytes: int | None
    created_s: int | None
    last_use_s: int | None
    oldest_stored_s: int | None
    newest_stored_s: int | None
    index_readable: bool
    drives: tuple[str, ...]
    problems: tuple[str, ...]
    segments: tuple[Segment, ...]

    @property
    def alive(self) -> bool:
        """Whether a process of its owner lives."""
        return self.owner == "alive"


@dataclass(frozen=True)
class Namespace:
    """All engine stores of one fingerprint, described by the engine that used it last.

    A block that two of them hold counts twice. ``unreadable_engine_stores`` are missing from the
    sums. ``groups``: KV-cache groups, each with group, blocks, block_tokens, payload_bytes and
    slot_bytes (on one rank), window_tokens. ``epochs``: of the weights (0: as in the files), each
    with epoch, blocks.
    """

    fingerprint: str
    model: Any
    dtype: Any
    kv_dtype: Any
    tensor_parallel: Any
    ranks: Any
    hash_tokens: Any
    engine_stores: tuple[str, ...]
    unreadable_engine_stores: int
    blocks: int
    used_bytes: int
    oldest_stored_s: int | None
    newest_stored_s: int | None
    groups: tuple[Mapping[str, Any], ...]
    epochs: tuple[Mapping[str, int], ...]
    prefixes: PrefixTree


@dataclass(frozen=True)
class Drive:
    """A directory of the store. ``path``: null where it was not named.

    ``allocated_bytes``: of segment files.
    """

    store_id: str | None
    path: Path | None
    engine_stores: int
    unreadable_engine_stores: int
    segments: int
    slots: int
    blocks: int
    used_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class Ages:
    """Blocks of all engine stores by age. Class n is below bound n; the last class has no bound.

    ``stored``: by the age of their record. ``used``: by the age of their last use; null where USES
    has no block. ``never_used``: blocks that were not used since they were stored. ``unknown``:
    blocks that USES does not have, such as those stored after it was last written.
    """

    bounds_s: tuple[int, ...]
    stored: list[int]
    used: list[int] | None
    never_used: int | None
    unknown: int | None


@dataclass(frozen=True)
class Reuse:
    """Blocks of all engine stores by uses. Class n has up to bound n uses; the last class has no
    bound.

    A use is a request that came to the block and found it, in a tier or in the GPU's cache. The
    request that computed the block is no use.
    """

    bounds: tuple[int, ...]
    blocks: list[int] | None
    unknown: int | None


@dataclass(frozen=True)
class Totals:
    """Sums over all engine stores but ``unreadable_engine_stores``. ``cap_bytes``: of live owners
    together; null, as ``fill`` is, where none lives."""

    namespaces: int
    engine_stores: int
    engine_stores_in_use: int
    unreadable_engine_stores: int
    blocks: int
    slots: int
    used_bytes: int
    allocated_bytes: int
    cap_bytes: int | None
    fill: float | None
    oldest_stored_s: int | None
    newest_stored_s: int | None


@dataclass(frozen=True)
class StoreFile:
    """What the STORE file says."""

    path: Path
    store_id: str | None
    format_version: int
    created_s: int | None


@dataclass(frozen=True)
class Survey:
    """A store at one moment. ``ok``: false where ``problems`` says what is wrong, in sentences."""

    surveyed_s: int
    ok: bool
    problems: tuple[str, ...]
    store: StoreFile
    totals: Totals
    drives: tuple[Drive, ...]
    ages: Ages
    reuse: Reuse
    namespaces: tuple[Namespace, ...]
    engine_stores: tuple[Home, ...]


def survey_store(
    directories: Directories, *, prefixes: int = PREFIXES, prefixes_in_all: int | None = None, shared_only: bool = True
) -> Survey:
    """Return what is in the store in these directories.

    ``prefixes``: how many of the biggest are shown of each namespace, fewer where there would be
    more than ``prefixes_in_all``. ``shared_only``: only those that several chains have or requests
    used again. Raises ConfigError where it is no store that this kvdisk and this user can read,
    CorruptRecord where its STORE file does not decode, StoreLocked, DeviceError.
    """
    path, *further = list_directories(directories)
    for _ in range(_ATTEMPTS):
        found = [(read, survey_home(read)) for read in read_homes([path, *further], guests=True)]
        # An engine store that was renamed, or has dropped a segment, meanwhile looks wrong: look
        # again.
        there = [each for each in found if each[1].path.exists()]
        if len(there) == len(found) and not any(home.alive and home.problems for _, home in found):
            break
    there.sort(key=lambda each: each[1].last_use_s or 0, reverse=True)
    read, homes = [each for each, _ in there], tuple(home for _, home in there)
    groups = by_namespace(read)
    most = prefixes if prefixes_in_all is None else min(prefixes, prefixes_in_all // max(1, len(groups)))
    with paths.device_errors(f"reading {path / STORE_FILE}"):
        store = _store_file(path)
        problems = [] if has_sound_store(path) else ["STORE is gone or damaged: the next start writes it anew"]
    problems += [f"{engine_store(home.id)}: {problem}" for home in homes for problem in home.problems]
    problems += _left(read)
    columns, now_s = [home.blocks for home in read if home.blocks is not None], int(time.time())
    return Survey(
        surveyed_s=now_s,
        ok=not problems,
        problems=tuple(problems),
        store=store,
        totals=_totals(homes),
        drives=_drives(store, homes, read),
        ages=_ages(columns, now_s),
        reuse=_reuse(columns),
        namespaces=tuple(_survey_namespace(one, homes, most, shared_only) for one in groups if one.record),
        engine_stores=homes,
    )


def _left(homes: Iterable[ReadHome]) -> list[str]:
    """Say which engine stores a running engine could not take over at its start."""
    records = [(each.summary.id, each.summary.alive, each.summary.record) for each in homes]
    return [
        f"{engine_store(left)}: the engine of {engine_store(owner)} could not take it over, and leaves it until the "
        "next start; its log says why"
        for owner, alive, record in records
        for left, _, other in records
        if alive and record and other and not record.leaves.isdisjoint({left, other.lineage})
    ]


def _store_file(path: Path) -> StoreFile:
    """Return what STORE says, or must have said. A field that no engine reads may hold anything.
    Raises as ``read_store``."""
    record, created_s = read_store(path), None
    with suppress(CorruptRecord, FileNotFoundError):
        created_s = paths.read_control(path / STORE_FILE).get("created_s")
    is_time = isinstance(created_s, int) and created_s >= 0
    return StoreFile(path, record.store_id if record else None, FORMAT_VERSION, created_s if is_time else None)


# -- engine stores -----------------------------------------------------------------------------


def survey_home(read: ReadHome) -> Home:
    """Describe an engine store. Raises DeviceError."""
    summary, record, blocks = read.summary, read.summary.record, read.blocks
    files: dict[int, list[SegmentFileSummary]] = {}
    with paths.device_errors(f"reading {engine_store(summary.id)}"):
        # Files that are newer than the index: it may name segments that were not there before.
        for file in scan_folders(summary.folders):
            files.setdefault(file.segment, []).append(file)
    problems = [not_named(drive) for drive, folder in enumerate(summary.folders) if folder is None]
    if record is None:
        problems.append(why_no_record(summary.path) or "its HOME file was being replaced")
    segments = tuple(_segments(read, files))
    count = used_bytes = oldest_s = newest_s = None
    if blocks is None:
        problems.append(read.problem or "")
    elif not read.is_guest:
        stored = blocks.columns.stored_s
        count, used_bytes = len(stored), _sum(segments, "used_bytes")
        oldest_s, newest_s = (int(stored.min()), int(stored.max())) if count else (None, None)
        problems += [*_wrong_records(read, blocks), *_wrong_files(read, segments)]
    return Home(
        id=summary.id,
        kind="guest" if read.is_guest else "spread" if read.is_spread else "whole",
        path=summary.path,
        fingerprint=record.fingerprint.hex() if record else None,
        owner="alive" if summary.alive else "stopped",
        clean=record.clean if record else None,
        ranks=read.ranks,
        cap_bytes=record.cap_bytes if record else None,
        joint_cap=record.joint_cap._asdict() if record and record.joint_cap else None,
        allocated_bytes=summary.allocated_bytes,
        used_bytes=used_bytes,
        blocks=count,
        slots=_sum(segments, "slots"),
        fragmentation=fragmentation(segments),
        read_run_blocks=read_run_blocks(segments),
        read_run_bytes=read_run_bytes(segments),
        created_s=record.created_s if record else None,
        last_use_s=record.last_use_s if record else None,
        oldest_stored_s=oldest_s,
        newest_stored_s=newest_s,
        index_readable=blocks is not None,
        drives=tuple(drive.store_id for drive in record.drives) if record else (),
        problems=tuple(problems),
        segments=segments,
    )


def _segments(read: ReadHome, files: Mapping[int, Sequence[SegmentFileSummary]]) -> Iterator[Segment]:
    """Yield the segments that the index or a file has, by number."""
    blocks = join([]) if read.blocks is None else read.blocks
    places = places_of(blocks.columns)
    order = np.argsort(places)
    places, names, above, groups = places[order], blocks.names[order], blocks.above[order], blocks.groups[order]
    begins = np.ones(len(places), np.bool_)  # a read: the block does not lie behind its parent
    begins[1:] = (places[1:] != places[:-1] + np.uint64(1)) | (above[1:] != names[:-1]) | (groups[1:] != groups[:-1])
    records = {record.segment: record for record in read.index.segments}
    for number in sorted(records.keys() | files.keys()):
        if number not in records:
            yield _unindexed(read, files[number])
            continue
        rows = slice(*np.searchsorted(places, np.array([number << 32, (number + 1) << 32], np.uint64)).tolist())
        used = (places[rows] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        yield _segment(records[number], files.get(number, []), used, begins[rows], read.ranks)


def _segment(
    record: SegmentRecord,
    files: Sequence[SegmentFileSummary],
    used: NDArray[np.int64],
    begins: NDArray[np.bool_],
    ranks: int,
) -> Segment:
    """Describe a segment. ``used``: slots that hold blocks, ascending. ``begins``: whether a read
    begins at each."""
    slots, blocks = record.slot_count, len(used)
    inside = used < slots
    free = np.diff(np.concatenate(([-1], np.unique(used[inside]), [slots]))) - 1
    free = free[free > 0]
    free_slots, reads = int(free.sum()), int(np.count_nonzero(begins[inside]))
    short_run_slots = -(-_SHORT_RUN_BYTES // max(1, record.slot_bytes))  # a damaged record's may be any
    short_slots = int(free[free < short_run_slots].sum())
    return Segment(
        segment=record.segment,
        drive=record.drive,
        indexed=True,
        slot_bytes=record.slot_bytes,
        slots=slots,
        used_slots=blocks,
        used_bytes=blocks * record.slot_bytes * ranks,
        fill=blocks / slots if slots else None,
        free_slots=free_slots,
        free_runs=len(free),
        longest_free_run_slots=int(free.max(initial=0)),
        fragmentation=short_slots / free_slots if free_slots else None,
        read_run_blocks=blocks / reads if reads else None,
        files=tuple(file._asdict() for file in files),
    )


def _unindexed(read: ReadHome, files: Sequence[SegmentFileSummary]) -> Segment:
    """Describe a segment of which only files are known."""
    number, drive, rank = files[0].segment, files[0].drive, files[0].rank
    folder, used = read.folder(drive), None if read.blocks is None else 0
    assert folder is not None, "a file was found there"
    slot_bytes = slots = used_bytes = None
    with suppress(KvdiskError):
        header = read_segment_header(folder, number, rank)
        slot_bytes, slots, used_bytes = header.slot_bytes, header.slot_count, used
    found = tuple(file._asdict() for file in files)
    return Segment(number, drive, False, slot_bytes, slots, used, used_bytes, files=found)


def _wrong_records(read: ReadHome, blocks: HomeColumns) -> Iterator[str]:
    slots = of_segments(blocks.columns.segments, {each.segment: each.slot_count for each in read.index.segments}, 0)
    if astray := int(np.count_nonzero(blocks.columns.indices >= slots)):
        yield f"{plural(astray, 'block')} lie where its segments have no slots"


def _wrong_files(read: ReadHome, segments: Iterable[Segment]) -> Iterator[str]:
    """Yield a problem for each file that cannot be opened for reading as an engine would open
    it."""
    record = read.summary.record
    for segment in segments:
        folder = read.folder(segment.drive)
        if record is not None and segment.drive >= len(record.drives):
            yield f"segment {segment.segment} is on drive {segment.drive} by the index, and HOME has no such drive"
        if record is None or not segment.indexed or folder is None:
            continue
        spec = SegmentSpec(segment.segment, segment.slot_bytes or 0, segment.slots or 0, segment.drive, create=False)
        for rank in range(read.ranks):
            try:
                open_segment(folder, spec, rank, read.ranks, record.fingerprint, writable=False).close()
            except DeviceError as error:
                # Dropping a segment takes its blocks first, then its files, then its record.
                if error.errno != errno.ENOENT:
                    yield str(error)
                elif segment.used_slots and not read.is_spread:  # else it is on another host
                    yield f"segment {segment.segment} of rank {rank} is missing; {read.remedy} drops the others' part"
            except KvdiskError as error:
                yield f"{str(error).replace(f'{read.summary.path}/', '')}; {read.remedy} drops that segment"


# -- sums --------------------------------------------------------------------------------------


def fragmentation(segments: Iterable[Segment]) -> float | None:
    """Return the share of free bytes in runs below 2 MiB on a rank; None without free slots."""
    return _mean(((each.free_slots or 0) * (each.slot_bytes or 0), each.fragmentation) for each in segments)


def read_run_blocks(segments: Iterable[Segment]) -> float | None:
    """Return how many blocks are read at a time on average, where chains are read; None without
    blocks."""
    return _mean((_reads(each), each.read_run_blocks) for each in segments)


def read_run_bytes(segments: Iterable[Segment]) -> int | None:
    """Return how many bytes of a rank are read at a time on average; None without blocks."""
    mean = _mean((_reads(each), (each.read_run_blocks or 0) * (each.slot_bytes or 0)) for each in segments)
    return None if mean is None else round(mean)


def _reads(segment: Segment) -> float:
    return (segment.used_slots or 0) / segment.read_run_blocks if segment.read_run_blocks else 0


def _mean(weighed: Iterable[tuple[float, float | None]]) -> float | None:
    known = [(weight, value) for weight, value in weighed if weight and value is not None]
    return sum(weight * value for weight, value in known) / sum(weight for weight, _ in known) if known else None


def _sum(things: Iterable[object], name: str) -> int:
    """Return the sum of one field over all things that have a value."""
    return sum(getattr(thing, name) or 0 for thing in things)


def _sums(homes: Sequence[Home]) -> dict[str, Any]:
    """Return the sums over engine stores that both a namespace and the totals have."""
    known = [home for home in homes if home.blocks]
    return {
        "unreadable_engine_stores": sum(not home.index_readable for home in homes),
        "blocks": _sum(homes, "blocks"),
        "used_bytes": _sum(homes, "used_bytes"),
        "oldest_stored_s": min((home.oldest_stored_s or 0 for home in known), default=None),
        "newest_stored_s": max((home.newest_stored_s or 0 for home in known), default=None),
    }


def _totals(homes: Sequence[Home]) -> Totals:
    joint = [JointCap(**home.joint_cap) if home.joint_cap else None for home in homes]
    live = [(home.cap_bytes or 0, cap) for home, cap in zip(homes, joint, strict=True) if home.alive]
    cap_bytes = bytes_allowed(live) or None
    return Totals(
        namespaces=len({home.fingerprint for home in homes} - {None}),
        engine_stores=len(homes),
        engine_stores_in_use=sum(home.alive for home in homes),
        slots=_sum(homes, "slots"),
        allocated_bytes=_sum(homes, "allocated_bytes"),
        cap_bytes=cap_bytes,
        fill=_sum(homes, "used_bytes") / cap_bytes if cap_bytes else None,
        **_sums(homes),
    )


def _survey_namespace(read: ReadNamespace, homes: Sequence[Home], prefixes: int, shared_only: bool) -> Namespace:
    record, blocks = read.record, read.blocks
    assert record is not None
    fingerprint = record.fingerprint.hex()
    mine = [home for home in homes if home.fingerprint == fingerprint]
    said = record.description | described_geometry(record)
    described = said.get("groups")
    groups = [group for group in described if isinstance(group, dict)] if isinstance(described, list) else []
    in_group = np.bincount(blocks.groups, minlength=len(groups)).tolist()
    epochs, in_epoch = np.unique(blocks.columns.epochs, return_counts=True)
    sizes = ("block_tokens", "payload_bytes", "slot_bytes", "window_tokens")
    names = ("model", "dtype", "kv_dtype", "tensor_parallel", "ranks", "hash_tokens")
    known: dict[str, Any] = {name: said.get(name) for name in names} | _sums(mine)
    return Namespace(
        fingerprint=fingerprint,
        engine_stores=tuple(home.id for home in mine),
        groups=tuple(
            {"group": number, "blocks": in_group[number]} | {name: group.get(name) for name in sizes}
            for number, group in enumerate(groups)
        ),
        epochs=tuple(
            {"epoch": epoch, "blocks": count} for epoch, count in zip(epochs.tolist(), in_epoch.tolist(), strict=True)
        ),
        prefixes=find_prefixes(blocks, prefixes, shared_only=shared_only),
        **known,
    )


def _drives(store: StoreFile, homes: Sequence[Home], read: Sequence[ReadHome]) -> tuple[Drive, ...]:
    """Return the store's directories, the first one first."""
    where: dict[str | None, Path | None] = {store.store_id: store.path}
    found: dict[str | None, list[tuple[Home, Segment]]] = {store.store_id: []}
    for home, one in zip(homes, read, strict=True):
        for drive, name in enumerate(home.drives or (store.store_id,)):
            folder = one.folder(drive)
            where.setdefault(name, None if folder is None else folder.path.parent.parent)
            found.setdefault(name, []).extend((home, each) for each in home.segments if each.drive == drive)
    drives = []
    for name, parts in found.items():
        segments = [segment for _, segment in parts]
        drives.append(
            Drive(
                store_id=name,
                path=where[name],
                engine_stores=len({home.id for home, _ in parts}),
                unreadable_engine_stores=len({home.id for home, _ in parts if not home.index_readable}),
                segments=len(segments),
                slots=_sum(segments, "slots"),
                blocks=_sum(segments, "used_slots"),
                used_bytes=_sum(segments, "used_bytes"),
                allocated_bytes=sum(file["allocated_bytes"] for segment in segments for file in segment.files),
            )
        )
    return tuple(drives)


# -- ages and reuse ----------------------------------------------------------------------------


def _ages(homes: Sequence[HomeColumns], now_s: int) -> Ages:
    stored_s = _column([home.columns for home in homes], "stored_s")
    last_use_s, is_known = _column(homes, "last_use_s"), _column(homes, "is_known") > 0
    stored = _classes(now_s - stored_s, AGE_BOUNDS_S, "right")
    if not is_known.any():
        return Ages(AGE_BOUNDS_S, stored, None, None, None)
    used = _classes(now_s - last_use_s[last_use_s > 0], AGE_BOUNDS_S, "right")
    never_used = int(np.count_nonzero(is_known & (last_use_s == 0)))
    return Ages(AGE_BOUNDS_S, stored, used, never_used, int(np.count_nonzero(~is_known)))


def _reuse(homes: Sequence[HomeColumns]) -> Reuse:
    uses, is_known = _column(homes, "uses"), _column(homes, "is_known") > 0
    if not is_known.any():
        return Reuse(REUSE_BOUNDS, None, None)
    return Reuse(REUSE_BOUNDS, _classes(uses[is_known], REUSE_BOUNDS, "left"), int(np.count_nonzero(~is_known)))


def _column(tables: Sequence[object], name: str) -> NDArray[np.int64]:
    """Return one column of all tables, one after the other."""
    return np.concatenate([np.zeros(0, np.int64), *(getattr(table, name) for table in tables)])


def _classes(values: NDArray[np.int64], bounds: tuple[int, ...], side: Literal["left", "right"]) -> list[int]:
    """Count values by class."""
    counts: list[int] = np.bincount(np.searchsorted(bounds, values, side), minlength=len(bounds) + 1).tolist()
    return counts
