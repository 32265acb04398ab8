# SPDX-License-Identifier: Apache-2.0
"""Live engines that are short of GPU blocks, under each store policy: every byte that a step reads
is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_children import SEED
from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel

from kvdisk.messages import JobKind

SHAPE = LoadShape(width=3, most_tokens=40, most_outputs=24, at_once=8, aborts=0.05, forgets=0.02, resets=0.002)


@pytest.mark.parametrize(("windowed", "no_cpu"), [(True, False), (False, True)], ids=["window", "no CPU tier"])
@pytest.mark.parametrize("policy", ["on_compute", "on_preemption", "spillover"])
def test_requests_are_preempted_and_read_the_right_bytes(
    policy: str, no_cpu: bool, windowed: bool, quick_path: Path
) -> None:
    model = LiveModel(windowed=windowed)
    more = {"cpu_bytes": 0} if no_cpu else {}
    config = model.config(str(quick_path / "store"), blocks=64, store_policy=policy, store_decode=True, **more)
    engine = LiveEngine(config, model, block_count=44 if windowed else 30)
    load = LiveLoad(engine, SEED + 7, SHAPE)
    try:
        for _ in range(100):  # the slower the stores, the rarer the preemptions
            load.run_requests(20)
            audit(engine)
            if engine.counting.preempted >= 30 and engine.counting.jobs[JobKind.LOAD]:
                break
        assert engine.counting.preempted >= 30
        assert engine.counting.jobs[JobKind.STORE] > 0
        assert engine.counting.jobs[JobKind.LOAD] > 0
    finally:
        engine.close()
