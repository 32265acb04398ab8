# SPDX-License-Identifier: Apache-2.0
"""``kvdisk clear --live`` and ``prune --live`` on engines that run: at rest, and under load."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel
from support.waits import WAIT_S
from typer.testing import CliRunner

from kvdisk.cli.main import app
from kvdisk.device.listing import list_homes
from kvdisk.device.store import Store

MODEL = LiveModel()
PROMPTS = [letter * 24 for letter in "abcdef"]


@pytest.fixture
def start(quick_path: Path) -> Iterator[Callable[..., LiveEngine]]:
    """Start engines, which end with the test."""
    engines = []

    def start_one(cpu_blocks: int = 0) -> LiveEngine:
        cpu_bytes = cpu_blocks * MODEL.geometry.slot_sizes[0] * MODEL.ranks
        config = MODEL.config(
            str(quick_path / "store"), blocks=64, segment_blocks=8, cpu_bytes=cpu_bytes, store_decode=True
        )
        engines.append(LiveEngine(config, MODEL))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.close()


def command(name: str, path: Path, *more: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, [name, str(path), "--live", "--yes", "--json", "--wait", "600", *more])
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rest(engine: LiveEngine) -> None:
    """Wait for requests, as vLLM does: no step is taken."""
    while True:
        engine.run_until_quiet()
        if not engine.parts.mailbox.rest():
            return


def hits(engine: LiveEngine) -> int:
    return engine.manager.stats["hit_tokens.nvme"] + engine.manager.stats["hit_tokens.cpu"]


def serve_until_all_hits(engine: LiveEngine, prompts: Sequence[str] = PROMPTS) -> None:
    """Serve prompts until all that was lost is stored again: a segment takes a moment to make."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        before = hits(engine)
        engine.serve(prompts)
        if hits(engine) - before == 20 * len(prompts):
            return
    pytest.fail(engine.describe())


@pytest.mark.parametrize("cpu_blocks", [0, 48])
def test_an_engine_at_rest_clears_itself_at_once(quick_path, start, cpu_blocks):
    store = quick_path / "store"
    engine = start(cpu_blocks)
    engine.serve(PROMPTS)
    rest(engine)
    (before,) = list_homes(store)
    found = command("clear", store)
    (done,) = found["engine_stores"]
    assert (done["result"], done["live"], done["whole"]) == ("deleted", True, False)
    assert done["blocks"] >= 20 and done["bytes"] >= sum(file.allocated_bytes for file in before.segments)
    assert done["why"] == "the drive gets the bytes back with the engine's next request"
    engine.parts.mailbox.wake()
    served = hits(engine)
    engine.serve(PROMPTS[:1])
    assert hits(engine) == served, "nothing from before is served"
    (after,) = list_homes(store)
    assert after.allocated_bytes < before.allocated_bytes and len(after.segments) < len(before.segments)
    serve_until_all_hits(engine, PROMPTS[:1])
    assert audit(engine) > 0
    engine.close()
    after = start(cpu_blocks)
    after.serve(PROMPTS)
    assert hits(after) == 20, "nor after a restart"


def test_an_engine_under_load_clears_itself_between_its_steps(quick_path, start):
    """Every block that is loaded and read is compared meanwhile."""
    engine = start(16)
    load = LiveLoad(engine, 1, LoadShape(width=3, forgets=0.5))
    load.run_requests(20)
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(command("clear", quick_path / "store")))
    asking.start()
    while asking.is_alive():
        load.step()
    asking.join()
    (done,) = answers[0]["engine_stores"]
    assert done["result"] == "deleted" and done["blocks"] > 0 and done["bytes"] > 0
    load.run_requests(20)
    assert audit(engine) > 0


def test_an_engine_deletes_what_a_plan_names_and_nothing_that_came_since(quick_path, start):
    store = quick_path / "store"
    engine = start()
    engine.serve(PROMPTS)
    rest(engine)
    (home,) = list_homes(store)
    most = home.allocated_bytes // 2
    (done,) = command("prune", store, "--to", str(most))["engine_stores"]
    assert done["result"] == "deleted" and done["segments"] and done["blocks"] > 0
    assert command("prune", store, "--older-than", "1d")["engine_stores"] == []
    engine.parts.mailbox.wake()
    nvme = engine.parts.nvme
    segment = next(record.slot.segment for record in engine.parts.index.blocks())
    slots = [record.slot.index for record in engine.parts.index.blocks() if record.slot.segment == segment]
    assert nvme.let_go(segment, 0) == (0, 0), "all came since"
    assert nvme.let_go(segment, ranges=[(slots[0], 1)]) == (1, 0), "the segment stays"
    blocks, segment_bytes = nvme.let_go(segment)
    assert blocks == len(slots) - 1 and segment_bytes > 0
    serve_until_all_hits(engine)
    assert audit(engine) > 0


def test_an_engine_that_does_not_answer_is_left_as_it_is(quick_path):
    store = Store.open(quick_path / "store")
    home = store.acquire_home(b"\1" * 32, {"model": "m"}, 64 << 20)
    (home.segments_path / "0").mkdir()
    (home.segments_path / "0" / "rank0.kv").write_bytes(bytes(4096))
    found = command("clear", store.path, "--wait", "0.1", code=1)
    (one,) = found["engine_stores"]
    assert one["result"] == "failed" and "did not answer in 0.1 s" in one["why"]
    assert not (home.path / "REQUEST").exists(), "it is not done later either"
    home.close(clean=True)
    assert command("clear", store.path)["engine_stores"][0]["whole"], "one that has stopped needs nobody"
