# SPDX-License-Identifier: Apache-2.0
"""Batches that a drive has begun and does not end: how many there may be, and what goes on beside
them. That nothing touches what they may still touch is shown in ``tests/simulation``."""

from __future__ import annotations

import pytest
from ranks import GPU_BLOCKS, Rank, keeping, move, segment_of

from kvdisk.messages import JobKind, Reason
from kvdisk.worker.batch_queue import MOST_WRITES
from kvdisk.worker.device_io import MOST_LATE, MOST_LATE_WRITES

DEADLINE_S = 10.0
"""Of ``Rank``."""
GOOD, BAD = 0, 1
SEGMENTS = {GOOD: 0, BAD: 7}
"""By drive; all for blocks of group 0."""


@pytest.fixture
def kept(rank):
    """Loads into CPU slots: as many from the bad drive as stop it and two more, then four from the
    good one."""
    rank.do(JobKind.OPEN_SEGMENT, segment=segment_of(0)._replace(segment=SEGMENTS[BAD], drive=BAD))
    drives = [BAD] * (MOST_LATE + 2) + [GOOD] * 4
    moves = rank.stored(len(drives), segments=tuple(SEGMENTS[drive] for drive in drives))
    return [keeping(each, rank.cpu(0, at)) for at, each in enumerate(moves)]


def hang_all(rank: Rank) -> None:
    first = rank.device._transfers + 1
    rank.device.plan.hang = set(range(first, first + 1000))


def pass_deadline(rank: Rank) -> None:
    rank.run()
    assert rank.device.hanging
    rank.now_s += DEADLINE_S + 1.0
    rank.run()


def test_late_reads_are_bounded_and_then_nothing_starts_on_their_drive(rank, kept):
    hang_all(rank)
    loads = []
    while rank.device.hanging < MOST_LATE:
        loads.append(rank.submit(JobKind.LOAD, [kept[len(loads)]]))
        pass_deadline(rank)
    assert all(rank.results[load].failed == {0: Reason.DEADLINE} for load in loads)
    assert all(rank.results[load].late == {0} for load in loads)
    assert rank.stats["late_moves"] == rank.stats["deadline_misses"] == MOST_LATE
    rank.device.plan.hang = set()
    refused = rank.submit(JobKind.LOAD, kept[MOST_LATE:])
    moves = [move(50 + drive, 0, drive, nvme=GPU_BLOCKS - 1, segment=SEGMENTS[drive]) for drive in (BAD, GOOD)]
    store = rank.submit(JobKind.STORE, moves)
    from_cpu = rank.submit(JobKind.STORE, [move(9, 1, 9, rank.cpu(1, 9))])
    results = rank.run()
    assert results[refused].failed == dict.fromkeys(range(2), Reason.DEADLINE)
    assert results[store].failed == {0: Reason.DEADLINE}
    assert results[refused].late == results[store].late == set()
    assert results[from_cpu].failed == {}
    assert rank.device.hanging == MOST_LATE and rank.released == {}
    rank.device.let_go()
    rank.run()
    assert rank.released == dict.fromkeys(loads, 1)
    assert rank.do(JobKind.LOAD, kept) == {}


def test_loads_go_on_beside_writes_that_hang(rank):
    """However many and for however long, as on a frozen file system; through staging too, of which
    half is left, also before their deadline."""
    moves = rank.stored(GPU_BLOCKS // 2)
    kept = [keeping(each, rank.cpu(0, at)) for at, each in enumerate(moves)]
    hang_all(rank)
    for _ in range(3):
        stores = [rank.submit(JobKind.STORE, [move(b, 0, b, nvme=b)]) for b in range(GPU_BLOCKS // 2, GPU_BLOCKS)]
        rank.run()
        assert rank.device.hanging == MOST_LATE_WRITES < MOST_WRITES
        pass_deadline(rank)
        assert all(rank.results[store].failed == {0: Reason.DEADLINE} for store in stores)
    rank.device.plan.hang = set()
    for loads in (kept, moves):
        rank.erase()
        assert rank.do(JobKind.LOAD, loads) == {}
    rank.do(JobKind.OPEN_SEGMENT, segment=segment_of(0)._replace(segment=SEGMENTS[BAD], drive=BAD))
    assert rank.do(JobKind.STORE, [move(1, 0, 1, nvme=1, segment=SEGMENTS[BAD])]) == {}, "the other drive takes writes"
    assert rank.device.hanging == MOST_LATE_WRITES
    rank.device.let_go()
    rank.run()
    assert rank.do(JobKind.STORE, [move(1, 0, 1, nvme=1)]) == {}
