# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.blocks import MAX_KEY_BYTES, BlockKey, Slot, make_block_key
from kvdisk.errors import CorruptRecord
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.packed import Packed
from kvdisk.index.records import decode_blocks, decode_segment, encode_block, encode_block_key, encode_segment

u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 2**63 - 1)
keys = st.binary(min_size=2, max_size=MAX_KEY_BYTES).map(BlockKey)
blocks = st.builds(BlockRecord, epochs, keys, st.builds(Slot, u32, u32), u64, st.none() | keys, u32, u64)
segments = st.builds(SegmentRecord, st.integers(0, 2**31 - 1), u64, u32, u16)

BLOCK = BlockRecord(7, make_block_key(b"h" * 32, 1), Slot(2, 3), 4, make_block_key(b"p" * 32, 1), 5)


def decode_block(key: bytes, value: bytes) -> BlockRecord:
    (record,) = decode_blocks(Packed.of([key], [value])).records()
    return record


def test_the_layout_is_the_one_written_down() -> None:
    key, value = encode_block(BLOCK)
    assert key == b"\0\0\0\0\0\0\0\x07" + b"h" * 32 + b"\0\x01"
    assert value == bytes.fromhex("01 00000002 00000003 0000000000000004 00000005 22") + b"p" * 32 + b"\0\x01"
    assert encode_block(BLOCK._replace(tenant=2**63)) == (key, b"\x02" + value[1:] + b"\x80" + bytes(7))
    assert encode_segment(SegmentRecord(1, 2, 3, 4)) == (
        bytes.fromhex("00000001"),
        bytes.fromhex("01 0000000000000002 00000003 0004"),
    )


@given(st.lists(blocks, max_size=6), segments)
def test_records_come_back_as_they_were(records: list[BlockRecord], segment: SegmentRecord) -> None:
    items = [encode_block(record) for record in records]
    assert list(decode_blocks(Packed.of([key for key, _ in items], [value for _, value in items])).records()) == records
    assert decode_segment(*encode_segment(segment)) == segment


@given(st.lists(st.tuples(epochs, keys), min_size=2, max_size=2))
def test_keys_sort_by_epoch_first(names: list[tuple[int, BlockKey]]) -> None:
    assert sorted(names) == sorted(names, key=lambda name: encode_block_key(*name))


SOUND = encode_block(BLOCK)
cut = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda ends: (SOUND[0][: ends[0]], SOUND[1][: ends[1]]))
WITH_TENANT = encode_block(BLOCK._replace(tenant=6))[1]
flipped = st.tuples(st.integers(0, 21), st.integers(0, 255)).map(
    lambda flip: (SOUND[0], SOUND[1][: flip[0]] + bytes([flip[1]]) + SOUND[1][flip[0] + 1 :])
)
wild = st.tuples(st.binary(max_size=150), st.binary(max_size=200).map(lambda value: b"\x01" + value))
wild |= st.tuples(st.binary(max_size=150), st.binary(max_size=200).map(lambda value: b"\x02" + value))
odd = [
    (b"\x80" + bytes(7) + b"hash", encode_block(BLOCK._replace(parent=None))[1]),
    (bytes(8) + b"h", SOUND[1]),
    (bytes(8) + bytes(129), SOUND[1]),
    (SOUND[0], SOUND[1] + b"\0"),
    (SOUND[0], encode_block(BLOCK._replace(parent=None))[1][:-1] + b"\x01p"),
    (SOUND[0], encode_block(BLOCK._replace(parent=None))[1][:-1] + b"\xff" + bytes(255)),
    (SOUND[0], WITH_TENANT[:-8] + bytes(8)),
    (SOUND[0], WITH_TENANT[:-1]),
    (SOUND[0], b"\x01" + WITH_TENANT[1:]),
    (SOUND[0], b"\x03" + WITH_TENANT[1:]),
    (SOUND[0], b"\x02" + SOUND[1][1:]),
]


@given(cut | flipped | wild | st.sampled_from(odd))
def test_any_bytes_decode_to_the_record_they_encode_or_are_corrupt(item: tuple[bytes, bytes]) -> None:
    """Beside sound ones, too."""
    for decode, encode in ((decode_block, encode_block), (decode_segment, encode_segment)):
        try:
            record = decode(*item)
        except CorruptRecord:
            if decode is decode_block:
                with pytest.raises(CorruptRecord):
                    decode_blocks(Packed.of([SOUND[0], item[0]], [SOUND[1], item[1]]))
            continue
        assert encode(record) == item


@pytest.mark.parametrize("item", odd)
def test_a_block_that_nothing_encodes_to_is_corrupt(item: tuple[bytes, bytes]) -> None:
    with pytest.raises(CorruptRecord):
        decode_block(*item)
