# SPDX-License-Identifier: Apache-2.0
"""GPU blocks whose stores are out, on vLLM's real scheduler and kvdisk's real workers: free at
once, and stored right.

The scenarios are those of the fences in vLLM's own tests of its offloading connector.
"""

from __future__ import annotations

from typing import Any

import pytest
from byte_bench import ByteBench
from schedulers import BLOCK_TOKENS, Engines, prompt_of
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import RequestStatus

from kvdisk.blocks import Tier
from kvdisk.errors import ConfigError
from kvdisk.messages import JobKind

pytestmark = pytest.mark.vllm

TOKENS = 3 * BLOCK_TOKENS + 5
PLACES: list[dict[str, Any]] = [{}, {"pipelined": True}, {"ranks": 2}, {"nvme": True, "extra": {"cpu_bytes": 0}}]
NAMES = ["alone", "pipelined", "two ranks", "no CPU tier"]


def start(engines: Engines, place: dict[str, Any], num_blocks: int, **more: Any) -> ByteBench:
    bench = engines.make(num_blocks=num_blocks, **place, **more)
    if "nvme" in place:
        bench.serve("first", prompt_of(9, TOKENS))  # while it runs the first segment is made
        bench.forget()
    return bench


def finish_with_stores_out(bench: ByteBench, max_tokens: int = 2) -> None:
    """Run a request of prompt 1 to its end, while not a byte of its stores moves."""
    bench.hold = {JobKind.STORE}
    bench.add("a", prompt_of(1, TOKENS), max_tokens=max_tokens)
    bench.run_until_finished("a")
    assert set(bench.keys("a")[:3]) <= set(bench.stored())


def assert_right_copies(bench: ByteBench, *prompts: list[int]) -> None:
    """End it, and load what was stored of these prompts."""
    bench.release()
    bench.run()
    for at, prompt in enumerate(prompts):
        bench.forget()
        bench.serve(f"again {at}", prompt)
        assert bench.jobs_of(JobKind.LOAD, f"again {at}")
    assert "failed_loads" not in bench.counters()
    bench.assert_quiet()


@pytest.mark.parametrize("place", PLACES, ids=NAMES)
def test_blocks_of_one_that_is_over_are_free_at_once(engines: Engines, place: dict[str, Any]) -> None:
    bench = start(engines, place, 64)
    finish_with_stores_out(bench)
    assert not bench.references()
    assert bench.pool.get_num_free_blocks() == 63
    assert bench.connector.has_pending_push_work()
    assert not bench.connector.has_pending_block_frees(), "nothing comes free when it ends"
    assert bench.scheduler.reset_prefix_cache()
    assert_right_copies(bench, prompt_of(1, TOKENS))


@pytest.mark.parametrize("loads", [False, True], ids=["computes", "loads"])
@pytest.mark.parametrize("place", PLACES, ids=NAMES)
def test_they_are_copied_before_the_next_one_writes_to_them(
    engines: Engines, place: dict[str, Any], loads: bool
) -> None:
    bench = start(engines, place, 6)
    if loads:
        bench.serve("before", prompt_of(2, TOKENS))
        bench.forget()
    finish_with_stores_out(bench)
    request = bench.add("next", prompt_of(2, TOKENS), max_tokens=50)
    for _ in range(80):
        bench.step()
    assert bool(bench.jobs_of(JobKind.LOAD, "next")) == loads
    assert request.is_finished(), "it had all five blocks, whatever was to be copied from them first"
    assert_right_copies(bench, prompt_of(1, TOKENS), prompt_of(2, TOKENS))


def test_blocks_that_a_window_has_passed_are_free_though_their_stores_are_out(engines: Engines) -> None:
    bench = engines.make(num_blocks=16, window_tokens=BLOCK_TOKENS + 1, extra={"store_decode": True})
    bench.hold = {JobKind.STORE}
    request = bench.add("a", prompt_of(1, TOKENS), max_tokens=150)
    for _ in range(155):
        bench.step()
    assert request.is_finished() and request.num_preemptions == 0, "eight blocks and a window of two are not too many"
    assert not bench.references()
    assert_right_copies(bench, prompt_of(1, TOKENS) + bench.sampled("a")[:100])


def test_another_connector_that_watches_the_same_blocks_later(engines: Engines) -> None:
    """It pins them while the request runs, and unpins them with a watcher of its own."""
    bench = engines.make(num_blocks=6)
    bench.hold = {JobKind.STORE}
    request = bench.add("a", prompt_of(1, TOKENS), max_tokens=2)
    bench.step()
    pinned = [bench.pool.blocks[block_id] for block_id in bench.table("a")[:3]]
    bench.pool.touch(pinned)
    bench.run_until_finished("a")
    assert request.is_finished()
    heard: list[int] = []
    bench.pool.unpin_blocks(pinned, lambda block: heard.append(block.block_id))
    again = bench.add("next", prompt_of(2, TOKENS), max_tokens=50)
    for _ in range(80):
        bench.step()
    assert again.is_finished()
    assert set(heard) == {block.block_id for block in pinned}
    assert_right_copies(bench, prompt_of(1, TOKENS), prompt_of(2, TOKENS))


@pytest.mark.parametrize("place", PLACES[:3], ids=NAMES[:3])
def test_blocks_that_the_engine_zeroes_before_their_copy_began_leave_nothing(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, place: dict[str, Any]
) -> None:
    """No wait helps: they are overwritten before kvdisk hears of the step."""
    bench = start(engines, place, 6)
    finish_with_stores_out(bench)
    before = bench.pool.free_block_queue.get_all_free_blocks()
    taken: list[int] = []

    def new_blocks() -> list[int]:
        new = [block.block_id for block in before if block.ref_cnt and block.block_id not in taken]
        taken.extend(new)
        return new

    monkeypatch.setattr(bench.scheduler, "_get_new_block_ids_to_zero", new_blocks)
    request = bench.add("next", prompt_of(2, TOKENS), max_tokens=50)
    for _ in range(80):
        bench.step()
    assert request.is_finished() and len(taken) == 5
    bench.release()
    bench.run()
    assert bench.counters()["overwritten_blocks"] == 2
    assert len(bench.in_tier(Tier.CPU) & set(bench.keys("a")[:3])) == 1, "the step could wait for the last one"
    bench.forget()
    bench.serve("again", prompt_of(1, TOKENS))
    bench.assert_quiet()


def test_an_engine_that_zeroes_needs_a_cpu_tier(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
    with pytest.raises(ConfigError, match="kvdisk needs a CPU tier"):
        engines.make(nvme=True, extra={"cpu_bytes": 0})
    engines.make()


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_victims_blocks_are_the_next_ones_at_once(engines: Engines, pipelined: bool) -> None:
    bench = engines.make(num_blocks=9, pipelined=pipelined)
    bench.hold = {JobKind.STORE}
    requests = [bench.add(f"r{number}", prompt_of(number, TOKENS), max_tokens=60) for number in range(2)]
    while not requests[1].num_preemptions:
        bench.step()
    for _ in range(120):
        bench.step()
    assert requests[0].is_finished(), "nobody waited for a store"
    assert_right_copies(bench, prompt_of(0, TOKENS), prompt_of(1, TOKENS))
    assert [len(bench.sampled(request.request_id)) for request in requests] == [60, 60]


@pytest.mark.parametrize("pipelined", [False, True])
def test_new_weights_while_stores_are_out(engines: Engines, pipelined: bool) -> None:
    """The engine resets everything at once, and the blocks that the stores read hold KV of the new
    weights soon."""
    bench = engines.make(pipelined=pipelined)
    bench.hold = {JobKind.STORE}
    request = bench.add("a", prompt_of(1, TOKENS), max_tokens=30)
    for _ in range(3):
        bench.step()
    while bench.behind:
        bench.update()
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    bench.weights += 1
    bench.step()
    assert request.status is RequestStatus.RUNNING
    bench.release()
    bench.run()
    assert bench.in_tier(Tier.CPU) == set(bench.keys("a")[:3]), "stored again, computed with the new weights"
    assert_right_copies(bench, prompt_of(1, TOKENS))
