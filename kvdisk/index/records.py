# SPDX-License-Identifier: Apache-2.0
"""The bytes of index records: no other code knows them. Many blocks are decoded at once.

Blocks table. Key: epoch (8 bytes, big-endian) and block key. Value, big-endian: version u8, segment
u32, slot index u32, generation u64, stored_s u32, length of the parent key u8 (0: none), parent
key. That is version 1. Version 2 is for a block with a tenant, whose digest u64 (not 0) follows.

Segments table. Key: segment u32, big-endian as the epoch is, so that tables iterate in ascending
order. Value: version u8, slot_bytes u64, slot_count u32, drive u16.

A record has exactly one encoding. A change of layout takes a new version byte. Encoding a field out
of its range is a programmer's error.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import GROUP_BYTES, MAX_KEY_BYTES, BlockKey
from kvdisk.errors import CorruptRecord
from kvdisk.geometry import EPOCH_LIMIT
from kvdisk.index.base import BlockColumns, BlockRecord, SegmentRecord
from kvdisk.messages import FOREIGN_SEGMENTS

RECORD_VERSION = 1
TENANT_VERSION = 2
"""The version byte in the record of a block that has a tenant."""

_TENANT = struct.Struct(">Q")
_EPOCH_BYTES = 8
_BLOCK = struct.Struct(">BIIQIB")
_FIELDS = ("version", "segment", "index", "generation", "stored_s", "parent_bytes")
_BLOCKS = np.dtype(list(zip(_FIELDS, ("u1", ">u4", ">u4", ">u8", ">u4", "u1"), strict=True)))
"""The dtype of an array of ``_BLOCK`` values."""
_SEGMENT_KEY = struct.Struct(">I")
_SEGMENT = struct.Struct(">BQIH")


class Table(IntEnum):
    """Whether a record is of a block or of a segment."""

    BLOCKS = 0
    SEGMENTS = 1


class Operation(NamedTuple):
    """One record to put, or to delete where ``value`` is None."""

    table: Table
    key: bytes
    value: bytes | None

    @property
    def droppable(self) -> bool:
        """Whether a failed commit may drop it: only puts of blocks may be dropped."""
        return self.value is not None and self.table is Table.BLOCKS


def encode_block_key(epoch: int, key: BlockKey) -> bytes:
    """Return the key bytes of a block's record."""
    assert 0 <= epoch < EPOCH_LIMIT, epoch
    assert GROUP_BYTES <= len(key) <= MAX_KEY_BYTES, len(key)
    return epoch.to_bytes(_EPOCH_BYTES, "big") + key


def encode_block(record: BlockRecord) -> tuple[bytes, bytes]:
    """Return the key and value bytes of a block's record."""
    parent = record.parent or b""
    assert record.parent is None or GROUP_BYTES <= len(parent) <= MAX_KEY_BYTES, len(parent)
    segment, index = record.slot
    version, tenant = (TENANT_VERSION, _TENANT.pack(record.tenant)) if record.tenant else (RECORD_VERSION, b"")
    fixed = _BLOCK.pack(version, segment, index, record.generation, record.stored_s, len(parent))
    return encode_block_key(record.epoch, record.key), fixed + parent + tenant


def decode_blocks(keys: Sequence[bytes], values: Sequence[bytes]) -> BlockColumns:
    """Return the records of these key and value bytes, in their order.

    The caller sees to the order that ``BlockColumns`` requires. Raises CorruptRecord for the first
    bytes that no record encodes to.
    """
    key_bytes, value_bytes = _lengths(keys), _lengths(values)
    # A value that is too short reads as version 0.
    joined, ends = np.frombuffer(b"".join((*values, bytes(_BLOCK.size))), np.uint8), np.cumsum(value_bytes)
    places = (ends - value_bytes)[:, np.newaxis] + np.arange(_BLOCK.size)
    fixed = np.where(value_bytes[:, np.newaxis] < _BLOCK.size, np.uint8(0), joined[places]).view(_BLOCKS)[:, 0]
    heads = b"".join([key[:_EPOCH_BYTES].ljust(_EPOCH_BYTES, b"\0") for key in keys])
    epochs = np.frombuffer(heads, ">u8").astype(np.uint64)
    parent_bytes = fixed["parent_bytes"].astype(np.int64)
    has_tenant = fixed["version"] == TENANT_VERSION
    tenants = np.zeros(len(keys), np.uint64)
    rows = np.flatnonzero(has_tenant)
    found = b"".join([values[row][-_TENANT.size :].rjust(_TENANT.size, b"\0") for row in rows.tolist()])
    tenants[rows] = np.frombuffer(found, ">u8")
    sound = (
        ((fixed["version"] == RECORD_VERSION) | (tenants != 0))
        & (epochs < EPOCH_LIMIT)
        & (key_bytes >= _EPOCH_BYTES + GROUP_BYTES)
        & (key_bytes <= _EPOCH_BYTES + MAX_KEY_BYTES)
        & (value_bytes == _BLOCK.size + parent_bytes + _TENANT.size * has_tenant)
        & ((parent_bytes == 0) | ((parent_bytes >= GROUP_BYTES) & (parent_bytes <= MAX_KEY_BYTES)))
    )
    if not sound.all():
        bad = int(np.argmin(sound))
        raise CorruptRecord(
            f"block record: version {fixed['version'][bad]} (this kvdisk knows up to {TENANT_VERSION}), "
            f"epoch {epochs[bad]}, key of {key_bytes[bad]} bytes, value of {value_bytes[bad]} with a parent key of "
            f"{parent_bytes[bad]}"
        )
    is_parent = np.ones(len(joined), np.bool_)
    is_parent[places] = is_parent[len(joined) - _BLOCK.size :] = False
    is_parent[ends[rows, np.newaxis] - np.arange(1, _TENANT.size + 1)] = False
    return BlockColumns(
        epochs,
        cast("list[BlockKey]", [key[_EPOCH_BYTES:] for key in keys]),
        fixed["segment"].astype(np.uint32),
        fixed["index"].astype(np.uint32),
        fixed["generation"].astype(np.uint64),
        joined[is_parent].tobytes(),
        parent_bytes,
        fixed["stored_s"].astype(np.uint32),
        tenants,
    )


def _lengths(texts: Sequence[bytes]) -> NDArray[np.int64]:
    return np.fromiter(map(len, texts), np.int64, len(texts))


def encode_segment_key(segment: int) -> bytes:
    """Return the key bytes of a segment's record."""
    return _SEGMENT_KEY.pack(segment)


def encode_segment(record: SegmentRecord) -> tuple[bytes, bytes]:
    """Return the key and value bytes of a segment's record."""
    value = _SEGMENT.pack(RECORD_VERSION, record.slot_bytes, record.slot_count, record.drive)
    return encode_segment_key(record.segment), value


def decode_segments(keys: Sequence[bytes], values: Sequence[bytes]) -> list[SegmentRecord]:
    """Return the records of these key and value bytes. Raises CorruptRecord."""
    return list(map(decode_segment, keys, values))


def decode_segment(key: bytes, value: bytes) -> SegmentRecord:
    """Return a segment's record. Raises CorruptRecord for bytes that no record encodes to."""
    if len(key) != _SEGMENT_KEY.size or len(value) != _SEGMENT.size:
        raise CorruptRecord(f"segment record: key of {len(key)} and value of {len(value)} bytes")
    version, slot_bytes, slot_count, drive = _SEGMENT.unpack(value)
    if version != RECORD_VERSION:
        raise CorruptRecord(f"segment record: version {version}, this kvdisk knows {RECORD_VERSION}")
    (segment,) = _SEGMENT_KEY.unpack(key)
    if segment >= FOREIGN_SEGMENTS:
        raise CorruptRecord(f"segment record: number {segment}, which no segment has")
    return SegmentRecord(segment, slot_bytes, slot_count, drive)
