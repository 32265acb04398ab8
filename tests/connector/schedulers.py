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
from support.live_audit import audit_manager
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
from kvdisk.connector.off import SchedulerOff
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
BLOCKS = 4
TOKENS = BLOCKS * BLOCK_TOKENS + 5
"""Of a prompt, unless a test says otherwise."""
KVDISK = "KVDiskConnector"


def prompt_of(number: int, tokens: int = TOKENS) -> list[int]:
    """Return a prompt that shares no block with another number's."""
    return [(number * 37 + at * 7 + at // 500) % 500 for at in range(tokens)]


PROMPT, OTHER = prompt_of(1), prompt_of(2)


def vllm_config(
    folder: Path,
    *,
    extra: Mapping[str, Any] | None = None,
    others: Sequence[str] = (),
    num_blocks: int = 64,
    max_batched_tokens: int = 512,
    max_seqs: int = 8,
    max_model_len: int = 2048,
    ranks: int = 1,
    pipelined: bool = False,
    events: bool = False,
    prefix_caching: bool = True,
) -> VllmConfig:
    """Return an engine's configuration. ``extra``: kvdisk's own.

    ``others``: the classes of a ``MultiConnector``'s children, kvdisk's being ``KVDISK``; none:
    kvdisk alone. ``pipelined``: vLLM's asynchronous scheduler. ``prefix_caching``: its own.
    """
    (folder / "config.json").write_text(json.dumps(MODEL))
    mine = BENCH_SETTINGS | dict(extra or {})

    def connector(name: str, settings: dict[str, Any]) -> dict[str, Any]:
        return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": settings}

    transfer = connector(KVDISK, mine)
    if others:
        children = [transfer if name == KVDISK else connector(name, {}) for name in others]
        transfer = connector("MultiConnector", {"connectors": children})
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
        kv_transfer_config=KVTransferConfig(**transfer),
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
    )
    config.cache_config.num_gpu_blocks = num_blocks
    config.parallel_config.tensor_parallel_size = ranks
    config.scheduler_config.async_scheduling = pipelined
    config.cache_config.enable_prefix_caching = prefix_caching
    return config


class Bench:
    """One scheduler. ``step`` schedules, lets the fake workers answer, and hands the output back.

    Loads and stores are answered at once, with success, unless ``hold`` names their kind; held jobs
    wait in ``held`` until ``release``. ``fail`` maps a kind to the move positions that shall fail.

    ``drafter``: a group of a drafter's layers. ``window_only``: the window's group is the only one.
    ``two_sizes``: the group has a second layer, twice as large, of which only the workers know
    (``worker_groups``). ``engine`` goes to ``vllm_config``. ``invalid``: GPU blocks that the next
    step reports as not loaded. With ``events`` what is published goes to ``published``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        window_tokens: int | None = None,
        window_block_tokens: int = BLOCK_TOKENS,
        window_only: bool = False,
        drafter: bool = False,
        two_sizes: bool = False,
        **engine: Any,
    ) -> None:
        register()
        self.config = vllm_config(folder, **engine)
        sizes = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["full.0"], FullAttentionSpec(**sizes))]
        if window_tokens is not None:
            spec = SlidingWindowSpec(**sizes | {"block_size": window_block_tokens}, sliding_window=window_tokens)
            groups.append(KVCacheGroupSpec(["window.0"], spec))
            del groups[: int(window_only)]
        if drafter:
            groups.append(KVCacheGroupSpec(["draft.0"], FullAttentionSpec(**sizes), is_eagle_group=True))
        tensors = []
        if two_sizes:
            groups[0].layer_names.append("full.1")
            tensors = [KVCacheTensor(0, [name], 0, 0) for name in groups[0].layer_names]
        wide = FullAttentionSpec(**sizes | {"head_size": 64})
        layers = {"full.0": groups[0].kv_cache_spec, "full.1": wide}
        self.worker_groups = [
            KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=layers))
        ]
        num_blocks = self.config.cache_config.num_gpu_blocks
        self.cache = KVCacheConfig(num_blocks, tensors, groups, hash_block_size=BLOCK_TOKENS)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler = (AsyncScheduler if self.config.scheduler_config.async_scheduling else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=self.cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=math.lcm(*(group.kv_cache_spec.block_size for group in groups)),
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self.ranks = self.config.parallel_config.tensor_parallel_size
        self.hold: set[JobKind] = set()
        self.held: list[Job] = []
        self.fail: dict[JobKind, tuple[int, ...]] = {}
        self.jobs: list[Job] = []
        self.known: dict[str, Request] = {}
        self.group_count = len(groups)
        self.invalid: set[int] = set()
        self.void: set[JobId] = set()
        self.published: list[Any] = []
        if self.config.kv_events_config is not None:
            self.scheduler.kv_event_publisher.publish = lambda batch: self.published.extend(batch.events)

    @property
    def children(self) -> list[Any]:
        return list(getattr(self.scheduler.connector, "_connectors", ()))

    @property
    def connector(self) -> Any:
        """kvdisk's connector."""
        return next((one for one in self.children if isinstance(one, KVDiskConnector)), self.scheduler.connector)

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def manager(self) -> Any:
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
        return set(self.manager._catalog.ready_keys(tier))

    def sampled(self, request_id: str) -> list[int]:
        """Return what a request has sampled."""
        return list(self.known[request_id].output_token_ids)

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
        for tier in tiers:
            for row in list(self.manager._catalog.rows_in(tier)):
                self.manager._tiers.get(tier).discard(row)

    def warm(self, *numbers: int, tokens: int = TOKENS) -> Any:
        """Serve these prompts, and leave their blocks in the lowest tier only; return the bench."""
        for number in numbers:
            self.serve(f"before {number}", prompt_of(number, tokens))
        on_nvme = self.manager._tiers.get(Tier.NVME) is not None
        self.forget(*([Tier.CPU] if on_nvme and self.manager._tiers.get(Tier.CPU) is not None else []))
        self.jobs.clear()
        return self

    def finish(self, *names: str, count: int = 2) -> None:
        """Let go what is held, and step until nothing is left to do: each of these requests has
        sampled ``count`` tokens then."""
        self.release()
        self.run(steps=2000)
        assert [len(self.sampled(name)) for name in names] == [count] * len(names)

    def assert_quiet(self) -> None:
        """Nothing is held, pinned or remembered of any request."""
        scheduler, side = self.scheduler, self.connector.scheduler
        assert not scheduler.requests and not scheduler.running
        assert not scheduler.waiting and not scheduler.kv_holding_waiting
        assert not scheduler.finished_recving_kv_req_ids and not scheduler.failed_recving_kv_req_ids
        assert not self.references()
        assert self.pool.get_num_free_blocks() == len(self.pool.blocks) - 1
        for one in scheduler.kv_cache_manager.coordinator.single_type_managers:
            assert not one.req_to_blocks
        if isinstance(side, SchedulerOff):
            return
        assert not side._requests and not side._local_tokens and not side._described
        audit_manager(side._manager)

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

    def release(self) -> None:
        """Let held jobs be answered in the next step."""
        self.hold = set()

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        transfer = self._work(output.kv_connector_metadata)
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
        index = self.connector.scheduler._parts.index
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
            if job.kind is JobKind.LOAD:
                failed |= {at: Reason.ABSENT for at, move in enumerate(job.moves) if not move.slots}
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

    def _model_output(self, output: SchedulerOutput, transfer: KVConnectorOutput) -> ModelRunnerOutput:
        sampled: list[list[int]] = []
        pooled: list[Any] = []
        for request in map(self.scheduler.requests.__getitem__, output.num_scheduled_tokens):
            is_last = request.num_computed_tokens >= request.num_tokens + max(0, request.num_output_placeholders - 1)
            pools = request.pooling_params is not None
            sampled.append([self._next_token(request)] if is_last and not pools else [])
            pooled.append(torch.zeros(1) if is_last and pools else None)
        return ModelRunnerOutput(
            req_ids=list(output.num_scheduled_tokens),
            req_id_to_index={name: at for at, name in enumerate(output.num_scheduled_tokens)},
            sampled_token_ids=sampled,
            pooler_output=pooled,
            kv_connector_output=transfer,
        )

    def _next_token(self, request: Request) -> int:
        return (request.num_tokens * 7) % 500


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

    def end(self) -> None:
        """Let what is left of every engine come to its end: nothing is held or remembered then."""
        try:
            for bench in self._made:
                bench.fail = {}
                bench.finish()
                bench.assert_quiet()
        finally:
            self.close()

    def close(self) -> None:
        """End the engines, as vLLM does."""
        while self._made:
            self._made.pop().close()
