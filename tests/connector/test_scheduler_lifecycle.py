# SPDX-License-Identifier: Apache-2.0
"""The life of a request that loads, step by step, on vLLM's real scheduler and kvdisk's real
workers.

The scenarios are those of vLLM's own tests of a remote prefill's life: alone, among others, with
too few GPU blocks.
"""

from __future__ import annotations

from typing import Any

import pytest
from byte_bench import ByteBench
from schedulers import BLOCK_TOKENS, Engines, prompt_of
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import FinishReason, RequestStatus

from kvdisk.blocks import Tier
from kvdisk.messages import JobKind

pytestmark = pytest.mark.vllm

TOKENS = 2 * BLOCK_TOKENS + 16
"""Two full blocks and a half one."""


def warm(bench: ByteBench, tokens: int = TOKENS) -> ByteBench:
    """Let prompt 1 be in memory, and not on the GPU."""
    bench.serve("before", prompt_of(1, tokens))
    bench.forget()
    bench.jobs.clear()
    return bench


def counts(bench: ByteBench) -> tuple[int, int, int]:
    """Return how many requests run, wait, and wait for a load."""
    scheduler = bench.scheduler
    return len(scheduler.running), len(scheduler.waiting), len(scheduler.kv_holding_waiting)


def test_a_life_step_by_step(engines: Engines) -> None:
    bench = warm(engines.make())
    free = bench.pool.get_num_free_blocks()
    bench.hold = {JobKind.LOAD}
    request = bench.add("a", prompt_of(1, TOKENS), max_tokens=2)
    output = bench.step()
    assert not output.scheduled_new_reqs and not output.num_scheduled_tokens
    assert counts(bench) == (0, 0, 1)
    bench.assert_waits(request, 2 * BLOCK_TOKENS)
    assert bench.connector.get_external_cache_hit_sources(request, 2 * BLOCK_TOKENS) == {
        CacheHitSource.HOST: 2 * BLOCK_TOKENS
    }
    assert bench.pool.get_num_free_blocks() == free - 2
    assert bench.hashed(bench.table("a")) == [False, False]
    bench.release()
    bench.step()
    assert bench.scheduler.finished_recving_kv_req_ids == {"a"}
    bench.assert_waits(request, 2 * BLOCK_TOKENS)
    assert bench.hashed(bench.table("a")) == [False, False], "they are cached when the request goes on"
    output = bench.step()
    (new,) = output.scheduled_new_reqs
    assert (new.num_computed_tokens, output.num_scheduled_tokens) == (2 * BLOCK_TOKENS, {"a": 16})
    assert counts(bench) == (1, 0, 0) and not bench.scheduler.finished_recving_kv_req_ids
    assert bench.hashed(bench.table("a")) == [True, True, False]
    assert all(bench.pool.blocks[block].ref_cnt == 1 for block in bench.table("a"))
    bench.step()
    assert bench.outputs["a"][-1].finish_reason is FinishReason.LENGTH
    bench.step()
    assert bench.pool.get_num_free_blocks() == free
    bench.assert_quiet()


@pytest.mark.parametrize("pipelined", [False, True])
def test_others_go_on_meanwhile(engines: Engines, pipelined: bool) -> None:
    bench = warm(engines.make(pipelined=pipelined))
    bench.hold = {JobKind.LOAD}
    bench.add("local", prompt_of(2, TOKENS), max_tokens=12)
    bench.step()
    bench.add("other local", prompt_of(3, TOKENS), max_tokens=12)
    bench.add("loads", prompt_of(1, TOKENS), max_tokens=12)
    output = bench.step()
    assert [new.req_id for new in output.scheduled_new_reqs] == ["other local"]
    for _ in range(3):
        assert set(bench.step().num_scheduled_tokens) == {"local", "other local"}
        assert counts(bench) == (2, 0, 1)
    bench.release()
    while counts(bench) != (3, 0, 0):
        output = bench.step()
    assert [new.req_id for new in output.scheduled_new_reqs] == ["loads"]
    assert output.num_scheduled_tokens == {"local": 1, "other local": 1, "loads": 16}
    bench.run()
    assert [len(bench.sampled(name)) for name in ("local", "other local", "loads")] == [12] * 3
    bench.assert_quiet()


def test_nobody_hits_blocks_that_are_not_loaded_yet(engines: Engines) -> None:
    bench = warm(engines.make())
    bench.hold = {JobKind.LOAD}
    loads = bench.add("loads", prompt_of(1, TOKENS), max_tokens=4)
    bench.step()
    bench.add("computes", prompt_of(1, TOKENS), max_tokens=4, params={"max_load_tokens": 0})
    assert bench.step().num_scheduled_tokens == {"computes": TOKENS}
    assert bench.hashed(bench.table("computes"))[:2] == [True, True]
    assert bench.hashed(bench.table("loads")) == [False, False]
    assert not set(bench.table("loads")) & set(bench.table("computes"))
    bench.assert_waits(loads, 2 * BLOCK_TOKENS)
    bench.release()
    bench.run()
    assert bench.sampled("loads") == bench.sampled("computes")
    bench.assert_quiet()


def test_one_that_finds_no_room_to_go_on_comes_back(engines: Engines) -> None:
    """Its blocks are loaded, and the next one it needs is somebody else's: it is preempted, and
    comes back later."""
    bench = warm(engines.make(num_blocks=6), 2 * BLOCK_TOKENS + 1)
    other = bench.add("other", prompt_of(2, 2 * BLOCK_TOKENS), max_tokens=8)  # three of five blocks
    bench.step()
    loads = bench.add("loads", prompt_of(1, 2 * BLOCK_TOKENS + 1), max_tokens=4)
    for _ in range(20):
        bench.step()
        assert other.num_preemptions == 0
        if other.is_finished():
            break
    assert loads.num_output_tokens == 0
    bench.run()
    assert [len(bench.sampled(name)) for name in ("other", "loads")] == [8, 4]
    assert bench.counters()["hit_tokens.cpu"] >= 2 * BLOCK_TOKENS
    bench.assert_quiet()


def test_one_for_whose_load_there_is_no_room_waits_and_holds_nothing(engines: Engines) -> None:
    bench = warm(engines.make(num_blocks=6), 3 * BLOCK_TOKENS + 1)
    bench.hold = {JobKind.LOAD}
    bench.add("other", prompt_of(2, 2 * BLOCK_TOKENS), max_tokens=8)
    bench.step()
    request = bench.add("loads", prompt_of(1, 3 * BLOCK_TOKENS + 1), max_tokens=4)
    for _ in range(5):
        bench.step()
        assert request.status is RequestStatus.WAITING
        assert not bench.jobs_of(JobKind.LOAD)
        catalog = bench._manager._catalog
        assert not any(catalog.pins(row, Tier.CPU) for row in map(catalog.find, bench.keys("loads")) if row >= 0)
    while request.status is RequestStatus.WAITING:
        bench.step()
    bench.assert_waits(request, 3 * BLOCK_TOKENS)
    bench.release()
    bench.run()
    assert len(bench.jobs_of(JobKind.LOAD)) == 1
    assert [len(bench.sampled(name)) for name in ("other", "loads")] == [8, 4]
    bench.assert_quiet()


def test_one_that_is_loaded_goes_on_though_a_victim_finds_no_room(engines: Engines) -> None:
    """It holds four of seven blocks, and the victim, which comes before it, needs four: one of them
    must go on."""
    bench = warm(engines.make(num_blocks=8), 4 * BLOCK_TOKENS + 1)
    victim = bench.add("victim", prompt_of(2, BLOCK_TOKENS + 10), max_tokens=60)
    bench.step()
    bench.hold = {JobKind.LOAD}
    bench.add("loads", prompt_of(1, 4 * BLOCK_TOKENS + 1), max_tokens=8)
    while not victim.num_preemptions:
        assert "victim" in bench.step().num_scheduled_tokens or victim.num_preemptions
    for _ in range(3):
        assert not bench.step().num_scheduled_tokens
    bench.release()
    bench.run()
    assert [len(bench.sampled(name)) for name in ("victim", "loads")] == [60, 8]
    bench.assert_quiet()


@pytest.mark.parametrize(("limit", "pipelined"), [(1, True), (2, False), (8, True)])
def test_loads_count_among_the_requests_that_may_run(engines: Engines, limit: int, pipelined: bool) -> None:
    """More requests than may run at once, all of which load: whatever the engine's limit, all are
    served."""
    bench = engines.make(max_seqs=limit, pipelined=pipelined)
    for number in range(4):
        bench.serve(f"before {number}", prompt_of(number, TOKENS))
    bench.forget()
    bench.hold = {JobKind.LOAD}
    requests: list[Any] = [bench.add(f"r{number}", prompt_of(number, TOKENS), max_tokens=5) for number in range(4)]
    bench.step()
    assert sum(request.status is RequestStatus.WAITING_FOR_REMOTE_KVS for request in requests) >= min(limit, 4)
    bench.release()
    most = 0
    while bench.scheduler.requests:
        bench.step()
        most = max(most, len(bench.scheduler.running))
    bench.run()
    assert most == min(limit, 4)
    assert [len(bench.sampled(request.request_id)) for request in requests] == [5] * 4
    assert bench.counters()["hit_tokens.cpu"] == 4 * 2 * BLOCK_TOKENS
    bench.assert_quiet()
