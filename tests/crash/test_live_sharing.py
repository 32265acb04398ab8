# SPDX-License-Identifier: Apache-2.0
"""Three processes with one store directory, tiny capacity and much load: no wrong byte, and the cap
holds."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from live_children import SEED, Child, SpaceWatch, wait_for
from support.live_process import ProcessSettings


def is_busy(child: Child) -> bool:
    return child.count("loaded_blocks") > 0 and child.count("evicted_blocks.nvme") > 0


def share(directory: Path, seed: int, seconds: float) -> None:
    """Three engines under load for ``seconds``; then one is killed, one stopped, and the third and
    a fourth go on."""
    store = directory / "store"
    settings = ProcessSettings(str(store), seed=seed, blocks=48, windowed=seed % 2 == 1, resets=0.002, every_s=0.2)
    cap_bytes = settings.config().nvme_bytes
    assert cap_bytes is not None
    with ExitStack() as stack:
        children = [stack.enter_context(Child(directory, replace(settings, seed=seed + at))) for at in range(3)]
        owners = len(children)
        watch = stack.enter_context(SpaceWatch(store, lambda: owners * cap_bytes))
        for child in children:
            child.wait_serving()
        assert len({child.lines("serving")[0]["home"] for child in children}) == 3, "each has a home of its own"
        end_s = time.monotonic() + seconds
        wait_for(
            lambda: (
                (time.monotonic() > end_s and all(map(is_busy, children)))
                or not all(child.process.is_alive() for child in children)
            ),
            "loads and evictions in all of them",
        )
        for child in children:
            assert child.process.is_alive(), child.text()
        children[0].assert_killed()
        children[1].pause()
        # The killed one's home is there for the next, who is an owner in its place.
        fourth = stack.enter_context(Child(directory, replace(settings, seed=seed + 3, audit=True)).wait_serving())
        before = children[2].count("loaded_blocks")
        wait_for(lambda: fourth.count("loaded_blocks") > 0, "blocks loaded by the fourth")
        wait_for(lambda: children[2].count("loaded_blocks") > before, "blocks loaded by the third")
        children[1].resume()
        end_s = time.monotonic() + seconds / 4
        wait_for(lambda: time.monotonic() > end_s, "the end")
        for child in (*children[1:], fourth):
            child.end()
        wait_for(lambda: watch.samples > 10, "looks at the space")
    excess = f"{watch.most_bytes} bytes at most, {watch.worst} more than the {owners} caps of {cap_bytes}"
    assert watch.worst <= 0, excess
    with Child(directory, replace(settings, seed=seed + 4, blocks=200, requests=50, audit=True)) as last:
        last.end()


def test_three_processes_share_a_store(tmp_path: Path) -> None:
    share(tmp_path, SEED, 3.0)


@pytest.mark.torture
def test_three_processes_share_a_store_for_a_minute(tmp_path: Path) -> None:
    share(tmp_path, SEED + 11, 60.0)  # an odd seed: two groups, one of a sliding window
