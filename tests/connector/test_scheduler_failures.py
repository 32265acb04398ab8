# SPDX-License-Identifier: Apache-2.0
"""Loads that fail, on vLLM's real scheduler and kvdisk's real workers: what is computed again, and
what is cached.

The scenarios are those of vLLM's own tests of load failures, invalid blocks, error propagation and
cache pollution. ``Bench`` compares every byte that a step reads, and that the prefix cache has,
in all of them.
"""

from __future__ import annotations

from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, BLOCKS, TOKENS, prompt_of
from vllm.v1.request import FinishReason, RequestStatus

from kvdisk.blocks import Tier
from kvdisk.messages import JobKind

SOURCES = ["cpu payload", "cpu header", "nvme payload", "nvme header", "nvme cut"]
WINDOW = 2 * BLOCK_TOKENS


# -- one of several loads fails --------------------------------------------------------------------


@pytest.mark.parametrize(("source", "bad"), [(source, bad) for source in SOURCES for bad in ((0, 3), (2,))])
def test_one_of_three_fails(engines, source, bad):
    tier, damage = source.split()
    bench = engines.make(nvme=tier == "nvme").warm(1, 3, 2)  # the last one's slots are the last of the file
    requests = bench.loading(1, 2, 3)
    bench.damage, bench.fail, bench.fail_of = damage, {JobKind.LOAD: bad}, "r2"
    bench.release()
    bench.step()
    bad = tuple(range(bad[0], BLOCKS)) if damage == "cut" else bad
    for request in requests:
        bench.assert_waits(request, (bad[0] if request.request_id == "r2" else BLOCKS) * BLOCK_TOKENS)
        assert not any(bench.hashed(bench.table(request.request_id)))
    assert bench.scheduler.failed_recving_kv_req_ids == {"r2"}
    assert bench.scheduler.finished_recving_kv_req_ids == {"r1", "r2", "r3"}
    assert bench.counters()["failed_loads"] == len(bad)
    assert not bench.in_tier(Tier.CPU if tier == "cpu" else Tier.NVME) & {bench.keys("r2")[at] for at in bad}
    bench.fail = {}
    output = bench.step()
    assert output.num_scheduled_tokens == {"r1": 5, "r2": TOKENS - bad[0] * BLOCK_TOKENS, "r3": 5}
    assert all(bench.hashed(bench.table("r2")[:BLOCKS])), "computed again, they are as good as any"
    assert not bench.scheduler.failed_recving_kv_req_ids and not bench.scheduler.finished_recving_kv_req_ids
    bench.finish("r1", "r2", "r3", count=3)
    assert len(bench.jobs_of(JobKind.LOAD, "r2")) == 1, "what failed is not promised again"
    assert bench.in_tier(Tier.CPU) >= set(bench.keys("r2")[:BLOCKS]), "what was computed again is stored again"
    bench.forget()
    bench.serve("later", prompt_of(2))
    assert len(bench.jobs_of(JobKind.LOAD, "later")[0].moves) == BLOCKS


@pytest.mark.parametrize(
    ("tier", "alone", "bad"),
    [("cpu", False, (0,)), ("nvme", False, (3,)), ("cpu", False, (5,)), ("cpu", True, (0, 1))],
    ids=["first", "last", "of the window", "a window and nothing else"],
)
def test_with_a_window_a_failure_takes_all_of_the_request(engines, tier, alone, bad):
    """Told of blocks, vLLM would go on from the first failed one, and has no blocks for what the
    window reaches before it."""
    bench = engines.make(nvme=tier == "nvme", window_tokens=WINDOW, window_only=alone).warm(1, 2)
    other, request = bench.loading(1, 2)
    bench.fail, bench.fail_of = {JobKind.LOAD: bad}, "r2"
    bench.release()
    bench.step()
    bench.assert_waits(request, 0)
    bench.assert_waits(other, BLOCKS * BLOCK_TOKENS)
    assert bench.scheduler.failed_recving_kv_req_ids == {"r2"}
    bench.fail = {}
    bench.finish("r1", "r2", count=3)


@pytest.mark.parametrize(("num_blocks", "beside"), [(13, False), (18, True)], ids=["alone", "one behind it has loaded"])
def test_where_the_engine_has_no_room_for_another_load_the_request_is_computed(engines, num_blocks, beside):
    """vLLM still counts the load that failed among those that it reserves blocks for: a request of
    more than half of the pool would never get any, nor whoever comes behind it."""
    bench = engines.make(window_tokens=WINDOW, num_blocks=num_blocks).warm(1)
    bench.serve("short", prompt_of(2, BLOCK_TOKENS + 1))
    bench.forget()
    bench.fail, bench.fail_of = {JobKind.LOAD: (3,)}, "r1"
    names = ["r1", "r2"] if beside else ["r1"]
    for name, tokens in zip(names, (TOKENS, BLOCK_TOKENS + 1), strict=False):
        bench.add(name, prompt_of(int(name[1]), tokens), max_tokens=3)
    bench.step()
    assert len(bench.jobs_of(JobKind.LOAD)) == len(names)
    bench.fail = {}
    bench.finish(*names, count=3)
    assert bench.counters()["failed_loads"] == 1


def test_all_of_a_load_that_was_not_begun_in_time_is_computed(engines):
    bench = engines.make(nvme=True).warm(1)
    (request,) = bench.loading(1)
    bench.damage, bench.fail = "late", {JobKind.LOAD: (0,)}
    bench.release()
    bench.step()
    bench.assert_waits(request, 0)
    bench.fail = {}
    assert bench.step().num_scheduled_tokens == {"r1": TOKENS}
    bench.run()
    assert bench.in_tier(Tier.NVME) == set(bench.keys("r1")[:BLOCKS]), "its copies are none the worse for it"


@pytest.mark.parametrize(
    ("tier", "first", "second"), [("cpu", 3, 0), ("nvme", 2, 2), ("cpu", 1, None), ("nvme", None, 1)]
)
def test_failures_that_come_rank_by_rank(engines, tier, first, second):
    """The second rank's answer comes steps after the first one's, which vLLM hears at once of the
    blocks alone."""
    bench = engines.make(nvme=tier == "nvme", ranks=2).warm(1)
    (request,) = bench.loading(1)
    bench.hold_rank, expected = 1, BLOCKS
    for rank, bad in ((0, first), (1, second)):
        bench.fail, bench.fail_rank = {JobKind.LOAD: () if bad is None else (bad,)}, rank
        if rank:
            bench.release()
        bench.step()
        expected = min(expected, BLOCKS if bad is None else bad)
        bench.assert_waits(request, expected * BLOCK_TOKENS)
        assert bool(bench.scheduler.failed_recving_kv_req_ids) == (expected < BLOCKS)
        assert bool(bench.scheduler.finished_recving_kv_req_ids) == (rank == 1)
        assert bench.references() == sorted(bench.table("r1")), "kept until the last rank has answered"
    bench.fail = {}
    assert bench.step().num_scheduled_tokens == {"r1": TOKENS - expected * BLOCK_TOKENS}


# -- the engine's policy ---------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "bad"), [(None, (0, 3)), (None, (2,)), (WINDOW, (0, 3)), (WINDOW, (2,))])
def test_where_the_engine_fails_such_requests_nothing_of_it_is_left(engines, bad, window):
    """kvdisk asks engines to compute them; one that does not, ends the request with an error and no
    wrong block."""
    bench = engines.make(window_tokens=window).warm(1, 2)
    bench.scheduler.recompute_kv_load_failures = False
    request, other = bench.loading(1, 2)
    bench.fail, bench.fail_of = {JobKind.LOAD: bad}, "r1"
    bench.release()
    bench.step()
    assert request.status is RequestStatus.FINISHED_ERROR
    (output,) = bench.outputs["r1"]
    assert (output.finish_reason, output.new_token_ids) == (FinishReason.ERROR, [])
    bench.assert_waits(other, BLOCKS * BLOCK_TOKENS)
    bench.fail = {}
    bench.step()
    assert "r1" not in bench.scheduler.requests
    held = {block for group in range(bench.group_count) for block in bench.table("r2", group)} - {0}
    assert set(bench.references()) == held, "its load has ended, so that its blocks are free"
    bench.run()
    bench.serve_twice(prompt_of(1))
    assert bench.jobs_of(JobKind.LOAD, "b")


# -- aborts while a load is out --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "heard", "bad"),
    [("cpu", False, ()), ("cpu", True, (0,)), ("cpu", False, (2,)), ("nvme", False, (0,)), ("nvme", True, ())],
)
def test_an_aborted_loads_blocks_are_nobodys_until_it_has_ended(engines, tier, heard, bad):
    bench = engines.make(nvme=tier == "nvme", num_blocks=8).warm(1)
    bench.loading(1)
    blocks = bench.table("r1")
    bench.fail, bench.fail_of = {JobKind.LOAD: bad}, "r1"
    if heard:
        bench.release()
        bench.step()
    bench.abort("r1")
    bench.add("next", prompt_of(7), max_tokens=40)  # it needs five blocks at least, of seven
    if not heard:
        for _ in range(3):
            assert not bench.step().num_scheduled_tokens, "the load may still write to its blocks"
            assert bench.references() == sorted(blocks) and "r1" in bench.scheduler.requests
        bench.release()
        bench.step()
    assert "r1" not in bench.scheduler.requests
    bench.finish("next", count=40)


# -- promises that are not kept, or not taken ------------------------------------------------------


@pytest.mark.parametrize("gone", [0, 2], ids=["all", "the tail"])
def test_copies_that_go_between_lookup_and_allocation_are_computed(engines, gone, monkeypatch):
    bench = engines.make().warm(1)
    manager, allocate = bench.manager, bench.scheduler.kv_cache_manager.allocate_slots

    def allocate_slots(request: Any, *arguments: Any, **more: Any) -> Any:
        for key in reversed(bench.keys("r1")[gone:BLOCKS]):
            row = manager._catalog.find(key)
            if row >= 0 and not manager._catalog.pins(row, Tier.CPU):
                manager._tiers.get(Tier.CPU).discard(row)
        return allocate(request, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(bench.scheduler.kv_cache_manager, "allocate_slots", allocate_slots)
        request = bench.add("r1", prompt_of(1), max_tokens=3)
        bench.step()
    bench.assert_waits(request, gone * BLOCK_TOKENS)
    assert bench.step().num_scheduled_tokens == {"r1": TOKENS - gone * BLOCK_TOKENS}
    bench.run()
    assert bench.in_tier(Tier.CPU) == set(bench.keys("r1")[:BLOCKS])


@pytest.mark.parametrize(("local", "taken"), [(0, 1), (1, 2)])
def test_an_engine_may_take_less_than_it_was_promised(engines, local, taken, monkeypatch):
    bench = engines.make().warm(1)
    if local:
        bench.serve("local", prompt_of(1, local * BLOCK_TOKENS + 1))
    matched = bench.connector.get_num_new_matched_tokens

    def takes_less(request: Any, tokens: int) -> Any:
        promised, is_async = matched(request, tokens)
        assert promised == (BLOCKS - local) * BLOCK_TOKENS
        return min(promised, taken * BLOCK_TOKENS), is_async

    monkeypatch.setattr(bench.connector, "get_num_new_matched_tokens", takes_less)
    request = bench.add("r1", prompt_of(1))
    bench.hold = {JobKind.LOAD}
    bench.step()
    (load,) = bench.jobs_of(JobKind.LOAD, "r1")
    bench.assert_waits(request, (local + taken) * BLOCK_TOKENS)
    assert [move.key for move in load.moves] == bench.keys("r1")[local : local + taken]
    assert [block for move in load.moves for block in move.gpu_blocks] == bench.table("r1")[local : local + taken]
