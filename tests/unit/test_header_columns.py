# SPDX-License-Identifier: Apache-2.0
"""Many headers say what the same say one by one, whatever the bytes are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvdisk.blocks import GROUP_BYTES, MAX_KEY_BYTES, BlockKey, group_of
from kvdisk.device.header import CHECKSUM_KINDS, SlotHeader, read_header, write_header
from kvdisk.device.rebuild import _BLOCK, Blocks, HomeShape, Shape, agreed, decode_headers, newest
from kvdisk.errors import KvdiskError
from kvdisk.geometry import HEADER_BYTES, Namespace

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


def test_of_one_block_the_newest_copy_stays():
    copies = [(0, 0, 1, 5, b"a", b""), (0, 1, 1, 9, b"a", b""), (0, 2, 2, 1, b"a", b""), (1, 0, 1, 9, b"a", b"")]
    assert newest(np.array(copies, _BLOCK))["index"].tolist() == [1, 2]
