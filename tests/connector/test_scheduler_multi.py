# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: kvdisk as one of two children of ``MultiConnector``, chosen or not."""

from __future__ import annotations

import time
from typing import Any

import pytest
from other_connectors import ANOTHER, OtherConnector
from schedulers import BLOCK_TOKENS, BLOCKS, KVDISK, OTHER, PROMPT, Bench, Engines, prompt_of
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import Request

from kvdisk.connector.connector import KVDiskConnector
from kvdisk.errors import ConfigError
from kvdisk.messages import JobKind

ORDERS = [(KVDISK, ANOTHER), (ANOTHER, KVDISK)]


@pytest.fixture(params=ORDERS, ids=["kvdisk first", "kvdisk second"])
def bench(request: pytest.FixtureRequest, engines: Engines) -> Bench:
    return engines.make(others=request.param)


def other_of(bench: Bench) -> OtherConnector:
    return next(child for child in bench.children if isinstance(child, OtherConnector))


@pytest.mark.parametrize(("promise", "asynchronous"), [(0, True), (2 * BLOCK_TOKENS, True), (2 * BLOCK_TOKENS, False)])
def test_the_first_that_has_something_loads(bench, promise, asynchronous):
    bench.warm(1)
    other = other_of(bench)
    other.promise, other.asynchronous = promise, asynchronous
    bench.serve("b", PROMPT)
    is_ours = not promise or bench.children[0] is bench.connector
    assert bench.loads() == ([("b", BLOCKS)] if is_ours else [])
    assert any(name == "b" and tokens for name, tokens in other.allocated) == (not is_ours)


@pytest.mark.parametrize("promise", [0, 2 * BLOCK_TOKENS])
def test_what_fails_to_load_is_computed_or_left_to_another(bench, promise):
    """vLLM ends the request with an error, unless the outer connector's configuration says
    otherwise."""
    assert bench.scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    bench.warm(1)
    bench.fail = {JobKind.LOAD: (0,)}
    bench.add("b", PROMPT)
    bench.step()
    other_of(bench).promise = promise
    bench.finish("b")
    assert len(bench.loads()) == 1
    assert promise == 0 or ("b", promise) in other_of(bench).allocated


class Hiding(OtherConnector):
    """Builds a child, and does not keep its own configuration where vLLM's connectors have it."""

    def __init__(self, *arguments: Any) -> None:
        self.child = KVDiskConnector(*arguments)


def test_around_it_what_cannot_be_set_must_be_set_by_hand(engines):
    built = engines.make().scheduler
    built.vllm_config.kv_transfer_config.kv_load_failure_policy = "fail"
    arguments = (built.vllm_config, KVConnectorRole.SCHEDULER, built.kv_cache_config)
    with pytest.raises(ConfigError, match="set kv_load_failure_policy to recompute"):
        Hiding(*arguments)
    built.vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
    Hiding(*arguments)


def test_what_another_one_loads_is_stored(bench):
    other_of(bench).promise = 2 * BLOCK_TOKENS
    bench.serve("a", PROMPT)
    assert ("a", 2 * BLOCK_TOKENS) in other_of(bench).allocated
    assert not bench.loads()
    assert bench.stored() == bench.keys("a"), "those that the other one has loaded among them"


def test_an_abort_before_and_while_another_one_loads(bench):
    bench.hold = {JobKind.STORE}
    bench.add("a", PROMPT)
    bench.step()
    other_of(bench).promise = 3 * BLOCK_TOKENS
    bench.add("b", OTHER)
    bench.add("c", prompt_of(3))
    bench.abort("b")
    other_of(bench).holds = True
    bench.step()  # "c" waits for its blocks
    bench.abort("c")
    bench.abort("a")
    bench.release()
    other_of(bench).holds = False


def computed_on_a_hole(bench: Bench) -> Request:
    """Let the other connector promise two blocks and fill one; return the request, which has
    computed on both."""
    other = other_of(bench)
    other.promise, other.asynchronous, other.holes = 2 * BLOCK_TOKENS, False, {1}
    request = bench.add("a", PROMPT, max_tokens=9)
    bench.step()
    other.promise, other.holes = 0, ()
    return request


@pytest.mark.parametrize("finish", ["in the same step", "later"])
def test_nothing_is_kept_of_what_was_computed_on_a_failed_load_of_another_one(finish, bench):
    """A synchronous load fails while the model computes on what it should have brought: those
    blocks are poison."""
    bench.hold = {JobKind.STORE} if finish == "later" else set()
    request = computed_on_a_hole(bench)
    assert request.num_computed_tokens == BLOCK_TOKENS, "computed again from there"
    (poison,) = bench.jobs
    assert len(poison.moves) == BLOCKS
    catalog = bench.manager._catalog
    assert len(catalog) == (0 if finish == "in the same step" else BLOCKS), "none is READY"
    bench.release()
    bench.step()
    time.sleep(0.06)  # the back-off of the store policy
    bench.run()
    assert bench.counters().get("failed_stores", 0) == 0
    newest = max(move.generation for move in poison.moves)
    generations = [catalog.generations[row] for row in catalog.rows()]
    assert len(generations) == BLOCKS, "stored again, computed properly"
    assert min(generations) > newest


def test_nothing_computed_on_a_failed_load_of_another_one_is_saved_of_a_victim(engines):
    """It is preempted before it has gone on: what its table says is computed is poison."""
    bench = engines.make(others=ORDERS[0], extra={"store_policy": "on_preemption"})
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


def test_what_nobody_filled_is_not_stored_lazily(engines):
    """The engine's cache keeps it under its hashes when the request is aborted before it has gone
    on."""
    bench = engines.make(others=ORDERS[0], num_blocks=24, extra={"store_policy": "spillover"})
    request = computed_on_a_hole(bench)
    bench.abort("a")
    assert all(bench.pool.get_cached_block(block_hash, [0]) for block_hash in request.block_hashes)
    bench.serve("b", OTHER)
    bench.serve("c", PROMPT[: BLOCK_TOKENS - 1])
    assert bench.stored(), "what was computed properly"
    assert not set(bench.stored()) & set(bench.keys("a"))


@pytest.mark.parametrize("hook", ["matched_tokens", "plan", "settle"])
def test_one_that_goes_off_leaves_the_other_at_work(bench, hook, monkeypatch):
    def broken(*arguments: object, **more: object) -> None:
        raise ZeroDivisionError("planted")

    bench.serve("a", PROMPT)
    bench.forget()
    monkeypatch.setattr(bench.connector.scheduler, hook, broken)
    bench.serve("b", PROMPT)
    other_of(bench).promise = 2 * BLOCK_TOKENS
    bench.serve("c", OTHER)
    assert ("c", 2 * BLOCK_TOKENS) in other_of(bench).allocated
    bench.finish(*"abc", count=1)
    assert bench.counters()["switched_off"] == 1
