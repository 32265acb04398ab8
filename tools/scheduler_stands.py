# SPDX-License-Identifier: Apache-2.0
"""A part of ``measure_scheduler``: kvdisk's and vLLM's scheduler sides over the same stand-ins for an engine's parts.

Block pool, requests, scheduler output and both connectors' code are real; there is no model, no worker and no KV.
vLLM is imported where it is first needed.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from kvdisk.blocks import BlockKey, Tier, make_block_keys
from kvdisk.config import Config
from kvdisk.manager.catalog import Catalog, CommittedCopies
from kvdisk.messages import JobResult, Plan, Report

BLOCK_TOKENS = 16
PAYLOAD_BYTES = 4096
SLOT_BYTES = 2 * PAYLOAD_BYTES
NVME_BYTES = 2 << 30


def hash_of(number: int) -> bytes:
    """Return a block's hash as vLLM makes it: a new object each time."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def hashes_of(numbers: range) -> list[bytes]:
    """Return the hashes of blocks that follow each other."""
    return [hash_of(number) for number in numbers]


def order_of(block_count: int, order: str) -> list[int]:
    """Return the numbers of blocks as they came to the store: ``prompts``, one after the other, or by ``keys``."""
    numbers = list(range(block_count))
    if order == "keys":
        numbers.sort(key=hash_of)
    return numbers


def catalog_of(numbers: Sequence[int], prompt_blocks: int) -> Catalog:
    """Return a catalog with a READY copy of each block, in this order."""
    keys = make_block_keys(map(hash_of, numbers), 0)
    places = {number: row for row, number in enumerate(numbers)}
    parent_rows = np.array([places[number - 1] if number % prompt_blocks else -1 for number in numbers], dtype=np.int32)
    parents: list[BlockKey | None] = [keys[row] if row >= 0 else None for row in parent_rows.tolist()]
    rows = np.arange(len(numbers))
    zeros = np.zeros(len(numbers), np.uint32)
    copies = CommittedCopies(keys, parents, parent_rows, rows.astype(np.uint64), zeros, rows.astype(np.uint32))
    catalog = Catalog()
    catalog.fill(Tier.CPU, copies, 0)
    return catalog


def full_offloading_manager(numbers: Sequence[int], call_blocks: int) -> Any:
    """Return vLLM's manager with these blocks stored."""
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(len(numbers))
    for start in range(0, len(numbers), call_blocks):
        context = ReqContext(req_id=str(start))
        keys = [make_offload_key(hash_of(number), 0) for number in numbers[start : start + call_blocks]]
        manager.prepare_store(keys, context)
        manager.complete_store(keys, context)
        manager.on_request_finished(context)
    return manager


class BothSides:
    """Running requests, and kvdisk's and vLLM's scheduler sides that follow them. ``cpu_blocks``: of each one's tier.

    Each request decodes; what it computes is stored by both. ``store_dir``: where kvdisk has an NVMe tier as well, an
    index and all, in a store of its own there: its blocks are the same as others'; nothing of them is written.
    ``their_blocks``: of vLLM's tier, by default as many.
    ``admission``: of kvdisk's memory.
    """

    def __init__(
        self,
        request_count: int,
        prompt_blocks: int,
        cpu_blocks: int,
        store_dir: Path | None = None,
        *,
        their_blocks: int | None = None,
        admission: str = "all",
    ) -> None:
        import torch
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from kvdisk.connector.scheduler_side import SchedulerSide

        half = PAYLOAD_BYTES // BLOCK_TOKENS // 2
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=half // 4, dtype=torch.float32)
        pool_blocks = 2 * request_count * prompt_blocks + 65536
        cache = KVCacheConfig(pool_blocks, [], [KVCacheGroupSpec(["layer"], spec)], hash_block_size=BLOCK_TOKENS)
        settings = _settings()
        drive: dict[str, Any] = {}
        if store_dir is not None:
            drive = {"store_dirs": (Path(tempfile.mkdtemp(dir=store_dir)),), "nvme_bytes": NVME_BYTES}
        config = Config(  # type: ignore[arg-type]
            cpu_bytes=cpu_blocks * SLOT_BYTES, store_decode=True, cpu_admission=admission, **drive
        )
        self.pool = BlockPool(pool_blocks, True, BLOCK_TOKENS)
        with mock.patch("kvdisk.connector.scheduler_side.fingerprint_of", return_value=(bytes(32), {})):  # no model
            self.ours = SchedulerSide(config, settings, cache)
        self.ours.bind_pool(self.pool)
        self.theirs = _offloading_scheduler(their_blocks or cpu_blocks, settings, cache)
        self._random = random.Random(0)  # noqa: S311 - not a secret
        self._next_number = 10**9
        self._last = 0
        self.requests: dict[str, Any] = {}
        self.tables: dict[str, list[Any]] = {}
        for _ in range(request_count):
            self.add(prompt_blocks)

    def add(self, prompt_blocks: int) -> Any:
        """Let a request come, compute its prompt, and begin to decode; both store it. Return it."""
        output = self.prefill(prompt_blocks)
        self.settle(*self.plan_both(output))
        request = self.requests[output.scheduled_cached_reqs.req_ids[0]]
        request.num_computed_tokens = prompt_blocks * BLOCK_TOKENS
        return request

    def prefill(self, prompt_blocks: int) -> Any:
        """Let a request come; return the output of the step that computes its whole prompt, which nobody has."""
        request_id = self.come(self._new_hashes(prompt_blocks)).request_id
        self.tables[request_id] = self.pool.get_new_blocks(prompt_blocks + 1)
        self.requests[request_id].append_output_token_ids(1)
        return self.output([request_id], {request_id: self.tables[request_id]}, prompt_blocks)

    def come(self, hashes: list[bytes]) -> Any:
        """Let a request come whose prompt is these blocks and a token more, but for what ``prefill`` makes."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._last += 1
        request_id = f"request {self._last}"
        request = Request(request_id, [1] * (len(hashes) * BLOCK_TOKENS), SamplingParams(max_tokens=10**6), None)
        request.block_hashes.extend(hashes)
        self.requests[request_id] = request
        for side in (self.ours.new_request, self.theirs.on_new_request):
            side(request)
        return request

    def allocate(self, request: Any) -> Any:
        """Give a request blocks for its prompt."""
        from vllm.v1.core.kv_cache_manager import KVCacheBlocks

        table = self.tables[request.request_id] = self.pool.get_new_blocks(len(request.block_hashes) + 1)
        return KVCacheBlocks((table,))

    def finish(self, request_id: str) -> None:
        """Let a request go of which both have settled everything."""
        from vllm.v1.request import RequestStatus

        request = self.requests.pop(request_id)
        self.ours.finished(request, (), True)
        request.status = RequestStatus.FINISHED_ABORTED
        self.theirs.request_finished(request)
        ended = self.output([], {})
        ended.finished_req_ids = {request_id}
        self.settle(*self.plan_both(ended))
        self.pool.free_blocks(reversed(self.tables.pop(request_id)))

    @property
    def stored_blocks(self) -> int:
        """Return how many blocks have been stored."""
        return self.ours.counters().get("stored_blocks", 0)

    def _new_hashes(self, count: int) -> list[bytes]:
        self._next_number += count
        return hashes_of(range(self._next_number - count, self._next_number))

    def output(self, request_ids: list[str], new_blocks: dict[str, list[Any]], first_blocks: int = 0) -> Any:
        """Return a scheduler's output: a token for each of these requests, or ``first_blocks`` blocks."""
        from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput

        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = dict.fromkeys(request_ids, first_blocks * BLOCK_TOKENS or 1)
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=request_ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[
                ([block.block_id for block in new_blocks[one]],) if one in new_blocks else None for one in request_ids
            ],
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

    def still(self) -> Any:
        """Return the output of a step in which nobody fills a block."""
        for request in self.requests.values():
            if (request.num_computed_tokens + 1) % BLOCK_TOKENS == 0:
                self._advance(request, 1)
        return self.output(list(self.requests), {})

    def filling(self, count: int) -> Any:
        """Return the output of a step in which ``count`` requests fill a block, and nobody else."""
        self.still()
        new_blocks = {}
        for request_id in self._random.sample(list(self.requests), count):
            request = self.requests[request_id]
            left = -request.num_computed_tokens % BLOCK_TOKENS or BLOCK_TOKENS
            self._advance(request, left - 1)
            request.block_hashes.extend(self._new_hashes(1))
            new_blocks[request_id] = self.pool.get_new_blocks(1)
            self.tables[request_id] += new_blocks[request_id]
        return self.output(list(self.requests), new_blocks)

    def _advance(self, request: Any, tokens: int) -> None:
        request.append_output_token_ids([1] * tokens)
        request.num_computed_tokens += tokens

    def plan_both(self, output: Any) -> tuple[Plan, Any]:
        """Let both plan a step."""
        return self.ours.plan(output), self.theirs.build_connector_meta(output)

    def settle(self, plan: Plan, meta: Any) -> None:
        """Let all jobs of both plans end well."""
        self.ours.settle(report_of(plan), set())
        self.theirs.update_connector_output(completed(meta))


def report_of(plan: Plan) -> Report:
    """Return the report of one rank by which all jobs of a plan ended well."""
    return Report({job.id: JobResult() for job in plan.jobs})


def completed(meta: Any) -> Any:
    """Return the same in vLLM's words."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.v1.outputs import KVConnectorOutput

    done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys((*meta.store_jobs, *meta.load_jobs), 1))
    return KVConnectorOutput(kv_connector_worker_meta=done)


def _settings() -> Any:
    """Return what both read of a ``VllmConfig``."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, world_size=1, decode_context_parallel_size=1, pipeline_parallel_size=1
        ),
        cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256),
        kv_events_config=None,
        speculative_config=None,
    )


def _offloading_scheduler(cpu_blocks: int, settings: Any, cache: Any) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    class Spec(OffloadingSpec):  # type: ignore[misc]  # vLLM is untyped here
        def get_manager(self) -> Any:
            return CPUOffloadingManager(cpu_blocks)

        def get_worker(self, kv_caches: Any) -> Any:  # noqa: ARG002 - vLLM's signature
            raise AssertionError("there is no worker here")

    group = SimpleNamespace(tokens_per_block=BLOCK_TOKENS, group_id=0, layer_names=("layer",))
    offloading = SimpleNamespace(
        groups=(group,),
        enable_kv_cache_events=False,
        extra_config={"offload_prompt_only": False},
        cache=SimpleNamespace(tokens_per_hash=BLOCK_TOKENS, blocks_per_chunk=1),
    )
    return OffloadingConnectorScheduler(Spec(offloading), settings, cache)
