# SPDX-License-Identifier: Apache-2.0
"""The 4 KiB header in front of each slot's payload: which block the slot holds. Pure, no I/O.

docs/STORE.md has the layout. Magic, version and the header's own checksum keep their place in every
format version. What a reader knows beforehand lies together at the front, so that ``check_slot``
compares it in one go. Every engine verifies a slot by the kind of checksum that the slot names.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvdisk.blocks import MAX_KEY_BYTES, BlockKey
from kvdisk.device.checksum import multilinear_digest
from kvdisk.errors import CorruptRecord, GeometryMismatch
from kvdisk.geometry import FINGERPRINT_BYTES, FORMAT_VERSION, HEADER_BYTES, Namespace
from kvdisk.messages import Reason

XXH3_128 = 1
"""The checksum kind that is fastest on processors."""
MULTILINEAR = 2
"""The checksum kind that a GPU can compute too; see ``device/checksum.py``."""
CHECKSUM_KINDS = (XXH3_128, MULTILINEAR)
"""The kinds that there are; every other number is reserved."""
CHECKSUM_BYTES = 16
MAGIC = b"KVDSLOT\0"

IDENTITY_FIELDS = (
    ("magic", "8s", 0),
    ("version", "H", 8),
    ("kind", "B", 10),
    ("rank", "H", 12),
    ("rank_count", "H", 14),
    ("key_bytes", "H", 16),
    ("generation", "Q", 24),
    ("epoch", "Q", 32),
    ("payload_bytes", "Q", 40),
    ("fingerprint", f"{FINGERPRINT_BYTES}s", 48),
    ("key", f"{MAX_KEY_BYTES}s", 80),
)
"""Name, ``struct`` code and offset of each field that a reader knows beforehand (but for the kind).

All fields are little-endian.
"""
REST_FIELDS = (
    ("checksum", f"{CHECKSUM_BYTES}s", 208),
    ("parent_bytes", "H", 224),
    ("parent", f"{MAX_KEY_BYTES}s", 232),
)
"""Name, ``struct`` code and offset of each field that a reader does not know beforehand. Zeros
follow, up to the header's own checksum."""


def _struct_of(fields: Iterable[tuple[str, str, int]], start: int) -> struct.Struct:
    codes, end = ["<"], start
    for _, code, offset in fields:
        codes.append(f"{offset - end}x{code}")
        end = offset + struct.calcsize(code)
    return struct.Struct("".join(codes))


_IDENTITY = _struct_of(IDENTITY_FIELDS, 0)
_REST_OFFSET = _IDENTITY.size
_REST = _struct_of(REST_FIELDS, _REST_OFFSET)
_CHECKSUM_END = _REST_OFFSET + CHECKSUM_BYTES
_KIND_OFFSET = 10
_GENERATION = struct.Struct("<Q")
_GENERATION_OFFSET = 24
_HEADER_SUM = struct.Struct("<Q")
FIELDS_BYTES = _REST_OFFSET + _REST.size
HEADER_SUM_OFFSET = HEADER_BYTES - _HEADER_SUM.size
_ZEROS = bytes(HEADER_SUM_OFFSET - FIELDS_BYTES)


class SlotIdentity(NamedTuple):
    """Which block a slot holds, and which rank's shard of it: what a reader knows beforehand."""

    namespace: Namespace
    key: BlockKey
    generation: int
    payload_bytes: int
    rank: int
    rank_count: int


class SlotHeader(NamedTuple):
    """What a slot's header says. ``checksum``: 16 bytes, over the ``payload_bytes`` bytes behind
    it."""

    identity: SlotIdentity
    parent: BlockKey | None
    checksum: bytes
    checksum_kind: int


def payload_checksum(payload: memoryview, kind: int = XXH3_128) -> bytes:
    """Return the checksum of a payload, 16 bytes. ``kind``: one of CHECKSUM_KINDS."""
    if kind == XXH3_128:
        return xxh3_128_digest(payload)
    assert kind == MULTILINEAR, kind
    return multilinear_digest(payload)


def seal_slot(slot_view: memoryview, identity: SlotIdentity, parent: BlockKey | None, kind: int = XXH3_128) -> None:
    """Write the header of a slot whose payload is in place behind it."""
    end = HEADER_BYTES + identity.payload_bytes
    assert len(slot_view) >= end
    fill_header(slot_view, identity, parent, payload_checksum(slot_view[HEADER_BYTES:end], kind), kind)


def check_slot(slot_view: memoryview, identity: SlotIdentity) -> Reason | None:
    """Verify a slot in memory, before any byte of it is served. Any thread that owns the bytes.

    Returns ``Reason.HEADER`` where the header is not sound or not that of this block,
    ``Reason.CHECKSUM`` where the payload does not have its checksum, otherwise None.
    """
    end = HEADER_BYTES + identity.payload_bytes
    assert len(slot_view) >= end
    named = named_checksum(slot_view[:HEADER_BYTES], identity)
    if named is None:
        return Reason.HEADER
    kind, checksum = named
    return None if payload_checksum(slot_view[HEADER_BYTES:end], kind) == checksum else Reason.CHECKSUM


def adopt_slot(slot_view: memoryview, identity: SlotIdentity) -> Reason | None:
    """Verify a slot as ``check_slot`` does, whatever its generation, and give it the generation of
    ``identity``: the slot came from another writer."""
    (generation,) = _GENERATION.unpack_from(slot_view, _GENERATION_OFFSET)
    reason = check_slot(slot_view, identity._replace(generation=generation))
    if reason is None:
        _GENERATION.pack_into(slot_view, _GENERATION_OFFSET, identity.generation)
        _HEADER_SUM.pack_into(slot_view, HEADER_SUM_OFFSET, xxh3_64_intdigest(slot_view[:HEADER_SUM_OFFSET]))
    return reason


def named_checksum(header_view: memoryview, identity: SlotIdentity) -> tuple[int, bytes] | None:
    """Return kind and value of the payload's checksum, if the header is sound and that of this
    block.

    None for any other header: the slot must not be used. Any thread that owns the ``HEADER_BYTES``
    bytes.
    """
    head = bytes(header_view[:HEADER_BYTES])
    kind = head[_KIND_OFFSET]
    if (
        kind not in CHECKSUM_KINDS
        or not head.startswith(_encode(identity, kind))
        or xxh3_64_intdigest(head[:HEADER_SUM_OFFSET]) != _HEADER_SUM.unpack_from(head, HEADER_SUM_OFFSET)[0]
    ):
        return None
    return kind, head[_REST_OFFSET:_CHECKSUM_END]


def read_header(view: memoryview) -> SlotHeader:
    """Decode the first ``HEADER_BYTES`` of ``view``.

    Raises CorruptRecord where they are no sound header, GeometryMismatch where another format
    version wrote them. The payload is not looked at.
    """
    assert len(view) >= HEADER_BYTES
    head = bytes(view[:HEADER_BYTES])
    if not head.startswith(MAGIC):
        raise CorruptRecord("slot header: no magic")
    if xxh3_64_intdigest(head[:HEADER_SUM_OFFSET]) != _HEADER_SUM.unpack_from(head, HEADER_SUM_OFFSET)[0]:
        raise CorruptRecord("slot header: checksum of the header does not match")
    (_, version, kind, rank, rank_count, key_length, generation, epoch, payload_bytes, fingerprint, key) = (
        _IDENTITY.unpack_from(head, 0)
    )
    if version != FORMAT_VERSION:
        raise GeometryMismatch(f"slot header: format version {version}, this kvdisk reads {FORMAT_VERSION}")
    checksum, parent_length, parent = _REST.unpack_from(head, _REST_OFFSET)
    if kind not in CHECKSUM_KINDS or not 0 < key_length <= MAX_KEY_BYTES or parent_length > MAX_KEY_BYTES:
        raise CorruptRecord(f"slot header: checksum kind {kind}, key length {key_length}, parent {parent_length}")
    key, namespace = BlockKey(key[:key_length]), Namespace(fingerprint, epoch)
    identity = SlotIdentity(namespace, key, generation, payload_bytes, rank, rank_count)
    return SlotHeader(identity, BlockKey(parent[:parent_length]) if parent_length else None, checksum, kind)


def fill_header(
    view: memoryview, identity: SlotIdentity, parent: BlockKey | None, checksum: bytes, kind: int = XXH3_128
) -> None:
    """Write a header into all of the first ``HEADER_BYTES`` of ``view``. Any thread that owns the
    bytes."""
    assert kind in CHECKSUM_KINDS, "other checksum kinds are reserved"
    assert len(checksum) == CHECKSUM_BYTES
    parent = parent or BlockKey(b"")
    assert len(parent) <= MAX_KEY_BYTES
    view[:_REST_OFFSET] = _encode(identity, kind)
    view[_REST_OFFSET:FIELDS_BYTES] = _REST.pack(checksum, len(parent), parent)
    view[FIELDS_BYTES:HEADER_SUM_OFFSET] = _ZEROS
    _HEADER_SUM.pack_into(view, HEADER_SUM_OFFSET, xxh3_64_intdigest(view[:HEADER_SUM_OFFSET]))


def _encode(identity: SlotIdentity, kind: int) -> bytes:
    """Return the bytes of a header before its payload checksum."""
    (fingerprint, epoch), key, generation, payload_bytes, rank, rank_count = identity
    assert 0 < len(key) <= MAX_KEY_BYTES  # struct would cut a longer string silently
    assert len(fingerprint) == FINGERPRINT_BYTES
    return _IDENTITY.pack(
        MAGIC, FORMAT_VERSION, kind, rank, rank_count, len(key), generation, epoch, payload_bytes, fingerprint, key
    )
