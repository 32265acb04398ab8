# SPDX-License-Identifier: Apache-2.0
"""The worker's half of the connector: plans in, reports out. Model runner's thread only."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvdisk.assembly import WorkerHalf, assemble_worker
from kvdisk.config import Config
from kvdisk.connector.deployment import deployment_of, rank_of, ranks_of_stage, sleeps
from kvdisk.connector.identity import platform_facts
from kvdisk.connector.kv_groups import groups_by_stage, handshake_of
from kvdisk.connector.layout import layer_blocks
from kvdisk.connector.off import WorkerOff
from kvdisk.connector.sizes import geometry_of, units_of
from kvdisk.messages import Plan, Report
from kvdisk.worker.request_loads import RequestLoads

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from kvdisk.worker.mover import Mover

_IDLE_WAIT_S = 0.002
"""Seconds that a step without a forward pass waits for a transfer: instead of spinning, and no
longer than a step."""


class WorkerSide:
    """Hands each step's plan to the ``Mover``, and turns its results into vLLM's terms."""

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        # Where failed blocks are reported, vLLM computes from the first of them on, and what a
        # window needs before it is not there. vLLM takes no blocks where there are several groups,
        # nor where only one of several is stored.
        alone = len(kv_cache_config.kv_cache_groups) == 1
        self._by_block = alone and geometry_of(vllm_config, kv_cache_config).groups[0].reads_all
        self._stages: list[list[KVCacheGroupSpec]] = []
        self._parts: WorkerHalf | None = None
        self._loads = RequestLoads()
        self._report = Report()
        self.failed_blocks: set[int] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the mover over vLLM's KV tensors, once the workers of all stages have sent their
        sizes."""
        assert self._parts is None, "the KV caches were registered twice"
        self._stages = groups_by_stage(self._vllm_config, self._kv_cache_config)
        units = units_of(self._config, self._vllm_config)
        geometry = geometry_of(self._vllm_config, self._kv_cache_config, self._stages, units)
        layers = layer_blocks(self._kv_cache_config, kv_caches)
        # A sleep may unmap the memory that the direct way between drive and GPU uses.
        config = replace(self._config, gpu_staging_bytes=0) if sleeps(self._vllm_config) else self._config
        deployment = deployment_of(self._vllm_config)
        platform = "; ".join(platform_facts(self._vllm_config))
        self._parts = assemble_worker(config, geometry, rank_of(self._vllm_config), layers, deployment, platform)

    def handshake(self) -> list[list[KVCacheGroupSpec]] | None:
        """Return what the scheduler cannot know of the KV cache. None where it knows all, or is
        told by the first stage: vLLM's connectors refuse handshakes of other stages, unless they
        say otherwise."""
        first = rank_of(self._vllm_config) < ranks_of_stage(self._vllm_config)
        return handshake_of(self._stages) if first else None

    @property
    def mover(self) -> Mover:
        """The running mover."""
        assert self._parts is not None, "no KV caches were registered"
        return self._parts.mover

    def leave_gpu(self) -> None:
        """Stop using the KV cache: it is about to be unmapped, for a sleep."""
        self.mover.leave_gpu()

    def return_to_gpu(self) -> None:
        """Use the KV cache again: it is mapped at the same addresses, and has none of its former
        content."""
        self.mover.return_to_gpu()

    def before_step(self, plan: Plan) -> None:
        """Let the step wait for the copies of what it overwrites. Nothing of the step was launched
        yet."""
        if plan.fence or plan.urgent:
            self.mover.protect(plan._replace(jobs=plan.jobs_before, void=()))

    def before_forward(self, plan: Plan) -> None:
        """Start all that does not read what this step computes: loads go on beside the forward
        pass."""
        jobs = plan.jobs_beside
        self._loads.begin(jobs)
        self._loads.void(plan.void)
        if jobs or plan.void:
            self.mover.submit(Plan(jobs, void=plan.void))

    def after_forward(self, plan: Plan) -> None:
        """Start the stores, which read what the forward pass computes."""
        jobs = plan.jobs_after
        if jobs:
            self.mover.submit(Plan(jobs))

    def collect(self, plan: Plan | None) -> tuple[set[str], set[str]]:
        """Take the mover's results. Return the requests whose load ended, and those among them
        whose load failed.

        With one KV-cache group, of full attention, ``failed_blocks`` names the blocks instead, and
        no request is among the failed: vLLM recomputes from the first failed block.
        """
        if plan is not None and plan.idle:
            self.mover.wait_any(_IDLE_WAIT_S)
        report = self.mover.poll()
        self.failed_blocks = set()
        self._report.merge(report)
        # Only when nothing can fail any more: until then no end is reported.
        ended = self._loads.end({job_id: result.failed for job_id, result in report.results.items()})
        if self._by_block:
            self.failed_blocks = {block for failed in ended.values() for block in failed}
            return set(ended), set()
        return set(ended), {name for name, failed in ended.items() if failed}

    def take_report(self) -> Report | None:
        """Return what goes to the scheduler with this step; None where there is nothing."""
        if self._report.empty:
            return None
        report, self._report = self._report, Report()
        return report

    def switched_off(self) -> WorkerOff:
        """Return the stand-in for this half after an error."""
        return WorkerOff(self._parts, self._loads, self.failed_blocks, by_block=self._by_block)

    def shutdown(self) -> None:
        """Finish what the device has started, and stop the mover. Idempotent."""
        if self._parts is not None:
            self._parts.close()
            self._parts = None
