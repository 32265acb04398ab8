# SPDX-License-Identifier: Apache-2.0
"""Any bytes where a header should be: it is one, or CorruptRecord or GeometryMismatch say that it is none."""

from __future__ import annotations

import struct

from hypothesis import example, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvdisk.blocks import make_block_key
from kvdisk.device.header import SlotHeader, SlotIdentity, check_slot, read_header, write_header
from kvdisk.device.segment import SegmentHeader, _decode, _encode
from kvdisk.errors import CorruptRecord, GeometryMismatch
from kvdisk.geometry import FORMAT_VERSION, HEADER_BYTES, SEGMENT_HEADER_BYTES, Namespace
from kvdisk.messages import Reason

NAMESPACE = Namespace(bytes(range(32)), 3)
KEY = make_block_key(b"k" * 32, 1)
SEGMENT = SegmentHeader(3, 1, 2, 8192, 5, bytes(range(32)))

changes = st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=40)), max_size=4)
"""What is written over a sound header, and where: most of what decides lies in the first 400 bytes."""


def sound_slot_header() -> bytearray:
    block = bytearray(HEADER_BYTES)
    header = SlotHeader(NAMESPACE, KEY, 7, make_block_key(b"p" * 32, 1), 100, 0, 1, b"c" * 16)
    write_header(memoryview(block), header)
    return block


def overwritten(block: bytearray, what: list[tuple[int, bytes]], *, summed: bool) -> bytearray:
    for at, data in what:
        block[at : at + len(data)] = data
    if summed:  # or hardly any would get past the checksum
        block[-8:] = struct.pack("<Q", xxh3_64_intdigest(bytes(block[:-8])))
    return block


@settings(max_examples=300)
@given(changes, st.booleans())
@example([(8, b"\xff\xff")], True)
@example([(10, b"\x02")], True)
@example([(10, b"\x03")], True)
def test_any_slot_header_is_read_or_refused(what: list[tuple[int, bytes]], summed: bool) -> None:
    block = overwritten(sound_slot_header(), what, summed=summed)
    try:
        header = read_header(memoryview(block))
    except CorruptRecord:
        return
    except GeometryMismatch:
        assert int.from_bytes(block[8:10], "little") != FORMAT_VERSION
        return
    again = bytearray(HEADER_BYTES)
    write_header(memoryview(again), header)
    # What has no meaning yet may differ; all that has comes back.
    assert read_header(memoryview(again)) == header


@settings(max_examples=300)
@given(changes, st.booleans(), st.binary(max_size=60))
@example([(10, b"\x02")], True, b"")
def test_any_slot_is_checked_without_an_exception(what: list[tuple[int, bytes]], summed: bool, payload: bytes) -> None:
    slot = overwritten(sound_slot_header(), what, summed=summed) + payload.ljust(100, b"\0")
    found = check_slot(memoryview(slot), SlotIdentity(NAMESPACE, KEY, 7, 100, 0, 1))
    assert found in {Reason.HEADER, Reason.CHECKSUM}, "the payload has not the checksum that the header names"


@settings(max_examples=300)
@given(changes, st.booleans())
def test_any_segment_header_is_read_or_refused(what: list[tuple[int, bytes]], summed: bool) -> None:
    block = bytes(overwritten(bytearray(_encode(SEGMENT)), what, summed=summed))
    try:
        header = _decode(block)
    except CorruptRecord:
        return
    except GeometryMismatch:
        assert int.from_bytes(block[8:10], "little") != FORMAT_VERSION
        return
    assert len(block) == SEGMENT_HEADER_BYTES
    assert _decode(_encode(header)) == header
