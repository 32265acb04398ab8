# SPDX-License-Identifier: Apache-2.0
"""vLLM's real manager of tiers and its real memory, without an engine: for the tests of kvdisk's
tier, and ``tools/measure_offloading.py``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

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
