# SPDX-License-Identifier: Apache-2.0
"""Parts whose bytes are being copied to or from the GPU's blocks, or summed on the GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvdisk.stats import Stats
from kvdisk.worker.gear import Gear
from kvdisk.worker.legs import Leg, Part

if TYPE_CHECKING:
    from kvdisk.worker.copier import CopyTicket


class Copies:
    """What copier and GPU have under way. The mover's thread calls everything. ``stats`` is the caller's."""

    def __init__(self, gear: Gear, stats: Stats) -> None:
        self._gear = gear
        self._stats = stats
        self._under_way: tuple[deque[tuple[Part, CopyTicket]], ...] = (deque(), deque())
        """Of stores and of loads. The order of each kind is kept: they are a lane of the GPU each."""

    @property
    def of_stores(self) -> int:
        """Number of parts that were gathered, or are just being."""
        return len(self._under_way[0])

    @property
    def of_loads(self) -> int:
        """Number of parts that are being verified on the GPU, or scattered."""
        return len(self._under_way[1])

    @property
    def busy(self) -> bool:
        """Whether a copy has to be asked for its end."""
        return any(self._under_way)

    def start(self, part: Part, leg: Leg) -> bool:
        """Start a leg of a part; return whether it has ended already. Otherwise ``ended`` yields the part."""
        ticket = self._begin(part, leg)
        copies = self._under_way[not part.route.gathers]
        if not copies and self._gear.copier.done(ticket):
            return True
        copies.append((part, ticket))
        return False

    def ended(self) -> Iterator[Part]:
        """Yield the parts whose copies have ended."""
        for copies in self._under_way:
            while copies and self._gear.copier.done(copies[0][1]):
                yield copies.popleft()[0]

    def await_all(self) -> Iterator[Part]:
        """Wait for each copy under way, and yield its part then."""
        for copies in self._under_way:
            while copies:
                part, ticket = copies.popleft()
                self._gear.copier.wait(ticket)
                yield part

    def _begin(self, part: Part, leg: Leg) -> CopyTicket:
        copier, moves, after = self._gear.copier, part.work.job.moves, part.work.mark
        payload_bytes = self._gear.geometry.groups[part.group].payload_bytes
        if leg is Leg.SUM or leg is Leg.SEAL:
            from kvdisk.worker.copier import Lane

            assert self._gear.direct is not None
            staging = self._gear.direct.staging
            if leg is Leg.SEAL:
                return staging.start_headers(part.size_class, part.slots)
            lane = Lane.STORE if part.route.gathers else Lane.LOAD
            return staging.start_sums(part.size_class, part.slots, payload_bytes, lane)
        blocks = [moves[position].block for position in part.positions]
        copied_bytes = 0 if part.route.direct else len(blocks) * payload_bytes
        if leg is Leg.GATHER:
            self._stats.add("rank_bytes_gpu_to_cpu", copied_bytes)
            return copier.gather(part.group, blocks, part.arena, part.size_class, part.slots, after=after)
        self._stats.add("rank_bytes_cpu_to_gpu", copied_bytes)
        return copier.scatter(part.group, part.arena, part.size_class, part.slots, blocks, after=after)
