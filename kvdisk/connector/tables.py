# SPDX-License-Identifier: Apache-2.0
"""A request's GPU blocks, in the lists of vLLM's KV-cache manager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

from vllm.v1.core.kv_cache_manager import KVCacheManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import KVConnectorBlockState


def unfilled_blocks(blocks: KVCacheBlocks) -> list[list[int]]:
    """Return a request's GPU blocks by vLLM's group, with 0 for each that no load may write to.

    A block that has a hash already was filled before: its KV is there.
    """
    return [_unfilled(group) for group in blocks.blocks]


def _unfilled(group: Sequence[KVCacheBlock]) -> list[int]:
    first = 0
    if group and group[0].is_null:  # before its window a group has no other: to look at each takes longer
        count = group.count(group[0])
        first = count if group[:count].count(group[0]) == count else 0
    filled = [0 if block.is_null or block.block_hash is not None else block.block_id for block in group[first:]]
    return [0] * first + filled


class BlockTable(Sequence[int]):
    """A request's GPU blocks of one group: a view of vLLM's own list, which is not copied.

    vLLM: it appends to that list, and puts the null block, 0, in the place of a block that it frees
    behind a window. When a request ends it drops the list as it is.
    """

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...

    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if isinstance(at, slice):
            return [block.block_id for block in self._blocks[at]]
        return self._blocks[at].block_id  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[int]:
        return iter([block.block_id for block in self._blocks])


def block_tables(state: KVConnectorBlockState, request_id: str) -> Sequence[Sequence[int]] | None:
    """Return the block tables of a request of this step, by vLLM's group; None where it has none.

    vLLM makes a list of a whole table, which takes milliseconds where the table is long. Where its
    resolver is the KV-cache manager's own, that manager's lists are viewed instead.
    """
    manager = getattr(state.resolve_block_ids, "__self__", None)
    if request_id not in state.req_ids or not isinstance(manager, KVCacheManager):
        return state.get_block_ids(request_id)  # type: ignore[no-any-return]
    return [BlockTable(blocks) for blocks in manager.get_blocks(request_id).blocks]
