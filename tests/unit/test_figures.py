# SPDX-License-Identifier: Apache-2.0
"""Figures of measurements, from the tool to the page, and what a page says of their age."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import figure_pages
import figures
import measure_all
import pytest
from figures import Figure, Record

CELL = {"median": 3.25, "least": 3.0, "most": 4, "unit": "us"}
RECORD: dict[str, Any] = {
    "command": "python tools/x.py",
    "small": False,
    "others": 0.1,
    "code": {},
    "date": "2026-01-02",
    "commit": "0123456789abcdef",
    "changed": False,
    "machine": "2 cores",
    "load": [0.5, 1.5],
    "seconds": 7,
    "tables": {
        "times": {"first row": {"ours": CELL, "theirs": CELL | {"median": 1234.4}}, "second row": {"theirs": CELL}}
    },
}


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A checkout with two files of code."""
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    for name in ("part/one.py", "part/inner/two.c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_a_record_has_each_cell_and_what_it_was_measured_on(tmp_path):
    record = Record(tmp_path)
    record.add("times", "row", "ours", [3.0, 1.0, 2.123456], "us")
    record.add("times", "row", "count", [7])
    record.write(tmp_path / "figures.json")
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["tables"] == {
        "times": {
            "row": {
                "ours": {"median": 2.1235, "least": 1.0, "most": 3.0, "unit": "us"},
                "count": {"median": 7, "least": 7, "most": 7, "unit": ""},
            }
        }
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"]) and "cores" in found["machine"] and len(found["load"]) == 2
    record.write(None)  # nobody wants it


def test_a_commit_is_as_it_was_where_only_pages_are_others(checkout, monkeypatch):
    def git(*arguments: str) -> None:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@x", *arguments]
        subprocess.run(command, cwd=checkout, check=True, capture_output=True)

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(checkout.parent))
    assert figures.code() == (None, False)
    (checkout / "tools").mkdir()
    (checkout / "tools/one.py").write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    (checkout / "figures.json").write_text("{}")
    commit, changed = figures.code()
    assert commit is not None and len(commit) == 40 and not changed
    (checkout / "tools/one.py").write_text("2")
    assert figures.code() == (commit, True)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "part/one.py").write_text("other"),
        lambda root: (root / "part/three.py").write_text(""),
        lambda root: (root / "part/inner/two.c").rename(root / "part/inner/four.c"),
        lambda root: (root / "part/inner/two.c").unlink(),
    ],
    ids=["changed", "added", "renamed", "removed"],
)
def test_code_that_has_changed_is_named(checkout, change):
    digests = {path: figures.digest_of(path) for path in ("part", "part/inner/two.c", "part/one.py")}
    assert figures.changed_since(digests) == []
    change(checkout)
    assert "part" in figures.changed_since(digests)
    assert len(figures.changed_since(digests)) < 3


def test_what_is_no_code_changes_nothing(checkout):
    digests = {"part": figures.digest_of("part")}
    (checkout / "part" / "__pycache__").mkdir()
    (checkout / "part" / "__pycache__" / "one.py").write_text("")
    (checkout / "part" / "page.md").write_text("")
    assert figures.changed_since(digests) == []
    with pytest.raises(FileNotFoundError):
        figures.digest_of("nowhere")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1234567, "1,234,567"),
        (1234.4, "1,234"),
        (99.96, "100.0"),
        (12.345, "12.3"),
        (2.5, "2.50"),
        (0.987, "0.987"),
        (0.35, "0.35"),
        (0.016, "0.016"),
        (-6.0, "-6.00"),
        (0.0, "0.00"),
    ],
)
def test_numbers_are_as_exact_as_they_are_known(value, said):
    assert figure_pages.number(value) == said


def test_a_page_is_filled_and_filling_it_again_changes_nothing():
    page = (
        "It takes <!-- m // times // first row // theirs -->old<!-- end -->, and\n\n"
        "<!-- spread: m // times -->\nold\n<!-- end -->\n\n<!-- table: m // times // theirs --><!-- end -->\n\n"
        "<!-- age: m --><!-- end -->\n\n<!-- table: other // times --><!-- end -->\n"
    )
    once = figure_pages.filled(page, {"m": RECORD})
    assert "It takes <!-- m // times // first row // theirs -->1,234 us<!-- end -->, and" in once
    assert "| us | ours | theirs |\n|" in once and "| second row | | 3.25 (3.00 to 4) |" in once
    assert "| us | theirs |\n" in once and "| second row | 3.25 |" in once
    assert "Measured on 2026-01-02, commit 01234567.\n" in once and "Not measured yet." in once and "old" not in once
    assert figure_pages.filled(once, {"m": RECORD}) == once


def test_a_mark_without_a_figure_is_an_error():
    with pytest.raises(KeyError):
        figure_pages.filled("<!-- m // times // first row // nobody --><!-- end -->", {"m": RECORD})


def test_a_page_says_how_old_its_figures_are(checkout):
    record = RECORD | {"code": {"part": figures.digest_of("part")}}
    assert "changed" not in figure_pages.age(record) and "the same code" in figure_pages.measurements({"m": record})
    (checkout / "part/one.py").write_text("other")
    assert figure_pages.age(record).endswith("**The code has changed since, in `part`.**")
    assert "in `part`" in figure_pages.measurements({"m": record})
    said = figure_pages.measured(record)
    assert said.startswith("`python tools/x.py` on 2 cores; load 0.5 before and 1.5 after, others used 0.1 cores")
    old = record | {"code": None, "commit": None, "date": None}
    assert "commit not recorded. **The code has changed since.**" in figure_pages.age(old)
    assert "measure nothing" in figure_pages.age(record | {"small": True})
    assert "commit 01234567 with changes" in figure_pages.age(record | {"changed": True})


def test_every_mark_of_the_pages_has_its_end():
    for path in figure_pages.PAGES:
        text = path.read_text()
        assert len(figure_pages.MARK.findall(text)) == text.count("<!-- end -->") == text.count("<!-- ") / 2, path.name


# --- measure_all ---


def options_of(tmp_path: Path, **others: Any) -> argparse.Namespace:
    values = {
        "dir": tmp_path,
        "trace": None,
        "most_busy": 1e9,
        "small": True,
        "out": tmp_path / "all.json",
        "logs": None,
    }
    return argparse.Namespace(**values | others)


def measurement(name: str, tool: str) -> measure_all.Measurement:
    return measure_all.Measurement(name, tool, "", "", 1, ("tools/figures.py",))


@pytest.fixture
def tools(tmp_path, monkeypatch) -> Path:
    """A checkout with a tool that measures, and one that fails."""
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "figures.py").write_text(Path(figures.__file__).read_text())
    good = 'import json, sys\nfrom pathlib import Path\nPath(sys.argv[2]).write_text(json.dumps({"tables": {}}))\n'
    (folder / "good.py").write_text(good)
    (folder / "bad.py").write_text(good + 'sys.exit("it broke")\n')
    return folder


def test_what_fails_keeps_its_old_figures_and_the_others_go_on(tools, tmp_path, capsys):
    (tmp_path / "all.json").write_text(figures.dumped({"bad": RECORD, "gone": RECORD}))
    wanted = [measurement("bad", "bad"), measurement("good", "good")]
    assert measure_all.run_all(wanted, options_of(tmp_path)) == ["bad"]
    found = figures.read(tmp_path / "all.json")
    assert found["bad"] == found["gone"] == RECORD and found["good"]["command"] == "python tools/good.py"
    assert found["good"]["small"] and figures.changed_since(found["good"]["code"]) == []
    assert "bad: no new figures, the old ones stay. exit code 1: it broke" in capsys.readouterr().out


def test_a_busy_machine_measures_nothing(tools, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure_all, "busy_cores", lambda _: 1.5)
    assert measure_all.run_all([measurement("good", "good")], options_of(tmp_path, most_busy=0.3)) == ["good"]
    assert not (tmp_path / "all.json").exists()
    assert "1.5 cores are in use: more than 0.3 (--most-busy)" in capsys.readouterr().out


def test_busy_cores_are_those_of_this_machine():
    assert 0 <= measure_all.busy_cores(0.05) < 1000


def test_what_needs_a_trace_says_so(tmp_path, capsys):
    (hits,) = (one for one in measure_all.MEASUREMENTS if one.name == "hits")
    assert measure_all.run_all([hits], options_of(tmp_path)) == ["hits"]
    assert "it needs a trace: --trace FILE" in capsys.readouterr().out


def test_a_small_run_never_replaces_figures(monkeypatch):
    monkeypatch.setattr("sys.argv", ["measure_all", "--small"])
    with pytest.raises(SystemExit):
        measure_all.main()


def test_places_are_put_into_commands(tmp_path):
    places = measure_all.Places(tmp_path, Path("/a/trace"))
    assert places.arguments("TRACE --dir DIR --store DIR/demo --nvme 1%,5%") == [
        *("/a/trace", "--dir", str(tmp_path), "--store", f"{tmp_path}/demo", "--nvme", "1%,5%")
    ]


def test_figures_are_named_by_measurements_that_there_are():
    names = [one.name for one in measure_all.MEASUREMENTS]
    assert len(set(names)) == len(names) and set(figures.read()) <= set(names)
    for one in measure_all.MEASUREMENTS:
        assert all(figures.sources_of(path) for path in one.code), one.name
    assert figures.figure({"m": RECORD}, ("m", "times", "first row", "ours")) == Figure(3.25, 3.0, 4, "us")
