# SPDX-License-Identifier: Apache-2.0
"""How the moves of a job are ordered before they are taken in parts."""

from __future__ import annotations

from kvdisk.blocks import JobId, Slot, make_block_key
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.messages import Job, JobKind, Move
from kvdisk.worker.legs import Route, Work, lots_of

GEOMETRY = Geometry((GroupGeometry(0, 16, 4096),), 1, 16)


def load(slots: list[Slot]) -> Work:
    moves = tuple(
        Move(make_block_key(at.to_bytes(4, "big"), 0), 1, block=at + 1, nvme=slot) for at, slot in enumerate(slots)
    )
    return Work(Job(JobId(1), JobKind.LOAD, moves, request_id="one"), None, 0.0)


def test_one_segment_is_read_in_the_order_of_its_slots():
    (lot,) = lots_of(load([Slot(3, 2), Slot(3, 0), Slot(3, 1)]), GEOMETRY, [2], 0)
    assert lot.route is Route.LOAD_STAGED
    assert lot.positions == [1, 2, 0]


def test_segments_are_read_in_turn_a_part_at_a_time():
    slots = [Slot(segment, index) for segment in (7, 4) for index in range(5)] + [Slot(9, 0)]
    (lot,) = lots_of(load(slots), GEOMETRY, [2], 0)
    assert [slots[at] for at in lot.positions] == [
        *(Slot(4, 0), Slot(4, 1), Slot(7, 0), Slot(7, 1), Slot(9, 0)),
        *(Slot(4, 2), Slot(4, 3), Slot(7, 2), Slot(7, 3)),
        *(Slot(4, 4), Slot(7, 4)),
    ]
