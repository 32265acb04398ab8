# SPDX-License-Identifier: Apache-2.0
"""``kvdisk clear --live`` and ``prune --live`` on engines that run: at rest, and under load."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel
from support.waits import WAIT_S, until
from typer.testing import CliRunner

from kvdisk.cli.main import app
from kvdisk.config import Config
from kvdisk.device.listing import list_homes
from kvdisk.device.store import Store
from kvdisk.store import BlockKind, BlockStore, Presence, Put, Result, make_block_key

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
    assert nvme.let_go(segment, 0) == (0, 0, False), "all came since"
    assert nvme.let_go(segment, ranges=[(slots[0], 1)]) == (1, 0, False), "the segment stays"
    blocks, segment_bytes, _ = nvme.let_go(segment)
    assert blocks == len(slots) - 1 and segment_bytes > 0
    serve_until_all_hits(engine)
    assert audit(engine) > 0


def test_an_engine_that_has_taken_no_step_yet_clears_itself_too(quick_path, start):
    """Its segments are not open yet, and their blocks are in its index."""
    engine = start()
    engine.serve(PROMPTS)
    engine.close()
    engine = start()
    assert not engine.parts.mailbox.rest()
    (done,) = command("clear", quick_path / "store")["engine_stores"]
    assert done["result"] == "deleted" and done["blocks"] > 0
    engine.parts.mailbox.wake()
    engine.serve(PROMPTS)
    assert hits(engine) == 0
    assert audit(engine) > 0


def test_an_engine_that_does_not_answer_is_left_as_it_is(quick_path):
    store = Store.open(quick_path / "store")
    home = store.acquire_home(b"\1" * 32, {"model": "m"}, 64 << 20)
    (home.segments_path / "0").mkdir()
    (home.segments_path / "0" / "rank0.kv").write_bytes(bytes(4096))
    found = command("clear", store.path, "--wait", "0.1", code=1)
    (one,) = found["engine_stores"]
    assert one["result"] == "withdrawn" and "did not answer in 0.1 s" in one["why"]
    assert not (home.path / "REQUEST").exists(), "it will not be done later either"
    home.close(clean=True)
    assert command("clear", store.path)["engine_stores"][0]["whole"], "one that has stopped needs nobody"


# -- who gives up, and who is killed -------------------------------------------------------------


def asking(path: Path, wait_s: float) -> subprocess.Popen[str]:
    """Begin a command in a process of its own."""
    words = ["clear", str(path), "--live", "--yes", "--json", "--wait", str(wait_s)]
    command = [sys.executable, "-m", "kvdisk.cli.main", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(asked: subprocess.Popen[str]) -> dict[str, Any]:
    said, _ = asked.communicate()
    assert asked.returncode == 1
    (one,) = json.loads(said)["engine_stores"]
    found: dict[str, Any] = one
    return found


def test_what_an_engine_has_not_deleted_in_time_stays(quick_path, start):
    """Its steps are long, and a segment goes with each."""
    engine = start()
    engine.serve(PROMPTS)
    segments = engine.parts.nvme.segments.in_place
    before = len(segments)
    assert before > 2
    asked = asking(quick_path / "store", 3.0)
    until(lambda: engine.step() or len(segments) < before)
    left = len(segments)
    one = result_of(asked)
    assert (one["result"], left) == ("failed", before - 1)
    assert f"{one['blocks']} blocks" in one["why"] and one["why"].endswith("went, and the rest stays")
    for _ in range(100):
        engine.step()
    rest(engine)
    assert len(segments) >= left
    engine.parts.mailbox.wake()
    served = hits(engine)
    engine.serve(PROMPTS)
    assert hits(engine) > served


def test_who_is_interrupted_says_whether_it_is_done(quick_path, start):
    engine = start()
    engine.serve(PROMPTS[:1])
    asked = asking(quick_path / "store", WAIT_S)
    home = engine.parts.home.path
    until(lambda: list(home.glob("REQUEST.taken")))
    asked.send_signal(signal.SIGINT)
    one = result_of(asked)
    assert one["result"] == "failed" and "its engine has begun: it goes on until it is done" in one["why"]
    until(lambda: engine.step() or not list(home.glob("REQUEST*")))
    served = hits(engine)
    engine.serve(PROMPTS[:1])
    assert hits(engine) == served, "it has"


def test_a_request_that_nobody_takes_is_withdrawn_by_who_is_interrupted(quick_path):
    home = Store.open(quick_path / "store").acquire_home(b"\1" * 32, {"model": "m"}, 64 << 20)
    (home.segments_path / "0").mkdir()
    (home.segments_path / "0" / "rank0.kv").write_bytes(bytes(4096))
    asked = asking(quick_path / "store", WAIT_S)
    until((home.path / "REQUEST").exists)
    asked.send_signal(signal.SIGINT)
    one = result_of(asked)
    assert (one["result"], one["why"]) == ("withdrawn", "the command was interrupted; it will not be done later either")
    assert not list(home.path.glob("REQUEST*"))
    home.close(clean=True)


def test_no_later_owner_obeys_what_a_killed_command_has_left(quick_path, start, caplog):
    engine = start()
    engine.serve(PROMPTS)
    engine.close()
    store = Store.open(quick_path / "store")
    (left,) = list_homes(store.path)
    owner = store.hold_home(left.id)
    asked = asking(store.path, WAIT_S)
    until((owner.path / "REQUEST").exists)
    asked.kill()
    asked.communicate()
    owner.release()
    engine = start()
    until(lambda: not (engine.parts.home.path / "REQUEST").exists())
    until((engine.parts.home.path / "ANSWER").exists)
    engine.serve(PROMPTS)
    assert hits(engine) == 20 * len(PROMPTS)
    assert "--live: it was for an earlier engine of this engine store" in caplog.text


def test_a_store_whose_process_makes_no_call_answers(quick_path):
    """As after the loop of docs/LIBRARY.md, where the last call is a poll."""
    rows = np.zeros((4, 4096), np.uint8)
    config = Config.from_mapping({"store_dirs": str(quick_path), "nvme_bytes": "64MiB", "nvme_admission": "all"})
    store = BlockStore.open(config, b"n" * 32, {}, [BlockKind(4096, tokens=16)], rows)
    key = make_block_key(b"a block", 0)
    store.put(1, [Put(key, None, 0)])
    while not (ended := store.poll(0.01)):
        store.step(time.monotonic())
    assert ended[0].results == [Result.DONE]
    (one,) = command("clear", quick_path)["engine_stores"]
    assert (one["result"], one["blocks"]) == ("deleted", 1)
    assert store.presence([key]) == bytes([Presence.ABSENT])
    store.close()
