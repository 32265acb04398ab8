# SPDX-License-Identifier: Apache-2.0
"""The bytes of index records: no other code knows them, but for where a block's value names its
segment (``packed``). Many blocks are decoded at once.

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
from itertools import starmap
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import GROUP_BYTES, MAX_KEY_BYTES, BlockKey
from kvdisk.errors import CorruptRecord
from kvdisk.geometry import EPOCH_LIMIT
from kvdisk.index.base import BlockColumns, BlockRecord, SegmentRecord
from kvdisk.index.packed import Packed
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


def decode_blocks(packed: Packed) -> BlockColumns:
    """Return the blocks of these records, in their order.

    The caller sees to the order that ``BlockColumns`` requires. Raises CorruptRecord for the first
    bytes that no record encodes to.
    """
    key_bytes, value_bytes = (np.array(each, np.int64) for each in (packed.key_bytes, packed.value_bytes))
    key_starts, ends = np.cumsum(key_bytes) - key_bytes, np.cumsum(value_bytes)
    starts, values = ends - value_bytes, packed.values + bytes(_BLOCK.size)
    fixed = _pieces(values, starts, _BLOCK.size).view(_BLOCKS)
    fixed[value_bytes < _BLOCK.size] = 0  # too short: version 0, which there is not
    epochs = _pieces(packed.keys + bytes(_EPOCH_BYTES), key_starts, _EPOCH_BYTES).view(">u8").astype(np.uint64)
    parent_bytes = fixed["parent_bytes"].astype(np.int64)
    has_tenant = fixed["version"] == TENANT_VERSION
    tenants = np.zeros(len(key_bytes), np.uint64)
    tenants[has_tenant] = _pieces(values, ends[has_tenant] - _TENANT.size, _TENANT.size).view(">u8")
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
    followers = np.flatnonzero(parent_bytes)
    return BlockColumns(
        epochs,
        cast("list[BlockKey]", _texts(packed.keys, key_starts + _EPOCH_BYTES, key_bytes - _EPOCH_BYTES)),
        fixed["segment"].astype(np.uint32),
        fixed["index"].astype(np.uint32),
        fixed["generation"].astype(np.uint64),
        b"".join(_texts(values, starts[followers] + _BLOCK.size, parent_bytes[followers])),
        parent_bytes,
        fixed["stored_s"].astype(np.uint32),
        tenants,
    )


def _pieces(text: bytes, starts: NDArray[np.int64], size: int) -> NDArray[np.void]:
    """Return the ``size`` bytes of a text that begin at each of these places."""
    found: NDArray[np.void] = np.ndarray((max(0, len(text) - size + 1),), f"V{size}", text, strides=(1,))[starts]
    return found


def _texts(text: bytes, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[bytes]:
    """Return parts of a text, by where they start and how long they are: quicker where all are as
    long."""
    if len(lengths) and (lengths == lengths[0]).all():
        found: list[bytes] = _pieces(text, starts, int(lengths[0])).tolist()
        return found
    return [text[start:end] for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]


def encode_segment_key(segment: int) -> bytes:
    """Return the key bytes of a segment's record."""
    return _SEGMENT_KEY.pack(segment)


def encode_segment(record: SegmentRecord) -> tuple[bytes, bytes]:
    """Return the key and value bytes of a segment's record."""
    value = _SEGMENT.pack(RECORD_VERSION, record.slot_bytes, record.slot_count, record.drive)
    return encode_segment_key(record.segment), value


def decode_segments(packed: Packed) -> list[SegmentRecord]:
    """Return the segments of these records. Raises CorruptRecord."""
    return list(starmap(decode_segment, packed.items()))


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
