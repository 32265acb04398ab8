# SPDX-License-Identifier: Apache-2.0
"""What people see of the ``kvdisk`` command: tables, help, wording; and that it needs no engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_stores import CAP, HYBRID, PLAIN, Owner, leave_home, run

from kvdisk import __version__
from kvdisk.cli.inspect import SEGMENTS_SHOWN
from kvdisk.cli.output import ago, bar, fine_bar, number, plural, printable, share, size

DAY_S = 86400


def lines_with(shown: str, *words: str) -> list[list[str]]:
    """The lines that have all these words, each cut at spaces."""
    return [line.split() for line in shown.splitlines() if set(words) <= set(line.split())]


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_the_tables_fit_and_have_the_facts(path: Path, columns: int) -> None:
    now_s = int(time.time())
    hybrid = leave_home(path, HYBRID, 4, last_use_s=now_s - 3 * DAY_S - 60, clean=False, used=8)
    owner = Owner(path)
    done = run("inspect", path, COLUMNS=str(columns))
    owner.kill()
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= columns
    assert "\x1b" not in done.stdout, "no colours where nobody sees them"
    (in_use,) = lines_with(done.stdout, owner.home_id[:8], "alive")
    assert in_use[1:6] == ["3f" * 4, "alive", "in", "use", "5"]
    (orphan,) = lines_with(done.stdout, hybrid[:8], "9b" * 4)
    assert (orphan[2:5], orphan[-3:]) == (["orphan", "no", "32"], ["3", "d", "ago"])
    assert f"{CAP >> 20}.0 MiB" in " ".join(orphan)
    (one,) = lines_with(done.stdout, "9b" * 4, "fp8")
    assert one[2:10] == ["fp8", "1", "16/32", "0", "+1", "own", "1", "32"]
    (first,) = lines_with(done.stdout, hybrid[:8], "x")
    assert first[1:] == [
        "0",
        "0",
        "8.0",
        "KiB",
        "8",
        "8",
        "████████",
        "100",
        "%",
        "-",
        *(["1.0"] if columns >= 100 else []),
        "1",
        "x",
        "68.0",
        "KiB",
    ]
    assert "2 homes (1 alive, 1 orphan) in 2 namespaces" in done.stdout


def test_many_segments_are_cut_unless_asked_for(path: Path) -> None:
    leave_home(path, HYBRID, SEGMENTS_SHOWN + 3, last_use_s=2000, used=4)
    shown = run("inspect", path).stdout
    (rest,) = lines_with(shown, "more")
    assert rest[:4] == ["3", "more", "24", "12"]
    assert not lines_with(shown, str(SEGMENTS_SHOWN), "x")
    everything = run("inspect", path, "--all").stdout
    assert lines_with(everything, str(SEGMENTS_SHOWN + 2), "x") and not lines_with(everything, "more")


def test_colours_where_a_terminal_sees_them_and_no_letters_lost_elsewhere(path: Path) -> None:
    leave_home(path, PLAIN, 1, last_use_s=2000)
    assert "\x1b[" in run("inspect", path, FORCE_COLOR="1", TERM="xterm").stdout
    plain = run("inspect", path, PYTHONIOENCODING="ascii")
    assert plain.returncode == 0 and "some/model-7B" in plain.stdout


def test_a_name_from_a_file_steers_no_terminal(path: Path) -> None:
    hostile = PLAIN._replace(
        description=PLAIN.description | {"model": "\x1b[31mred\x07[bold]b[/]", "tensor_parallel": []}
    )
    leave_home(path, hostile, 1, last_use_s=2000)
    shown = run("inspect", path, COLUMNS="120").stdout
    assert "\x1b" not in shown and "\x07" not in shown
    assert "[31mred\N{REPLACEMENT CHARACTER}[bold]b[/]" in shown


def test_version_help_and_completion() -> None:
    assert run("--version").stdout == f"kvdisk {__version__}\n"
    alone, asked = run(), run("--help")
    assert alone.returncode == asked.returncode == 0
    assert alone.stdout.split() == asked.stdout.split()
    assert "inspect" in alone.stdout
    explained = " ".join(run("inspect", "--help").stdout.split())
    for words in ("0 all is fine", "1 something in the store is wrong", "2 no report: not a store"):
        assert words in explained
    completion = run(_KVDISK_COMPLETE="source_bash")
    assert completion.returncode == 0 and "_kvdisk_completion" in completion.stdout


def test_neither_vllm_nor_torch_is_needed(path: Path, tmp_path: Path) -> None:
    leave_home(path, PLAIN, 1, last_use_s=2000)
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in ("torch", "vllm", "pyarrow", "matplotlib"):
        (absent / f"{name}.py").write_text("raise ImportError('this must not be loaded')")
    first = os.pathsep.join(filter(None, [str(absent), os.environ.get("PYTHONPATH")]))
    script = (
        "import sys\nfrom kvdisk.cli.main import app\n"
        f"try:\n    app(['inspect', {str(path)!r}])\nexcept SystemExit as end:\n    print('code', end.code)\n"
        "print('loaded', sorted({'torch', 'vllm', 'pyarrow'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": first},
    )
    assert done.stdout.splitlines()[-2:] == ["code 0", "loaded []"]
    assert "some/model-7B" in done.stdout
    assert run("--version", PYTHONPATH=first).returncode == 0


# -- wording -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count_bytes", "text"),
    [
        (None, "?"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1_048_575, "1.0 MiB"),
        (1_572_864, "1.5 MiB"),
        (500 << 30, "500.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (2 << 50, "2.0 PiB"),
    ],
)
def test_sizes(count_bytes: int | None, text: str) -> None:
    assert size(count_bytes) == text


@pytest.mark.parametrize(
    ("age_s", "text"),
    [
        (-30, "just now"),
        (4, "just now"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (3599, "59 min ago"),
        (7200, "2 h ago"),
        (3 * DAY_S, "3 d ago"),
    ],
)
def test_ages(age_s: int, text: str) -> None:
    assert ago(1_800_000_000 - age_s, 1_800_000_000) == text


def test_what_is_long_ago_or_ahead_is_a_date() -> None:
    now_s = 1_800_000_000
    for then_s in (now_s - 400 * DAY_S, now_s + 2 * DAY_S):
        assert ago(then_s, now_s) == time.strftime("%Y-%m-%d", time.localtime(then_s))


def test_shares_bars_and_counts() -> None:
    assert [share(fraction) for fraction in (None, 0, 0.001, 0.5, 0.999, 1)] == [
        "?",
        "0 %",
        "<1 %",
        "50 %",
        "99 %",
        "100 %",
    ]
    assert [bar(fraction, 4) for fraction in (0, 0.5, 1, 1.7)] == ["░░░░", "██░░", "████", "████"]
    assert [fine_bar(fraction, 2) for fraction in (0, 0.001, 0.5, 0.6, 1)] == ["", "▏", "█", "█▎", "██"]
    assert (number(12345), number(None), plural(1, "home"), plural(2, "home")) == ("12,345", "?", "1 home", "2 homes")
    assert printable("a\x1bb\n") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
