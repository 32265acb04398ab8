# SPDX-License-Identifier: Apache-2.0
"""Jobs on their way, settled, and released."""

from __future__ import annotations

import pytest

from kvdisk.blocks import Slot, Tier, make_block_key
from kvdisk.manager.jobs import MoveDetail, Transfers
from kvdisk.messages import JobKind, JobResult, Move, Reason, Report

LATE = JobResult(1, {0: Reason.DEADLINE}, {0}, 1)
DONE = JobResult(1)


@pytest.fixture
def transfers():
    return Transfers(2)


def demotion(transfers: Transfers) -> int:
    key = make_block_key(bytes(32), 0)
    move = Move(key, 1, slots={Tier.CPU: Slot(0, 0), Tier.NVME: Slot(0, 0)})
    record = transfers.add(JobKind.DEMOTE, [move], [MoveDetail(0)])
    transfers.take_queued(0.0)
    return record.job.id


def answer(result: JobResult | None, released: int = 0, job: int = 1) -> Report:
    """One rank's report on a job."""
    report = Report()
    if result is not None:
        report.results[job] = JobResult(result.ranks, dict(result.failed), set(result.late), result.late_ranks)
    if released:
        report.released[job] = released
    return report


def test_a_late_job_is_settled_at_once_and_released_when_its_rank_says_so(transfers):
    demotion(transfers)
    assert transfers.absorb(answer(LATE)) == []
    (record,) = transfers.absorb(answer(DONE))
    assert record.late == {0}
    assert len(transfers) == transfers.count(JobKind.DEMOTE) == 0
    assert transfers.take_released() == []
    assert transfers.absorb(answer(None, released=1)) == []
    assert transfers.take_released() == [record]
    assert transfers.take_released() == []


def test_every_late_rank_has_to_release(transfers):
    demotion(transfers)
    (record,) = transfers.absorb(answer(LATE).merge(answer(LATE)))
    transfers.absorb(answer(None, released=1))
    assert transfers.take_released() == []
    transfers.absorb(answer(None, released=1))
    assert transfers.take_released() == [record]


def test_what_is_released_before_the_last_rank_answers_is_not_late(transfers):
    demotion(transfers)
    transfers.absorb(answer(LATE, released=1))
    (record,) = transfers.absorb(answer(DONE))
    assert record.failed == {0: Reason.DEADLINE}
    assert record.late == set()
    assert transfers.take_released() == []


def test_one_rank_released_before_the_other_answers(transfers):
    demotion(transfers)
    transfers.absorb(answer(LATE, released=1))
    (record,) = transfers.absorb(answer(LATE))
    assert record.late == {0}
    transfers.absorb(answer(None, released=1))
    assert transfers.take_released() == [record]


def test_a_release_of_what_is_not_late_is_an_error(transfers):
    demotion(transfers)
    transfers.absorb(answer(DONE).merge(answer(DONE)))
    with pytest.raises(AssertionError, match="more than once per rank"):
        transfers.absorb(answer(None, released=1))
