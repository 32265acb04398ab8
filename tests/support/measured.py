# SPDX-License-Identifier: Apache-2.0
"""Whether a measurement has each figure that a page names, whatever size it was taken at."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import figure_pages
import measure_all
from measure_all import Measurement, Places

SIZES = re.compile(r"\d[\d,]*( KiB| MiB)?")


def run_small(one: Measurement, places: Places, out: Path | None = None) -> dict[str, Any]:
    """Run a measurement at a size that measures nothing; return its record. Asserts that it has
    what the pages name."""
    record = measure_all.measure(one, places, small=True, out=out)
    assert record["small"] and record["tables"] and set(record["code"]) == set(one.code)
    found = _parts_of(record["tables"])
    for names in _marked(one):
        if len(names) == 3:
            assert tuple(map(_without_sizes, names)) in found, names
        else:
            assert (_without_sizes(names[0]),) in found, names
            columns = {column for _, _, column in (part for part in found if len(part) == 3)}
            assert {_without_sizes(each) for each in names[1].split("; ")} <= columns if names[1:] else True
    return record


def _marked(one: Measurement) -> list[list[str]]:
    """Return the names of the figures and tables that pages take from a measurement."""
    found = [
        mark.split(" // ")
        for path in figure_pages.PAGES
        for _, _, mark, _, _ in figure_pages.MARK.findall(path.read_text())
    ]
    return [parts[1:] for parts in found if parts[0] == one.name and len(parts) > 1]


def _without_sizes(name: str) -> str:
    """Return a name that is the same at any size."""
    return SIZES.sub("#", name).replace("groups", "group")


def _parts_of(tables: object) -> set[tuple[str, ...]]:
    """Return the name of each table, row and column of a record, without sizes."""
    found: set[tuple[str, ...]] = set()
    assert isinstance(tables, dict)
    for table, rows in tables.items():
        found.add((_without_sizes(table),))
        for row, cells in rows.items():
            found |= {(_without_sizes(table), _without_sizes(row), _without_sizes(column)) for column in cells}
    return found
