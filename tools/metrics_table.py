# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/METRICS.md anew from ``kvdisk.stats``: ``python tools/metrics_table.py``."""

from __future__ import annotations

import re
from pathlib import Path

from kvdisk.stats import METRICS, Kind, Metric

PAGE = Path(__file__).resolve().parents[1] / "docs" / "METRICS.md"
KINDS = {Kind.COUNTER: "Counters", Kind.GAUGE: "Gauges", Kind.HISTOGRAM: "Histograms"}


def table_of(kind: Kind) -> str:
    """Return the table of the metrics of a kind, in Markdown."""
    rows = [_row(metric) for metric in METRICS.values() if metric.kind is kind]
    return "\n".join(("| metric | label | what it is |", "|---|---|---|", *rows))


def _row(metric: Metric) -> str:
    suffix = "_total" if metric.kind is Kind.COUNTER else ""
    values = f": {', '.join(f'`{value}`' for value in metric.values)}" if metric.values else ""
    label = f"`{metric.label}`{values or ': number of the drive'}" if metric.label else ""
    return f"| `vllm:kvdisk_{metric.name}{suffix}` | {label} | {metric.about} |"


def with_tables(text: str) -> str:
    """Return a text of Markdown with the table under each heading that names a kind replaced."""
    for kind, heading in KINDS.items():
        pattern = re.compile(rf"(^### {heading}\n\n).*?(?=^#|\Z)", re.MULTILINE | re.DOTALL)
        assert len(pattern.findall(text)) == 1, heading
        text = pattern.sub(lambda found, kind=kind: f"{found[1]}{table_of(kind)}\n\n", text)
    return text.rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
