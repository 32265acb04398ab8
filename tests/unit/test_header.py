# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.blocks import MAX_KEY_BYTES
from kvdisk.device.checksum import multilinear_digest
from kvdisk.device.header import (
    CHECKSUM_KINDS,
    MULTILINEAR,
    XXH3_128,
    SlotHeader,
    SlotIdentity,
    check_slot,
    fill_header,
    named_checksum,
    read_header,
    seal_slot,
)
from kvdisk.errors import CorruptRecord, GeometryMismatch
from kvdisk.geometry import FORMAT_VERSION, HEADER_BYTES, Namespace
from kvdisk.messages import Reason

PAYLOAD_BYTES = 6000
WHO = SlotIdentity(Namespace(bytes(range(32)), 3), b"k" * 34, 7, PAYLOAD_BYTES, 1, 2)


def make_slot(parent=b"p" * 34, kind=XXH3_128, **changes) -> memoryview:
    """A sealed slot in memory that was dirty before, with bytes behind the payload that do not
    count."""
    slot = memoryview(bytearray(b"\xaa" * (HEADER_BYTES + 8192)))
    slot[HEADER_BYTES:] = bytes(at * 7 % 251 for at in range(8192))
    seal_slot(slot, WHO._replace(**changes), parent, kind)
    return slot


u64 = st.integers(0, 2**64 - 1)
u16 = st.integers(0, 2**16 - 1)
keys = st.binary(min_size=1, max_size=MAX_KEY_BYTES)
namespaces = st.builds(Namespace, st.binary(min_size=32, max_size=32), st.integers(0, 2**63 - 1))


@given(
    header=st.builds(
        SlotHeader,
        st.builds(SlotIdentity, namespaces, keys, u64, u64, u16, u16),
        parent=st.none() | keys,
        checksum=st.binary(min_size=16, max_size=16),
        checksum_kind=st.sampled_from(CHECKSUM_KINDS),
    )
)
def test_what_is_written_is_read(header):
    view = memoryview(bytearray(b"\xaa" * (HEADER_BYTES + 16)))
    fill_header(view, *header)
    assert read_header(view) == header
    assert view[HEADER_BYTES:] == b"\xaa" * 16, "wrote beyond the header"


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": Namespace(bytes(32), 3)},
        {"namespace": Namespace(bytes(range(32)), 4)},
        {"key": b"k" * 33},
        {"key": b"k" * 34 + b"\0"},
        {"generation": 8},
        {"payload_bytes": PAYLOAD_BYTES - 1},
        {"rank": 0},
        {"rank_count": 3},
    ],
)
def test_another_block_is_refused(change):
    assert check_slot(make_slot(**change), WHO) is Reason.HEADER
    assert check_slot(make_slot(), WHO._replace(**change)) is Reason.HEADER


@pytest.mark.parametrize("kind", CHECKSUM_KINDS)
def test_a_flipped_bit_is_refused_anywhere_in_the_header_and_the_payload(kind):
    slot = make_slot(kind=kind)
    for at in range(HEADER_BYTES):
        slot[at] ^= 1 << at % 8
        assert check_slot(slot, WHO) is Reason.HEADER, at
        with pytest.raises((CorruptRecord, GeometryMismatch)):
            read_header(slot)
        slot[at] ^= 1 << at % 8
    for at in (0, 1, 63, 64, 4095, 4096, PAYLOAD_BYTES - 1):
        slot[HEADER_BYTES + at] ^= 1
        assert check_slot(slot, WHO) is Reason.CHECKSUM, at
        slot[HEADER_BYTES + at] ^= 1
    slot[HEADER_BYTES + PAYLOAD_BYTES] ^= 1
    assert check_slot(slot, WHO) is None, "behind the payload"


def test_a_slot_is_verified_by_the_kind_that_it_names():
    slot = make_slot(kind=MULTILINEAR)
    header = read_header(slot)
    digest = multilinear_digest(slot[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES])
    assert (header.checksum_kind, header.checksum) == (MULTILINEAR, digest)
    assert named_checksum(slot[:HEADER_BYTES], WHO) == (MULTILINEAR, digest)
    fill_header(slot, *header._replace(checksum_kind=XXH3_128))
    assert check_slot(slot, WHO) is Reason.CHECKSUM


def test_another_format_version_is_told_apart_from_damage():
    slot = make_slot()
    slot[8:10] = struct.pack("<H", FORMAT_VERSION + 1)
    slot[HEADER_BYTES - 8 : HEADER_BYTES] = struct.pack("<Q", xxhash.xxh3_64_intdigest(slot[: HEADER_BYTES - 8]))
    with pytest.raises(GeometryMismatch, match=str(FORMAT_VERSION + 1)):
        read_header(slot)
    assert check_slot(slot, WHO) is Reason.HEADER
