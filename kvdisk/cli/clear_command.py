# SPDX-License-Identifier: Apache-2.0
"""``kvdisk clear``: its options. What it does and prints is in ``deleting``."""

from __future__ import annotations

from kvdisk.cli.deleting import Asked, delete
from kvdisk.cli.prune_command import AsJson, DryRun, OnlyOrphans, Yes
from kvdisk.cli.refusal import StoreDirectories, store_paths


def clear(
    directories: StoreDirectories,
    orphans: OnlyOrphans = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete everything that is in a store; the store itself stays, empty.

    Refuses while an engine owns a home, unless --orphans says to leave such
    homes alone. What is to go is shown, and asked for, before anything is
    deleted.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  done, or there was nothing to delete

    [cyan]1[/cyan]  something could not be deleted; the report says why

    [cyan]2[/cyan]  nothing was deleted: not a store, no permission, another
    format, wrong usage, or the answer was no

    [cyan]3[/cyan]  nothing was deleted, or a home less, because an engine owns it
    """
    raise delete(store_paths(directories), Asked(orphans=orphans, dry_run=dry_run, yes=yes, as_json=as_json))
