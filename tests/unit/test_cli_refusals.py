# SPDX-License-Identifier: Apache-2.0
"""Every command that takes a store: what it says, in one sentence, where it cannot do anything, and
how it ends. What else is no store, and in which words: ``test_control``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_stores import HYBRID, PLAIN, leave_home, refused, run, run_here, sentence

from kvdisk import __version__
from kvdisk.device.store import Store

COMMANDS: dict[str, list[str]] = {
    "inspect": [], "verify": [], "repair": [], "prune": ["--to", "0", "--yes"], "clear": ["--yes"],
}  # fmt: skip


def rewritten(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def no_such_directory(path: Path) -> str:
    return f"{path} does not exist."


def newer(path: Path) -> str:
    Store.open(path)
    rewritten(path / "STORE", format_version=2)
    return f"{path} was made by a newer kvdisk (format 2, not 1)"


def no_lock(path: Path) -> str:
    Store.open(path)
    (path / "lock").unlink()
    return f"{path} is not a whole kvdisk store: it has no file named lock, as after a copy without it."


def damaged(path: Path) -> str:
    Store.open(path)
    (path / "STORE").write_text("{")
    return "STORE does not decode; repair cannot help: delete the directory, which is a cache."


def inside_a_store(path: Path) -> str:
    Store.open(path.parent / "around")
    path.symlink_to(path.parent / "around" / "homes")
    return f"is not a kvdisk store, but a part of {path.parent / 'around'}."


@pytest.mark.parametrize(
    "case", [no_such_directory, newer, no_lock, damaged, inside_a_store], ids=lambda case: case.__name__
)
def test_what_cannot_be_opened(path: Path, case: Callable[[Path], str]) -> None:
    expected = case(path)
    files = sorted(path.parent.rglob("*"))
    for command, options in COMMANDS.items():
        assert expected in refused(command, path, *options), command
    assert sorted(path.parent.rglob("*")) == files


@pytest.mark.parametrize("command", ["inspect", "clear"])
def test_no_permission(path, command):
    home_id = leave_home(path, HYBRID, 1, last_use_s=2000)
    for closed in (path, path / "homes" / home_id):
        closed.chmod(0)
        done = run(command, path, *COMMANDS[command], obey_modes=True)
        closed.chmod(0o700)
        assert (done.returncode, done.stdout) == (2, "")
        said = sentence(done.stderr)
        assert f"no permission to read {closed}" in said and "run this as the user whose engine made it" in said


def test_paths_in_a_directory_that_may_not_be_looked_into(path, tmp_path):
    leave_home(path, PLAIN, 1, last_use_s=2000)
    closed, config, prompt = tmp_path / "closed", tmp_path / "kvdisk.json", tmp_path / "prompt.txt"
    closed.mkdir(0)
    prompt.write_text("a prompt")
    inner = closed / "of another"
    for call in (
        ("inspect", inner),
        ("bench", inner),
        ("size", "--model", inner),
        ("report", path, "-o", inner),
        ("why", path, "--prompt", prompt, "--tokenizer", inner),
        ("check", {"store_dirs": str(inner), "nvme_bytes": "1GiB"}),
        ("check", {"store_dirs": str(inner / "kv"), "nvme_bytes": "1GiB"}),
        ("check", {"trace_file": str(inner)}),
    ):
        if isinstance(call[1], dict):
            config.write_text(json.dumps(call[1]))
        done = run(*(config if isinstance(word, dict) else word for word in call), obey_modes=True)
        assert (done.returncode, done.stdout) == (2, ""), call
        assert re.search("no permission|this user can write", sentence(done.stderr)) and str(closed) in done.stderr


def test_a_home_of_another_format_is_said_and_the_others_are_served(path):
    bad = leave_home(path, HYBRID, 1, last_use_s=2000)
    leave_home(path, PLAIN, 1, last_use_s=3000)
    for name in ("HOME", "HOME.tmp"):
        rewritten(path / "homes" / bad / name, format_version=9)
    for command in ("inspect", "verify", "repair"):
        done = run_here(command, path)
        assert done.exit_code == 1 and "HOME is of another format" in done.stdout.replace("\n", " "), done
    assert (run_here("prune", path, "--to", "0", "--yes").exit_code, os.listdir(path / "homes")) == (0, [])


def test_what_is_said_of_a_cleared_store(path):
    leave_home(path, HYBRID, 1, last_use_s=2000)
    assert "the store is empty." in run_here("clear", path, "--yes").stdout
    for command, words in (
        ("inspect", "empty: cleared, or no engine has used it yet"),
        ("verify", "the store is empty: there is nothing to check"),
        ("repair", "is empty: there is nothing to repair"),
        ("clear", "There is nothing to delete"),
    ):
        done = run_here(command, path)
        assert done.exit_code == 0 and words in done.stdout, command


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_output_without_room_is_said(path, command):
    leave_home(path, HYBRID, 1, last_use_s=2000)
    for options in ([], ["--json"]):
        done = run(command, path, *options, stdout="/dev/full")
        assert done.returncode == 2
        assert sentence(done.stderr) == "kvdisk: standard output cannot be written (No space left on device).\n"


@pytest.mark.parametrize(("options", "code", "left"), [([], 2, 1), (["--json"], 1, 0)])
def test_what_was_deleted_is_not_said_to_be_there_for_want_of_room_for_the_report(path, options, code, left):
    """The plan is shown before anything goes; there is none before JSON."""
    leave_home(path, HYBRID, 1, last_use_s=2000)
    done = run("clear", path, "--yes", *options, stdout="/dev/full")
    assert "cannot be written" in sentence(done.stderr)
    assert (done.returncode, len(os.listdir(path / "homes"))) == (code, left)


@pytest.mark.parametrize("typed", ["--help", "--version"])
def test_no_room_for_what_is_printed_before_any_command(typed):
    done = run(typed, stdout="/dev/full")
    assert done.returncode == 2 and "cannot be written" in sentence(done.stderr)


def test_the_installed_command_itself():
    assert run("--version").stdout == f"kvdisk {__version__}\n"
    for command in COMMANDS:
        assert run_here(command, "somewhere", "--no-such-option").exit_code == run_here(command).exit_code == 2
        assert "Exit codes" in run_here(command, "--help").stdout
    done = run(_KVDISK_COMPLETE="complete_bash", COMP_WORDS="kvdisk verify --", COMP_CWORD="2")
    assert {"--sample", "--seed", "--all", "--json"} <= set(done.stdout.split())
