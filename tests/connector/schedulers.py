# SPDX-License-Identifier: Apache-2.0
"""A real vLLM scheduler with a real connector, and workers that answer plans when a test says
so."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvdisk.blocks import BlockKey, JobId, Tier, make_block_key
from kvdisk.connector.connector import KVDiskConnector, KVDiskMetadata, KVDiskWorkerMetadata
from kvdisk.connector.plugin import register
from kvdisk.messages import Job, JobKind, JobResult, Plan, Reason, Report

BLOCK_TOKENS = 32
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "head_dim": 32,
}

BENCH_SETTINGS = {"cpu_bytes": "16MiB", "lookup_wait_s": 600.0, "min_load_tokens": 0, "io_deadline_s": 600.0}
"""Every hit is loaded, however short, and waited for: else the machine's speed would decide."""


def prompt_of(number: int, tokens: int) -> list[int]:
    """Return a prompt that shares no block with another number's."""
    return [(number * 37 + at * 7 + at // 500) % 500 for at in range(tokens)]


class Bench:
    """One scheduler. ``step`` schedules, lets the fake workers answer, and hands the output back.

    Loads and stores are answered at once, with success, unless ``hold`` names their kind; held jobs
    wait in ``held`` until ``release``. ``fail`` maps a kind to the move positions that shall fail.

    ``drafter``: a group of a drafter's layers. ``window_only``: the window's group is the only one.
    ``others``: the classes of a ``MultiConnector``'s children, kvdisk's being ``KVDiskConnector``;
    none: kvdisk alone. ``pipelined``: vLLM's asynchronous scheduler. ``two_sizes``: the group has a
    second layer, twice as large, of which only the workers know (``worker_groups``). ``invalid``:
    GPU blocks that the next step reports as not loaded. With ``events`` what is published goes to
    ``published``. ``caches``: vLLM's own prefix cache is on.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int = 64,
        window_tokens: int | None = None,
        max_batched_tokens: int = 512,
        max_seqs: int = 8,
        ranks: int = 1,
        extra: Mapping[str, Any] | None = None,
        connector: bool = True,
        window_block_tokens: int = BLOCK_TOKENS,
        window_only: bool = False,
        drafter: bool = False,
        others: Sequence[str] = (),
        events: bool = False,
        pipelined: bool = False,
        two_sizes: bool = False,
        max_model_len: int = 2048,
        prefix_caching: bool = True,
    ) -> None:
        register()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODEL))
        config = vllm_config(
            folder, num_blocks, max_batched_tokens, extra, connector, others, events, max_seqs, max_model_len
        )
        config.scheduler_config.async_scheduling = pipelined
        config.parallel_config.tensor_parallel_size = ranks
        config.cache_config.enable_prefix_caching = prefix_caching
        sizes = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["full.0"], FullAttentionSpec(**sizes))]
        if window_tokens is not None:
            spec = SlidingWindowSpec(**sizes | {"block_size": window_block_tokens}, sliding_window=window_tokens)
            groups.append(KVCacheGroupSpec(["window.0"], spec))
            del groups[: int(window_only)]
        if drafter:
            groups.append(KVCacheGroupSpec(["draft.0"], FullAttentionSpec(**sizes), is_eagle_group=True))
        self.config = config
        tensors = []
        if two_sizes:
            groups[0].layer_names.append("full.1")
            tensors = [KVCacheTensor(0, [name], 0, 0) for name in groups[0].layer_names]
        wide = FullAttentionSpec(**sizes | {"head_size": 64})
        layers = {"full.0": groups[0].kv_cache_spec, "full.1": wide}
        self.worker_groups = [
            KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=layers))
        ]
        self.cache = cache = KVCacheConfig(num_blocks, tensors, groups, hash_block_size=BLOCK_TOKENS)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler = (AsyncScheduler if pipelined else Scheduler)(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=math.lcm(*(group.kv_cache_spec.block_size for group in groups)),
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self.ranks = ranks
        self.hold: set[JobKind] = set()
        self.held: list[Job] = []
        self.fail: dict[JobKind, tuple[int, ...]] = {}
        self.jobs: list[Job] = []
        self.tokens: dict[str, list[int]] = {}
        self.known: dict[str, Request] = {}
        self.group_count = len(groups)
        self.invalid: set[int] = set()
        self.void: set[JobId] = set()
        self.published: list[Any] = []
        if events:
            self.scheduler.kv_event_publisher.publish = lambda batch: self.published.extend(batch.events)

    @property
    def connector(self) -> Any:
        """kvdisk's connector."""
        connector = self.scheduler.connector
        return next((one for one in self.children if isinstance(one, KVDiskConnector)), connector)

    @property
    def children(self) -> list[Any]:
        return list(getattr(self.scheduler.connector, "_connectors", ()))

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def _manager(self) -> Any:
        return self.connector.scheduler._manager

    def counters(self) -> dict[str, int]:
        return dict(self.connector.counters())

    def jobs_of(self, kind: JobKind, request_id: str | None = None) -> list[Job]:
        return [job for job in self.jobs if job.kind is kind and request_id in {None, job.request_id}]

    def stored(self) -> list[BlockKey]:
        """Return the keys of all blocks that were to be stored, in order."""
        return [move.key for job in self.jobs_of(JobKind.STORE) for move in job.moves]

    def loads(self) -> list[tuple[str | None, int]]:
        """Return of each load its request and how many blocks it brings."""
        return [(job.request_id, len(job.moves)) for job in self.jobs_of(JobKind.LOAD)]

    def keys(self, request_id: str, group: int = 0) -> list[BlockKey]:
        """Return the keys of a request's full blocks, in a group whose blocks are as large as what
        is hashed."""
        return [make_block_key(block_hash, group) for block_hash in self.known[request_id].block_hashes]

    def table(self, request_id: str, group: int = 0) -> list[int]:
        """Return a request's block table."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[group])

    def in_tier(self, tier: Tier) -> set[BlockKey]:
        """Return the keys of the copies that can be loaded from a tier."""
        return set(self._manager._catalog.ready_keys(tier))

    def references(self) -> list[int]:
        """Return the ids of the GPU blocks that somebody holds."""
        return [block.block_id for block in self.pool.blocks[1:] if block.ref_cnt]

    def serve(self, request_id: str, prompt: Iterable[int], max_tokens: int = 1, **more: Any) -> Request:
        """Serve one request alone, until all that comes of it has ended."""
        request = self.add(request_id, prompt, max_tokens, **more)
        self.run()
        return request

    def run_until_finished(self, request_id: str) -> None:
        """Step until a request is over, whatever still comes of it."""
        while request_id in self.scheduler.requests:
            self.step()

    def forget(self, *tiers: Tier) -> None:
        """Drop what the GPU's prefix cache has, and all copies in these tiers."""
        assert self.scheduler.reset_prefix_cache()
        catalog = self._manager._catalog
        for tier in tiers:
            for row in list(catalog.rows_in(tier)):
                self._manager._tiers.get(tier).discard(row)

    def assert_quiet(self) -> None:
        """Nothing is held, pinned or remembered of any request."""
        scheduler, side, manager = self.scheduler, self.connector.scheduler, self._manager
        assert not scheduler.requests and not scheduler.running
        assert not scheduler.waiting and not scheduler.kv_holding_waiting
        assert not scheduler.finished_recving_kv_req_ids and not scheduler.failed_recving_kv_req_ids
        assert not self.references()
        assert self.pool.get_num_free_blocks() == len(self.pool.blocks) - 1
        for one in scheduler.kv_cache_manager.coordinator.single_type_managers:
            assert not one.req_to_blocks
        assert not side._requests and not side._local_tokens and not side._described
        assert not manager._requests and len(manager._transfers) == 0
        catalog = manager._catalog
        assert not any(catalog.pins(row, tier) for row in catalog.rows() for tier in (Tier.CPU, Tier.NVME))

    def add(
        self, request_id: str, prompt: Iterable[int], max_tokens: int = 2, params: Any = None, **more: Any
    ) -> Request:
        """Add a request, see ``make_request``."""
        request = self.make_request(request_id, prompt, max_tokens, params, **more)
        self.scheduler.add_request(request)
        return request

    def make_request(
        self, request_id: str, prompt: Iterable[int], max_tokens: int = 2, params: Any = None, **more: Any
    ) -> Request:
        """Make a request. ``params``: its ``kv_transfer_params``. Further keywords go to vLLM's
        ``Request``."""
        sampling = more.pop("sampling_params", None) or SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        request = self.known[request_id] = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=None if "pooling_params" in more else sampling,
            block_hasher=self._hasher,
            **{"pooling_params": None} | more,
        )
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def release(self, kind: JobKind | None = None) -> None:
        """Let held jobs be answered in the next step."""
        self.hold -= {kind} if kind is not None else set(JobKind)

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        transfer = self._work(output.kv_connector_metadata) if self.connector is not None else None
        self.scheduler.update_from_output(output, self._model_output(output, transfer))
        return output

    def run(self, steps: int = 200) -> None:
        """Step until nothing is left to do, each step with all committed that the one before gave
        the index."""
        for _ in range(steps):
            if self._is_idle():
                return
            self.step()
            self.commit()
        raise AssertionError(f"still busy after {steps} steps")

    def _is_idle(self) -> bool:
        return not self.scheduler.has_requests()

    def commit(self) -> None:
        """Wait until what the index was given is committed."""
        index = self.connector.scheduler._parts.index if self.connector is not None else None
        assert index is None or index.flush(600.0)

    def close(self) -> None:
        """End it, as vLLM does."""
        self.connector.shutdown()

    def _work(self, metadata: KVConnectorMetadata) -> KVConnectorOutput:
        if isinstance(metadata, KVDiskMetadata):
            return self._work_plan(metadata.plan)
        assert isinstance(metadata, MultiKVConnectorMetadata)
        (at,) = (at for at, one in enumerate(metadata.metadata) if isinstance(one, KVDiskMetadata))
        output = self._work_plan(metadata.metadata[at].plan)
        for other in metadata.metadata:
            output.finished_recving |= getattr(other, "loaded", set())
        if output.kv_connector_worker_meta is not None:
            mine: list[Any] = [None] * len(metadata.metadata)
            mine[at] = output.kv_connector_worker_meta
            output.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(tuple(mine))
        return output

    def _work_plan(self, plan: Plan) -> KVConnectorOutput:
        self.jobs.extend(plan.jobs)
        self.void |= set(plan.void)
        waiting = self.held + list(plan.jobs)
        self.held = [job for job in waiting if job.kind in self.hold]
        output = KVConnectorOutput(finished_recving=set(), invalid_block_ids=self.invalid, failed_recving=set())
        self.invalid = set()
        results: dict[JobId, JobResult] = {}
        for job in waiting:
            if job.kind in self.hold:
                continue
            failed = {at: Reason.CHECKSUM for at in self.fail.get(job.kind, ()) if at < len(job.moves)}
            if job.id in self.void:
                failed = dict.fromkeys(range(len(job.moves)), Reason.CANCELLED)
            failed |= {at: Reason.ABSENT for at, move in enumerate(job.moves) if _has_no_source(job, at)}
            results[job.id] = JobResult(self.ranks, failed)
            if job.kind is JobKind.LOAD:
                output.finished_recving.add(job.request_id)
                if failed and self.group_count > 1:
                    output.failed_recving.add(job.request_id)
                elif failed:
                    output.invalid_block_ids |= {job.moves[at].block for at in failed}
        if results:
            output.kv_connector_worker_meta = KVDiskWorkerMetadata(Report(results))
        return output

    def _model_output(self, output: SchedulerOutput, transfer: KVConnectorOutput | None) -> ModelRunnerOutput:
        sampled, index, pooled = [], {}, []
        for at, request_id in enumerate(output.num_scheduled_tokens):
            request = self.scheduler.requests[request_id]
            done = request.num_computed_tokens >= request.num_tokens
            token = (request.num_tokens * 7) % 500
            pools = request.pooling_params is not None
            sampled.append([token] if done and not pools else [])
            pooled.append(torch.zeros(1) if done and pools else None)
            if done:
                self.tokens.setdefault(request_id, []).append(token)
            index[request_id] = at
        return ModelRunnerOutput(
            req_ids=list(index),
            req_id_to_index=index,
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=pooled,
            kv_connector_output=transfer,
        )


def _has_no_source(job: Job, at: int) -> bool:
    return job.kind is JobKind.LOAD and not job.moves[at].slots


def vllm_config(
    folder: Path,
    num_blocks: int,
    max_batched_tokens: int,
    extra: Mapping[str, Any] | None,
    connector: bool,
    others: Sequence[str] = (),
    events: bool = False,
    max_seqs: int = 8,
    max_model_len: int = 2048,
) -> VllmConfig:
    mine = BENCH_SETTINGS | dict(extra or {})
    transfer = KVTransferConfig(kv_connector="KVDiskConnector", kv_role="kv_both", kv_connector_extra_config=mine)
    if others:
        children = [
            {
                "kv_connector": name,
                "kv_role": "kv_both",
                "kv_connector_extra_config": mine if name == "KVDiskConnector" else {},
            }
            for name in others
        ]
        transfer = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": children},
        )
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=max_batched_tokens,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        parallel_config=ParallelConfig(),
        kv_transfer_config=transfer if connector else None,
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
    )
    config.cache_config.num_gpu_blocks = num_blocks
    return config


class Engines:
    """Makes benches in one folder. ``nvme``: with a store, one for all, whose home each takes over
    from the last."""

    def __init__(self, folder: Path, kind: type[Bench]) -> None:
        self._folder = folder
        self._kind = kind
        self._made: list[Any] = []
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_bytes(b"a store needs weights that have an identity")

    def make(self, *, nvme: bool = False, extra: Any = None, **more: Any) -> Any:
        store = {"store_dirs": str(self._folder / "store"), "nvme_bytes": "64MiB", "segment_bytes": "1MiB"}
        bench = self._kind(self._folder / "model", extra=(store if nvme else {}) | dict(extra or {}), **more)
        self._made.append(bench)
        return bench

    def close(self) -> None:
        while self._made:
            self._made.pop().close()
