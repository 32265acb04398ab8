# SPDX-License-Identifier: Apache-2.0
"""Several drives under a live engine: blocks on all, one that fails, and drives in another
order."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase

import pytest
from live_children import SEED
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel, PromptTree

from kvdisk.blocks import Tier
from kvdisk.device import posix
from kvdisk.device.base import Op
from kvdisk.manager import nvme
from kvdisk.manager.catalog import CopyState

SHAPE = LoadShape(width=12, forgets=0.3, aborts=0.0)
LONGER_THAN_A_QUARANTINE_S = 61.0
PROMPTS = [PromptTree()._branch(letter) * 4 for letter in ascii_lowercase[:20]]
"""Of ten blocks each, none of which two of them share."""


class Clock:
    """Five milliseconds a step: back-offs pass, quarantines do not."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        self.now_s += 0.005
        return self.now_s


def start(
    dirs: list[Path],
    model: LiveModel,
    clock: Callable[[], float],
    cpu_bytes: int = 1 << 20,
    device: str = "posix",
    blocks: int = 300,
) -> LiveEngine:
    listed = [str(path) for path in dirs]
    config = model.config(listed[0], blocks=blocks, cpu_bytes=cpu_bytes, store_dirs=listed, device=device)
    return LiveEngine(config, model, clock=clock)


def serve_until(load: LiveLoad, what: str, condition: Callable[[], bool]) -> None:
    for _ in range(100):
        if condition():
            return
        load.run_requests(5)
    pytest.fail(f"not within 500 requests: {what}; {load.engine.describe()}")


def blocks_by_drive(engine: LiveEngine) -> Counter[int]:
    nvme, catalog = engine.parts.nvme, engine.manager._catalog
    assert nvme is not None
    ready = [row for row in catalog.rows() if catalog.state(row, Tier.NVME) == CopyState.READY]
    return Counter(nvme.segments.specs[catalog.slot(row, Tier.NVME).segment].drive for row in ready)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is 16 MiB; here one block, so that tiny runs are cut as large ones are."""
    monkeypatch.setattr(nvme, "RUN_BYTES", 1)


@pytest.mark.parametrize(("windowed", "device"), [(True, "posix"), (False, "auto")])
def test_blocks_lie_on_all_drives_and_come_back_in_any_order(
    windowed: bool, device: str, quick_path: Path, tmp_path: Path
) -> None:
    model = LiveModel(windowed=windowed)
    # What is in memory may refuse O_DIRECT.
    dirs = [(quick_path if device == "posix" else tmp_path) / name for name in ("first", "second", "third")]
    engine = start(dirs, model, Clock(), device=device)
    load = LiveLoad(engine, SEED, SHAPE)
    load.run_requests(60)

    def even() -> bool:
        """A slow drive's first segment comes late; from then on it gets its turns."""
        found = blocks_by_drive(engine)
        return len(found) == 3 and min(found.values()) > max(found.values()) // 3

    serve_until(load, "about as many blocks on each drive", even)
    engine.run_until_quiet()
    before = blocks_by_drive(engine)
    engine.close()
    assert all(list(path.glob("homes/*/segments/*/rank1.kv")) for path in dirs)

    again = start([dirs[0], dirs[2], dirs[1]], model, Clock(), device=device)
    assert blocks_by_drive(again).total() == before.total(), "all are found again"
    LiveLoad(again, SEED, SHAPE).run_requests(30)
    stats = again.manager.stats
    assert stats["hit_tokens.nvme"] > 0
    assert not stats["failed_loads"], stats.counts
    again.close()


def test_a_drive_that_fails_is_left_alone_and_the_rest_serves_on(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks have room, so that none leaves; and time stands still unless it is told to go
    on."""
    dirs = [quick_path / "good", quick_path / "bad"]
    now_s = [1_000_000.0]
    monkeypatch.setattr(posix.aio, "serves", lambda fd: False)  # or the kernel's queue would get past the failures
    engine = start(dirs, LiveModel(), lambda: now_s[0], cpu_bytes=0, blocks=900)
    engine.serve(PROMPTS)
    assert all(blocks_by_drive(engine)[drive] > 50 for drive in (0, 1))
    run_call = posix._run

    def failing(op: Op, call: posix._Call) -> int:
        bad = os.readlink(f"/proc/self/fd/{call.fd}").startswith(str(dirs[1]))
        return errno.EIO if bad else run_call(op, call)

    monkeypatch.setattr(posix, "_run", failing)
    stats = engine.manager.stats
    engine.serve(PROMPTS[:5])
    assert (stats["drive_quarantines"], stats["write_pauses"]) == (1, 1)
    loaded, failed, stored = stats["hit_tokens.nvme"], stats["failed_loads"], stats["stored_blocks"]
    held = blocks_by_drive(engine)[0]
    engine.serve([*PROMPTS[5:10], "whatever is written goes to the other one"])
    assert stats["hit_tokens.nvme"] > loaded, "the other drive serves on"
    assert stats["stored_blocks"] > stored and blocks_by_drive(engine)[0] > held, "and is written"
    assert stats["failed_loads"] == failed, "nothing on the bad one is promised"
    now_s[0] += LONGER_THAN_A_QUARANTINE_S
    engine.serve(PROMPTS[10:])
    assert stats["drive_quarantines"] == 2, "it was tried again, and nothing has changed"
    assert stats["failed_loads"] > failed
    engine.close()
