# SPDX-License-Identifier: Apache-2.0
"""``kvdisk report``: one page that says what ``inspect`` says, and asks nobody for anything."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from cli_stores import CAP, HYBRID, PLAIN, Owner, json_of, leave_home, refused, run_here
from mass_stores import Layer
from test_cli_top import figures

from kvdisk.cli.report.command import PREFIXES_IN_ALL
from kvdisk.cli.report.page import MARK, page
from kvdisk.cli.survey import survey_store
from kvdisk.device.store import Store
from kvdisk.device.telemetry_file import FIGURES_FILE, write_telemetry

HOSTILE = "</script></title><img src=x onerror=alert(1)><script>alert('\"&\x1b"


class Page(HTMLParser):
    """A page taken apart: the attributes of its elements, and all text.

    Fails where elements are not closed in turn, where it makes a browser ask anybody for anything,
    and where it is longer than a mail takes.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        assert text.startswith(MARK) and "default-src 'none'" in text and len(text.encode()) < 2_000_000
        assert not re.search(r"https?:|//\w|@import|url\(|<[^>]*\b(?:src|href|on\w+)=", text)
        assert text.count("<script") == 1 and "\x1b" not in text
        self.elements: list[dict[str, str]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append({name: value or "" for name, value in attributes})
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open[-1:] not in (["script"], ["style"]) else ""

    def having(self, name: str) -> list[dict[str, str]]:
        return [attributes for attributes in self.elements if name in attributes]

    def total(self, name: str) -> int:
        return sum(int(attributes[name]) for attributes in self.having(name))


def fill(path: Path) -> None:
    layer = Layer(path, PLAIN)
    layer.put_chain("abc", age_s=90)
    layer.put_chain("de", "c", first=3)
    layer.put_chain("fg", "c", first=5, age_s=7200)
    layer.put("x", None, 40)
    layer.write_uses({"a": 9, "b": 9, "c": 9, "d": 1, "f": 0})
    layer.leave()
    leave_home(path, HYBRID, 3, last_use_s=1000)


def test_the_page_says_what_inspect_says(path: Path, tmp_path: Path) -> None:
    fill(path)
    target = tmp_path / "report.html"
    done = run_here("report", path, "-o", target)
    assert (done.exit_code, done.stderr) == (0, "") and done.stdout.startswith(f"{target} (")
    found = Page(target.read_text())
    assert all(title in found.text for title in ("Namespace", "Engine stores", "Ages of blocks", "Reuse of blocks"))
    facts = json_of("inspect", path, "--prefixes", "100")
    totals = facts["totals"]
    assert (found.total("data-slots"), found.total("data-used")) == (totals["slots"], totals["blocks"])
    segments = [segment for home in facts["engine_stores"] for segment in home["segments"] if segment["free_slots"]]
    loose = sum(round(segment["fragmentation"] * segment["free_slots"]) for segment in segments)
    assert found.total("data-short") == loose
    trees = [int(each["data-bytes"]) for each in found.having("data-bytes") if each["class"] == "all"]
    assert trees == [each["used_bytes"] for each in facts["namespaces"]]
    drawn = {each["data-key"]: each for each in found.having("data-key")}
    for prefix in facts["namespaces"][0]["prefixes"]["tree"]:
        piece = drawn[prefix["key"]]
        assert (int(piece["data-bytes"]), int(piece["data-below"])) == (prefix["bytes"], prefix["below_bytes"])
    assert len(drawn) == 4 + 15, "also those that nobody shares"
    assert [each["class"] for each in drawn.values()][:4] == ["k4", "k1", "k0", "k0"]
    nodes = [each["style"] for each in found.having("style") if each.get("class") == "node"]
    assert nodes[:4] == [f"width:{share}%" for share in (87.5, 28.5714, 28.5714, 12.5)], "of what is around it"


def test_a_name_from_the_store_is_only_text(path: Path) -> None:
    leave_home(path, PLAIN._replace(description=PLAIN.description | {"model": HOSTILE}), 1, last_use_s=2000)
    assert "<img src=x onerror=alert(1)>" in Page(page(survey_store(path, shared_only=False))).text


def test_a_store_in_use_a_damaged_one_and_an_empty_one(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    Store.open(path)
    assert run_here("report", path, "-o", target).exit_code == 0
    assert "no engine has used it yet" in Page(target.read_text()).text
    owner = Owner(path)
    assert json_of("report", path, "-o", target)["path"] == str(target)
    owner.kill()
    assert "in use" in Page(target.read_text()).text
    bad = leave_home(path, HYBRID, 2, last_use_s=2000)
    os.truncate(path / "homes" / bad / "index" / "data.mdb", 2 * 4096)  # reading it kills the process
    done = run_here("report", path, "-o", target)
    assert done.exit_code == 1 and "1 problem; the report names them" in done.stderr
    found = Page(target.read_text())
    assert f"engine store {bad[:8]}: its index cannot be read" in found.text
    assert [each["class"] for each in found.having("data-slots")].count("cell unknown") == 2


def test_it_says_what_requests_found_as_far_as_engines_have_told(path: Path, tmp_path: Path) -> None:
    homes = [Store.open(path).acquire_home(PLAIN.fingerprint, PLAIN.description, CAP) for _ in range(3)]
    told, bad = homes[0].path, homes[1].path
    totals = {"lookup_tokens": 200, "hit_tokens": {"cpu": 50, "nvme": 100}, "saved_seconds": 61.0}
    totals["misses"] = {"refused": 1, "writing": 3}
    write_telemetry(told, figures(1_800_000_000.0, totals=totals, model=HOSTILE))
    (bad / FIGURES_FILE).write_text("{")
    for home in homes:
        home.close(clean=True)
    target = tmp_path / "r.html"
    assert run_here("report", path, "-o", target).exit_code == 0
    text = Page(target.read_text()).text
    assert "hits: CPU 25 %, NVMe 50 %; saved ~1 min 1 s of computing" in text
    assert "4 requests missed something: still being written 75 %, refused by admission 25 %" in text
    assert "until 2027-01-15 08:00:00 UTC" in text


def test_what_report_replaces(path: Path, tmp_path: Path) -> None:
    Store.open(path)
    mine = tmp_path / "mine.html"
    mine.write_text("<p>mine")
    (tmp_path / "directory.html").mkdir()
    for target, words in (
        ("mine.html", "exists, and is no report; --force replaces it"),
        ("directory.html", "is a directory"),
        ("no/r.html", "is not a directory"),
    ):
        assert words in refused("report", path, "-o", tmp_path / target)
    assert mine.read_text() == "<p>mine"
    assert run_here("report", path, "-o", mine, "--force").exit_code == 0
    assert run_here("report", path, "-o", mine).exit_code == 0, "a report may be replaced"


def test_the_page_of_a_large_store_is_bounded(path: Path) -> None:
    """100 engine stores of 1000 segments each, with problems, in 100 namespaces with as many
    prefixes as are surveyed."""
    fill(path)
    facts = survey_store(path, prefixes=100, shared_only=False)
    home, namespace = facts.engine_stores[0], facts.namespaces[0]
    roots = tuple(replace(namespace.prefixes.tree[0], tree=()) for _ in range(PREFIXES_IN_ALL // 100))
    segments = tuple(replace(home.segments[0], segment=number) for number in range(1000))
    homes = [replace(home, id=f"{number:032x}", segments=segments) for number in range(100)]
    tree = replace(namespace.prefixes, tree=roots)
    namespaces = [replace(namespace, fingerprint=f"{number:064x}", prefixes=tree) for number in range(100)]
    wrong = ("something is wrong",) * 300
    Page(page(replace(facts, engine_stores=tuple(homes), namespaces=tuple(namespaces), problems=wrong)))
