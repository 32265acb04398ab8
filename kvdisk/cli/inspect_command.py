# SPDX-License-Identifier: Apache-2.0
"""``kvdisk inspect``: from arguments to output and exit code."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvdisk.cli.block_tables import print_block
from kvdisk.cli.export import check_target, export_blocks
from kvdisk.cli.inspect_block import block_as_json, survey_block
from kvdisk.cli.inspect_json import JSON_VERSION, store_as_json
from kvdisk.cli.inspect_tables import print_store
from kvdisk.cli.refusal import NOTHING_DONE, refusing, store_paths
from kvdisk.cli.survey import PREFIXES, survey_store
from kvdisk.cli.wording import plural, printable, size
from kvdisk.errors import ConfigError

DirectoriesAndKey = Annotated[
    list[Path],
    typer.Argument(
        metavar="DIR... [KEY]",
        help="The store: all that store_dirs names. KEY: show one block, by 8 or more hex digits of its key.",
        readable=False,
    ),
]
LEAST_DIGITS = 8
MOST_PREFIXES = 10_000


class Exit(IntEnum):
    """Exit codes. WRONG: there is a report, and it names problems. NO_REPORT: there is none, one sentence says why."""

    FINE = 0
    WRONG = 1
    NO_REPORT = NOTHING_DONE


def inspect(
    directories: DirectoriesAndKey,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with bytes and times as integers.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="List every segment and every problem.")] = False,
    prefixes: Annotated[
        int,
        typer.Option("--prefixes", metavar="N", min=0, max=MOST_PREFIXES, help="Show the N biggest shared prefixes."),
    ] = PREFIXES,
    target: Annotated[
        Path | None,
        typer.Option(
            "--export", metavar="FILE", help="Write a row for each block into a .csv or .parquet file instead."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --export.")] = False,
) -> None:
    """Show what a store holds: namespaces, homes, segments and drives; how old blocks are, and which are used again.

    With a KEY, one block: its record, the slot of every rank, its chain. Only reads, so it may look into a store that
    engines are using, or into a copy. Needs neither a GPU nor vLLM.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  all is fine

    [cyan]1[/cyan]  something in the store is wrong, such as an index that cannot be read; the report says what

    [cyan]2[/cyan]  no report: not a store, no permission, a newer format, or wrong usage
    """
    *paths, last = directories
    wanted = _key_of(last) if paths else None
    paths = store_paths(paths if wanted is not None else directories)
    console = Console(markup=False, highlight=False, emoji=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars and ellipses, where the locale has none
    with refusing(paths):
        if target is not None:
            if wanted is not None:
                raise ConfigError("--export writes all blocks, and takes no KEY")
            problems, found = _export(paths, target, force, as_json)
        elif wanted is not None:
            if len(wanted) < LEAST_DIGITS:
                raise ConfigError(f"{wanted} is no directory, and a KEY has {LEAST_DIGITS} hex digits or more")
            block = survey_block(paths, wanted)
            problems, found = block.problems, block_as_json(block)
            if not as_json:
                print_block(block, console, everything=everything)
        else:
            facts = survey_store(paths, prefixes=prefixes)
            problems, found = facts.problems, store_as_json(facts)
            if not as_json:
                print_store(facts, console, everything=everything)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    raise typer.Exit(Exit.WRONG if problems else Exit.FINE)


def _key_of(last: Path) -> str | None:
    """Return the digits of a KEY, if that is what the last argument is: hex digits, and nothing of that name."""
    digits = str(last).lower()
    is_key = re.fullmatch("[0-9a-f]+", digits) and not os.path.lexists(last)
    return digits if is_key else None


def _export(paths: list[Path], target: Path, force: bool, as_json: bool) -> tuple[tuple[str, ...], dict[str, Any]]:
    check_target(target, force=force)
    try:
        done = export_blocks(paths, target)
        length_bytes = target.stat().st_size
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror})") from None
    if not as_json:
        typer.echo(f"{plural(done.rows, 'block')} of {plural(done.homes, 'home')} in {target} ({size(length_bytes)})")
        for problem in done.problems:
            typer.echo(f"kvdisk: {printable(problem)}", err=True)
    names = ("rows", "homes", "problems")
    found = {"json_version": JSON_VERSION, "path": str(target), "bytes": length_bytes}
    return done.problems, found | {name: getattr(done, name) for name in names}
