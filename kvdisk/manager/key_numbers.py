# SPDX-License-Identifier: Apache-2.0
"""Keys as numbers, for tables by hash. Pure.

What is remembered, and so who leaves, must not differ from process to process, as Python's ``hash`` of bytes does. A
key is a hash already, but which of its bytes are spread evenly depends on who made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from xxhash import xxh3_64_intdigest

from kvdisk.blocks import BlockKey

number_of: Callable[[BlockKey], int] = xxh3_64_intdigest
"""Return a key's number, of 64 bits."""


def numbers_of(keys: Iterable[BlockKey]) -> Iterator[int]:
    """Yield each key's number, of 64 bits: no Python call for each."""
    return map(number_of, keys)
