# SPDX-License-Identifier: Apache-2.0
"""``kvdisk verify`` beside an engine that evicts as fast as it can, and over what it left when it
was killed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from live_children import WAIT_S, Child
from support.live_process import ProcessSettings

from kvdisk.cli.verify import Verdict, verify_store

VERIFY_S = 2.0


def wrong(verdict: Verdict) -> list[object]:
    return [*verdict.wrong, *(problem for home in verdict.homes for problem in home.problems)]


def test_a_store_in_use_is_good_however_fast_its_blocks_leave(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = ProcessSettings(str(store), seed=11, windowed=True, blocks=24, cpu_blocks=0, every_s=0.2)
    with Child(tmp_path, settings) as engine:
        engine.wait_serving()
        slots = changed = rounds = 0
        end_s = time.monotonic() + VERIFY_S
        while time.monotonic() < end_s or not (slots and changed):
            assert time.monotonic() < end_s + WAIT_S, (slots, changed)
            verdict = verify_store([store], watch=slowly)
            assert not wrong(verdict)
            (home,) = verdict.homes
            slots, changed, rounds = slots + home.slots, changed + home.changed_slots, rounds + 1
        assert engine.count("evicted_nvme_blocks") or changed
        copy = tmp_path / "copy"
        engine.pause()
        shutil.copytree(store, copy)
        engine.resume()
        engine.assert_killed()
    assert not wrong(verify_store([store])), "what a killed engine left"
    assert not wrong(verify_store([copy])), "a copy of a moment"


def slowly(done_bytes: int, total_bytes: int) -> None:
    """Let blocks leave between the look into the index and the reading of slots."""
    if not done_bytes:
        time.sleep(0.2)
