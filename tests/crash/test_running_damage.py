# SPDX-License-Identifier: Apache-2.0
"""Damage to the files of an engine that is running: what it serves is right, and it goes on."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from live_children import SEED, WAIT_S
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel

from kvdisk.geometry import HEADER_BYTES, SEGMENT_HEADER_BYTES

STEPS = 150
EVERY = 3
MODEL = LiveModel()
SLOT_BYTES = MODEL.geometry.slot_sizes[0]
COUNTERS = ("verification_failures.header", "verification_failures.checksum", "io_errors.read")

Damage = Callable[[Path, random.Random], None]


def overwrite(path: Path, at: int, change: Callable[[bytes], bytes], length: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        data = file.read(length)
        file.seek(at)
        file.write(change(data))


def flip_in(start: int, end: int) -> Damage:
    """Flip a bit of every slot between two places."""

    def damage(path: Path, rng: random.Random) -> None:
        for slot in range(SEGMENT_HEADER_BYTES, path.stat().st_size, SLOT_BYTES):
            overwrite(path, slot + rng.randrange(start, end), lambda data: bytes([data[0] ^ 0x10]), 1)

    return damage


def exchange(path: Path, rng: random.Random) -> None:
    """Write each slot's bytes over its neighbour's."""

    def rotated(data: bytes) -> bytes:
        return data[SLOT_BYTES:] + data[:SLOT_BYTES]

    overwrite(path, SEGMENT_HEADER_BYTES, rotated, path.stat().st_size - SEGMENT_HEADER_BYTES)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def replace_by_directory(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir(0o700)


CASES: dict[str, tuple[Damage, str]] = {
    "headers": (flip_in(0, HEADER_BYTES), "verification_failures.header"),
    "payloads": (flip_in(HEADER_BYTES, HEADER_BYTES + MODEL.payload_bytes), "verification_failures.checksum"),
    "exchanged slots": (exchange, "verification_failures.header"),
    "cut files": (cut, "io_errors.read"),
    "removed files": (remove, ""),
    "directories in place of files": (replace_by_directory, ""),
}


@pytest.mark.parametrize(("case", "cpu_bytes"), [(case, at % 2 * 16 * 2 * SLOT_BYTES) for at, case in enumerate(CASES)])
def test_damage_while_running(case: str, cpu_bytes: int, quick_path: Path, request: pytest.FixtureRequest) -> None:
    damage, counter = CASES[case]
    rng = random.Random(f"{SEED} {case}")
    config = MODEL.config(str(quick_path / "store"), blocks=48, cpu_bytes=cpu_bytes, store_decode=True)
    engine = LiveEngine(config, MODEL)
    request.addfinalizer(engine.close)
    load = LiveLoad(engine, SEED, LoadShape(width=3, forgets=0.5, resets=0.01))
    home = engine.parts.home
    assert home is not None
    engine.run_until_quiet()  # the home and the first segment are open, however busy the machine is
    stats = engine.manager.stats
    end_s = time.monotonic() + WAIT_S

    def noticed() -> bool:
        found = stats[counter] and stats["failed_loads"] if counter else True
        return bool(found and stats["hit_tokens.nvme"])

    for step in itertools.count():
        if step >= STEPS and noticed():
            break
        assert time.monotonic() < end_s, stats.counts
        load.step()
        files = sorted(home.segments_path.glob("*/rank*.kv"))
        if step % EVERY == 0 and files:
            path = rng.choice(files)
            if path.is_file():
                damage(path, rng)
    load.end()
    engine.close()
