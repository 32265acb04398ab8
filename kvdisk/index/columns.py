# SPDX-License-Identifier: Apache-2.0
"""Many block records decoded, or encoded, at once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import GROUP_BYTES, MAX_KEY_BYTES, BlockKey
from kvdisk.index.base import BlockColumns
from kvdisk.index.records import BLOCK_VALUE, EPOCH_BYTES, EPOCH_LIMIT, RECORD_VERSION, decode_block

_RUN_GENERATIONS = 4096
_FIELDS = ("version", "segment", "index", "generation", "stored_s", "parent_bytes")
_FIXED = np.dtype(list(zip(_FIELDS, ("u1", ">u4", ">u4", ">u8", ">u4", "u1"), strict=True)))
assert _FIXED.itemsize == BLOCK_VALUE.size


def decode_blocks(keys: Sequence[bytes], values: Sequence[bytes]) -> BlockColumns:
    """Decode many records at once, in their order: as ``decode_block`` does, but much faster.

    The order of ``BlockColumns`` is the caller's to see to. Raises CorruptRecord for the first
    bytes that no record encodes to, as ``decode_block`` does.
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
        cast("list[BlockKey]", [key[EPOCH_BYTES:] for key in keys]),
        fixed["segment"].astype(np.uint32),
        fixed["index"].astype(np.uint32),
        fixed["generation"].astype(np.uint64),
        b"".join([value[BLOCK_VALUE.size :] for value in values]),
        parent_bytes,
        fixed["stored_s"].astype(np.uint32),
    )


def encode_blocks(columns: BlockColumns) -> tuple[list[bytes], list[bytes]]:
    """Return the key and value bytes of many records: what ``encode_block`` would, much faster."""
    count = len(columns.keys)
    key_bytes = np.fromiter(map(len, columns.keys), np.int64, count)
    assert ((key_bytes >= GROUP_BYTES) & (key_bytes <= MAX_KEY_BYTES)).all()
    assert (columns.epochs < EPOCH_LIMIT).all()
    parents = columns.each_parent()
    assert all(not parent or GROUP_BYTES <= len(parent) <= MAX_KEY_BYTES for parent in parents)
    fixed = np.empty(count, _FIXED)
    fixed["version"] = RECORD_VERSION
    for name, column in (
        ("segment", columns.segments),
        ("index", columns.indices),
        ("generation", columns.generations),
        ("stored_s", columns.stored_s),
        ("parent_bytes", columns.parent_bytes),
    ):
        fixed[name] = column
    heads = _split(fixed.tobytes(), BLOCK_VALUE.size, count)
    epochs = _split(columns.epochs.astype(">u8").tobytes(), EPOCH_BYTES, count)
    return list(map(operator.add, epochs, columns.keys)), list(map(operator.add, heads, parents))


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


def _split(joined: bytes, length: int, count: int) -> list[bytes]:
    return [joined[start : start + length] for start in range(0, length * count, length)]


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
