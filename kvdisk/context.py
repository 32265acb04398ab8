# SPDX-License-Identifier: Apache-2.0
"""How the manager sees the engine's GPU block pool: two protocols, which the connector
implements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from kvdisk.blocks import BlockKey


class HandedState(NamedTuple):
    """A recurrent state that the engine hands off, valid within that scheduler step: of which
    group, in which GPU block, and after how many tokens of its request."""

    group: int
    gpu_block: int
    tokens: int


class KVCacheBlockView(Protocol):
    """One GPU block as the engine's pool holds it; read only, valid within one scheduler step."""

    @property
    def block_id(self) -> int:
        """Position in the KV-cache tensors; 0 is the null block."""

    @property
    def key(self) -> BlockKey | None:
        """What the engine's prefix cache knows the block by: a full block of its group; None: it
        does not know it."""


class SchedulerContext(Protocol):
    """The engine's block pool. All calls from the scheduler's thread only."""

    @property
    def block_count(self) -> int:
        """GPU blocks of the pool, the null block included."""

    @property
    def free_count(self) -> int:
        """Blocks of the free queue."""

    @property
    def caches(self) -> bool:
        """Whether the engine's own prefix cache is on."""

    @property
    def step_blocks(self) -> int:
        """How many blocks the requests of one step can take from the free queue at most, loads
        aside."""

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """Return the block with this id."""

    def watch(self, block_ids: Sequence[int]) -> None:
        """Have ``take_reused`` name these blocks, once, when the engine hands them out to be
        written anew.

        Takes no reference: the engine frees and reuses them as without this.
        """

    def unwatch(self, block_ids: Sequence[int]) -> None:
        """Watch these blocks no longer. Those that are not watched stay as they are."""

    def take_reused(self) -> Sequence[int]:
        """Return the watched blocks that were handed out since the last call; they are watched no
        longer.

        Those handed out in a scheduler step are named from the step's plan on, before its model
        runs. When the engine empties its prefix cache every watched block is named.
        """

    def is_cached(self, key: BlockKey) -> bool:
        """Whether the engine's own prefix cache has a block now."""

    def iter_free_blocks(self) -> Iterator[KVCacheBlockView]:
        """Yield the blocks of the free queue, the next to be reused first."""


class NoPool:
    """``SchedulerContext`` of who has no GPU blocks: no request is followed over it."""

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
        """See ``SchedulerContext``."""
        return ()

    def is_cached(self, key: BlockKey) -> bool:  # noqa: ARG002
        """See ``SchedulerContext``."""
        return False

    def iter_free_blocks(self) -> Iterator[KVCacheBlockView]:
        """See ``SchedulerContext``."""
        return iter(())
