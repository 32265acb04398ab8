# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: kvdisk as one of two children of ``MultiConnector``, chosen or not."""

from __future__ import annotations

import time
from typing import Any

import pytest
from other_connectors import OTHER, OtherConnector, register_other
from schedulers import BLOCK_TOKENS, Bench, Engines
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import Request, RequestStatus

from kvdisk.connector.connector import KVDiskConnector
from kvdisk.errors import ConfigError
from kvdisk.messages import JobKind

pytestmark = pytest.mark.vllm

BLOCKS = 4
PROMPT = list(range(100, 100 + BLOCKS * BLOCK_TOKENS + 5))
ORDERS = [("KVDiskConnector", OTHER), (OTHER, "KVDiskConnector")]


@pytest.fixture(autouse=True)
def _known() -> None:
    register_other()


@pytest.fixture(params=ORDERS, ids=["kvdisk first", "kvdisk second"])
def bench(request: pytest.FixtureRequest, plain: Engines) -> Bench:
    return plain.make(others=request.param)


def other_of(bench: Bench) -> OtherConnector:
    return next(child for child in bench.children if isinstance(child, OtherConnector))


def test_the_only_one_that_has_something_is_chosen(bench: Bench) -> None:
    bench.serve("a", PROMPT)
    bench.forget()
    bench.serve("b", PROMPT)
    assert len(bench.stored()) == BLOCKS
    assert bench.loads() == [("b", BLOCKS)]
    assert all(tokens == 0 for _, tokens in other_of(bench).allocated)
    bench.assert_quiet()


def test_what_fails_to_load_is_computed(bench: Bench) -> None:
    """vLLM ends the request with an error, unless the outer connector's configuration says
    otherwise."""
    assert bench.scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    bench.serve("a", PROMPT)
    bench.forget()
    bench.fail = {JobKind.LOAD: (1,)}
    request = bench.serve("b", PROMPT, 2)
    assert bench.loads()
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert len(bench.tokens["b"]) == 2
    bench.assert_quiet()


class Hiding(OtherConnector):
    """Builds a child, and does not keep its own configuration where vLLM's connectors have it."""

    def __init__(self, *arguments: Any) -> None:
        self.child = KVDiskConnector(*arguments)


def test_around_it_what_cannot_be_set_must_be_set_by_hand(plain: Engines) -> None:
    built = plain.make().scheduler
    built.vllm_config.kv_transfer_config.kv_load_failure_policy = "fail"
    arguments = (built.vllm_config, KVConnectorRole.SCHEDULER, built.kv_cache_config)
    with pytest.raises(ConfigError, match="set kv_load_failure_policy to recompute"):
        Hiding(*arguments)
    built.vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
    Hiding(*arguments)


def test_what_another_one_loads_is_stored(bench: Bench) -> None:
    other_of(bench).promise = 2 * BLOCK_TOKENS
    bench.serve("a", PROMPT)
    assert ("a", 2 * BLOCK_TOKENS) in other_of(bench).allocated
    assert not bench.loads()
    assert bench.stored() == bench.keys("a"), "those that the other one has loaded among them"
    bench.assert_quiet()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("order", ORDERS, ids=["kvdisk first", "kvdisk second"])
def test_of_two_that_have_something_the_first_loads(order: tuple[str, str], asynchronous: bool, plain: Engines) -> None:
    bench = plain.make(others=order)
    bench.serve("a", PROMPT)
    other = other_of(bench)
    other.promise, other.asynchronous = 2 * BLOCK_TOKENS, asynchronous
    bench.forget()
    bench.serve("b", PROMPT)
    assert bench.loads() == ([("b", BLOCKS)] if order[0] == "KVDiskConnector" else [])
    assert (("b", 2 * BLOCK_TOKENS) in other.allocated) == (order[0] == OTHER)
    bench.assert_quiet()


def test_a_load_that_failed_leaves_the_next_to_others(bench: Bench) -> None:
    """What kvdisk does not promise again, the other one may; kvdisk then loads nothing for this
    request."""
    bench.serve("a", PROMPT)
    bench.forget()
    bench.fail = {JobKind.LOAD: (0,)}
    bench.add("b", PROMPT)
    bench.step()
    other_of(bench).promise = 2 * BLOCK_TOKENS
    bench.run()
    assert len(bench.loads()) == 1
    assert ("b", 2 * BLOCK_TOKENS) in other_of(bench).allocated
    bench.assert_quiet()


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
    bench.assert_quiet()


def computed_on_a_hole(bench: Bench) -> Request:
    """Let the other connector promise two blocks and fill one; return the request, which has
    computed on both."""
    other = other_of(bench)
    other.promise, other.asynchronous = 2 * BLOCK_TOKENS, False
    request = bench.add("a", PROMPT, max_tokens=9)
    output = bench.scheduler.schedule()
    bench.invalid = {bench.table("a")[1]}
    transfer = bench._work(output.kv_connector_metadata)
    bench.scheduler.update_from_output(output, bench._model_output(output, transfer))
    other.promise = 0
    return request


@pytest.mark.parametrize("finish", ["in the same step", "later"])
def test_nothing_is_kept_of_what_was_computed_on_a_failed_load_of_another_one(finish: str, bench: Bench) -> None:
    """A synchronous load fails while the model computes on what it should have brought: those
    blocks are poison."""
    bench.hold = {JobKind.STORE} if finish == "later" else set()
    request = computed_on_a_hole(bench)
    assert request.num_computed_tokens == BLOCK_TOKENS, "computed again from there"
    (poison,) = bench.jobs
    assert len(poison.moves) == BLOCKS
    catalog = bench.connector.scheduler._manager._catalog
    assert len(catalog) == (0 if finish == "in the same step" else BLOCKS), "none is READY"
    bench.release()
    bench.step()
    time.sleep(0.06)  # the back-off of the store policy
    bench.run()
    bench.assert_quiet()
    assert bench.counters().get("failed_stores", 0) == 0
    newest = max(move.generation for move in poison.moves)
    generations = [catalog.generations[row] for row in catalog.rows()]
    assert len(generations) == BLOCKS, "stored again, computed properly"
    assert min(generations) > newest


def test_nothing_computed_on_a_failed_load_of_another_one_is_saved_of_a_victim(plain: Engines) -> None:
    """It is preempted before it has gone on: what its table says is computed is poison."""
    bench = plain.make(others=ORDERS[0], extra={"store_policy": "on_preemption"})
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
    bench.assert_quiet()


def test_what_nobody_filled_is_not_stored_lazily(plain: Engines) -> None:
    """The engine's cache keeps it under its hashes when the request is aborted before it has gone
    on."""
    bench = plain.make(others=ORDERS[0], num_blocks=24, extra={"store_policy": "spillover"})
    request = computed_on_a_hole(bench)
    bench.abort("a")
    assert all(bench.pool.get_cached_block(block_hash, [0]) for block_hash in request.block_hashes)
    bench.serve("b", [token + 1 for token in PROMPT])
    bench.serve("c", PROMPT[: BLOCK_TOKENS - 1])
    assert bench.stored(), "what was computed properly"
    assert not set(bench.stored()) & set(bench.keys("a"))


@pytest.mark.parametrize("hook", ["matched_tokens", "plan", "settle"])
def test_one_that_goes_off_leaves_the_other_at_work(bench: Bench, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **more: object) -> None:
        raise ZeroDivisionError("planted")

    bench.serve("a", PROMPT)
    bench.forget()
    monkeypatch.setattr(bench.connector.scheduler, hook, broken)
    bench.serve("b", PROMPT)
    other_of(bench).promise = 2 * BLOCK_TOKENS
    bench.serve("c", [token + 1 for token in PROMPT])
    assert ("c", 2 * BLOCK_TOKENS) in other_of(bench).allocated
    assert [len(bench.tokens[name]) for name in "abc"] == [1] * 3
    assert bench.counters()["switched_off"] == 1
    assert not bench.references()
