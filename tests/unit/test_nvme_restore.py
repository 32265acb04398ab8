# SPDX-License-Identifier: Apache-2.0
"""What is taken over from an index, whatever its records say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey, Slot, Tier, group_of, make_block_key
from kvdisk.device.uses import USES_RECORD, Uses, UsesRecords
from kvdisk.geometry import FILE_EPOCH, Geometry, GroupGeometry
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.eviction import EvictionPolicy, TailFirst
from kvdisk.manager.nvme_restore import Restored, restore_blocks
from kvdisk.manager.reuse import ReuseHistory
from kvdisk.manager.standings import Standings

GEOMETRY = Geometry((GroupGeometry(0, 4, 8192), GroupGeometry(1, 2, 4096), GroupGeometry(2, 4, 8192)), 1, 2)
SMALL, LARGE = GEOMETRY.slot_sizes
SEGMENTS = {
    2: SegmentRecord(2, SMALL, 4),
    3: SegmentRecord(3, LARGE, 4),
    9: SegmentRecord(9, LARGE, 2),
    11: SegmentRecord(11, LARGE + 4096, 2),
}

# Keys that differ early, that differ late, and of two lengths.
hashes = st.sampled_from([b"", b"early" + bytes(27), bytes(31) + b"a", bytes(31) + b"b", bytes(16) + b"m" + bytes(15)])
keys = st.builds(make_block_key, hashes, st.integers(0, 3))
long_keys = st.builds(make_block_key, hashes.filter(bool), st.integers(0, 3))


def records_of(some_keys: Any) -> Any:
    """A parent's key comes before its child's: so no way to a head goes in a circle."""
    records = st.builds(
        BlockRecord,
        st.sampled_from([FILE_EPOCH, FILE_EPOCH, FILE_EPOCH, 7]),
        some_keys,
        st.builds(Slot, st.sampled_from([1, 2, 3, 3, 9, 11, 12]), st.integers(0, 5)),
        st.integers(0, 2**64 - 1),
        st.none() | some_keys,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    return st.lists(records.filter(lambda record: record.parent is None or record.parent < record.key), max_size=14)


def restore(
    index: MemoryIndex, geometry: Geometry, segments: Any, uses: UsesRecords | None = None
) -> tuple[Catalog, list[TailFirst], Restored]:
    catalog = Catalog()
    history = ReuseHistory()
    orders = [
        TailFirst(EvictionPolicy(catalog.keys, history), catalog, Tier.NVME, history, Standings(), lambda: 0)
        for _ in geometry.slot_sizes
    ]
    known = np.zeros(0, USES_RECORD) if uses is None else uses
    return catalog, orders, restore_blocks(index, geometry, catalog, orders, segments, Uses(), known)


PARENT = BlockRecord(FILE_EPOCH, make_block_key(b"", 1), Slot(2, 0), 1)
FOLLOWED = [PARENT, BlockRecord(FILE_EPOCH, make_block_key(b"", 2), Slot(3, 0), 2, PARENT.key)]


def by_hand(index: MemoryIndex) -> tuple[list[BlockRecord], list[tuple[int, BlockKey]], set[Slot], set[Slot]]:
    """Return what is kept, in the order in which it leaves, the names that go, and the slots of
    both."""
    kept, stale, used, stale_slots = [], [], set(), set()
    for record in sorted(index.blocks(), key=lambda record: (record.epoch, record.key)):
        segment, group = SEGMENTS.get(record.slot.segment), group_of(record.key)
        inside = segment is not None and record.slot.index < segment.slot_count
        fresh = inside and record.slot not in used
        fits = inside and group < 3 and GEOMETRY.groups[group].slot_bytes == segment.slot_bytes
        if fresh:
            used.add(record.slot)
        if fresh and fits and record.epoch == FILE_EPOCH:
            kept.append(record)
        else:
            stale.append((record.epoch, record.key))
            stale_slots |= {record.slot} if fresh else set()
    kept.sort(key=lambda record: (record.stored_s, -record.generation))
    return kept, stale, used, stale_slots


def store(catalog: Catalog, record: BlockRecord) -> None:
    (row,) = catalog.add([record.key], [record.generation], record.epoch, [record.parent])
    catalog.begin((row,), Tier.NVME, (record.slot,))
    catalog.finish((row,), Tier.NVME)


def content(catalog: Catalog) -> dict[BlockKey, Any]:
    """Return all that a catalog says of each block, and of those that follow it."""
    found, columns = {}, catalog.columns(Tier.NVME)
    for row in {*catalog.rows(), *catalog._rows.values()}:
        children, child = set(), columns.first_child[row]
        while child >= 0:
            assert child not in children
            children.add(catalog.keys[child])
            child = columns.next_child[child]
        copy = (columns.states[row], columns.segments[row], columns.indices[row], columns.pins[row])
        of_block = (catalog.generations[row], catalog.epochs[row], catalog.parent(row), columns.first_child[row] >= 0)
        has_copy = catalog.find(catalog.keys[row]) == row
        found[catalog.keys[row]] = (children, (*copy, *of_block) if has_copy else None)
    return found


@given(records_of(keys) | records_of(long_keys))
@example(FOLLOWED)
def test_what_is_restored_is_what_the_records_say_one_by_one(records):
    index = MemoryIndex()
    index.put(records)
    index.commit()
    kept, stale, used, stale_slots = by_hand(index)
    catalog, orders, restored = restore(index, GEOMETRY, SEGMENTS)
    assert restored.stale == stale
    assert (set(restored.stale_slots), len(restored.stale_slots)) == (stale_slots, len(stale_slots))
    assert {Slot(segment, number) for segment, found in restored.used.items() for number in found.tolist()} == used
    followed = {record.parent for record in kept}
    for size_class, order in enumerate(orders):
        ours = [record.key for record in kept if GEOMETRY.size_classes[group_of(record.key)] == size_class]
        assert [catalog.keys[row] for _, row in order._policy.proposals()] == [
            key for key in ours if key not in followed
        ]
        assert all(order._policy.holds(catalog.find(key)) for key in ours)
    stored = Catalog()
    for record in kept:
        store(stored, record)
    for _ in range(2):  # whatever leaves, and comes back, the trees stay the same
        assert content(catalog) == content(stored)
        for record in kept[::2]:
            catalog.end((catalog.find(record.key),), Tier.NVME)
            store(catalog, record)


@pytest.mark.parametrize("length", [2, 3, 5000])
def test_records_whose_parents_go_in_a_circle_leave_all_the_same(length: int) -> None:
    geometry = Geometry((GroupGeometry(0, 4, 4096),), 1, 4)
    index, segment = MemoryIndex(), SegmentRecord(0, geometry.slot_sizes[0], length + 2)
    names = [make_block_key(number.to_bytes(32, "big"), 0) for number in range(length + 2)]
    parents = [*(names[(number + 1) % length] for number in range(length)), names[0], names[length]]
    for at, (name, parent) in enumerate(zip(names, parents, strict=True)):
        index.put([BlockRecord(FILE_EPOCH, name, Slot(0, at), at + 1, parent, at)])
    index.flush(1.0)
    catalog, (order,), _ = restore(index, geometry, {0: segment})
    for _ in range(length + 2):
        (row,) = order.victims(1, catalog.evictable_in(Tier.NVME))
        order.remove((row,))
        catalog.end((row,), Tier.NVME)
    assert len(catalog) == 0


def test_eviction_goes_on_with_the_last_uses_and_no_head_has_fewer_than_its_tail():
    """Of three chains: one whose head was evicted and stored again, one used often, one never."""
    geometry = Geometry((GroupGeometry(0, 4, 4096),), 1, 4)
    index, segment = MemoryIndex(), SegmentRecord(0, geometry.slot_sizes[0], 9)
    names = [make_block_key(number.to_bytes(32, "big"), 0) for number in range(9)]
    for at, name in enumerate(names):
        index.put([BlockRecord(FILE_EPOCH, name, Slot(0, at), at + 1, names[at - 1] if at % 3 else None, 1)])
    index.flush(1.0)
    counts, last_s = (0, 5, 2, 3, 1, 1, 0, 0, 0), (90, 80, 40, 70, 60, 60, 0, 0, 0)
    known = np.array(list(zip(range(1, 10), counts, last_s, strict=True)), USES_RECORD)
    catalog, (order,), _ = restore(index, geometry, {0: segment}, known)
    history = order._history
    assert [history.known(name)[0] for name in names] == [6, 6, 3, 4, 2, 2, 1, 1, 1]
    left = order.victims(9, catalog.evictable_in(Tier.NVME))
    assert [catalog.keys[row] for row in left] == [names[at] for at in (8, 7, 6, 2, 5, 4, 3, 1, 0)]
