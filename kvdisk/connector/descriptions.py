# SPDX-License-Identifier: Apache-2.0
"""What of vLLM decides the bytes of a block, as the namespace has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens, resolve_none_hash_seed
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, KVQuantMode, SlidingWindowSpec

from kvdisk.connector.kv_groups import layer_specs, specs_of
from kvdisk.connector.refusals import LAYERLESS_DRAFTERS

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


_PLAIN_SPECS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
_PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TOKEN_MAJOR = ("LBNHC", "BLNHC")
"""The layouts in which all heads of a token are together, whatever blocks the kernels take."""


def group_descriptions(stages: Sequence[Sequence[KVCacheGroupSpec]]) -> list[Any]:
    """Return, for the fingerprint, what decides the bytes of each group's blocks; with a pipeline,
    by stage. ``specs``: of each layer, or one for all of them."""
    described = [[{"layers": list(group.layer_names), "specs": _specs(group)} for group in groups] for groups in stages]
    return described if len(described) > 1 else described[0]


def _specs(group: KVCacheGroupSpec) -> list[str]:
    told = [_described(spec) for spec in layer_specs(group.kv_cache_spec, group.layer_names).values()]
    return told if len(set(told)) > 1 else told[:1]


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
        and all(_is_plain(spec) for groups in stages for group in groups for spec in specs_of(group))
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
