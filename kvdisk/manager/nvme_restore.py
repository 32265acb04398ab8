# SPDX-License-Identifier: Apache-2.0
"""What an index knows, taken over into the catalog and the eviction order at start. Scheduler
thread only.

A store of a million blocks is open in a second or two because nothing here looks at one block at a
time: columns come from the index, and columns go to the catalog.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise, repeat

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

_Flags = NDArray[np.bool_]


@dataclass
class Restored:
    """``used``: slots that are not free, by segment. ``stale``: names of records that go;
    ``stale_slots``: their slots, those in ``used`` that no copy holds."""

    used: dict[int, NDArray[np.uint32]]
    stale: list[tuple[int, BlockKey]]
    stale_slots: list[Slot]


def restore_blocks(
    index: Index,
    geometry: Geometry,
    catalog: Catalog,
    orders: Sequence[TailFirst],
    segments: Mapping[int, SegmentRecord],
    uses: Uses,
    known_uses: UsesRecords,
) -> Restored:
    """Adopt the blocks that can be served, in ``catalog`` (which has none yet) and by size class in
    ``orders``.

    With ``uses``, which has none yet either: of ``known_uses`` what is of these blocks.
    """
    columns = index.block_columns()
    groups = np.frombuffer(b"".join([key[-GROUP_BYTES:] for key in columns.keys]), ">u2").astype(np.int64)
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
    copies = CommittedCopies(
        columns.keys, *_find_parents(columns), columns.generations, columns.segments, columns.indices
    )
    catalog.fill(Tier.NVME, copies, FILE_EPOCH)
    uses.fill(columns.generations, known_uses)
    # What was stored or used last leaves last; within a second, a chain's tail (larger generation)
    # leaves first.
    last_s = np.maximum(columns.stored_s, uses.table["last_use_s"])
    rows_by_use = np.lexsort((~columns.generations, last_s)).astype(np.int32)
    classes = np.array(geometry.size_classes)[groups[rows_by_use]]
    for size_class, order in enumerate(orders):
        rows = rows_by_use[classes == size_class]
        order.fill(rows, uses.table["uses"][rows])
    return restored


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
    """Of the blocks ``inside``, return those that no earlier one shares its slot with, and their
    slots by segment."""
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


def _find_parents(columns: BlockColumns) -> tuple[NDArray[np.int32], dict[int, BlockKey]]:
    """Return each block's parent as its position in ``columns``, or NONE; and by position those not
    among them."""
    count = len(columns.keys)
    row_of = dict(zip(columns.keys, range(count), strict=True))
    ends = accumulate(columns.parent_bytes.tolist(), initial=0)
    each = (BlockKey(columns.parents[start:end]) for start, end in pairwise(ends))
    rows = np.fromiter(map(row_of.get, each, repeat(NONE)), np.int32, count)
    others = {}
    lengths, ends_of = columns.parent_bytes, np.cumsum(columns.parent_bytes)
    for row in np.flatnonzero((rows == NONE) & (lengths > 0)).tolist():
        others[row] = BlockKey(columns.parents[ends_of[row] - lengths[row] : ends_of[row]])
    return _without_circles(rows), others


def _without_circles(parent_rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the rows of parents; NONE where the way from a block to its head has no end: a damaged
    record says so."""
    ahead = parent_rows.copy()
    for _ in range(len(parent_rows).bit_length() + 1):  # twice as far each time
        on_way = np.flatnonzero(ahead != NONE)
        if not len(on_way):
            return parent_rows
        ahead[on_way] = ahead[ahead[on_way]]
    parent_rows[ahead != NONE] = NONE
    return parent_rows
