# SPDX-License-Identifier: Apache-2.0
"""Loads that are longer than what a step plans: how the manager divides them, and what a worker
makes of it."""

from __future__ import annotations

import pytest
from support.low_bounds import lower_shares
from tier_bench import TierBench

from kvdisk.blocks import JobId, Tier, make_block_key
from kvdisk.manager.step_work import Kind
from kvdisk.messages import Job, JobKind, Move
from kvdisk.worker.request_loads import RequestLoads

PROMPT = "aabbccddeeffgghhx"
BLOCKS = 8


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> TierBench:
    """What a step plans is three blocks; the prompt's blocks are in memory alone."""
    lower_shares(monkeypatch, 3, Kind.LOADS)
    made = TierBench([20])
    made.add(PROMPT)
    made.finish()
    made.engine.pool.forget_all()
    return made


def loads(plan) -> list[tuple[int, bool]]:
    """Return of each load in a plan how many blocks it has, and whether others follow."""
    return [(len(job.moves), job.more) for job in plan.jobs if job.kind is JobKind.LOAD]


def pins(bench: TierBench) -> list[int]:
    return [bench.catalog.pins(row, Tier.CPU) for row in bench.rows(PROMPT)]


def test_a_step_plans_a_part_and_all_copies_are_pinned_from_the_start(bench):
    bench.add(PROMPT)
    assert loads(bench.step()) == [(1, True), (2, True)], "the call that finds and pins all plans less"
    assert pins(bench) == [0] * 3 + [1] * 5, "those of the first jobs were read"
    assert bench.manager.has_pending_work(bench.now)
    assert loads(bench.step()) == [(3, True)]
    assert loads(bench.step()) == [(2, False)]
    bench.finish()
    assert pins(bench) == [0] * 8
    assert bench.stats["loaded_blocks"] == BLOCKS and bench.stats["hit_blocks.cpu"] == BLOCKS


def test_a_load_that_is_longer_than_memory_leaves_its_head_there(monkeypatch):
    """Its later jobs evict nothing of what its earlier ones have left."""
    lower_shares(monkeypatch, 2, Kind.LOADS)
    bench = TierBench([4], [20], nvme_admission="all", prefetch=False)
    bench.idle()
    for end in (4, 8, 12, 17):  # half of memory may wait for the drive
        bench.add(PROMPT[:end])
        bench.finish()
    bench.parts.cpu.discard(*(row for row in bench.rows(PROMPT) if bench.catalog.readable(row, Tier.CPU)))
    bench.engine.pool.forget_all()
    hit = sum(bench.held(PROMPT))
    bench.add(PROMPT)
    bench.finish()
    assert bench.stats["hit_blocks.nvme"] == hit > 4
    assert bench.held(PROMPT, Tier.CPU)[:5] == [True] * 4 + [False]


def test_those_that_wait_share_what_a_step_plans(bench):
    for name in range(2):
        bench.engine.pool.forget_all()
        bench.add(PROMPT[:16] + "xy"[name])
    found = []
    while bench.engine.requests:
        found.append(sum(count for count, _ in loads(bench.step())))
    assert max(found) <= 2 * 3, "each that begins has a job of its own"
    assert sum(found) in {BLOCKS, 2 * BLOCKS}, "the second waits for the first's, or loads"


def test_a_later_job_reads_no_copy_that_was_found_bad_meanwhile(bench):
    bench.add(PROMPT)
    bench.step()
    bench.parts.cpu.discard(bench.rows(PROMPT)[4])
    (job,) = (job for job in bench.step().jobs if job.kind is JobKind.LOAD)
    assert [bool(move.slots) for move in job.moves] == [True, False, True]
    bench.finish()
    assert pins(bench) == [0] * BLOCKS


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_abort_gives_all_pins_back(bench, steps):
    request = bench.add(PROMPT)
    for _ in range(steps):
        bench.step()
    bench.engine.abort(request)
    bench.finish()
    assert pins(bench) == [0] * 8
    assert not bench.stats["failed_loads"]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_reset_fails_all_of_it(bench, steps):
    """The engine compares all that a request reads with what the new weights make of it."""
    bench.add(PROMPT)
    for _ in range(steps):
        bench.step()
    bench.change_weights()
    bench.finish()
    assert all(pin == 0 for row in bench.rows(PROMPT) if row >= 0 for pin in [bench.catalog.pins(row, Tier.CPU)])


def job(number: int, blocks: tuple[int, ...], *, more: bool) -> Job:
    moves = tuple(Move(make_block_key(b"%d" % block, 0), 1, (block,)) for block in blocks)
    return Job(JobId(number), JobKind.LOAD, moves, request_id="r", more=more)


def test_a_worker_reports_a_load_once_with_all_that_failed():
    found = RequestLoads()
    found.begin([job(1, (10, 11), more=True)])
    assert found.end({JobId(1): [1]}) == {}
    found.begin([job(2, (12,), more=True)])
    found.begin([job(3, (13, 14), more=False)])
    assert found.end({JobId(3): [0]}) == {} and len(found) == 1
    assert found.end({JobId(2): [], JobId(9): [0]}) == {"r": [11, 13]}
    assert not len(found) and not found.jobs
    found.begin([job(4, (1,), more=False)])
    assert found.end({JobId(4): []}) == {"r": []}


@pytest.mark.parametrize("void", [1, 2, 3])
def test_a_void_job_takes_all_of_its_load_along(void):
    found = RequestLoads()
    found.begin([job(1, (10, 11), more=True)])
    found.end({JobId(1): []})
    found.begin([job(2, (12,), more=True), job(3, (13,), more=False)])
    found.void([JobId(void)])
    found.end({JobId(2): []})
    assert found.end({JobId(3): []}) == {"r": [10, 11, 12, 13]}
