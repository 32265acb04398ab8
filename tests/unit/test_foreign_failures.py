# SPDX-License-Identifier: Apache-2.0
"""A neighbour's block that is gone when it is read costs a recompute, and is no failure of this
engine."""

from __future__ import annotations

import pytest
from support.fake_neighbours import FakeHome
from tier_bench import GEOMETRY, TierBench, keys_of

from kvdisk.index.base import SegmentRecord
from kvdisk.stats import FAILURES, HARMLESS

PROMPT = "aabbccddx"
BLOCKS = len(keys_of(PROMPT))


@pytest.mark.parametrize("queued", [False, True], ids=["loaded", "read ahead"])
def test_what_another_engine_evicted_meanwhile_is_counted_as_that_and_as_nothing_else(queued):
    bench = TierBench((16,), (64,), nvme_admission="all", min_load_tokens=0, most_running=1)
    home = FakeHome("n" * 32, SegmentRecord(0, GEOMETRY.groups[0].slot_bytes, 16, 0))
    for place, key in enumerate(keys_of(PROMPT)):
        home.store(
            key, place, 7 + place, 1, 0, GEOMETRY.groups[0]
        )  # the index names it, and the slot holds something else
    bench.neighbours.homes.append(home)
    bench.step()
    running = bench.add("z", finishing=not queued)
    bench.step()
    bench.add(PROMPT)
    bench.neighbours.answer()
    for _ in range(4):
        bench.step()
    running.finishing = True
    bench.finish()
    assert bench.stats["foreign_failures"] == BLOCKS
    assert bench.stats["promoted_blocks"] == bench.stats["loaded_blocks"] == 0
    assert {name: bench.stats[name] for name in FAILURES if bench.stats[name]} == {}
    assert set(HARMLESS).isdisjoint(FAILURES)
