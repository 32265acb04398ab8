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
        str(item): item.read_bytes() for item in sorted(path.rglob("*")) if item.is_file() and item.name != "lock.mdb"
    }


def allocated(path: Path) -> int:
    return sum(home.allocated_bytes for home in list_homes(path))


def is_sound(*paths: Path) -> None:
    """Both tools find nothing wrong."""
    for command in ("verify", "inspect"):
        done = run_here(command, *paths)
        assert done.exit_code == 0, done.stdout


def used_at(path: Path, home_id: str, last_use_s: int) -> None:
    file = path / "homes" / home_id / "HOME"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"last_use_s": last_use_s}))


def three_homes(path: Path) -> tuple[str, str, str]:
    """The oldest, one between, and the newest, of three namespaces."""
    make_store(path)
    now_s = int(time.time())
    mine = home_ids(path)[0]
    oldest = leave_home(path, HYBRID, 3, last_use_s=now_s - 20 * DAY_S)
    newest = leave_home(path, PLAIN._replace(fingerprint=b"\x77" * 32), 2, last_use_s=now_s - DAY_S)
    used_at(path, mine, now_s - 10 * DAY_S)
    return oldest, mine, newest


# -- what goes ---------------------------------------------------------------------------------


def test_old_blocks_go_and_the_next_engine_has_the_others(path):
    expected = make_store(path)
    now_s = int(time.time())
    # Segments 0 and 1 are old; of segment 2 the last two are, which end a chain; of segment 3 only
    # the head.
    old = {Slot(segment, slot) for segment in (0, 1) for slot in range(5)} | {Slot(2, 3), Slot(2, 4)}
    home_id = stamp(path, lambda slot: now_s - (9 if slot in old | {Slot(3, 0)} else 1) * DAY_S)
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


def test_a_store_is_brought_to_a_size_from_the_oldest_home_on(path):
    oldest, mine, newest = three_homes(path)
    sizes = {home.id: home.allocated_bytes for home in list_homes(path)}
    to_bytes = int(sum(sizes.values()) * 0.3)
    found = pruned(path, "--to", to_bytes)
    assert found["after"]["allocated_bytes"] == allocated(path) <= to_bytes
    assert found["short_bytes"] == 0
    left = home_ids(path)
    assert left == sorted(left) and set(left) <= {oldest, mine, newest}
    for older, younger in ((oldest, mine), (mine, newest)):
        untouched = {home.id for home in list_homes(path) if home.allocated_bytes == sizes[home.id]}
        assert older not in left or younger in left
        assert older not in untouched or younger in untouched
    done = run_here("inspect", path, "--json")
    assert done.exit_code == 0
    assert pruned(path, "--to", to_bytes)["homes"] == []


def test_a_namespace_by_its_id_and_by_its_model(path):
    oldest, mine, newest = three_homes(path)
    assert pruned(path, "--namespace", "9b9b")["homes"][0]["id"] == oldest
    assert pruned(path, "--namespace", "model-7B")["homes"][0]["id"] == newest
    found = pruned(path, "--namespace", "m")
    assert (found["asked"]["namespace"], [home["id"] for home in found["homes"]]) == (MINE.hex(), [mine])
    assert home_ids(path) == []
    assert "no namespace of this store" in refused(path, "--namespace", "m", "--yes")


def test_clear_leaves_an_empty_store(path):
    three_homes(path)
    (path / "homes" / ("c" * 32)).mkdir()  # what a deletion that was broken off has left
    found = pruned(path, command="clear")
    assert (found["asked"]["everything"], found["goes"]["homes"], found["after"]) == (
        True, 4, {"homes": 0, "allocated_bytes": 0},
    )  # fmt: skip
    assert sorted(os.listdir(path)) == ["STORE", "homes", "lock"] and os.listdir(path / "homes") == []
    is_sound(path)
    assert make_store(path)
    shown = run_here("clear", path, "--yes").stdout
    assert "20 blocks, 1 whole engine store" in shown and "1 whole engine store; the store is empty." in shown
    assert "There is nothing to delete." in run_here("clear", path, "--yes").stdout


def test_every_drive(tmp_path):
    dirs = [tmp_path / "a", tmp_path / "b"]
    expected = make_store(dirs, 4, drives=2)
    loose = dirs[1] / "homes" / ("d" * 32) / "segments"
    loose.mkdir(parents=True)
    (loose / "junk").write_bytes(b"x" * 100_000)
    assert "has a part on a drive that was not named" in refused(dirs[0], "--to", 0, "--yes")
    assert "has a part on a drive that was not named" in refused(dirs[0], "--yes", command="clear")
    was = allocated(dirs)
    found = pruned(*dirs, "--to", was - 2 * (4096 + 8 * 8192))
    assert found["goes"]["bytes"] >= 2 * (4096 + 8 * 8192) + 100_000
    assert not loose.parent.exists() and allocated(dirs) <= was - 2 * (4096 + 8 * 8192)
    is_sound(*dirs)
    gone = found["homes"][0]["segments"]
    assert served(dirs) == {row for row in expected if row.slot.segment not in gone}
    pruned(*dirs, command="clear")
    assert [os.listdir(path / "homes") for path in dirs] == [[], []]


@pytest.mark.parametrize("how", ["killed", "machine stopped", "index gone", "index emptied", "HOME gone"])
def test_homes_that_were_not_left_in_order(path, how):
    make_store(path)
    now_s = int(time.time())
    home_id = stamp(path, lambda slot: now_s - (9 if slot.segment < 2 else 1) * DAY_S, clean=False)
    home = path / "homes" / home_id
    if how == "machine stopped":
        file = home / "HOME"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"boot_id": "another"}))
    elif how == "index gone":
        (home / "index" / "data.mdb").unlink()
    elif how == "index emptied":
        shutil.rmtree(home / "index")
        LmdbIndex(home / "index", map_bytes=8 << 20).close()
    elif how == "HOME gone":
        (home / "HOME").unlink()
    if how == "killed":
        assert pruned(path, "--older-than", "5d")["goes"]["segments"] == 2
        is_sound(path)
        assert len(served(path)) == 10
        return
    before = contents(path)
    found = pruned(path, "--older-than", "5d", code=0 if how == "HOME gone" else 1)
    assert found["homes"] == [] and contents(path) == before
    words = {
        "machine stopped": "kvdisk repair",
        "index gone": "its index is missing",
        "index emptied": "kvdisk repair",
    }
    assert all(words[how] in kept for kept in found["kept"]) and len(found["kept"]) == (how != "HOME gone")
    found = pruned(path, "--to", allocated(path) - 1)
    assert found["homes"][0]["whole"] and home_ids(path) == []


# -- who is left alone -------------------------------------------------------------------------


def test_a_live_home_is_never_touched(path, owner):
    orphan = leave_home(path, HYBRID, 3, last_use_s=5000)
    before = contents(path)
    for command, arguments in (
        ("clear", []),
        ("prune", ["--namespace", "3f3f"]),
        ("prune", ["--older-than", "1d"]),
        ("prune", ["--to", "0"]),
    ):
        said = refused(path, *arguments, "--yes", code=3, command=command)
        assert owner.home_id in said and "--orphans" in said
        assert "live engines own 1 engine store" in said
    assert contents(path) == before
    assert owner.put_one() == "True 0"
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
    other = leave_home(path, HYBRID, 2, last_use_s=5000)
    owners = []

    def carry_out(store, plan, _real=delete.carry_out):
        owners.append(start(path))  # it takes one home over, under another name
        owners.append(Store.open(path).hold_home(other))
        return _real(store, plan)

    monkeypatch.setattr(delete, "carry_out", carry_out)
    found = pruned(path, command="clear", code=3)
    assert {home["id"]: home["result"] for home in found["homes"]} == {
        other: "in use",
        next(home["id"] for home in found["homes"] if home["id"] != other): "gone",
    }
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
    said, sent = "", False
    while True:
        try:
            part = os.read(ours, 4096).decode(errors="replace")
        except OSError:
            break
        said += part
        if not part:
            break
        if not sent and "[y/N]" in said:
            os.write(ours, f"{answer}\n".encode())
            sent = True
    os.close(ours)
    return child.wait(), said


def test_it_asks_and_does_as_it_is_told(path):
    make_store(path)
    before = contents(path)
    code, said = answered("n", "clear", path)
    assert code == 2 and "nothing was deleted." in said
    assert contents(path) == before
    code, said = answered("y", "prune", path, "--older-than", "1d")
    assert code == 0 and "Delete " in said and "20 blocks, 1 whole engine store" in said
    assert home_ids(path) == []


def test_without_a_terminal_it_wants_to_be_told_yes(path):
    make_store(path)
    before = contents(path)
    for arguments in (["clear", path], ["prune", path, "--older-than", "1d", "--json"]):
        done = run_here(*arguments)
        assert done.exit_code == 2
        assert done.stderr.splitlines()[-1].startswith("kvdisk: nothing was deleted, since there is no terminal")
    assert contents(path) == before
    assert "There is nothing to delete." in run_here("prune", path, "--to", "1TiB").stdout
    for arguments, words in (
        ([], "say what to delete"),
        (["--to", "much"], "--to must be a size"),
        (["--older-than", "7"], "--older-than is a time such as"),
    ):
        assert words in refused(path, *arguments, "--yes")
