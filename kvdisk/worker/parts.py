# SPDX-License-Identifier: Apache-2.0
"""Parts cut from lots, each with its place in memory: a slot of the tier for each move, or of staging while it is under
way."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvdisk.worker.gear import Gear
from kvdisk.worker.legs import Lot, Part, Route
from kvdisk.worker.queues import FreeStaging

if TYPE_CHECKING:
    from kvdisk.worker.arena import Arena


class Parts:
    """Cuts parts of about ``part_bytes``, and takes their staging back. ``slots``: of a part, by size class; fewer
    where staging is small. The mover's thread calls everything.
    """

    def __init__(self, gear: Gear, part_bytes: int) -> None:
        self._gear = gear
        # To the nearest, since the header makes slots a little longer than a power of two.
        self.slots = [max(1, round(part_bytes / size)) for size in gear.geometry.slot_sizes]
        self._staging = FreeStaging(gear.staging.slot_counts, self.slots)
        self._direct = None if gear.direct is None else FreeStaging(gear.direct.staging.slot_counts, self.slots)

    def cut(self, lot: Lot) -> Part | None:
        """Cut the next part from a lot; None where it has to wait for staging."""
        route, gear = lot.route, self._gear
        size_class = gear.geometry.size_classes[lot.group]
        rest = len(lot.positions) - lot.taken
        staging: list[int] = []
        if route.staged:
            staging = self._free_of(route).take(size_class, rest, writes=route.writes)
            if not staging:
                return None
            arena = gear.staging
            if route.direct:
                assert gear.direct is not None
                arena = cast("Arena", gear.direct.staging)
        else:
            assert gear.arena is not None, "a move names a CPU slot, and there is no CPU tier"
            arena = gear.arena
        count = len(staging) or min(rest, self.slots[size_class])
        positions = lot.positions[lot.taken : lot.taken + count]
        slots = staging[:] or [lot.work.job.moves[position].cpu.index for position in positions]  # type: ignore[union-attr]
        lot.taken += count
        return Part(lot.work, route, lot.group, lot.drive, size_class, arena, positions, slots, staging)

    def give_back(self, part: Part) -> None:
        """Make a part's staging free, if it has any: nothing touches it any more."""
        self._free_of(part.route).give_back(part)

    @property
    def all_given_back(self) -> bool:
        """Whether no staging is in use."""
        return all(free.all_free for free in (self._staging, self._direct) if free is not None)

    def _free_of(self, route: Route) -> FreeStaging:
        if not route.direct:
            return self._staging
        assert self._direct is not None
        return self._direct
