# SPDX-License-Identifier: Apache-2.0
"""Fill pages with the figures of docs/measurements/figures.json, between marks that no reader sees.

    <!-- first-token // passes // of cold // warm from CPU -->0.016<!-- end -->
    <!-- table: scheduler // us -->...<!-- end -->
    <!-- spread: calls // 1,048,576 tokens, 1 group -->...<!-- end -->
    <!-- measured: drive -->...<!-- end -->
    <!-- age: drive -->...<!-- end -->
    <!-- measurements -->...<!-- end -->

The first is one figure, by measurement, table, row and column. It never begins a line: Markdown
would take that line for HTML. A table has all rows of one, as
medians, or as medians with the least and the most (``spread``); columns may be named behind it,
with semicolons. ``measured`` says of what commit, day and machine the figures are, and whether the
code has changed since, ``age`` the same without the machine, and ``measurements`` of all
measurements. ``make_docs.py`` writes the pages.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import figures
from figures import ROOT, Figure

DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    DOCS / "BENCHMARKS.md",
    DOCS / "BESIDE.md",
    DOCS / "REPLAY.md",
    *sorted((DOCS / "measurements").glob("*.md")),
)
MARK = re.compile(
    r"(<!-- (?:(table|spread|measured|age|measurements)(?:: )?)?([^<>]*?) ?-->)(.*?)(<!-- end -->)", re.DOTALL
)
SEPARATOR = " // "
WIDTH = 100
NOT_YET = "Not measured yet."

Records = dict[str, dict[str, Any]]


def filled(text: str, records: Records) -> str:
    """Return a page with everything between its marks anew. Raises KeyError where a mark names what
    is not there, in a measurement that is."""

    def fill(found: re.Match[str]) -> str:
        begin, kind, name, _, end = found.groups()
        parts = name.split(SEPARATOR)
        if kind is None:
            return f"{begin}{shown(figures.figure(records, parts))}{end}"
        makers = {
            "table": lambda: table(records, parts, spread=False),
            "spread": lambda: table(records, parts, spread=True),
            "measured": lambda: measured(records[name]),
            "age": lambda: age(records[name]),
            "measurements": lambda: measurements(records),
        }
        missing = parts[0] not in records and kind != "measurements"
        return f"{begin}\n\n{NOT_YET if missing else makers[kind]()}\n\n{end}"

    return MARK.sub(fill, text)


def shown(figure: Figure, *, unit: bool = True, spread: bool = False) -> str:
    """Return a figure in words."""
    said = number(figure.median)
    if spread and figure.least != figure.most:
        said += f" ({number(figure.least)} to {number(figure.most)})"
    return f"{said} {figure.unit}".rstrip() if unit else said


def number(value: float) -> str:
    """Return a number with three figures, or two where the third is 0; integers whole."""
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    said = f"{value:,.{digits}f}"
    return said[:-1] if digits == 3 and said.endswith("0") else said


def table(records: Records, name: list[str], *, spread: bool) -> str:
    """Return a table of a measurement as Markdown; where all figures have one unit its head says
    it."""
    measurement, title, *chosen = name
    rows = records[measurement]["tables"][title]
    columns = chosen[0].split("; ") if chosen else figures.columns_of(rows.values())
    cells = {row: {column: Figure(**found) for column, found in all_of.items()} for row, all_of in rows.items()}
    units = {cell.unit for row in cells.values() for cell in row.values()}
    common = units.pop() if len(units) == 1 else ""
    lines = [[common, *columns], ["---"] * (1 + len(columns))]
    for row, known in cells.items():
        found = [known.get(column) for column in columns]
        lines.append([row, *(shown(one, unit=not common, spread=spread) if one else "" for one in found)])
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines)


def measured(record: dict[str, Any]) -> str:
    """Return of what the figures of a record are, in a paragraph."""
    load = record["load"]
    loads = f"load {load[0]:g} before and {load[1]:g} after" if load else "load not recorded"
    others = record.get("others")
    busy = "" if others is None else f", others used {others:g} cores meanwhile"
    said = f"`{record['command']}` on {record['machine']}; {loads}{busy}. {age(record)}"
    return textwrap.fill(said, WIDTH, break_long_words=False, break_on_hyphens=False)


def age(record: dict[str, Any]) -> str:
    """Return how old the figures of a record are, in sentences."""
    said = [f"Measured {when(record)}."]
    if record["small"]:
        said.append("**A trial at a small size: these figures measure nothing.**")
    if changed := changed_in(record):
        said.append(f"**{changed[0].upper()}{changed[1:]}.**")
    return " ".join(said)


def when(record: dict[str, Any]) -> str:
    """Return the day and the commit that were measured, in words."""
    day = f"on {record['date']}" if record["date"] else "on a day that is not recorded"
    if record["commit"] is None:
        return f"{day}, commit not recorded"
    return f"{day}, commit {record['commit'][:8]}{' with changes' if record['changed'] else ''}"


def changed_in(record: dict[str, Any]) -> str:
    """Return in words what of the code is not what was measured; nothing where all is."""
    if record["code"] is None:
        return "the code has changed since"
    changed = figures.changed_since(record["code"])
    return f"the code has changed since, in {', '.join(f'`{path}`' for path in changed)}" if changed else ""


def measurements(records: Records) -> str:
    """Return a table of all measurements: how old each is."""
    lines = ["| measurement | measured | since then |", "|---|---|---|"]
    for name, record in records.items():
        small = "a trial that measures nothing; " if record["small"] else ""
        changed = changed_in(record) or "the same code"
        lines.append(f"| {name} | {when(record)} | {small}{changed} |")
    return "\n".join(lines)
