# SPDX-License-Identifier: Apache-2.0
"""A replay as a table, room by room."""

from __future__ import annotations

from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from kvdisk.cli.output import number, plural, size
from kvdisk.cli.replay.run import Replayed
from kvdisk.stats import REFUSALS, TIER_WORDS


def print_replayed(replayed: Replayed, console: Console) -> None:
    """Print the trace, the table, and how fast it went."""
    trace = replayed.trace
    console.print(
        f"{trace.name} ({trace.form}): {plural(trace.requests, 'request')}, {number(trace.references)} blocks of"
        f" {trace.block_tokens} tokens, {number(trace.distinct_blocks)} distinct"
    )
    for note in trace.notes:
        console.print(f"Note: {note}")
    console.print(_table(replayed))
    beside = f", {replayed.processes} runs at a time" if replayed.processes > 1 else ""
    console.print(
        "hits: tokens of prompts that were loaded, of all; write amp.: blocks written to NVMe / distinct blocks.\n"
        f"Bytes are of blocks of {size(replayed.block_bytes)} with their headers.\n"
        f"{plural(len(replayed.runs) * trace.references, 'block reference')} through the manager in"
        f" {replayed.seconds:.1f} s: {number(replayed.references_per_second)} a second{beside}."
    )


def _table(replayed: Replayed) -> Table:
    tiers = [tier for tier in TIER_WORDS if any(run.hit_blocks[tier] for run in replayed.runs)]
    told_apart = tiers if len(tiers) > 1 else []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("room", no_wrap=True)
    table.add_column("policy")
    by_tier = [f"by {TIER_WORDS[tier]}" for tier in told_apart]
    for title in ("hits", *by_tier, "of blocks", "written", "read", "write amp.", "evicted", "refused"):
        table.add_column(title, justify="right", no_wrap=True)
    for _, some in groupby(replayed.runs, lambda run: run.room.blocks):
        for at, run in enumerate(some):
            table.add_row(
                f"{run.room.given}  {number(run.room.blocks)}" if at == 0 else "",
                run.policy,
                _percent(run.hit_rate),
                *(_percent(run.hit_tokens[tier] / replayed.trace.tokens) for tier in told_apart),
                _percent(run.hit_blocks_rate),
                size(run.written_bytes),
                size(run.read_bytes),
                f"{run.write_amplification:.2f}",
                number(sum(run.evicted_blocks.values())),
                number(sum(run.refused[why] for why in REFUSALS)),
            )
        if at:
            table.add_section()
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
