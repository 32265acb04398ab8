# SPDX-License-Identifier: Apache-2.0
"""``kvdisk prune``: its options. What it does and prints is in ``deleting``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvdisk.cli.amounts import parse_age, parse_size
from kvdisk.cli.deleting import Asked, delete
from kvdisk.cli.refusal import StoreDirectories, refusal, store_paths
from kvdisk.errors import ConfigError

OnlyOrphans = Annotated[
    bool, typer.Option("--orphans", help="Leave homes that an engine owns alone, instead of refusing.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def prune(
    directories: StoreDirectories,
    to: Annotated[
        str | None, typer.Option("--to", metavar="BYTES", help="Until no more than this is allocated: 500GiB.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Only blocks not used for so long: 12h, 7d, 2w.")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", metavar="N", help="Only of this namespace: how its id begins, or its model."),
    ] = None,
    orphans: OnlyOrphans = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete a part of a store: the oldest, what is old, or one namespace.

    Only homes that no engine owns are changed. What is to go is shown, and
    asked for, before anything is deleted. Of several conditions all must hold.
    A block was used when it was stored, or when one that comes after it in its
    prompt was. Space comes back by whole homes and segments; blocks that go
    beside make room for the next engine.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  done, or there was nothing to delete

    [cyan]1[/cyan]  less went than was asked for; the report says why

    [cyan]2[/cyan]  nothing was deleted: not a store, no permission, another
    format, wrong usage, or the answer was no

    [cyan]3[/cyan]  nothing was deleted, or a home less, because an engine owns it
    """
    try:
        to_bytes = None if to is None else parse_size("--to", to)
        older_than_s = None if older_than is None else parse_age("--older-than", older_than)
    except ConfigError as error:
        raise refusal(str(error)) from None
    if to_bytes is None and older_than_s is None and namespace is None:
        raise refusal("say what shall go: --to, --older-than or --namespace; kvdisk clear deletes everything.")
    raise delete(store_paths(directories), Asked(to_bytes, older_than_s, namespace, orphans, dry_run, yes, as_json))
