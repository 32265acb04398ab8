# SPDX-License-Identifier: Apache-2.0
"""What people see of the ``kvdisk`` command: tables, help, wording; and that it needs no engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from cli_stores import CAP, HYBRID, PLAIN, Owner, leave_home, run

from kvdisk import __version__

DAY_S = 86400


def lines_with(shown: str, *words: str) -> list[list[str]]:
    """The lines that have all these words, each cut at spaces."""
    return [line.split() for line in shown.splitlines() if set(words) <= set(line.split())]


def test_the_tables_fit_and_have_the_facts(path: Path, owner: Owner) -> None:
    crashed = leave_home(path, HYBRID, 19, last_use_s=int(time.time()) - 3 * DAY_S - 60, clean=False, used=8)
    for columns in (80, 100):
        done = run("inspect", path, COLUMNS=str(columns))
        assert (done.returncode, done.stderr) == (0, "")
        assert max(map(len, done.stdout.splitlines())) <= columns
        assert "\x1b" not in done.stdout, "no colours where nobody sees them"
        assert "2 (1 in use, 1 of stopped engines) in 2 namespaces" in done.stdout
        (in_use,) = lines_with(done.stdout, owner.home_id[:8], "alive")
        assert in_use[1:4] == ["3f" * 4, "alive", "5"]
        (stopped,) = lines_with(done.stdout, crashed[:8], "9b" * 4)
        assert (stopped[2:4], stopped[-3:]) == (["crashed", "152"], ["3", "d", "ago"])
        assert f"{CAP >> 20}.0 MiB" in " ".join(stopped)
        (one,) = lines_with(done.stdout, "9b" * 4, "fp8")
        assert one[2:10] == ["fp8", "1", "16/32", "0", "+1", "own", "1", "152"]
        (first,) = lines_with(done.stdout, crashed[:8], "x")
        wide = ["-", "1.0"] if columns >= 100 else []
        assert " ".join(first[1:]) == " ".join(["0 0 8.0 KiB 8 8 ████████ 100 %", *wide, "1 x 68.0 KiB"])
        (rest,) = lines_with(done.stdout, "more")
        assert rest[:4] == ["3", "more", "24", "24"]
    assert not lines_with(run("inspect", path, "--all").stdout, "more")


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
    assert run("--version", PYTHONPATH=first).stdout == f"kvdisk {__version__}\n"
