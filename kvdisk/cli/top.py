# SPDX-License-Identifier: Apache-2.0
"""``kvdisk top``: a store in use, its engines and drives now, and how fast things are. Reads only.

An engine's rates are the difference of two readings of its FIGURES. ``Frame`` is what ``--json``
prints; its shape changes only with ``json_version``. Bytes are those of all ranks. ``null`` is what
is not known, or where nothing was asked. Rates (``*_per_s``) are those of the last ``seconds``; 0
where the engine is idle. Shares are between 0 and 1. Times (``*_s``) are seconds, those of moments
since the Unix epoch.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Column
from rich.text import Text

from kvdisk.blocks import Tier
from kvdisk.cli.output import (
    ID_LETTERS,
    AsJson,
    Exit,
    StoreDirectories,
    ago,
    bar,
    duration,
    engine_store,
    folded,
    in_counts,
    left,
    lines_of,
    make_lines,
    make_table,
    miss_counts,
    number,
    opening,
    plural,
    print_json,
    printable,
    report_console,
    share,
    short_model,
    size,
    speed,
)
from kvdisk.device import paths
from kvdisk.device.drives import list_directories
from kvdisk.device.listing import HomeOwner, list_owners
from kvdisk.device.telemetry_file import DriveTelemetry, TelemetryRecord, read_telemetry
from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError
from kvdisk.stats import FAILURES, HARMLESS, JOBS, ROUTES, SOURCES, TIER_WORDS, TIERS, Miss

JSON_VERSION = 3
STALE_S = 3.0
"""Seconds without new figures after which an engine is idle: it writes them when they change."""
HISTORY = 12
LOCK_WAIT_S = 2.0
NVME = Tier.NVME.name.lower()
READS = tuple(route for route in ROUTES if route.startswith(f"{NVME}_to_"))
WRITES = tuple(route for route in ROUTES if route.endswith(f"_to_{NVME}"))
STOPPED_SHOWN = 8
PROBLEMS_SHOWN = 5
MISSES_SHOWN = 2
_BAR_LETTERS = 8
_ROW_LETTERS, _STATE_LETTERS = 49, 16
"""Letters of a row without its model and state, and of a state."""
FETCH, SEND = (f"{Tier.REMOTE.label}_to_{Tier.CPU.label}", f"{Tier.CPU.label}_to_{Tier.REMOTE.label}")
FLOWS = tuple(route for route in ROUTES if route not in {*READS, *WRITES, FETCH, SEND})
"""Routes that neither read nor write NVMe, and are not those of the remote store."""
_WAITING = {
    "backlog_blocks": "blocks to write",
    "uncommitted_changes": "changes to commit",
    "awaiting_commit_blocks": "slots to free",
}
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class TierFigures:
    """A tier. ``hit_rate``: since the start. ``hit_rate_now``: in the last ``seconds``."""

    used_bytes: int
    capacity_bytes: int
    hit_rate: float | None
    hit_rate_now: float | None
    evicted_blocks_per_s: float | None


@dataclass(frozen=True)
class RemoteFigures:
    """The remote store, as one engine uses it. ``sent_blocks``, ``rejects``: since the start.
    ``paused``: it did not answer, and is left alone for now."""

    hit_rate: float | None
    hit_rate_now: float | None
    sent_blocks: int
    rejects: int
    paused: bool


@dataclass(frozen=True)
class Engine:
    """An engine store in use. ``figures_s``: when its figures were true; null where there are none
    yet.

    ``reset_s``: when it last began to serve nothing that was stored before. ``problem``: why its
    figures cannot be read. ``seconds``: the time over which its rates are. ``tiers``: by name, such
    as "cpu". ``remote``: null where there is none. ``bytes_per_s``: by route, such as "gpu_to_cpu".
    ``waiting``: ``jobs`` by kind, and the gauges of docs/METRICS.md ``backlog_blocks``,
    ``uncommitted_changes``, ``awaiting_commit_blocks`` and ``write_budget_bytes`` (null: writes
    have no such bound). ``failures``: by kind, since its start, without those that are 0.
    ``harmless``: failures that a healthy machine has too. ``reads``, ``writes``: bytes per second
    from and to NVMe at the last looks, the newest last.
    """

    engine_store: str
    model: str | None
    problem: str | None = None
    pid: int | None = None
    host: str | None = None
    ranks: int | None = None
    data_parallel_rank: int | None = None
    started_s: float | None = None
    reset_s: float | None = None
    figures_s: float | None = None
    idle: bool = False
    seconds: float | None = None
    tiers: Mapping[str, TierFigures] = field(default_factory=dict)
    remote: RemoteFigures | None = None
    bytes_per_s: Mapping[str, float] | None = None
    waiting: Mapping[str, Any] | None = None
    failures: Mapping[str, int] = field(default_factory=dict)
    harmless: Mapping[str, int] = field(default_factory=dict)
    reads: tuple[float, ...] = ()
    writes: tuple[float, ...] = ()

    def flow(self, routes: Iterable[str]) -> float | None:
        """Return the bytes per second on these routes; None where they are not known."""
        return None if self.bytes_per_s is None else sum(self.bytes_per_s[route] for route in routes)


@dataclass(frozen=True)
class Drive:
    """A directory of the store. ``quarantined``: the number of engines that have it in
    quarantine."""

    path: str
    engines: int
    read_bytes: int
    written_bytes: int
    read_bytes_per_s: float | None
    written_bytes_per_s: float | None
    quarantined: int


@dataclass(frozen=True)
class StoppedEngine:
    """An engine store that a stopped engine has left."""

    engine_store: str
    model: str | None
    last_use_s: int | None


@dataclass(frozen=True)
class Totals:
    """Sums over all engines. ``lookup_tokens`` (asked of the tiers), ``hit_rate`` (of these),
    ``saved_seconds``, ``misses`` (requests, by reason, see docs/METRICS.md): since the engines'
    starts. Rates: from and to NVMe."""

    engines: int
    stopped: int
    used_bytes: Mapping[str, int]
    capacity_bytes: Mapping[str, int]
    lookup_tokens: int
    hit_rate: float | None
    saved_seconds: int
    misses: Mapping[Miss, int]
    read_bytes_per_s: float | None
    written_bytes_per_s: float | None


@dataclass(frozen=True)
class Frame:
    """A store at one moment. ``engines``: by their start. ``problems``: what cannot be shown, in
    sentences."""

    time_s: float
    store: Mapping[str, Path]
    problems: tuple[str, ...]
    totals: Totals
    engines: tuple[Engine, ...]
    drives: tuple[Drive, ...]
    stopped: tuple[StoppedEngine, ...]


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
    until q or ctrl-C.

    Reads the figures of engines, which are new once a second at most; engines may come and go.

    Without a terminal, and with --json, there is one frame, as with --once. Only reads; needs
    neither a GPU nor vLLM.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  a frame was shown, also after q or ctrl-C

    [cyan]2[/cyan]  none: not a store, no permission, a newer format, or wrong usage
    """
    console = report_console()
    try:
        with opening(directories) as named:
            reader = TopReader(named)
            frame = reader.read()
            if as_json or once or not console.is_terminal or console.is_dumb_terminal:
                if frame.engines:  # how things are after one interval, over which rates are known
                    time.sleep(interval_s)
                    frame = reader.read()
                print_json(frame, JSON_VERSION) if as_json else console.print(draw(frame, console.width))
            else:
                _watch(reader, frame, console, interval_s)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.FINE) from None


def _watch(reader: TopReader, frame: Frame, console: Console, interval_s: float) -> None:
    """Show frames until q or KeyboardInterrupt. A look that fails is noted in the frame before
    it."""
    note = ""
    with (
        _keyboard() as typed_q,
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="ellipsis") as live,
    ):
        while True:
            live.update(draw(frame, console.width, note, console.height), refresh=True)
            if typed_q(interval_s):
                return
            try:
                frame, note = reader.read(), ""
            except KvdiskError as error:
                note = f"The store cannot be read, shown as of {time.time() - frame.time_s:.0f} s ago: {error}"


@contextmanager
def _keyboard() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits so many seconds, or until q is typed, and returns whether it
    was."""
    fd = sys.stdin.fileno() if sys.stdin.isatty() else None

    def typed_q(seconds: float) -> bool:
        if fd is None:
            time.sleep(seconds)
            return False
        end_s = time.monotonic() + seconds
        while select.select([fd], [], [], max(0.0, end_s - time.monotonic()))[0]:
            typed = os.read(fd, 64)
            if not typed or b"q" in typed.lower():  # a terminal that is gone gives nothing
                return True
        return False

    if fd is None:
        yield typed_q
        return
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield typed_q
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


# -- reading -----------------------------------------------------------------------------------


def _counted(figures: TelemetryRecord) -> Counter[str]:
    """Return all that only rises: counters by series, bytes by route, and bytes by drive."""
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


class _Watched:
    """An engine over time. ``last``: the figures read last.

    ``per_s``: how fast each of ``_counted`` rose in the ``seconds`` before them; None where that is
    not known yet. A value that fell was damaged, and counts as no rise.
    """

    def __init__(self, first: TelemetryRecord) -> None:
        self.last = first
        self.seconds: float | None = None
        self.per_s: dict[str, float] | None = None
        self.reads, self.writes = deque[float](maxlen=HISTORY), deque[float](maxlen=HISTORY)

    def look(self, figures: TelemetryRecord, *, idle: bool) -> None:
        """Compare the engine's figures with those before."""
        seconds = figures.time_s - self.last.time_s
        if seconds > 0:
            rose = _counted(figures) - _counted(self.last)
            self.per_s = {series: count / seconds for series, count in rose.items()}
            self.last, self.seconds = figures, seconds
        elif idle:
            self.per_s, self.seconds = {}, 1.0
        for history, routes in ((self.reads, READS), (self.writes, WRITES)):
            if (rate := self.rate(*routes)) is not None:
                history.append(rate)

    def rate(self, *series: str) -> float | None:
        """Return what these series rose by in a second, together; None where that is not known
        yet."""
        return None if self.per_s is None else sum(self.per_s.get(one, 0.0) for one in series)

    def tier(self, name: str) -> TierFigures | None:
        """Return a tier's figures; None where the engine does not have the tier."""
        gauges, capacity_bytes = self.last.gauges, self.last.gauges.get(f"capacity_bytes.{name}")
        if not capacity_bytes:
            return None
        return TierFigures(
            int(gauges.get(f"used_bytes.{name}", 0)),
            int(capacity_bytes),
            hit_rate=hit_rate(self.last.totals, name),
            hit_rate_now=hit_rate(self.per_s or {}, name),
            evicted_blocks_per_s=self.rate(f"evicted_blocks.{name}"),
        )

    def remote(self) -> RemoteFigures | None:
        """Return the remote store's figures; None where the engine has none."""
        totals, paused = self.last.totals, self.last.gauges.get("remote_paused")
        if paused is None:
            return None
        rates = hit_rate(totals, Tier.REMOTE.label), hit_rate(self.per_s or {}, Tier.REMOTE.label)
        return RemoteFigures(*rates, totals.get("sent_blocks", 0), totals.get("remote_rejects", 0), bool(paused))


class TopReader:
    """Reads a store again and again. ``clock``: returns seconds since the Unix epoch."""

    def __init__(self, directories: Sequence[Path], clock: Callable[[], float] = time.time) -> None:
        self._directories = list_directories(list(directories))
        self._clock = clock
        self._watched: dict[str, _Watched] = {}

    def read(self) -> Frame:
        """Return the store as it is now. Raises as ``Store.open``, and StoreLocked."""
        listed = list_owners(self._directories, LOCK_WAIT_S)
        owners = [owner for owner in listed if owner.record is None or not owner.record.guest]  # those have no figures
        now_s = self._clock()
        engines = [self._engine(owner, now_s) for owner in owners if owner.alive]
        engines.sort(key=lambda engine: (engine.started_s or 0.0, engine.engine_store))
        known = {engine.engine_store for engine in engines if engine.figures_s is not None}
        self._watched = {home_id: each for home_id, each in self._watched.items() if home_id in known}
        stopped = [
            StoppedEngine(owner.id, _model_of(owner), owner.record.last_use_s if owner.record else None)
            for owner in owners
            if not owner.alive
        ]
        stopped.sort(key=lambda one: -(one.last_use_s or 0))
        problems = [f"{engine_store(each.engine_store)}: {each.problem}" for each in engines if each.problem]
        problems += [
            f"{engine_store(each.engine_store)}: HOME cannot be read" for each in stopped if each.last_use_s is None
        ]
        drives: dict[str, list[tuple[_Watched, DriveTelemetry]]] = {}
        for watched in self._watched.values():
            for drive in watched.last.drives:
                drives.setdefault(drive.path, []).append((watched, drive))
        return Frame(
            round(now_s, 3),
            {"path": self._directories[0]},
            tuple(problems),
            self._totals(engines, len(stopped)),
            tuple(engines),
            tuple(_drive(path, users) for path, users in sorted(drives.items())),
            tuple(stopped),
        )

    def _engine(self, owner: HomeOwner, now_s: float) -> Engine:
        figures, problem = None, None
        try:
            with paths.device_errors(f"reading the figures of engine store {owner.id}"):
                figures = read_telemetry(owner.path)
        except (CorruptRecord, DeviceError) as error:
            problem = str(error).replace(f"{owner.path}/", "")
        if figures is None:
            return Engine(owner.id, _model_of(owner), problem)
        idle = abs(now_s - figures.time_s) >= STALE_S  # of a clock that was ahead: nobody goes on writing
        watched = self._watched.get(owner.id)
        if watched is None or (watched.last.pid, watched.last.started_s) != (figures.pid, figures.started_s):
            watched = self._watched[owner.id] = _Watched(figures)
        watched.look(figures, idle=idle)
        gauges = figures.gauges
        return Engine(
            engine_store=owner.id,
            model=figures.model or _model_of(owner),
            pid=figures.pid,
            host=figures.host,
            ranks=figures.ranks,
            data_parallel_rank=figures.data_parallel_rank,
            started_s=figures.started_s,
            reset_s=figures.reset_s,
            figures_s=figures.time_s,
            idle=idle,
            seconds=watched.seconds,
            tiers={name: tier for name in TIERS if (tier := watched.tier(name))},
            remote=watched.remote(),
            bytes_per_s=None if watched.per_s is None else {route: watched.per_s.get(route, 0.0) for route in ROUTES},
            waiting={"jobs": {job: int(gauges.get(f"queued_jobs.{job}", 0)) for job in (*JOBS, "files")}}
            | {name: int(gauges.get(name, 0)) for name in _WAITING}
            | {"write_budget_bytes": None if (left := gauges.get("write_budget_bytes")) is None else int(left)},
            failures={series: figures.totals[series] for series in FAILURES if figures.totals.get(series)},
            harmless={series: figures.totals[series] for series in HARMLESS if figures.totals.get(series)},
            reads=tuple(watched.reads),
            writes=tuple(watched.writes),
        )

    def _totals(self, engines: Sequence[Engine], stopped: int) -> Totals:
        counted = Counter[str]()
        for watched in self._watched.values():
            counted.update(watched.last.totals)
        asked, hit = counted["lookup_tokens"], sum(counted[f"hit_tokens.{tier}"] for tier in SOURCES)
        tiers = {name: [engine.tiers[name] for engine in engines if name in engine.tiers] for name in TIERS}
        return Totals(
            engines=len(engines),
            stopped=stopped,
            used_bytes={name: sum(tier.used_bytes for tier in found) for name, found in tiers.items()},
            capacity_bytes={name: sum(tier.capacity_bytes for tier in found) for name, found in tiers.items()},
            lookup_tokens=asked,
            hit_rate=min(1.0, hit / asked) if asked else None,
            saved_seconds=counted["saved_seconds"],
            misses=miss_counts(counted),
            read_bytes_per_s=_sum_known(engine.flow(READS) for engine in engines),
            written_bytes_per_s=_sum_known(engine.flow(WRITES) for engine in engines),
        )


def _drive(path: str, users: Sequence[tuple[_Watched, DriveTelemetry]]) -> Drive:
    """Return a drive with the sums over the engines that use it. Its rates are those of the engines
    whose rates are known."""
    return Drive(
        path,
        engines=len(users),
        read_bytes=sum(drive.read_bytes for _, drive in users),
        written_bytes=sum(drive.written_bytes for _, drive in users),
        read_bytes_per_s=_sum_known(watched.rate(f"read {path}") for watched, _ in users),
        written_bytes_per_s=_sum_known(watched.rate(f"written {path}") for watched, _ in users),
        quarantined=sum(drive.quarantined for _, drive in users),
    )


def _sum_known(rates: Iterable[float | None]) -> float | None:
    """Return the sum of the rates that are known; None where none is."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _model_of(owner: HomeOwner) -> str | None:
    name = owner.record and owner.record.description.get("model")
    return None if name is None else str(name)


# -- for people --------------------------------------------------------------------------------


def draw(frame: Frame, width: int, note: str = "", height: int | None = None) -> RenderableType:
    """Return a frame to print. ``width``, ``height``: of the terminal; ``height`` None: it scrolls.
    ``note``: about the reading itself.

    Drives come first, then a box for each engine. Where the boxes do not fit, each engine has a
    row; where the rows do not fit, the engines with failures come first, and a line says how many
    more there are.
    """
    above: list[RenderableType] = [_head(frame)]
    if note:
        above.append(Text(printable(note), "red"))
    if frame.drives:
        above.append(_drives(frame, width))
    problems = [Text.assemble(("✗ ", "red"), printable(problem)) for problem in frame.problems]
    below: list[RenderableType] = list(_listed(problems, PROBLEMS_SHOWN))
    stopped: list[RenderableType] = []
    if frame.stopped:
        stopped += [Text("\nEngine stores of stopped engines", "bold dim"), *_listed(_stopped(frame), STOPPED_SHOWN)]
    boxes = [_engine(engine, frame.time_s) for engine in frame.engines]
    if height is None:
        return Group(*above, *boxes, *stopped, *below)
    room = height - lines_of(Group(*above, *below), width)
    if lines_of(Group(*boxes), width) > room:
        boxes = [_rows(frame.engines, width, room)]
    if lines_of(Group(*boxes, *stopped), width) > room:
        stopped = []  # the head says how many there are
    return Group(*above, *boxes, *stopped, *below)


def _rows(engines: Sequence[Engine], width: int, room: int) -> RenderableType:
    """Return a table with a row for each engine, in ``room`` lines."""
    most = max(1, room - 3)  # beside title, header and rule
    shown = list(engines)
    if len(engines) > most:
        shown = sorted(engines, key=lambda engine: not (engine.failures or engine.problem))[: max(1, most - 1)]
    columns = [("CPU", 5), ("NVMe", 5), ("Full", 5), *([("Read", 9), ("Written", 9)] if width >= _ROW_LETTERS else [])]
    table = make_table("", width, Column("Engine", width=ID_LETTERS))
    table.title = "Engines: hits of CPU and NVMe since the start, and how full NVMe is"
    model_letters = min(40, width - _ROW_LETTERS - _STATE_LETTERS)
    if has_model := model_letters >= 8:
        table.add_column("Model", width=model_letters, no_wrap=True, overflow="ellipsis")
    for header, letters in columns:
        table.add_column(header, width=letters, justify="right")
    table.add_column("State", no_wrap=True, overflow="ellipsis")
    for engine in shown:
        tiers = [engine.tiers.get(tier) for tier in TIERS]
        cells = ["-" if tier is None or tier.hit_rate is None else share(tier.hit_rate) for tier in tiers]
        cells.append("-" if tiers[-1] is None else share(tiers[-1].used_bytes / tiers[-1].capacity_bytes))
        cells += [speed(engine.flow(routes)) for routes in (READS, WRITES)]
        name = [short_model(engine.model).rpartition("/")[2]] if has_model else []
        table.add_row(Text(engine.engine_store[:ID_LETTERS], "cyan"), *name, *cells[: len(columns)], _state(engine))
    more = [Text(f"+{plural(len(engines) - len(shown), 'engine')}", "dim")] if len(shown) < len(engines) else []
    return Group(table, *more)


def _state(engine: Engine) -> Text:
    if engine.problem or engine.figures_s is None:
        return Text("figures unreadable", "red") if engine.problem else Text("no figures yet", "dim")
    if engine.failures:
        return Text(_failed(engine.failures), "red")
    return Text("idle", "dim") if engine.idle else Text("fine", "green")


def _listed(lines: Sequence[Text], most: int) -> list[Text]:
    """Return the first lines, and a line that says how many more there are."""
    more = [Text(f"  … and {len(lines) - most} more", "dim")] if len(lines) > most else []
    return [*lines[:most], *more]


def spark(values: Sequence[float]) -> str:
    """Return values as a line of small bars, the largest of them the highest."""
    most = max(values, default=0.0) or 1.0
    return "".join(_SPARKS[round(value / most * (len(_SPARKS) - 1))] for value in values)


def _head(frame: Frame) -> RenderableType:
    lines, totals = make_lines(), frame.totals
    clock = time.strftime("%H:%M:%S", time.localtime(frame.time_s))
    lines.add_row("Store", Text.assemble((printable(frame.store["path"]), "bold cyan"), (f"  {clock}", "dim")))
    stopped = f", {plural(totals.stopped, 'engine store')} of stopped engines" if totals.stopped else ""
    if not frame.engines:
        lines.add_row("Engines", Text.assemble(("none is using this store now", "yellow"), stopped))
        return lines
    lines.add_row("Engines", f"{totals.engines} alive{stopped}")
    saved = f", which saved ~{duration(totals.saved_seconds)}" if totals.saved_seconds else ""
    asked = f" of {number(totals.lookup_tokens)} prompt tokens asked for{saved}"
    hits = (share(totals.hit_rate), "bold"), asked
    lines.add_row("Hits", Text.assemble(*hits))
    if totals.misses:
        lines.add_row("Misses", in_counts(totals.misses, MISSES_SHOWN))
    sizes = {tier: (totals.used_bytes[tier], most) for tier, most in totals.capacity_bytes.items() if most}
    tiers = (f"{TIER_WORDS[tier]} {size(used)} of {size(most)}" for tier, (used, most) in sizes.items())
    lines.add_row("Hold", "   ".join(tiers))
    return lines


def _drives(frame: Frame, width: int) -> RenderableType:
    numbers = ("Read now", "Written now", "Read", "Written", "Engines")
    table = make_table("", width, folded("Drive"), *numbers, left("State"))
    for drive in frame.drives:
        state = Text("fine", "green")
        if drive.quarantined:
            state = Text(f"not used by {drive.quarantined} of {drive.engines}", "bold red")
        table.add_row(
            printable(drive.path),
            speed(drive.read_bytes_per_s),
            speed(drive.written_bytes_per_s),
            size(drive.read_bytes),
            size(drive.written_bytes),
            number(drive.engines),
            state,
        )
    return table


def _stopped(frame: Frame) -> list[Text]:
    lines = []
    for one in frame.stopped:
        about = "HOME cannot be read"
        if one.last_use_s is not None:
            about = f"{short_model(one.model)}, last used {ago(one.last_use_s, int(frame.time_s))}"
        lines.append(Text(f"  {one.engine_store[:ID_LETTERS]}  {about}", "dim"))
    return lines


def _engine(engine: Engine, now_s: float) -> RenderableType:
    """Return an engine's box. A line of it goes on in the next where the terminal is narrow."""
    title = Text.assemble(
        ("● ", "dim" if engine.idle else "green"),
        (engine.engine_store[:ID_LETTERS], "cyan"),
        "  ",
        (short_model(engine.model), "bold"),
        "" if engine.data_parallel_rank is None else f"  DP {engine.data_parallel_rank}",
    )
    if engine.figures_s is None or engine.waiting is None:
        why = f"its figures cannot be read: {engine.problem}" if engine.problem else "it has written no figures yet"
        return Panel(Text(printable(why), "red" if engine.problem else "dim"), title=title, title_align="left")
    about = f"pid {engine.pid} on {printable(engine.host)}, {plural(engine.ranks or 0, 'rank')}, "
    about += f"up {duration(max(0.0, now_s - (engine.started_s or 0.0)))}"
    if engine.reset_s is not None:
        about += f", reset {duration(max(0.0, now_s - engine.reset_s))} ago"
    if engine.idle:
        about += f", idle for {duration(now_s - engine.figures_s)}"
    flows = "   ".join(f"{_in_words(route)} {speed(engine.flow([route]))}" for route in FLOWS)
    written, read = (spark(engine.writes), "yellow"), (spark(engine.reads), "magenta")
    to_nvme, from_nvme = (speed(engine.flow(routes)) for routes in (WRITES, READS))
    drive = Text.assemble(f"→ NVMe {to_nvme} ", written, f"   NVMe → {from_nvme} ", read)
    lines = [_tier(name, tier) for name, tier in engine.tiers.items()]
    lines += [_remote(engine.remote, engine)] if engine.remote is not None else []
    lines += [Text(flows), drive, _waiting(engine.waiting)]
    lines += _failures(engine)
    return Panel(Group(*lines), title=title, title_align="left", subtitle=Text(about, "dim"), subtitle_align="right")


def _in_words(route: str) -> str:
    return " → ".join(TIER_WORDS[tier] for tier in route.split("_to_"))


def _tier(name: str, tier: TierFigures) -> Text:
    fill, evicted = tier.used_bytes / tier.capacity_bytes, tier.evicted_blocks_per_s
    now, ever = ("-" if rate is None else share(rate) for rate in (tier.hit_rate_now, tier.hit_rate))
    ever = f"({ever} in all)"
    return Text.assemble(
        (f"{TIER_WORDS[name]:<5}", "bold"),
        "hits ",
        (f"{now:>5}", "bold green"),
        (f" {ever:<14}  ", "dim"),
        (bar(fill, _BAR_LETTERS), "cyan"),
        f" {share(fill):>5} of {size(int(tier.capacity_bytes)):<9}",
        f"  evicts {'?' if evicted is None else f'{evicted:,.0f}'}/s",
    )


def _remote(remote: RemoteFigures, engine: Engine) -> Text:
    now, ever = ("-" if rate is None else share(rate) for rate in (remote.hit_rate_now, remote.hit_rate))
    text = Text.assemble(
        ("remote ", "bold"), "hits ", (f"{now:>5}", "bold green"), (f" {f'({ever} in all)':<14}  ", "dim")
    )
    text.append(f"sent {number(remote.sent_blocks)}, now {speed(engine.flow([SEND]))}, ")
    reads = ("does not answer", "bold red") if remote.paused else (f"reads {speed(engine.flow([FETCH]))}", "")
    return text.append(*reads)


def _waiting(waiting: Mapping[str, Any]) -> Text:
    jobs = ", ".join(f"{job} {waiting['jobs'][job]:,.0f}" for job in JOBS if waiting["jobs"][job])
    text = Text.assemble(("jobs ", "bold"), jobs or "none")
    text.append("".join(f", {waiting[name]:,.0f} {what}" for name, what in _WAITING.items() if waiting[name]))
    if waiting["write_budget_bytes"] is not None:
        text.append(f", may write {size(int(waiting['write_budget_bytes']))} now")
    return text


def _failures(engine: Engine) -> list[Text]:
    """Return what has failed, and dimmed the failures that a healthy machine has too."""
    lines = []
    if engine.failures:
        lines.append(Text.assemble(("failures  ", "bold red"), (_failed(engine.failures), "red")))
    if engine.harmless:
        lines.append(Text(f"no fault: {_failed(engine.harmless)}", "dim"))
    return lines


def _failed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number(count)} {(FAILURES | HARMLESS)[name]}" for name, count in counts.items())
