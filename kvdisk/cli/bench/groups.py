# SPDX-License-Identifier: Apache-2.0
"""Which groups of contenders a run measures, by its settings."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvdisk.cli.bench.cases import Case, Contender, Flow, Group, Layout, Role, Unmeasured
from kvdisk.cli.bench.drive import auto_depth, bare_loop, under_way_bytes
from kvdisk.cli.bench.settings import Part, Settings
from kvdisk.cli.bench.stand import Stand
from kvdisk.device.base import Device
from kvdisk.device.probe import make_like

if TYPE_CHECKING:
    from kvdisk.cli.bench.mover import MoverRun

CPU_BLOCK_BYTES = 2 << 20
MOST_MOVER_BYTES = 512 << 20
"""Of one measurement through the mover: the blocks lie in memory, all of them."""
THROUGH_MOVER = "through the mover"
VERIFIED, UNVERIFIED = "verified", "unverified"
BARE = "bare preadv loop"
NO_TORCH = "torch is not installed: nothing is measured through the mover, nor between GPU and CPU."


def has_torch() -> bool:
    """Whether torch is there for the rooms that need it. Loads it, which takes a while."""
    try:
        import kvdisk.worker.copier  # noqa: F401
    except ImportError:
        return False
    return True


def drive_case(settings: Settings, flow: Flow, block_bytes: int, layout: Layout) -> Case:
    """Return a case of the part ``drive``."""
    depth = settings.depth or auto_depth(block_bytes)
    total = settings.total_bytes // block_bytes * block_bytes
    return Case(flow, block_bytes, min(depth, total // block_bytes), layout, total, busy=settings.busy)


def drive_cases(settings: Settings) -> list[Case]:
    """Return the cases of the part ``drive``, every size with every flow and layout."""
    return [
        drive_case(settings, flow, block_bytes, layout)
        for layout in settings.layouts
        for flow in settings.flows
        for block_bytes in settings.block_sizes
    ]


def mover_case(settings: Settings, flow: Flow, block_bytes: int) -> Case:
    """Return a case of the part ``mover``: as many blocks as fit, with their headers."""
    from kvdisk.cli.bench.mover import blocks_of

    count = blocks_of(min(settings.total_bytes, MOST_MOVER_BYTES), block_bytes)
    if not count:
        raise Unmeasured("--total is too small for one block and its header.")
    depth = min(settings.depth or auto_depth(block_bytes), count)
    return Case(flow, block_bytes, depth, Layout.CONTIGUOUS, count * block_bytes, busy=settings.busy, route="mover")


def mover_group(stand: Stand, case: Case, *, limit: bool = True) -> Group:
    """Return fio (or not, without ``limit``), each device alone, and the mover over each, in contiguous slots.

    Reads through the mover are measured without verification, too.
    """

    def make(stack: ExitStack) -> list[Contender]:
        made = [*(stand.limits(case) if limit else []), *stand.ours(case)]
        for device in [each.device for each in stand.runs]:
            run, name = _mover_run(stand, stack, device, case), device.name
            made.append(Contender(f"{name} {THROUGH_MOVER}", Role.OURS, run.measure))
            if case.flow is Flow.READ:
                made.append(Contender(f"{name} {THROUGH_MOVER}, {UNVERIFIED}", Role.OURS, run.measure_unverified))
        return made

    return Group(case, make)


def cpu_group(stand: Stand, settings: Settings) -> Group:
    """Return a loop of ``preadv`` calls, each device, and the mover's verified reads, of as many bytes each."""
    case = replace(mover_case(settings, Flow.READ, CPU_BLOCK_BYTES), route="cpu", busy=False)
    passes = -(-settings.cpu_bytes // (case.total_bytes * settings.rounds))
    case = replace(case, passes=passes)

    def make(stack: ExitStack) -> list[Contender]:
        made = [Contender(BARE, Role.LIMIT, partial(bare_loop, case, stand.files.fd, stand.memory))]
        made += stand.ours(case)
        for device in [each.device for each in stand.runs]:
            run = _mover_run(stand, stack, device, case, cpu_tier=True)
            made.append(Contender(f"{device.name}, {VERIFIED}", Role.OURS, run.promote))
        return made

    return Group(case, make)


def groups_of(stand: Stand, settings: Settings) -> list[Group]:
    """Return all groups of a run; what is left out is said in ``stand.skipped``."""
    groups = []
    if Part.DRIVE in settings.parts:
        groups += [stand.drive_group(case) for case in drive_cases(settings)]
    if not set(settings.parts) - {Part.PROBE, Part.DRIVE}:
        return groups
    if not has_torch():
        stand.skipped.append(NO_TORCH)
        return groups
    if Part.MOVER in settings.parts:
        for flow in settings.flows:
            if flow is not Flow.MIXED:
                groups += [mover_group(stand, mover_case(settings, flow, size)) for size in settings.block_sizes]
    if Part.GPU in settings.parts:
        from kvdisk.cli.bench.gpu import gpu_groups

        groups += gpu_groups(stand, settings)
    if Part.CPU in settings.parts:
        groups.append(cpu_group(stand, settings))
    return groups


def most_under_way_bytes(settings: Settings) -> int:
    """Return the memory that the largest case of a run needs for its batches."""
    sizes = [*settings.block_sizes, CPU_BLOCK_BYTES]
    return max(under_way_bytes(settings.depth or auto_depth(size), size) for size in sizes)


def _mover_run(stand: Stand, stack: ExitStack, device: Device, case: Case, *, cpu_tier: bool = False) -> MoverRun:
    """Return a mover over another device of the same kind."""
    from kvdisk.cli.bench.mover import MoverRun

    run = MoverRun(make_like(device), stand.files.fd, case, cpu_tier=cpu_tier)
    stack.callback(run.close)
    return run
