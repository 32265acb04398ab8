# SPDX-License-Identifier: Apache-2.0
"""What an index knows, taken over into the catalog and the eviction policies at start. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvdisk.blocks import BlockKey, Slot, Tier, group_of
from kvdisk.geometry import FILE_EPOCH, Geometry
from kvdisk.index.base import BlockRecord, Index, SegmentRecord
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.tail_first import TailFirst


@dataclass
class Restored:
    """``used``: slots that are not free, by segment. ``stale``: names of records that go; ``stale_slots``: their slots,
    those in ``used`` that no copy holds."""

    used: dict[int, set[int]] = field(default_factory=dict)
    stale: list[tuple[int, BlockKey]] = field(default_factory=list)
    stale_slots: list[Slot] = field(default_factory=list)


def restore_blocks(
    index: Index,
    geometry: Geometry,
    catalog: Catalog,
    policies: Sequence[TailFirst],
    segments: Mapping[int, SegmentRecord],
) -> Restored:
    """Adopt the blocks that can be served, in ``catalog`` (which has none yet) and by size class in ``policies``."""
    restored = Restored()
    kept: list[BlockRecord] = []
    for record in index.blocks():
        segment = segments.get(record.slot.segment)
        taken = restored.used.setdefault(record.slot.segment, set())
        fresh = record.slot.index not in taken
        if record.epoch == FILE_EPOCH and _fits(geometry, record, segment) and fresh:
            kept.append(record)
        else:
            restored.stale.append((record.epoch, record.key))
            if segment is None or record.slot.index >= segment.slot_count or not fresh:
                continue
            restored.stale_slots.append(record.slot)
        taken.add(record.slot.index)
    # The last stored leaves last; within a second, a chain's tail (larger generation) leaves first.
    kept.sort(key=lambda record: (record.stored_s, -record.generation))
    for record in kept:
        row = catalog.add(record.key, record.generation, record.epoch, record.parent)
        catalog.adopt(row, Tier.NVME, record.slot)
        policies[geometry.size_classes[group_of(record.key)]].insert(row)
    return restored


def _fits(geometry: Geometry, record: BlockRecord, segment: SegmentRecord | None) -> bool:
    group = group_of(record.key)
    return (
        segment is not None
        and segment.slot_bytes in geometry.slot_sizes
        and record.slot.index < segment.slot_count
        and group < len(geometry.groups)
        and geometry.groups[group].slot_bytes == segment.slot_bytes
    )
