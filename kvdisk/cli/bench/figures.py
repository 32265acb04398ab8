# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/BENCHMARKS.md: what is measured for them, what was asked for, and what was reached.

A row has several cases, and counts as the worst of them. Which device is best may differ from case to case, as
``device: auto`` may choose another for another direction or size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from kvdisk.cli.bench.cases import (
    Case,
    Contender,
    Flow,
    Group,
    GroupResult,
    Layout,
    Role,
    Series,
    cpu_ratio,
    ratio,
)
from kvdisk.cli.bench.drive import auto_depth
from kvdisk.cli.bench.groups import (
    BARE,
    NO_TORCH,
    THROUGH_MOVER,
    UNVERIFIED,
    VERIFIED,
    cpu_group,
    has_torch,
    mover_case,
    mover_group,
)
from kvdisk.cli.bench.report import short_size
from kvdisk.cli.bench.settings import Part, Settings
from kvdisk.cli.bench.stand import Stand

_KIB, _MIB = 1 << 10, 1 << 20
_RUN_SIZES = (_MIB, 2 * _MIB, 8 * _MIB)
_SMALL = 256 * _KIB
_PEER_SIZES = {2 * _MIB: 1.0, _SMALL: 1.3, 64 * _KIB: 2.0}
_FLOWS = (Flow.READ, Flow.WRITE)
_SHALLOW = 8
_MOST_FILES = 1024
"""Of the peer in one measurement: to make and remove more takes longer than everything else together."""


_Reached = tuple[float, str, float | None]
"""Ratio, by which contender, and the limit's ratio: as in ``Cell``."""


class Cell(NamedTuple):
    """One case of a row: in words, and the ratio that was reached, by which contender.

    ``limit``: what fio reached in the same rounds, where it was compared with the same thing.
    """

    words: str
    value: float
    name: str
    limit: float | None = None

    @property
    def text(self) -> str:
        """All of it, for people."""
        limit = "" if self.limit is None else f"; fio {self.limit:.2f}"
        return f"{self.words} {self.value:.2f} ({self.name}{limit})"


class Row(NamedTuple):
    """A figure. ``most``: the ratio may be no higher, rather than no lower. ``cells``: empty: not measured."""

    what: str
    wanted: float
    most: bool
    cells: list[Cell]

    @property
    def reached(self) -> float | None:
        """The worst of its cases."""
        values = [cell.value for cell in self.cells]
        return None if not values else max(values) if self.most else min(values)

    @property
    def holds(self) -> bool | None:
        """Whether it is as asked for; None: not measured."""
        reached = self.reached
        return None if reached is None else reached <= self.wanted if self.most else reached >= self.wanted

    def plain(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        cells = [{"case": one.words, "ratio": one.value, "by": one.name, "fio": one.limit} for one in self.cells]
        wanted = {"at_most" if self.most else "at_least": self.wanted}
        return {"what": self.what, **wanted, "reached": self.reached, "holds": self.holds, "cases": cells}


def figure_groups(stand: Stand, settings: Settings) -> list[Group]:
    """Return what is measured for the figures, of the parts that were asked for."""
    groups: list[Group] = []
    if Part.DRIVE in settings.parts:
        groups += [_best_group(stand, _case(settings, flow, size)) for size in _RUN_SIZES for flow in _FLOWS]
        for flow in _FLOWS:
            case = _case(settings, flow, _SMALL, Layout.SCATTERED)
            groups += [stand.drive_group(case, peer=False), stand.drive_group(replace(case, busy=True), peer=False)]
        if stand.peer is not None:
            groups += [stand.drive_group(_peer_case(settings, flow, size)) for size in _PEER_SIZES for flow in _FLOWS]
    if {Part.MOVER, Part.CPU} & set(settings.parts) and not has_torch():
        stand.skipped.append(NO_TORCH)
        return groups
    if Part.MOVER in settings.parts:
        groups += [mover_group(stand, mover_case(settings, flow, 2 * _MIB), limit=False) for flow in _FLOWS]
    if Part.CPU in settings.parts:
        groups.append(cpu_group(stand, settings))
    return groups


def rows_of(results: Sequence[GroupResult]) -> list[Row]:
    """Return the rows, those that were not measured too."""
    rows = [
        _row("best device, contiguous runs of 1 MiB and more, of fio's best", 0.95, _of(results, _is_run), _of_limit),
        _row("best device, 256 KiB scattered, of fio at the same depth", 0.85, _of(results, _is_scattered), _of_limit),
        _row("the same with one busy Python thread", 0.75, _of(results, _is_busy), _of_limit),
    ]
    rows += [
        _row(
            f"best device against vLLM's fs_io_C at its best thread count, {short_size(size)}",
            wanted,
            [one for one in results if one.case.route == "peer" and one.case.block_bytes == size],
            _of_peer,
        )
        for size, wanted in _PEER_SIZES.items()
    ]
    mover = [one for one in results if one.case.route == "mover"]
    rows.append(_row("through the mover, GPU tier in host memory, 2 MiB, of the device alone", 0.85, mover, _of_device))
    rows.append(_row("the same, of what it loads without verification", 0.95, mover, _of_unverified))
    cpu = [one for one in results if one.case.route == "cpu"]
    rows.append(_row("processor time for a GiB, unverified, to a bare preadv loop's", 1.5, cpu, _cpu_plain, most=True))
    rows.append(_row("the same, verified", 4.0, cpu, _cpu_verified, most=True))
    return rows


def table_of(rows: Sequence[Row]) -> Table:
    """Return the rows for people."""
    table = Table(title="Figures", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what (a row is as good as its worst case)", overflow="fold", ratio=3)
    table.add_column("wanted", justify="right", no_wrap=True)
    table.add_column("reached", justify="right", no_wrap=True)
    table.add_column("cases", overflow="fold", ratio=3)
    for row in rows:
        reached, holds = row.reached, row.holds
        table.add_row(
            row.what,
            f"{'<=' if row.most else '>='} {row.wanted:g}",
            "not measured" if reached is None else f"{reached:.2f}",
            ", ".join(cell.text for cell in row.cells),
            style={True: "green", False: "red", None: "dim"}[holds],
        )
    return table


def _case(settings: Settings, flow: Flow, size: int, layout: Layout = Layout.CONTIGUOUS) -> Case:
    total = settings.total_bytes // size * size
    return Case(flow, size, min(auto_depth(size), total // size), layout, total)


def _peer_case(settings: Settings, flow: Flow, size: int) -> Case:
    case = _case(settings, flow, size)
    return replace(case, route="peer", total_bytes=min(case.total_bytes, _MOST_FILES * size))


def _best_group(stand: Stand, case: Case) -> Group:
    """Return a case's contenders with more of fio's ways: also less deep, where it may be faster."""

    def make(_: ExitStack) -> list[Contender]:
        made = stand.limits(case)
        shallow = replace(case, depth=_SHALLOW)
        if stand.fio is not None and case.depth > _SHALLOW:
            made += [
                Contender(
                    f"fio {engine} x {_SHALLOW}",
                    Role.LIMIT,
                    partial(stand.fio.measure, shallow, engine),
                    in_process=False,
                )
                for engine in stand.engines
            ]
        return [*made, *stand.ours(case)]

    return Group(case, make)


def _row(
    what: str,
    wanted: float,
    results: Sequence[GroupResult],
    cell: Callable[[GroupResult], list[_Reached]],
    *,
    most: bool = False,
) -> Row:
    cells = [
        Cell(f"{result.case.flow.value} {short_size(result.case.block_bytes)}", *reached)
        for result in results
        for reached in cell(result)
    ]
    return Row(what, wanted, most, cells)


def _of(results: Sequence[GroupResult], wanted: Callable[[Case], bool]) -> list[GroupResult]:
    return [one for one in results if one.case.route == "drive" and wanted(one.case)]


def _is_run(case: Case) -> bool:
    return case.layout is Layout.CONTIGUOUS and case.block_bytes in _RUN_SIZES


def _is_scattered(case: Case) -> bool:
    return case.layout is Layout.SCATTERED and not case.busy


def _is_busy(case: Case) -> bool:
    return case.layout is Layout.SCATTERED and case.busy


def _of_limit(result: GroupResult) -> list[_Reached]:
    return _against(result.best(Role.OURS), result.best(Role.LIMIT))


def _of_peer(result: GroupResult) -> list[_Reached]:
    limit, peer = result.best(Role.LIMIT), result.best(Role.PEER)
    return [
        (value, name, None if limit is None or peer is None else ratio(limit, peer))
        for value, name, _ in _against(result.best(Role.OURS), peer)
    ]


def _of_device(result: GroupResult) -> list[_Reached]:
    """The best mover against the best device alone."""
    movers = [one for one in result.series if one.name.endswith(THROUGH_MOVER)]
    alone = [one for one in result.series if one.role is Role.OURS and THROUGH_MOVER not in one.name]
    if not movers or not alone:
        return []
    best = max(movers, key=lambda one: one.rate)
    name = best.name.removesuffix(THROUGH_MOVER).strip()
    return [(ratio(best, max(alone, key=lambda one: one.rate)), name, None)]


def _of_unverified(result: GroupResult) -> list[_Reached]:
    """Each device's mover against itself, not looking at what it has read."""
    found: list[_Reached] = []
    for one in result.series:
        blind = result.named(f"{one.name}, {UNVERIFIED}")
        if blind is not None:
            found.append((ratio(one, blind), one.name.removesuffix(THROUGH_MOVER).strip(), None))
    return found


def _against(mine: Series | None, other: Series | None) -> list[_Reached]:
    return [] if mine is None or other is None else [(ratio(mine, other), mine.name, None)]


def _cpu_plain(result: GroupResult) -> list[_Reached]:
    return _cpu(result, [one for one in result.series if one.name != BARE and not one.name.endswith(f", {VERIFIED}")])


def _cpu_verified(result: GroupResult) -> list[_Reached]:
    return _cpu(result, [one for one in result.series if one.name.endswith(f", {VERIFIED}")])


def _cpu(result: GroupResult, series: Sequence[Series]) -> list[_Reached]:
    """Each of them against the bare loop: of processor time there is no best device, the fastest one is used."""
    bare = result.named(BARE)
    return [] if bare is None else [(cpu_ratio(one, bare), one.name, None) for one in series]
