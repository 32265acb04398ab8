# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk inspect`` shows of blocks in the mass: ages, reuse, and the tree of the prefixes that are shared."""

from __future__ import annotations

from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdisk.cli.block_facts import AGE_NAMES, REUSE_NAMES, Prefix, PrefixTree
from kvdisk.cli.store_facts import NamespaceFacts, StoreFacts, add_classes
from kvdisk.cli.table_parts import ID_LETTERS, add_column, make_table, unknown
from kvdisk.cli.wording import ago, fine_bar, number, plural, size

_BAR_LETTERS = 10


def print_blocks(facts: StoreFacts, console: Console) -> None:
    """Print histograms of all blocks together, and for each namespace the tree of its prefixes."""
    if any(home.blocks for home in facts.homes):
        console.print(Columns([_ages(facts, console.width), _reuse(facts, console.width)], padding=(0, 4)))
    for namespace in facts.namespaces:
        tree = namespace.tree
        if tree is not None and tree.prefixes:
            console.print(_prefixes(facts, namespace, tree, console.width))
            hidden = tree.prefixes_total - len(tree.prefixes)
            if hidden:
                rest = f"{plural(tree.hidden_blocks, 'block')} in {size(tree.hidden_bytes)}"
                console.print(
                    Text(f"and {plural(hidden, 'other piece')} of {plural(tree.chains, 'chain')}: {rest}", "dim")
                )
        elif tree is not None and tree.roots and not tree.shared_total:
            console.print(_prefixes(facts, namespace, tree, console.width))
            console.print(Text(f"none: {plural(tree.chains, 'chain')}, and no request has used one again", "dim"))


def _ages(facts: StoreFacts, width: int) -> Table:
    known = [home.blocks_in_mass for home in facts.homes if home.blocks_in_mass is not None]
    stored = add_classes(mass.stored for mass in known) or ()
    used = add_classes(mass.used for mass in known)
    table = make_table("Ages of blocks", width)
    add_column(table, "Ago", style="cyan")
    for header in ("stored", "last used"):
        add_column(table, header, "right")
        add_column(table, "")
    names = [*AGE_NAMES, "never", "not known yet"]
    counts = [*stored, 0, 0]
    for at in _worth_showing([counts, used or ()], least=len(AGE_NAMES)):
        cells = [unknown(), Text("")] if used is None and at < len(stored) else _bar_cells(used or (), at)
        table.add_row(names[at], *(_bar_cells(counts, at) if at < len(stored) else ["", ""]), *cells)
    return table


def _reuse(facts: StoreFacts, width: int) -> Table:
    reuse = add_classes(home.blocks_in_mass.reuse for home in facts.homes if home.blocks_in_mass is not None)
    table = make_table("Reuse of blocks", width)
    add_column(table, "Times used", style="cyan")
    add_column(table, "Blocks", "right")
    add_column(table, "")
    if reuse is None:
        table.add_row("?", unknown(), Text("no USES file yet", "dim"))
        return table
    names = [*REUSE_NAMES, "not known yet"]
    for at in _worth_showing([reuse], least=len(REUSE_NAMES)):
        table.add_row(names[at], *_bar_cells(reuse, at))
    return table


def _worth_showing(columns: Sequence[Sequence[int]], least: int) -> list[int]:
    """Return the classes from the first to the last of the first ``least`` that have a block, and others that do."""
    filled = [at for at in range(max(map(len, columns))) if any(column[at] for column in columns if at < len(column))]
    inner = [at for at in filled if at < least]
    return [*range(min(inner, default=0), max(inner, default=-1) + 1), *(at for at in filled if at >= least)]


def _bar_cells(counts: Sequence[int], at: int) -> list[Text]:
    highest = max(counts, default=0)
    return [Text(number(counts[at])), Text(fine_bar(counts[at] / highest if highest else 0, _BAR_LETTERS), "cyan")]


def _prefixes(facts: StoreFacts, namespace: NamespaceFacts, tree: PrefixTree, width: int) -> Table:
    title = "Shared prefixes"
    if len(facts.namespaces) > 1:
        title += f" of {namespace.fingerprint.hex()[:ID_LETTERS]}"
    table = make_table(title, width)
    add_column(table, "First block", style="cyan")
    for header in ("Tokens", "up to", "Bytes", "Chains", "Used", "Last use"):
        add_column(table, header, "right")
    for prefix, guides in zip(tree.prefixes, _guides(tree.prefixes), strict=True):
        table.add_row(
            Text.assemble((guides, "dim"), prefix.key[:ID_LETTERS]),
            number(prefix.tokens),
            _end(prefix),
            size(prefix.bytes),
            number(prefix.chains),
            _used(prefix),
            _last_use(prefix, facts.surveyed_s),
        )
    return table


def _guides(prefixes: Sequence[Prefix]) -> list[str]:
    """Return for each line what leads to it from those before it."""
    found: list[str] = []
    goes_on: set[int] = set()
    for prefix in reversed(prefixes):  # a line has to know whether another one of its depth follows
        goes_on = {depth for depth in goes_on if depth <= prefix.depth}
        guides = "".join("│ " if depth in goes_on else "  " for depth in range(1, prefix.depth))
        if prefix.depth:
            guides += "├─" if prefix.depth in goes_on else "└─"
            goes_on.add(prefix.depth)
        else:
            goes_on.clear()
        found.append(guides)
    return found[::-1]


def _end(prefix: Prefix) -> Text:
    if prefix.start_tokens is None or prefix.tokens is None:
        return unknown()
    return Text(number(prefix.start_tokens + prefix.tokens))


def _used(prefix: Prefix) -> Text:
    """Return how often the first block was used, and the last where that differs."""
    if prefix.first_uses is None or prefix.last_uses is None:
        return unknown()
    if prefix.first_uses == prefix.last_uses:
        return Text(number(prefix.first_uses))
    return Text(f"{number(prefix.first_uses)}…{number(prefix.last_uses)}")


def _last_use(prefix: Prefix, now_s: int) -> Text:
    if prefix.last_use_s is None:
        return unknown()
    return Text(ago(prefix.last_use_s, now_s)) if prefix.last_use_s else Text("never", "dim")
