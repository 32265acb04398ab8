# SPDX-License-Identifier: Apache-2.0
"""A replay drawn: hit rate over room, and beside it the bytes written. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvdisk.cli.replay.result_json import name_of, slot_bytes_of
from kvdisk.cli.replay.run import Outcome, Replayed
from kvdisk.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")
_COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#e377c2")
_MODEL_COLOURS = ("#1f4e79", "#5b9bd5", "#548235", "#a9d18e", "#7f6000", "#d6a300", "#7030a0", "#b58ad0", "#404040")
_MODEL_DASHES = ("--", "-.", ":")
MISSING = "--plot needs matplotlib: pip install 'kvdisk[bench]'."


def check_plot(path: Path) -> None:
    """Raise ConfigError where a picture cannot be drawn to this path."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot draws {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, not {path.name}.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no directory {path.absolute().parent}.")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(MISSING) from None


def draw(replayed: Replayed, path: Path) -> None:
    """Write the picture. Raises OSError."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    series = _series(replayed)
    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    hits, writes = figure.subplots(1, 2)
    slot_bytes = slot_bytes_of(replayed)
    dashes = iter(_MODEL_DASHES * 16)
    colours = {True: iter(_COLOURS * 8), False: iter(_MODEL_COLOURS * 8)}
    for name, outcomes in series.items():
        is_own = outcomes[0].rival is None
        look = {
            "color": next(colours[is_own]),
            "linestyle": "-" if is_own else next(dashes),
            "marker": "o" if is_own else "",
            "markersize": 3.5,
            "linewidth": 1.8 if is_own else 1.2,
            "zorder": 3 if is_own else 2,
        }
        rooms = [100 * outcome.room.blocks / replayed.trace.distinct for outcome in outcomes]
        rates = [100 * outcome.tokens / replayed.trace.tokens for outcome in outcomes]
        written = [outcome.written * slot_bytes / 2**40 for outcome in outcomes]
        hits.plot(rooms, rates, label=name, **look)
        writes.plot(rooms, written, label=name, **look)
    _finish(hits, "hit rate", "tokens that hit, % of all", replayed)
    _finish(writes, "written to the tier", "TiB written", replayed)
    hits.legend(fontsize=8, frameon=False, loc="lower right")
    trace = replayed.trace
    figure.suptitle(
        f"{trace.name}: {len(trace.requests):,} requests, {trace.references:,} blocks of {trace.block_tokens} tokens,"
        f" {trace.distinct:,} distinct",
        fontsize=9,
    )
    with mpl.rc_context({"svg.hashsalt": "kvdisk", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _series(replayed: Replayed) -> dict[str, list[Outcome]]:
    """Return the runs of each name, by room."""
    found: dict[str, list[Outcome]] = {}
    for outcome in sorted(replayed.outcomes, key=lambda outcome: (outcome.rival is not None, outcome.room.blocks)):
        found.setdefault(name_of(outcome), []).append(outcome)
    return found


def _finish(axes: Any, title: str, label: str, replayed: Replayed) -> None:
    rooms = sorted({100 * outcome.room.blocks / replayed.trace.distinct for outcome in replayed.outcomes})
    if min(rooms) > 0 and max(rooms) / min(rooms) > 8:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(rooms, [f"{room:.2g}" for room in rooms], fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("room, % of the trace's distinct blocks", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
