# SPDX-License-Identifier: Apache-2.0
"""The sizes that are fixed for a namespace, and the arithmetic from slots to bytes. Pure; no
I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from kvdisk.errors import ConfigError

FORMAT_VERSION = 1
ALIGNMENT = 4096
"""O_DIRECT alignment, in bytes, of memory, offsets and lengths."""
HEADER_BYTES = 4096
"""Bytes of the header in front of each slot's payload, on the drive and in the arena alike."""
SEGMENT_HEADER_BYTES = 4096
SEGMENT_OVERHEAD_BYTES = 16384
"""Bytes that a segment file takes beside header and slots: a file system's list of extents, and a
share of the directories."""
USES_RECORD_BYTES = 16
"""Bytes of one block's record in an engine store's USES file."""
FINGERPRINT_BYTES = 32
LEAST_FILLED = 0.8
"""The least share of a KV group's slot that a recurrent state must fill to get slots of the same
size."""
AUTO = "auto"
"""The value of ``unit_tokens`` for units that are chosen by the longest prompt and the tiers' room:
see ``in_units``."""
OFF = "off"
"""The value of ``unit_tokens`` for the engine's own blocks."""
MOST_UNITS = 8192
"""The most units of the longest prompt with ``AUTO``, in all groups together, as far as other
limits allow."""
MOST_UNIT_TOKENS = 128
"""The most tokens of a unit with ``AUTO``: a hit ends with a unit, so that it loses half of one
(``docs/decisions``, 54)."""
LEAST_UNITS = 400
"""The fewest units of a group that each tier has room for with ``AUTO``."""
MOST_UNIT_BYTES = 16 << 20
"""The most bytes of one rank's shard of any unit: staging and a GPU's scratch hold several
slots."""
EPOCH_LIMIT = 2**63
FILE_EPOCH = 0
"""The epoch of KV computed with the weights in the files. Any other epoch is private to one
engine."""


def uses_bytes_for(slot_count: int) -> int:
    """Return the bytes that the USES file of an engine store with so many slots can take: twice its
    length, as while it is replaced."""
    return 2 * (ALIGNMENT + round_up(USES_RECORD_BYTES * slot_count, ALIGNMENT))


class Namespace(NamedTuple):
    """All blocks whose bytes mean the same: a fingerprint (32 bytes) and an epoch (0 <= epoch <
    EPOCH_LIMIT)."""

    fingerprint: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One KV-cache group.

    ``block_tokens``: tokens of a block. ``payload_bytes``: one block's KV on one rank, in all
    layers of the group; with pipeline parallelism, on the stage that has most of it, and the others
    pad to that. ``gpu_blocks``: how many of the engine's blocks, one after the other, are one block
    here; its payload is their payloads, one after the other. ``window_tokens``: the sliding window,
    with what the engine keeps behind it; None: there is none. ``volatile_tokens``: the KV of a
    token also depends on this many tokens after it (a drafter's layers), so that a block's hash
    does not determine the KV of its last ones. ``chunk_tokens``: the chunk of chunked local
    attention; None: another kind. ``prompt_only``: generated tokens see less than those of a
    prompt, so that their hash does not determine their KV. ``state_tokens``: the group keeps
    recurrent states, about one in so many tokens. A block is then the state after its last token,
    and serves without the blocks before it, which is a window of 2. None: the group keeps KV.
    ``least_bytes``: the least payload that a slot has room for. ``element_bytes``: of one element
    of the payload; 1 where they differ, or nobody knows. ``piece_bytes``: of a block that lies in
    pieces in the engine's memory, the bytes of each; empty: it lies in one.

    ``reads_all``: whether a token reads all tokens before it. ``volatile_blocks``: how many blocks
    behind a hit must be there too: they determine the KV of its last tokens. Each lookup asks for
    both.
    """

    group: int
    block_tokens: int
    payload_bytes: int
    window_tokens: int | None = None
    volatile_tokens: int = 0
    chunk_tokens: int | None = None
    prompt_only: bool = False
    state_tokens: int | None = None
    least_bytes: int = 0
    gpu_blocks: int = 1
    element_bytes: int = 1
    piece_bytes: tuple[int, ...] = ()
    reads_all: bool = field(init=False, repr=False, compare=False)
    volatile_blocks: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads_all", self.window_tokens is None and self.chunk_tokens is None)
        object.__setattr__(self, "volatile_blocks", -(-self.volatile_tokens // self.block_tokens))

    @property
    def pieces(self) -> tuple[int, ...]:
        """The bytes of each piece in which a block lies in the engine's memory."""
        return self.piece_bytes or (self.payload_bytes,)

    @property
    def gpu_block_tokens(self) -> int:
        """Tokens of one of the engine's blocks."""
        return self.block_tokens // self.gpu_blocks

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: header plus payload, a multiple of ``ALIGNMENT``."""
        return HEADER_BYTES + round_up(max(self.payload_bytes, self.least_bytes), ALIGNMENT)

    @property
    def tokens_each(self) -> int:
        """Tokens of a prompt for each block of it that is kept."""
        return self.state_tokens or self.block_tokens

    def first_read(self, tokens: int) -> int:
        """Return the first token that the token at ``tokens`` reads.

        vLLM: the same for every kind of group (``get_num_skipped_tokens``). It allocates no block
        that is wholly before that token, and frees those that it has.
        """
        if self.window_tokens is not None:
            return max(0, tokens - self.window_tokens + 1)
        return tokens // self.chunk_tokens * self.chunk_tokens if self.chunk_tokens is not None else 0


@dataclass(frozen=True)
class Geometry:
    """The sizes of one engine's blocks.

    ``groups``: in order of their index, 0, 1, ... ``rank_count``: workers, each with its own shard
    of a block. ``hash_tokens``: tokens that one of vLLM's block hashes covers; each group's
    ``block_tokens`` is a multiple. ``replicated``: the KV is the same on every rank (MLA under
    tensor parallelism): a block has one shard on each host, which each rank keeps in memory and
    one of them writes to the drive, for those of its host to read. ``hosts``: machines that the
    ranks may lie on, as many on each, one after the other.
    """

    groups: tuple[GroupGeometry, ...]
    rank_count: int
    hash_tokens: int
    replicated: bool = False
    hosts: int = 1

    def __post_init__(self) -> None:
        assert self.groups and self.rank_count > 0 and self.hash_tokens > 0
        assert self.hosts > 0 and self.rank_count % self.hosts == 0
        for position, group in enumerate(self.groups):
            assert group.group == position, "groups must be numbered 0, 1, ..."
            assert group.block_tokens % self.hash_tokens == 0 and group.payload_bytes >= 0

    @property
    def shard_count(self) -> int:
        """Shards of a block that are on the drive, each in a file of its own."""
        return self.rank_count // self.ranks_of_shard

    @property
    def ranks_of_shard(self) -> int:
        """How many ranks, one after the other, have the same shard of a block."""
        return self.rank_count // self.hosts if self.replicated else 1

    def shard_of(self, rank: int) -> int:
        """Return which shard of each block a rank has."""
        return rank // self.ranks_of_shard

    def writes(self, rank: int, segment: int) -> bool:
        """Return whether a rank makes, writes and removes its shard's file of a segment; the others
        only read it."""
        return segment % self.ranks_of_shard == rank % self.ranks_of_shard

    @cached_property
    def slot_sizes(self) -> tuple[int, ...]:
        """The distinct slot sizes in bytes, ascending. The position of a size is its size class."""
        return tuple(sorted({group.slot_bytes for group in self.groups}))

    @cached_property
    def size_classes(self) -> tuple[int, ...]:
        """The size class of each group, by group index."""
        return tuple(self.slot_sizes.index(group.slot_bytes) for group in self.groups)

    def beside(self, group: int) -> list[GroupGeometry]:
        """Return which groups a hit needs beside a recurrent state of this group, where it ends:
        KV first, then the states of groups before it."""
        states = [other for other in self.groups[:group] if other.state_tokens is not None]
        return [other for other in self.groups if other.reads_all] + states

    @cached_property
    def alignment_tokens(self) -> int:
        """Tokens of the shortest prefix that ends with a block of every group."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """The share of a tier's bytes for each size class: the bytes that its groups need per
        token, normalised to a sum of 1.

        A sliding-window group counts like a full one, so that no group starves another. Only those
        recurrent states count that are kept.
        """
        per_class = [0.0] * len(self.slot_sizes)
        for group, size_class in zip(self.groups, self.size_classes, strict=True):
            per_class[size_class] += group.slot_bytes / group.tokens_each
        total = sum(per_class)
        return tuple(weight / total for weight in per_class)

    def memory_slots(self, size: int) -> tuple[int, ...]:
        """Return the slots of a tier in memory by size class, the same on each rank, for ``size``
        bytes over all ranks."""
        per_rank = size / self.rank_count
        return tuple(int(per_rank * share) // size for share, size in zip(self.shares, self.slot_sizes, strict=True))

    def tokens_in(self, slots: Sequence[int]) -> int:
        """Return the tokens of the longest prompt all of whose kept blocks fit into ``slots``, by
        size class."""
        per_token = [0.0] * len(slots)
        for group, size_class in zip(self.groups, self.size_classes, strict=True):
            per_token[size_class] += 1 / group.tokens_each
        tokens = int(min(count / needed for count, needed in zip(slots, per_token, strict=True)))
        return tokens - tokens % self.alignment_tokens


def share_slots(groups: Sequence[GroupGeometry]) -> tuple[GroupGeometry, ...]:
    """Give recurrent states the slot size of the KV group whose blocks are a little larger, if
    there is one.

    With one size class, states and KV each take as much room as prompts need. vLLM: it pads a state
    to the page of the attention beside it, so this is the usual case. A state must fill
    ``LEAST_FILLED`` of the slot.
    """
    sizes = sorted(group.payload_bytes for group in groups if group.state_tokens is None)
    found = []
    for group in groups:
        least = next((size for size in sizes if LEAST_FILLED * size <= group.payload_bytes <= size), 0)
        found.append(group if group.state_tokens is None else replace(group, least_bytes=least))
    return tuple(found)


class UnitChoice(NamedTuple):
    """What decides how many of the engine's blocks are one.

    ``unit_tokens``: the setting. ``longest_tokens``: of the longest prompt that the engine takes.
    ``memory_bytes``: of each tier in memory, over all ranks. ``drive_bytes``: of what limits the
    tier on the drives, over all shards. 0: no such tier, or no limit.
    """

    unit_tokens: int | str = OFF
    longest_tokens: int = 0
    memory_bytes: tuple[int, ...] = ()
    drive_bytes: tuple[int, ...] = ()

    def of(self, geometry: Geometry) -> Geometry:
        """Return the sizes of an engine's blocks in units. ``geometry``: with the engine's own
        blocks. Raises ConfigError where a number fits no group."""
        rooms = [size // geometry.rank_count for size in self.memory_bytes]
        rooms += [size // geometry.shard_count for size in self.drive_bytes]
        groups = in_units(geometry.groups, self.unit_tokens, self.longest_tokens, [room for room in rooms if room])
        return replace(geometry, groups=share_slots(groups))


OWN_BLOCKS = UnitChoice()
"""The engine's own blocks."""


def in_units(
    groups: Sequence[GroupGeometry], unit_tokens: int | str, longest_tokens: int = 0, rooms: Sequence[int] = ()
) -> tuple[GroupGeometry, ...]:
    """Return the groups with blocks that are units: several of the engine's blocks, of
    ``unit_tokens`` tokens together. ``OFF``: the groups as they are.

    With ``AUTO`` units grow, in powers of two, until a prompt of ``longest_tokens`` has
    ``MOST_UNITS`` of them at most. They stop at ``MOST_UNIT_TOKENS``, and where a tier would have
    room for fewer than ``LEAST_UNITS`` of a group. All groups' units end together. ``rooms``: the
    bytes of each tier for one shard of its blocks.

    Some groups keep the engine's blocks: recurrent states; groups whose blocks are as large, or do
    not divide ``unit_tokens``; groups whose units would have more than ``MOST_UNIT_BYTES``; and
    groups that read less than two units. The engine frees a block when nobody reads its tokens any
    more, and all of a unit must be there when its last token is known. All do where a unit would
    not end with each block of recurrent states: a hit must end with both, and of a prompt the
    engine may keep one state alone. With ``AUTO`` a drafter's group does, too: its hits would lose
    a unit more. Raises ConfigError where a number fits no group.
    """
    if unit_tokens == OFF:
        return tuple(groups)
    ends = math.gcd(*(group.block_tokens for group in groups if group.state_tokens is not None))  # 0: no states
    if unit_tokens == AUTO:
        return _as_few_units(groups, ends, longest_tokens, rooms)
    wanted = int(unit_tokens)
    counts = [wanted // group.block_tokens if wanted % group.block_tokens == 0 else 0 for group in groups]
    if not any(_may_have(group, count) for group, count in zip(groups, counts, strict=True)):
        sizes = " or ".join(map(str, sorted({group.block_tokens for group in groups})))
        raise ConfigError(
            f"unit_tokens {wanted} fits no KV-cache group of this model, whose blocks have {sizes} tokens: it must be "
            "a multiple of that, at most half of what a sliding window reads, and have at most "
            f"{MOST_UNIT_BYTES >> 20} MiB on a rank; '{AUTO}' finds one, '{OFF}' keeps vLLM's blocks."
        )
    if ends % wanted:
        return tuple(groups)
    return tuple(
        _unit_of(group, count if _may_have(group, count) else 1) for group, count in zip(groups, counts, strict=True)
    )


def _as_few_units(
    groups: Sequence[GroupGeometry], ends: int, longest_tokens: int, rooms: Sequence[int]
) -> tuple[GroupGeometry, ...]:
    """Return the groups with the units that ``AUTO`` chooses. ``ends``: tokens that each unit must
    divide; 0: any."""
    found, tokens = tuple(groups), min(group.block_tokens for group in groups)
    while sum(-(-longest_tokens // group.tokens_each) for group in found) > MOST_UNITS and tokens < MOST_UNIT_TOKENS:
        tokens *= 2
        larger = _of_tokens(groups, ends, min(tokens, MOST_UNIT_TOKENS))
        if larger != found and min(_units_in(larger, room) for room in (*rooms, math.inf)) < LEAST_UNITS:
            break
        found = larger
    return found


def _of_tokens(groups: Sequence[GroupGeometry], ends: int, tokens: int) -> tuple[GroupGeometry, ...]:
    """Return the groups with units of at most so many tokens, a power of two of the engine's
    blocks. Those of all groups end together."""
    aligned = math.lcm(*(group.block_tokens for group in groups))
    ends = ends or aligned << max(0, (tokens // aligned).bit_length() - 1)
    return tuple(_unit_of(group, _fitting(group, ends, tokens)) for group in groups)


def _fitting(group: GroupGeometry, ends: int, tokens: int) -> int:
    """Return how many blocks of a group are a unit with ``AUTO``: a power of two. ``ends``: a
    multiple of the group's block, which a unit divides, so that those of all groups end there."""
    count = 1 << max(0, (tokens // group.block_tokens).bit_length() - 1) if not group.volatile_tokens else 1
    while count > 1 and (ends % (count * group.block_tokens) or not _may_have(group, count)):
        count //= 2
    return count


def _units_in(groups: Sequence[GroupGeometry], room: float) -> float:
    """Return how many units of the group with the longest ones fit into a tier that has ``room``
    bytes for one shard of each block."""
    tokens = room / sum(group.slot_bytes / group.tokens_each for group in groups)
    return tokens / max(group.block_tokens for group in groups if group.gpu_blocks > 1)


def _unit_of(group: GroupGeometry, count: int) -> GroupGeometry:
    tokens, payload_bytes = count * group.block_tokens, count * group.payload_bytes
    return replace(group, block_tokens=tokens, payload_bytes=payload_bytes, gpu_blocks=count)


def _may_have(group: GroupGeometry, count: int) -> bool:
    """Return whether so many blocks of a group may be one unit."""
    if count == 1:
        return True
    unit_tokens = count * group.block_tokens
    if count < 1 or group.state_tokens is not None or count * group.payload_bytes > MOST_UNIT_BYTES:
        return False
    if group.chunk_tokens is not None:
        return group.chunk_tokens % unit_tokens == 0
    return group.window_tokens is None or 2 * unit_tokens + group.volatile_tokens <= group.window_tokens


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def slots_per_segment(segment_bytes: int, slot_bytes: int) -> int:
    """Return the slots in one rank's file of ``segment_bytes``: at least one, even where that needs
    a larger file."""
    return max(1, (segment_bytes - SEGMENT_HEADER_BYTES) // slot_bytes)


def segment_file_bytes(slot_bytes: int, slot_count: int) -> int:
    """Return the length in bytes of one rank's segment file."""
    return SEGMENT_HEADER_BYTES + slot_bytes * slot_count


def segment_charge_bytes(slot_bytes: int, slot_count: int) -> int:
    """Return the bytes that one rank's file of a segment may take on the drive: its own, and its
    share of directories and extents."""
    return segment_file_bytes(slot_bytes, slot_count) + SEGMENT_OVERHEAD_BYTES


def slot_offset(slot_bytes: int, index: int) -> int:
    """Return the byte offset of slot ``index`` in a segment file."""
    return SEGMENT_HEADER_BYTES + slot_bytes * index


def contiguous_runs(indices: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """Cut positions of ``indices`` into runs of consecutive numbers. Return pairs (first position,
    count), with count <= longest.

    ``contiguous_runs([4, 5, 9], 8) == [(0, 2), (2, 1)]``.
    """
    runs: list[tuple[int, int]] = []
    start = 0
    for position in range(1, len(indices) + 1):
        if position == len(indices) or indices[position] != indices[position - 1] + 1 or position - start >= longest:
            runs.append((start, position - start))
            start = position
    return runs
