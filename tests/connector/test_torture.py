# SPDX-License-Identifier: Apache-2.0
"""Long, seeded runs of a real vLLM engine under many configurations: the tokens are those of vLLM
alone."""

from __future__ import annotations

from typing import Any

import pytest
from engine_child import STEADY, EngineChild
from torture_rounds import GPU, HERE, LIMITS_OF, MIB, MOST_TOKENS, PROMPTS, ROUNDS, SEED, run_round, verify_store

pytestmark = pytest.mark.torture

FEW_BLOCKS = {"num_gpu_blocks_override": 45, "max_num_seqs": 8}
STORE = {"nvme_bytes": 14 * MIB, "segment_bytes": MIB}
WORKLOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny GPU pool, preemptions": (FEW_BLOCKS, {"cpu_bytes": "4MiB", "store_decode": True}),
    "tiny CPU tier, a full backlog": (
        {"async_scheduling": False},
        STORE | {"cpu_bytes": 800_000, "store_decode": True},
    ),
    "tiny segments, evictions": ({}, {"cpu_bytes": "2MiB", "nvme_bytes": 12 * MIB, "segment_bytes": 300_000}),
    "no CPU tier": ({}, STORE | {"cpu_bytes": 0, "store_decode": True}),
    "no prefix cache on the GPU, admission by reuse": (
        {"enable_prefix_caching": False, "max_num_batched_tokens": 2048},
        STORE | {"cpu_bytes": "3MiB", "cpu_admission": "reuse(2)", "nvme_admission": "reuse(2)"},
    ),
    "victims saved, tiny GPU pool": (FEW_BLOCKS, {"cpu_bytes": "4MiB", "store_policy": "on_preemption"}),
    "victims saved, no CPU tier": (
        FEW_BLOCKS | {"async_scheduling": False},
        STORE | {"cpu_bytes": 0, "store_policy": "on_preemption"},
    ),
    "spillover": ({}, STORE | {"cpu_bytes": "3MiB", "store_decode": True, "store_policy": "spillover"}),
    "units of two blocks": (
        FEW_BLOCKS,
        {
            "cpu_bytes": "2MiB",
            "nvme_bytes": 12 * MIB,
            "segment_bytes": 300_000,
            "unit_tokens": 64,
            "store_decode": True,
        },
    ),
    "victims saved, units of two blocks": (
        FEW_BLOCKS,
        STORE | {"cpu_bytes": "4MiB", "store_policy": "on_preemption", "unit_tokens": 64},
    ),
    "no waiting, few pins, least staging": (
        {"async_scheduling": False},
        STORE | {"cpu_bytes": "3MiB", "lookup_wait_s": 0, "staging_bytes": 0},
    ),
}

RESTARTED = {"tiny segments, evictions", "units of two blocks"}
LAZY = (
    *("victims saved, tiny GPU pool", "victims saved, no CPU tier", "victims saved, units of two blocks"),
    "spillover",
)
BOTH = [
    *(("llama", name) for name in WORKLOADS if name not in LAZY),
    ("llama", "victims saved, units of two blocks"),
    # With several KV-cache groups those that fill and empty the tiers most, and those that store
    # little or late.
    *(("gemma3", name) for name in ("tiny GPU pool, preemptions", "tiny segments, evictions", *LAZY)),
    ("gemma3", "units of two blocks"),
    # Chunks, and sinks beside windows.
    ("llama4", "units of two blocks"),
    ("gpt-oss", "units of two blocks"),
]


@pytest.mark.parametrize(("model", "name"), BOTH, indirect=["model"])
def test_workload(name, model, expected, tmp_path):
    limits, extra = WORKLOADS[name]
    limits = limits | LIMITS_OF.get(model.name, {})
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
                    assert engine.call("engine_acts:reset_all")
            # What is saved of a victim is mostly still in the engine's own cache when it comes
            # back.
            assert counters.get("stored_blocks" if name.startswith("victims") else "loaded_blocks", 0) > 0
        if "nvme_bytes" in extra:
            verify_store(store, extra["nvme_bytes"])


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
def test_two_of_them_in_a_multi_connector(model, expected, tmp_path):
    """The first one that has something loads it; the other one is not chosen, and stores all the
    same."""
    store = STORE | {"cpu_bytes": "2MiB", "store_dirs": str(tmp_path / "store")}
    children = [
        {"kv_connector": "KVDiskConnector", "kv_role": "kv_both", "kv_connector_extra_config": STEADY | extra}
        for extra in (store, {"cpu_bytes": "4MiB"})
    ]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    with EngineChild(model, tmp_path / "log", env=HERE, **GPU, kv_transfer_config=transfer) as engine:
        for at in range(ROUNDS):
            run_round(engine, SEED + at, expected)
            first, second = engine.call("engine_acts:audit")["connectors"]
        assert first["counters"]["loaded_blocks"] > 0
        assert second["counters"]["stored_blocks"] > 0
        for name in ("stored_blocks", "loaded_blocks"):
            total = sum(facts["counters"].get(name, 0) for facts in (first, second))
            assert engine.metrics()[f"kvdisk_{name}"] == total, "vLLM adds up what both count"


@pytest.mark.parametrize("cpu_bytes", ["4MiB", 0])
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_resets_and_new_weights_under_load(cpu_bytes, model, expected, tmp_path):
    """Each reset succeeds, whatever stores are out, and nothing from before one is served after
    it."""
    extra = STORE | {"cpu_bytes": cpu_bytes, "store_dirs": str(tmp_path / "store"), "store_decode": True}
    # Too few for the prefix cache to keep what is asked for again.
    too_few = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 512}
    with EngineChild(model, tmp_path / "log", extra_config=extra, env=HERE, **GPU | too_few) as engine:
        engine.call("engine_acts:use_weights", 1)
        others = [answer.tokens for answer in engine.generate(PROMPTS, MOST_TOKENS, together=False)]
        changed = sum(one != other for one, other in zip(expected, others, strict=True))
        assert changed > len(PROMPTS) // 2, "else the test shows nothing"
        engine.drain()
        engine.call("engine_acts:use_weights", 0)
        assert engine.call("engine_acts:reset_all")
        counts = run_round(engine, SEED, expected, others, count=900, steps_between=44)
        assert counts["resets"] >= 60 and counts["interrupted"] > counts["resets"] // 2, counts
        assert counts["stores_out"] > 0 and counts["compared"] > counts["resets"], counts
        engine.call("engine_acts:audit")
        assert engine.counters()["loaded_blocks"] > 0
