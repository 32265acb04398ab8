# SPDX-License-Identifier: Apache-2.0
"""``kvdisk top``: from arguments to frames and exit code."""

from __future__ import annotations

import io
import json
import sys
import time
from enum import IntEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from kvdisk.cli.refusal import NOTHING_DONE, StoreDirectories, refusing, store_paths
from kvdisk.cli.top_json import frame_as_json
from kvdisk.cli.top_reader import Frame, TopReader
from kvdisk.cli.top_view import frame_of
from kvdisk.errors import KvdiskError


class Exit(IntEnum):
    """Exit codes. FINE: there was a frame, and somebody or ``--once`` ended it. NO_FRAME: one sentence says why."""

    FINE = 0
    NO_FRAME = NOTHING_DONE


def top(
    directories: StoreDirectories,
    interval_s: Annotated[
        float, typer.Option("--interval", "-i", min=0.2, max=3600.0, help="Seconds between two looks at the store.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, with rates over one interval, and end.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead, and end.")] = False,
) -> None:
    """Watch a store in use: each engine's hits, rates, fill and queues, and each drive's bytes; until ctrl-C.

    Reads what engines tell of themselves, which is new once a second at most; engines may come and go.

    Without a terminal there is one frame, as with --once. Only reads, and needs neither a GPU nor vLLM.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  a frame was shown, also after ctrl-C

    [cyan]2[/cyan]  none: not a store, no permission, a newer format, or wrong usage
    """
    paths = store_paths(directories)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars and arrows, where the locale has none
    console = Console(markup=False, highlight=False, emoji=False)
    reader = TopReader(paths)
    try:
        with refusing(paths):
            first = reader.read()
            if as_json or once or not console.is_terminal or console.is_dumb_terminal:
                _show_once(reader, first, console, interval_s, as_json=as_json)
            else:
                _watch(reader, first, console, interval_s)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.FINE) from None


def _show_once(reader: TopReader, first: Frame, console: Console, interval_s: float, *, as_json: bool) -> None:
    """Show how things are after one interval, over which rates are known."""
    frame = first
    if first.engines:
        time.sleep(interval_s)
        frame = reader.read()
    if as_json:
        typer.echo(json.dumps(frame_as_json(frame), indent=2))
    else:
        console.print(frame_of(frame, console.width))


def _watch(reader: TopReader, first: Frame, console: Console, interval_s: float) -> None:
    """Show frame after frame until KeyboardInterrupt. A look that fails is noted in the frame before."""
    frame, note = first, ""
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            live.update(frame_of(frame, console.width, note), refresh=True)
            time.sleep(interval_s)
            try:
                frame, note = reader.read(), ""
            except KvdiskError as error:
                note = f"The store cannot be read, this is how it was {time.time() - frame.time_s:.0f} s ago: {error}"
