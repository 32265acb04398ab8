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
from kvdisk.geometry import FILE_EPOCH, Geometry
from kvdisk.index.base import BlockColumns, Index, SegmentRecord
from kvdisk.manager.catalog import Catalog, CommittedCopies
from kvdisk.manager.chains import NONE
from kvdisk.manager.tail_first import TailFirst

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
) -> Restored:
    """Adopt the blocks that can be served, in ``catalog`` (which has none yet) and by size class in ``policies``."""
    columns = index.block_columns()
    groups = _groups_of(columns.keys)
    inside, suitable = _place(geometry, columns, groups, segments)
    fresh = _first_of_their_slots(columns, inside)
    kept = fresh & suitable & (columns.epochs == FILE_EPOCH)
    stale = np.flatnonzero(~kept)
    restored = Restored(
        {
            segment: columns.indices[fresh & (columns.segments == segment)]
            for segment in np.unique(columns.segments[fresh]).tolist()
        },
        [(int(columns.epochs[row]), columns.keys[row]) for row in stale],
        [Slot(int(columns.segments[row]), int(columns.indices[row])) for row in stale if fresh[row]],
    )
    if len(stale):
        columns, groups = _only(columns, kept), groups[kept]
    parent_rows = _parent_rows(columns.keys, columns.parents)
    parents = _parents(columns, parent_rows)
    copies = CommittedCopies(columns.keys, parents, parent_rows, columns.generations, columns.segments, columns.indices)
    catalog.fill(Tier.NVME, copies, FILE_EPOCH)
    # The last stored leaves last; within a second, a chain's tail (larger generation) leaves first.
    order = np.lexsort((~columns.generations, columns.stored_s)).astype(np.int32)
    classes = np.array(geometry.size_classes)[groups[order]]
    for size_class, policy in enumerate(policies):
        policy.fill(order[classes == size_class])
    return restored


def _groups_of(keys: Sequence[BlockKey]) -> NDArray[np.int64]:
    tails = b"".join([key[-GROUP_BYTES:] for key in keys])
    return np.frombuffer(tails, ">u2").astype(np.int64)


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


def _first_of_their_slots(columns: BlockColumns, inside: _Flags) -> _Flags:
    """Of the blocks ``inside``, return those that no earlier one shares its slot with."""
    rows = np.flatnonzero(inside)
    names = columns.segments[rows].astype(np.uint64) << np.uint64(32) | columns.indices[rows]
    _, first = np.unique(names, return_index=True)
    fresh = np.zeros(len(inside), np.bool_)
    fresh[rows[first]] = True
    return fresh


def _only(columns: BlockColumns, kept: _Flags) -> BlockColumns:
    return BlockColumns(
        columns.epochs[kept],
        list(compress(columns.keys, kept)),
        columns.segments[kept],
        columns.indices[kept],
        columns.generations[kept],
        list(compress(columns.parents, kept)),
        columns.stored_s[kept],
    )


def _parent_rows(keys: Sequence[BlockKey], parents: Sequence[bytes]) -> NDArray[np.int32]:
    """Return for each parent its position in ``keys``, which ascend, or NONE."""
    rows = np.full(len(keys), NONE, np.int32)
    children = np.flatnonzero(np.fromiter(map(len, parents), np.int64, len(parents)))
    lengths = set(map(len, keys)) | set(map(len, filter(None, parents)))
    if len(lengths) == 1 and min(lengths) >= _WORD_BYTES:
        (length,) = lengths
        found = _find_alike(b"".join(keys), b"".join(parents), length)
        rows[children[found != NONE]] = found[found != NONE]
        children = children[found == NONE]
    for child in children.tolist():  # keys that are not all of one length; or few
        row = bisect_left(keys, parents[child])
        if row < len(keys) and keys[row] == parents[child]:
            rows[child] = row
    rows[rows == np.arange(len(keys))] = NONE  # no block is its own parent, whatever a record says
    return rows


def _find_alike(keys: bytes, wanted: bytes, length: int) -> NDArray[np.int64]:
    """Return for each wanted key its position among ascending keys, all of ``length`` bytes and joined.

    NONE where it is not there, and where another key with the same first word comes before it.
    """
    table = np.frombuffer(keys, np.uint8).reshape(-1, length)
    needles = np.frombuffer(wanted, np.uint8).reshape(-1, length)
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


def _parents(columns: BlockColumns, parent_rows: NDArray[np.int32]) -> list[BlockKey | None]:
    """Return each block's parent: the very object of ``keys`` where it is among them."""
    choice = np.empty(len(columns.keys) + 1, np.object_)
    choice[:-1] = columns.keys
    parents: list[BlockKey | None] = choice[parent_rows].tolist()  # the last, for NONE, is None
    for row in np.flatnonzero(parent_rows == NONE).tolist():
        if columns.parents[row]:
            parents[row] = BlockKey(columns.parents[row])
    return parents
