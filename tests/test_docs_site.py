# SPDX-License-Identifier: Apache-2.0
"""The documentation builds as a site without a warning, opens without a network, and shows what its
sources say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    # Not --quiet: mkdocs counts the warnings that it shows.
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as ``make docs`` does."""
    made = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT, made)
    assert done.returncode == 0 and "WARNING" not in done.stdout + done.stderr, done.stdout + done.stderr
    return made


def built(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def test_every_source_is_built_and_reached(site):
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    wanted = {path.with_suffix(".html").as_posix().replace("README.html", "index.html") for path in sources}
    assert {path.relative_to(site).as_posix() for path in built(site)} == wanted | {"404.html"}
    home = (site / "index.html").read_text()
    assert not [name for name in wanted if f'href="{name}"' not in home]


FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}


class Reader(HTMLParser):
    """What a browser would fetch by itself, and each paragraph that is no code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.paragraphs: list[str] = []
        self._depth = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if tag in FETCHED and named.get("rel") not in {"next", "prev", "canonical"}:
            self.fetched.append(named.get(FETCHED[tag]) or "")
        if tag == "p":
            self.paragraphs.append("")
        self._depth += tag == "p"

    def handle_endtag(self, tag):
        self._depth -= tag == "p" and self._depth > 0

    def handle_data(self, data):
        if self._depth:
            self.paragraphs[-1] += data


def test_the_site_asks_the_network_for_nothing(site):
    found = []
    for path in built(site):
        fetched = Reader(path.read_text()).fetched
        assert fetched, path
        found += [f"{path.name}: {url}" for url in fetched if re.match(r"(?:[a-z]+:)?//", url)]
        missing = [url for url in fetched if url and not (path.parent / url.partition("#")[0]).exists()]
        assert not missing or path.name == "404.html", missing
    sheets = [(path.name, path.read_text()) for path in site.rglob("*.css")]
    found += [
        f"{name}: {url}" for name, text in sheets for url in re.findall(r"(?:url\(|@import)\s*[\"']?https?:", text)
    ]
    assert sheets and not found
    assert (site / "search" / "search_index.js").exists(), "the search works from a file system"
    assert "unpkg" not in (site / "index.html").read_text()


def test_lists_and_tables_are_not_taken_for_prose(site):
    """GitHub begins a list without an empty line before it, and others do not: what is meant as one
    must be one."""
    found = []
    for path in built(site):
        for paragraph in Reader(path.read_text()).paragraphs:
            found += [f"{path.name}: {line}" for line in re.findall(r"^(?:[-*|]|1\.) .*", paragraph, re.MULTILINE)]
    assert not found
