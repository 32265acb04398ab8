# SPDX-License-Identifier: Apache-2.0
"""What is in a store: ``Survey``, which is also what ``kvdisk inspect --json`` prints.

``survey_store`` is the one call. It writes nothing, and works on a store in use and on a copy.

The shape of the JSON changes only with ``json_version``. Bytes are integers, and ``*_s`` are whole
seconds since the Unix epoch. ``null`` is what cannot be known, since a file cannot be read, or what
is not there (no block, no live owner). A block, or a slot, has a part on every rank and counts
once; bytes are those of all ranks together. Used bytes are those of slots that hold blocks, each
with its header. Allocated bytes are what the file system holds, with index and control files. Homes
are in order of last use, the last first.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvdisk import __version__
from kvdisk.cli.indexes import (
    NONE,
    HomeColumns,
    ReadHome,
    ReadNamespace,
    described_geometry,
    places_of,
    ranks_of,
    read_namespaces,
)
from kvdisk.cli.prefixes import PrefixTree, find_prefixes, grow_forest
from kvdisk.device import paths
from kvdisk.device.control import STORE_FILE, HomeSummary, read_record
from kvdisk.device.drives import Directories, list_directories
from kvdisk.device.listing import list_homes, scan_folders
from kvdisk.device.segment import SegmentFileSummary, open_segment, read_segment_header
from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError
from kvdisk.messages import SegmentSpec

JSON_VERSION = 2
PREFIXES = 12
"""How many prefixes a survey looks for in each namespace."""
AGE_BOUNDS_S = (60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400)
AGE_NAMES = ("< 1 min", "1-10 min", "10-60 min", "1-6 h", "6-24 h", "1-7 d", "7-30 d", "> 30 d")
REUSE_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64)
REUSE_NAMES = ("0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "> 64")
_SHORT_RUN_BYTES = 2 << 20
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment's file of one rank."""

    rank: int
    length_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of a home. ``drive``: position among the home's drives.

    ``indexed``: the index has a record of it; one that is being made, or that a crash has left, has
    none yet. ``slot_bytes``: on one rank. ``fill``: used_slots / slots. A free run is a row of free
    slots, as long as it can be. ``fragmentation``: the share of free bytes in runs of less than 2
    MiB on a rank, which a larger write has to go around; null where nothing is free.
    ``read_run_blocks``: how many blocks are read at a time, in the mean, where chains are read in
    order: a block that lies behind its parent is read with it.
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
    files: tuple[SegmentFile, ...] = ()


@dataclass(frozen=True)
class Home:
    """A home. ``owner``: "alive" while a process of its owner lives, else "orphan".

    ``clean``: its last owner closed it in order; false while one lives. ``fill``: used_bytes /
    cap_bytes. ``read_run_bytes``: bytes of one rank that are read at a time, in the mean.
    ``drives``: the stores' ids of its drives. ``problems``: sentences.
    """

    id: str
    path: Path
    fingerprint: str | None
    owner: Literal["alive", "orphan"]
    clean: bool | None
    ranks: int
    cap_bytes: int | None
    allocated_bytes: int
    used_bytes: int | None
    blocks: int | None
    slots: int
    fill: float | None
    fragmentation: float | None
    read_run_blocks: float | None
    read_run_bytes: float | None
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
class Group:
    """A KV-cache group as the engine describes it. Payload and slot: on one rank."""

    group: int
    blocks: int
    block_tokens: Any
    payload_bytes: Any
    slot_bytes: Any
    window_tokens: Any


@dataclass(frozen=True)
class Epoch:
    """Blocks of one epoch of the weights; 0: as the files have them."""

    epoch: int
    blocks: int


@dataclass(frozen=True)
class Namespace:
    """All homes of one fingerprint, described by the engine that used it last.

    A block that two homes hold counts twice. ``unreadable_homes`` are missing from the sums.
    """

    fingerprint: str
    model: Any
    dtype: Any
    kv_dtype: Any
    tensor_parallel: Any
    ranks: Any
    hash_tokens: Any
    homes: tuple[str, ...]
    unreadable_homes: int
    blocks: int
    used_bytes: int
    oldest_stored_s: int | None
    newest_stored_s: int | None
    groups: tuple[Group, ...]
    epochs: tuple[Epoch, ...]
    prefixes: PrefixTree


@dataclass(frozen=True)
class Drive:
    """A directory of the store. ``path``: null where it was not named.

    ``allocated_bytes``: of segment files.
    """

    store_id: str | None
    path: Path | None
    homes: int
    unreadable_homes: int
    segments: int
    slots: int
    blocks: int
    used_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class Ages:
    """Blocks of all homes by age. Class n is below bound n; the last has no bound.

    ``stored``: by the age of their record. ``used``: by the age of their last use; null where no
    home has a USES file. ``never_used``: not since they were stored. ``unknown``: USES does not
    tell of them, as of those stored after it was last written.
    """

    bounds_s: tuple[int, ...]
    stored: list[int]
    used: list[int] | None
    never_used: int | None
    unknown: int | None


@dataclass(frozen=True)
class Reuse:
    """Blocks of all homes by uses. Class n has up to bound n uses; the last has no bound.

    A use is a request that came to the block and found it, in a tier or in the GPU's cache; the
    request that made the block is none.
    """

    bounds: tuple[int, ...]
    blocks: list[int] | None
    unknown: int | None


@dataclass(frozen=True)
class Totals:
    """Sums over all homes but ``unreadable_homes``. ``cap_bytes``: of live owners together."""

    namespaces: int
    homes: int
    live_homes: int
    unreadable_homes: int
    blocks: int
    slots: int
    used_bytes: int
    allocated_bytes: int
    cap_bytes: int | None
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

    json_version: int
    kvdisk_version: str
    surveyed_s: int
    ok: bool
    problems: tuple[str, ...]
    store: StoreFile
    totals: Totals
    drives: tuple[Drive, ...]
    ages: Ages
    reuse: Reuse
    namespaces: tuple[Namespace, ...]
    homes: tuple[Home, ...]


def survey_store(
    directories: Directories, *, prefixes: int = PREFIXES, prefixes_in_all: int | None = None, shared_only: bool = True
) -> Survey:
    """Return what is in the store in these directories.

    ``prefixes``: the biggest of each namespace, fewer where there would be more than
    ``prefixes_in_all``; with ``shared_only`` only what several chains have or requests used again.
    Raises ConfigError where it is no store that this kvdisk and this user can read, CorruptRecord
    where its STORE file does not decode, StoreLocked, DeviceError.
    """
    path, *further = list_directories(directories)
    for attempt in range(_ATTEMPTS):
        read = read_namespaces(list_homes([path, *further]))
        found = [(home, _survey_home(home)) for namespace in read for home in namespace.homes]
        still_there = [(home, facts) for home, facts in found if facts.path.exists()]
        # A home that has got another name, or dropped a segment, meanwhile looks wrong: look again.
        wrong = len(still_there) < len(found) or any(facts.alive and facts.problems for _, facts in found)
        if not wrong or attempt == _ATTEMPTS - 1:
            break
    now_s = int(time.time())
    homes = tuple(sorted((facts for _, facts in still_there), key=lambda home: home.last_use_s or 0, reverse=True))
    most = prefixes if prefixes_in_all is None else min(prefixes, prefixes_in_all // max(1, len(read)))
    namespaces = {
        one.record.fingerprint.hex(): _survey_namespace(one, homes, most, shared_only) for one in read if one.record
    }
    columns = [home.blocks for home, _ in still_there if home.blocks is not None]
    with paths.device_errors(f"reading {path / STORE_FILE}"):
        store = paths.read_control(path / STORE_FILE)
    store_id = store.get("store_id")
    problems = tuple(f"home {home.id}: {problem}" for home in homes for problem in home.problems)
    return Survey(
        json_version=JSON_VERSION,
        kvdisk_version=__version__,
        surveyed_s=now_s,
        ok=not problems,
        problems=problems,
        store=StoreFile(path, store_id, store["format_version"], store.get("created_s")),
        totals=_totals(homes),
        drives=_drives(path, store_id, homes, [home for home, _ in still_there]),
        ages=_ages(columns, now_s),
        reuse=_reuse(columns),
        namespaces=tuple(namespaces[name] for name in dict.fromkeys(h.fingerprint for h in homes if h.fingerprint)),
        homes=homes,
    )


# -- homes -------------------------------------------------------------------------------------


def _survey_home(read: ReadHome) -> Home:
    with paths.device_errors(f"reading home {read.summary.id}"):
        # Files that are newer than the index: it may name segments that were not there before.
        summary = replace(read.summary, segments=scan_folders(read.summary.folders))
    record, blocks, ranks = summary.record, read.blocks, ranks_of(summary.record, summary.segments)
    used = _used_slots(blocks) if blocks is not None else {}
    segments = tuple(_segments(summary, read, ranks, used))
    problems = list(_wrong_home(summary, read))
    used_bytes = stored = None
    if blocks is not None:
        used_bytes = sum(segment.used_bytes or 0 for segment in segments)
        stored = blocks.columns.stored_s
        problems += _wrong_records(segments, used)
        problems += _wrong_files(summary, segments, ranks)
    return Home(
        id=summary.id,
        path=summary.path,
        fingerprint=record.fingerprint.hex() if record else None,
        owner="alive" if summary.alive else "orphan",
        clean=record.clean if record else None,
        ranks=ranks,
        cap_bytes=record.cap_bytes if record else None,
        allocated_bytes=summary.allocated_bytes,
        used_bytes=used_bytes,
        blocks=None if stored is None else len(stored),
        slots=sum(segment.slots or 0 for segment in segments),
        fill=used_bytes / record.cap_bytes if record and record.cap_bytes > 0 and used_bytes is not None else None,
        fragmentation=fragmentation(segments),
        read_run_blocks=read_run_blocks(segments),
        read_run_bytes=read_run_bytes(segments),
        created_s=record.created_s if record else None,
        last_use_s=record.last_use_s if record else None,
        oldest_stored_s=int(stored.min()) if stored is not None and len(stored) else None,
        newest_stored_s=int(stored.max()) if stored is not None and len(stored) else None,
        index_readable=blocks is not None,
        drives=tuple(drive.store_id for drive in record.drives) if record else (),
        problems=tuple(problems),
        segments=segments,
    )


def _used_slots(blocks: HomeColumns) -> dict[int, tuple[int, int]]:
    """Return how many blocks each segment has, and the highest slot among theirs."""
    numbers, rows, counts = np.unique(blocks.columns.segments, return_inverse=True, return_counts=True)
    highest = np.zeros(len(numbers), np.int64)
    np.maximum.at(highest, rows, blocks.columns.indices)
    return dict(zip(numbers.tolist(), zip(counts.tolist(), highest.tolist(), strict=True), strict=True))


def _segments(
    summary: HomeSummary, read: ReadHome, ranks: int, used: Mapping[int, tuple[int, int]]
) -> Iterator[Segment]:
    records = {record.segment: record for record in read.index.segments} if read.blocks is not None else {}
    layout = _Layout(read.blocks) if read.blocks is not None else None
    files: dict[int, list[SegmentFileSummary]] = {}
    for file in summary.segments:
        files.setdefault(file.segment, []).append(file)
    for number in sorted(records.keys() | files.keys()):
        found = files.get(number, [])
        listed = tuple(SegmentFile(file.rank, file.length_bytes, file.allocated_bytes) for file in found)
        record = records.get(number)
        if record is None or layout is None:
            slot_bytes, slots = _sizes_from_header(summary, found[0])
            # A segment without a record has no blocks; nothing is known where the index cannot be read.
            used_slots = 0 if layout is not None else None
            used_bytes = None if slot_bytes is None else used_slots
            yield Segment(number, found[0].drive, False, slot_bytes, slots, used_slots, used_bytes, files=listed)
            continue
        blocks, slots = used.get(number, (0, 0))[0], record.slot_count
        free, reads = layout.free_runs(number, slots), layout.reads(number, slots)
        short_slots = int(free[free * record.slot_bytes < _SHORT_RUN_BYTES].sum())
        yield Segment(
            segment=number,
            drive=record.drive,
            indexed=True,
            slot_bytes=record.slot_bytes,
            slots=slots,
            used_slots=blocks,
            used_bytes=blocks * record.slot_bytes * ranks,
            fill=blocks / slots if slots else None,
            free_slots=int(free.sum()),
            free_runs=len(free),
            longest_free_run_slots=int(free.max(initial=0)),
            fragmentation=short_slots / int(free.sum()) if len(free) else None,
            read_run_blocks=blocks / reads if reads else None,
            files=listed,
        )


class _Layout:
    """How a home's blocks lie in its segments, in the order of their slots."""

    def __init__(self, blocks: HomeColumns) -> None:
        places = places_of(blocks.columns)
        follows = blocks.parents != NONE
        follows[follows] = places[follows] == places[blocks.parents[follows]] + np.uint64(1)
        order = np.argsort(places)
        self._places, self._begins = places[order], ~follows[order]

    def _rows(self, segment: int, slots: int) -> slice:
        bounds = np.array([segment << 32, (segment << 32) + slots], np.uint64)
        return slice(*np.searchsorted(self._places, bounds).tolist())

    def free_runs(self, segment: int, slots: int) -> NDArray[np.int64]:
        """Return the lengths of a segment's free runs."""
        used = np.unique(self._places[self._rows(segment, slots)]).astype(np.int64) - (segment << 32)
        lengths = np.diff(np.concatenate(([-1], used, [slots]))) - 1
        return lengths[lengths > 0]

    def reads(self, segment: int, slots: int) -> int:
        """Return in how many reads a segment's blocks are read along their chains."""
        return int(np.count_nonzero(self._begins[self._rows(segment, slots)]))


def _sizes_from_header(summary: HomeSummary, file: SegmentFileSummary) -> tuple[int | None, int | None]:
    try:
        folder = summary.folders[file.drive]
        assert folder is not None, "a file was found there"
        header = read_segment_header(folder, file.segment, file.rank)
    except KvdiskError:
        return None, None
    return header.slot_bytes, header.slot_count


def _wrong_home(summary: HomeSummary, read: ReadHome) -> Iterator[str]:
    for drive, folder in enumerate(summary.folders):
        if folder is None:
            yield f"drive {drive} was not looked at, name its directory too"
    if summary.record is None:
        yield why_no_record(summary.path) or "its HOME file was being replaced"
    if read.index.problem is not None:
        yield f"its index cannot be read ({read.index.problem})"
    elif read.blocks is None:
        yield "its index is missing"


def why_no_record(path: Path) -> str | None:
    """Say why the HOME file of the home in this directory cannot be read; None where it can."""
    try:
        read_record(path)
    except FileNotFoundError:
        return "its HOME file is missing, as after an interrupted deletion; the next engine that starts removes it"
    except CorruptRecord as error:
        return f"its HOME file cannot be read ({str(error).replace(f'{path}/', '')})"
    except OSError as error:
        return f"its HOME file cannot be read ({error.strerror})"
    return None


def _wrong_records(segments: Iterable[Segment], used: Mapping[int, tuple[int, int]]) -> Iterator[str]:
    slots = {segment.segment: segment.slots or 0 for segment in segments if segment.indexed}
    lost = sum(blocks for segment, (blocks, _) in used.items() if segment not in slots)
    if lost:
        yield f"{lost} blocks are in segments that the index does not have"
    for segment, count in slots.items():
        if segment in used and used[segment][1] >= count:
            yield f"segment {segment} has {count} slots, and the index has a block in slot {used[segment][1]}"


def _wrong_files(summary: HomeSummary, segments: Iterable[Segment], ranks: int) -> Iterator[str]:
    """Open each file that should be there as an engine would, to read."""
    if summary.record is None:
        return
    for segment in segments:
        folder = summary.folders[segment.drive] if segment.drive < len(summary.folders) else None
        if not segment.indexed or segment.slot_bytes is None or segment.slots is None or folder is None:
            continue
        spec = SegmentSpec(segment.segment, segment.slot_bytes, segment.slots, segment.drive, create=False)
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


# -- sums --------------------------------------------------------------------------------------


def fragmentation(segments: Iterable[Segment]) -> float | None:
    """Return the share of free bytes in runs below 2 MiB on a rank; None without free slots."""
    free = [(each.free_slots * (each.slot_bytes or 0), each.fragmentation or 0) for each in segments if each.free_slots]
    total = sum(free_bytes for free_bytes, _ in free)
    return sum(free_bytes * share for free_bytes, share in free) / total if total else None


def read_run_blocks(segments: Iterable[Segment]) -> float | None:
    """Return how many blocks are read at a time, where chains are read; None without blocks."""
    return _mean_read(segments, lambda _: 1)


def read_run_bytes(segments: Iterable[Segment]) -> float | None:
    """Return how many bytes of a rank are read at a time, in the mean; None without blocks."""
    return _mean_read(segments, lambda segment: segment.slot_bytes or 0)


def _mean_read(segments: Iterable[Segment], weight: Callable[[Segment], int]) -> float | None:
    known = [(each, each.used_slots or 0, each.read_run_blocks) for each in segments]
    reads = sum(used / run for _, used, run in known if run)
    return sum(used * weight(each) for each, used, run in known if run) / reads if reads else None


def stored_range(homes: Iterable[Home]) -> tuple[int | None, int | None]:
    """Return when the oldest and the newest block of these homes were stored."""
    known = [home for home in homes if home.blocks]
    oldest_s = min((home.oldest_stored_s or 0 for home in known), default=None)
    return oldest_s, max((home.newest_stored_s or 0 for home in known), default=None)


def _totals(homes: Sequence[Home]) -> Totals:
    caps = [home.cap_bytes for home in homes if home.alive and home.cap_bytes is not None]
    oldest_s, newest_s = stored_range(homes)
    return Totals(
        namespaces=len({home.fingerprint for home in homes} - {None}),
        homes=len(homes),
        live_homes=sum(home.alive for home in homes),
        unreadable_homes=sum(not home.index_readable for home in homes),
        blocks=sum(home.blocks or 0 for home in homes),
        slots=sum(home.slots for home in homes),
        used_bytes=sum(home.used_bytes or 0 for home in homes),
        allocated_bytes=sum(home.allocated_bytes for home in homes),
        cap_bytes=sum(caps) if caps else None,
        oldest_stored_s=oldest_s,
        newest_stored_s=newest_s,
    )


def _survey_namespace(read: ReadNamespace, homes: Sequence[Home], prefixes: int, shared_only: bool) -> Namespace:
    record, columns = read.record, read.columns
    assert record is not None
    mine = [home for home in homes if home.fingerprint == record.fingerprint.hex()]
    said = record.description | described_geometry(record)
    described = said.get("groups")
    groups = [group for group in described if isinstance(group, dict)] if isinstance(described, list) else []
    by_group, by_epoch = Counter[int](), Counter[int]()
    for one in columns:
        by_group.update(_counted(one.groups))
        by_epoch.update(_counted(one.columns.epochs))
    oldest_s, newest_s = stored_range(mine)
    sizes = ("block_tokens", "payload_bytes", "slot_bytes", "window_tokens")
    names = ("model", "dtype", "kv_dtype", "tensor_parallel", "ranks", "hash_tokens")
    return Namespace(
        fingerprint=record.fingerprint.hex(),
        **{name: said.get(name) for name in names},
        homes=tuple(home.id for home in mine),
        unreadable_homes=sum(not home.index_readable for home in mine),
        blocks=sum(home.blocks or 0 for home in mine),
        used_bytes=sum(home.used_bytes or 0 for home in mine),
        oldest_stored_s=oldest_s,
        newest_stored_s=newest_s,
        groups=tuple(
            Group(number, by_group[number], *(group.get(name) for name in sizes)) for number, group in enumerate(groups)
        ),
        epochs=tuple(Epoch(epoch, by_epoch[epoch]) for epoch in sorted(by_epoch)),
        prefixes=find_prefixes(
            columns, grow_forest(columns, read.block_tokens), read.block_tokens, prefixes, shared_only=shared_only
        ),
    )


def _counted(column: NDArray[Any]) -> dict[int, int]:
    values, counts = np.unique(column, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _drives(path: Path, store_id: str | None, homes: Sequence[Home], read: Sequence[ReadHome]) -> tuple[Drive, ...]:
    """Return the store's directories, the first one first."""
    folders = {home.summary.id: home.summary.folders for home in read}
    found: dict[str | None, list[tuple[Home, int]]] = {store_id: []}
    for home in homes:
        for drive, name in enumerate(home.drives or (store_id,)):
            found.setdefault(name, []).append((home, drive))
    drives = []
    for name, parts in found.items():
        segments = [(home, each) for home, drive in parts for each in home.segments if each.drive == drive]
        named = [folders[home.id][drive] for home, drive in parts if drive < len(folders[home.id])]
        folder = next((folder.path for folder in named if folder is not None), None)
        drives.append(
            Drive(
                store_id=name,
                path=path if name == store_id else None if folder is None else folder.parent.parent,
                homes=len({home.id for home, _ in segments}),
                unreadable_homes=len({home.id for home, _ in segments if not home.index_readable}),
                segments=len(segments),
                slots=sum(segment.slots or 0 for _, segment in segments),
                blocks=sum(segment.used_slots or 0 for _, segment in segments),
                used_bytes=sum(segment.used_bytes or 0 for _, segment in segments),
                allocated_bytes=sum(file.allocated_bytes for _, segment in segments for file in segment.files),
            )
        )
    return tuple(drives)


# -- ages and reuse ----------------------------------------------------------------------------


def _ages(homes: Sequence[HomeColumns], now_s: int) -> Ages:
    stored = _classes([now_s - home.columns.stored_s.astype(np.int64) for home in homes], AGE_BOUNDS_S, "right")
    told = [(home.is_known, home.last_use_s) for home in homes if home.last_use_s is not None]
    if not told:
        return Ages(AGE_BOUNDS_S, stored, None, None, None)
    used = _classes([now_s - last_s[known & (last_s != 0)] for known, last_s in told], AGE_BOUNDS_S, "right")
    never_used = sum(int(np.count_nonzero(known & (last_s == 0))) for known, last_s in told)
    return Ages(AGE_BOUNDS_S, stored, used, never_used, _untold(homes))


def _reuse(homes: Sequence[HomeColumns]) -> Reuse:
    told = [home.uses[home.is_known] for home in homes if home.uses is not None]
    if not told:
        return Reuse(REUSE_BOUNDS, None, None)
    return Reuse(REUSE_BOUNDS, _classes(told, REUSE_BOUNDS, "left"), _untold(homes))


def _untold(homes: Sequence[HomeColumns]) -> int:
    return sum(int(np.count_nonzero(~home.is_known)) for home in homes if home.uses is not None)


def _classes(parts: Sequence[NDArray[np.int64]], bounds: tuple[int, ...], side: Literal["left", "right"]) -> list[int]:
    """Count the values of all parts by class."""
    values = np.concatenate([np.zeros(0, np.int64), *parts])
    counts: list[int] = np.bincount(np.searchsorted(bounds, values, side), minlength=len(bounds) + 1).tolist()
    return counts
