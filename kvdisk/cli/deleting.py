# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk prune`` and ``kvdisk clear`` both do: the plan is shown, asked for, carried out and told.

What ``--json`` prints, one object whose shape changes only with ``json_version``; bytes are integers, ``*_s`` whole
seconds, ``null`` what is not known or does not apply::

    json_version       1
    kvdisk_version     of the command
    path               of the store
    dry_run            true: nothing was deleted
    asked              to_bytes, older_than_s, namespace (hex), everything (true for clear)
    before             homes, allocated_bytes
    goes               homes (whole), segments, blocks, bytes: what was planned
    homes[]            of which something goes: id, fingerprint (hex), model, last_use_s, whole, segments (numbers),
                       blocks, bytes, result ("deleted", "in use", "gone", "failed"; null in a dry run), why
    in_use             ids of homes that an engine owns, and that were left alone
    kept               sentences about homes that stay though they might have gone
    short_bytes        what is allocated beyond to_bytes even so
    after              homes, allocated_bytes; null in a dry run
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdisk import __version__
from kvdisk.cli.prune import Outcome, Stocktaking, carry_out, check_drives, find_namespace, parts_of_plan, take_stock
from kvdisk.cli.prune_plan import HomePlan, Plan, Wish, make_plan
from kvdisk.cli.refusal import NOTHING_DONE, refusal, refusing
from kvdisk.cli.terminal import ask, report_console
from kvdisk.cli.wording import ago, number, plural, printable, size

JSON_VERSION = 1
_ID_LETTERS = 8


class Exit(IntEnum):
    """Exit codes of both commands; the largest that applies."""

    DONE = 0
    LESS = 1
    NOTHING = NOTHING_DONE
    IN_USE = 3


class Asked(NamedTuple):
    """What the user asks for; see ``Wish``. ``orphans``: leave homes that an engine owns alone, instead of refusing."""

    to_bytes: int | None = None
    older_than_s: int | None = None
    namespace: str | None = None
    orphans: bool = False
    dry_run: bool = False
    yes: bool = False
    as_json: bool = False


class Deletion(NamedTuple):
    """What was planned, and what came of it. ``after``, ``outcomes``: None, and empty, in a dry run."""

    asked: Asked
    wish: Wish
    before: Stocktaking
    plan: Plan
    outcomes: Sequence[Outcome] = ()
    after: Stocktaking | None = None


def delete(paths: Sequence[Path], asked: Asked) -> typer.Exit:
    """Plan, show, ask, delete and tell. Returns what ends the command, with its exit code."""
    now_s = int(time.time())
    with refusing(paths):
        stock = take_stock(paths, with_blocks=True)
        wish = Wish(
            asked.to_bytes,
            None if asked.older_than_s is None else now_s - asked.older_than_s,
            None if asked.namespace is None else find_namespace(stock.homes, asked.namespace),
        )
        plan = make_plan(wish, stock.homes)
        check_drives(stock.store, [one.home for one in plan.homes])
    if plan.in_use and not asked.orphans:
        raise refusal(_in_use(plan, asked), Exit.IN_USE)
    deletion = Deletion(asked, wish, stock, plan)
    nothing = not plan.homes and not stock.loose_bytes
    must_ask = not (asked.yes or asked.dry_run or nothing)
    if not asked.as_json or must_ask:
        _show_plan(deletion, report_console(stderr=asked.as_json), now_s)
    if not (asked.dry_run or nothing):
        if must_ask:
            ask(f"Delete {size(plan.byte_count + stock.loose_bytes)} from {printable(paths[0])}?")
        with refusing(paths):
            outcomes = carry_out(stock.store, plan.homes)
            deletion = deletion._replace(outcomes=outcomes, after=take_stock(paths, with_blocks=False))
    if asked.as_json:
        typer.echo(json.dumps(deletion_as_json(deletion), indent=2))
    else:
        _show_result(deletion, report_console())
    return typer.Exit(_code(deletion))


def _in_use(plan: Plan, asked: Asked) -> str:
    count = len(plan.in_use)
    owns = f"{'an engine owns' if count == 1 else 'engines own'} {plural(count, 'home')} ({plan.in_use[0].id}"
    owns += ")" if count == 1 else " and others)"
    if asked.to_bytes is not None:
        freed = f"only {size(plan.byte_count)} can be freed, {size(plan.short_bytes)} too little, because {owns}"
    else:
        freed = f"{owns} that would have to change"
    return f"{freed}; end what uses the store, or say --orphans to delete only of homes that nobody owns."


def _code(deletion: Deletion) -> Exit:
    results = {outcome.result for outcome in deletion.outcomes}
    if results & {"in use", "gone"}:
        return Exit.IN_USE
    less = "failed" in results or deletion.plan.kept or deletion.plan.short_bytes
    return Exit.LESS if less else Exit.DONE


# -- for people --------------------------------------------------------------------------------


def _show_plan(deletion: Deletion, console: Console, now_s: int) -> None:
    plan, stock = deletion.plan, deletion.before
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    lines.add_row("Store", Text(printable(stock.store.path), "bold cyan"))
    lines.add_row("Holds", f"{size(stock.allocated_bytes)} in {plural(len(stock.homes), 'home')}")
    going = plan.byte_count + stock.loose_bytes
    lines.add_row("Goes", Text.assemble((size(going), "bold"), f", {_count(plan)}"))
    if stock.loose_bytes:
        lines.add_row("", f"{size(stock.loose_bytes)} of it in folders that no home names, left by a crash")
    lines.add_row("Stays", size(stock.allocated_bytes - going))
    console.print(lines)
    if plan.homes:
        console.print(_table(plan.homes, now_s))
    for home in plan.homes:
        if home.whole and home.home.why_whole and deletion.wish.to_bytes is not None:
            why = f"home {home.home.id} goes as a whole: {home.home.why_whole}"
            console.print(Text.assemble(("  · ", "yellow"), printable(why)), soft_wrap=True)
    if any(home.keys for home in plan.homes):
        freed = (
            "Blocks in segments that stay leave their slots to the next engine; the drive gets nothing back for them."
        )
        console.print(Text(freed, "dim"))
    for kept in plan.kept:
        console.print(Text.assemble(("  · ", "yellow"), printable(kept)), soft_wrap=True)


def _count(plan: Plan) -> str:
    whole = sum(home.whole for home in plan.homes)
    unknown = sum(home.block_count is None for home in plan.homes)
    more = f" and those of {plural(unknown, 'home')} that cannot be read" if unknown else ""
    said = f"{plural(plan.block_count, 'block')}{more}"
    return f"{said}, {plural(whole, 'home')} as a whole" if whole else said


def _table(homes: Sequence[HomePlan], now_s: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("\nHome", style="cyan", no_wrap=True)
    table.add_column("Name-\nspace", style="magenta", no_wrap=True)
    table.add_column("\nModel", overflow="fold")
    table.add_column("\nLast use", justify="right", no_wrap=True)
    table.add_column("\nGoes", overflow="fold")
    table.add_column("\nBlocks", justify="right", no_wrap=True)
    table.add_column("\nBytes", justify="right", no_wrap=True)
    for plan in homes:
        record = plan.home.record
        table.add_row(
            plan.home.id[:_ID_LETTERS],
            record.fingerprint.hex()[:_ID_LETTERS] if record else Text("?", "red"),
            printable(record.description.get("model") if record else None).rstrip("/").rpartition("/")[2],
            ago(record.last_use_s, now_s) if record else "?",
            parts_of_plan(plan),
            number(plan.block_count),
            size(plan.byte_count),
        )
    return table


def _show_result(deletion: Deletion, console: Console) -> None:
    plan, after = deletion.plan, deletion.after
    if after is None:
        why = "This was a dry run: nothing was deleted." if deletion.asked.dry_run else "There is nothing to delete."
        console.print(why)
    else:
        went = deletion.before.allocated_bytes - after.allocated_bytes
        done = [outcome.plan for outcome in deletion.outcomes if outcome.result == "deleted"]
        count = _count(Plan(done))
        left = f"{size(after.allocated_bytes)} in {plural(len(after.homes), 'home')} stay"
        stays = left if after.homes else "the store is empty"
        console.print(Text.assemble(("\nDeleted ", "green"), f"{size(went)}, {count}; {stays}."))
    for outcome in deletion.outcomes:
        if outcome.result != "deleted":
            said = f"home {outcome.plan.home.id} was left alone: {printable(outcome.why)}"
            console.print(Text.assemble(("  ✗ ", "red"), said), soft_wrap=True)
    if plan.short_bytes:
        short = f"{size(plan.short_bytes)} more than asked for stay, since {_owned(plan)}."
        console.print(Text(short, "yellow"), soft_wrap=True)
    elif plan.in_use:
        console.print(Text(f"Left alone: {_owned(plan)}.", "yellow"), soft_wrap=True)


def _owned(plan: Plan) -> str:
    if not plan.in_use:
        return "nothing else may go"
    return f"{plural(len(plan.in_use), 'home')} that engines own" + ("" if not plan.short_bytes else " may not change")


# -- for programs ------------------------------------------------------------------------------


def deletion_as_json(deletion: Deletion) -> dict[str, Any]:
    """Return the object that the module describes, of plain JSON values."""
    plan, outcomes, wish = deletion.plan, deletion.outcomes, deletion.wish
    results = {outcome.plan.home.id: outcome for outcome in outcomes}
    return {
        "json_version": JSON_VERSION,
        "kvdisk_version": __version__,
        "path": str(deletion.before.store.path),
        "dry_run": deletion.asked.dry_run,
        "asked": {
            "to_bytes": wish.to_bytes,
            "older_than_s": deletion.asked.older_than_s,
            "namespace": wish.fingerprint.hex() if wish.fingerprint else None,
            "everything": wish == Wish(),
        },
        "before": _stock_as_json(deletion.before),
        "goes": {
            "homes": sum(home.whole for home in plan.homes),
            "segments": sum(len(home.segments) for home in plan.homes),
            "blocks": plan.block_count,
            "bytes": plan.byte_count + deletion.before.loose_bytes,
        },
        "homes": [_home(home, results.get(home.home.id)) for home in plan.homes],
        "in_use": [home.id for home in plan.in_use],
        "kept": list(plan.kept),
        "short_bytes": plan.short_bytes,
        "after": None if deletion.after is None else _stock_as_json(deletion.after),
    }


def _stock_as_json(stock: Stocktaking) -> dict[str, int]:
    return {"homes": len(stock.homes), "allocated_bytes": stock.allocated_bytes}


def _home(plan: HomePlan, outcome: Outcome | None) -> dict[str, Any]:
    record = plan.home.record
    return {
        "id": plan.home.id,
        "fingerprint": record.fingerprint.hex() if record else None,
        "model": record.description.get("model") if record else None,
        "last_use_s": record.last_use_s if record else None,
        "whole": plan.whole,
        "segments": sorted(plan.segments),
        "blocks": plan.block_count,
        "bytes": plan.byte_count,
        "result": outcome.result if outcome else None,
        "why": outcome.why if outcome and outcome.why else None,
    }
