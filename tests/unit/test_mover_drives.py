# SPDX-License-Identifier: Apache-2.0
"""A drive that hangs holds up what is on it, and nothing of the others."""

from __future__ import annotations

import pytest
from ranks import GPU_BLOCKS, Rank, keeping, key_of, segment_of

from kvdisk.blocks import Slot, Tier
from kvdisk.messages import JobKind, Move, Reason
from kvdisk.worker.runner import MOST_LATE

DEADLINE_S = 10.0
"""Of ``Rank``."""
GOOD, BAD = 0, 1
SEGMENTS = {GOOD: 0, BAD: 7}
"""By drive; all for blocks of group 0."""


@pytest.fixture(params=[False, True], ids=["through host memory", "direct"])
def rank(request):
    made = Rank(direct=request.param)
    spec = segment_of(0)._replace(segment=SEGMENTS[BAD], drive=BAD)
    made.do(JobKind.OPEN_SEGMENT, segment=spec)
    yield made
    made.mover.close()


def stored(rank: Rank, drives: list[int]) -> list[Move]:
    """Store a block on each of these drives, and erase them; return the moves that load them."""
    moves = [Move(key_of(at), 7, at, {Tier.NVME: Slot(SEGMENTS[drive], at)}) for at, drive in enumerate(drives)]
    assert rank.do(JobKind.STORE, moves) == {}
    rank.erase()
    return moves


def hang_from(rank: Rank, offset: int) -> None:
    """Let every transfer after so many more hang."""
    first = rank.device._transfers + 1 + offset
    rank.device.plan.hang = set(range(first, first + 1000))


def pass_deadline(rank: Rank) -> None:
    rank.run()
    rank.now_s += DEADLINE_S + 1.0
    rank.run()


@pytest.mark.parametrize("kept", [False, True], ids=["through staging", "into CPU slots"])
def test_only_what_is_on_a_drive_that_hangs_is_late(rank, kept):
    moves = stored(rank, [GOOD, BAD])
    if kept:
        moves = [keeping(each, rank.cpu(0, at)) for at, each in enumerate(moves)]
    hang_from(rank, 1)
    load = rank.submit(JobKind.LOAD, moves)
    pass_deadline(rank)
    assert rank.results[load].failed == {1: Reason.DEADLINE}
    assert rank.results[load].late == {1}
    assert not rank.is_erased(0, 0)


def test_the_others_go_on_when_one_takes_nothing_more(rank):
    moves = stored(rank, [BAD] * (MOST_LATE + 1) + [GOOD] * 4)
    kept = [keeping(each, rank.cpu(0, at)) for at, each in enumerate(moves)]
    hang_from(rank, 0)
    for at in range(MOST_LATE):
        rank.submit(JobKind.LOAD, [kept[at]])
        pass_deadline(rank)
    assert rank.device.hanging == MOST_LATE
    rank.device.plan.hang = set()
    assert rank.do(JobKind.LOAD, kept[MOST_LATE:]) == {0: Reason.DEADLINE}
    assert not any(rank.is_erased(0, at) for at in range(MOST_LATE + 1, len(moves)))
    assert rank.do(JobKind.STORE, [Move(key_of(99), 7, 0, {Tier.NVME: Slot(SEGMENTS[GOOD], GPU_BLOCKS - 1)})]) == {}
    assert rank.device.hanging == MOST_LATE
