# SPDX-License-Identifier: Apache-2.0
"""kvdisk's tier beside vLLM's ``fs`` tier, in turn, behind vLLM's real manager of tiers on one
drive: rates, a step's own work, and hits of what memory does not hold.

    PYTHONPATH=tests python tools/measure_offloading.py /nvme/somewhere

Stores and loads of rows of three sizes, while the scheduler's Python rests between steps, and while
it works for 10 ms in each. A store ends when vLLM has its rows again: what was stored can be hit
from then on. Neither tier's is sure to outlive the machine then; kvdisk's commit of its index,
which a restart needs, comes up to ``index_commit_s`` later. ``fs`` is measured with 1, 4 and 16
threads for each direction, and its best counts. A ratio is the median of the rounds' ratios. No
model runs: rows are filled by numpy.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from support.tiering import Door, make_manager

MIB = 1 << 20
ROWS_BYTES = (2 * MIB, 256 << 10, 64 << 10)
MOVED_BYTES = {2 * MIB: 256 * MIB, 256 << 10: 128 * MIB, 64 << 10: 64 * MIB}
CHUNKS = 64
"""Of a request."""
BUSY_S = 0.010
FS_THREADS = (1, 4, 16)
STEP_BYTES = 16 * MIB
"""Of chunks that a step offers, if that is a request's or more: what 1.6 GB/s of new KV make of 10
ms. With less the steps are measured, and no tier."""
OFFERED = 128
"""Chunks of a step whose own work is measured."""


class BusyDoor(Door):
    """A door, stepped as by an engine. ``busy_s``: of Python, in each step."""

    def __init__(self, tier: dict[str, Any], rows: int, row_bytes: int, busy_s: float = 0.0) -> None:
        super().__init__(make_manager(tier, rows, row_bytes))
        self.busy_s = busy_s

    def take_step(self, *new: str) -> None:
        """Take a step, and a while."""
        end_s = time.perf_counter() + self.busy_s
        self.step(*new)
        if not self.busy_s:
            time.sleep(0.0005)
        while time.perf_counter() < end_s:
            pass

    def regain_rows(self) -> None:
        """Step until no tier has a row any more."""
        while self.manager._jobs:
            self.take_step()

    def rest(self) -> None:
        """Step until nothing is on its way."""
        while self.manager.has_pending_work():
            self.take_step()


@contextmanager
def opened(tier: dict[str, Any], rows: int, row_bytes: int, busy_s: float = 0.0) -> Iterator[BusyDoor]:
    """Have a door for a while."""
    door = BusyDoor(tier, rows, row_bytes, busy_s)
    try:
        yield door
    finally:
        door.close()


class Tiers:
    """The tiers that are measured, each in a directory of its own, emptied before each use."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._numbers = count()

    def kvdisk(self) -> dict[str, Any]:
        """Return the settings of kvdisk's tier."""
        store = {"store_dirs": str(self._new()), "nvme_bytes": 2 << 30, "segment_bytes": 256 * MIB}
        return {"type": "kvdisk", "namespace": "measured", "nvme_admission": "all", **store}

    def fs(self, threads: int = 16) -> dict[str, Any]:
        """Return the settings of vLLM's."""
        return {"type": "fs", "root_dir": str(self._new()), "n_read_threads": threads, "n_write_threads": threads}

    def _new(self) -> Path:
        path = self._place / str(next(self._numbers))
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path


def rates(tier: dict[str, Any], row_bytes: int, busy_s: float) -> tuple[float, float]:
    """Return the rates of stores and loads, in bytes a second."""
    rows = MOVED_BYTES[row_bytes] // row_bytes
    content = np.random.default_rng(1).integers(0, 256, row_bytes, np.uint8)
    with opened(tier, rows, row_bytes, busy_s) as door:
        warm = door.begin("warm", 10**6, 1)
        door.compute("warm", warm, lambda _: content)  # the first segment comes
        door.end("warm")
        door.rest()
        names = [(f"{at}", at) for at in range((rows - 1) // CHUNKS)]
        door.rows[:] = content
        start_s, stored = time.perf_counter(), 0
        for first in range(0, len(names), each := max(1, STEP_BYTES // (CHUNKS * row_bytes))):
            for name, document in names[first : first + each]:
                stored += door.compute(name, door.begin(name, document, CHUNKS))
                door.end(name)
            door.take_step()
        door.regain_rows()
        store_s = time.perf_counter() - start_s
        door.rest()
        door.manager.primary_tier.reset_cache()
        start_s, loaded = time.perf_counter(), 0
        for name, document in names:
            keys = door.begin(name, document, CHUNKS)
            while (found := door.look(name, keys)) is None:
                door.take_step()
            loaded += found
            door.take_step(name)
            door.end(name)
        load_s = time.perf_counter() - start_s
        door.rest()
    assert loaded == stored, f"{loaded} of {stored} chunks were loaded"
    return stored * row_bytes / store_s, loaded * row_bytes / load_s


def step_s(tier: dict[str, Any]) -> float:
    """Return the median of a step's own work with ``OFFERED`` chunks offered."""
    row_bytes, found = 64 << 10, []
    with opened(tier, 8 * OFFERED, row_bytes) as door:
        for at in range(12):
            keys = door.begin(f"{at}", at, OFFERED)
            prepared = door.manager.prepare_store(keys, door.requests[f"{at}"])
            start_s = time.perf_counter()
            door.manager.complete_store(prepared.keys_to_store, door.requests[f"{at}"])
            door.step()
            found.append(time.perf_counter() - start_s)
            door.end(f"{at}")
            door.rest()
    return statistics.median(found[2:])


def hits_of(tier: dict[str, Any], requests: int = 32, chunks: int = 5, rows: int = 80) -> int:
    """Return the chunks that hit after a restart, where all requests wait at once and memory has
    rows for half of them."""
    row_bytes = 64 << 10
    with opened(tier, 4 * rows, row_bytes) as door:
        for at in range(requests):
            door.compute(f"{at}", door.begin(f"{at}", at, chunks))
            door.end(f"{at}")
            door.rest()
    hits = 0
    with opened(tier, rows, row_bytes) as door:
        waiting = {f"{at}": door.begin(f"{at}", at, chunks) for at in range(requests)}
        running: list[str] = []
        while waiting or running:
            for name in list(waiting):  # vLLM: who waits for KV keeps nobody behind it from being asked
                found = door.look(name, waiting[name])
                if found is not None:
                    if found:
                        door.manager.prepare_load(waiting[name][:found], door.requests[name])
                        door.manager.complete_load(waiting[name][:found], door.requests[name])
                    hits += found
                    running.append(name)
                    del waiting[name]
            door.take_step(*running)
            for name in running:
                door.end(name)
            running = []
        door.rest()
    return hits


def best_threads(tiers: Tiers, row_bytes: int) -> dict[str, int]:
    """Return the count of threads with which ``fs`` stores, and loads, most."""
    found = {threads: rates(tiers.fs(threads), row_bytes, 0.0) for threads in FS_THREADS}
    return {what: max(found, key=lambda threads: found[threads][at]) for at, what in enumerate(("store", "load"))}


def rate(make: Callable[[], Any], row_bytes: int, busy_s: float, at: int) -> float:
    """Return one of a tier's rates."""
    return rates(make(), row_bytes, busy_s)[at]


def ratio(rounds: int, ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[float, float, float]:
    """Return the medians of both, and of their ratios, in alternation."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    middle = [statistics.median(each) for each in zip(*pairs, strict=True)]
    return middle[0], middle[1], statistics.median(one / other for one, other in pairs)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("place", type=Path, help="a directory on the drive, in which one is made")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    place = options.place.absolute() / "kvdisk-measures"
    tiers = Tiers(place)
    try:
        print("| rows | scheduler | | kvdisk, GiB/s | fs, GiB/s | ratio |\n|---|---|---|---|---|---|")
        for row_bytes in ROWS_BYTES:
            best = best_threads(tiers, row_bytes)
            for busy_s, busy in ((0.0, "rests"), (BUSY_S, "10 ms a step")):
                for at, what in enumerate(("store", "load")):
                    mine, other, times = ratio(
                        options.rounds,
                        partial(rate, tiers.kvdisk, row_bytes, busy_s, at),
                        partial(rate, partial(tiers.fs, best[what]), row_bytes, busy_s, at),
                    )
                    print(
                        f"| {row_bytes >> 10} KiB | {busy} | {what} | {mine / 2**30:.2f} "
                        f"| {other / 2**30:.2f} ({best[what]} threads) | {times:.2f} |",
                        flush=True,
                    )
        mine, other, times = ratio(options.rounds, lambda: step_s(tiers.kvdisk()), lambda: step_s(tiers.fs()))
        print(f"\nA step with {OFFERED} chunks offered: {1e3 * mine:.2f} ms, fs {1e3 * other:.2f}: {times:.2f}")
        mine, other, times = ratio(options.rounds, lambda: hits_of(tiers.kvdisk()), lambda: hits_of(tiers.fs()))
        print(f"Chunks that hit, of 160, with rows for 80: {mine:.0f}, fs {other:.0f}: {times:.2f}")
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
