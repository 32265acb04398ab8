# SPDX-License-Identifier: Apache-2.0
"""``KVDiskConnector``: every hook of vLLM's KV connector contract, each in a few lines.

One object is in the scheduler (role SCHEDULER) and one in each worker (role WORKER). What they do
is in ``scheduler_side`` and ``worker_side``, and in ``off`` after an error of ours.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from kvdisk.assembly import check_settings, check_sizes, warn_of_file_systems
from kvdisk.config import Config
from kvdisk.connector.callers import handshakes_beside
from kvdisk.connector.deployment import deployment_of, sleeps
from kvdisk.connector.hooks import refuse_other_hooks
from kvdisk.connector.identity import refuse_nameless
from kvdisk.connector.layout import wanted_layout
from kvdisk.connector.log import join_log
from kvdisk.connector.metadata import KVDiskHandshake, KVDiskMetadata, KVDiskWorkerMetadata
from kvdisk.connector.metrics import KVDiskPromMetrics, KVDiskStats
from kvdisk.connector.model_weights import read_weights_early
from kvdisk.connector.off import OWN_POLICIES, SchedulerOff, ToldOff, WorkerOff, guarded, say_off
from kvdisk.connector.refusals import refuse_deployment, refuse_store_policy, refuse_unsupported
from kvdisk.connector.scheduler_side import SchedulerSide
from kvdisk.connector.sizes import least_geometry
from kvdisk.connector.versions import refuse_version
from kvdisk.connector.worker_calls import watch_workers
from kvdisk.connector.worker_side import WorkerSide
from kvdisk.device.gds import gds_unavailable
from kvdisk.errors import ConfigError
from kvdisk.messages import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.lora.request import LoRARequest
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("kvdisk.connector")


def refuse_vllm() -> None:
    """Raise ConfigError, in one sentence, where this vLLM is not supported, or calls a hook
    otherwise than kvdisk takes it."""
    refuse_version()
    for ours, own in OWN_NAMES.items():
        refuse_other_hooks(ours, own)


def refuse_early(transfer: KVTransferConfig, vllm_config: VllmConfig | None) -> None:
    """Raise ConfigError for all that is known to keep the engine from starting before it has
    processes, and so before weights are loaded. ``transfer``: names kvdisk. ``vllm_config``: the
    configuration that is being built, if there is one."""
    refuse_vllm()
    config = check_settings(transfer.kv_connector_extra_config)
    if vllm_config is None:
        return
    refuse_deployment(vllm_config, transfer.kv_role)
    if vllm_config.cache_config.enable_prefix_caching is False:
        refuse_store_policy(config.store_policy, vllm_config)
    if config.store_dirs or config.remote is not None:
        refuse_nameless(vllm_config)
        read_weights_early(vllm_config)
    _refuse_gds_that_sleeps(config, vllm_config)
    if config.device == "gds" and (why := _why_no_gds()):
        raise ConfigError(f"device 'gds' cannot be used: {why}.")
    check_sizes(config, deployment_of(vllm_config), least_geometry(vllm_config))


def _refuse_gds_that_sleeps(config: Config, vllm_config: VllmConfig) -> None:
    if config.device == "gds" and sleeps(vllm_config):
        raise ConfigError("kvdisk does not support device 'gds' with sleep mode: leave device out.")


_why_no_gds = functools.cache(gds_unavailable)
"""Cached: vLLM looks a connector up several times, and this takes a second or two."""


class KVDiskConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is untyped here
    """The connector. vLLM never calls the hooks of the other role; they fail by assertion."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        refuse_vllm()
        super().__init__(vllm_config, role, kv_cache_config)
        join_log()
        refuse_unsupported(vllm_config, kv_cache_config)
        config = Config.from_mapping(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if not config.cpu_bytes and kv_cache_config.needs_kv_cache_zeroing:
            # The engine would zero blocks before the worker can wait for a copy; without a CPU tier
            # that copy is on its way to the drive, sealed whatever it has become.
            raise ConfigError(
                "kvdisk needs a CPU tier (cpu_bytes) where the engine zeroes KV blocks, as for this model."
            )
        _refuse_gds_that_sleeps(config, vllm_config)
        self._own_policies = {getattr(config, name) for name in OWN_POLICIES if ":" in getattr(config, name)}
        make = SchedulerSide if role == KVConnectorRole.SCHEDULER else WorkerSide
        self._half: SchedulerSide | WorkerSide | SchedulerOff | WorkerOff = make(config, vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            watch_workers(self.note_weights, self.note_adapter)

    @property
    def scheduler(self) -> SchedulerSide | SchedulerOff:
        """The scheduler's half, awake."""
        assert isinstance(self._half, SchedulerSide | SchedulerOff)
        if isinstance(self._half, SchedulerSide):
            self._half.wake()
        return self._half

    @property
    def worker(self) -> WorkerSide | WorkerOff:
        """The worker's half."""
        assert isinstance(self._half, WorkerSide | WorkerOff)
        return self._half

    @property
    def _scheduler(self) -> SchedulerSide:
        half = self.scheduler
        assert isinstance(half, SchedulerSide)
        return half

    @property
    def _worker(self) -> WorkerSide:
        assert isinstance(self._half, WorkerSide)
        return self._half

    @property
    def stand_in(self) -> SchedulerOff | WorkerOff | None:
        """What answers the hooks after an error; None before."""
        return self._half if isinstance(self._half, SchedulerOff | WorkerOff) else None

    def switch_off(self, error: Exception, hook: str) -> None:
        """Have a stand-in answer the hooks until the engine starts again. Idempotent."""
        if isinstance(self._half, SchedulerOff | WorkerOff):
            return
        self._half = self._half.switched_off()
        if not isinstance(error, ToldOff):
            say_off(error, hook, self._own_policies)

    # -- what the engine asks about the class ---------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is lost is only a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False: nothing happens by layer. vLLM asks while it builds its configuration, so a
        wrong setting of ours is refused before any weights are loaded. Raises ConfigError."""
        refuse_vllm()
        warn_of_file_systems(check_settings(extra_config))
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout in which all layers of a block are together, where the engine can have
        it; otherwise None."""
        return wanted_layout(vllm_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:  # noqa: ARG003 - vLLM's signature
        """Return True. vLLM 0.33 and later ask, which have ``unregister_kv_caches``."""
        return True

    # -- worker ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the worker's half over the KV tensors."""
        assert isinstance(self._half, WorkerSide)
        self._half.register(kv_caches)

    def get_handshake_metadata(self) -> KVDiskHandshake | None:
        """Return what the scheduler cannot know of the KV cache; None where it knows all. vLLM asks
        at the start, and after a sleep."""
        stages = self._half.handshake() if isinstance(self._half, WorkerSide) else None
        return None if stages is None else KVDiskHandshake(stages)

    @guarded
    def unregister_kv_caches(self) -> None:
        """Stop using the GPU's memory: it is about to be unmapped."""
        self._worker.leave_gpu()

    @guarded
    def restore_kv_caches(self) -> None:
        """Use the GPU's memory again."""
        self._worker.return_to_gpu()

    @guarded
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Let the step wait for the copies of blocks that it overwrites."""
        self._worker.before_step(_plan_in(kv_connector_metadata))

    @guarded
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's plan, and start the jobs that do not wait for its forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.before_forward(_plan_in(connector_metadata))

    @guarded
    def start_load_kv(self, /, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: loads were started with the plan."""

    @guarded
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs when all its blocks are loaded."""

    @guarded
    def save_kv_layer(
        self, /, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are stored whole, after the step."""

    @guarded
    def wait_for_save(self) -> None:
        """Start the step's stores. A later step that overwrites their blocks waits for them."""
        self._worker.after_forward(_plan_in(self._get_connector_metadata()))

    @guarded
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Return the loads that ended on this rank."""
        plan = _plan_in(self._get_connector_metadata()) if self.has_connector_metadata() else None
        finished, failed = self._worker.collect(plan)
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    @guarded
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the failed blocks of the loads that ``get_transfer_results`` returned last."""
        return self._worker.failed_blocks

    @guarded
    def build_connector_worker_meta(self) -> KVDiskWorkerMetadata | None:
        """Return this rank's report; None where there is nothing to send."""
        report = self._worker.take_report()
        return KVDiskWorkerMetadata(report) if report is not None else None

    # -- scheduler ------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Build the manager over the engine's block pool."""
        assert isinstance(self._half, SchedulerSide)
        self._half.bind_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[Any, KVConnectorHandshakeMetadata]) -> None:
        """Take what the first stage's workers sent, at the start and after a sleep; as a child of
        ``MultiConnector`` perhaps another connector's."""
        by_worker = [one.stages for one in metadata.values() if isinstance(one, KVDiskHandshake)]
        if isinstance(self._half, SchedulerSide):
            self._half.take_worker_groups(by_worker, handshakes_beside(self))

    set_xfer_handshake_metadata_pp_aware = set_xfer_handshake_metadata

    @guarded
    def on_new_request(self, request: Request) -> None:
        """Follow a request."""
        self._scheduler.new_request(request)

    @guarded
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens of the request's hit, None while more may come, and whether they are
        loaded asynchronously."""
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    @guarded
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan the load of a hit that the engine took."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    @guarded
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Return the tokens of a hit by the tier that serves them."""
        return self._scheduler.hit_sources(request, num_external_tokens)

    @guarded
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVDiskMetadata:
        """Plan the step."""
        return KVDiskMetadata(self._scheduler.plan(scheduler_output))

    @guarded
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Settle what the workers finished."""
        metadata = connector_output.kv_connector_worker_meta
        report = metadata.report if isinstance(metadata, KVDiskWorkerMetadata) else None
        if report is not None and report.off:
            logger.error("kvdisk is off until the engine starts again: a worker failed, see its log.")
            raise ToldOff
        self._scheduler.settle(report, connector_output.invalid_block_ids)

    @guarded
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Offer the request's last blocks. The engine may free its blocks at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the request's last blocks. The engine may free its blocks at once."""
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        self._scheduler.finished(request, block_ids, aborted)
        return False, None

    @guarded
    def has_pending_push_work(self) -> bool:
        """Return whether the engine must go on stepping for transfers and commits."""
        return self._scheduler.has_pending_work()

    @guarded
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the events of what became loadable, and what left, since the last call."""
        return self._scheduler.take_events()

    @guarded
    def reset_cache(self) -> bool:
        """Serve nothing again that was stored before; ``on_reset`` may keep it."""
        return self._scheduler.reset()

    @guarded
    def note_weights(self, name: str) -> None:
        """Serve nothing again that was stored before a call to the workers, which may change the
        weights; ``on_reset`` may keep it. No hook of vLLM's: see ``watch_workers``."""
        self._scheduler.note_weights(name)

    @guarded
    def note_adapter(self, adapter: LoRARequest) -> None:
        """Take note of an adapter that the workers are about to load. No hook of vLLM's."""
        self._scheduler.note_adapter(adapter)

    # -- both -----------------------------------------------------------------------------------

    @guarded
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what was counted and measured since the last call. A worker's statistics are in
        its report."""
        stats = None if isinstance(self._half, WorkerSide) else self._scheduler.take_stats()
        return KVDiskStats.of(stats) if stats is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Wrap values that came to the logging process."""
        return KVDiskStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVDiskPromMetrics:
        """Return the object that takes the values in the logging process."""
        return KVDiskPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def counters(self) -> dict[str, int]:
        """Return the totals of the counters since the start (scheduler only)."""
        return self.scheduler.counters()

    @guarded
    def shutdown(self) -> None:
        """Stop the worker's half, or commit and release the engine store."""
        self._half.shutdown()


def _plan_in(metadata: KVConnectorMetadata) -> Plan:
    """Return the step's plan. Raises ToldOff where the scheduler's half is off."""
    assert isinstance(metadata, KVDiskMetadata)
    if metadata.plan.off:
        raise ToldOff
    return metadata.plan


OWN_NAMES = {
    KVDiskConnector: {"counters", "note_adapter", "note_weights", "scheduler", "stand_in", "switch_off", "worker"},
    KVDiskStats: {"of", "stats"},
    KVDiskPromMetrics: (),
    KVDiskWorkerMetadata: (),
}
"""The classes that override hooks, each with its public names that are no hooks."""
