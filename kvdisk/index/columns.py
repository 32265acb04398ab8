# SPDX-License-Identifier: Apache-2.0
"""Many block records at once: their order, their times, and many parts as one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvdisk.index.base import BlockColumns
from kvdisk.index.records import decode_blocks

_RUN_GENERATIONS = 4096


def ascending(epochs: NDArray[np.uint64], keys: Sequence[bytes]) -> NDArray[np.int64]:
    """Return the order in which rows ascend by epoch, then by the bytes of the key."""
    names = list(zip(epochs.tolist(), keys, strict=True))
    return np.array(sorted(range(len(keys)), key=names.__getitem__), np.int64)


def stored_times(
    epochs: NDArray[np.uint64],
    keys: Sequence[bytes],
    parents: Sequence[bytes],
    generations: NDArray[np.uint64],
    now_s: int,
) -> NDArray[np.uint32]:
    """Return times for blocks of which only the headers are known. They keep the blocks' order.

    A header has no time, but a generation: it begins with an engine's start, in nanoseconds, and
    counts up. Blocks of one chain that were stored one after another get one time, so that the
    chain's tail leaves first; the next run gets a later one. None lies in the future.
    """
    named_epochs = epochs.tolist()
    rows = dict(zip(zip(named_epochs, keys, strict=True), range(len(keys)), strict=True))
    parent_rows = [rows.get(name, -1) for name in zip(named_epochs, parents, strict=True)]
    counted: list[int] = generations.tolist()
    times = [0] * len(counted)
    last_s = 0
    for row in np.argsort(generations, kind="stable").tolist():
        parent, generation = parent_rows[row], counted[row]
        stored_s = times[parent] if parent >= 0 else 0
        if not stored_s or generation - counted[parent] > _RUN_GENERATIONS:
            stored_s = last_s = min(now_s, max(last_s + 1, generation // 10**9))
        times[row] = stored_s
    return np.array(times, np.uint32)


def join_columns(parts: Sequence[BlockColumns]) -> BlockColumns:
    """Return many parts as one, in their order."""
    if not parts:
        return decode_blocks([], [])
    epochs, keys, segments, indices, generations, parents, parent_bytes, stored_s = zip(*parts, strict=True)
    return BlockColumns(
        np.concatenate(epochs),
        list(chain.from_iterable(keys)),
        np.concatenate(segments),
        np.concatenate(indices),
        np.concatenate(generations),
        b"".join(parents),
        np.concatenate(parent_bytes),
        np.concatenate(stored_s),
    )
