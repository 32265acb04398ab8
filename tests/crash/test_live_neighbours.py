# SPDX-License-Identifier: Apache-2.0
"""Two live engines of one store: what one has stored the other loads, and does not store again."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.live_engine import LiveEngine
from support.live_model import LiveModel
from support.waits import until

PROMPTS = [f"{letter * 9}{text}" for letter in "abc" for text in ("first and last tokens", "second, of another kind")]


def start(store: Path, model: LiveModel, *, blocks: int = 200, **config: object) -> LiveEngine:
    dirs = [str(store), str(store.with_name("other drive"))]
    config = {"store_dirs": dirs, "store_decode": True, "cpu_bytes": "2MiB"} | config
    return LiveEngine(model.config(dirs[0], blocks=blocks, **config), model)


def meets(engine: LiveEngine, others: int) -> None:
    """Wait until an engine has seen so many other homes."""
    until(lambda: len(engine.parts.neighbours._homes) == others, f"{others} homes that are seen")


@pytest.mark.parametrize("windowed", [False, True])
def test_what_one_stored_the_other_loads(windowed: bool, quick_path: Path) -> None:
    model = LiveModel(windowed=windowed)
    one, two = (start(quick_path / "store", model) for _ in range(2))
    meets(two, 1)
    one.serve(PROMPTS)
    held = one.manager.stats["demoted_blocks"]
    assert held > 20
    two.serve(PROMPTS)
    stats = two.manager.stats
    # Loaded on the way or read ahead while another load had the turn: either way they came from the
    # first's home.
    assert stats["promoted_blocks"] > 20
    assert stats["loaded_blocks_foreign"] + stats["prefetched_blocks"] > 20
    assert not stats["failed_loads"]
    assert stats["demoted_blocks"] < held // 4, "but for the tails that are always computed, nothing is stored twice"
    assert not two.manager._hints.neighbours._open
    two.close()
    one.close()


def test_an_orphan_serves_until_it_is_taken_over(quick_path: Path) -> None:
    model = LiveModel()
    one, two = (start(quick_path / "store", model) for _ in range(2))
    one.serve(PROMPTS)
    one.close()
    meets(two, 1)
    two.serve(PROMPTS[:3])
    promoted = two.manager.stats["promoted_blocks"]
    assert promoted > 10
    three = start(quick_path / "store", model)
    assert len(three.manager._catalog) > 20, "the third has taken over what the first left"
    home_id = three.parts.home.id
    until(lambda: list(two.parts.neighbours._homes) == [home_id], "its new id to be seen")
    two.serve(PROMPTS[3:])
    assert two.manager.stats["promoted_blocks"] > promoted, "from its new owner's home"
    three.close()
    two.close()


def test_an_owner_that_evicts_under_a_reader_causes_a_miss(quick_path: Path) -> None:
    model = LiveModel()
    one = start(quick_path / "store", model, blocks=24, segment_blocks=4)
    two = start(quick_path / "store", model)
    meets(two, 1)
    one.serve(PROMPTS[:1])
    # All that has room: nothing of a prompt is written over the prompt's own head.
    assert one.manager.stats["demoted_blocks"] > 3, "a fresh store's first request needs no second to be written"
    # The second hears of the blocks, and comes to load them when the first has given their slots to
    # others.
    two.pool.forget_all()
    request = two.add("slow", PROMPTS[0], 1)
    request.finishing = True
    two.step()  # it asks; the reader's process has only begun

    def known() -> object:
        two.manager._hints.neighbours.absorb()
        return two.manager._hints.neighbours.hints

    until(known, "an answer")
    for round_number in range(4):
        one.serve([f"{round_number}{number} entirely different words" for number in range(6)])
    assert one.manager.stats["evicted_blocks.nvme"] > 0
    two.run_until_quiet()
    stats = two.manager.stats
    assert stats["foreign_failures"] > 0, stats.counts
    failed = ("verification_failures.header", "io_errors.read", "failed_loads")
    assert not any(stats[name] for name in failed), "nothing of its own has failed"
    failures = stats["foreign_failures"]
    two.serve(PROMPTS[:1])
    assert stats["foreign_failures"] == failures, "what failed is not asked for again"
    two.close()
    one.close()
