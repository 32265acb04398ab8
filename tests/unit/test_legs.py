# SPDX-License-Identifier: Apache-2.0
"""How the moves of a job are ordered before they are taken in parts."""

from __future__ import annotations

from kvdisk.blocks import JobId, Slot, Tier, make_block_key
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.messages import Job, JobKind, Move
from kvdisk.worker.routes import NO_DRIVE, OpenFile, Route, Work, lots_of

GEOMETRY = Geometry((GroupGeometry(0, 16, 4096),), 1, 16)


def load(slots: list[Slot]) -> Work:
    moves = tuple(
        Move(make_block_key(at.to_bytes(4, "big"), 0), 1, block=at + 1, slots={Tier.NVME: slot})
        for at, slot in enumerate(slots)
    )
    return Work(Job(JobId(1), JobKind.LOAD, moves, request_id="one"), None, 0.0)


def files(**drives: int) -> dict[int, OpenFile]:
    """Open segments, by ``s<number>``, on these drives."""
    return {int(name[1:]): OpenFile(100, GEOMETRY.slot_sizes[0], 8, drive) for name, drive in drives.items()}


def test_one_drive_is_read_in_the_order_of_its_slots():
    slots = [Slot(5, 0), Slot(3, 2), Slot(3, 0), Slot(3, 1)]
    (lot,) = lots_of(load(slots), GEOMETRY, [2], files(s3=1, s5=1), 0)
    assert (lot.route, lot.drive) == (Route.LOAD_STAGED, 1)
    assert lot.positions == [2, 3, 1, 0]


def test_drives_are_read_in_turn_a_part_at_a_time():
    slots = [Slot(segment, index) for segment in (7, 4) for index in range(5)] + [Slot(9, 0), Slot(8, 1)]
    lots = lots_of(load(slots), GEOMETRY, [2], files(s4=0, s7=1, s8=1), 0)
    assert [(lot.drive, [slots[at] for at in lot.positions]) for lot in lots] == [
        (0, [Slot(4, 0), Slot(4, 1)]),
        (1, [Slot(7, 0), Slot(7, 1)]),
        (NO_DRIVE, [Slot(9, 0)]),
        (0, [Slot(4, 2), Slot(4, 3)]),
        (1, [Slot(7, 2), Slot(7, 3)]),
        (0, [Slot(4, 4)]),
        (1, [Slot(7, 4), Slot(8, 1)]),
    ]
