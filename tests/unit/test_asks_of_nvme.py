# SPDX-License-Identifier: Apache-2.0
"""A block that NVMe refused stays a CPU hit, and is asked again: when its count rises, and before
it leaves."""

from __future__ import annotations

from support.manager_parts import DAY_S
from tier_bench import GEOMETRY, TierBench

from kvdisk.blocks import Tier, make_block_key

BLOCK_BYTES = GEOMETRY.slot_sizes[0]
FIRST, OTHERS = "aabbx", ("ccddx", "eeffx", "gghhx", "iijjx")


class Served(TierBench):
    """An engine with a CPU tier of four blocks (or none) and an NVMe tier of eight."""

    def __init__(self, admission: str = "reuse(2)", bytes_per_day: int | None = None, cpu_slots: int = 4) -> None:
        cpu = (cpu_slots,) if cpu_slots else ()
        super().__init__(cpu, (8,), nvme_admission=admission, nvme_write_bytes_per_day=bytes_per_day)
        self.idle()

    def held(self, text: str, tier: Tier) -> list[bool]:
        """Return which of a prompt's blocks a tier has."""
        keys = [text[: 2 * (position + 1)] for position in range(len(text) // 2)]
        rows = [self.catalog.find(make_block_key(key.encode(), 0)) for key in keys]
        return [row >= 0 and self.catalog.readable(row, tier) for row in rows]


def test_it_is_asked_once_more_before_it_leaves(monkeypatch):
    served = Served()
    admission = served.parts.nvme.admission
    monkeypatch.setattr(served.watch, "_is_admitted", lambda *_: True)
    served.serve(FIRST)
    served.serve(OTHERS[0])
    assert served.held(FIRST, Tier.NVME) == [False, False]
    monkeypatch.setattr(admission, "admits", lambda keys: [True] * len(keys))
    served.serve(OTHERS[1])
    assert served.held(FIRST, Tier.NVME) == [False, True], "instead of leaving"
    assert served.held(FIRST, Tier.CPU)[0], "what it follows stays before it"
    assert served.stats["left_blocks.reuse"] == 0


def test_what_leaves_unwanted_is_counted_by_reason():
    served = Served()
    for text in (FIRST, *OTHERS):
        served.serve(text)
    assert served.stats["left_blocks.reuse"] == 6
    served = Served("all", 2 * BLOCK_BYTES)
    for text in (FIRST, *OTHERS):
        served.serve(text)
    assert served.stats["left_blocks.budget"] == served.stats["evicted_blocks.cpu"] == 6
    served = Served(cpu_slots=0)
    served.serve(FIRST)
    assert (served.stats["refused_blocks.room"], served.stats["refused_blocks.reuse"]) == (0, 2)


def test_a_spent_budget_plans_no_demotion_and_keeps_no_engine_awake():
    served = Served("all", 48 * BLOCK_BYTES)
    served.serve(FIRST)
    assert served.held(FIRST, Tier.NVME) == [False, False], "it starts empty"
    served.engine.now += DAY_S
    assert served.manager.has_pending_work(served.engine.now)
    served.idle()
    assert served.held(FIRST, Tier.NVME) == [True, True]
    served.serve(OTHERS[0])
    assert served.held(OTHERS[0], Tier.NVME) == [False, False]
    assert served.stats["budget_pauses"] == 1
    served.serve(OTHERS[0], cold=True)
    assert served.stats["hit_tokens.cpu"] == 4, "CPU hits go on"
    served.serve(FIRST, cold=True)
    served.engine.now += DAY_S
    served.idle()
    assert served.held(OTHERS[0], Tier.NVME) == [True, True]


def test_without_a_cpu_tier_a_spent_budget_refuses_and_is_asked_again():
    served = Served("all", 48 * BLOCK_BYTES, cpu_slots=0)
    served.engine.now += DAY_S
    served.idle()
    served.serve(FIRST)
    assert served.held(FIRST, Tier.NVME) == [True, True]
    served.serve(OTHERS[0])
    assert served.held(OTHERS[0], Tier.NVME) == [False, False]
    assert (served.stats["refused_blocks.budget"], served.stats["refused_blocks.room"]) == (2, 0)
    request = served.engine.add("long", OTHERS[1], 3)
    served.engine.schedule(8)
    served.engine.forward()
    served.engine.update()
    assert served.held(OTHERS[1], Tier.NVME) == [False, False]
    served.engine.now += DAY_S
    for _ in range(3):
        served.step()
    assert served.held(OTHERS[1], Tier.NVME) == [True, True], "while its request lives it is offered again"
    request.finishing = True
    served.idle()
