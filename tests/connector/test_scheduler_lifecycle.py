# SPDX-License-Identifier: Apache-2.0
"""The life of a request that loads, step by step, on vLLM's real scheduler and kvdisk's real
workers.

The scenarios are those of vLLM's own tests of a remote prefill's life: alone, and with too few GPU
blocks. Among others: ``test_scheduler_offloading``, in any order.
"""

from __future__ import annotations

from schedulers import BLOCK_TOKENS, Bench, prompt_of
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import FinishReason, RequestStatus

from kvdisk.blocks import Tier
from kvdisk.messages import JobKind

FULL = 2 * BLOCK_TOKENS
TOKENS = FULL + 16
"""Two full blocks and a half one."""


def counts(bench: Bench) -> tuple[int, int, int]:
    """Return how many requests run, wait, and wait for a load."""
    scheduler = bench.scheduler
    return len(scheduler.running), len(scheduler.waiting), len(scheduler.kv_holding_waiting)


def test_a_life_step_by_step(engines):
    bench = engines.make().warm(1, tokens=TOKENS)
    free = bench.pool.get_num_free_blocks()
    bench.hold = {JobKind.LOAD}
    request = bench.add("a", prompt_of(1, TOKENS))
    output = bench.step()
    assert not output.scheduled_new_reqs and not output.num_scheduled_tokens
    assert counts(bench) == (0, 0, 1)
    assert bench.connector.get_external_cache_hit_sources(request, FULL) == {CacheHitSource.HOST: FULL}
    assert bench.pool.get_num_free_blocks() == free - 2
    for ended in (set(), {"a"}):
        assert bench.scheduler.finished_recving_kv_req_ids == ended
        bench.assert_waits(request, FULL)
        assert bench.hashed(bench.table("a")) == [False, False], "they are cached when the request goes on"
        bench.release()
        output = bench.step()
    (new,) = output.scheduled_new_reqs
    assert (new.num_computed_tokens, output.num_scheduled_tokens) == (FULL, {"a": 16})
    assert counts(bench) == (1, 0, 0) and not bench.scheduler.finished_recving_kv_req_ids
    assert bench.hashed(bench.table("a")) == [True, True, False]
    assert all(bench.pool.blocks[block].ref_cnt == 1 for block in bench.table("a"))
    bench.step()
    assert bench.outputs["a"][-1].finish_reason is FinishReason.LENGTH


def test_one_for_whose_load_there_is_no_room_waits_and_holds_nothing(engines):
    bench = engines.make(num_blocks=6).warm(1, tokens=3 * BLOCK_TOKENS + 1)
    bench.hold = {JobKind.LOAD}
    bench.add("other", prompt_of(2, FULL), max_tokens=8)
    bench.step()
    request = bench.add("loads", prompt_of(1, 3 * BLOCK_TOKENS + 1), max_tokens=8)
    for _ in range(5):
        bench.step()
        assert request.status is RequestStatus.WAITING
        assert not bench.jobs_of(JobKind.LOAD)
        catalog = bench.manager._catalog
        assert not any(catalog.pins(row, Tier.CPU) for row in map(catalog.find, bench.keys("loads")) if row >= 0)
    while request.status is RequestStatus.WAITING:
        bench.step()
    bench.assert_waits(request, 3 * BLOCK_TOKENS)
    bench.finish("other", "loads", count=8)
    assert len(bench.jobs_of(JobKind.LOAD)) == 1
