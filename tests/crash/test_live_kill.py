# SPDX-License-Identifier: Apache-2.0
"""kill -9 of engines under load, and workers that outlive their scheduler: no wrong byte, all space
accounted for.

A failure names its seed; ``KVDISK_TORTURE_SEED`` shifts all seeds.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from live_children import SEED, Child
from support.live_process import ProcessSettings
from support.waits import until

from kvdisk.device.listing import list_homes

KINDS = {
    "one group": {},
    "two groups": {"windowed": True},
    "same on every rank": {"windowed": True, "replicated": True, "ranks": 3},
}


@pytest.mark.parametrize(
    ("rounds", "first"), [(3, 0), *(pytest.param(25, first, marks=pytest.mark.torture) for first in (0, 25, 50))]
)
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.torture) for kind in list(KINDS)[:2]), *list(KINDS)[2:]]
)
def test_killed_at_any_instant(kind: str, rounds: int, first: int, tmp_path: Path) -> None:
    """Of its start, its load and its end."""
    seed = SEED + 10_000 * (rounds > 3) + first
    rng = random.Random(seed)
    store = tmp_path / "store"
    served = 0
    for number in range(rounds):
        settings = ProcessSettings(
            str(store),
            seed=seed + number,
            blocks=40,
            cpu_blocks=rng.choice((0, 4, 16)),
            commit_s=rng.choice((0.0, 0.01, 0.1)),
            resets=rng.choice((0.0, 0.01)),
            seconds=rng.choice((0.0, 0.4)),
            audit=True,
            **KINDS[kind],  # type: ignore[arg-type]
        )
        with Child(tmp_path, settings) as child:
            if rng.random() < 0.8:
                child.wait_serving()
            time.sleep(rng.random() * 0.5)
            child.kill()
            assert child.process.exitcode in {-signal.SIGKILL, 0}, f"round {number}: {child.text()}"
            assert "WRONG BYTES" not in child.text()
            served += any(line["counts"] for line in child.lines())
        child.log.write_text("")  # or there would be hundreds
    settings = ProcessSettings(str(store), blocks=40, requests=50, audit=True, **KINDS[kind])  # type: ignore[arg-type]
    with Child(tmp_path, settings) as last:
        last.end()
    assert len(list_homes(store)) == 1, "every killed engine's home was taken over"
    assert served > 0 or rounds == 3


def test_a_worker_outlives_its_scheduler(tmp_path: Path) -> None:
    """A rank is stopped in the middle of its work, the rest killed, and another engine given the
    store; then the rank goes on."""
    rng = random.Random(SEED)
    store = tmp_path / "store"
    # Room for an orphan besides: the old rank's home, when it has let go.
    settings = ProcessSettings(str(store), seed=SEED, blocks=320, width=20, payload_bytes=20_000, every_s=0.1)
    with Child(tmp_path, replace(settings, rank_processes=True)) as old:
        old.wait_serving()
        (home,) = [line["home"] for line in old.lines("serving")]
        until(lambda: old.count("demoted_blocks"), "blocks on NVMe")
        time.sleep(rng.random() * 0.3)
        stopped = old.stop_rank(rng.randrange(2))
        old.assert_killed()
        with Child(tmp_path, replace(settings, seed=SEED + 1, audit=True)) as new:
            new.wait_serving()
            assert new.lines("serving")[0]["home"] != home
            assert {one.id for one in list_homes(store) if one.alive} >= {home}, "the stopped rank still holds its home"
            until(lambda: new.count("loaded_blocks"), "blocks loaded")
            os.kill(stopped, signal.SIGCONT)
            until(lambda: "outlived its scheduler" in old.text(), "the old rank's end")
            until(lambda: home not in {one.id for one in list_homes(store) if one.alive}, "the home's release")
            assert "WRONG BYTES" not in old.text()
            seen = len(new.lines())
            until(lambda: len(new.lines()) > seen + 5, "half a second of the new engine")
            assert new.end()["blocks"] > 0
        with Child(tmp_path, replace(settings, seed=SEED + 2, requests=40, audit=True)) as last:
            last.end()
