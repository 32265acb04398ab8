# SPDX-License-Identifier: Apache-2.0
"""What kvdisk uses of vLLM's insides, and the differences between the versions that it supports.

vLLM calls its connector API experimental. This module has all that depends on vLLM's KV-cache
specifications, its block pool, its tensors and its hooks. The other modules of this folder only
read fields of what a hook is given (configurations, requests, outputs), and use the classes of
events, metrics and the plugin. What other modules assume about vLLM is marked there:
docs/TESTING.md, "Another vLLM".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, fields
from itertools import repeat
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_block_hash,
    get_group_id,
    hash_block_tokens,
    resolve_dcp_kv_block_size,
    resolve_none_hash_seed,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    group_kernel_blocks,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvdisk.blocks import GROUP_BYTES, HIT_TIERS, BlockKey, Medium, Tier, group_of, make_block_key
from kvdisk.context import HandedState, KVCacheBlockView
from kvdisk.errors import ConfigError
from kvdisk.geometry import AUTO, Geometry, GroupGeometry, in_units, share_slots
from kvdisk.worker.host_memory import Deployment

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
    from vllm.v1.request import Request

    from kvdisk.config import Config

SUPPORTED_VERSIONS = ((0, 32), (0, 33))
"""The (major, minor) versions of vLLM. The tests run on 0.32; 0.33 adds the hooks of sleep mode,
and keeps no reference count on null blocks."""

_SLEEP_HOOKS = (0, 33)
"""The first version that calls the connector before it unmaps the KV cache, and after."""

SUPPORTED_DRAFTERS = frozenset({"ngram", "ngram_gpu", "suffix", "eagle", "eagle3", "mtp"})
"""The methods of speculative decoding. Drafters with layers of their own have them in KV-cache
groups that vLLM marks, or among the model's own."""

LAYERLESS_DRAFTERS = frozenset({"ngram", "ngram_gpu", "suffix"})


class VllmTier(NamedTuple):
    """vLLM's names for a tier. ``hit_source``: where hits come from. ``medium``: the medium in
    KV-cache events, for tiers whose changes are published."""

    hit_source: CacheHitSource
    medium: str | None = None


_VLLM_TIERS: Mapping[Medium, VllmTier] = {
    Medium.MEMORY: VllmTier(CacheHitSource.HOST, MEDIUM_CPU),
    Medium.FILES: VllmTier(CacheHitSource.DISK, MEDIUM_STORAGE),
    Medium.OBJECTS: VllmTier(CacheHitSource.EXTERNAL_UNSPECIFIED),
}
VLLM_TIERS: Mapping[Tier, VllmTier] = {tier: _VLLM_TIERS[tier.medium] for tier in HIT_TIERS}

_Reach = tuple[int | None, int | None]
"""The window and the chunk that a kind of layers reads in, in tokens; None where there is none."""


def _all(_spec: KVCacheSpec) -> _Reach:
    return None, None


def _window(spec: SlidingWindowSpec) -> _Reach:
    return spec.sliding_window + spec.extra_retained_tokens, None


_REACHES: dict[type[KVCacheSpec], Callable[[Any], _Reach]] = {
    FullAttentionSpec: _all,
    SinkFullAttentionSpec: _all,
    RSWASpec: _all,
    MLAAttentionSpec: _all,
    SlidingWindowSpec: _window,
    SlidingWindowMLASpec: _window,
    ChunkedLocalAttentionSpec: lambda spec: (None, spec.attention_chunk_size),
    MambaSpec: lambda _spec: (2, None),
}
"""The kinds of KV-cache specification that are supported. Exact classes: a subclass may keep its KV
in another way."""

_PLAIN_SPECS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
_PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TOKEN_MAJOR = ("LBNHC", "BLNHC")
"""The layouts in which all heads of a token are together, whatever blocks the kernels take."""

_WHOLE_BLOCKS = (16, 32, 64)
"""Block sizes in tokens that no attention kernel for CUDA takes in pieces, if all layers are
alike."""
_UNQUANTISED = ("auto", "float16", "bfloat16")
_OTHER_LAYERS = ("sliding_window", "global_head_dim", "attention_chunk_size")
"""Fields of a model's configuration that mean, or may mean, layers of another kind."""

_LAYERS_WITHOUT = ("block_configs", "num_kv_shared_layers", "index_topk", "hybrid_layer_pattern")
"""Fields of a model's configuration that mean layers without KV of their own, or with another
KV."""

_OWN_EXECUTORS = ("uni", "mp")
"""The executors whose workers are on the scheduler's machine, or where ``nnodes`` says."""

_LEAST_BLOCK_TOKENS = 16
"""The least tokens of a block, where the user has not set them and vLLM has not chosen yet."""

STATE_MODE = "align"
"""The only mode of recurrent states in which vLLM keeps each state at a block's end, and hands it
off."""

_STATE_BLOCKS = 16
"""Blocks of a prompt for each recurrent state that there is room for, where vLLM keeps fewer
states."""


def vllm_minor_version() -> tuple[int, int]:
    """Return vLLM's version as (major, minor); (0, 0) for a build that has none."""
    major, minor = vllm.__version_tuple__[:2]
    return int(major), int(minor)


def refuse_version() -> None:
    """Raise ConfigError, in one sentence, where this vLLM is not supported."""
    if vllm_minor_version() not in SUPPORTED_VERSIONS:
        listed = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED_VERSIONS)
        raise ConfigError(f"kvdisk does not support vLLM {vllm.__version__} (it supports {listed}).")


def transfer_looked_up() -> KVTransferConfig | None:
    """Return the transfer configuration that names kvdisk, where vLLM's factory is looking the
    connector up now; otherwise None.

    vLLM looks it up whenever a configuration is built. It calls the hook that is given the settings
    only where full CUDA graphs are planned: not on CPUs, nor with ``enforce_eager``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "get_connector_class":
        frame = frame.f_back
    found = None if frame is None else frame.f_locals.get("kv_transfer_config")
    is_ours = getattr(found, "kv_connector", None) == "KVDiskConnector"  # and not a class that builds on it
    return found if is_ours else None


def config_being_built() -> VllmConfig | None:
    """Return the VllmConfig that is being built by a caller of this function; None where there is
    none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, VllmConfig):
            return owner
        frame = frame.f_back
    return None


def offloading_being_built() -> tuple[VllmConfig, KVCacheConfig] | None:
    """Return the configurations of vLLM's connector that is being built around a tier; None where
    there is none. vLLM gives a tier what names the model, but nothing that says which weights it
    has."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals
        if isinstance(found.get("self"), KVConnectorBase_V1) and {"vllm_config", "kv_cache_config"} <= found.keys():
            return found["vllm_config"], found["kv_cache_config"]
        frame = frame.f_back
    return None


def others_place_workers(vllm_config: VllmConfig) -> bool:
    """Return whether somebody else than vLLM says on which machines workers are: Ray, a launcher,
    or an executor that is not vLLM's own. Then one that is alone may be on another machine, too."""
    parallel = vllm_config.parallel_config
    return parallel.distributed_executor_backend not in _OWN_EXECUTORS or parallel.data_parallel_backend == "ray"


def deployment_of(vllm_config: VllmConfig) -> Deployment:
    """Return how the workers of a configuration are placed. In the server's process this covers all
    data-parallel ranks of the host, in an engine's process perhaps only its own.

    Where others place the workers, perhaps not here, one rank is all that is known.
    """
    parallel = vllm_config.parallel_config
    ranks = ranks_of_stage(vllm_config) * parallel.pipeline_parallel_size
    if others_place_workers(vllm_config):
        return Deployment(ranks, 1, ranks)
    return Deployment(ranks, max(1, parallel.data_parallel_size_local), parallel.nnodes_within_dp)


def hosts_of(vllm_config: VllmConfig, *, replicated: bool) -> int:
    """Return on how many hosts the ranks of an engine may lie. ``replicated``: see ``Geometry``.

    vLLM: ranks of ``nnodes`` machines are numbered one machine after the other. Ray places them as
    it likes, so that those of one host cannot share a file: then they must all be on one.
    """
    return 1 if replicated and others_place_workers(vllm_config) else deployment_of(vllm_config).hosts


def data_parallel_rank_of(vllm_config: VllmConfig) -> int | None:
    """Return an engine's number among its data-parallel ranks; None where it is alone.

    vLLM: the ranks of a model without experts know nothing else of each other.
    """
    parallel = vllm_config.parallel_config
    return None if parallel.data_parallel_rank_local is None else int(parallel.data_parallel_index)


def least_geometry(vllm_config: VllmConfig) -> Geometry | None:
    """Return sizes of blocks that are not above the model's, before the model is built. None where
    its configuration does not determine them: layers that differ, or keep another state."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    config = None if model is None else model.hf_text_config
    if config is None or model.is_hybrid or model.is_attention_free or model.is_encoder_decoder:
        return None
    if _layers_differ(config) or any(getattr(config, name, None) for name in _LAYERS_WITHOUT):
        return None
    if cache.cache_dtype not in _UNQUANTISED or (getattr(config, "v_head_dim", None) and not model.use_mla):
        return None
    tokens = cache.block_size if getattr(cache, "user_specified_block_size", False) else _LEAST_BLOCK_TOKENS
    element_bytes = (model.dtype if cache.cache_dtype == "auto" else getattr(torch, cache.cache_dtype)).itemsize
    heads = 1 if model.use_mla else 2 * model.get_num_kv_heads(parallel)
    layers = model.get_num_layers(parallel)
    ranks = ranks_of_stage(vllm_config) * parallel.pipeline_parallel_size
    payload_bytes = tokens * layers * heads * model.get_head_size() * element_bytes
    alike = model.use_mla and ranks > 1 and parallel.pipeline_parallel_size == 1
    hosts = hosts_of(vllm_config, replicated=alike)
    return Geometry((GroupGeometry(0, tokens, payload_bytes),), ranks, tokens, replicated=alike, hosts=hosts)


def sleeps(vllm_config: VllmConfig) -> bool:
    """Return whether the engine's GPU memory can be unmapped for a sleep, and mapped again."""
    return bool(getattr(vllm_config.model_config, "enable_sleep_mode", False))


def refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError, in one sentence that names it, for the first thing that kvdisk does not
    support."""
    refuse_deployment(vllm_config, vllm_config.kv_transfer_config.kv_role)
    refused = next(_unsupported_groups(vllm_config, kv_cache_config), None)
    if refused is not None:
        raise ConfigError(f"kvdisk does not support {refused}.")


def refuse_deployment(vllm_config: VllmConfig, role: str | None) -> None:
    """Do the same as ``refuse_unsupported`` for what is known before the model is built. ``role``:
    the role that kvdisk was given, perhaps among other connectors."""
    refuse_version()
    refused = next(_unsupported(vllm_config, role), None)
    if refused is not None:
        raise ConfigError(f"kvdisk does not support {refused}.")


def _unsupported(vllm_config: VllmConfig, role: str | None) -> Iterator[str]:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if model.is_encoder_decoder:
        yield "encoder-decoder models"
    if sleeps(vllm_config) and vllm_minor_version() < _SLEEP_HOOKS:
        yield "sleep mode with this vLLM, which does not tell when it unmaps the KV cache (0.33 does)"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism (DCP, PCP), with which it has not run on GPUs"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in SUPPORTED_DRAFTERS:
        yield f"speculative decoding by the method {speculative.method}"
    if speculative is not None and parallel.pipeline_parallel_size > 1 and speculative.method not in LAYERLESS_DRAFTERS:
        # Their layers are on the last stage, but vLLM's scheduler has the groups of the first.
        yield "drafters with layers of their own under pipeline parallelism"
    if role != "kv_both":
        yield f"the role {role}; set kv_role to kv_both"


def _unsupported_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    if not kv_cache_config.kv_cache_groups:
        yield "models without KV cache, such as encoders"
    if getattr(vllm_config.model_config, "use_mla", False) and not vllm_config.scheduler_config.enable_chunked_prefill:
        # vLLM's reference implementation of MLA for CPUs, which turns this off, leaves out what was
        # computed before a prompt's step.
        yield "MLA with chunked prefill off, where attention may begin with the first token that is not loaded"
    for group in kv_cache_config.kv_cache_groups:
        if group.host_resident or not group.enable_kv_transfer:
            yield "KV-cache groups that live on the host or are rebuilt locally"
    groups = kv_cache_config.prefix_cacheable_groups
    if kv_cache_config.kv_cache_groups and not groups:
        yield "models of which vLLM's prefix cache keeps nothing"
    for group in groups:
        for spec in _specs_of(group):
            if type(spec) not in _REACHES:
                yield f"KV-cache groups of the kind {type(spec).__name__}"
                continue
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != STATE_MODE:
                mode = spec.mamba_cache_mode
                yield (
                    f"recurrent state in the cache mode {mode!r}; set mamba_cache_mode to {STATE_MODE!r}, with vLLM's "
                    "prefix caching on"
                )
            if _has_drafter(vllm_config, kv_cache_config, group) and _REACHES[type(spec)](spec) != (None, None):
                yield "drafters with sliding windows"


def _layer_specs(spec: KVCacheSpec, layer_names: Sequence[str]) -> dict[str, KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in layer_names}
    return dict.fromkeys(layer_names, spec)


def _specs_of(group: KVCacheGroupSpec) -> Collection[KVCacheSpec]:
    """Return the kinds of layers that a group has, on any stage of the pipeline."""
    spec = group.kv_cache_spec
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def _has_drafter(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, group: KVCacheGroupSpec) -> bool:
    """Return whether a drafter's layers may be in a group. vLLM: where it marks no group they may
    be in any, but not beside recurrent state."""
    if all(isinstance(spec, MambaSpec) for spec in _specs_of(group)):
        return False
    speculative = vllm_config.speculative_config
    marked = any(each.is_eagle_group for each in kv_cache_config.kv_cache_groups)
    return group.is_eagle_group or (not marked and speculative is not None and speculative.use_eagle_block_drop())


def _volatile_tokens(vllm_config: VllmConfig) -> int:
    """Return how many tokens ahead a drafter's KV looks: one, or one for each module where MTP has
    several."""
    return max(1, int(vllm_config.num_prefill_lookahead_tokens))


def keeps_parts_of_states(kv_cache_config: KVCacheConfig, geometry: Geometry) -> bool:
    """Return whether vLLM keeps recurrent states within its steps, after a part of a block. Such a
    state has another hash than a block, and is not stored."""
    return any(
        getattr(spec, "num_prefill_checkpoint_blocks", 0) and geometry.hash_tokens < spec.block_size
        for group in kv_cache_config.prefix_cacheable_groups
        for spec in _specs_of(group)
    )


def refuse_store_policy(store_policy: str, vllm_config: VllmConfig, geometry: Geometry | None = None) -> None:
    """Raise ConfigError where vLLM's prefix cache is off and a policy would store nothing, or
    nothing that hits. ``geometry``: None before the model is built."""
    why, groups = "", () if geometry is None else geometry.groups
    if store_policy == "spillover":
        why = "stores what leaves vLLM's prefix cache"
    elif store_policy == "on_preemption" and any(group.state_tokens is not None for group in groups):
        raise ConfigError(
            "store_policy 'on_preemption' stores nothing that hits for a model with recurrent state, which a victim "
            "has at another token: set it to 'on_compute' or 'spillover'."
        )
    elif store_policy == "on_preemption" and not all(group.reads_all for group in groups):
        # Only the prefix cache shows whether a block at the window's edge is still the victim's.
        why = "needs vLLM's prefix cache for a model with sliding windows"
    if why and not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            f"store_policy '{store_policy}' {why}, and that is off: set enable_prefix_caching, or store_policy to "
            "'on_compute'."
        )


def recompute_failed_loads(vllm_config: VllmConfig) -> bool:
    """Set ``kv_load_failure_policy`` to recompute; return whether it was something else. Call it
    while the connector is built.

    The scheduler reads the setting afterwards, from its own configuration. A child of
    ``MultiConnector`` is given a copy of that configuration; then the outermost connector that is
    being built has the scheduler's. Raises ConfigError where that connector does not show it,
    unless kvdisk's own says recompute already.
    """
    frame: FrameType | None = sys._getframe()
    outer: VllmConfig | None = vllm_config
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, KVConnectorBase_V1):
            outer = getattr(owner, "_vllm_config", None)
        frame = frame.f_back
    was_set = (outer or vllm_config).kv_transfer_config.kv_load_failure_policy == "recompute"
    if outer is None:
        if was_set:
            return False
        raise ConfigError(
            "kvdisk cannot reach the connector around it: set kv_load_failure_policy to recompute there and for kvdisk."
        )
    outer.kv_transfer_config.kv_load_failure_policy = "recompute"
    return not was_set


def wanted_layout(vllm_config: VllmConfig) -> str | None:
    """Return the layout to ask the engine for: one in which all layers of a block are together.
    None where that brings nothing, or might break the engine.

    vLLM: it uses a layout of its own, with a warning, where a backend names layouts and this one is
    not among them. It does not check whether kernels take such blocks in pieces, and packs layers
    of several kinds otherwise: so all layers have to be alike, and not quantised. It does not start
    where connectors beside each other ask for different layouts. ``VLLM_KV_CACHE_LAYOUT`` overrides
    all.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if (
        not current_platform.is_cuda()
        or model is None
        or model.use_mla  # its indexer's layers would still lie apart from the others
        or model.is_hybrid
        or cache.cache_dtype not in _UNQUANTISED
        or _layers_differ(model.hf_text_config)
        or getattr(cache, "kv_cache_dtype_skip_layers", None)
        or getattr(vllm_config.attention_config, "hisparse_config", None) is not None
        or (getattr(cache, "user_specified_block_size", True) and cache.block_size not in _WHOLE_BLOCKS)
        or _asked_by_another()
    ):
        return None
    capability = current_platform.get_device_capability()
    # vLLM: FlashInfer, which it prefers there, reads only blocks whose heads are outermost.
    return "BLHNC" if capability is not None and capability.major == 10 else "BLNHC"


def _layers_differ(config: Any) -> bool:
    """Return whether a model has layers of several kinds, or may have."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return len(kinds) > 1 or any(getattr(config, name, None) for name in _OTHER_LAYERS)


def _asked_by_another() -> bool:
    """Return whether another connector, such as ``MultiConnector``, is asking for its children's
    layouts."""
    asking = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        asking += frame.f_code.co_name == "get_required_kvcache_layout"
        frame = frame.f_back
    return asking > 1


def sizes_are_certain(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Return whether the scheduler's configuration has the sizes of all layers, and not only of
    each group's first layer, or of the first stage.

    vLLM takes the first layer's size for all layers of a group there. All that shows their
    difference is that layers which differ are in KV tensors of their own. Of a pipeline the
    scheduler has the first stage's layers only.
    """
    return vllm_config.parallel_config.pipeline_parallel_size == 1 and all(
        sum(not names.isdisjoint(tensor.layers) for tensor in kv_cache_config.kv_cache_tensors) <= 1
        for names in (set(group.layer_names) for group in kv_cache_config.prefix_cacheable_groups)
    )


def groups_by_stage(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[list[KVCacheGroupSpec]]:
    """Return a worker's KV-cache groups as each stage of its pipeline has them, the first stage
    first. The workers of all stages call this together at the start, and wait for each other."""
    groups = kv_cache_config.prefix_cacheable_groups
    found = [groups] * vllm_config.parallel_config.pipeline_parallel_size
    if len(found) > 1:
        torch.distributed.all_gather_object(found, groups, group=get_pp_group().cpu_group)
    return found


def handshake_of(stages: list[list[KVCacheGroupSpec]]) -> list[list[KVCacheGroupSpec]] | None:
    """Return the groups of all stages where the scheduler's groups lack something; otherwise None,
    so that other connectors' handshakes go on."""
    uniform = any(isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) for group in stages[0])
    return stages if len(stages) > 1 or uniform else None


def handshakes_beside(connector: KVConnectorBase_V1) -> list[str]:
    """Return the classes of the connectors beside ``connector`` that also take a handshake. Call it
    in the hook that brings the handshake.

    vLLM: ``MultiConnector`` hands all its children what the first of them has sent.
    """
    children: Collection[Any] = ()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        children = getattr(frame.f_locals.get("self"), "_connectors", children)
        frame = frame.f_back
    hooks = ("set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware")
    return [
        type(child).__name__
        for child in children
        if child is not connector
        and any(getattr(type(child), hook) is not getattr(KVConnectorBase_V1, hook) for hook in hooks)
    ]


def geometry_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    stages: Sequence[Sequence[KVCacheGroupSpec]] = (),
    unit_tokens: int | str | None = None,
) -> Geometry:
    """Return the sizes of this engine's blocks, each of one or several of vLLM's blocks.

    ``stages``: the groups of each stage of a pipeline. A block has the same size on each of them,
    that of the stage which has most of its bytes. Empty: the groups of the configuration (see
    ``sizes_are_certain``). Where a worker has no layers of a group, the group's blocks have no
    bytes. ``unit_tokens``: the setting. Raises ConfigError where no group can have such blocks.
    """
    groups = []
    parallel = vllm_config.parallel_config
    for index, group in enumerate(kv_cache_config.prefix_cacheable_groups):
        reaches = {_REACHES[type(spec)](spec) for spec in _specs_of(group)}
        if len(reaches) > 1:
            raise ConfigError("kvdisk does not support KV-cache groups whose layers have different windows.")
        window, chunk = reaches.pop()
        # With DCP a block's tokens are divided among so many ranks.
        block_tokens = resolve_dcp_kv_block_size(group.kv_cache_spec, parallel.decode_context_parallel_size)
        groups.append(
            GroupGeometry(
                index,
                block_tokens,
                max(_payload_bytes(stage[index]) for stage in stages or [kv_cache_config.prefix_cacheable_groups]),
                window,
                _volatile_tokens(vllm_config) if _has_drafter(vllm_config, kv_cache_config, group) else 0,
                chunk,
                any(isinstance(spec, RSWASpec) for spec in _specs_of(group)),
                _state_tokens(kv_cache_config, block_tokens) if _keeps_states(group) else None,
            )
        )
    hash_tokens = kv_cache_config.hash_block_size or min(group.block_tokens for group in groups)
    if unit_tokens is not None:
        groups = list(in_units(groups, unit_tokens))
    ranks = ranks_of_stage(vllm_config) * parallel.pipeline_parallel_size
    replicated = ranks > 1 and ranks_are_alike(vllm_config, kv_cache_config)
    return Geometry(share_slots(groups), ranks, hash_tokens, replicated, hosts_of(vllm_config, replicated=replicated))


def units_of(config: Config, vllm_config: VllmConfig) -> int | str | None:
    """Return the setting ``unit_tokens`` as far as it can be used here. Raises ConfigError where a
    number cannot."""
    why = ""
    if config.store_policy not in {"on_compute", "on_preemption"}:
        why = f"store_policy {config.store_policy!r} stores vLLM's blocks one by one"
    elif publishes_events(vllm_config):
        why = "KV-cache events name vLLM's blocks one by one"
    if not why or config.unit_tokens is None:
        return config.unit_tokens
    if config.unit_tokens != AUTO:
        raise ConfigError(f"unit_tokens {config.unit_tokens} cannot be used: {why}.")
    return None


def ranks_are_alike(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Return whether each rank has the same bytes of a block, however many ranks there are: that is
    so where all KV is MLA's latent KV, which has no heads to divide, and each rank has all layers
    and all tokens."""
    parallel = vllm_config.parallel_config
    return parallel.pipeline_parallel_size == parallel.decode_context_parallel_size == 1 and all(
        type(spec) is MLAAttentionSpec for group in kv_cache_config.prefix_cacheable_groups for spec in _specs_of(group)
    )


def _state_tokens(kv_cache_config: KVCacheConfig, block_tokens: int) -> int:
    """Return how many tokens of a prompt there are for each recurrent state that vLLM keeps: it
    keeps all (None), one in each interval, or, with 0, those at the ends of prompts."""
    interval = kv_cache_config.prefix_cache_retention_interval
    blocks = 1 if interval is None else interval // block_tokens or _STATE_BLOCKS
    return block_tokens * min(blocks, _STATE_BLOCKS)


def _payload_bytes(group: KVCacheGroupSpec) -> int:
    specs = _layer_specs(group.kv_cache_spec, group.layer_names)
    return sum(spec.real_page_size_bytes for spec in specs.values())


def ranks_of_stage(vllm_config: VllmConfig) -> int:
    """Return how many workers have the layers of one stage. vLLM: DCP divides tokens among them,
    and adds no worker."""
    parallel = vllm_config.parallel_config
    return parallel.tensor_parallel_size * parallel.prefill_context_parallel_size  # type: ignore[no-any-return]


def rank_of(vllm_config: VllmConfig) -> int:
    """Return a worker's rank among those that share its engine's blocks."""
    parallel = vllm_config.parallel_config
    return parallel.rank % (ranks_of_stage(vllm_config) * parallel.pipeline_parallel_size)  # type: ignore[no-any-return]


def group_descriptions(stages: Sequence[Sequence[KVCacheGroupSpec]]) -> list[Any]:
    """Return, for the fingerprint, what decides the bytes of each group's blocks; with a pipeline,
    by stage."""
    described = [
        [
            {
                "layers": list(group.layer_names),
                "specs": sorted(
                    {_described(spec) for spec in _layer_specs(group.kv_cache_spec, group.layer_names).values()}
                ),
            }
            for group in groups
        ]
        for groups in stages
    ]
    return described if len(described) > 1 else described[0]


def _described(spec: KVCacheSpec) -> str:
    """Return a specification's kind, its bytes, and the fields that do not have their default. So a
    field that another version adds changes nothing until it is used."""
    found = {
        field.name: getattr(spec, field.name)
        for field in fields(spec)
        if field.compare and (field.default is MISSING or getattr(spec, field.name) != field.default)
    }
    return f"{type(spec).__name__} {spec.real_page_size_bytes} {sorted(found.items())}"


def is_plain(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, stages: Sequence[Sequence[KVCacheGroupSpec]]
) -> bool:
    """Return whether descriptions and layout say where every byte of a block is, whatever minor
    version and attention backend wrote it: K and V of each token, one behind the other, unchanged.

    vLLM: on CUDA every backend writes what ``_TOKEN_MAJOR`` and the fields asked for here say; the
    code of each supported version was read for that. Elsewhere kernels pack as they like (CPUs,
    ROCm), and recurrent state, MLA and quantised KV have parts that no description names.
    """
    speculative = vllm_config.speculative_config
    return (
        current_platform.is_cuda()
        and kv_cache_config.kv_cache_layout in _TOKEN_MAJOR
        and not vllm_config.model_config.is_multimodal_model
        and (speculative is None or speculative.method in LAYERLESS_DRAFTERS)
        and all(_is_plain(spec) for groups in stages for group in groups for spec in _specs_of(group))
    )


def _is_plain(spec: KVCacheSpec) -> bool:
    return (
        type(spec) in _PLAIN_SPECS
        and spec.kv_quant_mode is KVQuantMode.NONE
        and spec.dtype in _PLAIN_DTYPES
        and (spec.num_head_slots, spec.state_content_bytes, spec.tokens_per_state) == (None, None, 1)
    )


def model_module(vllm_config: VllmConfig) -> str | None:
    """Return the name of the module with vLLM's own code of the model; None where that is not
    known, or another library's."""
    registered = ModelRegistry.models.get(vllm_config.model_config.architecture)
    name = getattr(registered, "module_name", None)
    return name if name is not None and "transformers" not in name.split(".") else None


def hash_chain(algorithm: str) -> str:
    """Return the hash of a sample block, with an extra key beside its tokens, behind another block.
    It changes when the same algorithm hashes other content."""
    hashed = get_hash_fn_by_name(algorithm)
    first = hash_block_tokens(hashed, BlockHash(hashed(resolve_none_hash_seed(hashed))), (1, 2))
    return hash_block_tokens(hashed, first, (3, 4), ("salt",)).hex()  # type: ignore[no-any-return]


def hash_by_content(request: Request, content: str) -> None:
    """Hash a request's blocks anew, and those that are added later, with ``content`` in place of
    its adapter's name and path. vLLM's prefix cache knows the request's blocks by these hashes from
    now on.
    """
    hasher, known = request._block_hasher, copy(request.lora_request)
    hasher = getattr(hasher, "vllm_hasher", hasher)
    known.lora_name, known.lora_path = "", content

    def hash_blocks(changed: Request) -> list[BlockHash]:
        adapter, changed.lora_request = changed.lora_request, known
        try:
            hashes: list[BlockHash] = hasher(changed)
        finally:
            changed.lora_request = adapter
        return hashes

    hash_blocks.vllm_hasher = hasher  # type: ignore[attr-defined]  # for the next time
    request._block_hasher = hash_blocks
    request.block_hashes.clear()
    request.update_block_hashes()


def publishes_events(vllm_config: VllmConfig) -> bool:
    """Return whether the engine publishes KV-cache events."""
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def event_groups(kv_cache_config: KVCacheConfig) -> list[tuple[int, str, int | None]]:
    """Return how events name each group: its index, its kind of attention, and its window in
    tokens."""
    specs = {at: kv_cache_config.kv_cache_groups[at].kv_cache_spec for at in kv_cache_config.prefix_cacheable_group_ids}
    return [
        (at, get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for at, spec in specs.items()
    ]


def layer_blocks(kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return, for each group, a worker's layers as uint8 views of shape (num_blocks, layer bytes)
    on vLLM's own memory.

    Raises ConfigError where a layer's block is not one contiguous range of bytes.
    """
    groups = []
    for group in kv_cache_config.prefix_cacheable_groups:
        views = [_block_view(name, kv_caches[name], kv_cache_config.num_blocks) for name in group.layer_names]
        total, expected = sum(view.shape[1] for view in views), _payload_bytes(group)
        if total != expected:
            raise ConfigError(
                f"kvdisk expected blocks of {expected} bytes in KV-cache group {group.layer_names[0]}..., "
                f"and the engine's tensors have {total}: this attention layout is not supported."
            )
        groups.append(views)
    if not any(groups):
        raise ConfigError("kvdisk does not support pipeline stages without KV cache.")
    return groups


def _block_view(name: str, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    blocks = group_kernel_blocks(cache, num_blocks)
    size = blocks.element_size()
    expected = 1
    for length, stride in sorted(zip(blocks.shape[1:], blocks.stride()[1:], strict=True), key=lambda pair: pair[1]):
        if length > 1 and stride != expected:
            raise ConfigError(f"kvdisk does not support the attention layout of {name}: its blocks are not contiguous.")
        expected *= length
    return torch.empty(0, dtype=torch.uint8, device=blocks.device).set_(
        blocks.untyped_storage(),
        blocks.storage_offset() * size,
        (num_blocks, expected * size),
        (blocks.stride(0) * size, 1),
    )


def unfilled_blocks(blocks: KVCacheBlocks) -> list[list[int]]:
    """Return a request's GPU blocks by vLLM's group, with 0 for each that no load may write to.

    A block that has a hash already was filled before: its KV is there.
    """
    return [_unfilled(group) for group in blocks.blocks]


def _unfilled(group: Sequence[KVCacheBlock]) -> list[int]:
    first = 0
    if group and group[0].is_null:  # before its window a group has no other: to look at each takes longer
        count = group.count(group[0])
        first = count if group[:count].count(group[0]) == count else 0
    filled = [0 if block.is_null or block.block_hash is not None else block.block_id for block in group[first:]]
    return [0] * first + filled


class BlockTable(Sequence[int]):
    """A request's GPU blocks of one group: a view of vLLM's own list, which is not copied.

    vLLM: it appends to that list, and puts the null block, 0, in the place of a block that it frees
    behind a window. When a request ends it drops the list as it is.
    """

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...

    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if isinstance(at, slice):
            return [block.block_id for block in self._blocks[at]]
        return self._blocks[at].block_id  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[int]:
        return iter([block.block_id for block in self._blocks])


def block_tables(state: KVConnectorBlockState, request_id: str) -> Sequence[Sequence[int]] | None:
    """Return the block tables of a request of this step, by vLLM's group; None where it has none.

    vLLM makes a list of a whole table, which takes milliseconds where the table is long. Where its
    resolver is the KV-cache manager's own, that manager's lists are viewed instead.
    """
    manager = getattr(state.resolve_block_ids, "__self__", None)
    if request_id not in state.req_ids or not isinstance(manager, KVCacheManager):
        return state.get_block_ids(request_id)  # type: ignore[no-any-return]
    return [BlockTable(blocks) for blocks in manager.get_blocks(request_id).blocks]


class GroupIds:
    """vLLM's indices of the KV-cache groups that are stored; kvdisk numbers these 0, 1, ...

    Groups that vLLM's prefix cache leaves out (a window that is computed again, a ring of one
    block) are left out here too: a hit needs nothing of them.
    """

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        self.ids = kv_cache_config.prefix_cacheable_group_ids
        self._numbers = {group_id: number for number, group_id in enumerate(self.ids)}
        groups = kv_cache_config.kv_cache_groups
        self._states = [group_id for group_id in self.ids if _keeps_states(groups[group_id])]

    def number_of(self, group_id: int) -> int:
        """Return kvdisk's number of one of vLLM's groups that are stored."""
        return self._numbers[group_id]

    def tables(self, block_ids: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the block tables of the groups that are stored, from those of all vLLM's
        groups."""
        return [block_ids[group_id] for group_id in self.ids]

    def handed_states(self, output: SchedulerOutput) -> dict[str, list[HandedState]]:
        """Return the recurrent states that a step hands off, by request; states after a part of a
        block are among them."""
        state = output.kv_connector_block_state
        return {
            request_id: [HandedState(self._numbers[group_id], *place) for group_id, *place in states]
            for request_id, states in (state.boundary_state_offloads if state is not None else {}).items()
        }

    def overwritten_blocks(self, output: SchedulerOutput) -> set[int]:
        """Return the GPU blocks that a model runner may write to before it calls
        ``handle_preemptions``.

        The second-generation runner zeroes new blocks, copies shared blocks and moves recurrent
        states into new blocks before it; the first-generation runner does so after it.
        """
        found = set(output.new_block_ids_to_zero or ())
        found.update(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
        if self._states:
            new = [request.block_ids for request in output.scheduled_new_reqs]
            new += [tables for tables in output.scheduled_cached_reqs.new_block_ids if tables is not None]
            found.update(block for tables in new for group_id in self._states for block in tables[group_id])
        return found


def _keeps_states(group: KVCacheGroupSpec) -> bool:
    specs = _layer_specs(group.kv_cache_spec, group.layer_names).values()
    return any(isinstance(spec, MambaSpec) for spec in specs)


def step_blocks_of(vllm_config: VllmConfig, geometry: Geometry) -> int:
    """Return how many GPU blocks one step can take: enough for all its tokens, and one more for
    each request and group."""
    limits = vllm_config.scheduler_config
    return sum(
        -(-limits.max_num_batched_tokens // group.gpu_block_tokens) + limits.max_num_seqs for group in geometry.groups
    )


class PooledBlock(NamedTuple):
    """``KVCacheBlockView`` of one of vLLM's blocks."""

    block: KVCacheBlock
    geometry: Geometry
    groups: GroupIds
    void: Collection[bytes] = ()

    @property
    def block_id(self) -> int:
        """See ``KVCacheBlockView``."""
        return self.block.block_id  # type: ignore[no-any-return]

    @property
    def key(self) -> BlockKey | None:
        """See ``KVCacheBlockView``. vLLM appends the group to the hash in four bytes, kvdisk in
        two.

        None also where vLLM knows the block by a part of its tokens, or by a hash that is void.
        """
        named, tokens = self.block.block_hash, self.block.block_hash_num_tokens
        if named is None or tokens is None:
            return None
        group = self.groups.number_of(get_group_id(named))
        if tokens % self.geometry.groups[group].gpu_block_tokens:
            return None
        key = get_block_hash(named)
        return None if key in self.void else make_block_key(key, group)


class BlockPoolContext:
    """``SchedulerContext`` over vLLM's ``BlockPool``. ``step_blocks``: see there. ``void``: hashes
    of blocks whose content is not known; it grows. The scheduler's thread makes all calls."""

    def __init__(
        self,
        pool: BlockPool,
        geometry: Geometry,
        groups: GroupIds,
        step_blocks: int,
        void: Collection[bytes] = (),
    ) -> None:
        for name in ("blocks", "free_block_queue", "get_cached_block", "enable_caching", "_reuse_watchers"):
            if not hasattr(pool, name):
                raise ConfigError(f"kvdisk needs the engine's block pool, and this one has no {name!r}.")
        self._pool = pool
        if not isinstance(pool._reuse_watchers, _Watchers):
            pool._reuse_watchers = _Watchers(pool._reuse_watchers)
        self._geometry = geometry
        self._groups = groups
        self._void = void
        self.step_blocks = step_blocks
        self._note = self._note_reuse  # one object, to be known again
        self._reused: list[int] = []

    @property
    def caches(self) -> bool:
        """Whether the engine's own prefix cache is on."""
        return bool(self._pool.enable_caching)

    @property
    def block_count(self) -> int:
        """GPU blocks of the pool, the null block included."""
        return len(self._pool.blocks)

    @property
    def free_count(self) -> int:
        """Blocks of the free queue."""
        return int(self._pool.get_num_free_blocks())

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """Return the block with this id."""
        return PooledBlock(self._pool.blocks[block_id], self._geometry, self._groups, self._void)

    def watch(self, block_ids: Sequence[int]) -> None:
        """See ``SchedulerContext``.

        ``BlockPool.unpin_blocks``, vLLM's own way to set watchers, would move free blocks to the
        end of the queue.
        """
        assert min(block_ids, default=1) > 0, "the null block belongs to no request"
        self._pool._reuse_watchers.add(block_ids, self._note)

    def unwatch(self, block_ids: Sequence[int]) -> None:
        """See ``SchedulerContext``."""
        self._pool._reuse_watchers.remove(block_ids, self._note)

    def take_reused(self) -> Sequence[int]:
        """See ``SchedulerContext``."""
        reused, self._reused = self._reused, []
        return reused

    def _note_reuse(self, block: KVCacheBlock) -> None:
        self._reused.append(block.block_id)

    def is_cached(self, key: BlockKey) -> bool:
        """Return whether the prefix cache has a block now."""
        return self._pool.get_cached_block(key[:-GROUP_BYTES], [self._groups.ids[group_of(key)]]) is not None

    def iter_free_blocks(self) -> Iterator[KVCacheBlockView]:
        """See ``SchedulerContext``."""
        for block in self._pool.free_block_queue.iter_blocks_after(None):
            yield PooledBlock(block, self._geometry, self._groups, self._void)


_Watcher = Callable[["KVCacheBlock"], None]


class _CallAll(list[_Watcher]):
    def __call__(self, block: KVCacheBlock) -> None:
        for watcher in self:
            watcher(block)


class _Watchers(dict[int, Any]):
    """A pool's watchers by block, where setting one adds it to those before: ``unpin_blocks`` would
    replace ours."""

    def __setitem__(self, block_id: int, watcher: _Watcher) -> None:
        before = self.setdefault(block_id, watcher)
        if isinstance(before, _CallAll):
            before += [watcher] * (watcher not in before)
        elif before != watcher:
            super().__setitem__(block_id, _CallAll([before, watcher]))

    def add(self, block_ids: Sequence[int], watcher: _Watcher) -> None:
        """Add a watcher to some blocks."""
        if self.keys().isdisjoint(block_ids):
            self.update(dict.fromkeys(block_ids, watcher))
        else:
            for block_id in block_ids:
                self[block_id] = watcher

    def remove(self, block_ids: Sequence[int], watcher: _Watcher) -> None:
        """Forget one watcher of some blocks. It may not be there."""
        found = list(map(self.pop, block_ids, repeat(None)))
        if found.count(watcher) == len(found):
            return
        for block_id, before in zip(block_ids, found, strict=True):
            if before is not None and before is not watcher:
                if isinstance(before, _CallAll) and watcher in before:
                    before.remove(watcher)
                super().__setitem__(block_id, before)
