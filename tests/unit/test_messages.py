# SPDX-License-Identifier: Apache-2.0
"""What goes to workers that are processes of their own."""

from __future__ import annotations

import pickle
import pickletools

import pytest

from kvdisk.blocks import BlockKey, JobId, Slot, Tier
from kvdisk.messages import Job, JobKind, Move, Plan, Report, SegmentSpec, StoreMoves, places_in

PROTOCOL = pickle.HIGHEST_PROTOCOL
"""vLLM: with it an executor of several processes sends what a step needs."""


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(36, "big"))


def load_of(count: int) -> Job:
    """Return a load with all that a move can have: sources of each tier, copies that stay in
    memory, and blocks that nobody has any more."""
    sources: list[dict[Tier, Slot]] = [
        {Tier.CPU: Slot(1, 3)},
        {Tier.NVME: Slot(2, 4), Tier.CPU: Slot(0, 7)},
        {Tier.CPU: Slot(0, 8), Tier.NVME: Slot(5, 6)},
        {Tier.REMOTE: Slot(0, 0)},
        {},
    ]
    moves = [
        Move(key(at), at * 5, (at + 1, at + 2)[: 1 + at % 2], sources[at % len(sources)], key(at - 1) if at else None)
        for at in range(count)
    ]
    return Job(JobId(7), JobKind.LOAD, tuple(moves), epoch=2, request_id="a", arrival=3, more=True)


def rows_of(count: int) -> StoreMoves:
    """Return the moves of a store by key."""
    keys, slots = list(map(key, range(count))), [Slot(2, at + 9) for at in range(count)]
    return StoreMoves(keys, range(100, 100 + count), list(zip(range(count))), Tier.NVME, slots, [None, *keys][:count])


@pytest.mark.parametrize(
    "job",
    [
        load_of(1),
        load_of(40),
        Job(JobId(8), JobKind.OPEN_SEGMENT, segment=SegmentSpec(3, 4096, 10)),
        Job(JobId(9), JobKind.STORE, (Move(key(1), 1, (5,)),)),
    ],
)
def test_a_plan_arrives_as_it_was_sent(job):
    plan = Plan((job, job), fence=(job.id,))
    found = pickle.loads(pickle.dumps(plan, PROTOCOL))  # noqa: S301
    assert found == plan
    for move, sent in zip(found.jobs[0].moves, job.moves, strict=True):
        assert type(move) is Move and list(move.slots) == list(sent.slots)
        assert all(type(slot) is Slot for slot in move.slots.values())


def test_what_a_step_sends_of_a_move_is_a_few_values():
    """Move by move it was 27 instructions of the pickle, and a step waited for calls of Python."""

    def instructions(count: int) -> int:
        return sum(1 for _ in pickletools.genops(pickle.dumps(Plan((load_of(count),)), PROTOCOL)))

    assert instructions(2000) - instructions(1000) <= 10 * 1000


def test_what_any_rank_has_lost_is_heard():
    report = Report().merge(Report(removed={3})).merge(Report(removed={3, 4})).merge(Report())
    assert report.removed == {3, 4} and not report.empty


@pytest.mark.parametrize("count", [0, 1, 40])
def test_moves_by_column_are_what_they_would_be_one_by_one(count):
    moves = rows_of(count)
    alone = tuple(
        Move(key(at), 100 + at, (at,), {Tier.NVME: Slot(2, at + 9)}, key(at - 1) if at else None) for at in range(count)
    )
    assert tuple(moves) == alone and moves[1:3] == alone[1:3] and len(moves) == count
    for tier in (Tier.CPU, Tier.NVME):
        assert list(places_in(moves, tier)) == list(places_in(alone, tier))
    job = Job(JobId(8), JobKind.STORE, moves, epoch=1)
    assert pickle.loads(pickle.dumps(job, PROTOCOL)) == job._replace(moves=alone)  # noqa: S301


def test_what_a_step_sends_of_a_store_by_key_is_a_few_values():
    def instructions(count: int) -> int:
        job = Job(JobId(8), JobKind.STORE, rows_of(count))
        return sum(1 for _ in pickletools.genops(pickle.dumps(Plan((job,)), PROTOCOL)))

    assert instructions(2000) - instructions(1000) <= 10 * 1000
