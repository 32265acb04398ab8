# SPDX-License-Identifier: Apache-2.0
"""Into which parts a job is cut, and in which order."""

from __future__ import annotations

import pytest
from ranks import Rank, segment_of

from kvdisk.blocks import JobId, Slot, Tier, make_block_key
from kvdisk.messages import Job, JobKind, Move
from kvdisk.worker.routes import NO_DRIVE, OpenFile, PartCutter, Route, Work, route_of


def cut(slots: list[Slot], **drives: int) -> list[tuple[Route, int, list[Slot]]]:
    """Route, drive and slots of a load's parts, of two slots each; ``drives``: of the open segments
    ``s<number>``."""
    moves = tuple(Move(make_block_key(bytes([at]), 0), 1, at, {Tier.NVME: slot}) for at, slot in enumerate(slots))
    files = {int(name[1:]): OpenFile(100, segment_of(0).slot_bytes, 8, drive) for name, drive in drives.items()}
    rank = Rank()
    work = Work(Job(JobId(1), JobKind.LOAD, moves, request_id="one"), None, 0.0)
    parts = PartCutter(rank.mover._runner._resources, 2 * segment_of(0).slot_bytes).cut(work, files)
    rank.mover.close()
    assert work.left == len(slots)
    return [(part.route, part.drive, [slots[at] for at in part.positions]) for part in parts]


def test_one_drive_is_read_in_the_order_of_its_slots():
    found = cut([Slot(5, 0), Slot(3, 2), Slot(3, 0), Slot(3, 1)], s3=1, s5=1)
    assert found == [
        (Route.LOAD_STAGED, 1, [Slot(3, 0), Slot(3, 1)]),
        (Route.LOAD_STAGED, 1, [Slot(3, 2), Slot(5, 0)]),
    ]


def test_drives_are_read_in_turn_a_part_at_a_time():
    slots = [Slot(segment, index) for segment in (7, 4) for index in range(5)] + [Slot(9, 0), Slot(8, 1)]
    assert [(drive, taken) for _, drive, taken in cut(slots, s4=0, s7=1, s8=1)] == [
        (1, [Slot(7, 0), Slot(7, 1)]),
        (0, [Slot(4, 0), Slot(4, 1)]),
        (NO_DRIVE, [Slot(9, 0)]),
        (1, [Slot(7, 2), Slot(7, 3)]),
        (0, [Slot(4, 2), Slot(4, 3)]),
        (1, [Slot(7, 4), Slot(8, 1)]),
        (0, [Slot(4, 4)]),
    ]


@pytest.mark.parametrize(
    ("kind", "tiers"),
    [
        (JobKind.STORE, ()),
        (JobKind.STORE, (Tier.CPU, Tier.NVME)),
        (JobKind.PROMOTE, (Tier.NVME,)),
        (JobKind.DEMOTE, (Tier.CPU,)),
    ],
)
def test_a_move_without_one_target_is_an_error_of_ours(kind, tiers):
    with pytest.raises(AssertionError, match="a target"):
        route_of(kind, Move(make_block_key(b"one", 0), 1, 1, dict.fromkeys(tiers, Slot(3, 0))))
