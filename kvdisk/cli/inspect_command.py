# SPDX-License-Identifier: Apache-2.0
"""``kvdisk inspect``: from arguments to output and exit code."""

from __future__ import annotations

import io
import json
import sys
from enum import IntEnum
from typing import Annotated

import typer
from rich.console import Console

from kvdisk.cli.inspect_json import store_as_json
from kvdisk.cli.inspect_tables import print_store
from kvdisk.cli.refusal import NOTHING_DONE, StoreDirectories, refusing, store_paths
from kvdisk.cli.survey import PREFIXES, survey_store

MOST_PREFIXES = 10_000


class Exit(IntEnum):
    """Exit codes. WRONG: there is a report, and it names problems. NO_REPORT: there is none, one sentence says why."""

    FINE = 0
    WRONG = 1
    NO_REPORT = NOTHING_DONE


def inspect(
    directories: StoreDirectories,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with bytes and times as integers.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="List every segment and every problem.")] = False,
    prefixes: Annotated[
        int,
        typer.Option("--prefixes", metavar="N", min=0, max=MOST_PREFIXES, help="Show the N biggest shared prefixes."),
    ] = PREFIXES,
) -> None:
    """Show what a store holds: namespaces, homes, segments and drives; how old blocks are, and which are used again.

    Only reads, so it may look into a store that engines are using, or into a copy. Needs neither a GPU nor vLLM.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  all is fine

    [cyan]1[/cyan]  something in the store is wrong, such as an index that cannot be read; the report says what

    [cyan]2[/cyan]  no report: not a store, no permission, a newer format, or wrong usage
    """
    paths = store_paths(directories)
    with refusing(paths):
        facts = survey_store(paths, prefixes=prefixes)
    if as_json:
        typer.echo(json.dumps(store_as_json(facts), indent=2))
    else:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # bars and ellipses, where the locale has none
        print_store(facts, Console(markup=False, highlight=False, emoji=False), everything=everything)
    raise typer.Exit(Exit.WRONG if facts.problems else Exit.FINE)
