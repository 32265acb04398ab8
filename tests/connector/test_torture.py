# SPDX-License-Identifier: Apache-2.0
"""Long, seeded runs of one real vLLM engine under many configurations: the tokens are those of vLLM
alone.

The other long runs, of several engines, ranks and starts, are in ``test_torture_engines.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_child import EngineChild
from torture_rounds import GPU, HERE, MIB, ROUNDS, SEED, run_round, verify_store

pytestmark = [pytest.mark.vllm, pytest.mark.torture]

WORKLOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny GPU pool, preemptions": (
        {"num_gpu_blocks_override": 45, "max_num_seqs": 8},
        {"cpu_bytes": "4MiB", "store_decode": True},
    ),
    "tiny CPU tier, a full backlog": (
        {"async_scheduling": False},
        {"cpu_bytes": 800_000, "nvme_bytes": 16 * MIB, "segment_bytes": "1MiB", "store_decode": True},
    ),
    "tiny segments, evictions": ({}, {"cpu_bytes": "2MiB", "nvme_bytes": 12 * MIB, "segment_bytes": 300_000}),
    "no CPU tier": ({}, {"cpu_bytes": 0, "nvme_bytes": 12 * MIB, "segment_bytes": "1MiB", "store_decode": True}),
    "no prefix cache on the GPU, admission by reuse": (
        {"enable_prefix_caching": False, "max_num_batched_tokens": 2048},
        {
            "cpu_bytes": "3MiB",
            "nvme_bytes": 14 * MIB,
            "segment_bytes": "1MiB",
            "cpu_admission": "reuse(2)",
            "nvme_admission": "reuse(2)",
        },
    ),
    "victims saved, tiny GPU pool": (
        {"num_gpu_blocks_override": 45, "max_num_seqs": 8},
        {"cpu_bytes": "4MiB", "store_policy": "on_preemption"},
    ),
    "victims saved, no CPU tier": (
        {"num_gpu_blocks_override": 45, "max_num_seqs": 8, "async_scheduling": False},
        {"cpu_bytes": 0, "nvme_bytes": 16 * MIB, "segment_bytes": "1MiB", "store_policy": "on_preemption"},
    ),
    "spillover": (
        {},
        {
            "cpu_bytes": "3MiB",
            "nvme_bytes": 14 * MIB,
            "segment_bytes": "1MiB",
            "store_decode": True,
            "store_policy": "spillover",
        },
    ),
    "no waiting, few pins, least staging": (
        {"async_scheduling": False},
        {
            "cpu_bytes": "3MiB",
            "nvme_bytes": 14 * MIB,
            "segment_bytes": "1MiB",
            "lookup_wait_s": 0,
            "staging_bytes": 0,
        },
    ),
}

RESTARTED = {"tiny segments, evictions"}
LAZY = ("victims saved, tiny GPU pool", "victims saved, no CPU tier", "spillover")
BOTH = [
    *(("llama", name) for name in WORKLOADS if name not in LAZY),
    # With several KV-cache groups those that fill and empty the tiers most, and those that store
    # little or late.
    *(("gemma3", name) for name in ("tiny GPU pool, preemptions", "tiny segments, evictions", *LAZY)),
]


@pytest.mark.parametrize(("model", "name"), BOTH, indirect=["model"])
def test_workload(name: str, model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    limits, extra = WORKLOADS[name]
    store = tmp_path / "store"
    extra = extra | ({"store_dirs": str(store)} if "nvme_bytes" in extra else {})
    for start in range(1 + (name in RESTARTED)):
        with EngineChild(model, tmp_path / "log", extra_config=extra, env=HERE, **GPU | limits) as engine:
            for at in range(ROUNDS):
                seed = SEED + 100 * start + at
                run_round(engine, seed, expected)
                (facts,) = engine.call("engine_acts:audit")["connectors"]
                counters = facts["counters"]
                bad = {name for name in counters if name.endswith("_failures") or name.startswith("failed")}
                assert not bad, f"seed {seed}: {counters}"
                if "nvme_bytes" in extra:
                    assert verify_store(store, extra["nvme_bytes"]) + facts["dropped_puts"] >= facts["nvme_blocks"]
                if at == 0 and start == 0:
                    assert engine.call("engine_acts:reset", True), "with the connector's cache"
            # What is saved of a victim is mostly still in the engine's own cache when it comes
            # back.
            assert counters.get("stored_blocks" if name.startswith("victims") else "loaded_blocks", 0) > 0
        if "nvme_bytes" in extra:
            verify_store(store, extra["nvme_bytes"])
