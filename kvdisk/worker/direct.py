# SPDX-License-Identifier: Apache-2.0
"""The way straight between drive and GPU, without host memory: tried at start, and what goes it
from then on."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvdisk.blocks import Tier
from kvdisk.device.base import Buffer, Device, Op, Transfer
from kvdisk.device.header import MULTILINEAR, XXH3_128
from kvdisk.device.probe import FILE_BYTES, GIVE_UP_S, Silence, await_batches, nameless_file
from kvdisk.messages import Move
from kvdisk.worker.arena import Arena
from kvdisk.worker.routes import Route

if TYPE_CHECKING:
    from kvdisk.worker.copier import CudaLanes
    from kvdisk.worker.gpu_staging import GpuStaging

MOST_FAILURES = 16
"""With so many parts in which the drive failed on the GPU's way, all go the host's way again."""


@dataclass(slots=True, eq=False)
class Direct:
    """The way between drive and GPU, as far as it is to be gone. The mover's thread calls
    everything.

    ``loads``, ``stores``: sizes of slots, by class, for which it was found faster than through host
    memory. Where ``loads`` has a size, every slot of that size is sealed with a checksum that a GPU
    computes, by whomever it is written. ``staging``: with slots of all these sizes; its owner's.
    """

    staging: GpuStaging
    loads: frozenset[int]
    stores: frozenset[int]
    _of_hosts: set[int] = field(default_factory=set)
    """Segments in which a slot was met that only a processor can verify."""
    _failures: int = 0

    def __post_init__(self) -> None:
        assert all(self.staging.slot_counts[size_class] for size_class in self.loads | self.stores)

    @property
    def given_up(self) -> bool:
        """Whether it has failed so often that nothing goes this way any more."""
        return self._failures >= MOST_FAILURES

    def route(self, route: Route, size_class: int, move: Move) -> Route:
        """Return the route of a move that would go by ``route``."""
        if self.given_up:
            return route
        if route is Route.STORE_STAGED and size_class in self.stores:
            return Route.STORE_DIRECT
        if route is Route.LOAD_STAGED and size_class in self.loads:
            return route if move.slots[Tier.NVME].segment in self._of_hosts else Route.LOAD_DIRECT
        return route

    def checksum_kind(self, size_class: int) -> int:
        """Return the kind that slots of a size are sealed with in host memory."""
        return MULTILINEAR if size_class in self.loads else XXH3_128

    def note_of_host(self, moves: Iterable[Move]) -> None:
        """These slots can be verified by a processor only. What else is in their segments is read
        its way, too: most of it was written at the same time, and each slot read in vain costs a
        second read."""
        self._of_hosts.update(move.slots[Tier.NVME].segment for move in moves if Tier.NVME in move.slots)

    def note_changed(self, segment: int) -> None:
        """A segment was opened or dropped: what its number said is nothing of the next one's."""
        self._of_hosts.discard(segment)

    def note_failure(self) -> bool:
        """The drive has failed in a part this way; return whether this was too much."""
        before = self.given_up
        self._failures += 1
        return self.given_up and not before


_given_up: list[object] = []
"""Devices that have not ended what they hold, and its memory: kept, for the drive may still come to
it."""


class DirectChoice(NamedTuple):
    """``direct``: None where nothing goes that way. ``line``: what was chosen and why, for the log.
    ``usable``: whether every size moved the right bytes both ways."""

    direct: Direct | None
    line: str
    usable: bool


def choose_direct(
    directory: Path,
    slot_sizes: Sequence[int],
    slot_counts: Sequence[int],
    lanes: CudaLanes,
    make_device: Callable[[], Device],
    *,
    always: bool,
    file_bytes: int = FILE_BYTES,
) -> DirectChoice:
    """Make GPU staging, try the way on a file of ``directory`` that nobody sees, and choose the
    sizes that go it.

    ``slot_counts``: of staging, by size class. ``lanes``: the copier's. ``make_device``: makes one
    of both kinds of memory, for the trial only. ``always``: all sizes go, faster or not, if they
    move the right bytes. The staging in ``direct`` is the caller's to close. For start: waits for
    the drive, a few seconds at most. Raises nothing that a drive, a library or a full GPU can
    cause.
    """
    from kvdisk.worker.gpu_staging import GpuStaging

    arena, staging = Arena(slot_sizes, slot_counts, pin=lanes.device.type == "cuda"), None
    found = DirectReport()
    try:
        staging = GpuStaging(slot_sizes, slot_counts, lanes)
        found = _try(directory, file_bytes, make_device, arena, staging)
    except Exception as error:  # torch's of a full GPU, kvikio's, the file system's
        found.problems.append(" ".join(str(error).split()) or type(error).__name__)
    usable = not found.problems and {each.size_class for each in found.speeds} == set(range(len(slot_sizes)))
    if always:
        found.loads = set(range(len(slot_sizes))) if usable else set()
        found.stores = found.loads
    line = found.line(slot_sizes)
    if found.silent:
        _given_up.append((arena, staging))
        return DirectChoice(None, line, False)
    arena.close()
    if staging is not None and found.loads | found.stores:
        return DirectChoice(Direct(staging, frozenset(found.loads), frozenset(found.stores)), line, usable)
    if staging is not None:
        staging.close()
    return DirectChoice(None, line, usable)


def _try(
    directory: Path, file_bytes: int, make_device: Callable[[], Device], arena: Arena, staging: GpuStaging
) -> DirectReport:
    with nameless_file(directory, file_bytes) as (opened, _):
        device, fd = make_device(), os.dup(opened)
        found = try_direct(fd, file_bytes, device, arena, staging)
        if found.silent:
            _given_up.append((device, fd))  # open: what has not ended may still use the number
        else:
            device.close()
            os.close(fd)
        return found


FASTER = 1.1
"""So many times as fast as host memory in runs of neighbours, and not slower in single slots, has
it to be."""
PART_BYTES = 8 << 20
BUDGET_S = 1.0
_MOST_ROUNDS = 5


class Speed(NamedTuple):
    """Medians of bytes per second. ``run``: whether neighbours were moved together."""

    size_class: int
    op: Op
    run: bool
    host: float
    direct: float


@dataclass(slots=True)
class DirectReport:
    """What a trial found. ``loads``, ``stores``: size classes for ``Direct``. ``problems``: what is
    wrong, in clauses.

    ``silent``: a device has not ended a batch in time: neither device nor memory may be closed.
    """

    loads: set[int] = field(default_factory=set)
    stores: set[int] = field(default_factory=set)
    speeds: list[Speed] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    silent: bool = False

    def line(self, slot_sizes: Sequence[int]) -> str:
        """Say what was chosen and why, in one line."""
        chosen = [
            f"{what} of {', '.join(str(slot_sizes[at]) for at in sorted(which))} bytes"
            for what, which in (("loads", self.loads), ("stores", self.stores))
            if which
        ]
        speeds = [
            f"{slot_sizes[each.size_class]} bytes {each.op.value} {'in runs' if each.run else 'alone'} "
            f"{each.direct / 1e6:.0f} ({each.host / 1e6:.0f} into host memory)"
            for each in self.speeds
        ]
        why = "; ".join([*self.problems, *(["MB/s: " + ", ".join(speeds)] if speeds else [])])
        what = " and ".join(chosen) or "nothing"
        return f"kvdisk moves {what} straight between drive and GPU: {why or 'there was no room to try it'}"


def try_direct(fd: int, file_bytes: int, device: Device, arena: Arena, staging: GpuStaging) -> DirectReport:
    """Write and read every size of slot both ways, compare the bytes, and measure.

    ``fd``: a file of ``file_bytes`` allocated bytes that is nobody else's, on the drive that moves
    are made to, and which ``device`` does not know yet. ``device``: of both kinds of memory; the
    caller's to close, and of no other use before. ``arena``: host staging of the same sizes. Both
    memories' bytes are overwritten. Only the drive's times are compared: a copy of one part hides
    behind that of the next. Waits, for about ``BUDGET_S`` for each size; raises nothing that a
    drive can cause.
    """
    report = DirectReport()
    for memory in (arena.memory, staging.memory):
        device.attach_memory(memory)
    device.attach_file(fd)
    try:
        for size_class, slot_bytes in enumerate(arena.slot_sizes):
            count = min(arena.slot_counts[size_class], staging.slot_counts[size_class], file_bytes // slot_bytes)
            if count >= 2:
                _Trial(fd, device, arena, staging, size_class, count).run(report)
    except Silence:
        return DirectReport(problems=[f"the drive has not answered for {GIVE_UP_S:.0f} s"], silent=True)
    device.detach_file(fd)
    return report


class _Trial:
    """One size of slots: ``count`` of them in each memory, and in the file."""

    def __init__(self, fd: int, device: Device, arena: Arena, staging: GpuStaging, size_class: int, count: int) -> None:
        self._fd = fd
        self._device = device
        self._arena = arena
        self._staging = staging
        self._size_class = size_class
        self._slot_bytes = arena.slot_sizes[size_class]
        self._count = count
        self._random = random.Random(size_class)  # noqa: S311 - the same places for both

    def run(self, report: DirectReport) -> None:
        """Add what is found to the report. Raises Silence."""
        problem = self._check()
        if problem:
            report.problems.append(f"of {self._slot_bytes} bytes {problem}")
            return
        samples: dict[tuple[Op, bool, bool], list[float]] = {
            case: [] for case in product((Op.WRITE, Op.READ), (True, False), (False, True))
        }
        deadline_s = time.monotonic() + BUDGET_S
        for case in list(samples) * _MOST_ROUNDS:
            if not samples[case] or time.monotonic() < deadline_s:
                samples[case].append(self._sample(*case))
        for op, chosen in ((Op.READ, report.loads), (Op.WRITE, report.stores)):
            ratios = {}
            for run in (True, False):
                host, direct = (statistics.median(samples[op, run, way]) for way in (False, True))
                report.speeds.append(Speed(self._size_class, op, run, host, direct))
                ratios[run] = direct / host
            if ratios[True] >= FASTER and ratios[False] >= 1.0:
                chosen.add(self._size_class)

    def _check(self) -> str:
        """Return what is wrong with bytes that go the one way and come the other, "" for
        nothing."""
        pair = self._arena.run_view(self._size_class, 0, 2)
        host, gpu = self._arena.tensor(self._size_class)[:2], self._staging.tensor(self._size_class)[:2]
        for straight, said in ((Op.WRITE, "written"), (Op.READ, "read")):
            data = self._random.randbytes(2 * self._slot_bytes)
            pair[:] = data
            gpu.zero_()
            if straight is Op.WRITE:
                gpu.copy_(host)
                host.zero_()
            for op in (Op.WRITE, Op.READ):
                batch = [Transfer(self._fd, 0, (self._slots(op is straight, 0, 2),))]
                if await_batches(self._device, [self._device.submit(op, batch)]):
                    return f"a {op.value} that was tried failed {'straight' if op is straight else 'in host memory'}"
            if straight is Op.READ:
                host.copy_(gpu)
            if pair != data:
                return f"what was {said} straight is not what is on the drive"
        return ""

    def _sample(self, op: Op, run: bool, direct: bool) -> float:
        """Move every slot once; return bytes per second."""
        each = max(1, PART_BYTES // self._slot_bytes)
        places = list(range(self._count))
        if not run:
            self._random.shuffle(places)
        began_s = time.monotonic()
        tickets = set()
        for start in range(0, self._count, each):
            at = range(start, min(start + each, self._count))
            moved = [(start, start, len(at))] if run else [(places[slot], slot, 1) for slot in at]
            batch = [
                Transfer(self._fd, place * self._slot_bytes, (self._slots(direct, slot, count),))
                for place, slot, count in moved
            ]
            tickets.add(self._device.submit(op, batch))
        await_batches(self._device, tickets)
        return self._count * self._slot_bytes / max(time.monotonic() - began_s, 1e-9)

    def _slots(self, direct: bool, start: int, count: int) -> Buffer:
        memory = self._staging if direct else self._arena
        return memory.run_view(self._size_class, start, count)
