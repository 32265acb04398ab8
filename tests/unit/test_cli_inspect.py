# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk inspect`` finds in stores in use, left behind, copied and damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cli_stores import CAP, HYBRID, PLAIN, SLOTS, Owner, drop_power, fill_home, inspect_json, leave_home, run, run_here

from kvdisk import __version__
from kvdisk.blocks import Slot, make_block_key
from kvdisk.cli.indexes import read_homes
from kvdisk.cli.survey import survey_store
from kvdisk.device.home import Home
from kvdisk.device.store import Store
from kvdisk.geometry import segment_file_bytes
from kvdisk.index.base import BlockRecord


def files_below(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, time of change and bytes of everything; LMDB's readers are known by their mark in
    lock.mdb."""
    found = {}
    for item in sorted(path.rglob("*")):
        if item.name != "lock.mdb":
            status = item.lstat()
            found[str(item)] = (status.st_mode, status.st_mtime_ns, item.read_bytes() if item.is_file() else b"")
    return found


def test_the_json_has_what_was_stored(path: Path) -> None:
    plain = leave_home(path, PLAIN, 3, last_use_s=2000)
    hybrid = leave_home(path, HYBRID, 2, last_use_s=9000, clean=False)
    done = run("inspect", path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["json_version"] == 2 and found["kvdisk_version"] == __version__ and found["problems"] == []
    assert found["store"] | {"store_id": "", "created_s": 2000} == found["store"] | {"store_id": ""}
    slot_plain, slot_wide = (group.slot_bytes for group in HYBRID.geometry.groups)
    assert found["totals"] == {
        "namespaces": 2,
        "homes": 2,
        "live_homes": 0,
        "unreadable_homes": 0,
        "blocks": 25,
        "slots": 5 * SLOTS,
        "used_bytes": 15 * slot_plain * 2 + 5 * slot_plain + 5 * slot_wide,
        "allocated_bytes": sum(home["allocated_bytes"] for home in found["homes"]),
        "cap_bytes": None,
        "oldest_stored_s": 1900,
        "newest_stored_s": 8904,
    }
    first, second = found["namespaces"]
    assert (first["homes"], second["homes"]) == ([hybrid], [plain]), "the last used comes first"
    assert (first["fingerprint"], first["model"], first["kv_dtype"]) == ("9b" * 32, "/models/of/hybrid-1B", "fp8")
    assert (second["tensor_parallel"], second["ranks"], second["hash_tokens"]) == (2, 2, 16)
    assert [(group["block_tokens"], group["window_tokens"], group["blocks"]) for group in first["groups"]] == [
        (16, None, 5),
        (32, 1024, 5),
    ]
    assert second["epochs"] == [{"epoch": 0, "blocks": 10}, {"epoch": 77, "blocks": 5}]
    home = found["homes"][1]
    expected = {"id": plain, "owner": "orphan", "clean": True, "cap_bytes": CAP, "blocks": 15, "slots": 3 * SLOTS}
    expected |= {"used_bytes": 30 * slot_plain, "fill": 30 * slot_plain / CAP, "last_use_s": 2000, "problems": []}
    assert home | expected == home
    assert home["allocated_bytes"] > 3 * 2 * SLOTS * slot_plain
    assert found["homes"][0]["clean"] is False
    length = segment_file_bytes(slot_plain, SLOTS)
    segment = home["segments"][2]
    assert [(file["rank"], file["length_bytes"]) for file in segment.pop("files")] == [(0, length), (1, length)]
    assert segment == {
        "segment": 2,
        "drive": 0,
        "indexed": True,
        "slot_bytes": slot_plain,
        "slots": SLOTS,
        "used_slots": 5,
        "used_bytes": 10 * slot_plain,
        "fill": 5 / SLOTS,
        "free_slots": 3,
        "free_runs": 1,
        "longest_free_run_slots": 3,
        "fragmentation": 1.0,
        "read_run_blocks": 1.0,
    }


def test_a_store_in_use(path: Path, owner: Owner) -> None:
    leave_home(path, HYBRID, 1, last_use_s=2000)
    before = files_below(path)
    found = inspect_json(path)
    assert files_below(path) == before
    live = found["homes"][0]
    assert (live["id"], live["owner"], live["clean"], live["blocks"]) == (owner.home_id, "alive", False, 5)
    assert (found["totals"]["cap_bytes"], found["totals"]["live_homes"], found["totals"]["homes"]) == (CAP, 1, 2)
    assert owner.put_one() == "True 0", "the owner goes on"
    assert inspect_json(path)["homes"][0]["blocks"] == 6
    owner.kill()
    left = inspect_json(path)["homes"][0]
    assert (left["owner"], left["clean"], left["blocks"]) == ("orphan", False, 6)


def test_a_copy_in_a_read_only_directory(path: Path, tmp_path: Path, owner: Owner) -> None:
    original = inspect_json(path)
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    (copy / "homes" / owner.home_id / "index" / "lock.mdb").unlink()
    inspect_json(copy)
    names = [str(item.relative_to(copy)) for item in copy.rglob("*")]
    assert not any(name.endswith("lock.mdb") for name in names), "no file is made in a copy"
    for item in (*copy.rglob("*"), copy):
        item.chmod(0o500 if item.is_dir() else 0o400)
    assert subprocess.run(["touch", copy / "homes" / "x"], check=False, preexec_fn=drop_power).returncode  # noqa: S607
    done = run("inspect", copy, "--json", obey_modes=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [str(item.relative_to(copy)) for item in copy.rglob("*")] == names
    for item in (copy, *copy.rglob("*")):
        item.chmod(0o700)
    (home,), (source,) = json.loads(done.stdout)["homes"], original["homes"]
    assert (home["owner"], source["owner"]) == ("orphan", "alive"), "a copy has no owner"
    assert (home["blocks"], home["segments"][0]["files"][0]["rank"]) == (source["blocks"], 0)


def test_a_home_that_is_taken_over_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_home(path, PLAIN, 1, last_use_s=2000)
    taken: list[Home] = []

    def after_the_takeover(*arguments: Any, **options: Any) -> Any:
        if not taken:
            taken.append(Store.open(path).acquire_home(PLAIN.fingerprint, PLAIN.description, CAP))
        return read_homes(*arguments, **options)

    monkeypatch.setattr("kvdisk.cli.survey.read_homes", after_the_takeover)
    facts = survey_store(path)
    taken[0].close(clean=True)
    assert [(home.id, home.alive, home.blocks) for home in facts.homes] == [(taken[0].id, True, 5)]
    assert facts.problems == ()


# -- what is wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut short", "missing"])
def test_an_index_that_cannot_be_read_is_one_homes_problem(path: Path, how: str) -> None:
    bad = leave_home(path, PLAIN, 2, last_use_s=2000)
    good = leave_home(path, HYBRID, 2, last_use_s=1000)
    data = path / "homes" / bad / "index" / "data.mdb"
    os.truncate(data, 2 * 4096) if how == "cut short" else data.unlink()  # reading it kills the process
    found = inspect_json(path, code=1)
    first, second = found["homes"]
    assert (first["id"], first["index_readable"], first["blocks"], first["used_bytes"]) == (bad, False, None, None)
    assert (second["id"], second["index_readable"], second["blocks"], second["problems"]) == (good, True, 10, [])
    (problem,) = first["problems"]
    assert "index is missing" in problem if how == "missing" else "index cannot be read" in problem
    segment = first["segments"][1]
    assert (segment["slots"], segment["slot_bytes"], segment["used_slots"]) == (SLOTS, 8192, None), "from its header"
    assert (found["totals"]["blocks"], found["totals"]["unreadable_homes"]) == (10, 1)
    shown = run_here("inspect", path)
    assert shown.exit_code == 1
    assert f"engine store {bad}: its index" in shown.stdout and "some/model-7B" in shown.stdout


@pytest.mark.parametrize("how", ["gone", "overwritten"])
def test_a_segment_file_that_is_wrong(path: Path, how: str) -> None:
    home_id = leave_home(path, PLAIN, 2, last_use_s=2000)
    file = path / "homes" / home_id / "segments" / "1" / "rank1.kv"
    if how == "gone":
        file.unlink()
    else:
        with file.open("r+b") as stream:
            stream.write(b"junk")
    (home,) = inspect_json(path, code=1)["homes"]
    (problem,) = home["problems"]
    assert {"gone": "segment 1 of rank 1 is missing", "overwritten": "no magic"}[how] in problem
    assert home["blocks"] == 10


def test_records_that_no_segment_has(path: Path) -> None:
    home = Store.open(path).acquire_home(PLAIN.fingerprint, PLAIN.description, CAP)
    index = fill_home(home, PLAIN, 1)
    index.put([BlockRecord(0, make_block_key(b"far" * 9, 0), Slot(0, SLOTS), 9)])
    index.put([BlockRecord(0, make_block_key(b"lost" * 9, 0), Slot(4, 0), 9)])
    index.close()
    home.close(clean=True)
    (found,) = inspect_json(path, code=1)["homes"]
    assert found["problems"] == [
        "1 blocks are in segments that the index does not have",
        f"segment 0 has {SLOTS} slots, and the index has a block in slot {SLOTS}",
    ]
