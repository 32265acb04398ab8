# SPDX-License-Identifier: Apache-2.0
"""A drive that does not answer, or an index that takes nothing: the manager goes on with the rest,
or rests."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine
from support.fake_neighbours import FakeNeighbours
from support.fake_ranks import FakeRank
from support.manager_parts import ManagerParts, Sizes
from support.manager_watch import ManagerWatch

from kvdisk.blocks import Tier, make_block_key
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.catalog import CopyState
from kvdisk.messages import JobKind, Reason

GEOMETRY = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)
CONFIG = Config(cpu_bytes=1, store_dirs=("/nowhere",), nvme_bytes=1, min_load_tokens=0)


class Served:
    """An engine with a CPU tier of eight blocks, and segments of two."""

    def __init__(self, *, drives: int, segments: int) -> None:
        sizes = Sizes(GEOMETRY, CONFIG, 40, (8,), (2,), segments, (), drives=drives)
        self.index, self.neighbours, self.rank = MemoryIndex(), FakeNeighbours([]), FakeRank(0)
        self.neighbours = self.rank.neighbours
        self.hung: set[JobKind] = set()
        """Kinds of jobs of files that do not end."""
        self.commits = True
        self.engine = FakeEngine(GEOMETRY, sizes.block_count, [self.rank])
        self.engine.now = 100.0
        self.parts = ManagerParts.make(sizes, self.engine, self.index, 0, self.neighbours)
        self.manager, self.requests = self.parts.manager, 0
        self.watch = ManagerWatch(sizes, self.parts, self.engine, [self.rank], self.index)

    def serve(self, text: str) -> None:
        """Serve a prompt, and a few steps more."""
        self.requests += 1
        request = self.engine.add(f"request {self.requests}", text, 1)
        self.neighbours.answer()
        request.finishing = True
        self.steps(8)
        assert request.id not in self.engine.requests

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.schedule(16)
            self.engine.forward()
            while runnable := [job for job in self.rank.runnable if self._kind(job) not in self.hung]:
                self.rank.run_job(runnable[0])
            for job in [job for job in self.rank._works if self._kind(job) in {JobKind.LOAD, JobKind.PROMOTE}]:
                self.rank.fail_job(job, Reason.DEADLINE)
            self.engine.update()
            if self.commits:
                self.index.commit()
            self.engine.now += 1.0
            self.watch.check()

    def _kind(self, job: int) -> JobKind:
        return self.rank._works[job].job.kind

    def on_nvme(self, text: str) -> list[int]:
        """Drives that a prompt's blocks are on; -1: nowhere."""
        catalog, segments = self.parts.catalog, self.parts.nvme.segments.specs
        rows = [catalog.find(make_block_key(text[:end].encode(), 0)) for end in range(2, len(text) + 1, 2)]
        return [
            segments[catalog.slot(row, Tier.NVME).segment].drive
            if row >= 0 and catalog.state(row, Tier.NVME) == CopyState.READY
            else -1
            for row in rows
        ]


def test_a_drive_that_is_left_alone_does_not_keep_the_others_full():
    """Of a chain the tail is on the one, and the head on the other."""
    served = Served(drives=2, segments=2)
    served.serve("aabbccddx")
    assert served.on_nvme("aabbccdd") == [0, 0, 1, 1]
    served.parts.nvme.segments.drives.read(1, served.engine.now, hangs=True)
    served.serve("eeffx")
    served.steps(4)
    assert served.on_nvme("eeff") == [0, 0]


def test_a_segment_that_is_never_made_does_not_keep_old_copies():
    served = Served(drives=2, segments=2)
    served.serve("aabbx")
    assert served.on_nvme("aabb") == [0, 0]
    served.hung = {JobKind.OPEN_SEGMENT}
    served.serve("ccddx")
    assert served.on_nvme("ccdd") == [-1, -1]
    served.engine.now += 100.0
    served.steps(4)
    assert served.on_nvme("ccdd") == [0, 0]


@pytest.mark.parametrize("full", [False, True], ids=["a record", "room that a deletion would give"])
def test_nobody_steps_for_a_commit_that_never_ends(full):
    served = Served(drives=1, segments=1 if full else 2)
    served.serve("aabbx")
    served.commits = False
    served.serve("ccddx")
    assert served.parts.nvme.status.uncommitted and bool(served.parts.demotions.count(0)) is full
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
