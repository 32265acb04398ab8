# SPDX-License-Identifier: Apache-2.0
"""Blocks that a rebuild found, as index records in columns. Apart from ``recovery`` because it needs numpy."""

from __future__ import annotations

import numpy as np

from kvdisk.blocks import BlockKey
from kvdisk.device.header_columns import FoundBlocks
from kvdisk.index.base import BlockColumns
from kvdisk.index.columns import ascending

_RUN_GENERATIONS = 4096


def to_columns(found: FoundBlocks, now_s: int) -> BlockColumns:
    """Return the blocks as records, with times that keep their order.

    A header has no time, but a generation: it begins with an engine's start, in nanoseconds, and counts up. Blocks of
    one chain that were stored one after another get one time, so that the chain's tail leaves first; the next run
    gets a later one. None lies in the future.
    """
    parents = _parent_rows(found)
    generations: list[int] = found.generations.tolist()
    times = [0] * len(generations)
    last_s = 0
    for row in np.argsort(found.generations, kind="stable").tolist():
        parent, generation = parents[row], generations[row]
        stored_s = times[parent] if parent >= 0 else 0
        if not stored_s or generation - generations[parent] > _RUN_GENERATIONS:
            stored_s = last_s = min(now_s, max(last_s + 1, generation // 10**9))
        times[row] = stored_s
    order = ascending(found.epochs, found.keys)
    rows = order.tolist()
    ordered_parents = [found.parents[row] for row in rows]
    return BlockColumns(
        found.epochs[order],
        [BlockKey(found.keys[row]) for row in rows],
        found.segments[order],
        found.indices[order],
        found.generations[order],
        b"".join(ordered_parents),
        np.fromiter(map(len, ordered_parents), np.int64, len(rows)),
        np.array(times, np.uint32)[order],
    )


def _parent_rows(found: FoundBlocks) -> list[int]:
    """Return for each block the row of its parent in the same epoch, or -1."""
    if len(found.epochs) and (found.epochs == found.epochs[0]).all():
        rows = dict(zip(found.keys, range(len(found.keys)), strict=True))
        return [rows.get(parent, -1) for parent in found.parents]
    epochs = found.epochs.tolist()
    named = dict(zip(zip(epochs, found.keys, strict=True), range(len(found.keys)), strict=True))
    return [named.get(name, -1) for name in zip(epochs, found.parents, strict=True)]
