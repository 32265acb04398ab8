# SPDX-License-Identifier: Apache-2.0
"""What a job is made of: parts of one route each, run leg by leg, with the staging they borrow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cache, cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from kvdisk.blocks import KEPT_TIERS, Medium, Slot, Tier, group_of
from kvdisk.device.base import Device
from kvdisk.geometry import Geometry
from kvdisk.messages import Job, JobKind, Move, Reason
from kvdisk.remote.base import Objects
from kvdisk.worker.arena import Arena, SlotMemory

if TYPE_CHECKING:
    from kvdisk.worker.copies import Copier, Event
    from kvdisk.worker.direct import Direct
    from kvdisk.worker.files import SegmentFiles


class Staging(Enum):
    """Slots that a part borrows where no tier's serve it: in host memory, or on the GPU. Of those
    on the GPU only the headers are ever in host memory."""

    HOST = 1
    GPU = 2


Memory = Tier | Staging
"""Where the slots of a part lie: in a tier of the MEMORY medium, or in staging."""


@dataclass(frozen=True, slots=True, eq=False)
class Resources:
    """What one rank moves bytes with.

    ``arenas``: of each tier of the MEMORY medium that there is; ``staging``: at least one slot of
    each size class where there is an NVMe tier. ``direct``: the way straight between drive and GPU,
    where ``device`` has one. All memory stays the caller's, who closes it after the mover.
    ``device``, ``files`` and ``remote``, the store that hosts share, become the mover's, which
    closes them. ``checksum_threads``: that seal and verify slots in host memory, several parts at
    once; 0: the mover's own thread does it.
    """

    geometry: Geometry
    rank: int
    arenas: Mapping[Tier, Arena]
    staging: Arena
    copier: Copier
    device: Device
    files: SegmentFiles
    direct: Direct | None = None
    remote: Objects | None = None
    checksum_threads: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.geometry.rank_count
        assert all(tier.medium is Medium.MEMORY for tier in self.arenas)
        assert all(slots.slot_sizes == self.geometry.slot_sizes for slots in self.memories.values())

    @property
    def memories(self) -> dict[Memory, SlotMemory]:
        """All slots that the device moves, where they lie."""
        found: dict[Memory, SlotMemory] = {Staging.HOST: self.staging, **dict(self.arenas.items())}
        if self.direct is not None:
            found[Staging.GPU] = self.direct.staging
        return found


class Leg(IntEnum):
    """A step of a route. GATHER and SCATTER run on the copier; READ and WRITE on what the slow tier
    of the route lies in: the device, the remote store, or another arena.

    SUM: checksums computed on the GPU; SEAL waits for them where slots lie there.
    """

    GATHER = 1
    SEAL = 2
    WRITE = 3
    READ = 4
    CHECK = 5
    SCATTER = 6
    SUM = 7


@dataclass(frozen=True, eq=False)
class Route:
    """A way of a move: the kind of its job, its legs, and where its slots lie.

    ``memory``: where a part's slots are while it goes. ``slow``: the tier that READ or WRITE is
    from or to; None: it has neither leg. There is one object of each route: compare them by ``is``.
    """

    kind: JobKind
    legs: tuple[Leg, ...]
    memory: Memory
    slow: Tier | None

    @property
    def staged(self) -> bool:
        """Whether it borrows slots of staging."""
        return isinstance(self.memory, Staging)

    @property
    def direct(self) -> bool:
        """Whether these are on the GPU."""
        return self.memory is Staging.GPU

    @property
    def fast(self) -> Tier:
        """The tier that its slots count as in metrics."""
        if isinstance(self.memory, Staging):
            return Tier.GPU if self.direct else Tier.CPU
        return self.memory

    @property
    def gathers(self) -> bool:
        """Whether it reads vLLM's blocks."""
        return Leg.GATHER in self.legs

    @property
    def scatters(self) -> bool:
        """Whether it writes vLLM's blocks."""
        return Leg.SCATTER in self.legs

    @property
    def reads(self) -> bool:
        """Whether it reads the slow tier."""
        return Leg.READ in self.legs

    @property
    def writes(self) -> bool:
        """Whether it writes the slow tier."""
        return Leg.WRITE in self.legs

    @property
    def on_drive(self) -> bool:
        """Whether the slow tier is in segment files."""
        return self.slow is not None and self.slow.medium is Medium.FILES

    @property
    def by_key(self) -> bool:
        """Whether the slow tier has objects."""
        return self.slow is not None and self.slow.medium is Medium.OBJECTS

    @property
    def in_memory(self) -> bool:
        """Whether the slow tier is in another arena."""
        return self.slow is not None and self.slow.medium is Medium.MEMORY

    @property
    def is_shared(self) -> bool:
        """Whether it writes what all ranks read: where their KV is the same, one of them does."""
        return self.writes and not self.in_memory

    def slow_slot(self, move: Move) -> Slot:
        """Return the slot that a move reads or writes in the slow tier."""
        assert self.slow is not None, self
        return move.slots[self.slow]

    @cached_property
    def on_gpu(self) -> Route:
        """The same way through staging on the GPU, for one through staging in host memory."""
        assert self.memory is Staging.HOST and self.on_drive, self
        return Route(self.kind, _ON_GPU[self.kind], Staging.GPU, self.slow)


_ON_GPU = {
    JobKind.LOAD: (Leg.READ, Leg.SUM, Leg.CHECK, Leg.SCATTER),
    JobKind.STORE: (Leg.GATHER, Leg.SUM, Leg.SEAL, Leg.WRITE),
}


@cache
def route_between(kind: JobKind, *tiers: Tier) -> Route | None:
    """Return the route through host memory of a move that has slots in these tiers, the fastest
    first; None: it has no source, and fails with ABSENT.

    A load or a promotion reads the slower of two, and leaves a copy in the faster one, which is in
    memory. Two tiers of files cannot be moved between yet: their device is one.
    """
    fast, slow = tiers[0] if tiers else None, tiers[-1] if tiers else None
    in_memory = fast is not None and fast.medium is Medium.MEMORY
    wrong = f"a move without a target, or with one too many: {kind.name} in {[tier.name for tier in tiers]}"
    assert len(tiers) <= 2 and (in_memory or len(tiers) < 2), wrong
    memory: Memory = fast if fast is not None and in_memory else Staging.HOST
    legs: tuple[Leg, ...]
    match kind:
        case JobKind.STORE:
            assert len(tiers) == 1 and slow is not None and slow.medium is not Medium.OBJECTS, wrong
            legs = (Leg.GATHER, Leg.SEAL) if in_memory else (Leg.GATHER, Leg.SEAL, Leg.WRITE)
        case JobKind.LOAD:
            if not tiers:
                return None
            legs = (Leg.CHECK, Leg.SCATTER)
            if len(tiers) == 2 or not in_memory:
                legs = (Leg.READ, *legs)
        case JobKind.PROMOTE:
            assert in_memory, wrong
            if len(tiers) == 1:
                return None
            legs = (Leg.READ, Leg.CHECK)
        case JobKind.DEMOTE:
            assert slow is not None and slow is not KEPT_TIERS[0], wrong
            if len(tiers) == 1:
                return None
            legs = (Leg.WRITE,)
        case _:
            raise AssertionError(wrong)
    return Route(kind, legs, memory, slow if Leg.READ in legs or Leg.WRITE in legs else None)


def route_of(kind: JobKind, move: Move) -> Route | None:
    """Return the route of a move through host memory; None: it has no source."""
    return route_between(kind, *sorted(move.slots))


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
            if isinstance(memory, Staging)
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
            elif route.is_shared and not geometry.writes(resources.rank, route.slow_slot(move).segment):
                others += 1
            else:
                group = 0 if len(geometry.groups) == 1 else group_of(move.key)
                if direct is not None and route.staged and route.on_drive:
                    route = direct.route(route, geometry.size_classes[group], move)
                file = files.get(route.slow_slot(move).segment) if route.on_drive else None
                drive = NO_DRIVE if file is None else file.drive
                found.setdefault((route, group, drive), []).append(position)
        work.left = len(moves) - len(work.failed) - others
        lanes = [self._cut_lane(work, *lane, positions) for lane, positions in found.items()]
        return [part for turn in zip_longest(*lanes) for part in turn if part is not None]

    def cut_by_host(self, part: Part, positions: list[int]) -> list[Part]:
        """Return parts that load some moves of a direct part through host memory."""
        assert part.route.slow is not None
        route = route_between(JobKind.LOAD, part.route.slow)
        assert route is not None
        return self._cut_lane(part.work, route, part.group, part.drive, positions)

    def _cut_lane(self, work: Work, route: Route, group: int, drive: int, positions: list[int]) -> list[Part]:
        """Return parts of one route, group and drive, in the order of their slots."""
        moves, size_class = work.job.moves, self._resources.geometry.size_classes[group]
        count = self._slots[size_class]
        assert route.memory in self._memories, f"a move names a slot of {route.memory}, which is not there"
        memory = self._memories[route.memory]
        of_tier = None if isinstance(route.memory, Staging) else route.memory
        if route.staged:
            assert memory.slot_counts[size_class], "there is no staging for this size of slot"
            share = 4 if route.reads and route.on_drive else 8
            count = min(count, max(1, memory.slot_counts[size_class] // share))
        order = route.slow if route.slow is not None else of_tier
        assert order is not None
        ordered = sorted(positions, key=lambda at: moves[at].slots[order])
        parts = []
        for start in range(0, len(ordered), count):
            part = Part(work, route, group, drive, size_class, memory, ordered[start : start + count])
            if of_tier is not None:
                part.slots = [moves[position].slots[of_tier].index for position in part.positions]
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
