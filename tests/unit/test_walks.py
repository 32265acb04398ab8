# SPDX-License-Identifier: Apache-2.0
"""What a step looks at of a long line, a backlog or a store: a number that does not grow with it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.fake_neighbours import FakeNeighbours
from support.fake_ranks import FakeRank
from support.manager_parts import ManagerParts, Sizes
from support.manager_watch import ManagerWatch

from kvdisk.blocks import BlockKey, Tier
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.base import Answer, ForeignCopy, SegmentRecord
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager import neighbours
from kvdisk.manager.demotions import MAX_DEMOTE_JOBS, MAX_DEMOTE_MOVES
from kvdisk.manager.neighbours import NeighbourCopies
from kvdisk.manager.prefetch import MOST_SEEN

GEOMETRY = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)
MANY = 2000


class Counted(OrderedDict[Any, Any]):
    """Counts what is iterated over."""

    steps = 0

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self.steps += 1
            yield key

    def items(self) -> Any:
        return ((key, self[key]) for key in self)


def counted(original: Any) -> Counted:
    assert isinstance(original, OrderedDict), (
        "the first of a plain dict is found by passing over all that were before it"
    )
    return Counted(original)


class Parts:
    """A manager with both tiers, whose drives answer when ``work`` is called."""

    def __init__(self, cpu_slots: int = 8 * MANY) -> None:
        config = Config(store_dirs=(Path("/nowhere"),), nvme_bytes=1, cpu_bytes=1, nvme_admission="all")
        sizes = Sizes(GEOMETRY, config, 60, (cpu_slots,), (MANY,), 4, (), most_running=1)
        self.ranks, self.index = [FakeRank(0)], MemoryIndex()
        self.engine = FakeEngine(GEOMETRY, sizes.block_count, self.ranks, sizes.most_running)
        self.neighbours = FakeNeighbours([])
        self.parts = ManagerParts.make(sizes, self.engine, self.index, 0, self.neighbours)
        ManagerWatch(sizes, self.parts, self.engine, self.ranks, self.index)

    def open_segment(self) -> None:
        nvme = self.parts.nvme
        assert nvme is not None
        while not nvme.has_room(0):
            nvme.make_room(self.engine.now, [1])
            self.step()

    def step(self) -> None:
        self.engine.now += 0.01
        self.engine.schedule(16)
        self.engine.forward()
        while self.ranks[0].runnable:
            self.ranks[0].run_job(self.ranks[0].runnable[0])
        self.index.commit()
        self.engine.update()


def test_demotions_take_from_a_long_backlog_no_more_than_they_move():
    parts = Parts()
    parts.open_segment()
    cpu, catalog = parts.parts.cpu, parts.parts.catalog
    assert cpu is not None
    rows = []
    for number, slot in enumerate(cpu.pool.allocate(0, MANY)):
        rows.append(catalog.add(BlockKey(number.to_bytes(32, "big") + bytes(2)), number + 1, 0, None))
        catalog.begin((rows[-1],), Tier.CPU, (slot,))
    cpu.finish(rows, 0)
    demotions = parts.parts.demotions
    assert demotions is not None and demotions.enqueue(rows) == MANY
    backlog = demotions._queues[0] = counted(demotions._queues[0])
    parts.parts.manager.take_plan(parts.engine.now, idle=True)
    assert MANY - len(backlog) == MAX_DEMOTE_JOBS * MAX_DEMOTE_MOVES
    assert backlog.steps <= MAX_DEMOTE_JOBS * MAX_DEMOTE_MOVES


def test_reading_ahead_looks_at_the_head_of_the_line():
    parts = Parts()
    parts.engine.add("running", "z", 2)
    for number in range(MANY):
        parts.engine.add(f"request {number}", f"{number:05}", 0)
    promotions = parts.parts.manager._promotions
    waiting = promotions._waiting = counted(promotions._waiting)
    promotions.plan()
    assert waiting.steps <= MOST_SEEN
    assert len(waiting) < MANY + 1, "those of whom nothing is to be read ahead have left the line"
    before = waiting.steps
    promotions.enqueue(parts.parts.manager._requests[f"request {MANY - 1}"], first=True)
    assert waiting is promotions._waiting and waiting.steps == before, "a victim goes to the head at no cost"
    assert next(iter(waiting)).request_id == f"request {MANY - 1}"


def test_what_was_heard_of_too_long_ago_is_forgotten_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    parts = Parts()
    known: NeighbourCopies = parts.parts.manager._neighbours
    segment = SegmentRecord(0, GEOMETRY.groups[0].slot_bytes, MANY)
    keys = [BlockKey(number.to_bytes(32, "big") + bytes(2)) for number in range(MANY)]
    copies = {key: (ForeignCopy("a" * 32, segment, at, 1 + at),) for at, key in enumerate(keys)}
    known._unanswered[7] = keys
    monkeypatch.setattr(parts.neighbours, "poll", lambda: [Answer(7, copies)])
    known.absorb(1000.0)
    assert len(known.hints) == MANY
    monkeypatch.setattr(parts.neighbours, "poll", list)
    known.hints = counted(known.hints)
    later = 1000.0 + neighbours.HINT_LIFE_S + 1.0
    known.absorb(later)
    assert MANY - len(known.hints) == neighbours.MOST_FORGOTTEN
    assert known.hints.steps <= neighbours.MOST_FORGOTTEN + 1
    while known.hints:
        known.absorb(later)


def test_a_full_store_of_many_segments_is_not_gone_through_for_room():
    parts = Parts()
    parts.open_segment()
    nvme = parts.parts.nvme
    assert nvme is not None
    while nvme.segments.plan_new(0, 0.0):
        for spec in nvme.segments.specs.values():
            nvme.segments.attached(spec)
    specs = nvme.segments.specs = Counted(nvme.segments.specs)
    specs.values = lambda: [specs[key] for key in specs]  # type: ignore[method-assign]
    assert len(specs) == 4, "all that the cap allows"
    assert not nvme.segments.plan_new(0, 0.0)
    nvme._evict(0, 1)
    assert specs.steps == 0
