# SPDX-License-Identifier: Apache-2.0
"""The size of LMDB's file of an index, and the part of it that is kept for deletions. Pure."""

from __future__ import annotations

MIN_MAP_BYTES = 1 << 20
MAX_TRANSACTION = 1000
"""Operations in one transaction; larger transactions leave a larger LMDB file for ever."""
RESERVE_UNITS = 128
_UNIT_BYTES = 4096
"""The bytes that LMDB allocates at a time, on machines with memory pages of 4 KiB."""
_BLOCK_RECORD_BYTES = 256
"""Bytes of a record with sha256 keys, with a margin: 118-162 at first, 221 after many replacements
(measured)."""
STEP_BYTES = 256 << 10


def map_bytes_for(block_count: int) -> int:
    """Return a map size in bytes that has room for so many blocks, and for what is kept for
    deletions."""
    kept_units = 2 * (MAX_TRANSACTION + RESERVE_UNITS)
    return MIN_MAP_BYTES + _UNIT_BYTES * kept_units + _BLOCK_RECORD_BYTES * block_count


def planned_bytes(record_count: int) -> int:
    """Return the bytes that LMDB's file can grow to while so many records are replaced, in whole
    steps of STEP_BYTES.

    Besides the records, as loosely as they come to be packed, there are the units that the last two
    transactions have freed: only the next transaction but one can take them.
    """
    packed_units = -(-_BLOCK_RECORD_BYTES * record_count // _UNIT_BYTES)
    units = packed_units + 2 * min(MAX_TRANSACTION, packed_units) + RESERVE_UNITS // 4
    return -(-_UNIT_BYTES * units // STEP_BYTES) * STEP_BYTES
