# SPDX-License-Identifier: Apache-2.0
"""The parents of many blocks at once, as an index has them at a start: by arrays."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey
from kvdisk.index.base import BlockColumns

_NO_ROW: Final = -1
_AT_ONCE: Final = 1 << 16
"""Keys that are hashed or compared at once: bounds what that takes of memory."""
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


def parents_among(blocks: BlockColumns, rows: Mapping[BlockKey, int]) -> NDArray[np.int32]:
    """Return the row of each block's parent; -1 where it has none, or the parent is not among the
    blocks. ``rows``: of each key.

    Where all keys have the same length, arrays find them by a hash, and then compare all bytes:
    looking up millions one by one takes seconds.
    """
    count, key_bytes = len(blocks.keys), len(blocks.keys[0]) if blocks.keys else 0
    followers = np.flatnonzero(blocks.parent_bytes)
    lengths = np.fromiter(map(len, blocks.keys), np.int64, count)
    if (lengths != key_bytes).any() or (blocks.parent_bytes[followers] != key_bytes).any():
        return np.fromiter(map(rows.get, blocks.each_parent(), repeat(_NO_ROW)), np.int32, count)
    found = np.full(count, _NO_ROW, np.int32)
    if not len(followers):
        return found
    keys = np.frombuffer(b"".join(blocks.keys), np.uint8).reshape(-1, key_bytes)
    parents = np.frombuffer(blocks.parents, np.uint8).reshape(-1, key_bytes)
    hashes, wanted = _hashes_of(keys), _hashes_of(parents)
    order, wanted_order = np.argsort(hashes), np.argsort(wanted)  # so that one pass goes through both
    places = np.searchsorted(hashes[order], wanted[wanted_order])
    for start in range(0, len(parents), _AT_ONCE):
        some = wanted_order[start : start + _AT_ONCE]
        parent_rows = order[np.minimum(places[start : start + _AT_ONCE], count - 1)]
        are_right = (keys[parent_rows] == parents[some]).all(1)
        found[followers[some[are_right]]] = parent_rows[are_right]
        for at in some[~are_right].tolist():  # another key has its hash, or it is not there
            found[followers[at]] = rows.get(BlockKey(parents[at].tobytes()), _NO_ROW)
    return found


def _hashes_of(keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return a hash of each row of bytes."""
    count, key_bytes = keys.shape
    found = np.zeros(count, np.uint64)
    for start in range(0, count, _AT_ONCE):
        some = keys[start : start + _AT_ONCE]
        words = np.zeros((len(some), -(-key_bytes // 8) * 8), np.uint8)
        words[:, :key_bytes] = some
        hashed = np.zeros(len(some), np.uint64)
        for word in words.view(np.uint64).T:
            hashed = (hashed ^ word) * _ODD
            hashed ^= hashed >> np.uint64(32)
        found[start : start + _AT_ONCE] = hashed
    return found


def without_circles(parent_rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the rows of parents, with -1 where the way from a block to its head never ends, as
    damaged records can say."""
    ahead = parent_rows.copy()
    for _ in range(len(parent_rows).bit_length() + 1):  # twice as far each time
        on_way = np.flatnonzero(ahead != _NO_ROW)
        if not len(on_way):
            return parent_rows
        ahead[on_way] = ahead[ahead[on_way]]
    parent_rows[ahead != _NO_ROW] = _NO_ROW
    return parent_rows
