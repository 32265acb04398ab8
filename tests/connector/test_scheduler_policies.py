# SPDX-License-Identifier: Apache-2.0
"""The store policies on vLLM's real scheduler: what they offer, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, Bench, Engines, kv_groups, prompt_of
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvdisk.connector.kv_groups import GroupIds
from kvdisk.connector.step import overwritten_blocks
from kvdisk.errors import ConfigError
from kvdisk.messages import JobKind

# -- on_preemption ---------------------------------------------------------------------------------


def preempting(engines: Engines, **more: Any) -> Bench:
    """Two requests whose blocks fill the pool when both have computed five full ones; the first
    then needs a sixth."""
    bench: Bench = engines.make(num_blocks=11, extra={"store_policy": "on_preemption"}, **more)
    for at, name in enumerate("ab"):
        bench.add(name, prompt_of(at), max_tokens=60)
    return bench


def step_until_preempted(bench: Bench) -> Any:
    for _ in range(60):
        output = bench.step()
        if output.preempted_req_ids:
            return output
    raise AssertionError("nobody was preempted")


def test_a_victim_is_saved_though_its_blocks_are_given_away_in_the_same_call(engines):
    bench = preempting(engines)
    output = step_until_preempted(bench)
    assert output.preempted_req_ids == {"b"}
    (store,) = bench.jobs_of(JobKind.STORE)
    assert output.kv_connector_metadata.plan.urgent == (store.id,)
    assert bench.stored() == bench.keys("b")[:5], "all that is full, generated tokens too"
    assert [move.parent for move in store.moves] == [None, *bench.keys("b")[:4]]
    assert bench.table("a")[-1] == store.moves[-1].gpu_blocks[-1], "its last block is the other request's by now"
    bench.finish("a", "b", count=60)
    # What was left in the GPU's cache is used, and the rest is loaded: only the last token is
    # computed again.
    loads = bench.jobs_of(JobKind.LOAD)
    assert {job.request_id for job in loads} == {"b"}
    assert bench.keys("b")[4] in {move.key for move in loads[0].moves}


def test_without_a_prefix_cache_a_victim_comes_back_to_what_was_saved(engines):
    bench = preempting(engines, prefix_caching=False)
    step_until_preempted(bench)
    bench.run()
    assert bench.loads() == [("b", 5)]


@pytest.mark.parametrize(
    ("policy", "window_tokens", "said"),
    [("spillover", None, "stores what leaves vLLM's prefix cache"), ("on_preemption", 64, "sliding windows")],
)
def test_without_a_prefix_cache_a_policy_that_is_of_no_use_is_refused(policy, window_tokens, said, engines):
    chosen: dict[str, Any] = {"extra": {"store_policy": policy}, "window_tokens": window_tokens}
    with pytest.raises(ConfigError, match=said) as refusal:
        engines.make(prefix_caching=False, **chosen)
    assert "enable_prefix_caching" in str(refusal.value)
    engines.make(**chosen)
    engines.make(prefix_caching=False, window_tokens=window_tokens)


def test_victims_have_no_state_that_hits(engines):
    with pytest.raises(ConfigError, match="recurrent state"):
        engines.make(state_tokens=BLOCK_TOKENS, extra={"store_policy": "on_preemption"})


def test_what_the_step_zeroes_is_left_out(engines, monkeypatch):
    bench = preempting(engines)
    seen: set[int] = set()

    def new_blocks() -> list[int]:
        new = set(bench.table("a")) - seen
        seen.update(new)
        return sorted(new)

    monkeypatch.setattr(bench.scheduler, "_get_new_block_ids_to_zero", new_blocks)
    step_until_preempted(bench)
    assert bench.stored() == bench.keys("b")[:4]


@pytest.mark.parametrize("states", [False, True])
def test_what_a_runner_writes_first_is_read_from_the_schedulers_output(states):
    """Into a new block of recurrent state the one before is copied."""
    new: Any = SimpleNamespace(block_ids=([7, 8], [9]))
    output: Any = SimpleNamespace(
        new_block_ids_to_zero=[3, 4],
        kv_cache_block_copies=[KVCacheBlockCopy(5, 6)],
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None, ([10], [11, 0])]),
    )
    groups = kv_groups(state_tokens=BLOCK_TOKENS)[0] if states else kv_groups(window_tokens=64)[0]
    ids = GroupIds(KVCacheConfig(8, [], groups, hash_block_size=BLOCK_TOKENS))
    assert overwritten_blocks(output, ids) - {0} == {3, 4, 6} | ({9, 11} if states else set())
    output.new_block_ids_to_zero = output.kv_cache_block_copies = None
    assert not overwritten_blocks(output, ids) & {3, 4, 6, 7, 8, 10}


@pytest.mark.parametrize("new_weights", [False, True])
def test_victims_of_a_reset_are_saved_unless_the_weights_are_new(engines, new_weights):
    bench = preempting(engines)
    bench.step(3)
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=new_weights)
    output = bench.step()
    assert output.preempted_req_ids == {"a", "b"}
    assert [len(job.moves) for job in bench.jobs_of(JobKind.STORE)] == ([] if new_weights else [4, 4])
    assert set(output.kv_connector_metadata.plan.urgent) == {job.id for job in bench.jobs}


# -- spillover -------------------------------------------------------------------------------------


@pytest.fixture
def lazy(engines: Engines) -> Bench:
    """At most 2 * (2 + 8) blocks at the front of the free queue are looked at."""
    made: Bench = engines.make(max_batched_tokens=64, extra={"store_policy": "spillover"})
    return made


def serve(bench: Bench, *numbers: int) -> None:
    for number in numbers:
        bench.serve(f"r{number}", prompt_of(number, 10 * BLOCK_TOKENS + 5))


def test_blocks_are_stored_shortly_before_the_gpu_forgets_them(lazy):
    serve(lazy, 1)
    first = lazy.keys("r1")[:10]
    known = [block.key for block in lazy.manager._stores._context.iter_free_blocks() if block.key is not None]
    assert [*reversed(known)] == first, "the tail of the chain comes first"
    assert not lazy.stored(), "its blocks are at the end of the queue"
    serve(lazy, *range(2, 9))
    assert set(first) <= set(lazy.stored())
    assert all(lazy.pool.get_cached_block(key[:-2], [0]) is None for key in first)
    parents = {move.key: move.parent for job in lazy.jobs for move in job.moves}
    assert [parents[key] for key in first] == [None, *first[:-1]]
    assert len(lazy.stored()) == len(set(lazy.stored())), "each was stored once"
    serve(lazy, 1)
    assert lazy.loads() == [("r1", 10)]
