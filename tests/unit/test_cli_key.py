# SPDX-License-Identifier: Apache-2.0
"""``kvdisk inspect DIR KEY`` and ``--export``: single blocks, and all of them."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
from cli_stores import HYBRID, PLAIN, json_of, leave_home, refused, run_here
from mass_stores import Layer, key
from pyarrow import parquet
from rebuild_stores import GEOMETRY, MINE, RANKS, home_path, key_of, make_store, start

from kvdisk.cli import export
from kvdisk.device.control import USES_FILE
from kvdisk.geometry import HEADER_BYTES, slot_offset

SLOT = [group.slot_bytes for group in GEOMETRY.groups]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    make_store(path)
    parts = start(path)
    assert parts.nvme is not None
    row = parts.manager._catalog.find(key_of(2))
    parts.nvme.uses.now_s = 1_700_000_500
    parts.nvme.uses.reached([row] * 3)
    parts.close()
    return path


def block_json(path: Path, name: str, *, code: int = 0) -> dict[str, Any]:
    return json_of("inspect", path, name, code=code)


def test_one_block_with_record_slots_chain_and_uses(path: Path) -> None:
    """The columns of its copies: ``test_every_block_is_a_row``."""
    name = key_of(2).hex()
    found = block_json(path, name[:12].upper())
    (block,) = found["blocks"]
    (copy,) = block["copies"]
    expected = {"key": name, "fingerprint": MINE.hex(), "model": "m", "group": 0, "epoch": 0, "block_tokens": 16}
    expected |= {"position": 2, "start_tokens": 32, "children": 1}
    assert found["groups"] == [0] and block | expected == block
    assert block["chain"] == [key_of(number)[:-2].hex() for number in range(3)]
    expected = {"owner": "stopped", "slot": 2, "parent": key_of(1).hex(), "uses": 3, "last_use_s": 1_700_000_500}
    assert copy | expected == copy
    assert [(rank["rank"], rank["offset"], rank["problems"], Path(rank["file"]).name) for rank in copy["ranks"]] == [
        (rank, slot_offset(SLOT[0], 2), [], f"rank{rank}.kv") for rank in range(RANKS)
    ]
    header = copy["ranks"][1]["header"]
    expected = {"key": name, "parent": key_of(1).hex(), "payload_bytes": 4000, "rank": 1, "rank_count": RANKS}
    assert header | expected | {"fingerprint": MINE.hex()} == header
    assert len(header["checksum"]) == 32
    shown = run_here("inspect", path, name).stdout
    assert "32 up to 48 of a prompt" in shown and "3 times" in shown and shown.count("✓") == RANKS
    assert "no block of this store has a key that begins with ffffffff" in refused("inspect", path, "ffffffff")
    assert f"{MINE.hex()[:8]} is a namespace, and no block" in refused("inspect", path, MINE.hex()[:8])
    store = home_path(path).name[:8]
    assert f"{store} is an engine store, and no block" in refused("inspect", path, store)
    assert "has 8 hex digits or more" in refused("inspect", path, "ffff")


def test_the_same_hash_in_two_groups_and_namespaces(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for model in (HYBRID, HYBRID._replace(fingerprint=b"\x01" * 32)):
        layer = Layer(store, model)
        for group in (0, 1):
            layer.put_chain("ab", group=group)
        layer.leave()
    found = block_json(store, key("b")[:-2].hex(), code=1)
    assert found["groups"] == [0, 1]
    assert {(block["fingerprint"], block["group"]) for block in found["blocks"]} == {("9b" * 32, 0), ("01" * 32, 0)}
    other = block_json(store, key("b", 1).hex(), code=1)
    assert (other["groups"], other["blocks"][0]["start_tokens"]) == ([1], 32)
    done = run_here("inspect", store, key("a")[:-2].hex())
    assert "also in 1: give the whole key" in done.stdout
    assert done.exit_code == 1 and "its header is all zeros" in done.stdout, "nothing was ever written there"


def test_a_chain_over_two_homes_and_one_without_its_head(tmp_path: Path) -> None:
    store = tmp_path / "store"
    head, tail = Layer(store, PLAIN), Layer(store, PLAIN)
    head.put_chain("abcdefghijklmno")
    tail.put_chain("xyz", "o")
    tail.put("a", None, 9)
    tail.put("m", "lost", 10, epoch=7)
    for layer in (head, tail):
        layer.leave()
    (block,) = block_json(store, key("y").hex(), code=1)["blocks"]
    assert (block["position"], block["chain"]) == (16, [key(name)[:-2].hex() for name in "abcdefghijklmnoxy"])
    for options, hides in (([], True), (["--all"], False)):
        shown = run_here("inspect", store, key("y").hex(), *options).stdout
        assert ("13 more" in shown, key("g")[:8].hex() in shown) == (hides, not hides)
    (block,) = block_json(store, key("a").hex(), code=1)["blocks"]
    assert {copy["engine_store"] for copy in block["copies"]} == {head.home.id, tail.home.id}
    first, lost = block_json(store, key("m").hex(), code=1)["blocks"]
    assert (first["epoch"], first["position"]) == (0, 12)
    assert (lost["epoch"], lost["position"], lost["start_tokens"], len(lost["chain"])) == (7, None, None, 1)
    shown = " ".join(run_here("inspect", store, key("m").hex()).stdout.split())
    assert "the head of its chain is not here" in shown and "… a block that is not here" in shown


@pytest.mark.parametrize("how", ["payload", "missing"])
def test_a_slot_that_does_not_hold_the_block(path: Path, how: str) -> None:
    file = home_path(path) / "segments" / "0" / "rank1.kv"
    data = bytearray(file.read_bytes())
    data[slot_offset(SLOT[0], 2) + HEADER_BYTES + 10] ^= 1
    file.write_bytes(data) if how == "payload" else file.unlink()
    first, second = block_json(path, key_of(2).hex(), code=1)["blocks"][0]["copies"][0]["ranks"]
    wrong = "its payload does not have the checksum that its header names"
    assert (first["problems"], second["problems"]) == ([], [wrong if how == "payload" else "there is no such file"])
    assert (second["header"] is None) == (how == "missing")
    assert "✗" in run_here("inspect", path, key_of(2).hex()).stdout


# -- export ------------------------------------------------------------------------------------


def csv_rows(target: Path) -> list[dict[str, str]]:
    with target.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_block_is_a_row(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_ROWS_AT_ONCE", 6)
    target = tmp_path / "blocks.csv"
    done = run_here("inspect", path, "--export", target)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"20 blocks of 1 engine store in {target} (")
    rows = {row["key"]: row for row in csv_rows(target)}
    assert len(rows) == 20
    expected = {"engine_store": home_path(path).name, "namespace": MINE.hex(), "epoch": "0", "key": key_of(0).hex()}
    expected |= {"group": "0", "segment": "0", "slot": "0", "drive": "0", "generation": "1700000000000000001"}
    expected |= {"parent": "", "position": "0", "tokens": "16", "bytes": str(RANKS * SLOT[0])}
    assert rows[key_of(0).hex()] == expected | {"stored_s": "1700000000", "uses": "0", "last_use_s": ""}
    used = {"uses": "3", "last_use_s": "1700000500", "parent": key_of(1).hex()}
    assert rows[key_of(2).hex()] | used == rows[key_of(2).hex()]
    last = {"position": "4", "tokens": "32", "segment": "3", "group": "1"}
    assert rows[key_of(304, 1).hex()] | last == rows[key_of(304, 1).hex()]
    assert run_here("inspect", path, "--export", tmp_path / "blocks.parquet").exit_code == 0
    table = parquet.read_table(tmp_path / "blocks.parquet").to_pylist()
    assert [{name: "" if value is None else str(value) for name, value in row.items()} for row in table] == csv_rows(
        target
    )
    (home_path(path) / USES_FILE).unlink()
    again = json_of("inspect", path, "--export", target, "--force")
    assert again | {"rows": 20, "engine_stores": 1, "problems": []} == again
    assert {row["uses"] for row in csv_rows(target)} == {""}
    assert sorted(item.name for item in tmp_path.iterdir()) == ["blocks.csv", "blocks.parquet", "store"]


def test_what_export_refuses(path: Path, tmp_path: Path) -> None:
    (tmp_path / "d.csv").mkdir()
    (tmp_path / "old.csv").touch()
    for name, force, expected in (
        ("b.xlsx", [], "takes a file whose name ends with .csv or .parquet, not 'b.xlsx'"),
        ("d.csv", ["--force"], "cannot be written (Is a directory)"),
        ("old.csv", [], "exists; --force replaces it"),
        ("no/b.csv", [], "cannot be written (No such file or directory)"),
    ):
        assert expected in refused("inspect", path, "--export", tmp_path / name, *force)
    assert "takes no KEY" in refused("inspect", path, "0" * 16, "--export", tmp_path / "b.csv")
    assert not (tmp_path / "b.csv").exists()


def test_a_damaged_index_leaves_the_others_rows(path: Path, tmp_path: Path) -> None:
    bad = leave_home(path, HYBRID, 2, last_use_s=2000)
    os.truncate(path / "homes" / bad / "index" / "data.mdb", 2 * 4096)  # reading it kills the process
    done = run_here("inspect", path, "--export", tmp_path / "b.csv")
    assert done.exit_code == 1
    assert f"engine store {bad[:8]}: its index cannot be read" in done.stderr
    assert len(csv_rows(tmp_path / "b.csv")) == 20
