# SPDX-License-Identifier: Apache-2.0
"""Offers of blocks that the engine has in its cache: their keys, and the GPU blocks that have their
bytes. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import compress
from operator import itemgetter

from kvdisk.manager.copies import Offers
from kvdisk.manager.parts import Parts
from kvdisk.manager.requests import RequestState

_POSITION_AND_GROUP = itemgetter(1, 0)


class GpuOffers:
    """Makes ``Offers`` of a request's blocks, and tells which blocks are still what they were."""

    def __init__(self, parts: Parts) -> None:
        self._geometry = parts.geometry
        self._context = parts.context
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
