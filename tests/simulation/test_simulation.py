# SPDX-License-Identifier: Apache-2.0
"""The real manager and the real movers of two ranks over drives that fail: everything from one
seed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from support import ENVIRONMENT
from support.low_bounds import lower_bounds
from support.simulator import PICKS, REMOTE_PICKS, UNIT_PICKS, Simulation, run_seeds

from kvdisk.worker.direct import Direct
from kvdisk.worker.slot_headers import SlotHeaders

SEEDS = 60
SHIFT = 10_000 * int(os.environ.get("KVDISK_TORTURE_SEED", "0"))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "kvdisk")


def test_what_is_served_is_right_and_nothing_is_left_over() -> None:
    counts = run_seeds(0, SEEDS)
    missing = [what for what in MUST_HAPPEN if not counts[what]]
    assert not missing, f"it never happened, so nothing is shown about it: {missing}"


MUST_HAPPEN = (
    *("a reset", "a restart", "a kill", "an abort", "damage", "preempted", "restarted, and loaded"),
    *(f"{op} {fault}" for op in ("read", "write") for fault in ("eio", "tear", "hang")),
    *("read flip", "write full", "write lose"),
    *(f"LOAD {reason}" for reason in ("CANCELLED", "CHECKSUM", "DEADLINE", "HEADER", "IO_ERROR", "late", "whole")),
    *(f"STORE {reason}" for reason in ("DEADLINE", "IO_ERROR", "NO_SPACE", "late", "whole")),
    *(f"DEMOTE {reason}" for reason in ("DEADLINE", "IO_ERROR", "NO_SPACE", "late", "whole")),
    *(f"OPEN_SEGMENT {reason}" for reason in ("IO_ERROR", "NO_SPACE", "whole")),
    *("OPEN_HOME IO_ERROR", "DROP_SEGMENT whole", "dropped_records", "released", "drive_quarantines", "write_pauses"),
    *(
        "promoted_blocks",
        "demoted_blocks",
        "evicted_blocks.cpu",
        "evicted_blocks.nvme",
        "segment_failures",
        "segments came back",
        "moved_segments",
    ),
    *PICKS,
)


def test_a_remote_store_that_fails_serves_what_is_right() -> None:
    counts = run_seeds(0, 20, remote=True)
    wanted = [f"{op} {result}" for op in ("put", "get") for result in ("OK", "FAILED", "LATE")]
    wanted += ["get ABSENT", "hit_blocks.remote", "sent_blocks", "remote_rejects", "a kill", "a reset", *REMOTE_PICKS]
    missing = [what for what in wanted if not counts[what]]
    assert not missing, f"it never happened, so nothing is shown about it: {missing}"


def test_units_of_several_blocks() -> None:
    counts = run_seeds(0, 15, units=True)
    wanted = ["a reset", "a kill", "an abort", "preempted", "LOAD CHECKSUM", "LOAD whole", "STORE late", *UNIT_PICKS]
    missing = [what for what in wanted if not counts[what]]
    assert not missing, f"it never happened, so nothing is shown about it: {missing}"


def test_hosts_that_come_and_go() -> None:
    """Each rank's files are lost, or as they were some lives ago, and some are removed while they
    are open."""
    counts = run_seeds(0, 24, hosts=True)
    wanted = [f"host {what}" for what in ("kept", "replaced", "old", "files lost")]
    wanted += ["removed files were found", "a kill", "a reset", "restarted, and loaded", "DROP_SEGMENT whole"]
    wanted += [f"LOAD {reason}" for reason in ("HEADER", "IO_ERROR", "whole")]
    missing = [what for what in wanted if not counts[what]]
    assert not missing, f"it never happened, so nothing is shown about it: {missing}"


@pytest.mark.torture
def test_hosts_that_come_and_go_for_long() -> None:
    run_seeds(SHIFT + 1000, 400, hosts=True)


@pytest.mark.torture
def test_units_of_several_blocks_for_long() -> None:
    run_seeds(SHIFT, 400, units=True)


@pytest.mark.parametrize("remote", [False, True])
def test_prompts_longer_than_every_bound_of_a_step(monkeypatch: pytest.MonkeyPatch, remote: bool) -> None:
    lower_bounds(monkeypatch)
    counts = run_seeds(0, 14, remote=remote)
    assert counts["LOAD whole"] and counts["a reset"] and counts["an abort"] and counts["a kill"]


@pytest.mark.torture
@pytest.mark.parametrize("remote", [False, True])
def test_prompts_longer_than_every_bound_for_long(monkeypatch: pytest.MonkeyPatch, remote: bool) -> None:
    lower_bounds(monkeypatch)
    run_seeds(SHIFT, 200, remote=remote)


@pytest.mark.torture
@pytest.mark.parametrize("first", range(0, 500, 100))
@pytest.mark.parametrize("straight", [False, True])
def test_for_long(first: int, straight: bool) -> None:
    run_seeds(SHIFT + SEEDS + first, 30 if straight else 100, straight=straight)


def test_a_seed_is_a_run() -> None:
    """And the same one in another process, whose hashes of strings are others."""
    found = [Simulation(seed).run() for seed in (3, 4)]
    assert found[0] != found[1]
    environment = ENVIRONMENT | {"PYTHONHASHSEED": "12"}
    command = [sys.executable, "-m", "support.simulator", "--seed", "3", "--count", "2"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert all(digest in shown for digest in found)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What became of moves that might go straight."""
    counts: Counter[str] = Counter()
    route, failed, check = Direct.route, Direct.note_failed, SlotHeaders.check

    def routed(self: Direct, wanted: Any, *rest: Any) -> Any:
        found = route(self, wanted, *rest)
        counts[f"{found.kind.name}_{'DIRECT' if found.direct else 'STAGED'}"] += found.staged
        return found

    def left(*parts: Any) -> Any:
        counts["failed straight"] += 1
        return failed(*parts)

    def checked(*parts: Any) -> Any:
        bad, unknown = check(*parts)
        counts.update(reason.name for reason in bad.values() if parts[1].route.direct)
        counts["sealed by a host"] += len(unknown)
        return bad, unknown

    monkeypatch.setattr(Direct, "route", routed)
    monkeypatch.setattr(Direct, "note_failed", left)
    monkeypatch.setattr(SlotHeaders, "check", checked)
    return counts


def test_blocks_that_go_straight_between_drive_and_gpu_in_some_processes(seen: Counter[str]) -> None:
    total = run_seeds(20, 40, straight=True)
    wanted = ("LOAD_DIRECT", "LOAD_STAGED", "STORE_DIRECT", "STORE_STAGED", "failed straight", "sealed by a host")
    missing = [what for what in (*wanted, "HEADER", "CHECKSUM") if not seen[what]]
    missing += [what for what in ("LOAD late", "STORE late", "a kill", "a restart") if not total[what]]
    assert not missing, f"it never happened, so nothing is shown about it: {missing}"
