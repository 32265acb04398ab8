# SPDX-License-Identifier: Apache-2.0
"""``kvdisk bench``: its options, and what it prints. What measures is loaded only when needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvdisk.cli.bench.cases import Part, Settings
from kvdisk.cli.output import Exit, parse_size, refusal
from kvdisk.cli.output import as_json as plain
from kvdisk.errors import ConfigError, KvdiskError

if TYPE_CHECKING:
    from kvdisk.cli.bench.run import Run

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A directory on the drive to measure.")]
Parts = Annotated[list[Part], typer.Option("--parts", help="What to measure; may be given several times.")]
BlockSizes = Annotated[
    list[str], typer.Option("--block-size", "-b", metavar="SIZE", help="Bytes of a block; may be given several times.")
]
Total = Annotated[str, typer.Option("--total", metavar="SIZE", help="Bytes of one measurement through the mover.")]
Rounds = Annotated[int, typer.Option("--rounds", help="Measurements of each device through the mover.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def bench(
    directory: Directory,
    parts: Parts = list(Part),  # noqa: B006 - typer copies it, here and below
    block_sizes: BlockSizes = ["64K", "256K", "1M", "2M", "8M"],  # noqa: B006
    total: Total = "256MiB",
    rounds: Rounds = 5,
    as_json: AsJson = False,
) -> None:
    """Measure how fast the drive under DIR, the CPU tier and the mover are on this machine.

    What is compared is measured in turn, round by round: medians, lowest and
    highest. Figures of two runs are not comparable: a drive's speed changes
    from one to the next by more than what is looked for. The file that is
    measured on has no name; nothing is left of it.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  measured; what was left out is said

    [cyan]1[/cyan]  the drive failed

    [cyan]2[/cyan]  nothing was measured: wrong usage, no room, no permission
    """
    try:
        settings = Settings(
            directory=directory,
            parts=tuple(parts),
            block_sizes=tuple(parse_size("--block-size", text) for text in block_sizes),
            total_bytes=parse_size("--total", total),
            rounds=rounds,
        )
        settings.check()
        run = _measure(settings)
    except ConfigError as error:
        raise refusal(str(error), Exit.NOTHING_DONE) from None
    except KvdiskError as error:
        raise refusal(str(error), Exit.WRONG) from None
    if as_json:
        typer.echo(json.dumps(plain(run), indent=2))
        return
    from kvdisk.cli.bench.tables import print_run

    print_run(run, Console(markup=False, highlight=False, emoji=False))


def _measure(settings: Settings) -> Run:
    from kvdisk.cli.bench.run import measure

    shown = sys.stderr.isatty()

    def watch(what: str) -> None:
        if shown:
            sys.stderr.write(f"\r\x1b[K{what}")
            sys.stderr.flush()

    try:
        return measure(settings, watch)
    finally:
        watch("")
