# SPDX-License-Identifier: Apache-2.0
"""Figures of a measurement, as JSON: what a tool found, on what code and machine.

Every tool that measures takes ``--json FILE`` (``add_json_option``), fills a ``Record``, and writes
it at its end. ``measure_all.py`` keeps the records of all tools in ``FILE``, and
``figure_pages.py`` fills pages with them. A record has tables, a table has rows, a row has cells,
each a ``Figure``: ``record["tables"][table][row][column]``.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "measurements" / "figures.json"
SOURCES = {".py", ".c", ".h"}
CODE = ("kvdisk", "tools")


class Figure(NamedTuple):
    """One figure: the median of what was measured, with the least and the most. ``unit``: as a
    page shows it; none for ratios."""

    median: float
    least: float
    most: float
    unit: str = ""

    @classmethod
    def of(cls, samples: Sequence[float], unit: str = "") -> Figure:
        """Return the figure of some samples."""
        middle, least, most = statistics.median(samples), min(samples), max(samples)
        return cls(_rounded(middle), _rounded(least), _rounded(most), unit)


def _rounded(value: float) -> float:
    """Leave integers alone, and keep five figures of others: more is noise, and fills the file."""
    return value if isinstance(value, int) else float(f"{value:.5g}")


class Record:
    """What one run of a tool finds. ``place``: on the drive that it uses, or any directory."""

    def __init__(self, place: Path = ROOT) -> None:
        from machine import Machine

        self.tables: dict[str, dict[str, dict[str, Figure]]] = {}
        self._machine = Machine.here(place).without_load  # the place may be gone at the end
        self._load = os.getloadavg()[0]
        self._began_s = time.monotonic()

    def add(self, table: str, row: str, column: str, samples: Sequence[float], unit: str = "") -> None:
        """Note the samples of a cell."""
        self.tables.setdefault(table, {}).setdefault(row, {})[column] = Figure.of(samples, unit)

    def as_json(self) -> dict[str, Any]:
        """Return it as ``FILE`` has it, without what only ``measure_all`` knows."""
        commit, changed = code()
        return {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": commit,
            "changed": changed,
            "machine": self._machine,
            "load": [round(load, 1) for load in (self._load, os.getloadavg()[0])],
            "seconds": round(time.monotonic() - self._began_s),
            "tables": {
                table: {
                    row: {column: figure._asdict() for column, figure in cells.items()} for row, cells in rows.items()
                }
                for table, rows in self.tables.items()
            },
        }

    def write(self, path: Path | None) -> None:
        """Write it to a file, if one is wanted. Raises OSError."""
        if path is not None:
            path.write_text(dumped(self.as_json()))


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` to a tool's options."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures as JSON")


def dumped(found: Any) -> str:
    """Return JSON with a line for each cell, so that a diff shows which figure is another."""
    return _lines(found, "") + "\n"


def _lines(found: Any, indent: str) -> str:
    if not isinstance(found, dict) or found.keys() == set(Figure._fields):
        return json.dumps(found, ensure_ascii=False)
    inner = indent + " "
    lines = (f"\n{inner}{json.dumps(key, ensure_ascii=False)}: {_lines(value, inner)}" for key, value in found.items())
    return "{" + ",".join(lines) + f"\n{indent}}}"


def code() -> tuple[str | None, bool]:
    """Return the commit of this checkout, and whether its code is another; None: no git is here.
    Pages and figures may be others: a measurement before may have written them."""
    try:
        commit = _git("rev-parse", "HEAD").strip()
        return commit, bool(_git("status", "--porcelain", "--", *CODE))
    except (OSError, subprocess.CalledProcessError):
        return None, False


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def sources_of(path: str) -> list[Path]:
    """Return the files of code at a path of this checkout, which is a file or a folder."""
    whole = ROOT / path
    if whole.is_file():
        return [whole]
    return sorted(file for file in whole.rglob("*") if file.suffix in SOURCES and "__pycache__" not in file.parts)


def digest_of(path: str) -> str:
    """Return a digest of the code at a path: names and bytes. Raises FileNotFoundError where there
    is none."""
    files = sources_of(path)
    if not files:
        raise FileNotFoundError(f"{path} has no code")
    found = hashlib.sha256()
    for file in files:
        content = hashlib.sha256(file.read_bytes()).digest()
        found.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + content)
    return found.hexdigest()[:16]


def changed_since(digests: dict[str, str]) -> list[str]:
    """Return the paths whose code is not what it was when their digests were taken."""
    return [path for path, digest in digests.items() if not sources_of(path) or digest_of(path) != digest]


def read(path: Path = FILE) -> dict[str, dict[str, Any]]:
    """Return all records, by the name of the measurement."""
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def figure(records: dict[str, dict[str, Any]], name: Sequence[str]) -> Figure:
    """Return a figure by measurement, table, row and column. Raises KeyError."""
    measurement, table, row, column = name
    return Figure(**records[measurement]["tables"][table][row][column])


def columns_of(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return the columns that any row of a table has, in their order."""
    return list(dict.fromkeys(column for cells in rows for column in cells))
