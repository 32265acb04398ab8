# SPDX-License-Identifier: Apache-2.0
"""``kvdisk bench``: its options, and what it prints. What measures is loaded only when something is measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvdisk.cli.bench.cases import Flow, Layout
from kvdisk.cli.bench.settings import Part, Settings, check
from kvdisk.cli.output import parse_size
from kvdisk.errors import ConfigError, KvdiskError

if TYPE_CHECKING:
    from kvdisk.cli.bench.run import Run, Watch
    from kvdisk.cli.bench.stand import Peer

OTHER_RUN = (
    "figures of different runs are not comparable, because a drive's speed changes from one to the next by more than"
    " what is looked for: measure all that is to be compared in one run."
)
_SIZES = ["64K", "256K", "1M", "2M", "8M"]
_PARTS = [Part.PROBE, Part.DRIVE, Part.MOVER, Part.GPU]
_FLOWS = [Flow.READ, Flow.WRITE]
_LAYOUTS = list(Layout)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A directory on the drive to measure.")]
Parts = Annotated[list[Part], typer.Option("--parts", help="What to measure; may be given several times.")]
BlockSizes = Annotated[
    list[str], typer.Option("--block-size", "-b", metavar="SIZE", help="Bytes of a block; may be given several times.")
]
Flows = Annotated[list[Flow], typer.Option("--flow", help="Which way; may be given several times.")]
Layouts = Annotated[list[Layout], typer.Option("--layout", help="Where the blocks lie; may be given several times.")]
Depth = Annotated[int | None, typer.Option("--depth", help="Blocks under way at once; otherwise as the mover has it.")]
Busy = Annotated[bool, typer.Option("--busy", help="Beside a Python thread in the process that never waits.")]
Total = Annotated[str, typer.Option("--total", metavar="SIZE", help="Bytes of one measurement, and of the file.")]
Rounds = Annotated[int, typer.Option("--rounds", help="Measurements of each contender.")]
Devices = Annotated[
    list[str] | None, typer.Option("--device", metavar="NAME", help="Only this device; may be given several times.")
]
CpuTotal = Annotated[
    str, typer.Option("--cpu-total", metavar="SIZE", help="Bytes that each contender of the part cpu moves.")
]
Figures = Annotated[bool, typer.Option("--figures", help="Measure what docs/BENCHMARKS.md has instead.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Save = Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Also write that JSON object to a new file.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it, as .png or .svg; needs matplotlib.")
]


class Exit(IntEnum):
    """Exit codes. REFUSED: nothing was measured, one sentence says why."""

    MEASURED = 0
    FAILED = 1
    REFUSED = 2


def make_command(peer: Callable[[], Peer] | None = None) -> Callable[..., None]:
    """Return the command, with another program's way beside ours where there is one.

    ``peer`` makes it when it is wanted; it raises ConfigError where that program is not installed.
    """

    def bench(
        directory: Directory,
        parts: Parts = _PARTS,
        block_sizes: BlockSizes = _SIZES,
        flows: Flows = _FLOWS,
        layouts: Layouts = _LAYOUTS,
        depth: Depth = None,
        busy: Busy = False,
        total: Total = "256MiB",
        rounds: Rounds = 5,
        devices: Devices = None,
        cpu_total: CpuTotal = "16GiB",
        figures: Figures = False,
        as_json: AsJson = False,
        save: Save = None,
        plot: Plot = None,
    ) -> None:
        """Measure how fast the tiers and routes are, beside what the drive under DIR can do.

        What is compared is measured in turn, round by round, in one run:
        medians, lowest and highest, and the median of the rounds' ratios.
        Figures of two runs are not comparable. The limit is fio, where it is
        installed: same sizes, same depth, same file. All files lie in a private
        directory in DIR, which is removed at the end.

        [bold]Exit codes[/bold]

        [cyan]0[/cyan]  measured; what was left out is said

        [cyan]1[/cyan]  the drive failed

        [cyan]2[/cyan]  nothing was measured: wrong usage, no room, no permission
        """
        try:
            settings = Settings(
                directory=directory,
                parts=tuple(parts),
                block_sizes=tuple(parse_size("--block-size", text) for text in block_sizes),
                flows=tuple(flows),
                layouts=tuple(layouts),
                depth=depth,
                busy=busy,
                total_bytes=parse_size("--total", total),
                rounds=rounds,
                devices=tuple(devices or ()),
                cpu_bytes=parse_size("--cpu-total", cpu_total),
                figures=figures,
            )
            _check(settings, save, plot)
        except ConfigError as error:
            raise _refusal(str(error)) from None
        run = _measure(settings, peer)
        _show(run, as_json=as_json)
        if save is not None:
            save.write_text(json.dumps(run.plain(), indent=2) + "\n")
        if plot is not None:
            from kvdisk.cli.bench.plot import draw

            draw(run, plot)

    return bench


def _measure(settings: Settings, peer: Callable[[], Peer] | None) -> Run:
    from kvdisk.cli.bench.run import measure
    from kvdisk.cli.bench.scratch import ending_on_signals

    other, missing = None, ""
    try:
        other = None if peer is None else peer()
    except ConfigError as error:
        missing = str(error)
    try:
        with ending_on_signals(), _progress() as watch:
            run = measure(settings, other, watch)
    except ConfigError as error:
        raise _refusal(str(error)) from None
    except KvdiskError as error:
        typer.echo(f"kvdisk: {error}", err=True)
        raise typer.Exit(Exit.FAILED) from None
    if missing:
        run.skipped.append(missing)
    return run


@contextmanager
def _progress() -> Iterator[Watch]:
    """Show a bar on the terminal, where standard error is one."""
    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("making the file", total=None)

        def watch(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield watch


def _show(run: Run, *, as_json: bool) -> None:
    from kvdisk.cli.bench import figures, machine, probes, report

    if as_json:
        typer.echo(json.dumps(run.plain(), indent=2))
        return
    console = Console(markup=False, highlight=False, emoji=False)
    console.print(machine.sentence(run.machine))
    if run.probes:
        console.print(probes.table_of(run.probes))
        console.print("\n".join([*probes.reasons(run.probes), run.direct]))
    for route, results in report.by_route(run.results):
        console.print(report.table_of(report.TITLES[route], results))
    if run.settings.figures:
        console.print(figures.table_of(figures.rows_of(run.results)))
    for line in run.skipped:
        console.print(line)


def _check(settings: Settings, save: Path | None, plot: Path | None) -> None:
    """Raise ConfigError where another run's figures are named, or something else that cannot be."""
    for path in (settings.directory, save):
        if path is not None and path.is_file():
            if _is_run(path):
                raise ConfigError(f"{path} has another run: {OTHER_RUN}")
            raise ConfigError(f"{path} exists and is not a directory.")
    if plot is not None:
        if plot.suffix not in {".png", ".svg"}:
            raise ConfigError(f"--plot draws .png or .svg, not {plot.name}.")
        from kvdisk.cli.bench.plot import check_plot

        check_plot()
    check(settings)


def _is_run(path: Path) -> bool:
    try:
        found: Any = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("what") == "kvdisk bench"


def _refusal(sentence: str) -> typer.Exit:
    typer.echo(f"kvdisk: {sentence}", err=True)
    return typer.Exit(Exit.REFUSED)
