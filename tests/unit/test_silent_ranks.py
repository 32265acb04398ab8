# SPDX-License-Identifier: Apache-2.0
"""A rank that has never answered is named once; slow ranks, and an engine that was stopped, are
not."""

from __future__ import annotations

import pytest

from kvdisk.manager.jobs import Transfers
from kvdisk.manager.silent_ranks import LEAST_STEPS, SILENT_DEADLINES, SilentRanks
from kvdisk.messages import JobKind, JobResult, Report

DEADLINE_S = 30.0
TOO_LONG_S = SILENT_DEADLINES * DEADLINE_S + 1


@pytest.fixture
def transfers() -> Transfers:
    """Of two ranks: a job is out."""
    made = Transfers(2)
    made.add(JobKind.STORE, [], [])
    made.take_queued(0.0)
    return made


def look(transfers: Transfers, steps: int, seconds: float, caplog: pytest.LogCaptureFixture) -> list[str]:
    silent = SilentRanks(transfers, DEADLINE_S)
    for step in range(steps + 1):
        silent.look(seconds * step / steps)
    return [record.getMessage() for record in caplog.records]


def test_ranks_that_answer_nothing_are_named_once(transfers, caplog):
    transfers.absorb(Report(results={1: JobResult(ranks=1)}))
    (line,) = look(transfers, 10 * LEAST_STEPS, 3 * TOO_LONG_S, caplog)
    assert "no answer from 1 of 2 ranks" in line and "each machine" in line


def test_slow_ranks_are_not_named(transfers, caplog):
    assert not look(transfers, 10 * LEAST_STEPS, TOO_LONG_S - 2, caplog)


def test_an_engine_that_was_stopped_says_nothing(transfers, caplog):
    assert not look(transfers, LEAST_STEPS // 2, 100 * TOO_LONG_S, caplog)


def test_who_has_answered_one_job_is_not_named(transfers, caplog):
    """However long the queue of a slow drive is."""
    transfers.absorb(Report(results={1: JobResult(ranks=2)}))
    transfers.add(JobKind.STORE, [], [])
    transfers.take_queued(0.0)
    assert not look(transfers, 10 * LEAST_STEPS, 100 * TOO_LONG_S, caplog)
