# SPDX-License-Identifier: Apache-2.0
"""What all commands share: JSON, numbers in words, tables, questions, and the reasons for a
refusal."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from enum import Enum, IntEnum
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.filesize import pick_unit_and_suffix
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column, Table
from rich.text import Text

from kvdisk import __version__
from kvdisk.device.control import STORE_FILE
from kvdisk.errors import ConfigError, CorruptRecord, DeviceError, KvdiskError, NoThread, thread_errors
from kvdisk.errors import printable as printable  # noqa: PLC0414 - the commands take it from here
from kvdisk.stats import Miss

_STORE = typer.Argument(metavar="DIR...", help="The store: all that store_dirs names.", readable=False)
StoreDirectories = Annotated[list[Path], _STORE]
StoreDirectoriesOrNone = Annotated[list[Path] | None, _STORE]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, with bytes as integers.")]
OnlyHome = Annotated[
    str | None, typer.Option("--engine-store", metavar="ID", help="Only the engine store whose id begins so.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
JSON_WANTED: ContextVar[bool] = ContextVar("kvdisk_json", default=False)
"""Whether the command that runs was typed with ``--json``."""
ID_LETTERS = 8
SCREEN_LINES = 24
"""Lines of a terminal, unless it is larger: a report fits there."""
WIDE = 100
"""Columns from which on a table has room for everything."""
_UNITS_S = {"d": 86400, "h": 3600, "min": 60, "s": 1}
_AGES_S = _UNITS_S | {"m": 60, "w": 7 * 86400}
YEAR_S = 365 * 86400
_JUST_NOW_S = 5
_SPEEDS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
_LAST_S = 1 << 35
"""The latest time that is shown; later ones are shown as this one: the C library knows no year that
is much later."""
DENIED_ERRNOS = frozenset({errno.EACCES, errno.EPERM})
UNWRITABLE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class Exit(IntEnum):
    """Exit codes of the commands. WRONG: something is wrong, or less was done than asked.

    NOTHING_DONE: a store cannot be opened, or the usage is wrong; one sentence says why. IN_USE: a
    live engine owns what would have to change. OWN_ERROR: an error of ours in ``check``, whose
    other codes are a verdict: there is none. STOPPED: ended by Ctrl-C; what was found so far is
    shown.
    """

    FINE = 0
    WRONG = 1
    NOTHING_DONE = 2
    IN_USE = 3
    OWN_ERROR = 3
    STOPPED = 130


# -- JSON --------------------------------------------------------------------------------------


def print_json(value: object, json_version: int | None = None) -> None:
    """Print a value as one JSON object: dataclasses by field, paths as text, enums by value, bytes
    as hex. ``json_version``: print it and kvdisk's version first."""
    if json_version is not None:
        fields_of = value if isinstance(value, dict) else _plain(value)
        value = {"json_version": json_version, "kvdisk_version": __version__} | fields_of
    typer.echo(as_json_text(value, indent=2))


def as_json_text(value: object, indent: int | None = None) -> str:
    """Return a value as ``print_json`` prints it. ``indent``: spaces of a level; None: one line."""
    return json.dumps(value, default=_plain, indent=indent)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    return value.hex() if isinstance(value, bytes) else os.fspath(value)


# -- numbers and names -------------------------------------------------------------------------


def size(count_bytes: int | None) -> str:
    """Return bytes in the largest unit that leaves 1 or more: ``1.5 GiB``; ``?`` for None."""
    if count_bytes is None:
        return "?"
    unit, name = pick_unit_and_suffix(count_bytes, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024)
    return f"{count_bytes} B" if unit == 1 else f"{count_bytes / unit:.1f} {name}"


def number(count: int | None) -> str:
    """Return a count with its thousands separated: ``12,345``; ``?`` for None."""
    return "?" if count is None else f"{count:,}"


def share(fraction: float | None) -> str:
    """Return a share in per cent; 0 and 100 mean exactly none and all. ``?`` for None."""
    if fraction is None:
        return "?"
    if 0 < fraction < 0.01:
        return "<1 %"
    percent = 99 if 0.99 <= fraction < 1 else round(fraction * 100)
    return f"{percent} %"


def miss_counts(totals: Mapping[str, int]) -> dict[Miss, int]:
    """Return how many requests missed for each reason, the most frequent first. ``totals``: those
    of FIGURES, by series."""
    counts = {miss: totals.get(f"misses.{miss}", 0) for miss in Miss}
    return {miss: count for miss, count in sorted(counts.items(), key=lambda each: -each[1]) if count}


def speed(bytes_per_s: float | None) -> str:
    """Return bytes per second in the units in which drives are sold: ``1.8 GB/s``, ``812 MB/s``;
    ``-`` for none, ``?`` where it is not known."""
    if bytes_per_s is None:
        return "?"
    if bytes_per_s < 1:
        return "-"
    unit, name = next((unit, name) for unit, name in _SPEEDS if bytes_per_s >= 0.9995 * unit or unit == 1)
    count = bytes_per_s / unit
    return f"{count:,.1f} {name}/s" if unit > 1 and count < 99.95 else f"{count:,.0f} {name}/s"


def in_counts(misses: Mapping[Miss, int], most: int | None = None) -> str:
    """Return how many requests missed, and for the first ``most`` reasons: ``12 requests: 9 evicted
    from NVMe, 3 load failed``."""
    reasons = ", ".join(f"{number(count)} {miss.words}" for miss, count in list(misses.items())[:most])
    return f"{plural(sum(misses.values()), 'request')}: {reasons}"


def in_shares(misses: Mapping[Miss, int], most: int | None = None) -> str:
    """Return the first ``most`` reasons with their shares: ``evicted from NVMe 61 %, load failed 39
    %``."""
    whole = sum(misses.values())
    return ", ".join(f"{miss.words} {share(count / whole)}" for miss, count in list(misses.items())[:most])


def bar(fraction: float, width: int) -> str:
    """Return a bar of ``width`` characters, filled in that share."""
    filled = min(width, max(0, round(fraction * width)))
    return "█" * filled + "░" * (width - filled)


def ago(then_s: int | None, now_s: int) -> str:
    """Return how long ago a time was: ``3 min ago``; its date where it is in the future; ``?`` for
    None."""
    if then_s is None:
        return "?"
    age_s = now_s - then_s
    if age_s > YEAR_S:
        return "more than a year ago"
    if age_s < -60:
        return time.strftime("%Y-%m-%d", time.localtime(min(then_s, _LAST_S)))
    if age_s < _JUST_NOW_S:
        return "just now"
    unit = next(unit for unit, unit_s in _UNITS_S.items() if age_s >= unit_s)
    return f"{age_s // _UNITS_S[unit]} {unit} ago"


def duration(seconds: float) -> str:
    """Return a length of time in its largest two units: ``3 h 12 min``."""
    seconds = int(seconds)
    if seconds > YEAR_S:
        return "more than a year"
    for (unit, unit_s), (part, part_s) in pairwise(_UNITS_S.items()):
        if seconds >= unit_s:
            rest = seconds % unit_s // part_s
            return f"{seconds // unit_s} {unit}{f' {rest} {part}' if rest else ''}"
    return f"{seconds} s"


def plural(count: int, noun: str) -> str:
    """Return ``1 block``, ``2 blocks``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def engine_store(home_id: str) -> str:
    """Return an engine store's name for people: as many digits of its id as every command takes."""
    return f"engine store {home_id[:ID_LETTERS]}"


def short_model(model: object) -> str:
    """Return the last two parts of a model's path; a hub's name has no more."""
    name = printable(model)
    parts = PurePosixPath(name).parts
    return name if len(parts) <= 3 else str(PurePosixPath("…", *parts[-2:]))


def parse_age(key: str, text: str) -> int:
    """Read ``90s``, ``30min``, ``12h``, ``7d``, ``2w``; return whole seconds. Raises
    ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if match is None or match[2] not in _AGES_S:
        raise ConfigError(f"{key} is a time such as 12h, 7d or 2w, and not {text!r}.")
    return round(float(match[1]) * _AGES_S[match[2]])


# -- the terminal ------------------------------------------------------------------------------


def report_console(*, stderr: bool = False) -> Console:
    """Return the console for a report. It reads no markup, since names come from files."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # bars and ellipses, where the locale has none
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def make_lines() -> Table:
    """Return an empty table of lines: a name in bold, and a text."""
    return Table.grid(Column(style="bold", no_wrap=True), Column(overflow="fold"), padding=(0, 2))


def make_table(title: str, width: int, *columns: Column | str) -> Table:
    """Return an empty table with a title, if there is one; its columns are closer where the
    terminal is narrow. A header given as text makes a column of numbers."""
    return Table(
        *(Column(one, justify="right", no_wrap=True) if isinstance(one, str) else one for one in columns),
        title=f"\n{title}" if title else None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1 if width >= WIDE else 0, 0, 0),
        header_style="dim",
    )


def left(header: str, style: str = "") -> Column:
    """Return a column of text that is not cut."""
    return Column(header, style=style, no_wrap=True)


def folded(header: str, style: str = "") -> Column:
    """Return a column of text that goes on in the next line where there is no room."""
    return Column(header, style=style, overflow="fold")


def print_list(title: str, lines: Sequence[str], console: Console, most: int | None, more: str) -> None:
    """Print problems, a line each, at most ``most`` of them; ``more`` says how to see the rest."""
    if not lines:
        return
    console.print(Text(f"\n{title}", "bold red"))
    for line in lines[:most]:
        console.print(Text.assemble(("  ✗ ", "red"), printable(line)), soft_wrap=True)
    if most is not None and len(lines) > most:
        console.print(Text(f"  … and {number(len(lines) - most)} more; {more}", "dim"))


def lines_of(part: RenderableType, width: int) -> int:
    """Return how many lines of a terminal a part takes."""
    console = Console(width=width, file=io.StringIO(), markup=False, highlight=False, emoji=False)
    return len(console.render_lines(part, pad=False))


def print_fitting(
    title: str, lines: Sequence[str], style: str, console: Console, room: int | None, more: str
) -> int | None:
    """Print lines with a title in ``room`` lines of the terminal; ``more`` says how to see the
    rest. Return the lines that are left; None where there is no limit."""
    if not lines:
        return room
    bullets = [Text.assemble(("  ✗ " if style == "red" else "  · ", style), printable(line)) for line in lines]
    shown, taken = 0, 3  # an empty line, the title, and how many more there are
    for bullet in bullets:
        taken += -(-bullet.cell_len // console.width)
        if room is not None and taken > room and shown:
            break
        shown += 1
    console.print(Text(f"\n{title}", f"bold {style}"))
    for bullet in bullets[:shown]:
        console.print(bullet, soft_wrap=True)
    if shown < len(bullets):
        console.print(Text(f"  … and {number(len(bullets) - shown)} more; {more}", "dim"))
    return None if room is None else max(0, room - taken)


def print_note(note: str, console: Console) -> None:
    """Print a sentence that is worth knowing, but no fault."""
    console.print(Text.assemble(("  · ", "yellow"), printable(note)), soft_wrap=True)


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress on standard error, if it is a terminal. Yields a function to call with the
    bytes done, and all bytes."""
    console, bytes_done = report_console(stderr=True), DownloadColumn(binary_units=True)
    columns = ("{task.description}", BarColumn(), bytes_done, TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done_bytes, total_bytes: progress.update(task, completed=done_bytes, total=total_bytes)


def can_ask() -> bool:
    """Return whether there is a terminal to ask on."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str) -> bool:
    """Ask on the terminal, on standard error; return whether the answer is yes."""
    return typer.confirm(question, default=False, err=True)


# -- refusals ----------------------------------------------------------------------------------


@contextmanager
def opening(directories: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield the directories with symbolic links resolved, as a store must be named. Where a
    KvdiskError comes out, end the command with the reason in one sentence."""
    paths = [Path(os.path.realpath(directory)) for directory in directories]
    try:
        yield paths
    except KvdiskError as error:
        raise refusal(why_not(error, paths)) from None


def refusal(sentence: str, code: Exit = Exit.NOTHING_DONE, **also: object) -> typer.Exit:
    """Print one sentence on standard error, and with ``--json`` also as the object's ``error``,
    beside the values of ``also``. Return the exception that ends the command."""
    print_json_error(sentence, **also)
    typer.echo(f"kvdisk: {printable(sentence)}", err=True)
    return typer.Exit(code)


def print_json_error(sentence: str, **also: object) -> None:
    """Print ``{"error": ...}`` where the command that runs was typed with ``--json``."""
    if JSON_WANTED.get():
        print_json(also | {"error": printable(sentence)})


@contextmanager
def standard_output(code: Exit = Exit.NOTHING_DONE) -> Iterator[None]:
    """End the command with one sentence and ``code`` where its output cannot be written, as on
    /dev/full. End it with NOTHING_DONE where a path that was typed is in a directory that this user
    may not look into, and where no thread can be started."""
    try:
        with thread_errors():
            yield
    except NoThread as error:
        raise refusal(f"{error}.") from None
    except OSError as error:
        if error.filename is not None and error.errno in DENIED_ERRNOS:
            raise refusal(f"no permission to look at {error.filename}.") from None
        if error.filename is not None or error.errno not in UNWRITABLE_ERRNOS:
            raise
        # Python writes what is left once more at its end: send that nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise refusal(f"standard output cannot be written ({error.strerror}).", code) from None


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Yield a path to write to. The file gets its name when it is complete. Raises ConfigError."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            yield temporary
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror})") from None


def why_not(error: KvdiskError, paths: Sequence[Path]) -> str:
    """Say in one sentence why a store cannot be opened, and what would help."""
    if isinstance(error, CorruptRecord):  # its STORE file
        return f"{error}; repair cannot help: delete the directory, which is a cache."
    cause = error.__cause__
    if isinstance(error, DeviceError) and error.errno in DENIED_ERRNOS and isinstance(cause, OSError):
        return _denied(cause.filename or paths[0])
    for path in paths:
        try:
            path.lstat()
        except PermissionError:
            return _denied(path)
        except OSError:
            return f"{path} does not exist."
        around = next((parent for parent in path.parents if os.path.lexists(parent / STORE_FILE)), None)
        if around is not None and not os.path.lexists(path / STORE_FILE):
            return f"{path} is not a kvdisk store, but a part of {around}."
    return str(error).removeprefix("store_dirs: ").rstrip(".") + "."


def _denied(path: object) -> str:
    return f"no permission to read {path}; run this as the user whose engine made it."
