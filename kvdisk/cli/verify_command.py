# SPDX-License-Identifier: Apache-2.0
"""``kvdisk verify``: from arguments to output and exit code."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from enum import IntEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdisk.cli.refusal import NOTHING_DONE, StoreDirectories, refusal, refusing, store_paths
from kvdisk.cli.terminal import byte_progress, report_console
from kvdisk.cli.verify import Finding, Verdict, verify_store
from kvdisk.cli.verify_json import verdict_as_json
from kvdisk.cli.wording import number, plural, printable, share, size

SHOWN = 20
_ID_LETTERS = 8
_KEY_LETTERS = 16


class Exit(IntEnum):
    """Exit codes. STOPPED: by Ctrl-C; what was found until then is shown."""

    GOOD = 0
    WRONG = 1
    NOTHING_READ = NOTHING_DONE
    STOPPED = 130


def verify(
    directories: StoreDirectories,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="PERCENT", help="Read so many per cent of the blocks, at random: 5, or 0.1."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Of the sample, as an earlier run printed it.")
    ] = None,
    home: Annotated[str | None, typer.Option("--home", metavar="ID", help="Only the home with this id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with all that is wrong.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="List everything that is wrong.")] = False,
) -> None:
    """Read every slot that holds a block; check its header and its checksum.

    Only reads, so a store in use may be verified too: blocks that leave
    meanwhile are no error. Checked are all homes, ranks and drives, in the
    way in which an engine checks what it loads. Needs neither a GPU nor vLLM.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  all is good

    [cyan]1[/cyan]  something is wrong, or cannot be read; the report says what and where

    [cyan]2[/cyan]  nothing was read: not a store, no such home, no permission,
    another format, or wrong usage

    [cyan]130[/cyan]  broken off by Ctrl-C; the report says what was found until then
    """
    percent = _percent(sample)
    if percent is not None and seed is None:
        seed = secrets.randbelow(1 << 31)
    paths = store_paths(directories)
    with refusing(paths), byte_progress("verifying") as watch:
        verdict = verify_store(paths, home_id=home, percent=percent, seed=seed or 0, watch=watch)
    if home is not None and not verdict.homes and not verdict.stopped:
        raise refusal(f"{paths[0]} has no home {home}.")
    if as_json:
        typer.echo(json.dumps(verdict_as_json(verdict), indent=2))
    else:
        _print(verdict, report_console(), None if everything else SHOWN)
    if verdict.stopped:
        raise typer.Exit(Exit.STOPPED)
    raise typer.Exit(Exit.GOOD if verdict.ok else Exit.WRONG)


def _percent(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise refusal(f"--sample is a percentage above 0 and up to 100, such as 5 or 0.1, and not {text}.")
    return percent


def _print(verdict: Verdict, console: Console, most: int | None) -> None:
    homes = verdict.homes
    slots, read_bytes = sum(home.slots for home in homes), sum(home.bytes for home in homes)
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    lines.add_row("Store", Text(printable(verdict.path), "bold cyan"))
    alive = sum(home.alive for home in homes)
    in_use = f" ({alive} in use)" if alive else ""
    blocks = sum(home.blocks or 0 for home in homes)
    lines.add_row("Holds", f"{plural(blocks, 'block')} in {plural(len(homes), 'home')}{in_use}")
    rate = f" ({size(round(read_bytes / verdict.seconds))}/s)" if verdict.seconds > 0 and read_bytes else ""
    lines.add_row("Read", f"{plural(slots, 'slot')}, {size(read_bytes)} in {verdict.seconds:.1f} s{rate}")
    if verdict.percent is not None:
        lines.add_row("Sample", f"{verdict.percent:g} % of the blocks, seed {verdict.seed}")
    if changed := sum(home.changed for home in homes):
        lines.add_row("Changed", f"{plural(changed, 'slot')} whose block left meanwhile")
    lines.add_row("Result", _result(verdict))
    console.print(lines)
    for home in homes:
        gone = ["it was taken over or deleted meanwhile, what it held was read in part"] if home.gone else []
        for note in [*home.notes, *gone]:
            console.print(Text.assemble(("  · ", "yellow"), f"home {home.id}: {printable(note)}"), soft_wrap=True)
    _print_wrong(verdict, console, most)


def _result(verdict: Verdict) -> Text:
    wrong = sum(home.wrong_slots for home in verdict.homes)
    problems = sum(len(home.problems) for home in verdict.homes)
    text = Text("stopped before the end; ", "yellow") if verdict.stopped else Text()
    if verdict.ok:
        return text.append("all that was read is good" if verdict.stopped or verdict.percent else "all good", "green")
    slots = sum(home.slots for home in verdict.homes)
    said = []
    if wrong:
        said.append(f"{plural(wrong, 'slot')} wrong ({share(wrong / slots)} of those read)" if slots else "")
    files = sum(finding.slots == 0 for home in verdict.homes for finding in home.findings)
    said += [f"{plural(files, 'file')} without blocks wrong"] if files else []
    said += [f"{plural(problems, 'problem')} of homes"] if problems else []
    return text.append(", ".join(filter(None, said)), "bold red")


def _print_wrong(verdict: Verdict, console: Console, most: int | None) -> None:
    lines = list(_wrong_lines(verdict))
    if lines:
        console.print(Text("\nWrong", "bold red"))
    for line in lines[:most]:
        console.print(Text.assemble(("  ✗ ", "red"), printable(line)), soft_wrap=True)
    if most is not None and len(lines) > most:
        console.print(Text(f"  … and {number(len(lines) - most)} more; --all or --json lists them", "dim"))


def _wrong_lines(verdict: Verdict) -> Iterator[str]:
    for home in verdict.homes:
        yield from (f"home {home.id}: {problem}" for problem in home.problems)
    for home in verdict.homes:
        yield from (_wrong_line(finding) for finding in home.findings)


def _wrong_line(finding: Finding) -> str:
    place = f"home {finding.home_id[:_ID_LETTERS]} drive {finding.drive} segment {finding.segment} rank {finding.rank}"
    path = f" ({finding.path})" if finding.path else ""
    if finding.slot is None:
        return f"{place}, all of its {plural(finding.slots, 'block')}: {finding.what}{path}"
    key = (finding.key or b"").hex()
    shown = key if len(key) <= _KEY_LETTERS else f"{key[:_KEY_LETTERS]}…"
    return f"{place} slot {finding.slot}: {finding.what}; key {shown}, byte {finding.offset_bytes} of {finding.path}"
