# SPDX-License-Identifier: Apache-2.0
"""The sizes of an engine's blocks: ``Geometry`` out of vLLM's configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvdisk.assembly import unit_choice
from kvdisk.connector.deployment import hosts_of, ranks_of_stage
from kvdisk.connector.kv_groups import (
    REACHES,
    element_bytes,
    has_drafter,
    has_other_kv_of_answers,
    keeps_states,
    payload_bytes,
    specs_of,
)
from kvdisk.connector.layout import UNQUANTISED, layers_differ
from kvdisk.errors import ConfigError
from kvdisk.geometry import OWN_BLOCKS, Geometry, GroupGeometry, UnitChoice

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from kvdisk.config import Config


_LEAST_BLOCK_TOKENS = 16
"""The least tokens of a block, where the user has not set them and vLLM has not chosen yet."""

_LAYERS_WITHOUT = ("block_configs", "num_kv_shared_layers", "index_topk", "hybrid_layer_pattern")
"""Fields of a model's configuration that mean layers without KV of their own, or with another
KV."""

_STATE_BLOCKS = 16
"""Blocks of a prompt for each recurrent state that there is room for, where vLLM keeps fewer
states."""


def least_geometry(vllm_config: VllmConfig) -> Geometry | None:
    """Return sizes of blocks that are not above the model's, before the model is built. None where
    its configuration does not determine them: layers that differ, or keep another state."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    config = None if model is None else model.hf_text_config
    if config is None or model.is_hybrid or model.is_attention_free or model.is_encoder_decoder:
        return None
    if layers_differ(config) or any(getattr(config, name, None) for name in _LAYERS_WITHOUT):
        return None
    if cache.cache_dtype not in UNQUANTISED or (getattr(config, "v_head_dim", None) and not model.use_mla):
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


def geometry_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    stages: Sequence[Sequence[KVCacheGroupSpec]] = (),
    units: UnitChoice = OWN_BLOCKS,
) -> Geometry:
    """Return the sizes of this engine's blocks, each of one or several of vLLM's blocks.

    ``stages``: the groups of each stage of a pipeline. A block has the same size on each of them,
    that of the stage which has most of its bytes. Empty: the groups of the configuration (see
    ``sizes_are_certain``). Where a worker has no layers of a group, the group's blocks have no
    bytes. ``units``: what decides how many of vLLM's blocks are one; by default one is. Raises
    ConfigError where no group can have units of the number that is set.
    """
    groups = []
    parallel = vllm_config.parallel_config
    for index, group in enumerate(kv_cache_config.prefix_cacheable_groups):
        reaches = {REACHES[type(spec)](spec) for spec in specs_of(group)}
        if len(reaches) > 1:
            raise ConfigError("kvdisk does not support KV-cache groups whose layers have different windows.")
        window, chunk = reaches.pop()
        # With DCP a block's tokens are divided among so many ranks.
        block_tokens = resolve_dcp_kv_block_size(group.kv_cache_spec, parallel.decode_context_parallel_size)
        groups.append(
            GroupGeometry(
                index,
                block_tokens,
                max(payload_bytes(stage[index]) for stage in stages or [kv_cache_config.prefix_cacheable_groups]),
                window,
                _volatile_tokens(vllm_config) if has_drafter(vllm_config, kv_cache_config, group) else 0,
                chunk,
                has_other_kv_of_answers(vllm_config, group),
                _state_tokens(kv_cache_config, block_tokens) if keeps_states(group) else None,
                element_bytes=element_bytes([group]),
            )
        )
    hash_tokens = kv_cache_config.hash_block_size or min(group.block_tokens for group in groups)
    ranks = ranks_of_stage(vllm_config) * parallel.pipeline_parallel_size
    replicated = ranks > 1 and ranks_are_alike(vllm_config, kv_cache_config)
    hosts = hosts_of(vllm_config, replicated=replicated)
    return units.of(Geometry(tuple(groups), ranks, hash_tokens, replicated, hosts))


def _volatile_tokens(vllm_config: VllmConfig) -> int:
    """Return how many tokens ahead a drafter's KV looks: one, or one for each module where MTP has
    several."""
    return max(1, int(vllm_config.num_prefill_lookahead_tokens))


def _state_tokens(kv_cache_config: KVCacheConfig, block_tokens: int) -> int:
    """Return how many tokens of a prompt there are for each recurrent state that vLLM keeps: it
    keeps all (None), one in each interval, or, with 0, those at the ends of prompts."""
    interval = kv_cache_config.prefix_cache_retention_interval
    blocks = 1 if interval is None else interval // block_tokens or _STATE_BLOCKS
    return block_tokens * min(blocks, _STATE_BLOCKS)


def ranks_are_alike(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Return whether each rank has the same bytes of a block, however many ranks there are: that is
    so where all KV is MLA's latent KV, which has no heads to divide, and each rank has all layers
    and all tokens."""
    parallel = vllm_config.parallel_config
    return parallel.pipeline_parallel_size == parallel.decode_context_parallel_size == 1 and all(
        type(spec) is MLAAttentionSpec for group in kv_cache_config.prefix_cacheable_groups for spec in specs_of(group)
    )


def units_of(config: Config, vllm_config: VllmConfig) -> UnitChoice:
    """Return what decides how many of vLLM's blocks are one."""
    model = vllm_config.model_config
    return unit_choice(config, 0 if model is None else model.max_model_len)


def keeps_parts_of_states(kv_cache_config: KVCacheConfig, geometry: Geometry) -> bool:
    """Return whether vLLM keeps recurrent states within its steps, after a part of a block. Such a
    state has another hash than a block, and is not stored."""
    return any(
        getattr(spec, "num_prefill_checkpoint_blocks", 0) and geometry.hash_tokens < spec.block_size
        for group in kv_cache_config.prefix_cacheable_groups
        for spec in specs_of(group)
    )


def step_blocks_of(vllm_config: VllmConfig, geometry: Geometry) -> int:
    """Return how many GPU blocks one step can take: enough for all its tokens, and one more for
    each request and group."""
    limits = vllm_config.scheduler_config
    return sum(
        -(-limits.max_num_batched_tokens // group.gpu_block_tokens) + limits.max_num_seqs for group in geometry.groups
    )
