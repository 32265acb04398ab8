# SPDX-License-Identifier: Apache-2.0
"""What an index knows, taken over into the catalog and the eviction order at start. Scheduler
thread only.

A store of a million blocks is open in a second or two because nothing here looks at one block at a
time: columns come from the index, and columns go to the catalog.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import GROUP_BYTES, BlockKey, Slot, Tier, groups_of
from kvdisk.device.uses import Uses, UsesRecords
from kvdisk.geometry import FILE_EPOCH, Geometry
from kvdisk.index.base import BlockColumns, SegmentRecord
from kvdisk.index.record_index import Index
from kvdisk.manager.catalog import NONE, Catalog
from kvdisk.manager.eviction import TailFirst
from kvdisk.manager.parents import KeyBytes, bytes_of

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
    keys = bytes_of(columns.keys)
    groups = _groups_of(columns.keys, keys)
    fresh, fits, used = _place(geometry, columns, groups, segments)
    kept = fresh & fits & (columns.epochs == FILE_EPOCH)
    stale = np.flatnonzero(~kept)
    restored = Restored(
        used,
        [(int(columns.epochs[row]), columns.keys[row]) for row in stale],
        [Slot(int(columns.segments[row]), int(columns.indices[row])) for row in stale if fresh[row]],
    )
    if len(stale):
        columns, groups, keys = columns.only(kept), groups[kept], None if keys is None else keys[kept]
    catalog.fill(Tier.NVME, columns, keys)
    uses.fill(columns.generations, known_uses)
    # What was stored or used last leaves last; within a second, a chain's tail (larger generation)
    # leaves first.
    last_s = np.maximum(columns.stored_s, uses.table["last_use_s"])
    rows_by_use = np.lexsort((~columns.generations, last_s)).astype(np.int32)
    counts = _never_rising(uses.table["uses"], catalog.parent_rows)
    classes = np.array(geometry.size_classes)[groups[rows_by_use]]
    for size_class, order in enumerate(orders):
        rows = rows_by_use[classes == size_class]
        order.fill(rows, counts[rows])
    return restored


def _groups_of(names: Sequence[BlockKey], keys: KeyBytes | None) -> NDArray[np.int64]:
    """Return the group of each block. ``keys``: the ``bytes_of`` these names."""
    if keys is None:
        return np.array(groups_of(names), np.int64)
    return keys[:, -GROUP_BYTES:].copy().view(">u2")[:, 0].astype(np.int64)


def _place(
    geometry: Geometry, columns: BlockColumns, groups: NDArray[np.int64], segments: Mapping[int, SegmentRecord]
) -> tuple[_Flags, _Flags, dict[int, NDArray[np.uint32]]]:
    """Return which blocks have a slot that there is and no earlier one shares, which have one that
    fits their group, and the slots by segment."""
    numbers = np.array(sorted(segments), np.int64)
    if not len(numbers):
        nothing = np.zeros(len(columns.keys), np.bool_)
        return nothing, nothing, {}
    slot_counts = np.array([segments[number].slot_count for number in sorted(segments)], np.int64)
    slot_bytes = np.array([segments[number].slot_bytes for number in sorted(segments)], np.uint64)
    at = np.minimum(np.searchsorted(numbers, columns.segments), len(numbers) - 1)
    fresh = (numbers[at] == columns.segments) & (columns.indices < slot_counts[at])
    needed = np.array([group.slot_bytes for group in geometry.groups], np.uint64)
    fits = (groups < len(needed)) & (needed[np.minimum(groups, len(needed) - 1)] == slot_bytes[at])
    starts = np.cumsum([0, *slot_counts])
    rows = np.flatnonzero(fresh)
    slots = starts[at[rows]] + columns.indices[rows]
    taken = np.zeros(int(starts[-1]), np.bool_)
    taken[slots] = True
    if np.count_nonzero(taken) < len(rows):
        _, first = np.unique(slots, return_index=True)
        fresh = np.zeros(len(fresh), np.bool_)
        fresh[rows[first]] = True
    each = zip(numbers.tolist(), np.split(taken, starts[1:-1]), strict=True)
    return fresh, fits, {number: np.flatnonzero(found).astype(np.uint32) for number, found in each}


def _never_rising(uses: NDArray[np.uint32], parent_rows: Sequence[int]) -> NDArray[np.uint32]:
    """Return of each row the most uses of its own and of all that follow it: a head that was
    evicted and stored again has fewer of its own."""
    found, ahead = uses.copy(), np.array(parent_rows[: len(uses)], np.int32)
    ahead[ahead >= len(uses)] = NONE
    on_way = np.flatnonzero(ahead != NONE)
    if (found[ahead[on_way]] >= found[on_way]).all():  # as it mostly is
        return found
    while len(on_way := np.flatnonzero(ahead != NONE)):  # twice as far each time
        np.maximum.at(found, ahead[on_way], found[on_way])
        ahead[on_way] = ahead[ahead[on_way]]
    return found
