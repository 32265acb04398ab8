# SPDX-License-Identifier: Apache-2.0
"""What ``device: auto`` would find out here at start, for each block size: all of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from kvdisk.cli.bench.groups import has_torch
from kvdisk.cli.bench.report import short_size
from kvdisk.device.base import Op
from kvdisk.device.gds import GdsDevice, gds_unavailable
from kvdisk.device.pair import PairDevice
from kvdisk.device.probe import MAKERS, ProbeReport, probe
from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, round_up

_STAGING_SLOTS = 4
_WAYS = ((Op.READ, False), (Op.WRITE, False), (Op.READ, True), (Op.WRITE, True))


def probe_sizes(directory: Path, block_sizes: Sequence[int]) -> list[ProbeReport]:
    """Run the probe of a start for slots of each of these blocks. Raises nothing that a drive or a library can cause.

    ``directory``: as a store's must be, this user's alone. Waits for the drive, a second or so for each size.
    """
    return [probe(directory, _slot_bytes(size)) for size in block_sizes]


def direct_line(directory: Path, block_sizes: Sequence[int]) -> str:
    """Say what would go straight between drive and GPU, and why, in one line. Waits as ``probe_sizes``."""
    why = gds_unavailable()
    if why is None and not has_torch():
        why = "torch is not installed"
    if why is not None:
        return f"nothing would go straight between drive and GPU: {why}"
    from kvdisk.worker.copier import CudaLanes
    from kvdisk.worker.direct import choose_direct

    try:
        lanes = CudaLanes()
    except (AssertionError, RuntimeError) as error:  # as torch says that it was built without CUDA, or finds no GPU
        return f"nothing would go straight between drive and GPU: {error}"
    slot_sizes = sorted({_slot_bytes(size) for size in block_sizes})
    counts = [_STAGING_SLOTS] * len(slot_sizes)
    choice = choose_direct(
        directory, slot_sizes, counts, lanes, lambda: PairDevice(MAKERS["posix"](), GdsDevice()), always=False
    )
    if choice.direct is not None:
        choice.direct.staging.close()
    return choice.line


def table_of(reports: Sequence[ProbeReport]) -> Table:
    """Return what probes measured, for people."""
    title = "What a start would choose (device: auto), MB/s"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("slots of", no_wrap=True)
    table.add_column("device", no_wrap=True)
    for name in ("read", "write", "runs read", "runs written"):
        table.add_column(name, justify="right")
    for report in reports:
        names = dict.fromkeys(speed.device for speed in report.speeds)
        for at, name in enumerate(names):
            size = short_size(report.block_bytes) if at == 0 else ""
            table.add_row(size, report.name(name), *[_figure(report, name, op, run) for op, run in _WAYS])
        table.add_section()
    return table


def reasons(reports: Sequence[ProbeReport]) -> list[str]:
    """Return what is chosen for each size, and why, in a line each; and why a device is not there."""
    lines = [
        f"{short_size(one.block_bytes)}: {one.name(one.chosen)}, because {one.why.rstrip('.')}." for one in reports
    ]
    absent = {f"without {name}: {why.rstrip('.')}." for one in reports for name, why in one.absent.items()}
    return [*lines, *sorted(absent)]


def plain(report: ProbeReport) -> dict[str, Any]:
    """Return a probe as plain values, for JSON."""
    return {
        "slot_bytes": report.block_bytes,
        "run_bytes": report.run_bytes,
        "direct": report.direct,
        "chosen": report.chosen,
        "names": report.names,
        "why": report.why,
        "problem": report.problem,
        "absent": report.absent,
        "seconds": report.seconds,
        "speeds": [
            {
                "device": speed.device,
                "op": speed.op.value,
                "run": speed.run,
                "bytes_each": speed.bytes_each,
                "mb_per_s": [sample / 1e6 for sample in speed.samples],
            }
            for speed in report.speeds
        ],
    }


def _slot_bytes(block_bytes: int) -> int:
    return HEADER_BYTES + round_up(block_bytes, ALIGNMENT)


def _figure(report: ProbeReport, name: str, op: Op, run: bool) -> str:
    speed = report.speed(name, op, run)
    return "" if speed is None else f"{speed.bytes_per_s / 1e6:,.0f}"
