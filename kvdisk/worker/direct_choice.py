# SPDX-License-Identifier: Apache-2.0
"""The way between drive and GPU as a start sets it up: tried on the real directory, and kept where it is good."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvdisk.device.base import Device
from kvdisk.device.probe import FILE_BYTES, nameless_file
from kvdisk.worker.arena import Arena
from kvdisk.worker.direct import Direct
from kvdisk.worker.direct_trial import DirectReport, try_direct

if TYPE_CHECKING:
    from kvdisk.worker.copier import Lanes
    from kvdisk.worker.gpu_staging import GpuStaging

_given_up: list[object] = []
"""Devices that have not ended what they hold, and its memory: kept, for the drive may still come to it."""


class DirectChoice(NamedTuple):
    """``direct``: None where nothing goes that way. ``line``: what was chosen and why, for the log. ``usable``: whether
    every size moved the right bytes both ways."""

    direct: Direct | None
    line: str
    usable: bool


def choose_direct(
    directory: Path,
    slot_sizes: Sequence[int],
    slot_counts: Sequence[int],
    lanes: Lanes,
    make_device: Callable[[], Device],
    *,
    always: bool,
    file_bytes: int = FILE_BYTES,
) -> DirectChoice:
    """Make GPU staging, try the way on a file of ``directory`` that nobody sees, and choose the sizes that go it.

    ``slot_counts``: of staging, by size class. ``lanes``: the copier's. ``make_device``: makes one of both kinds of
    memory, for the trial only. ``always``: all sizes go, faster or not, if they move the right bytes. The staging in
    ``direct`` is the caller's to close. For start: waits for the drive, a few seconds at most. Raises nothing that a
    drive, a library or a full GPU can cause.
    """
    from kvdisk.worker.gpu_staging import GpuStaging

    arena, staging = Arena(slot_sizes, slot_counts, pin=lanes.device.type == "cuda"), None
    report = DirectReport()
    try:
        staging = GpuStaging(slot_sizes, slot_counts, lanes)
        report = _try(directory, file_bytes, make_device, arena, staging)
    except Exception as error:  # torch's of a full GPU, kvikio's, the file system's
        report.problems.append(" ".join(str(error).split()) or type(error).__name__)
    if report.silent:
        _given_up.append((arena, staging))
        return DirectChoice(None, report.line(slot_sizes), False)
    arena.close()
    usable = not report.problems and {each.size_class for each in report.figures} == set(range(len(slot_sizes)))
    if always:
        report.loads = set(range(len(slot_sizes))) if usable else set()
        report.stores = report.loads
    line = report.line(slot_sizes)
    if staging is not None and report.loads | report.stores:
        return DirectChoice(Direct(staging, frozenset(report.loads), frozenset(report.stores)), line, usable)
    if staging is not None:
        staging.close()
    return DirectChoice(None, line, usable)


def _try(
    directory: Path, file_bytes: int, make_device: Callable[[], Device], arena: Arena, staging: GpuStaging
) -> DirectReport:
    with nameless_file(directory, file_bytes) as (opened, _):
        device, fd = make_device(), os.dup(opened)
        report = try_direct(fd, file_bytes, device, arena, staging)
        if report.silent:
            _given_up.append((device, fd))  # open: what has not ended may still use the number
        else:
            device.close()
            os.close(fd)
        return report
