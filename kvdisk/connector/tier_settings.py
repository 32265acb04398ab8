# SPDX-License-Identifier: Apache-2.0
"""What keeps kvdisk from starting as a tier of vLLM's own connector, before weights load.

This imports vLLM's offloading only where such a tier is asked for: the plugin imports it in every
process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdisk.assembly import warn_of_file_systems
from kvdisk.connector.identity import refuse_nameless_rows, refuse_other_machines, refuse_unstable
from kvdisk.connector.model_weights import read_weights_early
from kvdisk.tier_settings import TierSettings, own_tier

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refuse_tiers_early(vllm_config: VllmConfig) -> None:
    """Raise ConfigError for all that is known to keep a tier of kvdisk's from starting, where the
    engine's configuration names one."""
    transfer = vllm_config.kv_transfer_config
    tier = None if transfer is None else own_tier(transfer.kv_connector_extra_config)
    if tier is None:
        return
    from kvdisk.connector.tier import refuse_vllm

    refuse_vllm()
    settings = TierSettings.of(tier)
    warn_of_file_systems(settings.config)
    refuse_unstable(vllm_config)
    refuse_other_machines(vllm_config)
    if settings.namespace is None:
        refuse_nameless_rows(vllm_config)
        read_weights_early(vllm_config)
