# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines on the CPU: the tokens with kvdisk are those without it, wherever the KV came
from.

One engine start serves many cases, because it costs 5-25 s. The cases of a start run in the order
of its script; each assertion names what it shows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_child import Answer, EngineChild, EngineError

from kvdisk.device.listing import list_homes
from kvdisk.geometry import HEADER_BYTES, SEGMENT_HEADER_BYTES

pytestmark = pytest.mark.vllm

BLOCK_TOKENS = 32
CPU_ONLY = {"cpu_bytes": "64MiB"}


def _prompt(seed: int, length: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(10, 500) for _ in range(length)]


def _tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


SHARED = _prompt(1, 330)
LONG = [SHARED + _prompt(seed, 40) for seed in (2, 3)]
EXACT = _prompt(4, 4 * BLOCK_TOKENS)
OTHER = _prompt(5, 300)
TOGETHER = [_prompt(6, 256) + _prompt(seed, 50) for seed in range(10, 16)]
LIMITS = {"max_model_len": 1024, "num_gpu_blocks_override": 200}


def _with_store(store: Path, **more: object) -> dict[str, object]:
    """Return settings whose engines do not probe the drive, which takes most of a second of their
    start."""
    return {"cpu_bytes": "64MiB", "store_dirs": str(store), "nvme_bytes": "256MiB", "device": "posix", **more}


@pytest.fixture(scope="module")
def llama_expected(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """What vLLM alone answers."""
    log = tmp_path_factory.mktemp("expected") / "log"
    with EngineChild(tiny_llama, log, **LIMITS) as engine:
        return {
            "other": _tokens(engine.generate([OTHER])),
            "long": _tokens(engine.generate(LONG, together=False)),
            "exact": _tokens(engine.generate([EXACT])),
            "together": _tokens(engine.generate(TOGETHER)),
            "preempted": _tokens(engine.generate(PREEMPTED, PREEMPTED_TOKENS)),
        }


def test_one_process(tiny_llama: Path, llama_expected: dict[str, list[list[int]]], tmp_path: Path) -> None:
    store = tmp_path / "store"
    as_it_comes = _with_store(store, device="auto")
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=as_it_comes, **LIMITS) as engine:
        assert (tmp_path / "log").read_text().count(f"kvdisk reads and writes {store} with the device ") == 1
        assert _tokens(engine.generate([OTHER])) == llama_expected["other"], "cold"
        engine.drain()
        other_blocks = engine.counters()["demoted_blocks"]
        assert other_blocks == len(OTHER) // BLOCK_TOKENS
        cold = engine.generate(LONG, together=False)
        assert _tokens(cold) == llama_expected["long"], "cold, then a prefix on the GPU"
        assert engine.counters().get("loaded_blocks", 0) == 0

        engine.reset()
        first, second = engine.generate(LONG, together=False)
        assert [first.tokens, second.tokens] == llama_expected["long"], "warm from the CPU tier"
        assert first.cached == (len(LONG[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        # The second finds the shared prefix on the GPU and the rest in the CPU tier.
        loaded = engine.counters()["loaded_blocks"]
        assert len(LONG[0]) // BLOCK_TOKENS < loaded < 2 * (len(LONG[0]) // BLOCK_TOKENS)
        assert second.cached == first.cached, "GPU prefix and external hit add up"

        assert _tokens(engine.generate([EXACT])) == llama_expected["exact"], "cold, a whole number of blocks"
        engine.reset()
        (exact,) = engine.generate([EXACT])
        assert [exact.tokens] == llama_expected["exact"]
        assert exact.cached == len(EXACT) - BLOCK_TOKENS, "the last token's block is computed"

        assert _tokens(engine.generate(TOGETHER)) == llama_expected["together"], "concurrent, shared prefix, cold"
        engine.reset()
        assert _tokens(engine.generate(TOGETHER)) == llama_expected["together"], "concurrent, shared prefix, warm"
        engine.drain()
        counters = engine.counters()
        assert counters["demoted_blocks"] == counters["stored_blocks"], "all that was stored is on NVMe"
        assert not {name for name in counters if name.endswith("_failures") or name.startswith("failed")}

    (home,) = list_homes(store)
    assert home.record is not None
    assert home.record.clean, "an orderly end"
    # The first blocks stored were those of OTHER: overwrite their payloads on the drive.
    _overwrite_payloads(home.segments_path / "0" / "rank0.kv", other_blocks)

    with EngineChild(tiny_llama, tmp_path / "log", extra_config=as_it_comes, **LIMITS) as engine:
        warm = engine.generate(LONG, together=False)
        assert _tokens(warm) == llama_expected["long"], "warm from NVMe after a restart"
        counters = engine.counters()
        assert counters["hit_tokens.nvme"] >= warm[0].cached > 0 == counters.get("verification_failures.checksum", 0)
        _check_metrics(engine, warm, home.record.description["geometry"]["groups"][0])
        assert _tokens(engine.generate([OTHER])) == llama_expected["other"], "bytes on the drive were overwritten"
        counters = engine.counters()
        assert counters["verification_failures.checksum"] > 0
        assert counters["failed_loads"] > 0
        # The recomputed blocks took the place of the bad ones, and serve the next request.
        engine.reset()
        failed = counters["failed_loads"]
        (again,) = engine.generate([OTHER])
        assert [again.tokens] == llama_expected["other"]
        assert again.cached == (len(OTHER) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert engine.counters()["failed_loads"] == failed


def _check_metrics(engine: EngineChild, warm: Sequence[Answer], group: dict[str, int]) -> None:
    """What vLLM's endpoint says after these answers, which were from NVMe, and the same from
    memory."""
    engine.reset()
    answers = [*warm, *engine.generate(LONG, together=False)]
    assert _tokens(answers[2:]) == _tokens(warm), "from the CPU tier"
    engine.drain()
    slot_bytes, payload_bytes = group["slot_bytes"], group["payload_bytes"]
    counters = engine.counters()
    metrics = engine.metrics()
    assert {name: metrics[f"kvdisk_{name}"] for name in counters} == counters, "Prometheus and the connector agree"
    ours = {name.removeprefix("kvdisk_"): value for name, value in metrics.items() if name.startswith("kvdisk_")}
    # Of each prompt's whole blocks the second one of a pair has its prefix on the GPU.
    whole = answers[0].cached
    shared = len(SHARED) // BLOCK_TOKENS * BLOCK_TOKENS
    tokens = whole + whole - shared
    blocks = tokens // BLOCK_TOKENS
    assert [answer.cached for answer in answers] == [whole] * 4
    assert (ours["hit_tokens.nvme"], ours["hit_tokens.cpu"], ours["lookup_tokens"]) == (tokens, tokens, 2 * tokens)
    assert (ours["missed_tokens.nvme"], ours["missed_tokens.cpu"]) == (0, tokens), "memory was asked for all"
    assert (ours["hit_blocks.nvme"], ours["hit_blocks.cpu"], ours["missed_blocks.cpu"]) == (blocks, blocks, blocks)
    assert metrics["prompt_tokens_cached_by_source.disk"] == tokens, "vLLM hears which tier served"
    assert metrics["prompt_tokens_cached_by_source.host"] == tokens
    assert metrics["prompt_tokens_cached_by_source.external_unspecified"] == 0

    assert ours["transfer_bytes_sum.nvme_to_cpu"] == ours["drive_read_bytes.0"] == blocks * slot_bytes
    assert ours["transfer_bytes_sum.cpu_to_gpu"] == ours["loaded_blocks"] * payload_bytes == 2 * blocks * payload_bytes
    for route in ("gpu_to_cpu", "cpu_to_gpu", "cpu_to_nvme", "nvme_to_cpu"):
        assert ours[f"transfer_bytes_count.{route}"] == ours[f"transfer_seconds_count.{route}"]
        assert (ours[f"transfer_seconds_sum.{route}"] > 0) == (ours[f"transfer_bytes_sum.{route}"] > 0)
    assert ours["job_seconds_count.load"] == 4 and ours["job_seconds_sum.load"] > 0
    assert ours["held_blocks.nvme"] * slot_bytes == ours["used_bytes.nvme"] <= ours["capacity_bytes.nvme"]
    assert ours["held_blocks.cpu"] * slot_bytes == ours["used_bytes.cpu"] > 0
    waiting = ("queued_jobs", "backlog_blocks", "uncommitted_changes", "limbo_blocks")
    assert {name: ours[name] for name in waiting} == dict.fromkeys(waiting, 0), "an idle engine's gauges are of now"
    assert ours["fragmentation_ratio"] == 0 and "write_budget_bytes" not in ours


def _overwrite_payloads(file: Path, count: int) -> None:
    slot_bytes = _slot_bytes(file)
    with file.open("r+b") as stream:
        for index in range(count):
            stream.seek(SEGMENT_HEADER_BYTES + index * slot_bytes + HEADER_BYTES + 1000)
            stream.write(b"\xa5" * 64)


def _slot_bytes(file: Path) -> int:
    from kvdisk.device.segment import read_segment_header

    class Where:
        segments_path = file.parent.parent

    return read_segment_header(Where(), int(file.parent.name), 0).slot_bytes


PREEMPTING = {"max_model_len": 512, "num_gpu_blocks_override": 24}
PREEMPTED = [_prompt(seed, 45 + 3 * seed) for seed in range(26)]
PREEMPTED_TOKENS = 100


@pytest.mark.parametrize(
    "policy",
    ["on_preemption", *(pytest.param(name, marks=pytest.mark.torture) for name in ("on_compute", "spillover"))],
)
def test_preempted_requests_give_the_same_tokens(
    policy: str, tiny_llama: Path, llama_expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    config = {**CPU_ONLY, "store_decode": True, "store_policy": policy}
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=config, **PREEMPTING) as engine:
        for loaded in (0, 1):
            assert _tokens(engine.generate(PREEMPTED, PREEMPTED_TOKENS)) == llama_expected["preempted"], loaded
            engine.drain()
            counters = engine.counters()
            assert counters["stored_blocks"] > 0
            assert counters["loaded_blocks"] > loaded, "a victim comes back to what was stored of it"
            engine.reset()  # asserts that every block was given back
        assert engine.metrics()["num_preemptions"] >= 15


def test_two_ranks_of_which_one_dies(tiny_llama: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    engine = EngineChild(tiny_llama, tmp_path / "log", extra_config=_with_store(store), layout="tp2", **LIMITS)
    expected = _tokens(engine.generate(LONG, together=False))
    engine.reset()
    warm = engine.generate(LONG, together=False)
    assert _tokens(warm) == expected, "warm from the CPU tier"
    assert warm[0].cached > 0
    engine.drain()
    (home,) = list_homes(store)
    ranks = {file.name for file in (home.segments_path / "0").iterdir()}
    assert ranks == {"rank0.kv", "rank1.kv"}
    engine.kill_worker()
    with pytest.raises(EngineError, match="EngineDead"):
        engine.generate([OTHER])
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=_with_store(store), layout="tp2", **LIMITS) as engine:
        warm = engine.generate(LONG, together=False)
        assert _tokens(warm) == expected, "warm from NVMe after a worker died"
        assert warm[0].cached == (len(LONG[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_hybrid_model(tiny_gemma3: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    prompts = [*LONG, EXACT]
    with EngineChild(tiny_gemma3, tmp_path / "log", extra_config=_with_store(store), **LIMITS) as engine:
        cold = [*engine.generate(prompts, together=False), *engine.generate(TOGETHER)]
        # Each of them once more with a salt of its own, so that nothing is loaded: vLLM computes
        # all of it.
        alone = [engine.generate([prompt], salt=f"{at}")[0] for at, prompt in enumerate([*prompts, *TOGETHER])]
        assert not any(answer.cached for answer in alone)
        assert _tokens(cold) == _tokens(alone)
        expected, expected_together = _tokens(alone[:3]), _tokens(alone[3:])
        engine.reset()
        warm = engine.generate(prompts, together=False)
        assert _tokens(warm) == expected, "warm from the CPU tier"
        assert warm[0].cached == (len(LONG[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        full_blocks = sum(answer.cached // BLOCK_TOKENS for answer in warm)
        assert engine.counters()["loaded_blocks"] > full_blocks, "more than one group was loaded"
        engine.reset()
        assert _tokens(engine.generate(TOGETHER)) == expected_together
        engine.drain()
    (home,) = list_homes(store)
    _overwrite_payloads(home.segments_path / "0" / "rank0.kv", 30)
    with EngineChild(tiny_gemma3, tmp_path / "log", extra_config=_with_store(store), **LIMITS) as engine:
        assert _tokens(engine.generate(prompts, together=False)) == expected, "warm from NVMe, some of it overwritten"
        counters = engine.counters()
        assert counters["hit_tokens.nvme"] > 0
        assert counters["verification_failures.checksum"] > 0


def test_layers_of_different_sizes_in_one_group(tiny_gemma4: Path, tmp_path: Path) -> None:
    """The scheduler's configuration has only the first layer's size; the workers tell it the
    others'."""
    limits = {**LIMITS, "disable_hybrid_kv_cache_manager": True}
    store = tmp_path / "store"
    # More blocks than memory holds, so that each of its slots is used.
    settings = _with_store(store, cpu_bytes="6MiB")
    with EngineChild(tiny_gemma4, tmp_path / "log", extra_config=settings, **limits) as engine:
        expected = _tokens(engine.generate(LONG, together=False))
        assert engine.counters().get("loaded_blocks", 0) == 0, "vLLM has computed all of these"
        engine.reset()
        warm = engine.generate(LONG, together=False)
        assert _tokens(warm) == expected, "warm"
        assert warm[0].cached == (len(LONG[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        engine.generate([OTHER])
        engine.drain()
    (home,) = list_homes(store)
    assert home.record is not None
    (group,) = home.record.description["geometry"]["groups"]
    # Keys and values of 32-bit numbers; four layers, of which two have heads of 64, and two heads
    # of 128.
    assert group["payload_bytes"] == 2 * 4 * BLOCK_TOKENS * 2 * 2 * (64 + 128)
    with EngineChild(tiny_gemma4, tmp_path / "log", extra_config=settings, **limits) as engine:
        again = engine.generate(LONG, together=False)
        assert _tokens(again) == expected, "warm from NVMe after a restart"
        assert again[0].cached == warm[0].cached
        assert engine.counters()["hit_tokens.nvme"] > 0
