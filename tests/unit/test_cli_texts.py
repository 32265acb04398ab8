# SPDX-License-Identifier: Apache-2.0
"""What all commands share: help that an ordinary terminal shows whole, and JSON, also where nothing
comes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import make_docs
import pytest
from cli_stores import HYBRID, json_of, leave_home, run, run_here
from test_cli_top import Engines, figures

from kvdisk.cli import bench, check, top, verify
from kvdisk.cli.output import speed
from kvdisk.device.telemetry_file import write_telemetry

COMMANDS: dict[str, Any] = dict(make_docs.commands())
NEEDED = {
    "web": ["{missing}", "--token-file", "{missing}"],
    "check": ["{config}"],
    "size": ["--model", "{config}"],
    "replay": ["{config}"],
    "bench": ["{missing}"],
}
"""What a command takes instead of a store."""


def words(text: str) -> list[str]:
    return re.sub(r"\[/?\w+\]", "", text).split()


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What each command's help is at 80 columns, from one process: it starts for longer than it
    prints."""
    code = (
        "import json, sys; from typer.testing import CliRunner; from kvdisk.cli.main import app;"
        "said = lambda *words: CliRunner().invoke(app, [*words, '-h']).stdout;"
        "print(json.dumps({'': said(), **{each: said(each) for each in sys.argv[1:]}}))"
    )
    kept = {key: value for key, value in os.environ.items() if key not in {"FORCE_COLOR", "TERMINAL_WIDTH"}}
    done = subprocess.run(
        [sys.executable, "-c", code, *COMMANDS],
        capture_output=True,
        text=True,
        check=True,
        env=kept | {"COLUMNS": "80", "TERM": "dumb"},
    )
    shown: dict[str, str] = json.loads(done.stdout)
    return shown


def test_the_installed_command_says_the_same(helps):
    assert run("-h", COLUMNS="80", TERM="dumb").stdout.split() == helps[""].split()


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_is_whole_at_80_columns(name, helps):
    """No line is longer, no word is cut, and no paragraph is broken before its line is full."""
    shown = helps[name]
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in shown
    if not name:
        return
    command = COMMANDS[name]
    said = set(re.sub(r"[│╭╰╮╯─]", " ", shown).split())
    for param in command.params:
        missing = [word for word in words(getattr(param, "help", None) or "") if word not in said]
        assert not missing, (param.name, missing)
    assert [word for word in words(command.help) if word not in said] == []
    for above, below in pairwise(lines):
        if below[:2].strip() and above[:2].strip() and above.startswith(" ") and below.startswith(" "):
            room = 79 - len(above.rstrip())
            assert len(below.split()[0]) >= room, f"{above!r} has room for {below.split()[0]!r}"


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_refuses_is_said_in_json_too(name, tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{")
    places = {"config": str(config), "missing": str(tmp_path / "missing")}
    arguments = [word.format(**places) for word in NEEDED.get(name, ["{missing}"])]
    more = {"why": ["--tokens", str(config)], "prune": ["--to", "0"], "report": ["-o", str(tmp_path / "report")]}
    plain = run_here(name, *arguments, *more.get(name, []))
    done = run_here(name, *arguments, *more.get(name, []), "--json")
    assert plain.exit_code == done.exit_code == 2 and plain.stdout == ""
    assert done.stderr == plain.stderr
    assert f"kvdisk: {json.loads(done.stdout)['error']}\n" == done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_usage_is_said_in_json_too(name):
    done = run_here(name, "--json", "--no-such-option")
    assert done.exit_code == 2
    assert "--no-such-option" in json.loads(done.stdout)["error"]


def test_an_error_of_ours_is_said_in_json_too(path, monkeypatch):
    monkeypatch.setattr(verify, "verify_store", lambda *_, **__: 1 / 0)
    leave_home(path, HYBRID, 1, last_use_s=2000)
    done = run_here("verify", path, "--json")
    assert done.exit_code == 1 and isinstance(done.exception, ZeroDivisionError)
    assert json.loads(done.stdout) == {"error": "an error of kvdisk: ZeroDivisionError: division by zero"}


def not_whole(value: Any, name: str = "") -> list[str]:
    """Return what of JSON is a number of bytes, or counts something, and is no whole number."""
    if isinstance(value, dict):
        return [bad for key, each in value.items() for bad in not_whole(each, key)]
    if isinstance(value, list):
        return [bad for each in value for bad in not_whole(each, name)]
    counts = re.search(r"(_bytes|(?<!run)_blocks|_slots|_changes|^jobs|^store|^load|^demote|^promote|^count)$", name)
    return [name] if counts and isinstance(value, float) else []


def test_bytes_are_integers_in_json(path, tmp_path):
    leave_home(path, HYBRID, 2, last_use_s=2000)
    engines = Engines(path)
    home = engines.start()
    gauges = figures(0.0)["gauges"] | {"write_budget_bytes": 12345.6, "uncommitted_changes": 3}
    write_telemetry(home, figures(1_800_000_000.0, 7, gauges=gauges))
    try:
        for call in (["inspect", path, "--all"], ["top", path, "--interval", "0.2"], ["verify", path]):
            found = run_here(*call, "--json")
            assert not_whole(json.loads(found.stdout)) == [], call
        figures_shown = json_of("top", path, "--interval", "0.2")["engines"][0]
        assert figures_shown["waiting"]["write_budget_bytes"] == 12345
    finally:
        for held in engines.held:
            held.close(clean=True)
    for call in (["repair", path], ["prune", path, "--to", "0", "--dry-run"], ["clear", path, "--dry-run"]):
        assert not_whole(json.loads(run_here(*call, "--json").stdout)) == [], call


@pytest.mark.parametrize(
    ("bytes_per_s", "said"),
    [
        (None, "?"), (0.0, "-"), (999.0, "999 B/s"), (12_345.0, "12.3 kB/s"), (999_949.0, "1.0 MB/s"),
        (812_400_000.0, "812 MB/s"), (999_700_000.0, "1.0 GB/s"), (1.85e9, "1.9 GB/s"), (123e9, "123 GB/s"),
    ],
)  # fmt: skip
def test_a_drives_speed_is_said_alike_on_all_screens(bytes_per_s, said):
    assert speed(bytes_per_s) == said
    assert bench.speed is check.speed is top.speed is verify.speed is speed
    pages = [Path(module.__file__).read_text() for module in (bench, check, top, verify)]
    assert not [page for page in pages if re.search(r"[MG]i?B/s", page)], "no unit of their own"
