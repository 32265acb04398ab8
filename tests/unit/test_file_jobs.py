# SPDX-License-Identifier: Apache-2.0
"""Jobs of files on their own thread, under a mover on its own."""

from __future__ import annotations

import threading

import pytest
from ranks import FINGERPRINT, NamedFiles, Rank, move, segment_of
from support.waits import WAIT_S, until

from kvdisk.messages import HomeSpec, JobKind, Plan, Reason
from kvdisk.worker import files

SLOW = segment_of(0)._replace(segment=7)


@pytest.fixture
def rank():
    made = Rank(threaded=True)
    made.files.slow[7] = threading.Event()
    made.await_jobs(*made.opening)
    yield made
    made.files.slow[7].set()
    made.mover.close()


def slow_move(number: int):
    """A move to the segment that takes long to make."""
    return move(number, 0, number, nvme=number, segment=SLOW.segment)


def test_transfers_go_on_while_a_segment_is_made_and_its_own_wait(rank):
    make = rank.submit(JobKind.OPEN_SEGMENT, segment=SLOW)
    waits = rank.submit(JobKind.STORE, [move(1, 0, 1, nvme=1), slow_move(2)])
    beside = rank.submit(JobKind.STORE, [move(3, 0, 3, nvme=3)])
    from_cpu = rank.submit(JobKind.STORE, [move(4, 0, 4, rank.cpu(0, 4))])
    rank.await_jobs(beside, from_cpu)
    assert rank.submit(JobKind.LOAD, [move(3, 0, 5, nvme=3)]) not in rank.results
    rank.await_jobs(rank.last_job)
    assert not {make, waits} & set(rank.results)
    rank.files.slow[7].set()
    rank.await_jobs(make, waits)
    assert all(result.failed == {} for result in rank.results.values())


def test_a_job_that_waits_for_a_segment_is_given_up_in_time(rank):
    rank.submit(JobKind.OPEN_SEGMENT, segment=SLOW)
    waits = rank.submit(JobKind.STORE, [slow_move(2)])
    rank.now_s = 5.0
    later = rank.submit(JobKind.STORE, [slow_move(3)])
    rank.now_s = 11.0
    rank.await_jobs(waits)
    assert rank.results[waits].failed == {0: Reason.DEADLINE}
    assert rank.results[waits].late == set() and later not in rank.results
    rank.files.slow[7].set()
    rank.await_jobs(later)
    assert rank.results[later].failed == {}


def test_while_a_drive_hangs_over_a_file_one_load_waits_in_vain_and_no_other(rank):
    rank.await_jobs(rank.submit(JobKind.STORE, [move(1, 0, 1, nvme=1)]))
    make = rank.submit(JobKind.OPEN_SEGMENT, segment=SLOW)
    waits = rank.submit(JobKind.LOAD, [slow_move(2)])
    rank.now_s = 5.0
    stays = rank.submit(JobKind.STORE, [slow_move(3)])
    beside = rank.submit(JobKind.LOAD, [slow_move(4)])
    rank.now_s = 11.0
    rank.await_jobs(waits, beside)
    assert rank.results[waits].failed == {0: Reason.DEADLINE}
    assert rank.results[beside].failed == {0: Reason.IO_ERROR}
    later = rank.submit(JobKind.LOAD, [move(1, 0, 5, nvme=1), slow_move(6)])
    rank.await_jobs(later)
    assert rank.results[later].failed == {1: Reason.IO_ERROR}
    rank.files.slow[7].set()
    rank.await_jobs(make, stays)
    after = rank.submit(JobKind.LOAD, [slow_move(3)])
    rank.await_jobs(after)
    assert rank.results[stays].failed == rank.results[after].failed == {}


def test_close_ends_the_file_under_way_and_starts_no_other(rank):
    jobs = [rank.job(JobKind.OPEN_SEGMENT, segment=SLOW._replace(segment=segment)) for segment in (7, 8)]
    make, after = (job.id for job in jobs)
    rank.mover.submit(Plan(tuple(jobs)))
    waits = rank.submit(JobKind.STORE, [slow_move(2)])
    assert rank.files.opening.wait(WAIT_S)
    closer = threading.Thread(target=rank.mover.close)
    closer.start()
    while not any(task.cancelled() for _, task in list(rank.mover._runner._files._handed)):
        closer.join(0.001)
    assert not rank.files.closed
    rank.files.slow[7].set()
    closer.join(WAIT_S)
    assert rank.files.closed
    rank.poll()
    assert rank.files.calls[-1] == "open 7"
    assert rank.results[make].failed == rank.results[after].failed == {-1: Reason.CANCELLED}
    assert rank.results[waits].failed == {0: Reason.CANCELLED}


def test_an_error_of_ours_on_the_files_thread_is_raised_on_the_models():
    class Broken(NamedFiles):
        def open_home(self, spec: HomeSpec) -> None:
            raise ZeroDivisionError("planted")

    rank = Rank(threaded=True, files=Broken(), home=HomeSpec("ab" * 16, FINGERPRINT))
    assert rank.mover.wait_any(WAIT_S)
    rank.mover._thread.join(WAIT_S)
    with pytest.raises(ZeroDivisionError, match="planted"):
        rank.mover.poll()
    rank.poll()
    assert {result.failed[-1] for result in rank.results.values()} == {Reason.CANCELLED}
    assert rank.files.closed
    rank.mover.close()


def test_a_rank_looks_after_its_files_also_while_others_are_opened_and_dropped(monkeypatch):
    """Loads of neighbours' blocks open and drop files all the time."""
    monkeypatch.setattr(files, "GIVE_BACK_S", 0.0)
    rank = Rank(threaded=True)
    try:
        rank.await_jobs(*rank.opening)
        rank.files.slow[7] = threading.Event()
        jobs = [rank.job(JobKind.OPEN_SEGMENT, segment=SLOW._replace(segment=segment)) for segment in range(7, 12)]
        rank.mover.submit(Plan(tuple(jobs)))
        assert rank.files.opening.wait(WAIT_S)
        until(lambda: len(rank.mover._runner._files._handed) == len(jobs))
        rank.files.calls.clear()
        rank.files.slow[7].set()
        rank.await_jobs(*(job.id for job in jobs))
        calls = rank.files.calls
        assert "give back" in calls[: calls.index("open 11")], "though there was always something to open"
    finally:
        rank.mover.close()
