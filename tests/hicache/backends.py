# SPDX-License-Identifier: Apache-2.0
"""kvdisk behind SGLang's real factory and host pools, without a tree: who tests it says itself
which pages are looked up, stored and loaded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolName
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_only_group
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MambaPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

PAGE_TOKENS = 16
LAYERS, HEADS, HEAD_DIM = 3, 2, 64
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 200_000,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 4096,
}


def be_patient() -> None:
    """Have kvdisk wait as long as a machine may need on which much else runs, where the user says
    nothing."""
    from kvdisk.sglang import hicache

    hicache.IO_DEADLINE_S, hicache.LOOKUP_WAIT_S, hicache.ROOM_WAIT_S = 60.0, 20.0, 60.0
    hicache.CLOSE_S = 60.0


def write_model(folder: Path, weights: int = 1, **config: Any) -> Path:
    """Write what kvdisk reads of a model: a configuration, and weights with this number."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    data = bytes([weights]) * 4096
    header = json.dumps({"w": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return folder


def extra_config(
    store: Path, nvme_bytes: str | int = "256MiB", *, tensors: bool = False, shm: bool = False, **settings: Any
) -> str:
    """Return what a user writes after ``--hicache-storage-backend-extra-config``."""
    return json.dumps(
        {
            "backend_name": "kvdisk",
            "module_path": "kvdisk.sglang",
            "class_name": "HiCache",
            "interface_v1": 0 if tensors else 1,
            "hicache_storage_pass_prefix_keys": True,
            "prefetch_threshold": 1,
            **({"allocator": "shm"} if shm else {}),
            "kvdisk": {"store_dirs": str(store), "nvme_bytes": nvme_bytes, **settings},
        }
    )


def arguments_for(model: Path, extra: str, layout: str = "page_first", **more: Any) -> ServerArgs:
    """Return SGLang's arguments, as a user gives them."""
    settings = {
        "page_size": PAGE_TOKENS,
        "hicache_io_backend": "direct" if layout in ("page_first_direct", "layer_first") else "kernel",
        "hicache_mem_layout": layout,
        "hicache_ratio": 2.0,
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": extra,
        "hicache_storage_prefetch_policy": "wait_complete",
        "served_model_name": "a-model",
        "device": "cpu",
    }
    return ServerArgs(model_path=str(model), **settings | more)


def make_device_pool(pages: int, *, mla: bool, dtype: torch.dtype = torch.bfloat16, page: int = PAGE_TOKENS) -> Any:
    """Return SGLang's pool of a device, which is the CPU."""
    common = {"size": pages * page, "page_size": page, "dtype": dtype, "layer_num": LAYERS, "device": "cpu"}
    if mla:
        return MLATokenToKVPool(**common, kv_lora_rank=96, qk_rope_head_dim=32, enable_memory_saver=False)
    return MHATokenToKVPool(**common, head_num=HEADS, head_dim=HEAD_DIM, enable_memory_saver=False)


def make_dsa_pool(pages: int) -> Any:
    """Return SGLang's pool of sparse attention, whose pages have 64 tokens."""
    sizes = {"kv_lora_rank": 96, "qk_rope_head_dim": 32, "kv_cache_dim": 128, "index_head_dim": 128}
    return DSATokenToKVPool(
        size=pages * 64,
        page_size=64,
        dtype=torch.bfloat16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        **sizes,
    )


def make_pool_beside(name: str, pages: int, kv_pool: Any, device_kv_pool: Any, layout: str) -> Any:
    """Return the host pool that a model has beside its KV: ``"swa"``, ``"indexer"`` or
    ``"mamba"``."""
    if name == PoolName.SWA:
        device_pool = make_device_pool(pages, mla=False)
        return hybrid_pool_assembler.build_kv_host_pool(
            kv_pool=device_pool, page_size=PAGE_TOKENS, use_mla=False, pool_label="swa"
        )
    if name == PoolName.INDEXER:
        from sglang.srt.mem_cache.pool_host.dsa import make_dsa_indexer_pool_decl

        return DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device_kv_pool), kv_pool, pin_memory=False)
    shape = SimpleNamespace(conv=[(64, 3), (16, 3)], temporal=(4, 16, 32))
    dtype = SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32)
    states = SimpleNamespace(shape=shape, dtype=dtype, is_kda=False)
    device_pool = MambaPool(
        size=pages, spec_state_size=0, cache_params=states, mamba_layer_ids=list(range(LAYERS)), device="cpu"
    )
    (pool,) = device_pool.get_device_pool_infos()
    return MambaPoolHost(pool.buffer_info, 2.0, 0, device_capacity=pages, pin_memory=False, layout=layout)


def key_of(number: int) -> str:
    """Return a key as SGLang has them."""
    return hashlib.sha256(f"page {number}".encode()).hexdigest()


class Backend:
    """A storage backend of one rank, attached as SGLang's controller attaches it."""

    def __init__(
        self,
        model: Path,
        store: Path,
        *,
        mla: bool = False,
        layout: str = "page_first",
        tensors: bool = False,
        pages: int = 64,
        rank: tuple[int, int] = (0, 1),
        dtype: torch.dtype = torch.bfloat16,
        page: int = PAGE_TOKENS,
        arguments: dict[str, Any] | None = None,
        storage: dict[str, Any] | None = None,
        kind: str = "dynamic",
        beside: str = "",
        **settings: Any,
    ) -> None:
        """``kind``: SGLang's name of the backend: ``file`` is its own in files, with tensors.
        ``beside``: see ``make_pool_beside``; sparse attention comes with its indexer."""
        extra = extra_config(store, tensors=tensors, **settings)
        more = {"page_size": page, "tp_size": rank[1], **(arguments or {})}
        set_global_server_args_for_scheduler(arguments_for(model, extra, layout, **more))
        is_sparse = beside == PoolName.INDEXER
        device_pool = make_dsa_pool(pages) if is_sparse else make_device_pool(pages, mla=mla, dtype=dtype, page=page)
        layers = {layer: layer for layer in range(LAYERS)}
        self.group = build_kv_only_group(page_size=page, kv_pool=device_pool, full_layer_mapping=layers, use_mla=mla)
        self.pool = self.group.anchor_entry.host_pool
        self.config = HiCacheStorageConfig(
            tp_rank=rank[0],
            tp_size=rank[1],
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=mla,
            enable_storage_metrics=True,
            is_page_first_layout=layout == "page_first",
            model_name="a-model",
            extra_config=json.loads(extra) | {"file_storage_path": str(store)},
            **(storage or {}),
        )
        self.tensors, self.page = tensors, page
        self.storage: Any = StorageBackendFactory.create_backend(kind, self.config, self.pool)
        self.storage.register_mem_pool_host(self.pool)
        for entry in self.group.entries:
            self.storage.register_mem_host_pool_v2(entry.host_pool, entry.name)
        if beside:
            self.beside = make_pool_beside(beside, pages, self.pool, device_pool, layout)
            self.storage.register_mem_host_pool_v2(self.beside, PoolName(beside))
        if hasattr(HiCacheStorage, "on_host_pools_registered"):  # SGLang: 0.5.22 does not say it
            self.storage.on_host_pools_registered()

    def indices(self, pages: range) -> torch.Tensor:
        """Return the host indices of pages of the pool."""
        return torch.arange(pages.start * self.page, pages.stop * self.page)

    def fill(self, pages: range, seed: int = 0) -> None:
        """Write other bytes into each page."""
        for page in pages:
            data = np.random.default_rng([seed, page]).integers(0, 256, len(self.bytes_of(page)), np.uint8)
            flat = torch.from_numpy(data).view(self.pool.dtype)
            self.pool.set_from_flat_data_page(page * self.page, flat)

    def bytes_of(self, page: int) -> bytes:
        return bytes(self.pool.get_data_page(page * self.page).contiguous().view(torch.uint8).numpy())

    def store(self, keys: list[str], first: int = 0, prefix: list[str] | None = None) -> bool:
        """Store pages from the first on, as SGLang's controller does; return whether it would go
        on."""
        pages = range(first, first + len(keys))
        if self.tensors:
            return bool(self.storage.batch_set(keys, [self.pool.get_data_page(page * self.page) for page in pages]))
        extra = HiCacheStorageExtraInfo(prefix_keys=prefix)
        return all(self.storage.batch_set_v1(keys, self.indices(pages), extra))

    def load(self, keys: list[str], first: int = 0) -> list[bool]:
        """Load pages into those from the first on, likewise; return which came."""
        pages = range(first, first + len(keys))
        if not self.tensors:
            return list(self.storage.batch_get_v1(keys, self.indices(pages), HiCacheStorageExtraInfo()))
        found = self.storage.batch_get(keys, [self.pool.get_dummy_flat_data_page() for _ in keys])
        for page, data in zip(pages, found, strict=True):
            if data is not None:
                self.pool.set_from_flat_data_page(page * self.page, data)
        return [data is not None for data in found]

    def exists(self, keys: list[str]) -> int:
        return int(self.storage.batch_exists(keys, HiCacheStorageExtraInfo()))

    def close(self) -> None:
        if hasattr(self.storage, "close"):
            self.storage.close()


__all__ = ["Backend", "PoolName", "key_of", "write_model"]
