# SPDX-License-Identifier: Apache-2.0
"""The multilinear checksum against its formula in plain integers, and what it never lets pass."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.device.checksum import ROW_BYTES, ROW_WORDS, multilinear_digest

MASK = 2**64 - 1
EMPTY = "4b80d4e79a47c912c5311ef26d55f2b0"
PATTERN = "eb797df195cf26b3713701f60b4080e7"


def plain_multiplier(table: int, at: int) -> int:
    z = ((table << 32) + at + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31 | 1


def plain_digest(payload: bytes) -> bytes:
    """As docs/STORE.md has it, word by word."""
    padded = payload.ljust(-(-len(payload) // ROW_BYTES) * ROW_BYTES, b"\0")
    sums = []
    for lane, order in enumerate(("little", "big")):
        total = plain_multiplier(4, lane)
        for row in range(len(padded) // ROW_BYTES):
            row_sum = 0
            for at in range(ROW_WORDS):
                start = row * ROW_BYTES + 8 * at
                row_sum += plain_multiplier(lane, at) * int.from_bytes(padded[start : start + 8], order)
            total += plain_multiplier(2 + lane, row) * (row_sum & MASK)
        sums.append(total & MASK)
    return b"".join(each.to_bytes(8, "little") for each in sums)


def digest(payload: bytes) -> bytes:
    return multilinear_digest(memoryview(payload))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3 * ROW_BYTES), st.integers(0, 2**32))
def test_it_is_the_formula(length, seed):
    payload = random.Random(seed).randbytes(length)
    assert digest(payload) == plain_digest(payload)


def test_it_is_the_formula_over_many_rows_and_at_any_address():
    payload = random.Random(1).randbytes(131 * ROW_BYTES + 77)
    assert digest(payload) == plain_digest(payload)
    assert multilinear_digest(memoryview(b"x" + payload)[1:]) == digest(payload)


def test_it_stays_what_it_is_on_drives():
    """Slots that lie on drives have these: no change of the code may change them."""
    assert digest(b"").hex() == EMPTY
    assert digest(bytes(range(256)) * 33).hex() == PATTERN
