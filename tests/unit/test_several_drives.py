# SPDX-License-Identifier: Apache-2.0
"""A drive that does not answer, or an index that takes nothing: the manager goes on with the rest,
or rests."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from tier_bench import GEOMETRY, TierBench

from kvdisk.blocks import Tier
from kvdisk.config import Config
from kvdisk.index.base import SegmentRecord
from kvdisk.manager import bounds
from kvdisk.manager.catalog import CopyState
from kvdisk.manager.parts import Parts
from kvdisk.manager.segments import NvmeLayout, Segments
from kvdisk.messages import FOREIGN_SEGMENTS, HomeSpec, JobKind, JobResult, Reason, Report


class Served(TierBench):
    """An engine with a CPU tier of eight blocks, and segments of two. ``hung``: jobs of this kind
    do not end."""

    hung: JobKind | None = None
    commits = True

    def __init__(self, *, drives: int, segments: int) -> None:
        super().__init__((8,), (2,), drives=drives, segments=segments, min_load_tokens=0)

    def serve_steps(self, text: str) -> None:
        """Serve a prompt, and a few steps more."""
        request = self.add(text)
        self.steps(8)
        assert request.id not in self.engine.requests

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.now += 1.0
            self.engine.schedule(16)
            self.engine.forward()
            while runnable := [job for job in self.rank.runnable if self._kind(job) is not self.hung]:
                self.rank.run_job(runnable[0])
            self.engine.update()
            if self.commits:
                self.index.commit()
            self.watch.check()

    def _kind(self, job: int) -> JobKind:
        return self.parts.transfers._records[job].job.kind

    def on_nvme(self, text: str) -> list[int]:
        """Drives that a prompt's blocks are on; -1: nowhere."""
        specs, found = self.parts.nvme.segments.specs, zip(self.rows(text), self.held(text), strict=True)
        return [specs[self.catalog.slot(row, Tier.NVME).segment].drive if held else -1 for row, held in found]


def test_a_drive_that_is_left_alone_does_not_keep_the_others_full():
    """Of a chain the tail is on the one, and the head on the other."""
    served = Served(drives=2, segments=2)
    served.serve_steps("aabbccddx")
    assert served.on_nvme("aabbccdd") == [0, 0, 1, 1]
    served.parts.nvme.segments.drives.note_read_result(1, served.engine.now, hangs=True)
    served.serve_steps("eeffx")
    served.steps(4)
    assert served.on_nvme("eeff") == [0, 0]


def test_a_segment_that_is_never_made_does_not_keep_old_copies():
    served = Served(drives=2, segments=2)
    served.serve_steps("aabbx")
    assert served.on_nvme("aabb") == [0, 0]
    served.hung = JobKind.OPEN_SEGMENT
    served.serve_steps("ccddx")
    assert served.on_nvme("ccdd") == [-1, -1]
    served.engine.now += 100.0
    served.steps(4)
    assert served.on_nvme("ccdd") == [0, 0]


def test_the_files_of_a_segment_go_once_the_deletion_of_its_records_is_committed():
    served = Served(drives=1, segments=3)
    served.serve_steps("aabbccx")
    served.rank.segments[1] += 1  # it has another length, and cannot be opened
    served.restart()
    served.commits = False
    served.steps(4)
    assert [*served.parts.nvme.segments.specs] == [*served.rank.segments] == [0, 1]
    served.index.commit()
    served.steps(2)
    assert [*served.parts.nvme.segments.specs] == [*served.rank.segments] == [0]


@pytest.mark.parametrize("full", [False, True], ids=["a record", "room that a deletion would give"])
def test_nobody_steps_for_a_commit_that_never_ends(full):
    served = Served(drives=1, segments=1 if full else 2)
    served.serve_steps("aabbx")
    served.commits = False
    served.serve_steps("ccddx")
    assert served.parts.nvme.status.uncommitted and bool(served.parts.dirty.counts[0]) is full
    assert served.manager.has_pending_work(served.engine.now)
    served.engine.now += 1000.0
    assert not served.manager.has_pending_work(served.engine.now)
    served.steps(4)
    served.commits = True
    served.index.commit()
    served.manager.commit()
    assert served.manager.has_pending_work(served.engine.now) is full, (
        "it ends after all, and what waited for it goes on"
    )
    served.steps(4)
    assert served.on_nvme("ccdd") == [0, 0]
    assert not served.manager.has_pending_work(served.engine.now)


def test_no_segment_gets_the_number_of_a_neighbours():
    """A damaged record has used up those below: until the next start there are no more segments."""
    parts = Parts.make(Config.from_mapping({}), GEOMETRY, Mock())
    transfers, segments = parts.transfers, Segments(Tier.NVME, parts, NvmeLayout(0, (2,), 1 << 62), 1)
    segments.restore([SegmentRecord(FOREIGN_SEGMENTS - 2, GEOMETRY.slot_sizes[0], 2)])
    segments.open_all(HomeSpec("", b""))
    planned = []
    for _ in range(3):
        transfers.absorb(Report({job.id: JobResult(1) for job in transfers.take_queued(0.0)}))
        segments.opening.clear()
        planned.append(segments.plan_new(0, 0.0))
    assert planned == [True, False, False]
    assert max(segments.specs) == FOREIGN_SEGMENTS - 1


def test_of_a_drive_that_is_empty_at_the_start_each_step_ends_some_copies(monkeypatch):
    """All of a large store at once would hold up a step for seconds. Nobody is promised any of
    it."""
    served = Served(drives=1, segments=3)
    served.serve_steps("aabbccddx")
    served.restart()
    rows = served.rows("aabbccddx")
    assert all(served.held("aabbccddx"))
    monkeypatch.setattr(bounds, "ENDED", 1)
    served.engine.schedule(16)
    served.engine.forward()
    while runnable := served.rank.runnable:
        is_home = served.rank.opens_home(runnable[0])
        served.rank.run_leg(runnable[0], failure=None if is_home else Reason.ABSENT)
    served.engine.update()
    left = []
    for _ in range(5):
        assert not any(served.held("aabbccddx"))
        left.append(sum(served.catalog.state(row, Tier.NVME) != CopyState.ABSENT for row in rows))
        served.steps(1)
    assert left == [3, 2, 1, 0, 0]
    served.steps(3)
    assert not list(served.index.segments()) and not served.rank.segments
    served.serve_steps("aabbccddx")
    assert all(served.held("aabbccddx"))
