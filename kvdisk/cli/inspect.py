# SPDX-License-Identifier: Apache-2.0
"""``kvdisk inspect``: what a store holds, as tables for people; ``--json`` prints a
``survey.Survey``."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.bar import Bar
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kvdisk.cli.block import print_block, survey_block
from kvdisk.cli.export import export_blocks
from kvdisk.cli.indexes import NOT_NAMED
from kvdisk.cli.output import (
    ID_LETTERS,
    AsJson,
    Exit,
    ago,
    bar,
    folded,
    left,
    make_lines,
    make_table,
    number,
    opening,
    plural,
    print_json,
    print_list,
    printable,
    report_console,
    share,
    short_model,
    size,
)
from kvdisk.cli.prefixes import Prefix, each_prefix
from kvdisk.cli.remote import (
    JSON_VERSION as REMOTE_JSON_VERSION,
)
from kvdisk.cli.remote import (
    FromRemote,
    print_remote_survey,
    remote_config,
    survey_remote,
)
from kvdisk.cli.salts import print_salts, survey_salts
from kvdisk.cli.survey import (
    AGE_NAMES,
    JSON_VERSION,
    PREFIXES,
    REUSE_NAMES,
    Namespace,
    Segment,
    Survey,
    survey_store,
)
from kvdisk.errors import ConfigError

LEAST_DIGITS = 8
MOST_PREFIXES = 10_000
LINES = 20
"""Lines that are printed by default at most."""
MODELS_SHOWN, MOST_MODELS, PROBLEMS_SHOWN, SEGMENTS_SHOWN, SALTS_SHOWN = 4, 50, 3, 16, 16
_BAR_LETTERS = 24
_FINE_BAR_LETTERS = 10

DirectoriesAndKey = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="DIR... [KEY]",
        help="The store: all that store_dirs names. KEY: show one block, by 8 or more hex digits of its key.",
        readable=False,
    ),
]
OfTenants = Annotated[
    bool, typer.Option("--salts", help="Show instead what each tenant has, by the digest of its cache_salt.")
]
OneSalt = Annotated[
    str | None,
    typer.Option("--salt", metavar="TEXT", help="As --salts, and which digest this salt has; -: on standard input."),
]


def inspect(
    directories: DirectoriesAndKey = None,
    stores: Annotated[bool, typer.Option("--stores", help="Show engine stores and drives.")] = False,
    segments: Annotated[
        bool, typer.Option("--segments", help="Show how full and how fragmented segments are.")
    ] = False,
    ages: Annotated[bool, typer.Option("--ages", help="Show ages of blocks, and how often they were used.")] = False,
    prefixes: Annotated[
        int | None,
        typer.Option(
            "--prefixes", metavar="N", min=0, max=MOST_PREFIXES, help="Show the N biggest prefixes as a tree."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all of these, with every problem.")] = False,
    salts: OfTenants = False,
    salt: OneSalt = None,
    target: Annotated[
        Path | None,
        typer.Option(
            "--export", metavar="FILE", help="Write a row for each block into a .csv or .parquet file instead."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --export.")] = False,
    remote: FromRemote = None,
    as_json: AsJson = False,
) -> None:
    """Show what a store holds: its health and fill, its models, and what is used again and again.

    Fill is the bytes of the slots that hold blocks, of the caps (nvme_bytes) of the engines that
    live. With a KEY, one block: its record, the slot of every rank, its chain. With --salts what is
    on the drive of each tenant, most bytes first, by a digest of its salt. With --remote, and
    without a DIR, what is in a remote store, as far as a listing goes. Only reads, so it
    may look into a store that engines are using, or into a copy. Needs neither a GPU nor vLLM.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  all is fine

    [cyan]1[/cyan]  something in the store is wrong, such as an index that cannot be read; the
    report says what

    [cyan]2[/cyan]  no report: not a store, no permission, a newer format, or wrong usage
    """
    console = report_console()
    if not directories or remote is not None:
        _inspect_remote(directories, remote, console, as_json)
        return
    *named, last = directories
    wanted = _key_of(last) if named else None
    with opening(directories if wanted is None else named) as paths:
        if salts or salt is not None:
            if wanted is not None or target is not None:
                raise ConfigError("--salts counts all blocks, and takes neither a KEY nor --export")
            problems = _salts(paths, salt, None if everything else SALTS_SHOWN, as_json)
        elif target is not None:
            if wanted is not None:
                raise ConfigError("--export writes all blocks, and takes no KEY")
            problems = _export(paths, target, force, as_json)
        elif wanted is not None:
            problems = _block(paths, wanted, everything, as_json)
        else:
            survey = survey_store(paths, prefixes=PREFIXES if prefixes is None else prefixes)
            problems = survey.problems
            chosen = {"stores": stores, "segments": segments, "ages": ages, "prefixes": prefixes is not None}
            views = [view for view, is_chosen in chosen.items() if is_chosen or everything]
            views[:0] = ["models"] if everything else []
            print_json(survey, JSON_VERSION) if as_json else print_survey(survey, console, views, everything=everything)
    raise typer.Exit(Exit.WRONG if problems else Exit.FINE)


def _inspect_remote(directories: Sequence[Path] | None, named: str | None, console: Console, as_json: bool) -> None:
    with opening([]):
        survey = survey_remote(remote_config(named, directories))
    print_json(survey, REMOTE_JSON_VERSION) if as_json else print_remote_survey(survey, console)


def _block(paths: Sequence[Path], wanted: str, everything: bool, as_json: bool) -> tuple[str, ...]:
    if len(wanted) < LEAST_DIGITS:
        raise ConfigError(f"{wanted} is no directory, and a KEY has {LEAST_DIGITS} hex digits or more")
    block = survey_block(paths, wanted)
    print_json(block, JSON_VERSION) if as_json else print_block(block, report_console(), everything=everything)
    return block.problems


def _salts(paths: Sequence[Path], salt: str | None, most: int | None, as_json: bool) -> tuple[str, ...]:
    found = survey_salts(paths, salt)
    print_json(found, JSON_VERSION) if as_json else print_salts(found, report_console(), most)
    return found.problems


def _key_of(last: Path) -> str | None:
    """Return the digits of a KEY where the last argument is one: hex digits, and no file of that
    name."""
    digits = str(last).lower()
    is_key = re.fullmatch("[0-9a-f]+", digits) and not os.path.lexists(last)
    return digits if is_key else None


def _export(paths: Sequence[Path], target: Path, force: bool, as_json: bool) -> tuple[str, ...]:
    done = export_blocks(paths, target, force=force)
    if as_json:
        print_json(done, JSON_VERSION)
    else:
        said = f"{plural(done.rows, 'block')} of {plural(done.engine_stores, 'engine store')}"
        typer.echo(f"{said} in {target} ({size(done.bytes)})")
        for problem in done.problems:
            typer.echo(f"kvdisk: {printable(problem)}", err=True)
    return done.problems


def print_survey(survey: Survey, console: Console, views: Collection[str] = (), *, everything: bool = False) -> None:
    """Print what a store holds: the verdict, and models with the biggest shared prefixes, in at
    most LINES lines. Or print the ``views`` instead: models, stores, segments, ages, prefixes.

    ``everything``: all problems and segments, however many. ``console`` must not read markup: names
    come from files.
    """
    width, most = console.width, None if everything else PROBLEMS_SHOWN
    lines = _summary(survey)
    console.print(lines)
    print_list("Problems", survey.problems, console, most, "--all lists them")
    if survey.engine_stores and not views:
        shown = [-(-(len(problem) + 4) // width) for problem in survey.problems[:PROBLEMS_SHOWN]]
        more = 3 if len(survey.problems) > PROBLEMS_SHOWN else 2
        heads = len(console.render_lines(lines, pad=False))
        _print_models(survey, console, LINES - heads - (sum(shown) + more if shown else 0))
    if "models" in views:
        console.print("", namespaces_table(survey, width, MOST_MODELS), sep="\n")
    if "stores" in views and survey.engine_stores:
        console.print(homes_table(survey, width))
        if len(survey.drives) > 1:
            console.print(_drives(survey, width))
    if "segments" in views and survey.engine_stores:
        console.print(segments_table(survey, width, None if everything else SEGMENTS_SHOWN))
    if "ages" in views and survey.totals.blocks:
        console.print(_histograms(survey, width))
    for namespace in survey.namespaces if "prefixes" in views else ():
        _print_prefixes(survey, namespace, console)


def _print_models(survey: Survey, console: Console, room: int) -> None:
    """Print the models, and the biggest shared prefixes, in ``room`` lines."""
    most = max(1, min(MODELS_SHOWN, room - 5))
    console.print("", namespaces_table(survey, console.width, most), sep="\n")
    room -= 3 + min(len(survey.namespaces), most + 1) + 4
    shared = sorted(
        (one for each in survey.namespaces for _, one in each_prefix(each.prefixes.tree) if one.chains > 1),
        key=lambda one: -(one.tokens or 0),
    )
    if shared and room > 0:
        rows = [("", prefix) for prefix in shared[:room]]
        console.print("", prefix_table("", rows, survey.surveyed_s, console.width), sep="\n")
    console.print(Text("More: --stores, --segments, --ages, --prefixes N, or --all", "dim"))


def _verdict(survey: Survey) -> Text:
    """Return whether the store is healthy, or what to do, in words."""
    if survey.ok:
        return Text("healthy" if survey.engine_stores else "empty: cleared, or no engine has used it yet", "bold green")
    if any("kvdisk repair" in problem for problem in survey.problems):
        return Text("damaged: run kvdisk repair", "bold red")
    only_unnamed = all(NOT_NAMED in problem for problem in survey.problems)
    return Text(
        "incomplete: name all directories of the store" if only_unnamed else "damaged: see the problems", "bold red"
    )


def _summary(survey: Survey) -> Table:
    lines, totals, store, now_s = make_lines(), survey.totals, survey.store, survey.surveyed_s
    made = "" if store.created_s is None else f"  (made {ago(store.created_s, now_s)})"
    lines.add_row("Verdict", _verdict(survey))
    lines.add_row("Store", Text.assemble((printable(store.path), "bold cyan"), (made, "dim")))
    if not survey.engine_stores:
        return lines
    fill = Text(f"{size(totals.used_bytes)}, and no cap, since no engine lives")
    if totals.fill is not None:
        fill = Text.assemble((bar(totals.fill, _BAR_LETTERS), "cyan"), f" {share(totals.fill)}: ")
        fill.append(f"{size(totals.used_bytes)} of {size(totals.cap_bytes)}")
    lines.add_row("Fill", fill)
    alive, stopped = totals.engine_stores_in_use, totals.engine_stores - totals.engine_stores_in_use
    owners = [f"{count} {text}" for count, text in ((alive, "in use"), (stopped, "of stopped engines")) if count]
    unread = totals.unreadable_engine_stores
    without = f"; {unread} cannot be read" if unread else ""
    said = f"{totals.engine_stores}: {', '.join(owners)}; {size(totals.allocated_bytes)} allocated"
    guests = sum(home.kind == "guest" for home in survey.engine_stores)
    of_ranks = f"; {guests} with files of ranks whose index is on another host" if guests else ""
    lines.add_row("Engine stores", Text.assemble(said, (without, "red"), of_ranks))
    stored = ""
    if totals.oldest_stored_s is not None and totals.newest_stored_s is not None:
        stored = f", stored {ago(totals.oldest_stored_s, now_s)} to {ago(totals.newest_stored_s, now_s)}"
    lines.add_row("Blocks", f"{number(totals.blocks)}{stored}")
    if survey.reuse.blocks is not None:
        known = sum(survey.reuse.blocks)
        reused = known - survey.reuse.blocks[0]
        lines.add_row("Used again", f"{number(reused)} of {plural(known, 'block')} ({share(reused / max(1, known))})")
    return lines


def namespaces_table(survey: Survey, width: int, most: int) -> Table:
    """Return the table of at most ``most`` namespaces."""
    columns = (left("Namespace", "magenta"), Column("Model", no_wrap=True, overflow="ellipsis"), left("KV dtype"))
    table = make_table("", width, *columns, "TP", "Block", "Blocks", "Bytes")
    for each in survey.namespaces[:most]:
        unread = each.unreadable_engine_stores == len(each.engine_stores)
        dtype = each.dtype if each.kv_dtype in {None, "auto"} else each.kv_dtype
        table.add_row(
            each.fingerprint[:ID_LETTERS],
            short_model(each.model),
            printable(dtype).removeprefix("torch."),
            printable(each.ranks if each.tensor_parallel is None else each.tensor_parallel),
            "/".join(dict.fromkeys(printable(group["block_tokens"]) for group in each.groups)) or "?",
            number(None if unread else each.blocks),
            size(None if unread else each.used_bytes),
        )
    if len(survey.namespaces) > most:
        table.add_row("", Text(f"{len(survey.namespaces) - most} more (see --json)", "dim"))
    return table


def homes_table(survey: Survey, width: int) -> Table:
    """Return the table of engine stores. A cap counts only while its engine lives."""
    names = (left("Engine store", "cyan"), left("Namespace", "magenta"), left("Engine"))
    table = make_table("Engine stores", width, *names, "Blocks", "Bytes", "Allocated", "Cap", "Last use")
    for home in survey.engine_stores:
        stopped = Text("crashed" if home.clean is False else "stopped", "yellow")
        table.add_row(
            home.id[:ID_LETTERS],
            "?" if home.fingerprint is None else home.fingerprint[:ID_LETTERS],
            Text.assemble(Text("alive", "green") if home.alive else stopped, " guest" if home.kind == "guest" else ""),
            number(home.blocks),
            size(home.used_bytes),
            size(home.allocated_bytes),
            size(home.cap_bytes) if home.alive else "-",
            ago(home.last_use_s, survey.surveyed_s),
        )
    return table


def segments_table(survey: Survey, width: int, most: int | None) -> Table:
    """Return the table of segments, at most ``most`` of each engine store.

    The column "A read" says how many blocks are read at a time, where chains are read in order.
    """
    numbers = ("Segment", "Drive", "Slots", "Used", "Fragmented", "A read")
    table = make_table("Segments", width, left("Engine store", "cyan"), *numbers, folded("Files"))
    for home in survey.engine_stores:
        for at, segment in enumerate(home.segments[:most]):
            run = "-" if segment.read_run_blocks is None else f"{segment.read_run_blocks:.1f}"
            table.add_row(
                "" if at else home.id[:ID_LETTERS],
                str(segment.segment),
                str(segment.drive),
                number(segment.slots),
                share(segment.fill),
                "-" if segment.fragmentation is None else share(segment.fragmentation),
                run,
                _files(segment, of_guest=home.kind == "guest"),
            )
        if most is not None and len(home.segments) > most:
            table.add_row("", f"{len(home.segments) - most} more", *[""] * 5, "(see --all)")
        table.add_section()
    return table


def _drives(survey: Survey, width: int) -> Table:
    numbers = ("Engine stores", "Segments", "Blocks", "Used", "Allocated")
    table = make_table("Drives", width, folded("Directory"), *numbers)
    for drive in survey.drives:
        name = f"not named ({printable(drive.store_id)[:ID_LETTERS]})" if drive.path is None else printable(drive.path)
        table.add_row(
            name,
            number(drive.engine_stores),
            number(drive.segments if drive.path else None),
            number(drive.blocks),
            size(drive.used_bytes),
            size(drive.allocated_bytes if drive.path else None),
        )
    return table


def _files(segment: Segment, *, of_guest: bool) -> Text:
    """Say how long the files are; the ranks of one segment have equal ones."""
    lengths = Counter(file["length_bytes"] for file in segment.files)
    said = ", ".join(f"{count} x {size(length)}" for length, count in lengths.most_common()) or "none"
    strange = segment.used_slots is not None and not segment.indexed and not of_guest
    return Text.assemble(
        (said, "" if len(lengths) == 1 else "red"), ("\nnot in the index" if strange else "", "yellow")
    )


# -- ages, reuse, prefixes ---------------------------------------------------------------------


def _histograms(survey: Survey, width: int) -> Columns:
    ages, reuse = survey.ages, survey.reuse
    by_age = {"stored": [*ages.stored, 0, 0]}
    if ages.used is not None:
        by_age["last used"] = [*ages.used, ages.never_used or 0, ages.unknown or 0]
    uses = [0] * len(REUSE_NAMES) if reuse.blocks is None else reuse.blocks
    unknown = survey.totals.blocks if reuse.unknown is None else reuse.unknown
    tables = [
        _histogram("Ages of blocks", "Ago", (*AGE_NAMES, "never", "not known yet"), by_age, width),
        _histogram(
            "Reuse of blocks", "Times used", (*REUSE_NAMES, "not known yet"), {"Blocks": [*uses, unknown]}, width
        ),
    ]
    return Columns(tables, padding=(0, 4))


def _histogram(title: str, header: str, names: Sequence[str], counts: Mapping[str, Sequence[int]], width: int) -> Table:
    """Return a table of blocks by class, without the classes that have no blocks."""
    columns = [column for name in counts for column in (name, left(""))]
    table = make_table(title, width, left(header, "cyan"), *columns)
    for at, name in enumerate(names):
        cells: list[RenderableType] = []
        for each in counts.values():
            bar_of_count = Bar(max(each) or 1, 0, each[at], width=_FINE_BAR_LETTERS, color="cyan")
            cells += [number(each[at]) if each[at] else "", bar_of_count]
        if any(each[at] for each in counts.values()):
            table.add_row(name, *cells)
    return table


def _print_prefixes(survey: Survey, namespace: Namespace, console: Console) -> None:
    found = namespace.prefixes
    listed = list(each_prefix(found.tree))
    if not listed and (found.shared or not found.roots):
        return
    of_namespace = f" of {namespace.fingerprint[:ID_LETTERS]}" if len(survey.namespaces) > 1 else ""
    console.print(prefix_table(f"Shared prefixes{of_namespace}", listed, survey.surveyed_s, console.width))
    hidden = found.total - len(listed)
    chains = plural(found.chains, "chain")
    if not listed:
        console.print(Text(f"none: {chains}, and no request has used one again", "dim"))
    elif hidden:
        rest = f"{plural(found.hidden_blocks, 'block')} in {size(found.hidden_bytes)}"
        console.print(Text(f"and {plural(hidden, 'other piece')} of {chains}: {rest}", "dim"))


def prefix_table(title: str, listed: Iterable[tuple[str, Prefix]], now_s: int, width: int) -> Table:
    """Return a table of prefixes, each with the lines of the tree that lead to it."""
    numbers = ("Tokens", "up to", "Bytes", "Chains", "Used", "Last use")
    table = make_table(title, width, left("Shared prefix", "cyan"), *numbers)
    for guides, prefix in listed:
        start, tokens, last = prefix.start_tokens, prefix.tokens, prefix.last_use_s
        uses = dict.fromkeys([number(prefix.first_uses), number(prefix.last_uses)])
        table.add_row(
            Text.assemble((guides, "dim"), prefix.key[:ID_LETTERS]),
            number(tokens),
            number(None if start is None or tokens is None else start + tokens),
            size(prefix.bytes),
            number(prefix.chains),
            "…".join(uses),
            "never" if last == 0 else ago(last, now_s),
        )
    return table
