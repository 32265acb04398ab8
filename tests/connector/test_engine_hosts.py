# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine on the CPU whose two ranks are on two machines: vLLM's multi-node executor,
two processes that share nothing but the network, with a store directory each."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import second_machine
from engine_child import DEFAULTS_OF, STEADY, EngineChild, environment, vllm_device
from torture_rounds import BLOCK_TOKENS, HERE

from kvdisk.cli import verify
from kvdisk.device.listing import list_homes

pytestmark = pytest.mark.torture

CHOSEN = random.Random(11)
PROMPTS = [[CHOSEN.randrange(10, 500) for _ in range(330)] for _ in range(2)]
WHOLE = (len(PROMPTS[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
LIMITS: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 100}
END_S = 120.0


def _settings(store: Path) -> dict[str, Any]:
    return {"cpu_bytes": "4MiB", "store_dirs": str(store), "nvme_bytes": "256MiB", "device": "posix"}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def _engine(model: Path, stores: list[Path], log: Path) -> Iterator[EngineChild]:
    """An engine of two ranks, each of which knows its own machine's directory: the first by its
    arguments, the second by variables."""
    machines: dict[str, Any] = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": _free_port()}
    limits = LIMITS | machines | {"shutdown_timeout": 60}
    engine = EngineChild(
        model, log, layout="tp2", extra_config=_settings(stores[0]), env=HERE, wait=False, node_rank=0, **limits
    )
    settings = STEADY | _settings(stores[1])
    variables = {f"KVDISK_{key.upper()}": str(value) for key, value in settings.items()}
    flags = DEFAULTS_OF[vllm_device()] | limits | {"node_rank": 1, "tensor_parallel_size": 2, "seed": 0}
    command = [sys.executable, second_machine.__file__, f"--model={model}", "--enforce-eager"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    with log.with_suffix(".second").open("ab") as second_log:
        second = subprocess.Popen(
            command,
            stdout=second_log,
            stderr=second_log,
            env=environment("tp2", 1) | HERE | variables,
            start_new_session=True,
        )
    threading.Thread(target=lambda: second.wait() and engine.kill(), daemon=True).start()  # else it waits for it
    try:
        engine.ready()
        with engine:
            yield engine
    finally:
        second.send_signal(signal.SIGTERM)
        try:
            second.wait(END_S)
        finally:
            second.kill()


def test_ranks_on_two_machines(tiny_llama, tmp_path):
    stores, log = [tmp_path / "one", tmp_path / "two"], tmp_path / "log"
    with EngineChild(tiny_llama, log, env=HERE, **LIMITS) as alone:
        right = [answer.tokens for answer in alone.generate(PROMPTS, together=False)]

    def serve(engine: EngineChild) -> list[int]:
        answers = engine.generate(PROMPTS, together=False)
        assert [answer.tokens for answer in answers] == right
        return [answer.cached for answer in answers]

    with _engine(tiny_llama, stores, log) as engine:
        assert serve(engine) == [0, 0]
        engine.reset()
        assert serve(engine) == [WHOLE, WHOLE], "from memory"
        engine.drain()
        (home,), (guest,) = map(list_homes, stores)
        assert home.id == guest.id and home.alive and guest.alive
        assert {file.rank for file in home.segments} == {0} and {file.rank for file in guest.segments} == {1}
    assert all(verify.verify_store([store]).ok for store in stores)

    with _engine(tiny_llama, stores, log) as engine:
        assert serve(engine) == [WHOLE, WHOLE], "from both drives, after a restart"
        assert engine.metrics()["kvdisk_hit_tokens.nvme"] == 2 * WHOLE
    assert [len(list_homes(store)) for store in stores] == [1, 1], "taken over on both"

    shutil.rmtree(stores[1])
    with _engine(tiny_llama, stores, log) as engine:
        serve(engine)
        engine.reset()
        serve(engine)
        engine.drain()
        metrics = engine.metrics()
        assert not metrics.get("kvdisk_failed_moves.checksum")
        (home,), (guest,) = map(list_homes, stores)
        assert guest.record.guest and len(guest.segments) == len(home.segments) > 0, "stored anew on both"
