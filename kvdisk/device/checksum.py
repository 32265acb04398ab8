# SPDX-License-Identifier: Apache-2.0
"""The payload checksum that a GPU computes as easily as numpy: two multilinear sums modulo 2**64.
Pure, no I/O.

docs/STORE.md has the formula, and the probability that it misses a change. A payload is rows of 512
words of 8 bytes. Lane 0 reads them little-endian and lane 1 big-endian. What changes only the high
bits of a word changes only the high bits of lane 0's sum, where changes cancel more easily, but the
low bits of lane 1's sum.

``worker/gpu_staging.py`` computes the same with torch, bit for bit.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ROW_BYTES = 4096
WORD_BYTES = 8
ROW_WORDS = ROW_BYTES // WORD_BYTES
LANES = 2
_ROW_TABLE, _START_TABLE = 2, 4
_ROWS_AT_ONCE = 64  # as much as the processor's nearer caches hold, beside a copy with its bytes turned
_SUMS = struct.Struct("<QQ")


@lru_cache(maxsize=64)
def multipliers(table: int, count: int) -> NDArray[np.uint64]:
    """Return the first ``count`` multipliers of a table: odd, and the same for ever. Read-only; any
    thread.

    Tables 0 and 1 are for words, by lane; 2 and 3 for rows, by lane; 4 is what the sums start with.
    """
    mixed = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(table << 32)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    mixed |= np.uint64(1)
    mixed.flags.writeable = False
    return mixed


def multilinear_digest(payload: memoryview) -> bytes:
    """Return the 16-byte checksum of a payload of any length. Any thread that owns the bytes."""
    full_rows, tail_bytes = divmod(payload.nbytes, ROW_BYTES)
    lanes = [multipliers(lane, ROW_WORDS) for lane in range(LANES)]
    row_sums = np.empty((LANES, full_rows + bool(tail_bytes)), np.uint64)
    words = np.frombuffer(payload, "<u8", full_rows * ROW_WORDS).reshape(full_rows, ROW_WORDS)
    turned = np.empty((min(full_rows, _ROWS_AT_ONCE), ROW_WORDS), np.uint64)
    for start in range(0, full_rows, _ROWS_AT_ONCE):
        some = words[start : start + _ROWS_AT_ONCE]
        np.dot(some, lanes[0], out=row_sums[0, start : start + len(some)])
        np.copyto(turned[: len(some)], some.view(">u8"))
        np.dot(turned[: len(some)], lanes[1], out=row_sums[1, start : start + len(some)])
    if tail_bytes:
        tail = bytes(payload[full_rows * ROW_BYTES :]).ljust(ROW_BYTES, b"\0")
        row_sums[0, full_rows] = np.dot(np.frombuffer(tail, "<u8"), lanes[0])
        row_sums[1, full_rows] = np.dot(np.frombuffer(tail, ">u8").astype(np.uint64), lanes[1])
    starts = multipliers(_START_TABLE, LANES)
    folded = [np.dot(each, multipliers(_ROW_TABLE + lane, len(each))) for lane, each in enumerate(row_sums)]
    return _SUMS.pack(*((int(start) + int(added)) % 2**64 for start, added in zip(starts, folded, strict=True)))
