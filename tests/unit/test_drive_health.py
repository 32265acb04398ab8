# SPDX-License-Identifier: Apache-2.0
"""Back-off after failed writes and segments, quarantine after failed reads, drive by drive."""

from __future__ import annotations

import logging

import pytest

from kvdisk.manager.bounds import READ_AGAIN, WRITE_AGAIN
from kvdisk.manager.segments import FAILURES_IN_A_ROW, Drives
from kvdisk.stats import Stats


def write(drives: Drives, now: float, *, fails: bool) -> None:
    drives.note_write_result(1, now, "no space" if fails else None)


def make(drives: Drives, now: float, *, fails: bool) -> None:
    drives.note_segment_result(1, now, failed=fails)


def read(drives: Drives, now: float, *, fails: bool) -> None:
    drives.note_read_result(1, now, hangs=fails)


@pytest.mark.parametrize(
    ("act", "counter", "first_s", "most_s", "writable"),
    [
        (write, "write_pauses", *WRITE_AGAIN, [0]),
        (make, "segment_failures", *WRITE_AGAIN, [0, 1]),
        (read, "drive_quarantines", *READ_AGAIN, [0]),
    ],
)
def test_a_failure_pauses_its_drive_only_and_longer_each_time(act, counter, first_s, most_s, writable, caplog):
    caplog.set_level(logging.ERROR if act is read else logging.WARNING)
    stats, now = Stats(), 100.0
    drives = Drives(2, stats)
    for length_s in [min(first_s * 2**time, most_s) for time in range(9)]:
        act(drives, now, fails=True)
        assert (drives.writable(now), drives.may_make(0, now), drives.may_make(1, now)) == (
            writable,
            True,
            act is not make,
        )
        assert drives.quarantined == ({1} if act is read else set())
        if act is not make:
            act(drives, now + 0.001, fails=True)  # it was on its way at that time: it changes nothing
        now += length_s
        assert not drives.refresh(now - 0.01) and drives.refresh(now) and not drives.refresh(now), "said once"
        assert drives.writable(now) == [0, 1] and drives.may_make(1, now) and not drives.quarantined
    assert stats.counts[counter] == len(caplog.records) == 9, "told once for each pause"
    act(drives, now, fails=False)
    act(drives, now, fails=True)
    assert drives.refresh(now + first_s), "it went well: the next pause is a short one"


def test_only_failures_in_a_row_quarantine_a_drive_and_one_that_is_tried_again():
    drives = Drives(1, Stats())
    for fails in (FAILURES_IN_A_ROW - 1) * [True] + [False] + FAILURES_IN_A_ROW * [True]:
        assert not drives.quarantined, "bad blocks among good ones"
        drives.note_read_result(0, 5.0, failed=fails)
    assert drives.quarantined == {0}
    assert drives.refresh(5.0 + READ_AGAIN.first_s)
    drives.note_read_result(0, 70.0, failed=True)
    assert drives.quarantined == {0}, "on probation one failure is enough"
    assert drives.refresh(70.0 + 2 * READ_AGAIN.first_s)
    drives.note_read_result(0, 300.0)
    drives.note_read_result(0, 300.0, failed=True)
    assert not drives.quarantined
