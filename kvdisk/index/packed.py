# SPDX-License-Identifier: Apache-2.0
"""Encoded records, as the process has them that maps LMDB files: bytes, whatever they say.

That process imports no numpy, which takes most of a start, and its memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import NamedTuple


class Table(IntEnum):
    """Whether a record is of a block or of a segment."""

    BLOCKS = 0
    SEGMENTS = 1


class Operation(NamedTuple):
    """One record to put, or to delete where ``value`` is None."""

    table: Table
    key: bytes
    value: bytes | None

    @property
    def droppable(self) -> bool:
        """Whether a failed commit may drop it: only puts of blocks may be dropped."""
        return self.value is not None and self.table is Table.BLOCKS


class Packed(NamedTuple):
    """Encoded records of one table, ascending: the bytes of all keys, joined, those of all values,
    and the length of each key and value, as unsigned ints. Many records are one object, and quick
    to send."""

    keys: bytes
    key_bytes: array[int]
    values: bytes
    value_bytes: array[int]

    @classmethod
    def of(cls, keys: Sequence[bytes], values: Sequence[bytes]) -> Packed:
        """Return these records, packed."""
        return cls(b"".join(keys), array("I", map(len, keys)), b"".join(values), array("I", map(len, values)))

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield each record's key and value."""
        return zip(_split(self.keys, self.key_bytes), _split(self.values, self.value_bytes), strict=True)


def _split(text: bytes, lengths: array[int]) -> Iterator[bytes]:
    return (text[start:end] for start, end in pairwise(accumulate(lengths, initial=0)))


def segment_key_in(value: bytes) -> bytes:
    """Return the key of the segment's record that the value of a block's record names."""
    return value[1:5]
