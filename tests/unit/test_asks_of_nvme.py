# SPDX-License-Identifier: Apache-2.0
"""A block that NVMe refused stays a CPU hit, and is asked again: when its count rises, and before it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_engine import FakeEngine
from support.fake_ranks import FakeRank
from support.manager_parts import DAY_S, ManagerParts, Sizes
from support.manager_watch import ManagerWatch

from kvdisk.blocks import Tier, make_block_key
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.catalog import CopyState

GEOMETRY = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)
BLOCK_BYTES = GEOMETRY.slot_sizes[0]
FIRST, OTHERS = "aabbx", ("ccddx", "eeffx", "gghhx", "iijjx")


class Served:
    """An engine with a CPU tier of four blocks (or none) and an NVMe tier of eight."""

    def __init__(self, admission: str = "reuse(2)", bytes_per_day: int | None = None, cpu_slots: int = 4) -> None:
        config = Config(
            store_dirs=(Path("/nowhere"),),
            nvme_bytes=1,
            cpu_bytes=cpu_slots,
            nvme_admission=admission,
            nvme_write_bytes_per_day=bytes_per_day,
        )
        self.sizes = Sizes(GEOMETRY, config, 40, (cpu_slots,) if cpu_slots else (), (8,), 1, ())
        self.ranks = [FakeRank(0)]
        self.engine = FakeEngine(GEOMETRY, self.sizes.block_count, self.ranks)
        self.index, self.requests = MemoryIndex(), 0
        self.parts = ManagerParts.make(self.sizes, self.engine, self.index, 0)
        self.watch = ManagerWatch(self.sizes, self.parts, self.engine, self.ranks, self.index)
        self.stats = self.parts.manager.stats
        self.idle()

    def serve(self, text: str, *, cold: bool = False) -> None:
        """Serve a prompt to its end, and step until nothing is left to do."""
        if cold:
            self.engine.pool.forget_all()
        self.requests += 1
        request = self.engine.add(f"request {self.requests}", text, 1)
        while request.id in self.engine.requests:
            request.finishing = True
            self._step()
        self.idle()

    def idle(self) -> None:
        """Step until the manager asks for no more steps."""
        for _ in range(20):
            self._step()
            if not self.parts.manager.has_pending_work(self.engine.now):
                return
        raise AssertionError("it keeps an idle engine stepping")

    def _step(self) -> None:
        self.engine.schedule(8)
        self.engine.forward()
        while self.ranks[0].runnable:
            self.ranks[0].run_job(self.ranks[0].runnable[0])
        self.engine.update()
        self.index.commit()
        self.watch.check()

    def held(self, text: str, tier: Tier) -> list[bool]:
        """Return which of a prompt's blocks a tier has."""
        keys = [text[: 2 * (position + 1)] for position in range(len(text) // 2)]
        catalog = self.parts.catalog
        rows = [catalog.find(make_block_key(key.encode(), 0)) for key in keys]
        return [row >= 0 and catalog.state(row, tier) == CopyState.READY for row in rows]


@pytest.mark.parametrize("cold", [False, True], ids=["has it on the GPU", "loads it from the CPU tier"])
def test_a_refused_block_is_a_cpu_hit_and_is_asked_when_another_request_wants_it(cold):
    served = Served()
    served.serve(FIRST)
    assert served.held(FIRST, Tier.CPU) == [True, True]
    assert served.held(FIRST, Tier.NVME) == [False, False]
    served.serve(FIRST, cold=cold)
    assert served.stats["hit_tokens.cpu"] == (4 if cold else 0)
    assert served.held(FIRST, Tier.NVME) == [True, True]


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
    assert served.parts.manager.has_pending_work(served.engine.now)
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
        served._step()
    assert served.held(OTHERS[1], Tier.NVME) == [True, True], "while its request lives it is offered again"
    request.finishing = True
    served.idle()


def test_the_share_of_a_full_tier_goes_by_its_room():
    served = Served("adaptive")
    policy = served.parts.nvme.admission
    assert served.parts.nvme.most_slots == 8
    for text in (FIRST, *OTHERS[:2]):
        served.serve(text)
        assert served.held(text, Tier.NVME) == [True, True], "there is room"
    policy.distance = 1e9
    served.serve(OTHERS[2])
    assert served.held(OTHERS[2], Tier.NVME) == [True, True], "the last of it"
    served.serve(OTHERS[3])
    assert served.held(OTHERS[3], Tier.NVME) == [False, False]
    served.serve(OTHERS[3])
    assert served.held(OTHERS[3], Tier.NVME) == [True, True]
