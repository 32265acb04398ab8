# SPDX-License-Identifier: Apache-2.0
"""The simulation, with blocks that go straight between drive and GPU in some processes of a store,
not in others."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from support.simulator import run_seeds

from kvdisk.worker.direct import Direct
from kvdisk.worker.slot_headers import SlotHeaders

FIRST, SEEDS = 20, 40
"""Few that let everything happen."""
SHIFT = 10_000 * int(os.environ.get("KVDISK_TORTURE_SEED", "0"))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "kvdisk")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What became of moves that might go straight."""
    counts: Counter[str] = Counter()
    route, failures, check = Direct.route, Direct.note_failures, SlotHeaders.check

    def routed(self: Direct, wanted: Any, *rest: Any) -> Any:
        found = route(self, wanted, *rest)
        counts[found.name] += 1
        return found

    def failed(self: Direct, count: int) -> bool:
        counts["failed straight"] += count
        return failures(self, count)

    def checked(*parts: Any) -> Any:
        bad, unknown = check(*parts)
        counts.update(reason.name for reason in bad.values() if parts[1].route.direct)
        counts["sealed by a host"] += len(unknown)
        return bad, unknown

    monkeypatch.setattr(Direct, "route", routed)
    monkeypatch.setattr(Direct, "note_failures", failed)
    monkeypatch.setattr(SlotHeaders, "check", checked)
    return counts


def test_what_is_served_is_right_and_nothing_is_left_over(seen: Counter[str]) -> None:
    total = run_seeds(FIRST, SEEDS, straight=True)
    wanted = ("LOAD_DIRECT", "LOAD_STAGED", "STORE_DIRECT", "STORE_STAGED", "failed straight", "sealed by a host")
    missing = [what for what in (*wanted, "HEADER", "CHECKSUM") if not seen[what]]
    missing += [what for what in ("LOAD late", "STORE late", "a kill", "a restart") if not total[what]]
    assert not missing, f"it never happened, so nothing is shown about it: {missing}"


@pytest.mark.torture
def test_for_long() -> None:
    run_seeds(SHIFT + FIRST + SEEDS, 150, straight=True)
