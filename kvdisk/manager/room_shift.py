# SPDX-License-Identifier: Apache-2.0
"""Room that one size class of a tier gives to another: which needs it, and whose segment goes.
Scheduler thread only.

A segment has slots of one size. Where no more can be made, a class that is short of room gets that
of a segment of another class, whose copies bring less than what it would have to let go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvdisk.blocks import Tier
from kvdisk.manager import bounds
from kvdisk.manager.eviction import TailFirst
from kvdisk.manager.parts import Parts
from kvdisk.manager.pool import SlotPool
from kvdisk.manager.segments import Segments
from kvdisk.messages import SegmentSpec


class RoomShift:
    """Decides which segment is given up for another size class: one at a time.

    ``giving``: the segment, until its files are gone. ``taker``: the class that its room is for,
    until that has made one of its own, or is short no more: no other makes one meanwhile.
    """

    MARGIN: Final = 1.5
    """How much more the copies of the taker have to bring: else two classes that are equally in
    need would give the same room to and fro."""

    def __init__(self, parts: Parts, tier: Tier, segments: Segments, pool: SlotPool, orders: Sequence[TailFirst]):
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._tier = tier
        self._segments = segments
        self._pool = pool
        self._evictors = orders
        self.giving: SegmentSpec | None = None
        self.taker: int | None = None
        self._evicted = [0] * len(orders)
        """Copies that left for room since the last decision, by size class."""

    # -- what happens ----------------------------------------------------------------------------

    def evicted(self, size_class: int, count: int) -> None:
        """Copies of a class left for others of it."""
        self._evicted[size_class] += count

    def note_satisfied(self, size_class: int) -> None:
        """A class is not short of room."""
        if self.taker == size_class and self.giving is None:
            self.taker = None

    def is_freeing_for(self, size_class: int) -> bool:
        """Whether a segment is on its way out for a class."""
        return self.taker == size_class and self.giving is not None

    def made(self, spec: SegmentSpec) -> None:
        """A segment was made."""
        if self.taker == self._segments.class_of(spec):
            self.taker = None

    def gone(self, spec: SegmentSpec) -> None:
        """The files of a segment are gone."""
        if self.giving is not None and self.giving.segment == spec.segment:
            self.giving = None
            self._segments.room_came(spec.drive)

    # -- decisions -------------------------------------------------------------------------------

    def may_make(self, size_class: int) -> bool:
        """Whether a class may make a segment: room that comes free for another is not its own."""
        return self.taker in {None, size_class}

    def begin(self, size_class: int) -> SegmentSpec | None:
        """Return the segment that is to go for a class that is short, if any.

        A class with segments gets another one's only after it had to let go of as many copies as
        one holds: each decision has seen that much.
        """
        if len(self._evictors) == 1 or self.taker is not None or not self._segments.lacks_room(size_class):
            return None
        if self._segments.away:  # what a class has there may be all that it needs
            return None
        total = self._pool.total[size_class]
        least = 0.0
        if total:
            if self._evicted[size_class] < self._segments.whole_slots(size_class):
                return None
            least = self._evictors[size_class].least_value() / self.MARGIN
        self._evicted = [0] * len(self._evictors)
        values = self._values(size_class)
        spec = min(values, key=lambda each: values[each], default=None)
        if spec is None or (total and values[spec] >= least):
            return None
        self.giving, self.taker = spec, size_class
        return spec

    def _values(self, taker: int) -> dict[SegmentSpec, float]:
        """Return what the copies of each segment that can go bring, on average over its slots.

        None is the last of its class, nor on a drive that cannot be written.
        """
        segments, pool = self._segments, self._pool
        in_service = [spec for spec in segments.specs.values() if pool.has_segment(spec.segment)]
        counts = Counter(spec.slot_bytes for spec in in_service)
        mine = self._geometry.slot_sizes[taker]
        able = {
            spec.segment: spec
            for spec in in_service
            if spec.slot_bytes != mine and counts[spec.slot_bytes] > 1 and spec.drive in segments.writable
        }
        segment_of = self._catalog.columns(self._tier).segments
        rows = [row for row in self._catalog.rows_in(self._tier) if segment_of[row] in able]
        found: dict[int, list[float]] = {segment: [] for segment in able}
        for row in rows[:: -(-len(rows) // bounds.LOOKED_AT) or 1]:
            spec = able[segment_of[row]]
            found[spec.segment].append(self._evictors[segments.class_of(spec)].value_of(row))
        return {
            spec: sum(found[segment]) / max(1, len(found[segment])) * pool.used_part(segment)
            for segment, spec in able.items()
        }
