# SPDX-License-Identifier: Apache-2.0
"""What an index knows, taken over into the catalog and the eviction order at start. Scheduler thread only.

A store of a million blocks is open in a second or two because nothing here looks at one block at a
time: columns come from the index, and columns go to the catalog.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import GROUP_BYTES, BlockKey, Slot, Tier
from kvdisk.device.uses import UsesRecords
from kvdisk.geometry import FILE_EPOCH, Geometry
from kvdisk.index.base import BlockColumns, Index, SegmentRecord
from kvdisk.manager.catalog import Catalog, CommittedCopies
from kvdisk.manager.chains import NONE
from kvdisk.manager.eviction import TailFirst
from kvdisk.manager.uses import Uses

_WORD_BYTES = 8
_Flags = NDArray[np.bool_]


@dataclass
class Restored:
    """``used``: slots that are not free, by segment. ``stale``: names of records that go; ``stale_slots``: their slots,
    those in ``used`` that no copy holds."""

    used: dict[int, NDArray[np.uint32]]
    stale: list[tuple[int, BlockKey]]
    stale_slots: list[Slot]


def restore_blocks(
    index: Index,
    geometry: Geometry,
    catalog: Catalog,
    policies: Sequence[TailFirst],
    segments: Mapping[int, SegmentRecord],
    uses: Uses,
    known_uses: UsesRecords,
) -> Restored:
    """Adopt the blocks that can be served, in ``catalog`` (which has none yet) and by size class in ``policies``.

    With ``uses``, which has none yet either: of ``known_uses`` what is of these blocks.
    """
    columns = index.block_columns()
    table = _table(b"".join(columns.keys), set(map(len, columns.keys)))
    groups = _groups_of(columns.keys, table)
    inside, suitable = _place(geometry, columns, groups, segments)
    fresh, used = _taken_slots(columns, inside, segments)
    kept = fresh & suitable & (columns.epochs == FILE_EPOCH)
    stale = np.flatnonzero(~kept)
    restored = Restored(
        used,
        [(int(columns.epochs[row]), columns.keys[row]) for row in stale],
        [Slot(int(columns.segments[row]), int(columns.indices[row])) for row in stale if fresh[row]],
    )
    if len(stale):
        columns, groups = _only(columns, kept), groups[kept]
        table = None if table is None else table[kept]
    copies = CommittedCopies(
        columns.keys, *_find_parents(columns, table), columns.generations, columns.segments, columns.indices
    )
    catalog.fill(Tier.NVME, copies, FILE_EPOCH)
    uses.fill(columns.generations, known_uses)
    # What was stored or used last leaves last; within a second, a chain's tail (larger generation) leaves first.
    last_s = np.maximum(columns.stored_s, uses.table["last_use_s"])
    order = np.lexsort((~columns.generations, last_s)).astype(np.int32)
    classes = np.array(geometry.size_classes)[groups[order]]
    for size_class, policy in enumerate(policies):
        rows = order[classes == size_class]
        policy.fill(rows, uses.table["uses"][rows])
    return restored


def _groups_of(keys: Sequence[BlockKey], table: NDArray[np.uint8] | None) -> NDArray[np.int64]:
    tails = b"".join([key[-GROUP_BYTES:] for key in keys]) if table is None else table[:, -GROUP_BYTES:].tobytes()
    return np.frombuffer(tails, ">u2").astype(np.int64)


def _table(joined: bytes, lengths: set[int]) -> NDArray[np.uint8] | None:
    """Return joined keys as rows of bytes; None where they are not all of one length, or there are none."""
    if len(lengths) != 1:
        return None
    return np.frombuffer(joined, np.uint8).reshape(-1, *lengths)


def _place(
    geometry: Geometry, columns: BlockColumns, groups: NDArray[np.int64], segments: Mapping[int, SegmentRecord]
) -> tuple[_Flags, _Flags]:
    """Return which blocks have a slot that there is, and which have one that fits their group."""
    numbers = np.array(sorted(segments), np.int64)
    slot_counts = np.array([segments[number].slot_count for number in sorted(segments)], np.int64)
    slot_bytes = np.array([segments[number].slot_bytes for number in sorted(segments)], np.uint64)
    if not len(numbers):
        nothing = np.zeros(len(columns.keys), np.bool_)
        return nothing, nothing
    at = np.minimum(np.searchsorted(numbers, columns.segments), len(numbers) - 1)
    inside = (numbers[at] == columns.segments) & (columns.indices < slot_counts[at])
    needed = np.array([group.slot_bytes for group in geometry.groups], np.uint64)
    known = groups < len(needed)
    return inside, inside & known & (needed[np.minimum(groups, len(needed) - 1)] == slot_bytes[at])


def _taken_slots(
    columns: BlockColumns, inside: _Flags, segments: Mapping[int, SegmentRecord]
) -> tuple[_Flags, dict[int, NDArray[np.uint32]]]:
    """Of the blocks ``inside``, return those that no earlier one shares its slot with, and their slots by segment."""
    rows = np.flatnonzero(inside)
    numbers = sorted(segments)
    starts = np.cumsum([0] + [segments[number].slot_count for number in numbers])
    slots = starts[np.searchsorted(np.array(numbers, np.int64), columns.segments[rows])] + columns.indices[rows]
    taken = np.zeros(int(starts[-1]), np.bool_)
    taken[slots] = True
    fresh = inside
    if np.count_nonzero(taken) < len(rows):
        _, first = np.unique(slots, return_index=True)
        fresh = np.zeros(len(inside), np.bool_)
        fresh[rows[first]] = True
    used = {
        number: np.flatnonzero(taken[start:end]).astype(np.uint32)
        for number, start, end in zip(numbers, starts[:-1], starts[1:], strict=True)
    }
    return fresh, used


def _only(columns: BlockColumns, kept: _Flags) -> BlockColumns:
    return BlockColumns(
        columns.epochs[kept],
        list(compress(columns.keys, kept)),
        columns.segments[kept],
        columns.indices[kept],
        columns.generations[kept],
        b"".join(compress(columns.each_parent(), kept)),
        columns.parent_bytes[kept],
        columns.stored_s[kept],
    )


def _find_parents(
    columns: BlockColumns, table: NDArray[np.uint8] | None
) -> tuple[NDArray[np.int32], dict[int, BlockKey]]:
    """Return each block's parent as its position in ``columns``, or NONE; and by position those not among them."""
    keys = columns.keys
    rows = np.full(len(keys), NONE, np.int32)
    children = np.flatnonzero(columns.parent_bytes)
    wanted = _table(columns.parents, set(np.unique(columns.parent_bytes[children]).tolist()))
    if table is not None and wanted is not None and table.shape[1] == wanted.shape[1] >= _WORD_BYTES:
        found = _find_alike(table, wanted)
        rows[children[found != NONE]] = found[found != NONE]
        children = children[found == NONE]
    ends = np.cumsum(columns.parent_bytes)
    others: dict[int, BlockKey] = {}
    for child in children.tolist():  # where keys are not all of one length; else few
        end = int(ends[child])
        parent = BlockKey(columns.parents[end - int(columns.parent_bytes[child]) : end])
        row = bisect_left(keys, parent)
        if row < len(keys) and keys[row] == parent:
            rows[child] = row
        else:
            others[child] = parent
    return _without_circles(rows), others


def _without_circles(parent_rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the rows of parents; NONE where the way from a block to its head has no end: a damaged record says so."""
    ahead = parent_rows.copy()
    for _ in range(len(parent_rows).bit_length() + 1):  # twice as far each time
        on_way = np.flatnonzero(ahead != NONE)
        if not len(on_way):
            return parent_rows
        ahead[on_way] = ahead[ahead[on_way]]
    parent_rows[ahead != NONE] = NONE
    return parent_rows


def _find_alike(table: NDArray[np.uint8], needles: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return for each of ``needles`` its row in ``table``, whose rows ascend and are as long.

    NONE where it is not there, and where another row with the same first word comes before it.
    """
    length = table.shape[1]
    first, sought = _word(table, 0, ">u8").astype(np.uint64), _word(needles, 0, ">u8").astype(np.uint64)
    order = np.argsort(sought)
    at = np.empty(len(sought), np.int64)
    at[order] = np.minimum(np.searchsorted(first, sought[order]), len(first) - 1)
    same = first[at] == sought
    for start in range(_WORD_BYTES, length - _WORD_BYTES + 1, _WORD_BYTES):
        same &= _word(table, start, "u8")[at] == _word(needles, start, "u8")
    for start in range(length - length % _WORD_BYTES, length):
        same &= table[:, start][at] == needles[:, start]
    return np.where(same, at, NONE)


def _word(rows: NDArray[np.uint8], start: int, dtype: str) -> NDArray[np.uint64]:
    words: NDArray[np.uint64] = np.ascontiguousarray(rows[:, start : start + _WORD_BYTES]).view(dtype).ravel()
    return words
