# SPDX-License-Identifier: Apache-2.0
"""The engine stores of a store as every command reads them: what is there, its index, and its USES,
in columns.

A process of its own reads the indexes: see ``kvdisk.index.reader_process``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import GROUP_BYTES, BlockKey, Slot
from kvdisk.device.control import DriveFolder, HomeRecord, HomeSummary, read_record
from kvdisk.device.drives import Directories
from kvdisk.device.listing import list_homes
from kvdisk.device.segment import SegmentFileSummary
from kvdisk.device.uses import UsesRecords, find_uses, read_uses
from kvdisk.errors import CorruptRecord
from kvdisk.index.base import BlockColumns, BlockRecord, SegmentRecord
from kvdisk.index.columns import join_columns
from kvdisk.index.reader_process import IndexContent, read_indexes

NONE = -1
_MOST_RANKS = 1 << 16
_MOST_TOKENS = 1 << 20


class Records:
    """The blocks of an index as records, each made of ``columns`` when it is asked for."""

    def __init__(self, blocks: BlockColumns | None) -> None:
        self.columns = blocks or join_columns([])
        self._parent_ends = np.cumsum(self.columns.parent_bytes)

    def __len__(self) -> int:
        return len(self.columns.keys)

    def __iter__(self) -> Iterator[BlockRecord]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, row: int) -> BlockRecord:
        blocks, end = self.columns, int(self._parent_ends[row])
        parent = blocks.parents[end - int(blocks.parent_bytes[row]) : end]
        return BlockRecord(
            int(blocks.epochs[row]),
            blocks.keys[row],
            Slot(int(blocks.segments[row]), int(blocks.indices[row])),
            int(blocks.generations[row]),
            BlockKey(parent) if parent else None,
            int(blocks.stored_s[row]),
        )


class HomeColumns(NamedTuple):
    """Blocks of one engine store, a row each.

    ``slot_bytes``: on all ranks; 0 in a segment that the index does not have. ``parents``: row of
    the parent, or NONE. ``uses`` and ``last_use_s``: None where no USES file tells; ``is_known``:
    of which blocks it does.
    """

    columns: BlockColumns
    groups: NDArray[np.int64]
    slot_bytes: NDArray[np.int64]
    parents: NDArray[np.int64]
    uses: NDArray[np.int64] | None
    last_use_s: NDArray[np.int64] | None
    is_known: NDArray[np.bool_]


@dataclass(frozen=True)
class ReadHome:
    """An engine store and its index."""

    summary: HomeSummary
    index: IndexContent

    @property
    def id(self) -> str:
        """Its id."""
        return self.summary.id

    @property
    def problem(self) -> str | None:
        """Why the index cannot be read; None where it can. One that has neither files nor an index
        is new."""
        if self.index.problem is not None:
            return f"its index cannot be read ({self.index.problem})"
        return "its index is missing" if self.summary.segments and not self.index.exists else None

    @property
    def ranks(self) -> int:
        """How many parts a block has on the drive: as HOME says, else as many as have files."""
        return ranks_of(self.summary.record, self.summary.segments)

    @cached_property
    def records(self) -> Records:
        """The blocks of the index, none where it cannot be read."""
        return Records(self.index.blocks)

    @cached_property
    def blocks(self) -> HomeColumns | None:
        """The blocks with what USES tells of them; None where the index cannot be read."""
        if self.problem is not None:
            return None
        uses = read_uses(self.summary.path)
        return join_home(self.records.columns, self.index.segments, self.ranks, uses)

    def folder(self, drive: int) -> DriveFolder | None:
        """Return its part on a drive; None where that directory was not named."""
        return self.summary.folders[drive] if drive < len(self.summary.folders) else None


class ReadNamespace(NamedTuple):
    """The engine stores of one namespace. One whose HOME cannot be read is alone."""

    homes: tuple[ReadHome, ...]
    block_tokens: tuple[int | None, ...]

    @property
    def record(self) -> HomeRecord | None:
        """HOME of the engine store that was used last."""
        return max((home.summary.record for home in self.homes), key=lambda one: one.last_use_s if one else 0)

    @property
    def columns(self) -> list[HomeColumns]:
        """The blocks of those whose index can be read."""
        return [home.blocks for home in self.homes if home.blocks is not None]


def read_homes(directories: Directories, wanted: Callable[[HomeSummary], bool] = lambda _: True) -> list[ReadHome]:
    """Read the wanted engine stores of a store, by id. Raises as ``list_homes``."""
    summaries = list(filter(wanted, list_homes(directories)))
    indexes = read_indexes([summary.index_path for summary in summaries])
    return [ReadHome(*each) for each in zip(summaries, indexes, strict=True)]


def by_namespace(homes: Sequence[ReadHome]) -> list[ReadNamespace]:
    """Put engine stores together that serve the same requests."""
    groups: dict[object, list[ReadHome]] = {}
    for home in homes:
        record = home.summary.record
        groups.setdefault(record.fingerprint if record else home.id, []).append(home)
    found = [ReadNamespace(tuple(group), ()) for group in groups.values()]
    return [each._replace(block_tokens=_block_tokens(each.record)) for each in found]


def why_no_record(path: Path) -> str | None:
    """Say why the HOME file of the engine store in this directory cannot be read; None where it
    can."""
    try:
        read_record(path)
    except FileNotFoundError:
        return "its HOME file is missing, as after an interrupted deletion; the next engine that starts removes it"
    except CorruptRecord as error:
        return f"its HOME file cannot be read ({str(error).replace(f'{path}/', '')})"
    except OSError as error:
        return f"its HOME file cannot be read ({error.strerror})"
    return None


def not_named(drive: int) -> str:
    """Say that a directory of the store is missing among the arguments."""
    return f"drive {drive} was not looked at, name its directory too"


def described_geometry(record: HomeRecord | None) -> dict[str, object]:
    """Return what HOME says of blocks; nothing in it is certain."""
    description = record.description if record else {}
    geometry = description.get("geometry")
    return geometry if isinstance(geometry, dict) else description


def ranks_of(record: HomeRecord | None, files: Sequence[SegmentFileSummary]) -> int:
    """Return how many parts a block has: as HOME says, else as many as have files."""
    ranks = described_geometry(record).get("ranks")
    if isinstance(ranks, int) and 0 < ranks <= _MOST_RANKS:
        return ranks
    return max(1, len({file.rank for file in files}))


def _block_tokens(record: HomeRecord | None) -> tuple[int | None, ...]:
    groups = described_geometry(record).get("groups")
    if not isinstance(groups, list):
        return ()
    sizes = [group.get("block_tokens") if isinstance(group, dict) else None for group in groups]
    return tuple(size if isinstance(size, int) and 0 < size <= _MOST_TOKENS else None for size in sizes)


def join_home(
    columns: BlockColumns, segments: Sequence[SegmentRecord], ranks: int, uses: UsesRecords | None
) -> HomeColumns:
    """Put together what one engine store's index and USES file say."""
    count = len(columns.keys)
    tails = b"".join([key[-GROUP_BYTES:] for key in columns.keys])
    names: Sequence[bytes] = columns.keys
    above: Sequence[bytes] = columns.each_parent()
    if count and columns.epochs[0] != columns.epochs[-1]:  # they ascend
        heads = [epoch.to_bytes(8, "big") for epoch in columns.epochs.tolist()]
        names = [head + key for head, key in zip(heads, names, strict=True)]
        above = [parent and head + parent for head, parent in zip(heads, above, strict=True)]
    row_of = dict(zip(names, range(count), strict=True))
    sizes = {record.segment: min(record.slot_bytes, 1 << 48) for record in segments}
    return HomeColumns(
        columns,
        np.frombuffer(tails, ">u2").astype(np.int64),
        of_segments(columns.segments, sizes, 0) * ranks,
        np.fromiter(map(row_of.get, above, repeat(NONE)), np.int64, count),
        *_uses_of(columns, uses),
    )


def of_segments(numbers: NDArray[np.uint32], values: Mapping[int, int], missing: int) -> NDArray[np.int64]:
    """Return the value of each segment number; ``missing`` for those that have none."""
    found, at = np.unique(numbers, return_inverse=True)
    of_found: NDArray[np.int64] = np.array([values.get(number, missing) for number in found.tolist()], np.int64)
    return of_found[at]


def places_of(columns: BlockColumns) -> NDArray[np.uint64]:
    """Return segment and slot of each block as one number."""
    return columns.segments.astype(np.uint64) << np.uint64(32) | columns.indices.astype(np.uint64)


def _uses_of(
    columns: BlockColumns, records: UsesRecords | None
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None, NDArray[np.bool_]]:
    """Return uses, last use, and whether USES names the block's generation."""
    if records is None:
        return None, None, np.zeros(len(columns.keys), np.bool_)
    found, is_known = find_uses(records, columns.generations)
    return found["uses"].astype(np.int64), found["last_use_s"].astype(np.int64), is_known
