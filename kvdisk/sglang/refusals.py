# SPDX-License-Identifier: Apache-2.0
"""What kvdisk does not serve behind SGLang: each is refused when the backend is attached, in one
sentence."""

from __future__ import annotations

import json
from typing import Any

from kvdisk.errors import ConfigError
from kvdisk.sglang.identity import model_folder
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
    config = model_folder(str(model.model_path), model.revision, model.download_dir) / "config.json"
    try:
        architectures = json.loads(config.read_text()).get("architectures") or []
    except (OSError, ValueError) as error:
        raise ConfigError(f"kvdisk needs the model's configuration, and cannot read {config}.") from error
    return bool(is_multimodal_model(architectures))


def refuse_pool(pool: Any) -> None:
    """Raise ConfigError for a host pool that is not served."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    if type(pool) not in (MHATokenToKVPoolHost, MLATokenToKVPoolHost):
        raise ConfigError(
            f"kvdisk keeps plain attention and MLA behind SGLang, and this model has a {type(pool).__name__}."
        )
    device_pool = getattr(pool, "device_pool", None)
    if getattr(pool, "layer_shard_enabled", False) or getattr(device_pool, "layer_shard_enabled", False):
        raise ConfigError("kvdisk does not keep a cache whose layers are split over ranks.")


def stores_of(storage: Any, *, is_remote: bool) -> int:
    """Return how many ranks of this host may write to the drive, each to a store of its own.
    ``is_remote``: a rank that only reads writes what it got from another host."""
    from sglang.srt import runtime_context as context

    arguments = context.get_server_args()
    # SGLang: rank 0 of a group writes for all with MLA
    in_group = 1 if storage.is_mla_model and not is_remote else storage.tp_size
    everywhere: int = in_group * storage.pp_size * max(1, int(getattr(arguments, "dp_size", 1) or 1))
    return -(-everywhere // max(1, int(getattr(arguments, "nnodes", 1) or 1)))
