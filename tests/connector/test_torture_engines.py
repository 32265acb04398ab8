# SPDX-License-Identifier: Apache-2.0
"""Long, seeded runs of several real vLLM engines, ranks and starts: the tokens are those of vLLM
alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine_child import STEADY, EngineChild
from torture_damage import damage
from torture_rounds import GPU, HERE, MIB, ROUNDS, SEED, run_round, verify_store

pytestmark = [pytest.mark.vllm, pytest.mark.torture]

ONE_GROUP = pytest.mark.parametrize("model", ["llama"], indirect=True)
SEVERAL_GROUPS = pytest.mark.parametrize("model", ["gemma3"], indirect=True)
DAMAGES = (
    ("payloads", "headers", "index deleted"),
    ("swapped slots", "truncated", "index truncated"),
    ("file of another segment", "missing file", "segment header", "index garbage", "HOME garbage"),
)


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
    """The first one that has something loads it; the other one is not chosen, and stores all the
    same."""
    store = {"cpu_bytes": "2MiB", "store_dirs": str(tmp_path / "store"), "nvme_bytes": "16MiB", "segment_bytes": "1MiB"}
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


@ONE_GROUP
def test_two_engines_with_one_store(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """More than fits: each evicts what the other may be reading. One that is killed leaves its home
    to be read."""
    extra = {"cpu_bytes": "2MiB", "store_dirs": str(tmp_path / "store"), "nvme_bytes": 12 * MIB, "segment_bytes": MIB}
    engines = [EngineChild(model, tmp_path / "log", extra_config=extra, env=HERE, wait=False, **GPU) for _ in range(2)]
    for engine in engines:
        engine.ready()
    for at in range(2):
        for engine in engines:
            run_round(engine, SEED + 10 * at, expected)
            engine.call("engine_acts:audit")
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
            engine.call("engine_acts:audit")
        for kind in kinds:
            damage(store, kind, rng)
