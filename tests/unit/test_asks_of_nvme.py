# SPDX-License-Identifier: Apache-2.0
"""What NVMe does not take: what is counted of it, and what waits for its budget."""

from __future__ import annotations

import pytest
from support.manager_parts import DAY_S
from tier_bench import GEOMETRY, TierBench

from kvdisk.blocks import Tier

BLOCK_BYTES = GEOMETRY.slot_sizes[0]
FIRST, OTHERS = "aabbx", ("ccddx", "eeffx", "gghhx", "iijjx")


class Served(TierBench):
    """An engine with a CPU tier of four blocks and an NVMe tier of eight."""

    def __init__(self, admission: str = "reuse(2)", bytes_per_day: int | None = None) -> None:
        super().__init__((4,), (8,), nvme_admission=admission, nvme_write_bytes_per_day=bytes_per_day)
        self.idle()


@pytest.mark.parametrize(("why", "how"), [("reuse", ()), ("budget", ("all", 2 * BLOCK_BYTES))])
def test_what_leaves_unwanted_is_counted_by_reason(why, how):
    served = Served(*how)
    for text in (FIRST, *OTHERS):
        served.serve(text)
    assert served.stats[f"evicted_unwritten.{why}"] == served.stats["evicted_blocks.cpu"] == 6


def test_a_spent_budget_plans_no_demotion_and_keeps_no_engine_awake():
    served = Served("all", 48 * BLOCK_BYTES)
    served.serve(FIRST)
    assert served.held(FIRST) == [False, False], "it starts empty"
    served.engine.now += DAY_S
    assert served.manager.has_pending_work(served.engine.now)
    served.idle()
    assert served.held(FIRST) == [True, True]
    served.serve(OTHERS[0])
    assert served.held(OTHERS[0]) == [False, False]
    assert served.stats["budget_pauses"] == 1
    served.serve(OTHERS[0], cold=True)
    assert served.stats["hit_tokens.cpu"] == 4, "CPU hits go on"
    served.engine.now += DAY_S
    served.idle()
    assert served.held(OTHERS[0]) == [True, True]


def test_queued_copies_leave_only_while_nothing_is_written_and_nothing_else_can():
    served = Served("all", 48 * BLOCK_BYTES)
    served.serve(FIRST)
    served.serve(OTHERS[0])
    cpu, dirty = served.parts.cpu, served.parts.dirty
    assert dirty.blocked and dirty.counts[0] == dirty.limit(0) == 2
    assert len(cpu.allocate(0, 3, keep_dirty=True)) == 2
    assert not cpu.allocate(0, 1, keep_dirty=True)
    assert served.held(FIRST, Tier.CPU) == [True, True], "those that are queued have stayed"
    dirty.blocked = False
    assert not cpu.allocate(0, 1)
    dirty.blocked = True
    assert len(cpu.allocate(0, 1)) == 1
