# SPDX-License-Identifier: Apache-2.0
"""kill -9 of ``kvdisk prune`` and ``kvdisk clear`` after each change that they make to the
store."""

from __future__ import annotations

import os
import shutil
import signal
import time
import warnings

import pytest
from rebuild_stores import Row, make_store, served, stamp

from kvdisk.cli.main import app
from kvdisk.cli.verify import verify_store
from kvdisk.device import paths
from kvdisk.device.listing import list_homes
from kvdisk.index.lmdb_tables import LmdbTables

DAY_S = 86400


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
        counted(LmdbTables, "commit")
        counted(paths, "_exchange")
        os._exit(app([*map(str, arguments), "--yes"], standalone_mode=False) or 0)
    finally:
        os._exit(99)


@pytest.mark.parametrize(("command", "stride"), [(["prune", "--older-than", "5d"], 1), (["clear"], 3)])
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
