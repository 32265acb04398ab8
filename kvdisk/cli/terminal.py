# SPDX-License-Identifier: Apache-2.0
"""What the commands show beside their result, and what they ask: consoles, progress, questions."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kvdisk.cli.refusal import refusal


def report_console(*, stderr: bool = False) -> Console:
    """Return the console for a report. It reads no markup, since names come from files."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # bars and ellipses, where the locale has none
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show bytes, rate and remaining time on standard error, if that is a terminal. Yields a call for (done, all)."""
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def watch(done_bytes: int, total_bytes: int) -> None:
            progress.update(task, completed=done_bytes, total=total_bytes)

        yield watch


def ask(question: str) -> None:
    """Ask on the terminal, on standard error, and end the command unless the answer is yes.

    Where nobody can be asked, that is a refusal too.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise refusal("nothing was deleted, since there is no terminal to ask on; say --yes to delete without asking.")
    if not typer.confirm(question, default=False, err=True):
        raise refusal("nothing was deleted.")
