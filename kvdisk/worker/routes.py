# SPDX-License-Identifier: Apache-2.0
"""What a job is made of: batches of one route each, run leg by leg."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple

from kvdisk.blocks import KEPT_TIERS, Medium, Slot, Tier
from kvdisk.messages import Job, JobKind, Move, Reason
from kvdisk.worker.arena import SlotMemory

if TYPE_CHECKING:
    from kvdisk.worker.copier_base import Event


class Staging(Enum):
    """Slots that a batch borrows where no tier's serve it: in host memory, or on the GPU. Of those
    on the GPU only the headers are ever in host memory."""

    HOST = 1
    GPU = 2


Memory = Tier | Staging
"""Where the slots of a batch lie: in a tier of the MEMORY medium, or in staging."""


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

    ``memory``: where a batch's slots are while it goes. ``source``, ``target``: the tiers that READ
    is from, and WRITE is to; None: it has no such leg. There is one object of each route: compare
    them by ``is``.
    """

    kind: JobKind
    legs: tuple[Leg, ...]
    memory: Memory
    source: Tier | None
    target: Tier | None

    @cached_property
    def files(self) -> Tier | None:
        """The tier in segment files that it reads or writes; None: there is none."""
        return next((tier for tier in (self.source, self.target) if tier and tier.medium is Medium.FILES), None)

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
        """Whether it reads a slow tier."""
        return Leg.READ in self.legs

    @property
    def writes(self) -> bool:
        """Whether it writes a slow tier."""
        return Leg.WRITE in self.legs

    @property
    def on_drive(self) -> bool:
        """Whether it reads or writes segment files."""
        return self.files is not None

    @property
    def writes_drive(self) -> bool:
        """Whether it writes segment files."""
        return self.files is not None and self.files is self.target

    @property
    def by_key(self) -> bool:
        """Whether it reads or writes objects."""
        return any(tier is not None and tier.medium is Medium.OBJECTS for tier in (self.source, self.target))

    @property
    def relays(self) -> bool:
        """Whether it goes from one slow tier to another, through staging."""
        return self.reads and self.writes

    @property
    def shared(self) -> Tier | None:
        """The tier that it writes for all ranks to read: where their KV is the same, one of them
        does. None: there is none."""
        return None if self.target is None or self.target.medium is Medium.MEMORY else self.target

    def file_slot(self, move: Move) -> Slot:
        """Return the slot of segment files that a move reads or writes."""
        assert self.files is not None, self
        return move.slots[self.files]

    @cached_property
    def on_gpu(self) -> Route:
        """The same way through staging on the GPU, for one through staging in host memory."""
        assert self.memory is Staging.HOST and self.on_drive and not self.relays, self
        return Route(self.kind, _ON_GPU[self.kind], Staging.GPU, self.source, self.target)

    @property
    def by_host(self) -> Route:
        """The same way through host memory, for a load through staging on the GPU."""
        assert self.direct and self.source is not None, self
        route = route_between(self.kind, self.source)
        assert route is not None, self
        return route


_ON_GPU = {
    JobKind.LOAD: (Leg.READ, Leg.SUM, Leg.CHECK, Leg.SCATTER),
    JobKind.STORE: (Leg.GATHER, Leg.SUM, Leg.SEAL, Leg.WRITE),
}


_RELAYS = frozenset({JobKind.DEMOTE, JobKind.PROMOTE})
"""Jobs that may go from one slow tier to another."""


@cache
def route_between(kind: JobKind, *tiers: Tier) -> Route | None:
    """Return the route through host memory of a move that has slots in these tiers, the fastest
    first; None: it has no source, and fails with ABSENT.

    A load or a promotion reads the slower of two, and leaves a copy in the faster one, which is in
    memory. A demotion writes the slower of two. Between a drive and a store of objects both go
    through staging, and blocks are verified on their way. Two tiers of files cannot be moved
    between yet: their device is one.
    """
    fast, slow = tiers[0] if tiers else None, tiers[-1] if tiers else None
    in_memory = fast is not None and fast.medium is Medium.MEMORY
    wrong = f"a move without a target, or with one too many: {kind.name} in {[tier.name for tier in tiers]}"
    relays = len(tiers) == 2 and not in_memory
    assert len(tiers) <= 2 and (not relays or (kind in _RELAYS and tiers[1].medium is Medium.OBJECTS)), wrong
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
            assert fast is not None, wrong
            if len(tiers) == 1:
                return None
            legs = (Leg.READ, Leg.CHECK, Leg.WRITE) if relays else (Leg.READ, Leg.CHECK)
        case JobKind.DEMOTE:
            assert slow is not None and slow is not KEPT_TIERS[0], wrong
            if len(tiers) == 1:
                return None
            legs = (Leg.READ, Leg.CHECK, Leg.WRITE) if relays else (Leg.WRITE,)
        case _:
            raise AssertionError(wrong)
    source, target = (fast, slow) if relays and kind is JobKind.DEMOTE else (slow, fast if relays else slow)
    return Route(kind, legs, memory, source if Leg.READ in legs else None, target if Leg.WRITE in legs else None)


def route_of(kind: JobKind, move: Move) -> Route | None:
    """Return the route of a move through host memory; None: it has no source."""
    return route_between(kind, *sorted(move.slots))


@dataclass(slots=True, eq=False)
class Work:
    """A job under way.

    ``left``: moves that have not ended. ``late``: those of ``failed`` whose slots the device has
    still. ``after``: the model's work to wait for. ``deadline_s``: on
    the mover's clock; what has not started then fails. ``urgent``: before all that is not;
    ``fenced``: what of it cannot start at once fails. ``copied``: it was reported that nothing of
    it reads the GPU any more.
    """

    job: Job
    after: Event | None
    deadline_s: float
    left: int = 0
    failed: dict[int, Reason] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    urgent: bool = False
    fenced: bool = False
    copied: bool = False

    def close_moves(self, count: int) -> bool:
        """Take out moves that have ended; return whether they were the last."""
        self.left -= count
        assert self.left >= 0
        return count > 0 and self.left == 0


@dataclass(slots=True, eq=False)
class Batch:
    """Moves of one job that go together, by one route and, of one group, to or from one drive.

    ``positions``: moves that have not failed, in the order of their slots. ``slots``: where in
    ``memory`` each of them lies; none before staging is lent. ``staging``: slots to give back.
    ``drive``: see ``OpenFile``; NO_DRIVE where the route has none, or the segments are not open. On
    a direct route ``memory`` is GPU staging.

    ``begun``: number of legs begun. Of the one under way, ``began_s``: since when; ``pending``:
    whether it is a copy, or on another thread, and goes on; ``transfers``: the positions of the
    moves in each transfer, where it is at the device. ``late``: its moves have failed, and the
    device still owns its slots.
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
    pending: bool = False
    transfers: list[list[int]] = field(default_factory=list)
    late: bool = False

    @property
    def leg(self) -> Leg:
        """The leg under way, or the last one."""
        return self.route.legs[self.begun - 1]

    @property
    def far(self) -> Tier:
        """The tier that the leg under way, READ or WRITE, reads or writes."""
        found = self.route.source if self.leg is Leg.READ else self.route.target
        assert found is not None, self.leg
        return found

    @property
    def is_of_objects(self) -> bool:
        """Whether what it has read were objects."""
        return self.route.source is not None and self.route.source.medium is Medium.OBJECTS

    @property
    def slot_bytes(self) -> int:
        """Bytes of one of its slots."""
        return self.memory.slot_sizes[self.size_class]

    @property
    def urgency(self) -> tuple[int, int]:
        """Its place in the queue: urgent stores, loads as their requests arrived, the others."""
        route, work = self.route, self.work
        rank = 0 if work.urgent else 1 if route.scatters else 2 if route.gathers else 4 if route.writes else 3
        return rank, work.job.arrival

    @property
    def sums_on_host(self) -> bool:
        """Whether the leg under way is one on headers and checksums that a processor runs."""
        return self.leg is Leg.CHECK or (self.leg is Leg.SEAL and not self.route.direct)

    def drop(self, gone: Container[int]) -> None:
        """Take out moves, at these positions."""
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
