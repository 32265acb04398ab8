# SPDX-License-Identifier: Apache-2.0
"""Draws what ``kvdisk replay --json`` printed: hit rate over room, and beside it the bytes written.

kvdisk replay TRACE --json > replay.json
python tools/plot_replay.py replay.json docs/pictures/replay.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

OWN_COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#e377c2")
MODEL_COLOURS = ("#1f4e79", "#548235", "#7f6000", "#7030a0", "#404040")
DASHES = ("--", "-.", ":")


def draw(replayed: dict[str, Any], path: Path) -> None:
    trace = replayed["trace"]
    series: dict[str, list[dict[str, Any]]] = {}
    for run in sorted(replayed["runs"], key=lambda run: (run["model"] is not None, run["room"]["blocks"])):
        series.setdefault(run["policy"], []).append(run)
    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    hits, writes = figure.subplots(1, 2)
    models = [name for name, runs in series.items() if runs[0]["model"] is not None]
    for at, (name, runs) in enumerate(series.items()):
        if name in models:
            number = models.index(name)
            look = {"color": MODEL_COLOURS[number % 5], "linestyle": DASHES[number % 3], "linewidth": 1.2}
        else:
            look = {"color": OWN_COLOURS[at % 8], "marker": "o", "markersize": 3.5, "linewidth": 1.8, "zorder": 3}
        rooms = [room_of(run, trace) for run in runs]
        hits.plot(rooms, [100 * run["hit_rate"] for run in runs], label=name, **look)
        writes.plot(rooms, [run["written_bytes"] / 2**40 for run in runs], label=name, **look)
    ticks = sorted({room_of(run, trace) for run in replayed["runs"]})
    finish(hits, "hit rate", "tokens that hit, % of all", ticks)
    finish(writes, "written to the tier", "TiB written", ticks)
    hits.legend(fontsize=8, frameon=False, loc="lower right")
    figure.suptitle(
        f"{trace['name']}: {trace['requests']:,} requests, {trace['references']:,} blocks of"
        f" {trace['block_tokens']} tokens, {trace['distinct_blocks']:,} distinct",
        fontsize=9,
    )
    with mpl.rc_context({"svg.hashsalt": "kvdisk", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def room_of(run: dict[str, Any], trace: dict[str, Any]) -> float:
    return 100 * run["room"]["blocks"] / trace["distinct_blocks"]


def finish(axes: Any, title: str, label: str, ticks: list[float]) -> None:
    if ticks[0] > 0 and ticks[-1] / ticks[0] > 8:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks], fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("room, % of the trace's distinct blocks", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
