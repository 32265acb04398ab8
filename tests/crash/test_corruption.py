# SPDX-License-Identifier: Apache-2.0
"""Damage of every kind to the files of a store, at rest and in use: right bytes or a miss, or one
clear sentence at the start.

At rest each case is a copy of one prepared store, opened by an engine in a process of its own:
what LMDB makes of a damaged file could end the process.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from live_children import SEED, Child
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_process import REFUSED, ProcessSettings
from support.waits import WAIT_S

from kvdisk.device.listing import list_homes
from kvdisk.geometry import HEADER_BYTES, SEGMENT_HEADER_BYTES

REQUESTS = 12
STEPS, EVERY = 150, 3
"""Of an engine whose files are damaged meanwhile."""
SETTINGS = ProcessSettings("", seed=SEED, width=2, requests=REQUESTS, at_once=3, audit=True, damaged=True)
MODEL = SETTINGS.live_model()
SLOT_BYTES = MODEL.geometry.slot_sizes[0]

Damage = Callable[[Path, random.Random], None]


def home_of(store: Path) -> Path:
    (home,) = list_homes(store)
    return home.path


def segment_files(store: Path) -> list[Path]:
    return sorted((home_of(store) / "segments").glob("*/rank*.kv"))


def flip(path: Path, rng: random.Random, start: int = 0, end: int | None = None) -> None:
    """Flip one bit of a file between two places, in place: its owner may have it open."""
    at = rng.randrange(start, path.stat().st_size if end is None else end)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def flip_slots(start: int, end: int) -> Damage:
    """Flip a bit of every slot of a segment between two places."""

    def damage(path: Path, rng: random.Random) -> None:
        for at in range(SEGMENT_HEADER_BYTES, path.stat().st_size, SLOT_BYTES):
            flip(path, rng, at + start, at + end)

    return damage


def rotate_slots(path: Path, rng: random.Random) -> None:
    """Write each slot's bytes over its neighbour's."""
    with path.open("r+b") as file:
        data = file.read()[SEGMENT_HEADER_BYTES:]
        file.seek(SEGMENT_HEADER_BYTES)
        file.write(data[SLOT_BYTES:] + data[:SLOT_BYTES])


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def replaced(make: Callable[[Path], object]) -> Callable[[Path, random.Random], object]:
    def damage(path: Path, rng: random.Random) -> object:
        path.rename(path.with_name(path.name + "-aside"))
        return make(path)

    return damage


WAYS: dict[str, Callable[[Path, random.Random], object]] = {
    "flipped": flip,
    "flipped at the front": lambda path, rng: flip(path, rng, 0, 60),
    "flipped often": lambda path, rng: [flip(path, rng) for _ in range(40)],
    "garbage": lambda path, rng: path.write_bytes(rng.randbytes(path.stat().st_size)),
    "empty": lambda path, rng: os.truncate(path, 0),
    "cut": cut,
    "cut to one unit": lambda path, rng: os.truncate(path, 4096),
    "missing": replaced(lambda path: None),
    "a directory": replaced(lambda path: path.mkdir(0o700)),
    "a file": replaced(lambda path: path.write_bytes(b"nothing")),
    "a symlink": replaced(lambda path: path.symlink_to(path.name + "-aside")),
    "a symlink to nothing": replaced(lambda path: path.symlink_to("nowhere")),
    "a pipe": replaced(lambda path: os.mkfifo(path, 0o600)),
}
FILES: dict[str, Callable[[Path], Path]] = {
    "STORE": lambda store: store / "STORE",
    "store lock": lambda store: store / "lock",
    "HOME": lambda store: home_of(store) / "HOME",
    "USES": lambda store: home_of(store) / "USES",
    "home lock": lambda store: home_of(store) / "lock",
    "segment": lambda store: segment_files(store)[0],
    "data.mdb": lambda store: home_of(store) / "index" / "data.mdb",
    "lock.mdb": lambda store: home_of(store) / "index" / "lock.mdb",
}
DIRECTORIES: dict[str, Callable[[Path], Path]] = {
    "homes": lambda store: store / "homes",
    "home": home_of,
    "index": lambda store: home_of(store) / "index",
    "segments": lambda store: home_of(store) / "segments",
    "segment 0": lambda store: home_of(store) / "segments" / "0",
}
KINDS_OF_FILES = ("missing", "a directory", "a symlink", "a symlink to nothing", "a pipe")
KINDS_OF_DIRECTORIES = ("missing", "a file", "a symlink", "a symlink to nothing")
CONTENTS = ("flipped", "flipped at the front", "flipped often", "garbage", "empty", "cut", "cut to one unit")


def in_file(find: Callable[[Path], Path], how: str) -> Damage:
    return lambda store, rng: WAYS[how](find(store), rng)


def in_every_segment(damage: Damage) -> Damage:
    def of_store(store: Path, rng: random.Random) -> None:
        for path in segment_files(store):
            damage(path, rng)

    return of_store


OF_SLOTS: dict[str, tuple[Damage, str]] = {
    "headers": (flip_slots(0, 208), "verification_failures.header"),
    "payloads": (flip_slots(HEADER_BYTES, HEADER_BYTES + MODEL.payload_bytes), "verification_failures.checksum"),
    "exchanged slots": (rotate_slots, "verification_failures.header"),
}
"""Damage to a segment file, and the counter in which it shows."""
CASES: dict[str, Damage] = {
    **{name: in_every_segment(damage) for name, (damage, _) in OF_SLOTS.items()},
    **{f"{name} {how}": in_file(FILES[name], how) for name in FILES for how in KINDS_OF_FILES},
    **{f"{name} {how}": in_file(FILES[name], how) for name in FILES if "lock" not in name for how in CONTENTS},
    **{f"{name} {how}": in_file(DIRECTORIES[name], how) for name in DIRECTORIES for how in KINDS_OF_DIRECTORIES},
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that was closed in order."""
    store = tmp_path_factory.mktemp("prepared") / "store"
    with Child(store.parent, replace(SETTINGS, store=str(store), damaged=False, requests=300)) as child:
        assert child.end()["blocks"] >= 10
    return store


def open_damaged(store: Path) -> dict[str, int]:
    """Let a process serve from a damaged store; return its counters, {} where it refused in one
    sentence."""
    with Child(store.parent, replace(SETTINGS, store=str(store))) as child:
        child.process.join(WAIT_S)
        text = child.text()
        assert "Traceback" not in text, text
        assert "WRONG BYTES" not in text, text
        if child.process.exitcode == REFUSED:
            (sentence,) = re.findall(r"^REFUSED: \w+: (.*)", text, re.MULTILINE)
            assert len(sentence) > 20, text
            return {}
        assert child.process.exitcode == 0, text
        return dict(child.lines("ended")[0]["counts"]) | {"it": 1}


def test_the_prepared_store_serves(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "store")
    counts = open_damaged(tmp_path / "store")
    assert counts["hit_tokens.nvme"] > 0
    assert "failed_loads" not in counts


@pytest.mark.parametrize(
    "case",
    [
        # Each ninth: so they are different kinds of damage.
        case if case in OF_SLOTS or not at % 9 else pytest.param(case, marks=pytest.mark.torture)
        for at, case in enumerate(CASES)
    ],
)
def test_damage_at_rest(case: str, prepared: Path, quick_path: Path) -> None:
    store = quick_path / "store"
    shutil.copytree(prepared, store)
    CASES[case](store, random.Random(f"{SEED} {case}"))
    counts = open_damaged(store)
    if case in OF_SLOTS:
        assert counts.get(OF_SLOTS[case][1], 0) > 0, counts


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


WHILE_RUNNING = OF_SLOTS | {"cut files": (cut, "io_errors.read"), "removed files": (remove, "")}


@pytest.mark.parametrize("cpu_bytes", [0, 32 * SLOT_BYTES])
@pytest.mark.parametrize("case", WHILE_RUNNING)
def test_damage_while_running(case: str, cpu_bytes: int, quick_path: Path, request: pytest.FixtureRequest) -> None:
    damage, counter = WHILE_RUNNING[case]
    rng = random.Random(f"{SEED} {case}")
    config = MODEL.config(str(quick_path / "store"), blocks=48, cpu_bytes=cpu_bytes, store_decode=True)
    engine = LiveEngine(config, MODEL)
    request.addfinalizer(engine.close)
    load = LiveLoad(engine, SEED, LoadShape(width=3, forgets=0.5, resets=0.01))
    engine.run_until_quiet()  # the first segment is open, however busy the machine is
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
        files = segment_files(quick_path / "store")
        if step % EVERY == 0 and files:
            damage(rng.choice(files), rng)
    load.end()
