# SPDX-License-Identifier: Apache-2.0
"""``kvdisk inspect DIR KEY`` and ``--export``: single blocks, and all of them."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
from cli_stores import HYBRID, PLAIN, leave_home, run_here
from mass_stores import Layer, key
from rebuild_stores import GEOMETRY, MINE, RANKS, home_path, key_of, make_store, start

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
    parts.nvme.uses.reached([row] * 3)
    parts.nvme.uses.count(1_700_000_500)
    parts.close()
    return path


def block_json(path: Path, name: str, *, code: int = 0) -> dict[str, Any]:
    done = run_here("inspect", path, name, "--json")
    assert (done.exit_code, done.stderr) == (code, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ok"] is (code == 0)
    return found


def said(*arguments: object) -> str:
    done = run_here(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("kvdisk: ") and done.stderr.endswith(".\n") and done.stderr.count("\n") == 1
    return done.stderr


def test_one_block_with_record_slots_chain_and_uses(path: Path) -> None:
    name = key_of(2).hex()
    found = block_json(path, name)
    (block,) = found["blocks"]
    assert (block["key"], block["group"], found["groups"], block["epoch"]) == (name, 0, [0], 0)
    assert (block["fingerprint"], block["model"]) == (MINE.hex(), "m")
    assert (block["position"], block["start_tokens"], block["block_tokens"], block["children"]) == (2, 32, 16, 1)
    assert block["chain"] == [key_of(number)[:-2].hex() for number in range(3)]
    (copy,) = block["copies"]
    assert {name: copy[name] for name in ("segment", "slot", "drive", "generation", "parent", "stored_s")} == {
        "segment": 0,
        "slot": 2,
        "drive": 0,
        "generation": 1_700_000_000_000_000_003,
        "parent": key_of(1).hex(),
        "stored_s": 1_700_000_000,
    }
    assert (copy["owner"], copy["uses"], copy["last_use_s"]) == ("orphan", 3, 1_700_000_500)
    assert [(rank["rank"], rank["offset"], rank["problems"]) for rank in copy["ranks"]] == [
        (rank, slot_offset(SLOT[0], 2), []) for rank in range(RANKS)
    ]
    assert [Path(rank["file"]).name for rank in copy["ranks"]] == ["rank0.kv", "rank1.kv"]
    header = copy["ranks"][1]["header"]
    assert (header["key"], header["parent"], header["payload_bytes"]) == (name, key_of(1).hex(), 4000)
    assert (header["rank"], header["rank_count"], header["fingerprint"]) == (1, RANKS, MINE.hex())
    assert len(header["checksum"]) == 32


def test_a_beginning_of_the_key_is_enough_where_it_is_clear(path: Path) -> None:
    name = key_of(104, 1).hex()
    assert block_json(path, name[:8].upper())["blocks"][0]["key"] == name
    assert block_json(path, name[:11])["blocks"][0]["start_tokens"] == 4 * 32
    assert "no block of this store has a key that begins with ffffffff" in said("inspect", path, "ffffffff")
    assert "has 8 hex digits or more" in said("inspect", path, "ffff")


def test_the_same_hash_in_two_groups_and_namespaces(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for model in (HYBRID, HYBRID._replace(fingerprint=b"\x01" * 32)):
        layer = Layer(store, model)
        layer.put_chain("ab")
        layer.put_chain("ab", group=1)
        layer.leave()
    found = block_json(store, key("b")[:-2].hex(), code=1)
    assert (found["groups"], [block["group"] for block in found["blocks"]]) == ([0, 1], [0, 0])
    assert {block["fingerprint"] for block in found["blocks"]} == {"9b" * 32, "01" * 32}
    other = block_json(store, key("b", 1).hex(), code=1)
    assert (other["groups"], other["blocks"][0]["start_tokens"]) == ([1], 32)
    done = run_here("inspect", store, key("a")[:-2].hex())
    assert "also in 1: give the whole key" in done.stdout and "0 up to 16 of a prompt" in done.stdout
    assert done.exit_code == 1 and "its header is all zeros" in done.stdout, "nothing was ever written there"


def test_a_chain_over_two_homes_and_one_without_its_head(tmp_path: Path) -> None:
    store = tmp_path / "store"
    head, tail = Layer(store, PLAIN), Layer(store, PLAIN)
    head.put_chain("abc")
    tail.put_chain("xyz", "c")
    tail.put("a", None, 9)
    tail.put("m", "lost", 10)
    head.leave()
    tail.leave()
    (block,) = block_json(store, key("y").hex(), code=1)["blocks"]
    assert (block["position"], block["chain"]) == (4, [key(name)[:-2].hex() for name in "abcxy"])
    (block,) = block_json(store, key("a").hex(), code=1)["blocks"]
    assert {copy["home"] for copy in block["copies"]} == {head.home.id, tail.home.id}
    (block,) = block_json(store, key("m").hex(), code=1)["blocks"]
    assert (block["position"], block["start_tokens"], len(block["chain"])) == (None, None, 1)
    shown = " ".join(run_here("inspect", store, key("m").hex()).stdout.split())
    assert "the head of its chain is not here" in shown and "… a block that is not here" in shown


@pytest.mark.parametrize("how", ["header", "payload", "other block", "missing"])
def test_a_slot_that_does_not_hold_the_block(path: Path, how: str) -> None:
    file = home_path(path) / "segments" / "0" / "rank1.kv"
    offset = slot_offset(SLOT[0], 2)
    data = bytearray(file.read_bytes())
    if how == "header":
        data[offset + 30] ^= 1
    elif how == "payload":
        data[offset + HEADER_BYTES + 10] ^= 1
    elif how == "other block":
        data[offset : offset + SLOT[0]] = data[offset + SLOT[0] : offset + 2 * SLOT[0]]
    file.unlink()
    if how != "missing":
        file.write_bytes(data)
    found = block_json(path, key_of(2).hex(), code=1)
    first, second = found["blocks"][0]["copies"][0]["ranks"]
    assert first["problems"] == []
    expected = {
        "header": "checksum of the header does not match",
        "payload": "its payload does not have the checksum that its header names",
        "other block": f"its header names the key {key_of(3).hex()}, not {key_of(2).hex()}",
        "missing": "there is no such file",
    }[how]
    assert any(expected in problem for problem in second["problems"])
    assert (second["header"] is None) == (how in {"header", "missing"})
    assert "✗" in run_here("inspect", path, key_of(2).hex()).stdout


# -- export ------------------------------------------------------------------------------------

EXPECTED_FIRST = {
    "namespace": MINE.hex(),
    "epoch": "0",
    "key": key_of(0).hex(),
    "group": "0",
    "segment": "0",
    "slot": "0",
    "drive": "0",
    "generation": "1700000000000000001",
    "parent": "",
    "position": "0",
    "tokens": "16",
    "bytes": str(RANKS * SLOT[0]),
    "stored_s": "1700000000",
    "uses": "0",
    "last_use_s": "",
}


def test_every_block_is_a_row(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "blocks.csv"
    done = run_here("inspect", path, "--export", target)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"20 blocks of 1 engine store in {target} (")
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    (first,) = [row for row in rows if row["key"] == key_of(0).hex()]
    assert first == EXPECTED_FIRST | {"home": home_path(path).name}
    (used,) = [row for row in rows if row["key"] == key_of(2).hex()]
    assert (used["uses"], used["last_use_s"], used["parent"]) == ("3", "1700000500", key_of(1).hex())
    (last,) = [row for row in rows if row["key"] == key_of(304, 1).hex()]
    assert (last["position"], last["tokens"], last["segment"], last["group"]) == ("4", "32", "3", "1")
    assert "exists; --force replaces it" in said("inspect", path, "--export", target)
    (home_path(path) / USES_FILE).unlink()
    again = run_here("inspect", path, "--export", target, "--force", "--json")
    assert json.loads(again.stdout) | {"rows": 20, "homes": 1, "problems": []} == json.loads(again.stdout)
    with target.open(newline="") as file:
        assert {row["uses"] for row in csv.DictReader(file)} == {""}
    assert sorted(item.name for item in tmp_path.iterdir()) == ["blocks.csv", "store"]


def test_parquet_has_the_same_rows(path: Path, tmp_path: Path) -> None:
    from pyarrow import parquet

    for suffix in ("csv", "parquet"):
        assert run_here("inspect", path, "--export", tmp_path / f"b.{suffix}").exit_code == 0
    with (tmp_path / "b.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    table = parquet.read_table(tmp_path / "b.parquet").to_pylist()
    assert [{name: "" if value is None else str(value) for name, value in row.items()} for row in table] == rows
    assert table[0]["uses"] is not None and isinstance(table[0]["stored_s"], int)


def test_what_export_refuses(path: Path, tmp_path: Path) -> None:
    assert "takes a file whose name ends with .csv or .parquet, not 'b.xlsx'" in said(
        "inspect", path, "--export", tmp_path / "b.xlsx"
    )
    (tmp_path / "d.csv").mkdir()
    assert "is a directory" in said("inspect", path, "--export", tmp_path / "d.csv", "--force")
    assert "takes no KEY" in said("inspect", path, "0" * 16, "--export", tmp_path / "b.csv")
    assert not (tmp_path / "b.csv").exists()


def test_a_damaged_index_leaves_the_others_rows(path: Path, tmp_path: Path) -> None:
    bad = leave_home(path, HYBRID, 2, last_use_s=2000)
    os.truncate(path / "homes" / bad / "index" / "data.mdb", 2 * 4096)  # reading it kills the process
    done = run_here("inspect", path, "--export", tmp_path / "b.csv")
    assert done.exit_code == 1
    assert f"engine store {bad}: its index cannot be read" in done.stderr
    assert len((tmp_path / "b.csv").read_text().splitlines()) == 21
