# SPDX-License-Identifier: Apache-2.0
"""GPU to CPU and back, on a CUDA GPU. Needs torch."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvdisk.cli.bench.cases import Case, Contender, Flow, Group, Role, Sample
from kvdisk.cli.bench.drive import auto_depth
from kvdisk.cli.bench.mover import LAYERS
from kvdisk.cli.bench.rounds import timed
from kvdisk.cli.bench.settings import Settings
from kvdisk.cli.bench.stand import Stand, fill
from kvdisk.errors import ConfigError
from kvdisk.geometry import HEADER_BYTES
from kvdisk.worker.arena import Arena

if TYPE_CHECKING:
    from kvdisk.worker.copier import Lanes

_MOST_BYTES = 512 << 20
_SCRATCH_BYTES = 128 << 20
NO_GPU = "there is no CUDA GPU here: nothing is measured between GPU and CPU."


def gpu_groups(stand: Stand, settings: Settings) -> list[Group]:
    """Return a group for each flow but MIXED and each size; none, and a line in ``stand.skipped``, without a GPU."""
    from kvdisk.worker.copier import CudaLanes

    try:
        lanes = CudaLanes()
        Arena([2 * HEADER_BYTES], [1], pin=True).close()
    except (AssertionError, RuntimeError, ConfigError):  # as torch says that it was built without, or finds none
        stand.skipped.append(NO_GPU)
        return []
    total = min(settings.total_bytes, _MOST_BYTES)
    return [
        _group(lanes, Case(flow, size, auto_depth(size), layout, total // size * size, busy=settings.busy, route="gpu"))
        for layout in settings.layouts
        for flow in settings.flows
        if flow is not Flow.MIXED
        for size in settings.block_sizes
    ]


def _group(lanes: Lanes, case: Case) -> Group:
    def make(stack: ExitStack) -> list[Contender]:
        run = GpuRun(lanes, case)
        stack.callback(run.close)
        return [
            Contender("one large copy", Role.LIMIT, run.measure_plain),
            Contender("copier", Role.OURS, run.measure),
        ]

    return Group(case, make)


class GpuRun:
    """Blocks of a model on a GPU, and as many slots in pinned memory. One thread calls.

    ``pin``: False for tests without a GPU. A READ case goes towards the GPU. ``measure_plain`` copies the bytes of all
    blocks in one piece.
    """

    def __init__(self, lanes: Lanes, case: Case, *, pin: bool = True) -> None:
        from kvdisk.cli.bench.drive import block_order
        from kvdisk.worker.copier import CudaCopier, LayerBlocks

        count, block_bytes = case.block_count, case.block_bytes
        self._case = case
        self._arena = Arena([block_bytes + HEADER_BYTES], [count], pin=pin)
        fill(self._arena.memory)
        self._flat = self._arena.tensor(0).view(-1)[: case.total_bytes]
        self._gpu = self._flat.to(lanes.device, copy=True)
        part = case.total_bytes // LAYERS
        layers = [self._gpu[at * part : (at + 1) * part].view(count, block_bytes // LAYERS) for at in range(LAYERS)]
        self._copier = CudaCopier([LayerBlocks(layers)], lanes, _SCRATCH_BYTES)
        self._lanes = lanes
        self._blocks = list(range(count))
        self._slots = block_order(case)

    def measure(self, passes: int) -> Sample:
        """Copy all blocks, ``depth`` at a time, with kvdisk's copier."""
        from kvdisk.worker.copier import Slots

        case, copier = self._case, self._copier

        def move() -> None:
            for _ in range(passes):
                for start in range(0, case.block_count, case.depth):
                    blocks, slots = self._blocks[start : start + case.depth], self._slots[start : start + case.depth]
                    if case.flow is Flow.READ:
                        ticket = copier.scatter(0, Slots(self._arena, 0, slots), blocks)
                    else:
                        ticket = copier.gather(0, blocks, Slots(self._arena, 0, slots))
                copier.wait(ticket)

        return timed(move)

    def measure_plain(self, passes: int) -> Sample:
        """Copy as many bytes in one piece."""
        source, target = (self._flat, self._gpu) if self._case.flow is Flow.READ else (self._gpu, self._flat)

        def move() -> None:
            for _ in range(passes):
                target.copy_(source, non_blocking=True)
            self._lanes.record(None).synchronize()

        return timed(move)

    def close(self) -> None:
        """Give the memory back."""
        self._lanes.record(None).synchronize()
        del self._gpu, self._flat, self._copier
        self._arena.close()
