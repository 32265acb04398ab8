# SPDX-License-Identifier: Apache-2.0
"""Reading ahead under a live engine that runs one request at a time: real movers, files and index; bytes checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.live_engine import LiveEngine
from support.live_model import LiveModel, PromptTree

from kvdisk.messages import JobKind

LETTERS = "abcdefgh"


def start(store: Path, model: LiveModel, **values: object) -> LiveEngine:
    engine = LiveEngine(model.config(str(store), blocks=300, cpu_bytes=1 << 23, **values), model)
    engine.most_running = 1
    return engine


def serve(engine: LiveEngine, prompts: list[str]) -> None:
    """Serve prompts that come all at once."""
    for number, prompt in enumerate(prompts):
        engine.add(f"{engine.step_count}-{number}", prompt, 4).finishing = False
    while engine.requests:
        for request in engine.running:
            request.finishing = len(request.tokens) >= request.most_tokens
        engine.step()
    engine.run_until_quiet()


@pytest.mark.parametrize("windowed", [False, True], ids=["one group", "with a window"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_what_is_read_ahead_is_served(windowed: bool, prefetch: bool, quick_path: Path) -> None:
    model = LiveModel(windowed=windowed)
    branch = PromptTree()._branch
    prompts = [branch(letter) + branch(letter * 2) + branch(letter * 3) for letter in LETTERS]
    before = start(quick_path, model)
    for prompt in prompts:
        serve(before, [prompt])
    before.close()

    engine = start(quick_path, model, prefetch=prefetch)
    serve(engine, prompts)
    stats = engine.manager.stats
    assert stats["failed_loads"] == stats["failed_promotions"] == 0
    if prefetch:
        assert engine.counting.jobs[JobKind.PROMOTE] > 0
        # The first one's turn comes at once; those behind it find their blocks in memory, or most of them.
        assert stats["hit_tokens.cpu"] > stats["hit_tokens.nvme"]
    else:
        assert engine.counting.jobs[JobKind.PROMOTE] == 0
        assert stats["hit_tokens.cpu"] == 0
    engine.close()
