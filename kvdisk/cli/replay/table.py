# SPDX-License-Identifier: Apache-2.0
"""A replay as a table: room by room, the manager's runs and what they are compared with."""

from __future__ import annotations

from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from kvdisk.cli.output import number, plural, size
from kvdisk.cli.replay.run import REASONS, Replayed, Run, TraceFacts

_TIERS = {"gpu": "GPU", "cpu": "CPU", "nvme": "NVMe"}


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
    console.print("\n".join(_legend(replayed)))


def _table(replayed: Replayed) -> Table:
    tiers = [tier for tier in _TIERS if any(run.hit_blocks[tier] for run in replayed.own)]
    told_apart = tiers if len(tiers) > 1 else []
    waits = any(run.waits_s for run in replayed.runs)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("room", no_wrap=True)
    table.add_column("policy")
    by_tier = [f"by {_TIERS[tier]}" for tier in told_apart]
    titles = ["hits", *by_tier, "of blocks", "written", "read", "write amp.", "evicted", "refused"]
    for title in [*titles, *(("wait p50", "p99") if waits else ())]:
        table.add_column(title, justify="right", no_wrap=True)
    for _, some in groupby(replayed.runs, lambda run: run.room.blocks):
        for at, run in enumerate(some):
            room = f"{run.room.given}  {number(run.room.blocks)}" if at == 0 else ""
            cells = _cells(replayed.trace, run, told_apart, waits=waits)
            table.add_row(room, run.policy, *cells, style="dim" if run.model is not None else None)
        table.add_section()
    return table


def _cells(trace: TraceFacts, run: Run, told_apart: list[str], *, waits: bool) -> list[str]:
    is_own = run.model is None
    cells = [
        _percent(run.hit_rate),
        *(_percent(run.hit_tokens[tier] / trace.tokens) if is_own else "" for tier in told_apart),
        _percent(run.hit_blocks_rate),
        size(run.written_bytes),
        size(run.read_bytes),
        f"{run.write_amplification:.2f}",
        "" if run.evicted_blocks is None else number(sum(run.evicted_blocks.values())),
        number(sum(run.refused[why] for why in REASONS)) if is_own else "",
    ]
    if waits:
        cells += (
            [f"{1000 * wait:.1f} ms" for wait in (run.waits_s.median, run.waits_s.p99)] if run.waits_s else ["", ""]
        )
    return cells


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _legend(replayed: Replayed) -> list[str]:
    beside = f", {replayed.processes} runs at a time" if replayed.processes > 1 else ""
    lines = [
        "hits: tokens of prompts that were loaded, of all; write amp.: blocks written to NVMe / distinct blocks.",
        f"Bytes are of blocks of {size(replayed.block_bytes)} with their headers.",
        f"{plural(len(replayed.own) * replayed.trace.references, 'block reference')} through the manager in"
        f" {replayed.seconds:.1f} s: {number(replayed.references_per_second)} a second{beside}.",
    ]
    if replayed.io_directory is not None:
        lines.append(
            f"Bytes were written to, read from and compared with what they were under {replayed.io_directory}."
        )
    failed = sum(sum(run.failed.values()) for run in replayed.own)
    if failed:
        lines.append(f"{plural(failed, 'block')} failed to load or to be stored.")
    return lines
