# SPDX-License-Identifier: Apache-2.0
"""The direct way between drive and GPU, without host memory: tried at start, which chooses what
goes it from then on."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvdisk.blocks import Tier
from kvdisk.device.base import Buffer, Device, Op, Transfer
from kvdisk.device.checksum import multilinear_digest
from kvdisk.device.header import MULTILINEAR, XXH3_128
from kvdisk.device.probe import FILE_BYTES, GIVE_UP_S, DeviceTimeout, await_batches, nameless_file, on_trial
from kvdisk.errors import QuietLog
from kvdisk.geometry import HEADER_BYTES
from kvdisk.messages import Move, Reason
from kvdisk.worker.arena import Arena
from kvdisk.worker.routes import Route, Staging

if TYPE_CHECKING:
    from kvdisk.worker.copier import CudaLanes
    from kvdisk.worker.gpu_staging import GpuStaging

FASTER = 1.1
"""How many times as fast as through host memory the direct way must be to be chosen."""
BATCH_BYTES = 8 << 20
BUDGET_S = 1.0
_MOST_ROUNDS = 5
MOST_FAILED_READS = 16
"""Batches of reads in which the drive may fail before nothing goes this way until the next start:
each costs a second read."""


@dataclass(slots=True, eq=False)
class Direct:
    """The direct way between drive and GPU, as far as it is used. The mover's thread makes all
    calls.

    ``loads``, ``stores``: the size classes of slots that go it. Where ``loads`` has a class, every
    slot of that class is sealed with a checksum that a GPU computes, whatever wrote it.
    ``staging``: has slots of all these classes; its owner closes it.
    """

    staging: GpuStaging
    loads: frozenset[int]
    stores: frozenset[int]
    _by_host: set[int] = field(default_factory=set)
    """The segments that are read through host memory."""
    _failed_reads: int = 0

    def __post_init__(self) -> None:
        assert all(self.staging.slot_counts[size_class] for size_class in self.loads | self.stores)

    def route(self, route: Route, size_class: int, move: Move) -> Route:
        """Return the route of a move that would otherwise go by ``route``: a direct one where that
        is chosen."""
        if self._failed_reads >= MOST_FAILED_READS or route.memory is not Staging.HOST or not route.on_drive:
            return route
        if route.reads:
            goes = size_class in self.loads and route.file_slot(move).segment not in self._by_host
        else:
            goes = size_class in self.stores
        return route.on_gpu if goes else route

    def checksum_kind(self, size_class: int) -> int:
        """Return the checksum kind with which slots of a size class are sealed in host memory."""
        return MULTILINEAR if size_class in self.loads else XXH3_128

    def load_by_host(self, moves: Iterable[Move]) -> None:
        """Read the segments of these moves through host memory from now on.

        The drive has failed such a read on the direct way, or only a processor can verify the slot.
        Most of a segment was written at about the same time, and each slot read in vain costs a
        second read.
        """
        self._by_host.update(move.slots[Tier.NVME].segment for move in moves)

    def note_failed(
        self, route: Route, failed: Mapping[int, Reason], quiet: QuietLog
    ) -> tuple[Mapping[int, Reason], list[int]]:
        """The drive has failed moves of a batch that went this way: use the way less. Return the
        failures that stay, and the moves that are to be loaded through host memory instead."""
        broken = [position for position, reason in failed.items() if reason is Reason.IO_ERROR]
        if route.reads:
            self._failed_reads += bool(broken)
            if broken and self._failed_reads == MOST_FAILED_READS:
                quiet.warn(
                    "direct reads",
                    "reads with GPUDirect Storage keep failing: all blocks go through host memory until the next start",
                )
            return {position: reason for position, reason in failed.items() if reason is not Reason.IO_ERROR}, broken
        if broken:
            self.stores = frozenset()
            quiet.warn("direct", "a write with GPUDirect Storage failed: from now on all go through host memory")
        return failed, []

    def note_changed(self, segment: int) -> None:
        """Note that a segment was opened or dropped: what was known of its number does not hold for
        the next segment with that number."""
        self._by_host.discard(segment)


class DirectChoice(NamedTuple):
    """The outcome of a choice. ``direct``: None where nothing goes that way. ``line``: for the log,
    what was chosen and why."""

    direct: Direct | None
    line: str


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
    """Make GPU staging, try the direct way on an unnamed file in ``directory``, and choose the size
    classes that go it.

    ``slot_counts``: of the staging, by size class. ``lanes``: the copier's. ``make_device``: makes
    a device for both kinds of memory, for the trial only. ``always``: all classes go, faster or
    not, or none where one moved wrong bytes. The caller closes the staging in ``direct``. For the
    start only: waits for the drive, a few seconds at most. Raises nothing that a drive, a library
    or a full GPU can cause.
    """
    from kvdisk.worker.gpu_staging import GpuStaging

    found = _Findings(slot_sizes)
    arena, staging = Arena(slot_sizes, slot_counts, pin=lanes.device.type == "cuda"), None
    try:
        staging = GpuStaging(slot_sizes, slot_counts, lanes)
        arena.await_pinned()
        with nameless_file(directory, file_bytes) as (fd, _):
            _Trial(fd, make_device(), arena, staging, found).run(file_bytes)
    except DeviceTimeout:
        return DirectChoice(None, f"{_NOTHING}: the drive has not answered for {GIVE_UP_S:.0f} s")
    except Exception as error:  # torch's of a full GPU, kvikio's, the file system's
        found.problems.append(" ".join(str(error).split()) or type(error).__name__)
        found.right, found.loads, found.stores = set(), set(), set()  # what failed may do so again at any size
    if always:
        found.loads = found.stores = found.right if len(found.right) == len(slot_sizes) else set()
    arena.close()
    if staging is not None and found.loads | found.stores:
        return DirectChoice(Direct(staging, frozenset(found.loads), frozenset(found.stores)), found.line)
    if staging is not None:
        staging.close()
    return DirectChoice(None, found.line)


_NOTHING = "kvdisk does not use GPUDirect Storage"


@dataclass(slots=True)
class _Findings:
    """What a trial found. ``right``: the size classes that moved the right bytes both ways.
    ``loads``, ``stores``: those of them that were faster. ``problems``, ``speeds``: clauses for the
    log."""

    slot_sizes: Sequence[int]
    right: set[int] = field(default_factory=set)
    loads: set[int] = field(default_factory=set)
    stores: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    speeds: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        """What was chosen and why, in one line."""
        chosen = [
            f"{what} of {', '.join(str(self.slot_sizes[at]) for at in sorted(which))} bytes"
            for what, which in (("loads", self.loads), ("stores", self.stores))
            if which
        ]
        head = f"kvdisk moves {' and '.join(chosen)} straight between drive and GPU" if chosen else _NOTHING
        why = [*self.problems, *(["MB/s: " + ", ".join(self.speeds)] if self.speeds else [])]
        return f"{head}: {'; '.join(why) or 'there was no room to try it'}"


class _Trial:
    """Writes and reads slots of every size both ways, compares the bytes, and measures.

    ``fd``: a file of its own, on the drive that moves go to. ``device``: for both kinds of memory;
    closed at the end, unless it gave no answer. ``arena``: host staging of the same sizes. The
    bytes of both memories are overwritten. Only the drive's times are compared: a copy of one batch
    overlaps with the transfer of the next.
    """

    def __init__(self, fd: int, device: Device, arena: Arena, staging: GpuStaging, found: _Findings) -> None:
        self._fd = fd
        self._device = device
        self._arena = arena
        self._staging = staging
        self._found = found
        self._random = random.Random(0)  # noqa: S311 - the same places each time

    def run(self, file_bytes: int) -> None:
        """Add to the findings, in about ``BUDGET_S`` for each size. Raises DeviceTimeout."""
        arena, staging = self._arena, self._staging
        with on_trial(self._device, self._fd, arena.memory, staging.memory, owners=(arena, staging)):
            for size_class, slot_bytes in enumerate(arena.slot_sizes):
                count = min(arena.slot_counts[size_class], staging.slot_counts[size_class], file_bytes // slot_bytes)
                if count >= 2:
                    self._try(size_class, count)

    def _try(self, size_class: int, count: int) -> None:
        """Try one size class, with ``count`` slots in each memory and in the file."""
        found, slot_bytes = self._found, self._arena.slot_sizes[size_class]
        problem = self._check(size_class)
        if problem:
            found.problems.append(f"of {slot_bytes} bytes {problem}")
            return
        found.right.add(size_class)
        samples: dict[tuple[Op, bool], list[float]] = {case: [] for case in product(Op, (False, True))}
        deadline_s = time.monotonic() + BUDGET_S
        for case in list(samples) * _MOST_ROUNDS:
            if not samples[case] or time.monotonic() < deadline_s:
                samples[case].append(self._speed(size_class, count, *case))
        for op, chosen in ((Op.READ, found.loads), (Op.WRITE, found.stores)):
            host, direct = (statistics.median(samples[op, way]) for way in (False, True))
            found.speeds.append(f"{slot_bytes} bytes {op.value} {direct / 1e6:.0f} ({host / 1e6:.0f} into host memory)")
            if direct >= FASTER * host:
                chosen.add(size_class)

    def _check(self, size_class: int) -> str:
        """Return what is wrong with bytes that go one way and come back the other; "" where nothing
        is."""
        pair = self._arena.view(size_class, 0, 2)
        host, gpu = self._arena.tensor(size_class)[:2], self._staging.tensor(size_class)[:2]
        for straight, said in ((Op.WRITE, "written"), (Op.READ, "read")):
            data = self._random.randbytes(pair.nbytes)
            pair[:] = data
            gpu.zero_()
            if straight is Op.WRITE:
                gpu.copy_(host)
                host.zero_()
            self._staging.settle()  # the device does not wait for this thread's stream
            for op in (Op.WRITE, Op.READ):
                transfers = [Transfer(self._fd, 0, (self._slots(op is straight, size_class, 0, 2),))]
                if await_batches(self._device, [self._device.submit(op, transfers)]):
                    return f"a {op.value} that was tried failed {'straight' if op is straight else 'in host memory'}"
            if straight is Op.READ:
                host.copy_(gpu)
            if pair != data:
                return f"what was {said} straight is not what is on the drive"
        return self._check_sums(size_class, pair)

    def _check_sums(self, size_class: int, pair: Buffer) -> str:
        """Return what is wrong with the checksums of two slots, which hold the same bytes in both
        memories; "" where nothing is."""
        from kvdisk.worker.copier import Lane  # imports torch

        slot_bytes = self._arena.slot_sizes[size_class]
        payloads = [pair[start + HEADER_BYTES : start + slot_bytes] for start in (0, slot_bytes)]
        summed = self._staging.start_sums(size_class, [0, 1], slot_bytes - HEADER_BYTES, Lane.LOAD)
        if summed is None:
            return "the GPU has no memory for checksums"
        summed.synchronize()
        found = [self._staging.digest(size_class, slot) for slot in (0, 1)]
        if found != [multilinear_digest(payload) for payload in payloads]:
            return "the GPU computes other checksums than a processor"
        return ""

    def _speed(self, size_class: int, count: int, op: Op, direct: bool) -> float:
        """Move every slot twice, once with its neighbours and once alone; return bytes per
        second."""
        slot_bytes = self._arena.slot_sizes[size_class]
        each = max(1, BATCH_BYTES // slot_bytes)
        places = self._random.sample(range(count), count)
        began_s = time.monotonic()
        for alone in (False, True):
            tickets = set()
            for start in range(0, count, each):
                slots = range(start, min(start + each, count))
                moved = [(places[slot], slot, 1) for slot in slots] if alone else [(start, start, len(slots))]
                transfers = [
                    Transfer(self._fd, place * slot_bytes, (self._slots(direct, size_class, slot, slot_count),))
                    for place, slot, slot_count in moved
                ]
                tickets.add(self._device.submit(op, transfers))
            await_batches(self._device, tickets)
        return 2 * count * slot_bytes / max(time.monotonic() - began_s, 1e-9)

    def _slots(self, direct: bool, size_class: int, start: int, count: int) -> Buffer:
        memory = self._staging if direct else self._arena
        return memory.view(size_class, start, count)
