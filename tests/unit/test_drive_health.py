# SPDX-License-Identifier: Apache-2.0
"""Back-off after failed writes, quarantine after failed reads, drive by drive."""

from __future__ import annotations

import logging

from kvdisk.manager.segments import (
    FAILURES_IN_A_ROW,
    FIRST_BACK_OFF_S,
    FIRST_QUARANTINE_S,
    LAST_BACK_OFF_S,
    LAST_QUARANTINE_S,
    Drives,
)
from kvdisk.stats import Stats


def test_a_failed_write_pauses_its_drive_only_and_longer_each_time(caplog):
    stats = Stats()
    drives = Drives(2, stats)
    now, pauses = 100.0, []
    for _ in range(9):
        drives.wrote(1, now, "no space")
        assert drives.writable(now) == [0]
        start = now
        drives.wrote(1, now + 0.001, "no space")  # on its way at that time: it changes nothing
        while not drives.may_write(1, now):
            now += FIRST_BACK_OFF_S / 2
        pauses.append(now - start)
        assert drives.refresh(now)
        assert not drives.refresh(now), "said once"
    assert pauses == sorted(pauses)
    assert pauses[0] == FIRST_BACK_OFF_S
    assert pauses[-1] == LAST_BACK_OFF_S
    assert stats.counts["write_pauses"] == 9
    assert len(caplog.records) == 9, "one warning for each pause"
    drives.wrote(1, 0.0)
    drives.wrote(1, now, "no space")
    assert drives.may_write(1, now + FIRST_BACK_OFF_S)


def test_a_drive_that_fails_block_after_block_is_quarantined_and_tried_again(caplog):
    caplog.set_level(logging.WARNING)
    stats = Stats()
    drives = Drives(2, stats)
    for _ in range(3):  # bad blocks among good ones are not the drive's end
        for _ in range(FAILURES_IN_A_ROW - 1):
            drives.read(0, 5.0, failed=True)
        drives.read(0, 0.0)
    assert not drives.quarantined
    for _ in range(FAILURES_IN_A_ROW):
        drives.read(0, 5.0, failed=True)
    assert drives.quarantined == {0}
    assert drives.writable(5.0) == [1]
    drives.read(0, 6.0, failed=True)  # one that was on its way
    assert stats.counts["drive_quarantines"] == 1
    assert not drives.refresh(5.0 + FIRST_QUARANTINE_S - 1)
    assert drives.refresh(5.0 + FIRST_QUARANTINE_S)
    assert not drives.quarantined
    drives.read(0, 70.0, failed=True)
    assert drives.quarantined == {0}, "on probation one failure is enough"
    assert not drives.refresh(70.0 + FIRST_QUARANTINE_S)
    assert drives.refresh(70.0 + 2 * FIRST_QUARANTINE_S)
    drives.read(0, 0.0)
    drives.read(0, 300.0, failed=True)
    assert not drives.quarantined


def test_a_drive_that_does_not_answer_is_quarantined_at_once():
    drives = Drives(1, Stats())
    drives.read(0, 1.0, hangs=True)
    assert drives.quarantined == {0}
    now = 1.0
    for _ in range(12):
        now += LAST_QUARANTINE_S
        assert drives.refresh(now)
        drives.read(0, now, hangs=True)
    assert not drives.refresh(now + LAST_QUARANTINE_S - 1)
    assert drives.refresh(now + LAST_QUARANTINE_S)


def test_a_segment_that_cannot_be_made_stops_only_the_making_of_segments():
    stats = Stats()
    drives = Drives(2, stats)
    drives.made(1, 10.0, failed=True)
    assert drives.writable(10.0) == [0, 1]
    assert drives.may_make(0, 10.0)
    assert not drives.may_make(1, 10.0)
    assert not drives.refresh(10.0)
    assert drives.refresh(10.0 + FIRST_BACK_OFF_S), "room may have come free"
    assert drives.may_make(1, 10.0 + FIRST_BACK_OFF_S)
    drives.made(1, 20.0, failed=True)
    assert not drives.may_make(1, 20.0 + FIRST_BACK_OFF_S)
    drives.made(1, 0.0)
    drives.made(1, 30.0, failed=True)
    assert drives.may_make(1, 30.0 + FIRST_BACK_OFF_S)
    assert stats.counts["segment_failures"] == 3
