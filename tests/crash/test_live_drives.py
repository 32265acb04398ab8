# SPDX-License-Identifier: Apache-2.0
"""Two drives under a live engine: named in another order at the next start, and one that fails."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path
from string import ascii_lowercase

import pytest
from support.live_engine import LiveEngine
from support.live_model import LiveModel, PromptTree

from kvdisk.blocks import Tier
from kvdisk.device import posix
from kvdisk.device.base import Op
from kvdisk.device.batches import Call
from kvdisk.manager import nvme
from kvdisk.manager.catalog import CopyState

LONGER_THAN_A_QUARANTINE_S = 61.0
PROMPTS = [PromptTree()._branch(letter) * 4 for letter in ascii_lowercase[:20]]
"""Of ten blocks each, none of which two of them share."""


def start(first: Path, *further: Path, now_s: list[float]) -> LiveEngine:
    """All blocks have room, so that none leaves; time goes on only where the test says so."""
    model, listed = LiveModel(), [str(path) for path in (first, *further)]
    config = model.config(listed[0], blocks=900, cpu_bytes=0, store_dirs=listed)
    return LiveEngine(config, model, clock=lambda: now_s[0])


def blocks_by_drive(engine: LiveEngine) -> Counter[int]:
    nvme, catalog = engine.parts.nvme, engine.manager._catalog
    assert nvme is not None
    ready = [row for row in catalog.rows() if catalog.state(row, Tier.NVME) == CopyState.READY]
    return Counter(nvme.segments.specs[catalog.slot(row, Tier.NVME).segment].drive for row in ready)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is 16 MiB; here one block, so that tiny runs are cut as large ones are."""
    monkeypatch.setattr(nvme, "RUN_BYTES", 1)


def test_a_drive_that_fails_is_left_alone_and_the_rest_serves_on(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, bad, third = (quick_path / name for name in ("first", "bad", "third"))
    now_s = [1_000_000.0]
    monkeypatch.setattr(posix.aio, "serves", lambda fd: False)  # or the kernel's queue would get past the failures
    run_call, broken = posix._run, []

    def failing(op: Op, call: Call) -> int:
        is_bad = broken and os.readlink(f"/proc/self/fd/{call.fd}").startswith(str(bad))
        return errno.EIO if is_bad else run_call(op, call)

    monkeypatch.setattr(posix, "_run", failing)
    engine = start(first, bad, now_s=now_s)
    engine.serve(PROMPTS)
    held = blocks_by_drive(engine)
    assert all(held[drive] > 50 for drive in (0, 1))
    engine.close()
    engine = start(first, third, bad, now_s=now_s)
    assert blocks_by_drive(engine) == held, "positions stay, whatever the order"

    broken.append(True)
    stats = engine.manager.stats
    engine.serve(PROMPTS[:5])
    assert stats["drive_quarantines"] == 1
    loaded, failed, stored = stats["hit_tokens.nvme"], stats["failed_loads"], stats["stored_blocks"]
    assert failed
    engine.serve([*PROMPTS[5:10], "whatever is written goes to the other ones"])
    assert stats["hit_tokens.nvme"] > loaded, "the other drives serve on"
    assert stats["stored_blocks"] > stored and blocks_by_drive(engine)[2] > 0, "and are written"
    assert stats["failed_loads"] == failed, "nothing on the bad one is promised"
    now_s[0] += LONGER_THAN_A_QUARANTINE_S
    engine.serve(PROMPTS[10:])
    assert stats["drive_quarantines"] == 2, "it was tried again, and nothing has changed"
    assert stats["failed_loads"] > failed
    engine.close()
