# SPDX-License-Identifier: Apache-2.0
"""kvdisk's tier behind vLLM's real manager of tiers, with its store on a drive and its mover in a
process of its own."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.waits import WAIT_S, lives
from test_tier import ROW_BYTES, Bench
from typer.testing import CliRunner

from kvdisk.cli import verify
from kvdisk.cli.main import app
from kvdisk.device.listing import list_homes
from kvdisk.geometry import HEADER_BYTES, slot_offset

SLOT_BYTES = ROW_BYTES + HEADER_BYTES


class DriveBench(Bench):
    """A bench whose engine steps as long as something is on its way."""

    def rest(self) -> None:
        end_s = time.monotonic() + WAIT_S
        while self.manager.has_pending_work():
            assert time.monotonic() < end_s, "the engine never rests"
            self.step()

    def load(self, name, keys) -> int:
        end_s = time.monotonic() + WAIT_S
        while (hits := self.look(name, keys)) is None:
            assert time.monotonic() < end_s, "it waits for ever"
            self.step()
        if hits:
            self.use(name, keys[:hits])
        self.step(name)
        return hits


Make = Callable[..., DriveBench]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[DriveBench] = []

    def make_bench(**fields: object) -> DriveBench:
        made.append(DriveBench(tmp_path, **{"device": "posix", "lookup_wait_s": 600, "io_deadline_s": 600} | fields))
        return made[-1]

    yield make_bench
    for bench in made:
        if hasattr(bench, "rows"):
            bench.close()


def flip(folder: Path, index: int) -> None:
    (home,) = list_homes(folder / "store")
    with (home.segments_path / "0" / "rank0.kv").open("r+b") as opened:
        opened.seek(slot_offset(SLOT_BYTES, index) + HEADER_BYTES + 5000)
        (byte,) = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 8]))


def test_every_byte_comes_back_after_a_restart_and_no_flipped_bit(make, tmp_path):
    bench = make()
    for document in range(4):
        assert bench.serve(f"cold {document}", document, 12, document % 2) == 0
    bench.close()
    bench = make(rows=16)
    assert sum(bench.serve(f"warm {document}", document, 12, document % 2) for document in range(4)) == 48
    bench.close()
    flip(tmp_path, 0)
    bench = make()
    hits = [bench.serve(f"warm {document}", document, 12, document % 2) for document in range(4)]
    assert hits == [0, 12, 12, 12], "the first chunk of the first document has the bit"
    bench.forget_memory()
    assert bench.serve("again", 0, 12) == 12, "and was computed and stored again"
    bench.close()
    verdict = verify.verify_store([tmp_path / "store"])
    assert not verdict.wrong


def test_a_reset_and_a_restart_after_it(make):
    bench = make()
    bench.serve("old", 1, 6)
    bench.manager.reset_cache()
    getattr(bench.manager, "on_reset_flushed", lambda: None)()
    assert bench.serve("new", 1, 6) == 0
    bench.forget_memory()
    assert bench.serve("again", 1, 6) == 6
    bench.close()
    bench = make()
    assert bench.serve("after a restart", 1, 6) == 6, "the weights are those of the files again"


@pytest.mark.parametrize("stopped", [False, True])
def test_the_mover_ends_with_loads_and_stores_out(make, stopped, caplog):
    bench = make()
    bench.serve("cold", 1, 12)
    bench.forget_memory()
    mover = bench.tier._mover
    os.kill(mover.pid, signal.SIGSTOP)
    keys = bench.begin("warm", 1, 12)
    bench.look("warm", keys)
    others = [f"other {document}" for document in range(2, 17)]
    for document, name in enumerate(others, 2):
        bench.compute(name, bench.begin(name, document, 3))
    bench.step()
    assert len(bench.tier._jobs) == 16
    if stopped:
        mover._answer_s = 0.2
    else:
        os.kill(mover.pid, signal.SIGKILL)
    assert bench.load("warm", keys) == 0
    assert bench.tier.is_off and not lives(mover.pid), "no row is given up before it is dead"
    bench.compute("warm", keys)
    bench.end("warm", *others)
    bench.rest()
    assert not bench.manager._jobs
    assert bench.serve("from memory", 1, 12) == 12
    assert len([text for text in caplog.messages if "kvdisk is off" in text]) == 1
    bench.close()
    bench = make()
    assert bench.serve("after a restart", 1, 12) == 12


def test_an_engine_at_rest_answers_a_command_also_where_it_publishes_events(make, tmp_path):
    bench = make(enable_kv_events=True)
    bench.serve("a", 1, 6)
    assert sum(not event.removed for event in bench.manager.take_events())
    bench.tier.get_stats()
    done = CliRunner().invoke(app, ["clear", str(tmp_path / "store"), *["--live", "--yes", "--json", "--wait", "600"]])
    (one,) = json.loads(done.stdout)["engine_stores"]
    assert (one["result"], one["blocks"]) == ("deleted", 6)
    assert any(event.removed for event in bench.manager.take_events())
    bench.forget_memory()
    assert bench.serve("again", 1, 6) == 0


def test_ended_within_a_moment_of_its_start_and_twice(make):
    for _ in range(2):
        bench = make()
        bench.compute("a", bench.begin("a", 1, 6))
        bench.step()
        bench.close()
        bench.tier.shutdown()


def test_its_memory_is_given_back(make):
    """At once: no garbage has to be collected for it."""
    bench = make()
    path = bench.manager.primary_tier._mmap_region.mmap_path
    bench.serve("a", 1, 6)
    assert path in Path("/proc/self/maps").read_text()
    gc.disable()
    try:
        bench.close()
        assert path not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()
