# SPDX-License-Identifier: Apache-2.0
"""The bytes of index records, and with ``columns`` the only code that knows them.

Blocks table, key: epoch (8 bytes, big-endian) and block key. Value, big-endian: version u8, segment
u32, slot index u32, generation u64, stored_s u32, length of the parent key u8 (0: none), parent
key.

Segments table, key: segment u32, so that tables iterate in ascending order. Value: version u8,
slot_bytes u64, slot_count u32, drive u16.

A record has exactly one encoding. A change of layout takes a new version byte.
"""

from __future__ import annotations

import struct

from kvdisk.blocks import GROUP_BYTES, MAX_KEY_BYTES, BlockKey, Slot
from kvdisk.errors import CorruptRecord
from kvdisk.index.base import BlockRecord, SegmentRecord

RECORD_VERSION = 1

EPOCH_BYTES = 8
EPOCH_LIMIT = 2**63
BLOCK_VALUE = struct.Struct(">BIIQIB")
_SEGMENT_KEY = struct.Struct(">I")
_SEGMENT = struct.Struct(">BQIH")


def encode_block_key(epoch: int, key: BlockKey) -> bytes:
    """Return the key bytes of a block's record. An epoch or key that a record cannot hold is a
    programmer's error."""
    assert 0 <= epoch < EPOCH_LIMIT, epoch
    assert GROUP_BYTES <= len(key) <= MAX_KEY_BYTES, len(key)
    return epoch.to_bytes(EPOCH_BYTES, "big") + key


def encode_block(record: BlockRecord) -> tuple[bytes, bytes]:
    """Return the key and value bytes of a block's record. A field out of its range is a
    programmer's error."""
    parent = record.parent or b""
    assert record.parent is None or GROUP_BYTES <= len(parent) <= MAX_KEY_BYTES, len(parent)
    segment, index = record.slot
    fixed = BLOCK_VALUE.pack(RECORD_VERSION, segment, index, record.generation, record.stored_s, len(parent))
    return encode_block_key(record.epoch, record.key), fixed + parent


def decode_block(key: bytes, value: bytes) -> BlockRecord:
    """Return the record of these key and value bytes. Raises CorruptRecord for bytes that no record
    encodes to."""
    if not EPOCH_BYTES + GROUP_BYTES <= len(key) <= EPOCH_BYTES + MAX_KEY_BYTES:
        raise CorruptRecord(f"block record: key of {len(key)} bytes")
    if len(value) < BLOCK_VALUE.size:
        raise CorruptRecord(f"block record: value of {len(value)} bytes")
    version, segment, index, generation, stored_s, parent_bytes = BLOCK_VALUE.unpack_from(value)
    _check_version("block", version)
    if len(value) != BLOCK_VALUE.size + parent_bytes:
        raise CorruptRecord(f"block record: value of {len(value)} bytes with a parent key of {parent_bytes}")
    if parent_bytes and not GROUP_BYTES <= parent_bytes <= MAX_KEY_BYTES:
        raise CorruptRecord(f"block record: parent key of {parent_bytes} bytes")
    epoch = int.from_bytes(key[:EPOCH_BYTES], "big")
    if epoch >= EPOCH_LIMIT:
        raise CorruptRecord(f"block record: epoch {epoch}")
    parent = BlockKey(value[BLOCK_VALUE.size :]) if parent_bytes else None
    return BlockRecord(epoch, BlockKey(key[EPOCH_BYTES:]), Slot(segment, index), generation, parent, stored_s)


def encode_segment_key(segment: int) -> bytes:
    """Return the key bytes of a segment's record."""
    return _SEGMENT_KEY.pack(segment)


def encode_segment(record: SegmentRecord) -> tuple[bytes, bytes]:
    """Return the key and value bytes of a segment's record. A field out of its range is a
    programmer's error."""
    value = _SEGMENT.pack(RECORD_VERSION, record.slot_bytes, record.slot_count, record.drive)
    return encode_segment_key(record.segment), value


def decode_segment(key: bytes, value: bytes) -> SegmentRecord:
    """Return the record of these key and value bytes. Raises CorruptRecord for bytes that no record
    encodes to."""
    if len(key) != _SEGMENT_KEY.size or len(value) != _SEGMENT.size:
        raise CorruptRecord(f"segment record: key of {len(key)} and value of {len(value)} bytes")
    version, slot_bytes, slot_count, drive = _SEGMENT.unpack(value)
    _check_version("segment", version)
    (segment,) = _SEGMENT_KEY.unpack(key)
    return SegmentRecord(segment, slot_bytes, slot_count, drive)


def _check_version(what: str, version: int) -> None:
    if version != RECORD_VERSION:
        raise CorruptRecord(f"{what} record: version {version}, this kvdisk knows {RECORD_VERSION}")
