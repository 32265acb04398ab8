# SPDX-License-Identifier: Apache-2.0
"""kvdisk's tier behind vLLM's real manager of tiers and its real memory, over a store without a
drive."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from schedulers import vllm_config
from support.tiering import GROUP_IDS, TOKENS, Door, make_manager
from test_scheduler_weights import Engine
from test_start import PLAIN
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    RSWASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvdisk.blocks import BlockKey, Tier
from kvdisk.config import TIER_KEYS
from kvdisk.connector import tier as tiers
from kvdisk.connector.identity import fingerprint_of_rows
from kvdisk.connector.metrics import PREFIX
from kvdisk.connector.plugin import register
from kvdisk.connector.tier import KVDiskTier
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.manager.events import BlockChange, Taken
from kvdisk.stats import METRICS
from kvdisk.store import BlockStore, Get, Put, Result
from kvdisk.testing.memory_blocks import MemoryBlocks
from kvdisk.tier_settings import TierSettings

ROW_BYTES = 8192


class Blocks(MemoryBlocks):
    """A store whose blocks fail where the test wants it. ``bad``: what a load of these ends with.
    ``holds``: jobs do not end. ``told``: what it was told of requests."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.bad: dict[BlockKey, Result] = {}
        self.refused: dict[BlockKey, Result] = {}
        self.holds = False
        self.told: dict[str, list[BlockKey]] = {}
        self.puts: list[Put] = []
        self.gets: list[tuple[int, list[Get]]] = []
        self.asked: list[list[BlockKey]] = []
        self.forgot: list[int] = []
        self.hinted: list[tuple[bool, Any]] = []
        self.is_budget_spent = False

    def put(self, tag: int, blocks: Sequence[Put]) -> None:
        self.puts += blocks
        super().put(tag, blocks)

    def get(self, tag: int, blocks: Sequence[Get], arrival: int = 0) -> None:
        self.gets.append((arrival, list(blocks)))
        super().get(tag, blocks, arrival)

    def ask(self, keys: Sequence[BlockKey]) -> None:
        self.asked.append(list(keys))

    def reached(self, request: str, keys: Sequence[BlockKey]) -> None:
        assert request not in self.told, "each once"
        self.told[request] = list(keys)
        super().reached(request, keys)

    def hint(self, prompt: Any, *, ended: bool) -> None:
        self.hinted.append((ended, prompt))

    def forget(self, epoch: int) -> None:
        self.forgot.append(epoch)
        super().forget(epoch)

    def poll(self, wait_s: float = 0.0) -> list[Any]:
        return [] if self.holds else super().poll(wait_s)

    def _move(self, block: Put | Get) -> Result:
        wrong = (self.bad if isinstance(block, Get) else self.refused).get(block.key)
        return super()._move(block) if wrong is None else wrong


class Bench(Door):
    """A door of kvdisk's, and a model that computes the bytes that a key names."""

    def __init__(self, folder: Path, rows: int = 64, blocks_per_chunk: int = 1, **settings: Any) -> None:
        values = {"store_dirs": str(folder / "store"), "nvme_bytes": "1GiB", "namespace": "test", **settings}
        super().__init__(make_manager({"type": "kvdisk", **values}, rows, ROW_BYTES, blocks_per_chunk))
        (self.tier,) = self.manager.secondary_tiers
        assert isinstance(self.tier, KVDiskTier)

    @property
    def store(self) -> Any:
        return self.tier.store

    def rest(self) -> None:
        """Step until nothing is left to do, which an idle engine must come to."""
        for _ in range(100):
            if not self.manager.has_pending_work():
                return
            self.step()
        raise AssertionError("the engine never rests")

    def compute(self, name: str, keys: Sequence[OffloadKey], content_of: Any = None) -> int:
        return super().compute(name, keys, content_of or content_named)

    def use(self, name: str, keys: Sequence[OffloadKey]) -> None:
        """The worker copies chunks from memory to the GPU: every byte must be right."""
        spec = self.manager.prepare_load(keys, self.requests[name])
        for key, row in zip(keys, spec.chunk_ids.tolist(), strict=True):
            assert np.array_equal(self.rows[row], content_named(key)), key
        self.manager.complete_load(keys, self.requests[name])

    def load(self, name: str, keys: Sequence[OffloadKey]) -> int:
        """Step until the prompt has its answer; use what hit, and return how much that was."""
        for _ in range(200):
            hits = self.look(name, keys)
            if hits is not None:
                if hits:
                    self.use(name, keys[:hits])
                self.step(name)
                return hits
            self.step()
        raise AssertionError("it waits for ever")

    def serve(self, name: str, document: int, chunks: int, group: int = 0, **sent: Any) -> int:
        """Serve a whole request; return the chunks that hit."""
        keys = self.begin(name, document, chunks, group, **sent)
        hits = self.load(name, keys)
        self.compute(name, keys[hits:])
        self.end(name)
        self.rest()
        return hits

    def forget_memory(self) -> None:
        """Have vLLM's memory hold nothing, without its reset."""
        self.manager.primary_tier.reset_cache()


def content_named(key: OffloadKey) -> np.ndarray:
    return np.random.default_rng(list(key)).integers(0, 256, ROW_BYTES, np.uint8)


Make = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes benches over ``Blocks``, which keep what the one before has kept."""
    made: list[Bench] = []
    kept: dict[BlockKey, bytes] = {}

    def open_blocks(config, identity, kinds, rows, start_mover):
        store = Blocks(kinds, rows)
        store._blocks = kept
        return store

    def make_bench(**fields: Any) -> Bench:
        made.append(Bench(tmp_path, **fields))
        return made[-1]

    monkeypatch.setattr(BlockStore, "open_for", open_blocks)
    yield make_bench
    for bench in made:
        if bench.tier._store is not None or hasattr(bench, "rows"):
            bench.close()


@pytest.fixture
def bench(make: Make) -> Bench:
    return make()


# -- what is stored, and what hits -----------------------------------------------------------------


@pytest.mark.parametrize("group", [0, 1])
def test_what_was_stored_hits_when_memory_has_lost_it_and_after_a_restart(make, group):
    bench = make()
    assert bench.serve("cold", 1, 10, group) == 0
    assert bench.serve("from memory", 1, 12, group) == 10
    assert bench.store.gets == []
    bench.forget_memory()
    assert bench.serve("from the store", 1, 14, group) == 12
    bench.close()
    bench = make()
    assert bench.serve("after a restart", 1, 20, group) == 14
    assert bench.serve("another document", 2, 3, group) == 0


def test_a_chunk_is_put_behind_its_parent_and_once(bench):
    keys = bench.begin("a", 1, 6)
    bench.compute("a", keys[4:])  # as of a window, whose older chunks are stored later
    bench.compute("a", keys[:4])
    other = bench.begin("b", 1, 6, group=1)
    bench.compute("b", other)
    ours = [bench.tier._names.block(key) for key in keys]
    assert [(put.key, put.parent) for put in bench.store.puts[:6]] == [
        (ours[at], ours[at - 1] if at else None) for at in (4, 5, 0, 1, 2, 3)
    ]
    assert {put.key[-2:] for put in bench.store.puts[6:]} == {b"\0\1"}
    assert bench.store.puts[6].parent is None
    assert [bench.tier._names.offload(key) for key in ours] == keys


def test_a_state_within_a_chunk_is_behind_the_chunk_before_it(bench):
    keys = bench.begin("a", 1, 3)
    inside = make_offload_key(b"inside".ljust(32), GROUP_IDS[0])
    bench.requests["a"].set_offload_key_position(inside, 2 * TOKENS + 5)
    bench.compute("a", [inside])
    assert bench.store.puts[0].parent == bench.tier._names.block(keys[1])


def test_others_are_asked_for_a_long_prompt_stretch_by_stretch(bench, monkeypatch):
    monkeypatch.setattr(tiers, "MOST_ASKED", 8)
    bench.serve("cold", 1, 9)
    bench.forget_memory()
    bench.store.asked.clear()
    keys = bench.begin("long", 1, 30)
    names = [bench.tier._names.block(key) for key in keys]
    for key in (*keys[:12], keys[29]):
        bench.manager.lookup(key, bench.requests["long"])
    assert bench.store.asked == [names[8:12], names[28:30]]
    bench.end("long")


def test_a_key_without_a_place_in_a_prompt_is_stored_too(bench):
    bench.begin("a", 1, 3)
    bench.compute("a", [make_offload_key(b"elsewhere".ljust(32), GROUP_IDS[0])])
    assert bench.store.puts[0].parent is None


def test_an_engine_that_rests_has_stored_everything(bench):
    keys = bench.begin("a", 1, 30)
    bench.compute("a", keys)
    bench.end("a")
    assert bench.manager.has_pending_work()
    bench.rest()
    assert len(bench.store._blocks) == 30 and not bench.tier._jobs


@pytest.mark.parametrize(
    ("result", "is_fine"), [(Result.REFUSED, True), (Result.NO_ROOM, False), (Result.IO_ERROR, False)]
)
def test_a_refusal_is_a_success_and_what_fails_is_counted_by_vllm(bench, result, is_fine):
    keys = bench.begin("a", 1, 4)
    bench.store.refused = {bench.tier._names.block(keys[2]): result}
    bench.compute("a", keys)
    bench.step()
    (done,) = bench.tier.get_finished_jobs() or [None]
    assert done.success is is_fine and done.transfer_bytes == 3 * ROW_BYTES


def test_the_store_is_told_of_a_request_at_its_end_in_the_order_of_its_prompt(bench):
    """vLLM touches no tier, and its lookups end at memory."""
    bench.serve("a", 1, 10)
    bench.serve("from memory", 1, 8)
    bench.begin("without a chunk", 2, 0)
    bench.end("without a chunk")
    bench.rest()
    ours = [bench.tier._names.block(key) for key in bench.begin("c", 1, 10)]
    assert bench.store.told == {"a": ours, "from memory": ours[:8]}


def test_a_long_request_does_not_hold_up_a_step_with_others(bench, monkeypatch):
    monkeypatch.setattr(tiers, "MOST_TOLD", 10)
    names = [f"request {at}" for at in range(6)]
    for at, name in enumerate(names):
        bench.begin(name, at, 25 if at == 0 else 4)
    bench.end(*names)
    told = []
    while bench.manager.has_pending_work():
        bench.step()
        told.append(len(bench.store.told))
    assert told[:4] == [1, 3, 5, 6]


# -- loads that fail, and memory that is full ------------------------------------------------------


@pytest.mark.parametrize("result", [Result.CHECKSUM, Result.IO_ERROR, Result.DEADLINE, Result.ABSENT])
def test_what_fails_to_load_is_denied_to_its_request_until_that_ends(bench, result):
    bench.serve("a", 1, 8)
    bench.forget_memory()
    keys = bench.begin("b", 1, 8)
    bench.store.bad = {bench.tier._names.block(keys[5]): result}
    assert bench.load("b", keys) == 5, "and what came before it is used"
    assert len(bench.store.gets) == 1, "and not asked for in every step"
    bench.store.bad = {}
    assert bench.look("b", keys) == 5
    bench.compute("b", keys[5:])
    bench.end("b")
    bench.rest()
    bench.forget_memory()
    assert bench.serve("c", 1, 8) == 8, "another request may have it"


def test_all_of_a_load_fails(bench):
    bench.serve("a", 1, 4)
    bench.forget_memory()
    keys = bench.begin("b", 1, 4)
    bench.store.bad = {bench.tier._names.block(key): Result.DEADLINE for key in keys}
    assert bench.load("b", keys) == 0


def test_a_chunk_that_goes_between_its_hit_and_its_load_is_computed(bench):
    bench.serve("a", 1, 4)
    bench.forget_memory()
    keys = bench.begin("b", 1, 4)
    assert bench.look("b", keys) is None
    bench.store._blocks.pop(bench.tier._names.block(keys[1]))
    assert bench.load("b", keys) == 1
    assert bench.store.asked[-1] == [bench.tier._names.block(key) for key in keys]


def test_with_half_of_memory_promised_a_request_waits_and_then_goes_on(make, monkeypatch):
    bench = make(rows=8, lookup_wait_s=100)
    for document in range(4):
        bench.serve(f"cold {document}", document, 4)
    bench.forget_memory()
    keys = {name: bench.begin(name, at, 4) for at, name in enumerate("abc")}
    assert bench.look("a", keys["a"]) is None and set(bench.results) == {LookupResult.HIT_PENDING}
    assert bench.look("b", keys["b"]) is None and set(bench.results) == {LookupResult.RETRY}
    bench.step()
    assert bench.look("b", keys["b"]) is None and set(bench.results) == {LookupResult.RETRY}, "loaded, and not used"
    assert bench.load("a", keys["a"]) == 4
    assert bench.look("b", keys["b"]) is None and set(bench.results) == {LookupResult.HIT_PENDING}
    assert bench.look("c", keys["c"]) is None and set(bench.results) == {LookupResult.RETRY}
    now_s = time.monotonic()
    monkeypatch.setattr(tiers.time, "monotonic", lambda: now_s + 101)
    bench.step()
    bench.look("c", keys["c"])
    assert bench.results[0] is not LookupResult.RETRY, "its wait is over"
    for name in "bc":
        bench.load(name, keys[name])
    bench.end(*"abc")
    bench.rest()
    assert bench.tier._held == 0 and not bench.tier._requests


def test_a_request_whose_rows_are_given_away_again_and_again_is_computed(make):
    """vLLM gives others the rows of what was loaded, while its request waits for blocks on the
    GPU."""
    bench = make(rows=4)
    bench.serve("cold", 0, 4)
    keys = bench.begin("a", 0, 4)
    for _ in range(20):
        bench.forget_memory()
        hits = bench.look("a", keys)
        if hits is not None:
            break
        bench.step()
        bench.step()
        assert bench.look("a", keys) == 4, "and it is not scheduled"
    assert hits == 0
    assert len(bench.store.gets) > 1, "it was loaded again before"
    bench.end("a")
    bench.rest()


def test_a_request_that_is_aborted_gives_its_promise_back(make):
    bench = make(rows=8, lookup_wait_s=100)
    for document in range(2):
        bench.serve(f"cold {document}", document, 4)
    bench.forget_memory()
    keys = {name: bench.begin(name, at, 4) for at, name in enumerate("ab")}
    bench.look("a", keys["a"])
    bench.step()
    bench.end("a")
    assert bench.load("b", keys["b"]) == 4
    bench.end("b")
    bench.rest()


def test_promotions_of_a_thousand_requests_at_once(make):
    bench = make(rows=64, lookup_wait_s=0)
    for document in range(100):
        bench.serve(f"cold {document}", document, 3)
    bench.forget_memory()
    keys = {f"warm {at}": bench.begin(f"warm {at}", at % 100, 3) for at in range(1000)}
    hits = dict.fromkeys(keys, 0)
    left = dict(keys)
    for _ in range(2000):
        ready = []
        for name, each in left.items():
            found = bench.look(name, each)
            if found is not None:
                hits[name] = found
                bench.use(name, each[:found])
                ready.append(name)
        for name in ready:
            del left[name]
            bench.end(name)
        bench.step(*ready)
        if not left:
            break
    assert not left
    assert sum(hits.values()) >= 60
    bench.rest()
    assert not bench.tier._requests and bench.tier._held == 0


def test_earlier_requests_are_loaded_first(bench):
    for document in range(2):
        bench.serve(f"cold {document}", document, 2)
    bench.forget_memory()
    first, second = bench.begin("first", 0, 2), bench.begin("second", 1, 2)
    bench.look("second", second)
    bench.look("first", first)
    bench.step()
    of = {blocks[0].key: arrival for arrival, blocks in bench.store.gets}
    assert of[bench.tier._names.block(first[0])] < of[bench.tier._names.block(second[0])]


# -- resets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "is_over"),
    [([(0, 8), (4, 8)], True), ([(0, 8), (2, 2), (8, 4)], True), ([(0, 8), (8, 4)], False), ([], False)],
)
def test_a_request_with_media_that_lie_over_each_other_is_left_alone(bench, places, is_over):
    """By vLLM's hashes it would hit what has other media."""
    request = SimpleNamespace(
        resumable=False,
        mm_features=[SimpleNamespace(mm_position=PlaceholderRange(*place)) for place in places],
        kv_transfer_params={"mine": 1},
    )

    def on_new_request(request: Any) -> list[OffloadKey]:
        return bench.begin("a", 1, 3)

    keys = on_new_request(request)
    nothing = {"max_load_tokens": 0, "max_offload_tokens": 0}
    assert request.kv_transfer_params == {"mine": 1} | (nothing if is_over else {})
    bench.compute("a", keys)
    bench.end("a")
    bench.rest()
    assert bool(bench.store.puts) != is_over


def test_nothing_from_before_a_reset_is_served_or_stored_after_it(bench):
    bench.serve("a", 1, 6)
    running = bench.begin("b", 2, 6)
    bench.compute("b", running[:3])
    bench.manager.reset_cache()
    getattr(bench.manager, "on_reset_flushed", lambda: None)()
    assert len(bench.store.forgot) == 1 and bench.store.forgot[0] > 0
    before = len(bench.store.puts)
    bench.compute("b", running)
    bench.step()
    assert len(bench.store.puts) == before, "what runs on has KV of the old weights"
    bench.end("b")
    bench.rest()
    bench.forget_memory()
    assert bench.serve("c", 1, 6) == 0
    assert bench.serve("d", 2, 6) == 0
    bench.forget_memory()
    assert bench.serve("e", 1, 6) == 6, "and what is computed since is"


def test_a_reset_that_keeps(make):
    bench = make(on_reset="keep")
    bench.serve("a", 1, 6)
    running = bench.begin("b", 2, 3)
    bench.manager.reset_cache()
    getattr(bench.manager, "on_reset_flushed", lambda: None)()
    bench.compute("b", running)
    bench.end("b")
    bench.rest()
    bench.forget_memory()
    assert bench.serve("c", 1, 6) == 6 and bench.serve("d", 2, 3) == 3
    assert not bench.store.forgot


@pytest.mark.parametrize(
    ("on_reset", "method", "kept"),
    [("epoch", "update_weights", 0), ("epoch", "add_lora", 6), ("keep", "update_weights", 6)],
)
def test_a_call_that_may_change_weights(make, on_reset, method, kept):
    engine = Engine(make, on_reset=on_reset)
    bench = engine.bench
    bench.serve("a", 1, 6)
    bench.rest()
    running = bench.begin("b", 2, 6)
    bench.compute("b", running[:3])
    before = len(bench.store.puts)
    engine.call(method, None)
    bench.compute("b", running)
    bench.step()
    assert (len(bench.store.puts) > before) == bool(kept), "what runs on has KV of the old weights"
    bench.end("b")
    bench.rest()
    bench.forget_memory()
    assert bench.serve("c", 1, 6) == kept


def test_a_reset_waits_for_late_reads(bench):
    bench.serve("a", 1, 6)
    bench.forget_memory()
    keys = bench.begin("b", 1, 6)
    bench.look("b", keys)
    bench.store.holds = True
    bench.step()
    assert bench.tier._jobs
    drained = []
    drain = bench.store.drain

    def drain_late() -> None:
        bench.store.holds = False
        drain()
        drained.append(True)

    bench.store.drain = drain_late
    bench.manager.reset_cache()
    assert drained and not bench.tier._jobs and bench.tier._held == 0


# -- an error of ours ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["presence", "put", "get", "poll", "step", "reached", "changes", "stats", "drain"])
def test_an_error_of_ours_switches_the_tier_off_and_the_engine_goes_on(bench, where, caplog, monkeypatch):
    bench.tier._published = set()
    bench.serve("a", 1, 6)
    bench.forget_memory()
    keys = bench.begin("b", 1, 6)
    monkeypatch.setattr(tiers, "STATS_S", 0.0)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("of ours")

    setattr(bench.store, where, fail)
    for _ in range(3):
        bench.look("b", keys)
        bench.step()
        list(bench.manager.take_events())
        bench.manager.get_stats()
    bench.compute("b", [*keys, *bench.begin("c", 3, 3)])
    bench.end("b", "c")
    if where == "drain":
        bench.manager.reset_cache()
    bench.rest()
    assert bench.tier.is_off
    assert not bench.manager._jobs and not bench.tier._jobs, "every job was reported"
    assert len([text for text in caplog.messages if "kvdisk is off" in text]) == 1
    bench.forget_memory()
    assert bench.serve("d", 1, 6) == 0
    assert bench.serve("e", 1, 6) == 6, "from memory"
    assert not bench.tier._requests


HOOKS = ["on_new_request", "lookup", "submit_store", "get_finished_jobs", "on_schedule_end", "has_pending_work"]
HOOKS += ["take_events", "get_stats", "on_request_finished"]


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("change", ["more", "renamed"])
def test_arguments_that_a_hook_does_not_know_switch_it_off(bench, name, change, monkeypatch, caplog):
    hook, calls = getattr(bench.tier, name), []

    def newer(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if change == "more" or not (arguments or more):
            return hook(*arguments, **more, novel=True)
        return hook(**{f"novel_{at}": each for at, each in enumerate([*arguments, *more.values()])})

    monkeypatch.setattr(bench.tier, name, newer)
    bench.serve("a", 1, 6)
    list(bench.manager.take_events())
    bench.manager.get_stats()
    bench.rest()
    assert calls and bench.tier.is_off
    assert not bench.manager._jobs and not bench.tier._jobs, "every job was reported"
    assert len([text for text in caplog.messages if "kvdisk is off" in text]) == 1
    assert bench.serve("b", 1, 6) == 6, "from memory"


def test_a_row_that_there_is_not_switches_it_off(bench):
    from vllm.v1.kv_offload.tiering.base import TransferJob

    keys = bench.begin("a", 1, 2)
    bench.tier.submit_store(TransferJob(7, keys, np.array([1, 10_000]), False, bench.requests["a"]))
    assert [(job.job_id, job.success) for job in bench.tier.get_finished_jobs()] == [(7, False)]
    assert bench.tier.is_off and not list(bench.tier.get_finished_jobs())


def test_jobs_of_no_keys_and_of_a_key_twice(bench):
    from vllm.v1.kv_offload.tiering.base import TransferJob

    keys = bench.begin("a", 1, 1)
    bench.rows[3] = bench.rows[4] = content_named(keys[0])
    jobs = [
        TransferJob(1, [], np.array([], np.int32), False, bench.requests["a"]),
        TransferJob(2, keys * 2, np.array([3, 4]), False, bench.requests["a"]),
        TransferJob(3, keys, np.array([3]), False, bench.requests["a"]),
    ]
    for job in jobs:
        bench.tier.submit_store(job)
    bench.step()
    done = []
    while len(done) < 3:
        done += bench.tier.get_finished_jobs()
        bench.tier.on_schedule_end(ScheduleEndContext((), ()))
    assert sorted((job.job_id, job.success) for job in done) == [(1, True), (2, True), (3, True)]


def test_a_drive_that_does_not_let_us_have_a_store_leaves_memory(tmp_path, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise DeviceError(5, "the drive")

    monkeypatch.setattr(BlockStore, "open_for", fail)
    bench = Bench(tmp_path)
    assert bench.serve("a", 1, 6) == 0 and bench.serve("b", 1, 6) == 6
    assert any("memory alone" in text for text in caplog.messages)
    bench.close()


# -- events and metrics ----------------------------------------------------------------------------


def test_events_say_what_is_stored_and_what_left(make):
    bench = make(enable_kv_events=True, locality="LOCAL")
    bench.store._most_blocks = 4
    events: list[Any] = []
    for name, chunks in (("a", 3), ("b", 6)):
        bench.serve(name, 1, chunks)
        events += [event for event in bench.manager.take_events() if event.medium is Medium.STORAGE]
    held: set[OffloadKey] = set()
    for event in events:
        held = held - set(event.keys) if event.removed else held | set(event.keys)
        assert event.locality.value == "LOCAL" and event.ownership == "kvdisk"
    assert held == {bench.tier._names.offload(key) for key in bench.store._blocks} and len(held) == 4
    assert any(event.removed for event in events)


def test_alike_changes_of_a_step_are_one_event_and_in_their_order(make, monkeypatch):
    bench = make(enable_kv_events=True)
    blocks = [bench.tier._names.block(make_offload_key(bytes([at]) * 32, GROUP_IDS[0])) for at in range(4)]
    first, second, third, fourth = ([block] for block in blocks)
    steps = [(True, first), (True, second), (False, first), (True, third), (True, fourth)]
    changes = [BlockChange(Tier.NVME, stored, keys) for stored, keys in steps]
    monkeypatch.setattr(bench.store, "changes", lambda: Taken(False, changes))
    events = [
        (event.removed, [bench.tier._names.block(key) for key in event.keys]) for event in bench.tier.take_events()
    ]
    assert events == [(False, blocks[:2]), (True, first), (False, blocks[2:])]


def test_when_too_many_wait_all_that_was_published_is_taken_back(make, monkeypatch):
    bench = make(enable_kv_events=True)
    bench.serve("a", 1, 6)
    assert sum(len(event.keys) for event in bench.tier.take_events()) == 6
    taken = bench.store.changes()
    taken.cleared = True
    monkeypatch.setattr(bench.store, "changes", lambda: taken)
    (event,) = bench.tier.take_events()
    assert event.removed and len(event.keys) == 6


def test_without_vllms_events_there_are_none(bench):
    bench.serve("a", 1, 6)
    assert not [event for event in bench.manager.take_events() if event.medium is Medium.STORAGE]


def test_metrics_are_defined_where_they_come(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "STATS_S", 0.0)
    bench.serve("a", 1, 6)
    bench.forget_memory()
    bench.serve("b", 1, 6)
    for metric in METRICS.values():  # as if all of them had moved
        series = f"{metric.name}.{(metric.values or ('0',))[0]}" if metric.label else metric.name
        if metric.kind.name == "COUNTER":
            bench.tier._stats.add(series)
        elif metric.kind.name == "HISTOGRAM":
            bench.tier._stats.observe(series, 1.0)
        else:
            bench.tier._stats.gauges[series] = 1.0
    data = bench.tier.get_stats().data["data"]
    known = KVDiskTier.build_metric_definitions(
        {"type": "kvdisk", "store_dirs": str(tmp_path), "nvme_bytes": "1GiB", "backpressure": {}}
    )
    assert set(data) == set(known) == {f"{PREFIX}{name}" for name in METRICS}
    for name, values in data.items():
        assert all(len(labels) == len(known[name].labelnames) for labels in values), name
    assert data[f"{PREFIX}loaded_blocks"][()] == 7


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"nvme_byte": 1}, "the nearest it knows is 'nvme_bytes'"),
        ({"cpu_bytes": "4GiB"}, "of KVDiskConnector alone"),
        ({"salt_share": 0.5}, "of KVDiskConnector alone"),
        ({"remote": "bucket"}, "begins with s3"),
        ({"remote": "s3://bucket", "max_age_s": 600}, "max_age_s cannot be used with remote"),
        ({"store_dirs": None}, "needs store_dirs"),
        ({"nvme_bytes": "much"}, "nvme_bytes must be a size"),
        ({"locality": "HERE"}, "locality must be"),
        ({"enable_kv_events": "yes"}, "enable_kv_events must be"),
        ({"namespace": " "}, "namespace must be a text"),
        ({"device": "gds"}, "device 'gds'"),
        ({"store_dirs": "relative"}, "absolute path"),
        ({"nvme_admission": "nowhere:Class"}, "nowhere"),
    ],
)
def test_a_wrong_setting_is_one_sentence(tmp_path, changed, said):
    values = {"store_dirs": str(tmp_path), "nvme_bytes": "1GiB"} | changed
    with pytest.raises(ConfigError, match=said) as caught:
        TierSettings.of(values)
    assert str(caught.value).count(". ") == 0 and str(caught.value).endswith(".")


def test_a_tier_needs_a_cap(tmp_path):
    with pytest.raises(ConfigError, match="needs nvme_bytes"):
        TierSettings.of({"store_dirs": str(tmp_path)})


def test_a_store_threshold_is_refused_by_vllm_before_a_store_is_made(tmp_path):
    tier = {"type": "kvdisk", "store_dirs": str(tmp_path / "store"), "nvme_bytes": "64MiB", "namespace": "test"}
    with pytest.raises(ValueError, match="store_threshold"):
        make_manager(tier, 16, ROW_BYTES, store_threshold=2)
    assert not (tmp_path / "store").exists()


def test_weights_that_nobody_names_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="set namespace"):
        Bench(tmp_path, namespace=None)


def test_what_a_prefix_does_not_determine_is_refused(tiny_llama):
    register()
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, non_causal=True)
    cache = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)], hash_block_size=TOKENS)
    with pytest.raises(ConfigError, match="later tokens of a prompt"):
        fingerprint_of_rows(_config_of(1), 4096, (vllm_config(tiny_llama), cache), "a name")
    config = vllm_config(tiny_llama)
    config.model_config.hf_text_config.engram_layer_ids = [1]
    plain = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], replace(spec, non_causal=False))], hash_block_size=TOKENS)
    assert not config.use_v2_model_runner
    with pytest.raises(ConfigError, match="Engram with vLLM's model runner V1"):
        fingerprint_of_rows(_config_of(1), 4096, (config, plain), "a name")


@pytest.mark.parametrize("kind", ["diffusion", "R-SWA"])
def test_generated_tokens_with_other_kv_than_a_prompts_are_refused(tiny_llama, kind):
    register()
    config, cache = vllm_config(tiny_llama), PLAIN
    config.kv_transfer_config.kv_connector_extra_config = {"offload_prompt_only": False}
    fingerprint_of_rows(_config_of(1), 4096, (config, cache), "a name")
    if kind == "diffusion":
        config.model_config.is_diffusion = True
    else:
        spec = RSWASpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, rswa_window=TOKENS)
        cache = replace(PLAIN, kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)])
    with pytest.raises(ConfigError, match="needs offload_prompt_only"):
        fingerprint_of_rows(_config_of(1), 4096, (config, cache), "a name")
    config.kv_transfer_config.kv_connector_extra_config.clear()
    fingerprint_of_rows(_config_of(1), 4096, (config, cache), "a name")


@pytest.mark.parametrize("kind", ["window", "chunked", "plain"])
def test_windows_in_chunks_of_several_blocks_are_refused(tiny_llama, kind):
    register()
    shape = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
    spec = {
        "window": SlidingWindowSpec(**shape, sliding_window=TOKENS),
        "chunked": ChunkedLocalAttentionSpec(**shape, attention_chunk_size=TOKENS),
        "plain": FullAttentionSpec(**shape, sliding_window=TOKENS),
    }[kind]
    whose = vllm_config(tiny_llama), replace(PLAIN, kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)])
    one = _config_of(1)
    fingerprint_of_rows(one, 4096, whose, "a name")
    several = replace(one, cache=replace(one.cache, blocks_per_chunk=2))
    refused = nullcontext() if kind == "plain" else pytest.raises(ConfigError, match="does not support block_size")
    with refused:
        fingerprint_of_rows(several, 4096, whose, "a name")


def _rows_of(tensor: int, **changes: Any) -> bytes:
    """Return the fingerprint of the rows of an engine with so many ranks."""
    return fingerprint_of_rows(_config_of(tensor, **changes), 4096, None, "a name")[0]


def _config_of(tensor: int, **changes: Any) -> OffloadingConfig:
    parallel = OffloadingParallelConfig(0, tensor, tensor, 1, 1, 1, 0, 1, None, changes.pop("agnostic", False))
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(TOKENS, ("layer",), 0),),
        worker_kv_bytes_per_block=changes.pop("worker_bytes", 4096),
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(TOKENS, 1),
        parallel=parallel,
        kv_cache_layout="LBNHC",
        **changes,
    )


def test_prompts_can_be_hashed_where_a_name_identifies_the_rows(tiny_llama, monkeypatch):
    """By ``kvdisk why``."""
    register()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    engine = vllm_config(tiny_llama)
    engine.cache_config.prefix_caching_hash_algo = "sha256_cbor"
    described = fingerprint_of_rows(_config_of(1), 4096, (engine, PLAIN), "a name")[1]
    assert described["facts"]["hash"] == '["sha256_cbor", "7"]'


def test_ranks_find_each_others_rows_where_these_are_laid_out_alike():
    one = _rows_of(1)
    assert one == _rows_of(2, replicated_layout=True) == _rows_of(8, replicated_layout=True)
    assert len({one, _rows_of(2), _rows_of(4)}) == 3, "each rank has its heads"
    assert len({one, _rows_of(2, agnostic=True), _rows_of(4, agnostic=True)}) == 3, "rank after rank, though"
    canonical = {_rows_of(n, worker_bytes=4096 // n, agnostic=True, canonical_layout=True) for n in (1, 2, 4)}
    assert len(canonical) == 1 and one not in canonical
    uncertified = {_rows_of(n, worker_bytes=4096 // n, canonical_layout=True) for n in (1, 2, 4)}
    assert len(uncertified) == 3


def test_a_line_for_each_request(make, caplog):
    caplog.set_level(logging.INFO)
    bench = make(log_requests=True)
    bench.serve("a", 1, 4)
    bench.forget_memory()
    bench.serve("b\n\x1b[2Jforged", 1, 6)
    assert [text for text in caplog.messages if "request b" in text] == [
        "kvdisk: request b\ufffd\ufffd[2Jforged: 6 chunks, 4 found, 4 loaded, the first missing one absent."
    ]


def test_the_page_has_every_setting():
    text = (Path(__file__).resolve().parents[2] / "docs/OFFLOADING.md").read_text()
    section = text.partition("## Settings\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {*TIER_KEYS, *TierSettings._fields[1:], "backpressure"}
