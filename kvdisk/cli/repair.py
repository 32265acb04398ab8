# SPDX-License-Identifier: Apache-2.0
"""``kvdisk repair``: rebuilds the index of each damaged engine store of a stopped engine, from its
slots.

``--json`` prints an object with ``json_version`` (3) and ``engine_stores``, a list of ``Repaired``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from kvdisk.cli.indexes import find_home, read_homes
from kvdisk.cli.output import (
    AsJson,
    Exit,
    OnlyHome,
    StoreDirectories,
    Yes,
    ask,
    can_ask,
    engine_store,
    opening,
    plural,
    print_json,
    printable,
    standard_output,
)
from kvdisk.cli.survey import survey_home
from kvdisk.cli.verify import why_unusable
from kvdisk.device.home import Home
from kvdisk.device.listing import list_homes
from kvdisk.device.store import Store
from kvdisk.errors import ConfigError, DeviceError, KvdiskError, StoreLocked
from kvdisk.recovery import rebuild_index


@dataclass(frozen=True)
class DroppedSegment:
    """A segment whose files are of no use."""

    drive: int
    segment: int
    why: str


@dataclass(frozen=True)
class Repaired:
    """How the repair of an engine store ended.

    "healthy": its index is healthy; its blocks were not read. ``why``: null where it was rebuilt or
    healthy. The other fields are null unless it was rebuilt. ``older_copies``: older copies of the
    same blocks, which were left out.
    """

    id: str
    result: Literal["rebuilt", "healthy", "in use", "failed"]
    why: str | None = None
    blocks: int | None = None
    segments: int | None = None
    older_copies: int | None = None
    dropped_segments: tuple[DroppedSegment, ...] | None = None


def repair(
    directories: StoreDirectories,
    home: OnlyHome = None,
    with_healthy: Annotated[
        bool,
        typer.Option(
            "--healthy", help="Rebuild sound indexes too: deleted blocks may come back, and ages are estimated."
        ),
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild the index of every damaged engine store that no engine owns, from its slots.

    An engine does this by itself when it starts and finds its index lost or
    damaged; this is for looking at once. Headers are read and no block: each
    is checked when it is loaded, and by kvdisk verify. Segments whose files
    are of no use are removed. An index that is healthy is left as it is,
    unless you say --healthy, and yes. Whether the blocks are, kvdisk verify
    says.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  the index of every engine store asked for is healthy, or was rebuilt

    [cyan]1[/cyan]  one could not be rebuilt, and the report says why; or it found no room

    [cyan]2[/cyan]  nothing was done: not a store, no such engine store, no permission, or wrong
    usage

    [cyan]3[/cyan]  a live engine owns one, which was left alone; the others were rebuilt
    """
    logging.getLogger("kvdisk").addHandler(logging.NullHandler())  # what it would say is in the report
    with opening(directories) as paths:
        wanted = find_home(paths, home)
        store = Store.open(paths, create=False)
        homes = read_homes(paths, lambda one: wanted in {None, one.id})
        stopped = [one for one in homes if not (one.summary.alive or why_unusable(one, store.boot_id))]
        healthy = {one.id for one in stopped if not survey_home(one).problems}
    whole = plural(len(healthy), "engine store")
    if healthy and with_healthy and not yes:
        question = f"Rebuild {whole} with a healthy index, too? Deleted blocks may come back, and ages are estimated."
        with_healthy = can_ask() and ask(question)
    left_alone = set() if with_healthy else healthy
    reports = [Repaired(one.id, "healthy") if one.id in left_alone else _repair(store, one.id) for one in homes]
    with standard_output(Exit.WRONG):
        if as_json:
            print_json({"json_version": 3, "engine_stores": reports})
        else:
            for report in reports if len(left_alone) < len(homes) else ():
                _print(report)
            if reports and len(left_alone) == len(homes):
                have = "has a healthy index" if len(homes) == 1 else "have healthy indexes"
                typer.echo(f"{whole} of stopped engines {have}.")
                typer.echo("There is nothing to repair. Blocks were not read; kvdisk verify reads them.")
            if not reports:
                empty = "is empty" if not list_homes(paths) else "has no index: those of its files are on other hosts"
                typer.echo(f"{printable(paths[0])} {empty}: there is nothing to repair.")
    codes = {"in use": Exit.IN_USE, "failed": Exit.WRONG}
    raise typer.Exit(max((codes.get(report.result, Exit.FINE) for report in reports), default=Exit.FINE))


@contextmanager
def held_home(store: Store, home_id: str) -> Iterator[Home]:
    """Own a stopped engine's store to change it. It is closed in order afterwards, unless the
    change failed.

    This does not count as a use of the engine store. Raises as ``Store.hold_home``, and
    DeviceError.
    """
    held = store.hold_home(home_id)
    try:
        yield held
    except BaseException:
        with suppress(DeviceError):  # the same drive's
            held.close(clean=False, used=False)
        raise
    held.close(clean=True, used=False)


def _repair(store: Store, home_id: str) -> Repaired:
    try:
        with held_home(store, home_id) as held:
            if None in held.folders:
                raise ConfigError("not all of its directories were named")
            done = rebuild_index(held, index_bytes=0)  # as large as it has to be
    except StoreLocked:
        return Repaired(home_id, "in use", "a live engine owns it")
    except KvdiskError as error:
        return Repaired(home_id, "failed", str(error))
    lost = tuple(DroppedSegment(*place, why) for place, why in done.lost.items())
    return Repaired(home_id, "rebuilt", None, len(done.blocks), len(done.segments), done.older_copies, lost)


def _print(report: Repaired) -> None:
    if report.result != "rebuilt":
        result = "index healthy" if report.result == "healthy" else report.result
        typer.echo(f"{engine_store(report.id)}: {result}{f', {printable(report.why)}' if report.why else ''}")
        return
    blocks, segments = plural(report.blocks or 0, "block"), plural(report.segments or 0, "segment")
    typer.echo(f"{engine_store(report.id)}: {blocks} in {segments} recovered")
    if report.older_copies:
        typer.echo(f"  older copies of the same blocks left out: {report.older_copies}")
    for one in report.dropped_segments or ():
        typer.echo(f"  dropped segment {one.segment} of drive {one.drive}: {printable(one.why)}")
