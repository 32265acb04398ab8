# SPDX-License-Identifier: Apache-2.0
"""SGLang's real caches of one rank without a model: device pool, host pool, radix tree, controller
and its threads, on the CPU.

The KV of a token is a function of the weights' number, the tokens up to it, layer and part. So all
that a load has put into the device pool is compared, byte by byte.
"""

from __future__ import annotations

import atexit
import time
import zlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import set_global_server_args_for_scheduler

from hicache.backends import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    PAGE_TOKENS,
    arguments_for,
    extra_config,
    make_device_pool,
    write_model,
)

WAIT_S = 60.0
WINDOW_TOKENS = 3 * PAGE_TOKENS


def kv_of(tokens: list[int], weights: int, layer: int, part: int, row_bytes: int) -> np.ndarray:
    """Return the bytes of each token's row in a layer, by all tokens up to it."""
    seeds, seen = np.empty(len(tokens), np.int64), 0
    for at, token in enumerate(tokens):
        seen = zlib.crc32(token.to_bytes(8, "little"), seen)
        seeds[at] = zlib.crc32(bytes((weights, layer, part)), seen)
    steps = np.arange(row_bytes, dtype=np.int64)
    return ((seeds[:, None] // 7 + steps * (1 + seeds[:, None] % 251)) % 256).astype(np.uint8)


class Tree:
    """SGLang's caches in one rank, with storage. ``weights``: the number that KV is computed with.
    ``group``: the ranks' process group; None: one rank."""

    def __init__(
        self,
        model: Path,
        extra: str,
        *,
        mla: bool = False,
        layout: str = "page_first",
        pages: int = 64,
        weights: int = 1,
        rank: tuple[int, int] = (0, 1),
        group: Any = None,
        backend: str = "dynamic",
        **arguments: Any,
    ) -> None:
        self.weights, self.group, self.rank = weights, group, rank
        named = {"hicache_storage_backend": backend, "tp_size": rank[1]}
        self.arguments = arguments_for(model, extra, layout, **named | arguments)
        set_global_server_args_for_scheduler(self.arguments)
        size = pages * PAGE_TOKENS
        self.mla = mla
        self.make_pools(pages)
        requests = ReqToTokenPool(size=8, max_context_len=size, device="cpu", enable_memory_saver=False)
        parameters = CacheInitParams(
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE_TOKENS,
            disable=False,
            tp_cache_group=group,
            **self.shape(),
        )
        self.cache = UnifiedRadixCache(params=parameters)
        self._requests = 0
        with self.placed():
            self.cache.init_hicache(self.arguments, parameters)
        # SGLang leaves half of the host pool to what is stored; here loads may have all of it
        self.controller.prefetch_capacity_limit = self.controller.mem_pool_host.size

    def make_pools(self, pages: int) -> None:
        """Make the device pool and its allocator."""
        self.pool: Any = make_device_pool(pages, mla=self.mla)
        self.allocator: Any = TokenToKVPoolAllocator(
            size=pages * PAGE_TOKENS, dtype=torch.bfloat16, device="cpu", kvcache=self.pool, need_sort=False
        )

    def shape(self) -> dict[str, Any]:
        """Return what the tree is told of the model."""
        return {"tree_components": (ComponentType.FULL,)}

    def placed(self) -> Any:
        """Return a context in which SGLang knows which rank this is."""
        return get_parallel().override(tp_rank=self.rank[0], tp_size=self.rank[1], pp_rank=0, pp_size=1)

    @property
    def controller(self) -> Any:
        return self.cache.cache_controller

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    @property
    def threads(self) -> list[Any]:
        """SGLang's threads of storage."""
        names = ("prefetch_thread", "prefetch_io_aux_thread", "prefetch_sync_thread", "backup_thread")
        return [getattr(self.controller, name) for name in names]

    def _parts(self) -> list[list[torch.Tensor]]:
        """Return the device pool's tensors, by layer and part."""
        if self.mla:
            return [[self.pool.kv_buffer[layer]] for layer in range(LAYERS)]
        return [[self.pool.k_buffer[layer], self.pool.v_buffer[layer]] for layer in range(LAYERS)]

    def compute(self, tokens: list[int]) -> None:
        """Have the KV of a prompt computed, and stored as SGLang does: written through to the host
        pool, and from there to the storage."""
        key = RadixKey(array("q", tokens))
        match = self.cache.match_prefix(MatchPrefixParams(key=key))
        known = self.cache.path_device_indices(match.last_device_node)
        places = torch.cat([known, self.allocator.alloc(len(tokens) - len(known))])
        self.fill(tokens, places)
        self.cache.insert(InsertParams(key=key, value=places))
        self.cache.flush_pending_backups()
        self.pump(lambda: not self.cache.ongoing_write_through and not self.cache.ongoing_backup)

    def fill(self, tokens: list[int], places: torch.Tensor) -> None:
        """Write the KV of tokens into the device pool."""
        for layer, parts in enumerate(self._parts()):
            for part, tensor in enumerate(parts):
                rows = tensor.view(len(tensor), -1).view(torch.uint8)
                rows[places] = torch.from_numpy(kv_of(tokens, self.weights, layer, part, rows.shape[1]))

    def pump(self, is_done: Any, wait_s: float = WAIT_S) -> None:
        """Do as the scheduler's loop does until something is so, on all ranks in step."""
        until_s = time.monotonic() + wait_s
        while True:
            self.cache.check_hicache_events()
            is_over = torch.tensor(int(is_done()))
            if self.group is not None:
                torch.distributed.all_reduce(is_over, torch.distributed.ReduceOp.MIN, self.group)
            if is_over:
                return
            assert time.monotonic() < until_s, "SGLang's threads do not come to an end"
            assert all(thread.is_alive() for thread in self.threads), "a thread of SGLang's has ended"
            time.sleep(0.002)

    def load(self, tokens: list[int]) -> int:
        """Have SGLang fetch a prompt from the storage and load it; return how many of its tokens
        have KV on the device then. Asserts that each has the right one."""
        self._requests += 1
        request, key = CacheRequestHandle(f"request {self._requests}", 0), RadixKey(array("q", tokens))
        before = self.cache.match_prefix(MatchPrefixParams(key=key))
        known = before.device_prefix_len + before.host_hit_length
        if known < len(tokens):
            node = before.last_host_node
            self.cache.prefetch_from_storage(
                request, node, array("q", tokens[known:]), *self._prefix_of(node, tokens[:known])
            )
            self.pump(lambda: self.cache.check_prefetch_progress(request))
        match = self.cache.match_prefix(MatchPrefixParams(key=key))
        if match.host_hit_length:
            assert self.cache.load_back(match.best_match_node)
            self.cache.ready_to_load_host_cache()
            self.cache.check_hicache_events()
            match = self.cache.match_prefix(MatchPrefixParams(key=key))
        found = match.device_prefix_len
        self.compare(tokens[:found], self.cache.path_device_indices(match.last_device_node))
        return found

    def _prefix_of(self, node: Any, tokens: list[int]) -> tuple[str | None, list[str] | None]:
        """Return the last hash, and all hashes, of what is known of a prompt."""
        if not tokens:
            return None, None
        hashes = self.cache.tree_core.get_hash_values(node)
        return hashes[-1], None

    def compare(self, tokens: list[int], places: torch.Tensor) -> None:
        for layer, parts in enumerate(self._parts()):
            for part, tensor in enumerate(parts):
                rows = tensor.view(len(tensor), -1).view(torch.uint8)
                want = torch.from_numpy(kv_of(tokens, self.weights, layer, part, rows.shape[1]))
                assert torch.equal(rows[places], want), "WRONG BYTES"

    def close(self) -> None:
        """End as SGLang does at the end of its process."""
        atexit.unregister(self.cache.shutdown)
        self.cache.shutdown()
        self.cache.release_host_resources()


class WindowTree(Tree):
    """Of a model with two layers of full attention and two of a sliding window, whose KV is in a
    pool of its own."""

    def make_pools(self, pages: int) -> None:
        size = pages * PAGE_TOKENS
        self.pool = SWAKVPool(
            size=size,
            size_swa=size,
            page_size=PAGE_TOKENS,
            dtype=torch.bfloat16,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            swa_attention_layer_ids=[1, 3],
            full_attention_layer_ids=[0, 2],
            device="cpu",
        )
        self.allocator = SWATokenToKVPoolAllocator(
            size, size, page_size=1, dtype=torch.bfloat16, device="cpu", kvcache=self.pool, need_sort=False
        )

    def shape(self) -> dict[str, Any]:
        return {"tree_components": (ComponentType.FULL, ComponentType.SWA), "sliding_window_size": WINDOW_TOKENS}

    def _rows(self) -> list[tuple[bool, int, int, torch.Tensor]]:
        """Return the device's tensors: whether they are of the window, layer, part, and rows."""
        return [
            (is_window, layer + 100 * is_window, part, tensor.view(len(tensor), -1).view(torch.uint8))
            for is_window, pool in enumerate((self.pool.full_kv_pool, self.pool.swa_kv_pool))
            for part, buffers in enumerate((pool.k_buffer, pool.v_buffer))
            for layer, tensor in enumerate(buffers)
        ]

    def _in_window(self, places: torch.Tensor) -> torch.Tensor:
        return self.allocator.translate_loc_from_full_to_swa(places).long()

    def fill(self, tokens: list[int], places: torch.Tensor) -> None:
        has_window = self._in_window(places) > 0
        for is_window, layer, part, rows in self._rows():
            want = torch.from_numpy(kv_of(tokens, self.weights, layer, part, rows.shape[1]))
            if is_window:
                rows[self._in_window(places)[has_window]] = want[has_window]
            else:
                rows[places] = want

    def compare(self, tokens: list[int], places: torch.Tensor) -> None:
        """Of the window's layers what the next token reads."""
        for is_window, layer, part, rows in self._rows():
            want = torch.from_numpy(kv_of(tokens, self.weights, layer, part, rows.shape[1]))
            if is_window:
                last = self._in_window(places[-WINDOW_TOKENS:])
                assert (last > 0).all(), "a hit without its window"
                assert torch.equal(rows[last], want[-WINDOW_TOKENS:]), "WRONG BYTES"
            else:
                assert torch.equal(rows[places], want), "WRONG BYTES"


def prompt(number: int, pages: int) -> list[int]:
    """Return a prompt of so many whole pages, which begins with its number."""
    return [(number * 7919 + at * 31) % 100_003 for at in range(pages * PAGE_TOKENS)]


__all__ = ["Tree", "WindowTree", "extra_config", "prompt", "write_model"]
