# SPDX-License-Identifier: Apache-2.0
"""The plugin entry point by which vLLM finds kvdisk, in every process of an engine."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from typing import Any

from kvdisk.errors import ConfigError

logger = logging.getLogger("kvdisk.connector")
_RESOLVE = "_post_init_kv_transfer_config"
_OURS = "_is_wrapped_by_kvdisk"
"""The mark of a method that is wrapped. Another plugin's wrapper keeps it, or has it below."""


def register() -> None:
    """Register the connector and the tier with vLLM's factories.

    It also wraps two methods of vLLM's. One builds an engine's configuration: where nobody has
    named a connector, ``KVDISK_`` variables do. The other applies a flag: so none replaces kvdisk
    by another connector, and a tier's settings are checked when a configuration is built. vLLM
    calls it at the start, before it builds a configuration. Idempotent.
    """
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if "KVDiskConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVDiskConnector", "kvdisk.connector", "KVDiskConnector")
    if "kvdisk" not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier("kvdisk", "kvdisk.offloading", "KVDiskTier")
    for owner, name, wrap in (
        (VllmConfig, _RESOLVE, _refuse_replacement),
        (EngineArgs, "create_engine_config", _ask_environment),
    ):
        method = getattr(owner, name, None)
        if method is not None and not hasattr(method, _OURS):
            wrapped = wrap(method)
            setattr(wrapped, _OURS, True)
            setattr(owner, name, wrapped)


def _ask_environment(create: Any) -> Any:
    """Return vLLM's method that builds an engine's configuration from its arguments, wrapped: where
    these have no connector, it gives them the one of ``KVDISK_`` variables for the call.

    vLLM: one process of a server builds the configuration, or each of several API servers does. Its
    engines and workers are sent it, and look at no variable.
    """

    @functools.wraps(create)
    def create_with_kvdisk(arguments: Any, *rest: Any, **more: Any) -> Any:
        if not any(name.startswith("KVDISK_") for name in os.environ):
            return create(arguments, *rest, **more)
        from vllm.config import KVTransferConfig

        from kvdisk.connector.log import join_log
        from kvdisk.environment import transfer_of, variables

        names = ", ".join(variables(os.environ))
        if not names:
            return create(arguments, *rest, **more)
        before, size = arguments.kv_transfer_config, arguments.kv_offloading_size
        if before is None and size is None:
            transfer = transfer_of(os.environ)
            assert transfer is not None
            arguments.kv_transfer_config = KVTransferConfig(**transfer)
            said = f"set the connector {transfer['kv_connector']}, as --kv-transfer-config would"
        else:
            given = "--kv-offloading-size" if before is None else "--kv-transfer-config"
            said = f"set nothing, since {given} is given"
        try:
            return create(arguments, *rest, **more)
        finally:  # vLLM's log, and with it ours, is set up in there
            arguments.kv_transfer_config = before
            join_log()
            logger.info("kvdisk: %s of the environment %s.", names, said)

    return create_with_kvdisk


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
        if transfer is not None and transfer.has_connector("KVDiskConnector"):
            _refuse_tier_beside(transfer.kv_connector_extra_config.get("connectors", ()))
        if transfer is not None and transfer.kv_connector_extra_config.get("secondary_tiers"):
            from kvdisk.connector.tier_settings import refuse_tiers_early

            refuse_tiers_early(vllm_config)

    return resolve_or_refuse


def _refuse_tier_beside(children: Iterable[dict[str, Any]]) -> None:
    """Raise ConfigError where one of the connectors beside kvdisk's has kvdisk's tier. vLLM: two
    sets of metrics of one name end a start."""
    from kvdisk.tier_settings import own_tier

    if any(own_tier(child.get("kv_connector_extra_config") or {}) for child in children):
        raise ConfigError(
            "kvdisk cannot be a connector and a tier of another one in the same MultiConnector: leave out one of them."
        )
