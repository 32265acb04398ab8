# SPDX-License-Identifier: Apache-2.0
"""The longest external hit of a request: pure functions over the catalog. Scheduler thread only."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from functools import partial

from kvdisk.blocks import BlockKey, Tier
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.catalog import Catalog, CopyState


def is_ready(catalog: Catalog, row: int) -> bool:
    """Whether a row (or -1) can be loaded from some tier now."""
    return catalog.is_ready(row)


def is_coming(catalog: Catalog, row: int) -> bool:
    """Whether a row (or -1) can be loaded now, or is being written."""
    return row >= 0 and (
        catalog.state(row, Tier.CPU) in {CopyState.READY, CopyState.WRITING}
        or catalog.state(row, Tier.NVME) == CopyState.WRITING
        or catalog.readable(row, Tier.NVME)
    )


def first_needed(group: GroupGeometry, local_tokens: int, hit_tokens: int) -> int:
    """Return the position of the first block that a hit of ``hit_tokens`` needs from outside the GPU.

    A sliding window of w tokens whose next token is at ``hit_tokens`` reads the w - 1 tokens before
    it, and vLLM allocates no block that lies wholly before them (its
    ``SlidingWindowManager.get_num_skipped_tokens``).
    """
    start = local_tokens
    if group.window_tokens is not None:
        start = max(start, hit_tokens - group.window_tokens + 1)
    return start // group.block_tokens


def longest_hit(
    catalog: Catalog,
    geometry: Geometry,
    keys: Sequence[Sequence[BlockKey]],
    local_tokens: int,
    limit_tokens: int,
    *,
    coming: bool,
    elsewhere: Container[BlockKey] = frozenset(),
) -> int:
    """Return the end, in tokens, of the longest prefix that is there; ``local_tokens`` where nothing follows it.

    There means ready in some tier, or in another home (``elsewhere``), or, with ``coming``, being written. The
    end is a multiple of every group's block size, at most ``limit_tokens``. Full-attention groups need every block from
    ``local_tokens`` on; window groups only those that ``first_needed`` names.
    """
    there = partial(is_coming, catalog) if coming else catalog.is_ready
    find = catalog.find
    step = math.lcm(*(group.block_tokens for group in geometry.groups))
    end = limit_tokens // step * step
    for group in geometry.groups:
        end = min(end, len(keys[group.group]) * group.block_tokens // step * step)
        if group.window_tokens is None:
            position = local_tokens // group.block_tokens
            last = end // group.block_tokens
            group_keys = keys[group.group]
            while position < last and (there(find(group_keys[position])) or group_keys[position] in elsewhere):
                position += 1
            end = position * group.block_tokens // step * step
        if end <= local_tokens:
            return local_tokens
    streaks = [
        (
            group,
            _streaks([there(find(key)) or key in elsewhere for key in keys[group.group][: end // group.block_tokens]]),
        )
        for group in geometry.groups
        if group.window_tokens is not None
    ]
    while end > local_tokens:
        if all(
            streak[end // group.block_tokens - 1] >= end // group.block_tokens - first_needed(group, local_tokens, end)
            for group, streak in streaks
        ):
            return end
        end -= step
    return local_tokens


def _streaks(present: list[bool]) -> list[int]:
    """Return, for each position, how many blocks in a row up to and with it are there."""
    streaks = []
    length = 0
    for here in present:
        length = length + 1 if here else 0
        streaks.append(length)
    return streaks
