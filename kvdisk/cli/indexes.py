# SPDX-License-Identifier: Apache-2.0
"""What homes' indexes and USES files say of their blocks, whole and in columns.

A process of its own reads the indexes: see ``kvdisk.index.reader_process``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import GROUP_BYTES, BlockKey, Slot
from kvdisk.device.control import HomeRecord, HomeSummary
from kvdisk.device.segment import SegmentFileSummary
from kvdisk.device.uses import UsesRecords, find_uses, read_uses
from kvdisk.index.base import BlockColumns, BlockRecord, SegmentRecord
from kvdisk.index.columns import join_columns
from kvdisk.index.reader_process import IndexContent, read_indexes

NONE = -1
_MOST_RANKS = 1 << 16
_MOST_TOKENS = 1 << 20


class Records(Sequence[BlockRecord]):
    """The blocks of an index as records, each made of ``columns`` when it is asked for."""

    def __init__(self, blocks: BlockColumns | None) -> None:
        self.columns = blocks or join_columns([])
        self._parent_ends = np.cumsum(self.columns.parent_bytes)

    def __len__(self) -> int:
        return len(self.columns.keys)

    @overload
    def __getitem__(self, row: int) -> BlockRecord: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[BlockRecord]: ...
    def __getitem__(self, row: int | slice) -> BlockRecord | Sequence[BlockRecord]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        blocks = self.columns
        end = int(self._parent_ends[row])
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
    """Blocks of one home, a row each.

    ``slot_bytes``: on all ranks; 0 in a segment that the index does not have. ``names`` and
    ``parent_names``: keys, with their epoch before them where the home has several, so that they
    are unique; empty: no parent. ``parents``: row of the parent, or NONE. ``uses`` and
    ``last_use_s``: None where no USES file tells; ``is_known``: of which blocks it does.
    """

    columns: BlockColumns
    groups: NDArray[np.int64]
    slot_bytes: NDArray[np.int64]
    names: Sequence[bytes]
    parent_names: Sequence[bytes]
    parents: NDArray[np.int64]
    uses: NDArray[np.int64] | None
    last_use_s: NDArray[np.int64] | None
    is_known: NDArray[np.bool_]


@dataclass(frozen=True)
class ReadHome:
    """A home, its index, and its blocks; ``blocks`` is None where the index cannot be read.

    A home that has files and no index cannot be read; one that has neither is new.
    """

    summary: HomeSummary
    index: IndexContent
    blocks: HomeColumns | None


class ReadNamespace(NamedTuple):
    """All homes of one namespace. A home whose HOME cannot be read is alone."""

    homes: tuple[ReadHome, ...]
    block_tokens: tuple[int | None, ...]

    @property
    def record(self) -> HomeRecord | None:
        """HOME of the home that was used last."""
        return _latest(self.homes).record

    @property
    def columns(self) -> list[HomeColumns]:
        """The blocks of those homes whose index can be read."""
        return [home.blocks for home in self.homes if home.blocks is not None]


def read_namespaces(summaries: Sequence[HomeSummary]) -> list[ReadNamespace]:
    """Read the indexes and USES files of these homes."""
    groups: dict[object, list[ReadHome]] = {}
    indexes = read_indexes([summary.index_path for summary in summaries])
    for summary, index in zip(summaries, indexes, strict=True):
        blocks = None
        if index.problem is None and (index.exists or not summary.segments):
            ranks = ranks_of(summary.record, summary.segments)
            columns = Records(index.blocks).columns
            blocks = join_home(columns, index.segments, ranks, read_uses(summary.path))
        name = summary.record.fingerprint if summary.record else summary.id
        groups.setdefault(name, []).append(ReadHome(summary, index, blocks))
    return [ReadNamespace(tuple(homes), _block_tokens(_latest(homes).record)) for homes in groups.values()]


def _latest(homes: Sequence[ReadHome]) -> HomeSummary:
    return max((home.summary for home in homes), key=lambda one: one.record.last_use_s if one.record else 0)


def described_geometry(record: HomeRecord | None) -> dict[str, object]:
    """Return what HOME says of blocks; nothing in it is certain."""
    description = record.description if record else {}
    geometry = description.get("geometry")
    return geometry if isinstance(geometry, dict) else description


def ranks_of(record: HomeRecord | None, files: Sequence[SegmentFileSummary]) -> int:
    """Return how many parts a block has on the drive: as HOME says, else as many as have files."""
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
    """Put together what one home's index and USES file say."""
    count = len(columns.keys)
    tails = b"".join([key[-GROUP_BYTES:] for key in columns.keys])
    names: Sequence[bytes] = columns.keys
    parent_names: Sequence[bytes] = columns.each_parent()
    if count and columns.epochs[0] != columns.epochs[-1]:  # they ascend
        heads = [epoch.to_bytes(8, "big") for epoch in columns.epochs.tolist()]
        names = [head + key for head, key in zip(heads, names, strict=True)]
        parent_names = [parent and head + parent for head, parent in zip(heads, parent_names, strict=True)]
    row_of = dict(zip(names, range(count), strict=True))
    sizes = {record.segment: min(record.slot_bytes, 1 << 48) for record in segments}
    return HomeColumns(
        columns,
        np.frombuffer(tails, ">u2").astype(np.int64),
        of_segments(columns.segments, sizes, 0) * ranks,
        names,
        parent_names,
        np.fromiter(map(row_of.get, parent_names, repeat(NONE)), np.int64, count),
        *_uses_of(columns, uses),
    )


def of_segments(numbers: NDArray[np.uint32], values: Mapping[int, int], missing: int) -> NDArray[np.int64]:
    """Return the value of each segment number; ``missing`` for those that have none."""
    if not values:
        return np.full(len(numbers), missing, np.int64)
    known = np.array(sorted(values.items()), np.int64)
    at = np.minimum(np.searchsorted(known[:, 0], numbers), len(known) - 1)
    return np.where(known[at, 0] == numbers, known[at, 1], missing)


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
