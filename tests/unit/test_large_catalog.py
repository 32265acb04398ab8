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

from kvdisk.blocks import Tier, make_block_key
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.catalog import CommittedCopies
from kvdisk.manager.chains import NONE

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
    made.catalog.fill(Tier.NVME, CommittedCopies(keys, heads, {}, numbers.astype(np.uint64), *slots), 0)
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


def test_a_reset(parts):
    assert calls_of(lambda: parts.manager.reset(7)) < COUNT // 10
