# SPDX-License-Identifier: Apache-2.0
"""The protocols by which the manager sees the engine's GPU block pool. The connector implements
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from kvdisk.blocks import BlockKey


class HandedState(NamedTuple):
    """A recurrent state that the engine hands off. Valid within that scheduler step. ``tokens``:
    the tokens of its request that the state covers."""

    group: int
    gpu_block: int
    tokens: int


class KVCacheBlockView(Protocol):
    """One GPU block as the engine's pool holds it. Read-only, valid within one scheduler step."""

    @property
    def block_id(self) -> int:
        """The block's position in the KV-cache tensors; 0 is the null block."""

    @property
    def key(self) -> BlockKey | None:
        """The key of the block in the engine's prefix cache, if it is a full block that is in
        there; otherwise None."""


class SchedulerContext(Protocol):
    """The engine's block pool. Only the scheduler's thread makes calls."""

    @property
    def block_count(self) -> int:
        """GPU blocks of the pool, the null block included."""

    @property
    def free_count(self) -> int:
        """GPU blocks in the free queue."""

    @property
    def caches(self) -> bool:
        """Whether the engine's own prefix cache is on."""

    @property
    def step_blocks(self) -> int:
        """The most blocks that the requests of one step can take from the free queue, loads
        aside."""

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """Return the block with this id."""

    def watch(self, block_ids: Sequence[int]) -> None:
        """Watch these blocks: ``take_reused`` names each of them once, when the engine hands it out
        to be overwritten.

        This takes no reference: the engine frees and reuses the blocks as it would without it.
        """

    def unwatch(self, block_ids: Sequence[int]) -> None:
        """Watch these blocks no longer. Those that are not watched stay as they are."""

    def take_reused(self) -> Sequence[int]:
        """Return the watched blocks that were handed out since the last call; they are watched no
        longer.

        Blocks that are handed out in a scheduler step are named from the step's plan on, before its
        model runs. When the engine empties its prefix cache, every watched block is named.
        """

    def is_cached(self, key: BlockKey) -> bool:
        """Return whether the engine's own prefix cache has a block now."""

    def find_block(self, key: BlockKey) -> int | None:
        """Return a GPU block that the engine's own prefix cache has for a key now, if it has
        one."""

    def iter_free_blocks(self) -> Iterator[KVCacheBlockView]:
        """Yield the blocks of the free queue, the next one to be reused first."""


class NoPool:
    """``SchedulerContext`` for a caller without GPU blocks: no request is followed through it."""

    block_count = free_count = step_blocks = 0
    caches = False

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """See ``SchedulerContext``: there is none."""
        raise AssertionError(f"there is no GPU block {block_id}")

    def watch(self, block_ids: Sequence[int]) -> None:
        """See ``SchedulerContext``."""

    def unwatch(self, block_ids: Sequence[int]) -> None:
        """See ``SchedulerContext``."""

    def take_reused(self) -> Sequence[int]:
        return ()

    def is_cached(self, key: BlockKey) -> bool:  # noqa: ARG002
        return False

    def find_block(self, key: BlockKey) -> int | None:  # noqa: ARG002
        """See ``SchedulerContext``."""
        return None

    def iter_free_blocks(self) -> Iterator[KVCacheBlockView]:
        return iter(())
