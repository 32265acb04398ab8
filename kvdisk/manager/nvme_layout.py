# SPDX-License-Identifier: Apache-2.0
"""How the NVMe tier's bytes are divided: between index and segments, and between size classes. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvdisk.errors import ConfigError
from kvdisk.geometry import SEGMENT_OVERHEAD_BYTES, Geometry, segment_charge_bytes, slots_per_segment


@dataclass(frozen=True)
class NvmeLayout:
    """How a budget is cut: slots of a segment and cap of segment bytes (all ranks) by size class."""

    index_bytes: int
    slot_counts: tuple[int, ...]
    class_bytes: tuple[int, ...]

    @classmethod
    def make(
        cls,
        budget_bytes: int,
        segment_bytes: int,
        geometry: Geometry,
        index_bytes_for: Callable[[int], int],
        uses_charge_bytes: Callable[[int, int], int],
        drive_count: int = 1,
    ) -> NvmeLayout:
        """Divide ``budget_bytes`` (all ranks) between index, the file of uses, and size classes.

        ``index_bytes_for``: bytes of an index of so many blocks; ``uses_charge_bytes``: what the file for so many
        slots and segments is charged with. Raises ConfigError where nothing fits.
        """
        without = cls._divide(budget_bytes, segment_bytes, geometry, index_bytes_for, drive_count)
        uses_bytes = uses_charge_bytes(without.most_slots(geometry), sum(without.most_segments(geometry)))
        return cls._divide(budget_bytes - uses_bytes, segment_bytes, geometry, index_bytes_for, drive_count)

    @classmethod
    def _divide(
        cls,
        budget_bytes: int,
        segment_bytes: int,
        geometry: Geometry,
        index_bytes_for: Callable[[int], int],
        drive_count: int,
    ) -> NvmeLayout:
        parts = geometry.part_count
        slots = budget_bytes // (min(geometry.slot_sizes) * parts)
        index_bytes = index_bytes_for(slots)
        class_bytes = tuple(int((budget_bytes - index_bytes) * share) for share in geometry.shares)
        slot_counts = []
        for size, cap in zip(geometry.slot_sizes, class_bytes, strict=True):
            # Four segments or more per class, and two a drive: dropping or refusing one must not take the tier away.
            share = cap // (max(4, 2 * drive_count) * parts) - SEGMENT_OVERHEAD_BYTES
            count = slots_per_segment(min(segment_bytes, share), size)
            if segment_charge_bytes(size, count) * parts > cap:
                raise ConfigError(
                    f"nvme_bytes leaves {max(cap, 0)} bytes for blocks that need {size * parts} bytes each on the "
                    "drive; give it more."
                )
            slot_counts.append(count)
        return cls(index_bytes, tuple(slot_counts), class_bytes)

    def most_slots(self, geometry: Geometry) -> int:
        """Return the slots of all segments that the caps have room for."""
        return sum(self.class_slots(geometry))

    def class_slots(self, geometry: Geometry) -> tuple[int, ...]:
        """Return the same by size class."""
        counts = zip(self.most_segments(geometry), self.slot_counts, strict=True)
        return tuple(segments * slots for segments, slots in counts)

    def capacity_bytes(self, geometry: Geometry) -> int:
        """Return the bytes of these slots, over all ranks."""
        return sum(map(int.__mul__, geometry.slot_sizes, self.class_slots(geometry))) * geometry.part_count

    def most_segments(self, geometry: Geometry) -> tuple[int, ...]:
        """Return by size class how many segments the caps have room for."""
        return tuple(
            cap // (segment_charge_bytes(size, count) * geometry.part_count)
            for size, count, cap in zip(geometry.slot_sizes, self.slot_counts, self.class_bytes, strict=True)
        )
