# SPDX-License-Identifier: Apache-2.0
"""Stores whose blocks are overwritten as soon as ``protect`` returns."""

from __future__ import annotations

import threading

import pytest
from ranks import Rank, move
from support.waits import WAIT_S, until

from kvdisk.messages import JobKind, Plan, Reason
from kvdisk.worker.mover import URGENT_S

BLOCKS = range(20)


@pytest.mark.parametrize("held", [False, True])
def test_with_a_thread_the_wait_is_bounded(held, monkeypatch):
    monkeypatch.setattr("kvdisk.worker.mover.FENCE_S", WAIT_S)
    rank = Rank(threaded=True, staging_slots=8)
    rank.await_jobs(*rank.opening)
    before = rank.payload(0, 3)
    rank.device.plan.hold = held
    job = rank.job(JobKind.STORE, [move(block, 0, block, nvme=block) for block in BLOCKS])
    saver = threading.Thread(target=rank.mover.protect, args=(Plan((job,), urgent=(job.id,)),))
    saver.start()
    if held:
        until(lambda: rank.mover._fenced)
        assert saver.is_alive(), "it waits as long as the clock stands still"
        rank.now_s = URGENT_S + 0.001
    saver.join(WAIT_S)
    assert not saver.is_alive()
    rank.erase()
    rank.let_go()
    rank.await_jobs(job.id)
    failed = rank.results[job.id].failed
    assert bool(failed) == held, "only what cannot begin is given up"
    load = rank.submit(JobKind.LOAD, [move(3, 0, 3, nvme=3)])
    rank.await_jobs(load)
    assert 3 in failed or rank.payload(0, 3) == before
    rank.mover.close()


def fence(rank: Rank, *jobs: int) -> None:
    rank.mover.protect(Plan(fence=jobs))


def test_what_cannot_begin_at_a_fence_is_given_up_at_once_and_others_are_left_alone(rank):
    rank.device.plan.hold = True
    job, other = (
        rank.submit(JobKind.STORE, [move(100 * at + block, 0, block, nvme=20 * at + block) for block in BLOCKS])
        for at in range(2)
    )
    now_s = rank.now_s
    fence(rank, job)
    assert rank.now_s == now_s
    rank.erase()
    assert not {job, other} & set(rank.poll())
    rank.let_go()
    results = rank.run()
    assert set(results[job].failed.values()) == {Reason.OVERWRITTEN}, "staging was full, and nobody waits for the drive"
    assert results[other].failed == {}, "no step overwrites what it reads"


def test_where_there_is_no_cpu_tier_the_end_of_the_copy_is_told_before_the_end_of_the_job():
    rank = Rank(staging_slots=8, cpu_slots=0)
    rank.run()
    rank.device.plan.hold = True
    job = rank.submit(JobKind.STORE, [move(block, 0, block, nvme=block) for block in range(2)])
    while rank.mover.turn():
        pass
    report = rank.mover.poll()
    assert report.copied == {job: 1} and not report.results
    rank.let_go()
    assert rank.run()[job].failed == {}
    rank.mover.close()


def test_a_mover_that_hangs_holds_a_step_up_for_a_while_only_and_begins_nothing_later(monkeypatch):
    """Its thread is at a drive that does not come back."""
    monkeypatch.setattr("kvdisk.worker.mover.FENCE_S", 0.05)
    rank = Rank(threaded=True)
    rank.await_jobs(*rank.opening)
    let_go, hanging, turn = threading.Event(), threading.Event(), rank.mover.turn

    def hung(*arguments, **more):
        hanging.set()
        assert let_go.wait(WAIT_S)
        return turn(*arguments, **more)

    monkeypatch.setattr(rank.mover, "turn", hung)
    job = rank.submit(JobKind.STORE, [move(block, 0, block, rank.cpu(0, block)) for block in BLOCKS])
    assert hanging.wait(WAIT_S)
    fence(rank, job)
    rank.erase()
    # While it hangs on, no other step waits.
    monkeypatch.setattr("kvdisk.worker.mover.FENCE_S", 10 * WAIT_S)
    other = rank.submit(JobKind.STORE, [move(block, 0, block, rank.cpu(0, block + 8)) for block in BLOCKS])
    fence(rank, other)
    let_go.set()
    rank.await_jobs(job, other)
    for each in (job, other):
        assert rank.results[each].failed == dict.fromkeys(range(len(BLOCKS)), Reason.OVERWRITTEN)
    # It turns again, and steps wait again.
    last = rank.submit(JobKind.STORE, [move(block, 0, block, rank.cpu(0, block)) for block in BLOCKS])
    fence(rank, last)
    rank.await_jobs(last)
    assert not rank.results[last].failed
    rank.mover.close()
