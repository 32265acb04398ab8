# SPDX-License-Identifier: Apache-2.0
"""Parts, routes, order and reports of the mover."""

from __future__ import annotations

from ranks import GPU_BLOCKS, GROUPS, Rank, move, segment_of

from kvdisk.blocks import JobId, Slot
from kvdisk.messages import Job, JobKind, Plan
from kvdisk.worker import batch_queue
from kvdisk.worker.batch_queue import BatchQueue
from kvdisk.worker.cutter import BatchCutter
from kvdisk.worker.routes import NO_DRIVE, OpenFile, Work

BLOCKS = [5, 1, 2, 3, 40, 17, 16, 47]
"""Neighbours and strangers, in no order."""


def test_without_a_cpu_slot_through_staging_to_the_drive_and_back(rank):
    groups = [at % 2 for at in range(len(BLOCKS))]
    before = [rank.payload(group, block) for group, block in zip(groups, BLOCKS, strict=True)]
    moves = [move(b, g, b, nvme=20 + at) for at, (b, g) in enumerate(zip(BLOCKS, groups, strict=True))]
    assert rank.do(JobKind.STORE, moves) == {}
    rank.erase()
    assert rank.do(JobKind.LOAD, moves) == {}
    assert [rank.payload(group, block) for group, block in zip(groups, BLOCKS, strict=True)] == before
    on_drive = sum(GROUPS[group].slot_bytes for group in groups)
    memory = "cpu" if rank.direct is None else "gpu"
    assert rank.stats.sum_of(f"transfer_bytes.{memory}_to_nvme") == on_drive
    assert rank.stats.sum_of(f"transfer_bytes.nvme_to_{memory}") == on_drive


def test_neighbouring_slots_are_one_transfer(rank):
    """On the drive; in memory they may lie anywhere."""
    before = {at: rank.payload(0, at) for at in range(4)}
    in_memory, on_drive = (10, 13, 11, 20), (4, 5, 6, 9)
    rank.do(JobKind.STORE, [move(at, 0, at, rank.cpu(0, in_memory[at])) for at in range(4)])
    # Named in another order than they lie in; the fourth is no neighbour.
    moves = [move(at, 0, cpu=rank.cpu(0, in_memory[at]), nvme=on_drive[at]) for at in (2, 0, 3, 1)]
    rank.do(JobKind.DEMOTE, moves)
    (_, batch), *others = rank.device.submitted
    assert not others
    assert [length // GROUPS[0].slot_bytes for _, _, length in batch] == [3, 1]
    rank.erase()
    assert rank.do(JobKind.LOAD, [move(at, 0, at, nvme=on_drive[at]) for at in range(4)]) == {}
    assert {at: rank.payload(0, at) for at in range(4)} == before


def test_a_turn_looks_at_the_heads_of_the_queues(rank, monkeypatch):
    rank.do(JobKind.STORE, [move(b, 0, b, nvme=b) for b in range(GPU_BLOCKS)])
    rank.device.plan.hold = True
    for _ in range(12):
        rank.submit(JobKind.LOAD, [move(b, 0, b, nvme=b) for b in range(GPU_BLOCKS)])
    rank.run()
    batches, looked = rank.mover._runner._batches, []
    queued = batches.queued
    assert len(queued) > 20
    monkeypatch.setattr(batch_queue, "_urgency", lambda part: looked.append(part) or part.urgency)
    monkeypatch.setattr(BatchQueue, "remove", lambda *_: looked.extend(queued) or [])
    assert not rank.mover.turn()
    assert 0 < len(looked) <= 2 * len(batches._queues), "however many wait"
    monkeypatch.undo()
    rank.let_go()
    assert all(not result.failed for result in rank.run().values())


def test_a_dropped_segment_waits_for_its_transfers_and_what_follows_waits_for_it(rank):
    rank.do(JobKind.STORE, [move(1, 0, 1, nvme=1), move(2, 1, 2, nvme=2), move(2, 0, 2, rank.cpu(0, 0))])
    rank.device.plan.hold = True
    load = rank.submit(JobKind.LOAD, [move(1, 0, 1, nvme=1)])
    rank.run()
    drop = rank.submit(JobKind.DROP_SEGMENT, segment=segment_of(0))
    make = rank.submit(JobKind.OPEN_SEGMENT, segment=segment_of(0))
    later = rank.submit(JobKind.STORE, [move(3, 0, 3, nvme=3)])
    beside = rank.submit(JobKind.LOAD, [move(2, 0, 2, rank.cpu(0, 0))])
    results = rank.run()
    assert beside in results
    assert not {load, drop, make, later} & set(results)
    assert "drop 0" not in rank.files.calls
    rank.let_go()
    results = rank.run()
    assert all(results[job_id].failed == {} for job_id in (load, drop, make, later))
    assert rank.files.calls[-2:] == ["drop 0", "open 0"]
    assert rank.do(JobKind.LOAD, [move(3, 0, 3, nvme=3)]) == {}


def order_of(rank: Rank, *jobs: int) -> list[int]:
    """Turn until nothing happens; return these jobs as they end."""
    order: list[int] = []
    while rank.mover.turn():
        order += [job_id for job_id in rank.poll() if job_id in set(jobs) - set(order)]
    return order


def test_fenced_stores_go_before_all_else(rank):
    rank.do(JobKind.STORE, [move(1, 0, 1, rank.cpu(0, 47))])
    stores = [
        rank.submit(JobKind.STORE, [move(b, 0, b, rank.cpu(0, b)) for b in range(at * 8, at * 8 + 8)])
        for at in range(4)
    ]
    load = rank.submit(JobKind.LOAD, [move(1, 0, 44, rank.cpu(0, 47))])
    rank.mover.submit(Plan(fence=(stores[2], stores[3])))
    assert order_of(rank, *stores, load) == [stores[2], stores[3], load, stores[0], stores[1]]


def test_loads_of_requests_that_arrived_earlier_go_first(rank):
    """Whatever the order of their plans, and wherever their blocks come from."""
    rank.do(JobKind.STORE, [move(b, 0, b, rank.cpu(0, b)) for b in range(32)])
    rank.do(JobKind.DEMOTE, [move(b, cpu=rank.cpu(0, b), nvme=b) for b in range(32)])
    rank.device.plan.hold = True
    first = rank.submit(JobKind.LOAD, [move(b, 0, b, nvme=b) for b in range(16)], arrival=9)
    rank.run()  # it has taken all the reads that may be under way
    staged = [rank.submit(JobKind.LOAD, [move(16 + at, 0, 16 + at, nvme=16 + at)], arrival=at) for at in (5, 3, 7)]
    kept = rank.submit(JobKind.LOAD, [move(24, 0, 24, rank.cpu(0, 40), 24)], arrival=4)
    rank.let_go()
    order = [job for job in order_of(rank, first, *staged, kept) if job != first]
    assert order == [staged[1], kept, staged[0], staged[2]]


def test_a_job_is_cut_into_parts_by_drive_in_the_order_of_its_slots_and_drives_take_turns():
    drives = {4: 0, 7: 1, 8: 1}
    slots = [Slot(segment, index) for segment in (7, 4) for index in (1, 0, 3, 2, 4)] + [Slot(9, 0), Slot(8, 1)]
    moves = tuple(move(at, 0, at, nvme=slot.index, segment=slot.segment) for at, slot in enumerate(slots))
    files = {segment: OpenFile(100, segment_of(0).slot_bytes, 8, drive) for segment, drive in drives.items()}
    rank = Rank()
    work = Work(Job(JobId(1), JobKind.LOAD, moves, request_id="one"), None, 0.0)
    parts = BatchCutter(rank.mover._runner._resources, 2 * segment_of(0).slot_bytes).cut(work, files)
    rank.close()
    assert work.left == len(slots)
    assert [(part.drive, [slots[at] for at in part.positions]) for part in parts] == [
        (1, [Slot(7, 0), Slot(7, 1)]),
        (0, [Slot(4, 0), Slot(4, 1)]),
        (NO_DRIVE, [Slot(9, 0)]),
        (1, [Slot(7, 2), Slot(7, 3)]),
        (0, [Slot(4, 2), Slot(4, 3)]),
        (1, [Slot(7, 4), Slot(8, 1)]),
        (0, [Slot(4, 4)]),
    ]
