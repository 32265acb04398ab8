# SPDX-License-Identifier: Apache-2.0
"""The nouns that every floor shares: keys, tiers, slots, jobs."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, IntEnum
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, NewType, TypeVar

BlockKey = NewType("BlockKey", bytes)
"""vLLM's block hash, followed by the KV-cache group index as two big-endian bytes."""

JobId = NewType("JobId", int)

GROUP_BYTES = 2
MAX_KEY_BYTES = 128
"""The longest key that a slot header and an index record can hold (sha256 hashes make 34 bytes)."""
LATEST_S = 2**32 - 1
"""The last second since the Unix epoch that a record can hold: in the year 2106."""
AHEAD_S = 60
"""Seconds by which a time may lie ahead of the clock without a word: clocks of two hosts differ,
and are corrected."""


def in_record_s(time_s: float) -> int:
    """Return a time, in seconds since the Unix epoch, as a record can hold it."""
    return min(max(int(time_s), 0), LATEST_S)


class Medium(Enum):
    """What a tier keeps copies in, and how a worker reaches them.

    ``MEMORY``: slots of an arena that each rank has. ``FILES``: slots of segment files on drives.
    ``OBJECTS``: objects of a store that names blocks by key. The tiers that kvdisk itself keeps are
    MEMORY or FILES.
    """

    GPU = 0
    MEMORY = 1
    FILES = 2
    OBJECTS = 3


class Tier(IntEnum):
    """A place where a copy of a block can be. The order is from the fastest to the slowest, and
    counts.

    ``word``: the tier's name for people. ``label``: its name in metrics and in JSON.
    """

    word: str
    label: str
    medium: Medium

    GPU = 0, "GPU", Medium.GPU
    CPU = 1, "CPU", Medium.MEMORY
    NVME = 2, "NVMe", Medium.FILES
    REMOTE = 3, "remote", Medium.OBJECTS

    def __new__(cls, number: int, word: str, medium: Medium) -> Tier:
        """Return a member made of its three values."""
        tier = int.__new__(cls, number)
        tier._value_, tier.word, tier.label, tier.medium = number, word, word.lower(), medium
        return tier


KEPT_TIERS = tuple(tier for tier in Tier if tier.medium in {Medium.MEMORY, Medium.FILES})
"""The tiers that kvdisk keeps copies in, the fastest first."""
HIT_TIERS = tuple(tier for tier in Tier if tier.medium is not Medium.GPU)
"""The tiers that hits are loaded from, the fastest first."""


_add: Any = bytes.__add__


class Slot(NamedTuple):
    """A numbered place of fixed size in a tier. The same number names the same place on every rank.

    On NVMe ``segment`` is a segment's number. In the CPU tier it is the size class of the arena
    region (see ``geometry.Geometry.size_classes``).
    """

    segment: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which no slot needs


_RecordT = TypeVar("_RecordT", bound=tuple[Any, ...])


def records_of(kind: type[_RecordT], rows: Iterable[tuple[Any, ...]]) -> list[_RecordT]:
    """Return named tuples of these rows, each with all of its fields; quicker than one by one."""
    return list(map(partial(tuple.__new__, kind), rows))


BY_KEY = Slot(0, 0)
"""The slot of every block in a tier that names blocks by key."""
BY_KEY_OVER = Slot(0, 1)
"""As BY_KEY, for a block that is to replace what is there."""


def make_block_key(block_hash: bytes, group: int) -> BlockKey:
    """Return the key of the block with this vLLM hash in KV-cache group ``group`` (0 <= group <
    65536)."""
    return BlockKey(block_hash + group.to_bytes(GROUP_BYTES, "big"))


def make_block_keys(block_hashes: Iterable[bytes], group: int) -> list[BlockKey]:
    """Return the key of each block with one of these hashes: faster than one by one."""
    return with_key_end(block_hashes, key_end(group))


def key_end(group: int) -> bytes:
    """Return what the keys of a KV-cache group end with."""
    return group.to_bytes(GROUP_BYTES, "big")


def with_key_end(block_hashes: Iterable[bytes], end: bytes) -> list[BlockKey]:
    """Return what ``make_block_keys`` does, of a group whose ``key_end`` is known."""
    return list(map(_add, block_hashes, repeat(end)))


def groups_of(keys: Iterable[BlockKey]) -> list[int]:
    """Return ``group_of`` each key; quicker than one by one."""
    ends = [key[-GROUP_BYTES:] for key in keys]
    numbers = {end: int.from_bytes(end, "big") for end in set(ends)}
    return list(map(numbers.__getitem__, ends))


def group_of(key: BlockKey) -> int:
    """Return the KV-cache group index in a key."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")
