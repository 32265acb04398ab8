# SPDX-License-Identifier: Apache-2.0
"""``kvdisk prune`` and ``kvdisk clear`` on real stores: what goes, what stays, who is asked, and
who is left alone."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from cli_stores import COMMAND, HYBRID, PLAIN, leave_home, run_here
from rebuild_stores import MINE, end, make_store, served, stamp, start

from kvdisk.blocks import Slot
from kvdisk.cli import delete
from kvdisk.device.control import home_ids
from kvdisk.device.listing import list_homes
from kvdisk.device.store import Store
from kvdisk.index.lmdb_index import LmdbIndex

DAY_S = 86400


def pruned(*arguments: object, code: int = 0, command: str = "prune") -> dict:
    done = run_here(command, *arguments, "--yes", "--json")
    assert (done.exit_code, done.stderr) == (code, "")
    found = json.loads(done.stdout)
    assert found["json_version"] == 1
    return found


def refused(*arguments: object, code: int = 2, command: str = "prune") -> str:
    done = run_here(command, *arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith("kvdisk: ") and done.stderr.endswith(".\n") and done.stderr.count("\n") == 1
    return done.stderr


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(item): item.read_bytes() for item in path.rglob("*") if item.is_file() and not item.name.startswith("lock")
    }


def allocated(path: Path) -> int:
    return sum(home.allocated_bytes for home in list_homes(path))


def is_sound(*paths: Path) -> None:
    for command in ("verify", "inspect"):
        done = run_here(command, *paths)
        assert done.exit_code == 0, done.stdout


def rewrite_home(path: Path, home_id: str, **fields: object) -> None:
    file = path / "homes" / home_id / "HOME"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


# -- what goes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
def test_old_blocks_go_and_the_next_engine_has_the_others(path, clean):
    """Of an engine that ended in order, or was killed."""
    expected = make_store(path)
    now_s = int(time.time())
    # Segments 0 and 1 are old; of segment 2 the last two are, which end a chain; of segment 3 only
    # the head.
    old = {Slot(segment, slot) for segment in (0, 1) for slot in range(5)} | {Slot(2, 3), Slot(2, 4)}
    home_id = stamp(path, lambda slot: now_s - (9 if slot in old | {Slot(3, 0)} else 1) * DAY_S, clean=clean)
    before = contents(path)
    dry = run_here("prune", path, "--older-than", "5d", "--dry-run", "--json")
    assert (dry.exit_code, contents(path) == before) == (0, True)
    planned = json.loads(dry.stdout)
    assert (planned["dry_run"], planned["after"], planned["homes"][0]["result"]) == (True, None, None)
    was, last_use_s = allocated(path), list_homes(path)[0].record.last_use_s
    found = pruned(path, "--older-than", "5d")
    assert found["goes"] == planned["goes"] == found["goes"] | {"homes": 0, "segments": 2, "blocks": 12}
    (home,) = found["homes"]
    assert home == home | {"id": home_id, "whole": False, "segments": [0, 1], "blocks": 12, "result": "deleted"}
    assert (found["before"]["allocated_bytes"], found["after"]["allocated_bytes"]) == (was, allocated(path))
    assert abs(was - allocated(path) - found["goes"]["bytes"]) <= 64 << 10, "but for directories"
    (summary,) = list_homes(path)
    assert (summary.id, summary.record.clean, summary.record.last_use_s) == (home_id, True, last_use_s)
    is_sound(path)
    assert served(path) == {row for row in expected if row.slot not in old}
    assert pruned(path, "--older-than", "5d")["homes"] == []
    found = pruned(path, "--older-than", "0s")
    assert (found["goes"]["homes"], found["after"]["homes"], home_ids(path)) == (1, 0, [])


def test_a_namespace_goes_and_what_is_cleared(path):
    make_store(path)
    mine, newest = home_ids(path)[0], leave_home(path, PLAIN._replace(fingerprint=b"\x77" * 32), 2, last_use_s=5000)
    leave_home(path, HYBRID, 3, last_use_s=4000)
    assert [home["id"] for home in pruned(path, "--namespace", "model-7B")["homes"]] == [newest]
    found = pruned(path, "--namespace", MINE.hex()[:4])
    assert (found["asked"]["namespace"], [home["id"] for home in found["homes"]]) == (MINE.hex(), [mine])
    for arguments, words in (
        (["--namespace", "m"], "no namespace of this store"),
        ([], "say what to delete"),
        (["--to", "much"], "--to must be a size"),
        (["--older-than", "7"], "--older-than is a time such as"),
    ):
        assert words in refused(path, *arguments, "--yes")
    (path / "homes" / ("c" * 32)).mkdir()  # what a deletion that was broken off has left
    found = pruned(path, command="clear")
    assert (found["asked"]["everything"], found["goes"]["homes"]) == (True, 2)
    assert found["after"] == {"homes": 0, "allocated_bytes": 0}
    assert sorted(os.listdir(path)) == ["STORE", "homes", "lock"] and os.listdir(path / "homes") == []
    assert make_store(path)
    shown = run_here("clear", path, "--yes").stdout
    assert "20 blocks, 1 whole engine store" in shown and "1 whole engine store; the store is empty." in shown
    assert "There is nothing to delete." in run_here("clear", path, "--yes").stdout


def test_every_drive(tmp_path):
    dirs = [tmp_path / "a", tmp_path / "b"]
    expected = make_store(dirs, 4, drives=2)
    loose = dirs[1] / "homes" / ("d" * 32) / "segments"
    loose.mkdir(parents=True)
    assert "has a part on a drive that was not named" in refused(dirs[0], "--to", 0, "--yes")
    was = allocated(dirs)
    found = pruned(*dirs, "--to", was - 2 * (4096 + 8 * 8192))
    assert not loose.parent.exists() and allocated(dirs) <= was - 2 * (4096 + 8 * 8192)
    is_sound(*dirs)
    gone = found["homes"][0]["segments"]
    assert gone and served(dirs) == {row for row in expected if row.slot.segment not in gone}
    pruned(*dirs, command="clear")
    loose.mkdir(parents=True)
    pruned(*dirs, command="clear")
    assert [os.listdir(path / "homes") for path in dirs] == [[], []]


def empty_index(home: Path) -> None:
    shutil.rmtree(home / "index")
    LmdbIndex(home / "index", map_bytes=8 << 20).close()


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (lambda home: rewrite_home(home.parents[1], home.name, boot_id="another"), "kvdisk repair"),
        (lambda home: (home / "index" / "data.mdb").unlink(), "its index is missing"),
        (empty_index, "kvdisk repair"),
        (lambda home: (home / "HOME").unlink(), None),
    ],
)
def test_homes_that_were_not_left_in_order(path, damage, kept):
    make_store(path)
    now_s = int(time.time())
    home_id = stamp(path, lambda slot: now_s - (9 if slot.segment < 2 else 1) * DAY_S, clean=False)
    damage(path / "homes" / home_id)
    before = contents(path)
    found = pruned(path, "--older-than", "5d", code=0 if kept is None else 1)
    assert found["homes"] == [] and contents(path) == before
    assert [kept in one for one in found["kept"]] == ([] if kept is None else [True])
    found = pruned(path, "--to", allocated(path) - 1)
    assert found["homes"][0]["whole"] and home_ids(path) == []


# -- who is left alone -------------------------------------------------------------------------


def test_a_live_home_is_never_touched(path, owner):
    orphan = leave_home(path, HYBRID, 3, last_use_s=5000)
    before = contents(path)
    for command, *arguments in (
        ["clear"], ["prune", "--namespace", "3f3f"], ["prune", "--older-than", "1d"], ["prune", "--to", "0"],
    ):  # fmt: skip
        said = refused(path, *arguments, "--yes", code=3, command=command)
        assert f"live engines own 1 engine store ({owner.home_id})" in said and "--orphans" in said
    assert contents(path) == before
    alone = next(home.allocated_bytes for home in list_homes(path) if home.alive)
    assert pruned(path, "--to", alone)["homes"][0]["id"] == orphan, "no live home has to change for that"
    assert home_ids(path) == [owner.home_id]
    found = pruned(path, "--orphans", command="clear")
    assert (found["homes"], found["in_use"]) == ([], [owner.home_id])
    found = pruned(path, "--to", 0, "--orphans", code=1)
    assert (found["homes"], found["short_bytes"]) == ([], alone)
    shown = run_here("prune", path, "--to", 0, "--orphans", "--yes").stdout
    assert "more than asked for stay: live engines own 1 engine store, which may not change." in " ".join(shown.split())
    assert owner.put_one() == "True 0"


def test_an_engine_that_comes_between_the_plan_and_the_deletion(path, monkeypatch):
    make_store(path)
    mine, other = home_ids(path)[0], leave_home(path, HYBRID, 2, last_use_s=5000)
    owners = []

    def carry_out(store, plan, _real=delete.carry_out):
        owners.append(start(path))  # it takes one home over, under another name
        owners.append(Store.open(path).hold_home(other))
        return _real(store, plan)

    monkeypatch.setattr(delete, "carry_out", carry_out)
    found = pruned(path, command="clear", code=3)
    assert {home["id"]: home["result"] for home in found["homes"]} == {other: "in use", mine: "gone"}
    assert found["goes"]["homes"] == 2 and found["after"]["homes"] == 2
    owners[1].close(clean=False)
    end(owners[0])
    assert len(served(path)) == 20


# -- who is asked ------------------------------------------------------------------------------


def answered(answer: str, *arguments: object) -> tuple[int, str]:
    """Run the command on a terminal, and answer its question."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [str(COMMAND), *map(str, arguments)], stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"TERM": "dumb", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    said = b""
    try:
        while part := os.read(ours, 4096):
            said += part
    except OSError:
        pass
    os.close(ours)
    return child.wait(), said.decode(errors="replace")


def test_it_asks_and_does_as_it_is_told(path):
    make_store(path)
    before = contents(path)
    for command in (["clear", path], ["prune", path, "--older-than", "1d", "--json"]):
        done = run_here(*command)
        assert done.exit_code == 2
        assert done.stderr.splitlines()[-1].startswith("kvdisk: nothing was deleted, since there is no terminal")
    code, said = answered("n", "clear", path)
    assert code == 2 and "nothing was deleted." in said and contents(path) == before
    code, said = answered("y", "prune", path, "--older-than", "1d")
    assert code == 0 and "Delete " in said and "20 blocks, 1 whole engine store" in said
    assert home_ids(path) == []
