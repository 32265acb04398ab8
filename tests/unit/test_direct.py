# SPDX-License-Identifier: Apache-2.0
"""Moves between drive and GPU staging: slots of both ways side by side, what sends a move the other
way, and that no leg begins before the GPU has ended the one before. What both ways have in common
is in ``test_mover*.py``."""

from __future__ import annotations

import errno

import pytest
from ranks import CpuLanes, Rank, move, segment_of

from kvdisk.blocks import Tier
from kvdisk.device.base import Op
from kvdisk.device.header import MULTILINEAR, XXH3_128, read_header
from kvdisk.geometry import slot_offset
from kvdisk.messages import JobKind, Reason
from kvdisk.worker.direct import MOST_FAILED_READS
from kvdisk.worker.routes import route_between

STORED = range(6)
LOAD_STAGED = route_between(JobKind.LOAD, Tier.NVME)
STORE_STAGED = route_between(JobKind.STORE, Tier.NVME)


@pytest.fixture
def rank():
    made = Rank(direct=True, staging_slots=16)
    made.run()
    yield made
    made.close()


def slot_on_drive(rank: Rank, group: int, index: int) -> memoryview:
    size = segment_of(group).slot_bytes
    start = slot_offset(size, index)
    return memoryview(rank.memory.contents(100 + group))[start : start + size]


def store(rank: Rank, group: int = 0):
    moves = [move(b, group, b, nvme=b) for b in STORED]
    before = {b: rank.payload(group, b) for b in STORED}
    assert rank.do(JobKind.STORE, moves) == {}
    rank.erase()
    return moves, before


def test_slots_that_a_gpu_cannot_verify_are_read_again_and_their_segment_by_the_host_from_then_on(rank):
    rank.direct.loads, rank.direct.stores, every = frozenset(), frozenset(), rank.direct.loads
    moves, before = store(rank)
    assert read_header(slot_on_drive(rank, 0, 0)).checksum_kind == XXH3_128
    rank.direct.loads = rank.direct.stores = every
    seen = len(rank.device.submitted)
    assert rank.do(JobKind.LOAD, moves) == {}
    assert {b: rank.payload(0, b) for b in STORED} == before
    twice = len(rank.device.submitted) - seen
    rank.erase()
    seen = len(rank.device.submitted)
    assert rank.do(JobKind.LOAD, moves) == {}
    assert {b: rank.payload(0, b) for b in STORED} == before
    assert len(rank.device.submitted) - seen == twice / 2
    rank.do(JobKind.DROP_SEGMENT, segment=segment_of(0))
    assert rank.direct.route(LOAD_STAGED, rank.classes[0], moves[0]) is LOAD_STAGED.on_gpu


def test_what_the_drive_fails_goes_through_host_memory_from_then_on(rank):
    moves, before = store(rank)
    elsewhere = move(0, 0, 0, nvme=0, segment=7)
    together_and_alone = range(rank.device._transfers + 1, rank.device._transfers + 4)
    rank.device.plan.fail = dict.fromkeys(together_and_alone, errno.EIO)
    assert rank.do(JobKind.LOAD, moves[:2]) == {}, "read again"
    assert {b: rank.payload(0, b) for b in range(2)} == {b: before[b] for b in range(2)}
    straight = [rank.direct.route(LOAD_STAGED, rank.classes[0], each) for each in (moves[0], elsewhere)]
    assert straight == [LOAD_STAGED, LOAD_STAGED.on_gpu], "its segment alone"
    rank.device.plan.fail = {rank.device._transfers + 1: errno.EIO}
    written = [move(30, 0, 30, nvme=30)]
    assert rank.do(JobKind.STORE, written) == {0: Reason.IO_ERROR}
    assert rank.do(JobKind.STORE, written) == {}
    assert rank.direct.route(STORE_STAGED, rank.classes[0], written[0]) is STORE_STAGED
    assert read_header(slot_on_drive(rank, 0, 30)).checksum_kind == MULTILINEAR, "a later start may read it straight"


def test_a_way_whose_reads_keep_failing_is_not_gone_any_more(rank, caplog):
    """Also where its segments are made anew, and so are tried again each time."""
    moves, before = store(rank)
    for _ in range(MOST_FAILED_READS):
        assert rank.direct.route(STORE_STAGED, rank.classes[0], moves[0]) is STORE_STAGED.on_gpu
        rank.direct.note_changed(0)
        rank.device.plan.fail = dict.fromkeys(range(rank.device._transfers + 1, rank.device._transfers + 4), errno.EIO)
        assert rank.do(JobKind.LOAD, moves[:2]) == {}
    rank.direct.note_changed(0)
    ways = [(LOAD_STAGED, 0), (STORE_STAGED, 0), (STORE_STAGED, 1)]
    assert [rank.direct.route(way, rank.classes[group], moves[0]) for way, group in ways] == [way for way, _ in ways]
    assert sum("reads with GPUDirect Storage keep failing" in message for message in caplog.messages) == 1
    rank.device.plan.fail = {}
    rank.erase()
    assert rank.do(JobKind.LOAD, moves) == {}
    assert {b: rank.payload(0, b) for b in STORED} == before
    assert rank.do(JobKind.STORE, [move(30, 0, 30, nvme=30)]) == {}
    assert read_header(slot_on_drive(rank, 0, 30)).checksum_kind == MULTILINEAR, "a later start may read it straight"


class Later:
    """An event that has not come."""

    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.ended = True


class SlowLanes(CpuLanes):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[Later] = []

    def record(self, lane):
        self.events.append(Later())
        return self.events[-1]


def test_no_leg_begins_before_the_gpu_has_ended_the_last(rank):
    lanes = rank.direct.staging._lanes = SlowLanes()
    moves = [move(b, 0, b, nvme=b) for b in range(2)]
    before = [rank.payload(0, b) for b in range(2)]
    job = rank.submit(JobKind.STORE, moves)
    rank.run()
    rank.erase()
    assert (len(lanes.events), rank.device.submitted) == (1, [])
    lanes.events[0].ended = True
    rank.run()
    assert (len(lanes.events), rank.device.submitted) == (2, []), "the headers are on their way"
    lanes.events[1].ended = True
    assert rank.run()[job].failed == {}
    assert [op for op, _ in rank.device.submitted] == [Op.WRITE]

    job = rank.submit(JobKind.LOAD, moves)
    rank.run()
    assert len(lanes.events) == 3
    assert all(rank.is_erased(0, b) for b in range(2)), "nothing is scattered before it is verified"
    lanes.events[2].ended = True
    assert rank.run()[job].failed == {}
    assert [rank.payload(0, b) for b in range(2)] == before
