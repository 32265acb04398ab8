# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk top`` shows to people: the store, a box for each engine, the drives, and the homes that nobody owns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvdisk.cli.table_parts import make_table
from kvdisk.cli.top_reader import READS, WRITES, EngineNow, Frame, hit_rate
from kvdisk.cli.wording import ago, bar, number, plural, printable, share, size
from kvdisk.stats import JOBS, TIERS

ORPHANS_SHOWN = 8
PROBLEMS_SHOWN = 5
_ID_LETTERS = 8
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400
_NAMES = {"cpu": "CPU", "nvme": "NVMe"}
_ROUTES = (
    ("GPU → memory", ("gpu_to_cpu",)),
    ("memory → GPU", ("cpu_to_gpu",)),
    ("→ NVMe", WRITES),
    ("NVMe →", READS),
)
_FAILURES = {
    "verification_failures.header": "wrong headers",
    "verification_failures.checksum": "wrong checksums",
    "io_errors.read": "read errors",
    "io_errors.write": "write errors",
    "dropped_records": "records not committed",
    "segment_failures": "segments not made",
    "foreign_failures": "gone from other homes",
}
_SPARKS = "▁▂▃▄▅▆▇█"
_WIDE, _NARROW = 96, 76


def frame_of(frame: Frame, width: int, note: str = "") -> RenderableType:
    """Return a frame. ``width``: letters of the terminal; ``note``: a sentence about the reading itself, in red."""
    parts: list[RenderableType] = [_head(frame)]
    if note:
        parts.append(Text(printable(note), "red"))
    parts += [_engine(engine, frame.time_s, width) for engine in frame.engines]
    if frame.drives:
        parts.append(_drives(frame, width))
    if frame.orphans:
        parts.append(_orphans(frame))
    for problem in frame.problems[:PROBLEMS_SHOWN]:
        parts.append(Text.assemble(("✗ ", "red"), printable(problem)))
    if len(frame.problems) > PROBLEMS_SHOWN:
        parts.append(Text(f"… and {len(frame.problems) - PROBLEMS_SHOWN} more", "dim"))
    return Group(*parts)


def per_second(rate: float | None) -> str:
    """Return bytes a second: ``812.4 MiB/s``; ``-`` for none, ``?`` where it is not known yet."""
    if rate is None:
        return "?"
    return f"{size(round(rate))}/s" if rate >= 1 else "-"


def spark(values: Sequence[float], width: int) -> str:
    """Return the last values as a line of small bars, the largest of them the highest."""
    shown = list(values)[-width:]
    most = max(shown, default=0.0)
    if most <= 0:
        return _SPARKS[0] * len(shown)
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(value / most * (len(_SPARKS) - 1) + 0.5))] for value in shown)


def duration(seconds: float) -> str:
    """Return a length of time in its largest two units: ``3 h 12 min``."""
    seconds = int(seconds)
    for unit_s, unit, part_s, part in (
        (_DAY_S, "d", _HOUR_S, "h"),
        (_HOUR_S, "h", _MINUTE_S, "min"),
        (_MINUTE_S, "min", 1, "s"),
    ):
        if seconds >= unit_s:
            rest = seconds % unit_s // part_s
            return f"{seconds // unit_s} {unit}{f' {rest} {part}' if rest else ''}"
    return f"{seconds} s"


# -- the store ---------------------------------------------------------------------------------


def _head(frame: Frame) -> RenderableType:
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    clock = time.strftime("%H:%M:%S", time.localtime(frame.time_s))
    lines.add_row("Store", Text.assemble((printable(frame.path), "bold cyan"), (f"  {clock}", "dim")))
    orphans = f", {plural(len(frame.orphans), 'orphan')}" if frame.orphans else ""
    if not frame.engines:
        lines.add_row("Engines", Text.assemble(("none is using this store now", "yellow"), orphans))
        return lines
    lines.add_row("Engines", f"{len(frame.engines)} alive{orphans}")
    found = [Text.assemble("hits ", (share(hit_rate(frame.totals)), "bold"), " since their start")]
    for tier in TIERS:
        fills = [fill for engine in frame.engines if (fill := engine.fill(tier)) is not None]
        if fills:
            used, capacity = sum(used for used, _ in fills), sum(capacity for _, capacity in fills)
            found.append(Text(f"{_NAMES[tier]} {size(int(used))} of {size(int(capacity))}"))
    lines.add_row("Totals", Text("   ").join(found))
    rises = [engine.rise for engine in frame.engines if engine.rise is not None]
    if rises:
        written, read = (sum(rise.bytes_per_s(routes) for rise in rises) for routes in (WRITES, READS))
        lines.add_row("NVMe now", f"{per_second(written)} written   {per_second(read)} read")
    return lines


def _drives(frame: Frame, width: int) -> RenderableType:
    table = make_table("Drives", width)
    table.title = "Drives"  # the boxes above leave a line
    table.add_column("Drive", overflow="fold")
    for header in ("Read now", "Written now", "Read", "Written", "Engines"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("State", no_wrap=True)
    for drive in frame.drives:
        state = Text("fine", "green")
        if drive.quarantined:
            state = Text(f"left alone by {drive.quarantined} of {drive.engines}", "bold red")
        table.add_row(
            printable(drive.path),
            per_second(drive.read_per_s),
            per_second(drive.written_per_s),
            size(drive.read_bytes),
            size(drive.written_bytes),
            number(drive.engines),
            state,
        )
    return table


def _orphans(frame: Frame) -> RenderableType:
    lines = [Text("\nOrphans", "bold dim")]
    for orphan in frame.orphans[:ORPHANS_SHOWN]:
        record = orphan.record
        about = "HOME cannot be read"
        if record is not None:
            about = f"{_short(record.description.get('model'))}, last used {ago(record.last_use_s, int(frame.time_s))}"
        lines.append(Text(f"  {orphan.home_id[:_ID_LETTERS]}  {about}", "dim"))
    if len(frame.orphans) > ORPHANS_SHOWN:
        lines.append(Text(f"  … and {len(frame.orphans) - ORPHANS_SHOWN} more", "dim"))
    return Group(*lines)


# -- an engine ---------------------------------------------------------------------------------


def _engine(engine: EngineNow, now_s: float, width: int) -> RenderableType:
    title = Text.assemble(
        ("● ", "green" if not engine.idle else "dim"),
        (engine.home_id[:_ID_LETTERS], "cyan"),
        "  ",
        (_short(engine.model), "bold"),
    )
    figures = engine.figures
    if figures is None:
        why = f"its figures cannot be read: {engine.problem}" if engine.problem else "it has told nothing of itself yet"
        return Panel(Text(printable(why), "red" if engine.problem else "dim"), title=title, title_align="left")
    about = f"pid {figures.pid} on {printable(figures.host)}, {plural(figures.ranks, 'rank')}, "
    about += f"up {duration(max(0.0, now_s - figures.started_s))}"
    if engine.idle:
        about += f", idle for {duration(engine.age_s)}"
    return Panel(
        Group(_tiers(engine, width), _flow(engine, width), _waiting(figures.gauges), _failures(engine)),
        title=title,
        title_align="left",
        subtitle=Text(about, "dim"),
        subtitle_align="right",
        padding=(0, 1),
    )


def _tiers(engine: EngineNow, width: int) -> RenderableType:
    assert engine.figures is not None
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold", no_wrap=True)
    for _ in range(4 if width >= _NARROW else 2):
        lines.add_column(no_wrap=True)
    for tier in TIERS:
        fill = engine.fill(tier)
        if fill is None:
            continue
        used, capacity = fill
        now = hit_rate(engine.rise.totals, tier) if engine.rise is not None else None
        evicted = engine.rise.rate(f"evicted_blocks.{tier}") if engine.rise is not None else None
        letters = 24 if width >= _WIDE else 10 if width >= _NARROW else 6
        room = (
            Text.assemble((bar(used / capacity, letters), "cyan"), f" {share(used / capacity):>5}"),
            f"{size(int(used))} of {size(int(capacity))}",
        )
        in_all = f" ({_asked(hit_rate(engine.figures.totals, tier))} in all)" if width >= _WIDE else ""
        use = (
            Text.assemble("hits ", (_asked(now), "bold green"), (in_all, "dim")),
            f"evicts {'?' if evicted is None else f'{evicted:,.0f}'}/s",
        )
        if width >= _NARROW:
            lines.add_row(_NAMES[tier], *room, *use)
        else:
            lines.add_row(_NAMES[tier], *room)
            lines.add_row("", *use)
    return lines


def _asked(rate: float | None) -> str:
    return "-" if rate is None else share(rate)


def _flow(engine: EngineNow, width: int) -> RenderableType:
    lines = Table.grid(padding=(0, 3))
    rates = [
        f"{name} {per_second(None if engine.rise is None else engine.rise.bytes_per_s(routes))}"
        for name, routes in _ROUTES
    ]
    if width >= _WIDE:
        lines.add_row(*rates)
    else:
        lines.add_row(*rates[:2])
        lines.add_row(*rates[2:])
    history = Table.grid(padding=(0, 3))
    letters = max(8, min(60, (width - 24) // 2))
    history.add_row(
        Text.assemble("written ", (spark(engine.writes, letters), "yellow")),
        Text.assemble("read ", (spark(engine.reads, letters), "magenta")),
    )
    return Group(lines, history) if any(engine.writes) or any(engine.reads) else lines


def _waiting(gauges: Mapping[str, float]) -> Text:
    parts = [f"{job} {gauges.get(f'queued_jobs.{job}', 0):,.0f}" for job in JOBS]
    text = Text.assemble(("jobs ", "bold"), ", ".join(parts))
    for series, name in (
        ("backlog_blocks", "blocks to be written"),
        ("uncommitted_changes", "changes to be committed"),
        ("limbo_blocks", "slots to come free"),
    ):
        if gauges.get(series):
            text.append(f"   {gauges[series]:,.0f} {name}")
    if "write_budget_bytes" in gauges:
        text.append(f"   may write {size(int(gauges['write_budget_bytes']))} now")
    return text


def _failures(engine: EngineNow) -> Text:
    if not engine.failures:
        return Text("no failures", "dim green")
    said = [f"{number(count)} {_FAILURES.get(name, name.replace('_', ' '))}" for name, count in engine.failures.items()]
    return Text.assemble(("failures  ", "bold red"), (", ".join(said), "red"))


def _short(model: object) -> str:
    """Return the last two parts of a path; a hub's name has no more."""
    name = printable(model)
    parts = PurePosixPath(name).parts
    return name if len(parts) <= 3 else str(PurePosixPath("…", *parts[-2:]))
