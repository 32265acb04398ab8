# SPDX-License-Identifier: Apache-2.0
"""A run of ``kvdisk bench`` as people read it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from kvdisk.cli.bench.cases import Part, Result, short_size
from kvdisk.cli.bench.drive import DriveReport
from kvdisk.cli.bench.run import Run
from kvdisk.device.base import Op

_TITLES = {
    Part.MOVER: "{gpu} and NVMe, through the mover",
    Part.MEMORY: "{gpu} and CPU tier, through the mover",
}
_WAYS = ((Op.READ, False), (Op.WRITE, False), (Op.READ, True), (Op.WRITE, True))


def print_run(run: Run, console: Console) -> None:
    """Print the machine, the figures, what a start would choose, and what was left out."""
    console.print(run.machine.sentence)
    if run.drive:
        console.print("\nMemory and NVMe, each device alone, MB/s", _drive_table(run.drive), sep="\n")
        console.print(run.chosen, run.straight_to_gpu, sep="\n")
    gpu = "GPU" if run.gpu else "Host memory in place of a GPU"
    for part, results in groupby(run.results, key=lambda result: result.case.part):
        console.print(f"\n{_TITLES[part].format(gpu=gpu)}", _result_table(list(results)), sep="\n")
    for line in run.skipped:
        console.print(line)


def _drive_table(reports: Sequence[DriveReport]) -> Table:
    table = _table()
    for name in ("slots of", "device"):
        table.add_column(name, no_wrap=True)
    for name in ("read", "write", "runs read", "runs written"):
        table.add_column(name, justify="right")
    for report in reports:
        figures = {(speed.op, speed.run): f"{speed.bytes_per_s / 1e6:,.0f}" for speed in report.speeds}
        table.add_row(short_size(report.block_bytes), report.speeds[0].device, *(figures[way] for way in _WAYS))
    return table


def _result_table(results: Sequence[Result]) -> Table:
    table = _table()
    table.add_column("", overflow="fold")
    for name in ("MB/s", "lowest-highest", "CPU s/GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for case, mine in groupby(results, key=lambda result: result.case):
        table.add_row(case.words, style="italic")
        for one in mine:
            speed = one.mb_per_s
            spread = f"{speed.lowest:,.0f}-{speed.highest:,.0f}"
            table.add_row(f"  {one.name}", f"{speed.median:,.0f}", spread, f"{one.cpu_s_per_gib:.3f}")
        table.add_section()
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
