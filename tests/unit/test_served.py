# SPDX-License-Identifier: Apache-2.0
"""What is counted of a request's hit: by tier, in tokens and blocks, once for each time it is taken
up."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.manager_parts import Sizes
from support.small_engine import SmallEngine

from kvdisk.blocks import Tier, make_block_key
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.jobs import MoveDetail
from kvdisk.manager.requests import HitCounts, RequestState
from kvdisk.stats import Stats

ONE = Geometry((GroupGeometry(0, 4, 4096),), 1, 4)
TWO = Geometry((GroupGeometry(0, 4, 4096), GroupGeometry(1, 2, 4096, window_tokens=5)), 1, 2)
SMALL = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)
CPU, NVME, NOWHERE = "cpu", "nvme", "nowhere"


def counted(stats: Stats) -> dict[str, int]:
    """Return hits and misses, without the zeros."""
    names = ("hit_tokens", "missed_tokens", "hit_blocks", "missed_blocks", "lookup_tokens")
    return {series: count for series, count in stats.counts.items() if series.startswith(names)}


class Desk:
    """A request at position ``local`` whose lookups are answered by hand."""

    def __init__(self, geometry: Geometry = ONE, *, has_cpu: bool = True, has_nvme: bool = True) -> None:
        self.stats = Stats()
        tiers = [tier for tier, there in ((Tier.CPU, has_cpu), (Tier.NVME, has_nvme)) if there]
        self.counts = HitCounts(geometry, self.stats, tiers)
        self.request = RequestState("r", [], 100, geometry)

    def load(self, local: int, external: int, sources: list[tuple[int, int, str]]) -> None:
        """Plan a load whose blocks (group, position) come from these sources."""
        where = {CPU: Tier.CPU, NVME: Tier.NVME, NOWHERE: None}
        details = [MoveDetail(0, group, position, where[source]) for group, position, source in sources]
        self.counts.loaded(self.request, local, external, details)


def test_a_hit_that_is_partly_on_the_gpu_in_memory_and_on_nvme():
    desk = Desk()
    desk.request.asked = (8, 27, 12)
    desk.load(8, 12, [(0, 2, CPU), (0, 3, NVME), (0, 4, CPU)])
    assert desk.request.hit_tokens == {Tier.CPU: 8, Tier.NVME: 4}
    assert counted(desk.stats) == {
        "lookup_tokens": 16,  # from 8 to 24, the last multiple of a block
        "hit_tokens.cpu": 8,
        "hit_blocks.cpu": 2,
        "missed_tokens.cpu": 8,
        "missed_blocks.cpu": 2,
        "hit_tokens.nvme": 4,
        "hit_blocks.nvme": 1,
        "missed_tokens.nvme": 4,
        "missed_blocks.nvme": 1,
    }
    desk.counts.passed_over(desk.request)
    assert desk.stats["lookup_tokens"] == 16, "it was counted when its load was planned"


def test_a_miss_counts_when_the_request_runs_and_not_each_time_it_asks():
    desk = Desk()
    for _ in range(5):
        desk.request.asked = (0, 17, 0)
    assert counted(desk.stats) == {}
    for _ in range(3):
        desk.counts.passed_over(desk.request)
    assert counted(desk.stats) == {
        "lookup_tokens": 16,
        "missed_tokens.cpu": 16,
        "missed_blocks.cpu": 4,
        "missed_tokens.nvme": 16,
        "missed_blocks.nvme": 4,
    }


def test_a_promise_that_the_engine_did_not_take_is_no_miss():
    desk = Desk()
    desk.request.asked = (0, 17, 8)
    desk.counts.passed_over(desk.request)
    assert counted(desk.stats) == {}


@pytest.mark.parametrize(("tier", "other"), [("cpu", "nvme"), ("nvme", "cpu")])
def test_a_tier_that_does_not_exist_is_not_asked_and_serves_nothing(tier, other):
    """A window's blocks that the engine did not want have no move, and are still tokens of the
    hit."""
    desk = Desk(has_cpu=tier == "cpu", has_nvme=tier == "nvme")
    desk.request.asked = (0, 21, 12)
    desk.load(0, 12, [(0, 1, tier), (0, 2, NOWHERE)])
    assert desk.request.hit_tokens == {Tier[tier.upper()]: 12, Tier[other.upper()]: 0}
    assert not [series for series in counted(desk.stats) if series.endswith(other)]
    assert (desk.stats[f"hit_tokens.{tier}"], desk.stats[f"missed_tokens.{tier}"]) == (12, 8)


def test_with_several_groups_a_token_is_of_the_farthest_tier_that_one_of_its_blocks_came_from():
    desk = Desk(TWO)
    desk.request.asked = (4, 17, 8)
    desk.load(4, 8, [(0, 1, CPU), (0, 2, CPU), (1, 4, NVME), (1, 5, CPU)])
    assert desk.request.hit_tokens == {Tier.CPU: 6, Tier.NVME: 2}
    # Missed are the block from 12 on and, of the window group, those that reach what a hit up to 16
    # needs.
    assert (desk.stats["missed_blocks.nvme"], desk.stats["missed_tokens.nvme"]) == (1 + 2, 4)
    assert (desk.stats["hit_blocks.cpu"], desk.stats["hit_blocks.nvme"]) == (3, 1)


def test_a_wait_is_measured_once_from_its_first_answer_to_the_last():
    desk = Desk()
    for now in (10.0, 10.5, 11.0):
        desk.counts.waits(desk.request, now)
    desk.counts.waited(desk.request, 12.5)
    assert desk.request.waited_since_s is None
    samples = desk.stats.samples["wait_seconds"]
    assert (samples.count, samples.total, desk.stats["lookup_waits"]) == (1, 2.5, 3)


def test_gauges_and_hits_of_an_engine():
    """An engine with four blocks in memory and eight on NVMe, through its real manager."""
    config = Config(store_dirs=(Path("/nowhere"),), nvme_bytes=1, cpu_bytes=4, nvme_admission="all", prefetch=False)
    small = SmallEngine(Sizes(SMALL, config, 40, (4,), (8,), 1, ()))
    gauges, stats, slot_bytes = small.manager.gauges, small.manager.stats, SMALL.slot_sizes[0]

    def serve(text: str) -> dict[str, int]:
        small.engine.pool.forget_all()
        before = dict(stats.counts)
        small.serve(text)
        found = {name: count - before.get(name, 0) for name, count in counted(stats).items()}
        return {name: count for name, count in found.items() if count}

    missed = {f"missed_{what}.{tier}": count for what, count in (("tokens", 4), ("blocks", 2)) for tier in (CPU, NVME)}
    assert serve("aabbx") == {"lookup_tokens": 4, **missed}
    assert serve("aabbx") == {"lookup_tokens": 4, "hit_tokens.cpu": 4, "hit_blocks.cpu": 2}
    serve("ccddx"), serve("eeffx")
    of_cpu = {"missed_tokens.cpu": 4, "missed_blocks.cpu": 2}
    assert serve("aabbx") == {"lookup_tokens": 4, **of_cpu, "hit_tokens.nvme": 4, "hit_blocks.nvme": 2}
    read = gauges.read()
    assert (read["used_bytes.nvme"], read["capacity_bytes.nvme"]) == (6 * slot_bytes, 8 * slot_bytes)
    assert (read["held_blocks.cpu"], read["used_bytes.cpu"]) == (4, 4 * slot_bytes)
    assert read["uncommitted_changes"] == read["backlog_blocks"] == read["queued_jobs.load"] == 0
    assert not gauges.busy
    small.parts.nvme.drop(small.parts.catalog.rows_in(Tier.NVME, 0)[:1])
    read = gauges.read()
    assert (read["held_blocks.nvme"], read["limbo_blocks"], read["uncommitted_changes"]) == (5, 1, 1)
    assert gauges.busy
    small.add("gghhx")
    small.engine.schedule(8)
    assert gauges.read()["queued_jobs.store"] == 1


@pytest.mark.parametrize("cold", [False, True], ids=["in the GPU's cache", "in the tier"])
def test_what_is_asked_for_again_stays(cold):
    """A request that has its blocks, from a tier or from the GPU's own cache, counts as a use of
    their copies."""
    small = SmallEngine(Sizes(SMALL, Config(cpu_bytes=1), 40, (8,), (), 0, ()))
    catalog = small.parts.catalog

    def held(text: str) -> list[bool]:
        rows = [catalog.find(make_block_key(text[:end].encode(), 0)) for end in (2, 4)]
        return [row >= 0 and catalog.is_ready(row) for row in rows]

    for text in ("aabbx", "ccddx", "eeffx", "gghhx"):
        small.serve(text)
        assert held(text) == [True, True]
    if cold:
        small.engine.pool.forget_all()
    small.serve("aabbx")
    small.serve("iijjx")
    assert [held(text) for text in ("iijjx", "aabbx", "ccddx")] == [[True, True], [True, True], [False, False]]
