# SPDX-License-Identifier: Apache-2.0
"""What mkdocs asks of this project while it builds the site: every decision has its place in the
navigation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECTION = "Decisions"


def on_config(config: Any) -> Any:
    """Put docs/decisions/*.md, which the navigation does not name one by one, behind their table,
    by number."""
    section = next(_found(config.nav))
    for path in sorted((Path(config.docs_dir) / "decisions").glob("[0-9]*.md")):
        section.append({_title(path): path.relative_to(config.docs_dir).as_posix()})
    return config


def _found(part: Any) -> Iterator[list[Any]]:
    """Yield the section of the decisions, wherever it is."""
    for item in part:
        for name, below in item.items() if isinstance(item, dict) else ():
            if name == SECTION:
                yield below
            elif isinstance(below, list):
                yield from _found(below)


def _title(path: Path) -> str:
    """Return the first clause of a heading: the navigation is narrow."""
    heading = path.read_text().partition("\n")[0].removeprefix("# ")
    return re.split(r"[,;:] | and ", heading, maxsplit=1)[0]
