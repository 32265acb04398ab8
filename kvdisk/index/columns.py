# SPDX-License-Identifier: Apache-2.0
"""Work on columns of block records: order them, give them times, join parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import in_record_s
from kvdisk.index.base import BlockColumns
from kvdisk.index.packed import Packed
from kvdisk.index.records import decode_blocks

_RUN_GENERATIONS = 4096
_SPREAD_S = 3600
"""Seconds before an engine's start in which the times of all that it stored lie."""


def ascending(epochs: NDArray[np.uint64], keys: Sequence[bytes]) -> NDArray[np.int64]:
    """Return the order in which rows ascend by epoch, then by the bytes of the key."""
    names = list(zip(epochs.tolist(), keys, strict=True))
    return np.array(sorted(range(len(keys)), key=names.__getitem__), np.int64)


def stored_times(
    epochs: NDArray[np.uint64],
    keys: Sequence[bytes],
    parents: Sequence[bytes],
    generations: NDArray[np.uint64],
) -> NDArray[np.uint32]:
    """Return a time of storing, in seconds since the Unix epoch, for each block of which only the
    slot header is known. The times keep the blocks' order.

    A header has no time, but a generation: it begins with its engine's start, in nanoseconds, and
    counts up. No block is older than that start, and none gets a later time: with ``max_age_s`` a
    block may end too early, and never too late. Where a clock was ahead they are still to come.
    Blocks of one chain that were stored one after another (a run) get one time, so that the chain's
    tail leaves first. The run before gets an earlier time, by less than a second where there are
    many runs.
    """
    named_epochs = epochs.tolist()
    rows = dict(zip(zip(named_epochs, keys, strict=True), range(len(keys)), strict=True))
    parent_rows = [rows.get(name, -1) for name in zip(named_epochs, parents, strict=True)]
    counted: list[int] = generations.tolist()
    run_of = [-1] * len(counted)
    starts: list[int] = []
    """The second in which the engine of each run started."""
    for row in np.argsort(generations, kind="stable").tolist():
        parent, generation = parent_rows[row], counted[row]
        run = run_of[parent] if parent >= 0 else -1
        if run < 0 or generation - counted[parent] > _RUN_GENERATIONS:
            run = len(starts)
            starts.append(in_record_s(generation // 10**9))
        run_of[row] = run
    runs_of, times, last_s = Counter(starts), [0] * len(starts), math.inf
    for run in reversed(range(len(starts))):
        last_s = min(last_s - min(1.0, _SPREAD_S / runs_of[starts[run]]), starts[run])
        times[run] = max(1, int(last_s))
    return np.array(times, np.uint32)[np.array(run_of, np.int64)]


def join_columns(parts: Sequence[BlockColumns]) -> BlockColumns:
    """Return the rows of all parts as one, in order."""
    if not parts:
        return decode_blocks(Packed.of((), ()))
    epochs, keys, segments, indices, generations, parents, parent_bytes, stored_s, tenants = zip(*parts, strict=True)
    return BlockColumns(
        np.concatenate(epochs),
        list(chain.from_iterable(keys)),
        np.concatenate(segments),
        np.concatenate(indices),
        np.concatenate(generations),
        b"".join(parents),
        np.concatenate(parent_bytes),
        np.concatenate(stored_s),
        np.concatenate(tenants),
    )
