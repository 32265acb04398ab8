# SPDX-License-Identifier: Apache-2.0
"""What a fake worker's slots hold, the legs of its routes, and legs that outlive their job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvdisk.blocks import BlockKey, Slot, Tier
from kvdisk.messages import Job, JobKind, Move
from kvdisk.worker.routes import Leg, route_of

EMPTY = ""
TORN = "torn"
"""What a write that failed leaves."""
ROTTEN = "rotten"
"""What a drive that lost a block leaves."""


DEVICE_LEGS = frozenset({Leg.WRITE, Leg.READ})


class Content(NamedTuple):
    """A slot: its header, with the payload that the header's checksum was made from, and its
    payload."""

    epoch: int = -1
    key: BlockKey | None = None
    generation: int = -1
    summed: str = EMPTY
    payload: str = EMPTY

    def holds(self, epoch: int, key: BlockKey, generation: int, value: str) -> bool:
        """Whether this is the record asked for, as far as the drive has kept it."""
        return self[:4] == (epoch, key, generation, value) and self.payload in {value, ROTTEN}


def legs_of(kind: JobKind, move: Move) -> tuple[Leg, ...]:
    """Return a move's route; empty where it has no source."""
    route = route_of(kind, move)
    return () if route is None else route.legs


class LateLeg(NamedTuple):
    """A leg that the device has begun, and whose move (``at`` in its job) was given up.

    ``staging``: what it writes, where that is in no slot of a tier.
    """

    job: Job
    move: Move
    at: int
    leg: Leg
    staging: Content

    @property
    def reads(self) -> tuple[Tier, Slot | None]:
        """The slot that it reads; None: one of staging."""
        tier = Tier.NVME if self.leg is Leg.READ else Tier.CPU
        return tier, self.move.slots.get(tier)

    @property
    def writes(self) -> tuple[Tier, Slot | None]:
        """The slot that it writes, likewise."""
        tier = Tier.CPU if self.leg is Leg.READ else Tier.NVME
        return tier, self.move.slots.get(tier)


def check_late(late_legs: Sequence[LateLeg], job: Job) -> None:
    """Assert that a new job has nothing to do with a slot that a late leg may still touch."""
    written = {late.writes for late in late_legs}
    touched = written | {late.reads for late in late_legs}
    for move in job.moves:
        for place in move.slots.items():
            if place[1] is None:
                continue
            assert place not in written, f"{place} is used, and a late transfer may still write it"
            target = place[0] is (Tier.NVME if job.kind is JobKind.DEMOTE else Tier.CPU)
            if job.kind is JobKind.STORE or (target and (job.kind is not JobKind.LOAD or Tier.NVME in move.slots)):
                assert place not in touched, f"{place} is given away, and a late transfer still reads it"
