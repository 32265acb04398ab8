# SPDX-License-Identifier: Apache-2.0
"""Batches that a drive has begun and does not end: who hears of it, and what they may still
touch."""

from __future__ import annotations

import logging

from ranks import GPU_BLOCKS, Rank, keeping, move, segment_of

from kvdisk.messages import JobKind, Move, Reason
from kvdisk.worker.runner import MOST_LATE, MOST_WRITES

DEADLINE_S = 10.0
"""Of ``Rank``."""


def hang_next(rank: Rank) -> None:
    """Let the next transfer hang."""
    rank.device.plan.hang = {rank.device._transfers + 1}


def pass_deadline(rank: Rank) -> None:
    rank.run()
    assert rank.device.hanging
    rank.now_s += DEADLINE_S + 1.0
    rank.run()


def test_a_late_read_is_reported_and_touches_nothing_when_it_ends(rank, caplog):
    moves = rank.stored(8)
    hang_next(rank)
    load = rank.submit(JobKind.LOAD, moves)
    with caplog.at_level(logging.WARNING, "kvdisk.worker"):
        pass_deadline(rank)
    result = rank.results[load]
    late = set(range(2))  # a quarter of eight staging slots
    assert result.failed == dict.fromkeys(late, Reason.DEADLINE)
    assert (result.late, result.late_ranks) == (late, 1)
    assert all(rank.is_erased(0, at) == (at in late) for at in range(8))
    assert rank.released == {}
    assert rank.stats["late_moves"] == rank.stats["deadline_misses"] == 2
    assert len(caplog.records) == 1

    seen = len(rank.device.submitted)
    rank.device.let_go()
    rank.run()
    assert rank.released == {load: 1}
    assert all(rank.is_erased(0, at) for at in late)
    assert len(rank.device.submitted) == seen
    assert rank.do(JobKind.LOAD, moves) == {}


def test_late_batches_are_bounded_and_then_nothing_starts(rank):
    moves = rank.stored(GPU_BLOCKS)
    kept = [keeping(each, rank.cpu(0, at)) for at, each in enumerate(moves)]
    first = rank.device._transfers + 1
    rank.device.plan.hang = set(range(first, first + 1000))
    loads = []
    while rank.device.hanging < MOST_LATE:
        loads.append(rank.submit(JobKind.LOAD, [kept[len(loads)]]))
        pass_deadline(rank)
    assert rank.device.hanging == MOST_LATE
    refused = rank.submit(JobKind.LOAD, [kept[40], kept[41]])
    store = rank.submit(JobKind.STORE, [move(42, 0, 42, nvme=42)])
    from_cpu = rank.submit(JobKind.STORE, [move(9, 1, 9, rank.cpu(1, 9))])
    results = rank.run()
    assert results[refused].failed == dict.fromkeys(range(2), Reason.DEADLINE)
    assert results[store].failed == {0: Reason.DEADLINE}
    assert results[refused].late == results[store].late == set()
    assert results[from_cpu].failed == {}
    assert rank.device.hanging == MOST_LATE
    rank.device.plan.hang = set()
    rank.device.let_go()
    rank.run()
    assert rank.released == dict.fromkeys(loads, 1)
    assert rank.do(JobKind.LOAD, kept) == {}


def test_loads_go_on_beside_writes_that_hang(rank):
    """However many and for however long, as on a frozen file system; through staging too, of which
    half is left."""
    moves = rank.stored(GPU_BLOCKS // 2)
    kept = [keeping(each, rank.cpu(0, at)) for at, each in enumerate(moves)]
    first = rank.device._transfers + 1
    rank.device.plan.hang = set(range(first, first + 1000))
    for _ in range(MOST_LATE // MOST_WRITES):
        stores = [rank.submit(JobKind.STORE, [move(b, 0, b, nvme=b)]) for b in range(GPU_BLOCKS // 2, GPU_BLOCKS)]
        pass_deadline(rank)
        assert all(rank.results[store].failed == {0: Reason.DEADLINE} for store in stores)
    hanging = rank.device.hanging
    assert hanging == MOST_WRITES
    rank.device.plan.hang = set()
    rank.erase()
    assert rank.do(JobKind.LOAD, kept) == {}
    rank.erase()
    assert rank.do(JobKind.LOAD, moves) == {}
    assert rank.device.hanging == hanging
    rank.device.let_go()
    rank.run()
    assert rank.do(JobKind.STORE, [move(1, 0, 1, nvme=1)]) == {}


# -- several drives ------------------------------------------------------------------------------

GOOD, BAD = 0, 1
SEGMENTS = {GOOD: 0, BAD: 7}
"""By drive; all for blocks of group 0."""


def on_drives(rank: Rank, drives: list[int]) -> list[Move]:
    """Store a block on each of these drives, and erase them; return the moves that load them."""
    rank.do(JobKind.OPEN_SEGMENT, segment=segment_of(0)._replace(segment=SEGMENTS[BAD], drive=BAD))
    return rank.stored(len(drives), segments=tuple(SEGMENTS[drive] for drive in drives))


def hang_from(rank: Rank, offset: int) -> None:
    """Let every transfer after so many more hang."""
    first = rank.device._transfers + 1 + offset
    rank.device.plan.hang = set(range(first, first + 1000))


def test_the_others_go_on_when_one_takes_nothing_more(rank):
    moves = on_drives(rank, [BAD] * (MOST_LATE + 1) + [GOOD] * 4)
    kept = [keeping(each, rank.cpu(0, at)) for at, each in enumerate(moves)]
    hang_from(rank, 0)
    for at in range(MOST_LATE):
        rank.submit(JobKind.LOAD, [kept[at]])
        pass_deadline(rank)
    assert rank.device.hanging == MOST_LATE
    rank.device.plan.hang = set()
    assert rank.do(JobKind.LOAD, kept[MOST_LATE:]) == {0: Reason.DEADLINE}
    assert not any(rank.is_erased(0, at) for at in range(MOST_LATE + 1, len(moves)))
    assert rank.do(JobKind.STORE, [move(99, 0, 0, nvme=GPU_BLOCKS - 1)]) == {}
    assert rank.device.hanging == MOST_LATE
