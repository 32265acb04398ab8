# SPDX-License-Identifier: Apache-2.0
"""Loads that fail, on vLLM's real scheduler and kvdisk's real workers: what is computed again, and
what is cached.

The scenarios are those of vLLM's own tests of load failures, invalid blocks, error propagation and
cache pollution. ``ByteBench`` compares every byte that a step reads, and that the prefix cache has,
in all of them.
"""

from __future__ import annotations

from typing import Any

import pytest
from byte_bench import ByteBench
from schedulers import BLOCK_TOKENS, Engines, prompt_of
from vllm.v1.request import FinishReason, RequestStatus

from kvdisk.blocks import Tier
from kvdisk.messages import JobKind

pytestmark = pytest.mark.vllm

BLOCKS = 4
TOKENS = BLOCKS * BLOCK_TOKENS + 5
SOURCES = ["cpu payload", "cpu header", "nvme payload", "nvme header", "nvme cut"]


def warm(bench: ByteBench, *numbers: int) -> ByteBench:
    """Let the full blocks of these prompts be in the lowest tier only."""
    for number in numbers:
        bench.serve(f"before {number}", prompt_of(number, TOKENS))
    bench.forget(*([Tier.CPU] if bench.store.exists() else []))
    bench.jobs.clear()
    return bench


def loading(bench: ByteBench, *numbers: int) -> list[Any]:
    """Begin loads of these prompts, of which not a byte has moved."""
    bench.hold = {JobKind.LOAD}
    requests = [bench.add(f"r{number}", prompt_of(number, TOKENS), max_tokens=3) for number in numbers]
    assert not bench.step().num_scheduled_tokens
    for request in requests:
        bench.assert_waits(request, BLOCKS * BLOCK_TOKENS)
        assert not any(bench.hashed(bench.table(request.request_id))), "nothing is cached that is not there"
    return requests


# -- one of several loads fails --------------------------------------------------------------------


@pytest.mark.parametrize("bad", [(0, 3), (2,)], ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_one_of_three_fails(engines: Engines, source: str, bad: tuple[int, ...]) -> None:
    tier, damage = source.split()
    bench = warm(engines.make(nvme=tier == "nvme"), 1, 3, 2)  # the last one's slots are the last of the file
    requests = loading(bench, 1, 2, 3)
    bench.damage, bench.fail, bench.fail_of = damage, {JobKind.LOAD: bad}, "r2"
    bench.release()
    bench.step()
    bad = tuple(range(bad[0], BLOCKS)) if damage == "cut" else bad
    for request in requests:
        failed = request.request_id == "r2"
        bench.assert_waits(request, (bad[0] if failed else BLOCKS) * BLOCK_TOKENS)
        assert not any(bench.hashed(bench.table(request.request_id)))
    assert bench.scheduler.failed_recving_kv_req_ids == {"r2"}
    assert bench.scheduler.finished_recving_kv_req_ids == {"r1", "r2", "r3"}
    assert bench.counters()["failed_loads"] == len(bad)
    assert not bench.in_tier(Tier.CPU if tier == "cpu" else Tier.NVME) & {bench.keys("r2")[at] for at in bad}
    bench.fail = {}
    output = bench.step()
    again = TOKENS - bad[0] * BLOCK_TOKENS
    assert output.num_scheduled_tokens == {"r1": 5, "r2": again, "r3": 5}
    assert [request.status for request in requests] == [RequestStatus.RUNNING] * 3
    assert all(bench.hashed(bench.table("r2")[:BLOCKS])), "computed again, they are as good as any"
    assert not bench.scheduler.failed_recving_kv_req_ids and not bench.scheduler.finished_recving_kv_req_ids
    bench.run()
    assert len(bench.jobs_of(JobKind.LOAD, "r2")) == 1, "what failed is not promised again"
    assert bench.in_tier(Tier.CPU) >= set(bench.keys("r2")[:BLOCKS]), "what was computed again is stored again"
    bench.forget()
    bench.serve("later", prompt_of(2, TOKENS))
    assert len(bench.jobs_of(JobKind.LOAD, "later")[0].moves) == BLOCKS
    bench.assert_quiet()


@pytest.mark.parametrize(("tier", "bad"), [("cpu", 0), ("nvme", 3), ("cpu", 5)])
def test_with_several_groups_a_failure_takes_all_of_the_request(engines: Engines, tier: str, bad: int) -> None:
    bench = warm(engines.make(nvme=tier == "nvme", window_tokens=2 * BLOCK_TOKENS), 1, 2)
    other, request = loading(bench, 1, 2)
    bench.fail, bench.fail_of = {JobKind.LOAD: (bad,)}, "r2"
    bench.release()
    bench.step()
    bench.assert_waits(request, 0)
    bench.assert_waits(other, BLOCKS * BLOCK_TOKENS)
    assert bench.scheduler.failed_recving_kv_req_ids == {"r2"}
    bench.fail = {}
    bench.run()
    assert [len(bench.outputs[name]) for name in ("r1", "r2")] == [3, 3]
    bench.assert_quiet()


def test_what_is_computed_after_a_failed_block_has_its_whole_window(engines: Engines) -> None:
    """vLLM goes on from the first failed block, and has no blocks for what the window reaches
    before it."""
    bench = warm(engines.make(window_tokens=2 * BLOCK_TOKENS, window_only=True), 1)
    bench.fail = {JobKind.LOAD: (0, 1)}
    bench.add("r1", prompt_of(1, TOKENS))
    counts: list[int] = []
    while bench.scheduler.requests:
        counts += bench.step().num_scheduled_tokens.values()
    assert bench.counters()["failed_loads"] > 0
    assert counts[0] == TOKENS, "computed from the first token on"
    bench.run()
    bench.assert_quiet()


def test_all_of_a_load_that_was_not_begun_in_time_is_computed(engines: Engines) -> None:
    bench = warm(engines.make(nvme=True), 1)
    (request,) = loading(bench, 1)
    bench.damage, bench.fail = "late", {JobKind.LOAD: (0,)}
    bench.release()
    bench.step()
    bench.assert_waits(request, 0)
    bench.fail = {}
    assert bench.step().num_scheduled_tokens == {"r1": TOKENS}
    bench.run()
    assert bench.in_tier(Tier.NVME) == set(bench.keys("r1")[:BLOCKS]), "its copies are none the worse for it"
    bench.assert_quiet()


@pytest.mark.parametrize(
    ("tier", "first", "second"), [("cpu", 3, 0), ("nvme", 3, 0), ("nvme", 2, 2), ("cpu", 1, None), ("nvme", None, 1)]
)
def test_failures_that_come_rank_by_rank(engines: Engines, tier: str, first: int | None, second: int | None) -> None:
    """The second rank's answer comes steps after the first one's, which vLLM hears at once of the
    blocks alone."""
    bench = warm(engines.make(nvme=tier == "nvme", ranks=2), 1)
    (request,) = loading(bench, 1)
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
    bench.run()
    bench.assert_quiet()


# -- the engine's policy ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 2 * BLOCK_TOKENS], ids=["one group", "two groups"])
@pytest.mark.parametrize("bad", [(0, 3), (2,)], ids=str)
def test_where_the_engine_fails_such_requests_nothing_of_it_is_left(
    engines: Engines, bad: tuple[int, ...], window: int | None
) -> None:
    """kvdisk asks engines to compute them; one that does not, ends the request with an error and no
    wrong block."""
    bench = warm(engines.make(window_tokens=window), 1, 2)
    bench.scheduler.recompute_kv_load_failures = False
    request, other = loading(bench, 1, 2)
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
    for name in ("again", "and again"):
        bench.serve(name, prompt_of(1, TOKENS))
        bench.forget()
    assert bench.jobs_of(JobKind.LOAD, "and again")
    bench.assert_quiet()


# -- aborts and resets while a load is out ---------------------------------------------------------


@pytest.mark.parametrize("bad", [(), (0,), (2,)], ids=["good", "first bad", "third bad"])
@pytest.mark.parametrize("heard", [False, True], ids=["before its end", "after its end"])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_an_aborted_loads_blocks_are_nobodys_until_it_has_ended(
    engines: Engines, tier: str, heard: bool, bad: tuple[int, ...]
) -> None:
    bench = warm(engines.make(nvme=tier == "nvme", num_blocks=8), 1)
    loading(bench, 1)
    blocks = bench.table("r1")
    bench.fail, bench.fail_of = {JobKind.LOAD: bad}, "r1"
    if heard:
        bench.release()
        bench.step()
    bench.abort("r1")
    next_one = bench.add("next", prompt_of(7, TOKENS), max_tokens=40)  # it needs five blocks at least, of seven
    if not heard:
        for _ in range(3):
            assert not bench.step().num_scheduled_tokens, "the load may still write to its blocks"
            assert bench.references() == sorted(blocks) and "r1" in bench.scheduler.requests
        bench.release()
        bench.step()
    assert "r1" not in bench.scheduler.requests
    bench.run()
    assert next_one.status is RequestStatus.FINISHED_LENGTH_CAPPED
    bench.assert_quiet()


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("held", [{JobKind.LOAD}, {JobKind.LOAD, JobKind.STORE}], ids=["loads", "both"])
def test_resets_while_jobs_are_out_and_then_new_weights(engines: Engines, held: set[JobKind], pipelined: bool) -> None:
    """What was on its way at a reset is not served again; whatever is read afterwards is of the new
    weights."""
    bench = warm(engines.make(nvme=True, pipelined=pipelined), 1)
    bench.hold = held
    bench.add("r1", prompt_of(1, TOKENS), max_tokens=8)
    bench.add("r2", prompt_of(2, TOKENS), max_tokens=60)
    for _ in range(3):
        bench.step()
    assert bench.scheduler.reset_connector_cache()
    assert not bench.in_tier(Tier.CPU) | bench.in_tier(Tier.NVME)
    bench.release()
    for _ in range(4):
        bench.step()
    while bench.behind:
        bench.update()
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    bench.weights += 1
    bench.run()
    assert [len(bench.sampled(name)) for name in ("r1", "r2")] == [8, 60]
    bench.forget()
    for number in (1, 2):
        bench.serve(f"later {number}", prompt_of(number, TOKENS))
    bench.assert_quiet()


# -- promises that are not kept, or not taken ------------------------------------------------------


@pytest.mark.parametrize("gone", [0, 2], ids=["all", "the tail"])
def test_copies_that_go_between_lookup_and_allocation_are_computed(
    engines: Engines, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = warm(engines.make(), 1)
    manager, allocate = bench._manager, bench.scheduler.kv_cache_manager.allocate_slots

    def allocate_slots(request: Any, *arguments: Any, **more: Any) -> Any:
        for key in reversed(bench.keys("r1")[gone:BLOCKS]):
            row = manager._catalog.find(key)
            if row >= 0 and not manager._catalog.pins(row, Tier.CPU):
                manager._tiers.get(Tier.CPU).discard(row)
        return allocate(request, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(bench.scheduler.kv_cache_manager, "allocate_slots", allocate_slots)
        request = bench.add("r1", prompt_of(1, TOKENS), max_tokens=3)
        bench.step()
    bench.assert_waits(request, gone * BLOCK_TOKENS)
    assert bench.step().num_scheduled_tokens == {"r1": TOKENS - gone * BLOCK_TOKENS}
    bench.run()
    assert bench.in_tier(Tier.CPU) == set(bench.keys("r1")[:BLOCKS])
    bench.assert_quiet()


@pytest.mark.parametrize("local", [0, 1])
@pytest.mark.parametrize("taken", [1, 2])
def test_an_engine_may_take_less_than_it_was_promised(
    engines: Engines, local: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = warm(engines.make(), 1)
    if local:
        bench.serve("local", prompt_of(1, local * BLOCK_TOKENS + 1))
    matched = bench.connector.get_num_new_matched_tokens

    def takes_less(request: Any, tokens: int) -> Any:
        promised, is_async = matched(request, tokens)
        assert promised == (BLOCKS - local) * BLOCK_TOKENS
        return min(promised, taken * BLOCK_TOKENS), is_async

    monkeypatch.setattr(bench.connector, "get_num_new_matched_tokens", takes_less)
    request = bench.add("r1", prompt_of(1, TOKENS), max_tokens=3)
    bench.hold = {JobKind.LOAD}
    bench.step()
    (load,) = bench.jobs_of(JobKind.LOAD, "r1")
    bench.assert_waits(request, (local + taken) * BLOCK_TOKENS)
    assert [move.key for move in load.moves] == bench.keys("r1")[local : local + taken]
    assert [move.block for move in load.moves] == bench.table("r1")[local : local + taken]
    bench.release()
    bench.run()
    bench.assert_quiet()
