# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines on the CPU: the tokens are those that vLLM computes, wherever the KV came from.

``test_torture.py`` compares with vLLM without kvdisk; here the same engine computes first, or once
more with a salt. One engine start serves many cases, because it costs 5-25 s. The cases of a start
run in the order of its script; each assertion names what it shows.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from engine_child import Answer, EngineChild, EngineError
from support.needs import why_no_queue
from torture_rounds import BLOCK_TOKENS, HERE, SLOT_BYTES, random_prompt, tokens_of

from kvdisk.cli import verify
from kvdisk.cli.salts import survey_salts
from kvdisk.cli.survey import survey_store
from kvdisk.cli.why import explain
from kvdisk.device.listing import list_homes
from kvdisk.geometry import HEADER_BYTES, slot_offset


def _whole(prompt: Sequence[int]) -> int:
    """Return how many tokens of a prompt can be loaded."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


SHARED = random_prompt(1, 330)
LONG = [SHARED + random_prompt(seed, 40) for seed in (2, 3)]
EXACT = random_prompt(4, 4 * BLOCK_TOKENS)
OTHER = random_prompt(5, 300)
TOGETHER = [random_prompt(6, 256) + random_prompt(seed, 50) for seed in range(10, 16)]
PREEMPTED = [random_prompt(seed, 45 + 3 * seed) for seed in range(26)]
SALT_SHARE = 0.005
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


def _check_log_of_start(log: Path, store: Path) -> None:
    """What a start without faults says: four lines, and no warning; but for that of a machine
    without the kernel's queue."""
    said = re.findall(r"(INFO|WARNING|ERROR) .*\] (kvdisk\b.*)", log.read_text())
    ready = r"kvdisk ready: CPU 0\.06 GiB = [\d.]+ k tokens, NVMe 0\.25 GiB = [\d.]+ k tokens; 0 blocks found\."
    policy = r"kvdisk sets kv_load_failure_policy to recompute: a block that fails to load is computed\."
    wanted = (
        policy,
        r"kvdisk \S+ keeps [\d.]+ KiB of KV a token\.",
        rf"kvdisk made engine store \w+ in {store}\.",
        ready,
    )
    if why := why_no_queue():
        said = [(level, line) for level, line in said if why not in line]
    assert [level for level, _ in said] == ["INFO"] * 4, said
    assert all(re.fullmatch(one, line) for one, (_, line) in zip(wanted, said, strict=True)), said


def test_one_process(tiny_llama, tmp_path):
    store = tmp_path / "store"
    as_it_comes = _with_store(store, device="auto", salt_share=SALT_SHARE)
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=as_it_comes, **LIMITS) as engine:
        _check_log_of_start(tmp_path / "log", store)
        # vLLM computes all of these: nothing is loaded before the first reset.
        other = tokens_of(engine.generate([OTHER]))
        engine.drain()
        other_blocks = engine.counters()["demoted_blocks"]
        assert other_blocks == len(OTHER) // BLOCK_TOKENS
        long = tokens_of(engine.generate(LONG, together=False))
        exact = tokens_of(engine.generate([EXACT]))
        together = tokens_of(engine.generate(TOGETHER))
        preempted = tokens_of(engine.generate(PREEMPTED, 100))
        assert engine.counters().get("loaded_blocks", 0) == engine.metrics()["num_preemptions"] == 0

        engine.reset()
        warm = engine.generate(LONG, together=False)
        assert tokens_of(warm) == long, "warm from the CPU tier"
        # The second finds the shared prefix on the GPU and the rest in the CPU tier.
        assert len(LONG[0]) // BLOCK_TOKENS < engine.counters()["loaded_blocks"] < 2 * (len(LONG[0]) // BLOCK_TOKENS)
        assert [answer.cached for answer in warm] == [_whole(LONG[0])] * 2, "GPU prefix and external hit add up"
        (again,) = engine.generate([EXACT])
        assert [again.tokens] == exact
        assert again.cached == len(EXACT) - BLOCK_TOKENS, "the last token's block is computed"
        assert tokens_of(engine.generate(TOGETHER)) == together, "concurrent, shared prefix"
        engine.drain()
        counters = engine.counters()
        assert counters["demoted_blocks"] == counters["stored_blocks"], "all that was stored is on NVMe"
        assert not {name for name in counters if name.endswith("_failures") or name.startswith("failed")}
        _check_salts(engine, exact)

    (home,) = list_homes(store)
    assert home.record is not None and home.record.clean, "an orderly end"
    _check_why(store)
    _overwrite_payloads(store, other_blocks)  # those of OTHER, which were stored first

    config = as_it_comes | {"store_decode": True}
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=config, **FEW_BLOCKS) as engine:
        warm = engine.generate(LONG, together=False)
        assert tokens_of(warm) == long, "warm from NVMe after a restart"
        counters = engine.counters()
        assert counters["hit_tokens.nvme"] >= warm[0].cached > 0 == counters.get("verification_failures.checksum", 0)
        _check_metrics(engine, warm)
        assert tokens_of(engine.generate([OTHER])) == other, "bytes on the drive were overwritten"
        assert engine.counters()["verification_failures.checksum"] > 0
        # The recomputed blocks took the place of the bad ones, and serve the next request.
        engine.reset()
        failed = engine.counters()["failed_loads"]
        (again,) = engine.generate([OTHER])
        assert ([again.tokens], again.cached) == (other, _whole(OTHER))
        assert engine.counters()["failed_loads"] == failed > 0

        loaded = engine.counters()["loaded_blocks"]
        assert tokens_of(engine.generate(PREEMPTED, 100)) == preempted, "victims are saved and come back"
        engine.drain()
        assert engine.counters()["loaded_blocks"] > loaded and engine.metrics()["num_preemptions"] >= 15
        engine.reset()  # asserts that every block was given back


def _check_salts(engine: EngineChild, exact: list[list[int]]) -> None:
    """A tenant that floods the tiers evicts its own, and another one's prompt stays."""
    assert tokens_of(engine.generate([EXACT], salt="small")) == exact
    for prompt in [*TOGETHER, *LONG, OTHER, *PREEMPTED[10:]]:
        engine.generate([prompt], salt="flood")
        engine.drain()
    counters = engine.counters()
    assert counters["share_evicted_blocks.cpu"] > 0 and counters["share_evicted_blocks.nvme"] > 0
    engine.reset()
    loaded = counters["loaded_blocks"]
    (again,) = engine.generate([EXACT], salt="small")
    assert ([again.tokens], again.cached) == (exact, len(EXACT) - BLOCK_TOKENS)
    assert engine.counters()["loaded_blocks"] == loaded + len(EXACT) // BLOCK_TOKENS - 1


def _check_salts_on_drive(store: Path) -> None:
    found = survey_salts([store], "small")
    assert found.asked is not None and found.asked.blocks == len(EXACT) // BLOCK_TOKENS
    (flood,) = [one for one in found.salts if one != found.asked]
    (home,) = survey_store([store]).engine_stores
    assert home.cap_bytes is not None and 0 < flood.bytes <= SALT_SHARE * home.cap_bytes
    assert found.without.blocks > flood.blocks


def _check_why(store: Path) -> None:
    """``kvdisk why`` tells what the next engine will load, and where another prompt differs; and
    the index whose blocks are there."""
    _check_salts_on_drive(store)
    assert explain([store], LONG[0], None).found.hit_tokens == _whole(LONG[0])
    differing = explain([store], [*OTHER[:200], 5, *OTHER[201:]], None)
    assert differing.found.hit_tokens == 192 and "differs from each within tokens 192 to 224" in differing.ends


def _check_metrics(engine: EngineChild, warm: Sequence[Answer]) -> None:
    """What vLLM's endpoint says after these answers, which were from NVMe, and the same from
    memory."""
    engine.reset()
    answers = [*warm, *engine.generate(LONG, together=False)]
    assert tokens_of(answers[2:]) == tokens_of(warm), "from the CPU tier"
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
    assert ours["job_seconds_count.load"] == 4 and ours["job_seconds_sum.load"] > 0
    assert ours["held_blocks.nvme"] * SLOT_BYTES == ours["used_bytes.nvme"] <= ours["capacity_bytes.nvme"]
    assert ours["queued_jobs"] == ours["uncommitted_changes"] == 0, "an idle engine's gauges are of now"


@pytest.mark.torture
def test_units_of_two_blocks(tiny_llama, tmp_path):
    """Before and after a restart; the GPU's own hit ends within a unit."""
    store, unit_tokens = tmp_path / "store", 2 * BLOCK_TOKENS
    config = _with_store(store, unit_tokens=unit_tokens)
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=config, **LIMITS) as engine:
        long, exact = (tokens_of(engine.generate(prompts, together=False)) for prompts in (LONG, [EXACT]))
        preempted = tokens_of(engine.generate(PREEMPTED, 100))
        engine.reset()
        warm = engine.generate(LONG, together=False)
        assert tokens_of(warm) == long
        units = len(LONG[0]) // unit_tokens
        assert warm[0].cached == units * unit_tokens and engine.counters()["loaded_blocks"] >= units
        engine.drain()
    assert (verdict := verify.verify_store([store])).engine_stores[0].blocks > units and not verdict.wrong
    engine = EngineChild(tiny_llama, tmp_path / "log", extra_config=config, **LIMITS | FEW_BLOCKS)
    with engine:
        assert tokens_of(engine.generate(LONG[::-1], together=False)) == long[::-1]
        (again,) = engine.generate([EXACT])
        assert [again.tokens] == exact and again.cached == len(EXACT) - unit_tokens
        assert tokens_of(engine.generate(PREEMPTED, 100)) == preempted
        assert engine.metrics()["num_preemptions"] > 0
        counters = engine.counters()
        assert counters["hit_tokens.nvme"] > 0 and not counters.get("failed_loads")


def test_by_default_units_of_two_blocks_where_the_longest_prompt_has_many(tiny_llama, tmp_path):
    """The engine is started for 270,000 tokens, which are 8,438 blocks. Tokens are as without
    kvdisk."""
    store, unit_tokens = tmp_path / "store", 2 * BLOCK_TOKENS
    limits = {"max_model_len": 270_000, "num_gpu_blocks_override": 8500, "env": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}
    with EngineChild(tiny_llama, tmp_path / "plain", **LIMITS) as engine:
        long = tokens_of(engine.generate(LONG, together=False))
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=_with_store(store), **limits) as engine:
        assert tokens_of(engine.generate(LONG, together=False)) == long
        engine.reset()
        warm = engine.generate(LONG, together=False)
        hit_tokens = len(LONG[0]) // unit_tokens * unit_tokens
        assert tokens_of(warm) == long and warm[0].cached == hit_tokens
        engine.drain()
        counters = engine.counters()
        assert counters["hit_tokens.cpu"] >= hit_tokens and counters["loaded_blocks"] >= hit_tokens // unit_tokens
    assert "several of vLLM's blocks as one, of 64 tokens by KV-cache group" in (tmp_path / "log").read_text()
    assert not verify.verify_store([store]).wrong
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=_with_store(store), **limits) as engine:
        again = engine.generate(LONG[::-1], together=False)
        assert tokens_of(again) == long[::-1] and again[0].cached == hit_tokens
        assert engine.counters()["hit_tokens.nvme"] >= hit_tokens and not engine.counters().get("failed_loads")


def _change_last_rows(model: Path, count: int) -> None:
    """Change some rows of the embedding, which lie far behind the start of that tensor."""
    file = model / "model.safetensors"
    header_bytes = int.from_bytes(file.read_bytes()[:8], "little")
    tensor = json.loads(file.read_bytes()[8 : 8 + header_bytes])["model.embed_tokens.weight"]
    end, row_bytes = tensor["data_offsets"][1], math.prod(tensor["shape"][1:]) * 2
    with file.open("r+b") as stream:
        stream.seek(8 + header_bytes + end - count * row_bytes)
        rows = np.frombuffer(stream.read(count * row_bytes), np.uint16)
        stream.seek(-count * row_bytes, os.SEEK_CUR)
        stream.write((rows ^ 0x8000).tobytes())  # the other sign


@pytest.mark.torture
def test_weights_of_which_a_few_rows_are_others(tiny_llama, tmp_path):
    """PEFT's trainable tokens are such weights. Their store is another one, and both stay. That any
    byte of the weights counts, ``unit/test_weights.py`` shows without an engine."""
    model, config = tmp_path / "model", _with_store(tmp_path / "store")
    shutil.copytree(tiny_llama, model)
    last = json.loads((model / "config.json").read_text())["vocab_size"] - 1
    prompt = [token if at % 3 else last - at % 8 for at, token in enumerate(LONG[0])]
    answers = []
    for _ in range(2):
        with EngineChild(model, tmp_path / "log", extra_config=config, **LIMITS) as engine:
            ((tokens,), (cached,)) = _answer(engine, [prompt])
            (computed,) = engine.generate([prompt], salt="computed anew")
            assert (tokens, cached) == (computed.tokens, 0)
        answers.append(tokens)
        _change_last_rows(model, 12)
    assert answers[0] != answers[1], "what was stored before would be wrong"
    with EngineChild(model, tmp_path / "log", extra_config=config, **LIMITS) as engine:
        assert _answer(engine, [prompt]) == ([answers[0]], [_whole(prompt)]), "as they were at first"


@pytest.mark.torture
def test_two_ranks_of_which_one_dies(tiny_llama, tmp_path):
    store = tmp_path / "store"
    config = _with_store(store, cpu_bytes=0)  # each load is one from the drive
    engine = EngineChild(tiny_llama, tmp_path / "log", extra_config=config, layout="tp2", **LIMITS)
    engine.generate([EXACT])  # while it runs the first segment is made
    expected = tokens_of(engine.generate(LONG, together=False))
    engine.reset()
    warm = engine.generate(LONG, together=False)
    assert tokens_of(warm) == expected, "warm from NVMe"
    assert warm[0].cached == _whole(LONG[0])
    engine.drain()
    engine.kill_worker()
    with pytest.raises(EngineError, match="EngineDead"):
        engine.generate([OTHER])
    (home,) = list_homes(store)
    assert {file.name for file in (home.segments_path / "0").iterdir()} == {"rank0.kv", "rank1.kv"}
    verdict = verify.verify_store([store])
    assert sum(one.blocks for one in verdict.engine_stores) >= len(LONG[0]) // BLOCK_TOKENS and not verdict.wrong


def _answer(engine: EngineChild, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return an engine's tokens, and how many of each prompt were cached, when all that follows has
    ended."""
    answers = engine.generate(prompts, together=False)
    engine.drain()
    return tokens_of(answers), [answer.cached for answer in answers]


@pytest.mark.torture
def test_two_engines_share_two_drives_and_one_gets_new_weights(tiny_llama, tmp_path):
    log, drives = tmp_path / "log", [tmp_path / "one drive", tmp_path / "another"]
    store = {"store_dirs": [str(drive) for drive in drives], "nvme_bytes": "64MiB", "device": "posix"}
    in_memory = store | {"cpu_bytes": "16MiB", "segment_bytes": 300_000, "prefetch": False}
    staged = store | {"cpu_bytes": 0, "segment_bytes": "1MiB"}  # every load is one from a drive
    together, long = [_whole(TOGETHER[0])] * len(TOGETHER), [_whole(LONG[0])] * len(LONG)
    first = EngineChild(tiny_llama, log, extra_config=in_memory, layout="own", env=HERE, **LIMITS)
    with first, EngineChild(tiny_llama, log, extra_config=staged, **LIMITS) as second:
        of_first, _ = _answer(first, TOGETHER)
        homes = survey_store(drives).engine_stores
        assert sorted(len({one.drive for one in home.segments if one.used_slots}) for home in homes) == [0, 2]
        assert _answer(second, TOGETHER) == (of_first, together), "computed by one engine, loaded by the other"
        counted = second.counters()
        assert counted["loaded_blocks_foreign"] == counted["loaded_blocks"] > 0
        assert not counted.get("stored_blocks"), "and not written a second time"
        assert not [name for name in counted if name.startswith(("failed_", "foreign_failures", "verification_"))]
        of_second, _ = _answer(second, LONG)
        assert _answer(first, LONG) == (of_second, long), "the other way round"
        assert first.metrics()["kvdisk_loaded_blocks_foreign"] > 0

        # Not drained: it falls asleep with stores on their way, and nothing is lost by it.
        first.generate([[7, *EXACT]])
        first.call("engine_acts:sleep_and_wake")
        first.reset()
        assert _answer(first, TOGETHER) == (of_first, together)
        # Nor here: stores are on their way when the caches are cleared.
        first.generate([[7, *OTHER]])
        first.call("engine_acts:pause", "abort")
        first.call("engine_acts:use_weights", 1)
        first.call("engine_acts:resume")
        after, cached = _answer(first, TOGETHER)
        assert cached[0] == 0, "nothing from before the update is there, of either engine"
        assert all(one != other for one, other in zip(of_first, after, strict=True)), "else the test shows nothing"
        first.reset()
        assert _answer(first, TOGETHER) == (after, together), "what was computed with the new weights is served here"
        second.reset()
        assert _answer(second, TOGETHER)[0] == of_first, "and nowhere else"
        # A second pause, with nothing changed in between, is as good as an update: kvdisk cannot
        # tell.
        first.call("engine_acts:pause", "wait")
        first.call("engine_acts:resume")
        assert _answer(first, TOGETHER)[1][0] == 0
    assert not survey_store(drives).problems
