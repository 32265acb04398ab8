# SPDX-License-Identifier: Apache-2.0
"""A run drawn: throughput by block size, the limit as a line above. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvdisk.cli.bench import machine, report
from kvdisk.cli.bench.cases import GroupResult, Role
from kvdisk.cli.bench.run import Run
from kvdisk.errors import ConfigError

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2")
_STYLES = {Role.LIMIT: ":", Role.PEER: "--", Role.OURS: "-"}
_MB = 1e6
MISSING = "--plot needs matplotlib: pip install 'kvdisk[bench]'."


def check_plot() -> None:
    """Raise ConfigError where matplotlib cannot be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(MISSING) from None


def draw(run: Run, path: Path) -> None:
    """Write a picture to ``path`` (.png or .svg): one field for each route, flow and layout. Raises OSError."""
    from matplotlib.figure import Figure

    fields = _fields(run.results)
    columns = min(2, max(1, len(fields)))
    rows = max(1, -(-len(fields) // columns))
    figure = Figure(figsize=(6.0 * columns, 3.8 * rows + 0.4), layout="constrained")
    for at, (title, results) in enumerate(fields.items()):
        _draw_field(figure.add_subplot(rows, columns, at + 1), title, results)
    figure.suptitle(machine.sentence(run.machine), fontsize=7)
    figure.savefig(path, dpi=120)


def _fields(results: Sequence[GroupResult]) -> dict[str, list[GroupResult]]:
    found: dict[str, list[GroupResult]] = {}
    for result in results:
        case = result.case
        if case.route != "cpu":
            title = f"{case.route}: {case.flow.value}, {case.layout.value}"
            found.setdefault(f"{title}, busy thread" if case.busy else title, []).append(result)
    return found


def _draw_field(axes: Any, title: str, results: Sequence[GroupResult]) -> None:
    """Draw the median of each contender by block size, with lowest and highest."""
    lines: dict[tuple[str, Role], list[tuple[int, float, float, float]]] = {}
    for result in results:
        limit = result.best(Role.LIMIT)
        for one in result.series:
            if one.role is Role.LIMIT and one is not limit:
                continue
            rates = one.rates
            name = "limit" if one.role is Role.LIMIT else one.name
            point = (result.case.block_bytes, one.rate / _MB, min(rates) / _MB, max(rates) / _MB)
            lines.setdefault((name, one.role), []).append(point)
    for at, ((name, role), points) in enumerate(lines.items()):
        points.sort()
        sizes, medians, lowest, highest = zip(*points, strict=True)
        colour, width = ("black", 2.5) if role is Role.LIMIT else (_COLOURS[at % len(_COLOURS)], 1.5)
        axes.plot(sizes, medians, _STYLES[role], marker="o", markersize=3, color=colour, linewidth=width, label=name)
        axes.fill_between(sizes, lowest, highest, color=colour, alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=2)
    ticks = sorted({result.case.block_bytes for result in results})
    axes.set_xticks(ticks, [report.short_size(size) for size in ticks], fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9)
    axes.set_ylabel("MB/s", fontsize=8)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=6)
