# SPDX-License-Identifier: Apache-2.0
"""What a step looks at of a long line, a backlog or a store: a number that does not grow with
it."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from tier_bench import TierBench

from kvdisk.blocks import BlockKey, Tier
from kvdisk.index.base import BlockColumns
from kvdisk.manager import bounds
from kvdisk.manager.parents import bytes_of
from kvdisk.manager.step_work import Kind
from kvdisk.messages import JobKind

MANY = 2000


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


def make_bench() -> TierBench:
    return TierBench((8 * MANY,), (MANY,), segments=4, gpu_blocks=60, most_running=1, nvme_admission="all")


def test_demotions_take_from_a_long_backlog_no_more_than_they_move():
    bench = make_bench()
    while not bench.parts.nvme.free_slots(0):
        bench.parts.nvme.make_room(bench.engine.now, [1])
        bench.step()
    cpu, catalog, dirty = bench.parts.cpu, bench.catalog, bench.parts.dirty
    rows = []
    for number, slot in enumerate(cpu.pool.allocate(0, MANY)):
        rows += catalog.add([BlockKey(number.to_bytes(32, "big") + bytes(2))], [number + 1], 0, [None])
        catalog.begin((rows[-1],), Tier.CPU, (slot,))
    cpu.finish(rows)
    cpu.offer(rows)
    assert dirty.total == MANY
    bench.parts.transfers.add(JobKind.DEMOTE, [], [])  # as if between two other tiers
    bench.manager.take_plan(bench.engine.now, idle=True)
    assert MANY - dirty.total == bounds.JOBS * bounds.MOVES
    assert all(row in dirty for row in rows[bounds.JOBS * bounds.MOVES :]), "the oldest were taken"


def test_reading_ahead_looks_at_the_head_of_the_line():
    bench = make_bench()
    bench.engine.add("running", "z", 2)
    for number in range(MANY):
        bench.engine.add(f"request {number}", f"{number:05}", 0)
    promotions = bench.manager._promotions
    assert isinstance(promotions._waiting, OrderedDict), "of a plain dict the first is found by passing over all"
    assert calls_of(lambda: bench.manager._work.run(Kind.PREFETCH)) < MANY
    assert len(promotions._waiting) < MANY, "those of whom nothing is to be read ahead have left the line"
    victim = bench.manager._requests[f"request {MANY - 1}"]
    assert calls_of(lambda: promotions.enqueue(victim, first=True)) < MANY // 10, "to the head of the line at no cost"
    assert next(iter(promotions._waiting)) is victim


def test_a_reset_does_not_look_at_each_copy():
    bench, numbers = make_bench(), np.arange(MANY)
    nothing = np.zeros(MANY, np.uint32)
    blocks = BlockColumns(
        epochs=nothing.astype(np.uint64),
        keys=[BlockKey(number.to_bytes(32, "big") + bytes(2)) for number in range(MANY)],
        segments=(numbers // 50).astype(np.uint32),
        indices=(numbers % 50).astype(np.uint32),
        generations=numbers.astype(np.uint64),
        parents=b"",
        parent_bytes=nothing.astype(np.int64),
        stored_s=nothing,
        tenants=nothing.astype(np.uint64),
    )
    bench.catalog.fill(Tier.NVME, blocks, bytes_of(blocks.keys))
    assert calls_of(lambda: bench.manager.reset(7)) < MANY // 10
