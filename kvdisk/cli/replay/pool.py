# SPDX-License-Identifier: Apache-2.0
"""The replay's GPU: blocks without bytes, a free queue and, where wanted, a prefix cache, as vLLM's
block pool has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from kvdisk.blocks import BlockKey


@dataclass(slots=True)
class GpuBlock:
    """``KVCacheBlockView``."""

    block_id: int
    ref_cnt: int = 0
    key: BlockKey | None = None


class GpuPool:
    """``SchedulerContext``. ``block_count``: the null block, number 0, included. One thread calls
    everything.

    ``caches``: whether a free block keeps its content until it is given away; the one freed first
    goes first. ``step_blocks``: see ``SchedulerContext``.
    """

    def __init__(self, block_count: int, step_blocks: int, *, caches: bool) -> None:
        self._blocks = [GpuBlock(number) for number in range(block_count)]
        self._free = dict.fromkeys(range(1, block_count))
        self.caches = caches
        self._cached: dict[BlockKey, int] = {}
        self.step_blocks = step_blocks
        self._watched: set[int] = set()
        self._reused: list[int] = []

    # -- SchedulerContext ----------------------------------------------------------------------

    @property
    def block_count(self) -> int:
        """See ``SchedulerContext``."""
        return len(self._blocks)

    def get_block(self, block_id: int) -> GpuBlock:
        """See ``SchedulerContext``."""
        return self._blocks[block_id]

    def watch(self, block_ids: Sequence[int]) -> None:
        """See ``SchedulerContext``."""
        self._watched.update(block_ids)

    def unwatch(self, block_ids: Iterable[int]) -> None:
        """See ``SchedulerContext``."""
        self._watched.difference_update(block_ids)

    def take_reused(self) -> Sequence[int]:
        """See ``SchedulerContext``."""
        reused, self._reused = self._reused, []
        return reused

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Give back one reference on each block, in this order."""
        blocks, free = self._blocks, self._free
        for block_id in block_ids:
            block = blocks[block_id]
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            if not block.ref_cnt:
                free[block_id] = None

    def is_cached(self, key: BlockKey) -> bool:
        """See ``SchedulerContext``."""
        return key in self._cached

    def iter_free_blocks(self) -> Iterator[GpuBlock]:
        """See ``SchedulerContext``."""
        return map(self._blocks.__getitem__, self._free)

    # -- the engine's side ---------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """Give away the first blocks of the free queue; what they held is forgotten."""
        free, blocks, cached = self._free, self._blocks, self._cached
        assert count <= len(free), "the pool is sized for the longest prompt"
        taken = list(islice(free, count))
        if not self._watched.isdisjoint(taken):
            self._reused += self._watched.intersection(taken)
            self._watched.difference_update(taken)
        for block_id in taken:
            del free[block_id]
            block = blocks[block_id]
            block.ref_cnt = 1
            if block.key is not None:
                del cached[block.key]
                block.key = None
        return taken

    def hit(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the blocks of the longest prefix in the cache, and take a reference on each."""
        found = [self._cached[key] for key in takewhile(self._cached.__contains__, keys)]
        for block_id in found:
            block = self._blocks[block_id]
            if not block.ref_cnt:
                del self._free[block_id]
            block.ref_cnt += 1
        return found

    def cache(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> None:
        """Make computed or loaded blocks known to the cache, if there is one; those known already
        stay as they are."""
        if self.caches:
            for key, block_id in zip(keys, block_ids, strict=True):
                if self._cached.setdefault(key, block_id) == block_id:
                    self._blocks[block_id].key = key
