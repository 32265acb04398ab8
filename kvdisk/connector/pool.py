# SPDX-License-Identifier: Apache-2.0
"""``SchedulerContext`` over vLLM's block pool."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from kvdisk.blocks import GROUP_BYTES, BlockKey, group_of, key_end
from kvdisk.connector.kv_groups import GroupIds
from kvdisk.context import KVCacheBlockView
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class PooledBlock(NamedTuple):
    """``KVCacheBlockView`` of one of vLLM's blocks. ``key_of``: see
    ``BlockPoolContext.key_of``."""

    block: KVCacheBlock
    key_of: Callable[[KVCacheBlock], BlockKey | None]

    @property
    def block_id(self) -> int:
        return self.block.block_id  # type: ignore[no-any-return]

    @property
    def key(self) -> BlockKey | None:
        """See ``KVCacheBlockView``."""
        return self.key_of(self.block)


class BlockPoolContext:
    """``SchedulerContext`` over vLLM's ``BlockPool``. ``step_blocks``: see there. ``void``: hashes
    of blocks whose content is not known; it grows. The scheduler's thread makes all calls."""

    def __init__(
        self,
        pool: BlockPool,
        geometry: Geometry,
        groups: GroupIds,
        step_blocks: int,
        void: Collection[bytes] = (),
    ) -> None:
        for name in ("blocks", "free_block_queue", "get_cached_block", "enable_caching", "_reuse_watchers"):
            if not hasattr(pool, name):
                raise ConfigError(f"kvdisk needs the engine's block pool, and this one has no {name!r}.")
        self._pool = pool
        if not isinstance(pool._reuse_watchers, _Watchers):
            pool._reuse_watchers = _Watchers(pool._reuse_watchers)
        self._groups = groups
        self._named = {
            group_id: (key_end(number), geometry.groups[number].gpu_block_tokens)
            for number, group_id in enumerate(groups.ids)
        }
        """By vLLM's group: what keys end with, and the tokens of a whole block."""
        self._void = void
        self.step_blocks = step_blocks
        self._note = self._note_reuse  # one object, to be known again
        self._reused: list[int] = []

    @property
    def caches(self) -> bool:
        """Whether the engine's own prefix cache is on."""
        return bool(self._pool.enable_caching)

    @property
    def block_count(self) -> int:
        """GPU blocks of the pool, the null block included."""
        return len(self._pool.blocks)

    @property
    def free_count(self) -> int:
        """Blocks of the free queue."""
        return int(self._pool.get_num_free_blocks())

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """Return the block with this id."""
        return PooledBlock(self._pool.blocks[block_id], self.key_of)

    def key_of(self, block: KVCacheBlock) -> BlockKey | None:
        """Return the key of what a block has. vLLM appends the group to the hash in four bytes,
        kvdisk in two.

        None also where vLLM knows the block by a part of its tokens, or by a hash that is void.
        """
        named, tokens = block.block_hash, block.block_hash_num_tokens
        if named is None or tokens is None:
            return None
        end, block_tokens = self._named[get_group_id(named)]
        key = get_block_hash(named)
        return None if tokens % block_tokens or key in self._void else BlockKey(key + end)

    def watch(self, block_ids: Sequence[int]) -> None:
        """See ``SchedulerContext``.

        ``BlockPool.unpin_blocks``, vLLM's own way to set watchers, would move free blocks to the
        end of the queue.
        """
        assert min(block_ids, default=1) > 0, "the null block belongs to no request"
        self._pool._reuse_watchers.add(block_ids, self._note)

    def unwatch(self, block_ids: Sequence[int]) -> None:
        self._pool._reuse_watchers.remove(block_ids, self._note)

    def take_reused(self) -> Sequence[int]:
        reused, self._reused = self._reused, []
        return reused

    def _note_reuse(self, block: KVCacheBlock) -> None:
        self._reused.append(block.block_id)

    def is_cached(self, key: BlockKey) -> bool:
        """Return whether the prefix cache has a block now."""
        return self._pool.get_cached_block(key[:-GROUP_BYTES], [self._groups.ids[group_of(key)]]) is not None

    def find_block(self, key: BlockKey) -> int | None:
        """See ``SchedulerContext``."""
        found = self._pool.get_cached_block(key[:-GROUP_BYTES], [self._groups.ids[group_of(key)]])
        return found[0].block_id if found and self.key_of(found[0]) == key else None

    def iter_free_blocks(self) -> Iterator[KVCacheBlockView]:
        for block in self._pool.free_block_queue.iter_blocks_after(None):
            yield PooledBlock(block, self.key_of)


_Watcher = Callable[["KVCacheBlock"], None]


class _CallAll(list[_Watcher]):
    def __call__(self, block: KVCacheBlock) -> None:
        for watcher in self:
            watcher(block)


class _Watchers(dict[int, Any]):
    """A pool's watchers by block, where setting one adds it to those before: ``unpin_blocks`` would
    replace ours."""

    def __setitem__(self, block_id: int, watcher: _Watcher) -> None:
        before = self.setdefault(block_id, watcher)
        if isinstance(before, _CallAll):
            before += [watcher] * (watcher not in before)
        elif before != watcher:
            super().__setitem__(block_id, _CallAll([before, watcher]))

    def add(self, block_ids: Sequence[int], watcher: _Watcher) -> None:
        """Add a watcher to some blocks."""
        if self.keys().isdisjoint(block_ids):
            self.update(dict.fromkeys(block_ids, watcher))
        else:
            for block_id in block_ids:
                self[block_id] = watcher

    def remove(self, block_ids: Sequence[int], watcher: _Watcher) -> None:
        """Forget one watcher of some blocks. It may not be there."""
        found = list(map(self.pop, block_ids, repeat(None)))
        if found.count(watcher) == len(found):
            return
        for block_id, before in zip(block_ids, found, strict=True):
            if before is not None and before is not watcher:
                if isinstance(before, _CallAll) and watcher in before:
                    before.remove(watcher)
                super().__setitem__(block_id, before)
