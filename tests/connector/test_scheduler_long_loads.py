# SPDX-License-Identifier: Apache-2.0
"""Loads that are longer than what a step plans, in vLLM's scheduler and over real workers: they
come in several jobs, and the engine hears of each once."""

from __future__ import annotations

from itertools import takewhile

import pytest
from schedulers import BLOCK_TOKENS, BLOCKS, TOKENS, prompt_of
from support.low_bounds import lower_shares

from kvdisk.manager.manager import TierManager
from kvdisk.manager.step_work import Kind
from kvdisk.messages import JobKind

MOST = 2
TWO_GROUPS = {"window_tokens": 2 * BLOCK_TOKENS}


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step plans few blocks of loads, and no failure of kvdisk's is taken for another's."""
    lower_shares(monkeypatch, MOST, Kind.LOADS)

    def lose_gpu(_: TierManager) -> None:
        raise AssertionError("a block that a job had failed to fill before was taken for another connector's")

    monkeypatch.setattr(TierManager, "lose_gpu", lose_gpu)


def assert_in_parts(bench, name):
    """Each job but the last says that others follow, and none has more than may be."""
    jobs = bench.jobs_of(JobKind.LOAD, name)
    assert len(jobs) > 1 and max(len(job.moves) for job in jobs) <= MOST
    assert [job.more for job in jobs] == [True] * (len(jobs) - 1) + [False]
    keys = [move.key for job in jobs for move in job.moves]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("nvme", [False, True])
@pytest.mark.parametrize("groups", [{}, TWO_GROUPS], ids=["one group", "two groups"])
def test_all_of_a_long_hit_is_loaded(engines, groups, nvme):
    bench = engines.make(nvme=nvme, **groups).warm(1, 2)
    for number in (1, 2):
        bench.add(f"r{number}", prompt_of(number), max_tokens=3)
    bench.finish("r1", "r2", count=3)
    for number in (1, 2):
        assert_in_parts(bench, f"r{number}")
    assert bench.counters()["hit_tokens.nvme" if nvme else "hit_tokens.cpu"] >= 2 * BLOCKS * BLOCK_TOKENS
    assert "failed_loads" not in bench.counters()


@pytest.mark.parametrize(
    ("nvme", "bad"),
    [(False, 0), (False, 1), (True, 0)],
    ids=["the first of each job", "the second of each job", "each block: one that leaves a copy takes two looks"],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_any_job_fails_to_bring_is_computed(engines, ranks, nvme, bad):
    bench = engines.make(nvme=nvme, ranks=ranks).warm(1)
    bench.fail, bench.fail_rank = {JobKind.LOAD: (bad,)}, ranks - 1
    bench.add("r1", prompt_of(1), max_tokens=3)
    while not bench.scheduler.failed_recving_kv_req_ids:
        assert not bench.step().num_scheduled_tokens
    assert_in_parts(bench, "r1")
    sizes = [blocks for _, blocks in bench.loads()]
    brought = sum(takewhile(lambda blocks: blocks <= bad, sizes)) + bad
    assert bench.step().num_scheduled_tokens == {"r1": TOKENS - brought * BLOCK_TOKENS}
    bench.fail = {}
    bench.finish("r1", count=3)
    assert bench.counters()["failed_loads"] == sum(blocks > bad for blocks in sizes) > 0


def test_of_several_groups_a_failure_takes_all_of_the_request(engines):
    bench = engines.make(**TWO_GROUPS).warm(1)
    bench.fail = {JobKind.LOAD: (1,)}
    request = bench.add("r1", prompt_of(1), max_tokens=3)
    while not bench.scheduler.failed_recving_kv_req_ids:
        assert not bench.step().num_scheduled_tokens
    assert_in_parts(bench, "r1")
    assert request.num_computed_tokens == 0
    bench.fail = {}
    bench.finish("r1", count=3)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("groups", [{}, TWO_GROUPS], ids=["one group", "two groups"])
@pytest.mark.parametrize("hold", [False, True], ids=["with some jobs ended", "with all jobs out"])
def test_an_abort_on_the_way(engines, hold, groups, steps):
    bench = engines.make(**groups).warm(1)
    bench.hold = {JobKind.LOAD} if hold else set()
    bench.add("r1", prompt_of(1))
    for _ in range(steps):
        bench.step()
    bench.abort("r1")
    held = bench.references()
    if hold:
        bench.step()
        assert bench.references() == held and held, "the load may still write to its blocks"
    bench.finish()
    assert "r1" not in bench.scheduler.requests and not bench.references()
    assert "failed_loads" not in bench.counters(), "what nobody waits for any more has not failed"
    assert bench.scheduler.reset_prefix_cache()
    bench.serve("later", prompt_of(1))
    assert_in_parts(bench, "later")


@pytest.mark.parametrize(("groups", "steps"), [({}, 1), (TWO_GROUPS, 1), (TWO_GROUPS, 2)])
def test_a_reset_on_the_way_leaves_nothing_of_before(engines, groups, steps):
    """Also what earlier jobs have brought is of the old weights."""
    bench = engines.make(**groups).warm(1)
    request = bench.add("r1", prompt_of(1), max_tokens=3)
    for _ in range(steps):
        assert not bench.step().num_scheduled_tokens
    bench.scheduler.reset_connector_cache()
    while not bench.scheduler.failed_recving_kv_req_ids:
        assert not bench.step().num_scheduled_tokens
    assert request.num_computed_tokens == 0
    bench.finish("r1", count=3)


@pytest.mark.parametrize("groups", [{}, TWO_GROUPS], ids=["one group", "two groups"])
def test_an_error_of_ours_on_the_way_fails_all_of_the_load(engines, groups, monkeypatch):
    """Also what was brought before it: nobody would tell the worker of a reset that comes later."""
    bench = engines.make(**groups).warm(1)
    request = bench.add("r1", prompt_of(1), max_tokens=3)
    bench.step()

    def collect(_plan):
        raise RuntimeError("planted")

    monkeypatch.setattr(bench.ranks[0].ours.worker, "collect", collect)
    while not bench.scheduler.failed_recving_kv_req_ids:
        assert not bench.step().num_scheduled_tokens
    assert request.num_computed_tokens == 0
    bench.finish("r1", count=3)
