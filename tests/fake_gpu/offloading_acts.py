# SPDX-License-Identifier: Apache-2.0
"""What tests of vLLM's offloading do in an engine's process: they watch the rows of its memory.

The GPU's copies and the tier's drive transfers share these rows. The fake GPU orders the copies
among themselves; of what the host does it learns here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from host_offloading import tier_of
from vllm.distributed.kv_transfer import get_kv_transfer_group

from fake_gpu import control

_watches: dict[int, Watch] = {}


class Watch:
    """Says that the host touches a row, when a job of the tier begins and when it has ended: a copy
    that is at work there then is a violation. A copy that begins between is counted in
    ``meetings``.

    ``jobs``: of each the rows, and whether it writes them.
    """

    def __init__(self, llm: Any) -> None:
        self.worker = get_kv_transfer_group().connector_worker.worker
        self.region = self.worker._mmap_region
        self.jobs: dict[int, tuple[list[int], bool]] = {}
        self.meetings: list[str] = []
        self.stored = self.loaded = 0
        tier = tier_of(llm)
        self._tier_store, self._tier_load, self._ended = tier.submit_store, tier.submit_load, tier.get_finished_jobs
        tier.submit_store, tier.submit_load, tier.get_finished_jobs = self.tier_store, self.tier_load, self.ended
        self._gpu_store, self._gpu_load = self.worker.submit_store, self.worker.submit_load
        self.worker.submit_store, self.worker.submit_load = self.gpu_store, self.gpu_load

    def _touch(self, rows: Iterable[int], writes: bool) -> None:
        base, row_bytes = self.region._base.data_ptr(), self.region._row_stride
        for row in rows:
            control.host_touches(base + row * row_bytes, row_bytes, writes=writes)

    def _begin(self, job: Any, writes: bool) -> None:
        rows = job.chunk_ids.tolist()
        self.jobs[job.job_id] = rows, writes
        self._touch(rows, writes)

    def tier_store(self, job: Any) -> None:
        self._begin(job, False)
        self._tier_store(job)

    def tier_load(self, job: Any) -> None:
        self._begin(job, True)
        self._tier_load(job)

    def ended(self) -> Any:
        results = list(self._ended())
        for result in results:
            rows, writes = self.jobs.pop(result.job_id)
            self._touch(rows, writes)
            if writes:
                self.loaded += len(rows)
            else:
                self.stored += len(rows)
        return results

    def gpu_store(self, job_id: int, blocks: Any, rows: Any) -> bool:
        self._meet("writes", rows, [rows for rows, _ in self.jobs.values()])
        return bool(self._gpu_store(job_id, blocks, rows))

    def gpu_load(self, job_id: int, rows: Any, blocks: Any) -> bool:
        self._meet("reads", rows, [rows for rows, writes in self.jobs.values() if writes])
        return bool(self._gpu_load(job_id, rows, blocks))

    def _meet(self, what: str, rows: Any, at_work: list[list[int]]) -> None:
        if met := set(rows.block_ids.tolist()).intersection(*[{each for rows in at_work for each in rows}]):
            self.meetings.append(f"the GPU {what} rows {sorted(met)} that the tier is at work on")


def watch(llm: Any) -> bool:
    """Watch from now on; return whether vLLM could pin its memory."""
    _watches[0] = Watch(llm)
    return bool(_watches[0].region.is_pinned)


def watched(llm: Any) -> dict[str, Any]:
    """Return what has been seen: rows moved by the tier, copies that met it, and how the GPU
    copied."""
    seen, calls, kernels = _watches[0], control.counts(), control.counts(kernels=True)
    return {
        "meetings": seen.meetings,
        "stored": seen.stored,
        "loaded": seen.loaded,
        "batches": calls.get("cudaMemcpyBatchAsync", 0),
        "swap_kernels": kernels.get("triton _swap_blocks_kernel", 0),
        "row_bytes": seen.region._row_stride,
        "worker": type(seen.worker).__qualname__,
    }


def ranks_seen(llm: Any) -> list[dict[str, int]]:
    """Return what each worker's GPU has seen."""
    return list(llm.collective_rpc(_get_rank_seen))


def _get_rank_seen(worker: Any) -> dict[str, int]:
    calls = control.counts()
    return {
        "device": worker.device.index,
        "races": control.races(),
        "violations": control.violations(),
        "kernels": sum(control.counts(kernels=True).values()),
        "copies": calls.get("cudaMemcpyBatchAsync", 0) + calls.get("cudaMemcpy2DAsync", 0),
    }


def wait_for_nobody(llm: Any) -> None:
    """From now on let vLLM's stores begin without waiting for the model, and the host touch each
    row as soon as its copy has been given."""
    seen = _watches[0]
    given = seen._gpu_store

    def store(job_id: int, blocks: Any, rows: Any) -> bool:
        waits = torch.cuda.Stream.wait_stream
        torch.cuda.Stream.wait_stream = lambda *_: None
        try:
            return bool(given(job_id, blocks, rows))
        finally:
            torch.cuda.Stream.wait_stream = waits
            seen._touch(rows.block_ids.tolist(), False)

    seen._gpu_store = store
