# SPDX-License-Identifier: Apache-2.0
"""What a job is made of: parts of one route each, run leg by leg, with the staging they borrow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, unique
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from kvdisk.blocks import Slot, Tier, group_of
from kvdisk.device.base import Device
from kvdisk.geometry import Geometry
from kvdisk.messages import Job, JobKind, Move, Reason
from kvdisk.remote.base import Objects
from kvdisk.worker.arena import Arena, SlotMemory

if TYPE_CHECKING:
    from kvdisk.worker.copies import Copier, Event
    from kvdisk.worker.direct import Direct
    from kvdisk.worker.files import SegmentFiles


@dataclass(frozen=True, slots=True, eq=False)
class Resources:
    """What one rank moves bytes with.

    ``arena``: the CPU tier, or None; ``staging``: at least one slot of each size class where there
    is an NVMe tier. ``direct``: the way straight between drive and GPU, where ``device`` has one.
    All memory stays the caller's, who closes it after the mover. ``device``, ``files`` and
    ``remote``, the store that hosts share, become the mover's, which closes them.
    ``checksum_threads``: that seal and verify slots in host memory, several parts at once; 0: the
    mover's own thread does it.
    """

    geometry: Geometry
    rank: int
    arena: Arena | None
    staging: Arena
    copier: Copier
    device: Device
    files: SegmentFiles
    direct: Direct | None = None
    remote: Objects | None = None
    checksum_threads: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.geometry.rank_count
        assert all(slots.slot_sizes == self.geometry.slot_sizes for slots in self.memories.values())

    @property
    def memories(self) -> dict[Memory, SlotMemory]:
        """All slots that the device moves, where they lie."""
        found: dict[Memory, SlotMemory] = {Memory.STAGING: self.staging}
        if self.arena is not None:
            found[Memory.CPU_TIER] = self.arena
        if self.direct is not None:
            found[Memory.GPU_STAGING] = self.direct.staging
        return found


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


class Memory(Enum):
    """Where the slots of a route lie. Of GPU staging only the headers are ever in host memory."""

    CPU_TIER = 1
    STAGING = 2
    GPU_STAGING = 3


@unique
class Route(Enum):
    """The ways of a move: the kind of its job, its legs, whose slots they use, and the tier behind
    the device or beyond this host, where they read or write one.

    ``staged``: through a slot of staging, not of the tier. ``direct``: of staging on the GPU.
    ``on_drive``: that tier is in segment files; ``by_key``: it has objects. ``tiers``: in which the
    route has slots.
    """

    LOAD_DIRECT = (JobKind.LOAD, (Leg.READ, Leg.SUM, Leg.CHECK, Leg.SCATTER), Memory.GPU_STAGING, Tier.NVME)
    LOAD_STAGED = (JobKind.LOAD, (Leg.READ, Leg.CHECK, Leg.SCATTER), Memory.STAGING, Tier.NVME)
    LOAD_KEPT = (JobKind.LOAD, (Leg.READ, Leg.CHECK, Leg.SCATTER), Memory.CPU_TIER, Tier.NVME)
    LOAD_CPU = (JobKind.LOAD, (Leg.CHECK, Leg.SCATTER), Memory.CPU_TIER, None)
    STORE_CPU = (JobKind.STORE, (Leg.GATHER, Leg.SEAL), Memory.CPU_TIER, None)
    STORE_DIRECT = (JobKind.STORE, (Leg.GATHER, Leg.SUM, Leg.SEAL, Leg.WRITE), Memory.GPU_STAGING, Tier.NVME)
    STORE_STAGED = (JobKind.STORE, (Leg.GATHER, Leg.SEAL, Leg.WRITE), Memory.STAGING, Tier.NVME)
    PROMOTE = (JobKind.PROMOTE, (Leg.READ, Leg.CHECK), Memory.CPU_TIER, Tier.NVME)
    DEMOTE = (JobKind.DEMOTE, (Leg.WRITE,), Memory.CPU_TIER, Tier.NVME)
    FETCH_STAGED = (JobKind.LOAD, (Leg.READ, Leg.CHECK, Leg.SCATTER), Memory.STAGING, Tier.REMOTE)
    FETCH_KEPT = (JobKind.LOAD, (Leg.READ, Leg.CHECK, Leg.SCATTER), Memory.CPU_TIER, Tier.REMOTE)
    FETCH_AHEAD = (JobKind.PROMOTE, (Leg.READ, Leg.CHECK), Memory.CPU_TIER, Tier.REMOTE)
    SEND = (JobKind.DEMOTE, (Leg.WRITE,), Memory.CPU_TIER, Tier.REMOTE)

    def __init__(self, kind: JobKind, legs: tuple[Leg, ...], memory: Memory, far: Tier | None) -> None:
        self.kind = kind
        self.legs = legs
        self.memory = memory
        self.staged = memory is not Memory.CPU_TIER
        self.direct = memory is Memory.GPU_STAGING
        self.gathers = Leg.GATHER in legs
        self.scatters = Leg.SCATTER in legs
        self.reads = Leg.READ in legs
        self.writes = Leg.WRITE in legs
        self.far = far
        self.on_drive = far is Tier.NVME
        self.by_key = far is Tier.REMOTE
        self.tiers = frozenset(tier for tier in (None if self.staged else Tier.CPU, far) if tier is not None)

    def far_slot(self, move: Move) -> Slot:
        """Return the slot outside memory that a move reads or writes."""
        assert self.far is not None, self
        return move.slots[self.far]


_ROUTES: dict[tuple[JobKind, frozenset[Tier]], Route | None] = {
    **{(route.kind, route.tiers): route for route in Route if not route.direct},
    (JobKind.LOAD, frozenset()): None,
    (JobKind.PROMOTE, frozenset({Tier.CPU})): None,
    (JobKind.DEMOTE, frozenset({Tier.NVME})): None,
}
"""By the tiers in which a move has slots. None: it has no source, and fails with ABSENT."""


def route_of(kind: JobKind, move: Move) -> Route | None:
    """Return the route of a move through host memory; None: it has no source."""
    found = kind, frozenset(move.slots)
    assert found in _ROUTES, f"a move without a target, or with one too many: {found}"
    return _ROUTES[found]


@dataclass(slots=True, eq=False)
class Work:
    """A job under way.

    ``left``: moves that have not ended. ``after``: the model's work to wait for. ``deadline_s``: on
    the mover's clock; what has not started then fails. ``urgent``: before all that is not;
    ``fenced``: what of it cannot start at once fails. ``copied``: it was reported that nothing of
    it reads the GPU any more.
    """

    job: Job
    after: Event | None
    deadline_s: float
    left: int = 0
    failed: dict[int, Reason] = field(default_factory=dict)
    urgent: bool = False
    fenced: bool = False
    copied: bool = False


@dataclass(slots=True, eq=False)
class Part:
    """Moves of one job that go together, by one route and, of one group, to or from one drive.

    ``positions``: moves that have not failed, in the order of their slots. ``slots``: where in
    ``memory`` each of them lies; none before staging is lent. ``staging``: slots to give back.
    ``drive``: see ``OpenFile``; NO_DRIVE where the route has none, or the segments are not open. On
    a direct route ``memory`` is GPU staging.

    ``begun``: number of legs begun. Of the one under way, ``began_s``: since when; ``copy``: its
    end, where it is a copy, or on another thread; ``batch``: the positions of the moves in each
    transfer, where it is at the device. ``late``: its moves have failed, and the device still owns
    its slots.
    """

    work: Work
    route: Route
    group: int
    drive: int
    size_class: int
    memory: SlotMemory
    positions: list[int]
    slots: list[int] = field(default_factory=list)
    staging: list[int] = field(default_factory=list)
    begun: int = 0
    began_s: float = 0.0
    copy: Event | None = None
    batch: list[list[int]] = field(default_factory=list)
    late: bool = False

    @property
    def leg(self) -> Leg:
        """The leg under way, or the last one."""
        return self.route.legs[self.begun - 1]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one of its slots."""
        return self.memory.slot_sizes[self.size_class]

    @property
    def urgency(self) -> tuple[int, int]:
        """Its place in the queue: urgent stores, loads as their requests arrived, the others."""
        route, work = self.route, self.work
        rank = 0 if work.urgent else 1 if route.scatters else 2 if route.gathers else 3 if route.reads else 4
        return rank, work.job.arrival

    def drop(self, gone: Mapping[int, Reason]) -> None:
        """Take out moves that failed."""
        kept = [
            (position, slot) for position, slot in zip(self.positions, self.slots, strict=True) if position not in gone
        ]
        self.positions = [position for position, _ in kept]
        self.slots = [slot for _, slot in kept]


class OpenFile(NamedTuple):
    """An open segment file. ``drive``: by the home that was opened, for a neighbour's file too."""

    fd: int
    slot_bytes: int
    slot_count: int
    drive: int = 0


NO_DRIVE = -1


class PartCutter:
    """Cuts jobs into parts of about ``part_bytes``, and lends them staging.

    A part through staging takes at most a quarter of it for a load and an eighth for a store, or a
    load from the remote store. Stores leave half to loads. The mover's thread calls everything.
    """

    def __init__(self, resources: Resources, part_bytes: int) -> None:
        self._resources = resources
        # To the nearest, since the header makes slots a little longer than a power of two.
        self._slots = [max(1, round(part_bytes / size)) for size in resources.geometry.slot_sizes]
        self._memories = resources.memories
        self._free: dict[Memory, list[list[int]]] = {
            memory: [list(range(count)) for count in slots.slot_counts]
            for memory, slots in self._memories.items()
            if memory is not Memory.CPU_TIER
        }

    def cut(self, work: Work, files: Mapping[int, OpenFile]) -> list[Part]:
        """Cut a job into parts, and set ``work.left``; moves without a source fail with ABSENT.

        Where the KV is the same on every rank, what another rank writes to the drive has ended well
        here, unmoved. ``files``: by segment. What lies on several drives is taken from each in
        turn, so that the parts under way read from, or write to, all of them.
        """
        resources, moves = self._resources, work.job.moves
        geometry, direct = resources.geometry, resources.direct
        found: dict[tuple[Route, int, int], list[int]] = {}
        others = 0
        for position, move in enumerate(moves):
            route = route_of(work.job.kind, move)
            if route is None:
                work.failed[position] = Reason.ABSENT
            elif route.writes and not geometry.writes(resources.rank, route.far_slot(move).segment):
                others += 1
            else:
                group = 0 if len(geometry.groups) == 1 else group_of(move.key)
                if direct is not None and route.staged and route.on_drive:
                    route = direct.route(route, geometry.size_classes[group], move)
                file = files.get(route.far_slot(move).segment) if route.on_drive else None
                drive = NO_DRIVE if file is None else file.drive
                found.setdefault((route, group, drive), []).append(position)
        work.left = len(moves) - len(work.failed) - others
        lanes = [self._cut_lane(work, *lane, positions) for lane, positions in found.items()]
        return [part for turn in zip_longest(*lanes) for part in turn if part is not None]

    def cut_by_host(self, part: Part, positions: list[int]) -> list[Part]:
        """Return parts that load some moves of a direct part through host memory."""
        return self._cut_lane(part.work, Route.LOAD_STAGED, part.group, part.drive, positions)

    def _cut_lane(self, work: Work, route: Route, group: int, drive: int, positions: list[int]) -> list[Part]:
        """Return parts of one route, group and drive, in the order of their slots."""
        moves, size_class = work.job.moves, self._resources.geometry.size_classes[group]
        count = self._slots[size_class]
        assert route.memory in self._memories, "a move names a CPU slot, and there is no CPU tier"
        memory = self._memories[route.memory]
        if route.staged:
            assert memory.slot_counts[size_class], "there is no staging for this size of slot"
            share = 4 if route.reads and route.on_drive else 8
            count = min(count, max(1, memory.slot_counts[size_class] // share))
        ordered = sorted(positions, key=lambda at: moves[at].slots[route.far or Tier.CPU])
        parts = []
        for start in range(0, len(ordered), count):
            part = Part(work, route, group, drive, size_class, memory, ordered[start : start + count])
            if not route.staged:
                part.slots = [moves[position].slots[Tier.CPU].index for position in part.positions]
            parts.append(part)
        return parts

    def lend(self, part: Part, under_way: Iterable[Part]) -> bool:
        """Lend a part its staging, where it needs any; return False where it has to wait. What is
        late of ``under_way`` holds no other store up."""
        if part.route.staged:
            memory, size_class, count = part.route.memory, part.size_class, len(part.positions)
            free = self._free[memory][size_class]
            of_stores = sum(
                len(other.staging)
                for other in under_way
                if other.route.writes and other.route.memory is memory and other.size_class == size_class
                if not other.late
            )
            half = part.memory.slot_counts[size_class] // 2  # the first store goes, however little there is
            if count > len(free) or (part.route.writes and of_stores and of_stores + count > half):
                return False
            part.staging, part.slots = free[:count], free[:count]
            del free[:count]
        return True

    def give_back(self, part: Part) -> None:
        """Take a part's staging back, if it has any: nothing touches it any more."""
        if part.staging:
            free = self._free[part.route.memory][part.size_class]
            free.extend(part.staging)
            free.sort()  # so that parts find neighbours
