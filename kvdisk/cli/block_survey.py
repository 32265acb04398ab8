# SPDX-License-Identifier: Apache-2.0
"""Many blocks looked at at once, in columns: tallies, layouts, ages, reuse. For the process ``index_child``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import GROUP_BYTES
from kvdisk.cli.block_facts import AGE_BOUNDS_S, REUSE_BOUNDS, SHORT_RUN_BYTES, BlockTally, HomeBlocks, SegmentLayout
from kvdisk.device.uses import UsesUnit
from kvdisk.index.base import BlockColumns, SegmentRecord

NONE = -1


class HomeColumns(NamedTuple):
    """Blocks of one home, a row each. ``slot_bytes``: on all ranks; 0 in a segment that the index does not have.

    ``names`` and ``parent_names``: keys, with their epoch before them where the home has several, so that they are
    unique; empty: no parent. ``parents``: row of the parent, or NONE. ``uses`` and ``last_use_s``: None where there is
    no file that tells; ``is_known``: of which blocks it does.
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


def join_home(
    columns: BlockColumns, segments: Sequence[SegmentRecord], ranks: int, units: Sequence[UsesUnit] | None
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
    parents = np.fromiter(map(row_of.get, parent_names, repeat(NONE)), np.int64, count)
    uses, last_use_s, is_known = _uses_of(columns, units)
    return HomeColumns(
        columns,
        np.frombuffer(tails, ">u2").astype(np.int64),
        _slot_bytes(columns, segments) * ranks,
        names,
        parent_names,
        parents,
        uses,
        last_use_s,
        is_known,
    )


def _slot_bytes(columns: BlockColumns, segments: Sequence[SegmentRecord]) -> NDArray[np.int64]:
    known = sorted(segments)
    if not known:
        return np.zeros(len(columns.keys), np.int64)
    numbers = np.array([record.segment for record in known], np.int64)
    sizes = np.array([min(record.slot_bytes, 1 << 48) for record in known], np.int64)
    at = np.minimum(np.searchsorted(numbers, columns.segments), len(numbers) - 1)
    return np.where(numbers[at] == columns.segments, sizes[at], 0)


def _places(segments: NDArray[np.uint32], indices: NDArray[np.uint32]) -> NDArray[np.uint64]:
    return segments.astype(np.uint64) << np.uint64(32) | indices.astype(np.uint64)


def _uses_of(
    columns: BlockColumns, units: Sequence[UsesUnit] | None
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None, NDArray[np.bool_]]:
    """Return uses, last use, and whether they are known: only where the file speaks of that very generation."""
    count = len(columns.keys)
    is_known = np.zeros(count, np.bool_)
    if units is None:
        return None, None, is_known
    uses, last_use_s = np.zeros(count, np.int64), np.zeros(count, np.int64)
    if not units or not count:
        return uses, last_use_s, is_known
    lengths = [len(unit.generations) for unit in units]
    starts = np.array([unit.segment << 32 | unit.first for unit in units], np.uint64)
    within = np.concatenate([np.arange(length, dtype=np.uint64) for length in lengths])
    said = np.repeat(starts, lengths) + within
    order = np.argsort(said, kind="stable")
    sought = _places(columns.segments, columns.indices)
    at = order[np.minimum(np.searchsorted(said, sought, sorter=order), len(said) - 1)]
    generations = np.concatenate([unit.generations for unit in units])[at]
    is_known = (said[at] == sought) & (generations == columns.generations)
    uses[is_known] = np.concatenate([unit.uses for unit in units])[at][is_known]
    last_use_s[is_known] = np.concatenate([unit.last_use_s for unit in units])[at][is_known]
    return uses, last_use_s, is_known


def tally(home: HomeColumns) -> list[BlockTally]:
    """Count blocks by epoch, segment and group, in that order."""
    columns = home.columns
    if not len(columns.keys):
        return []
    order = np.lexsort((home.groups, columns.segments, columns.epochs))
    epochs, segments, groups = columns.epochs[order], columns.segments[order], home.groups[order]
    changes = (np.diff(epochs) != 0) | (np.diff(segments) != 0) | (np.diff(groups) != 0)
    starts = np.concatenate(([0], np.flatnonzero(changes) + 1))
    counts = np.diff(starts, append=len(order))
    stored = columns.stored_s[order]
    return list(
        map(
            BlockTally,
            epochs[starts].tolist(),
            segments[starts].tolist(),
            groups[starts].tolist(),
            counts.tolist(),
            np.maximum.reduceat(columns.indices[order], starts).tolist(),
            np.minimum.reduceat(stored, starts).tolist(),
            np.maximum.reduceat(stored, starts).tolist(),
        )
    )


def survey_blocks(home: HomeColumns, segments: Sequence[SegmentRecord], now_s: int) -> HomeBlocks:
    """Return layouts, ages and reuse of a home's blocks."""
    ages = now_s - home.columns.stored_s.astype(np.int64)
    used = reuse = None
    if home.uses is not None and home.last_use_s is not None:
        never = home.is_known & (home.last_use_s == 0)
        told = home.is_known & ~never
        unknown = int(np.count_nonzero(~home.is_known))
        used = (*_age_classes(now_s - home.last_use_s[told]), int(np.count_nonzero(never)), unknown)
        classes = np.searchsorted(REUSE_BOUNDS, home.uses[home.is_known])
        reuse = (*np.bincount(classes, minlength=len(REUSE_BOUNDS) + 1).tolist(), unknown)
    return HomeBlocks(tuple(_layouts(home, segments)), tuple(_age_classes(ages)), used, reuse)


def _age_classes(ages: NDArray[np.int64]) -> list[int]:
    classes = np.searchsorted(AGE_BOUNDS_S, ages, side="right")
    counted: list[int] = np.bincount(classes, minlength=len(AGE_BOUNDS_S) + 1).tolist()
    return counted


def _layouts(home: HomeColumns, segments: Sequence[SegmentRecord]) -> list[SegmentLayout]:
    columns = home.columns
    places = _places(columns.segments, columns.indices)
    follows = home.parents != NONE
    follows[follows] = places[follows] == places[home.parents[follows]] + np.uint64(1)
    order = np.argsort(places)
    ordered, starts_read = places[order], ~follows[order]
    found = []
    for record in sorted(segments):
        first, last = record.segment << 32, (record.segment << 32) + record.slot_count
        start, end = np.searchsorted(ordered, np.array([first, last], np.uint64)).tolist()
        slots = np.unique(ordered[start:end]).astype(np.int64) - first
        edges = np.concatenate(([-1], slots, [record.slot_count]))
        free = np.diff(edges) - 1
        free = free[free > 0]
        short = free[free * record.slot_bytes < SHORT_RUN_BYTES]
        found.append(
            SegmentLayout(
                record.segment,
                len(slots),
                int(free.sum()),
                len(free),
                int(free.max(initial=0)),
                int(short.sum()),
                end - start,
                int(np.count_nonzero(starts_read[start:end])),
            )
        )
    return found
