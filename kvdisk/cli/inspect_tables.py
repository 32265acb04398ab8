# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk inspect`` shows to people: a summary, and tables of namespaces, homes and segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdisk.cli.inspect_blocks import print_blocks
from kvdisk.cli.store_facts import (
    HomeFacts,
    NamespaceFacts,
    SegmentFacts,
    StoreFacts,
    fragmentation,
    stored_range,
)
from kvdisk.cli.table_parts import ID_LETTERS, WIDE, add_column, make_table, unknown
from kvdisk.cli.wording import ago, bar, number, plural, printable, share, size
from kvdisk.geometry import FILE_EPOCH

SEGMENTS_SHOWN = 16
PROBLEMS_SHOWN = 20
_BAR_LETTERS = 24


def print_store(facts: StoreFacts, console: Console, *, everything: bool) -> None:
    """Print what a store holds. ``everything``: all segments and problems, however many.

    ``console`` must not read markup: names come from files.
    """
    console.print(_summary(facts))
    if facts.homes:
        if facts.namespaces:
            console.print(_namespaces(facts, console.width))
        console.print(_homes(facts, console.width))
        if any(home.segments for home in facts.homes):
            console.print(_segments(facts, console.width, None if everything else SEGMENTS_SHOWN))
        if len(facts.drives) > 1:
            console.print(_drives(facts, console.width))
        print_blocks(facts, console)
    _print_problems(facts.problems, console, None if everything else PROBLEMS_SHOWN)


def _summary(facts: StoreFacts) -> Table:
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    made = "" if facts.created_s is None else f"  (made {ago(facts.created_s, facts.surveyed_s)})"
    lines.add_row("Store", Text.assemble((printable(facts.path), "bold cyan"), (made, "dim")))
    if not facts.homes:
        lines.add_row("Homes", "none: no engine has used this store yet")
        return lines
    alive = sum(home.alive for home in facts.homes)
    orphans = len(facts.homes) - alive
    owners = [text for count, text in ((alive, f"{alive} alive"), (orphans, plural(orphans, "orphan"))) if count]
    homes = f"{plural(len(facts.homes), 'home')} ({', '.join(owners)})"
    lines.add_row("Homes", f"{homes} in {plural(len(facts.namespaces), 'namespace')}")
    unreadable = sum(home.tallies is None for home in facts.homes)
    blocks = sum(home.blocks or 0 for home in facts.homes)
    used_bytes = sum(home.used_bytes or 0 for home in facts.homes)
    without = f", without {plural(unreadable, 'home')} that cannot be read" if unreadable else ""
    lines.add_row("Blocks", Text.assemble(f"{number(blocks)} in {size(used_bytes)}", (without, "red")))
    lines.add_row("Allocated", _allocated(facts))
    stored = stored_range(facts.homes)
    if stored is not None:
        oldest, newest = (ago(moment_s, facts.surveyed_s) for moment_s in stored)
        lines.add_row("Stored", f"oldest {oldest}, newest {newest}")
    return lines


def _allocated(facts: StoreFacts) -> Text:
    allocated_bytes = sum(home.allocated_bytes for home in facts.homes)
    if not facts.cap_bytes:
        return Text.assemble(size(allocated_bytes), ("  (no live owner, so no cap)", "dim"))
    fraction = allocated_bytes / facts.cap_bytes
    return Text.assemble(
        f"{size(allocated_bytes)} of {size(facts.cap_bytes)}  ",
        (bar(fraction, _BAR_LETTERS), "cyan"),
        f" {share(fraction)}",
    )


def _namespaces(facts: StoreFacts, width: int) -> Table:
    table = make_table("Namespaces", width)
    add_column(table, "Namespace", style="magenta")
    table.add_column("Model", overflow="fold")
    add_column(table, "KV dtype")
    for header in ("TP", "Block\nsize", "Epochs", "Homes", "Blocks", "Stored"):
        add_column(table, header, "right")
    for namespace in facts.namespaces:
        description = namespace.description
        table.add_row(
            namespace.fingerprint.hex()[:ID_LETTERS],
            _model(description.get("model")),
            _dtype(description),
            printable(description.get("tensor_parallel", description.get("ranks"))),
            _block_tokens(description),
            _epochs(namespace),
            number(len(namespace.homes)),
            *_sums(namespace),
        )
    return table


def _homes(facts: StoreFacts, width: int) -> Table:
    table = make_table("Homes", width)
    add_column(table, "Home", style="cyan")
    add_column(table, "Namespace", style="magenta")
    add_column(table, "Owner")
    add_column(table, "Clean")
    for header in ("Blocks", "Allocated", "Cap", "Fill", "Frag"):
        add_column(table, header, "right")
    add_column(table, "Last use", "right")
    for home in facts.homes:
        record = home.record
        table.add_row(
            home.id[:ID_LETTERS],
            record.fingerprint.hex()[:ID_LETTERS] if record else unknown(),
            Text("alive", "green") if home.alive else Text("orphan", "yellow"),
            _clean(home),
            _count(home.blocks),
            size(home.allocated_bytes),
            size(record.cap_bytes) if record else unknown(),
            unknown() if home.fill is None else share(home.fill),
            _fragmentation(home.segments),
            ago(record.last_use_s, facts.surveyed_s) if record else unknown(),
        )
    return table


def _segments(facts: StoreFacts, width: int, most: int | None) -> Table:
    table = make_table("Segments", width)
    add_column(table, "Home", style="cyan")
    for header in ("Segment", "Drive", "Slot", "Slots", "Used"):
        add_column(table, header, "right")
    add_column(table, "Fill")
    add_column(table, "Frag", "right")
    if width >= WIDE:
        add_column(table, "Run", "right")
    table.add_column("Files", overflow="fold")
    for home in facts.homes:
        name = home.id[:ID_LETTERS]
        shown = home.segments[:most]
        for segment in shown:
            table.add_row(
                name,
                str(segment.segment),
                str(segment.drive),
                size(segment.slot_bytes),
                number(segment.slots),
                _count(segment.used_slots),
                _fill(segment),
                _fragmentation([segment]),
                *([_run(segment)] if width >= WIDE else []),
                _files(segment, home.ranks),
            )
            name = ""
        if len(shown) < len(home.segments):
            _add_rest(table, home, home.segments[len(shown) :], width)
        table.add_section()
    return table


def _add_rest(table: Table, home: HomeFacts, rest: tuple[SegmentFacts, ...], width: int) -> None:
    slots = sum(segment.slots or 0 for segment in rest)
    used = None if home.tallies is None else sum(segment.used_slots or 0 for segment in rest)
    length_bytes = sum(file.length_bytes for segment in rest for file in segment.files)
    fill = Text("") if used is None or not slots else _fill_bar(used / slots)
    table.add_row(
        "",
        f"{len(rest)} more",
        "",
        "",
        number(slots),
        _count(used),
        fill,
        _fragmentation(rest),
        *([""] if width >= WIDE else []),
        f"{size(length_bytes)} (see --all)",
    )


def _drives(facts: StoreFacts, width: int) -> Table:
    table = make_table("Drives", width)
    table.add_column("Directory", overflow="fold")
    for header in ("Homes", "Segments", "Blocks", "Used", "Allocated"):
        add_column(table, header, "right")
    for drive in facts.drives:
        more = (" +?", "red") if drive.unreadable_homes else ""
        name = f"not named ({printable(drive.store_id)[:ID_LETTERS]})" if drive.path is None else printable(drive.path)
        table.add_row(
            name,
            number(drive.homes),
            number(drive.segments) if drive.path else unknown(),
            Text.assemble(number(drive.blocks), more),
            Text.assemble(size(drive.used_bytes), more),
            size(drive.allocated_bytes) if drive.path else unknown(),
        )
    return table


def _print_problems(problems: tuple[str, ...], console: Console, most: int | None) -> None:
    if not problems:
        return
    console.print(Text(f"\n{plural(len(problems), 'problem')}", "bold red"))
    for problem in problems[:most]:
        console.print(Text.assemble(("  ✗ ", "red"), printable(problem)), soft_wrap=True)
    if most is not None and len(problems) > most:
        console.print(Text(f"  … and {len(problems) - most} more; --all lists them", "dim"))


# -- cells -------------------------------------------------------------------------------------


def _count(count: int | None) -> Text:
    return unknown() if count is None else Text(number(count))


def _clean(home: HomeFacts) -> Text:
    if home.record is None:
        return unknown()
    if home.alive:
        return Text("in use", "dim")
    return Text("yes", "green") if home.record.clean else Text("no", "yellow")


def _model(model: Any) -> str:
    """Return the last two parts of a path, which say more than where it lies; a hub's name has no more."""
    name = printable(model)
    parts = PurePosixPath(name).parts
    return name if len(parts) <= 3 else str(PurePosixPath("…", *parts[-2:]))


def _dtype(description: dict[str, Any]) -> str:
    kv_dtype = description.get("kv_dtype")
    chosen = description.get("dtype") if kv_dtype in {None, "auto"} else kv_dtype
    return printable(chosen).removeprefix("torch.")


def _block_tokens(description: dict[str, Any]) -> str:
    groups = description.get("groups")
    if not isinstance(groups, list):
        return "?"
    tokens = dict.fromkeys(printable(group.get("block_tokens")) for group in groups if isinstance(group, dict))
    return "/".join(tokens) or "?"


def _epochs(namespace: NamespaceFacts) -> str:
    """Return the epochs that have blocks: 0, the one that all engines share, and how many are one engine's own."""
    private = len(namespace.blocks_by_epoch.keys() - {FILE_EPOCH})
    shared = str(FILE_EPOCH) if FILE_EPOCH in namespace.blocks_by_epoch or not private else ""
    return " ".join(filter(None, [shared, f"+{private} own" if private else ""]))


def _sums(namespace: NamespaceFacts) -> tuple[Text, Text]:
    """Return blocks and bytes, with a mark where homes cannot be read."""
    unreadable = sum(home.tallies is None for home in namespace.homes)
    if unreadable == len(namespace.homes):
        return unknown(), unknown()
    more = (" +?", "red") if unreadable else ""
    blocks = sum(home.blocks or 0 for home in namespace.homes)
    return Text.assemble(number(blocks), more), Text.assemble(size(namespace.used_bytes), more)


def _fill(segment: SegmentFacts) -> Text:
    return unknown() if segment.fill is None else _fill_bar(segment.fill)


def _fill_bar(fraction: float) -> Text:
    return Text.assemble((bar(fraction, 8), "cyan"), f" {share(fraction):>5}")


def _fragmentation(segments: Sequence[SegmentFacts]) -> Text:
    """Return the share of free bytes in short runs; a dash where nothing is free."""
    if any(segment.layout is None and segment.indexed for segment in segments):
        return unknown()
    fraction = fragmentation(segments)
    return Text("-" if fraction is None else share(fraction))


def _run(segment: SegmentFacts) -> Text:
    """Return how many blocks are read at a time."""
    if segment.layout is None:
        return unknown() if segment.indexed else Text("-")
    return Text("-" if segment.read_run_blocks is None else f"{segment.read_run_blocks:.1f}")


def _files(segment: SegmentFacts, ranks: int) -> Text:
    """Return how long the files are: the usual length once, then the ranks that differ."""
    lengths = {file.rank: file.length_bytes for file in segment.files}
    counts = Counter(lengths.values())
    usual = max(counts, key=lambda length: (counts[length], length), default=None)
    lines = [] if usual is None else [Text(f"{counts[usual]} x {size(usual)}")]
    for rank in sorted(lengths.keys() | set(range(ranks))):
        length = lengths.get(rank)
        if length is None or length != usual:
            lines.append(Text(f"rank {rank}: {'none' if length is None else size(length)}", "red"))
    if segment.used_slots is not None and not segment.indexed:
        lines.append(Text("not in the index", "yellow"))
    return Text("\n").join(lines)
