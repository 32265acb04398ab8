# SPDX-License-Identifier: Apache-2.0
"""What is known of blocks in the mass: layouts, ages, reuse, prefixes. Plain values, which a child process hands over.

Ages and reuse are counts of blocks by class; the classes of ages are bounded by ``AGE_BOUNDS_S``, those of reuse by
``REUSE_BOUNDS``. A use is a request that came to the block and found it: in a tier, or in the GPU's cache.
"""

from __future__ import annotations

from typing import NamedTuple

AGE_BOUNDS_S = (60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400)
"""Ages in seconds: class n is below bound n, the last class has no bound."""
AGE_NAMES = ("< 1 min", "1-10 min", "10-60 min", "1-6 h", "6-24 h", "1-7 d", "7-30 d", "> 30 d")
REUSE_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64)
"""Uses: class n is up to bound n, the last class has no bound."""
REUSE_NAMES = ("0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "> 64")
SHORT_RUN_BYTES = 2 << 20


class SegmentLayout(NamedTuple):
    """How blocks and free slots lie in a segment, as the index has it.

    A free run is a row of free slots, as long as it can be. ``short_free_slots``: those that lie in runs of less than
    SHORT_RUN_BYTES on a rank, which a larger write has to go around. ``reads``: a block is read together with
    its parent if it lies in the slot behind it; so many runs are left of ``blocks`` blocks when each is read so.
    ``used_slots``: slots that hold a block, each once.
    """

    segment: int
    used_slots: int
    free_slots: int
    free_runs: int
    longest_free_slots: int
    short_free_slots: int
    blocks: int
    reads: int


class BlockTally(NamedTuple):
    """Blocks of one epoch, segment and KV-cache group. Times: seconds since the Unix epoch."""

    epoch: int
    segment: int
    group: int
    blocks: int
    highest_slot: int
    oldest_stored_s: int
    newest_stored_s: int


class HomeBlocks(NamedTuple):
    """Of a home's blocks. ``stored``: how many by age. ``used`` and ``reuse``: by the age of their last use, and by
    uses; None where the home has no file that tells. In these two one class more: blocks of which it does not tell
    yet. ``used`` has also, before that, those that were never used."""

    layouts: tuple[SegmentLayout, ...]
    stored: tuple[int, ...]
    used: tuple[int, ...] | None
    reuse: tuple[int, ...] | None


class Prefix(NamedTuple):
    """Blocks that follow each other and do not branch: the KV of ``tokens`` tokens of all requests that begin so.

    ``key``: of the first block, hex, without its group. ``depth``: prefixes before this one. ``children``: those that
    follow it, of which ``hidden`` are not shown. ``start_tokens``: tokens before it; None where the block before is
    not here. ``tokens``: None where the size of blocks is not known. ``bytes``: of the slots of all copies.
    ``chains``: ends of chains that begin with it, at least 1. ``uses``: over its blocks together, and of the first and
    the last alone; None where no home has a file that tells; a block that several KV-cache groups have is used as
    often as in that where it was used most. ``last_use_s``: 0: never. ``below_blocks`` and ``below_bytes``: of all
    that follows it.
    """

    key: str
    epoch: int
    depth: int
    block_tokens: int | None
    start_tokens: int | None
    tokens: int | None
    blocks: int
    bytes: int
    chains: int
    children: int
    hidden: int
    uses: int | None
    first_uses: int | None
    last_uses: int | None
    last_use_s: int | None
    below_blocks: int
    below_bytes: int


class PrefixTree(NamedTuple):
    """The biggest prefixes of a namespace, in the order in which a tree is read: each before those that follow it.

    ``prefixes_total``: how many there are; ``shared_total``: that several chains begin with, or that were used again.
    ``hidden_roots``, ``hidden_blocks``, ``hidden_bytes``: what is not shown.
    """

    prefixes: tuple[Prefix, ...]
    prefixes_total: int
    shared_total: int
    roots: int
    chains: int
    hidden_roots: int
    hidden_blocks: int
    hidden_bytes: int
