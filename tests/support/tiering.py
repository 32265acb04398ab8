# SPDX-License-Identifier: Apache-2.0
"""vLLM's real manager of tiers and its real memory, without an engine: for the tests of kvdisk's
tier, and ``tools/measure_offloading.py``."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

TOKENS = 16
"""Of a block."""
GROUP_IDS = (0, 70_000)
"""vLLM's numbers of KV-cache groups: the second one does not fit into two bytes."""


def make_manager(tier: Mapping[str, Any], rows: int, row_bytes: int, blocks_per_chunk: int = 1, **extra: Any) -> Any:
    """Return vLLM's manager with one tier behind a memory of so many rows. ``tier``: an entry of
    ``secondary_tiers``. ``row_bytes``: of a chunk of ``blocks_per_chunk`` blocks, a multiple of
    4,096, with room to spare. ``extra``: of ``kv_connector_extra_config``."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from kvdisk.connector.plugin import register

    register()
    config = OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(TOKENS, (f"layer{at}",), group) for at, group in enumerate(GROUP_IDS)),
        worker_kv_bytes_per_block=row_bytes - 100,
        enable_kv_cache_events=True,
        extra_config={"cpu_bytes_to_use": rows * row_bytes, "secondary_tiers": [dict(tier)], **extra},
        engine_id=f"kvdisk-test-{uuid.uuid4().hex}",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(TOKENS, blocks_per_chunk),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    )
    return TieringOffloadingSpec(config).get_manager()


class Door:
    """vLLM's manager with one tier, stepped by hand; requests are for so many chunks of a document.
    ``results``: of the last lookup."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.rows = np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.requests: dict[str, Any] = {}
        self.results: list[Any] = []

    def begin(self, name: str, document: int, chunks: int, group: int = 0, **sent: Any) -> list[Any]:
        """Let a request come; return the keys of its prompt. ``sent``: what else vLLM tells of
        it."""
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key

        context = self.requests[name] = ReqContext(name, **sent)
        self.manager.on_new_request(context)
        keys = [make_offload_key(f"{document}:{at}".encode().ljust(32), GROUP_IDS[group]) for at in range(chunks)]
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, (at + 1) * TOKENS)
        return keys

    def step(self, *new: str) -> None:
        """End a step of the scheduler, in which these requests were scheduled for the first
        time."""
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext(new, ()))

    def look(self, name: str, keys: Sequence[Any]) -> int | None:
        """Look a prompt up as vLLM's scheduler does: chunks of its prefix that hit; None: it is to
        ask again."""
        from vllm.v1.kv_offload.base import LookupResult

        self.results = []
        for key in keys:
            self.results.append(self.manager.lookup(key, self.requests[name]))
            if self.results[-1] is LookupResult.MISS:
                break
        if {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(self.results):
            return None
        return sum(result is not LookupResult.MISS for result in self.results)

    def compute(self, name: str, keys: Sequence[Any], content_of: Callable[[Any], Any] | None = None) -> int:
        """The model computes chunks, and its worker copies them to memory, if there is room; return
        how many. ``content_of``: the bytes of each; None: what is there."""
        prepared = self.manager.prepare_store(keys, self.requests[name])
        if prepared is None or not prepared.keys_to_store:
            return 0
        if content_of is not None:
            for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids.tolist(), strict=True):
                self.rows[row] = content_of(key)
        self.manager.complete_store(prepared.keys_to_store, self.requests[name])
        return len(prepared.keys_to_store)

    def end(self, *names: str) -> None:
        """Requests end."""
        for name in names:
            self.manager.on_request_finished(self.requests[name])

    def close(self) -> None:
        """Shut it down: that fails where a view of its memory is left."""
        del self.rows
        self.manager.shutdown()
