# SPDX-License-Identifier: Apache-2.0
"""LMCache's objects as blocks of a store: each is cut into pieces of three sizes.

A store has to know the sizes of its blocks when it is opened. LMCache has objects of any size: one
for each object group of each model, which it tells when the first request comes. So the sizes are
those of the pieces, which no model changes: one store has objects of every size, under one cap.

Pieces are a chain, from an object's last to its first, and objects of a prompt follow each other. A
block leaves before its parent does: where an object's first piece is there, the others are, and so
a lookup asks for that one alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvdisk.blocks import BlockKey, make_block_key
from kvdisk.errors import ConfigError
from kvdisk.geometry import ALIGNMENT
from kvdisk.store import BlockKind, Rows

SIZES = LARGE_BYTES, MIDDLE_BYTES, SMALL_BYTES = (2 << 20, 256 << 10, 64 << 10)
"""The bytes of pieces. A piece costs about the same whatever its size, so most bytes go in large
ones, and an object in as few as it can."""
KINDS = tuple(BlockKind(size, element_bytes=2) for size in SIZES)
"""Small pieces begin with a thirtieth of the drive, middle ones with a ninth, and each gets more as
it needs it. Objects of any type come later: elements are taken to be of 2 bytes, as most models'
are."""
NAME_BYTES = 32
"""Bytes of an object's name, which the keys of its pieces begin with."""
_LAYOUT_BYTES = 16


class Piece(NamedTuple):
    """``suffix``: what its key has behind the object's name. ``offset``: where it begins in the
    object, in bytes."""

    suffix: bytes
    offset: int


class Layout(NamedTuple):
    """How objects of one kind lie in memory, and are cut. ``pieces``: from the first to the last;
    () where such an object is too small. ``taken_bytes``: what it takes of memory, the alignment
    behind it included."""

    size_bytes: int
    taken_bytes: int
    pieces: tuple[Piece, ...]

    def keys(self, name: bytes) -> list[BlockKey]:
        """Return the keys of an object's pieces, from the first to the last."""
        return [BlockKey(name + piece.suffix) for piece in self.pieces]


def layout_of(shapes: Sequence[Any], dtypes: Sequence[Any], pitch: int) -> Layout:
    """Return the layout of an object with these tensors, one behind the other. ``pitch``: in bytes;
    see ``ArenaRows``."""
    tensors = [(tuple(map(int, shape)), str(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
    sizes = [math.prod(shape) * dtype.itemsize for (shape, _), dtype in zip(tensors, dtypes, strict=True)]
    size = sum(sizes)
    taken = -(-size // pitch) * pitch
    # Pieces are other bytes where objects are cut elsewhere: all that decides it is in their keys.
    text = repr((tensors, taken, SIZES))
    tag = hashlib.sha256(text.encode()).digest()[:_LAYOUT_BYTES]
    cuts = _cuts(taken)
    places = [
        Piece(make_block_key(tag + at.to_bytes(4, "big"), kind), offset) for at, (kind, offset) in enumerate(cuts)
    ]
    return Layout(size, taken, tuple(places))


def _cuts(size: int) -> Iterable[tuple[int, int]]:
    """Return the kind and offset of each piece. The last one ends where the object does, and
    overlaps the one before it: both have the same bytes there."""
    if size < SMALL_BYTES:
        return []
    cuts, whole = list[tuple[int, int]](), 0
    for kind, piece in enumerate(SIZES):
        count = (size - whole) // piece
        cuts += [(kind, whole + at * piece) for at in range(count)]
        whole += count * piece
    return cuts if whole == size else [*cuts, (len(SIZES) - 1, size - SMALL_BYTES)]


class ArenaRows:
    """LMCache's memory as the rows of a store: one begins at every ``pitch`` bytes, so that a piece
    is a row wherever it lies. Rows overlap, and the last ones reach beyond the memory; only the
    bytes of a piece are ever touched.

    ``memory``: the rows. The memory stays LMCache's, and must live until the store is closed.
    Raises ConfigError where there is none.
    """

    def __init__(self, l1_memory_desc: Any) -> None:
        if l1_memory_desc is None:
            raise ConfigError("kvdisk needs LMCache's first level in host memory: leave out --gds-l1-path.")
        self._base, self._size = int(l1_memory_desc.ptr), int(l1_memory_desc.size)
        # LMCache: an object begins at a multiple of the alignment, and no other has the bytes up to
        # the next one.
        self.pitch = math.gcd(int(l1_memory_desc.align_bytes) or ALIGNMENT, ALIGNMENT)
        if self._size < SMALL_BYTES:
            raise ConfigError("kvdisk needs more memory of LMCache's first level than one piece of an object.")
        flat = np.ctypeslib.as_array((ctypes.c_uint8 * self._size).from_address(self._base))
        shape, strides = (self._size // self.pitch, LARGE_BYTES), (self.pitch, 1)
        self.memory: Rows = np.lib.stride_tricks.as_strided(flat, shape, strides)

    def rows_of(self, address: int, layout: Layout) -> list[int] | None:
        """Return the row of each piece of an object; None: it does not lie in this memory."""
        offset = address - self._base
        if offset < 0 or offset % self.pitch or offset + layout.taken_bytes > self._size:
            return None
        return [(offset + piece.offset) // self.pitch for piece in layout.pieces]
