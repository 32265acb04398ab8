# SPDX-License-Identifier: Apache-2.0
"""GPU blocks whose stores are out, on vLLM's real scheduler and kvdisk's real workers: free at
once, and stored right.

The scenarios are those of the fences in vLLM's own tests of its offloading connector.
"""

from __future__ import annotations

import os
import threading
from itertools import islice
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, OTHER, PROMPT, Bench, Engines, prompt_of
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import RequestStatus

from kvdisk.blocks import Tier
from kvdisk.device import aio
from kvdisk.errors import ConfigError
from kvdisk.messages import JobKind

PLACES: dict[str, dict[str, Any]] = {
    "alone": {},
    "pipelined": {"pipelined": True},
    "two ranks": {"ranks": 2},
    "no CPU tier": {"nvme": True, "extra": {"cpu_bytes": 0}},
}
SMALL = 7
"""GPU blocks of a pool that a prompt and what it samples fill."""


def ended_with_stores_out(engines: Engines, place: str, num_blocks: int, *before: int) -> Bench:
    """Serve prompts ``before``; then run request "a", of ``PROMPT``, to its end, while not a byte
    of its stores moves."""
    bench: Bench = engines.make(num_blocks=num_blocks, **PLACES[place])
    if place == "no CPU tier":
        bench.warm(9)  # while it runs the first segment is made
    bench.warm(*before)
    bench.hold = {JobKind.STORE}
    bench.add("a", PROMPT)
    bench.run_until_finished("a")
    assert set(bench.keys("a")[:4]) <= set(bench.stored())
    return bench


def assert_right_copies(bench: Bench, *prompts: list[int]) -> None:
    """End it, and load what was stored of these prompts."""
    bench.finish()
    for at, prompt in enumerate(prompts):
        bench.forget()
        bench.serve(f"again {at}", prompt)
        assert bench.jobs_of(JobKind.LOAD, f"again {at}")
    assert "failed_loads" not in bench.counters()


def serve_the_next(bench: Bench) -> None:
    """Serve a request that needs all the blocks of a small pool: whatever is copied from them
    first."""
    request = bench.add("next", OTHER, max_tokens=50)
    bench.step(80)
    assert request.is_finished()


@pytest.mark.parametrize("then", ["computes", "loads", "computes after a reset"])
@pytest.mark.parametrize("place", PLACES)
def test_blocks_of_one_that_is_over_are_free_and_copied_before_the_next_one_writes_to_them(engines, place, then):
    bench = ended_with_stores_out(engines, place, SMALL, *[2] * (then == "loads"))
    assert not bench.references()
    assert bench.pool.get_num_free_blocks() == SMALL - 1
    assert bench.connector.has_pending_push_work()
    assert not bench.connector.has_pending_block_frees(), "nothing comes free when it ends"
    if "reset" in then:
        assert bench.scheduler.reset_prefix_cache()
    serve_the_next(bench)
    assert bool(bench.jobs_of(JobKind.LOAD, "next")) == (then == "loads")
    assert_right_copies(bench, PROMPT, OTHER)


def test_blocks_that_a_window_has_passed_are_free_though_their_stores_are_out(engines):
    bench = engines.make(num_blocks=16, window_tokens=BLOCK_TOKENS + 1, extra={"store_decode": True})
    bench.hold = {JobKind.STORE}
    request = bench.add("a", prompt_of(1, 100), max_tokens=150)
    bench.step(155)
    assert request.is_finished() and request.num_preemptions == 0, "eight blocks and a window of two are not too many"
    assert not bench.references()
    assert_right_copies(bench, prompt_of(1, 100) + bench.sampled("a")[:100])


def test_another_connector_that_watches_the_same_blocks_later(engines):
    """It pins them while the request runs, and unpins them with a watcher of its own."""
    bench = engines.make(num_blocks=SMALL)
    bench.hold = {JobKind.STORE}
    bench.add("a", PROMPT)
    bench.step()
    pinned = [bench.pool.blocks[block_id] for block_id in bench.table("a")[:4]]
    bench.pool.touch(pinned)
    bench.run_until_finished("a")
    heard: list[int] = []
    bench.pool.unpin_blocks(pinned, lambda block: heard.append(block.block_id))
    serve_the_next(bench)
    assert set(heard) == {block.block_id for block in pinned}
    assert_right_copies(bench, PROMPT, OTHER)


@pytest.mark.parametrize("place", ["alone", "pipelined", "two ranks"])
def test_blocks_that_the_engine_zeroes_before_their_copy_began_leave_nothing(engines, monkeypatch, place):
    """No wait helps: they are overwritten before kvdisk hears of the step."""
    bench = ended_with_stores_out(engines, place, SMALL)
    before = bench.pool.free_block_queue.get_all_free_blocks()
    taken: list[int] = []

    def new_blocks() -> list[int]:
        new = [block.block_id for block in before if block.ref_cnt and block.block_id not in taken]
        taken.extend(new)
        return new

    monkeypatch.setattr(bench.scheduler, "_get_new_block_ids_to_zero", new_blocks)
    serve_the_next(bench)
    assert len(taken) == 6
    bench.finish()
    assert bench.counters()["overwritten_blocks"] == 3
    assert len(bench.in_tier(Tier.CPU) & set(bench.keys("a")[:4])) == 1, "the step could wait for the last one"
    bench.forget()
    bench.serve("again", PROMPT)


def test_an_engine_that_zeroes_needs_a_cpu_tier(engines, monkeypatch):
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
    with pytest.raises(ConfigError, match="kvdisk needs a CPU tier"):
        engines.make(nvme=True, extra={"cpu_bytes": 0})
    engines.make()


@pytest.mark.parametrize("pipelined", [False, True])
def test_new_weights_while_stores_are_out(engines, pipelined):
    """The engine resets everything at once, and the blocks that the stores read hold KV of the new
    weights soon."""
    bench = engines.make(pipelined=pipelined)
    bench.hold = {JobKind.STORE}
    request = bench.add("a", PROMPT, max_tokens=25)
    bench.step(3)
    while bench.behind:
        bench.update()
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    bench.weights += 1
    bench.step()
    assert request.status is RequestStatus.RUNNING
    bench.finish()
    assert bench.in_tier(Tier.CPU) == set(bench.keys("a")[:4]), "stored again, computed with the new weights"
    assert_right_copies(bench, PROMPT)


def test_what_a_request_computes_over_kv_of_old_weights_is_not_stored(engines):
    bench = engines.make(extra={"store_decode": True})
    bench.add("a", PROMPT, max_tokens=2 * BLOCK_TOKENS)
    bench.step(3)
    assert bench.scheduler.reset_connector_cache()
    bench.jobs.clear()
    bench.run()
    assert bench.stored() == [] and bench.in_tier(Tier.CPU) == set()


def test_slow_and_hanging_writes_cost_an_engine_without_a_cpu_tier_no_step(engines, monkeypatch):
    """Half of the pool was once held until the drive had written, and one write that hung stopped
    all decoding. Nothing is loaded: a preempted request would wait for writes of its own blocks, as
    long as it may."""
    monkeypatch.setattr(aio, "serves", lambda _fd: False)  # threads write, and Python can hold them up
    extra = {"cpu_bytes": 0, "min_load_tokens": 1000, "lookup_wait_s": 0}
    bench = engines.make(threaded=True, max_seqs=16, nvme=True, extra=extra)
    write, gate, numbers = os.pwritev, threading.Event(), iter(range(1, 1000))

    def steps_of_40_requests() -> int:
        requests = [bench.add(f"r{number}", prompt_of(number, 190), 10) for number in islice(numbers, 40)]
        steps = 0
        while not all(request.is_finished() for request in requests):
            bench.step()
            steps += 1
        return steps

    bench.warm(0)  # while it runs the first segment is made
    usual = steps_of_40_requests()
    bench.run()
    monkeypatch.setattr(os, "pwritev", lambda *given: (gate.wait(0.5), write(*given))[1])
    slow = steps_of_40_requests()
    monkeypatch.setattr(os, "pwritev", lambda *given: (gate.wait(600.0), write(*given))[1])
    hung = steps_of_40_requests()
    assert bench.connector.has_pending_push_work()
    gate.set()
    assert slow == hung == usual
