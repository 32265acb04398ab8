# SPDX-License-Identifier: Apache-2.0
"""vLLM's plugin entry point: makes the name ``KVDiskConnector`` known in every process of an engine."""

from __future__ import annotations


def register() -> None:
    """Register the connector with vLLM's factory. May be called many times; vLLM calls it at start."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVDiskConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVDiskConnector", "kvdisk.connector.connector", "KVDiskConnector")
