# SPDX-License-Identifier: Apache-2.0
"""How the manager sees the engine's GPU block pool: two protocols, which the connector implements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from kvdisk.blocks import BlockKey


class KVCacheBlockView(Protocol):
    """One GPU block as the engine's pool holds it; read only, valid within one scheduler step."""

    @property
    def block_id(self) -> int:
        """Position in the KV-cache tensors; 0 is the null block."""

    @property
    def ref_cnt(self) -> int:
        """Requests and touches that hold the block."""

    @property
    def key(self) -> BlockKey | None:
        """What the engine's prefix cache knows the block by: a full block of its group; None: it does not know it."""


class SchedulerContext(Protocol):
    """The engine's block pool. All calls from the scheduler's thread only."""

    @property
    def block_count(self) -> int:
        """GPU blocks of the pool, the null block included."""

    @property
    def caches(self) -> bool:
        """Whether the engine's own prefix cache is on."""

    @property
    def step_blocks(self) -> int:
        """How many blocks the requests of one step can take from the free queue at most, loads aside."""

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """Return the block with this id."""

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each block, so that it is neither freed nor given away."""

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Give back one reference on each block, in this order (the first becomes the first to be reused)."""

    def free_first(self, block_ids: Sequence[int]) -> None:
        """As ``free_blocks``; those that come free become the first of all to be reused, in this order."""

    def is_cached(self, key: BlockKey) -> bool:
        """Whether the engine's own prefix cache has a block now."""

    def iter_free_blocks(self) -> Iterator[KVCacheBlockView]:
        """Yield the blocks of the free queue, the next to be reused first."""
