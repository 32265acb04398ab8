# SPDX-License-Identifier: Apache-2.0
"""What kvdisk does not serve behind SGLang: each is refused when the backend is attached, in one
sentence."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kvdisk.errors import ConfigError
from kvdisk.sglang.identity import model_place
from kvdisk.sglang.versions import sglang_version


def refuse_arguments(storage: Any) -> None:
    """Raise ConfigError for a deployment that is not served. ``storage``: SGLang's
    configuration of the backend."""
    version = sglang_version()
    if storage.attn_cp_size > 1 or getattr(storage, "dcp_size", 1) > 1:
        raise ConfigError("kvdisk does not keep the KV of context parallelism behind SGLang.")
    if storage.should_split_heads:
        raise ConfigError("kvdisk keeps pages for one tensor-parallel size: leave out tp_lcm_size.")
    from sglang.srt import runtime_context as context

    try:
        lora, memory, mm = context.get_lora(), context.get_memory(), context.get_mm()
    except ValueError as error:
        raise ConfigError("kvdisk runs in SGLang's scheduler, whose arguments it needs, and there are none.") from error
    if lora.enable_lora:
        # SGLang: an adapter of --lora-paths has the same key after its files have changed
        raise ConfigError("kvdisk does not keep the KV of LoRA adapters behind SGLang: leave out --enable-lora.")
    if memory.hicache_host_memory_mode != "cache":
        raise ConfigError("kvdisk needs --hicache-host-memory-mode cache.")
    if version.startswith("0.5.22") and mm.enable_multimodal is not False and _is_multimodal():
        # SGLang: it names an image by 30 bits there, too few for a store that outlives the server
        raise ConfigError("kvdisk serves models of several media from SGLang 0.5.23 on.")


def _is_multimodal() -> bool:
    from sglang.srt import runtime_context as context
    from sglang.srt.configs.model_config import is_multimodal_model

    model = context.get_model()
    place = model_place(str(model.model_path), model.revision, model.download_dir)
    config = (place.parent if place.is_file() else place) / "config.json"
    try:
        architectures = json.loads(config.read_text()).get("architectures") or []
    except (OSError, ValueError) as error:
        raise ConfigError(f"kvdisk needs the model's configuration, and cannot read {config}.") from error
    return bool(is_multimodal_model(architectures))


def refuse_pool(name: str, pool: Any) -> None:
    """Raise ConfigError for a host pool that is not served. ``name``: SGLang's for it."""
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    served = {
        PoolName.KV: (MHATokenToKVPoolHost, MLATokenToKVPoolHost),
        PoolName.SWA: (MHATokenToKVPoolHost,),
        PoolName.MAMBA: (MambaPoolHost,),
        PoolName.INDEXER: (DSAIndexerPoolHost,),
    }
    if type(pool) not in served.get(name, ()):
        raise ConfigError(
            "kvdisk keeps attention, MLA, sliding windows, recurrent states and sparse attention's indexer behind"
            f" SGLang, and this model has a {type(pool).__name__} for {name}."
        )
    device_pool = getattr(pool, "device_pool", None)
    if getattr(pool, "layer_shard_enabled", False) or getattr(device_pool, "layer_shard_enabled", False):
        raise ConfigError("kvdisk does not keep a cache whose layers are split over ranks.")


def refuse_together(storage: Any, names: Iterable[str]) -> None:
    """Raise ConfigError for host pools that are not served beside each other."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    if storage.is_mla_model and storage.tp_size > 1 and not {PoolName.KV, PoolName.INDEXER}.issuperset(names):
        # SGLang: each rank has its own of these, beside KV and indexer that all share
        raise ConfigError(
            "kvdisk keeps recurrent states and sliding windows beside MLA with one tensor-parallel rank only."
        )
