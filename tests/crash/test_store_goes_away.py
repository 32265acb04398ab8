# SPDX-License-Identifier: Apache-2.0
"""A store that others move, or remove, while an engine has it open.

Upkeep looks when it is told, not when it is time. Every block that a load brings is compared byte
by byte, as in all tests of a live engine.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_model import LiveModel
from support.open_files import open_below
from support.waits import WAIT_S

from kvdisk.device.listing import list_homes
from kvdisk.device.store import Store
from kvdisk.upkeep import Upkeep

MODEL = LiveModel()
PROMPTS = [letter * 24 for letter in "abcdef"]


@pytest.fixture
def store(quick_path: Path) -> Path:
    return quick_path / "store"


@pytest.fixture
def start(store: Path) -> Iterator[Callable[..., LiveEngine]]:
    """Start engines, which end with the test."""
    engines = []

    def start_one(model: LiveModel = MODEL) -> LiveEngine:
        config = model.config(str(store), blocks=64, segment_blocks=8, cpu_bytes=0, store_decode=True)
        engines.append(LiveEngine(config, model))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.close()


def upkeep_of(engine: LiveEngine, path: Path, model: LiveModel = MODEL) -> Upkeep:
    parts = engine.parts
    assert parts.home is not None and parts.nvme is not None
    return Upkeep(Store.open(path, create=False), parts.home, parts.nvme, parts.mailbox, model.geometry.shard_count)


def warnings(caplog: pytest.LogCaptureFixture, engine: LiveEngine) -> list[str]:
    """Warnings of this engine's upkeep: one that another test left open may look, too."""
    said = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return [text for text in said if f"something else changed engine store {engine.parts.home.id} " in text]


def hits(engine: LiveEngine) -> int:
    return engine.manager.stats["hit_tokens.nvme"]


def serve_until_all_hits(engine: LiveEngine, prompts: Sequence[str] = PROMPTS) -> None:
    """Serve prompts until all that was lost is stored again: a segment takes a moment to make."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        before = hits(engine)
        engine.serve(prompts)
        if hits(engine) - before == 20 * len(prompts):
            return
    pytest.fail(engine.describe())


def nameless(path: Path) -> list[str]:
    """Segment files that are open and have no name: their bytes are taken."""
    return [one for one in open_below(path) if one.endswith(".kv (deleted)")]


def test_removed_segments_are_given_up_and_made_anew(store, start, caplog):
    engine = start()
    upkeep = upkeep_of(engine, store)
    engine.serve(PROMPTS)
    upkeep.look()
    assert warnings(caplog, engine) == [], "nothing is missing"
    home = engine.parts.home.path
    files = sorted(home.glob("segments/*/rank1.kv"))
    assert len(files) >= 3
    files[0].unlink()  # of one rank: the other's part is of no use
    shutil.copy(files[1], store / "other")
    (store / "other").replace(files[1])  # it has the name, and is not what is open
    assert len(nameless(store)) == 2
    upkeep.look()
    upkeep.look()
    (said,) = warnings(caplog, engine)
    assert "files of 2 segments are gone" in said
    engine.run_until_quiet()
    engine.serve(["z"])
    assert nameless(store) == [], "the bytes are free"
    assert not (files[0].parent / "rank0.kv").exists()
    before, loads = hits(engine), engine.manager.stats["failed_loads"]
    engine.serve(PROMPTS)
    assert hits(engine) > before and engine.manager.stats["failed_loads"] == loads
    serve_until_all_hits(engine)
    assert audit(engine) > 0
    upkeep.look()
    assert warnings(caplog, engine) == []


def test_a_removed_store_is_not_written_to_and_its_bytes_come_back(store, start, caplog):
    engine = start()
    upkeep = upkeep_of(engine, store)
    engine.serve(PROMPTS)
    shutil.rmtree(store)
    store.mkdir(0o700)
    assert nameless(store)
    upkeep.look()
    upkeep.look()
    (said,) = warnings(caplog, engine)
    assert "is gone, so it takes no more blocks until the next start" in said
    before, stored = hits(engine), engine.manager.stats["stored_blocks"]
    engine.serve(PROMPTS)
    assert nameless(store) == [] and hits(engine) == before
    assert engine.manager.stats["stored_blocks"] == stored
    assert list(store.iterdir()) == [], "what is there now is another's"
    other = start(LiveModel("other"))
    other.serve(PROMPTS)
    upkeep.look()
    engine.close()
    assert [home.alive for home in list_homes(store)] == [True] and audit(other) > 0


def test_a_moved_store_serves_what_it_has(store, start, caplog):
    engine = start()
    upkeep = upkeep_of(engine, store)
    engine.serve(PROMPTS)
    moved = store.with_name("moved")
    store.rename(moved)
    upkeep.look()
    (said,) = warnings(caplog, engine)
    assert "was moved away, so it takes no more blocks" in said
    before, stored = hits(engine), engine.manager.stats["stored_blocks"]
    engine.serve([*PROMPTS, "y" * 24])
    assert hits(engine) - before == 20 * len(PROMPTS) and engine.manager.stats["stored_blocks"] == stored
    assert [home.alive for home in list_homes(moved)] == [True], "nobody takes it over where it is now"
    shutil.rmtree(moved)
    upkeep.look()
    engine.serve(["x"])
    assert nameless(moved) == []


def test_removed_lock_files_are_made_anew_before_another_engine_looks_or_after(store, start, caplog):
    engine = start()
    upkeep = upkeep_of(engine, store)
    engine.serve(PROMPTS)
    home = engine.parts.home.path
    gone = [store / "lock", home / "lock", store / "STORE"]
    for before in (True, False):
        for path in gone[: 3 if before else 2]:
            path.unlink()
        if before:
            upkeep.look()
            (said,) = warnings(caplog, engine)
            assert all(path.name in said for path in gone) and "made again" in said
            assert all(path.exists() for path in gone)
        other = start(LiveModel(f"other {before}"))
        other.serve(["z" * 24])
        upkeep.look()
        assert {path.name for path in (store / "homes").iterdir()} >= {home.name, other.parts.home.id}
        other.close()
    found = hits(engine)
    engine.serve(PROMPTS)
    assert hits(engine) - found == 20 * len(PROMPTS)
    engine.close()
    after = start()
    assert not after.parts.home.fresh
    after.serve(PROMPTS)
    assert hits(after) == 20 * len(PROMPTS)


def test_without_its_index_it_takes_no_more_and_the_next_start_has_all(store, start, caplog):
    engine = start()
    upkeep = upkeep_of(engine, store)
    engine.serve(PROMPTS)
    shutil.rmtree(engine.parts.home.index_path)
    upkeep.look()
    upkeep.look()
    (said,) = warnings(caplog, engine)
    assert "its index is gone, so it takes no more blocks until the next start" in said
    stored = engine.manager.stats["stored_blocks"]
    engine.serve([*PROMPTS, "y" * 24])
    assert hits(engine) >= 20 * len(PROMPTS) and engine.manager.stats["stored_blocks"] == stored
    engine.close()
    after = start()
    after.serve(PROMPTS)
    assert hits(after) == 20 * len(PROMPTS)
