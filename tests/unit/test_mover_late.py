# SPDX-License-Identifier: Apache-2.0
"""Batches that a drive has begun and does not end: who hears of it, and what they may still touch."""

from __future__ import annotations

import logging

import pytest
from ranks import GPU_BLOCKS, GROUPS, NamedFiles, Rank, keeping, move, segment_of

from kvdisk.messages import JobKind, Plan, Reason
from kvdisk.worker.runner import MOST_LATE, MOST_WRITES

DEADLINE_S = 10.0
"""Of ``Rank``."""


@pytest.fixture(params=[False, True], ids=["through host memory", "direct"])
def rank(request):
    made = Rank(direct=request.param)
    yield made
    made.mover.close()


def stored(rank: Rank, count: int, group: int = 0):
    """Store blocks 0.. to the same numbers on the drive, and erase them; return the moves that load them."""
    moves = [move(b, group, b, nvme=b) for b in range(count)]
    assert rank.do(JobKind.STORE, moves) == {}
    rank.erase()
    return moves


def hang_next(rank: Rank) -> None:
    """Let the next transfer hang."""
    rank.device.plan.hang = {rank.device._transfers + 1}


def pass_deadline(rank: Rank) -> None:
    rank.run()
    assert rank.device.hanging
    rank.now_s += DEADLINE_S + 1.0
    rank.run()


def test_a_late_read_is_reported_and_touches_nothing_when_it_ends(rank, caplog):
    moves = stored(rank, 8)
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


def test_staging_is_reused_only_after_the_device_has_ended(rank):
    moves = stored(rank, GPU_BLOCKS)
    hang_next(rank)
    rank.submit(JobKind.LOAD, moves[:2])
    pass_deadline(rank)
    assert fresh_staging(rank, lambda: rank.do(JobKind.LOAD, moves[2:])) == {2, 3}
    rank.device.let_go()
    rank.run()
    assert fresh_staging(rank, lambda: rank.do(JobKind.LOAD, moves)) == {0, 1}


def fresh_staging(rank: Rank, act) -> set[int]:
    """Which of the eight slots are written by what ``act`` does; it does not fail."""
    slot_bytes = GROUPS[0].slot_bytes
    memory = rank.staging_view(rank.classes[0], 8)
    memory[:] = b"\x11" * len(memory)
    assert act() == {}
    return {at for at in range(8) if memory[at * slot_bytes : at * slot_bytes + 8] != b"\x11" * 8}


def test_a_late_read_lands_in_its_cpu_slot_and_goes_no_further(rank):
    (wanted,) = stored(rank, 1)
    slot = rank.arena.view(rank.classes[0], 3)
    hang_next(rank)
    load = rank.submit(JobKind.LOAD, [keeping(wanted, rank.cpu(0, 3))])
    pass_deadline(rank)
    assert rank.results[load].late == {0}
    assert set(slot) == {0}
    rank.device.let_go()
    rank.run()
    assert set(slot) != {0}
    assert rank.is_erased(0, 0)
    assert rank.released == {load: 1}


@pytest.mark.parametrize("kind", [JobKind.STORE, JobKind.DEMOTE])
def test_a_late_write_ends_its_job_and_writes_when_it_ends(rank, kind):
    """The store's gather has ended: its GPU block is not read any more."""
    payload = rank.payload(0, 1)
    moves = [move(1, 0, 1, nvme=1)]
    if kind is JobKind.DEMOTE:
        rank.do(JobKind.STORE, [move(1, 0, 1, rank.cpu(0, 0))])
        moves = [move(1, cpu=rank.cpu(0, 0), nvme=1)]
    hang_next(rank)
    job = rank.submit(kind, moves)
    pass_deadline(rank)
    assert rank.results[job].failed == {0: Reason.DEADLINE}
    assert rank.results[job].late == {0}
    rank.erase()
    rank.device.let_go()
    rank.run()
    assert rank.released == {job: 1}
    assert rank.do(JobKind.LOAD, [move(1, 0, 1, nvme=1)]) == {}
    assert rank.payload(0, 1) == payload


def test_other_transfers_go_on_beside_late_ones(rank):
    """Late batches take none of the places of reads and writes; only their own staging."""
    count = GPU_BLOCKS
    moves = stored(rank, count)
    for _ in range(3):
        hang_next(rank)
        rank.submit(JobKind.STORE, [move(1, 1, 1, nvme=1)])
        pass_deadline(rank)
    assert rank.device.hanging == 3
    assert rank.do(JobKind.LOAD, moves) == {}
    kept = [move(b, 1, b, rank.cpu(1, b)) for b in range(count)]
    assert rank.do(JobKind.STORE, kept) == {}
    assert rank.do(JobKind.STORE, [move(2, 1, 2, nvme=2)]) == {}


def test_late_batches_are_bounded_and_then_nothing_starts(rank):
    moves = stored(rank, GPU_BLOCKS)
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
    """However many and for however long, as on a frozen file system; through staging too, of which half is left."""
    moves = stored(rank, GPU_BLOCKS // 2)
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


def test_a_store_whose_gather_ends_when_the_drives_are_stuck_starts_no_write(rank):
    moves = stored(rank, GPU_BLOCKS)
    first = rank.device._transfers + 1
    rank.device.plan.hang = set(range(first, first + 1000))
    copier = rank.mover._copier
    copier.done = lambda _: False
    store = rank.submit(JobKind.STORE, [move(42, 0, 42, nvme=42)])
    rank.run()
    for at in range(MOST_LATE):
        rank.submit(JobKind.LOAD, [keeping(moves[at], rank.cpu(0, at))])
        pass_deadline(rank)
    del copier.done
    assert rank.run()[store].failed == {0: Reason.DEADLINE}
    assert rank.results[store].late == set()
    assert rank.device.hanging == MOST_LATE


def test_what_ends_before_the_report_is_not_late(rank):
    """The job's other part is being scattered while the late one ends."""
    moves = stored(rank, 4)
    hang_next(rank)
    copier = rank.mover._copier
    copier.done = lambda _: False
    load = rank.submit(JobKind.LOAD, moves)
    pass_deadline(rank)
    assert load not in rank.results
    rank.device.let_go()
    rank.run()
    del copier.done
    result = rank.run()[load]
    assert result.failed == dict.fromkeys(range(2), Reason.DEADLINE)
    assert (result.late, result.late_ranks) == (set(), 0)
    assert rank.released == {}


def test_two_late_parts_are_released_once_when_the_last_has_ended(rank):
    moves = stored(rank, 4)
    first = rank.device._transfers + 1
    rank.device.plan.hang = {first, first + 1}
    load = rank.submit(JobKind.LOAD, moves)
    pass_deadline(rank)
    assert rank.results[load].late == set(range(4))
    last = rank.device._hanging.pop()
    rank.device.let_go()
    rank.run()
    assert rank.released == {}
    rank.device._hanging.append(last)
    rank.device.let_go()
    rank.run()
    assert rank.released == {load: 1}


@pytest.mark.parametrize("polled", [False, True])
def test_void_loads_become_late_too(rank, polled):
    moves = stored(rank, 2)
    hang_next(rank)
    load = rank.submit(JobKind.LOAD, moves)
    rank.run()
    if polled:
        rank.mover.submit(Plan(void=(load,)))
        pass_deadline(rank)
    else:
        rank.now_s += DEADLINE_S + 1.0
        while rank.mover.turn():
            pass
        rank.mover.submit(Plan(void=(load,)))
    result = rank.poll()[load]
    assert result.failed == dict.fromkeys(range(2), Reason.CANCELLED)
    assert (result.late, result.late_ranks) == ({0, 1}, 1)
    rank.device.let_go()
    rank.run()
    assert rank.released == {load: 1}


def test_a_second_try_counts_from_the_first(rank):
    moves = stored(rank, 2)
    first = rank.device._transfers + 1
    rank.device.plan.fail = {first: 5}
    rank.device.plan.hang = {first + 1, first + 2}
    rank.device.plan.hold = True
    load = rank.submit(JobKind.LOAD, moves)
    rank.run()
    rank.now_s += DEADLINE_S - 1.0
    rank.device.release()
    rank.run()
    assert rank.device.hanging == 1
    rank.now_s += 2.0
    assert rank.run()[load].late == {0, 1}


def test_a_segment_is_not_dropped_before_its_late_batches_have_ended(rank):
    moves = stored(rank, 1)
    hang_next(rank)
    load = rank.submit(JobKind.LOAD, moves)
    pass_deadline(rank)
    drop = rank.submit(JobKind.DROP_SEGMENT, segment=segment_of(0))
    behind = rank.submit(JobKind.LOAD, [move(1, 0, 1, nvme=1)])
    beside = rank.submit(JobKind.STORE, [move(9, 1, 9, nvme=9)])
    results = rank.run()
    assert results[beside].failed == {}
    assert drop not in results
    assert rank.files.calls[-1] != "drop 0"
    rank.now_s += DEADLINE_S + 1.0
    assert rank.run()[behind].failed == {0: Reason.DEADLINE}
    rank.device.let_go()
    assert rank.run()[drop].failed == {}
    assert rank.files.calls[-1] == "drop 0"
    assert rank.released == {load: 1}


def test_close_waits_for_late_batches_and_answers_for_them():
    rank = Rank(files=NamedFiles())
    moves = stored(rank, 1)
    hang_next(rank)
    load = rank.submit(JobKind.LOAD, moves)
    pass_deadline(rank)
    rank.mover.close()
    rank.poll()
    assert rank.device.hanging == 0
    assert rank.released == {load: 1}
    assert rank.files.closed
