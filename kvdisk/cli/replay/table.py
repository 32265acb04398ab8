# SPDX-License-Identifier: Apache-2.0
"""A replay as a table: room by room, the manager's runs and what they are compared with."""

from __future__ import annotations

from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from kvdisk.blocks import Tier
from kvdisk.cli.output import number, plural, size
from kvdisk.cli.replay.result_json import name_of, slot_bytes_of, waits_of
from kvdisk.cli.replay.run import Outcome, Replayed

_TIERS = {Tier.GPU: "GPU", Tier.CPU: "CPU", Tier.NVME: "NVMe"}


def print_replayed(replayed: Replayed, console: Console) -> None:
    """Print the trace, the table, and how fast it went."""
    trace = replayed.trace
    console.print(
        f"{trace.name} ({trace.form}): {plural(len(trace.requests), 'request')}, {number(trace.references)} blocks of"
        f" {trace.block_tokens} tokens, {number(trace.distinct)} distinct"
    )
    for note in trace.notes:
        console.print(f"Note: {note}")
    console.print(_table(replayed))
    console.print(_legend(replayed))


def _table(replayed: Replayed) -> Table:
    shown = _tiers_of(replayed)
    waits = any(outcome.waits_s for outcome in replayed.outcomes)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("room", "policy"):
        table.add_column(title, no_wrap=title == "room")
    titles = [
        "hits",
        *(f"by {_TIERS[tier]}" for tier in shown),
        "of blocks",
        "written",
        "read",
        "write amp.",
        "evicted",
    ]
    for title in [*titles, "refused", *(("wait p50", "p99") if waits else ())]:
        table.add_column(title, justify="right", no_wrap=True)
    for _, some in groupby(replayed.outcomes, lambda outcome: outcome.room.blocks):
        for at, outcome in enumerate(some):
            room = f"{outcome.room.text}  {number(outcome.room.blocks)}" if at == 0 else ""
            cells = _cells(replayed, outcome, shown, waits=waits)
            table.add_row(room, name_of(outcome), *cells, style="dim" if outcome.rival is not None else None)
        table.add_section()
    return table


def _tiers_of(replayed: Replayed) -> list[Tier]:
    """Return the tiers to be told apart, where there are several."""
    found = [tier for tier in Tier if any(outcome.hit_blocks.get(tier) for outcome in replayed.own)]
    return found if len(found) > 1 else []


def _cells(replayed: Replayed, outcome: Outcome, shown: list[Tier], *, waits: bool) -> list[str]:
    trace, slot_bytes = replayed.trace, slot_bytes_of(replayed)
    is_own = outcome.rival is None
    refused = sum(outcome.refused.get(why, 0) for why in ("reuse", "room", "budget"))
    cells = [
        _percent(outcome.tokens / trace.tokens),
        *(_percent(outcome.hit_tokens.get(tier, 0) / trace.tokens) if is_own else "" for tier in shown),
        _percent(outcome.blocks / trace.references),
        size(outcome.written * slot_bytes),
        size(outcome.read * slot_bytes),
        f"{outcome.written / trace.distinct:.2f}",
        "" if outcome.evicted is None else number(sum(outcome.evicted.values())),
        number(refused) if is_own else "",
    ]
    if waits:
        found = waits_of(outcome)
        cells += [f"{1000 * found[name]:.1f} ms" for name in ("median", "p99")] if found else ["", ""]
    return cells


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _legend(replayed: Replayed) -> str:
    own = len(replayed.own)
    total = own * replayed.trace.references
    beside = f", {replayed.processes} runs at a time" if replayed.processes > 1 else ""
    lines = [
        "hits: tokens of prompts that were loaded, of all; write amp.: blocks written to NVMe / distinct blocks.",
        f"Bytes are of blocks of {size(replayed.block_bytes)} with their headers.",
        f"{plural(total, 'block reference')} through the manager in {replayed.seconds:.1f} s:"
        f" {number(round(replayed.rate))} a second{beside}.",
    ]
    if replayed.io_directory is not None:
        lines.append(
            f"Bytes were written to, read from and compared with what they were under {replayed.io_directory}."
        )
    failed = sum(sum(outcome.failed.values()) for outcome in replayed.own)
    if failed:
        lines.append(f"{plural(failed, 'block')} failed to load or to be stored.")
    return "\n".join(lines)
