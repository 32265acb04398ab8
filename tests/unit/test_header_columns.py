# SPDX-License-Identifier: Apache-2.0
"""Many headers say what the same say one by one, whatever the bytes are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvdisk.blocks import GROUP_BYTES, LATEST_S, MAX_KEY_BYTES, BlockKey, group_of
from kvdisk.device.header import CHECKSUM_KINDS, SlotIdentity, fill_header, read_header
from kvdisk.device.rebuild import _BLOCK, Blocks, HomeShape, Shape, agreed, decode_headers, newest
from kvdisk.errors import KvdiskError
from kvdisk.geometry import HEADER_BYTES, Namespace
from kvdisk.index.columns import _RUN_GENERATIONS, stored_times
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
    namespace = Namespace(
        draw(or_else(FINGERPRINT, st.binary(min_size=32, max_size=32))),
        draw(or_else(0, st.integers(0, 2**64 - 1))),
    )
    identity = SlotIdentity(
        namespace,
        BlockKey(key),
        draw(st.integers(0, 3) | st.integers(0, 2**64 - 1)),
        draw(or_else(size, st.integers(0, 2**64 - 1))),
        draw(or_else(1, st.just(0))),
        draw(or_else(2, st.integers(0, 2**16 - 1))),
    )
    parent = draw(st.none() | st.one_of(usual_keys, keys).map(BlockKey))
    block = bytearray(draw(st.sampled_from([bytes(HEADER_BYTES), b"\xff" * HEADER_BYTES])))
    fill_header(memoryview(block), identity, parent, bytes(16), draw(st.sampled_from(CHECKSUM_KINDS)))
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
        (fingerprint, epoch), key, generation, payload_bytes, *ranks = header.identity
        group, parent = group_of(key), header.parent or b""
        fits = (
            len(key) >= GROUP_BYTES
            and (not parent or len(parent) >= GROUP_BYTES)
            and ranks == [1, 2]
            and fingerprint == FINGERPRINT
            and epoch < 2**63
            and group < len(SIZES)
            and SIZES[group] == payload_bytes
        )
        if fits:
            told.append(Told(epoch, key, index, generation, parent))
    return told


def rows(blocks: Blocks) -> list[Told]:
    return [Told(epoch, key, index, made, parent) for _, index, epoch, made, key, parent in blocks.tolist()]


def decoded(blocks: list[bytes]) -> Blocks:
    return decode_headers(memoryview(bytearray(b"".join(blocks))), len(blocks), SHAPE, FILE)


@given(st.lists(blocks_of_bytes, min_size=1, max_size=6), st.data())
def test_many_headers_say_what_each_says_and_ranks_agree_where_they_say_the_same(blocks, data):
    others = [data.draw(st.one_of(st.just(block), st.just(block), blocks_of_bytes)) for block in blocks]
    mine, theirs = ([block.ljust(HEADER_BYTES, b"\0") for block in each] for each in (blocks, others))
    assert rows(decoded(mine)) == one_by_one(mine)
    both = set(one_by_one(mine)) & set(one_by_one(theirs))
    assert rows(agreed(decoded(mine), decoded(theirs))) == sorted(both, key=lambda told: told.index)


names = st.sampled_from([bytes([number]) * 8 + bytes(2) for number in range(6)]) | short_keys
told_blocks = st.builds(
    Told,
    st.sampled_from([0, 0, 0, 1, 2**62]),
    names,
    st.integers(0, 7),
    st.integers(1, 20) | st.integers(10**18, 10**18 + 9000) | st.integers(0, 2**64 - 1),
    st.just(b"") | names,
)


@given(st.lists(told_blocks, max_size=30, unique_by=lambda told: told.index))
def test_of_each_name_the_newest_becomes_a_record(told):
    """In the order of their names; a block is not older than the parent that it followed, and none
    is younger than the start of its engine, with which its generation begins."""
    columns = np.array([(0, one.index, one.epoch, one.generation, one.key, one.parent) for one in told], _BLOCK)
    records = list(_as_records(newest(columns)).records())
    best = {}
    for one in told:
        if (one.epoch, one.key) not in best or best[one.epoch, one.key].generation < one.generation:
            best[one.epoch, one.key] = one
    found = [Told(*record[:2], record.slot.index, record.generation, record.parent or b"") for record in records]
    assert found == [best[name] for name in sorted(best)]
    ordered = sorted(records, key=lambda record: record.generation)
    assert all(0 < record.stored_s <= LATEST_S for record in records)
    assert all(record.stored_s <= max(1, record.generation // 10**9) for record in records)
    alone = [record.stored_s for record in ordered if record.parent is None]
    assert alone == sorted(alone)
    times = {(record.epoch, record.key): record for record in records}
    for record in records:
        parent = times.get((record.epoch, record.parent))
        if parent is not None and 0 < record.generation - parent.generation <= _RUN_GENERATIONS:
            assert record.stored_s == parent.stored_s, "of one run"


def test_the_times_of_a_long_life_lie_in_an_hour_before_its_start():
    """Of an engine that stored 10,000 prompts' blocks, and of one before it, which ended just then:
    the order stays, and with an age limit none lives longer than it may."""
    start_s, prompts = 1_700_000_000, 10_000
    before = [(start_s - 5000) * 10**9 + at for at in range(10)]
    after = [start_s * 10**9 + at for at in range(prompts)]
    generations = np.array([*before, *after], np.uint64)
    keys = [at.to_bytes(8, "big") for at in range(len(generations))]
    times = stored_times(np.zeros(len(keys), np.uint64), keys, [b""] * len(keys), generations)
    assert (np.diff(times.astype(np.int64)) >= 0).all()
    assert times[:10].tolist() == list(range(start_s - 5009, start_s - 4999))
    assert start_s - 3600 <= times[10] and times[-1] == start_s
