# SPDX-License-Identifier: Apache-2.0
"""The plugin entry point by which vLLM finds kvdisk, in every process of an engine."""

from __future__ import annotations

import functools
from typing import Any

from kvdisk.errors import ConfigError

_RESOLVE = "_post_init_kv_transfer_config"


def register() -> None:
    """Register the connector and the tier with vLLM's factories.

    It also wraps one method of vLLM's configuration, so that no flag of vLLM's replaces kvdisk by
    another connector, and so that a tier's settings are checked when a configuration is built. vLLM
    calls it at the start, before it builds a configuration. Idempotent.
    """
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if "KVDiskConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVDiskConnector", "kvdisk.connector", "KVDiskConnector")
    if "kvdisk" not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier("kvdisk", "kvdisk.offloading", "KVDiskTier")
    resolve = getattr(VllmConfig, _RESOLVE, None)
    if resolve is not None and not hasattr(resolve, "__wrapped__"):
        setattr(VllmConfig, _RESOLVE, _refuse_replacement(resolve))


def _refuse_replacement(resolve: Any) -> Any:
    """Return vLLM's method that applies ``--kv-offloading-size``, wrapped: it first refuses that
    flag beside kvdisk, and at the end checks a tier's settings.

    vLLM: it writes the name of its own connector over the one that was asked for, and says nothing.
    """

    @functools.wraps(resolve)
    def resolve_or_refuse(vllm_config: Any) -> None:
        asked = vllm_config.kv_transfer_config
        size = getattr(vllm_config.cache_config, "kv_offloading_size", None)
        if size is not None and asked is not None and asked.has_connector("KVDiskConnector"):
            raise ConfigError(
                "vLLM's --kv-offloading-size puts a connector of vLLM's in the place of kvdisk: leave it out, and give "
                f"kvdisk the memory with cpu_bytes ('{size:g}GiB')."
            )
        resolve(vllm_config)
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector_extra_config.get("secondary_tiers"):
            from kvdisk.connector.tier_settings import refuse_tiers_early

            refuse_tiers_early(vllm_config)

    return resolve_or_refuse
