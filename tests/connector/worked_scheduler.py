# SPDX-License-Identifier: Apache-2.0
"""A real vLLM scheduler with both halves of a real connector, over KV caches whose bytes follow from the tokens.

The model is the only stand-in: a step fills the blocks it computes, and fails where one that counts as computed does
not hold its tokens' bytes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from schedulers import BLOCK_TOKENS, Bench
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvdisk.connector.connector import KVDiskConnector


class WorkedBench(Bench):
    """``worker``: the connector of the one rank. ``plans``: all that the scheduler's half has planned."""

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__(folder, **more)
        cache = self.scheduler.kv_cache_config
        self.caches = {
            group.layer_names[0]: torch.zeros(
                (cache.num_blocks, group.kv_cache_spec.unpadded_page_size_bytes), dtype=torch.uint8
            )
            for group in cache.kv_cache_groups
        }
        self.worker: KVDiskConnector = KVConnectorFactory.create_connector(
            self.scheduler.vllm_config, KVConnectorRole.WORKER, cache
        )
        self.worker.register_kv_caches(self.caches)
        self.plans: list[Any] = []
        self.checked_blocks = 0

    def close(self) -> None:
        """End both halves, as vLLM does: the worker's first."""
        self.worker.shutdown()
        self.scheduler.shutdown()

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        transfer = self._run_model(output)
        self.scheduler.update_from_output(output, self._model_output(output, transfer))
        return output

    def _run_model(self, output: SchedulerOutput) -> KVConnectorOutput:
        """Call the worker's hooks in the order of vLLM's model runners."""
        worker, metadata = self.worker, output.kv_connector_metadata
        self.plans.append(metadata.plan)
        self.jobs.extend(metadata.plan.jobs)
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        self._compute(output)
        worker.start_load_kv(SimpleNamespace())
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        transfer = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return transfer

    def _compute(self, output: SchedulerOutput) -> None:
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            after = request.num_computed_tokens  # the scheduler has counted this step's tokens
            tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            for group, (cache, table) in enumerate(zip(self.caches.values(), tables, strict=True)):
                for at, block in enumerate(table):
                    end = (at + 1) * BLOCK_TOKENS
                    if block == 0 or end > after:
                        continue
                    expected = _bytes_of(list(request.all_token_ids)[:end], group, cache.shape[1])
                    if end <= after - count:
                        assert torch.equal(cache[block], expected), f"block {at} of {request_id} is not what it was"
                        self.checked_blocks += 1
                    else:
                        cache[block] = expected


def _bytes_of(tokens: list[int], group: int, size: int) -> torch.Tensor:
    digest = hashlib.sha256(repr((group, tokens)).encode()).digest()
    return torch.frombuffer(bytearray(digest * (-(-size // len(digest)))), dtype=torch.uint8)[:size]
