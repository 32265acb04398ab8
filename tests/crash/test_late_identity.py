# SPDX-License-Identifier: Apache-2.0
"""Engines that find their fingerprint after they have started: until then nothing that outlives the
process is read or written, and what others stored is left as it is.

Every block that a load brings is compared byte by byte, as in all tests of a live engine.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_model import LiveModel
from support.waits import until
from test_store_goes_away import PROMPTS, hits, serve_until_all_hits

from kvdisk import assembly
from kvdisk.device.control import HOMES
from kvdisk.device.listing import list_homes
from kvdisk.identity import GUESS, Identity, Named

MODEL = LiveModel()
OTHER = LiveModel(name="of which a sample is equal")
GUESSED = b"g" * 32


@dataclass
class Late:
    """The identity of a model, which a test makes known."""

    model: LiveModel = MODEL
    found: Future[Named] = field(default_factory=Future)

    @property
    def identity(self) -> Identity:
        return Identity(Named(GUESSED, self._described), self.found)

    @property
    def _described(self) -> dict[str, object]:
        return {"model": self.model.name, GUESS: GUESSED.hex()}

    def tell(self, engine: LiveEngine) -> None:
        """Make it known, and wait until the engine has it."""
        self.found.set_result(Named(self.model.fingerprint, self._described))
        until(lambda: engine.parts.mailbox.work() or engine.manager._state.is_identified)


def known(model: LiveModel = MODEL) -> Late:
    late = Late(model)
    late.found.set_result(Named(model.fingerprint, late._described))
    return late


Start = Callable[..., LiveEngine]


@pytest.fixture
def start(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start engines of one store, which end with the test."""
    monkeypatch.setattr(assembly, "IDENTITY_WAIT_S", 0.0)
    monkeypatch.setattr(assembly, "IDENTITY_LOOK_S", 0.01)
    engines = []

    def start_one(late: Late, blocks: int = 64, **values: object) -> LiveEngine:
        values = {"store_decode": True, "cpu_bytes": "2MiB"} | values
        config = late.model.config(str(quick_path), blocks=blocks, segment_blocks=8, **values)
        engines.append(LiveEngine(config, late.model, identity=late.identity))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.close()


def fingerprints(path: Path) -> list[bytes]:
    return sorted(home.record.fingerprint for home in list_homes(path) if home.record is not None)


def files_of(path: Path) -> dict[str, int]:
    """Return the files of segments, and when each was last written to."""
    found = (path / HOMES).glob("*/segments/*/*")
    return {str(file.relative_to(path).parts[3:]): os.stat(file).st_mtime_ns for file in found}


@pytest.mark.parametrize("cpu_bytes", ["2MiB", 0])
def test_what_was_stored_before_is_used_from_then_on(start, quick_path, cpu_bytes):
    first = start(known())
    first.serve(PROMPTS)
    first.close()
    before, blocks = files_of(quick_path), len(first.parts.manager._catalog.rows())
    assert before and blocks

    late = Late()
    engine = start(late, cpu_bytes=cpu_bytes)
    engine.serve(PROMPTS[:3])
    engine.serve(PROMPTS[:3])
    stats = engine.manager.stats
    assert hits(engine) == 0 and stats["demoted_blocks"] == 0
    assert (stats["hit_tokens.cpu"] == 60) == bool(cpu_bytes), "memory serves"
    assert files_of(quick_path) == before, "nothing is written, and no file is made"
    in_memory = stats["hit_tokens.cpu"]
    late.tell(engine)
    engine.serve(PROMPTS)
    assert hits(engine) + stats["hit_tokens.cpu"] - in_memory == 20 * len(PROMPTS), "all is found"
    assert hits(engine) >= 60 and stats["failed_loads"] == 0
    engine.serve(["new to all of them, once more"])
    assert audit(engine) > blocks


def test_a_store_that_looks_alike_is_neither_read_nor_written_nor_lost(start, quick_path, caplog):
    first = start(known())
    first.serve(PROMPTS)
    first.close()
    before = files_of(quick_path)

    late = Late(OTHER)
    engine = start(late)
    assert engine.parts.home.fingerprint == MODEL.fingerprint, "the guess misleads"
    engine.serve(PROMPTS)
    late.found.set_result(Named(OTHER.fingerprint, late._described))
    until(lambda: "is of other weights, and is left as it is" in caplog.text)
    engine.serve(PROMPTS)
    assert hits(engine) == engine.manager.stats["demoted_blocks"] == 0
    assert engine.manager.stats["hit_tokens.cpu"] > 0
    engine.close()
    assert files_of(quick_path) == before

    late = Late(OTHER)
    engine = start(late, blocks=200)  # room for both
    assert engine.parts.home.fresh, "it misleads once"
    late.tell(engine)
    engine.serve(PROMPTS)
    engine.serve(PROMPTS)
    engine.close()
    assert fingerprints(quick_path) == sorted([MODEL.fingerprint, OTHER.fingerprint])

    back = start(known(), blocks=200)
    back.serve(PROMPTS)
    assert hits(back) == 20 * len(PROMPTS), "what was there before is there"
    other = start(known(OTHER))
    other.serve(PROMPTS)
    assert hits(other) == 20 * len(PROMPTS)


def test_a_first_start_stores_once_it_knows_what(start, quick_path):
    """What memory has by then names the guess, and is forgotten."""
    late = Late()
    engine = start(late)
    engine.serve(PROMPTS[:2])
    assert not files_of(quick_path)
    late.tell(engine)
    assert fingerprints(quick_path) == [MODEL.fingerprint]
    engine.serve(PROMPTS)
    assert engine.manager.stats["hit_tokens.cpu"] == engine.manager.stats["verification_failures.header"] == 0
    serve_until_all_hits_or_memory(engine)
    audit(engine)
    engine.close()
    again = start(known())
    serve_until_all_hits(again)
    assert again.parts.home.previous_id == engine.parts.home.id


def serve_until_all_hits_or_memory(engine: LiveEngine) -> None:
    stats = engine.manager.stats
    before = hits(engine) + stats["hit_tokens.cpu"]
    engine.serve(PROMPTS)
    assert hits(engine) + stats["hit_tokens.cpu"] - before == 20 * len(PROMPTS)


def test_what_cannot_be_found_is_said_and_memory_serves(start, quick_path, caplog):
    late = Late()
    engine = start(late)
    late.found.set_exception(OSError(errno.EIO, "the drive of the weights fails"))
    until(lambda: "cannot identify the weights: [Errno 5] the drive of the weights fails" in caplog.text)
    engine.serve(PROMPTS[:2])
    engine.serve(PROMPTS[:2])
    assert engine.manager.stats["hit_tokens.cpu"] > 0 == hits(engine)
    assert not files_of(quick_path)


def test_neighbours_are_not_asked_before(start):
    first = start(known())
    first.serve(PROMPTS)
    late = Late()
    second = start(late)
    assert second.parts.home.fresh
    until(lambda: second.parts.neighbours.any)
    second.serve(PROMPTS[:2])
    assert second.manager.stats["foreign_questions"] == 0
    late.tell(second)
    second.serve(PROMPTS[2:])
    assert second.manager.stats["loaded_blocks_foreign"] > 0


@pytest.mark.parametrize("drive", [True, False])
def test_hosts_share_by_what_was_found(start, s3_server, quick_path, drive):
    """Objects have the fingerprint in their names and headers."""
    remote: dict[str, object] = {
        "remote": f"s3://kvdisk-tests/{secrets.token_hex(8)}",
        "remote_options": s3_server.options,
        "remote_admission": "all",
        "cpu_bytes": "2MiB",
        "remote_deadline_s": 60.0,
        "lookup_wait_s": 60.0,
    }
    late = Late()
    one = start_remote(late, quick_path / "one", remote, drive=drive)
    try:
        one.serve(PROMPTS)
        assert one.manager.stats["sent_blocks"] == one.manager.stats["remote_questions"] == 0
        late.tell(one)
        one.serve(PROMPTS)
        assert one.manager.stats["sent_blocks"] > 0
    finally:
        one.close()
    for model, finds in ((MODEL, True), (OTHER, False)):
        two = start_remote(known(model), quick_path / model.name, remote, drive=drive)
        try:
            two.serve(PROMPTS)
            assert (two.manager.stats["hit_blocks.remote"] + two.manager.stats["prefetched_blocks"] > 0) == finds
            assert two.manager.stats["remote_rejects"] == two.manager.stats["failed_loads"] == 0
        finally:
            two.close()


def start_remote(late: Late, store: Path, values: dict[str, object], *, drive: bool) -> LiveEngine:
    config = late.model.config(str(store), blocks=64, segment_blocks=8, store_decode=True, **values)
    if not drive:
        kept = {"min_load_tokens": 0, "store_decode": True, "io_deadline_s": 600.0}
        config = type(config).from_mapping(kept | values)
    return LiveEngine(config, late.model, identity=late.identity)
