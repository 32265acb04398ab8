# SPDX-License-Identifier: Apache-2.0
"""The settings that change what a model computes, beside its configuration and its code."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vllm import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FAMILIES = tuple(
    f"VLLM_{family}_"
    for family in (
        *("BUILD", "DOCKER", "IMAGE", "USAGE", "LOG", "DEBUG", "TRACE", "CPU_OMP", "CPU_NUM"),
        *("RAY", "USE_RAY", "DP", "NIXL", "P2P", "EC", "MOONCAKE", "MQ", "LORA", "RUST", "USE_RUST", "TOOL"),
    )
)
_ENDINGS = ("_PORT", "_HOST", "_IP", "_PATH", "_PREFIX", "_TIMEOUT", "_TIMEOUT_S", "_TIMEOUT_SECONDS")
_OTHERS = frozenset(
    f"VLLM_{name}"
    for name in (
        *("KV_CACHE_LAYOUT", "SSM_CONV_STATE_LAYOUT", "PP_LAYER_PARTITION"),  # facts of their own show what they do
        *("TARGET_DEVICE", "MAIN_CUDA_VERSION", "USE_PRECOMPILED", "HAS_FLASHINFER_CUBIN"),  # as it was built
        *("PLUGINS", "CONFIGURE_LOGGING", "GC_DEBUG", "SKIP_P2P_CHECK", "DISABLE_COMPILE_CACHE"),
        *("ALLOW_LONG_MAX_MODEL_LEN", "ALLOW_INSECURE_SERIALIZATION", "ALLOW_RUNTIME_LORA_UPDATING"),
        *("USE_FLASHINFER_SAMPLER", "KV_EVENTS_USE_INT_BLOCK_HASHES", "DISABLE_REQUEST_ID_RANDOMIZATION"),
        *("ENABLE_RESPONSES_API_STORE", "USE_BREAKABLE_CUDAGRAPH", "DISABLE_SHARED_EXPERTS_STREAM"),
    )
)
"""Variables that compute nothing: where processes are and wait for each other, how vLLM was built,
what it logs, what clients may ask for, and what becomes of answers."""
_OF_MEDIA = ("VLLM_MEDIA_CONNECTOR", "VLLM_VIDEO_LOADER_BACKEND", "XHS_VIDEO_JPEG_QUALITY")
"""Variables that say what becomes of images and videos before they are processed. vLLM: they are
none of its compiled code, and the last, of dots3.note, is none of its own."""
_BACKEND = ("attention_config", "backend")
"""It is a fact of its own."""


def settings_that_compute(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return, for the fingerprint, the settings that are not as they are by default and may change
    what is computed; most engines have none.

    Of vLLM's variables these are all that are set and that it takes for its compiled code, but for
    those that are known to compute nothing: one that a version adds counts.
    """
    found: dict[str, Any] = {}
    if names := sorted(name for name in os.environ if _computes(name)):
        factors = envs.compile_factors()
        found |= {name: factors[name] for name in names if name in factors}
    if vllm_config.model_config.multimodal_config is not None:
        found |= {name: os.environ[name] for name in _OF_MEDIA if name in os.environ}
    for part in ("attention_config", "mamba_config", "kernel_config"):
        config = getattr(vllm_config, part)
        plain = type(config)()
        for name in (field.name for field in fields(config)):
            is_warming = part == "kernel_config" and "backend" not in name
            if getattr(config, name) != getattr(plain, name) and not is_warming and (part, name) != _BACKEND:
                found[f"{part}.{name}"] = str(getattr(config, name))
    if more := vllm_config.additional_config:  # of a platform that is a plugin's
        found["additional_config"] = more if isinstance(more, dict) else more.compute_hash()
    return found


def _computes(variable: str) -> bool:
    return (
        variable.startswith("VLLM_")
        and variable in envs.environment_variables
        and variable not in _OTHERS
        and not variable.startswith(_FAMILIES)
        and not variable.endswith(_ENDINGS)
    )
