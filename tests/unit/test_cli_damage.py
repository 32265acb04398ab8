# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk inspect`` says of stores that are damaged, or that it may not read, and how it exits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_stores import CAP, HYBRID, PLAIN, SLOTS, fill_home, inspect_json, leave_home, run, run_here

from kvdisk.blocks import Slot, make_block_key
from kvdisk.device.segment import create_segment
from kvdisk.device.store import Store
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.messages import SegmentSpec


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


# -- what is wrong -----------------------------------------------------------------------------


def damage_index(data: Path, how: str) -> None:
    if how == "cut short":
        os.truncate(data, 2 * 4096)  # reading it kills the process
    elif how == "empty":
        os.truncate(data, 0)
    elif how == "overwritten":
        data.write_bytes(b"\xa5" * data.stat().st_size)
    elif how == "not allowed":
        data.unlink()
        data.mkdir()
    else:
        data.unlink()


@pytest.mark.parametrize("how", ["cut short", "empty", "overwritten", "not allowed", "missing"])
def test_an_index_that_cannot_be_read_is_one_homes_problem(path: Path, how: str) -> None:
    bad = leave_home(path, PLAIN, 2, last_use_s=2000)
    good = leave_home(path, HYBRID, 2, last_use_s=1000)
    damage_index(path / "homes" / bad / "index" / "data.mdb", how)
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
    assert f"home {bad}: its index" in shown.stdout and "some/model-7B" in shown.stdout


@pytest.mark.parametrize(
    ("text", "words"), [(None, "is missing"), ("{", "does not decode"), ("other format", "is of another format")]
)
def test_a_home_file_that_cannot_be_read(path: Path, text: str | None, words: str) -> None:
    bad = leave_home(path, PLAIN, 1, last_use_s=2000)
    good = leave_home(path, HYBRID, 1, last_use_s=1000)
    file = path / "homes" / bad / "HOME"
    changed = text if text != "other format" else json.dumps(json.loads(file.read_text()) | {"format_version": 9})
    file.unlink()
    if changed is not None:
        file.write_text(changed)
    found = inspect_json(path, code=1)
    first, second = found["homes"]
    assert (first["id"], first["problems"]) == (good, [])
    assert (second["id"], second["fingerprint"], second["cap_bytes"], second["blocks"]) == (bad, None, None, 5)
    assert words in second["problems"][0]
    assert run_here("inspect", path).exit_code == 1


@pytest.mark.parametrize("how", ["gone", "short", "overwritten"])
def test_a_segment_file_that_is_wrong(path: Path, how: str) -> None:
    home_id = leave_home(path, PLAIN, 2, last_use_s=2000)
    file = path / "homes" / home_id / "segments" / "1" / "rank1.kv"
    if how == "gone":
        file.unlink()
    elif how == "short":
        os.truncate(file, 9000)
    else:
        with file.open("r+b") as stream:
            stream.write(b"junk")
    (home,) = inspect_json(path, code=1)["homes"]
    (problem,) = home["problems"]
    assert {"gone": "segment 1 of rank 1 is missing", "short": "has 9000 bytes", "overwritten": "no magic"}[
        how
    ] in problem
    assert home["blocks"] == 10
    shown = run_here("inspect", path).stdout
    assert ("rank 1: none" in shown, "rank 1: 8.8 KiB" in shown) == (how == "gone", how == "short")


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


def test_what_a_crash_leaves_of_segments_is_not_wrong(path: Path) -> None:
    home = Store.open(path).acquire_home(PLAIN.fingerprint, PLAIN.description, CAP)
    index = fill_home(home, PLAIN, 1)
    index.put_segment(SegmentRecord(1, 8192, SLOTS))  # was being dropped: its files are gone
    index.close()
    create_segment(home, SegmentSpec(2, 8192, SLOTS), 0, 2, PLAIN.fingerprint).close()  # was being made
    home.close(clean=False)
    (found,) = inspect_json(path)["homes"]
    assert [(segment["indexed"], len(segment["files"])) for segment in found["segments"]] == [
        (True, 2),
        (True, 0),
        (False, 1),
    ]
    assert "not in the index" in run_here("inspect", path).stdout


# -- no report ---------------------------------------------------------------------------------


def one_sentence(code: int, stdout: str, stderr: str) -> str:
    assert (code, stdout) == (2, "")
    assert stderr.startswith("kvdisk: ") and stderr.endswith(".\n") and stderr.count("\n") == 1, stderr
    return stderr


def refused(path: Path) -> str:
    done = run_here("inspect", path, "--json")
    return one_sentence(done.exit_code, done.stdout, done.stderr)


def test_what_is_no_store(path: Path, tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nothing")
    assert "is not a kvdisk store, it is an empty directory.\n" in refused(tmp_path)
    (tmp_path / "file").write_text("")
    assert "is not a kvdisk store.\n" in refused(tmp_path)
    Store.open(path)
    assert f"is not a kvdisk store, but a part of {path}.\n" in refused(path / "homes")
    assert os.listdir(path / "homes") == []
    assert f"{tmp_path / 'file'} is a file, and a store is a directory.\n" in refused(tmp_path / "file")
    assert run_here("inspect").exit_code == 2
    assert run_here("inspect", path, "--jsn").exit_code == 2
    os.symlink(path, tmp_path / "link")
    assert inspect_json(tmp_path / "link")["store"]["path"] == str(path)


def test_a_newer_or_damaged_store(path: Path) -> None:
    Store.open(path)
    store = json.loads((path / "STORE").read_text())
    (path / "STORE").write_text(json.dumps(store | {"format_version": 2}))
    assert "was made by a newer kvdisk (format 2, not 1)" in refused(path)
    (path / "STORE").write_text("{")
    assert "STORE does not decode" in refused(path)


def test_no_permission(path: Path) -> None:
    home_id = leave_home(path, PLAIN, 1, last_use_s=2000)
    for closed in (path, path / "homes" / home_id, path / "homes" / home_id / "HOME"):
        mode = closed.stat().st_mode & 0o777
        closed.chmod(0)
        done = run("inspect", path, "--json", obey_modes=True)
        closed.chmod(mode)
        said = one_sentence(done.returncode, done.stdout, done.stderr)
        assert f"no permission to read {path}; run this as the user" in said
    path.chmod(0o777)
    assert "can be written by others" in refused(path)


def test_an_index_that_this_user_may_not_read(path: Path) -> None:
    home_id = leave_home(path, PLAIN, 1, last_use_s=2000)
    (path / "homes" / home_id / "index" / "data.mdb").chmod(0)
    done = run("inspect", path, "--json", obey_modes=True)
    assert done.returncode == 1
    assert "Permission denied" in json.loads(done.stdout)["homes"][0]["problems"][0]
