# SPDX-License-Identifier: Apache-2.0
"""What kvdisk's scheduler side costs a step, beside vLLM's own offloading doing the same.

Block pool, requests, scheduler output and both connectors' code are real; there is no model, no
worker and no KV: lookups, loads and stores are decided and booked, and nothing is moved. Both do
the same in turn, and who begins changes from round to round. Figures are medians of the thread's
processor time in microseconds: what others do on the machine still fills its caches, so the ratio
is the result. vLLM has its CPU tier alone in all rows; with NVMe kvdisk has both tiers, demotes
what earlier steps stored, and loads what is on NVMe. Stores go into a full tier.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from figures import Record, add_json_option
from machine import Machine
from rich.console import Console
from rich.table import Table
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvdisk.blocks import Tier, make_block_keys
from kvdisk.config import Config
from kvdisk.connector.scheduler_side import SchedulerSide
from kvdisk.messages import JobKind, JobResult, Plan, Report

BLOCK_TOKENS = 16
PAYLOAD_BYTES = 4096
NVME_BYTES = 2 << 30
TIER_BLOCKS = 4096
RUNNING, NEW_BLOCKS = 100, 10
STORED, LOADED = (1, 16, 512), (1, 16, 2000)
SIDES = {"kvdisk": "vLLM", "with NVMe": "vLLM again"}
"""Kvdisk's with one tier and with both, and what stands for vLLM in the same run."""

Samples = Iterator[tuple[float, float]]
"""Processor time of kvdisk and of vLLM for the same work, in seconds."""


class BothSides:
    """Requests of an engine, and kvdisk's and vLLM's scheduler sides that follow them.

    ``cpu_blocks``: of kvdisk's tier; ``their_blocks``: of vLLM's. ``store_dir``: where kvdisk has
    an NVMe tier as well, with an index and all, in a store of its own.
    """

    def __init__(self, cpu_blocks: int, store_dir: Path | None, their_blocks: int | None = None) -> None:
        head_size = PAYLOAD_BYTES // BLOCK_TOKENS // 8
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=head_size, dtype=torch.float32)
        pool_blocks = 1 << 17
        cache = KVCacheConfig(pool_blocks, [], [KVCacheGroupSpec(["layer"], spec)], hash_block_size=BLOCK_TOKENS)
        drive: dict[str, Any] = {}
        if store_dir is not None:
            drive = {"store_dirs": (Path(tempfile.mkdtemp(dir=store_dir)),), "nvme_bytes": NVME_BYTES}
        config = Config(cpu_bytes=cpu_blocks * 2 * PAYLOAD_BYTES, store_decode=True, **drive)
        self.pool = BlockPool(pool_blocks, True, BLOCK_TOKENS)
        with mock.patch("kvdisk.connector.scheduler_side.fingerprint_of", return_value=(bytes(32), {})):  # no model
            self.ours = SchedulerSide(config, _settings(), cache)
        self.ours.bind_pool(self.pool)
        self.theirs = _offloading_scheduler(their_blocks or cpu_blocks, _settings(), cache)
        self._random = random.Random(0)  # noqa: S311 - not a secret
        self._last = 0
        self._ours_first = False
        self.requests: dict[str, Any] = {}
        self.tables: dict[str, list[Any]] = {}

    # -- requests and steps --------------------------------------------------------------------

    def come(self, hashes: list[bytes]) -> Any:
        """Let a request come whose prompt is these blocks."""
        self._last += 1
        request_id = f"request {self._last}"
        request = Request(request_id, [1] * (len(hashes) * BLOCK_TOKENS), SamplingParams(max_tokens=10**6), None)
        request.block_hashes.extend(hashes)
        self.requests[request_id] = request
        self.ours.new_request(request)
        self.theirs.on_new_request(request)
        request.append_output_token_ids(1)  # so that all of its prompt may hit
        self.tables[request_id] = self.pool.get_new_blocks(len(hashes) + 1)
        return request

    def new_hashes(self, count: int) -> list[bytes]:
        """Return hashes that nobody has, new objects each time, as vLLM makes them."""
        return [hashlib.sha256(self._random.randbytes(8)).digest() for _ in range(count)]

    def prefill(self, blocks: int) -> tuple[Any, Any]:
        """Let a request come; return it, and the output of the step that computes its whole
        prompt."""
        request = self.come(self.new_hashes(blocks))
        name = request.request_id
        output = self.output([name], {name: self.tables[name]})
        output.num_scheduled_tokens = {name: blocks * BLOCK_TOKENS}
        return request, output

    def finish(self, request_id: str) -> None:
        """Let a request go of which both have settled everything."""
        request = self.requests.pop(request_id)
        self.ours.finished(request, (), True)
        request.status = RequestStatus.FINISHED_ABORTED
        self.theirs.request_finished(request)
        ended = self.output([], {})
        ended.finished_req_ids = {request_id}
        self.step(ended)
        self.pool.free_blocks(reversed(self.tables.pop(request_id)))

    def output(self, request_ids: list[str], new_blocks: dict[str, list[Any]]) -> Any:
        """Return a scheduler's output: a token for each of these requests."""
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = dict.fromkeys(request_ids, 1)
        found = [new_blocks.get(name) for name in request_ids]
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=request_ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None if blocks is None else ([block.block_id for block in blocks],) for blocks in found],
            num_computed_tokens=[],
            num_output_tokens=[],
        )
        tables = self.tables
        output.kv_connector_block_state = KVConnectorBlockState(
            req_ids=set(request_ids),
            resolve_block_ids=lambda request_id: ([block.block_id for block in tables[request_id]],),
            boundary_state_offloads={},
        )
        return output

    def filling(self, count: int) -> Any:
        """Return the output of a step of all requests in which ``count`` of them fill a block, and
        nobody else."""
        for request in self.requests.values():
            if (request.num_computed_tokens + 1) % BLOCK_TOKENS == 0:  # filled its block in the last step
                self._advance(request, 1)
        new_blocks = {}
        for name in self._random.sample(list(self.requests), count):
            request = self.requests[name]
            self._advance(request, BLOCK_TOKENS - 1)
            request.block_hashes.extend(self.new_hashes(1))
            new_blocks[name] = self.pool.get_new_blocks(1)
            self.tables[name] += new_blocks[name]
        return self.output(list(self.requests), new_blocks)

    def _advance(self, request: Any, tokens: int) -> None:
        request.append_output_token_ids([1] * tokens)
        request.num_computed_tokens += tokens

    # -- what is timed -------------------------------------------------------------------------

    def both(self, ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[tuple[float, Any], tuple[float, Any]]:
        """Time both, and return what each took and answered. Who comes second finds warm caches:
        they take turns."""
        if self._ours_first:
            mine = timed(ours)
            return mine, timed(theirs)
        other = timed(theirs)
        return timed(ours), other

    def step(self, output: Any, ours: Any = None, theirs: Any = None) -> tuple[float, float, Plan]:
        """Let both plan a step and book it as done; return the time of each, and kvdisk's plan.

        ``ours``, ``theirs``: called first, in the same time.
        """
        self._ours_first = not self._ours_first
        (ours_s, plan), (theirs_s, meta) = self.both(
            lambda: (ours and ours(), self.ours.plan(output))[1],
            lambda: (theirs and theirs(), self.theirs.build_connector_meta(output))[1],
        )
        report = Report({job.id: JobResult() for job in plan.jobs})
        done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys((*meta.store_jobs, *meta.load_jobs), 1))
        ended = KVConnectorOutput(kv_connector_worker_meta=done)
        (more_s, _), (their_s, _) = self.both(
            lambda: self.ours.settle(report, set()), lambda: self.theirs.update_connector_output(ended)
        )
        return ours_s + more_s, theirs_s + their_s, plan


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor time of a call, in seconds, and its answer."""
    start_s = time.thread_time()
    answer = call()
    return time.thread_time() - start_s, answer


def _settings(longest_tokens: int = 0) -> Any:
    """Return what both read of a ``VllmConfig``. ``longest_tokens``: of the longest prompt."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=longest_tokens, is_diffusion=False),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            world_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            distributed_executor_backend="mp",
            data_parallel_backend="mp",
            data_parallel_size_local=1,
            nnodes_within_dp=1,
            data_parallel_rank_local=None,
        ),
        cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256),
        kv_events_config=None,
        speculative_config=None,
        lora_config=None,
    )


def _offloading_scheduler(cpu_chunks: int, settings: Any, cache: Any, chunk: int = 1) -> Any:
    """Return vLLM's scheduler side. ``chunk``: blocks that it stores as one."""

    class Spec(OffloadingSpec):  # type: ignore[misc]  # vLLM is untyped here
        def get_manager(self) -> Any:
            return CPUOffloadingManager(cpu_chunks)

        def get_worker(self, kv_caches: Any) -> Any:  # noqa: ARG002 - vLLM's signature
            raise AssertionError("there is no worker here")

    offloading = SimpleNamespace(
        groups=tuple(
            SimpleNamespace(tokens_per_block=BLOCK_TOKENS, group_id=at, layer_names=tuple(group.layer_names))
            for at, group in enumerate(cache.kv_cache_groups)
        ),
        enable_kv_cache_events=False,
        extra_config={"offload_prompt_only": False},
        cache=SimpleNamespace(tokens_per_hash=BLOCK_TOKENS, blocks_per_chunk=chunk),
    )
    return OffloadingConnectorScheduler(Spec(offloading), settings, cache)


# -- what is measured --------------------------------------------------------------------------


def stored_by(plan: Plan) -> int:
    """Return how many blocks a plan stores; it may demote others."""
    return sum(len(job.moves) for job in plan.jobs if job.kind is JobKind.STORE)


def steps(new_blocks: int, store_dir: Path | None) -> Samples:
    """Yield steps of RUNNING requests that decode, of which so many fill a block."""
    sides = BothSides(200_000, store_dir)
    for _ in range(RUNNING):
        request, output = sides.prefill(128)
        sides.step(output)
        request.num_computed_tokens = 128 * BLOCK_TOKENS
    while True:
        ours_s, theirs_s, plan = sides.step(sides.filling(new_blocks))
        assert stored_by(plan) == new_blocks
        yield ours_s, theirs_s


def stores(blocks: int, store_dir: Path | None) -> Samples:
    """Yield stores of a whole prompt, where each block takes the place of another: per block."""
    sides, stored = BothSides(TIER_BLOCKS, store_dir), 0
    while True:
        count = 512 if stored < 2 * TIER_BLOCKS else blocks
        request, output = sides.prefill(count)
        ours_s, theirs_s, plan = sides.step(output)
        stored += stored_by(plan)
        sides.finish(request.request_id)
        if stored > 2 * TIER_BLOCKS:
            assert stored_by(plan) == count
            yield ours_s / count, theirs_s / count


def hits(blocks: int, store_dir: Path | None) -> Samples:
    """Yield loads of the prompt that was used longest ago: per block, lookup, plan and settlement.

    With NVMe, memory holds just less than two prompts: for what is loaded others are evicted from
    it.
    """
    sides = BothSides(1 << 16 if store_dir is None else 2 * blocks - blocks // 8, store_dir, 1 << 16)
    prompts: list[list[bytes]] = []
    for number in range(1, 9):
        request, output = sides.prefill(blocks)
        prompts += [request.block_hashes[:blocks]] * (number > 1)  # the first waits for a segment: it is not used
        sides.step(output)
        while sides.ours.counters().get("stored_blocks", 0) < number * blocks:  # what finds no room is offered again
            request.num_computed_tokens = blocks * BLOCK_TOKENS
            sides.step(sides.output([request.request_id], {}))
        while sides.ours.has_pending_work():  # until all is on NVMe that goes there, and committed
            sides.step(sides.output([], {}))
        sides.finish(request.request_id)
    while True:
        prompts.append(prompts.pop(0))
        request, tokens = sides.come(prompts[-1]), blocks * BLOCK_TOKENS
        table, output = KVCacheBlocks((sides.tables[request.request_id],)), sides.output([], {})
        looked = sides.both(
            partial(sides.ours.matched_tokens, request, 0), partial(sides.theirs.get_num_new_matched_tokens, request, 0)
        )
        assert [found for _, found in looked] == [(tokens, True)] * 2
        ours_s, theirs_s, plan = sides.step(
            output,
            partial(sides.ours.allocated, request, table, tokens),
            partial(sides.theirs.update_state_after_alloc, request, table, tokens),
        )
        loads = [move for job in plan.jobs if job.kind is JobKind.LOAD for move in job.moves]
        assert len(loads) == blocks and bool(store_dir) == any(Tier.NVME in move.slots for move in loads)
        yield (looked[0][0] + ours_s) / blocks, (looked[1][0] + theirs_s) / blocks
        sides.finish(request.request_id)
        while sides.ours.has_pending_work():
            sides.step(sides.output([], {}))


def reasons(blocks: int) -> Samples:
    """Yield, of requests whose prompt came before and is in no tier, what it takes kvdisk to say
    why, and its whole lookup and step with that."""
    sides, taken_s = BothSides(TIER_BLOCKS, None), 0.0
    manager = sides.ours._manager
    hits, tell_why = manager._hits, manager._hits._why

    def tell_why_timed(*asked: Any) -> Any:
        nonlocal taken_s
        taken_s, answer = timed(partial(tell_why, *asked))
        return answer

    hits._why = tell_why_timed  # type: ignore[method-assign, assignment]  # timed, and else as it is
    while True:
        request, output = sides.prefill(blocks)
        manager._history.count(make_block_keys(request.block_hashes[:blocks], 0), 0, blocks, 0)
        (lookup_s, found), _ = sides.both(
            partial(sides.ours.matched_tokens, request, 0), partial(sides.theirs.get_num_new_matched_tokens, request, 0)
        )
        assert found == (0, False)
        step_s, _, _ = sides.step(output)
        yield taken_s, lookup_s + step_s
        sides.finish(request.request_id)


def rows() -> Iterator[tuple[str, Callable[[Path | None], Samples]]]:
    """Yield what is measured, and what measures it with and without NVMe."""
    for new in (0, NEW_BLOCKS):
        yield f"step of {RUNNING} requests, {new} new blocks", partial(steps, new)
    for kind, measure, sizes in (("store", stores, STORED), ("hit", hits, LOADED)):
        for blocks in sizes:
            name = f"{kind} of {blocks:,} block{'s'[: blocks > 1]}, a block"
            yield name, partial(measure, blocks)


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    add_json_option(parser)
    options = parser.parse_args()
    table = Table("us: median", "kvdisk", "vLLM", "ratio", "with NVMe", "vLLM", "ratio")
    load, record = os.getloadavg()[0], Record()
    with tempfile.TemporaryDirectory() as directory:
        for name, measure in rows():
            both = [measure(None), measure(Path(directory))]
            taken: list[list[tuple[float, float]]] = [[], []]
            for each in both:
                next(each)  # warms up
            gc.collect()
            gc.freeze()  # as vLLM does when it has started
            for _ in range(options.rounds):
                for samples, each in zip(taken, both, strict=True):
                    samples.append(next(each))
            gc.unfreeze()
            cells = []
            for samples, (side, beside) in zip(taken, SIDES.items(), strict=True):
                ours, theirs = ([1e6 * seconds for seconds in column] for column in zip(*samples, strict=True))
                ratio = statistics.median(ours) / statistics.median(theirs)
                cells += [f"{statistics.median(ours):,.1f}", f"{statistics.median(theirs):,.1f}", f"{ratio:.2f}"]
                record.add("us", name, side, ours)
                record.add("us", name, beside, theirs)
                record.add("us", name, f"{side}, of vLLM", [ratio])
            table.add_row(name, *cells)
    console = Console(highlight=False, soft_wrap=True, width=120)
    console.print(table)
    for blocks in STORED[1:]:
        samples = list(islice(reasons(blocks), 8, 8 + options.rounds))
        reason_s, all_s = (statistics.median(column) for column in zip(*samples, strict=True))
        record.add("reasons", f"{blocks} blocks", "of lookup and step", [100 * reason_s / all_s], "%")
        console.print(
            f"Why {blocks} blocks missed: {1e6 * reason_s:.1f} us, {reason_s / all_s:.2%} of lookup and step."
        )
    console.print(f"{options.rounds} rounds. {Machine.here(Path()).sentence}; load before: {load:.1f}")
    record.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
