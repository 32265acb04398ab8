# SPDX-License-Identifier: Apache-2.0
"""Parts whose bytes are being copied to or from the GPU's blocks, or summed on the GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kvdisk.stats import Stats
from kvdisk.worker.gear import Gear
from kvdisk.worker.legs import Leg, Part

if TYPE_CHECKING:
    from kvdisk.worker.copier import CopyTicket


class _Copy(NamedTuple):
    """A leg under way. ``moved_bytes``: between GPU and host memory; 0: the bytes stay where they are."""

    part: Part
    ticket: CopyTicket
    began_s: float
    moved_bytes: int


class Copies:
    """What copier and GPU have under way. The mover's thread calls everything. ``stats`` is the caller's.

    ``clock``: as the mover's. A copy takes from its start, which waits for the model's work before it, to its end.
    """

    def __init__(self, gear: Gear, stats: Stats, clock: Callable[[], float]) -> None:
        self._gear = gear
        self._stats = stats
        self._clock = clock
        self._under_way: tuple[deque[_Copy], ...] = (deque(), deque())
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
        payload_bytes = self._gear.geometry.groups[part.group].payload_bytes
        moves = leg in {Leg.GATHER, Leg.SCATTER} and not part.route.direct
        began_s = self._clock()
        copy = _Copy(part, self._begin(part, leg, payload_bytes), began_s, moves * len(part.positions) * payload_bytes)
        copies = self._under_way[not part.route.gathers]
        copies.append(copy)
        if len(copies) > 1 or not self._gear.copier.done(copy.ticket):
            return False
        self._count(copies.popleft())
        return True

    def ended(self) -> Iterator[Part]:
        """Yield the parts whose copies have ended."""
        for copies in self._under_way:
            while copies and self._gear.copier.done(copies[0].ticket):
                copy = copies.popleft()
                self._count(copy)
                yield copy.part

    def await_all(self) -> Iterator[Part]:
        """Wait for each copy under way, and yield its part then."""
        for copies in self._under_way:
            while copies:
                copy = copies.popleft()
                self._gear.copier.wait(copy.ticket)
                self._count(copy)
                yield copy.part

    def abandon(self) -> None:
        """After an error of ours: wait for each copy under way, and forget it. Does not raise."""
        for copies in self._under_way:
            while copies:
                with suppress(Exception):  # a GPU that fails copies nothing any more
                    self._gear.copier.wait(copies[0].ticket)
                copies.popleft()

    def _count(self, copy: _Copy) -> None:
        if copy.moved_bytes:
            route = "gpu_to_cpu" if copy.part.route.gathers else "cpu_to_gpu"
            self._stats.observe(f"transfer_bytes.{route}", copy.moved_bytes)
            self._stats.observe(f"transfer_seconds.{route}", max(0.0, self._clock() - copy.began_s))

    def _begin(self, part: Part, leg: Leg, payload_bytes: int) -> CopyTicket:
        copier, moves, after = self._gear.copier, part.work.job.moves, part.work.mark
        if leg is Leg.SUM or leg is Leg.SEAL:
            from kvdisk.worker.copier import Lane

            assert self._gear.direct is not None
            staging = self._gear.direct.staging
            if leg is Leg.SEAL:
                return staging.start_headers(part.size_class, part.slots)
            lane = Lane.STORE if part.route.gathers else Lane.LOAD
            return staging.start_sums(part.size_class, part.slots, payload_bytes, lane)
        blocks = [moves[position].block for position in part.positions]
        if leg is Leg.GATHER:
            return copier.gather(part.group, blocks, part.arena, part.size_class, part.slots, after=after)
        return copier.scatter(part.group, part.arena, part.size_class, part.slots, blocks, after=after)
