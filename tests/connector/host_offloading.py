# SPDX-License-Identifier: Apache-2.0
"""vLLM's own offloading without a GPU: a spec, named by ``spec_module_path``, whose worker copies
on the host.

vLLM refuses the CPU platform in ``get_worker`` alone: scheduler, connector, manager, shared memory
and tiers are its own.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTieringSpec(TieringOffloadingSpec):
    """vLLM's own, but for the worker."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class HostWorker(OffloadingWorker):
    """Copies at once, where vLLM's own begins a copy on the GPU."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._each = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._blocks = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes).numpy() for each in kv_caches.tensors
        ]
        # By chunk and block within it, as vLLM's worker lays them out.
        self._chunks = [
            region.create_next_worker_view(each.page_size_bytes * blocks_per_chunk).numpy()
            for each in kv_caches.tensors
        ]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec.block_ids, is_store=False)

    def _copy(self, job_id: int, of_gpu: Any, chunk_ids: np.ndarray, *, is_store: bool) -> bool:
        """Copy blocks to chunks or back. A group's first and last chunk may take part with some of
        their blocks."""
        began_s, copied_bytes = time.monotonic(), 0
        blocks, chunks = of_gpu.block_ids.tolist(), chunk_ids.tolist()
        for group, (count, first) in enumerate(zip(of_gpu.group_sizes, of_gpu.block_indices, strict=True)):
            for at in range(count):
                chunk, within = divmod(first % self._each + at, self._each)
                for ref in self._refs[group]:
                    page = self._blocks[ref.tensor_idx].shape[1]
                    block = self._blocks[ref.tensor_idx][blocks[at], : ref.page_size_bytes]
                    row = self._chunks[ref.tensor_idx][chunks[chunk], within * page :][: ref.page_size_bytes]
                    source, target = (block, row) if is_store else (row, block)
                    target[:] = source
                    copied_bytes += ref.page_size_bytes
            blocks = blocks[count:]
            chunks = chunks[-(-(first % self._each + count) // self._each) if count else 0 :]
        assert not blocks and not chunks
        self._ended.append(TransferResult(job_id, True, copied_bytes, time.monotonic() - began_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Every copy has ended."""

    def shutdown(self) -> None:
        del self._chunks
        self._region.cleanup()


# -- what tests do in an engine's process, by ``EngineChild.call`` ---------------------------------


def tier_of(llm: Any) -> Any:
    """Return the tier of an engine in the caller's process."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    (tier,) = connector.connector_scheduler.manager.secondary_tiers
    return tier


def signal_mover(llm: Any, number: int) -> int:
    """Send a signal to the process that moves blocks; return its number."""
    mover = tier_of(llm)._mover
    os.kill(mover.pid, number)
    return mover.pid  # type: ignore[no-any-return]


def answer_within(llm: Any, seconds: float) -> None:
    """Have the mover be killed where it does not answer for so long."""
    tier_of(llm)._mover._answer_s = seconds


def state_of(llm: Any) -> dict[str, Any]:
    """Return what a tier that rests must not have. vLLM says of a request that it has ended in the
    next step, if there is one."""
    tier = tier_of(llm)
    manager = llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager
    others = tier._requests.keys() - manager._req_state.keys()
    return {"off": tier.is_off, "jobs": len(tier._jobs), "requests": len(others), "held": tier._held}
