# SPDX-License-Identifier: Apache-2.0
"""Every command that takes a store: what it says, in one sentence, where it cannot do anything, and
how it ends.

All run the installed command's own entry point in another process: one for each command once, and
else one for all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from cli_stores import HYBRID, PLAIN, drop_power, leave_home, run, run_here

from kvdisk.device.store import Store

COMMANDS = {"inspect": [], "verify": [], "repair": [], "prune": ["--to", "0", "--yes"], "clear": ["--yes"]}
CHANGING = ("prune", "clear")


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


EACH_IN_TURN = """
import contextlib, io, json, sys
from kvdisk.cli.main import app
done = {}
for name, arguments in json.loads(sys.argv[1]).items():
    code, out, err = 0, io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app([name, *arguments])
        except SystemExit as end:
            code = end.code or 0
        except BaseException as error:
            code, _ = -1, err.write(f"Traceback: {error!r}")
    for stream in (out, err):
        stream.flush()
    done[name] = [code, *(stream.buffer.getvalue().decode("utf-8", "surrogateescape") for stream in (out, err))]
print(json.dumps(done))
"""


def run_each(*paths: Path, obey_modes: bool = False) -> dict[str, Done]:
    """Run every command on these directories. ``obey_modes``: without root's power over
    permissions."""
    arguments = {name: [*map(str, paths), *options] for name, options in COMMANDS.items()}
    child = subprocess.run(
        [sys.executable, "-c", EACH_IN_TURN, json.dumps(arguments)],
        capture_output=True, text=True, check=True, preexec_fn=drop_power if obey_modes else None,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"},
    )  # fmt: skip
    return {name: Done(*fields) for name, fields in json.loads(child.stdout).items()}


def sentence(done: Done | subprocess.CompletedProcess[str]) -> str:
    """What a command said that did nothing."""
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("kvdisk: ") and done.stderr.endswith(".\n") and done.stderr.count("\n") == 1, done
    return done.stderr


def rewritten(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def no_such_directory(path: Path) -> str:
    return f"{path} does not exist."


def other_files(path: Path) -> str:
    path.mkdir(0o700)
    (path / "notes.txt").write_text("mine")
    return f"{path} is not a kvdisk store."


def newer(path: Path) -> str:
    leave_home(path, HYBRID, 1, last_use_s=2000)
    rewritten(path / "STORE", format_version=2)
    return f"{path} was made by a newer kvdisk (format 2, not 1)"


def no_lock(path: Path) -> str:
    leave_home(path, HYBRID, 1, last_use_s=2000)
    (path / "lock").unlink()
    return f"{path} is not a whole kvdisk store: it has no file named lock, as after a copy without it."


def inside_a_store(path: Path) -> str:
    Store.open(path.parent / "around")
    path.symlink_to(path.parent / "around" / "homes")
    return f"is not a kvdisk store, but a part of {path.parent / 'around'}."


def of_another_user(path: Path) -> str:
    Store.open(path)
    os.chown(path, 4321, 4321)
    return f"{path} belongs to user 4321; run this as that user."


CASES: list[Callable[[Path], str]] = [
    no_such_directory, other_files, newer, no_lock,
    inside_a_store, of_another_user,
]  # fmt: skip


def bytes_below(path: Path) -> dict[str, bytes]:
    return {str(item): item.read_bytes() for item in path.rglob("*") if item.is_file() and item.name != "lock.mdb"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_cannot_be_opened(path, case):
    if case is of_another_user and os.geteuid() != 0:
        return  # only root gives files away
    expected = case(path)
    before = bytes_below(path.parent)
    for command, done in run_each(path).items():
        assert expected in sentence(done), command
    assert bytes_below(path.parent) == before


def test_no_permission(path):
    home_id = leave_home(path, HYBRID, 1, last_use_s=2000)
    for closed in (path, path / "homes" / home_id):
        mode = closed.stat().st_mode & 0o777
        closed.chmod(0)
        said = run_each(path, obey_modes=True)
        closed.chmod(mode)
        for command, done in said.items():
            if command == "repair" and home_id in str(closed):  # it says so of that home, and goes on with the others
                assert done.returncode == 1 and "Permission denied" in done.stdout and not done.stderr, done
                continue
            assert (done.returncode, done.stdout) == (2, ""), (command, done)
            assert f"kvdisk: no permission to read {path}; run this as the user whose engine made it" in done.stderr
            assert str(closed) in done.stderr and done.stderr.count("\n") == 1


def test_a_home_of_another_format_is_said_and_the_others_are_served(path):
    bad = leave_home(path, HYBRID, 1, last_use_s=2000)
    leave_home(path, PLAIN, 1, last_use_s=3000)
    rewritten(path / "homes" / bad / "HOME", format_version=9)
    said = run_each(path)
    for command in ("inspect", "verify", "repair"):
        done = said[command]
        assert done.returncode == 1 and "HOME is of another format" in done.stdout.replace("\n", " "), done
        assert done.stderr == ""
    assert (said["prune"].returncode, os.listdir(path / "homes")) == (0, [])


def test_the_installed_command_itself(path):
    assert f"{path} does not exist." in sentence(run("verify", path))
    assert run("verify", path, "--no-such-option").returncode == 2
    for command in COMMANDS:
        assert "Exit codes" in run_here(command, "--help").stdout
        assert run_here(command).exit_code == 2
    done = run(_KVDISK_COMPLETE="complete_bash", COMP_WORDS="kvdisk verify --", COMP_CWORD="2")
    assert {"--sample", "--seed", "--home", "--json"} <= set(done.stdout.split())
