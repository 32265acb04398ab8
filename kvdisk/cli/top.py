# SPDX-License-Identifier: Apache-2.0
"""``kvdisk top``: a store in use, its engines and drives now, and how fast things are.

An engine's rates are the difference of two of its FIGURES. Reads only.

``Frame`` is what ``--json`` prints; its shape changes only with ``json_version``. Bytes are those
of all ranks. ``null`` is what is not known, or where nothing was asked. Rates (``*_per_s``) are
those of the last ``seconds``; 0 where the engine is idle. Shares lie between 0 and 1. Times
(``*_s``) are seconds, those of moments since the Unix epoch.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvdisk import __version__
from kvdisk.cli.output import (
    ID_LETTERS,
    WIDE,
    AsJson,
    Exit,
    StoreDirectories,
    ago,
    bar,
    duration,
    folded,
    left,
    make_lines,
    make_table,
    number,
    plural,
    print_json,
    printable,
    refusing,
    report_console,
    right,
    share,
    short_model,
    size,
    store_paths,
)
from kvdisk.device import paths
from kvdisk.device.drives import list_directories
from kvdisk.device.listing import HomeOwner, list_owners
from kvdisk.device.telemetry_file import DriveTelemetry, TelemetryRecord, read_telemetry
from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError
from kvdisk.stats import FAILURES, JOBS, ROUTES, TIER_WORDS, TIERS

JSON_VERSION = 1
STALE_S = 3.0
"""After so long without new figures an engine is idle: it writes them when they change."""
HISTORY = 60
LOCK_WAIT_S = 2.0
READS = ("nvme_to_cpu", "nvme_to_gpu")
WRITES = ("cpu_to_nvme", "gpu_to_nvme")
ORPHANS_SHOWN = 8
PROBLEMS_SHOWN = 5
_FLOWS = {"GPU → memory": ("gpu_to_cpu",), "memory → GPU": ("cpu_to_gpu",), "→ NVMe": WRITES, "NVMe →": READS}
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Tier:
    """A tier. ``hit_rate``: since the start; ``hit_rate_now``: of the last ``seconds``."""

    used_bytes: float
    capacity_bytes: float
    hit_rate: float | None
    hit_rate_now: float | None
    evicted_blocks_per_s: float | None


@dataclass(frozen=True)
class Waiting:
    """What waits. ``jobs``: by kind. ``limbo_blocks``: slots that come free when a job ends.

    ``write_budget_bytes``: what may be written to NVMe now; null: there is no such bound.
    """

    jobs: Mapping[str, float]
    backlog_blocks: float
    uncommitted_changes: float
    limbo_blocks: float
    write_budget_bytes: float | None


@dataclass(frozen=True)
class Engine:
    """A home that an engine owns. ``figures_s``: when its figures were true; null: none yet.

    ``problem``: why its figures cannot be read. ``seconds``: over which its rates are. ``tiers``:
    by name, "cpu" or "nvme". ``bytes_per_s``: by route, such as "gpu_to_cpu". ``failures``: by
    kind, since its start, without those that are 0. ``reads``, ``writes``: bytes a second from and
    to NVMe over the last looks, the newest last.
    """

    home: str
    model: str | None
    problem: str | None = None
    pid: int | None = None
    host: str | None = None
    ranks: int | None = None
    started_s: float | None = None
    figures_s: float | None = None
    idle: bool = False
    seconds: float | None = None
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    bytes_per_s: Mapping[str, float] | None = None
    waiting: Waiting | None = None
    failures: Mapping[str, int] = field(default_factory=dict)
    reads: tuple[float, ...] = ()
    writes: tuple[float, ...] = ()

    def flow(self, routes: Iterable[str]) -> float | None:
        """Return what moves on these routes, in bytes a second."""
        return None if self.bytes_per_s is None else sum(self.bytes_per_s[route] for route in routes)


@dataclass(frozen=True)
class Drive:
    """A directory of the store. ``quarantined``: by how many engines."""

    path: str
    engines: int
    read_bytes: int
    written_bytes: int
    read_bytes_per_s: float | None
    written_bytes_per_s: float | None
    quarantined: int


@dataclass(frozen=True)
class Orphan:
    """A home that nobody owns."""

    home: str
    model: object
    last_use_s: int | None


@dataclass(frozen=True)
class Totals:
    """Sums over all engines. ``hit_rate``: since their starts. Rates: from and to NVMe."""

    engines: int
    orphans: int
    used_bytes: Mapping[str, int]
    capacity_bytes: Mapping[str, int]
    hit_rate: float | None
    read_bytes_per_s: float | None
    written_bytes_per_s: float | None


@dataclass(frozen=True)
class Frame:
    """A store at one moment. ``problems``: what of it cannot be shown, in sentences.

    ``engines``: by their start.
    """

    json_version: int
    kvdisk_version: str
    time_s: float
    store: Mapping[str, Path]
    problems: tuple[str, ...]
    totals: Totals
    engines: tuple[Engine, ...]
    drives: tuple[Drive, ...]
    orphans: tuple[Orphan, ...]


def top(
    directories: StoreDirectories,
    interval_s: Annotated[
        float, typer.Option("--interval", "-i", min=0.2, max=3600.0, help="Seconds between two looks at the store.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, with rates over one interval, and end.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Watch a store in use: each engine's hits, rates, fill and queues, and each drive's bytes;
    until ctrl-C.

    Reads what engines tell of themselves, which is new once a second at most; engines may come and
    go.

    Without a terminal, and with --json, there is one frame, as with --once. Only reads; needs
    neither a GPU nor vLLM.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  a frame was shown, also after ctrl-C

    [cyan]2[/cyan]  none: not a store, no permission, a newer format, or wrong usage
    """
    named = store_paths(directories)
    console = report_console()
    reader = TopReader(named)
    try:
        with refusing(named):
            frame = reader.read()
            if as_json or once or not console.is_terminal or console.is_dumb_terminal:
                if frame.engines:  # how things are after one interval, over which rates are known
                    time.sleep(interval_s)
                    frame = reader.read()
                print_json(frame) if as_json else console.print(draw(frame, console.width))
            else:
                _watch(reader, frame, console, interval_s)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.FINE) from None


def _watch(reader: TopReader, frame: Frame, console: Console, interval_s: float) -> None:
    """Show frames until KeyboardInterrupt. A look that fails is noted in the frame before."""
    note = ""
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            live.update(draw(frame, console.width, note), refresh=True)
            time.sleep(interval_s)
            try:
                frame, note = reader.read(), ""
            except KvdiskError as error:
                note = f"The store cannot be read, this is how it was {time.time() - frame.time_s:.0f} s ago: {error}"


# -- reading -----------------------------------------------------------------------------------


def _counted(figures: TelemetryRecord) -> Counter[str]:
    """Return all that only rises: counters by series, bytes by route, and by drive."""
    counted = Counter(figures.totals)
    for route in ROUTES:
        counted[route] = int(figures.sums.get(f"transfer_bytes.{route}", (0, 0.0))[1])
    for drive in figures.drives:
        counted[f"read {drive.path}"], counted[f"written {drive.path}"] = drive.read_bytes, drive.written_bytes
    return counted


def hit_rate(counts: Mapping[str, float], tier: str) -> float | None:
    """Return the share of the tokens asked of a tier that were hits; None where none were asked."""
    hit = counts.get(f"hit_tokens.{tier}", 0)
    asked = hit + counts.get(f"missed_tokens.{tier}", 0)
    return min(1.0, hit / asked) if asked else None


@dataclass
class _Watched:
    """An engine over time.

    ``last``: the figures read last. ``rose``: by how much each of ``_counted`` rose in the
    ``seconds`` before them; None: not known yet. What fell was damaged, and counts as no rise.
    """

    last: TelemetryRecord
    rose: Counter[str] | None = None
    seconds: float = 1.0
    reads: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    writes: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def look(self, figures: TelemetryRecord, *, idle: bool) -> None:
        """Compare the engine's figures with those before."""
        if figures.time_s > self.last.time_s:
            self.rose, self.seconds = _counted(figures) - _counted(self.last), figures.time_s - self.last.time_s
            self.last = figures
        elif idle:
            self.rose, self.seconds = Counter(), 1.0
        if self.rose is not None:
            self.reads.append(sum(self.rose[route] for route in READS) / self.seconds)
            self.writes.append(sum(self.rose[route] for route in WRITES) / self.seconds)

    def per_s(self, series: str) -> float | None:
        """Return what a series rose by in a second."""
        return None if self.rose is None else self.rose[series] / self.seconds

    def tiers(self) -> Iterator[tuple[str, Tier]]:
        """Yield the tiers that the engine has."""
        figures = self.last
        for tier in TIERS:
            if capacity_bytes := figures.gauges.get(f"capacity_bytes.{tier}"):
                yield (
                    tier,
                    Tier(
                        figures.gauges.get(f"used_bytes.{tier}", 0),
                        capacity_bytes,
                        hit_rate=hit_rate(figures.totals, tier),
                        hit_rate_now=None if self.rose is None else hit_rate(self.rose, tier),
                        evicted_blocks_per_s=self.per_s(f"evicted_blocks.{tier}"),
                    ),
                )


class TopReader:
    """Reads a store again and again. ``clock``: seconds since the Unix epoch."""

    def __init__(self, directories: Sequence[Path], clock: Callable[[], float] = time.time) -> None:
        self._directories = list_directories(list(directories))
        self._clock = clock
        self._watched: dict[str, _Watched] = {}

    def read(self) -> Frame:
        """Return the store as it is now. Raises as ``Store.open``, and StoreLocked."""
        owners = list_owners(self._directories, LOCK_WAIT_S)
        now_s = self._clock()
        engines = [self._engine(owner, now_s) for owner in owners if owner.alive]
        told = {engine.home for engine in engines if engine.figures_s is not None}
        self._watched = {home_id: each for home_id, each in self._watched.items() if home_id in told}
        engines.sort(key=lambda engine: (engine.started_s or 0.0, engine.home))
        orphans = [
            Orphan(owner.id, _model_of(owner), owner.record.last_use_s if owner.record else None)
            for owner in owners
            if not owner.alive
        ]
        orphans.sort(key=lambda orphan: -(orphan.last_use_s or 0))
        problems = [f"home {each.home}: {each.problem}" for each in engines if each.problem]
        problems += [f"home {orphan.home}: HOME cannot be read" for orphan in orphans if orphan.last_use_s is None]
        return Frame(
            JSON_VERSION,
            __version__,
            round(now_s, 3),
            {"path": self._directories[0]},
            tuple(problems),
            self._totals(engines, len(orphans)),
            tuple(engines),
            tuple(self._drive(path) for path in sorted({drive.path for _, drive in self._drives()})),
            tuple(orphans),
        )

    def _engine(self, owner: HomeOwner, now_s: float) -> Engine:
        figures, problem = None, None
        try:
            with paths.device_errors(f"reading the figures of home {owner.id}"):
                figures = read_telemetry(owner.path)
        except (CorruptRecord, DeviceError) as error:
            problem = str(error).replace(f"{owner.path}/", "")
        name = _model_of(owner)
        model = None if name is None else str(name)
        if figures is None:
            return Engine(owner.id, model, problem)
        idle = now_s - figures.time_s >= STALE_S
        watched = self._watched.get(owner.id)
        if watched is None or (watched.last.pid, watched.last.started_s) != (figures.pid, figures.started_s):
            watched = self._watched[owner.id] = _Watched(figures)
        watched.look(figures, idle=idle)
        rose, gauges = watched.rose, figures.gauges
        return Engine(
            home=owner.id,
            model=figures.model or model,
            pid=figures.pid,
            host=figures.host,
            ranks=figures.ranks,
            started_s=figures.started_s,
            figures_s=figures.time_s,
            idle=idle,
            seconds=None if rose is None else watched.seconds,
            tiers=dict(watched.tiers()),
            bytes_per_s=None if rose is None else {route: rose[route] / watched.seconds for route in ROUTES},
            waiting=Waiting(
                jobs={job: gauges.get(f"queued_jobs.{job}", 0) for job in (*JOBS, "files")},
                backlog_blocks=gauges.get("backlog_blocks", 0),
                uncommitted_changes=gauges.get("uncommitted_changes", 0),
                limbo_blocks=gauges.get("limbo_blocks", 0),
                write_budget_bytes=gauges.get("write_budget_bytes"),
            ),
            failures={series: figures.totals[series] for series in FAILURES if figures.totals.get(series)},
            reads=tuple(watched.reads),
            writes=tuple(watched.writes),
        )

    def _totals(self, engines: Sequence[Engine], orphans: int) -> Totals:
        counted = Counter[str]()
        for watched in self._watched.values():
            counted.update(watched.last.totals)
        asked, hit = counted["lookup_tokens"], sum(counted[f"hit_tokens.{tier}"] for tier in TIERS)
        tiers = {tier: [engine.tiers[tier] for engine in engines if tier in engine.tiers] for tier in TIERS}
        return Totals(
            engines=len(engines),
            orphans=orphans,
            used_bytes={name: int(sum(tier.used_bytes for tier in found)) for name, found in tiers.items()},
            capacity_bytes={name: int(sum(tier.capacity_bytes for tier in found)) for name, found in tiers.items()},
            hit_rate=min(1.0, hit / asked) if asked else None,
            read_bytes_per_s=_sum_known(engine.flow(READS) for engine in engines),
            written_bytes_per_s=_sum_known(engine.flow(WRITES) for engine in engines),
        )

    def _drives(self) -> list[tuple[_Watched, DriveTelemetry]]:
        return [(watched, drive) for watched in self._watched.values() for drive in watched.last.drives]

    def _drive(self, path: str) -> Drive:
        """Return a drive that engines tell of. Rates: of the engines whose rates are known."""
        told = [(watched, drive) for watched, drive in self._drives() if drive.path == path]
        return Drive(
            path,
            engines=len(told),
            read_bytes=sum(drive.read_bytes for _, drive in told),
            written_bytes=sum(drive.written_bytes for _, drive in told),
            read_bytes_per_s=_sum_known(watched.per_s(f"read {path}") for watched, _ in told),
            written_bytes_per_s=_sum_known(watched.per_s(f"written {path}") for watched, _ in told),
            quarantined=sum(drive.quarantined for _, drive in told),
        )


def _sum_known(rates: Iterable[float | None]) -> float | None:
    """Return the sum of the rates that are known; None where none is."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _model_of(owner: HomeOwner) -> object:
    return owner.record.description.get("model") if owner.record else None


# -- for people --------------------------------------------------------------------------------


def draw(frame: Frame, width: int, note: str = "") -> RenderableType:
    """Return a frame. ``width``: of the terminal. ``note``: about the reading itself."""
    parts: list[RenderableType] = [_head(frame)]
    if note:
        parts.append(Text(printable(note), "red"))
    parts += [_engine(engine, frame.time_s, width) for engine in frame.engines]
    if frame.drives:
        parts.append(_drives(frame, width))
    if frame.orphans:
        parts += [Text("\nOrphans", "bold dim"), *_listed(_orphans(frame), ORPHANS_SHOWN)]
    parts += _listed([Text.assemble(("✗ ", "red"), printable(problem)) for problem in frame.problems], PROBLEMS_SHOWN)
    return Group(*parts)


def _listed(lines: Sequence[Text], most: int) -> list[Text]:
    """Return the first lines, and how many more there are."""
    more = [Text(f"  … and {len(lines) - most} more", "dim")] if len(lines) > most else []
    return [*lines[:most], *more]


def per_second(rate: float | None) -> str:
    """Return bytes a second: ``812.4 MiB/s``; ``-`` for none, ``?`` where it is not known yet."""
    if rate is None:
        return "?"
    return f"{size(round(rate))}/s" if rate >= 1 else "-"


def spark(values: Sequence[float], width: int) -> str:
    """Return the last values as a line of small bars, the largest of them the highest."""
    shown = values[-width:]
    most = max(shown, default=0.0) or 1.0
    return "".join(_SPARKS[round(value / most * (len(_SPARKS) - 1))] for value in shown)


def _head(frame: Frame) -> RenderableType:
    lines, totals = make_lines(), frame.totals
    clock = time.strftime("%H:%M:%S", time.localtime(frame.time_s))
    lines.add_row("Store", Text.assemble((printable(frame.store["path"]), "bold cyan"), (f"  {clock}", "dim")))
    orphans = f", {plural(totals.orphans, 'orphan')}" if totals.orphans else ""
    if not frame.engines:
        lines.add_row("Engines", Text.assemble(("none is using this store now", "yellow"), orphans))
        return lines
    lines.add_row("Engines", f"{totals.engines} alive{orphans}")
    found = [Text.assemble("hits ", (share(totals.hit_rate), "bold"), " since their start")]
    for tier, capacity_bytes in totals.capacity_bytes.items():
        if capacity_bytes:
            found.append(Text(f"{TIER_WORDS[tier]} {size(totals.used_bytes[tier])} of {size(capacity_bytes)}"))
    lines.add_row("Totals", Text("   ").join(found))
    if totals.written_bytes_per_s is not None:
        written, read = per_second(totals.written_bytes_per_s), per_second(totals.read_bytes_per_s)
        lines.add_row("NVMe now", f"{written} written   {read} read")
    return lines


def _drives(frame: Frame, width: int) -> RenderableType:
    numbers = map(right, ("Read now", "Written now", "Read", "Written", "Engines"))
    table = make_table("Drives", width, folded("Drive"), *numbers, left("State"))
    table.title = "Drives"  # the boxes above leave a line
    for drive in frame.drives:
        state = Text("fine", "green")
        if drive.quarantined:
            state = Text(f"left alone by {drive.quarantined} of {drive.engines}", "bold red")
        table.add_row(
            printable(drive.path),
            per_second(drive.read_bytes_per_s),
            per_second(drive.written_bytes_per_s),
            size(drive.read_bytes),
            size(drive.written_bytes),
            number(drive.engines),
            state,
        )
    return table


def _orphans(frame: Frame) -> list[Text]:
    lines = []
    for orphan in frame.orphans:
        about = "HOME cannot be read"
        if orphan.last_use_s is not None:
            about = f"{short_model(orphan.model)}, last used {ago(orphan.last_use_s, int(frame.time_s))}"
        lines.append(Text(f"  {orphan.home[:ID_LETTERS]}  {about}", "dim"))
    return lines


def _engine(engine: Engine, now_s: float, width: int) -> RenderableType:
    title = Text.assemble(
        ("● ", "green" if not engine.idle else "dim"),
        (engine.home[:ID_LETTERS], "cyan"),
        "  ",
        (short_model(engine.model), "bold"),
    )
    if engine.figures_s is None or engine.waiting is None:
        why = f"its figures cannot be read: {engine.problem}" if engine.problem else "it has told nothing of itself yet"
        return Panel(Text(printable(why), "red" if engine.problem else "dim"), title=title, title_align="left")
    about = f"pid {engine.pid} on {printable(engine.host)}, {plural(engine.ranks or 0, 'rank')}, "
    about += f"up {duration(max(0.0, now_s - (engine.started_s or 0.0)))}"
    if engine.idle:
        about += f", idle for {duration(now_s - engine.figures_s)}"
    tiers = [_tier(name, tier, width) for name, tier in engine.tiers.items()]
    flows = [f"{name} {per_second(engine.flow(routes))}" for name, routes in _FLOWS.items()]
    parts = [_grid(tiers, width), _grid([flows], width)]
    if any(engine.writes) or any(engine.reads):
        letters = max(8, min(HISTORY, (width - 24) // 2))
        written = Text.assemble("written ", (spark(engine.writes, letters), "yellow"))
        parts.append(_grid([[written, Text.assemble("read ", (spark(engine.reads, letters), "magenta"))]], width))
    return Panel(
        Group(*parts, _waiting(engine.waiting), _failures(engine)),
        title=title,
        title_align="left",
        subtitle=Text(about, "dim"),
        subtitle_align="right",
        padding=(0, 1),
    )


def _grid(rows: Iterable[Sequence[str | Text]], width: int) -> RenderableType:
    """Return rows of cells, with two cells in a line where the terminal is narrow."""
    lines = Table.grid(padding=(0, 3 if width >= WIDE else 2))
    for row in rows:
        per_line = len(row) if width >= WIDE else 2
        for start in range(0, len(row), per_line):
            lines.add_row(*row[start : start + per_line])
    return lines


def _tier(name: str, tier: Tier, width: int) -> Sequence[str | Text]:
    """Return the cells of a tier."""
    fill, evicted = tier.used_bytes / tier.capacity_bytes, tier.evicted_blocks_per_s
    now, ever = ("-" if rate is None else share(rate) for rate in (tier.hit_rate_now, tier.hit_rate))
    letters, in_all = (24, f" ({ever} in all)") if width >= WIDE else (10, "")
    return (
        Text.assemble((f"{TIER_WORDS[name]:<6}", "bold"), (bar(fill, letters), "cyan"), f" {share(fill):>5}"),
        f"{size(int(tier.used_bytes))} of {size(int(tier.capacity_bytes))}",
        Text.assemble("hits ", (now, "bold green"), (in_all, "dim")),
        f"evicts {'?' if evicted is None else f'{evicted:,.0f}'}/s",
    )


def _waiting(waiting: Waiting) -> Text:
    parts = [f"{job} {waiting.jobs[job]:,.0f}" for job in JOBS]
    text = Text.assemble(("jobs ", "bold"), ", ".join(parts))
    for count, name in (
        (waiting.backlog_blocks, "blocks to be written"),
        (waiting.uncommitted_changes, "changes to be committed"),
        (waiting.limbo_blocks, "slots to come free"),
    ):
        if count:
            text.append(f"   {count:,.0f} {name}")
    if waiting.write_budget_bytes is not None:
        text.append(f"   may write {size(int(waiting.write_budget_bytes))} now")
    return text


def _failures(engine: Engine) -> Text:
    if not engine.failures:
        return Text("no failures", "dim green")
    said = [f"{number(count)} {FAILURES[name]}" for name, count in engine.failures.items()]
    return Text.assemble(("failures  ", "bold red"), (", ".join(said), "red"))
