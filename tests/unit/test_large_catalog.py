# SPDX-License-Identifier: Apache-2.0
"""What happens now and then must not look at every block one by one: a step would take seconds for
a million."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from support.fake_engine import FakeEngine
from support.fake_ranks import FakeRank
from support.manager_parts import ManagerParts, Sizes

from kvdisk.blocks import JobId, Slot, Tier, make_block_key
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.base import BlockColumns
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.catalog import NONE, CopyState
from kvdisk.manager.jobs import JobRecord
from kvdisk.messages import Job, JobKind, Reason, SegmentSpec

GEOMETRY = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)
CONFIG = Config(cpu_bytes=1, store_dirs=("/nowhere",), nvme_bytes=1)
COUNT = 5000
IN_SEGMENT = 50


@pytest.fixture
def parts():
    sizes = Sizes(GEOMETRY, CONFIG, 40, (8,), (IN_SEGMENT,), 2, ())
    made = ManagerParts.make(sizes, FakeEngine(GEOMETRY, 40, [FakeRank(0)]), MemoryIndex(), 0)
    keys = [make_block_key(number.to_bytes(32, "big"), 0) for number in range(COUNT)]
    numbers = np.arange(COUNT)
    slots = (numbers // IN_SEGMENT).astype(np.uint32), (numbers % IN_SEGMENT).astype(np.uint32)
    heads = np.full(COUNT, NONE, np.int32)
    nothing = np.zeros(COUNT, np.uint32)
    blocks = BlockColumns(nothing, keys, *slots, numbers.astype(np.uint64), b"", nothing, nothing)
    made.catalog.fill(Tier.NVME, blocks, heads, {})
    return made


def calls_of(act: Callable[[], object]) -> int:
    """Return how many calls of Python functions, generators' steps among them, an act takes."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def fail(parts: ManagerParts, spec: SegmentSpec) -> None:
    job = Job(JobId(1000 + spec.segment), JobKind.OPEN_SEGMENT, segment=spec)
    parts.nvme.settle_files(JobRecord(job, [], None, failed={-1: Reason.NO_SPACE}), 1.0)


def test_a_segment_that_cannot_be_opened_takes_its_own_copies_only(parts):
    spec = SegmentSpec(3, GEOMETRY.slot_sizes[0], IN_SEGMENT, create=False)
    rows = parts.catalog.rows_in(Tier.NVME, 3)
    parts.catalog.pin((rows[0],), Tier.NVME)
    fail(parts, spec)
    catalog = parts.catalog
    assert len(rows) == IN_SEGMENT
    assert [catalog.state(row, Tier.NVME) for row in rows] == [CopyState.DOOMED] + [CopyState.ABSENT] * (len(rows) - 1)
    assert len(catalog) == COUNT - IN_SEGMENT + 1
    assert catalog.rows_in(Tier.NVME, 3) == rows[:1]
    assert catalog.slot(rows[0], Tier.NVME) == Slot(3, 0)


def test_a_reset(parts):
    assert calls_of(lambda: parts.manager.reset(7)) < COUNT // 10
