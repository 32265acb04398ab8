# SPDX-License-Identifier: Apache-2.0
"""Which moves go between drive and GPU without host memory: what was chosen at start, and when it is gone back on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvdisk.device.header import MULTILINEAR, XXH3_128
from kvdisk.messages import Move
from kvdisk.worker.legs import Route

if TYPE_CHECKING:
    from kvdisk.worker.gpu_staging import GpuStaging

MOST_FAILURES = 32
"""With so many moves that the drive failed on the GPU's way, all go the host's way again."""


@dataclass(slots=True, eq=False)
class Direct:
    """The way between drive and GPU, as far as it is to be gone. The mover's thread calls everything.

    ``loads``, ``stores``: sizes of slots, by class, for which it was found faster than through host memory. Where
    ``loads`` has a size, every slot of that size is sealed with a checksum that a GPU computes, by whomever it is
    written. ``staging``: with slots of all these sizes; its owner's.
    """

    staging: GpuStaging
    loads: frozenset[int]
    stores: frozenset[int]
    _of_hosts: set[int] = field(default_factory=set)
    """Segments in which a slot was met that only a processor can verify."""
    _failures: int = 0

    def __post_init__(self) -> None:
        assert all(self.staging.slot_counts[size_class] for size_class in self.loads | self.stores)

    @property
    def given_up(self) -> bool:
        """Whether it has failed so often that nothing goes this way any more."""
        return self._failures >= MOST_FAILURES

    def route(self, route: Route, size_class: int, move: Move) -> Route:
        """Return the route of a move that would go by ``route``."""
        if self.given_up:
            return route
        if route is Route.STORE_STAGED and size_class in self.stores:
            return Route.STORE_DIRECT
        if route is Route.LOAD_STAGED and size_class in self.loads:
            assert move.nvme is not None
            return route if move.nvme.segment in self._of_hosts else Route.LOAD_DIRECT
        return route

    def checksum_kind(self, size_class: int) -> int:
        """Return the kind that slots of a size are sealed with in host memory."""
        return MULTILINEAR if size_class in self.loads else XXH3_128

    def note_of_host(self, moves: Iterable[Move]) -> None:
        """These slots can be verified by a processor only. What else is in their segments is read its way, too: most
        of it was written at the same time, and each slot read in vain costs a second read."""
        self._of_hosts.update(move.nvme.segment for move in moves if move.nvme is not None)

    def note_changed(self, segment: int) -> None:
        """A segment was opened or dropped: what its number said is nothing of the next one's."""
        self._of_hosts.discard(segment)

    def note_failures(self, count: int) -> bool:
        """The drive has failed so many moves this way; return whether this was too much."""
        before = self.given_up
        self._failures += count
        return self.given_up and not before
