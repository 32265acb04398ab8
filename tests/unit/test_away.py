# SPDX-License-Identifier: Apache-2.0
"""Segments that some rank cannot open now: nothing of them is given up, served or written, and they
are tried again."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest
from tier_bench import GEOMETRY, TierBench

from kvdisk.blocks import Tier
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.catalog import CopyState
from kvdisk.messages import JobKind, Reason

PROMPT = "aabbccddeeffx"
"""Of six blocks, in the first three segments."""
FILES = [0, 1, 2, 3]
CANNOT = [each for each in Reason if each not in {Reason.ABSENT, Reason.HEADER}]


class Away(TierBench):
    """An engine with segments of two slots. ``broken``: the segments that its rank cannot open, for
    ``reason``; None: nor its home."""

    broken: Collection[int | None] = ()
    reason = Reason.IO_ERROR

    def __init__(self, segments: int = 4, drives: int = 1, geometry: Geometry = GEOMETRY) -> None:
        super().__init__((), (2,), segments=segments, drives=drives, geometry=geometry, min_load_tokens=0)

    def work(self) -> None:
        for rank in self.ranks:
            while rank.runnable:
                job = self.parts.transfers._records[rank.runnable[0]].job
                is_broken = (job.kind is JobKind.OPEN_HOME and None in self.broken) or (
                    job.kind is JobKind.OPEN_SEGMENT and not job.segment.create and job.segment.segment in self.broken
                )
                if is_broken:
                    rank.run_leg(rank.runnable[0], failure=self.reason)
                else:
                    rank.run_job(rank.runnable[0])
        self.index.commit()

    def serve(self, prompt: str, *, seconds: float = 0.01) -> int:
        """Serve a prompt from a cold GPU; return how many tokens of it were hits."""
        self.engine.pool.forget_all()
        before = self.stats["hit_tokens.nvme"]
        self.add(prompt)
        for _ in range(12):
            self.step(seconds=seconds)
        assert not self.engine.requests
        self.watch.check()
        return int(self.stats["hit_tokens.nvme"] - before)

    def restart_with(self, *broken: int | None, reason: Reason = Reason.IO_ERROR) -> None:
        self.restart()
        self.broken, self.reason = broken, reason
        for _ in range(3):
            self.step(seconds=0.01)

    @property
    def away(self) -> list[int]:
        return [*self.parts.nvme.segments.away]

    @property
    def files(self) -> list[int]:
        return sorted(self.rank.segments)

    def records(self) -> int:
        return len(list(self.index.blocks()))

    def gauge(self, name: str) -> float:
        return self.parts.nvme.gauges()[name]


def filled(**how: int) -> Away:
    away = Away(**how)
    away.serve(PROMPT)
    assert away.files == FILES and away.records() == 6
    return away


@pytest.mark.parametrize("reason", CANNOT)
def test_what_cannot_be_opened_now_stays_and_is_served_when_it_can(reason, caplog):
    away = filled()
    held = away.parts.nvme.segments.held_bytes
    away.restart_with(1, reason=reason)
    assert away.away == [1]
    assert away.held(PROMPT) == [True, True, False, False, True, True]
    assert away.serve(PROMPT) == 4, "what is in front of it"
    assert away.records() == 6 and away.files == FILES
    assert away.parts.nvme.segments.held_bytes == held, "its room stays taken"
    assert away.gauge("unavailable_blocks") == 2
    assert "cannot open 1 of 4 segments on every rank now" in caplog.text
    away.broken = ()
    away.serve(PROMPT, seconds=1.0)
    assert away.away == [] and all(away.held(PROMPT[:-1]))
    assert "has opened all of its engine store again" in caplog.text
    assert away.serve(PROMPT) == 12
    assert away.gauge("unavailable_blocks") == 0


@pytest.mark.parametrize("reason", [Reason.ABSENT, Reason.HEADER])
def test_what_is_known_to_be_lost_goes(reason, caplog):
    away = filled()
    away.restart_with(1, 2, reason=reason)
    away.serve("uuvvx")
    assert away.records() <= 4 and not away.away and 1 not in away.files and 2 not in away.files
    assert "gives up segments (2)" in caplog.text


def test_a_rank_that_cannot_join_loses_nothing_and_joins_later(caplog):
    away = filled()
    away.restart_with(None)
    assert sorted(away.away) == FILES and not any(away.held(PROMPT[:-1]))
    assert away.serve(PROMPT) == 0
    assert away.serve("ssttuux") == 0
    assert away.records() == 6 and away.files == FILES, "nothing is written meanwhile"
    assert caplog.text.count("cannot open its engine store on every rank now") == 1
    away.broken = ()
    away.serve("zzx", seconds=60.0)
    assert away.serve(PROMPT) == 12


def test_a_life_in_which_all_is_away_leaves_all_to_the_next():
    away = filled()
    for broken in ((None,), FILES, (None, 0)):
        away.restart_with(*broken)
        for prompt in (PROMPT, "ssttuux", "gghhiix"):
            away.serve(prompt)
    away.restart_with()
    assert away.serve(PROMPT) == 12


def test_each_pause_is_longer_and_one_segment_of_a_drive_is_tried_before_the_others():
    away = filled()
    away.restart_with(*FILES)
    tried: list[tuple[float, int]] = []
    opened = away.parts.nvme.segments.open

    def note(spec) -> None:
        tried.append((away.now, spec.segment))
        opened(spec)

    away.parts.nvme.segments.open = note
    for _ in range(200):
        away.step(seconds=0.5)
    times, numbers = zip(*tried, strict=True)
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses == sorted(pauses) and len(tried) < 10
    assert set(numbers) == set(FILES), "one that never can be opened does not keep the others away"
    tried.clear()
    away.broken = (2,)
    for _ in range(300):
        away.step(seconds=0.5)
    assert away.away == [2] and {number for _, number in tried} == set(FILES)


def test_eviction_takes_what_can_be_served_for_what_is_wanted_and_nothing_that_is_away():
    away = Away(segments=12)
    for letter in "abcdefgh":
        away.serve(letter * 4 + "x")
    away.restart_with(0, 1)
    for letter in "ijklmnopq":
        away.serve(letter * 4 + "x")
    old = [row for prompt in ("aaaa", "bbbb") for row in away.rows(prompt)]
    assert all(away.catalog.state(row, Tier.NVME) == CopyState.READY for row in old), "used longest ago"
    assert not any(away.held("cccc")) and all(away.held("qqqq"))
    kept = {(record.epoch, record.key) for record in away.index.blocks()}
    assert kept >= {(away.catalog.epochs[row], away.catalog.keys[row]) for row in old}


def test_nothing_is_evicted_to_have_room_to_spare_where_no_segment_can_be_made():
    away = Away(segments=12)
    prompts = [letter * 4 + "x" for letter in "abcdefgh"]
    for prompt in prompts:
        away.serve(prompt)
    before = away.records()
    away.restart_with(0)
    away.parts.nvme.segments.drives.note_segment_result(0, away.now + 1000.0, failed=True)
    for _ in range(10):
        away.step(seconds=0.01)
    assert away.records() == before


def test_a_class_takes_no_room_of_another_while_something_is_away():
    geometry = Geometry((GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 8192)), 1, 2)
    away = TierBench((), (2, 2), segments=1, geometry=geometry, min_load_tokens=0)
    shift, segments = away.parts.nvme._shift, away.parts.nvme.segments
    segments.away[7] = Away().parts.nvme.segments.specs.get(7)
    segments.lacks_room = lambda _: True
    assert shift.begin(0) is None
    del segments.away[7]


def test_an_operator_deletes_what_is_away_too():
    away = filled()
    away.restart_with(1)
    away.watch.must_stay.clear()
    blocks, file_bytes, _ = away.parts.nvme.let_go(1)
    assert blocks == 2 and file_bytes > 0
    away.serve("uux")
    assert 1 not in away.files and not away.away
    away.restart_with()
    assert away.held(PROMPT)[2:4] == [False, False]


def test_a_file_that_is_removed_while_another_rank_cannot_open_its_own_is_lost():
    away = filled()
    away.restart_with(1)
    away.watch.must_stay.clear()
    away.parts.nvme.lose({1})
    away.serve("uux")
    assert 1 not in away.files and not away.away


def test_a_reset_leaves_what_is_away_for_the_next_start():
    away = filled()
    away.restart_with(1)
    away.change_weights()
    assert away.serve("uux") == 0
    away.broken = ()
    away.serve("zzx", seconds=60.0)
    assert not away.away
    away.restart_with()
    assert all(away.held(PROMPT)[2:4])
