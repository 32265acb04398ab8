# SPDX-License-Identifier: Apache-2.0
"""Offers of blocks that the engine has in its cache: their keys, and the GPU blocks that have their
bytes. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import compress
from operator import itemgetter

from kvdisk.blocks import GROUP_BYTES, BlockKey, group_of, groups_of, make_block_key
from kvdisk.manager.copies import Offers
from kvdisk.manager.free_units import FreeUnits
from kvdisk.manager.parts import Parts
from kvdisk.manager.requests import RequestState
from kvdisk.manager.shares import FreeTenants
from kvdisk.manager.store_policy import FreeOffer

_POSITION_AND_GROUP = itemgetter(1, 0)


class GpuOffers:
    """Makes ``Offers`` of a request's blocks and of free ones, and tells which blocks are still
    what they were. ``units``: of the free blocks; None: each block is one."""

    def __init__(self, parts: Parts, units: FreeUnits | None = None) -> None:
        self._geometry = parts.geometry
        self._context = parts.context
        self._units = units
        self._tenants = FreeTenants(parts.catalog, parts.context)
        self._block_tokens = [group.block_tokens for group in parts.geometry.groups]

    def in_order(self, places: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return blocks, by group and position, in the order of their prompt over all groups."""
        if len(places) < 2:
            return list(places)
        sizes = self._block_tokens
        if len(set(sizes)) == 1:
            return sorted(places, key=_POSITION_AND_GROUP)
        return sorted(places, key=lambda place: ((place[1] + 1) * sizes[place[0]], place[0]))

    def of_request(
        self, request: RequestState, places: Iterable[tuple[int, int]], gpu_blocks: Sequence[Sequence[int]]
    ) -> Offers:
        """Return a request's blocks, by group and position, in the order of its prompt over all
        groups; not those that are not all on the GPU."""
        if len(self._geometry.groups) == 1:
            positions = sorted({at for _, at in places})
            return self.of_group(request, 0, gpu_blocks[0], positions)
        by_group: dict[int, list[int]] = {}
        for group, at in sorted(set(places)):
            by_group.setdefault(group, []).append(at)
        each = [self.of_group(request, group, gpu_blocks[group], positions) for group, positions in by_group.items()]
        offers = Offers.joined(each)
        if len(by_group) > 1:
            at_of = {place: at for at, place in enumerate(zip(offers.groups, offers.positions, strict=True))}
            offers = offers.at([at_of[place] for place in self.in_order(at_of)])
        return offers

    def of_group(self, request: RequestState, group: int, table: Sequence[int], positions: Sequence[int]) -> Offers:
        """Return a request's blocks of one group, whose positions ascend; not those that are not
        all on the GPU. ``table``: the group's."""
        blocks = self._gpu_blocks(group, table, positions)
        if not all(blocks):
            positions = list(compress(positions, blocks))
            blocks = list(filter(None, blocks))
        count, keys, tenant = len(blocks), request.keys[group], request.limits.tenant
        named = keys.of(positions), keys.before(positions), ()
        return Offers(*named, [group] * count, [tenant] * count, positions, blocks)

    def named(self, request: RequestState, group: int, table: Sequence[int], positions: Sequence[int]) -> Offers:
        """Return blocks of one group, as ``of_group`` does, that nobody may hold on the GPU when
        they are stored, nor offers again."""
        offers = self.of_group(request, group, table, positions)
        gpu_keys = list(map(request.keys[group].of_gpu, offers.positions))
        return offers._replace(positions=[-1] * len(gpu_keys), gpu_keys=gpu_keys)

    def may_come_free(self, request: RequestState, group: int, start: int, stop: int) -> None:
        """Remember whose a request's blocks of a group are that it has reached: they may be offered
        when no request has them any more."""
        self._tenants.note(request, request.keys[group], start, stop)
        if self._units is not None:
            self._units.reached(group, request.keys[group], start, stop)

    def of_free(self, found: Sequence[FreeOffer]) -> Offers:
        """Return the offers of blocks that are no request's now."""
        keys, geometry = [each.key for each in found], self._geometry
        groups = groups_of(keys)
        parents = [self._parent_of_free(each, group) for each, group in zip(found, groups, strict=True)]
        blocks: list[tuple[int, ...]] = []
        gpu_keys: list[Sequence[BlockKey]] = []
        for each, group in zip(found, groups, strict=True):
            is_unit, units = geometry.groups[group].gpu_blocks > 1, self._units
            found_there = units.find(each.key) if is_unit and units is not None else ((), ())
            blocks.append(found_there[0] if is_unit else (each.block,))
            gpu_keys.append(found_there[1] if is_unit else (each.key,))
        whose = self._tenants.of(keys, parents)
        offers = Offers(keys, parents, (), groups, whose, [-1] * len(keys), blocks, gpu_keys)
        return offers if all(blocks) else offers.at([at for at, each in enumerate(blocks) if each])

    def _parent_of_free(self, offer: FreeOffer, group: int) -> BlockKey | None:
        """Return the key before a block. The policy knows one group. What ends with a state has its
        hash."""
        groups, parent = self._geometry.groups, offer.parent
        if groups[group].state_tokens is None or (parent is not None and group_of(parent) != group):
            return parent
        size = groups[group].block_tokens
        others = [other.group for other in self._geometry.beside(group) if size % other.block_tokens == 0]
        return make_block_key(offer.key[:-GROUP_BYTES], others[-1]) if others else parent

    def cached(self, offers: Offers) -> list[int]:
        """Return the places of those that nobody holds on the GPU whose blocks are what they were
        there."""
        block_of, each = self._context.get_block, zip(offers.gpu_blocks, offers.gpu_keys, strict=True)
        return [at for at, (blocks, keys) in enumerate(each) if [block_of(block).key for block in blocks] == [*keys]]

    def _gpu_blocks(self, group: int, table: Sequence[int], positions: Iterable[int]) -> list[tuple[int, ...]]:
        """Return the GPU blocks that some blocks of a group have; none of one that is not all
        there. ``table``: the group's, 0: not there."""
        each = self._geometry.groups[group].gpu_blocks
        if each == 1:
            return [(block,) if block else () for block in map(table.__getitem__, positions)]
        found = (tuple(table[at * each : (at + 1) * each]) for at in positions)
        return [blocks if all(blocks) else () for blocks in found]
