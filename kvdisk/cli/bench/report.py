# SPDX-License-Identifier: Apache-2.0
"""A run's results as a table for people and as plain values for JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from kvdisk.cli.bench.cases import Case, GroupResult, Role, Series, ratio
from kvdisk.cli.output import size

TITLES = {
    "drive": "CPU and NVMe",
    "mover": "NVMe, CPU and GPU through the mover (the GPU's blocks are in host memory)",
    "gpu": "CPU and GPU",
    "cpu": "Processor time",
    "peer": "CPU and NVMe, beside vLLM's files",
}
_MB = 1e6


def table_of(title: str, results: Sequence[GroupResult]) -> Table:
    """Return the medians of groups of one route, with their spread and their ratio to limit and peer."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    peers = any(result.best(Role.PEER) for result in results)
    limits = any(result.best(Role.LIMIT) for result in results)
    table.add_column("", overflow="fold")
    for name in ("MB/s", "spread", *["of limit"] * limits, *["of peer"] * peers, "CPU s/GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        limit, peer = result.best(Role.LIMIT), result.best(Role.PEER)
        table.add_row(case_words(result.case), style="italic")
        for one in result.series:
            cpu = one.cpu_rates
            table.add_row(
                f"  {one.name}",
                f"{one.rate / _MB:,.0f}",
                f"{min(one.rates) / _MB:,.0f}-{max(one.rates) / _MB:,.0f}",
                *[_ratio(one, limit)] * limits,
                *[_ratio(one, peer)] * peers,
                f"{statistics.median(cpu):.3f}" if cpu else "",
                style="bold" if one.role is Role.OURS else "",
            )
        for name, why in result.dropped.items():
            table.add_row(f"  {name}: {why}", style="dim")
        table.add_section()
    return table


def case_words(case: Case) -> str:
    """Return a case in words."""
    words = f"{case.flow.value} {short_size(case.block_bytes)} x {case.depth} {case.layout.value}"
    return f"{words}, busy thread" if case.busy else words


def short_size(count_bytes: int) -> str:
    """Return a size without decimals where it has none: ``64 KiB``."""
    return size(count_bytes).replace(".0 ", " ")


def plain(results: Sequence[GroupResult]) -> list[dict[str, Any]]:
    """Return groups as plain values: every sample is in there."""
    return [_plain_group(result) for result in results]


def by_route(results: Sequence[GroupResult]) -> list[tuple[str, list[GroupResult]]]:
    """Return the groups route by route, in their order."""
    return [(route, list(mine)) for route, mine in groupby(results, key=lambda result: result.case.route)]


def _plain_group(result: GroupResult) -> dict[str, Any]:
    limit, peer = result.best(Role.LIMIT), result.best(Role.PEER)
    return {
        "case": result.case.plain(),
        "contenders": [
            {
                "name": one.name,
                "role": one.role.value,
                "seconds": [sample.seconds for sample in one.samples],
                "cpu_seconds": [sample.cpu_seconds for sample in one.samples],
                "mb_per_s": {"median": one.rate / _MB, "lowest": min(one.rates) / _MB, "highest": max(one.rates) / _MB},
                "of_limit": None if limit is None else ratio(one, limit),
                "of_peer": None if peer is None else ratio(one, peer),
            }
            for one in result.series
        ],
        "left_out": [{"name": name, "why": why} for name, why in result.dropped.items()],
    }


def _ratio(one: Series, other: Series | None) -> str:
    """Return the ratio in figures; none of a limit, which others are compared with."""
    return "" if other is None or one.role is Role.LIMIT else f"{ratio(one, other):.2f}"
