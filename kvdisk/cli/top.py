# SPDX-License-Identifier: Apache-2.0
"""``kvdisk top``: a store in use, drawn again and again. What it reads: ``kvdisk.cli.frames``."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Column
from rich.text import Text

from kvdisk.blocks import Tier
from kvdisk.cli.frames import (
    JSON_VERSION,
    READS,
    WAITING,
    WRITES,
    Engine,
    Frame,
    FrameReader,
    RemoteFigures,
    TierFigures,
)
from kvdisk.cli.output import (
    ID_LETTERS,
    AsJson,
    Exit,
    StoreDirectories,
    ago,
    bar,
    duration,
    folded,
    in_counts,
    left,
    lines_of,
    make_lines,
    make_table,
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
from kvdisk.errors import KvdiskError
from kvdisk.stats import FAILURES, HARMLESS, JOBS, ROUTES, TIER_WORDS, TIERS

STOPPED_SHOWN = 8
PROBLEMS_SHOWN = 5
MISSES_SHOWN = 2
_BAR_LETTERS = 8
_ROW_LETTERS, _STATE_LETTERS = 49, 16
"""Letters of a row without its model and state, and of a state."""
FETCH, SEND = (f"{Tier.REMOTE.label}_to_{Tier.CPU.label}", f"{Tier.CPU.label}_to_{Tier.REMOTE.label}")
FLOWS = tuple(route for route in ROUTES if route not in {*READS, *WRITES, FETCH, SEND})
"""Routes that neither read nor write NVMe, and are not those of the remote store."""
_SPARKS = "▁▂▃▄▅▆▇█"


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
            reader = FrameReader(named)
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


def _watch(reader: FrameReader, frame: Frame, console: Console, interval_s: float) -> None:
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
    text.append("".join(f", {waiting[name]:,.0f} {what}" for name, what in WAITING.items() if waiting[name]))
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
