# SPDX-License-Identifier: Apache-2.0
"""``kvdisk report``: from arguments to a document and an exit code.

With ``--json`` it prints one object: json_version (1), path, bytes, problems.
"""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from kvdisk.cli.frames import LOCK_WAIT_S
from kvdisk.cli.output import (
    AsJson,
    Exit,
    StoreDirectories,
    new_file,
    opening,
    plural,
    print_json,
    printable,
    size,
)
from kvdisk.cli.report.page import MARK, page
from kvdisk.cli.survey import Survey, survey_store
from kvdisk.device.drives import list_directories
from kvdisk.device.listing import list_owners
from kvdisk.device.telemetry_file import TelemetryRecord, read_telemetry
from kvdisk.errors import ConfigError, CorruptRecord

PREFIXES, PREFIXES_IN_ALL = 1500, 2400
"""Prefixes that are drawn of a namespace, and of all namespaces, at most."""


def report(
    directories: StoreDirectories,
    target: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The report. Another report there is replaced.")
    ] = Path("kvdisk-report.html"),
    show: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is no report.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draw a store as one HTML file: what inspect shows, with pictures. It opens without a network.

    Occupancy of segments, age and reuse of blocks, what requests found and why not more, and the
    tree of shared prefixes to zoom into.
    Only reads the store.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  the report is written

    [cyan]1[/cyan]  it is written, and something in the store is wrong: the report says what

    [cyan]2[/cyan]  no report: not a store, no permission, a newer format, or wrong usage
    """
    with opening(directories) as paths:
        _check_target(target, force=force)
        survey, text = draw_report(paths)
        data = text.encode()
        with new_file(target) as temporary:
            temporary.write_bytes(data)
    if as_json:
        print_json({"json_version": 1, "path": target, "bytes": len(data), "problems": survey.problems})
    else:
        typer.echo(f"{printable(target)} ({size(len(data))})")
        if survey.problems:
            typer.echo(f"kvdisk: {plural(len(survey.problems), 'problem')}; the report names them", err=True)
    if show and not webbrowser.open(target.resolve().as_uri()):
        typer.echo("kvdisk: no browser could be opened", err=True)
    raise typer.Exit(Exit.WRONG if survey.problems else Exit.FINE)


def draw_report(directories: Sequence[Path]) -> tuple[Survey, str]:
    """Return what is in a store, and the report of it. Raises as ``survey_store``."""
    survey = survey_store(directories, prefixes=PREFIXES, prefixes_in_all=PREFIXES_IN_ALL, shared_only=False)
    return survey, page(survey, _records(directories))


def _records(directories: Sequence[Path]) -> list[TelemetryRecord]:
    """Return what the FIGURES files of the engines say, the latest first. A file that cannot be
    read is left out: nothing depends on it."""
    found = []
    for owner in list_owners(list_directories(directories), LOCK_WAIT_S):
        with suppress(CorruptRecord, OSError):
            found.append(read_telemetry(owner.path))
    return sorted((each for each in found if each is not None), key=lambda each: -each.time_s)


def _check_target(target: Path, *, force: bool) -> None:
    """Raise ConfigError where the report cannot be written. It is checked before the store is
    read."""
    if target.is_dir():
        raise ConfigError(f"{target} is a directory")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a directory")
    if os.path.lexists(target) and not force:
        try:
            with target.open("rb") as file:
                is_report = file.read(len(MARK)) == MARK.encode()
        except OSError as error:
            raise ConfigError(f"{target} cannot be read ({error.strerror})") from None
        if not is_report:
            raise ConfigError(f"{target} exists, and is no report; --force replaces it")
