# SPDX-License-Identifier: Apache-2.0
"""What a collection of garbage walks must not grow with the store: it stops the engine for that
long."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from support.fake_pool import FakePool
from support.index_conformance import key_of

from kvdisk.blocks import BlockKey, Slot, Tier
from kvdisk.config import EVICTIONS, Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.garbage import uncollected
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.parts import Parts
from kvdisk.manager.segments import NvmeLayout

GEOMETRY = Geometry((GroupGeometry(0, 16, 4096),), 1, 16)
SLOTS, CHAIN = 1024, 16
ALLOWED = 500
"""Of what is walked; of blocks there are more."""


@pytest.fixture(autouse=True, scope="module")
def _apart() -> None:
    """What was there before is not walked."""
    gc.collect()
    gc.freeze()


class NoIndex(MemoryIndex):
    """Keeps nothing: the real one keeps its records in a file."""

    def put(self, records):
        return 1

    def delete(self, names):
        return 1


def make_tier(eviction: str, index: MemoryIndex) -> tuple[Parts, NvmeSpace]:
    config = Config(store_dirs=(Path("/nowhere"),), nvme_bytes=1, eviction=eviction)
    parts = Parts.make(config, GEOMETRY, FakePool(2, lambda _: None))
    return parts, NvmeSpace(parts, NvmeLayout(0, (SLOTS,), 1 << 62), index, AdmissionPolicy())


def parent_of(number: int) -> BlockKey | None:
    """The block before it; of each other chain the first has a parent that is not there."""
    return key_of(number - 1 if number % CHAIN else 10**9 + number) if number % (2 * CHAIN) else None


def walked() -> int:
    """Return how many references a full collection follows."""
    gc.collect()
    return sum(len(gc.get_referents(each)) for each in gc.get_objects())


def store(parts: Parts, nvme: NvmeSpace, numbers: range) -> None:
    for start in range(numbers.start, numbers.stop, CHAIN):
        slots = nvme.allocate(0, CHAIN)
        rows = [
            parts.catalog.add([key_of(number)], [number + 1], 0, [parent_of(number)])[0]
            for number in range(start, start + CHAIN)
        ]
        parts.catalog.begin(rows, Tier.NVME, slots)
        nvme.finish(rows[::-1])
        nvme.reached(rows[::-1])


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_blocks_that_are_stored_used_evicted_and_stored_again(eviction):
    parts, nvme = make_tier(eviction, NoIndex())
    nvme.pool.add_segment(0, 0, 3 * SLOTS)
    store(parts, nvme, range(CHAIN))
    before = walked()
    store(parts, nvme, range(CHAIN, 3 * SLOTS))
    assert walked() - before < ALLOWED
    nvme._evict(0, SLOTS)
    nvme.pool.free_committed(1)
    assert walked() - before < ALLOWED
    store(parts, nvme, range(3 * SLOTS, 4 * SLOTS))
    assert walked() - before < ALLOWED
    assert len(parts.catalog) == 3 * SLOTS


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_blocks_that_were_there_at_the_start(eviction):
    def opened(segments: int) -> int:
        index = MemoryIndex()
        for segment in range(segments):
            index.put_segment(SegmentRecord(segment, GEOMETRY.slot_sizes[0], SLOTS))
        slots = (Slot(segment, at) for segment in range(segments) for at in range(SLOTS))
        index.put([BlockRecord(0, key_of(at), slot, at + 1, parent_of(at), 1) for at, slot in enumerate(slots)])
        index.commit()
        parts, nvme = make_tier(eviction, index)
        nvme.restore("0" * 32, bytes(32))
        assert len(parts.catalog) == segments * SLOTS
        nvme._index = NoIndex()
        index.__dict__.clear()
        return walked()

    assert opened(3) - opened(1) < ALLOWED


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_waits_for_what_makes_many_objects(fails):
    seen: list[bool] = []

    @uncollected
    def make(count: int) -> list[list[int]]:
        seen.append(gc.isenabled())
        made = [[at] for at in range(count)]
        assert not fails
        return made

    collections = sum(each["collections"] for each in gc.get_stats())
    if fails:
        with pytest.raises(AssertionError):
            make(100_000)
    else:
        assert make(100_000)[-1] == [99_999]
        assert sum(each["collections"] for each in gc.get_stats()) <= collections + 3
    assert seen == [False] and gc.isenabled()
    gc.disable()
    try:
        if not fails:
            make(1)
        assert not gc.isenabled(), "it was off before"
    finally:
        gc.enable()
