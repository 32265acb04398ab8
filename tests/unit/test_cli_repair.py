# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
from cli_stores import HYBRID, json_of, leave_home, run_here
from rebuild_stores import home_path, make_store, served

from kvdisk.cli import repair as command
from kvdisk.device import control, home
from kvdisk.device.listing import list_homes


def repair(*arguments: object, code: int = 0) -> list[dict]:
    return json_of("repair", *arguments, "--healthy", "--yes", code=code)["engine_stores"]


def test_every_home_without_an_owner_gets_its_index_back(path, owner):
    expected = make_store(path)
    (mine,) = (home.id for home in list_homes(path) if not home.alive)
    other = leave_home(path, HYBRID, 2, last_use_s=5000)
    for home_id in (mine, other):
        shutil.rmtree(path / "homes" / home_id / "index")
    os.truncate(path / "homes" / mine / "segments" / "2" / "rank1.kv", 5000)
    found = {report["id"]: report for report in repair(path, code=3)}
    assert found[owner.home_id]["result"] == "in use" and owner.put_one() == "True 0", "it does not notice"
    (dropped,) = found[mine].pop("dropped_segments")
    assert (dropped["drive"], dropped["segment"], "has 5000 bytes" in dropped["why"]) == (0, 2, True)
    counts = {"blocks": 15, "segments": 3, "older_copies": 0}
    assert found[mine] == {"id": mine, "result": "rebuilt", "why": None} | counts
    assert (found[other]["blocks"], found[other]["segments"]) == (0, 2), "its slots were never written"
    assert next(home.record.last_use_s for home in list_homes(path) if home.id == other) == 5000, "that is no use"
    shown = run_here("repair", path, "--yes", "--healthy").stdout
    assert f"engine store {owner.home_id[:8]}: in use, a live engine owns it" in shown
    assert f"engine store {mine[:8]}: 15 blocks in 3 segments recovered" in shown
    assert [report["result"] for report in repair(path, "--engine-store", other[:8])] == ["rebuilt"]
    owner.kill()
    assert served(path) == {row for row in expected if row.slot.segment != 2}


def test_a_healthy_index_is_left_as_it_is_unless_it_is_asked_for(path, monkeypatch):
    """Whoever says yes has not said that: deleted blocks would come back, and times are lost."""
    make_store(path)
    mine = home_path(path)
    other = leave_home(path, HYBRID, 2, last_use_s=5000)
    index = mine / "index" / "data.mdb"
    before = index.stat().st_ctime_ns
    for options in ([], ["--yes"], ["--healthy"]):  # there is no terminal to ask on
        done = run_here("repair", path, *options)
        assert (done.exit_code, index.stat().st_ctime_ns) == (0, before), options
        assert done.stdout.splitlines() == [
            "2 engine stores of stopped engines have healthy indexes.",
            "There is nothing to repair. Blocks were not read; kvdisk verify reads them.",
        ]
    for answer, code in (("n", False), ("y", True)):
        monkeypatch.setattr(command, "can_ask", lambda: True)
        done = run_here("repair", path, "--healthy", typed=f"{answer}\n")
        assert (done.exit_code, "recovered" in done.stdout, index.stat().st_ctime_ns == before) == (0, code, not code)
        assert "Deleted blocks may come back" in done.stderr
    shutil.rmtree(path / "homes" / other / "index")
    found = {one["id"]: one["result"] for one in json_of("repair", path, "--yes")["engine_stores"]}
    assert found == {mine.name: "healthy", other: "rebuilt"}
    shutil.rmtree(path / "homes" / other / "index")
    assert f"engine store {mine.name[:8]}: index healthy" in run_here("repair", path, "--yes").stdout


def test_a_home_that_says_too_little_cannot_be_repaired(path):
    make_store(path)
    file = home_path(path) / "HOME"
    for text, why in (
        (json.dumps(json.loads(file.read_text()) | {"description": {}}), "does not describe"),
        ("{", "does not decode"),
    ):
        for name in ("HOME", "HOME.tmp"):
            file.with_name(name).write_text(text)
        (report,) = repair(path, code=1)
        assert (report["result"], why in report["why"]) == ("failed", True)
        assert (home_path(path) / "index" / "data.mdb").exists(), "nothing was touched"


def test_all_drives_have_to_be_named(tmp_path):
    dirs = [tmp_path / "a", tmp_path / "b"]
    expected = make_store(dirs, 4, drives=2)
    (report,) = repair(dirs[0], code=1)
    assert "not all of its directories" in report["why"]
    assert repair(*dirs)[0]["blocks"] == 20
    assert served(dirs) == expected


@pytest.mark.parametrize("write", [1, 2])
def test_a_drive_that_takes_no_more_is_a_report_too(path, monkeypatch, write):
    """From this write of HOME on: before the index goes, when it is there again, and at the end."""
    expected = make_store(path)
    writes = []

    def write_record(*arguments, **named):
        writes.append(arguments)
        if len(writes) >= write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return control.write_record(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(home, "write_record", write_record)
        (report,) = repair(path, code=1)
    assert report["result"] == "failed" and f"errno {errno.ENOSPC}" in report["why"]
    assert served(path) == expected
