# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: kvdisk as one of two children of ``MultiConnector``, chosen or not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from other_connectors import OTHER, OtherConnector, register_other
from schedulers import BLOCK_TOKENS, Bench
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import Request, RequestStatus

from kvdisk.connector.connector import KVDiskConnector
from kvdisk.errors import ConfigError
from kvdisk.messages import JobKind

pytestmark = pytest.mark.vllm

BLOCKS = 4
PROMPT = list(range(100, 100 + BLOCKS * BLOCK_TOKENS + 5))
ORDERS = [("KVDiskConnector", OTHER), (OTHER, "KVDiskConnector")]


@pytest.fixture(params=ORDERS, ids=["kvdisk first", "kvdisk second"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return make_bench(tmp_path, request.param)


def make_bench(tmp_path: Path, order: tuple[str, str], **more: object) -> Bench:
    register_other()
    return Bench(tmp_path / "model", others=order, **more)


def other_of(bench: Bench) -> OtherConnector:
    return next(child for child in bench.children if isinstance(child, OtherConnector))


def kinds(bench: Bench) -> list[JobKind]:
    return [job.kind for job in bench.jobs]


def assert_nothing_is_left(bench: Bench) -> None:
    assert all(block.ref_cnt == 0 for block in bench.pool.blocks[1:])
    side = bench.connector.scheduler
    assert not side._requests and not side._local_tokens and not side._told
    manager = side._manager
    assert not manager._requests and len(manager._transfers) == 0
    catalog = manager._catalog
    assert not any(catalog.pins(row, tier) for row in catalog.rows() for tier in (1, 2))


def test_the_only_one_that_has_something_is_chosen(bench: Bench) -> None:
    bench.add("a", PROMPT)
    bench.run()
    assert bench.scheduler.reset_prefix_cache()
    bench.add("b", PROMPT)
    bench.run()
    assert kinds(bench) == [JobKind.STORE, JobKind.LOAD]
    assert len(bench.jobs[-1].moves) == BLOCKS
    assert len(bench.tokens["b"]) == 2
    assert all(tokens == 0 for _, tokens in other_of(bench).allocated)
    assert_nothing_is_left(bench)


def test_what_fails_to_load_is_computed(bench: Bench) -> None:
    """vLLM ends the request with an error, unless the outer connector's configuration says otherwise."""
    assert bench.scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    bench.add("a", PROMPT)
    bench.run()
    assert bench.scheduler.reset_prefix_cache()
    bench.fail = {JobKind.LOAD: (1,)}
    request = bench.add("b", PROMPT)
    bench.run()
    assert JobKind.LOAD in kinds(bench)
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert len(bench.tokens["b"]) == 2
    assert_nothing_is_left(bench)


class Hiding(OtherConnector):
    """Builds a child, and does not keep its own configuration where vLLM's connectors have it."""

    def __init__(self, *arguments: Any) -> None:
        self.child = KVDiskConnector(*arguments)


def test_around_it_what_cannot_be_set_must_be_set_by_hand(tmp_path: Path) -> None:
    built = Bench(tmp_path / "model").scheduler
    built.vllm_config.kv_transfer_config.kv_load_failure_policy = "fail"
    arguments = (built.vllm_config, KVConnectorRole.SCHEDULER, built.kv_cache_config)
    with pytest.raises(ConfigError, match="set kv_load_failure_policy to recompute"):
        Hiding(*arguments)
    built.vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
    Hiding(*arguments)


def test_what_another_one_loads_is_stored(bench: Bench) -> None:
    other_of(bench).promise = 2 * BLOCK_TOKENS
    bench.add("a", PROMPT)
    bench.run()
    assert ("a", 2 * BLOCK_TOKENS) in other_of(bench).allocated
    assert kinds(bench) == [JobKind.STORE]
    assert len(bench.jobs[0].moves) == BLOCKS, "those that the other one has loaded among them"
    assert_nothing_is_left(bench)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("order", ORDERS, ids=["kvdisk first", "kvdisk second"])
def test_of_two_that_have_something_the_first_loads(order: tuple[str, str], asynchronous: bool, tmp_path: Path) -> None:
    bench = make_bench(tmp_path, order)
    bench.add("a", PROMPT)
    bench.run()
    other = other_of(bench)
    other.promise, other.asynchronous = 2 * BLOCK_TOKENS, asynchronous
    assert bench.scheduler.reset_prefix_cache()
    bench.add("b", PROMPT)
    bench.run()
    loads = [job for job in bench.jobs if job.kind is JobKind.LOAD]
    assert len(loads) == (1 if order[0] == "KVDiskConnector" else 0)
    assert (("b", 2 * BLOCK_TOKENS) in other.allocated) == (order[0] == OTHER)
    assert bench.counters().get("hit_tokens.cpu", 0) == len(loads) * BLOCKS * BLOCK_TOKENS
    assert_nothing_is_left(bench)


def test_a_load_that_failed_leaves_the_next_to_others(bench: Bench) -> None:
    """What kvdisk does not promise again, the other one may; kvdisk then loads nothing for this request."""
    bench.add("a", PROMPT)
    bench.run()
    assert bench.scheduler.reset_prefix_cache()
    bench.fail = {JobKind.LOAD: (0,)}
    bench.add("b", PROMPT)
    bench.step()
    other_of(bench).promise = 2 * BLOCK_TOKENS
    bench.run()
    assert kinds(bench).count(JobKind.LOAD) == 1
    assert ("b", 2 * BLOCK_TOKENS) in other_of(bench).allocated
    assert_nothing_is_left(bench)


def test_an_abort_before_and_while_another_one_loads(bench: Bench) -> None:
    bench.hold = {JobKind.STORE}
    bench.add("a", PROMPT)
    bench.step()
    other_of(bench).promise = 3 * BLOCK_TOKENS
    bench.add("b", [token + 1 for token in PROMPT])
    bench.add("c", [token + 2 for token in PROMPT])
    bench.abort("b")
    bench.scheduler.schedule()  # its output goes to no worker: "c" waits for its blocks
    bench.abort("c")
    bench.abort("a")
    bench.release()
    other_of(bench)._loading = {"c"}
    bench.run()
    assert_nothing_is_left(bench)


@pytest.mark.parametrize("finish", ["in the same step", "later"])
def test_nothing_is_kept_of_what_was_computed_on_a_failed_load_of_another_one(finish: str, bench: Bench) -> None:
    """A synchronous load fails while the model computes on what it should have brought: those blocks are poison."""
    other = other_of(bench)
    other.promise, other.asynchronous = 2 * BLOCK_TOKENS, False
    bench.hold = {JobKind.STORE} if finish == "later" else set()
    request = bench.add("a", PROMPT, max_tokens=9)
    output = bench.scheduler.schedule()
    (table,) = bench.scheduler.kv_cache_manager.get_block_ids("a")
    assert output.num_scheduled_tokens == {"a": len(PROMPT) - 2 * BLOCK_TOKENS}
    bench.invalid = {table[1]}
    transfer = bench._work(output.kv_connector_metadata)
    bench.scheduler.update_from_output(output, bench._model_output(output, transfer))
    assert request.num_computed_tokens == BLOCK_TOKENS, "computed again from there"
    (poison,) = bench.jobs
    assert len(poison.moves) == BLOCKS
    catalog = bench.connector.scheduler._manager._catalog
    assert len(catalog) == (0 if finish == "in the same step" else BLOCKS), "none is READY"
    other.promise = 0
    bench.release()
    bench.step()
    time.sleep(0.06)  # the back-off of the store policy
    bench.run()
    assert_nothing_is_left(bench)
    assert bench.counters().get("failed_stores", 0) == 0
    newest = max(move.generation for move in poison.moves)
    generations = [catalog.generations[row] for row in catalog.rows()]
    assert len(generations) == BLOCKS, "stored again, computed properly"
    assert min(generations) > newest


def computed_on_a_hole(bench: Bench) -> Request:
    """Let the other connector promise two blocks and fill one; return the request, which has computed on both."""
    other = other_of(bench)
    other.promise, other.asynchronous = 2 * BLOCK_TOKENS, False
    request = bench.add("a", PROMPT, max_tokens=9)
    output = bench.scheduler.schedule()
    (table,) = bench.scheduler.kv_cache_manager.get_block_ids("a")
    bench.invalid = {table[1]}
    transfer = bench._work(output.kv_connector_metadata)
    bench.scheduler.update_from_output(output, bench._model_output(output, transfer))
    other.promise = 0
    return request


def test_nothing_computed_on_a_failed_load_of_another_one_is_saved_of_a_victim(tmp_path: Path) -> None:
    """It is preempted before it has gone on: what its table says is computed is poison."""
    bench = make_bench(tmp_path, ORDERS[0], extra={"store_policy": "on_preemption"})
    request = computed_on_a_hole(bench)
    assert request.num_computed_tokens == BLOCK_TOKENS
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert bench.step().preempted_req_ids == {"a"}
    assert not bench.jobs
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    bench.step()
    (store,) = bench.jobs
    assert len(store.moves) == BLOCKS, "computed properly"
    bench.run()
    assert_nothing_is_left(bench)


def test_what_nobody_filled_is_not_stored_lazily(tmp_path: Path) -> None:
    """The engine's cache keeps it under its hashes when the request is aborted before it has gone on."""
    bench = make_bench(tmp_path, ORDERS[0], num_blocks=24, extra={"store_policy": "spillover"})
    request = computed_on_a_hole(bench)
    bench.abort("a")
    assert all(bench.pool.get_cached_block(block_hash, [0]) for block_hash in request.block_hashes)
    bench.add("b", [token + 1 for token in PROMPT])
    bench.run()
    bench.add("c", PROMPT[: BLOCK_TOKENS - 1])
    bench.run()
    stored = {move.key[:-2] for job in bench.jobs for move in job.moves}
    assert stored, "what was computed properly"
    assert not stored & set(request.block_hashes)


@pytest.mark.parametrize("hook", ["matched_tokens", "plan", "settle"])
def test_one_that_goes_off_leaves_the_other_at_work(bench: Bench, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **more: object) -> None:
        raise ZeroDivisionError("planted")

    bench.add("a", PROMPT)
    bench.run()
    assert bench.scheduler.reset_prefix_cache()
    monkeypatch.setattr(bench.connector.scheduler, hook, broken)
    bench.add("b", PROMPT)
    bench.run()
    other_of(bench).promise = 2 * BLOCK_TOKENS
    bench.add("c", [token + 1 for token in PROMPT])
    bench.run()
    assert ("c", 2 * BLOCK_TOKENS) in other_of(bench).allocated
    assert [len(bench.tokens[name]) for name in "abc"] == [2] * 3
    assert bench.counters()["switched_off"] == 1
    assert all(block.ref_cnt == 0 for block in bench.pool.blocks[1:])
