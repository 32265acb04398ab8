# SPDX-License-Identifier: Apache-2.0
"""What an engine with a second tier in memory does: run by ``test_seams``, with the plugin
``support.second_memory``. Every byte that a load brings is looked at (``LocalRank``)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel

from kvdisk.blocks import KEPT_TIERS
from kvdisk.worker import resources
from kvdisk.worker.resources import Resources

CPU, FAR, NVME = KEPT_TIERS
WAYS = ("cpu_to_far", "far_to_cpu", "far_to_nvme", "nvme_to_cpu")
SHAPE = LoadShape(width=4, at_once=4, most_tokens=60, forgets=0.3, aborts=0.05)
PROMPTS = [f"{at} are the words of a prompt" for at in range(3)]


@pytest.mark.parametrize(("windowed", "ranks", "threads"), [(False, 1, 0), (True, 2, 0), (False, 1, 2)])
def test_blocks_go_down_and_come_back_from_each_tier(
    windowed: bool, ranks: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``threads``: that copy between the two memories, as on a GPU machine."""
    monkeypatch.setattr(
        resources, "Resources", lambda *parts, **more: Resources(*parts, **more | {"checksum_threads": threads})
    )
    model = LiveModel(windowed=windowed, ranks=ranks)
    config = model.config(str(tmp_path / "store"), blocks=60, nvme_admission="all")
    counted: Counter[str] = Counter()
    for seed in range(2):  # the second one finds what the first has left on the drive
        engine = LiveEngine(config, model)
        try:
            LiveLoad(engine, seed, SHAPE).run_requests(50)
            audit(engine)
            stats = engine.manager.stats
            assert [space.tier for space in engine.manager._tiers] == [CPU, FAR, NVME]
            counted.update({tier.label: stats[f"hit_blocks.{tier.label}"] for tier in KEPT_TIERS})
            counted.update({way: int(stats.sum_of(f"transfer_bytes.{way}")) for way in WAYS})
            assert not stats["verification_failures.header"] and not stats["verification_failures.checksum"]
        finally:
            engine.close()
    assert all(counted.values()), counted


def test_without_a_drive_what_leaves_the_first_memory_is_in_the_second(tmp_path: Path) -> None:
    model = LiveModel()
    held = model.config(str(tmp_path / "store"), blocks=8)
    engine = LiveEngine(held.__class__(cpu_bytes=held.cpu_bytes, min_load_tokens=0), model)
    try:
        engine.serve(PROMPTS)
        engine.serve(PROMPTS)
        stats = engine.manager.stats
        assert stats["hit_blocks.far"] > 10 and stats["evicted_blocks.cpu"] > 10, dict(stats.counts)
        assert not stats["evicted_blocks.far"]
        engine.change_weights()
        hits = stats["hit_tokens.far"] + stats["hit_tokens.cpu"]
        engine.serve(PROMPTS[:1])
        assert stats["hit_tokens.far"] + stats["hit_tokens.cpu"] == hits, "of other weights"
        audit(engine)
    finally:
        engine.close()
