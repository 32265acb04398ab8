# SPDX-License-Identifier: Apache-2.0
"""A GPU block pool without a GPU: reference counts, a free queue and a prefix cache, as in vLLM's
``BlockPool``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvdisk.blocks import BlockKey


@dataclass(slots=True)
class FakeBlock:
    """``KVCacheBlockView``. ``key``: what the prefix cache knows the block by, or None."""

    block_id: int
    ref_cnt: int = 0
    key: BlockKey | None = None


class FakePool:
    """``SchedulerContext`` with the engine's side of it: ``take`` and the prefix cache.

    ``block_count``: the null block, number 0, included. ``before_reuse(block_id)`` is called when a
    block is given away, so that a test can see who still uses it. Misuse fails by assertion.
    """

    def __init__(self, block_count: int, before_reuse: Callable[[int], None]) -> None:
        self._blocks = [FakeBlock(block_id) for block_id in range(block_count)]
        self._free = dict.fromkeys(range(1, block_count))
        self._cached: dict[BlockKey, dict[int, None]] = {}
        self._before_reuse = before_reuse
        self._watched: set[int] = set()
        self._reused: list[int] = []

    # -- SchedulerContext ----------------------------------------------------------------------

    step_blocks = 2
    """Of the fake engine's small steps. A class attribute: a test may set its own."""

    caches = True
    """Likewise."""

    @property
    def block_count(self) -> int:
        return len(self._blocks)

    def get_block(self, block_id: int) -> FakeBlock:
        return self._blocks[block_id]

    def watch(self, block_ids: Sequence[int]) -> None:
        assert 0 not in block_ids, "the null block is nobody's"
        self._watched.update(block_ids)

    def unwatch(self, block_ids: Iterable[int]) -> None:
        self._watched.difference_update(block_ids)

    def take_reused(self) -> list[int]:
        reused, self._reused = self._reused, []
        return reused

    def touch(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert block_id > 0, "the null block is nobody's"
            block = self._blocks[block_id]
            if block.ref_cnt == 0:
                del self._free[block_id]
            block.ref_cnt += 1

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Give back one reference on each block, in this order."""
        for block_id in block_ids:
            assert block_id > 0, "the null block is nobody's"
            block = self._blocks[block_id]
            assert block.ref_cnt > 0, f"block {block_id} is freed more often than it was taken"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free[block_id] = None

    def is_cached(self, key: BlockKey) -> bool:
        return self.find(key) is not None

    def find_block(self, key: BlockKey) -> int | None:
        return self.find(key)

    def iter_free_blocks(self) -> Iterator[FakeBlock]:
        for block_id in self._free:
            yield self._blocks[block_id]

    # -- the engine's side ---------------------------------------------------------------------

    @property
    def free_count(self) -> int:
        """Blocks that ``take`` can give."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Give away the first ``count`` blocks of the free queue; the prefix cache forgets them."""
        assert count <= len(self._free)
        taken = list(self._free)[:count]
        for block_id in taken:
            self._before_reuse(block_id)
            self._hand_out(block_id)
            del self._free[block_id]
            self.forget(block_id)
            self._blocks[block_id].ref_cnt = 1
        return taken

    def _hand_out(self, block_id: int) -> None:
        if block_id in self._watched:
            self._watched.remove(block_id)
            self._reused.append(block_id)

    def cache(self, key: BlockKey, block_id: int) -> None:
        """Make a full block known to the prefix cache; one that is known already stays as it is."""
        block = self._blocks[block_id]
        if block.key is None:
            block.key = key
            self._cached.setdefault(key, {})[block_id] = None

    def find(self, key: BlockKey) -> int | None:
        return next(iter(self._cached.get(key, ())), None)

    def forget(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.key is not None:
            del self._cached[block.key][block_id]
            block.key = None

    def forget_all(self) -> None:
        for block in self._blocks:
            self.forget(block.block_id)
        for block_id in sorted(self._watched):
            self._hand_out(block_id)
