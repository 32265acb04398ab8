# SPDX-License-Identifier: Apache-2.0
"""Many headers say what the same say one by one, whatever the bytes are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvdisk.blocks import GROUP_BYTES, MAX_KEY_BYTES, BlockKey, Slot, group_of
from kvdisk.device.header import CHECKSUM_KINDS, SlotHeader, read_header, write_header
from kvdisk.device.rebuild import _BLOCK, Blocks, HomeShape, Shape, agreed, decode_headers, newest
from kvdisk.errors import KvdiskError
from kvdisk.geometry import HEADER_BYTES, Namespace
from kvdisk.index.base import BlockRecord
from kvdisk.index.columns import _RUN_GENERATIONS, ascending
from kvdisk.recovery import _as_records

FINGERPRINT = b"\x5a" * 32
SIZES = (4000, -1, 9000)
SHAPE = HomeShape(FINGERPRINT, 2, (Shape(16384, 4000), Shape(8192, 8), Shape(16384, 9000)))
FILE = SimpleNamespace(segment=0, rank=1, slot_bytes=16384)
SUM_OFFSET = HEADER_BYTES - 8

short_keys = st.sampled_from([bytes([number]) + bytes([0, group]) for number in range(4) for group in (0, 2)])
keys = st.one_of(short_keys, st.binary(min_size=1, max_size=MAX_KEY_BYTES), st.binary(min_size=34, max_size=34))
usual_keys = st.builds(
    lambda start, group: start + bytes([0, group]), st.binary(max_size=40), st.sampled_from([0, 0, 0, 1, 2, 3])
)


class Told(NamedTuple):
    """A block as one header, or the headers of all ranks, say it."""

    epoch: int
    key: bytes
    index: int
    generation: int
    parent: bytes


def or_else(usual, *others):
    return st.one_of(*[st.just(usual)] * 8, *others)


@st.composite
def headers(draw) -> bytes:
    key = draw(st.one_of(usual_keys, keys))
    group = group_of(BlockKey(key))
    size = SIZES[group] if group < len(SIZES) and SIZES[group] > 0 else 4000
    header = SlotHeader(
        Namespace(
            draw(or_else(FINGERPRINT, st.binary(min_size=32, max_size=32))),
            draw(or_else(0, st.integers(0, 2**64 - 1))),
        ),
        BlockKey(key),
        draw(st.integers(0, 3) | st.integers(0, 2**64 - 1)),
        draw(st.none() | st.one_of(usual_keys, keys).map(BlockKey)),
        draw(or_else(size, st.integers(0, 2**64 - 1))),
        draw(or_else(1, st.just(0))),
        draw(or_else(2, st.integers(0, 2**16 - 1))),
        draw(st.binary(min_size=16, max_size=16)),
        draw(st.sampled_from(CHECKSUM_KINDS)),
    )
    block = bytearray(draw(st.sampled_from([bytes(HEADER_BYTES), b"\xff" * HEADER_BYTES])))
    write_header(memoryview(block), header)
    for at in draw(st.lists(st.integers(0, 370) | st.integers(0, HEADER_BYTES - 1), max_size=2)):
        block[at] = draw(st.integers(0, 255))
    if draw(st.booleans()):  # damage that its checksum agrees with
        block[SUM_OFFSET:] = xxh3_64_intdigest(block[:SUM_OFFSET]).to_bytes(8, "little")
    return bytes(block)


blocks_of_bytes = st.one_of(headers(), headers(), st.just(bytes(HEADER_BYTES)), st.binary(max_size=64))


def one_by_one(blocks: list[bytes]) -> list[Told]:
    """Decode headers as records, and ask of each what a home asks."""
    told = []
    for index, block in enumerate(blocks):
        try:
            header = read_header(memoryview(block))
        except KvdiskError:
            continue
        group = group_of(header.key)
        fits = (
            len(header.key) >= GROUP_BYTES
            and (header.parent is None or len(header.parent) >= GROUP_BYTES)
            and (header.rank, header.rank_count) == (1, 2)
            and header.namespace.fingerprint == FINGERPRINT
            and header.namespace.epoch < 2**63
            and group < len(SIZES)
            and SIZES[group] == header.payload_bytes
        )
        if fits:
            told.append(Told(header.namespace.epoch, header.key, index, header.generation, header.parent or b""))
    return told


def rows(blocks: Blocks) -> list[Told]:
    return [Told(epoch, key, index, made, parent) for _, index, epoch, made, key, parent in blocks.tolist()]


def decoded(blocks: list[bytes]) -> Blocks:
    return decode_headers(memoryview(bytearray(b"".join(blocks))), len(blocks), SHAPE, FILE)


@settings(max_examples=100, deadline=None)
@given(st.lists(blocks_of_bytes, min_size=1, max_size=5))
def test_many_headers_say_what_each_says(blocks):
    blocks = [block.ljust(HEADER_BYTES, b"\0") for block in blocks]
    assert rows(decoded(blocks)) == one_by_one(blocks)


@settings(max_examples=60, deadline=None)
@given(st.lists(blocks_of_bytes, min_size=1, max_size=6), st.data())
def test_what_two_ranks_agree_on(blocks, data):
    blocks = [block.ljust(HEADER_BYTES, b"\0") for block in blocks]
    others = [data.draw(st.one_of(st.just(block), st.just(block), blocks_of_bytes)) for block in blocks]
    others = [block.ljust(HEADER_BYTES, b"\0") for block in others]
    both = set(one_by_one(blocks)) & set(one_by_one(others))
    assert rows(agreed(decoded(blocks), decoded(others))) == sorted(both, key=lambda told: told.index)


@st.composite
def segments_of_blocks(draw) -> list[tuple[int, list[Told]]]:
    numbers = draw(st.lists(st.integers(0, 5), unique=True, max_size=4))
    names = st.sampled_from([bytes([number]) * 8 + bytes(2) for number in range(6)]) | short_keys
    blocks = st.builds(
        Told,
        st.sampled_from([0, 0, 0, 1, 2**62]),
        names,
        st.just(0),
        st.integers(1, 20) | st.integers(10**18, 10**18 + 9000) | st.integers(0, 2**64 - 1),
        st.just(b"") | names,
    )
    return [
        (number, [told._replace(index=at) for at, told in enumerate(draw(st.lists(blocks, max_size=8)))])
        for number in numbers
    ]


def in_columns(segments: list[tuple[int, list[Told]]]) -> Blocks:
    found = [(n, told.index, told.epoch, told.generation, told.key, told.parent) for n, ts in segments for told in ts]
    return np.array(found, _BLOCK)


def records_one_by_one(segments: list[tuple[int, list[Told]]], now_s: int) -> list[BlockRecord]:
    """Return the newest block of each name as a record."""
    best: dict[tuple[int, bytes], tuple[int, Told]] = {}
    for segment, blocks in segments:
        for told in blocks:
            known = best.get((told.epoch, told.key))
            if known is None or known[1].generation < told.generation:
                best[told.epoch, told.key] = segment, told
    places = {(segment, told): at for at, (segment, told) in enumerate((s, t) for s, ts in segments for t in ts)}
    records, times, last_s = [], {}, 0
    for segment, told in sorted(best.values(), key=lambda block: (block[1].generation, places[block])):
        stored_s, generation = times.get((told.epoch, told.parent), (0, 0)) if told.parent else (0, 0)
        if not stored_s or told.generation - generation > _RUN_GENERATIONS:
            stored_s = last_s = min(now_s, max(last_s + 1, told.generation // 10**9))
        times[told.epoch, told.key] = stored_s, told.generation
        parent = BlockKey(told.parent) if told.parent else None
        slot = Slot(segment, told.index)
        records.append(BlockRecord(told.epoch, BlockKey(told.key), slot, told.generation, parent, stored_s))
    return sorted(records, key=lambda record: (record.epoch, record.key))


@settings(max_examples=100, deadline=None)
@given(segments_of_blocks(), st.sampled_from([3, 1_700_000_000]))
def test_the_newest_become_records_as_they_would_one_by_one(segments, now_s):
    columns = _as_records(newest(in_columns(segments)), now_s)
    expected = records_one_by_one(segments, now_s)
    assert list(columns.records()) == expected


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(min_size=2, max_size=12) | short_keys)))
def test_rows_ascend_as_their_bytes_do(names):
    epochs = np.array([epoch for epoch, _ in names], np.uint64)
    order = ascending(epochs, [key for _, key in names]).tolist()
    assert [names[row] for row in order] == sorted(names)
