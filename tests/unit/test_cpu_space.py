# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kvdisk.blocks import BlockKey, Tier
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.eviction import LruPolicy
from kvdisk.manager.tiers import CpuSpace
from kvdisk.stats import Stats

GEOMETRY = Geometry((GroupGeometry(0, 16, 4096),), 1, 16)


class Room:
    """A CPU tier that is full of blocks without parents, the first the oldest."""

    def __init__(self, slots: int, ahead: int | None = None) -> None:
        self.catalog, self.stats = Catalog(), Stats()
        self.cpu = CpuSpace(GEOMETRY, (slots,), self.catalog, self.stats, LruPolicy, ahead)
        self._made = 0
        for _ in range(slots):
            self.store()

    def store(self) -> None:
        slots = self.cpu.allocate(0, 1)
        assert len(slots) == 1
        key = BlockKey(self._made.to_bytes(32, "big") + bytes(4))
        self._made += 1
        row = self.catalog.add(key, self._made, 0, None)
        self.catalog.begin((row,), Tier.CPU, (slots[0],))
        self.catalog.finish([row], Tier.CPU)
        self.cpu.inserted([row])

    @property
    def evicted(self) -> int:
        return self.stats.counts.get("evicted_blocks.cpu", 0)

    def rows(self) -> list[int]:
        """The oldest first."""
        return sorted(self.catalog.rows(), key=lambda row: self.catalog.keys[row])

    def numbers(self) -> set[int]:
        return {int.from_bytes(self.catalog.keys[row][:32], "big") for row in self.catalog.rows()}


@pytest.mark.parametrize(("slots", "ahead"), [(4, 0), (255, 0), (256, 1), (1000, 3), (3840, 15), (100_000, 15)])
def test_a_few_more_than_needed_leave_at_a_time(slots, ahead):
    room = Room(slots)
    counts = []
    for _ in range(2 * (ahead + 1)):
        room.store()
        counts.append(room.evicted)
    assert counts == [1 + ahead] * (1 + ahead) + [2 * (1 + ahead)] * (1 + ahead)
    assert room.numbers() == set(range(2 * (1 + ahead), slots + 2 * (1 + ahead))), "the oldest left, each for one"
    room.cpu.pool.check()


def test_those_that_leave_ahead_are_not_waited_for():
    room = Room(8, ahead=3)
    rows = room.rows()
    room.catalog.pin(rows[2:], Tier.CPU)
    assert len(room.cpu.allocate(0, 1)) == 1
    assert room.evicted == 2, "one that was needed, and the only other that may leave"
    room.catalog.unpin(rows[2:], Tier.CPU)
    assert len(room.cpu.allocate(0, 2)) == 2
    assert room.numbers() == {6, 7}, "the order is as if nothing had been looked for"


def test_of_the_backlog_none_leaves_ahead():
    """What waits to be written to a drive leaves only where nothing else can, and then for a block that needs it."""
    room = Room(8, ahead=3)
    assert room.cpu.enqueue(room.rows()) == 4
    room.cpu.is_draining = False
    assert len(room.cpu.allocate(0, 1)) == 1
    assert (room.evicted, room.cpu.backlog_count(0)) == (4, 4), "all others"
    assert len(room.cpu.allocate(0, 4)) == 4
    assert (room.evicted, room.cpu.backlog_count(0)) == (5, 3)
    assert room.cpu.allocate(0, 1, spare_backlog=True) == []


def test_the_backlog_leaves_for_what_others_leave_short():
    room = Room(8, ahead=0)
    assert room.cpu.enqueue(room.rows()) == 4
    room.cpu.is_draining = False
    assert len(room.cpu.allocate(0, 6)) == 6
    assert (room.evicted, room.cpu.backlog_count(0)) == (6, 2)


@pytest.mark.parametrize(("waiting", "evicted"), [(0, 2), (2, 1), (3, 1), (4, 1)])
def test_what_is_wanted_elsewhere_does_not_leave_ahead_of_its_place_in_the_backlog(waiting, evicted):
    """Of eight copies every other one is wanted on a drive, and in the backlog is place for four."""
    room = Room(8, ahead=3)
    rows = room.rows()
    assert room.cpu.enqueue(rows[8 - waiting :]) == waiting
    wanted = set(rows[::2])
    room.cpu.before_evict = lambda row: row in wanted and room.cpu.enqueue([row]) == 1
    assert len(room.cpu.allocate(0, 1)) == 1
    assert room.evicted == evicted
    left = set(rows) - set(room.rows())
    assert len(left & wanted) <= (waiting == 4), "one for the block that needs its slot"
    room.cpu.pool.check()
