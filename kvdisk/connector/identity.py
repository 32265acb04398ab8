# SPDX-License-Identifier: Apache-2.0
"""The namespace fingerprint: everything that decides what the bytes of a block mean.

Two engines share stored blocks exactly when their fingerprints are equal, so whatever could change
a byte of KV for the same block hash is in it: a doubt costs a miss, an omission a wrong token.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.platforms import current_platform

from kvdisk.connector.deployment import deployment_of, others_place_workers
from kvdisk.connector.descriptions import group_descriptions, hash_chain, is_plain, model_module
from kvdisk.connector.model_code import code_digest, foreign_code, refuse_code_without_file
from kvdisk.connector.model_files import WITHOUT, drafter_load
from kvdisk.connector.model_settings import settings_that_compute
from kvdisk.connector.model_weights import WeightsDigest, how_digest, loaded_of, reads_more, weights_digest
from kvdisk.connector.refusals import refuse_answers, refuse_more_than_kv, refuse_windows_in_chunks
from kvdisk.connector.sizes import ranks_are_alike
from kvdisk.connector.versions import vllm_minor_version
from kvdisk.errors import ConfigError
from kvdisk.geometry import FORMAT_VERSION

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.kv_offload.config import OffloadingConfig

_LONGEST_FACT = 80
_UNSTABLE_HASHES = ("xxhash", "builtin")
_NO_IDENTITY = frozenset(
    {"dummy", "ipc_cache", "modelexpress", "npcache", "runai_streamer", "runai_streamer_sharded", "tensorizer"}
)
"""Formats of weights that are not those of the files on this machine, or need not be: a daemon or
another host may have loaded others from the same path, and vLLM's own copy (npcache) stays as it
was when the files change."""
_MEDIA_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
"""Settings of an engine that decide what an image, a sound or a video is to the model. vLLM: in the
hashes of blocks are only what is in the image, and what its request says of it."""
_PROCESSED_BY_LENGTH = ("Dots3Note", "NemotronH_")
"""How the architectures begin whose images and videos have a size that goes by the longest context,
or sounds only where the limits allow them. Text models of the second are ``NemotronHFor...``."""
_TUNING, _MOST_UNTUNED = "attn_temperature_tuning", 32_768
"""Of Llama 4. vLLM: it is on for contexts that are longer, unless a setting of generation says
otherwise."""


def fingerprint_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    stages: Sequence[Sequence[KVCacheGroupSpec]] = (),
    units: Sequence[int] = (),
    *,
    any_ranks: bool = False,
    digest: WeightsDigest = weights_digest,
    name: str | None = None,
) -> tuple[bytes, dict[str, Any]]:
    """Return the fingerprint (32 bytes) and a description for people and the inspector.

    ``stages``: the KV-cache groups of each stage of a pipeline; none: the configuration's own.
    ``units``: of each group how many of vLLM's blocks are stored as one; none: one.
    ``any_ranks``: stored bytes are laid out alike for any tensor-parallel size. ``name``: the user
    vouches that it names weights and code; None: they are found.

    Raises ConfigError where the weights have no identity (dummy, streamed), where the hashes of
    blocks are not the same in the next process, or mean something else there: then nothing on NVMe
    could be found, or trusted.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    algorithm = str(cache.prefix_caching_hash_algo)
    if name is None:
        refuse_nameless(vllm_config)
    final_config = model.hf_config.to_dict()
    final_config.pop("_name_or_path", None)
    stages = stages or [kv_cache_config.prefix_cacheable_groups]
    module = model_module(vllm_config) if is_plain(vllm_config, kv_cache_config, stages) else None
    code = None if module is None else code_digest(Path(vllm.__file__).parents[1], module)
    if code is not None:
        final_config.pop("transformers_version", None)  # it computes nothing of such a model
    any_ranks = any_ranks or ranks_are_alike(vllm_config, kv_cache_config)
    tensor_parallel = None if any_ranks else parallel.tensor_parallel_size
    facts: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "vllm": vllm_minor_version() if code is None else None,
        "code": code,
        "model_config": final_config,
        "quantization": model.quantization,
        "dtype": str(model.dtype),
        "kv_dtype": cache.cache_dtype,
        "groups": group_descriptions(stages),
        "kv_layout": kv_cache_config.kv_cache_layout,
        "hash_tokens": kv_cache_config.hash_block_size,
        "tensor_parallel": tensor_parallel,
        "hash": [algorithm, os.environ.get("PYTHONHASHSEED")],
        "hash_chain": hash_chain(algorithm),
        "platform": platform_facts(vllm_config),
    } | ({"units": list(units)} if any(count > 1 for count in units) else {})
    facts |= _facts_of_longest(model, final_config)
    facts |= _model_facts(vllm_config, is_vouched=name is not None) | settings_that_compute(vllm_config)
    if model.architecture not in (final_config.get("architectures") or ()):
        facts["architecture"] = model.architecture  # of another implementation than the model's own
    facts |= _context_facts(vllm_config, kv_cache_config)
    if kv_cache_config.has_mamba_layers:
        facts["conv_state"] = get_conv_state_layout()
    facts["weights"] = digest(model, vllm_config.load_config) if name is None else {"name": name}
    facts["drafter"] = _drafter_facts(vllm_config, digest) if name is None else None  # last: it takes long
    text = json.dumps(facts, sort_keys=True, default=str)
    description = {
        "model": str(model.model),
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "tensor_parallel": tensor_parallel,
        "facts": _named_facts(facts),
    }
    return hashlib.sha256(text.encode()).digest(), description


def _facts_of_longest(model: ModelConfig, final_config: dict[str, Any]) -> dict[str, Any]:
    """Return what depends on the longest context that the model was built for, where something
    does."""
    # vLLM: where it is to choose the length (-1), it builds the model for what the configuration
    # allows, and then sets what the memory has room for.
    longest = None if model.original_max_model_len == -1 else model.max_model_len
    facts: dict[str, Any] = {}
    if any(kind in json.dumps(final_config, default=str) for kind in ("longrope", "dynamic")):
        facts["max_model_len"] = longest  # of rotary embeddings
    if hasattr(model.hf_text_config, _TUNING):
        # vLLM: the workers of Llama 4 go by this, and not by the model's configuration.
        asked = model.try_get_generation_config() | model.override_generation_config
        facts["tuning"] = asked.get(_TUNING, None if longest is None else longest > _MOST_UNTUNED)
    return facts


def _model_facts(vllm_config: VllmConfig, *, is_vouched: bool) -> dict[str, Any]:
    """Return what says how a model is computed, where there is something to say. ``is_vouched``:
    its files need not be there."""
    model = vllm_config.model_config
    settings = ("quantization_config", "model_class_overrides")  # which layers, and whose code
    facts: dict[str, Any] = {name: repr(value) for name in settings if (value := getattr(model, name, None))}
    if skipped := vllm_config.cache_config.kv_cache_dtype_skip_layers:
        facts["kv_dtype_not_of"] = sorted(skipped)  # vLLM: its scheduler knows only a group's first layer
    if file := getattr(model.hf_config, "quantization_config_file", None):  # vLLM: one of ``--hf-overrides``
        facts["quantization_config_file"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    if not is_vouched and (loaded := loaded_of(model, vllm_config.load_config)):
        facts["loaded"] = loaded
    if (media := model.multimodal_config) is not None:
        facts["media"] = {name: getattr(media, name, None) for name in _MEDIA_SETTINGS}
        if scales := facts["media"]["mm_encoder_fp8_scale_path"]:  # vLLM writes this file, too
            facts["media"]["scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
        if model.architecture.startswith(_PROCESSED_BY_LENGTH):
            facts["media"]["limits"] = [model.max_model_len, repr(media.limit_per_prompt)]
    if reads_more(model):
        how = how_digest(model, vllm_config.load_config, is_vouched=is_vouched)
        facts["files"] = [how, str(model.tokenizer_mode)]
    return facts | foreign_code(vllm_config, is_vouched=is_vouched)


def _context_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """Return which tokens of a block a rank has, where it has not all."""
    parallel = vllm_config.parallel_config
    sizes = [parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size]
    if sizes == [1, 1]:
        return {}
    # vLLM: another option, or NIXL, changes that, in the workers alone.
    vllm_config.adjust_dcp_kv_cache_interleave_size(kv_cache_config)
    return {"context_parallel": [*sizes, parallel.cp_kv_cache_interleave_size]}


def fingerprint_of_rows(
    config: OffloadingConfig,
    row_bytes: int,
    whose: tuple[VllmConfig, KVCacheConfig] | None,
    name: str | None,
    digest: WeightsDigest = weights_digest,
) -> tuple[bytes, dict[str, Any]]:
    """The same of rows of vLLM's own offloading: the bytes of all workers for a chunk of a group,
    as this version of vLLM lays them out. Where all workers have one copy of MLA's KV, and where
    vLLM vouches for its canonical layout, any tensor-parallel size finds what another has stored.

    ``whose``: the engine's configuration; None: it is not known. ``name``: the user vouches that it
    names weights, revision and adapters; None: they are found, or refused. ``digest``: see
    ``fingerprint_of``. Raises ConfigError.
    """
    parallel = config.parallel
    is_canonical = config.canonical_layout and parallel.is_parallelism_agnostic
    any_ranks = config.replicated_layout or is_canonical
    sizes = [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size]
    facts: dict[str, Any] = {
        "door": "offloading",
        "row_vllm": vllm_minor_version(),
        "row_bytes": [row_bytes, None if is_canonical else config.worker_kv_bytes_per_block],
        "row_dtype": config.model.dtype,
        "row_groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "row_tokens": [config.cache.tokens_per_hash, config.cache.blocks_per_chunk],
        "row_layout": config.kv_cache_layout,
        "row_format": canonical_format_id(config.kv_cache_layout) if config.canonical_layout else None,
        "row_copies": 1 if any_ranks else parallel.world_size,
        "row_parallel": [1] * len(sizes) if any_ranks else sizes,
        "row_stages": envs.VLLM_PP_LAYER_PARTITION,
    }
    if name is not None:
        facts |= {"name": name, "model": config.model.name, "seed": os.environ.get("PYTHONHASHSEED")}
    if whose is None and name is None:
        raise ConfigError(
            "kvdisk cannot see from here which weights the model has: set namespace to a text that names model, "
            "revision and quantization."
        )
    if whose is None:
        facts["platform"] = [current_platform.device_name, platform.machine()]
        fingerprint, description = b"", {"model": config.model.name, "kv_dtype": config.model.dtype, "facts": {}}
    else:
        refuse_other_machines(whose[0])
        refuse_more_than_kv(*whose)
        refuse_answers(*whose)
        refuse_windows_in_chunks(config.cache.blocks_per_chunk, whose[1])
        if name is None:
            refuse_nameless_rows(whose[0])
        else:
            refuse_unstable(whose[0])
        with _vouched():
            fingerprint, description = fingerprint_of(*whose, any_ranks=any_ranks, digest=digest, name=name)
        facts["runner"] = bool(getattr(whose[0], "use_v2_model_runner", False))
    text = json.dumps(facts, sort_keys=True, default=str)
    description["door"] = facts["door"]
    if whose is not None:
        # Not in the fingerprint: ``kvdisk why`` hashes prompts with it.
        facts["hash"] = [whose[0].cache_config.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED")]
    description["facts"] |= _named_facts({"model_config": {}} | facts)
    return hashlib.sha256(fingerprint + text.encode()).digest(), description


def refuse_nameless_rows(vllm_config: VllmConfig) -> None:
    """As ``refuse_nameless``, where a name would do; also where hashes of blocks name LoRA
    adapters, which may change under their names."""
    with _vouched():
        refuse_nameless(vllm_config)
    if vllm_config.lora_config is not None:
        raise ConfigError(
            "vLLM's hashes of blocks have an adapter's name, and not what it holds: set the tier's namespace to a "
            "text that you change when an adapter does, or use KVDiskConnector."
        )


@contextmanager
def _vouched() -> Iterator[None]:
    """Say of weights that cannot be told what helps a tier."""
    try:
        yield
    except ConfigError as error:
        instead = "set the tier's namespace to a text that names model and revision"
        raise ConfigError(str(error).replace(WITHOUT, instead)) from None


def refuse_nameless(vllm_config: VllmConfig) -> None:
    """Raise ConfigError where weights or code have no identity, and for all that
    ``refuse_unstable`` does so."""
    refuse_unstable(vllm_config)
    refuse_code_without_file(vllm_config)
    load_format = str(vllm_config.load_config.load_format)
    if load_format in _NO_IDENTITY:
        raise ConfigError(
            f"The NVMe tier needs weights that come from files, and load_format is {load_format!r}: {WITHOUT}."
        )


def refuse_unstable(vllm_config: VllmConfig) -> None:
    """Raise ConfigError where hashes of blocks are not the same in the next process, or mean
    something else there."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith(_UNSTABLE_HASHES):
        raise ConfigError(
            f"The NVMe tier needs block hashes that are the same in every process, and {algorithm} is not: set "
            "prefix_caching_hash_algo to sha256."
        )
    cache, media = vllm_config.cache_config, vllm_config.model_config.multimodal_config
    if media is not None and not cache.enable_prefix_caching and getattr(media, "mm_processor_cache_gb", None) == 0:
        # vLLM: with both caches off it hashes no image, but counts them, in each process from 1.
        raise ConfigError(
            "The NVMe tier needs images that are known by their content, and without enable_prefix_caching and with "
            "mm_processor_cache_gb 0 vLLM only counts them: set one of the two."
        )


def refuse_other_machines(vllm_config: VllmConfig) -> None:
    """Raise ConfigError where rows of vLLM's own offloading are not all in the memory of one
    machine."""
    needs, parallel = "all workers of an engine on one machine, whose memory it reads", vllm_config.parallel_config
    if others_place_workers(vllm_config):
        raise ConfigError(
            f"The tier 'kvdisk' needs {needs}, and with distributed_executor_backend "
            f"{parallel.distributed_executor_backend!r} and data_parallel_backend {parallel.data_parallel_backend!r} "
            "nobody knows where they will be: set both to 'mp', or use KVDiskConnector."
        )
    if deployment_of(vllm_config).hosts > 1:
        raise ConfigError(f"The tier 'kvdisk' needs {needs}: use KVDiskConnector.")


def _named_facts(facts: dict[str, Any]) -> dict[str, str]:
    """Return each fact as JSON text, or a digest of a long one, for ``kvdisk why``, which says in
    what two namespaces differ."""
    parts = {f"model_config.{name}": value for name, value in facts["model_config"].items()} | facts
    texts = {name: json.dumps(value, sort_keys=True, default=str) for name, value in parts.items()}
    del texts["model_config"]
    return {
        name: text if len(text) <= _LONGEST_FACT else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"
        for name, text in texts.items()
    }


def platform_facts(vllm_config: VllmConfig) -> list[str]:
    """Return what chooses the attention kernel, and with it the order of bytes within a block."""
    facts = [current_platform.device_name, platform.machine(), str(vllm_config.attention_config.backend)]
    if current_platform.is_cpu():
        # vLLM's CPU attention packs keys for the instruction set that it finds.
        facts.append(",".join(sorted(flag for flag in _cpu_flags() if flag.startswith(("avx", "amx", "asimd", "sve")))))
    else:
        facts.append(str(current_platform.get_device_capability()))
    return facts


def _cpu_flags() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError as error:
        raise ConfigError(
            f"kvdisk cannot read the processor's features, on which KV depends: /proc/cpuinfo: {error.strerror}."
        ) from error
    for line in lines:
        if line.startswith(("flags", "Features")):
            return line.split(":", 1)[1].split()
    return []


def _drafter_facts(vllm_config: VllmConfig, digest: WeightsDigest) -> list[str] | None:
    """Return what decides the KV of a drafter's layers, where there are any."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return None
    drafter = speculative.draft_model_config
    return [speculative.method, str(drafter.quantization), digest(drafter, drafter_load(vllm_config))]
