# SPDX-License-Identifier: Apache-2.0
"""How vLLM finds kvdisk: the plugin entry point, which every process of an engine calls, and the
log."""

from __future__ import annotations

import logging


def register() -> None:
    """Register the connector with vLLM's factory. May be called many times; vLLM calls it at
    start."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVDiskConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVDiskConnector", "kvdisk.connector", "KVDiskConnector")


def join_log() -> None:
    """Let kvdisk's lines go where vLLM's go, at vLLM's level, unless somebody has said where they
    go. Idempotent.

    vLLM shows only the lines of its own loggers.
    """
    ours, theirs = logging.getLogger("kvdisk"), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level)
