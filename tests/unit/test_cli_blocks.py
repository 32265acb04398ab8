# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk inspect`` finds out of blocks in the mass: layouts, ages, reuse and prefixes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_stores import CAP, HYBRID, PLAIN, inspect_json, run_here
from mass_stores import MASS_FINGERPRINT, SEGMENT_SLOTS, Layer, build_mass, key

from kvdisk.blocks import Slot
from kvdisk.device.control import USES_FILE
from kvdisk.device.segment import create_segment
from kvdisk.device.store import Store
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for
from kvdisk.messages import SegmentSpec

HOUR_S = 3600


def lines(tree: list[dict[str, Any]], depth: int = 0) -> Iterator[tuple[Any, ...]]:
    """Depth, first letter of the key, start, tokens, chains, uses of first and last block."""
    for prefix in tree:
        letter = bytes.fromhex(prefix["key"])[:1].decode()
        yield (
            depth,
            letter,
            prefix["start_tokens"],
            prefix["tokens"],
            prefix["chains"],
            prefix["first_uses"],
            prefix["last_uses"],
        )
        yield from lines(prefix["tree"], depth + 1)


def shared(home: Layer) -> None:
    """abc is shared by de and by fg, which hi and j follow; xy is alone."""
    home.put_chain("abc")
    home.put_chain("de", "c", first=3)
    home.put_chain("fg", "c", first=5)
    home.put_chain("hi", "g", first=7)
    home.put_chain("j", "g", first=20)
    home.put_chain("xy", first=30)


def test_the_tree_of_prefixes(path: Path) -> None:
    layer = Layer(path, PLAIN)
    shared(layer)
    layer.write_uses(dict(zip("abcdefghijxy", (9, 9, 9, 1, 0, 5, 5, 3, 3, 0, 0, 0), strict=True)))
    layer.leave()
    (namespace,) = inspect_json(path)["namespaces"]
    prefixes = namespace["prefixes"]
    assert list(lines(prefixes["tree"])) == [
        (0, "a", 0, 48, 3, 9, 9),
        (1, "f", 48, 32, 2, 5, 5),
        (2, "h", 80, 32, 1, 3, 3),
        (1, "d", 48, 32, 1, 1, 0),
    ]
    assert {
        name: prefixes[name] for name in ("total", "shared", "roots", "chains", "hidden_roots", "hidden_blocks")
    } == {"total": 6, "shared": 4, "roots": 2, "chains": 4, "hidden_roots": 1, "hidden_blocks": 3}
    slot_bytes = 2 * PLAIN.geometry.groups[0].slot_bytes
    head = prefixes["tree"][0]
    assert (head["bytes"], head["blocks"], head["below_blocks"]) == (3 * slot_bytes, 3, 7)
    assert (head["below_bytes"], head["uses"], head["children"]) == (7 * slot_bytes, 27, 2)
    assert prefixes["hidden_bytes"] == 3 * slot_bytes
    assert abs(head["last_use_s"] - time.time() + 2 * HOUR_S) < 60
    assert head["tree"][0]["hidden_children"] == 1, "nobody shares or used j"


def test_prefixes_are_cut_to_a_number_and_shown_as_a_tree(path: Path) -> None:
    layer = Layer(path, PLAIN)
    shared(layer)
    layer.write_uses({"a": 9, "b": 9, "c": 9, "f": 5, "g": 5, "h": 3})
    layer.leave()
    found = json.loads(run_here("inspect", path, "--json", "--prefixes", "2").stdout)["namespaces"][0]["prefixes"]
    assert [line[:2] for line in lines(found["tree"])] == [(0, "a"), (1, "f")]
    shown = run_here("inspect", path, "--prefixes", "3").stdout
    ends = {letter: key(letter)[:4].hex() for letter in "afh"}
    table = [line.rstrip() for line in shown.splitlines() if any(end in line for end in ends.values())]
    assert [line.split()[0] for line in table] == [ends["a"], f"└─{ends['f']}", "└─" + ends["h"]]
    assert table[2].startswith("  └─") and "9" in table[0].split()
    assert "5" in table[1].split() and "3…0" in table[2].split()
    assert "and 3 other pieces of 4 chains: 5 blocks in 80.0 KiB" in shown
    assert run_here("inspect", path, "--prefixes", "-1").exit_code == 2
    assert "Shared prefixes" not in run_here("inspect", path, "--prefixes", "0").stdout


def test_ages_and_reuse(path: Path) -> None:
    layer = Layer(path, PLAIN)
    for at, (name, age_s) in enumerate(zip("abcdef", (10, 300, 1800, 2 * HOUR_S, 8 * 86400, 90 * 86400), strict=True)):
        layer.put(name, None, at, age_s=age_s)
    layer.write_uses({"a": 0, "b": 1, "c": 2, "d": 4, "e": 70}, generation_of={"c": 99})
    layer.leave()
    found = inspect_json(path)
    assert found["ages"]["stored"] == [1, 1, 1, 1, 0, 0, 1, 1]
    assert found["ages"]["used"] == [0, 0, 0, 3, 0, 0, 0, 0]
    assert (found["ages"]["never_used"], found["ages"]["unknown"]) == (1, 2), "c's slot held another block, f none"
    assert found["reuse"] == {
        "bounds": [0, 1, 2, 4, 8, 16, 32, 64],
        "blocks": [1, 1, 0, 1, 0, 0, 0, 0, 1],
        "unknown": 2,
    }


def test_free_runs_and_reads(path: Path) -> None:
    layer = Layer(path, HYBRID, slots=600)
    layer.put_chain("abcd")  # one read
    layer.put_chain("ef", "d", first=300)  # another
    layer.put("g", "f", 302, group=0)
    layer.put("h", "f", 310)
    layer.leave()
    segment, empty = inspect_json(path)["homes"][0]["segments"]
    assert (segment["free_slots"], segment["free_runs"], segment["longest_free_run_slots"]) == (592, 3, 296)
    assert segment["fragmentation"] == pytest.approx(7 / 592), "2 MiB are 256 slots: the other runs are longer"
    assert segment["read_run_blocks"] == pytest.approx(8 / 3)
    assert (empty["fragmentation"], empty["read_run_blocks"]) == (0.0, None)


@pytest.mark.parametrize("how", ["header", "record", "cut", "pipe"])
def test_a_uses_file_that_is_damaged_says_nothing_and_is_no_problem(path: Path, how: str) -> None:
    layer = Layer(path, PLAIN)
    shared(layer)
    layer.write_uses({"a": 9, "b": 9})
    file = path / "homes" / layer.leave() / USES_FILE
    data = bytearray(file.read_bytes())
    assert file.stat().st_mode & 0o777 == 0o600
    file.unlink()
    if how == "pipe":
        os.mkfifo(file)
    else:
        if how == "header":
            data[20] ^= 1
        elif how == "record":
            data[30] ^= 1
        else:
            del data[-9:]
        file.write_bytes(data)
    found = inspect_json(path)
    assert found["reuse"]["blocks"] is None
    assert run_here("inspect", path).exit_code == 0


def test_drives(path: Path, tmp_path: Path) -> None:
    further = tmp_path / "further"
    store = Store.open([path, further])
    home = store.acquire_home(PLAIN.fingerprint, PLAIN.description, CAP)
    index = LmdbIndex(home.index_path, map_bytes=map_bytes_for(100))
    slot_bytes = PLAIN.geometry.groups[0].slot_bytes
    for segment, drive in ((0, 0), (1, 1), (2, 1)):
        for rank in range(2):
            spec = SegmentSpec(segment, slot_bytes, 8, drive)
            create_segment(home.folder(drive), spec, rank, 2, PLAIN.fingerprint).close()
        index.put_segment(SegmentRecord(segment, slot_bytes, 8, drive))
    index.put([BlockRecord(0, key(name), Slot(segment, 0), 1) for segment, name in enumerate("abc")])
    index.close()
    home.close(clean=True)
    done = run_here("inspect", path, further, "--json")
    drives = json.loads(done.stdout)["drives"]
    expected = [(str(path), 1, 8, 1, 2 * slot_bytes), (str(further), 2, 16, 2, 4 * slot_bytes)]
    names = ("path", "segments", "slots", "blocks", "used_bytes")
    assert [tuple(drive[name] for name in names) for drive in drives] == expected
    assert drives[1]["allocated_bytes"] >= 4 * 8 * slot_bytes
    printed = run_here("inspect", path, further).stdout.splitlines()
    # A long path goes on in the first column of the next line, wherever it was cut.
    assert str(further) in "".join(line.split()[0] for line in printed if line.strip())
    alone = json.loads(run_here("inspect", path, "--json").stdout)
    assert [(drive["path"], drive["segments"]) for drive in alone["drives"]] == [(str(path), 1), (None, 2)]


def test_a_hundred_thousand_blocks(path: Path) -> None:
    made = build_mass(path, prompts=100, prompt_blocks=200, conversations=20, turn_blocks=40, now_s=int(time.time()))
    found = inspect_json(path)
    assert found["totals"]["blocks"] == made.blocks == 100_000
    (namespace,) = found["namespaces"]
    assert namespace["fingerprint"] == MASS_FINGERPRINT.hex()
    prefixes = namespace["prefixes"]
    assert (prefixes["roots"], prefixes["chains"], prefixes["total"]) == (100, 2000, 2100)
    assert [(prefix["tokens"], prefix["chains"], prefix["first_uses"]) for prefix in prefixes["tree"]] == [
        (3200, 20, 100 - place) for place in range(12)
    ]
    assert found["reuse"]["blocks"] == [80_000, 200, 200, 400, 800, 1600, 3200, 6400, 7200]
    assert sum(found["ages"]["stored"]) == 100_000
    full = found["homes"][0]["segments"][0]
    assert (full["used_slots"], full["fragmentation"]) == (SEGMENT_SLOTS, None)
    assert run_here("inspect", path, "--export", path.with_suffix(".csv")).exit_code == 0
    assert len(path.with_suffix(".csv").read_bytes().splitlines()) == 1 + made.blocks, "a row for each"
    assert found["homes"][0]["read_run_blocks"] == pytest.approx(100_000 / (100 * 20 + 24), rel=0.02)
