# SPDX-License-Identifier: Apache-2.0
"""What one long prompt costs the scheduler, call by call, beside vLLM's own offloading doing the
same.

Each side serves a prompt in chunks of STEP_TOKENS, decodes a little, ends, and meets a prompt that
is stored whole. All is as in ``measure_scheduler``: real block pool, requests and connectors'
code, no model, worker or KV. Stores go into a tier that another prompt of the same length has
filled. Each round builds its side anew; nothing of another side is alive then. Figures are of the
thread's processor time, in ms: those that come once are medians of the rounds, those of steps
medians of steps: also those of a hit's plans. With NVMe the hit is on NVMe alone, and its blocks
take the place of others.

``CALLS`` are the calls that only some settings or circumstances bring, and that vLLM's offloading
has not got. Of steps that come again and again a round gives the longest.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import measure_scheduler as short
import torch
from figures import Record, add_json_option
from machine import Machine
from rich.console import Console
from rich.table import Table
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_hints.protocol import KvHintAction, KvHintsEnvelope
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvdisk.blocks import BlockKey, Tier
from kvdisk.config import Config
from kvdisk.connector.scheduler_side import SchedulerSide
from kvdisk.connector.sizes import geometry_of
from kvdisk.geometry import AUTO, OFF, UnitChoice
from kvdisk.manager.free_units import FreeUnits
from kvdisk.manager.manager import TierManager
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.store_policy import NoStores, make_store_policy
from kvdisk.messages import JobKind, JobResult, Reason, Report

BLOCK_TOKENS, STEP_TOKENS, WINDOW_TOKENS = short.BLOCK_TOKENS, 8192, 1024
LENGTHS, GROUPS = (131_072, 1_048_576), (1, 7)
SPARE_BLOCKS = 8192
"""By group: slots of a tier beside those of one prompt."""
DECODED = 5
"""Blocks that a request generates."""
IDLE_STEPS = 8
"""Steps without tokens behind what a side was asked for."""
ANSWER_S = 120.0
"""How long another engine store may take to say what it has."""
HIT = "hit: "
ROWS = (
    "arrival",
    "first lookup, nothing there",
    "first prefill step",
    "a later one",
    "a decode step that fills a block",
    "end",
    HIT + "lookup",
    HIT + "planning",
    HIT + "its plan",
    HIT + "settling",
    HIT + "first step",
    HIT + "in all",
    "longest single call",
)
PREFETCHED = "waits in the queue: a step"
WAITS = "waits for room on the GPU: lookup"
EQUAL = "waits for an equal prompt's load: lookup, step"
CLEAR, RESET, NEXT_DOOR, AFTER = "clear --live: ", "reset", "of another engine store: ", ", a later step"
PREFILL, LATER, FILLS, NONE = ROWS[2], ROWS[3], ROWS[4], "a decode step that fills none"
ABORT, FAILED = "abort: ", "a load that fails: "
SLEEP = "sleep, on_reset: keep"
PREEMPTED = "preemption"
POLICIES = ("on_compute", "on_preemption", "spillover")
HINTS: dict[str, dict[str, Any]] = {"prefetch": {}, "pin": {"seconds": 600}, "retain": {"seconds": 600}, "demote": {}}
HINTED = ("arrival", "a later step", "end")
WIRE = ("to the workers: dump", "to the workers: load, on each", "to the workers: MB")
SIZES = "to the workers"
"""The table of the last of these."""


class Ours:
    """kvdisk's, over a CPU tier, and a store in ``store_dir`` where one is given. ``unit_tokens``:
    the setting. ``joins``: the store of another one, beside which it has its own part."""

    def __init__(
        self,
        cache: Any,
        pool: BlockPool,
        blocks: int,
        store_dir: Path | None,
        longest_tokens: int,
        unit_tokens: str = AUTO,
        policy: str = "on_compute",
        *,
        joins: Path | None = None,
    ) -> None:
        drive: dict[str, Any] = {}
        if store_dir is not None:
            self.store = joins or Path(tempfile.mkdtemp(dir=store_dir))
            drive = {"store_dirs": (self.store,), "nvme_bytes": 3 * blocks * 2 * short.PAYLOAD_BYTES}
        settings, units = short._settings(longest_tokens), UnitChoice(unit_tokens, longest_tokens)
        groups = geometry_of(settings, cache, units=units).groups
        size = sum(blocks // len(groups) // group.gpu_blocks * group.slot_bytes for group in groups)
        config = Config(cpu_bytes=size, store_decode=True, unit_tokens=unit_tokens, store_policy=policy, **drive)
        # No worker has made the segments' files that the upkeep would miss.
        mock.patch("kvdisk.upkeep.HomeWatch.lost_segments", return_value=frozenset()).start()
        with mock.patch("kvdisk.connector.scheduler_side.fingerprint_of", return_value=(bytes(32), {})):  # no model
            self._side = SchedulerSide(config, settings, cache)
        self._side.bind_pool(pool)
        self.arrive, self.allocated, self.plan = self._side.new_request, self._side.allocated, self._side.plan
        self.is_busy = self._side.has_pending_work
        self.wakes = self._side.wake

    @property
    def manager(self) -> TierManager:
        """What decides."""
        return self._side._manager

    @property
    def nvme(self) -> NvmeSpace | None:
        """The NVMe tier; None: there is none."""
        found = self.manager._tiers.get(Tier.NVME)
        assert found is None or isinstance(found, NvmeSpace)
        return found

    def reset(self) -> None:
        """Answer ``reset_cache``."""
        self._side.reset()

    def lookup(self, request: Any) -> int:
        """Return how many tokens can be loaded."""
        return self._side.matched_tokens(request, 0)[0] or 0

    def settle(self, plan: Any) -> None:
        """All that a plan says is done, but for what is nowhere: the rest of a load that was given
        up."""
        gone = {
            job.id: {at: Reason.ABSENT for at, move in enumerate(job.moves) if not move.slots}
            for job in plan.jobs
            if job.kind is JobKind.LOAD
        }
        self._side.settle(Report({job.id: JobResult(failed=gone.get(job.id, {})) for job in plan.jobs}), set())

    def fail(self, plan: Any) -> None:
        """All that a plan says failed."""
        failed = {job.id: dict.fromkeys(range(len(job.moves)), Reason.IO_ERROR) for job in plan.jobs}
        self._side.settle(Report({job: JobResult(failed=moves) for job, moves in failed.items()}), set())

    def finish(self, request: Any) -> None:
        """Let a request go."""
        self._side.finished(request, (), True)

    def loads(self, plan: Any) -> bool:
        """Whether a plan loads anything."""
        return any(job.kind is JobKind.LOAD for job in plan.jobs)

    def goes_on(self, plan: Any) -> bool:
        """Whether the load of a plan goes on in the next one."""
        return any(job.more for job in plan.jobs)

    def close(self) -> None:
        """End it."""
        self._side.shutdown()


class Theirs:
    """vLLM's, over its CPU tier, with so many blocks a chunk."""

    def __init__(self, cache: Any, blocks: int, chunk: int) -> None:
        self._side = short._offloading_scheduler(blocks // chunk, short._settings(), cache, chunk)
        self.arrive, self.allocated = self._side.on_new_request, self._side.update_state_after_alloc
        self.plan = self._side.build_connector_meta

    def lookup(self, request: Any) -> int:
        """Return how many tokens can be loaded."""
        return self._side.get_num_new_matched_tokens(request, 0)[0] or 0

    def settle(self, plan: Any) -> None:
        """All that a plan says is done."""
        done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys((*plan.store_jobs, *plan.load_jobs), 1))
        self._side.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))

    def finish(self, request: Any) -> None:
        """Let a request go."""
        request.status = RequestStatus.FINISHED_ABORTED
        self._side.request_finished(request)

    def is_busy(self) -> bool:
        """Whether it asks for more steps."""
        return False

    def wakes(self) -> None:
        """It goes on."""

    def loads(self, plan: Any) -> bool:
        """Whether a plan loads anything."""
        return bool(plan.load_jobs)

    def goes_on(self, plan: Any) -> bool:  # noqa: ARG002
        """Whether the load of a plan goes on in the next one."""
        return False

    def close(self) -> None:
        """End it."""
        self._side.shutdown()


class _Tables(KVCacheManager):  # type: ignore[misc]  # vLLM is untyped here
    """The block tables of requests, as vLLM's own manager has them."""

    def __init__(self) -> None:
        self.tables: dict[str, list[list[Any]]] = {}

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return a request's blocks."""
        return KVCacheBlocks(tuple(self.tables[request_id]))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return their ids."""
        return tuple([block.block_id for block in blocks] for blocks in self.tables[request_id])


class Engine:
    """One side's requests, one at a time. ``taken``: processor seconds of each call, by row."""

    def __init__(self, tokens: int, groups: int) -> None:
        head_size = short.PAYLOAD_BYTES // BLOCK_TOKENS // 8
        shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": head_size, "dtype": torch.float32}
        specs = [FullAttentionSpec(**shape)]
        specs += [SlidingWindowSpec(**shape, sliding_window=WINDOW_TOKENS)] * (groups - 1)
        layers = [KVCacheGroupSpec([f"layer {at}"], spec) for at, spec in enumerate(specs)]
        pool_blocks = tokens // BLOCK_TOKENS + groups * 4096
        self.cache = KVCacheConfig(pool_blocks, [], layers, hash_block_size=BLOCK_TOKENS)
        self.pool = BlockPool(pool_blocks, True, BLOCK_TOKENS)
        self.tokens, self.groups = tokens, groups
        self.about = self.cache, self.pool
        self.side: Any = None
        self._tables = _Tables()
        self._count = 0
        self.taken: defaultdict[str, list[float]] = defaultdict(list)
        self.longest = (0.0, "")

    def _time(self, row: str, call: Callable[[], Any]) -> Any:
        taken_s, answer = short.timed(call)
        self.taken[row].append(taken_s)
        self.longest = max(self.longest, (taken_s, row))
        return answer

    def hashes(self, name: str, count: int) -> list[bytes]:
        """Return the hashes of a prompt's blocks, new objects each time, as vLLM makes them."""
        return [hashlib.sha256(f"{name} {at}".encode()).digest() for at in range(count)]

    def come(self, hashes: Sequence[bytes], row: str, kv_hints: Any = None) -> Any:
        """Let a request come whose prompt is these blocks."""
        self._count += 1
        name, tokens = f"request {self._count}", [1] * self.tokens
        request = Request(name, tokens, SamplingParams(max_tokens=10**6), None, kv_hints=kv_hints)
        request.block_hashes.extend(hashes)
        self._time(row, partial(self.side.arrive, request))
        request.append_output_token_ids(1)  # so that all of its prompt may hit
        self._tables.tables[request.request_id] = [[] for _ in range(self.groups)]
        return request

    def _output(self, request: Any | None, tokens: int, new: Sequence[Sequence[Any]] = ()) -> Any:
        output = SchedulerOutput.make_empty()
        if request is not None:
            name = request.request_id
            ids = tuple([block.block_id for block in blocks] for blocks in new) if new else None
            output.num_scheduled_tokens = {name: tokens}
            output.scheduled_cached_reqs = CachedRequestData([name], set(), [], {}, [ids], [], [])
            output.kv_connector_block_state = KVConnectorBlockState({name}, self._tables.get_block_ids, {})
        return output

    def step(self, output: Any, row: str) -> Any:
        """Let the side plan a step, and book it as done."""
        self.side.wakes()
        taken_s, plan = short.timed(partial(self.side.plan, output))
        settled_s, _ = short.timed(partial(self.side.settle, plan))
        self.taken[row].append(taken_s + settled_s)
        self.longest = max(self.longest, (taken_s, row), (settled_s, row))
        return plan

    def _grow(self, request: Any, tokens: int) -> list[list[Any]]:
        """Give a request blocks for so many more tokens, and free those behind its windows."""
        new = [self.pool.get_new_blocks(tokens // BLOCK_TOKENS) for _ in range(self.groups)]
        behind = max(0, request.num_computed_tokens - WINDOW_TOKENS) // BLOCK_TOKENS
        for at, (table, blocks) in enumerate(zip(self._tables.tables[request.request_id], new, strict=True)):
            table.extend(blocks)
            for place in range(max(0, behind - STEP_TOKENS // BLOCK_TOKENS), behind if at else 0):
                if not table[place].is_null:
                    self.pool.free_blocks([table[place]])
                    table[place] = self.pool.null_block
        return new

    def prefill(self, name: str) -> Any:
        """Have a prompt computed that nobody has seen; return its request."""
        request = self.come(self.hashes(name, self.tokens // BLOCK_TOKENS), "arrival")
        assert self._time("first lookup, nothing there", partial(self.side.lookup, request)) == 0
        for _ in range(0, self.tokens, STEP_TOKENS):
            self.compute(request, "a later one" if request.num_computed_tokens else "first prefill step")
        return request

    def compute(self, request: Any, row: str) -> None:
        """Run a step of a request's prompt."""
        output = self._output(request, STEP_TOKENS, self._grow(request, STEP_TOKENS))
        self.step(output, row)
        request.num_computed_tokens += STEP_TOKENS

    def serve(self, name: str) -> None:
        """Serve a prompt that nobody has seen."""
        request = self.prefill(name)
        self.decode(request, name)
        self.leave(request, "end")

    def decode(self, request: Any, name: str) -> None:
        """Have a request generate blocks."""
        for at in range(DECODED):
            request.append_output_token_ids([1] * BLOCK_TOKENS)
            request.num_computed_tokens += BLOCK_TOKENS - 1
            request.block_hashes.extend(self.hashes(f"{name} answer {at}", 1))
            output = self._output(request, 1, self._grow(request, BLOCK_TOKENS))
            self.step(output, "a decode step that fills a block")
            request.num_computed_tokens += 1
        for _ in range(BLOCK_TOKENS - 1):  # what found no room is offered again
            self.step(self._output(request, 1), NONE)
            request.append_output_token_ids(1)
            request.num_computed_tokens += 1

    def ask(self, request: Any, row: str) -> None:
        """Look up a request whose prompt is stored whole."""
        found = self._time(row, partial(self.side.lookup, request))
        assert found == self.tokens, f"{found:,} tokens hit"

    def take(self, request: Any) -> None:
        """Have the hit of a request loaded that was looked up."""
        blocks, window = self.tokens // BLOCK_TOKENS, WINDOW_TOKENS // BLOCK_TOKENS
        tables = self._tables.tables[request.request_id]
        for at, table in enumerate(tables):
            lacking = blocks - window if at else 0
            table.extend([self.pool.null_block] * lacking + self.pool.get_new_blocks(blocks - lacking))
        given = KVCacheBlocks(tuple(tables))
        self._time(HIT + "planning", partial(self.side.allocated, request, given, self.tokens))

    def meet(self, name: str, *, steps: int = 0, loses: bool = False) -> None:
        """Serve a prompt that is stored whole; ``steps``: without tokens, behind the first, before
        which memory has lost it where it ``loses`` that."""
        before = self._hit_s()
        request = self.come(self.hashes(name, self.tokens // BLOCK_TOKENS), "arrival")
        self.ask(request, HIT + "lookup")
        self.take(request)
        plan = self._time(HIT + "its plan", partial(self.side.plan, self._output(None, 0)))
        assert self.side.loads(plan)
        wire = self._wire(plan)
        self._time(HIT + "settling", partial(self.side.settle, plan))
        while self.side.goes_on(plan):
            plan = self._time(HIT + "its plan", partial(self.side.plan, self._output(None, 0)))
            wire = max(wire, self._wire(plan))
            self._time(HIT + "settling", partial(self.side.settle, plan))
        request.num_computed_tokens = self.tokens
        output = self._output(request, 1, [self.pool.get_new_blocks(1) for _ in range(self.groups)])
        self.step(output, HIT + "first step")
        self.taken[HIT + "in all"].append(self._hit_s() - before)
        if loses:
            self.side.manager._clear_all_memory()
        for _ in range(steps):
            self.step(self._output(None, 0), HIT + "a later step")
        self.leave(request, "end")
        for row, value in zip(WIRE, wire, strict=True):
            self.taken[row].append(value)

    def _hit_s(self) -> float:
        return sum(sum(taken) for row, taken in self.taken.items() if row.startswith(HIT))

    def _wire(self, plan: Any) -> tuple[float, float, float]:
        dump_s, sent = short.timed(partial(pickle.dumps, plan, pickle.HIGHEST_PROTOCOL))
        load_s, _ = short.timed(partial(pickle.loads, sent))
        return dump_s, load_s, len(sent) / 1e9  # of which 1,000 are printed for each

    def leave(self, request: Any, row: str) -> None:
        """Let a request end, and all of it be done."""
        ended = self._output(None, 0)
        ended.finished_req_ids = {request.request_id}
        self._time(row, partial(self.side.finish, request))
        self.step(ended, "idle")
        self.taken[row][-1] += self.taken["idle"][-1]
        self._free(request)
        del self._tables.tables[request.request_id]
        while self.side.is_busy():  # until all is on NVMe that goes there, and committed
            self.step(self._output(None, 0), "idle")

    def _free(self, request: Any) -> None:
        for table in self._tables.tables[request.request_id]:
            self.pool.free_blocks([block for block in reversed(table) if not block.is_null])

    def rest(self, row: str) -> None:
        """Take steps without tokens, in which what was begun goes on."""
        for _ in range(IDLE_STEPS):
            self.step(self._output(None, 0), row)

    def preempt(self, name: str) -> None:
        """Have a prompt computed that nobody has seen, and its request preempted."""
        request = self.prefill(name)
        self.decode(request, name)
        for group, table in enumerate(self._tables.tables[request.request_id]):
            self.pool.cache_full_blocks(request, table, 0, len(table), BLOCK_TOKENS, group)
        self._free(request)
        output = self._output(None, 0)
        output.preempted_req_ids = {request.request_id}
        self.step(output, PREEMPTED)
        self.rest(PREEMPTED + AFTER)
        self._tables.tables[request.request_id] = []
        self.leave(request, "end")

    def wait_for_room(self, name: str) -> None:
        """Look up a stored prompt that waits for blocks of the GPU, once in each step of another
        one."""
        request, other = (
            self.come(self.hashes(each, self.tokens // BLOCK_TOKENS), "arrival") for each in (name, "other")
        )
        self.ask(request, HIT + "lookup")
        for _ in range(8):
            self.compute(other, "a later one")
            assert self._time(WAITS, partial(self.side.lookup, request)) > self.tokens // 2

    def wait_in_queue(self, name: str) -> None:
        """Let a stored prompt wait, without a lookup."""
        self.come(self.hashes(name, self.tokens // BLOCK_TOKENS), "arrival")
        for _ in range(8):
            self.step(self._output(None, 0), PREFETCHED)

    def meet_twice(self, name: str) -> None:
        """Look up a stored prompt in each step in which an equal one is loaded."""
        requests = [self.come(self.hashes(name, self.tokens // BLOCK_TOKENS), "arrival") for _ in range(2)]
        self.ask(requests[0], HIT + "lookup")
        self.take(requests[0])
        loads = True
        while loads:
            self._time(EQUAL, partial(self.side.lookup, requests[1]))
            loads = self.side.goes_on(self.step(self._output(None, 0), EQUAL))

    def hint(self, name: str) -> None:
        """Let requests for a stored prompt come and go, each with a KV hint."""
        for action, payload in HINTS.items():
            hints = KvHintsEnvelope("1.0", "hints", [KvHintAction(action, f"kv.{action}", "1.0", payload)])
            request = self.come(self.hashes(name, self.tokens // BLOCK_TOKENS), f"kv.{action}: arrival", hints)
            self.rest(f"kv.{action}: a later step")
            self.leave(request, f"kv.{action}: end")

    def go_wrong(self, name: str) -> None:
        """Abort a stored prompt's load; have another fail; and abort a prompt that is stored."""
        for row in (ABORT + "while it loads", FAILED + "settling"):
            request = self.come(self.hashes(name, self.tokens // BLOCK_TOKENS), "arrival")
            self.ask(request, HIT + "lookup")
            self.take(request)
            plan = self.side.plan(self._output(None, 0))
            assert self.side.loads(plan)
            if row.startswith(ABORT):
                self._time(row, partial(self.side.finish, request))
                self.side.settle(plan)
            else:
                self._time(row, partial(self.side.fail, plan))
            self.rest(row + AFTER)
            self.leave(request, "end")
        request = self.come(self.hashes("aborted", self.tokens // BLOCK_TOKENS), "arrival")
        while request.num_computed_tokens < self.tokens // 2:
            self.compute(request, LATER)
        plan = self.side.plan(self._output(request, STEP_TOKENS, self._grow(request, STEP_TOKENS)))
        self._time(ABORT + "while it stores", partial(self.side.finish, request))
        self.side.settle(plan)
        self.rest(ABORT + "while it stores" + AFTER)

    def spill(self, name: str) -> None:
        """Serve a stored prompt under ``spillover``."""
        stores = self.side.manager._stores
        stores._store_policy = make_store_policy("spillover")
        stores._free_units = stores._offers._units = FreeUnits(stores._context, stores._geometry)
        self.meet(name, steps=20)

    def list_all(self, name: str) -> None:
        """Serve a stored prompt under a policy that returns lists; memory loses it at once."""
        self.side.manager._stores._store_policy = Listed()  # type: ignore[abstract]  # what is empty is meant so
        self.meet(name, steps=20, loses=True)

    def clear(self, _: str) -> None:
        """Delete all, as ``kvdisk clear --live`` asks for it."""
        while self._time(CLEAR + "memory", self.side.manager.clear_memory).more:
            pass
        nvme = self.side.nvme
        for segment in list(nvme.segments.in_place) if nvme else ():
            self._time(CLEAR + "a segment", partial(nvme.let_go, segment))
            self.step(self._output(None, 0), CLEAR + "a later step")

    def forget(self, _: str) -> None:
        """Sleep, and reset the cache."""
        self._time(SLEEP, self.side.manager.lose_gpu)
        self.rest(SLEEP + AFTER)
        self._time(RESET, self.side.reset)
        self.rest(RESET + AFTER)

    def meet_next_door(self, name: str) -> None:
        """Let another engine of this one's store serve a prompt that this one has on NVMe."""
        other = Engine(self.tokens, self.groups)
        other.side = Ours(*other.about, SPARE_BLOCKS * self.groups, self.side.store, self.tokens, joins=self.side.store)
        other.taken = self.taken
        request = other.come(other.hashes(name, self.tokens // BLOCK_TOKENS), NEXT_DOOR + "arrival")
        until_s, found = time.monotonic() + ANSWER_S, 0
        while found < self.tokens and time.monotonic() < until_s:
            found = other._time(NEXT_DOOR + "lookup", partial(other.side.lookup, request))
            other.step(other._output(None, 0), NEXT_DOOR + "a step that waits")
            time.sleep(0.02)  # the file is read by another process
        assert found == self.tokens, f"{found:,} tokens hit next door"
        other.take(request)
        self.taken[NEXT_DOOR + "planning"] += self.taken.pop(HIT + "planning")
        goes_on = True
        while goes_on:
            goes_on = other.side.goes_on(other.step(other._output(None, 0), NEXT_DOOR + "a step that loads"))
        other.leave(request, NEXT_DOOR + "end")
        other.side.close()


class Listed(NoStores):
    """Offers all, as a list: a policy of a user's own may."""

    def reached(self, request_id: str, keys: Sequence[BlockKey], start: int, stop: int) -> Sequence[int]:  # noqa: ARG002
        """Return all positions."""
        return list(range(start, stop))


def filled(
    tokens: int, groups: int, make: Callable[[Engine, int], Any], use: Callable[[Engine, str], None] = Engine.serve
) -> Engine:
    """Return an engine whose side a prompt has filled, and that has served another one, or has done
    what ``use`` does with both."""
    engine = Engine(tokens, groups)
    engine.side = make(engine, (tokens // BLOCK_TOKENS + SPARE_BLOCKS) * groups)
    use(engine, "filler")
    engine.taken.clear()
    engine.longest = (0.0, "")
    gc.collect()
    gc.freeze()  # as vLLM does when it has started
    use(engine, "prompt")
    return engine


def measure(tokens: int, groups: int, make: Callable[[Engine, int], Any], *, is_nvme: bool) -> Engine:
    """Return an engine that has served and met a prompt; the first one has filled its side."""
    engine = filled(tokens, groups, make)
    engine.meet("filler" if is_nvme else "prompt")  # where it is on NVMe alone
    gc.unfreeze()
    engine.side.close()
    return engine


def sides(store_dir: Path) -> dict[str, tuple[Callable[[Engine, int], Any], bool]]:
    """Return how to make each side, by its name, and whether it has an NVMe tier."""
    return {
        "kvdisk": (lambda engine, blocks: Ours(*engine.about, blocks, None, engine.tokens), False),
        "with NVMe": (lambda engine, blocks: Ours(*engine.about, blocks, store_dir, engine.tokens), True),
        "vLLM, 1 a chunk": (lambda engine, blocks: Theirs(engine.cache, blocks, 1), False),
        "vLLM, 16 a chunk": (lambda engine, blocks: Theirs(engine.cache, blocks, 16), False),
        "kvdisk, units off": (lambda engine, blocks: Ours(*engine.about, blocks, None, engine.tokens, OFF), False),
        "with NVMe, off": (lambda engine, blocks: Ours(*engine.about, blocks, store_dir, engine.tokens, OFF), True),
    }


def title_of(tokens: int, groups: int) -> str:
    """Return what a table is of."""
    return f"{tokens:,} tokens, {groups} group{'s'[: groups > 1]}"


def table_of(tokens: int, groups: int, rounds: int, record: Record) -> Table:
    """Measure all sides; note and return a table of milliseconds."""
    columns = []
    with tempfile.TemporaryDirectory() as directory:
        made = sides(Path(directory))
        for make, is_nvme in made.values():
            results = []
            for _ in range(rounds):
                results.append(_result(measure(tokens, groups, make, is_nvme=is_nvme)))
                gc.collect()
            columns.append({row: [1e3 * each[row] for each in results] for row in results[0]})
    table = Table("ms: " + title_of(tokens, groups), *made)
    for row in (*ROWS, *WIRE):
        # A prompt of one step has no later one.
        table.add_row(row, *(f"{statistics.median(column[row]):,.2f}" if row in column else "" for column in columns))
        for name, column in zip(made, columns, strict=True):
            cell = (SIZES, title_of(tokens, groups)) if row == WIRE[-1] else (title_of(tokens, groups), row)
            if row in column:
                record.add(*cell, name, column[row], "MB" if row == WIRE[-1] else "ms")
    return table


Rows = dict[str, tuple[str, ...]]
"""Rows of a table: of each, whose longest call it has."""
LOOK = {"a step after a hit": (HIT + "first step", HIT + "a later step")}
CALLS: tuple[tuple[Callable[[Engine, str], None], Rows], ...] = (
    (Engine.wait_in_queue, {PREFETCHED: (PREFETCHED,)}),
    (Engine.wait_for_room, {WAITS: (WAITS,)}),
    (Engine.meet_twice, {EQUAL: (EQUAL,)}),
    (Engine.hint, {f"kv.{action}: {what}": (f"kv.{action}: {what}",) for action in HINTS for what in HINTED}),
    (Engine.spill, {f"spillover: {row}": parts for row, parts in LOOK.items()}),
    (Engine.list_all, {f"a policy's list: {row}": parts for row, parts in LOOK.items()}),
    (Engine.clear, {f"{CLEAR}{what}": (f"{CLEAR}{what}",) for what in ("memory", "a segment", "a later step")}),
    (Engine.forget, {row: (row,) for each in (SLEEP, RESET) for row in (each, each + AFTER)}),
    (
        Engine.go_wrong,
        {
            row: (row,)
            for each in (ABORT + "while it loads", FAILED + "settling", ABORT + "while it stores")
            for row in (each, each + AFTER)
        },
    ),
)
"""What an engine does once it has met a prompt, and the rows of that."""
IN_A_STORE: tuple[Callable[[Engine, str], None], Rows] = (
    Engine.meet_next_door,
    {
        f"{NEXT_DOOR}{what}": (f"{NEXT_DOOR}{what}",)
        for what in ("arrival", "lookup", "a step that waits", "planning", "a step that loads", "end")
    },
)
"""The same, where there is a store."""
SERVED: Rows = {
    "arrival": ("arrival",),
    "lookup": (ROWS[1],),
    "a prefill step": (PREFILL, LATER),
    "a decode step": (FILLS, NONE),
    PREEMPTED: (PREEMPTED,),
    PREEMPTED + AFTER: (PREEMPTED + AFTER,),
    "end": ("end",),
}
"""Of a prompt that nobody has seen, under each policy."""


def calls_of(tokens: int, groups: int, rounds: int, record: Record, unit_tokens: str = AUTO) -> Table:
    """Measure ``CALLS``, and each store policy; note and return a table of milliseconds: the
    median, and the least and most, of the longest of each round."""
    found: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for at, store_dir in enumerate((None, Path(directory))):

            def make(engine: Engine, blocks: int, policy: str = "on_compute", where: Path | None = store_dir) -> Ours:
                return Ours(*engine.about, blocks, where, engine.tokens, unit_tokens, policy)

            for _ in range(rounds):
                for call, rows in CALLS if store_dir is None else (*CALLS, IN_A_STORE):
                    engine = filled(tokens, groups, make)
                    call(engine, "prompt" if store_dir is None else "filler")
                    _note(engine, rows, found, at)
                for policy in POLICIES:
                    engine = filled(tokens, groups, partial(make, policy=policy), Engine.preempt)
                    _note(engine, {f"{policy}: {row}": parts for row, parts in SERVED.items()}, found, at)
    table = Table("ms: " + title_of(tokens, groups), *short.SIDES)
    for row, both in found.items():
        table.add_row(row, *(_cell(taken) for taken in both))
        for side, taken in zip(short.SIDES, both, strict=True):
            if taken:
                record.add(title_of(tokens, groups), row, side, [1e3 * seconds for seconds in taken], "ms")
    return table


def _cell(taken: Sequence[float]) -> str:
    if not taken:
        return ""
    return f"{1e3 * statistics.median(taken):,.1f} ({1e3 * min(taken):,.1f} to {1e3 * max(taken):,.1f})"


def _note(engine: Engine, rows: Rows, found: dict[str, list[list[float]]], at: int) -> None:
    """Take an engine's longest call of each row, and end it."""
    gc.unfreeze()
    engine.side.close()
    for row, parts in rows.items():
        taken = [seconds for part in parts for seconds in engine.taken[part]]
        if taken:
            found.setdefault(row, [[], []])[at].append(max(taken))
    gc.collect()


def _result(engine: Engine) -> dict[str, float]:
    found = {row: statistics.median(taken) for row, taken in engine.taken.items()}
    return found | {"longest single call": engine.longest[0]}


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--groups", type=int, nargs="+", default=GROUPS)
    parser.add_argument("--calls", action="store_true", help="the calls that only some circumstances bring")
    parser.add_argument("--unit-tokens", default=AUTO, help="the setting, of --calls")
    add_json_option(parser)
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True, width=120)
    load, record = os.getloadavg()[0], Record()
    for tokens in options.tokens:
        for groups in options.groups:
            measured = partial(calls_of, unit_tokens=options.unit_tokens) if options.calls else table_of
            console.print(measured(tokens, groups, options.rounds, record))
    console.print(f"{options.rounds} rounds. {Machine.here(Path()).sentence}; load before: {load:.1f}")
    record.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
