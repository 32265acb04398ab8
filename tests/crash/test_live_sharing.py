# SPDX-License-Identifier: Apache-2.0
"""Three processes with one store directory, tiny capacity and much load: no wrong byte, the cap
holds, and the tools see the store as it is: sound, however fast its blocks leave, and in use by
those that live."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from live_children import SEED, Child, SpaceWatch
from support.live_process import ProcessSettings
from support.waits import WAIT_S, until

from kvdisk.cli.top import TopReader
from kvdisk.cli.verify import verify_store
from kvdisk.device.telemetry_file import read_telemetry


def is_busy(child: Child) -> bool:
    return child.count("loaded_blocks") > 0 and child.count("evicted_blocks.nvme") > 0


def verify(store: Path) -> int:
    """Assert that nothing is wrong; return how many slots changed while they were read."""

    def slowly(done_bytes: int, total_bytes: int) -> None:
        """Let blocks leave between the look into the index and the reading of slots."""
        if not done_bytes:
            time.sleep(0.2)

    verdict = verify_store([store], watch=slowly)
    problems = [home.problems for home in verdict.engine_stores if home.problems]
    assert not verdict.wrong and not problems, f"{verdict.wrong} {problems}"
    return sum(home.changed_slots for home in verdict.engine_stores)


def check_figures(store: Path, child: Child) -> None:
    """What an engine tells of itself is of this engine, and adds up."""
    found = read_telemetry(store / "homes" / child.lines("serving")[0]["home"])
    assert found is not None and (found.pid, found.ranks, found.model) == (child.pid, 2, "model")
    (drive,) = found.drives
    assert drive.path == str(store) and drive.written_bytes > 0 and not drive.quarantined
    assert found.sums["transfer_bytes.cpu_to_nvme"][1] == drive.written_bytes


@pytest.mark.parametrize("seconds", [1.0, 60.0])
@pytest.mark.torture
def test_three_processes_share_a_store(seconds: float, tmp_path: Path) -> None:
    """Three engines under load; then one is killed, one stopped, and the third and a fourth go
    on."""
    store, seed = tmp_path / "store", SEED + int(seconds)
    top = TopReader([store])
    settings = ProcessSettings(str(store), seed=seed, blocks=40, windowed=True, resets=0.002, every_s=0.2)
    cap_bytes = settings.config().nvme_bytes
    assert cap_bytes is not None
    with ExitStack() as stack:
        children = [stack.enter_context(Child(tmp_path, replace(settings, seed=seed + at))) for at in range(3)]
        owners = len(children)
        watch = stack.enter_context(SpaceWatch(store, lambda: owners * cap_bytes))
        for child in children:
            child.wait_serving()
        assert len({child.lines("serving")[0]["home"] for child in children}) == 3, "each has a home of its own"
        changed, end_s = 0, time.monotonic() + seconds
        while time.monotonic() < end_s or not (changed and all(map(is_busy, children))):
            assert time.monotonic() < end_s + WAIT_S, "loads and evictions in all of them"
            for child in children:
                assert child.process.is_alive(), child.text()
            changed += verify(store)
        pids = {child.pid for child in children}
        until(lambda: {engine.pid for engine in top.read().engines} == pids, "what each tells of itself")
        for child in children:
            check_figures(store, child)
        children[0].assert_killed()
        verify(store)
        # The others delete it as soon as they need its room.
        left = store / "homes" / children[0].lines("serving")[0]["home"]
        until(
            lambda: len(top.read().stopped) == 1 or not left.exists(), "the end of the process that had its index open"
        )
        assert {engine.pid for engine in top.read().engines} == pids - {children[0].pid}
        children[1].pause()
        # The next is an owner in the killed one's place, and takes its home if it is still there.
        fourth = stack.enter_context(Child(tmp_path, replace(settings, seed=seed + 3, audit=True)).wait_serving())
        before = children[2].count("loaded_blocks")
        until(lambda: fourth.count("loaded_blocks") > 0, "blocks loaded by the fourth")
        until(lambda: children[2].count("loaded_blocks") > before, "blocks loaded by the third")
        children[1].resume()
        end_s = time.monotonic() + seconds / 4
        until(lambda: time.monotonic() > end_s, "the end")
        for child in (*children[1:], fourth):
            child.end()
        until(lambda: watch.samples > 10, "looks at the space")
    excess = f"{watch.most_bytes} bytes at most, {watch.worst} more than the {owners} caps of {cap_bytes}"
    assert watch.worst <= 0, excess
    verify(store)
    frame = top.read()
    assert not frame.engines and frame.stopped
    with Child(tmp_path, replace(settings, seed=seed + 4, blocks=200, requests=50, audit=True)) as last:
        last.end()
