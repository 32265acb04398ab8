# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.blocks import MAX_KEY_BYTES, BlockKey, Slot, make_block_key
from kvdisk.errors import CorruptRecord
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.columns import decode_blocks
from kvdisk.index.records import (
    decode_block,
    decode_segment,
    encode_block,
    encode_block_key,
    encode_segment,
    encode_segment_key,
)

u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 2**63 - 1)
keys = st.binary(min_size=2, max_size=MAX_KEY_BYTES).map(BlockKey)
blocks = st.builds(BlockRecord, epochs, keys, st.builds(Slot, u32, u32), u64, st.none() | keys, u32)
segments = st.builds(SegmentRecord, u32, u64, u32, u16)

BLOCK = BlockRecord(7, make_block_key(b"h" * 32, 1), Slot(2, 3), 4, make_block_key(b"p" * 32, 1), 5)
SEGMENT = SegmentRecord(1, 2, 3, 4)


@given(blocks)
def test_a_block_comes_back_as_it_was(record: BlockRecord) -> None:
    key, value = encode_block(record)
    assert decode_block(key, value) == record
    assert key == encode_block_key(record.epoch, record.key)


@given(segments)
def test_a_segment_comes_back_as_it_was(record: SegmentRecord) -> None:
    key, value = encode_segment(record)
    assert decode_segment(key, value) == record
    assert key == encode_segment_key(record.segment)


def test_the_layout_is_the_one_written_down() -> None:
    key, value = encode_block(BLOCK)
    assert key == b"\0\0\0\0\0\0\0\x07" + b"h" * 32 + b"\0\x01"
    assert value == bytes.fromhex("01 00000002 00000003 0000000000000004 00000005 22") + b"p" * 32 + b"\0\x01"
    assert encode_segment(SEGMENT) == (
        bytes.fromhex("00000001"),
        bytes.fromhex("01 0000000000000002 00000003 0004"),
    )


@given(st.lists(st.tuples(epochs, keys), min_size=2, max_size=2))
def test_keys_sort_by_epoch_first(names: list[tuple[int, BlockKey]]) -> None:
    assert sorted(names) == sorted(names, key=lambda name: encode_block_key(*name))


@settings(max_examples=300)
@given(st.binary(max_size=150), st.binary(max_size=200))
def test_any_bytes_decode_to_the_record_they_encode_or_are_corrupt(key: bytes, value: bytes) -> None:
    value = b"\x01" + value  # the version byte, or hardly any would get past it
    for decode, encode in ((decode_block, encode_block), (decode_segment, encode_segment)):
        try:
            record = decode(key, value)
        except CorruptRecord:
            continue
        assert encode(record) == (key, value)


def _record_wise(items: list[tuple[bytes, bytes]]) -> list[BlockRecord] | str:
    try:
        return [decode_block(key, value) for key, value in items]
    except CorruptRecord as error:
        return str(error)


def _column_wise(items: list[tuple[bytes, bytes]]) -> list[BlockRecord] | str:
    try:
        columns = decode_blocks([key for key, _ in items], [value for _, value in items])
    except CorruptRecord as error:
        return str(error)
    slots = map(Slot, columns.segments.tolist(), columns.indices.tolist())
    parents = [parent or None for parent in columns.each_parent()]
    fields = (slots, columns.generations.tolist(), parents, columns.stored_s.tolist())
    return list(map(BlockRecord, columns.epochs.tolist(), columns.keys, *fields))


sound_items = blocks.map(encode_block)
cut_items = st.tuples(sound_items, st.integers(0, 60), st.integers(0, 60)).map(
    lambda cut: (cut[0][0][: cut[1]], cut[0][1][: cut[2]])
)
flipped_items = st.tuples(sound_items, st.integers(0, 21), st.integers(0, 255)).map(
    lambda flip: (flip[0][0], flip[0][1][: flip[1]] + bytes([flip[2]]) + flip[0][1][flip[1] + 1 :])
)
wild_items = st.tuples(st.binary(max_size=150), st.binary(max_size=200).map(lambda value: b"\x01" + value))


@settings(max_examples=300)
@given(
    st.lists(sound_items, max_size=6),
    st.lists(sound_items | cut_items | flipped_items | wild_items, max_size=2),
    st.randoms(),
)
def test_columns_are_the_records_or_are_corrupt_for_the_same_reason(sound, odd, random):
    items = sound + odd
    random.shuffle(items)
    expected, found = _record_wise(items), _column_wise(items)
    if isinstance(expected, str):
        assert isinstance(found, str)
        reasons = [reason for item in items if isinstance(reason := _record_wise([item]), str)]
        assert found in reasons
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"\x80" + bytes(7) + b"hash", encode_block(BLOCK._replace(parent=None))[1]),
        (bytes(8) + b"h", encode_block(BLOCK)[1]),
        (bytes(8) + bytes(129), encode_block(BLOCK)[1]),
        (bytes(8) + b"hash", encode_block(BLOCK)[1] + b"\0"),
        (bytes(8) + b"hash", encode_block(BLOCK._replace(parent=None))[1][:-1] + b"\x01p"),
        (bytes(8) + b"hash", encode_block(BLOCK._replace(parent=None))[1][:-1] + b"\xff" + bytes(255)),
    ],
    ids=["epoch", "short key", "long key", "longer than it says", "short parent", "long parent"],
)
def test_a_block_that_nothing_encodes_to_is_corrupt(key: bytes, value: bytes) -> None:
    with pytest.raises(CorruptRecord):
        decode_block(key, value)
