# SPDX-License-Identifier: Apache-2.0
"""The tools on stores with a few random wounds: each says what it has to say and ends, and none
with a traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from cli_stores import HYBRID, leave_home, run_here
from rebuild_stores import make_store

from kvdisk.index.lmdb_tables import LmdbTables
from kvdisk.index.packed import Operation, Table
from kvdisk.index.records import decode_segments, encode_segment

COMMANDS = (
    ["inspect"],
    ["verify"],
    ["prune", "--older-than", "1d", "--dry-run"],
    ["prune", "--to", "200000", "--yes"],
    ["repair"],
    ["verify", "--json"],
    ["clear", "--yes"],
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "store"
    make_store(path)
    leave_home(path, HYBRID, 2, last_use_s=5000)
    return path


def wound(path: Path, chosen: random.Random) -> None:
    how = chosen.choice(["flip", "flip", "flip", "cut", "junk", "remove", "directory", "pipe", "link"])
    if how in {"remove", "directory", "pipe", "link"}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if how == "directory":
            path.mkdir()
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "link":
            path.symlink_to("elsewhere")
    elif path.is_file():
        data = bytearray(path.read_bytes())
        for _ in range(chosen.choice([1, 3, 50]) if data and how == "flip" else 0):
            data[chosen.randrange(min(len(data), chosen.choice([200, 8192, len(data)])))] ^= 1 << chosen.randrange(8)
        if how == "cut":
            del data[chosen.randrange(len(data) + 1) :]
        path.write_bytes(chosen.randbytes(chosen.randrange(9000)) if how == "junk" else data)


@pytest.mark.parametrize("value", ["x", {}, -1, 1 << 61])
@pytest.mark.parametrize(("file", "field"), [("STORE", "created_s"), ("homes/*/HOME", "last_use_s")])
def test_a_time_in_a_control_file_may_be_anything(
    whole: Path, tmp_path: Path, file: str, field: str, value: object
) -> None:
    path = tmp_path / "store"
    shutil.copytree(whole, path)
    for control in path.glob(file):
        control.write_text(json.dumps(json.loads(control.read_text()) | {field: value}))
    done = run_here("inspect", path)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    assert done.exit_code in {0, 1} and done.stdout.startswith("Verdict")


@pytest.mark.parametrize(
    "changed", [{"slot_bytes": 0}, {"slot_bytes": 2**64 - 1}, {"slot_count": 2**32 - 1}, {"drive": 7}]
)
def test_a_segment_in_an_index_may_be_of_any_size(whole: Path, tmp_path: Path, changed: dict[str, int]) -> None:
    path = tmp_path / "store"
    shutil.copytree(whole, path)
    for index in path.glob("homes/*/index"):
        tables = LmdbTables(index, 1 << 24)
        records = [
            record._replace(**changed) for part in tables.scan(Table.SEGMENTS) for record in decode_segments(part)
        ]
        tables.commit([Operation(Table.SEGMENTS, *encode_segment(record)) for record in records])
        tables.close()
    for name, *options in (["inspect", "--all"], ["verify"]):
        done = run_here(name, path, *options)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        assert done.exit_code == 1 and done.stdout


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_damaged_the_tools_end_in_order(whole: Path, tmp_path: Path, seed: int) -> None:
    path, chosen = tmp_path / "store", random.Random(seed)
    shutil.copytree(whole, path)
    for _ in range(chosen.choice([1, 1, 2, 5])):
        things = [thing for thing in sorted(path.rglob("*")) if not thing.is_symlink() and not thing.is_fifo()]
        wound(chosen.choice(things), chosen)
    for name, *options in COMMANDS:
        done = run_here(name, path, *options)
        assert done.exception is None or isinstance(done.exception, SystemExit), (seed, name, done.exc_info)
        assert done.exit_code in {0, 1, 2}, (seed, name)
        if done.exit_code == 2:
            assert done.stderr.startswith("kvdisk: ") and done.stderr.count("\n") == 1, (seed, name, done.stderr)
        else:
            assert done.stdout and not done.stderr
