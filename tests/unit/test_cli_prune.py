# SPDX-License-Identifier: Apache-2.0
"""``kvdisk prune`` and ``kvdisk clear`` on real stores: what goes, what stays, who is asked, who is
left alone, and what a kill leaves."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import time
import warnings
from pathlib import Path

import pytest
from cli_stores import COMMAND, HYBRID, PLAIN, json_of, leave_home, refused, run_here
from rebuild_stores import MINE, Row, end, make_store, served, stamp, start

from kvdisk.blocks import Slot
from kvdisk.cli import delete
from kvdisk.cli.main import app
from kvdisk.cli.verify import verify_store
from kvdisk.device import paths
from kvdisk.device.control import home_ids
from kvdisk.device.listing import list_homes
from kvdisk.device.store import Store
from kvdisk.index.lmdb_index import LmdbIndex, TablesProcess

DAY_S = 86400


def pruned(*arguments: object, code: int = 0, command: str = "prune") -> dict:
    found = json_of(command, *arguments, "--yes", code=code)
    assert found["json_version"] == 2
    return found


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(item): item.read_bytes() for item in path.rglob("*") if item.is_file() and not item.name.startswith("lock")
    }


def allocated(path: Path) -> int:
    return sum(home.allocated_bytes for home in list_homes(path))


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
    planned = json_of("prune", path, "--older-than", "5d", "--dry-run")
    assert contents(path) == before
    assert (planned["dry_run"], planned["after"], planned["engine_stores"][0]["result"]) == (True, None, None)
    was, last_use_s = allocated(path), list_homes(path)[0].record.last_use_s
    found = pruned(path, "--older-than", "5d")
    assert found["goes"] == planned["goes"] == found["goes"] | {"engine_stores": 0, "segments": 2, "blocks": 12}
    (home,) = found["engine_stores"]
    assert home == home | {"id": home_id, "whole": False, "segments": [0, 1], "blocks": 12, "result": "deleted"}
    assert (found["before"]["allocated_bytes"], found["after"]["allocated_bytes"]) == (was, allocated(path))
    assert abs(was - allocated(path) - found["goes"]["bytes"]) <= 64 << 10, "but for directories"
    (summary,) = list_homes(path)
    assert (summary.id, summary.record.clean, summary.record.last_use_s) == (home_id, True, last_use_s)
    assert verify_store([path]).ok and run_here("inspect", path).exit_code == 0
    assert served(path) == {row for row in expected if row.slot not in old}
    assert pruned(path, "--older-than", "5d")["engine_stores"] == []
    found = pruned(path, "--older-than", "0s")
    assert (found["goes"]["engine_stores"], found["after"]["engine_stores"], home_ids(path)) == (1, 0, [])


def test_a_namespace_goes_and_what_is_cleared(path):
    make_store(path)
    mine, newest = home_ids(path)[0], leave_home(path, PLAIN._replace(fingerprint=b"\x77" * 32), 2, last_use_s=5000)
    leave_home(path, HYBRID, 3, last_use_s=4000)
    assert [home["id"] for home in pruned(path, "--namespace", "model-7B")["engine_stores"]] == [newest]
    found = pruned(path, "--namespace", MINE.hex()[:4])
    assert (found["asked"]["namespace"], [home["id"] for home in found["engine_stores"]]) == (MINE.hex(), [mine])
    for arguments, words in (
        (["--namespace", "m"], "no namespace of this store"),
        ([], "give what to delete"),
        (["--to", "much"], "--to must be a size"),
        (["--older-than", "7"], "--older-than is a time such as"),
    ):
        assert words in refused("prune", path, *arguments, "--yes")
    (path / "homes" / ("c" * 32)).mkdir()  # what a deletion that was broken off has left
    found = pruned(path, command="clear")
    assert (found["asked"]["everything"], found["goes"]["engine_stores"]) == (True, 2)
    assert found["after"] == {"engine_stores": 0, "allocated_bytes": 0}
    assert sorted(os.listdir(path)) == ["SALT_KEY", "STORE", "homes", "lock"] and os.listdir(path / "homes") == []
    make_store(path)
    assert "1 whole engine store; the store is empty." in run_here("clear", path, "--yes").stdout
    assert "There is nothing to delete." in run_here("clear", path, "--yes").stdout


def test_every_drive(tmp_path):
    dirs = [tmp_path / "a", tmp_path / "b"]
    expected = make_store(dirs, 4, drives=2)
    loose = dirs[1] / "homes" / ("d" * 32) / "segments"
    loose.mkdir(parents=True)
    assert "has a part on a drive that was not named" in refused("prune", dirs[0], "--to", 0, "--yes")
    most = allocated(dirs) - 2 * (4096 + 8 * 8192)
    (home,) = pruned(*dirs, "--to", most)["engine_stores"]
    assert not loose.parent.exists() and allocated(dirs) <= most and verify_store(dirs).ok
    assert home["segments"] and served(dirs) == {row for row in expected if row.slot.segment not in home["segments"]}
    loose.mkdir(parents=True)
    pruned(*dirs, command="clear")
    assert [os.listdir(path / "homes") for path in dirs] == [[], []]


def other_boot(home: Path) -> None:
    said = json.loads((home / "HOME").read_text())
    an_hour_ago_s = said["last_use_s"] - 3600  # what was used a moment ago would be another machine's
    (home / "HOME").write_text(json.dumps(said | {"boot_id": "another", "last_use_s": an_hour_ago_s}))


def empty_index(home: Path) -> None:
    shutil.rmtree(home / "index")
    LmdbIndex(home / "index", map_bytes=8 << 20).close()


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (other_boot, "kvdisk repair"),
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
    assert found["engine_stores"] == [] and contents(path) == before
    assert [kept in one for one in found["kept"]] == ([] if kept is None else [True])
    found = pruned(path, "--to", allocated(path) - 1)
    assert found["engine_stores"][0]["whole"] and home_ids(path) == []


# -- who is left alone, and who is asked -------------------------------------------------------


def test_a_live_home_is_never_touched(path, owner):
    orphan = leave_home(path, HYBRID, 3, last_use_s=5000)
    before = contents(path)
    for command, *arguments in (
        ["clear"], ["prune", "--namespace", "3f3f"], ["prune", "--older-than", "1d"], ["prune", "--to", "0"],
    ):  # fmt: skip
        said = refused(command, path, *arguments, "--yes", code=3)
        assert f"live engines own 1 engine store ({owner.home_id[:8]})" in said and "--stopped" in said
    assert contents(path) == before
    alone = next(home.allocated_bytes for home in list_homes(path) if home.alive)
    assert pruned(path, "--to", alone)["engine_stores"][0]["id"] == orphan, "no live home has to change for that"
    found = pruned(path, "--stopped", command="clear")
    assert (found["engine_stores"], found["in_use"], home_ids(path)) == ([], [owner.home_id], [owner.home_id])
    found = pruned(path, "--to", 0, "--stopped", code=1)
    assert (found["engine_stores"], found["short_bytes"]) == ([], alone)
    shown = run_here("prune", path, "--to", 0, "--stopped", "--yes").stdout
    assert "more than asked for stay: live engines own 1 engine store, which may not change." in " ".join(shown.split())
    assert owner.put_one() == "True 0"


def test_an_engine_that_comes_between_the_plan_and_the_deletion(path, monkeypatch):
    make_store(path)
    mine, other = home_ids(path)[0], leave_home(path, HYBRID, 2, last_use_s=5000)
    owners, real = [], delete.carry_out

    def carry_out(store, plan, wait_s):
        owners.append(start(path))  # it takes one home over, under another name
        owners.append(Store.open(path).hold_home(other))
        real(store, plan, wait_s)

    monkeypatch.setattr(delete, "carry_out", carry_out)
    found = pruned(path, command="clear", code=3)
    assert {home["id"]: home["result"] for home in found["engine_stores"]} == {other: "in use", mine: "gone"}
    assert found["goes"]["engine_stores"] == 2 and found["after"]["engine_stores"] == 2
    owners[1].close(clean=False)
    end(owners[0])
    assert len(served(path)) == 20


def answered(answer: str, *arguments: object) -> tuple[int, str]:
    """Run the command on a terminal, and answer its question."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "COLUMNS": "100"}
    command = [str(COMMAND), *map(str, arguments)]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
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
    done = run_here("prune", path, "--older-than", "1d", "--json")
    assert done.exit_code == 2 and "nothing was deleted, since there is no terminal" in done.stderr
    code, said = answered("n", "clear", path)
    assert code == 2 and "nothing was deleted." in said and contents(path) == before
    code, said = answered("y", "prune", path, "--older-than", "1d")
    assert code == 0 and "Delete " in said and "20 blocks, 1 whole engine store" in said
    assert home_ids(path) == []


# -- kill -9 -----------------------------------------------------------------------------------


def killed_at(step: int, *arguments: object) -> int:
    """Run the command in a process that is killed after so many changes; return its exit code."""
    with warnings.catch_warnings(action="ignore"):
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = step

    def counted(place: object, name: str) -> None:
        real = getattr(place, name)

        def count(*given: object, **named: object) -> object:
            nonlocal left
            result = real(*given, **named)
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(place, name, count)

    try:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        for name in ("unlink", "rmdir", "rename", "replace"):
            counted(os, name)
        counted(TablesProcess, "commit")
        counted(paths, "_exchange")
        os._exit(app([*map(str, arguments), "--yes"], standalone_mode=False) or 0)
    finally:
        os._exit(99)


@pytest.mark.parametrize(
    ("command", "stride"), [pytest.param(["prune", "--older-than", "5d"], 1, marks=pytest.mark.torture), (["clear"], 3)]
)
def test_whatever_step_it_dies_after_the_next_engine_starts_and_nothing_is_wrong(command, stride, tmp_path):
    is_prune = command[0] == "prune"
    whole = [tmp_path / "whole" / name for name in ("ab" if is_prune else "a")]
    whole[0].parent.mkdir()
    expected, now_s = make_store(whole, drives=len(whole)), int(time.time())
    stamp(whole, lambda slot: now_s - (9 if slot.segment < 2 or slot.index > 3 else 1) * DAY_S)
    stay = {row for row in expected if is_prune and row.slot.segment >= 2 and row.slot.index <= 3}
    outcomes: list[set[Row]] = []
    code = -signal.SIGKILL
    while code:
        dirs = [tmp_path / "killed" / path.name for path in whole]
        shutil.copytree(whole[0].parent, dirs[0].parent)
        code = killed_at(1 + stride * len(outcomes), *command, *dirs)
        assert code in {0, -signal.SIGKILL}
        left = served(dirs)  # an engine starts, serves and ends
        assert stay <= left <= expected, f"step {len(outcomes)}"
        assert all(home.record is not None for home in list_homes(dirs))
        verdict = verify_store(dirs)
        assert verdict.ok, (len(outcomes), verdict)
        outcomes.append(left)
        shutil.rmtree(dirs[0].parent)
    assert outcomes[0] == (expected if is_prune else set()), "HOME is the first to go"
    assert outcomes[-1] == stay and len(outcomes) > 4
