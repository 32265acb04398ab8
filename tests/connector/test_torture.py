# SPDX-License-Identifier: Apache-2.0
"""Long, seeded runs of real vLLM engines against vLLM alone: whatever happens, the tokens are the same.

Decoding of the tiny models does not depend on how requests are batched (``expected`` asserts it), so one baseline,
request after request, serves all of them. A failure names its seed. ``KVDISK_TORTURE_SEED`` shifts all seeds.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from engine_child import EngineChild, EngineError
from torture_damage import damage
from torture_prompts import MOST_TOKENS, make_prompts, make_requests, verify_store

pytestmark = [pytest.mark.vllm, pytest.mark.torture]

SEED = int(os.environ.get("KVDISK_TORTURE_SEED", "0"))
HERE = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))}
PROMPTS = make_prompts(SEED, 50)
ROUNDS = 2
MIB = 1 << 20
GPU = {"max_model_len": 512, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 96}

WORKLOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny GPU pool, preemptions": (
        {"num_gpu_blocks_override": 45, "max_num_seqs": 8},
        {"cpu_bytes": "4MiB", "store_decode": True, "max_pinned_gpu_blocks": 40},
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
            "max_pinned_gpu_blocks": 3,
            "staging_bytes": 0,
        },
    ),
}


@pytest.fixture(params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"tiny_{request.param}")


RESTARTED = {"tiny segments, evictions"}
LAZY = ("victims saved, tiny GPU pool", "victims saved, no CPU tier", "spillover")
BOTH = [
    *(("llama", name) for name in WORKLOADS if name not in LAZY),
    # With several KV-cache groups those that fill and empty the tiers most, and those that store little or late.
    *(("gemma3", name) for name in ("tiny GPU pool, preemptions", "tiny segments, evictions", *LAZY)),
]
ONE_GROUP = pytest.mark.parametrize("model", ["llama"], indirect=True)
SEVERAL_GROUPS = pytest.mark.parametrize("model", ["gemma3"], indirect=True)
DAMAGES = (
    ("payloads", "headers", "index deleted"),
    ("swapped slots", "truncated", "index truncated"),
    ("file of another segment", "missing file", "segment header", "index garbage", "HOME garbage"),
)


@pytest.fixture(scope="module")
def baselines() -> dict[Path, list[list[int]]]:
    """By model. A fixture that depended on the parameter would be made anew for each of its pairs with another."""
    return {}


@pytest.fixture
def expected(
    model: Path, baselines: dict[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """What vLLM alone answers to each prompt, one after the other; and, preempted and batched anyhow, all the same."""
    if model not in baselines:
        baselines[model] = _baseline(model, tmp_path_factory.mktemp("expected") / "log")
    return baselines[model]


def _baseline(model: Path, log: Path) -> list[list[int]]:
    with EngineChild(model, log, env=HERE, **GPU | {"num_gpu_blocks_override": 45}) as engine:
        answers = [answer.tokens for answer in engine.generate(PROMPTS, MOST_TOKENS, together=False)]
        for at in range(ROUNDS):
            run_round(engine, SEED + at, answers)
        assert engine.metrics()["num_preemptions"] > 0
    return answers


def run_round(engine: EngineChild, seed: int, expected: list[list[int]], count: int = 40) -> None:
    requests = make_requests(seed, PROMPTS, count)
    result = engine.call("torture_acts:run_requests", requests, seed)
    for at, samples in result["ended"].items():
        request = requests[int(at)]
        for tokens in samples:
            wanted = expected[request["which"]][: request["max_tokens"]]
            assert tokens == wanted, f"seed {seed}, request {at}: wrong tokens, {len(request['prompt'])} in the prompt"
    for request, at in zip(requests, range(count), strict=True):
        assert request["abort"] is not None or str(at) in result["ended"], f"seed {seed}: request {at} has no answer"


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
                (facts,) = engine.call("torture_acts:audit")["connectors"]
                counters = facts["counters"]
                bad = {name for name in counters if name.endswith("_failures") or name.startswith("failed")}
                assert not bad, f"seed {seed}: {counters}"
                if "nvme_bytes" in extra:
                    assert verify_store(store, extra["nvme_bytes"]) + facts["dropped_puts"] >= facts["nvme_blocks"]
                if at == 0 and start == 0:
                    assert engine.call("torture_acts:reset", True), "with the connector's cache"
            # What is saved of a victim is mostly still in the engine's own cache when it comes back.
            assert counters.get("stored_blocks" if name.startswith("victims") else "loaded_blocks", 0) > 0
        if "nvme_bytes" in extra:
            verify_store(store, extra["nvme_bytes"])


@pytest.fixture(scope="module")
def expected_of_two_ranks(tiny_gemma3: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    log = tmp_path_factory.mktemp("expected") / "log"
    with EngineChild(tiny_gemma3, log, layout="tp2", **TWO_RANKS) as engine:
        return [answer.tokens for answer in engine.generate(PREEMPTED, 100)]


TWO_RANKS = {"max_model_len": 512, "num_gpu_blocks_override": 72}
PREEMPTED = [random.Random(seed).choices(range(10, 500), k=45 + 3 * seed) for seed in range(24)]


@pytest.mark.parametrize("policy", ["on_compute", "on_preemption", "spillover"])
def test_preemptions_on_two_ranks(
    policy: str, tiny_gemma3: Path, expected_of_two_ranks: list[list[int]], tmp_path: Path
) -> None:
    """Several groups, two ranks: what one rank has not copied in time is a miss on both."""
    extra = {"cpu_bytes": "64MiB", "store_policy": policy, "store_decode": True}
    with EngineChild(tiny_gemma3, tmp_path / "log", extra_config=extra, layout="tp2", **TWO_RANKS) as engine:
        for _ in range(2):
            answers = [answer.tokens for answer in engine.generate(PREEMPTED, 100)]
            assert answers == expected_of_two_ranks, policy
            engine.reset()
        assert engine.metrics()["num_preemptions"] >= 15


@SEVERAL_GROUPS
def test_two_of_them_in_a_multi_connector(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """The first one that has something loads it; the other one is not chosen, and stores all the same."""
    store = {"cpu_bytes": "2MiB", "store_dirs": str(tmp_path / "store"), "nvme_bytes": "16MiB", "segment_bytes": "1MiB"}
    children = [
        {"kv_connector": "KVDiskConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
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
            first, second = engine.call("torture_acts:audit")["connectors"]
        assert first["counters"]["loaded_blocks"] > 0
        assert second["counters"]["stored_blocks"] > 0
        for name in ("stored_blocks", "loaded_blocks"):
            total = sum(facts["counters"].get(name, 0) for facts in (first, second))
            assert engine.metrics()[f"kvdisk_{name}"] == total, "vLLM adds up what both count"


@ONE_GROUP
def test_two_engines_with_one_store(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """More than fits: each evicts what the other may be reading. One that is killed leaves its home to be read."""
    extra = {"cpu_bytes": "2MiB", "store_dirs": str(tmp_path / "store"), "nvme_bytes": 12 * MIB, "segment_bytes": MIB}
    engines = [EngineChild(model, tmp_path / "log", extra_config=extra, env=HERE, wait=False, **GPU) for _ in range(2)]
    for engine in engines:
        engine.ready()
    for at in range(2):
        for engine in engines:
            run_round(engine, SEED + 10 * at, expected)
            engine.call("torture_acts:audit")
        verify_store(tmp_path / "store", 12 * MIB)
    assert engines[1].counters()["loaded_blocks_foreign"] > 0
    engines[0].kill()
    run_round(engines[1], SEED + 100, expected)
    engines[1].close()
    verify_store(tmp_path / "store", 12 * MIB)


def test_damage_between_starts(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    store = tmp_path / "store"
    # One group and several differ in how failed loads end; the files are the same.
    damages = DAMAGES if model.name == "tiny-llama" else DAMAGES[:1]
    for start, kinds in enumerate((*damages, ())):
        seed = SEED + 1000 + start
        rng = random.Random(seed)
        extra = {
            "cpu_bytes": rng.choice([0, 2 * MIB, 4 * MIB]),
            "store_dirs": str(store),
            "nvme_bytes": rng.choice([12, 16, 24]) * MIB,
            "segment_bytes": rng.choice([300_000, MIB, 1 << 30]),
        }
        with EngineChild(model, tmp_path / "log", extra_config=extra, env=HERE, **GPU) as engine:
            run_round(engine, 10 * seed, expected, 25)
            engine.call("torture_acts:audit")
        for kind in kinds:
            damage(store, kind, rng)


@ONE_GROUP
def test_killed_at_any_moment(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """A few times: ``tests/crash`` does it by the hundred, with engines that have no model."""
    store = tmp_path / "store"
    for start in range(2):
        seed = SEED + 2000 + start
        rng = random.Random(seed)
        extra = {
            "cpu_bytes": rng.choice([0, 4 * MIB]),
            "store_dirs": str(store),
            "nvme_bytes": 16 * MIB,
            "segment_bytes": 300_000,
            "index_commit_s": rng.choice([0, 0.05, 0.3]),
        }
        engine = EngineChild(model, tmp_path / "log", extra_config=extra, layout="own", **GPU)
        killed = threading.Event()
        killer = threading.Timer(rng.random() * 2, lambda engine=engine, killed=killed: (killed.set(), engine.kill()))
        killer.start()
        try:
            for _ in range(50):
                chosen = rng.sample(range(len(PROMPTS)), 10)
                answers = engine.generate([PROMPTS[at] for at in chosen], 8)
                assert [one.tokens for one in answers] == [expected[at][:8] for at in chosen], f"seed {seed}"
                engine.reset()
        except EngineError:
            assert killed.is_set(), f"seed {seed}: it ended before it was killed"
        finally:
            engine.kill()
            killer.join()
        verify_store(store, 16 * MIB)
