# SPDX-License-Identifier: Apache-2.0
"""A load that fails where all layers have sliding windows, on vLLM's real scheduler, with bytes that are looked at."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from schedulers import BLOCK_TOKENS
from worked_scheduler import WorkedBench

from kvdisk.geometry import HEADER_BYTES

pytestmark = pytest.mark.vllm

WAIT_S = 600.0
PROMPT = list(range(100, 100 + 6 * BLOCK_TOKENS + 5))


def _serve(bench: WorkedBench) -> None:
    end_s = time.monotonic() + WAIT_S
    while bench.scheduler.has_requests():
        assert time.monotonic() < end_s
        bench.step()


def test_what_is_computed_after_a_failed_block_has_its_whole_window(tmp_path: Path) -> None:
    """vLLM goes on from the first failed block, and has no blocks for what the window reaches before it."""
    bench = WorkedBench(tmp_path / "model", window_tokens=2 * BLOCK_TOKENS, window_only=True)
    bench.add("a", PROMPT)
    _serve(bench)
    assert bench.scheduler.reset_prefix_cache()
    arena = bench.worker.worker.mover._runner._resources.arena
    for index in range(6):
        arena.view(0, index)[HEADER_BYTES + 7] ^= 1
    bench.add("b", PROMPT)
    counts: list[int] = []
    while bench.scheduler.has_requests():
        counts += bench.step().num_scheduled_tokens.values()
    assert bench.counters()["failed_loads"] > 0
    assert counts[0] == len(PROMPT), "computed from the first token on"
    bench.close()
