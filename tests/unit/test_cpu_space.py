# SPDX-License-Identifier: Apache-2.0
"""Who leaves a tier for room while some copies wait for their demotion."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.fake_pool import FakePool
from support.pool_check import check_pool

from kvdisk.blocks import BlockKey
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.admission import AdmitAll
from kvdisk.manager.parts import Parts
from kvdisk.manager.tiers import CpuSpace

GEOMETRY = Geometry((GroupGeometry(0, 16, 4096),), 1, 16)


class Queue:
    """A tier below that wants nothing but what is queued."""

    stalls = False
    rows: Sequence[int] = ()

    def is_queued(self, row: int) -> bool:
        return row in self.rows

    def count(self, size_class: int) -> int:
        return len(self.rows)

    def keeps(self, row: int) -> bool:
        return False

    def forget(self, rows) -> None:
        self.rows = [row for row in self.rows if row not in rows]


class Memory:
    """A CPU tier that is full of eight blocks without parents, the first the oldest."""

    def __init__(self) -> None:
        self.parts = Parts.make(Config(cpu_bytes=1, eviction="lru"), GEOMETRY, FakePool(2, lambda _: None))
        self.catalog = self.parts.catalog
        self.cpu = CpuSpace(self.parts, (8,), AdmitAll())
        self.cpu.lower = self.queue = Queue()
        self.rows = []
        for number, slot in enumerate(self.cpu.allocate(0, 8)):
            key = BlockKey(number.to_bytes(32, "big") + bytes(2))
            row = self.catalog.add(key, number + 1, 0, None)
            self.catalog.begin([row], self.cpu.tier, [slot])
            self.cpu.finish([row], 0)
            self.rows.append(row)

    def left(self) -> set[int]:
        """Which of the blocks have left, by number; and what else must hold then."""
        check_pool(self.cpu.pool)
        held = {int.from_bytes(self.catalog.keys[row][:32], "big") for row in self.catalog.rows()}
        assert self.parts.stats["evicted_blocks.cpu"] == 8 - len(held)
        return set(range(8)) - held


@pytest.mark.parametrize("stalls", [False, True])
def test_queued_copies_leave_only_while_none_is_written_and_nothing_else_can(stalls):
    memory = Memory()
    memory.queue.rows, memory.queue.stalls = memory.rows[:4], stalls
    assert len(memory.cpu.allocate(0, 4)) == 4
    assert memory.left() == {4, 5, 6, 7}
    assert memory.cpu.allocate(0, 5, keep_queued=True)[4:] == []
    assert len(memory.cpu.allocate(0, 1)) == stalls
