# SPDX-License-Identifier: Apache-2.0
"""``kvdisk replay``: from arguments to output and exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from kvdisk.cli.output import WIDE, AsJson, Exit, number, plural, print_json, refusal, report_console, size
from kvdisk.cli.replay.run import Replayed, Run, run_all
from kvdisk.cli.replay.tiers import Setting, make_geometry, parse_capacity, split
from kvdisk.cli.replay.trace import Form, Trace, read_trace
from kvdisk.config import Config, parse_bytes
from kvdisk.errors import ConfigError, KvdiskError, printable
from kvdisk.stats import REFUSALS, TIER_WORDS

_DEFAULTS = Config()
_TOKEN_BYTES = 128 << 10
"""Bytes of a token of a model with 32 layers and 8 KV heads of 128 in 16 bits."""
NEARLY = 0.9
"""The share that is enough of the hits that any size could bring: more costs more than it is
worth."""
_Names = Annotated[list[str], typer.Option(metavar="NAME,...", help="As in the configuration.")]


_Unit = Annotated[
    int | None,
    typer.Option(min=1, metavar="TOKENS", help="Of a unit, see the setting unit_tokens; by default one block."),
]
OfForm = Annotated[
    Form,
    typer.Option(
        "--form", metavar="FORM", help="How it is written: auto (by its first line), mooncake, azure, jsonl or kvdisk."
    ),
]


def replay(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="The trace: plain or gzip.", show_default=False)],
    form: OfForm = Form.AUTO,
    block_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a block; by default the trace's; 512 for mooncake; else 16."),
    ] = None,
    unit_tokens: _Unit = None,
    block_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes of a block; by default the trace's, or 128 KiB a token."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--requests", min=1, metavar="N", help="Only the first N requests.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole-blocks", help="Leave out the partial blocks at the ends of prompts.")
    ] = False,
    nvme: Annotated[
        list[str],
        typer.Option(metavar="ROOM,...", help="NVMe tier: blocks, % of the distinct blocks, or a size; 0: none."),
    ] = ["1%,5%,10%,25%,50%"],  # noqa: B006 - typer copies it
    cpu: Annotated[list[str], typer.Option(metavar="ROOM,...", help="CPU tier, likewise.")] = ["0"],  # noqa: B006
    gpu: Annotated[int, typer.Option(min=0, metavar="BLOCKS", help="A prefix cache in front of the tiers, LRU.")] = 0,
    eviction: _Names = [_DEFAULTS.eviction],  # noqa: B006
    nvme_admission: _Names = [_DEFAULTS.nvme_admission],  # noqa: B006
    cpu_admission: _Names = [_DEFAULTS.cpu_admission],  # noqa: B006
    store_policy: _Names = [_DEFAULTS.store_policy],  # noqa: B006
    processes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Runs at a time; by default one a CPU."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take a trace of requests through the tiers without the model: what hits, and what is written.

    The tiers' manager and policies are the real ones, and all combinations
    of what is listed are run. No bytes are moved. Says how large nvme_bytes has to be.
    An engine writes a trace of its own requests with trace_file.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  replayed

    [cyan]2[/cyan]  nothing was replayed: a damaged trace, or wrong usage
    """
    console = report_console()
    try:
        policies = {
            "eviction": split(eviction),
            "cpu_admission": split(cpu_admission),
            "nvme_admission": split(nvme_admission),
            "store_policy": split(store_policy),
        }
        _check_policies(policies)
        trace = read_trace(path, form, block_tokens, limit, whole=whole).in_units(unit_tokens)
        own = trace.block_bytes or _TOKEN_BYTES * trace.block_tokens
        each = own if block_bytes is None else parse_bytes("--block-bytes", block_bytes)
        if not each:
            raise ConfigError("--block-bytes must be more than 0.")
        settings = _settings(trace, each, split(cpu), split(nvme), gpu, policies)
        at_once = processes or len(os.sched_getaffinity(0))
        replayed = run_all(trace, settings, each, at_once, lambda done: _watch(done, len(settings)))
    except KvdiskError as error:
        raise refusal(f"{str(error).removesuffix('.')}.", Exit.NOTHING_DONE) from None
    if as_json:
        print_json(replayed)
    else:
        wide = None if console.is_terminal else 160
        _print(replayed, Console(markup=False, highlight=False, emoji=False, width=wide))


def _check_policies(policies: dict[str, list[str]]) -> None:
    for key, names in policies.items():
        for name in names:
            Config.from_mapping({key: name})
    if "on_preemption" in policies["store_policy"]:
        raise ConfigError("--store-policy on_preemption would store nothing: a replay preempts no request.")


def _settings(
    trace: Trace, block_bytes: int, cpu: list[str], nvme: list[str], gpu: int, policies: dict[str, list[str]]
) -> list[Setting]:
    geometry = make_geometry(trace, block_bytes)
    cpu_rooms = [parse_capacity("--cpu", text, trace, geometry, on_nvme=False) for text in cpu]
    nvme_rooms = [parse_capacity("--nvme", text, trace, geometry, on_nvme=True) for text in nvme]
    rooms = [pair for pair in product(cpu_rooms, nvme_rooms) if pair[0].slots or pair[1].slots]
    if not rooms:
        raise ConfigError("With neither --cpu nor --nvme there is no tier to keep anything in.")
    if "spillover" in policies["store_policy"] and not gpu:
        raise ConfigError("--store-policy spillover stores what leaves the GPU's prefix cache; give it one with --gpu.")
    return [
        Setting(eviction, cpu_admission, nvme_admission, store, *pair, gpu)
        for pair in rooms
        for eviction, cpu_admission, nvme_admission, store in product(*policies.values())
    ]


def _watch(done: int, total: int) -> None:
    """Show on standard error, where it is a terminal, how many runs have ended."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\x1b[K{done} of {total} runs\r" if done < total else "\x1b[K")
        sys.stderr.flush()


# -- for people --------------------------------------------------------------------------------


def _print(replayed: Replayed, console: Console) -> None:
    """Print the trace, the table, and how fast the replay went."""
    trace = replayed.trace
    console.print(
        f"{printable(trace.name)} ({trace.form}): {plural(trace.requests, 'request')}, "
        f"{number(trace.references)} blocks of {trace.block_tokens} tokens, {number(trace.distinct_blocks)} distinct"
    )
    for note in trace.notes:
        console.print(f"Note: {note}")
    _print_table(replayed, console)
    console.print(_answer(replayed))
    beside = f", {replayed.processes} runs at a time" if replayed.processes > 1 else ""
    console.print(
        "hits: tokens of prompts that were loaded, of all.\n"
        f"Bytes are of blocks of {size(replayed.block_bytes)} with their headers.\n"
        f"{plural(len(replayed.runs) * trace.references, 'block reference')} through the manager in"
        f" {replayed.seconds:.1f} s: {number(replayed.references_per_second)} a second{beside}."
    )


def _room(run: Run) -> str:
    return f"{run.room.given}  {size(run.nvme_bytes) if run.nvme_bytes else number(run.room.blocks)}"


def _answer(replayed: Replayed) -> str:
    """Say in a sentence how large the NVMe tier has to be. It is the smallest size, among those
    with the first run's policies, that brings nearly all hits that any size could bring."""
    alike = [run for run in replayed.runs if run.policy == replayed.runs[0].policy and run.nvme_bytes]
    most = replayed.trace.most_hits
    if not most:
        return "No prompt begins as another did: no size would bring hits."
    if not alike:
        return f"A tier without an end would hit {_percent(most)}."
    enough = [run for run in alike if run.hit_rate >= NEARLY * most]
    if enough:
        least = min(enough, key=lambda run: run.nvme_bytes)
        return (
            f"nvme_bytes of {size(least.nvme_bytes)} brings {_percent(least.hit_rate)}; no size brings more than"
            f" {_percent(most)}."
        )
    best = max(alike, key=lambda run: run.hit_rate)
    return (
        f"None of these is enough: {size(best.nvme_bytes)} brings {_percent(best.hit_rate)} of {_percent(most)};"
        " try more with --nvme 75%,100%."
    )


def _print_table(replayed: Replayed, console: Console) -> None:
    """Print the runs. Columns for which there is no room are left out; those of them that a narrow
    terminal mostly has are named."""
    usual = 0 if console.width >= WIDE else 1
    for count in range(usual, len(_SPARE) + 1):
        table = _table(replayed, _SPARE[:count], is_wide=console.width >= WIDE)
        unbound = console.options.update(max_width=_NO_BOUND)
        if Measurement.get(console, unbound, table).minimum <= console.width:
            break
    console.print(table)
    if count > usual:
        console.print(f"No room here for {', '.join(_SPARE[:count])}: a wider terminal has more, and --json all.")


def _table(replayed: Replayed, left_out: Sequence[str], *, is_wide: bool) -> Table:
    tiers = [tier for tier in TIER_WORDS if any(run.hit_blocks.get(tier) for run in replayed.runs)]
    told_apart = tiers if len(tiers) > 1 else []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2 if is_wide else 1, 0, 0))
    table.add_column("nvme_bytes" if replayed.runs[0].nvme_bytes else "room", no_wrap=True)
    table.add_column("policy")
    by_tier = [f"by {TIER_WORDS[tier]}" for tier in told_apart]
    shown = [name for name in _FIGURES if name not in left_out]
    for title in ("hits", *by_tier, *shown):
        table.add_column(title, justify="right", no_wrap=True)
    for _, some in groupby(replayed.runs, lambda run: run.room.blocks):
        for at, run in enumerate(some):
            table.add_row(
                _room(run) if at == 0 else "",
                run.policy,
                _percent(run.hit_rate),
                *(_percent(run.hit_tokens[tier] / replayed.trace.tokens) for tier in told_apart),
                *(_FIGURES[name](run) for name in shown),
            )
        if at:
            table.add_section()
    for column in (one for one in table.columns if one.no_wrap):
        column.min_width = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
    return table


_FIGURES: dict[str, Callable[[Run], str]] = {
    "written": lambda run: size(run.written_bytes),
    "read": lambda run: size(run.read_bytes),
    "write amp.": lambda run: f"{run.write_amplification:.2f}",
    "evicted": lambda run: number(sum(run.evicted_blocks.values())),
    "refused": lambda run: number(sum(run.refused[why] for why in REFUSALS)),
}
_SPARE = ("write amp.", "refused", "evicted", "read")
"""What is left out first where a terminal is narrow."""
_NO_BOUND = 10_000


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
