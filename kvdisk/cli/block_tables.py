# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk inspect DIR KEY`` shows to people."""

from __future__ import annotations

from pathlib import Path, PurePath

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdisk.cli.inspect_block import BlockFacts, CopyFacts, FoundBlock, RankFacts
from kvdisk.cli.table_parts import ID_LETTERS, add_column, make_table
from kvdisk.cli.wording import ago, number, plural, printable

CHAIN_SHOWN = 6
_KINDS = {1: "xxh3_128", 2: "multilinear"}


def print_block(facts: BlockFacts, console: Console, *, everything: bool) -> None:
    """Print a block. ``everything``: the whole chain. ``console`` must not read markup: names come from files."""
    for block in facts.blocks:
        console.print(_summary(facts, block))
        for copy in block.copies:
            console.print(_copy(facts, copy))
            console.print(_ranks(copy, console.width))
        console.print(_chain(block, console.width, None if everything else CHAIN_SHOWN))
    if facts.problems:
        console.print(Text(f"\n{plural(len(facts.problems), 'problem')}", "bold red"))
        for problem in facts.problems:
            console.print(Text.assemble(("  ✗ ", "red"), printable(problem)), soft_wrap=True)


def _lines() -> Table:
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    return lines


def _summary(facts: BlockFacts, block: FoundBlock) -> Table:
    found, lines = block.found, _lines()
    lines.add_row("Block", Text(found["key"], "bold cyan"))
    name = "?" if block.fingerprint is None else block.fingerprint.hex()[:ID_LETTERS]
    epoch = f", epoch {found['epoch']}" if found["epoch"] else ""
    lines.add_row("Namespace", Text.assemble((name, "magenta"), f"  {printable(block.model)}{epoch}"))
    others = [str(group) for group in facts.groups if group != found["group"]]
    more = f"  (also in {', '.join(others)}: give the whole key)" if others else ""
    lines.add_row("Group", Text.assemble(str(found["group"]), (more, "dim")))
    tokens = found["block_tokens"]
    if tokens is None:
        lines.add_row("Tokens", "?")
    elif block.start_tokens is None:
        lines.add_row("Tokens", f"{number(tokens)}, somewhere in a prompt: the head of its chain is not here")
    else:
        lines.add_row("Tokens", f"{number(block.start_tokens)} up to {number(block.start_tokens + tokens)} of a prompt")
    children = found["children"]
    lines.add_row("Followed by", plural(children, "block") if children else "nothing: the end of its chain")
    return lines


def _copy(facts: BlockFacts, copy: CopyFacts) -> Table:
    record, lines = copy.record, _lines()
    owner = ("in use", "green") if copy.home.alive else ("orphan", "yellow")
    lines.add_row("", "")
    lines.add_row("Copy", Text.assemble("home ", (copy.home.id, "cyan"), "  ", owner))
    drive = "?" if copy.drive is None else str(copy.drive)
    folder = next((Path(rank.file).parents[2] for rank in copy.ranks if rank.file), None)
    if folder is not None:
        lines.add_row("Directory", printable(folder))
    lines.add_row("Place", f"segment {record['segment']}, slot {record['slot']}, drive {drive}")
    lines.add_row("Generation", str(record["generation"]))
    lines.add_row("Stored", ago(record["stored_s"], facts.surveyed_s))
    if record["uses"] is None:
        lines.add_row("Used", "? (USES does not tell of it yet)")
    elif record["uses"]:
        times = plural(record["uses"], "time")
        lines.add_row("Used", f"{times}, last {ago(record['last_use_s'], facts.surveyed_s)}")
    else:
        lines.add_row("Used", "never")
    return lines


def _ranks(copy: CopyFacts, width: int) -> Table:
    table = make_table("Slots", width)
    for name in ("Rank", "Offset", "Payload"):
        add_column(table, name, "right")
    add_column(table, "Checksum")
    add_column(table, "Header and payload")
    table.add_column("File", overflow="fold")
    for rank in copy.ranks:
        header = rank.header
        table.add_row(
            str(rank.rank),
            number(rank.offset),
            number(header.payload_bytes if header else None),
            _KINDS.get(header.checksum_kind, "?") if header else "?",
            _verdict(rank),
            "?" if rank.file is None else printable(PurePath(*Path(rank.file).parts[-3:])),
        )
    return table


def _verdict(rank: RankFacts) -> Text:
    if not rank.problems:
        return Text("✓ as recorded", "green")
    return Text(f"✗ {plural(len(rank.problems), 'problem')}", "red")


def _chain(block: FoundBlock, width: int, most: int | None) -> Table:
    found = block.found
    chain, tokens = found["chain"], found["block_tokens"]
    table = make_table(f"Chain, {plural(len(chain), 'block')} from its head" if found["is_whole"] else "Chain", width)
    for title in ("Position", "Tokens up to"):
        add_column(table, title, "right")
    table.add_column("Block", overflow="fold", style="cyan")
    if not found["is_whole"]:
        table.add_row("", "", Text("… a block that is not here", "dim"))
    hidden = 0 if most is None else max(0, len(chain) - 2 * most)
    for position, name in enumerate(chain):
        if hidden and most is not None and position == most:
            table.add_row("…", "", Text(f"{number(hidden)} more (see --all)", "dim"))
        if not hidden or most is None or position < most or position >= most + hidden:
            end = "?" if tokens is None or not found["is_whole"] else number((position + 1) * tokens)
            table.add_row(str(position) if found["is_whole"] else "?", end, name)
    return table
