# SPDX-License-Identifier: Apache-2.0
"""What the tables of the command line share."""

from __future__ import annotations

from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

ID_LETTERS = 8
WIDE = 100

Align = Literal["left", "right"]


def make_table(title: str, width: int) -> Table:
    """Return an empty table as all of ``inspect`` are, closer where it is narrow."""
    return Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1 if width >= WIDE else 0, 0, 0),
        header_style="dim",
    )


def add_column(table: Table, header: str, justify: Align = "left", style: str | None = None) -> None:
    """Add a column that is not cut."""
    table.add_column(header, justify=justify, style=style, no_wrap=True)


def unknown() -> Text:
    """Return what stands for a value that cannot be known."""
    return Text("?", "red")
