# SPDX-License-Identifier: Apache-2.0
"""Reads slots of a segment file in long reads, and checks them as a load does. Writes nothing; for
the tools."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvdisk.blocks import BlockKey
from kvdisk.device.header import SlotIdentity, check_slot, read_header
from kvdisk.device.segment import SegmentFile
from kvdisk.errors import CorruptRecord, GeometryMismatch
from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, Namespace, contiguous_runs, slot_offset
from kvdisk.messages import Reason

READ_BYTES = 8 << 20
"""The longest read, unless a slot is longer."""


class NamedSlot(NamedTuple):
    """A slot as an index names it. ``payload_bytes``: of its block, on one rank."""

    number: int
    namespace: Namespace
    key: BlockKey
    generation: int
    parent: BlockKey | None
    payload_bytes: int


class WrongSlot(NamedTuple):
    """A slot that must not be used.

    ``check``: "read" (it cannot be read), "header" (it has no sound one), "version", "checksum" (of
    the payload), or the field of the header that says something else: "namespace", "epoch", "key",
    "generation", "payload_bytes", "rank", "rank_count", "parent". ``what``: the same in words.
    """

    slot: NamedSlot
    check: str
    what: str


def read_memory(slot_bytes: int) -> mmap.mmap:
    """Return memory for ``check_slots``, aligned for O_DIRECT."""
    return mmap.mmap(-1, max(READ_BYTES, slot_bytes))


def check_slots(
    file: SegmentFile, rank_count: int, slots: Sequence[NamedSlot], memory: mmap.mmap
) -> Iterator[WrongSlot]:
    """Yield those of ``slots``, ascending by number, that are wrong. Any thread; ``memory`` is its
    own meanwhile."""
    assert len(memory) >= file.slot_bytes and file.slot_bytes % ALIGNMENT == 0
    view = memoryview(memory)
    for first, count in contiguous_runs([slot.number for slot in slots], len(memory) // file.slot_bytes):
        run = slots[first : first + count]
        place = view[: count * file.slot_bytes]
        if _read(file.fd, place, slot_offset(file.slot_bytes, run[0].number)) is None:
            for position, slot in enumerate(run):
                at = place[position * file.slot_bytes : (position + 1) * file.slot_bytes]
                yield from _check(at, slot, file.rank, rank_count)
            continue
        for slot in run:  # which of them it is
            at = view[: file.slot_bytes]
            why = _read(file.fd, at, slot_offset(file.slot_bytes, slot.number))
            if why is not None:
                yield WrongSlot(slot, "read", why)
            else:
                yield from _check(at, slot, file.rank, rank_count)


def _read(fd: int, place: memoryview, offset: int) -> str | None:
    """Fill ``place``; return what went wrong."""
    done = 0
    while done < len(place):
        try:
            count = os.preadv(fd, [place[done:]], offset + done)
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        done += count
        if done < len(place) and os.fstat(fd).st_size <= offset + done:
            return "the file ends within it"
    return None


def _check(view: memoryview, slot: NamedSlot, rank: int, rank_count: int) -> Iterator[WrongSlot]:
    identity = SlotIdentity(slot.namespace, slot.key, slot.generation, slot.payload_bytes, rank, rank_count)
    reason = check_slot(view, identity)
    if reason is Reason.CHECKSUM:
        yield WrongSlot(slot, "checksum", "its payload does not have the checksum that its header names")
    elif reason is not None:
        yield WrongSlot(slot, *_why(view, identity))
    elif (parent := read_header(view).parent) != slot.parent:
        yield WrongSlot(slot, "parent", f"its header names the parent {_shown(parent)}, not {_shown(slot.parent)}")


def _why(view: memoryview, wanted: SlotIdentity) -> tuple[str, str]:
    """Say what is wrong with a header that is not that of this block."""
    if not any(view[:HEADER_BYTES]):
        return "header", "its header is all zeros: it was never written, or lost"
    try:
        found = read_header(view).identity
    except CorruptRecord as error:
        return "header", f"it has no sound header ({str(error).removeprefix('slot header: ')})"
    except GeometryMismatch as error:
        return "version", str(error).removeprefix("slot header: ")
    names = ("namespace", "epoch", *SlotIdentity._fields[1:])
    fields: Iterator[tuple[str, bytes | int, bytes | int]] = zip(
        names, (*found.namespace, *found[1:]), (*wanted.namespace, *wanted[1:]), strict=True
    )
    for name, said, due in fields:
        if said != due:
            return name, f"its header names the {name} {_shown(said)}, not {_shown(due)}"
    return "header", "its header has other bytes between its fields than it should"


def _shown(value: bytes | int | None) -> str:
    if value is None:
        return "none"
    return value.hex() if isinstance(value, bytes) else str(value)
