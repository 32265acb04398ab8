# SPDX-License-Identifier: Apache-2.0
"""What a job is made of: lots of moves of one route, cut into parts, each run leg by leg."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple, cast

from kvdisk.blocks import JobId, Tier, group_of
from kvdisk.device.base import Buffer, Device, Transfer
from kvdisk.geometry import Geometry, contiguous_runs, slot_offset
from kvdisk.messages import Job, JobKind, JobResult, Move, Reason
from kvdisk.worker.arena import Arena

if TYPE_CHECKING:
    from kvdisk.worker.copier import Copier
    from kvdisk.worker.direct import Direct
    from kvdisk.worker.files import SegmentFiles


@dataclass(frozen=True, slots=True, eq=False)
class Resources:
    """What one rank moves bytes with.

    ``arena``: the CPU tier, or None; ``staging``: at least one slot of each size class where there
    is an NVMe tier. ``direct``: the way straight between drive and GPU, where ``device`` has one.
    All memory stays the caller's, who closes it after the mover. ``device`` and ``files`` become
    the mover's, which closes them.
    """

    geometry: Geometry
    rank: int
    arena: Arena | None
    staging: Arena
    copier: Copier
    device: Device
    files: SegmentFiles
    direct: Direct | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.geometry.rank_count
        slot_sizes = self.geometry.slot_sizes
        assert all(memory is None or memory.slot_sizes == slot_sizes for memory in (self.arena, self.staging))
        assert self.direct is None or self.direct.staging.slot_sizes == slot_sizes

    @property
    def memories(self) -> list[Buffer]:
        """All memory that the device moves."""
        found = [arena.memory for arena in (self.staging, self.arena) if arena is not None]
        return found if self.direct is None else [*found, self.direct.staging.memory]


class Leg(IntEnum):
    """A step of a route. GATHER and SCATTER run on the copier, READ and WRITE on the device.

    SUM: checksums computed on the GPU; SEAL waits for them where slots lie there.
    """

    GATHER = 1
    SEAL = 2
    WRITE = 3
    READ = 4
    CHECK = 5
    SCATTER = 6
    SUM = 7


class Route(Enum):
    """The ways of a move, the most urgent first.

    ``staged``: through a slot of staging, not of the tier. ``direct``: of staging on the GPU: only
    its header is ever in host memory.
    """

    LOAD_DIRECT = ((Leg.READ, Leg.SUM, Leg.CHECK, Leg.SCATTER), True)
    LOAD_STAGED = ((Leg.READ, Leg.CHECK, Leg.SCATTER), True)
    LOAD_KEPT = ((Leg.READ, Leg.CHECK, Leg.SCATTER), False)
    LOAD_CPU = ((Leg.CHECK, Leg.SCATTER), False)
    STORE_CPU = ((Leg.GATHER, Leg.SEAL), False)
    STORE_DIRECT = ((Leg.GATHER, Leg.SUM, Leg.SEAL, Leg.WRITE), True)
    STORE_STAGED = ((Leg.GATHER, Leg.SEAL, Leg.WRITE), True)
    PROMOTE = ((Leg.READ, Leg.CHECK), False)
    DEMOTE = ((Leg.WRITE,), False)

    def __init__(self, legs: tuple[Leg, ...], staged: bool) -> None:
        self.legs = legs
        self.staged = staged
        self.direct = Leg.SUM in legs
        self.gathers = Leg.GATHER in legs
        self.scatters = Leg.SCATTER in legs
        self.reads = Leg.READ in legs
        self.writes = Leg.WRITE in legs
        self.on_drive = self.reads or self.writes


@dataclass(slots=True, eq=False)
class Work:
    """A job under way. ``left``: moves that have not ended. ``mark``: the model's work to wait for.

    ``deadline_s``: on the mover's clock; what has not started then fails. ``void``: ends as failed.
    ``late``: moves that have failed, and that the device has not ended; ``late_parts``: how many
    parts they are. ``waits_for``: number of the last job of files that has to end first.
    ``urgent``: before all that is not; ``fenced``: what of it cannot start at once fails.
    ``to_launch``, ``to_gather``: moves whose copy from the GPU has neither failed nor begun, or
    ended; None before they are counted. ``told_copied``: it is reported.
    """

    job: Job
    mark: object
    deadline_s: float
    left: int = 0
    failed: dict[int, Reason] = field(default_factory=dict)
    void: bool = False
    late: set[int] = field(default_factory=set)
    late_parts: int = 0
    waits_for: int = 0
    urgent: bool = False
    fenced: bool = False
    to_launch: int | None = None
    to_gather: int | None = None
    told_copied: bool = False

    def result(self) -> JobResult:
        """Return this rank's answer."""
        failed = self.failed
        if self.void:
            failed = dict.fromkeys(range(len(self.job.moves)), Reason.CANCELLED)
        return JobResult(1, failed, set(self.late), 1 if self.late else 0)

    def note_launched(self, count: int) -> None:
        """So many copies more from the GPU have begun, or never will."""
        assert self.to_launch is not None and self.to_launch >= count
        self.to_launch -= count

    def note_gathered(self, count: int) -> None:
        """So many moves more do not read the GPU any more."""
        assert self.to_gather is not None and self.to_gather >= count
        self.to_gather -= count

    def cancelled(self) -> Work:
        """Let every move fail with CANCELLED, and return itself."""
        moves = len(self.job.moves)
        self.failed = dict.fromkeys(range(moves) if moves else (-1,), Reason.CANCELLED)
        return self


@dataclass(slots=True, eq=False)
class Lot:
    """Moves of one job that share route, group and drive, in the order of their slots.

    Those before ``taken`` have started. ``drive``: see ``OpenFile``; NO_DRIVE where the route has
    none, or the segments are not open.
    """

    work: Work
    route: Route
    group: int
    drive: int
    positions: list[int]
    taken: int = 0


@dataclass(slots=True, eq=False)
class Part:
    """What of a lot is under way together, on one drive: a drive that hangs stops no other.

    ``positions``: moves that have not failed, and ``slots``: where in ``arena`` each of them lies.
    ``staging``: slots to give back at the end. On a direct route ``arena`` is GPU staging, which
    has of an arena what copier and device need. ``leg``: legs begun. ``late``: its moves have
    failed, and it is still at the device, which owns its slots.
    """

    work: Work
    route: Route
    group: int
    drive: int
    size_class: int
    arena: Arena
    positions: list[int]
    slots: list[int]
    staging: list[int]
    leg: int = 0
    late: bool = False

    @property
    def slot_bytes(self) -> int:
        """Bytes of one of its slots."""
        return self.arena.slot_sizes[self.size_class]

    def drop(self, gone: Mapping[int, Reason]) -> None:
        """Take out moves that failed."""
        kept = [
            (position, slot) for position, slot in zip(self.positions, self.slots, strict=True) if position not in gone
        ]
        self.positions = [position for position, _ in kept]
        self.slots = [slot for _, slot in kept]


class OpenFile(NamedTuple):
    """An open segment file. ``drive``: as its home numbers them."""

    fd: int
    slot_bytes: int
    slot_count: int
    drive: int = 0


NO_DRIVE = -1


def lots_of(
    work: Work,
    geometry: Geometry,
    part_slots: Sequence[int],
    files: Mapping[int, OpenFile],
    rank: int,
    direct: Direct | None = None,
) -> list[Lot]:
    """Sort a job's moves into lots; moves without a source fail with ABSENT. Sets ``work.left``.

    Where the KV is the same on every rank, what another rank writes to the drive has ended well
    here, unmoved. ``part_slots``: slots of a part, by size class; ``files``: by segment. What lies
    on several drives is taken from each in turn, a lot of one part at a time, so that the parts
    under way read from, or write to, all of them. ``direct``: says of staged moves whether they go
    straight to the GPU.
    """
    moves, kind = work.job.moves, work.job.kind
    one_group = len(geometry.groups) == 1
    found: dict[tuple[Route, int], list[int]] = {}
    others = 0
    for position, move in enumerate(moves):
        route = _route_of(kind, move)
        if route is None:
            work.failed[position] = Reason.ABSENT
        elif route.writes and Tier.NVME in move.slots and not geometry.writes(rank, move.slots[Tier.NVME].segment):
            others += 1
        else:
            group = 0 if one_group else group_of(move.key)
            if direct is not None and route.staged:
                route = direct.route(route, geometry.size_classes[group], move)
            found.setdefault((route, group), []).append(position)
    work.left = len(moves) - len(work.failed) - others
    work.to_launch = work.to_gather = work.left if kind is JobKind.STORE else 0
    lots = []
    for (route, group), positions in found.items():
        on_drive = route.on_drive
        positions.sort(key=lambda at: moves[at].slots[Tier.NVME if on_drive else Tier.CPU])
        of_drives = _by_drive(positions, moves, files) if on_drive else {NO_DRIVE: positions}
        longest = max(map(len, of_drives.values()))
        count = part_slots[geometry.size_classes[group]] if len(of_drives) > 1 else longest
        lots += [
            Lot(work, route, group, drive, mine[start : start + count])
            for start in range(0, longest, count)
            for drive, mine in of_drives.items()
            if start < len(mine)
        ]
    return lots


def _by_drive(positions: list[int], moves: Sequence[Move], files: Mapping[int, OpenFile]) -> dict[int, list[int]]:
    """Return positions by the drive that their slots are on, each drive's in the order given."""
    found: dict[int, list[int]] = {}
    for position in positions:
        place = moves[position].slots.get(Tier.NVME)
        assert place is not None
        file = files.get(place.segment)
        found.setdefault(NO_DRIVE if file is None else file.drive, []).append(position)
    return found


def _route_of(kind: JobKind, move: Move) -> Route | None:
    if kind is JobKind.LOAD:
        if Tier.NVME in move.slots:
            return Route.LOAD_KEPT if Tier.CPU in move.slots else Route.LOAD_STAGED
        return Route.LOAD_CPU if Tier.CPU in move.slots else None
    if kind is JobKind.STORE:
        assert move.slots, "a store without a target"
        return Route.STORE_CPU if Tier.CPU in move.slots else Route.STORE_STAGED
    if kind is JobKind.PROMOTE:
        assert Tier.CPU in move.slots, "a promotion without a target"
        return Route.PROMOTE if Tier.NVME in move.slots else None
    assert kind is JobKind.DEMOTE, kind
    assert Tier.NVME in move.slots, "a demotion without a target"
    return Route.DEMOTE if Tier.CPU in move.slots else None


def transfers_of(part: Part, files: Mapping[int, OpenFile]) -> tuple[list[Transfer], list[list[int]], list[int]]:
    """Merge neighbouring slots of a part into one transfer for each run within a segment.

    Returns the transfers, for each of them the positions of its moves, and the positions of moves
    whose segment is not open.
    """
    moves, positions, slots = part.work.job.moves, part.positions, part.slots
    places = [moves[position].slots.get(Tier.NVME) for position in positions]
    transfers: list[Transfer] = []
    members: list[list[int]] = []
    unopened: list[int] = []
    start, total = 0, len(positions)
    while start < total:
        place = places[start]
        assert place is not None
        segment, first = place
        end = start + 1
        while end < total and places[end] == (segment, first + end - start):
            end += 1
        file = files.get(segment)
        if file is None:
            unopened += positions[start:end]
        else:
            assert file.slot_bytes == part.slot_bytes, "slots of another size"
            assert first + end - start <= file.slot_count, "a slot behind the segment's last"
            buffers = _buffers(part, slots[start:end])
            transfers.append(Transfer(file.fd, slot_offset(file.slot_bytes, first), buffers))
            members.append(positions[start:end])
        start = end
    return transfers, members, unopened


def split_transfer(transfer: Transfer, slot_bytes: int, count: int) -> list[Transfer]:
    """Cut a transfer of ``count`` slots into one for each slot."""
    views = [
        buffer[start : start + slot_bytes]
        for buffer in transfer.buffers
        for start in range(0, buffer.nbytes, slot_bytes)
    ]
    assert len(views) == count
    return [Transfer(transfer.fd, transfer.offset + at * slot_bytes, (view,)) for at, view in enumerate(views)]


def _buffers(part: Part, slots: Sequence[int]) -> tuple[Buffer, ...]:
    return tuple(
        part.arena.run_view(part.size_class, slots[start], count) for start, count in contiguous_runs(slots, len(slots))
    )


class LotQueues:
    """A queue of lots for each route, and one of urgent lots for each route of stores.

    The urgent come first, then loads, those of requests that arrived earlier before others; then
    stores, promotions and demotions.
    """

    def __init__(self) -> None:
        self._queues: dict[Route, deque[Lot]] = {route: deque() for route in Route}
        self._urgent: dict[Route, deque[Lot]] = {route: deque() for route in Route if route.gathers}
        self._loads = [self._queues[route] for route in Route if route.scatters]
        others = [self._queues[route] for route in Route if not route.scatters]
        self._others = others
        self._order = [*self._urgent.values(), *self._loads, *self._others]

    def add(self, lot: Lot) -> None:
        """Put a lot behind the others of its route, but for loads of requests that arrived later."""
        queue = (self._urgent if lot.work.urgent else self._queues)[lot.route]
        at = len(queue)
        while at and queue[at - 1].work.job.arrival > lot.work.job.arrival:
            at -= 1
        queue.insert(at, lot)

    def hurry(self, job_id: JobId) -> None:
        """Let a store go before all else."""
        for route, urgent in self._urgent.items():
            queue = self._queues[route]
            moved = [lot for lot in queue if lot.work.job.id == job_id]
            for lot in moved:
                queue.remove(lot)
            urgent.extend(moved)

    def heads(self) -> Iterator[Lot]:
        """Yield the first lot of each queue. Pass a lot that is taken whole to ``pop`` at once."""
        yield from (queue[0] for queue in self._urgent.values() if queue)
        yield from sorted((queue[0] for queue in self._loads if queue), key=lambda lot: lot.work.job.arrival)
        for queue in self._others:
            if queue:
                yield queue[0]

    def pop(self, lot: Lot) -> None:
        """Take out the first lot of its queue."""
        for queue in self._order:
            if queue and queue[0] is lot:
                queue.popleft()
                return
        raise AssertionError("not the first of any queue")

    def remove(self, wanted: Callable[[Lot], bool]) -> list[Lot]:
        """Take out all lots that are ``wanted``, and return them."""
        found: list[Lot] = []
        for queue in filter(None, self._order):
            gone = [lot for lot in queue if wanted(lot)]
            for lot in gone:
                queue.remove(lot)
            found += gone
        return found


class FreeStaging:
    """The free slots of staging, by size class. ``part_slots``: how many a part should take."""

    def __init__(self, slot_counts: Sequence[int], part_slots: Sequence[int]) -> None:
        self._free = [list(range(count)) for count in slot_counts]
        self._counts = tuple(slot_counts)
        # A quarter of staging for a part of a load, an eighth of a store: MOST_WRITES of them leave
        # half to loads.
        self._most = {
            writes: [min(most, max(1, count // share)) for most, count in zip(part_slots, slot_counts, strict=True)]
            for writes, share in ((False, 4), (True, 8))
        }

    def take(self, size_class: int, wanted: int, *, writes: bool) -> list[int]:
        """Take slots for a part of at most ``wanted``; empty where it has to wait.

        ``writes``: the part goes to a drive.
        """
        assert self._counts[size_class], "there is no staging for this size of slot"
        free = self._free[size_class]
        count = min(wanted, self._most[writes][size_class])
        if count > len(free):
            return []
        taken = free[:count]
        del free[:count]
        return taken

    def give_back(self, part: Part) -> None:
        """Make a part's slots free: nothing touches them any more."""
        if part.staging:
            free = self._free[part.size_class]
            free.extend(part.staging)
            free.sort()  # so that parts find neighbours

    @property
    def all_free(self) -> bool:
        """Whether every slot has been given back."""
        return tuple(map(len, self._free)) == self._counts


class Parts:
    """Cuts parts of about ``part_bytes``, and takes their staging back.

    ``slots``: of a part, by size class; fewer where staging is small. The mover's thread calls
    everything.
    """

    def __init__(self, resources: Resources, part_bytes: int) -> None:
        self._resources = resources
        # To the nearest, since the header makes slots a little longer than a power of two.
        self.slots = [max(1, round(part_bytes / size)) for size in resources.geometry.slot_sizes]
        self._staging = FreeStaging(resources.staging.slot_counts, self.slots)
        direct = resources.direct
        self._direct = None if direct is None else FreeStaging(direct.staging.slot_counts, self.slots)

    def cut(self, lot: Lot) -> Part | None:
        """Cut the next part from a lot; None where it has to wait for staging."""
        route, resources = lot.route, self._resources
        size_class = resources.geometry.size_classes[lot.group]
        rest = len(lot.positions) - lot.taken
        staging: list[int] = []
        if route.staged:
            staging = self._free_of(route).take(size_class, rest, writes=route.writes)
            if not staging:
                return None
            arena = resources.staging
            if route.direct:
                assert resources.direct is not None
                arena = cast("Arena", resources.direct.staging)
        else:
            assert resources.arena is not None, "a move names a CPU slot, and there is no CPU tier"
            arena = resources.arena
        count = len(staging) or min(rest, self.slots[size_class])
        positions = lot.positions[lot.taken : lot.taken + count]
        slots = staging[:] or [lot.work.job.moves[position].slots[Tier.CPU].index for position in positions]
        lot.taken += count
        return Part(lot.work, route, lot.group, lot.drive, size_class, arena, positions, slots, staging)

    def give_back(self, part: Part) -> None:
        """Make a part's staging free, if it has any: nothing touches it any more."""
        self._free_of(part.route).give_back(part)

    @property
    def all_given_back(self) -> bool:
        """Whether no staging is in use."""
        return all(free.all_free for free in (self._staging, self._direct) if free is not None)

    def _free_of(self, route: Route) -> FreeStaging:
        if not route.direct:
            return self._staging
        assert self._direct is not None
        return self._direct
