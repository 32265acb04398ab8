# SPDX-License-Identifier: Apache-2.0
"""The parents of many blocks at once, as an index has them at a start: by arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey
from kvdisk.index.base import BlockColumns
from kvdisk.manager import bounds

_NO_ROW: Final = -1
_AT_ONCE: Final = 1 << 16
"""Keys that are compared at once: bounds what that takes of memory."""
_BEGIN_BYTES: Final = 8

KeyBytes = NDArray[np.uint8]
"""The bytes of keys, with a row for each."""


def bytes_of(keys: Sequence[BlockKey]) -> KeyBytes | None:
    """Return the bytes of keys, None where not all have the same length."""
    if len(set(map(len, keys))) != 1:
        return None
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)


def parents_among(blocks: BlockColumns, keys: KeyBytes | None, rows: Mapping[BlockKey, int]) -> NDArray[np.int32]:
    """Return the row of each block's parent; -1 where it has none, or the parent is not among the
    blocks. ``keys``: the ``bytes_of`` theirs. ``rows``: of each key.

    Where all keys have the same length, arrays find them by their first bytes, by which they
    ascend, and then compare all bytes: looking up millions one by one takes longer.
    """
    count, followers = len(blocks.keys), np.flatnonzero(blocks.parent_bytes)
    if keys is None or (blocks.parent_bytes[followers] != keys.shape[1]).any():
        return np.fromiter(map(rows.get, blocks.each_parent(), repeat(_NO_ROW)), np.int32, count)
    found = np.full(count, _NO_ROW, np.int32)
    parents = np.frombuffer(blocks.parents, np.uint8).reshape(-1, keys.shape[1])
    begins, wanted = _begins(keys), _begins(parents)
    order = np.argsort(wanted)  # so that one pass goes through both
    places = np.searchsorted(begins, wanted[order])
    odd = [order[:0]]
    """Parents that are not found that way: keys that have more than a beginning in common, or that
    are not there."""
    for start in range(0, len(parents), _AT_ONCE):
        left, at = order[start : start + _AT_ONCE], places[start : start + _AT_ONCE]
        for _ in range(bounds.ALIKE):
            at = np.minimum(at, count - 1)
            are_right = _texts(keys.take(at, 0)) == _texts(parents.take(left, 0))
            found[followers[left[are_right]]] = at[are_right]
            left, at = left[~are_right], at[~are_right] + 1
            are_alike = begins.take(at, mode="clip") == wanted[left]
            odd.append(left[~are_alike])
            left, at = left[are_alike], at[are_alike]
            if not len(left):
                break
        odd.append(left)
    for each in np.concatenate(odd).tolist():
        found[followers[each]] = rows.get(BlockKey(parents[each].tobytes()), _NO_ROW)
    return found


def _begins(keys: KeyBytes) -> NDArray[np.uint64]:
    """Return the first bytes of each key as a number: those of keys that ascend ascend."""
    words = np.zeros((len(keys), _BEGIN_BYTES), np.uint8)
    words[:, : keys.shape[1]] = keys[:, :_BEGIN_BYTES]
    return words.view(">u8")[:, 0].astype(np.uint64)


def _texts(keys: KeyBytes) -> NDArray[np.void]:
    """Return each row of bytes as one value."""
    return keys.view(f"V{keys.shape[1]}")[:, 0]


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
