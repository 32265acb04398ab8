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
from torture_rounds import SLOT_BYTES

from kvdisk.cli import verify
from kvdisk.device.listing import list_homes
from kvdisk.geometry import HEADER_BYTES, slot_offset

BLOCK_TOKENS = 32


def _prompt(seed: int, length: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(10, 500) for _ in range(length)]


def _tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def _whole(prompt: Sequence[int]) -> int:
    """Return how many tokens of a prompt can be loaded."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


SHARED = _prompt(1, 330)
LONG = [SHARED + _prompt(seed, 40) for seed in (2, 3)]
EXACT = _prompt(4, 4 * BLOCK_TOKENS)
OTHER = _prompt(5, 300)
TOGETHER = [_prompt(6, 256) + _prompt(seed, 50) for seed in range(10, 16)]
PREEMPTED = [_prompt(seed, 45 + 3 * seed) for seed in range(26)]
LIMITS = {"max_model_len": 1024, "num_gpu_blocks_override": 200}
FEW_BLOCKS = {"max_model_len": 512, "num_gpu_blocks_override": 24}


def _with_store(store: Path, **more: object) -> dict[str, object]:
    """Return settings whose engines do not probe the drive, which takes most of a second of their
    start."""
    return {"cpu_bytes": "64MiB", "store_dirs": str(store), "nvme_bytes": "256MiB", "device": "posix", **more}


def _overwrite_payloads(store: Path, count: int) -> None:
    """Overwrite the first blocks on the drive."""
    (home,) = list_homes(store)
    with (home.segments_path / "0" / "rank0.kv").open("r+b") as stream:
        for index in range(count):
            stream.seek(slot_offset(SLOT_BYTES, index) + HEADER_BYTES + 1000)
            stream.write(b"\xa5" * 64)


@pytest.fixture
def expected(tiny_llama: Path, tmp_path: Path) -> dict[str, list[list[int]]]:
    """What vLLM alone answers."""
    with EngineChild(tiny_llama, tmp_path / "log", **LIMITS) as alone:
        return {
            "other": _tokens(alone.generate([OTHER])),
            "long": _tokens(alone.generate(LONG, together=False)),
            "exact": _tokens(alone.generate([EXACT])),
            "together": _tokens(alone.generate(TOGETHER)),
            "preempted": _tokens(alone.generate(PREEMPTED, 100)),
        }


def test_one_process(tiny_llama, expected, tmp_path):
    store = tmp_path / "store"
    as_it_comes = _with_store(store, device="auto")
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=as_it_comes, **LIMITS) as engine:
        assert (tmp_path / "log").read_text().count(f"kvdisk reads and writes {store} with the device ") == 1
        assert _tokens(engine.generate([OTHER])) == expected["other"], "cold"
        engine.drain()
        other_blocks = engine.counters()["demoted_blocks"]
        assert other_blocks == len(OTHER) // BLOCK_TOKENS
        assert _tokens(engine.generate(LONG, together=False)) == expected["long"], "cold, then a prefix on the GPU"
        assert engine.counters().get("loaded_blocks", 0) == 0

        engine.reset()
        first, second = engine.generate(LONG, together=False)
        assert [first.tokens, second.tokens] == expected["long"], "warm from the CPU tier"
        # The second finds the shared prefix on the GPU and the rest in the CPU tier.
        assert len(LONG[0]) // BLOCK_TOKENS < engine.counters()["loaded_blocks"] < 2 * (len(LONG[0]) // BLOCK_TOKENS)
        assert second.cached == first.cached == _whole(LONG[0]), "GPU prefix and external hit add up"

        assert _tokens(engine.generate([EXACT])) == expected["exact"], "cold, a whole number of blocks"
        engine.reset()
        (exact,) = engine.generate([EXACT])
        assert [exact.tokens] == expected["exact"]
        assert exact.cached == len(EXACT) - BLOCK_TOKENS, "the last token's block is computed"

        assert _tokens(engine.generate(TOGETHER)) == expected["together"], "concurrent, shared prefix, cold"
        engine.reset()
        assert _tokens(engine.generate(TOGETHER)) == expected["together"], "concurrent, shared prefix, warm"
        engine.drain()
        counters = engine.counters()
        assert counters["demoted_blocks"] == counters["stored_blocks"], "all that was stored is on NVMe"
        assert not {name for name in counters if name.endswith("_failures") or name.startswith("failed")}

    (home,) = list_homes(store)
    assert home.record is not None and home.record.clean, "an orderly end"
    _overwrite_payloads(store, other_blocks)  # those of OTHER, which were stored first

    config = as_it_comes | {"store_decode": True}
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=config, **FEW_BLOCKS) as engine:
        warm = engine.generate(LONG, together=False)
        assert _tokens(warm) == expected["long"], "warm from NVMe after a restart"
        counters = engine.counters()
        assert counters["hit_tokens.nvme"] >= warm[0].cached > 0 == counters.get("verification_failures.checksum", 0)
        _check_metrics(engine, warm)
        assert _tokens(engine.generate([OTHER])) == expected["other"], "bytes on the drive were overwritten"
        assert engine.counters()["verification_failures.checksum"] > 0
        # The recomputed blocks took the place of the bad ones, and serve the next request.
        engine.reset()
        failed = engine.counters()["failed_loads"]
        (again,) = engine.generate([OTHER])
        assert ([again.tokens], again.cached) == (expected["other"], _whole(OTHER))
        assert engine.counters()["failed_loads"] == failed > 0

        loaded = engine.counters()["loaded_blocks"]
        assert _tokens(engine.generate(PREEMPTED, 100)) == expected["preempted"], "victims are saved and come back"
        engine.drain()
        assert engine.counters()["loaded_blocks"] > loaded and engine.metrics()["num_preemptions"] >= 15
        engine.reset()  # asserts that every block was given back


def _check_metrics(engine: EngineChild, warm: Sequence[Answer]) -> None:
    """What vLLM's endpoint says after these answers, which were from NVMe, and the same from
    memory."""
    engine.reset()
    answers = [*warm, *engine.generate(LONG, together=False)]
    assert _tokens(answers[2:]) == _tokens(warm), "from the CPU tier"
    engine.drain()
    counters = engine.counters()
    metrics = engine.metrics()
    assert {name: metrics[f"kvdisk_{name}"] for name in counters} == counters, "Prometheus and the connector agree"
    ours = {name.removeprefix("kvdisk_"): value for name, value in metrics.items() if name.startswith("kvdisk_")}
    # Of each prompt's whole blocks the second one of a pair has its prefix on the GPU.
    tokens = 2 * _whole(LONG[0]) - len(SHARED) // BLOCK_TOKENS * BLOCK_TOKENS
    blocks, payload_bytes = tokens // BLOCK_TOKENS, SLOT_BYTES - HEADER_BYTES
    assert [answer.cached for answer in answers] == [_whole(LONG[0])] * 4
    assert (ours["hit_tokens.nvme"], ours["hit_tokens.cpu"], ours["lookup_tokens"]) == (tokens, tokens, 2 * tokens)
    assert (ours["missed_tokens.nvme"], ours["missed_tokens.cpu"]) == (0, tokens), "memory was asked for all"
    assert (ours["hit_blocks.nvme"], ours["hit_blocks.cpu"], ours["missed_blocks.cpu"]) == (blocks, blocks, blocks)
    assert metrics["prompt_tokens_cached_by_source.disk"] == tokens, "vLLM hears which tier served"
    assert metrics["prompt_tokens_cached_by_source.host"] == tokens
    assert metrics["prompt_tokens_cached_by_source.external_unspecified"] == 0

    assert ours["transfer_bytes_sum.nvme_to_cpu"] == ours["drive_read_bytes.0"] == blocks * SLOT_BYTES
    assert ours["transfer_bytes_sum.cpu_to_gpu"] == ours["loaded_blocks"] * payload_bytes == 2 * blocks * payload_bytes
    for route in ("gpu_to_cpu", "cpu_to_gpu", "cpu_to_nvme", "nvme_to_cpu"):
        assert ours[f"transfer_bytes_count.{route}"] == ours[f"transfer_seconds_count.{route}"]
        assert (ours[f"transfer_seconds_sum.{route}"] > 0) == (ours[f"transfer_bytes_sum.{route}"] > 0)
    assert ours["job_seconds_count.load"] == 4 and ours["job_seconds_sum.load"] > 0
    assert ours["held_blocks.nvme"] * SLOT_BYTES == ours["used_bytes.nvme"] <= ours["capacity_bytes.nvme"]
    assert ours["held_blocks.cpu"] * SLOT_BYTES == ours["used_bytes.cpu"] > 0
    waiting = ("queued_jobs", "backlog_blocks", "uncommitted_changes", "limbo_blocks")
    assert {name: ours[name] for name in waiting} == dict.fromkeys(waiting, 0), "an idle engine's gauges are of now"
    assert ours["fragmentation_ratio"] == 0 and "write_budget_bytes" not in ours


def test_two_ranks_of_which_one_dies(tiny_llama, tmp_path):
    store = tmp_path / "store"
    config = _with_store(store, cpu_bytes=0)  # each load is one from the drive
    engine = EngineChild(tiny_llama, tmp_path / "log", extra_config=config, layout="tp2", **LIMITS)
    engine.generate([EXACT])  # while it runs the first segment is made
    expected = _tokens(engine.generate(LONG, together=False))
    engine.reset()
    warm = engine.generate(LONG, together=False)
    assert _tokens(warm) == expected, "warm from NVMe"
    assert warm[0].cached == _whole(LONG[0])
    engine.drain()
    engine.kill_worker()
    with pytest.raises(EngineError, match="EngineDead"):
        engine.generate([OTHER])
    (home,) = list_homes(store)
    assert {file.name for file in (home.segments_path / "0").iterdir()} == {"rank0.kv", "rank1.kv"}
    verdict = verify.verify_store([store])
    assert sum(one.blocks for one in verdict.homes) >= len(LONG[0]) // BLOCK_TOKENS and not verdict.wrong


def test_hybrid_model(tiny_gemma3, tmp_path):
    store = tmp_path / "store"
    prompts = [*LONG, EXACT]
    config = _with_store(store, cpu_bytes="4MiB")  # of what came first the blocks are on the drive alone
    with EngineChild(tiny_gemma3, tmp_path / "log", extra_config=config, **LIMITS) as engine:
        cold = engine.generate(prompts, together=False)
        engine.reset()
        warm = engine.generate(prompts, together=False)
        assert warm[0].cached == _whole(LONG[0])
        full_blocks = sum(answer.cached // BLOCK_TOKENS for answer in warm)
        assert engine.counters()["loaded_blocks"] > full_blocks, "more than one group was loaded"
        together = engine.generate(TOGETHER)
        # Each of them once more with a salt of its own, so that nothing is loaded: vLLM computes
        # all of it.
        alone = [engine.generate([prompt], salt=f"{at}")[0] for at, prompt in enumerate([*prompts, *TOGETHER])]
        assert not any(answer.cached for answer in alone)
        assert _tokens([*cold, *together]) == _tokens(alone)
        assert _tokens(warm) == _tokens(cold), "warm from the CPU tier"
        engine.drain()
        _overwrite_payloads(store, 30)
        engine.reset()
        assert _tokens(engine.generate(prompts, together=False)) == _tokens(cold), "from NVMe, some of it overwritten"
        counters = engine.counters()
        assert counters["hit_tokens.nvme"] > 0
        assert counters["verification_failures.checksum"] > 0
        engine.reset()
        assert _tokens(engine.generate(TOGETHER)) == _tokens(together)


def test_layers_of_different_sizes_in_one_group(tiny_gemma4, tmp_path):
    """The scheduler's configuration has only the first layer's size; the workers tell it the
    others'."""
    limits = {**LIMITS, "disable_hybrid_kv_cache_manager": True}
    store = tmp_path / "store"
    # More blocks than memory holds, so that each of its slots is used, and the first are on the
    # drive alone.
    settings = _with_store(store, cpu_bytes="6MiB")
    with EngineChild(tiny_gemma4, tmp_path / "log", extra_config=settings, **limits) as engine:
        expected = _tokens(engine.generate(LONG, together=False))
        assert engine.counters().get("loaded_blocks", 0) == 0, "vLLM has computed all of these"
        engine.reset()
        warm = engine.generate(LONG, together=False)
        assert _tokens(warm) == expected, "warm"
        assert warm[0].cached == _whole(LONG[0])
        engine.generate([OTHER, *TOGETHER])
        engine.reset()
        again = engine.generate(LONG, together=False)
        assert _tokens(again) == expected, "warm from NVMe"
        assert again[0].cached == warm[0].cached
        assert engine.counters()["hit_tokens.nvme"] > 0
    (home,) = list_homes(store)
    assert home.record is not None
    (group,) = home.record.description["geometry"]["groups"]
    # Keys and values of 32-bit numbers; four layers, of which two have heads of 64, and two heads
    # of 128.
    assert group["payload_bytes"] == 2 * 4 * BLOCK_TOKENS * 2 * 2 * (64 + 128)
