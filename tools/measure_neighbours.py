# SPDX-License-Identifier: Apache-2.0
"""A part of ``measure_store``: what a question to another engine's home costs the thread that asks, and how long it
takes to be answered."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvdisk.blocks import BlockKey
from kvdisk.index.neighbour_reader import Neighbour, NeighbourReader

POLL_INTERVAL_S = 0.0005
ANSWERED_WITHIN_S = 60.0


class Asked(NamedTuple):
    """Seconds: of the call of ``ask``, of each call of ``poll`` until the answer, and from the one to the other."""

    ask_s: float
    polls_s: Sequence[float]
    answer_s: float


class AskedHome:
    """Another engine's index, and the reader that asks it as an engine would."""

    def __init__(self, index_path: Path) -> None:
        forget(index_path / "data.mdb")
        self._reader = NeighbourReader(lambda: [Neighbour("0" * 32, index_path)], lambda: None)

    def ask(self, keys: Sequence[BlockKey]) -> Asked:
        """Ask for keys that the index has, all of them."""
        start_s = time.perf_counter()
        assert self._reader.ask(1, 0, keys)
        asked_s = time.perf_counter()
        polls_s: list[float] = []
        while time.perf_counter() - start_s < ANSWERED_WITHIN_S:
            before_s = time.perf_counter()
            answers = self._reader.poll()
            after_s = time.perf_counter()
            polls_s.append(after_s - before_s)
            if answers:
                assert len(answers[0].copies) == len(keys)
                return Asked(asked_s - start_s, polls_s, after_s - start_s)
            time.sleep(POLL_INTERVAL_S)
        raise AssertionError("no answer")

    def close(self) -> None:
        """Ask no more."""
        self._reader.close()


def forget(path: Path) -> None:
    """Drop a file, which no process has mapped, from the system's memory."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
