# SPDX-License-Identifier: Apache-2.0
"""Keys as numbers, for tables by hash. Pure.

What is remembered, and so who leaves, must not differ from process to process, as Python's ``hash`` of bytes does. A
key is a hash already; that of a few letters is spread too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

from kvdisk.blocks import BlockKey

_PRIME = 0x1D3A5C7E9B1F247D
_FOOT = b"\1\0\0\0\0\0\0\0"
"""Before the bytes of a key, so that a short one, too, is larger than the prime."""
_from_bytes: Any = int.from_bytes


def number_of(key: BlockKey) -> int:
    """Return a key's number, of nearly 61 bits."""
    return int.from_bytes(_FOOT + key, "little") % _PRIME


def numbers_of(keys: Iterable[BlockKey]) -> Iterator[int]:
    """Yield each key's number: no Python call for each."""
    return map(_PRIME.__rmod__, map(_from_bytes, map(_FOOT.__add__, keys), repeat("little")))
