# SPDX-License-Identifier: Apache-2.0
"""Processes with a joint cap, or caps of their own, each with a store of its own, that are killed:
together they never exceed that, and each finds what it had."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import joint_cap_owner
import pytest
from joint_cap_owner import BLOCKS, CAP
from live_children import SEED, SpaceWatch


class Rank:
    """One of them."""

    def __init__(self, stack: ExitStack, path: Path, rank: int, seed: int, joint: str) -> None:
        """One of two. ``stack``: with its end this ends, too."""
        command = [sys.executable, joint_cap_owner.__file__, str(path), str(rank), "2", str(seed), joint]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        stack.callback(self.process.kill)
        word, count = self.line().split()
        assert word == "found"
        self.found = int(count)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def fill(self) -> None:
        """Wait until blocks leave for others."""
        assert self.line() == "full\n"

    def fill_and_kill(self) -> None:
        self.fill()
        self.kill()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        rest, _ = self.process.communicate()
        assert "WRONG" not in rest


@pytest.mark.parametrize("joint", ["a server", ""])
@pytest.mark.parametrize("rounds", [1, pytest.param(12, marks=pytest.mark.torture)])
def test_killed_ranks_find_what_each_had_within_the_cap(tmp_path: Path, rounds: int, joint: str) -> None:
    """Whoever starts first. Then others take the room, also more than have shares."""
    dice, store = random.Random(SEED + rounds), tmp_path / "store"
    with ExitStack() as stack:
        watch = stack.enter_context(SpaceWatch(store, lambda: CAP))
        ranks = {rank: Rank(stack, store, rank, rank, joint) for rank in (0, 1)}
        for rank in ranks.values():
            rank.fill()
        for turn in range(rounds):
            first = dice.randrange(2)
            gone = (0, 1) if turn % 2 == 0 else (first,)
            for rank in gone:
                ranks[rank].kill()
            for rank in sorted(gone, key=lambda each: each != first):
                ranks[rank] = Rank(stack, store, rank, 10 * turn + rank, joint)
                assert ranks[rank].found > BLOCKS // 2, (turn, rank)
            if rounds > 1:
                time.sleep(dice.random())
        ranks[1].kill()
        more = 3 if rounds > 1 and joint else 1
        others = [Rank(stack, store, 2 + rank, 100 + rank, joint) for rank in range(more)]
        ranks[0].kill()
        with ThreadPoolExecutor(more) as pool:  # two have room at a time, whichever they are
            list(pool.map(Rank.fill_and_kill, others))
        assert watch.samples > 5
    assert watch.worst <= 0, f"{watch.most_bytes} bytes at most, {watch.worst} more than {CAP}"
