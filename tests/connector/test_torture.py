# SPDX-License-Identifier: Apache-2.0
"""Long, seeded runs of real vLLM engines against vLLM alone: whatever happens, the tokens are the same.

Decoding of the tiny models does not depend on how requests are batched (``test_the_models_are_fit_for_this``), so one
baseline, request after request, serves all of them. A failure names its seed. ``KVDISK_TORTURE_SEED`` shifts all seeds.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from engine_child import EngineChild, EngineError
from torture_damage import KINDS, damage
from torture_prompts import MOST_TOKENS, make_prompts, make_requests, verify_store

pytestmark = [pytest.mark.vllm, pytest.mark.torture]

SEED = int(os.environ.get("KVDISK_TORTURE_SEED", "0"))
HERE = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))}
PROMPTS = make_prompts(SEED, 60)
ROUNDS = 3
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
    "no prefix cache on the GPU": ({"enable_prefix_caching": False}, {"cpu_bytes": "3MiB"}),
    "no CPU tier": ({}, {"cpu_bytes": 0, "nvme_bytes": 12 * MIB, "segment_bytes": "1MiB", "store_decode": True}),
    "admission by reuse": (
        {"max_num_batched_tokens": 2048},
        {
            "cpu_bytes": "3MiB",
            "nvme_bytes": 14 * MIB,
            "segment_bytes": "1MiB",
            "cpu_admission": "reuse(2)",
            "nvme_admission": "reuse(2)",
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


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM alone answers to each prompt, one after the other."""
    log = tmp_path_factory.mktemp("expected") / "log"
    with EngineChild(model, log, max_model_len=512, num_gpu_blocks_override=400) as engine:
        return [answer.tokens for answer in engine.generate(PROMPTS, MOST_TOKENS, together=False)]


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


def test_the_models_are_fit_for_this(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    with EngineChild(model, tmp_path / "log", env=HERE, **GPU | {"num_gpu_blocks_override": 45}) as engine:
        for at in range(2):
            run_round(engine, SEED + at, expected)
        assert engine.metrics()["num_preemptions"] > 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload(name: str, model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    limits, extra = WORKLOADS[name]
    store = tmp_path / "store"
    extra = extra | ({"store_dirs": str(store)} if "nvme_bytes" in extra else {})
    for start in range(1 + ("nvme_bytes" in extra)):
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
                if at == 1 and start == 0:
                    assert engine.call("torture_acts:reset", True), "with the connector's cache"
            assert counters.get("loaded_blocks", 0) > 0
        if "nvme_bytes" in extra:
            verify_store(store, extra["nvme_bytes"])


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


def test_two_engines_with_one_store(tiny_llama: Path, tmp_path: Path) -> None:
    """Each has a home of its own; one that is killed leaves it to the next."""
    prompts = PROMPTS[:30]
    with EngineChild(tiny_llama, tmp_path / "log", **GPU) as engine:
        expected = [answer.tokens for answer in engine.generate(prompts, 8, together=False)]
    extra = {"cpu_bytes": "2MiB", "store_dirs": str(tmp_path / "store"), "nvme_bytes": 12 * MIB, "segment_bytes": MIB}
    engines = [EngineChild(tiny_llama, tmp_path / "log", extra_config=extra, env=HERE, **GPU) for _ in range(2)]
    rng = random.Random(SEED)
    for _ in range(3):
        for engine in engines:
            chosen = rng.sample(range(len(prompts)), 15)
            answers = engine.generate([prompts[at] for at in chosen], 8)
            assert [one.tokens for one in answers] == [expected[at] for at in chosen]
            engine.reset()
            engine.call("torture_acts:audit")
        verify_store(tmp_path / "store", 12 * MIB)
    engines[0].kill()
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=extra, env=HERE, **GPU) as engine:
        answers = engine.generate(prompts, 8)
        assert [one.tokens for one in answers] == expected
        assert engine.counters()["hit_tokens_nvme"] > 0, "the killed one's home was taken over"
        assert engines[1].generate(prompts[:1], 8)[0].tokens == expected[0]
    engines[1].close()
    verify_store(tmp_path / "store", 12 * MIB)


def test_damage_between_starts(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    store = tmp_path / "store"
    # One group and several differ in how failed loads end; the files are the same.
    kinds = KINDS if model.name == "tiny-llama" else KINDS[:2] + KINDS[4:5]
    for start, kind in enumerate((*kinds, "nothing")):
        seed = SEED + 1000 + start
        rng = random.Random(seed)
        extra = {
            "cpu_bytes": rng.choice([0, 2 * MIB, 4 * MIB]),
            "store_dirs": str(store),
            "nvme_bytes": rng.choice([12, 16, 24]) * MIB,
            "segment_bytes": rng.choice([300_000, MIB, 1 << 30]),
        }
        with EngineChild(model, tmp_path / "log", extra_config=extra, env=HERE, **GPU) as engine:
            for at in range(2):
                run_round(engine, 10 * seed + at, expected, 25)
                engine.call("torture_acts:audit")
        damage(store, kind, rng)


def test_killed_at_any_moment(tiny_llama: Path, tmp_path: Path) -> None:
    prompts = PROMPTS[:30]
    with EngineChild(tiny_llama, tmp_path / "log", **GPU) as engine:
        expected = [answer.tokens for answer in engine.generate(prompts, 8, together=False)]
    store = tmp_path / "store"
    for start in range(4):
        seed = SEED + 2000 + start
        rng = random.Random(seed)
        extra = {
            "cpu_bytes": rng.choice([0, 4 * MIB]),
            "store_dirs": str(store),
            "nvme_bytes": 16 * MIB,
            "segment_bytes": 300_000,
            "index_commit_s": rng.choice([0, 0.05, 0.3]),
        }
        engine = EngineChild(tiny_llama, tmp_path / "log", extra_config=extra, layout="own", **GPU)
        killed = threading.Event()
        killer = threading.Timer(rng.random() * 2, lambda engine=engine, killed=killed: (killed.set(), engine.kill()))
        killer.start()
        try:
            for _ in range(50):
                chosen = rng.sample(range(len(prompts)), 10)
                answers = engine.generate([prompts[at] for at in chosen], 8)
                assert [one.tokens for one in answers] == [expected[at] for at in chosen], f"seed {seed}"
                engine.reset()
        except EngineError:
            assert killed.is_set(), f"seed {seed}: it ended before it was killed"
        finally:
            engine.kill()
            killer.join()
        verify_store(store, 16 * MIB)
