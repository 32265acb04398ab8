# SPDX-License-Identifier: Apache-2.0
"""All blocks of a namespace as columns in a file, from the process ``index_child`` to the one that exports them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdisk.cli.block_survey import HomeColumns
from kvdisk.cli.prefixes import grow_forest
from kvdisk.index.base import SegmentRecord

UNKNOWN = -1


class BlockRows(NamedTuple):
    """Blocks, a row each. ``homes``: position in the question. ``keys`` and ``parents``: joined, with their lengths.

    UNKNOWN where ``positions``, ``tokens``, ``drives``, ``uses`` or ``last_use_s`` are not known; there 0 is never.
    """

    homes: NDArray[np.int64]
    epochs: NDArray[np.uint64]
    groups: NDArray[np.int64]
    segments: NDArray[np.uint32]
    slots: NDArray[np.uint32]
    drives: NDArray[np.int64]
    generations: NDArray[np.uint64]
    positions: NDArray[np.int64]
    tokens: NDArray[np.int64]
    bytes: NDArray[np.int64]
    stored_s: NDArray[np.uint32]
    uses: NDArray[np.int64]
    last_use_s: NDArray[np.int64]
    keys: NDArray[np.uint8]
    key_bytes: NDArray[np.int64]
    parents: NDArray[np.uint8]
    parent_bytes: NDArray[np.int64]


def save_rows(
    homes: Sequence[tuple[int, HomeColumns, Sequence[SegmentRecord]]], block_tokens: Sequence[int | None], path: Path
) -> None:
    """Write the rows of a namespace's homes, in the order of their indexes."""
    forest = grow_forest([home for _, home, _ in homes], block_tokens)
    tokens = np.array([*(size or UNKNOWN for size in block_tokens), UNKNOWN], np.int64)
    parts = []
    for (number, home, segments), nodes in zip(homes, forest.node_of, strict=True):
        columns, count = home.columns, len(home.names)
        uses = home.uses if home.uses is not None else np.zeros(count, np.int64)
        last_use_s = home.last_use_s if home.last_use_s is not None else np.zeros(count, np.int64)
        parts.append(
            BlockRows(
                np.full(count, number, np.int64),
                columns.epochs,
                home.groups,
                columns.segments,
                columns.indices,
                _drives(columns.segments, segments),
                columns.generations,
                np.where(forest.is_whole[nodes], forest.depths[nodes], UNKNOWN),
                tokens[np.minimum(home.groups, len(block_tokens))],
                home.slot_bytes,
                columns.stored_s,
                np.where(home.is_known, uses, UNKNOWN),
                np.where(home.is_known, last_use_s, UNKNOWN),
                np.frombuffer(b"".join(columns.keys), np.uint8),
                np.fromiter(map(len, columns.keys), np.int64, count),
                np.frombuffer(columns.parents, np.uint8),
                columns.parent_bytes,
            )
        )
    joined = BlockRows._make(np.concatenate(column) for column in zip(*parts, strict=True)) if parts else None
    np.savez(path, **({} if joined is None else joined._asdict()))


def load_rows(path: Path) -> BlockRows | None:
    """Return what was written; None where there was no home to write of."""
    with np.load(path, allow_pickle=False) as found:
        return BlockRows._make(found[name] for name in BlockRows._fields) if found.files else None


def each_hex(joined: NDArray[np.uint8], lengths: NDArray[np.int64]) -> list[str]:
    """Return joined bytes as hex digits, a string for each length."""
    text = joined.tobytes().hex()
    ends = [0, *(2 * np.cumsum(lengths)).tolist()]
    return [text[start:end] for start, end in pairwise(ends)]


def _drives(numbers: NDArray[np.uint32], segments: Sequence[SegmentRecord]) -> NDArray[np.int64]:
    known = sorted(segments)
    if not known:
        return np.full(len(numbers), UNKNOWN, np.int64)
    names = np.array([record.segment for record in known], np.int64)
    drives = np.array([record.drive for record in known], np.int64)
    at = np.minimum(np.searchsorted(names, numbers), len(names) - 1)
    return np.where(names[at] == numbers, drives[at], UNKNOWN)
