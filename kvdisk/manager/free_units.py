# SPDX-License-Identifier: Apache-2.0
"""The engine's free blocks as store policies see them where several of them are one: by the key of
their unit. Scheduler thread only.

The engine frees, caches and evicts its blocks one by one. A unit can be stored while its cache has
all of them, whoever uses them, so it is offered as soon as the first of them is at the front. Once
the engine has taken one of them, the others serve nobody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvdisk.blocks import BlockKey, group_of
from kvdisk.context import KVCacheBlockView, SchedulerContext
from kvdisk.geometry import Geometry
from kvdisk.manager.requests import BlockKeys


class _InUnit(NamedTuple):
    """``KVCacheBlockView`` of a block that goes by the key of its unit."""

    block_id: int
    key: BlockKey | None


class FreeUnits:
    """``SchedulerContext`` over the engine's, whose free blocks have the keys of units; None: they
    belong to no unit that is all there. It knows the units last reached, of twice as many blocks as
    the GPU has."""

    def __init__(self, context: SchedulerContext, geometry: Geometry) -> None:
        self._context = context
        self._counts = [group.gpu_blocks for group in geometry.groups]
        self._members: OrderedDict[BlockKey, list[BlockKey]] = OrderedDict()
        """The keys of a unit's blocks, by its own; the unit that was reached first is the first."""
        self._unit_of: dict[BlockKey, BlockKey] = {}
        """The unit that was last reached of those that have a block."""

    def reached(self, group: int, keys: BlockKeys, start: int, stop: int) -> None:
        """A request has reached its blocks of a group from ``start`` to before ``stop``."""
        if self._counts[group] == 1:
            return
        for at, unit in enumerate(keys[start:stop], start):
            members = self._members[unit] = keys.of_gpu(at)
            self._members.move_to_end(unit)
            self._unit_of.update(dict.fromkeys(members, unit))
        while len(self._unit_of) > 2 * self._context.block_count:
            unit, members = self._members.popitem(last=False)
            for member in members:
                if self._unit_of.get(member) == unit:
                    del self._unit_of[member]

    def find(self, unit: BlockKey) -> tuple[tuple[int, ...], Sequence[BlockKey]]:
        """Return the GPU blocks of a unit and their keys; none where the cache lacks one of
        them."""
        members = self._members.get(unit, [])
        blocks = [self._context.find_block(member) for member in members]
        found = tuple(block for block in blocks if block is not None)
        return (found, members) if len(found) == len(members) else ((), ())

    def clear(self) -> None:
        """Forget all units."""
        self._members.clear()
        self._unit_of.clear()

    # -- SchedulerContext ----------------------------------------------------------------------

    def iter_free_blocks(self) -> Iterator[KVCacheBlockView]:
        """Yield the blocks of the free queue, the next one to be reused first."""
        are_there: dict[BlockKey, bool] = {}
        for block in self._context.iter_free_blocks():
            key = block.key
            if key is None or self._counts[group_of(key)] == 1:
                yield block
                continue
            unit = self._unit_of.get(key)
            if unit is not None and unit not in are_there:
                are_there[unit] = bool(self.find(unit)[0])
            yield _InUnit(block.block_id, unit if unit is not None and are_there[unit] else None)

    @property
    def block_count(self) -> int:
        """See ``SchedulerContext``, here and below."""
        return self._context.block_count

    @property
    def free_count(self) -> int:
        return self._context.free_count

    @property
    def caches(self) -> bool:
        return self._context.caches

    @property
    def step_blocks(self) -> int:
        return self._context.step_blocks

    def get_block(self, block_id: int) -> KVCacheBlockView:
        return self._context.get_block(block_id)

    def watch(self, block_ids: Sequence[int]) -> None:
        self._context.watch(block_ids)

    def unwatch(self, block_ids: Sequence[int]) -> None:
        self._context.unwatch(block_ids)

    def take_reused(self) -> Sequence[int]:
        return self._context.take_reused()

    def is_cached(self, key: BlockKey) -> bool:
        return self._context.is_cached(key)

    def find_block(self, key: BlockKey) -> int | None:
        return self._context.find_block(key)
