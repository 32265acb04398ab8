# SPDX-License-Identifier: Apache-2.0
"""Fill pages with the figures of docs/measurements/figures.json, between marks that no reader sees.

    <!-- first-token // passes // of cold // warm from CPU -->0.016<!-- end -->
    <!-- table: scheduler // us -->...<!-- end -->
    <!-- spread: calls // 1,048,576 tokens, 1 group -->...<!-- end -->
    <!-- measured: drive -->...<!-- end -->
    <!-- measurements -->...<!-- end -->

The first is one figure, by measurement, table, row and column. A table has all rows of one, as
medians, or as medians with the least and the most (``spread``); columns may be named behind it,
with commas. ``measured`` says of what commit, day and machine the figures are, and whether the code
has changed since; ``measurements`` says that of all. ``make_docs.py`` writes the pages.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import figures
from figures import ROOT, Figure

PAGES = (ROOT / "README.md", ROOT / "docs" / "BENCHMARKS.md", *sorted((ROOT / "docs" / "measurements").glob("*.md")))
MARK = re.compile(
    r"(<!-- (?:(table|spread|measured|measurements)(?:: )?)?([^<>]*?) ?-->)(.*?)(<!-- end -->)", re.DOTALL
)
SEPARATOR = " // "
WIDTH = 100

Records = dict[str, dict[str, Any]]


def filled(text: str, records: Records) -> str:
    """Return a page with everything between its marks anew. Raises KeyError where a mark names what
    is not there."""

    def fill(found: re.Match[str]) -> str:
        begin, kind, name, _, end = found.groups()
        parts = name.split(SEPARATOR)
        if kind is None:
            return f"{begin}{shown(figures.figure(records, parts))}{end}"
        makers = {
            "table": lambda: table(records, parts, spread=False),
            "spread": lambda: table(records, parts, spread=True),
            "measured": lambda: measured(records[name]),
            "measurements": lambda: measurements(records),
        }
        return f"{begin}\n\n{makers[kind]()}\n\n{end}"

    return MARK.sub(fill, text)


def shown(figure: Figure, *, unit: bool = True, spread: bool = False) -> str:
    """Return a figure in words."""
    said = number(figure.median)
    if spread and figure.least != figure.most:
        said += f" ({number(figure.least)} to {number(figure.most)})"
    return f"{said} {figure.unit}".rstrip() if unit else said


def number(value: float) -> str:
    """Return a number with three figures; integers whole."""
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{value:,.{digits}f}"


def table(records: Records, name: list[str], *, spread: bool) -> str:
    """Return a table of a measurement as Markdown; where all figures have one unit its head says
    it."""
    measurement, title, *chosen = name
    rows = records[measurement]["tables"][title]
    columns = chosen[0].split(", ") if chosen else figures.columns_of(rows.values())
    cells = {row: {column: Figure(**found) for column, found in all_of.items()} for row, all_of in rows.items()}
    units = {cell.unit for row in cells.values() for cell in row.values()}
    common = units.pop() if len(units) == 1 else ""
    lines = [[common, *columns], ["---"] * (1 + len(columns))]
    for row, known in cells.items():
        found = [known.get(column) for column in columns]
        lines.append([row, *(shown(one, unit=not common, spread=spread) if one else "" for one in found)])
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def measured(record: dict[str, Any]) -> str:
    """Return of what the figures of a record are, in a paragraph."""
    load = record["load"]
    loads = f"load {load[0]:g} before and {load[1]:g} after" if load else "load not recorded"
    others = record.get("others")
    said = [
        f"`{record['command']}`: {record['date'] or 'day not recorded'}, {commit_of(record)};"
        f" {record['machine'] or 'machine not recorded'}; {loads}"
        + ("" if others is None else f", others used {others:g} cores meanwhile")
        + "."
    ]
    if record["small"]:
        said.append("**A trial at a small size: these figures measure nothing.**")
    if age := age_of(record):
        said.append(f"**{age[0].upper()}{age[1:]}.**")
    return textwrap.fill(" ".join(said), WIDTH, break_long_words=False, break_on_hyphens=False)


def commit_of(record: dict[str, Any]) -> str:
    """Return the commit that was measured, in words."""
    if record["commit"] is None:
        return "commit not recorded"
    return f"commit {record['commit'][:8]}{', with changes' if record['changed'] else ''}"


def age_of(record: dict[str, Any]) -> str:
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
        age = age_of(record) or "the same code"
        lines.append(f"| {name} | {record['date'] or 'day not recorded'}, {commit_of(record)} | {small}{age} |")
    return "\n".join(lines)
