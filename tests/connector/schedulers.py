# SPDX-License-Identifier: Apache-2.0
"""A ``Bench``: vLLM's real scheduler over kvdisk's real workers, whose jobs begin when a test says
so."""

from __future__ import annotations

import inspect
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.live_audit import audit_manager
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_dcp_kv_block_size
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from workers import Rank, Text, children_of, kvdisk_of

from kvdisk.blocks import BlockKey, Tier, make_block_key
from kvdisk.connector.connector import KVDiskMetadata
from kvdisk.connector.off import SchedulerOff, WorkerOff
from kvdisk.connector.plugin import register
from kvdisk.messages import Job, JobKind

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
    "max_position_embeddings": 1 << 22,
    "torch_dtype": "float32",
    "head_dim": 32,
}

SIZES: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
SLOT_BYTES = 20480
"""Of a block of the bench's model, header included."""
BENCH_SETTINGS = {
    "cpu_bytes": "4MiB",
    "staging_bytes": "1MiB",
    "device": "posix",
    "index_commit_s": 0.01,
    "lookup_wait_s": 600.0,
    "min_load_tokens": 0,
    "io_deadline_s": 600.0,
}
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
    stages: int = 1,
    shards: int = 1,
    pipelined: bool = False,
    events: bool = False,
    prefix_caching: bool = True,
    adapters: bool = False,
    retention_tokens: int | None = 0,
    sleeps: bool = False,
    drafts: int = 0,
    method: str = "ngram",
) -> VllmConfig:
    """Return an engine's configuration. ``extra``: kvdisk's own.

    ``others``: the classes of a ``MultiConnector``'s children, kvdisk's being ``KVDISK``; none:
    kvdisk alone. ``ranks``, ``stages``: of tensor and of pipeline parallelism. ``shards``: of a
    block's tokens, by DCP, each of ``BLOCK_TOKENS // shards``. ``pipelined``: vLLM's asynchronous
    scheduler. ``prefix_caching``: its own. ``adapters``: LoRA.
    ``retention_tokens``: the interval in which that keeps recurrent states; 0: those at a prompt's
    end; None: all. ``sleeps``: sleep mode. ``drafts``: tokens of
    speculation by ``method``, which for "mtp" has a module for each.
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
        cache_config=CacheConfig(block_size=BLOCK_TOKENS // shards, enable_prefix_caching=True),
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
        lora_config=LoRAConfig(max_loras=4, max_lora_rank=8) if adapters else None,
    )
    config.cache_config.num_gpu_blocks = num_blocks
    config.parallel_config.tensor_parallel_size = ranks
    config.parallel_config.pipeline_parallel_size = stages
    config.parallel_config.decode_context_parallel_size = shards
    config.scheduler_config.async_scheduling = pipelined
    config.cache_config.enable_prefix_caching = prefix_caching
    config.cache_config.prefix_cache_retention_interval = retention_tokens
    config.model_config.enable_sleep_mode = sleeps
    if drafts:
        model, parallel = config.model_config, config.parallel_config
        speculative = SpeculativeConfig(
            method="ngram", num_speculative_tokens=drafts, target_model_config=model, target_parallel_config=parallel
        )
        if method != "ngram":
            speculative.method = method
            modules = SimpleNamespace(num_nextn_predict_layers=drafts)
            speculative.draft_model_config = None if "ngram" in method else SimpleNamespace(hf_config=modules)
        config.speculative_config = speculative
    return config


def kv_groups(
    *,
    window_tokens: int | None = None,
    window_block_tokens: int = BLOCK_TOKENS,
    window_only: bool = False,
    drafter: bool = False,
    two_sizes: bool = False,
    by_stage: bool = False,
    state_tokens: int | None = None,
    state_only: bool = False,
    checkpoints: bool = False,
    state_drafts: int = 0,
    latent: bool = False,
    other: KVCacheSpec | None = None,
    left_out: KVCacheSpec | None = None,
) -> tuple[list[KVCacheGroupSpec], list[list[KVCacheGroupSpec]]]:
    """Return the KV-cache groups as the scheduler has them, and as the workers of each stage do.

    ``drafter``: a group of a drafter's layers. ``window_only``: the window's group is the only one.
    ``two_sizes``: the group has a second layer, twice as large, of which only the workers know.
    ``by_stage``: it has two more layers, on a second stage, where all layers of a window are, too.
    ``state_tokens``: of a block of recurrent state, and of full attention beside it; with
    ``state_only`` the state is the only group; ``checkpoints``: kept within steps;
    ``state_drafts``: for so many drafts there are states, too. ``latent``:
    MLA in place of full attention. ``other``: the kind of a further group. ``left_out``: that of
    the first, which vLLM's prefix cache leaves out.
    """
    sizes = {"block_size": state_tokens or BLOCK_TOKENS, **SIZES}
    full = MLAAttentionSpec(**sizes | {"num_kv_heads": 1}) if latent else FullAttentionSpec(**sizes)
    groups = [KVCacheGroupSpec(["full.0"], full)]
    if state_tokens is not None:
        page = groups[0].kv_cache_spec.page_size_bytes
        shapes, dtypes = ((page // 16,), (page // 8 + page // 32,)), (torch.float32, torch.float32)
        state = MambaSpec(state_tokens, shapes=shapes, dtypes=dtypes, page_size_padded=page, mamba_cache_mode="align")
        if state_drafts:
            state = replace(state, num_speculative_blocks=state_drafts)
        if checkpoints:
            state = replace(state, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)
        groups.append(KVCacheGroupSpec(["state.0"], state))
        del groups[: int(state_only)]
    if other is not None:
        groups.append(KVCacheGroupSpec(["other.0"], other))
    if left_out is not None:
        groups.insert(0, KVCacheGroupSpec(["left out.0"], left_out))
    if window_tokens is not None:
        spec = SlidingWindowSpec(**sizes | {"block_size": window_block_tokens}, sliding_window=window_tokens)
        groups.append(KVCacheGroupSpec(["window.0"], spec))
        del groups[: int(window_only)]
    if drafter:
        groups.append(KVCacheGroupSpec(["draft.0"], FullAttentionSpec(**sizes), is_eagle_group=True))
    if not (two_sizes or by_stage):
        return groups, [groups]
    if by_stage:
        second = replace(groups[0], layer_names=["full.1", "full.2"])
        others = [replace(group, layer_names=[]) for group in groups[1:]]
        return [groups[0], *others], [[groups[0], *others], [second, *groups[1:]]]
    groups[0].layer_names.append("full.1")
    layers = {"full.0": groups[0].kv_cache_spec, "full.1": FullAttentionSpec(**sizes | {"head_size": 64})}
    uniform = UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=layers)
    return groups, [[KVCacheGroupSpec(list(layers), uniform)]]


class Bench:
    """One scheduler and its ranks. ``step`` schedules, runs the step, and hands the results back.

    Each step compares all that it reads, and after it all that the engine's prefix cache has, byte
    by byte. So are the sampled tokens.

    Not a byte moves of jobs whose kind is in ``hold``, until ``release``. ``fail`` spoils the
    sources of a job's moves as it begins, by kind and position, in the way that ``damage`` names:
    "payload", "header", "cut" (the file ends before it), "late" (past the deadline: all moves
    fail). ``fail_of``: the only request meant; ``hold_rank``, ``fail_rank``: the rank meant, -1:
    each. With ``threaded`` movers have their threads, and these are without effect.

    ``pipelined``: vLLM's asynchronous scheduler, and a step's results arrive after the next one was
    scheduled; so do those of stages of a pipeline. With ``events`` what is published goes to
    ``published``. ``engine`` goes to ``vllm_config``, ``groups`` to ``kv_groups``.
    """

    def __init__(
        self, folder: Path, *, extra: Any, threaded: bool, groups: Mapping[str, Any], engine: Mapping[str, Any]
    ) -> None:
        register()
        self.config = vllm_config(folder, extra=extra, **engine)
        found, self.worker_groups = kv_groups(**groups)
        self.group_count = len(found)
        self.shards = self.config.parallel_config.decode_context_parallel_size
        for group in found:
            if group.kv_cache_spec.dcp_sharded:
                group.kv_cache_spec = replace(
                    group.kv_cache_spec, block_size=group.kv_cache_spec.block_size // self.shards
                )
        # Layers that differ lie in KV tensors of their own.
        tensors = [KVCacheTensor(0, [name], 0, 0) for name in found[0].layer_names if found not in self.worker_groups]
        num_blocks = self.config.cache_config.num_gpu_blocks
        self.cache = KVCacheConfig(
            num_blocks,
            tensors,
            found,
            prefix_cache_retention_interval=self.config.cache_config.prefix_cache_retention_interval,
            hash_block_size=BLOCK_TOKENS,
        )
        if self.cache.has_mamba_layers:
            self.config.cache_config.mamba_cache_mode = "align"
            self.config.cache_config.block_size = groups["state_tokens"]
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler = (AsyncScheduler if self.config.scheduler_config.async_scheduling else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=self.cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=math.lcm(*(resolve_dcp_kv_block_size(group.kv_cache_spec, self.shards) for group in found)),
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self.hold: set[JobKind] = set()
        self.fail: dict[JobKind, tuple[int, ...]] = {}
        self.damage = "payload"
        self.fail_of = ""
        self.hold_rank = self.fail_rank = -1
        self.weights = 0
        self.store = Path(dict(extra or {}).get("store_dirs", ""))
        self.jobs: list[Job] = []
        self.known: dict[str, Request] = {}
        self.texts: dict[str, Text] = {}
        self.outputs: dict[str, list[Any]] = {}
        self.behind: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.published: list[Any] = []
        self._taken: list[dict[str, tuple[int, int, int]]] = []
        """Of each step whose results are not known: by request where its tokens begin, and end, and
        how many fewer drafts were right."""
        self._named: dict[bytes, tuple[Text, int]] = {}
        self._threaded = threaded
        self._end_s = time.monotonic() + 600.0
        if self.config.kv_events_config is not None:
            self.scheduler.kv_event_publisher.publish = lambda batch: self.published.extend(batch.events)
        parallel = self.config.parallel_config
        count = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._lag = max(int(self.config.scheduler_config.async_scheduling), parallel.pipeline_parallel_size - 1)
        self._aggregator = KVOutputAggregator(count)
        self.ranks = [Rank(self, rank, threaded=threaded) for rank in range(count)]

    # -- what there is -------------------------------------------------------------------------

    @property
    def children(self) -> list[Any]:
        return children_of(self.scheduler.connector)

    @property
    def connector(self) -> Any:
        """kvdisk's connector."""
        return kvdisk_of(self.scheduler.connector)

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
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[group])

    def in_tier(self, tier: Tier) -> set[BlockKey]:
        """Return the keys of the copies that can be loaded from a tier."""
        return set(self.manager._catalog.ready_keys(tier))

    def sampled(self, request_id: str) -> list[int]:
        """Return what a request has sampled."""
        return list(self.known[request_id].output_token_ids)

    def references(self) -> list[int]:
        return [block.block_id for block in self.pool.blocks[1:] if block.ref_cnt]

    def serve(self, request_id: str, prompt: Iterable[int], max_tokens: int = 1, **more: Any) -> Request:
        """Serve one request alone, until all that comes of it has ended."""
        request = self.add(request_id, prompt, max_tokens, **more)
        self.run()
        return request

    def serve_twice(self, prompt: Sequence[int]) -> None:
        """Serve a prompt as requests "a" and "b", and forget each time what the GPU has."""
        for name in "ab":
            self.serve(name, prompt)
            self.forget()

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

    def assert_waits(self, request: Request, computed_tokens: int) -> None:
        """A load of the request is out: it is not scheduled, holds blocks, and none of what comes
        is in the cache."""
        scheduler = self.scheduler
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert request.num_computed_tokens == computed_tokens
        assert request in scheduler.kv_holding_waiting and request not in scheduler.running
        assert request not in scheduler.waiting

    def hashed(self, block_ids: Sequence[int]) -> list[bool]:
        """Return which of these GPU blocks the prefix cache knows."""
        return [self.pool.blocks[block_id].block_hash is not None for block_id in block_ids]

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
        for rank in self.ranks:
            assert not rank.ours.worker._loads
            assert isinstance(rank.ours.worker, WorkerOff) or rank.mover._runner.idle
        if isinstance(side, SchedulerOff):
            return
        assert not side._requests and not side._local_tokens and not side._described
        audit_manager(side._manager)

    # -- requests ------------------------------------------------------------------------------

    def add(
        self, request_id: str, prompt: Iterable[int], max_tokens: int = 2, params: Any = None, **more: Any
    ) -> Request:
        """Add a request. ``params``: its ``kv_transfer_params``. Further keywords go to vLLM's
        ``Request``."""
        sampling = more.pop("sampling_params", None) or SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=None if "pooling_params" in more else sampling,
            block_hasher=self._hasher,
            **{"pooling_params": None} | more,
        )
        self.known.setdefault(request_id, request)
        self.texts.setdefault(request_id, Text(list(request.prompt_token_ids), []))
        self.scheduler.add_request(request)
        return request

    def loading(self, *numbers: int, blocks: int = BLOCKS) -> list[Any]:
        """Begin loads of these prompts, for requests "r1" and so on; not a byte has moved."""
        self.hold = {JobKind.LOAD}
        requests = [self.add(f"r{number}", prompt_of(number), max_tokens=3) for number in numbers]
        assert not self.step().num_scheduled_tokens
        for request in requests:
            self.assert_waits(request, blocks * BLOCK_TOKENS)
            assert not any(self.hashed(self.table(request.request_id))), "nothing is cached that is not there"
        return requests

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def sees_images(self) -> None:
        """Let requests have images, though the bench's model has no encoder."""
        self.scheduler.max_num_encoder_input_tokens = 4096
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=4096)

    # -- steps ---------------------------------------------------------------------------------

    def release(self) -> None:
        """Let held jobs begin in the next step."""
        self.hold = set()

    def step(self, count: int = 1) -> SchedulerOutput:
        """Step so often; return what the last step is made of."""
        for _ in range(count):
            output = self.schedule()
            if len(self.behind) > self._lag:
                self.update()
        return output

    def schedule(self) -> SchedulerOutput:
        """Schedule a step and run it; its results wait for ``update``."""
        output = self.scheduler.schedule()
        (metadata,) = (
            one
            for one in getattr(output.kv_connector_metadata, "metadata", [output.kv_connector_metadata])
            if isinstance(one, KVDiskMetadata)
        )
        self.jobs.extend(metadata.plan.jobs)
        for request in self.scheduler.requests.values():
            if request.resumable:  # its prompt grows, in place of its last token
                self.texts[request.request_id] = Text(list(request.all_token_ids), [])
        self._note_drafts(output)
        results = [self._model_output(output, rank.run(output)) for rank in self.ranks]
        self.behind.append((output, self._aggregator.aggregate(results) if len(results) > 1 else results[0]))
        return output

    def update(self) -> None:
        """Let the scheduler hear of the oldest step."""
        output, results = self.behind.pop(0)
        for outputs in self.scheduler.update_from_output(output, results).values():
            for one in outputs.outputs:
                self.outputs.setdefault(one.request_id, []).append(one)
                text, told = self.texts[one.request_id], self.known[one.request_id].output_token_ids
                start = len(self.known[one.request_id].prompt_token_ids)
                text.grow(start + len(told))
                assert list(told) == text.tokens[start : start + len(told)], "a wrong token"
        self._taken.pop(0)
        if self.config.speculative_config is not None and not self._lag:
            self._propose()
        for rank in self.ranks:
            rank.check_cache()

    def _note_drafts(self, output: SchedulerOutput) -> None:
        """Decide how many of a step's drafts are right, of those that the scheduler knows by what
        they are."""
        taken: dict[str, tuple[int, int, int]] = {}
        for step in self._taken:  # what a victim's last steps come to is dropped
            for name in output.preempted_req_ids or ():
                step.pop(name, None)
        for name, count in output.num_scheduled_tokens.items():
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            end = self.scheduler.requests[name].num_computed_tokens - self._rejected(name)
            base, text = end - len(drafts), self.texts[name]
            text.grow(end + 1)
            right = _luck(base, len(drafts)) if -1 in drafts else _same(drafts, text.tokens[base:])
            taken[name] = (end - count, end, right - len(drafts))
        self._taken.append(taken)

    def _rejected(self, name: str) -> int:
        """Return how many tokens fewer a request has than the scheduler counts, who has not heard
        of the last steps."""
        return -sum(taken[name][2] for taken in self._taken if name in taken)

    def span(self, name: str) -> tuple[int, int, int]:
        """Return where a request's tokens of the last step begin and end, and the end of those that
        were right."""
        start, end, rejected = self._taken[-1][name]
        return start, end, end + rejected

    def _propose(self) -> None:
        """Draft for each request that decodes: some tokens right, then wrong ones."""
        most, drafts = self.config.speculative_config.num_speculative_tokens, {}
        for request in self.scheduler.running:
            known, text = request.num_tokens, self.texts[request.request_id]
            if request.num_computed_tokens >= known - 1:
                text.grow(known + most)
                right = _luck(known, most)
                drafts[request.request_id] = [
                    (token + (at >= right)) % 500 for at, token in enumerate(text.tokens[known : known + most])
                ]
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def named(self, block_hash: bytes) -> tuple[Text, int]:
        """Return a request's text that has the block of this hash, and where the block ends."""
        if block_hash not in self._named:
            for name, request in self.known.items():
                ends = range(BLOCK_TOKENS, BLOCK_TOKENS * len(request.block_hashes) + 1, BLOCK_TOKENS)
                self._named.update(zip(request.block_hashes, ((self.texts[name], end) for end in ends), strict=True))
        return self._named[block_hash]

    def run(self, steps: int = 200) -> None:
        """Step until nothing is left to do, each step with all committed that the one before gave
        the index."""
        while not self._is_idle():
            assert steps > 0 or self._threaded, "still busy"
            adapters = getattr(self.connector.scheduler, "_adapters", None)
            if adapters is not None and (adapters._new or adapters._held):
                time.sleep(0.001)  # another thread looks at files
            else:
                steps -= 1
            self.step()
            self.commit()

    def _is_idle(self) -> bool:
        assert time.monotonic() < self._end_s, "it never ends"
        if self.behind and not self.scheduler.requests:
            self.update()
        return not self.behind and not self.scheduler.has_requests()

    def commit(self) -> None:
        """Wait until what the index was given is committed."""
        index = self.connector.scheduler._parts.index
        assert index is None or index.flush(600.0)

    def close(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.connector.shutdown()

    def _model_output(self, output: SchedulerOutput, transfer: KVConnectorOutput) -> ModelRunnerOutput:
        sampled: list[list[int]] = []
        pooled: list[Any] = []
        for request in map(self.scheduler.requests.__getitem__, output.num_scheduled_tokens):
            is_last = request.num_computed_tokens >= request.num_tokens + max(0, request.num_output_placeholders - 1)
            pools = request.pooling_params is not None
            _, end, right = self.span(request.request_id)
            base = end - len(output.scheduled_spec_decode_tokens.get(request.request_id, []))
            text = self.texts[request.request_id]
            text.grow(right + 1)
            sampled.append(text.tokens[base : right + 1] if is_last and not pools else [])
            pooled.append(torch.zeros(1) if is_last and pools else None)
        return ModelRunnerOutput(
            req_ids=list(output.num_scheduled_tokens),
            req_id_to_index={name: at for at, name in enumerate(output.num_scheduled_tokens)},
            sampled_token_ids=sampled,
            pooler_output=pooled,
            kv_connector_output=transfer,
        )


def _luck(known: int, most: int) -> int:
    """Return how many drafts are right behind so many tokens."""
    return (known * 2654435761 >> 7) % (most + 1)


def _same(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many of the drafts are the tokens, from the first on."""
    return next((at for at, (one, other) in enumerate(zip(drafts, tokens, strict=False)) if one != other), len(drafts))


class Engines:
    """Makes benches in one folder. ``nvme``: with a store, one for all, whose home each takes over
    from the last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Bench] = []
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_bytes(b"a store needs weights that have an identity")

    def make(self, *, nvme: bool = False, threaded: bool = False, extra: Any = None, **more: Any) -> Bench:
        """``more``: what goes to ``kv_groups``, and to ``vllm_config``."""
        store = {"store_dirs": str(self._folder / "store"), "nvme_bytes": "64MiB", "segment_bytes": "1MiB"}
        extra = (store if nvme else {}) | dict(extra or {})
        groups = {name: more.pop(name) for name in inspect.signature(kv_groups).parameters if name in more}
        bench = Bench(self._folder / "model", extra=extra, threaded=threaded, groups=groups, engine=more)
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
        while self._made:
            self._made.pop().close()
