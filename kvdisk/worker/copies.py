# SPDX-License-Identifier: Apache-2.0
"""Parts whose bytes are being copied to or from the GPU's blocks: begun, and waited for without waiting."""

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
    """Gathers and scatters under way. The mover's thread calls everything. ``stats`` is the caller's."""

    def __init__(self, gear: Gear, stats: Stats) -> None:
        self._gear = gear
        self._stats = stats
        self._under_way: tuple[deque[tuple[Part, CopyTicket]], ...] = (deque(), deque())
        """Of stores and of loads. The copier keeps the order of each kind."""

    @property
    def of_stores(self) -> int:
        """Number of parts on their way from the GPU's blocks."""
        return len(self._under_way[0])

    @property
    def of_loads(self) -> int:
        """Number of parts on their way to the GPU's blocks."""
        return len(self._under_way[1])

    @property
    def busy(self) -> bool:
        """Whether a copy has to be asked for its end."""
        return any(self._under_way)

    def start(self, part: Part, leg: Leg) -> bool:
        """Start a part's copy; return whether it has ended already. Otherwise ``ended`` yields the part."""
        copier, moves, after = self._gear.copier, part.work.job.moves, part.work.mark
        blocks = [moves[position].block for position in part.positions]
        copied_bytes = len(blocks) * self._gear.geometry.groups[part.group].payload_bytes
        if leg is Leg.GATHER:
            ticket = copier.gather(part.group, blocks, part.arena, part.size_class, part.slots, after=after)
            self._stats.add("rank_bytes_gpu_to_cpu", copied_bytes)
        else:
            ticket = copier.scatter(part.group, part.arena, part.size_class, part.slots, blocks, after=after)
            self._stats.add("rank_bytes_cpu_to_gpu", copied_bytes)
        copies = self._under_way[leg is Leg.SCATTER]
        if not copies and copier.done(ticket):
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
