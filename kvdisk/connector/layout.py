# SPDX-License-Identifier: Apache-2.0
"""How the bytes of a block lie in a worker's KV tensors: the layout to ask for, and views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import group_kernel_blocks

from kvdisk.connector.callers import asked_by_another
from kvdisk.connector.kv_groups import payload_bytes
from kvdisk.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


_WHOLE_BLOCKS = (16, 32, 64)
"""Block sizes in tokens that no attention kernel for CUDA takes in pieces, if all layers are
alike."""
UNQUANTISED = ("auto", "float16", "bfloat16")
_OTHER_LAYERS = ("sliding_window", "global_head_dim", "attention_chunk_size")
"""Fields of a model's configuration that mean, or may mean, layers of another kind."""


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
        or cache.cache_dtype not in UNQUANTISED
        or layers_differ(model.hf_text_config)
        or getattr(cache, "kv_cache_dtype_skip_layers", None)
        or getattr(vllm_config.attention_config, "hisparse_config", None) is not None
        or (getattr(cache, "user_specified_block_size", True) and cache.block_size not in _WHOLE_BLOCKS)
        or asked_by_another()
    ):
        return None
    capability = current_platform.get_device_capability()
    # vLLM: FlashInfer, which it prefers there, reads only blocks whose heads are outermost.
    return "BLHNC" if capability is not None and capability.major == 10 else "BLNHC"


def layers_differ(config: Any) -> bool:
    """Return whether a model has layers of several kinds, or may have."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return len(kinds) > 1 or any(getattr(config, name, None) for name in _OTHER_LAYERS)


def layer_blocks(kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return, for each group, a worker's layers as uint8 views of shape (num_blocks, layer bytes)
    on vLLM's own memory.

    Raises ConfigError where a layer's block is not one contiguous range of bytes.
    """
    groups = []
    for group in kv_cache_config.prefix_cacheable_groups:
        views = [_block_view(name, kv_caches[name], kv_cache_config.num_blocks) for name in group.layer_names]
        total, expected = sum(view.shape[1] for view in views), payload_bytes(group)
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
