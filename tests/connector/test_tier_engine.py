# SPDX-License-Identifier: Apache-2.0
"""kvdisk behind vLLM's own ``OffloadingConnector`` in real engines on the CPU: the tokens are those
of vLLM alone, wherever the KV came from.

All but the copies between the model's blocks and memory is vLLM's own: see ``host_offloading``. One
engine start serves many cases, and the cases run in the order of a script.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from engine_child import EngineChild
from support.waits import lives, until
from test_model_kinds import KINDS
from torture_rounds import (
    BLOCK_TOKENS,
    GPU,
    HERE,
    MOST_TOKENS,
    PROMPTS,
    SEED,
    answers_alone,
    random_prompt,
    run_round,
    tokens_of,
    verify_store,
)

from kvdisk.cli.why import explain
from kvdisk.device.listing import list_homes
from kvdisk.geometry import HEADER_BYTES

ROW_BYTES = 32768
"""Of the tiny Llama: 32 tokens, two layers, two heads of 32, keys and values, four bytes."""
ACTS = "host_offloading"
IDLE = {"off": False, "jobs": 0, "requests": 0, "held": 0}
CAP = 256 << 20
"""More than all prompts have."""


def start(
    model: Path,
    folder: Path,
    *,
    memory: int,
    layout: str = "inproc",
    ends_in_s: int = 0,
    limits: Mapping[str, Any] = GPU,
    **tier: Any,
) -> EngineChild:
    """Start an engine whose host memory has so many bytes. ``ends_in_s``: vLLM's
    ``--shutdown-timeout``. ``limits``: its other arguments."""
    ours = {"type": "kvdisk", "store_dirs": str(folder / "store"), "nvme_bytes": CAP, "device": "posix"}
    ours |= {"lookup_wait_s": 600, "io_deadline_s": 600} | tier
    extra = {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "host_offloading",
        "cpu_bytes_to_use": memory,
        "secondary_tiers": [ours],
    }
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return EngineChild(
        model,
        folder / "log",
        env=HERE,
        layout=layout,
        kv_transfer_config=transfer,
        shutdown_timeout=ends_in_s,
        **limits,
    )


def answers(engine: EngineChild) -> tuple[list[list[int]], int]:
    """Return an engine's tokens to each prompt, and how many tokens of all were cached."""
    found = engine.generate(PROMPTS, MOST_TOKENS, together=False)
    return tokens_of(found), sum(answer.cached for answer in found)


def flip_bits(store: Path) -> None:
    """Flip a bit in the payload of every slot of a store."""
    (home,) = list_homes(store)
    for file in home.segments_path.glob("*/rank0.kv"):
        with file.open("r+b") as opened:
            content = bytearray(opened.read())
            for at in range(HEADER_BYTES * 2 + 1000, len(content), ROW_BYTES + HEADER_BYTES):
                content[at] ^= 4
            opened.seek(0)
            opened.write(content)


@pytest.mark.parametrize("model", ["llama", pytest.param("gemma3", marks=pytest.mark.torture)], indirect=True)
def test_one_process(model, expected, tmp_path):
    with start(model, tmp_path, memory=64 << 20) as engine:
        assert answers(engine)[0] == expected, "cold"
        engine.drain()
        run_round(engine, SEED, expected)
        engine.drain()
        assert engine.call(f"{ACTS}:state_of") == IDLE
        stored = engine.metrics()["kvdisk_held_blocks.nvme"]
        assert stored > 100
    with start(model, tmp_path, memory=3 << 20) as engine:
        tokens, cached = answers(engine)
        assert tokens == expected, "warm from NVMe after a restart, with memory for a part of it"
        assert cached > 1000
        run_round(engine, SEED + 1, expected)
        engine.drain()
        metrics = engine.metrics()
        assert metrics["kvdisk_loaded_blocks"] > 100
        assert engine.call(f"{ACTS}:state_of") == IDLE
        assert verify_store(tmp_path / "store", CAP) >= stored
    found = [explain([tmp_path / "store"], prompt, None).found.hit_tokens for prompt in PROMPTS[:8]]
    whole = [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in PROMPTS[:8]]
    # vLLM offers of a window's blocks those that a step has left in it.
    assert found == whole if model.name == "llama" else sum(found) > sum(whole) / 4
    command = [sys.executable, "-m", "kvdisk.cli.main", "prune", str(tmp_path / "store"), "--older-than", "0s", "--yes"]
    subprocess.run(command, check=True, capture_output=True)
    assert verify_store(tmp_path / "store", CAP) == 0


@pytest.mark.torture
def test_damage_resets_and_the_end_of_the_mover(tiny_llama, tmp_path):
    expected = answers_alone(tiny_llama)
    store, small = tmp_path / "store", 3 << 20
    with start(tiny_llama, tmp_path, memory=64 << 20) as engine:
        assert answers(engine)[0] == expected
    flip_bits(store)
    with start(tiny_llama, tmp_path, memory=small) as engine:
        assert answers(engine)[0] == expected, "no flipped bit is served"
        engine.drain()
        assert engine.metrics()["kvdisk_verification_failures.checksum"] > 10
        assert engine.call(f"{ACTS}:state_of") == IDLE
    with start(tiny_llama, tmp_path, memory=small) as engine:
        tokens, cached = answers(engine)
        assert tokens == expected and cached > 1000, "what was computed again has taken their place"
        assert not engine.metrics().get("kvdisk_verification_failures.checksum")
        # Other weights come each time that everything is reset, whatever runs.
        engine.call("engine_acts:use_weights", 1)
        assert engine.call("engine_acts:reset_all")
        others, _ = answers(engine)
        assert others != expected
        engine.call("engine_acts:use_weights", 0)
        assert engine.call("engine_acts:reset_all")
        counts = run_round(engine, SEED, expected, others, count=60, steps_between=40)
        assert counts["resets"] > 1 and counts["compared"] > 20
        engine.drain()
        assert engine.call(f"{ACTS}:state_of") == IDLE
    with start(tiny_llama, tmp_path, memory=small) as engine:
        tokens, cached = answers(engine)
        assert tokens == expected and cached > 1000, "of what was stored after a reset nothing is found"
        # The mover stands still, is killed for it, and the engine goes on with memory alone.
        pid = engine.call(f"{ACTS}:signal_mover", signal.SIGSTOP)
        engine.call(f"{ACTS}:answer_within", 0.5)
        assert answers(engine)[0] == expected
        engine.drain()
        assert engine.call(f"{ACTS}:state_of") == IDLE | {"off": True}
        assert not lives(pid)
        run_round(engine, SEED, expected)
    log = (tmp_path / "log").read_text()
    assert log.count("kvdisk is off until the engine starts again") == 1
    assert "Traceback" not in log
    assert verify_store(store, CAP) > 100


@pytest.mark.torture
def test_a_mover_that_is_killed_under_load(tiny_llama, tmp_path):
    expected = answers_alone(tiny_llama)
    with start(tiny_llama, tmp_path, memory=3 << 20) as engine:
        run_round(engine, SEED, expected)
        pid = engine.call(f"{ACTS}:signal_mover", signal.SIGSTOP)
        engine.generate(PROMPTS[:1], 1)  # stores are on their way to it
        engine.call(f"{ACTS}:signal_mover", signal.SIGKILL)
        until(lambda: not lives(pid), "its end")
        run_round(engine, SEED, expected)
        engine.drain()
        assert engine.call(f"{ACTS}:state_of") == IDLE | {"off": True}
    assert "Traceback" not in (tmp_path / "log").read_text()
    events = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    with start(tiny_llama, tmp_path, memory=3 << 20, limits=GPU | events, enable_kv_events=True) as engine:
        assert answers(engine)[0] == expected
        engine.drain()
        command = [sys.executable, "-m", "kvdisk.cli.main", "clear", str(tmp_path / "store"), "--live", "--yes"]
        said = subprocess.run([*command, "--wait", "600"], check=True, capture_output=True, text=True).stdout
        assert " deleted " in said, "an engine that takes no step answers"
        assert answers(engine)[0] == expected


@pytest.mark.torture
def test_two_hosts_that_share_a_bucket(tiny_llama, tmp_path, s3_server):
    """Each has a directory of its own: what the second one finds has gone through the bucket."""
    prompts, found = PROMPTS[:8], []
    bucket = {"remote": f"s3://kvdisk-tests/{tmp_path.name}", "remote_admission": "all", "remote_deadline_s": 60}
    bucket["remote_options"] = s3_server.options | {"allow_http": "true"}
    for host in ("here", "there"):
        (tmp_path / host).mkdir()
        with start(tiny_llama, tmp_path / host, memory=3 << 20, **bucket) as engine:
            if host == "here":
                engine.generate(prompts, 1, together=False)
                engine.drain()  # until all is sent
            answered = engine.generate(prompts, MOST_TOKENS, together=False)
            engine.drain()
            assert tokens_of(answered) == [each[:MOST_TOKENS] for each in answers_alone(tiny_llama)[: len(prompts)]]
            assert engine.call(f"{ACTS}:state_of") == IDLE
            found.append(engine.metrics())
        assert "Traceback" not in (tmp_path / host / "log").read_text()
    here, there = found
    assert here["kvdisk_sent_blocks"] > 10
    assert not here.get("kvdisk_transfer_bytes_sum.remote_to_cpu")
    assert there["kvdisk_transfer_bytes_sum.remote_to_cpu"] > 10 * ROW_BYTES


@pytest.mark.torture
@pytest.mark.parametrize("name", ["granite4", "lfm2"])
def test_recurrent_states(name, models, tmp_path):
    """What hits answers as vLLM alone does with a hit in its own cache: of LFM2 on the CPU some
    other tokens than without one."""
    limits = {"max_model_len": 1024, "num_gpu_blocks_override": 400, **KINDS[name].limits}
    with EngineChild(models(name), tmp_path / "alone", env=HERE, **limits) as engine:
        computed, cached = (engine.generate(PROMPTS, MOST_TOKENS, together=False) for _ in range(2))
    assert tokens_of(computed) == tokens_of(cached) or name == "lfm2"
    for run, right in enumerate((computed, cached)):
        with start(models(name), tmp_path, memory=(64 << 20, 3 << 20)[run], limits=limits) as engine:
            found = engine.generate(PROMPTS, MOST_TOKENS, together=False)
            assert tokens_of(found) == tokens_of(right), ("cold", "from NVMe after a restart")[run]
            engine.drain()
            assert engine.call(f"{ACTS}:state_of") == IDLE
            assert engine.metrics().get("kvdisk_loaded_blocks", 0) >= 50 * run
    assert sum(answer.cached for answer in found) >= sum(answer.cached for answer in cached) / 2


def test_a_streaming_session_leaves_nothing(tiny_llama, tmp_path):
    """vLLM's connector would take blocks of it for others, and serve them."""
    with start(tiny_llama, tmp_path, memory=64 << 20) as engine:
        tokens = engine.call("engine_acts:run_session", [random_prompt(at, 100) for at in range(3)])
        engine.reset()
        (found,) = engine.generate([tokens], MOST_TOKENS)
        (right,) = engine.generate([tokens], MOST_TOKENS, salt="computed")
        assert (found.tokens, found.cached, right.cached) == (right.tokens, 0, 0)


@pytest.mark.torture
@pytest.mark.parametrize("layout", ["own", "tp2"])
def test_processes(tiny_llama, tmp_path, layout):
    """A row has the bytes of all workers, in their shared memory.

    Stages of a pipeline end vLLM 0.32's engine on the CPU with any tier behind its connector.
    """
    prompts, found, numbers = PROMPTS[:12], [], count(10_000)
    for _ in range(2):
        # vLLM's two workers take longer to end than the 5 s that it has for them otherwise.
        with start(tiny_llama, tmp_path, memory=3 << 20, layout=layout, ends_in_s=120) as engine:

            def has_stored(engine: EngineChild = engine) -> bool:
                """On a busy machine the first segment may come later than a store waits for."""
                engine.generate([random_prompt(next(numbers), 200)], 1)
                return engine.metrics().get("kvdisk_held_blocks.nvme", 0) > 0

            until(has_stored, "room on the drive")
            answered = engine.generate(prompts, 8, together=False)
            found.append((tokens_of(answered), sum(answer.cached for answer in answered)))
            if len(found) == 2:
                metrics = engine.metrics()
                assert metrics["kvdisk_loaded_blocks"] > 10 and not metrics.get("kvdisk_switched_off")
            engine.drain()
    assert found[0][0] == found[1][0]
    assert found[1][1] > found[0][1]
    if layout == "own":
        assert found[0][0] == [tokens[:8] for tokens in answers_alone(tiny_llama)[: len(prompts)]]
    assert verify_store(tmp_path / "store", CAP) > 10
    assert "Traceback" not in (tmp_path / "log").read_text()
