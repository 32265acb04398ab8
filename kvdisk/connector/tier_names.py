# SPDX-License-Identifier: Apache-2.0
"""vLLM's names for kvdisk's tiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvdisk.blocks import HIT_TIERS, Medium, Tier


class VllmTier(NamedTuple):
    """vLLM's names for a tier. ``hit_source``: where hits come from. ``medium``: the medium in
    KV-cache events, for tiers whose changes are published."""

    hit_source: CacheHitSource
    medium: str | None = None


_VLLM_TIERS: Mapping[Medium, VllmTier] = {
    Medium.MEMORY: VllmTier(CacheHitSource.HOST, MEDIUM_CPU),
    Medium.FILES: VllmTier(CacheHitSource.DISK, MEDIUM_STORAGE),
    Medium.OBJECTS: VllmTier(CacheHitSource.EXTERNAL_UNSPECIFIED),
}
VLLM_TIERS: Mapping[Tier, VllmTier] = {tier: _VLLM_TIERS[tier.medium] for tier in HIT_TIERS}
