# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey, Slot, Tier, group_of, make_block_key
from kvdisk.device.uses import USES_RECORD, Uses
from kvdisk.geometry import FILE_EPOCH, Geometry, GroupGeometry
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.catalog import Catalog, CopyState
from kvdisk.manager.eviction import LruPolicy, TailFirst
from kvdisk.manager.nvme_restore import restore_blocks

GEOMETRY = Geometry((GroupGeometry(0, 4, 8192), GroupGeometry(1, 2, 4096), GroupGeometry(2, 4, 8192)), 1, 2)
NO_USES = np.zeros(0, USES_RECORD)
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


def records_of(some_keys):
    return st.lists(
        st.builds(
            BlockRecord,
            st.sampled_from([FILE_EPOCH, FILE_EPOCH, FILE_EPOCH, 7]),
            some_keys,
            st.builds(Slot, st.sampled_from([1, 2, 3, 3, 9, 11, 12]), st.integers(0, 5)),
            st.integers(0, 2**64 - 1),
            st.none() | some_keys,
            st.integers(0, 2),
        ),
        max_size=14,
    )


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


@settings(max_examples=400)
@given(records_of(keys) | records_of(long_keys))
def test_what_is_restored_is_what_the_records_say_one_by_one(records):
    index = MemoryIndex()
    index.put(records)
    index.commit()
    kept, stale, used, stale_slots = by_hand(index)
    catalog = Catalog()
    policies = [TailFirst(LruPolicy(()), catalog, Tier.NVME) for _ in GEOMETRY.slot_sizes]
    restored = restore_blocks(index, GEOMETRY, catalog, policies, SEGMENTS, Uses(), NO_USES)
    assert restored.stale == stale
    assert set(restored.stale_slots) == stale_slots
    assert len(restored.stale_slots) == len(stale_slots)
    assert {Slot(segment, number) for segment, found in restored.used.items() for number in found.tolist()} == used
    assert len(catalog) == len(kept)
    for record in kept:
        row = catalog.find(record.key)
        assert catalog.slot(row, Tier.NVME) == record.slot
        assert [catalog.state(row, tier) for tier in (Tier.CPU, Tier.NVME)] == [CopyState.ABSENT, CopyState.READY]
        assert (catalog.generations[row], catalog.epochs[row]) == (record.generation, FILE_EPOCH)
        assert catalog.parent(row) == record.parent or (catalog.parent(row) is None and in_circles(kept))
        assert catalog.pins(row, Tier.NVME) == catalog.pins(row, Tier.CPU) == 0
    keys_by_row = catalog.keys.tolist()
    for _ in range(2):  # whatever leaves, and comes back, the trees stay the same
        if not in_circles(kept):
            assert trees(catalog) == trees_of(kept)
        for record in kept[::2]:
            catalog.drop((catalog.find(record.key),), Tier.NVME)
            row = catalog.add(record.key, record.generation, record.epoch, record.parent)
            catalog.begin((row,), Tier.NVME, (record.slot,))
            catalog.finish((row,), Tier.NVME)
    for size_class, policy in enumerate(policies):
        order = [keys_by_row[row] for row in policy._policy.proposals()]
        assert order == [record.key for record in kept if GEOMETRY.size_classes[group_of(record.key)] == size_class]


def in_circles(records: list[BlockRecord]) -> bool:
    """Whether some block's way to its head has no end."""
    parents = {record.key: record.parent for record in records}
    for ahead in parents.values():
        for _ in parents:
            ahead = parents.get(ahead)  # noqa: PLW2901
        if ahead in parents:
            return True
    return False


def trees_of(records: list[BlockRecord]) -> dict[BlockKey, set[BlockKey]]:
    found: dict[BlockKey, set[BlockKey]] = {}
    for record in records:
        if record.parent is not None:
            found.setdefault(record.parent, set()).add(record.key)
    return found


def trees(catalog: Catalog) -> dict[BlockKey, set[BlockKey]]:
    """Return who follows whom by key; children that name each other end in an assertion."""
    following: dict[BlockKey, set[BlockKey]] = {}
    for row in {*catalog.rows(), *catalog._rows.values()}:
        child = catalog.columns(Tier.NVME).first_child[row]
        while child >= 0:
            assert catalog.parent_rows[child] == row
            mine = following.setdefault(catalog.keys[row], set())
            assert catalog.keys[child] not in mine
            mine.add(catalog.keys[child])
            child = catalog.columns(Tier.NVME).next_child[child]
    return following


@pytest.mark.parametrize("length", [2, 3, 5000])
def test_records_whose_parents_go_in_a_circle_leave_all_the_same(length: int) -> None:
    geometry = Geometry((GroupGeometry(0, 4, 4096),), 1, 4)
    index, catalog = MemoryIndex(), Catalog()
    names = [make_block_key(number.to_bytes(32, "big"), 0) for number in range(length + 2)]
    parents = [*(names[(number + 1) % length] for number in range(length)), names[0], names[length]]
    index.put_segment(segment := SegmentRecord(0, geometry.slot_sizes[0], length + 2))
    for at, (name, parent) in enumerate(zip(names, parents, strict=True)):
        index.put([BlockRecord(FILE_EPOCH, name, Slot(0, at), at + 1, parent, at)])
    index.flush(1.0)
    order = TailFirst(LruPolicy(()), catalog, Tier.NVME)
    restore_blocks(index, geometry, catalog, [order], {0: segment}, Uses(), NO_USES)
    for _ in range(length + 2):
        (row,) = order.victims(1, catalog.evictable_in(Tier.NVME))
        order.remove((row,))
        catalog.drop((row,), Tier.NVME)
    assert len(catalog) == 0
