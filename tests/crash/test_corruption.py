# SPDX-License-Identifier: Apache-2.0
"""Damage of every kind to the files of a store: right bytes or a miss, or one clear sentence at the
start.

Each case is a copy of one prepared store, damaged, and opened by an engine in a process of its own,
since what LMDB makes of a damaged file could end the process.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from live_children import SEED, WAIT_S, Child
from support.live_process import REFUSED, ProcessSettings

from kvdisk.device.listing import list_homes
from kvdisk.geometry import HEADER_BYTES, SEGMENT_HEADER_BYTES

REQUESTS = 12
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
    """Flip one bit of a file between two places."""
    at = rng.randrange(start, path.stat().st_size if end is None else end)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def in_every_slot(start: int, end: int) -> Damage:
    def damage(store: Path, rng: random.Random) -> None:
        for path in segment_files(store):
            for at in range(SEGMENT_HEADER_BYTES, path.stat().st_size, SLOT_BYTES):
                flip(path, rng, at + start, at + end)

    return damage


def swap_slots(store: Path, rng: random.Random) -> None:
    for path in segment_files(store):
        data = path.read_bytes()
        head, slots = data[:SEGMENT_HEADER_BYTES], data[SEGMENT_HEADER_BYTES:]
        moved = [slots[at : at + SLOT_BYTES] for at in range(0, len(slots), SLOT_BYTES)]
        path.write_bytes(head + b"".join(moved[1:] + moved[:1]))


def swap_ranks(store: Path, rng: random.Random) -> None:
    first, second = segment_files(store)[:2]
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


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
    "cut": lambda path, rng: os.truncate(path, rng.randrange(path.stat().st_size)),
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


CASES: dict[str, Damage] = {
    "slot headers": in_every_slot(0, HEADER_BYTES),
    "slot identities": in_every_slot(0, 208),
    "payloads": in_every_slot(HEADER_BYTES, HEADER_BYTES + MODEL.payload_bytes),
    "swapped slots": swap_slots,
    "swapped ranks": swap_ranks,
    **{f"{name} {how}": in_file(FILES[name], how) for name in FILES for how in KINDS_OF_FILES},
    **{f"{name} {how}": in_file(FILES[name], how) for name in FILES if "lock" not in name for how in CONTENTS},
    **{f"{name} {how}": in_file(DIRECTORIES[name], how) for name in DIRECTORIES for how in KINDS_OF_DIRECTORIES},
}
MUST_BE_NOTICED = {
    "slot headers": "verification_failures.header",
    "slot identities": "verification_failures.header",
    "payloads": "verification_failures.checksum",
    "swapped slots": "verification_failures.header",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that was closed in order."""
    store = tmp_path_factory.mktemp("prepared") / "store"
    with Child(store.parent, replace(SETTINGS, store=str(store), damaged=False, requests=100)) as child:
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
        case if case in MUST_BE_NOTICED or not at % 5 else pytest.param(case, marks=pytest.mark.torture)
        for at, case in enumerate(CASES)
    ],
)
def test_damage_at_rest(case: str, prepared: Path, quick_path: Path) -> None:
    store = quick_path / "store"
    shutil.copytree(prepared, store)
    CASES[case](store, random.Random(f"{SEED} {case}"))
    counts = open_damaged(store)
    if case in MUST_BE_NOTICED:
        assert counts.get(MUST_BE_NOTICED[case], 0) > 0, counts
