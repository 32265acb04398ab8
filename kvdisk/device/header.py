# SPDX-License-Identifier: Apache-2.0
"""The 4 KiB header in front of each slot's payload: which block the slot holds. Pure, no I/O.

Layout, little-endian::

      0  magic 8, format version u16, checksum kind u8, 0 u8, rank u16, rank count u16, key length u16, 6 zeros
     24  generation u64, epoch u64, payload bytes u64, fingerprint 32, key 128 (zero padded)
    208  payload checksum 16, parent length u16 (0: none), 6 zeros, parent key 128 (zero padded)
    360  zeros
   4088  xxh3_64 of the 4088 bytes before it, u64

Magic, version and the last field keep their place in every format version. What a reader knows
beforehand lies together at the front, so that ``check_slot`` compares it in one go. Of the checksum's
kind it knows nothing: a slot is verified by the kind that it names, whoever wrote it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvdisk.blocks import MAX_KEY_BYTES, BlockKey
from kvdisk.errors import CorruptRecord, GeometryMismatch
from kvdisk.geometry import FINGERPRINT_BYTES, FORMAT_VERSION, HEADER_BYTES, Namespace
from kvdisk.messages import Reason

XXH3_128 = 1
"""The checksum kind of processors: the fastest there."""
MULTILINEAR = 2
"""The checksum kind that a GPU computes too; see ``device/checksum.py``."""
CHECKSUM_KINDS = (XXH3_128, MULTILINEAR)
"""Every other number is reserved."""
CHECKSUM_BYTES = 16

MAGIC = b"KVDSLOT\0"
_IDENTITY = struct.Struct(f"<8sHBxHHH6xQQQ{FINGERPRINT_BYTES}s{MAX_KEY_BYTES}s")
_REST = struct.Struct(f"<{CHECKSUM_BYTES}sH6x{MAX_KEY_BYTES}s")
_HEADER_SUM = struct.Struct("<Q")
_KIND_OFFSET = 10
_REST_OFFSET = _IDENTITY.size
_CHECKSUM_END = _REST_OFFSET + CHECKSUM_BYTES
_ZEROS_OFFSET = _REST_OFFSET + _REST.size
HEADER_SUM_OFFSET = HEADER_BYTES - _HEADER_SUM.size
_ZEROS = bytes(HEADER_SUM_OFFSET - _ZEROS_OFFSET)


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot says about itself. ``checksum``: of exactly ``payload_bytes`` bytes, 16 bytes long."""

    namespace: Namespace
    key: BlockKey
    generation: int
    parent: BlockKey | None
    payload_bytes: int
    rank: int
    rank_count: int
    checksum: bytes
    checksum_kind: int = XXH3_128


def payload_checksum(payload: memoryview, kind: int = XXH3_128) -> bytes:
    """Return the checksum of a payload, 16 bytes. ``kind``: one of CHECKSUM_KINDS."""
    if kind == XXH3_128:
        return xxh3_128_digest(payload)
    assert kind == MULTILINEAR, kind
    from kvdisk.device.checksum import multilinear_digest  # with numpy, which the tools do without

    return multilinear_digest(payload)


def write_header(view: memoryview, header: SlotHeader) -> None:
    """Fill the first ``HEADER_BYTES`` of ``view``, all of them. Any thread that owns the bytes."""
    assert header.checksum_kind in CHECKSUM_KINDS, "other checksum kinds are reserved"
    assert len(header.checksum) == CHECKSUM_BYTES
    identity = _identity(
        header.namespace,
        header.key,
        header.generation,
        header.payload_bytes,
        header.rank,
        header.rank_count,
        header.checksum_kind,
    )
    _fill(view, identity, header.checksum, header.parent)


def seal_slot(
    slot_view: memoryview,
    *,
    namespace: Namespace,
    key: BlockKey,
    generation: int,
    parent: BlockKey | None,
    payload_bytes: int,
    rank: int,
    rank_count: int,
    kind: int = XXH3_128,
) -> None:
    """Write the header of a slot whose payload, ``payload_bytes`` behind the header, is already in place."""
    assert len(slot_view) >= HEADER_BYTES + payload_bytes
    checksum = payload_checksum(slot_view[HEADER_BYTES : HEADER_BYTES + payload_bytes], kind)
    _fill(slot_view, _identity(namespace, key, generation, payload_bytes, rank, rank_count, kind), checksum, parent)


def check_slot(
    slot_view: memoryview,
    *,
    namespace: Namespace,
    key: BlockKey,
    generation: int,
    payload_bytes: int,
    rank: int,
    rank_count: int,
) -> Reason | None:
    """Verify a slot in memory, before any byte of it is served. Any thread that owns the bytes.

    Returns ``Reason.HEADER`` unless the header is sound and is that of this block, else ``Reason.CHECKSUM``
    unless the ``payload_bytes`` behind it have their checksum, else None.
    """
    assert len(slot_view) >= HEADER_BYTES + payload_bytes
    named = named_checksum(
        slot_view[:HEADER_BYTES],
        namespace=namespace,
        key=key,
        generation=generation,
        payload_bytes=payload_bytes,
        rank=rank,
        rank_count=rank_count,
    )
    if named is None:
        return Reason.HEADER
    kind, checksum = named
    if payload_checksum(slot_view[HEADER_BYTES : HEADER_BYTES + payload_bytes], kind) != checksum:
        return Reason.CHECKSUM
    return None


def named_checksum(
    header_view: memoryview,
    *,
    namespace: Namespace,
    key: BlockKey,
    generation: int,
    payload_bytes: int,
    rank: int,
    rank_count: int,
) -> tuple[int, bytes] | None:
    """Return kind and value of the payload's checksum, as a header names them that is sound and that of this block.

    None for any other header: the slot must not be used. Any thread that owns the ``HEADER_BYTES`` bytes.
    """
    head = bytes(header_view[:HEADER_BYTES])
    kind = head[_KIND_OFFSET]
    if (
        kind not in CHECKSUM_KINDS
        or not head.startswith(_identity(namespace, key, generation, payload_bytes, rank, rank_count, kind))
        or xxh3_64_intdigest(head[:HEADER_SUM_OFFSET]) != _HEADER_SUM.unpack_from(head, HEADER_SUM_OFFSET)[0]
    ):
        return None
    return kind, head[_REST_OFFSET:_CHECKSUM_END]


def read_header(view: memoryview) -> SlotHeader:
    """Decode the first ``HEADER_BYTES`` of ``view``.

    Raises CorruptRecord where they are no sound header, GeometryMismatch where another format version
    wrote them. The payload is not looked at.
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
    return SlotHeader(
        namespace=Namespace(fingerprint, epoch),
        key=BlockKey(key[:key_length]),
        generation=generation,
        parent=BlockKey(parent[:parent_length]) if parent_length else None,
        payload_bytes=payload_bytes,
        rank=rank,
        rank_count=rank_count,
        checksum=checksum,
        checksum_kind=kind,
    )


def _identity(
    namespace: Namespace, key: BlockKey, generation: int, payload_bytes: int, rank: int, rank_count: int, kind: int
) -> bytes:
    """Return the bytes of a header before its payload checksum."""
    assert 0 < len(key) <= MAX_KEY_BYTES  # struct would cut a longer string silently
    assert len(namespace.fingerprint) == FINGERPRINT_BYTES
    return _IDENTITY.pack(
        MAGIC,
        FORMAT_VERSION,
        kind,
        rank,
        rank_count,
        len(key),
        generation,
        namespace.epoch,
        payload_bytes,
        namespace.fingerprint,
        key,
    )


def _fill(view: memoryview, identity: bytes, checksum: bytes, parent: BlockKey | None) -> None:
    parent = parent or BlockKey(b"")
    assert len(parent) <= MAX_KEY_BYTES
    view[:_REST_OFFSET] = identity
    view[_REST_OFFSET:_ZEROS_OFFSET] = _REST.pack(checksum, len(parent), parent)
    view[_ZEROS_OFFSET:HEADER_SUM_OFFSET] = _ZEROS
    _HEADER_SUM.pack_into(view, HEADER_SUM_OFFSET, xxh3_64_intdigest(view[:HEADER_SUM_OFFSET]))
