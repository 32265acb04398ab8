# SPDX-License-Identifier: Apache-2.0
"""The store policies on vLLM's real scheduler, and its own offloading scheduler beside them in the same steps."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, Bench
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvdisk.blocks import BlockKey, make_block_key
from kvdisk.connector.adapter import BlockPoolContext, overwritten_blocks
from kvdisk.errors import ConfigError
from kvdisk.manager.admission import AdmitReused
from kvdisk.messages import Job, JobKind

pytestmark = pytest.mark.vllm


def _prompt(number: int, tokens: int) -> list[int]:
    return [(number * 37 + at * 7) % 500 for at in range(tokens)]


def _stores(bench: Bench) -> list[Job]:
    return [job for job in bench.jobs if job.kind is JobKind.STORE]


def _keys(request: Any) -> list[BlockKey]:
    return [make_block_key(block_hash, 0) for block_hash in request.block_hashes]


def _held(bench: Bench) -> list[int]:
    return [block.block_id for block in bench.pool.blocks[1:] if block.ref_cnt]


# -- on_preemption ---------------------------------------------------------------------------------


def _preempting(folder: Path, *, prefix_caching: bool = True, **extra: object) -> tuple[Bench, list[Any]]:
    """Two requests whose blocks fill the pool when both have computed five full ones; the first then needs a sixth."""
    extra = {"store_policy": "on_preemption", **extra}
    bench = Bench(folder, num_blocks=11, extra=extra, prefix_caching=prefix_caching)
    return bench, [bench.add(name, _prompt(at, 4 * BLOCK_TOKENS + 5), max_tokens=60) for at, name in enumerate("ab")]


def _step_until_preempted(bench: Bench) -> Any:
    for _ in range(60):
        output = bench.step()
        if output.preempted_req_ids:
            return output
    raise AssertionError("nobody was preempted")


def test_a_victim_is_saved_though_its_blocks_are_given_away_in_the_same_call(tmp_path: Path) -> None:
    bench, (first, victim) = _preempting(tmp_path / "model")
    output = _step_until_preempted(bench)
    assert output.preempted_req_ids == {"b"}
    plan = output.kv_connector_metadata.plan
    (store,) = _stores(bench)
    assert plan.urgent == (store.id,)
    assert [move.key for move in store.moves] == _keys(victim)[:5], "all that is full, generated tokens too"
    assert [move.parent for move in store.moves] == [None, *_keys(victim)[:4]]
    table = bench.scheduler.kv_cache_manager.get_block_ids(first.request_id)[0]
    assert table[-1] == store.moves[-1].block, "its last block is the other request's by now"
    bench.run(200)
    assert len(bench.tokens["b"]) == 60
    # What was left in the GPU's cache is used, and the rest is loaded: only the last token is computed again.
    loads = [job for job in bench.jobs if job.kind is JobKind.LOAD]
    assert {job.request_id for job in loads} == {"b"}
    assert _keys(victim)[4] in {move.key for move in loads[0].moves}
    assert bench.counters()["stored_blocks"] == len({move.key for job in _stores(bench) for move in job.moves})
    assert not _held(bench)


def test_a_victim_waits_for_what_was_saved_of_it_though_it_has_once_waited_in_vain(tmp_path: Path) -> None:
    bench, _ = _preempting(tmp_path / "model")
    request = bench.connector.scheduler._manager._requests["b"]
    request.gave_up_waiting, request.wait_started_s = True, 0.0
    bench.hold = {JobKind.STORE}
    _step_until_preempted(bench)
    while "a" in bench.scheduler.requests:
        bench.step()
    bench.step()
    bench.release()
    bench.run(200)
    assert [job.request_id for job in bench.jobs if job.kind is JobKind.LOAD] == ["b"]


def test_without_a_prefix_cache_a_victim_comes_back_to_what_was_saved(tmp_path: Path) -> None:
    bench, (_, victim) = _preempting(tmp_path / "model", prefix_caching=False)
    _step_until_preempted(bench)
    bench.run(200)
    (load,) = [job for job in bench.jobs if job.kind is JobKind.LOAD]
    assert [move.key for move in load.moves] == _keys(victim)[:5]


@pytest.mark.parametrize(
    ("policy", "window_tokens", "said"),
    [("spillover", None, "stores what leaves vLLM's prefix cache"), ("on_preemption", 64, "sliding windows")],
)
def test_without_a_prefix_cache_a_policy_that_is_of_no_use_is_refused(
    policy: str, window_tokens: int | None, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said) as refusal:
        Bench(
            tmp_path / "model",
            extra={"store_policy": policy},
            window_tokens=window_tokens,
            prefix_caching=False,
        )
    assert "enable_prefix_caching" in str(refusal.value)
    for more in ({"prefix_caching": True}, {"prefix_caching": False, "extra": {}}):
        Bench(tmp_path / "model", **({"extra": {"store_policy": policy}, "window_tokens": window_tokens} | more))


def test_urgent_stores_hold_no_block(tmp_path: Path) -> None:
    bench, _ = _preempting(tmp_path / "model")
    bench.hold = {JobKind.STORE}
    _step_until_preempted(bench)
    assert len(bench.held) == 1
    table = bench.scheduler.kv_cache_manager.get_block_ids("a")[0]
    assert set(_held(bench)) == set(table)
    assert bench.connector.has_pending_push_work()
    bench.release()
    bench.run(200)


def test_what_the_step_zeroes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, (_, victim) = _preempting(tmp_path / "model")
    scheduler = bench.scheduler

    def new_blocks() -> list[int]:
        return [table[-1] for table in scheduler.kv_cache_manager.get_block_ids("a")]

    monkeypatch.setattr(scheduler, "_get_new_block_ids_to_zero", new_blocks)
    _step_until_preempted(bench)
    assert [move.key for move in _stores(bench)[0].moves] == _keys(victim)[:4]


def test_what_a_runner_writes_first_is_read_from_the_schedulers_output() -> None:
    output = SimpleNamespace(new_block_ids_to_zero=[3, 4], kv_cache_block_copies=[KVCacheBlockCopy(5, 6)])
    assert overwritten_blocks(output) == {3, 4, 6}
    assert overwritten_blocks(SimpleNamespace(new_block_ids_to_zero=None, kv_cache_block_copies=None)) == set()


def test_a_victim_of_a_reset_with_new_weights_is_not_saved(tmp_path: Path) -> None:
    bench, _ = _preempting(tmp_path / "model")
    for _ in range(3):
        bench.step()
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert bench.step().preempted_req_ids
    assert not _stores(bench)


def test_a_victim_of_a_reset_of_the_gpus_cache_alone_is_saved(tmp_path: Path) -> None:
    bench, _ = _preempting(tmp_path / "model")
    for _ in range(3):
        bench.step()
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    output = bench.step()
    assert output.preempted_req_ids == {"a", "b"}
    assert set(output.kv_connector_metadata.plan.urgent) == {job.id for job in _stores(bench)}
    assert sorted(len(job.moves) for job in _stores(bench)) == [4, 4]


# -- spillover -------------------------------------------------------------------------------------


def _lazy(folder: Path, **extra: object) -> Bench:
    """At most 2 * (2 + 8) blocks at the front of the free queue are looked at."""
    return Bench(folder, num_blocks=64, max_batched_tokens=64, extra={"store_policy": "spillover", **extra})


def _serve(bench: Bench, *numbers: int, **more: Any) -> list[Any]:
    requests = []
    for number in numbers:
        requests.append(bench.add(f"r{number}-{len(bench.jobs)}", _prompt(number, 10 * BLOCK_TOKENS + 5), **more))
        bench.run()
    return requests


def test_blocks_are_stored_shortly_before_the_gpu_forgets_them(tmp_path: Path) -> None:
    bench = _lazy(tmp_path / "model")
    (first,) = _serve(bench, 1)
    assert not _stores(bench), "its blocks are at the end of the queue"
    _serve(bench, 2, 3, 4, 5)
    stored = {move.key for job in _stores(bench) for move in job.moves}
    assert stored & set(_keys(first))
    _serve(bench, 6, 7, 8)
    stored = {move.key for job in _stores(bench) for move in job.moves}
    assert stored >= set(_keys(first)[:10])
    assert all(bench.pool.get_cached_block(block_hash, [0]) is None for block_hash in first.block_hashes[:10])
    parents = {move.key: move.parent for job in _stores(bench) for move in job.moves}
    assert [parents[key] for key in _keys(first)[:10]] == [None, *_keys(first)[:9]]
    moved = [move.key for job in _stores(bench) for move in job.moves]
    assert len(moved) == len(set(moved)), "each was stored once"
    (again,) = _serve(bench, 1)
    (load,) = [job for job in bench.jobs if job.kind is JobKind.LOAD]
    assert [move.key for move in load.moves] == _keys(again)[:10]
    assert not _held(bench)


def test_what_is_stored_lazily_was_free_and_is_what_the_gpu_knows_it_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _lazy(tmp_path / "model")
    seen: list[bool] = []

    def look(block_ids: list[int]) -> None:
        seen.extend(bench.pool.blocks[block_id].ref_cnt == 0 for block_id in block_ids)

    context = bench.connector.scheduler._manager._stores._context
    watch = context.watch
    monkeypatch.setattr(context, "watch", lambda block_ids: (look(block_ids), watch(block_ids)))
    bench.hold = {JobKind.STORE}
    _serve_until_stored(bench)
    assert seen and all(seen)
    for move in (move for job in bench.held for move in job.moves):
        assert context.get_block(move.block).key == move.key
    assert not set(_held(bench)) & {move.block for job in bench.held for move in job.moves}
    bench.release()
    bench.run()


def _serve_until_stored(bench: Bench) -> None:
    for number in range(1, 10):
        bench.add(f"r{number}", _prompt(number, 10 * BLOCK_TOKENS + 5))
        while bench.scheduler.requests:
            bench.step()
            if bench.held:
                return


def test_nothing_of_before_a_reset_is_stored_lazily(tmp_path: Path) -> None:
    bench = _lazy(tmp_path / "model")
    _serve(bench, 1, 2, 3)
    before = {move.key for job in _stores(bench) for move in job.moves}
    # The engine keeps its hashes where it could not reset its own cache.
    assert bench.connector.reset_cache()
    _serve(bench, 4, 5, 6, 7)
    after = [move.key for job in _stores(bench) for move in job.moves]
    old = {key for number in (1, 2, 3) for key in _keys(_request_of(bench, number))}
    assert not (set(after) - before) & old


def _request_of(bench: Bench, number: int) -> Any:
    request = bench.add(f"key-{number}", _prompt(number, 10 * BLOCK_TOKENS + 5))
    bench.abort(f"key-{number}")
    return request


def test_blocks_of_an_adapter_are_not_stored_lazily(tmp_path: Path) -> None:
    bench = _lazy(tmp_path / "model")
    _serve(bench, *range(1, 10), lora_request=LoRARequest("adapter", 1, "/nowhere"))
    assert not _stores(bench)


def test_a_free_block_whose_store_failed_is_offered_again(tmp_path: Path) -> None:
    bench = _lazy(tmp_path / "model")
    bench.fail = {JobKind.STORE: tuple(range(64))}
    _serve(bench, 1, 2, 3, 4, 5, 6)
    failed = {move.key for job in _stores(bench) for move in job.moves}
    assert failed
    context: BlockPoolContext = bench.connector.scheduler._manager._stores._context
    at_front = {block.key for block in list(context.iter_free_blocks())[: 2 * context.step_blocks]} & failed
    assert at_front
    bench.jobs.clear()
    bench.fail = {}
    time.sleep(0.06)  # the first back-off
    for _ in range(10):
        bench.step()
    assert at_front <= {move.key for job in _stores(bench) for move in job.moves}
    assert bench.counters()["failed_stores"] == len(failed)


def test_what_was_stored_is_still_the_first_to_be_reused(tmp_path: Path) -> None:
    """At the queue's end it would let others come to the front, until all of the queue were stored."""
    bench = _lazy(tmp_path / "model")
    context: BlockPoolContext = bench.connector.scheduler._manager._stores._context
    bench.hold = {JobKind.STORE}
    _serve_until_stored(bench)
    stored = [move.block for job in bench.held for move in job.moves]
    bench.release()
    bench.run()
    while bench.connector.has_pending_push_work():
        bench.step()
    queue = [block.block_id for block in context.iter_free_blocks()]
    count = sum(len(job.moves) for job in _stores(bench))
    assert count <= 2 * context.step_blocks, "no more than what the cursor passes"
    assert set(stored) <= set(queue[: 2 * context.step_blocks])
    for _ in range(20):
        bench.step()
    assert sum(len(job.moves) for job in _stores(bench)) == count
    assert [block.block_id for block in context.iter_free_blocks()] == queue


def test_keys_are_the_same_on_both_sides(tmp_path: Path) -> None:
    bench = _lazy(tmp_path / "model")
    (request,) = _serve(bench, 1)
    context: BlockPoolContext = bench.connector.scheduler._manager._stores._context
    known = [block.key for block in context.iter_free_blocks() if block.key is not None]
    assert list(reversed(known)) == _keys(request)[:10], "the tail of the chain comes first"
    assert context.step_blocks == 2 + 8


# -- beside vLLM's own -----------------------------------------------------------------------------


class Manager(OffloadingManager):
    """Holds nothing and notes every offer. ``answer``: what it says to an offer."""

    def __init__(self) -> None:
        self.offered: list[list[bytes]] = []
        self.no_room = False
        self.refused: set[bytes] = set()
        self.stored: set[bytes] = set()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        return LookupResult.MISS

    def prepare_load(self, keys: Any, req_context: Any) -> Any:
        raise AssertionError("nothing is promised")

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> PrepareStoreOutput | None:
        self.offered[-1] += keys
        if self.no_room:
            return None
        taken = [key for key in keys if key not in self.refused and key not in self.stored]
        self.stored.update(taken)
        return PrepareStoreOutput(taken, BlockIDsLoadStoreSpec(list(range(len(taken)))), [])


class Spec(OffloadingSpec):
    """vLLM's offloading over that manager, one block at a time."""

    def __init__(self, manager: Manager) -> None:
        super().__init__(
            OffloadingConfig(
                groups=(OffloadingGroupConfig(BLOCK_TOKENS, ("full.0",), 0),),
                worker_kv_bytes_per_block=1,
                enable_kv_cache_events=False,
                extra_config={},
                engine_id="engine",
                model=OffloadingModelConfig("model", "float32"),
                cache=OffloadingCacheConfig(BLOCK_TOKENS, 1),
                parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
            )
        )
        self._manager = manager

    def get_manager(self) -> Manager:
        return self._manager

    def get_worker(self, kv_caches: Any) -> Any:
        raise AssertionError("there is no worker")


class SideBySide:
    """One request in a real scheduler with kvdisk; vLLM's offloading scheduler sees the same steps.

    ``offers``: by step, the positions that each of them offered.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **extra: object) -> None:
        self.bench = Bench(folder, num_blocks=64, max_batched_tokens=2 * BLOCK_TOKENS, extra=extra)
        self.theirs = Manager()
        scheduler = self.bench.scheduler
        self.offloading = OffloadingConnectorScheduler(
            Spec(self.theirs), scheduler.vllm_config, scheduler.kv_cache_config
        )
        self.offers: dict[str, list[list[int]]] = {"kvdisk": [], "vllm": []}
        manager = self.bench.connector.scheduler._manager
        self.planner, self.demand = manager._stores, manager._stores._demand
        answer = self.planner._answer
        patch.setattr(
            self.planner, "_answer", lambda *args: (self.offers["kvdisk"][-1].extend(args[2]), answer(*args))[1]
        )
        build = self.bench.connector.build_connector_meta
        patch.setattr(
            self.bench.connector, "build_connector_meta", lambda output: (self._see(output), build(output))[1]
        )

    def _see(self, output: Any) -> None:
        self.offloading.build_connector_meta(output)

    def add(self, name: str, tokens: int, **more: Any) -> Any:
        request = self.bench.add(name, _prompt(1, tokens), **more)
        self.offloading.on_new_request(request)
        self.offloading.get_num_new_matched_tokens(request, 0)
        self.keys = [bytes(block_hash) for block_hash in request.block_hashes]
        return request

    def step(self) -> None:
        self.offers["kvdisk"].append([])
        self.theirs.offered.append([])
        self.bench.step()
        self.offers["vllm"].append([self.keys.index(key[:-4]) for key in self.theirs.offered[-1]])


def test_a_block_refused_for_lack_of_reuse_is_offered_when_its_count_rises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 6 blocks, 2 a step; blocks 1 and 2 have been wanted by nobody else until after the fifth step."""
    both = SideBySide(tmp_path / "model", monkeypatch, cpu_admission="reuse(2)")
    request = both.add("a", 6 * BLOCK_TOKENS + 1, max_tokens=12)
    assert isinstance(both.planner._target.admission, AdmitReused)
    cold = (1, 2)
    for position, key in enumerate(_keys(request)):
        if position not in cold:
            both.demand.count_demand((key,), "somebody else")
    both.theirs.refused = {make_block_key(both.keys[at], 0)[:-2] + bytes(4) for at in cold}
    for step in range(8):
        if step == 5:
            both.theirs.refused.clear()
            for position in cold:
                both.demand.count_demand((_keys(request)[position],), "somebody else")
        both.step()
    #                                  step 0, 1, and 2: the prompt; then decoding; the counts rise before step 5
    assert both.offers["kvdisk"] == [[0, 1], [2, 3], [4, 5], [], [], [1, 2], [], []]
    assert both.offers["vllm"] == [[0, 1], [2, 3], [4, 5], [], [], [], [], []], "skipped for good"
    stored = {move.key for job in _stores(both.bench) for move in job.moves}
    assert stored == set(_keys(request)[:6])
    assert len(both.theirs.stored) == 4


def test_without_room_a_block_is_offered_when_room_came_free_and_not_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 4 blocks, 2 a step. There is no room until after the sixth step, and something is freed then."""
    both = SideBySide(tmp_path / "model", monkeypatch)
    clock = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: 0.0, now=100.0)
    monkeypatch.setattr("kvdisk.connector.scheduler_side.time", clock)
    request = both.add("a", 4 * BLOCK_TOKENS + 1, max_tokens=12)
    both.theirs.no_room = True
    allocate = both.planner._allocate
    monkeypatch.setattr(both.planner, "_allocate", lambda *_: [])
    for step in range(8):
        clock.now += 0.03
        if step == 6:
            both.theirs.no_room = False
            monkeypatch.setattr(both.planner, "_allocate", allocate)
            both.planner._state.released += 1
        both.step()
    assert both.offers["kvdisk"] == [[0, 1], [], [], [], [], [], [0, 1, 2, 3], []], "the head first"
    first = [[0, 1], *[[0, 1, 2, 3]] * 5]
    assert both.offers["vllm"] == [*first, [0, 1, 2, 3], []], "the same range in every step"
    assert {move.key for job in _stores(both.bench) for move in job.moves} == set(_keys(request)[:4])
