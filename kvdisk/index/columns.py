# SPDX-License-Identifier: Apache-2.0
"""Many block records decoded at once. Apart from ``records`` because it needs numpy, which the tools do without."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from kvdisk.blocks import GROUP_BYTES, MAX_KEY_BYTES, BlockKey
from kvdisk.index.base import BlockColumns
from kvdisk.index.records import BLOCK_VALUE, EPOCH_BYTES, EPOCH_LIMIT, RECORD_VERSION, decode_block

_FIELDS = ("version", "segment", "index", "generation", "stored_s", "parent_bytes")
_FIXED = np.dtype(list(zip(_FIELDS, ("u1", ">u4", ">u4", ">u8", ">u4", "u1"), strict=True)))
assert _FIXED.itemsize == BLOCK_VALUE.size


def decode_blocks(keys: Sequence[bytes], values: Sequence[bytes]) -> BlockColumns:
    """Return the records of many key and value bytes, in their order: what ``decode_block`` would, much faster.

    The order of ``BlockColumns`` is the caller's to see to. Raises CorruptRecord for the first bytes that no record
    encodes to, as ``decode_block`` does.
    """
    key_bytes = np.fromiter(map(len, keys), np.int64, len(keys))
    value_bytes = np.fromiter(map(len, values), np.int64, len(values))
    sound = (
        (key_bytes >= EPOCH_BYTES + GROUP_BYTES)
        & (key_bytes <= EPOCH_BYTES + MAX_KEY_BYTES)
        & (value_bytes >= BLOCK_VALUE.size)
    )
    if sound.all():
        fixed = np.frombuffer(b"".join([value[: BLOCK_VALUE.size] for value in values]), _FIXED)
        epochs = np.frombuffer(b"".join([key[:EPOCH_BYTES] for key in keys]), ">u8").astype(np.uint64)
        parent_bytes = fixed["parent_bytes"].astype(np.int64)
        sound = (
            (fixed["version"] == RECORD_VERSION)
            & (value_bytes == BLOCK_VALUE.size + parent_bytes)
            & ((parent_bytes == 0) | ((parent_bytes >= GROUP_BYTES) & (parent_bytes <= MAX_KEY_BYTES)))
            & (epochs < EPOCH_LIMIT)
        )
    if not sound.all():
        bad = int(np.argmin(sound))
        decode_block(keys[bad], values[bad])
        raise AssertionError("two readings of one record")
    return BlockColumns(
        epochs,
        [BlockKey(key[EPOCH_BYTES:]) for key in keys],
        fixed["segment"].astype(np.uint32),
        fixed["index"].astype(np.uint32),
        fixed["generation"].astype(np.uint64),
        b"".join([value[BLOCK_VALUE.size :] for value in values]),
        parent_bytes,
        fixed["stored_s"].astype(np.uint32),
    )


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
