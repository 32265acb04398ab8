# SPDX-License-Identifier: Apache-2.0
"""What of vLLM kvdisk does not serve: each in one sentence, at the start; and which requests it
leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

from kvdisk.connector.deployment import sleeps
from kvdisk.connector.kv_groups import REACHES, has_drafter, has_other_kv_of_answers, specs_of
from kvdisk.connector.model_weights import has_engram
from kvdisk.connector.versions import refuse_version
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_WINDOWS = (SlidingWindowSpec, ChunkedLocalAttentionSpec)

_SLEEP_HOOK = "unregister_kv_caches"
"""What vLLM 0.33 and later call before they unmap the KV cache."""

SUPPORTED_DRAFTERS = frozenset({"ngram", "ngram_gpu", "suffix", "eagle", "eagle3", "mtp"})
"""The methods of speculative decoding. Drafters with layers of their own have them in KV-cache
groups that vLLM marks, or among the model's own."""
LAYERLESS_DRAFTERS = frozenset({"ngram", "ngram_gpu", "suffix"})

STATE_MODE = "align"
"""The only mode of recurrent states in which vLLM keeps each state at a block's end, and hands it
off."""


def refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError, in one sentence that names it, for the first thing that kvdisk does not
    support."""
    refuse_deployment(vllm_config, vllm_config.kv_transfer_config.kv_role)
    refuse_more_than_kv(vllm_config, kv_cache_config)
    refused = next(_unsupported_groups(vllm_config, kv_cache_config), None)
    if refused is not None:
        raise ConfigError(f"kvdisk does not support {refused}.")


def refuse_more_than_kv(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError where the KV of a prompt's tokens is not all that is needed to go on behind
    them, or depends on later ones. vLLM: of the latter its own prefix cache is off."""
    if any(getattr(spec, "non_causal", False) for group in kv_cache_config.kv_cache_groups for spec in specs_of(group)):
        raise ConfigError("kvdisk does not support attention that reads later tokens of a prompt, as of a prefix LM.")
    model = vllm_config.model_config
    if (media := model.multimodal_config) is not None and media.is_multimodal_pruning_enabled() and model.uses_mrope:
        # vLLM: its positions are those of the whole video, until its encoder has said what is left.
        raise ConfigError(
            "kvdisk does not support video_pruning_rate with this model: vLLM learns the positions of tokens behind a "
            "video only by computing it."
        )
    if has_engram(model) and not vllm_config.use_v2_model_runner:
        # vLLM: that one has the ids of generated tokens in a cache by slots of the KV cache.
        raise ConfigError(
            "kvdisk does not support Engram with vLLM's model runner V1, which knows no generated tokens of KV that is "
            "loaded: set VLLM_USE_V2_MODEL_RUNNER=1."
        )


def refuse_answers(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError where vLLM's own offloading stores generated tokens, and their KV is not
    that of a prompt's."""
    transfer = vllm_config.kv_transfer_config
    stores_them = transfer is not None and not transfer.get_from_extra_config("offload_prompt_only", True)
    if stores_them and any(has_other_kv_of_answers(vllm_config, group) for group in kv_cache_config.kv_cache_groups):
        raise ConfigError(
            "The tier 'kvdisk' needs offload_prompt_only for a model whose generated tokens have other KV than those "
            "of a prompt: leave it out."
        )


def refuse_windows_in_chunks(blocks_per_chunk: int, kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError where vLLM's own offloading puts several blocks of a window into a chunk.
    vLLM: a block that the window has left may be another's before its chunk is full, the chunk is
    stored without it, and what comes behind it moves up into its place."""
    specs = (spec for group in kv_cache_config.kv_cache_groups for spec in specs_of(group))
    if blocks_per_chunk > 1 and any(isinstance(spec, _WINDOWS) for spec in specs):
        raise ConfigError(
            "The tier 'kvdisk' does not support block_size for a model with sliding windows or chunked attention, of "
            "which vLLM then stores some blocks in the place of others: leave it out."
        )


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
    if getattr(getattr(vllm_config, "aux_output_config", None), "enabled", False):
        yield "enable_return_routed_experts: vLLM knows no experts of KV that is loaded, and ends at the first hit"
    if model.pooler_config is not None and not model.is_prefix_caching_supported:
        yield "models whose pooling needs each prompt computed whole, as of all its tokens (MEAN, CLS, STEP)"
    if sleeps(vllm_config) and not hasattr(KVConnectorBase_V1, _SLEEP_HOOK):
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
        for spec in specs_of(group):
            if type(spec) not in REACHES:
                yield f"KV-cache groups of the kind {type(spec).__name__}"
                continue
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != STATE_MODE:
                mode = spec.mamba_cache_mode
                yield (
                    f"recurrent state in the cache mode {mode!r}; set mamba_cache_mode to {STATE_MODE!r}, with vLLM's "
                    "prefix caching on"
                )
            if has_drafter(vllm_config, kv_cache_config, group) and REACHES[type(spec)](spec) != (None, None):
                yield "drafters with sliding windows"


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


def hides_media(request: Request) -> bool:
    """Return whether the hashes of a request's blocks may leave out media that they hold.

    vLLM gives a block the first of two inputs that lie in it together, as a video's sound among its
    frames (``use_audio_in_video``): prompts with other sound would have the same hashes.
    """
    end = 0
    for feature in request.mm_features:
        if feature.mm_position.offset < end:
            return True
        end = feature.mm_position.offset + feature.mm_position.length
    return False
