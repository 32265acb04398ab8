# SPDX-License-Identifier: Apache-2.0
"""What ends, hangs or cuts short the index of an engine under load: its requests go on, one
sentence says what is kept no more, and the next engine serves what is on the drive."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from live_children import SEED, Child, held_bytes
from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel
from support.live_process import ProcessSettings
from support.waits import WAIT_S, lives, until

from kvdisk import engine_store
from kvdisk.device import home as homes
from kvdisk.device.home_lock import lock_directory, unlock_directory
from kvdisk.device.listing import list_homes
from kvdisk.index import commit_writer, lmdb_index
from kvdisk.index.base import IndexState
from kvdisk.index.reader_process import ReaderProcess
from kvdisk.messages import JobKind

MODEL = LiveModel(windowed=True)
STEPS = 150
GONE = "takes no new blocks on NVMe until the next start"
ANOTHER = "a new process takes over"
LATE = "a commit has not ended"
REBUILT = "kvdisk rebuilt the index"


def cut(name: str, units: int) -> Callable[[LiveEngine], None]:
    def harm(engine: LiveEngine) -> None:
        assert engine.parts.home is not None
        os.truncate(engine.parts.home.index_path / name, units * 4096)

    return harm


def sent(number: int) -> Callable[[LiveEngine], None]:
    def harm(engine: LiveEngine) -> None:
        assert engine.parts.index is not None and engine.parts.index.pid is not None
        os.kill(engine.parts.index.pid, number)

    return harm


CASES = {
    "data.mdb is emptied": (cut("data.mdb", 0), GONE, True),
    "data.mdb is cut": (cut("data.mdb", 3), GONE, True),
    "lock.mdb is emptied": (cut("lock.mdb", 0), ANOTHER, False),
    "killed": (sent(signal.SIGKILL), ANOTHER, False),
    "of an unreadable place": (sent(signal.SIGBUS), ANOTHER, False),
    "stopped": (sent(signal.SIGSTOP), LATE, False),
}


def started(store: Path) -> LiveEngine:
    return LiveEngine(MODEL.config(str(store), blocks=24, segment_blocks=4, store_decode=True), MODEL)


def load_on(engine: LiveEngine, seed: int) -> LiveLoad:
    return LiveLoad(engine, seed, LoadShape(width=3, forgets=0.5))


def run(load: LiveLoad, done: Callable[[], object], what: str) -> None:
    def step() -> object:
        load.step()
        return done()

    until(step, what)


@pytest.mark.parametrize("case", CASES)
def test_an_index_that_is_lost_under_load(case, quick_path, caplog, monkeypatch, request):
    harm, said, rebuilds = CASES[case]
    monkeypatch.setattr(commit_writer, "LATE_S", 0.5 if said == LATE else WAIT_S)
    if said == LATE:
        monkeypatch.setattr(engine_store, "_CLOSE_TIMEOUT_S", 0.1)
        monkeypatch.setattr(lmdb_index, "CLOSE_TIMEOUT_S", 0.1)
    engine = started(quick_path / "store")
    request.addfinalizer(engine.close)
    load, stats, index = load_on(engine, SEED), engine.manager.stats, engine.parts.index
    run(load, lambda: stats["hit_tokens.nvme"] and stats["evicted_blocks.nvme"], "hits and evictions")
    assert "data.mdb" not in Path("/proc/self/maps").read_text(), "the engine does not map its index"
    pid = index.pid
    harm(engine)
    run(load, lambda: said in caplog.text, said)
    jobs = engine.counting.jobs[JobKind.DEMOTE]
    # Where no deletion is committed all of this small drive's slots may wait for one.
    tiers = ("nvme", "cpu") if said == LATE else ("nvme",)

    def hits() -> int:
        return sum(stats[f"hit_tokens.{tier}"] for tier in tiers)

    before, finished, steps = hits(), load.finished, engine.step_count
    run(load, lambda: engine.step_count > steps + STEPS and hits() > before, "hits go on")
    assert load.finished > finished
    load.end()
    if said == GONE:
        assert index.poll().state is IndexState.GONE
        assert engine.counting.jobs[JobKind.DEMOTE] <= jobs + 1, "nothing more is written"
    if said == ANOTHER:
        assert index.pid != pid
        audit(engine)
    assert len([text for text in caplog.messages if "index" in text]) == 1, caplog.messages
    engine.close()
    assert not lives(pid)
    caplog.clear()
    after = started(quick_path / "store")
    request.addfinalizer(after.close)
    assert (REBUILT in caplog.text) == rebuilds, caplog.messages
    audit(after)
    load = load_on(after, SEED)
    run(load, lambda: after.manager.stats["hit_tokens.nvme"], "hits of what was there")
    load.end()
    audit(after)
    after.close()


def test_an_engine_that_is_killed_leaves_no_process_behind(tmp_path):
    """Its index's process ends the commit that it is at, and the next engine takes the store over
    after that."""
    settings = ProcessSettings(str(tmp_path / "store"), seed=SEED, commit_s=0.0)
    with Child(tmp_path, settings) as child:
        child.wait_serving()
        until(lambda: child.count("demoted_blocks"), "blocks on NVMe")
        found = children_of(child.pid)
        assert found
        child.assert_killed()
        until(lambda: not any(map(lives, found)), "the end of its processes")


def children_of(pid: int) -> list[int]:
    return [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]


def has_records(store: Path) -> bool:
    """Whether the only engine store has committed several, so that some outlive what is deleted
    meanwhile; blocks are written before."""
    (home,) = list_homes(store)
    reader = ReaderProcess()
    try:
        blocks = reader.read(home.index_path).blocks
        return blocks is not None and len(blocks.keys) >= 2
    finally:
        reader.stop()


@pytest.mark.parametrize("ends", [True, False])
def test_the_next_engine_waits_for_a_commit_that_a_killed_one_has_under_way(ends, tmp_path, caplog, monkeypatch):
    """Or leaves that engine store alone, where the commit does not end: it is written to later."""
    monkeypatch.setattr(homes, "INDEX_WAIT_S", WAIT_S if ends else 0.2)
    settings = ProcessSettings(str(tmp_path / "store"), seed=SEED, commit_s=0.0)  # so many blocks never all go at once
    with Child(tmp_path, settings) as child:
        child.wait_serving()
        until(lambda: has_records(tmp_path / "store"), "records of blocks on NVMe")
        found = children_of(child.pid)
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
        child.assert_killed()
    (old,) = list_homes(tmp_path / "store")

    def go_on() -> None:
        for pid in found:
            os.kill(pid, signal.SIGCONT)

    def go_on_when_taken_over() -> None:
        until(lambda: [home.id for home in list_homes(tmp_path / "store")] != [old.id], "a takeover")
        go_on()

    resuming = threading.Thread(target=go_on_when_taken_over)
    if ends:
        resuming.start()
    engine = LiveEngine(settings.config(), settings.live_model())
    if ends:
        resuming.join()
        assert not any(map(lives, found))
    else:
        assert engine.parts.home.fresh and "leaves engine store" in caplog.text
        assert engine.parts.neighbours is not None
        go_on()
    engine.run_until_quiet()
    audit(engine)
    engine.close()
    until(lambda: not any(map(lives, found)), "the end of the processes")
    monkeypatch.setattr(homes, "INDEX_WAIT_S", WAIT_S)  # nobody has it now, however long a busy machine takes
    last = LiveEngine(settings.config(), settings.live_model())
    assert len(list_homes(tmp_path / "store")) == 1 + (not ends)
    assert not last.parts.home.fresh
    last.run_until_quiet()
    assert audit(last) > 0, "the store of the one that was killed, the fullest"
    last.close()


@pytest.mark.parametrize("fills", [True, False])
def test_what_cannot_be_opened_stays_and_the_engine_uses_the_room_beside_it(fills, quick_path, caplog, monkeypatch):
    """The next start has it."""
    store = quick_path / "store"
    config = MODEL.config(str(store), blocks=64, segment_blocks=4, store_decode=True)
    first = LiveEngine(config, MODEL)
    load = LiveLoad(first, SEED, LoadShape(forgets=0.5))
    run(load, lambda: first.manager.stats["evicted_blocks.nvme" if fills else "demoted_blocks"], "blocks on NVMe")
    load.end()
    held = audit(first)
    first.close()
    (old,) = list_homes(store)
    assert held >= 2
    monkeypatch.setattr(homes, "INDEX_WAIT_S", 0.1)
    lock = lock_directory(old.index_path, fcntl.LOCK_EX, WAIT_S, "the index")
    engine = LiveEngine(config, MODEL)
    assert "leaves engine store" in caplog.text
    assert engine.parts.home is not None and engine.parts.home.fresh
    unlock_directory(lock)
    LiveLoad(engine, SEED + 1, LoadShape(forgets=0.5)).run_requests(60)
    (left,) = [home for home in list_homes(store) if home.id != engine.parts.home.id]
    assert left.segments == old.segments and held_bytes(store) <= config.nvme_bytes
    assert fills or audit(engine) > 0
    engine.close()
    if fills:
        last = LiveEngine(config, MODEL)
        assert audit(last) == held
        last.close()


PROGRAM = """
import sys
from pathlib import Path
from support.live_engine import LiveEngine
from support.live_model import LiveModel
model = LiveModel()
engine = LiveEngine(model.config(sys.argv[1], blocks=24), model)
engine.serve(["abcdefgh" * 4])
assert engine.parts.index.poll().committed > 0
print("lmdb" in sys.modules, "data.mdb" in Path("/proc/self/maps").read_text())
engine.close()
"""


def test_an_engine_neither_imports_lmdb_nor_maps_its_files(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "False False\n"
